// Names for tools that read NVTX, such as Nsight Systems: what the host enqueues while a range is open
// belongs to it. Without such a tool they cost a look at a pointer.
#pragma once

#include "plan/plan.h"

namespace overlap::runtime {

class Range {
 public:
  explicit Range(const plan::Problem& problem);  // a call: "gemm_allreduce 4096 x 8192 x 7168"
  explicit Range(int chunk);                     // a chunk's communication: "chunk 3"
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  bool open_ = false;
};

}  // namespace overlap::runtime
