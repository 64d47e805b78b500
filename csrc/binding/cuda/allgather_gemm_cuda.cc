// allgather_gemm on CUDA.
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda/cuda_operands.h"

namespace overlap::binding {
namespace {

class Gather : public CudaOperands {
 public:
  Gather(const OpCall& call, const CudaCall& cuda)
      : CudaOperands(call, cuda,
                     overlapped(cuda.plan()) ? call.input.contiguous() : aligned(call.input)) {
    if (!plan::has_program(plan_)) blocks_ = call.blocks;
  }

  AllGatherGemmResult run() {
    const plan::Problem& problem = plan_.problem;
    gathered_ = empty({problem.m, problem.k}, input_.options());
    // Before the rows, which are many more.
    if (call_.scales) scales_ = gathered_scales(call_, cuda_);
    steps::Variant variant = {.captured = plan_.resources.window && captured()};
    for (size_t i = 0; i < call_.weights.size() && overlapped(plan_); ++i) {
      const at::Tensor& weight = call_.weights[i];
      outputs_.push_back(empty({problem.m, weight.size(0)}, options()));
      gemms_.push_back(operands_of(i, scales_));
      kernels::GemmParams probe = gemms_.back();
      probe.m = problem.m;
      probe.output = outputs_.back().data_ptr();
      // The kernels add no bias, the framework's GEMM does.
      const bool takes = !call_.biases[i].has_value() && weight.size(0) > 0 &&
                         (blocks_ == 1 || tiles_fit(call_, plan_)) &&
                         kernel_takes(probe, weight, plan_);
      variant.weights.push_back({weight.size(0), takes});
    }
    CudaOperands::run(variant);
    if (blocks_ != call_.blocks) {
      gathered_ = blocks_of_parts(call_, gathered_);
      for (at::Tensor& output : outputs_) output = blocks_of_parts(call_, output);
    }
    return {std::move(outputs_), std::move(gathered_), std::move(scales_)};
  }

  void* library(const steps::LibraryGemm& step, const void* input, const void*,
                void* output) override {
    if (step.weight == steps::LibraryGemm::kAllWeights) {
      // Over peers the rows have come in the order of parts.
      if (blocks_ > 1 && plan::over_peers(plan_)) gathered_ = blocks_of_parts(call_, gathered_);
      for (size_t i = 0; i < call_.weights.size(); ++i) {
        outputs_.push_back(product(gathered_, scales_, i, true));
      }
      return nullptr;
    }
    const auto i = static_cast<size_t>(step.weight);
    if (call_.weights[i].size(0) == 0) return nullptr;
    const int64_t count = step.rows.end - step.rows.begin;
    if (blocks_ > 1) {
      multiply_blocks(
          step.rows, i, true,
          at::from_blob(const_cast<void*>(input), {count, plan_.problem.k}, input_.options()),
          outputs_[i]);
      return nullptr;
    }
    multiply(at::from_blob(const_cast<void*>(input), {count, plan_.problem.k}, input_.options()),
             scales_of_gathered(step.rows), i, true, output);
    return nullptr;
  }

 private:
  // The scales of one rank's rows.
  at::Tensor scales_of_gathered(plan::Rows range) const {
    if (!call_.scales) return {};
    if (call_.scales->recipe != plan::Recipe::kTensor) {
      return scales_.narrow(0, range.begin, range.end - range.begin);
    }
    if (scales_.size(0) == 1) return scales_;
    return scales_.narrow(0, range.begin / plan::part_rows(plan_), 1);
  }

  at::Tensor scales_;  // of the gathered rows
};

}  // namespace

AllGatherGemmResult allgather_gemm_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  if (takes_composition(call)) return allgather_gemm_composition(call);
  const CudaCall cuda(call);
  return Gather(call, cuda).run();
}

}  // namespace overlap::binding
