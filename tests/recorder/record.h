// The executors' calls of CUDA, NCCL and the kernels, written down in place of being done: one call after the other, with
// the operations that each comes after. Memory has names in place of addresses, and an event stands for the operations
// before it, so that the same calls give the same text in each run and on each machine.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/signal/signal.h"
#include "runtime/group.h"

namespace recorder {

// The pieces, texts and integers, one after the other.
template <typename... Pieces>
std::string cat(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  return text.str();
}

inline constexpr int64_t kEnough = int64_t{1} << 38;    // bytes, where only lists have bounds
inline constexpr int64_t kDeadlineNs = 30'000'000'000;  // of every wait
inline constexpr int kMaxStreams = 13;

// The number of operations of each stream that come before.
using Clock = std::array<size_t, kMaxStreams>;

inline void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

// Handles are indices.
template <typename Handle>
size_t index_of(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle) / 16 - 1;
}

// The record of one case: a rank's calls on one device. All that the fakes know lies here.
class Record {
 public:
  // A new case on a device that no case before has used.
  void begin_case(int of_world, int of_rank) {
    const int last = device;
    *this = Record();
    device = last + 1;
    world = of_world;
    rank = of_rank;
  }

  // Memory is never touched: an address is the number of its block, far from what a program can map, and an offset.
  void* allocate(std::string name, int64_t bytes = kEnough) {
    memory_.push_back({std::move(name), bytes});
    return reinterpret_cast<void*>(memory_.size() << kBlockShift);
  }
  // "slots@1+4096", "-" for null. `bytes`: what is accessed there, which must lie within the block.
  std::string at(const void* pointer, int64_t bytes = 0) {
    if (pointer == nullptr) return "-";
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto offset = static_cast<int64_t>(address & ((uintptr_t{1} << kBlockShift) - 1));
    const size_t block = (address >> kBlockShift) - 1;
    if (block >= memory_.size()) return violation("an address that is nobody's"), "?";
    const auto& [name, room] = memory_[block];
    const std::string place = offset == 0 ? name : cat(name, "+", offset);
    if (offset + bytes > room) violation(cat(bytes, " bytes at ", place, " of ", room, " bytes"));
    return place;
  }

  cudaStream_t new_stream(std::string name) {
    streams_.push_back({.name = std::move(name)});
    return reinterpret_cast<cudaStream_t>(streams_.size() * 16);
  }
  cudaEvent_t new_event(bool timed) {
    events_.push_back({.timed = timed});
    return reinterpret_cast<cudaEvent_t>(events_.size() * 16);
  }
  // The capture that a stream is part of; 0: none.
  unsigned long long capture_of(cudaStream_t stream) {
    return streams_.at(index_of(stream)).capture;
  }
  // When an event was recorded; negative: never.
  double us_of(cudaEvent_t event) { return events_.at(index_of(event)).us; }

  void operation(cudaStream_t handle, const std::string& text) {
    if (!on || !in_call_) return;
    Stream& stream = streams_.at(index_of(handle));
    if (stream.capture != capture_) {
      violation(cat("'", text, "' on ", stream.name, ", which the capture does not hold"));
    }
    const std::string named = chunk < 0 ? text : cat("[", chunk, "] ", text);
    stream.operations.emplace_back(named, before(stream));
    before(stream)[index_of(handle)] = stream.operations.size();
  }
  void wait(cudaStream_t handle, cudaEvent_t awaited) {
    if (!on || us_of(awaited) < 0) return;
    const Event& event = events_.at(index_of(awaited));
    Stream& stream = streams_.at(index_of(handle));
    if (event.capture != capture_) violation(stream.name + " waits across a capture's border");
    // A stream becomes part of a capture by waiting for one that is.
    if (event.capture != 0) stream.capture = event.capture;
    join(before(stream), event.before);
  }
  void mark(cudaEvent_t handle, cudaStream_t on_stream) {
    if (!on) return;
    Event& event = events_.at(index_of(handle));
    if (event.timed && in_call_) {
      if (event.name < 0) event.name = timed_events_++;
      operation(on_stream, cat("time ", event.name));
    }
    Stream& stream = streams_.at(index_of(on_stream));
    event.before = before(stream);
    event.capture = stream.capture;
    event.us = now_us;
  }

  // The host does this meanwhile, which no captured call may.
  void host(const char* what) {
    if (on && in_call_ && capture_ != 0) violation(cat(what, " in a capture"));
  }
  // Memory that a call frees may be in use on the device.
  void free() {
    if (on && in_call_) violation("memory is freed in a call");
  }
  // A collective of this stream may wait for other ranks.
  void meets(cudaStream_t handle) { meeting_.insert(handle); }
  // A copy to the host's own memory waits within the driver for all of the stream.
  void bring(cudaStream_t handle) {
    if (on && meeting_.contains(handle)) violation("a copy waits for ranks without a deadline");
  }
  // The host waits for all that has been enqueued on a stream, so that all that follows comes after it.
  void synchronize(cudaStream_t handle) {
    meeting_.erase(handle);
    if (!on || !in_call_) return;
    host("the host waits");
    Stream& awaited = streams_.at(index_of(handle));
    awaited.ended = awaited.operations.size();
    for (Stream& stream : streams_) join(before(stream), before(awaited));
  }
  // A call that no plan may make.
  void violation(const std::string& text) { violations.push_back(text); }
  // Each wait has the group's deadline, and reports to the group.
  void expect_deadline(int64_t ns, const overlap::kernels::WaitReport* to) {
    if (ns != kDeadlineNs || to != report) violation("a wait has not the group's deadline");
  }

  void begin_call(cudaStream_t caller, bool captured) {
    in_call_ = true;
    timed_events_ = 0;
    const unsigned long long before = capture_;
    // Captured calls in a row are of one graph, and others end it.
    if (!captured) ++captures_;
    capture_ = captured ? captures_ + 1 : 0;
    for (Stream& stream : streams_) {
      stream.capture = 0;
      stream.before_call = stream.operations.size();
      if (captured && capture_ != before) stream.before[1] = {};
    }
    streams_.at(index_of(caller)).capture = capture_;
  }
  // Checks that the caller's stream has waited for all that the call enqueued, and the host for all of a refused one.
  void end_call(cudaStream_t caller, bool refused = false) {
    const Clock clock = before(streams_.at(index_of(caller)));
    for (size_t i = 0; i < streams_.size(); ++i) {
      const Stream& stream = streams_[i];
      const size_t all = stream.operations.size();
      if (all == stream.before_call) continue;
      if (clock[i] < all) violation("the call ends before what it enqueued on " + stream.name);
      if (refused && all > stream.ended) violation("a refused call enqueued on " + stream.name);
    }
    operation(caller, "the call ends");
    in_call_ = false;
  }

  // Leaves out what has been recorded so far.
  void hide() {
    for (Stream& stream : streams_) stream.hidden = stream.operations.size();
  }
  // The operations of each stream, and the last ones of other streams that each comes after and the one above it does not:
  // neither redundant waits show, nor the turn in which the host enqueues on different streams.
  std::string text() const {
    std::string text;
    for (const Stream& stream : streams_) {
      Clock shown = {};
      for (size_t i = stream.hidden; i < stream.operations.size(); ++i) {
        const auto& [what, before] = stream.operations[i];
        text += cat(stream.name, "#", i, " ", what);
        for (size_t other = 0; other < streams_.size(); ++other) {
          if (&streams_[other] == &stream || before[other] == shown[other]) continue;
          text += cat(" | ", streams_[other].name, "#", before[other] - 1);
        }
        shown = before;
        text += '\n';
      }
    }
    return text;
  }
  // How many of these have been made in this case, before this one.
  int count(const std::string& kind) { return made_[kind]++; }

  std::vector<std::string> violations;
  bool on = true;  // false: several threads call, and nothing is written
  int world = 1;
  int rank = 0;
  int device = 0;
  bool maps_peers = true;    // the ranks map each other's memory through CUDA IPC
  int next_peer = 0;         // whose memory is mapped next
  int team = 0;              // ranks that NCCL's windows map
  int windows = 0;           // that are registered, and not taken back
  double now_us = 0.0;       // moved on by what takes time in the set-up
  bool nccl_failed = false;  // what NCCL says of any communicator
  int library_gemms = -1;    // that may still be enqueued before one throws; -1: all
  int chunk = -1;            // that operations are named after
  const overlap::kernels::WaitReport* report = nullptr;  // the group's
  std::function<void(int32_t)> before_wait;              // for a chunk's tiles
  std::vector<uint8_t> brought;  // by the host to the device, and not taken back

 private:
  static constexpr int kBlockShift = 40;

  struct Stream {
    std::string name;
    std::vector<std::pair<std::string, Clock>> operations = {};
    size_t hidden = 0;       // of them, the first ones, that the text leaves out
    size_t before_call = 0;  // of them, before the call in progress
    size_t ended = 0;        // of them, those that the host has waited for
    unsigned long long capture = 0;
    // All that the stream's next operation comes after: outside of captures, and in the last capture, which
    // knows nothing of what was enqueued before it.
    std::array<Clock, 2> before = {};
  };
  struct Event {
    bool timed = false;
    Clock before = {};
    unsigned long long capture = 0;
    int name = -1;  // of a timed one, once it has been recorded in a call
    double us = -1.0;
  };
  Clock& before(Stream& stream) { return stream.before[capture_ != 0]; }

  std::set<cudaStream_t> meeting_;
  std::map<std::string, int> made_;
  std::vector<std::pair<std::string, int64_t>> memory_;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
  unsigned long long capture_ = 0;
  unsigned long long captures_ = 0;
  bool in_call_ = false;
  int timed_events_ = 0;
};

inline Record& record() {
  static Record instance;
  return instance;
}
inline std::string at(const void* pointer, int64_t bytes = 0) {
  return record().at(pointer, bytes);
}

// The driver as far as threads notice it: it may keep all that call it, as it does while a thread loads code and waits
// for a kernel to end.
struct Driver {
  std::atomic<bool> busy{false};
  std::atomic<int> kept{0};      // threads
  std::atomic<bool> ends{true};  // what is asked of events
  std::atomic<int> aborted{0};   // communicators
  bool full = false;             // no memory is left for windows
  int answers = -1;              // about streams, before the device fails; -1: it never does
  bool failed = false;           // it has, and what frees memory would wait for NCCL's kernels
  std::atomic<cudaStream_t> stuck{nullptr};  // what comes after this stream's work never ends
  std::atomic<cudaEvent_t> never{nullptr};   // such an event
  const void* report = nullptr;              // pinned memory,
  bool freed = false;                        // which has been freed

  void enter() {
    if (!busy) return;
    ++kept;
    busy.wait(true);
    --kept;
  }
};
inline Driver driver;

// A function that succeeds, and what it does.
#define FAKE_OF(Result, success, function, parameters, ...) \
  Result function parameters {                              \
    __VA_ARGS__;                                            \
    return success;                                         \
  }

// A group with a store to which all ranks have come, whatever is asked for.
overlap::runtime::GroupOptions options_of(const std::string& name, int64_t timeout_ms);

// Checks on calls made by hand; those that do not hold.
std::vector<std::string> failed_checks();

}  // namespace recorder
