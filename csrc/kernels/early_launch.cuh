// Kernels that are launched before the one in front has ended, and wait for its end themselves: what they
// do before that, and their launch, takes no time of its own.
#pragma once

#include <cuda_runtime_api.h>

namespace overlap::kernels {

// Before anything that the kernel in front may have written is read, and anything that it reads written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in, as soon as there is room: only from kernels that wait for nobody, as it holds
// SMs while it waits for their end.
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

}  // namespace overlap::kernels
