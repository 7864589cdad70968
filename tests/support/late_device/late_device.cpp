// A device that exists in software only: torch's open registration (PrivateUse1), one translation unit.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "ranks.h"

namespace py = pybind11;

static const bool registered = [] {
  c10::SetAllocator(late::kLate, &late::Memory::get());
  static late::Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  late::Machine::get().set_around(late::run_plainly);
  return true;
}();

PYBIND11_MODULE(LATE_MODULE, m) {
  auto& machine = late::Machine::get();
  m.def("set_num_devices", [&](int count) { machine.num_devices = count; });
  m.def("num_devices", [&] { return machine.num_devices; });
  m.def("set_limit", [](size_t num_bytes) { late::Memory::get().limit = num_bytes; });
  m.def("set_keeps_freed", [](bool keeps) { late::Memory::get().keeps_freed = keeps; });
  m.def("set_delays", [&](double kernel, double copy, double launch, std::unordered_map<std::string, double> by_name,
                          int64_t seed) { machine.set_delays({kernel, copy, launch, std::move(by_name), seed}); });
  m.def("set_on_wait", [&](std::optional<std::function<void(const std::string&)>> call) {
    machine.on_wait = nullptr;
    if (call)
      machine.on_wait = [call = *call](const std::string& why) {
        const py::gil_scoped_acquire gil;
        call(why);
      };
  });
  m.def("set_tracing", [&](bool on) { machine.set_tracing(on); });
  m.def("spans", [&] {
    std::vector<std::tuple<int, int64_t, std::string, double, double>> found;
    for (const auto& span : machine.spans()) found.emplace_back(span.device, span.stream, span.name, span.begin, span.end);
    return found;
  });
  auto generator = [](int device) { return late::default_generator(device).get<late::Generator>(); };
  m.def("seed_generator", [=](int device, uint64_t seed) { generator(device)->set_current_seed(seed); });
  m.def("generator_state", [=](int device) { return at::Tensor(generator(device)->get_state()); });
  m.def("set_generator_state", [=](int device, const at::Tensor& state) {
    generator(device)->set_state(*state.unsafeGetTensorImpl());
  });
  m.def("end_of_work", [&](int device) { return machine.end_of_work(device); });
  m.def("busy", [&](int device) { return machine.busy(device); });
  m.def("drain", [&] { machine.run_until(machine.end_of_work()); }, py::call_guard<py::gil_scoped_release>());
  py::class_<late::LateBackend, c10::intrusive_ptr<late::LateBackend>, c10d::Backend>(m, "Backend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
