// The counters' zeroing, the waiting side of them, with a deadline, and the delay that race tests use.
#include "kernels/signal/signal.h"

#include "kernels/gemm/early_launch.cuh"
#include "kernels/signal/spin.cuh"

namespace overlap::kernels {
namespace {

// One lane polls: many pollers would slow the GEMM down. The next kernel on the stream starts when
// this one has ended and thus sees what the acquire saw. Past the deadline the kernel ends all the
// same, with a report; nothing spins for ever.
__global__ void wait_counter_kernel(const WaitParams params) {
  if (threadIdx.x != 0) return;
  int32_t seen = 0;
  spin(
      params.deadline_ns, params.report,
      [&] {
        seen = load_acquire_gpu(params.counter);  // [A] pairs with signal_release_gpu
        return seen >= params.expected;
      },
      [&] { write_report(params.report, {params.chunk, kOwnGemm, params.expected, seen}); });
  if (params.report != nullptr) {
    store_relaxed_sys(&params.report->reached, params.chunk);
  }
}

constexpr int kZeroingThreads = 64;

__global__ void zero_counters_kernel(int32_t* counters, int32_t count) {
  let_next_kernel_in();
  wait_for_previous_kernel();
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += blockDim.x) counters[i] = 0;
}

__global__ void delay_kernel(const int64_t duration_ns) {
  pause(duration_ns);
}

__device__ int32_t counters_of_device[kDeviceCounters];  // zero when this library is loaded

}  // namespace

cudaError_t wait_counter(const WaitParams& params, cudaStream_t stream) {
  WaitParams kernel_params = params;
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(wait_counter_kernel, dim3(1), dim3(32), arguments, 0, stream);
}

cudaError_t zero_counters(int32_t* counters, int32_t count, cudaStream_t stream) {
  return launch_early(zero_counters_kernel, 1, kZeroingThreads, stream, counters, count);
}

cudaError_t device_counters(int32_t** counters) {
  return cudaGetSymbolAddress(reinterpret_cast<void**>(counters), counters_of_device);
}

cudaError_t delay(int64_t microseconds, cudaStream_t stream) {
  if (microseconds <= 0) {
    return cudaSuccess;
  }
  int64_t duration_ns = microseconds * 1000;
  void* arguments[] = {&duration_ns};
  return cudaLaunchKernel(delay_kernel, dim3(1), dim3(1), arguments, 0, stream);
}

cudaError_t load_signal_kernels() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const cudaError_t error : {cudaFuncGetAttributes(&attributes, wait_counter_kernel),
                                  cudaFuncGetAttributes(&attributes, zero_counters_kernel),
                                  cudaFuncGetAttributes(&attributes, delay_kernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
