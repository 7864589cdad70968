// Operations: memory and views by hand, everything else by one fallback that queues the CPU's kernel.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"

namespace late {

using c10::IValue;
using Stack = torch::jit::Stack;
using Map = std::function<at::Tensor(const at::Tensor&)>;

inline bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }

// The memory of a tensor as the CPU sees it. It holds nothing: the tensor may be freed before the queue comes to it.
inline at::Tensor seen(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.storage().mutable_data() == nullptr ? nullptr : tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()));
}

inline IValue mapped(const IValue& value, const Map& map) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(tensor.defined() ? map(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(map(*tensor)) : tensor);
    return list;
  }
  return value;
}

inline void visit(const IValue& value, const std::function<void(const at::Tensor&)>& call) {
  mapped(value, [&](const at::Tensor& tensor) { return call(tensor), tensor; });
}

inline std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> found;
  visit(value, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

inline at::Tensor as_meta(const at::Tensor& tensor) {
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

inline at::Tensor new_like(const at::Tensor& shape) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(kLate));
}

inline at::Tensor private_copy(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).copy_(tensor);
}

// Nothing of the thread that happens to run the queue may change what an operation does.
inline void run_plainly(const Call& call) {
  const c10::InferenceMode mode(false);
  const c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  call();
}

// An operation of which the arguments are known, on memory of one device.
struct Operation {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  c10::DeviceIndex device = -1;
  bool waits = false;  // what it returns the host must know

  Operation(const c10::OperatorHandle& handle, std::vector<IValue> given) : op(handle), arguments(std::move(given)) {
    for (const auto& argument : arguments) {
      visit(argument, [&](const at::Tensor& tensor) {
        if (!is_late(tensor)) return;
        TORCH_CHECK(
            device < 0 || device == tensor.device().index(), "Expected all tensors to be on the same device, but ", name(),
            " got late:", int(device), " and ", tensor.device());
        device = tensor.device().index();
      });
      if (device < 0 && argument.isDevice() && argument.toDevice().type() == kLate)
        device = argument.toDevice().has_index() ? argument.toDevice().index() : current_device;
    }
    if (device < 0) device = current_device;
    const bool takes_mask = name().find("index") != std::string::npos;
    for (const auto& argument : arguments)
      visit(argument, [&](const at::Tensor& tensor) {
        if (is_late(tensor)) {
          waits |= takes_mask && argument.isOptionalTensorList() && tensor.scalar_type() == at::kBool;
          return;
        }
        TORCH_CHECK(
            tensor.dim() == 0 || takes_mask, "Expected all tensors to be on the same device, but ", name(), " got ",
            tensor.device(), " and late:", int(device));
        waits |= tensor.dim() > 0;
      });
    for (const auto& result : op.schema().returns()) {
      const auto kind = result.type()->kind();
      waits |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    }
  }

  std::string name() const { return c10::toString(op.operator_name()); }

  bool is_written(size_t i) const {
    const auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // The argument that result i is; -1 for a new tensor.
  int64_t argument_of(size_t i) const {
    const auto* alias = op.schema().returns()[i].alias_info();
    if (!alias) return -1;
    TORCH_CHECK(alias->isWrite(), "late: ", name(), " returns a view, and has no kernel here");
    for (size_t j = 0; j < arguments.size(); ++j) {
      const auto* given = op.schema().arguments()[j].alias_info();
      if (given && given->beforeSets() == alias->beforeSets()) return int64_t(j);
    }
    TORCH_CHECK(false, "late: ", name(), ": a result is none of the arguments");
  }

  Stack for_cpu(bool settled) const {
    Stack stack;
    for (const auto& argument : arguments) {
      if (argument.isDevice()) {
        stack.emplace_back(c10::Device(c10::kCPU));
      } else {
        stack.push_back(mapped(argument, [&](const at::Tensor& tensor) {
          return is_late(tensor) ? seen(tensor) : settled ? tensor : private_number(tensor);
        }));
      }
    }
    return stack;
  }

  static at::Tensor private_number(const at::Tensor& tensor) {  // the host may change it while the operation is queued
    auto copy = private_copy(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  Stack for_meta() const {
    Stack stack;
    for (const auto& argument : arguments) {
      if (argument.isDevice()) stack.emplace_back(c10::Device(c10::kMeta));
      else if (argument.isGenerator()) stack.emplace_back();
      else stack.push_back(mapped(argument, as_meta));
    }
    return stack;
  }

  // The generator for this operation alone; undefined where it draws nothing.
  at::Generator draws(Stack& stack) const {
    bool takes = false;
    auto& usual = default_generator(device);
    at::Generator found;
    for (size_t i = 0; i < stack.size(); ++i) {
      const auto type = op.schema().arguments()[i].type();
      if (type->str().find("Generator") == std::string::npos) continue;
      takes = true;
      const auto given = stack[i].isGenerator() ? stack[i].toGenerator() : usual;
      found = given.device().type() == kLate ? given.get<Generator>()->for_one_operation() : given;
      stack[i] = found;
    }
    if (takes || !op.hasTag(at::Tag::nondeterministic_seeded)) return {};
    return usual.get<Generator>()->for_one_operation();
  }

  static void call(const c10::OperatorHandle& op, Stack& stack, const at::Generator& generator) {
    if (!generator.defined()) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    auto usual = at::detail::getDefaultCPUGenerator();  // an operation that takes no generator draws from it
    const auto before = usual.get_state();
    usual.set_state(generator.get_state());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    usual.set_state(before);
  }

  // Do it at once, when all that was queued has been done.
  Stack now(const std::string& why) {
    auto& machine = Machine::get();
    const auto finish = machine.queue(current_stream(device), name(), false, [] {});
    machine.wait(std::max(finish, machine.end_of_work(device)), why);
    auto stack = for_cpu(true);
    const auto generator = draws(stack);
    run_plainly([&] { call(op, stack, generator); });
    Stack results;
    for (size_t i = 0; i < stack.size(); ++i) {
      const auto given = argument_of(i);
      if (given >= 0) results.push_back(arguments[given]);
      else
        results.push_back(mapped(stack[i], [&](const at::Tensor& tensor) {
          auto moved = new_like(tensor);
          machine.run_until(machine.end_of_work(device));  // the poison of its block
          seen(moved).copy_(tensor);
          return moved;
        }));
    }
    return results;
  }

  Stack queue() {
    std::vector<int64_t> of_argument;
    bool has_new = false, has_empty = false;
    for (size_t i = 0; i < op.schema().returns().size(); ++i) {
      of_argument.push_back(argument_of(i));
      has_new |= of_argument.back() < 0;
    }
    for (size_t i = 0; i < arguments.size(); ++i)
      if (op.schema().arguments()[i].is_out())
        visit(arguments[i], [&](const at::Tensor& tensor) { has_empty |= tensor.numel() == 0; });
    Stack shapes;
    if (has_new || has_empty) {
      shapes = for_meta();
      try {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
      } catch (const std::exception&) {
        return now(name() + ": its shape is known after it has run");
      }
    }
    Stack results;
    for (size_t i = 0; i < of_argument.size(); ++i) {
      if (of_argument[i] < 0) {
        results.push_back(mapped(shapes[i], new_like));
        continue;
      }
      results.push_back(arguments[of_argument[i]]);
      if (!has_empty) continue;
      const auto wanted = tensors_in(shapes[i]), given = tensors_in(results.back());
      for (size_t j = 0; j < given.size(); ++j)
        if (given[j].sizes() != wanted[j].sizes()) given[j].resize_(wanted[j].sizes());
    }
    auto stack = for_cpu(false);
    const auto generator = draws(stack);
    std::vector<std::vector<at::Tensor>> targets;
    for (size_t i = 0; i < results.size(); ++i) {
      targets.emplace_back();
      if (of_argument[i] < 0)
        for (const auto& tensor : tensors_in(results[i])) targets.back().push_back(seen(tensor));
    }
    struct Running {
      Stack stack;
      std::vector<std::pair<at::Tensor, at::Tensor>> writes;
    };
    auto running = std::make_shared<Running>();
    running->stack = std::move(stack);
    std::vector<size_t> written;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (is_written(i)) written.push_back(i);
    Machine::get().queue(
        current_stream(device), name(), false,
        [running, written, generator, targets, of_argument, op = op] {
          for (const auto i : written)
            running->stack[i] = mapped(running->stack[i], [&](const at::Tensor& tensor) {
              running->writes.emplace_back(tensor, private_copy(tensor));
              return running->writes.back().second;
            });
          call(op, running->stack, generator);
          for (size_t i = 0; i < targets.size(); ++i) {
            if (of_argument[i] >= 0) continue;
            const auto made = tensors_in(running->stack[i]);
            for (size_t j = 0; j < targets[i].size() && j < made.size(); ++j)
              running->writes.emplace_back(targets[i][j], made[j]);
          }
          running->stack.clear();
        },
        [running] {
          for (auto& [target, value] : running->writes) target.copy_(value);
        });
    return results;
  }

  Stack run() {
    const c10::DeviceGuard guard(c10::Device(kLate, device));
    if (Machine::get().is_full()) Machine::get().run_until(Machine::get().end_of_work());
    return waits ? now(name()) : queue();
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto count = op.schema().arguments().size();
  Operation operation(op, std::vector<IValue>(stack->end() - int64_t(count), stack->end()));
  auto results = operation.run();
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

inline c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// What torch calls for types that it doesn't know is the usual operation on the CPU.
inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  return Operation(
             named("aten::convolution"),
             {input, weight, bias, stride, padding, dilation, transposed, output_padding, groups})
      .run()[0]
      .toTensor();
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const std::vector<int64_t> sizes = {transposed ? weight.size(1) * groups : weight.size(0)};
  auto results = Operation(
                     named("aten::convolution_backward"),
                     {grad, input, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, mask})
                     .run();
  auto tensor = [&](size_t i) { return results[i].isTensor() ? results[i].toTensor() : at::Tensor(); };
  return {tensor(0), tensor(1), tensor(2)};
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &Memory::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &Memory::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Read `source` as the copy begins and write as it ends; both are the CPU's view.
inline Seconds queue_copy(const c10::Stream& stream, const at::Tensor& source, const at::Tensor& target) {
  auto held = std::make_shared<at::Tensor>();
  return Machine::get().queue(
      stream, "copy", true, [=] { *held = at::empty_like(source).copy_(source); }, [=] { target.copy_(*held); });
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  auto& machine = Machine::get();
  const auto source = from.expand(target.sizes());
  if (!is_late(source)) {
    const auto stream = current_stream(target.device().index());
    const bool stays = non_blocking && source.is_pinned();
    const auto end = queue_copy(stream, stays || !non_blocking ? source : source.clone(), seen(target));
    if (!non_blocking) machine.wait(end, "copy from the host");
  } else if (!is_late(target)) {
    const auto end = queue_copy(current_stream(source.device().index()), seen(source), target);
    if (!non_blocking || !target.is_pinned()) machine.wait(end, "copy to the host");
  } else if (source.device() == target.device()) {
    queue_copy(current_stream(target.device().index()), seen(source), seen(target));
  } else {  // on the stream of the source, after a barrier between both, as torch does on CUDA
    const auto stream = current_stream(source.device().index()), other = current_stream(target.device().index());
    machine.hold_back(stream, machine.tail(other));
    machine.hold_back(other, queue_copy(stream, seen(source), seen(target)));
  }
  return target;
}

inline at::Scalar read_number(const at::Tensor& tensor) {
  auto& machine = Machine::get();
  const auto stream = current_stream(tensor.device().index());
  machine.wait(machine.queue(stream, "copy", true, [] {}), "item: a number is read");
  return seen(tensor).item();
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto items = int64_t(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {items}, {1});
}

}  // namespace late

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&late::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", late::empty);
  m.impl("empty_strided", late::empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", late::set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", late::copy_from);
  m.impl("_copy_from_and_resize", [](const at::Tensor& from, const at::Tensor& target) {
    return late::copy_from(from, target.resize_(from.sizes()), false);
  });
  m.impl("_local_scalar_dense", late::read_number);
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    late::Memory::get().recordStream(self.storage().data_ptr(), stream);
  });
  m.impl("convolution_overrideable", late::convolution);
  m.impl("convolution_backward_overrideable", late::convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}
