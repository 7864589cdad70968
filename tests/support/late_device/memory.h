// Memory of the devices: a cache of blocks per stream, a limit, peaks, and poison in what has been freed.
//
// A block belongs to the stream that was current when it was allocated, and may be used again on it at once. Whoever uses
// it on another stream must say so (`record_stream`) or be ordered before; else it reads poison: nan, or minus one.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>

#include "queue.h"

namespace late {

constexpr int kPoison = 0xFF;

struct Block {
  char* memory;
  size_t size;
  c10::Stream stream;
  std::vector<c10::Stream> used_on;
};

inline char* new_memory(size_t size) {
  auto* memory = static_cast<char*>(std::aligned_alloc(64, size));
  TORCH_CHECK(memory != nullptr, "late: the host has no ", size, " bytes");
  std::memset(memory, kPoison, size);
  return memory;
}

class Memory final : public c10::DeviceAllocator {
 public:
  static Memory& get() {
    static auto* memory = new Memory();
    return *memory;
  }

  size_t limit = size_t(16) << 30;
  bool keeps_freed = false;  // until it is used again, as CUDA does; torch's FSDP relies on that

  c10::DataPtr allocate(size_t num_bytes) override {
    const auto device = current_device;
    const c10::Device place(kLate, device);
    if (!num_bytes) return {nullptr, nullptr, &free, place};
    const size_t size = (num_bytes + 511) / 512 * 512;
    const auto stream = current_stream(device);
    std::unique_lock lock(mutex_);
    take_back(device);
    auto& stats = of(device);
    if (size_t(stats.active_bytes[0].current) + size > limit && !waiting_[device].empty()) {
      lock.unlock();
      Machine::get().wait(Machine::get().end_of_work(device), "memory that other streams still use");
      lock.lock();
      take_back(device);
    }
    if (size_t(stats.active_bytes[0].current) + size > limit) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "late out of memory. Tried to allocate ", num_bytes, " bytes on GPU ", int(device),
          ", which holds ", stats.active_bytes[0].current, " of ", limit, " bytes.");
    }
    auto& blocks = free_[{device, stream.id(), size}];
    Block* block;
    if (blocks.empty()) {
      block = new Block{new_memory(size), size, stream, {}};
      stats.reserved_bytes[0].increase(size);
      all_[block->memory] = block;
    } else {
      block = blocks.back();
      blocks.pop_back();
      if (keeps_freed) poison(block);
    }
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(size);
    stats.active_bytes[0].increase(size);
    return {block->memory, block, &free, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    Machine::get().wait(Machine::get().end_of_work(), "a copy of memory");
    std::memcpy(target, source, num_bytes);
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Machine::get().wait(Machine::get().end_of_work(), "empty_cache");
    std::lock_guard lock(mutex_);
    for (int device = 0; device < Machine::get().num_devices; ++device) take_back(device);
    Machine::get().run_until(Machine::get().end_of_work());  // the poison of what was taken back
    for (auto& [where, blocks] : free_) {
      for (auto* block : blocks) {
        of(std::get<0>(where)).reserved_bytes[0].decrease(block->size);
        all_.erase(block->memory);
        std::free(block->memory);
        delete block;
      }
      blocks.clear();
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard lock(mutex_);
    if (block && block->stream != stream) block->used_on.push_back(stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return of(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    of(device).allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    auto& stats = of(device);
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return {limit - std::min(limit, size_t(of(device).active_bytes[0].current)), limit};
  }

  c10::Device device_of(void* pointer) {
    std::lock_guard lock(mutex_);
    auto next = all_.upper_bound(static_cast<char*>(pointer));
    TORCH_CHECK(next != all_.begin(), "late: not a pointer of a device");
    return std::prev(next)->second->stream.device();
  }

 private:
  static void free(void* context) {
    if (auto* block = static_cast<Block*>(context)) get().give_back(block);
  }

  void give_back(Block* block) {
    std::lock_guard lock(mutex_);
    const auto device = block->stream.device_index();
    of(device).allocation[0].decrease(1);
    of(device).allocated_bytes[0].decrease(block->size);
    if (block->used_on.empty()) return release(block);
    Seconds last = 0;
    for (const auto& stream : block->used_on) last = std::max(last, Machine::get().tail(stream));
    block->used_on.clear();
    waiting_[device].emplace_back(last, block);
  }

  void take_back(c10::DeviceIndex device) {  // what other streams have used until now
    auto& waiting = waiting_[device];
    for (auto i = waiting.begin(); i != waiting.end();) {
      if (Machine::get().has_come(i->first)) {
        release(i->second);
        i = waiting.erase(i);
      } else {
        ++i;
      }
    }
  }

  void release(Block* block) {
    of(block->stream.device_index()).active_bytes[0].decrease(block->size);
    if (!keeps_freed) poison(block);
    free_[{block->stream.device_index(), block->stream.id(), block->size}].push_back(block);
  }

  static void poison(Block* block) {
    auto* memory = block->memory;
    const auto size = block->size;
    Machine::get().queue(block->stream, "", false, [memory, size] { std::memset(memory, kPoison, size); });
  }

  c10::CachingDeviceAllocator::DeviceStats& of(c10::DeviceIndex device) { return stats_[device]; }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> stats_;
  std::map<std::tuple<c10::DeviceIndex, c10::StreamId, size_t>, std::vector<Block*>> free_;
  std::map<c10::DeviceIndex, std::vector<std::pair<Seconds, Block*>>> waiting_;
  std::map<char*, Block*> all_;
};

// Memory of the host that devices copy from and to while the host goes on.
class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    if (!num_bytes) return {nullptr, nullptr, &free, c10::Device(c10::DeviceType::CPU)};
    auto* memory = new_memory((num_bytes + 63) / 64 * 64);
    std::lock_guard lock(mutex_);
    sizes_[memory] = num_bytes;
    return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
  bool holds(const void* pointer) {
    std::lock_guard lock(mutex_);
    auto next = sizes_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (next == sizes_.begin()) return false;
    --next;
    return pointer < next->first + next->second;
  }

 private:
  static void free(void* memory) {
    if (!memory) return;
    {
      std::lock_guard lock(get().mutex_);
      get().sizes_.erase(static_cast<char*>(memory));
    }
    std::free(memory);
  }
  std::mutex mutex_;
  std::map<char*, size_t> sizes_;
};

}  // namespace late
