// A process group that stages tensors of devices through gloo, on a stream of its own, as NCCL works beside the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "operators.h"

namespace late {

using Tensors = std::vector<at::Tensor>;
template <typename T>
using Ref = c10::intrusive_ptr<T>;

// The stream of a device for collectives. They begin in the order of their launch on whatever device, since that is the
// order on which all ranks agree, and one connection serves all devices.
inline c10::Stream ranks_stream(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* streams = new std::map<c10::DeviceIndex, c10::Stream>();
  std::lock_guard lock(mutex);
  auto found = streams->find(device);
  if (found == streams->end()) found = streams->emplace(device, Machine::get().new_stream(device)).first;
  return found->second;
}

class LateWork final : public c10d::Work {
 public:
  LateWork(c10d::OpType type, Tensors outputs, c10::DeviceIndex device, Seconds end)
      : Work(-1, type), outputs_(std::move(outputs)), device_(device), end_(end) {
    const c10::StreamGuard guard(ranks_stream(device));
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kLate, device)});
    future_->markCompleted(IValue(outputs_));
  }
  bool isCompleted() override { return Machine::get().has_come(end_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { Machine::get().hold_back(current_stream(device_), end_); }
  Tensors result() override { return outputs_; }
  Ref<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  c10::DeviceIndex device_;
  Seconds end_;
  Ref<c10::ivalue::Future> future_;
};

class LateBackend final : public c10d::Backend {
 public:
  explicit LateBackend(Ref<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "late_gloo"; }

  Ref<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return staged(c10d::OpType::BROADCAST, tensors, tensors, [=](auto& gloo, Tensors& in, Tensors& out) {
      out = in;
      return gloo.broadcast(out, options);
    });
  }
  Ref<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return staged(c10d::OpType::ALLREDUCE, tensors, tensors, [=](auto& gloo, Tensors& in, Tensors& out) {
      out = in;
      return averaged(options, out, gloo.getSize(), [&](const auto& summed) { return gloo.allreduce(out, summed); });
    });
  }
  Ref<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return staged(c10d::OpType::REDUCE, tensors, tensors, [=](auto& gloo, Tensors& in, Tensors& out) {
      out = in;
      return gloo.reduce(out, options);
    });
  }
  Ref<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return staged(c10d::OpType::ALLGATHER, inputs, outputs[0], [=](auto& gloo, Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return gloo.allgather(lists, in, options);
    });
  }
  Ref<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return staged(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [=](auto& gloo, Tensors& in, Tensors& out) {
      return gloo._allgather_base(out[0], in[0], options);
    });
  }
  Ref<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return staged(c10d::OpType::COALESCED, inputs, outputs, [=](auto& gloo, Tensors& in, Tensors& out) {
      return gloo.allgather_into_tensor_coalesced(out, in, options);
    });
  }
  Ref<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const bool receives = !outputs.empty();
    return staged(
        c10d::OpType::GATHER, inputs, receives ? outputs[0] : Tensors(), [=](auto& gloo, Tensors& in, Tensors& out) {
          auto lists = receives ? std::vector<Tensors>{out} : std::vector<Tensors>();
          return gloo.gather(lists, in, options);
        });
  }
  Ref<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return staged(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, [=](auto& gloo, Tensors& in, Tensors& out) {
      c10d::AllreduceOptions sum;
      sum.reduceOp = options.reduceOp;
      sum.timeout = options.timeout;
      Tensors whole{in[0].reshape({gloo.getSize(), -1})};
      auto work = averaged(sum, whole, gloo.getSize(), [&](const auto& summed) { return gloo.allreduce(whole, summed); });
      out[0].view({-1}).copy_(whole[0][gloo.getRank()]);
      return work;
    });
  }
  Ref<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    Machine::get().wait(Machine::get().end_of_work(), "a barrier of the ranks");
    return gloo_->barrier(options);
  }

 private:
  template <typename Options, typename Call>
  static Ref<c10d::Work> averaged(Options options, Tensors& tensors, int size, const Call& call) {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    auto work = call(options);
    work->wait();
    for (auto& tensor : tensors)
      if (mean) tensor.div_(size);
    return work;
  }

  template <typename Call>
  Ref<c10d::Work> staged(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, Call call) {
    auto& machine = Machine::get();
    const auto device = (inputs.empty() ? outputs : inputs)[0].device().index();
    const auto stream = ranks_stream(device);
    static std::mutex mutex;
    static Seconds last = 0;
    std::lock_guard lock(mutex);
    machine.hold_back(stream, std::max(last, machine.tail(current_stream(device))));
    const auto used = [&](const Tensors& tensors) {
      Tensors views;
      for (const auto& tensor : tensors) {
        Memory::get().recordStream(tensor.storage().data_ptr(), stream);
        views.push_back(seen(tensor));
      }
      return views;
    };
    const Tensors in = used(inputs), out = used(outputs);
    auto received = std::make_shared<Tensors>();
    const auto end = machine.queue(
        stream, "collective", true,
        [=, gloo = gloo_] {
          Tensors sent;
          for (const auto& tensor : in) sent.push_back(tensor.clone(at::MemoryFormat::Contiguous));
          for (const auto& tensor : out) received->push_back(at::empty(tensor.sizes(), tensor.options()));
          call(*gloo, sent, *received)->wait();
        },
        [=] {
          for (size_t i = 0; i < out.size(); ++i) Tensors(out)[i].copy_((*received)[i]);
        });
    last = end;
    machine.run_beside(end);  // other ranks wait for this one, whatever its host does
    return c10::make_intrusive<LateWork>(type, outputs, device, end);
  }

  Ref<c10d::Backend> gloo_;
};

}  // namespace late
