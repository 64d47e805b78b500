// gemm_allreduce on one kind of device. Operands are checked and flattened: input [M, K], weight
// [N, K], one dtype, one device, M, N, K > 0, more than one rank.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "binding/groups.h"

namespace overlap::binding {

struct GemmAllReduce {
  const at::Tensor& input;
  const at::Tensor& weight;
  const std::optional<at::Tensor>& bias;
  const std::shared_ptr<GroupEntry>& group;
  plan::Problem problem;
};

// all_reduce(input @ weight.T) + bias, one after the other, with the process group's own
// collective.
at::Tensor gemm_allreduce_composition(const GemmAllReduce& call);

at::Tensor gemm_allreduce_cpu(const GemmAllReduce& call);

#if defined(OVERLAP_WITH_CUDA)
at::Tensor gemm_allreduce_cuda(const GemmAllReduce& call);

// What the planner knows of this group on this device. Collective at its first call.
plan::Machine cuda_machine(const std::shared_ptr<GroupEntry>& group, at::Device device);

// Whether the fast path serves this group on this device: NCCL, compute capability 8.0 or newer.
bool cuda_supported(const std::shared_ptr<GroupEntry>& group, at::Device device);

void check_cuda_groups();  // throws what went wrong asynchronously
std::vector<int64_t> cuda_memory(
    const std::shared_ptr<GroupEntry>& group);  // [communicators, bytes]
#endif

// Rows of trace_stop(): call, chunk, ready_us, begin_us, end_us.
class TraceSwitch {
 public:
  static bool on();
  static void start();
  static at::Tensor stop();
  static void add_rows(const std::vector<double>& rows);  // CPU calls; `call` is filled in
};

// Test hook: holds the side stream (CPU: the communication thread) before each chunk.
int64_t side_delay_us();

}  // namespace overlap::binding
