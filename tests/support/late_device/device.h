// What torch asks of a type of device: guards, streams, events, generators, hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace late {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kLate, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override { return {kLate, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() < Machine::get().num_devices, "late: device ", int(device.index()), " does not exist; there are ",
        Machine::get().num_devices);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return Machine::get().num_devices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return Machine::stream_of(index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return Machine::get().new_stream(index(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Machine::get().has_come(Machine::get().tail(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::get().wait(Machine::get().tail(stream), "synchronize a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Machine::get().wait(Machine::get().end_of_work(device), "synchronize a device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    Memory::get().recordStream(pointer, stream);
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->time = Machine::get().tail(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Machine::get().hold_back(stream, static_cast<Event*>(event)->time);
  }
  bool queryEvent(void* event) const override {
    return !event || Machine::get().has_come(static_cast<Event*>(event)->time);
  }
  void synchronizeEvent(void* event) const override {
    if (event) Machine::get().wait(static_cast<Event*>(event)->time, "synchronize an event");
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return (static_cast<Event*>(second)->time - static_cast<Event*>(first)->time) * 1000;
  }

 private:
  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A seed and the number of draws so far: what an operation draws is settled when it is queued, not when it runs.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kLate, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  at::Generator for_one_operation() {
    std::lock_guard lock(mutex_);
    return at::detail::createCPUGenerator(mixed(seed_, offset_++));
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* generators = new std::map<c10::DeviceIndex, at::Generator>();
  std::lock_guard lock(mutex);
  const auto index = device < 0 ? current_device : device;
  auto found = generators->find(index);
  if (found == generators->end()) found = generators->emplace(index, at::make_generator<Generator>(index)).first;
  return found->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Machine::get().num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Machine::get().num_devices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* pointer) const override { return Memory::get().device_of(pointer); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::get().holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto* implementation = storage.unsafeGetStorageImpl();
    auto fresh = Memory::get().allocate(size);
    const auto kept = std::min(size, implementation->nbytes());
    if (kept) {
      auto* target = static_cast<char*>(fresh.get());
      const auto* source = static_cast<const char*>(implementation->data());
      Machine::get().queue(
          current_stream(storage.device().index()), "resize", false,
          [target, source, kept] { std::memcpy(target, source, kept); });
    }
    implementation->set_data_ptr_noswap(std::move(fresh));
    implementation->set_nbytes(size);
  }
};

}  // namespace late
