#include "kernels/gemm/few_rows.h"

#include <algorithm>

#include "kernels/moe/grouped_gemm.h"
#include "kernels/peer/peer_block.cuh"
#include "kernels/peer/peer_sum.cuh"

namespace overlap::kernels {
namespace {

constexpr int kFewThreads = 256;
constexpr int kVector = 8;  // numbers of 16 bits in an access

__global__ void __launch_bounds__(kFewThreads)
    arrange_kernel(const __grid_constant__ FewRowsParams params) {
  wait_for_previous_kernel();
  const int64_t k = params.k / kVector;  // in accesses
  const int64_t all = params.groups * params.m * k;
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < params.groups) {
    params.ends[threadIdx.x] = static_cast<int32_t>((threadIdx.x + 1) * params.m);
  }
  const auto* const input = static_cast<const uint4*>(params.input);
  for (int64_t i = int64_t{blockIdx.x} * kFewThreads + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * kFewThreads) {
    const int64_t row = i / k % params.m;
    const int64_t column = i / k / params.m * k + i % k;
    static_cast<uint4*>(params.rows)[i] = input[row * (params.input_stride / kVector) + column];
  }
}

template <class T>
__global__ void __launch_bounds__(kFewThreads)
    add_kernel(const __grid_constant__ FewRowsParams params) {
  wait_for_previous_kernel();
  const int64_t all = params.m * params.n / kVector;
  const auto* const products = static_cast<const uint4*>(params.products);
  for (int64_t i = int64_t{blockIdx.x} * kFewThreads + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * kFewThreads) {
    Sum<T, kVector, true> sum;
    for (int32_t group = 0; group < params.groups; ++group) {
      sum.add(bits_as<Access<T, kVector>>(products[group * all + i]), group);
    }
    static_cast<uint4*>(params.output)[i] = bits_as<uint4>(sum.rounded(nullptr, 0, 1));
  }
}

using Adder = void (*)(FewRowsParams);
Adder adder_of(plan::DType dtype) {
  return dtype == plan::DType::kFloat16 ? add_kernel<__half> : add_kernel<__nv_bfloat16>;
}

int blocks_for(int64_t accesses) {
  constexpr int64_t kMost = 1024;
  return static_cast<int>(
      std::clamp<int64_t>((accesses + kFewThreads - 1) / kFewThreads, 1, kMost));
}

}  // namespace

cudaError_t launch_few_rows(const FewRowsParams& params, cudaStream_t stream) {
  cudaError_t error =
      launch_early(arrange_kernel, blocks_for(params.groups * params.m * params.k / kVector),
                   kFewThreads, stream, params);
  if (error != cudaSuccess) return error;
  GroupedGemmParams gemm;
  gemm.rows = params.groups * params.m;
  gemm.k = params.k;
  gemm.n = params.n;
  gemm.input = params.rows;
  gemm.weight = params.weight;
  gemm.turned = !params.weight_k_contiguous;
  gemm.k_slices = params.weight_k_contiguous;
  gemm.gate.element =
      params.dtype == plan::DType::kFloat16 ? Element::kFloat16 : Element::kBFloat16;
  gemm.gate.width = params.n;
  gemm.gate.offs = params.ends;
  gemm.gate.experts = params.groups;
  gemm.gate.output = params.products;
  gemm.ctas = params.ctas;
  error = launch_grouped_gemm(gemm, stream);
  if (error != cudaSuccess || params.products == params.output) return error;
  return launch_early(adder_of(params.dtype), blocks_for(params.m * params.n / kVector),
                      kFewThreads, stream, params);
}

cudaError_t load_few_rows_kernels() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  cudaError_t error = cudaFuncGetAttributes(&attributes, arrange_kernel);
  for (const plan::DType dtype : {plan::DType::kBFloat16, plan::DType::kFloat16}) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, adder_of(dtype));
  }
  return error;
}

}  // namespace overlap::kernels
