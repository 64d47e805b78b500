// One executor, a loop for each way in which computation and communication follow each other.
//
// produce: a GEMM that counts its finished tiles, and beside it, per chunk, a wait and a collective.
//
//   caller | fork | GEMM: chunk 0, 1, 2 ... signal [A] ...... | join |
//   side   |      | wait 0 [A] | NCCL 0 | wait 1 [A] | NCCL 1 | ^
//   copy   |                            | finish 0 |          | finish 1 | ^
//
// consume: a collective per chunk, and behind each a launch of the GEMM. All launches together compute
// the own rows and then what has arrived, each in whole rounds of tiles; beside that each copies the new
// rows into the gathered input (or, where the kernel cannot, the copy stream does).
//
//   caller | copy: own rows | fork | GEMM: own rows ... | GEMM: ..., chunk 0 | GEMM: ..., chunk 1 | join |
//   side   |                       | NCCL 0 | NCCL 1 |    ^                    ^
//
// ring: the rows are cut into the ranks' parts. In each phase a rank computes one part, adds the
// partial sums that came from the rank before, and stores into the memory of the rank behind; in the
// last phase it computes its own part, which an all-reduce passes on: tile by tile between two ranks, else
// at once, or in chunks. All phases are one launch, which announces each tile and waits for each [B].
//
//   caller | GEMM: part r - 1 -> rank r + 1, then r - 2 + what came ..., then r + what came | gather |
//   side   |                              in chunks: wait [A] for those of part r, signal [B] | ^
//   copy   |                        chunks of the other parts: wait [B] | into the output | ^
//
// direct, for few rows: partial sums go to whoever adds them up; nothing is forked.
//
//   caller | GEMM: every tile to the ranks that need it | one kernel: signal, wait [B], add |
//
// all to all: rows that go each their own way; by NCCL as executor_all_to_all.cc has it, and over peers:
//
//   caller | GEMM: rows of each peer -> its slot | GEMM: own rows | one kernel: signal, wait [B], copy |
//
// sequential: one call after the other.
//
// With several lanes the chunks take turns on as many side streams. finish: unpacking, adding parts
// or copying out of the staging buffer, and the bias; present only if there is something to do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/gemm.h"
#include "plan/plan.h"
#include "runtime/group.h"
#include "runtime/trace.h"

namespace overlap::runtime {

// One call of an op that computes first and communicates then.
struct ProduceCall {
  const plan::Plan* plan = nullptr;
  const plan::TileOrder* order = nullptr;

  void* output = nullptr;  // row-major, contiguous: the result, [m, n] or this rank's part of it
  void* buffer = nullptr;  // where chunks are communicated: the output itself, or staging memory of
                           // plan::buffer_elements; null: the group's registered window
  const void* bias = nullptr;  // [n] or null

  // The GEMM. Either `signals`: `gemm` is launched once and counts tiles, in a capture in kMaxChunks counters
  // that this makes ...
  bool signals = false;
  kernels::GemmParams gemm;
  std::function<int32_t*()> counters;
  // ... or the framework's GEMM computes product rows [begin, end) into `destination` on the
  // caller's stream.
  std::function<void(plan::Rows rows, void* destination)> library_gemm;
  void* library_rows = nullptr;  // row-major scratch for packed plans, [m, n], and for rings, [m /
                                 // ranks, n], without a signalling GEMM
  // Direct plans': enqueues the whole product, [m, n], on the stream and returns where it is; of an
  // all-reduce it becomes the output, where that is null.
  std::function<void*()> library_product;
  // A ring's: product rows [begin, end), plus `source` where it is not null, into `destination`.
  std::function<void(plan::Rows rows, const void* source, void* destination)> library_phase;

  cudaStream_t stream = nullptr;
  Trace* trace = nullptr;  // records a timeline if set
  int64_t delay_us = 0;    // tests: hold the side stream this long before each chunk
};

// One call of an op that communicates first and computes then, with one or more weights.
struct ConsumeCall {
  const plan::Plan* plan = nullptr;

  const void* input = nullptr;  // this rank's rows, contiguous: [m / ranks, k]
  void* gathered = nullptr;     // all ranks' rows: [m, k], a result
  void* buffer = nullptr;  // staging memory of plan::buffer_elements; null: the registered window

  // For each weight: the whole GEMM (m and output are those of all ranks' rows, input is this rank's,
  // ctas those beside communication) and whether the plan's kernel takes it ...
  struct Gemm {
    bool fast = false;
    kernels::GemmParams params;
  };
  std::vector<Gemm> gemms;
  // ... else the framework's GEMM of that weight, plus its bias, computes output rows [begin, end)
  // from `input`.
  std::function<void(size_t weight, const void* input, plan::Rows rows)> library_gemm;

  cudaStream_t stream = nullptr;
  Trace* trace = nullptr;
  int64_t delay_us = 0;
};

// One call of gemm_alltoall.
struct AllToAllCall {
  const plan::Plan* plan = nullptr;

  std::vector<int64_t> send_rows;  // one for each rank
  std::vector<int64_t> receive_rows;
  // Memory for what is sent, [sum of send_rows, n], made if it is needed.
  std::function<void*()> product;
  void* output = nullptr;  // [sum of receive_rows, n]: the result

  bool fast = false;  // whether the plan's kernel takes the operands
  kernels::GemmParams gemm;
  // The framework's GEMM, plus bias: rows [begin, end) of the product into `destination`.
  std::function<void(plan::Rows rows, void* destination)> library_gemm;

  cudaStream_t stream = nullptr;
  Trace* trace = nullptr;
  int64_t delay_us = 0;
};

// Sequential: one GEMM and one collective over whole tensors, on the caller's stream.
struct SequentialCall {
  const plan::Plan* plan = nullptr;
  // Enqueues the GEMM on the stream and returns its row-major output.
  std::function<void*()> gemm;
  const void* input = nullptr;  // all-gather: this rank's rows
  void* output = nullptr;       // reduce-scatter: this rank's rows; all-gather: all ranks' rows
  cudaStream_t stream = nullptr;
  Trace* trace = nullptr;
};

// Whether this plan's chunks are communicated in the output itself, without staging.
bool communicates_in_place(const plan::Plan& plan);

// Each enqueues GEMM and communication; the call's stream continues after both. Throws before
// anything is launched if the group has failed, or if something would have to be made inside a
// capture.
void run_produce(Group& group, const ProduceCall& call);
void run_ring(Group& group, const ProduceCall& call);    // reductions over the peers' memory
void run_direct(Group& group, const ProduceCall& call);  // the same in one step
void run_consume(Group& group, const ConsumeCall& call);
void run_all_to_all(Group& group, const AllToAllCall& call);
void run_exchange(Group& group, const AllToAllCall& call);  // the same over the peers' memory
void run_sequential(Group& group, const SequentialCall& call);

}  // namespace overlap::runtime
