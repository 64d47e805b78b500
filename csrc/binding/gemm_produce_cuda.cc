// gemm_allreduce and gemm_reducescatter on CUDA: look the plan up, turn tensors into plain structs,
// hand them to the executor.
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda_call.h"
#include "runtime/executor.h"

namespace overlap::binding {
namespace {

at::Tensor run_overlapped(const OpCall& call, const CudaCall& cuda) {
  const plan::Plan& plan = cuda.plan();
  const at::TensorOptions options = call.input.options();
  const at::Tensor output = empty(
      {plan.problem.op == plan::Op::kGemmReduceScatter ? plan::part_rows(plan) : plan.problem.m,
       plan.problem.n},
      options);
  const at::Tensor input = k_contiguous(call.input);

  runtime::ProduceCall produce;
  produce.plan = &plan;
  produce.order = &cuda.entry->order;
  produce.output = output.data_ptr();
  produce.stream = cuda.stream;
  produce.delay_us = side_delay_us();
  produce.trace = cuda.trace();

  const bool ring = plan::over_peers(plan);
  at::Tensor buffer;
  if (!ring) buffer = runtime::communicates_in_place(plan) ? output : cuda.staging(options);
  if (buffer.defined()) produce.buffer = buffer.data_ptr();

  at::Tensor bias;
  if (call.bias().has_value()) {
    bias = call.bias()->contiguous();
    produce.bias = bias.const_data_ptr();
  }

  produce.gemm = gemm_params(input, call.weight(), cuda);
  kernels::GemmParams probe = produce.gemm;
  probe.output = produce.buffer != nullptr ? produce.buffer : produce.output;
  if (ring) {
    // From the second phase on: not every kernel adds a source.
    probe.sources[0] = probe.output;
  }
  produce.signals = kernel_takes(probe, call.weight(), plan);
  at::Tensor counters;
  produce.counters = [&] {
    counters = empty({plan::kMaxChunks}, options.dtype(at::kInt));
    return counters.data_ptr<int32_t>();
  };
  at::Tensor rows;
  if (ring && !produce.signals) {
    rows = empty({plan::part_rows(plan), plan.problem.n}, options);
    produce.library_rows = rows.data_ptr();
    produce.library_phase = [&](plan::Rows range, const void* source, void* destination) {
      const int64_t count = range.end - range.begin;
      library_gemm(input.narrow(0, range.begin, count), call.weight(), {}, destination);
      if (source == nullptr) return;
      at::Tensor place = at::from_blob(destination, {count, plan.problem.n}, options);
      place.add_(at::from_blob(const_cast<void*>(source), {count, plan.problem.n}, options));
    };
  } else if (!produce.signals) {
    if (plan.layout == plan::Layout::kPacked) {
      rows = empty({plan.problem.m, plan.problem.n}, options);
      produce.library_rows = rows.data_ptr();
    }
    produce.library_gemm = [&](plan::Rows range, void* destination) {
      library_gemm(input.narrow(0, range.begin, range.end - range.begin), call.weight(), {},
                   destination);
    };
  }
  if (ring) {
    runtime::run_ring(*cuda.group, produce);
  } else {
    runtime::run_produce(*cuda.group, produce);
  }
  return output;
}

at::Tensor run_direct(const OpCall& call, const CudaCall& cuda) {
  const plan::Plan& plan = cuda.plan();
  const bool all_reduces = plan.problem.op == plan::Op::kGemmAllReduce;
  at::Tensor product;
  at::Tensor output;
  at::Tensor input;
  at::Tensor bias;
  runtime::ProduceCall direct;
  direct.plan = &plan;
  direct.order = &cuda.entry->order;
  direct.stream = cuda.stream;
  direct.delay_us = side_delay_us();
  direct.trace = cuda.trace();
  if (call.bias().has_value()) {
    bias = aligned(*call.bias());
    direct.bias = bias.const_data_ptr();
  }
  if (plan.schedule == plan::Schedule::kOverlapped || !all_reduces) {
    const int64_t rows = all_reduces ? plan.problem.m : plan.problem.m / plan.problem.world_size;
    output = empty({rows, plan.problem.n}, call.input.options());
    direct.output = output.data_ptr();
  }
  if (plan.schedule == plan::Schedule::kOverlapped) {
    input = k_contiguous(call.input);
    direct.gemm = gemm_params(input, call.weight(), cuda);
    kernels::GemmParams probe = direct.gemm;
    probe.output = direct.output;
    probe.mirrors[probe.num_mirrors++] = direct.output;
    direct.signals = kernel_takes(probe, call.weight(), plan);
  }
  direct.library_product = [&] {
    product = library_gemm(call.input, call.weight());
    return product.data_ptr();
  };
  runtime::run_direct(*cuda.group, direct);
  return output.defined() ? output : product;
}

at::Tensor run_sequential(const OpCall& call, const CudaCall& cuda) {
  at::Tensor product;
  at::Tensor output;
  runtime::SequentialCall sequential;
  sequential.plan = &cuda.plan();
  sequential.gemm = [&] {
    product = library_gemm(call.input, call.weight());
    if (call.problem.op == plan::Op::kGemmReduceScatter) {  // behind the GEMM, which is on its way
      output = empty({plan::part_rows(cuda.plan()), call.problem.n}, call.input.options());
      sequential.output = output.data_ptr();
    }
    return product.data_ptr();
  };
  sequential.stream = cuda.stream;
  sequential.trace = cuda.trace();
  runtime::run_sequential(*cuda.group, sequential);
  if (!output.defined()) output = product;
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

at::Tensor run(const OpCall& call) {
  const CudaCall cuda(call);
  if (cuda.plan().collective == plan::Collective::kDirect) return run_direct(call, cuda);
  return cuda.plan().schedule == plan::Schedule::kOverlapped ? run_overlapped(call, cuda)
                                                             : run_sequential(call, cuda);
}

}  // namespace

at::Tensor gemm_allreduce_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  return takes_composition(call) ? gemm_allreduce_composition(call) : run(call);
}

at::Tensor gemm_reducescatter_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  return takes_composition(call) ? gemm_reducescatter_composition(call) : run(call);
}

}  // namespace overlap::binding
