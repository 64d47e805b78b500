// CUTLASS asks the runtime for the driver's encoder of tensor maps each time that it makes one; this asks
// once. To be included before anything of CUTLASS that makes tensor maps.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cutlass/cuda_host_adapter.hpp>

namespace overlap::kernels {

using cutlass::call_cuTensorMapEncodeIm2col;

template <class... Args>
CUresult call_cuTensorMapEncodeTiled(Args... args) {
  static const auto encode = [] {
    constexpr unsigned int kSinceCuda12 = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, kSinceCuda12, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(usable ? function : nullptr);
  }();
  return encode != nullptr ? encode(args...) : CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace overlap::kernels

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) ::overlap::kernels::call_##function
