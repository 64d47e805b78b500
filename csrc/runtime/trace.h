// Timelines: when each chunk's tiles were finished and when its communication ran.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device_state.h"

namespace overlap::runtime {

// Events of one call, with timing. Not recorded inside captures.
struct CallTrace {
  explicit CallTrace(int chunks);
  Event start{cudaEventDefault};
  Event gemm_end{cudaEventDefault};
  Event end{cudaEventDefault};
  std::vector<std::unique_ptr<Event>> ready;  // one per chunk
  std::vector<std::unique_ptr<Event>> begin;
  std::vector<std::unique_ptr<Event>> finish;
};

// All calls since start(). One row a chunk: call, chunk, ready_us, begin_us, end_us, from the
// call's start; one row a call with chunk -1: the GEMM's end, 0, the call's end.
class Trace {
 public:
  CallTrace& add(int chunks);
  // Synchronises with the last event. Clears.
  std::vector<double> take();

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<CallTrace>> calls_;
};

}  // namespace overlap::runtime
