// Launches a kernel of yours with shared memory that it does not use, so that an SM holds fewer of its blocks, and what that
// leaves is communication's: see overlap_torch.resources(by="padding").
//
//   overlap::launch(kernel, grid, block, shared_bytes, smem_pad_bytes, stream, a, b, ...);
//
// in place of kernel<<<grid, block, shared_bytes, stream>>>(a, b, ...). How much comes from the job: `job.smem_pad_bytes(own)` in
// Python, where `own` are a block's bytes, static and dynamic ones. Beyond the 48 KiB that every kernel may have, its limit is
// raised; a launch that asks for more than a block may have returns cudaErrorInvalidValue.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace overlap {

template <class... Params, class... Arguments>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                   size_t smem_pad_bytes, cudaStream_t stream, const Arguments&... arguments) {
  static_assert(sizeof...(Params) == sizeof...(Arguments), "as many arguments as the kernel takes");
  const size_t bytes = shared_bytes + smem_pad_bytes;
  // The limit is the kernel's, on this device. Setting it again costs less than a launch.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  kernel<<<grid, block, bytes, stream>>>(static_cast<Params>(arguments)...);
  return cudaGetLastError();
}

}  // namespace overlap
