// Timelines: when each chunk's tiles were finished and when its communication ran.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "runtime/device_state.h"

namespace overlap::runtime {

// Events of one call, with timing. Not recorded inside captures.
struct CallTrace {
  CallTrace(const plan::Problem& called, const std::string& on_group, int on_device, int chunks);
  const plan::Problem problem;
  const std::string group;
  const int device;
  std::vector<bool> communicated;  // of each chunk, whether anything was
  std::atomic<bool> ended{false};  // all events have been recorded
  Event start{cudaEventDefault};
  Event gemm_end{cudaEventDefault};
  Event end{cudaEventDefault};
  std::vector<std::unique_ptr<Event>> ready;  // one per chunk
  std::vector<std::unique_ptr<Event>> begin;
  std::vector<std::unique_ptr<Event>> finish;
};

// The calls of a timeline.
class Trace {
 public:
  // Five numbers a row. One row a chunk: 0, chunk, ready_us, begin_us, end_us, from the call's start; then
  // one of the call: 0, -1, the GEMM's end, the call's start, the call's end. The start counts from that of
  // the first call on the same device.
  struct Recorded {
    plan::Problem problem;
    std::string group;
    int device = 0;
    std::vector<double> rows;
  };

  // Held by whoever records it, as the timeline may be taken meanwhile.
  std::shared_ptr<CallTrace> add(const plan::Problem& problem, const std::string& group, int device,
                                 int chunks);
  void clear();
  // All calls whose end was enqueued. Waits for it, and clears.
  std::vector<Recorded> take();

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<CallTrace>> calls_;
};

}  // namespace overlap::runtime
