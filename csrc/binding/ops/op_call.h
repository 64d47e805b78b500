// A call of any op, checked and flattened, and what runs it on each kind of device.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding/ops/groups.h"
#include "binding/ops/scales.h"
#include "binding/ops/trace_switch.h"

namespace overlap::kernels {
struct FinishParams;
}

namespace overlap::binding {

// Operands of one dtype on one device. Functions that take it may rely on more than one rank and
// M, N, K > 0. Two exceptions: gemm_alltoall's input may have no rows on this rank, as the ranks do not share their number,
// and its K may be 0.
struct OpCall {
  at::Tensor input;                               // [rows on this rank, K]
  std::vector<at::Tensor> weights;                // [N_i, K]; several only for allgather_gemm
  std::vector<std::optional<at::Tensor>> biases;  // [N_i], as many as weights
  std::shared_ptr<GroupEntry> group;
  plan::Problem problem;
  // gemm_alltoall: rows for and from each rank, in rank order.
  std::vector<int64_t> send_rows;
  std::vector<int64_t> recv_rows;
  std::string
      dims;  // for messages: gemm_alltoall's dims between the first and the last, and `blocks`
  std::optional<Scales> scales;  // of fp8 operands; others have none
  // The number of elements of the dims before the one that is cut between the ranks. Rows of the whole are blocks
  // [blocks, ranks, rows of a rank, columns], which are the plan's parts [ranks, blocks, ...] in another order.
  int64_t blocks = 1;
  // An all-reduce on CUDA has it whose rows get a residual and a norm. The rows of a sum that is named there have them; else
  // that is left to the caller. Without weights the input is what is added up.
  kernels::FinishParams* finish = nullptr;

  std::string description() const { return problem.to_string() + dims; }
  RowCounts row_counts() const { return {send_rows, recv_rows}; }
  const at::Tensor& weight() const { return weights.front(); }
  const std::optional<at::Tensor>& bias() const { return biases.front(); }
  at::ScalarType output_dtype() const {
    return scales ? scales->output_dtype : input.scalar_type();
  }
  at::TensorOptions output_options() const { return input.options().dtype(output_dtype()); }
};

struct AllGatherGemmResult {
  std::vector<at::Tensor> outputs;  // [M, N_i]
  at::Tensor gathered;              // [M, K]
  at::Tensor
      scales;  // of scaled operands: the gathered input's, [1, 1], [ranks, 1], [M, 1] or [M, ceil(K / 128)]
};

// Rows in the order of a call's blocks, [blocks, ranks, rows of a rank, columns], as the plan's parts, and back: the
// rows themselves where both orders are one, else a copy.
at::Tensor parts_of_blocks(const OpCall& call, const at::Tensor& rows);
at::Tensor blocks_of_parts(const OpCall& call, const at::Tensor& rows);

// Under OVERLAP_DEBUG=1: finds ranks that disagree about what they call, before the call begins.
void compare_calls(const OpCall& call);
// This rank's part of a call that needs no communication, if all ranks call the same.
void compare_local_call(const OpCall& call);

// A collective of a gradient or a layer: the ranks compare it as they compare calls, before it begins.
void compare_collective(const std::string& what, at::Device device, const std::string& group_name);

// The unfused compositions: one GEMM, then one of the process group's own collectives, or the other
// way round. Any device.
at::Tensor gemm_allreduce_composition(const OpCall& call);
at::Tensor gemm_reducescatter_composition(const OpCall& call);
AllGatherGemmResult allgather_gemm_composition(const OpCall& call);
at::Tensor gemm_alltoall_composition(const OpCall& call);
// The composition of Invariance::kBatch and kWorld, for any number of ranks: the framework's GEMM of 128 rows at a time, so
// that none depends on their number; then the ranks' terms, added up as the kernels do.
at::Tensor invariant_composition(const OpCall& call);
// An invariant call's product of its first rows by the Hopper kernel, whose bits depend on no other row; null where that
// does not take the operands, whatever the number of rows.
std::optional<at::Tensor> kernel_product(const OpCall& call, int64_t rows);

at::Tensor gemm_reduction_cpu(const OpCall& call);  // gemm_allreduce, gemm_reducescatter
AllGatherGemmResult allgather_gemm_cpu(const OpCall& call);
at::Tensor gemm_alltoall_cpu(const OpCall& call);

// Every rank's scales of its rows, in rank order; one number, if they are shared.
at::Tensor gathered_scales(const OpCall& call);

// In a build without CUDA kernels (cuda_absent.cc) these are the compositions, and there is no
// machine to plan for.
at::Tensor gemm_allreduce_cuda(const OpCall& call);
at::Tensor gemm_reducescatter_cuda(const OpCall& call);  // [M / world, N]
AllGatherGemmResult allgather_gemm_cuda(const OpCall& call);
at::Tensor gemm_alltoall_cuda(const OpCall& call);  // [sum of recv_rows, N]

// The planner's knowledge of this group on this device. Collective at its first call.
plan::Machine cuda_machine(const std::shared_ptr<GroupEntry>& group, at::Device device);

#if defined(OVERLAP_WITH_CUDA)
// Only the GEMM of an all-reduce plan, counters on; returns its row-major or packed buffer, flat. Scales: of fp8, by
// recipe and accumulation of the plan's problem.
at::Tensor gemm_alone(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef plan,
                      const std::optional<at::Tensor>& scale_input,
                      const std::optional<at::Tensor>& scale_weight);

// True if the fast path serves this group on this device: NCCL, compute capability 8.0 or newer.
bool cuda_supported(const std::shared_ptr<GroupEntry>& group, at::Device device);
#endif

void check_cuda_groups();  // throws what went wrong asynchronously
std::vector<int64_t> cuda_memory(
    const std::shared_ptr<GroupEntry>& group);  // [communicators, bytes]
// The way by which the ranks map each other's memory; "" before the group's first call on CUDA.
std::string cuda_peer_memory(const std::shared_ptr<GroupEntry>& group);

// Rows of the input with the weight of this number, plus its bias if it is wanted: one GEMM on this rank. The
// scales are those of these rows, of no meaning where operands have none.
at::Tensor local_gemm(const OpCall& call, const at::Tensor& rows, const at::Tensor& scales,
                      size_t weight, bool with_bias);

// The same of this rank's first `count` rows, and of all; without weights a copy of the input.
at::Tensor local_gemm(const OpCall& call, int64_t count, bool with_bias);
at::Tensor local_gemm(const OpCall& call, bool with_bias);

}  // namespace overlap::binding
