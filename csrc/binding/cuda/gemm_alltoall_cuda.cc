// gemm_alltoall on CUDA.
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>

#include "binding/cuda/cuda_operands.h"

namespace overlap::binding {
namespace {

class AllToAll : public CudaOperands {
 public:
  AllToAll(const OpCall& call, const CudaCall& cuda)
      : CudaOperands(call, cuda, k_contiguous(call.input)) {}

  at::Tensor run() {
    outputs_.push_back(empty({c10::sum_integers(call_.recv_rows), plan_.problem.n}, options()));
    gemms_.push_back(operands_of(0));
    steps::Variant variant = {.send_rows = call_.send_rows, .receive_rows = call_.recv_rows};
    // The kernels add no bias, the framework's GEMM does.
    variant.compute = steps::kernel_if(!call_.bias().has_value() && input_.size(0) > 0 &&
                                       kernel_takes(gemms_[0], call_.weight(), plan_));
    runtime::Group& group = *cuda_.group;
    if (plan::over_peers(plan_) && group.world_size() > 2) {
      const int64_t own =
          steps::longest_message(plan_, group.rank(), call_.send_rows, call_.recv_rows);
      const std::lock_guard<std::mutex> lock(group.device().mutex);
      variant.longest_message = group.longest_message(own, captured());
    }
    CudaOperands::run(variant);
    return outputs_[0];
  }

  void* library(const steps::LibraryGemm& step, const void*, const void*, void* output) override {
    multiply(rows(step.rows), scales_of(step.rows), 0, true, output);
    return nullptr;
  }
};

}  // namespace

at::Tensor gemm_alltoall_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  if (takes_composition(call)) return gemm_alltoall_composition(call);
  if (call.problem.k == 0) {
    call.group->count_unplanned(call.problem, at::kCUDA, "K is 0: there is nothing to compute");
    return gemm_alltoall_composition(call);
  }
  const CudaCall cuda(call);
  if (cuda.plan().schedule != plan::Schedule::kOverlapped) return gemm_alltoall_composition(call);
  return AllToAll(call, cuda).run();
}

}  // namespace overlap::binding
