// allgather_gemm on CUDA.
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda_operands.h"

namespace overlap::binding {
namespace {

class Gather : public CudaOperands {
 public:
  Gather(const OpCall& call, const CudaCall& cuda)
      : CudaOperands(call, cuda,
                     overlapped(cuda.plan()) ? call.input.contiguous() : aligned(call.input)) {}

  AllGatherGemmResult run() {
    const plan::Problem& problem = plan_.problem;
    gathered_ = empty({problem.m, problem.k}, options());
    steps::Variant variant = {.captured = plan_.resources.window && captured()};
    for (size_t i = 0; i < call_.weights.size() && overlapped(plan_); ++i) {
      const at::Tensor& weight = call_.weights[i];
      outputs_.push_back(empty({problem.m, weight.size(0)}, options()));
      gemms_.push_back(gemm_params(input_, weight, plan_));
      kernels::GemmParams probe = gemms_.back();
      probe.m = problem.m;
      probe.output = outputs_.back().data_ptr();
      // The kernels add no bias, the framework's GEMM does.
      const bool takes =
          !call_.biases[i].has_value() && weight.size(0) > 0 && kernel_takes(probe, weight, plan_);
      variant.weights.push_back({weight.size(0), takes});
    }
    CudaOperands::run(variant);
    return {std::move(outputs_), std::move(gathered_), {}};
  }

  void* library(const steps::LibraryGemm& step, const void* input, const void*,
                void* output) override {
    if (step.weight == steps::LibraryGemm::kAllWeights) {
      for (size_t i = 0; i < call_.weights.size(); ++i) {
        outputs_.push_back(library_gemm(gathered_, call_.weights[i], call_.biases[i]));
      }
      return nullptr;
    }
    const auto i = static_cast<size_t>(step.weight);
    if (call_.weights[i].size(0) == 0) return nullptr;
    const int64_t count = step.rows.end - step.rows.begin;
    library_gemm(at::from_blob(const_cast<void*>(input), {count, plan_.problem.k}, options()),
                 call_.weights[i], call_.biases[i], output);
    return nullptr;
  }
};

}  // namespace

AllGatherGemmResult allgather_gemm_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  if (takes_composition(call)) return allgather_gemm_composition(call);
  const CudaCall cuda(call);
  return Gather(call, cuda).run();
}

}  // namespace overlap::binding
