// The machine: a virtual clock, streams on which work is queued, and events. Nothing here knows of tensors.
//
// The host launches work and goes on. When an operation would begin and end is computed as it is queued: it begins when
// the work before it on its stream has ended, and what the stream was told to wait for. What it does is done when
// somebody waits for it, in the order of the clock: it reads as it begins and writes as it ends, so that work which is
// not ordered sees what it would see on hardware of these speeds.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
using Seconds = double;
using Call = std::function<void()>;

inline uint64_t mixed(uint64_t a, uint64_t b) {  // numbers that look drawn, of two numbers
  uint64_t x = a * 0x9E3779B97F4A7C15ull + b + 0x632BE59BD9B4E019ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

struct Delays {
  Seconds kernel = 1e-5, copy = 1e-5, launch = 0;
  std::unordered_map<std::string, Seconds> by_name;  // in place of `kernel` or `copy`
  int64_t seed = -1;                                 // not negative: each delay is drawn between 0 and twice its value
};

struct Span {  // one operation, as the clock has it
  int device;
  int64_t stream;
  std::string name;
  Seconds begin, end;
};

class Machine {
 public:
  static Machine& get() {
    static auto* machine = new Machine();  // never destroyed: tensors are freed while the interpreter ends
    return *machine;
  }

  int num_devices = 4;
  std::function<void(const std::string&)> on_wait;  // told what makes the host wait; may throw

  void set_delays(Delays delays) {
    std::lock_guard lock(state_);
    delays_ = std::move(delays);
  }

  void set_tracing(bool on) {
    std::lock_guard lock(state_);
    tracing_ = on;
    spans_.clear();
  }

  std::vector<Span> spans() {
    std::lock_guard lock(state_);
    return spans_;
  }

  c10::Stream new_stream(c10::DeviceIndex device) {
    std::lock_guard lock(state_);
    return stream_of(device, ++num_streams_);
  }

  static c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, device), id);
  }

  Seconds tail(const c10::Stream& stream) {
    std::lock_guard lock(state_);
    return std::max(tails_[key(stream)], host_);
  }

  // When all that was queued so far on a device, or on all (-1), has ended.
  Seconds end_of_work(int device = -1) {
    std::lock_guard lock(state_);
    Seconds end = host_;
    for (const auto& [stream, tail] : tails_)
      if (device < 0 || stream.first == device) end = std::max(end, tail);
    return end;
  }

  Seconds busy(int device) {
    std::lock_guard lock(state_);
    return busy_[device];
  }

  void hold_back(const c10::Stream& stream, Seconds time) {  // what is queued from now on begins no earlier
    std::lock_guard lock(state_);
    auto& tail = tails_[key(stream)];
    tail = std::max(tail, time);
  }

  // Queue an operation: `begin` runs when it begins, `end` when it ends. Returns when it ends.
  Seconds queue(const c10::Stream& stream, const std::string& name, bool is_copy, Call begin, Call end = nullptr) {
    std::lock_guard lock(state_);
    host_ += delays_.launch;
    auto& tail = tails_[key(stream)];
    const Seconds start = std::max(tail, host_), lasts = name.empty() ? 0 : delay(name, is_copy);
    tail = start + lasts;
    if (!name.empty()) busy_[stream.device_index()] += lasts;
    pending_.push({start, ++num_queued_, std::move(begin)});
    if (end) pending_.push({tail, ++num_queued_, std::move(end)});
    if (tracing_ && !name.empty()) spans_.push_back({stream.device_index(), stream.id(), name, start, tail});
    return tail;
  }

  // The host waits until a time has come.
  void wait(Seconds time, const std::string& why) {
    if (on_wait) on_wait(why);
    run_until(time);
    std::lock_guard lock(state_);
    host_ = std::max(host_, time);
  }

  bool is_full() {  // a queue of a device is finite, too
    std::lock_guard lock(state_);
    return pending_.size() > 4096;
  }

  bool has_come(Seconds time) {
    std::lock_guard lock(state_);
    return time <= done_;
  }

  // Do what is due up to a time. Who waits does it, one thread at a time. As on hardware, an error shows where somebody
  // waits.
  void run_until(Seconds time) {
    std::lock_guard running(running_);
    do_what_is_due(time);
    const auto failure = std::exchange(failure_, "");
    TORCH_CHECK(failure.empty(), "late: an operation that was queued before has failed: ", failure);
  }

  // Have a thread of the machine do what is due up to a time: for work that other processes wait for.
  void run_beside(Seconds time) {
    std::lock_guard lock(beside_);
    if (!runner_) runner_ = new std::thread([this] { run_forever(); });
    until_ = std::max(until_, time);
    changed_.notify_one();
  }

  void set_around(std::function<void(const Call&)> around) { around_ = std::move(around); }

 private:
  struct Action {
    Seconds time = 0;
    uint64_t order = 0;
    Call run;
    bool operator<(const Action& other) const {  // the top of a priority queue is its largest
      return std::tie(time, order) > std::tie(other.time, other.order);
    }
  };
  using Key = std::pair<int, int64_t>;

  static Key key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

  Seconds delay(const std::string& name, bool is_copy) const {
    const auto given = delays_.by_name.find(name);
    const Seconds usual = given != delays_.by_name.end() ? given->second : is_copy ? delays_.copy : delays_.kernel;
    if (delays_.seed < 0) return usual;
    return usual * 2 * static_cast<double>(mixed(delays_.seed, num_queued_) >> 11) / 9007199254740992.0;
  }

  void do_what_is_due(Seconds time) {
    for (;;) {
      Action next;
      {
        std::lock_guard lock(state_);
        if (pending_.empty() || pending_.top().time > time) {
          done_ = std::max(done_, time);
          break;
        }
        next = pending_.top();
        pending_.pop();
      }
      try {
        around_(next.run);
      } catch (const c10::Error& error) {
        if (failure_.empty()) failure_ = error.what_without_backtrace();
      } catch (const std::exception& error) {
        if (failure_.empty()) failure_ = error.what();
      }
    }
  }

  void run_forever() {
    for (;;) {
      Seconds time;
      {
        std::unique_lock lock(beside_);
        changed_.wait(lock, [&] { return until_ > 0; });
        time = std::exchange(until_, 0);
      }
      std::lock_guard running(running_);
      do_what_is_due(time);
    }
  }

  std::mutex state_, running_, beside_;
  Delays delays_;
  Seconds host_ = 0, done_ = 0, until_ = 0;
  uint64_t num_queued_ = 0;
  int64_t num_streams_ = 0;
  bool tracing_ = false;
  std::vector<Span> spans_;
  std::map<Key, Seconds> tails_;
  std::map<int, Seconds> busy_;
  std::priority_queue<Action> pending_;
  std::string failure_;
  std::function<void(const Call&)> around_ = [](const Call& run) { run(); };
  std::thread* runner_ = nullptr;
  std::condition_variable changed_;
};

struct Event {
  Seconds time = -1;
};

// Where a thread is.
inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

inline c10::Stream current_stream(c10::DeviceIndex device) {
  const auto found = current_streams.find(device);
  return Machine::stream_of(device, found == current_streams.end() ? 0 : found->second);
}

}  // namespace late
