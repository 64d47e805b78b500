// Tensors as the GEMM kernels' plain structs, and the framework's own GEMM on them.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>

#include "binding/cuda/cuda_call.h"

namespace overlap::binding {
namespace {

constexpr int64_t kAllRows = std::numeric_limits<int32_t>::max();

}  // namespace

at::Tensor transposed(const at::Tensor& matrix) {
  return at::native::as_strided_tensorimpl(matrix, {matrix.size(1), matrix.size(0)},
                                           {matrix.stride(1), matrix.stride(0)},
                                           matrix.storage_offset());
}

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::detail::empty_cuda(sizes, options);
}

at::Tensor matrix_at(void* data, int64_t rows, int64_t columns, const at::TensorOptions& options) {
  return at::for_blob(data, {rows, columns})
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

at::Tensor k_contiguous(const at::Tensor& input) {
  const bool fits = (input.size(1) == 1 || input.stride(1) == 1) &&
                    (input.size(0) == 1 || input.stride(0) >= input.size(1));
  return fits ? input : input.contiguous();
}

kernels::GemmParams gemm_params(const at::Tensor& input, const at::Tensor& weight,
                                const plan::Plan& plan) {
  kernels::GemmParams params;
  params.m = input.size(0);
  params.n = weight.size(0);
  params.k = weight.size(1);
  params.dtype = plan.problem.dtype;
  params.input = input.const_data_ptr();
  params.input_stride = input.size(0) == 1 ? params.k : input.stride(0);
  params.weight = weight.const_data_ptr();
  params.weight_k_contiguous = weight.stride(1) == 1 || weight.size(1) == 1;
  params.weight_stride = params.weight_k_contiguous
                             ? (weight.size(0) == 1 ? params.k : weight.stride(0))
                             : weight.stride(1);
  params.output_stride = params.n;
  params.layout = plan.layout;
  params.smem_pad_bytes = plan.resources.smem_pad_bytes;
  params.groups.count = plan::k_groups(plan.problem);
  return params;
}

std::optional<kernels::GemmScales> gemm_scales(const Scales& scales, size_t number,
                                               const at::Tensor& weight, const plan::Plan& plan,
                                               const at::Tensor& gathered) {
  if (scales.recipe == plan::Recipe::kBlock || !scales.use_fast_accum) return std::nullopt;
  const at::Tensor& of_weight = scales.weights[number];
  kernels::GemmScales params;
  params.weight_dtype = to_plan_dtype(weight.scalar_type());
  params.output_dtype = plan::output_dtype(plan.problem);
  const at::Tensor& of_rows = gathered.defined() ? gathered : scales.input;
  params.input = of_rows.const_data_ptr<float>();
  if (scales.recipe == plan::Recipe::kTensor) {
    // One number of all rows, or of each rank's.
    const int64_t rows = of_rows.size(0) > 1 ? plan::part_rows(plan) : kAllRows;
    params.rows_per_scale = static_cast<int32_t>(rows);
  }
  params.weight = of_weight.const_data_ptr<float>();
  params.weight_stride = of_weight.size(0) > 1 ? 1 : 0;
  return params;
}

at::Tensor group_memory(const kernels::GemmParams& params, const at::TensorOptions& options) {
  const int32_t sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const int64_t bytes = kernels::group_sums_bytes(sms, params.groups.count);
  return bytes > 0 ? empty({bytes}, options.dtype(at::kByte)) : at::Tensor();
}

bool kernel_takes(const kernels::GemmParams& params, const at::Tensor& weight,
                  const plan::Plan& plan) {
  const bool along_k = (weight.stride(1) == 1 || weight.size(1) == 1) &&
                       (weight.size(0) == 1 || weight.stride(0) >= weight.size(1));
  const bool along_n = weight.stride(0) == 1 && weight.stride(1) >= weight.size(0);
  return (along_k || along_n) && kernels::gemm_supported(plan.kernel, params);
}

at::Tensor aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kAccess = 16;
  const at::Tensor result = tensor.contiguous();
  const bool begins_there = reinterpret_cast<uintptr_t>(result.const_data_ptr()) % kAccess == 0;
  return begins_there ? result : result.clone();
}

void add_rows(const steps::CopyRows& step, const void* source, void* destination, cudaStream_t on,
              const at::TensorOptions& options) {
  const c10::cuda::CUDAStreamGuard guard(
      c10::cuda::getStreamFromExternal(on, options.device().index()));
  const auto element = static_cast<int64_t>(options.dtype().itemsize());
  const auto rows = [&](void* begin, int64_t stride) {
    return at::from_blob(begin, {step.rows, step.row_bytes / element}, {stride / element, 1},
                         options);
  };
  at::Tensor sums = rows(destination, step.destination_stride);
  sums.add_(rows(const_cast<void*>(source), step.source_stride));
}

at::Tensor library_gemm(const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  return bias.has_value() ? at::cuda::addmm(*bias, input, transposed(weight))
                          : at::cuda::mm(input, transposed(weight));
}

void library_gemm(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, void* destination) {
  if (input.size(0) == 0) return;
  at::Tensor place = matrix_at(destination, input.size(0), weight.size(0), input.options());
  if (bias.has_value()) {
    at::cuda::addmm_out(place, *bias, input, transposed(weight));
  } else {
    at::cuda::mm_out(place, input, transposed(weight));
  }
}

}  // namespace overlap::binding
