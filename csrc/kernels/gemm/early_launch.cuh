// Kernels that are launched before the one in front has ended, and wait for its end themselves: what they
// do before that, and their launch, takes no time of its own.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace overlap::kernels {

// Before anything that the kernel in front may have written is read, and anything that it reads written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in, once all blocks have come here and as soon as there is room: only where no block waits
// for anybody any more, as it holds SMs while it waits for this one's end.
__device__ __forceinline__ void let_next_kernel_in() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline cudaLaunchAttribute early_launch() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Returns true if this build's code for the current device waits as above. Code for older devices, which newer ones
// run as well, does not.
inline bool waits_for_previous_kernel() {
#if defined(OVERLAP_WITH_SM90)
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
#else
  return false;
#endif
}

// A kernel that waits for the one in front itself, where it can.
template <class... Parameters>
cudaError_t launch_early(void (*kernel)(Parameters...), int blocks, int threads,
                         cudaStream_t stream,
                         const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute early = early_launch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(static_cast<unsigned int>(threads));
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_for_previous_kernel() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace overlap::kernels
