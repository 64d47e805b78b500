// A build without CUDA kernels: CUDA tensors take the unfused compositions.
#if !defined(OVERLAP_WITH_CUDA)

#include "binding/ops/op_call.h"
#include "binding/ops/scales.h"

namespace overlap::binding {
namespace {

void warn(const OpCall& call) {
  TORCH_WARN_ONCE(
      "overlap_torch was built without CUDA kernels: CUDA tensors take the unfused compositions "
      "(a GEMM, then its collective). Rebuild it where an nvcc of torch's CUDA version is "
      "installed; `python -m overlap_torch doctor` says what is missing.");
  call.group->count_unplanned(call.problem, at::kCUDA,
                              "built without CUDA kernels: a GEMM, then its collective");
}

}  // namespace

at::Tensor gemm_allreduce_cuda(const OpCall& call) {
  warn(call);
  return gemm_allreduce_composition(call);
}

at::Tensor gemm_reducescatter_cuda(const OpCall& call) {
  warn(call);
  return gemm_reducescatter_composition(call);
}

AllGatherGemmResult allgather_gemm_cuda(const OpCall& call) {
  warn(call);
  return allgather_gemm_composition(call);
}

at::Tensor gemm_alltoall_cuda(const OpCall& call) {
  warn(call);
  return gemm_alltoall_composition(call);
}

plan::Machine cuda_machine(const std::shared_ptr<GroupEntry>&, at::Device device) {
  TORCH_CHECK(false, "overlap_torch: built without CUDA kernels, there are no plans for ", device);
}

std::optional<at::Tensor> device_scaled_product(const Scales&, const at::Tensor&, const at::Tensor&,
                                                const at::Tensor&, const at::Tensor&,
                                                const std::optional<at::Tensor>&, at::Tensor*) {
  return std::nullopt;
}

std::optional<at::Tensor> kernel_product(const OpCall&, int64_t) {
  return std::nullopt;
}

void check_cuda_groups() {}

std::vector<int64_t> cuda_memory(const std::shared_ptr<GroupEntry>&) {
  return {0, 0};
}

std::string cuda_peer_memory(const std::shared_ptr<GroupEntry>&) {
  return "";
}

}  // namespace overlap::binding

#endif
