// How a kernel waits: polling with pauses, up to a deadline, and the report that it leaves behind.
#pragma once

#include <cstdint>

#include "kernels/signal/signal.h"

namespace overlap::kernels {

inline constexpr uint32_t kFirstSleepNs = 20;
inline constexpr uint32_t kLastSleepNs = 100;  // an idle poll every 100 ns costs the GEMM nothing
inline constexpr int64_t kReportPollNs =
    1'000'000;  // the report lies across the bus: read it rarely

__device__ __forceinline__ int64_t global_time_ns() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

__device__ __forceinline__ void store_relaxed_sys(int32_t* address, int32_t value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// One store, so that the host never reads half a report, and waits that fail on several streams
// leave that of one of them. No atomic: host memory may take none from the device.
__device__ __forceinline__ void write_report(WaitReport* report, const WaitFailure& failure) {
  if (report == nullptr || load_relaxed_sys(&report->failure) != 0) return;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&report->failure), "l"(pack(failure))
               : "memory");
}

// Some 100 ns more, rather than less.
__device__ __forceinline__ void pause(int64_t duration_ns) {
  if (duration_ns <= 0) return;
  const int64_t start = global_time_ns();
  while (global_time_ns() - start < duration_ns) __nanosleep(kLastSleepNs);
}

// The kernel goes on after a wait that failed, and announces to its peers what is not right: they learn of the failure
// before.
__device__ __forceinline__ void tell_peers(const WaitReport* report) {
  if (report == nullptr) return;
  const uint64_t failure = load_relaxed_sys(&report->failure);
  for (uint64_t* const word : report->tell) {
    if (word == nullptr) break;
    store_relaxed_sys(word, failure);
  }
  __threadfence_system();
}

// How long a wait goes on: until its deadline has passed, or another wait of the group has failed. Then the results are
// void, and later waits need not sit out a deadline each. One thread waits, or a warp whose lanes stay together.
template <bool kByWarp = false>
class Patience {
 public:
  __device__ __forceinline__ Patience(int64_t deadline_ns, const WaitReport* report)
      : deadline_ns_(deadline_ns), report_(report) {}

  // Between two looks at what is awaited. Calls `expired()` at the deadline, which leaves a report.
  template <class Expired>
  __device__ __forceinline__ bool ends(Expired expired) {
    const int64_t now = by_all(global_time_ns());
    if (start_ns_ == 0) start_ns_ = now;
    const int64_t waited = now - start_ns_;
    bool over = waited >= deadline_ns_;
    if (over) {
      expired();
    } else if (waited >= next_report_poll_) {
      next_report_poll_ = waited + kReportPollNs;
      over = report_ != nullptr && by_all(load_relaxed_sys(&report_->failure)) != 0;
    }
    if (over) tell_peers(report_);
    return over;
  }
  __device__ __forceinline__ void pause() {
    __nanosleep(sleep_ns_);
    sleep_ns_ = min(2 * sleep_ns_, kLastSleepNs);
  }

 private:
  template <class Value>
  __device__ __forceinline__ static Value by_all(Value value) {
    return kByWarp ? __shfl_sync(~0u, value, 0) : value;
  }

  const int64_t deadline_ns_;
  const WaitReport* const report_;
  int64_t start_ns_ = 0;
  int64_t next_report_poll_ = kReportPollNs;
  uint32_t sleep_ns_ = kFirstSleepNs;
};

// Polls until `reached()`, or as long as patience lasts. True if reached.
template <class Reached, class Expired>
__device__ __forceinline__ bool spin(int64_t deadline_ns, const WaitReport* report, Reached reached,
                                     Expired expired) {
  Patience<> patience(deadline_ns, report);
  while (!reached()) {
    if (patience.ends(expired)) return false;
    patience.pause();
  }
  return true;
}

}  // namespace overlap::kernels
