// Every op's CUDA path starts from these: stream, group, plan, and operands as plain structs.
#pragma once

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <memory>

#include "binding/ops/op_call.h"
#include "kernels/gemm/gemm.h"
#include "runtime/group.h"
#include "runtime/trace.h"

namespace overlap::binding {

// One call on the current device and stream. Making it looks the plan up, and is collective at the
// group's first call.
struct CudaCall {
  explicit CudaCall(const OpCall& call);

  const plan::Plan& plan() const { return entry->plan; }
  runtime::Trace* trace() const;

  cudaStream_t stream;
  std::shared_ptr<runtime::Group> group;
  std::shared_ptr<const PlanEntry> entry;
};

// The group's CUDA side on the current device. Collective at its first call.
[[gnu::visibility("default")]] std::shared_ptr<runtime::Group> cuda_group(
    const std::shared_ptr<GroupEntry>& entry, int device, cudaStream_t stream);

// True if this build holds machine code for the device. Loads all kernels.
bool has_kernels(at::Device device);

// True if the fast path leaves this call to the composition, which is then counted.
bool takes_composition(const OpCall& call);

// Uninitialised memory on the current device. This and the GEMMs below pass no dispatcher, as a call's operands
// have done so, and the GPU waits meanwhile.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor transposed(const at::Tensor& matrix);  // a view, past the dispatcher
// Rows in memory of this rank, or of a peer's that is mapped here.
at::Tensor matrix_at(void* data, int64_t rows, int64_t columns, const at::TensorOptions& options);

// Rows must be contiguous along K for the kernels; transposed or expanded inputs are copied once.
at::Tensor k_contiguous(const at::Tensor& input);

// Contiguous, and beginning where 16-byte accesses do: what a collective in one kernel reads.
at::Tensor aligned(const at::Tensor& tensor);

// A GEMM of input and weight; the output, which is not set yet, has the weight's N columns.
kernels::GemmParams gemm_params(const at::Tensor& input, const at::Tensor& weight,
                                const plan::Plan& plan);

// The scales of a weight's operands as the kernel reads them, or nothing, where it cannot apply them: its sums are the
// tensor cores' own, which blocks and callers that ask for fp32 sums (use_fast_accum = False) do not take. `gathered`:
// those of all ranks' rows, if the operands are; else those of this rank's.
std::optional<kernels::GemmScales> gemm_scales(const Scales& scales, size_t number,
                                               const at::Tensor& weight, const plan::Plan& plan,
                                               const at::Tensor& gathered);

// Every rank's scales of its rows, in rank order.
at::Tensor gathered_scales(const OpCall& call, const CudaCall& cuda);

// The memory that GemmGroups of these operands need; undefined where they need none.
at::Tensor group_memory(const kernels::GemmParams& params, const at::TensorOptions& options);

// True if the plan's kernel takes these operands, which depends only on this rank's strides.
// Either way the same chunks are communicated.
bool kernel_takes(const kernels::GemmParams& params, const at::Tensor& weight,
                  const plan::Plan& plan);

// Adds rows that lie in memory to others, on this stream; `options` say what their numbers are.
void add_rows(const steps::CopyRows& step, const void* source, void* destination, cudaStream_t on,
              const at::TensorOptions& options);

// The framework's GEMM: [rows, K] -> [rows, N], plus bias.
at::Tensor library_gemm(const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias = {});

// The same on memory that the executor names.
void library_gemm(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, void* destination);

// The same of [blocks, rows, K], into [blocks, rows, N].
void library_gemm_of_blocks(const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::Tensor output);

}  // namespace overlap::binding
