// PyTorch's own GEMM of scaled operands on CUDA, for the operands that it takes. The caller handles
// the others: shapes, strides and the device decide this before anything is launched.
#include <ATen/cuda/CUDAContext.h>
#include <cuda_runtime_api.h>

#include "binding/cuda/cuda_call.h"
#include "binding/ops/scales.h"

namespace overlap::binding {
namespace {

using plan::Recipe;

constexpr int64_t kMultiple = 16;  // of N and K, and of the bytes at which rows begin

bool shapes_fit(const Scales& scales, int64_t m, int64_t n, int64_t k, int arch) {
  if (arch < 89 || m == 0 || n == 0 || k == 0 || n % kMultiple != 0 || k % kMultiple != 0) {
    return false;
  }
  if (scales.recipe != Recipe::kBlock) return true;
  // cuBLAS, only on Hopper; it reads scales in whole 16-byte accesses, and those of the weight in rows of four.
  return CUDART_VERSION >= 12090 && arch == 90 && m % 4 == 0 && n % 128 == 0 && k % 512 == 0;
}

// CUTLASS scales rows on chips other than Hopper only for these types.
bool types_fit(const Scales& scales, const at::Tensor& input, const at::Tensor& weight,
               bool by_rows, int arch) {
  if (!by_rows || arch == 90) return true;
  return scales.output_dtype == at::kBFloat16 && input.scalar_type() == at::kFloat8_e4m3fn &&
         weight.scalar_type() == at::kFloat8_e4m3fn;
}

// Contiguous along K, its rows beginning at multiples of 16 bytes.
at::Tensor laid_out(const at::Tensor& operand) {
  const at::Tensor rows = k_contiguous(operand);
  return (rows.size(0) > 1 && rows.stride(0) % kMultiple != 0)
             ? rows.clone(at::MemoryFormat::Contiguous)
         : reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kMultiple != 0
             ? rows.clone(at::MemoryFormat::Contiguous)
             : rows;
}

// cuBLAS takes scales that begin where 16-byte accesses do: those of some rows may not. Strides stay.
at::Tensor aligned_scales(const at::Tensor& scales) {
  const bool fits = reinterpret_cast<uintptr_t>(scales.const_data_ptr()) % kMultiple == 0;
  return fits ? scales : scales.clone();
}

}  // namespace

std::optional<at::Tensor> device_scaled_product(const Scales& scales, const at::Tensor& input,
                                                const at::Tensor& input_scales,
                                                const at::Tensor& weight,
                                                const at::Tensor& weight_scales,
                                                const std::optional<at::Tensor>& bias,
                                                at::Tensor* output) {
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(input.get_device());
  const int arch = 10 * device->major + device->minor;
  const int64_t m = input.size(0);
  const int64_t n = weight.size(0);
  const bool by_blocks = scales.recipe == Recipe::kBlock;
  const bool by_rows = !by_blocks && (input_scales.numel() > 1 || weight_scales.numel() > 1);
  if (!shapes_fit(scales, m, n, input.size(1), arch) ||
      !types_fit(scales, input, weight, by_rows, arch)) {
    return std::nullopt;
  }
  at::Tensor left = input_scales;
  at::Tensor right = weight_scales;
  if (by_blocks) {
    left = left.t().contiguous().t();  // one K block's scales after the other's
    right = right.contiguous().t();
  } else if (by_rows) {
    left = left.expand({m, 1}).contiguous();
    right = right.expand({n, 1}).contiguous().view({1, n});
  }
  left = aligned_scales(left);
  right = aligned_scales(right);
  // It adds a bias to 16-bit results only.
  const bool adds_bias = bias.has_value() && scales.output_dtype != at::kFloat && !by_blocks;
  const bool fast = scales.use_fast_accum && !by_blocks;
  const bool whole = adds_bias || !bias.has_value();
  const auto own_bias = adds_bias ? bias : std::nullopt;
  const at::Tensor x = laid_out(input);
  const at::Tensor w = laid_out(weight).t();
  if (output != nullptr && whole) {
    return at::_scaled_mm_out(*output, x, w, left, right, own_bias, std::nullopt,
                              scales.output_dtype, fast);
  }
  at::Tensor product = at::_scaled_mm(x, w, left, right, own_bias, std::nullopt,
                                      whole ? scales.output_dtype : at::kFloat, fast);
  if (whole) return product;
  return product.add_(*bias).to(scales.output_dtype);
}

}  // namespace overlap::binding
