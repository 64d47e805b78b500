// allgather_gemm on CUDA.
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda_call.h"
#include "runtime/executor.h"

namespace overlap::binding {
namespace {

AllGatherGemmResult run_overlapped(const OpCall& call, const CudaCall& cuda) {
  const plan::Plan& plan = cuda.plan();
  const plan::Problem& problem = plan.problem;
  const at::TensorOptions options = call.input.options();
  const at::Tensor input = call.input.contiguous();
  AllGatherGemmResult result;
  result.gathered = empty({problem.m, problem.k}, options);

  runtime::ConsumeCall consume;
  consume.plan = &plan;
  consume.input = input.const_data_ptr();
  consume.gathered = result.gathered.data_ptr();
  consume.stream = cuda.stream;
  consume.delay_us = side_delay_us();
  consume.trace = cuda.trace();
  const at::Tensor buffer = plan::over_peers(plan) ? at::Tensor() : cuda.staging(options);
  if (buffer.defined()) consume.buffer = buffer.data_ptr();

  for (size_t i = 0; i < call.weights.size(); ++i) {
    const at::Tensor& weight = call.weights[i];
    result.outputs.push_back(empty({problem.m, weight.size(0)}, options));
    runtime::ConsumeCall::Gemm gemm;
    gemm.params = gemm_params(input, weight, cuda);
    gemm.params.m = problem.m;
    gemm.params.output = result.outputs.back().data_ptr();
    // The kernels add no bias, the framework's GEMM does.
    gemm.fast = !call.biases[i].has_value() && weight.size(0) > 0 &&
                kernel_takes(gemm.params, weight, plan);
    consume.gemms.push_back(gemm);
  }
  consume.library_gemm = [&](size_t i, const void* rows, plan::Rows range) {
    const int64_t count = range.end - range.begin;
    const at::Tensor place = result.outputs[i].narrow(0, range.begin, count);
    if (place.numel() == 0) return;
    library_gemm(at::from_blob(const_cast<void*>(rows), {count, problem.k}, options),
                 call.weights[i], call.biases[i], place.data_ptr());
  };
  runtime::run_consume(*cuda.group, consume);
  return result;
}

AllGatherGemmResult run_sequential(const OpCall& call, const CudaCall& cuda) {
  const plan::Problem& problem = cuda.plan().problem;
  const at::Tensor input = aligned(call.input);
  AllGatherGemmResult result;
  result.gathered = empty({problem.m, problem.k}, input.options());
  runtime::SequentialCall sequential;
  sequential.plan = &cuda.plan();
  sequential.input = input.const_data_ptr();
  sequential.output = result.gathered.data_ptr();
  sequential.gemm = [&]() -> void* {
    for (size_t i = 0; i < call.weights.size(); ++i) {
      result.outputs.push_back(library_gemm(result.gathered, call.weights[i], call.biases[i]));
    }
    return nullptr;
  };
  sequential.stream = cuda.stream;
  sequential.trace = cuda.trace();
  runtime::run_sequential(*cuda.group, sequential);
  return result;
}

}  // namespace

AllGatherGemmResult allgather_gemm_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  if (takes_composition(call)) return allgather_gemm_composition(call);
  const CudaCall cuda(call);
  return cuda.plan().schedule == plan::Schedule::kOverlapped ? run_overlapped(call, cuda)
                                                             : run_sequential(call, cuda);
}

}  // namespace overlap::binding
