// A plan's GEMM without its communication, counters on: what benchmarks hold against the framework's.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include "binding/cuda/cuda_call.h"

namespace overlap::binding {
namespace {

// With the counters that ops have: zeroed before, for many calls at once. A capture's are its own.
void launch_with_counters(const plan::Plan& plan, kernels::GemmParams& params,
                          cudaStream_t stream) {
  const int32_t count = params.order.num_chunks;
  if (runtime::capture_id(stream).has_value()) {
    const at::Tensor counters = empty({count}, at::device(at::kCUDA).dtype(at::kInt));
    params.counters = counters.data_ptr<int32_t>();
    C10_CUDA_CHECK(kernels::zero_counters(params.counters, count, stream));
    C10_CUDA_CHECK(kernels::launch_gemm(plan.kernel, params, stream));
    return;
  }
  runtime::DeviceState& device = runtime::DeviceState::current();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.chain(stream, std::nullopt);
  params.counters = device.zeroed_counters(count, stream);
  C10_CUDA_CHECK(kernels::launch_gemm(plan.kernel, params, stream));
  device.chained(stream, std::nullopt);
}

}  // namespace

at::Tensor gemm_alone(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef code,
                      const std::optional<at::Tensor>& scale_input,
                      const std::optional<at::Tensor>& scale_weight) {
  const plan::Plan plan = plan::decode(code.vec());
  plan::validate(plan);
  const plan::Problem& problem = plan.problem;
  TORCH_CHECK_VALUE(problem.traits().all_reduces() &&
                        plan.schedule == plan::Schedule::kOverlapped &&
                        plan.collective == plan::Collective::kAllReduce,
                    "gemm_alone: the plan must be an overlapped one of gemm_allreduce with the "
                    "collective all_reduce, but is ",
                    plan.to_string());
  const bool scaled = problem.recipe != plan::Recipe::kNone;
  TORCH_CHECK_VALUE(
      input.dim() == 2 && weight.dim() == 2 && input.size(0) == problem.m &&
          weight.size(0) == problem.n && input.size(1) == problem.k &&
          weight.size(1) == problem.k && to_plan_dtype(input.scalar_type()) == problem.dtype &&
          (scaled || weight.scalar_type() == input.scalar_type()) &&
          weight.device() == input.device(),
      "gemm_alone: input and weight must be [M, K] and [N, K] of the plan's problem (",
      problem.to_string(), ") on one device, but are ", input.sizes(), " and ", weight.sizes(),
      " of ", input.scalar_type(), " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(
      scale_input.has_value() == scaled && scale_weight.has_value() == scaled,
      "gemm_alone: scale_input and scale_weight are for fp8, which needs both; the plan's "
      "problem is ",
      problem.to_string());
  const c10::cuda::CUDAGuard guard(input.device());
  TORCH_CHECK_VALUE(has_kernels(input.device()), "gemm_alone: this build has no kernels for ",
                    input.device());  // loads them
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream().stream();
  const at::ScalarType type = scaled ? at::kBFloat16 : input.scalar_type();
  const at::Tensor output = empty({plan::buffer_elements(plan)}, input.options().dtype(type));

  kernels::GemmParams params = gemm_params(input, weight, plan);
  std::optional<Scales> scales;
  if (scaled) {
    const int64_t recipe = scaling_type_of_input(problem.recipe);
    scales = check_scales("gemm_alone", input, {weight},
                          {.input = *scale_input,
                           .weights = {*scale_weight},
                           .recipe_input = recipe,
                           .recipe_weight = {},  // as the input's
                           .use_fast_accum = problem.fast_accum});
    params.scales = gemm_scales(*scales, 0, weight, plan, {});
  }
  params.output = output.data_ptr();
  params.order = plan::tile_order(plan);
  params.ctas =
      at::cuda::getCurrentDeviceProperties()->multiProcessorCount - plan.resources.comm_sms;
  TORCH_CHECK_VALUE(
      kernel_takes(params, weight, plan), "gemm_alone: kernel ", plan::name(plan.kernel),
      " does not take these operands: K contiguous, 16-byte aligned rows, a device and "
      "a build that have the kernel");
  launch_with_counters(plan, params, stream);
  return output;
}

}  // namespace overlap::binding
