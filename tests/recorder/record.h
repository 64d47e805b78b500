// The executors' calls of CUDA, NCCL and the kernels, written down in place of being done: one call after the
// other, with the operations that each comes after. Memory has names in place of addresses, and events are resolved into the
// operations that they stand for, so that the same calls give the same text in each run and on each machine.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace recorder {

inline void add(std::string& text, std::string_view piece) {
  text += piece;
}
template <std::integral Number>
void add(std::string& text, Number number) {
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

// The pieces, texts and integers, one after the other.
template <typename... Pieces>
std::string cat(const Pieces&... pieces) {
  std::string text;
  (add(text, pieces), ...);
  return text;
}

inline constexpr int kMaxStreams = 13;

// The number of operations of each stream that come before.
using Clock = std::array<int32_t, kMaxStreams>;

struct Stream {
  std::string name;
  int32_t operations = 0;
  int32_t before_call = 0;         // of them, before the call in progress
  int32_t ended = 0;               // of them, those that the host has waited for
  unsigned long long capture = 0;  // that the stream is part of; 0: none
  // All that the stream's next operation comes after: outside of captures, and in the last capture, which
  // knows nothing of what was enqueued before it.
  std::array<Clock, 2> before = {};
};

struct EventState {
  bool timed = false;
  bool recorded = false;
  int32_t stream = 0;
  Clock before = {};
  unsigned long long capture = 0;
  int32_t name = -1;  // of a timed one, once it has been recorded in a call
  double us = 0.0;    // when
};

struct Memory {
  std::string name;
  int64_t bytes = 0;
};

// One line of the record.
struct Operation {
  std::string text;
  Clock before = {};
};

// The record of one case: a rank's calls on one device. All that the fakes know lies here.
class Record {
 public:
  // A new case on a device that no case before has used.
  void begin_case(int world, int rank);

  // Memory is never touched: an address is the number of its block and an offset.
  void* allocate(std::string name, int64_t bytes);
  // "slots@1+4096", "-" for null. `bytes`: what is accessed there, which must lie within the block.
  std::string at(const void* pointer, int64_t bytes = 0);
  // The known contents of small blocks: what the host has copied there.
  std::map<const void*, std::vector<uint8_t>> contents;

  cudaStream_t new_stream(std::string name);
  cudaEvent_t new_event(bool timed);
  Stream& stream(cudaStream_t handle);
  EventState& event(cudaEvent_t handle);

  // An operation that is enqueued on a stream.
  void operation(cudaStream_t stream, const std::string& text);
  // Something that the host does meanwhile, and that no captured call may.
  void host(const std::string& text);
  // Memory that a call frees may be in use on the device.
  void free();
  // The host waits for all that has been enqueued on a stream, so that all that follows comes after it.
  void synchronize(cudaStream_t stream);
  void wait(cudaStream_t stream, cudaEvent_t event);
  void mark(cudaEvent_t event, cudaStream_t stream);

  // A call that no plan may make.
  void violation(const std::string& text);

  void begin_call(cudaStream_t caller, bool captured);
  // Checks that the caller's stream has waited for all that the call enqueued.
  void end_call(cudaStream_t caller);
  // Leaves out what has been recorded so far.
  void forget();
  // The number of this call's operations that the host has not waited for.
  int call_operations() const;

  // The operations of each stream, and the last ones of the other streams that each comes after, directly or not. The
  // text is the same for two records with the same operations in the same order. Redundant waits do not show, nor the
  // turn in which the host enqueues on different streams.
  std::string text() const;

  bool on = true;  // false: several threads call, and nothing is written
  int world = 1;
  int rank = 0;
  int device = 0;
  bool maps_peers = true;    // the ranks map each other's memory
  double now_us = 0.0;       // moved on by what takes time in the set-up
  std::string communicator;  // the name of the next one that is made
  bool nccl_failed = false;  // what NCCL says of any communicator
  // How many of these have been made in this case, before this one.
  int count(const std::string& kind) { return made_[kind]++; }
  int library_gemms = -1;  // that may still be enqueued before one throws; -1: all
  int next_peer = 0;       // whose memory is mapped next
  std::vector<std::string> violations;

 private:
  // The operations that come before those that are enqueued now.
  Clock& before(Stream& stream) { return stream.before[capture_ != 0]; }

  std::map<std::string, int> made_;
  std::vector<Memory> memory_;
  std::vector<Stream> streams_;
  std::vector<EventState> events_;
  std::array<std::vector<Operation>, kMaxStreams> operations_;
  std::array<int32_t, kMaxStreams> forgotten_ = {};
  unsigned long long capture_ = 0;
  unsigned long long captures_ = 0;  // calls outside of captures end a capture
  unsigned long long last_capture_ = 0;
  bool in_call_ = false;
  int timed_events_ = 0;
};

Record& record();

// The driver as far as threads notice it: it may keep all that call it, as it does while a thread loads code and waits
// for a kernel to end.
struct Driver {
  std::atomic<bool> busy{false};
  std::atomic<int> kept{0};      // threads
  std::atomic<bool> ends{true};  // what is asked of events
  std::atomic<int> aborted{0};   // communicators
  bool full = false;             // no memory is left for windows

  void enter() {
    if (!busy) return;
    ++kept;
    busy.wait(true);
    --kept;
  }
  void leave() {
    busy = false;
    busy.notify_all();
  }
};

inline Driver& driver() {
  static Driver one;
  return one;
}

inline std::string at(const void* pointer, int64_t bytes = 0) {
  return record().at(pointer, bytes);
}

}  // namespace recorder
