// The produce loop: a GEMM that counts its finished tiles, and beside it, per chunk, a wait and a
// collective.
//
//   caller | zero counters | fork | GEMM: chunk 0, 1, 2 ... signal [A] ...... | join |
//   side   |                      | wait 0 [A] | NCCL 0 | wait 1 [A] | NCCL 1 | ^
//   copy   |                                            | finish 0 |          | finish 1 | ^
//
// With several lanes the chunks take turns on as many side streams. finish: unpacking, adding parts
// or copying out of the staging buffer, and the bias; present only if there is something to do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "kernels/gemm.h"
#include "plan/plan.h"
#include "runtime/group.h"
#include "runtime/trace.h"

namespace overlap::runtime {

// One call of an op that computes first and communicates then.
struct ProduceCall {
  const plan::Plan* plan = nullptr;
  const plan::TileOrder* order = nullptr;

  void* output = nullptr;  // row-major [m, n], contiguous: the result
  void* buffer = nullptr;  // where chunks are communicated: the output itself, or staging memory of
                           // plan::buffer_elements; null: the group's registered window
  const void* bias = nullptr;  // [n] or null

  // The GEMM. Either `signals`: `gemm` is launched once and counts tiles in `counters` (kMaxChunks
  // of them) ...
  bool signals = false;
  kernels::GemmParams gemm;
  int32_t* counters = nullptr;
  // ... or the framework's GEMM computes output rows [begin, end) into `destination` on the
  // caller's stream.
  std::function<void(plan::Rows rows, void* destination)> library_gemm;
  void* library_rows =
      nullptr;  // row-major [m, n] scratch for packed plans without a signalling GEMM

  cudaStream_t stream = nullptr;
  Trace* trace = nullptr;  // records a timeline if set
  int64_t delay_us = 0;    // tests: hold the side stream this long before each chunk
};

// Whether this plan's chunks are communicated in the output itself, without staging.
bool communicates_in_place(const plan::Plan& plan);

// Enqueues GEMM and collectives of an overlapped plan; `call.stream` continues after both. Throws
// before anything is launched if the group has failed, or if something would have to be made inside
// a capture.
void run_all_reduce(Group& group, const ProduceCall& call);

// Sequential: `gemm` enqueues the whole GEMM on the stream and returns its row-major output; one
// all-reduce over it follows on the same stream.
void run_sequential_all_reduce(Group& group, const plan::Plan& plan,
                               const std::function<void*()>& gemm, cudaStream_t stream,
                               Trace* trace);

}  // namespace overlap::runtime
