// The waiting side of the counters, with a deadline, and the delay that the race tests use.
#include "kernels/signal.h"

namespace overlap::kernels {
namespace {

constexpr uint32_t kFirstSleepNs = 20;
constexpr uint32_t kLastSleepNs = 100;        // an idle poll every 100 ns costs the GEMM nothing
constexpr int64_t kReportPollNs = 1'000'000;  // the report lies across the bus: read it rarely

__device__ __forceinline__ int64_t global_time_ns() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

__device__ __forceinline__ void store_relaxed_sys(int32_t* address, int32_t value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// One store, so that the host never reads half a report, and waits that fail on several lanes leave
// that of one of them. No atomic: host memory may take none from the device.
__device__ void write_report(const WaitParams& params, int32_t seen) {
  if (params.report == nullptr || load_relaxed_sys(&params.report->failure) != 0) {
    return;
  }
  const uint64_t failure = pack({params.chunk, params.expected, seen});
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&params.report->failure), "l"(failure)
               : "memory");
}

// One lane polls: many pollers would slow the GEMM down. What follows on the stream starts when the
// kernel has ended and thus sees what the acquire saw. Past the deadline the kernel ends all the
// same, with a report; nothing spins for ever.
__device__ void wait_for(const WaitParams& params) {
  int32_t seen = load_acquire_gpu(params.counter);  // [A] pairs with signal_release_gpu
  if (seen >= params.expected) {
    return;
  }
  const int64_t start = global_time_ns();
  int64_t next_report_poll = kReportPollNs;
  uint32_t sleep_ns = kFirstSleepNs;
  while (true) {
    __nanosleep(sleep_ns);
    sleep_ns = min(2 * sleep_ns, kLastSleepNs);
    seen = load_acquire_gpu(params.counter);  // [A] pairs with signal_release_gpu
    if (seen >= params.expected) {
      return;
    }
    const int64_t waited = global_time_ns() - start;
    if (waited >= params.deadline_ns) {
      write_report(params, seen);
      return;
    }
    // Once one wait has failed the results are void: the later chunks need not sit out a deadline
    // each.
    if (waited >= next_report_poll) {
      next_report_poll = waited + kReportPollNs;
      if (params.report != nullptr && load_relaxed_sys(&params.report->failure) != 0) {
        return;
      }
    }
  }
}

__global__ void wait_counter_kernel(const WaitParams params) {
  if (threadIdx.x != 0) {
    return;
  }
  wait_for(params);
  if (params.report != nullptr) {
    store_relaxed_sys(&params.report->reached, params.chunk);
  }
}

__global__ void delay_kernel(const int64_t duration_ns) {
  const int64_t start = global_time_ns();
  while (global_time_ns() - start < duration_ns) {
    __nanosleep(kLastSleepNs);
  }
}

}  // namespace

cudaError_t wait_counter(const WaitParams& params, cudaStream_t stream) {
  WaitParams kernel_params = params;
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(wait_counter_kernel, dim3(1), dim3(32), arguments, 0, stream);
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
  const cudaError_t error = cudaFuncGetAttributes(&attributes, wait_counter_kernel);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, delay_kernel);
}

}  // namespace overlap::kernels
