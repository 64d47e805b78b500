// The state that the ops on one device share: the side streams, events, and the order of ops among
// themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>

#include "plan/tile_order.h"
#include "runtime/error.h"

namespace overlap::runtime {

// Owner of a CUDA event. Waiting on it inside a capture makes an edge of the graph.
class Event {
 public:
  explicit Event(unsigned int flags = cudaEventDisableTiming);
  ~Event();
  Event(Event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream);
  void block(cudaStream_t stream) const;  // `stream` waits for what was recorded last
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// The time between two timed events that have both completed.
double elapsed_us(const Event& begin, const Event& end);

// Owner of a CUDA stream. Captured by forking from a stream that is being captured.
class Stream {
 public:
  explicit Stream(int priority);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Device memory for the length of a scope. Stream-ordered: cudaFree would wait for the whole device, where a
// foreign collective may be waiting for a peer that waits for this rank.
class Scratch {
 public:
  Scratch(size_t bytes, cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&pointer_, bytes, stream), "cudaMallocAsync");
  }
  ~Scratch() { cudaFreeAsync(pointer_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// While it lives, this thread's calls may come between another's capture, or its own: none of them is part of it.
class LetCapturesBe {
 public:
  LetCapturesBe() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~LetCapturesBe() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  LetCapturesBe(const LetCapturesBe&) = delete;
  LetCapturesBe& operator=(const LetCapturesBe&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The id of the capture that `stream` is part of.
std::optional<unsigned long long> capture_id(cudaStream_t stream);

// One per device and process, made once, never destroyed (the driver is gone by then).
//
//   caller   | fork | GEMM ............................ | join
//   side     |      | wait 0 | NCCL 0 | wait 1 | NCCL 1 | ^
//   copy     |                        | unpack 0 |      | unpack 1 | ^
//   observer | only while a timeline is recorded: when each chunk's tiles were finished
//
// side has the highest priority, so that NCCL's CTAs get the SMs that are free; copy has the lowest. Plans may take
// streams of the lowest priority in side's place.
class DeviceState {
 public:
  // Makes the current device's state: loads all kernels, so that nothing is loaded lazily while
  // something waits.
  static DeviceState& current();

  // Held while an op is enqueued. Ops of one device are chained in the order in which they took it.
  std::mutex mutex;
  bool open = false;  // with it held: an op has begun that is not finished, so that none may begin
  void check_closed() const;  // throws what to do if one has

  std::array<Stream, plan::kMaxLanes> side;
  Stream copy;
  Stream observer;
  std::array<Stream, plan::kMaxLanes> low_side;  // in place of side, for plans that say so
  Event fork;
  std::array<Event, plan::kMaxLanes> join;
  Event copied;

  cudaStream_t side_stream(bool low_priority, int32_t lane) const {
    return (low_priority ? low_side : side)[static_cast<size_t>(lane)].get();
  }

  // One event for each step of a call that other steps wait for, by number.
  void reserve_events(size_t count) {
    while (events_.size() < count) events_.emplace_back();
  }
  Event& event(int32_t number) { return events_[static_cast<size_t>(number)]; }

  // `stream` waits for the last op on this device, on whatever stream and group it ran: at most one
  // op of a device waits for its peers at a time. Ops in different captures, or in a capture and
  // outside, cannot be chained.
  void chain(cudaStream_t stream, std::optional<unsigned long long> capture);
  void chained(cudaStream_t stream, std::optional<unsigned long long> capture);

  // Counters for an op that has been chained, zero; not in a capture, whose replays would find them used.
  int32_t* zeroed_counters(int32_t count, cudaStream_t stream);

  int device() const { return device_; }
  int sm_count() const { return sm_count_; }
  int arch() const { return arch_; }
  int clock_khz() const { return clock_khz_; }

 private:
  explicit DeviceState(int device);

  int device_ = 0;
  int sm_count_ = 0;
  int arch_ = 0;
  int clock_khz_ = 0;
  struct Last {
    Event event;
    std::optional<unsigned long long> capture;
    unsigned long long stream = 0;
    bool exists = false;
  };
  Last& last_of(std::optional<unsigned long long> capture) {
    return capture ? last_captured_ : last_;
  }
  std::deque<Event> events_;
  Last last_;  // op outside of captures
  Last last_captured_;
  int32_t* counters_ = nullptr;
  int32_t counters_taken_ = 0;
};

}  // namespace overlap::runtime
