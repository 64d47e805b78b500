// A CUDA call's tensors, as the executor asks for them.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "binding/cuda/cuda_call.h"
#include "binding/ops/profiled.h"
#include "runtime/run.h"
#include "steps/list/step.h"

namespace overlap::binding {

// Tensors of every op; what the framework computes is the op's.
class CudaOperands : public runtime::Operands {
 public:
  // `input`: rows of K elements.
  CudaOperands(const OpCall& call, const CudaCall& cuda, at::Tensor input)
      : call_(call),
        cuda_(cuda),
        plan_(cuda.plan()),
        input_(std::move(input)),
        part_rows_(plan_.problem.m / plan_.problem.world_size) {}

  void* base(steps::Buffer buffer, int32_t index) override;
  const kernels::GemmParams& gemm(int32_t weight) override {
    return gemms_[static_cast<size_t>(weight)];
  }
  void add(const steps::CopyRows& step, const void* source, void* destination,
           cudaStream_t on) override;
  void name_chunk(int32_t chunk) override;
  int32_t* counters(int32_t count) override;

 protected:
  // Makes what the list names as scratch, except for a product that library() makes, and runs it. Returns true if the
  // list finishes the sum's rows.
  bool run(const steps::Variant& variant, const at::Tensor& bias = {});

  static bool overlapped(const plan::Plan& plan) {
    return plan.schedule == plan::Schedule::kOverlapped;
  }

  // True if the plan's kernel can take rows of the call's blocks where they are: no tile lies in two of them.
  static bool tiles_fit(const OpCall& call, const plan::Plan& plan) {
    const int64_t rows = plan.problem.m / plan.problem.world_size / call.blocks;
    return call.blocks == 1 || rows % plan.tile_m == 0;
  }
  // The framework's GEMM of rows of the plan's, where either side has them one after the other, and the other one, of all
  // rows, in blocks.
  void multiply_blocks(plan::Rows range, size_t weight, bool with_bias, const at::Tensor& input,
                       const at::Tensor& output) const;

  // Rows of the input, [begin, end).
  at::Tensor rows(plan::Rows range) const {
    return input_.narrow(0, range.begin, range.end - range.begin);
  }
  bool captured() const { return runtime::capture_id(cuda_.stream).has_value(); }
  at::TensorOptions options() const { return call_.output_options(); }

  // The plan's kernel's operands: all rows, and a weight with its scales, if these have any. `gathered`: the scales of
  // all ranks' rows, where these are computed.
  kernels::GemmParams operands_of(size_t weight, const at::Tensor& gathered = {}) const;
  // The framework's GEMM with a weight; or on memory that the executor names. `scales`: those of these rows.
  at::Tensor product(const at::Tensor& rows, const at::Tensor& scales, size_t weight,
                     bool with_bias) const;
  void multiply(const at::Tensor& rows, const at::Tensor& scales, size_t weight, bool with_bias,
                void* destination) const;
  at::Tensor scales_of(plan::Rows range) const {
    return call_.scales ? call_.scales->of_rows(range.begin, range.end - range.begin)
                        : at::Tensor();
  }

  const OpCall& call_;
  const CudaCall& cuda_;
  const plan::Plan& plan_;
  at::Tensor input_;
  const int64_t part_rows_;                 // of a rank, of what is cut between the ranks
  int64_t blocks_ = 1;                      // the call's, where steps leave rows in them
  std::vector<kernels::GemmParams> gemms_;  // of each weight, where the plan's kernel may take it
  std::vector<at::Tensor> outputs_;
  at::Tensor gathered_;
  bool makes_product_ = false;  // library() does

 private:
  at::Tensor staging_;
  at::Tensor product_;
  at::Tensor partial_;
  at::Tensor counters_;
  at::Tensor group_memory_;
  std::optional<Profiled> chunk_name_;
};

}  // namespace overlap::binding
