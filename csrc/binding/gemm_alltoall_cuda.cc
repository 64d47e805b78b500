// gemm_alltoall on CUDA.
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>

#include "binding/cuda_call.h"
#include "runtime/executor.h"

namespace overlap::binding {

at::Tensor gemm_alltoall_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  // K is not shared between ranks, but a rank without features has nothing that the kernels take.
  if (takes_composition(call)) return gemm_alltoall_composition(call);
  if (call.problem.k == 0) {
    call.group->count_unplanned(call.problem, at::kCUDA, "K is 0: there is nothing to compute");
    return gemm_alltoall_composition(call);
  }
  const CudaCall cuda(call);
  const plan::Plan& plan = cuda.plan();
  if (plan.schedule != plan::Schedule::kOverlapped) return gemm_alltoall_composition(call);
  const at::TensorOptions options = call.input.options();
  const at::Tensor input = k_contiguous(call.input);
  const at::Tensor output = empty({c10::sum_integers(call.recv_rows), plan.problem.n}, options);

  runtime::AllToAllCall all_to_all;
  all_to_all.plan = &plan;
  all_to_all.send_rows = call.send_rows;
  all_to_all.receive_rows = call.recv_rows;
  at::Tensor product;
  all_to_all.product = [&] {
    product = empty({input.size(0), plan.problem.n}, options);
    return product.data_ptr();
  };
  all_to_all.output = output.data_ptr();
  all_to_all.gemm = gemm_params(input, call.weight(), cuda);
  // The kernels add no bias, the framework's GEMM does.
  all_to_all.fast = !call.bias().has_value() && input.size(0) > 0 &&
                    kernel_takes(all_to_all.gemm, call.weight(), plan);
  all_to_all.library_gemm = [&](plan::Rows range, void* destination) {
    library_gemm(input.narrow(0, range.begin, range.end - range.begin), call.weight(), call.bias(),
                 destination);
  };
  all_to_all.stream = cuda.stream;
  all_to_all.delay_us = side_delay_us();
  all_to_all.trace = cuda.trace();
  if (plan::over_peers(plan)) {
    runtime::run_exchange(*cuda.group, all_to_all);
  } else {
    runtime::run_all_to_all(*cuda.group, all_to_all);
  }
  return output;
}

}  // namespace overlap::binding
