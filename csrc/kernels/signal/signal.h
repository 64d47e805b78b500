// Counters: how a finished tile is announced and waited for. Every verb names its memory order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan/tile_order.h"

namespace overlap::kernels {

#if defined(__CUDACC__)
// [A] Announces one finished tile. The calling thread must have observed the tile's stores (bulk
// stores: complete, not merely read; ordinary stores: after a CTA barrier). Pairs with the acquire
// in wait_counter, label [A] in signal.cu.
__device__ __forceinline__ void signal_release_gpu(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// Counts one more, after what the calling thread has observed, and makes what others counted after visible to it:
// what there was before.
__device__ __forceinline__ int32_t add_acq_rel_gpu(int32_t* counter, int32_t value) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// Orders bulk copies and plain accesses of the same memory.
__device__ __forceinline__ void fence_bulk_copies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Bulk stores (cp.async.bulk.tensor) that this thread issued are complete and visible to it.
__device__ __forceinline__ void wait_bulk_stores_complete() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  fence_bulk_copies();
}

__device__ __forceinline__ int32_t load_acquire_gpu(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
#endif

using plan::kMaxPeers;

// The report of a wait that passed its deadline: in pinned host memory, read without
// synchronising.
struct WaitReport {
  uint64_t failure = 0;  // a packed WaitFailure, written at once, or 0; an early failure is kept
  int32_t reached =
      -1;  // the last chunk of any call whose wait ended: what its rank was communicating
  // Where a wait that failed tells the peers so, in their memory; null: no more peers.
  uint64_t* tell[kMaxPeers - 1] = {};
};

inline constexpr int32_t kOwnGemm = 255;  // in place of a peer: what was waited for is local

// A wait whose deadline passed: for which chunk and whom, and what it expected and saw: tiles of the
// own GEMM, or a peer's signals.
struct WaitFailure {
  int32_t chunk = 0;
  int32_t peer = kOwnGemm;
  int32_t expected = 0;  // more than 0 in a wait that can fail, so that no failure packs to 0
  int32_t seen = 0;
};

// Chunks and peers fit 8 bits each, and counts 24, beyond which they are cut off.
OVERLAP_HOST_DEVICE constexpr uint64_t pack(const WaitFailure& failure) {
  constexpr int64_t kMax = (int64_t{1} << 24) - 1;
  const auto count = [](int64_t value) {
    return static_cast<uint64_t>(value < 0 ? 0 : value > kMax ? kMax : value);
  };
  return static_cast<uint64_t>(failure.chunk & 0xff) << 56 |
         static_cast<uint64_t>(failure.peer & 0xff) << 48 | count(failure.expected) << 24 |
         count(failure.seen);
}

OVERLAP_HOST_DEVICE constexpr WaitFailure unpack(uint64_t packed) {
  constexpr uint64_t kMask = (uint64_t{1} << 24) - 1;
  return {static_cast<int32_t>(packed >> 56), static_cast<int32_t>(packed >> 48 & 0xff),
          static_cast<int32_t>(packed >> 24 & kMask), static_cast<int32_t>(packed & kMask)};
}

struct WaitParams {
  const int32_t* counter = nullptr;
  int32_t expected = 0;
  int64_t deadline_ns = 0;       // how long to wait at most
  int32_t chunk = 0;             // for the report
  WaitReport* report = nullptr;  // pinned host memory mapped into the device
};

// Enqueues a one-warp kernel that ends once *counter >= expected (acquire), or at the deadline,
// with a report.
cudaError_t wait_counter(const WaitParams& params, cudaStream_t stream);

// Enqueues a kernel that zeroes counters, before the GEMM that counts: a memset would not let that in
// before its end.
cudaError_t zero_counters(int32_t* counters, int32_t count, cudaStream_t stream);

// Memory of the current device for as many counters, zero at first.
inline constexpr int32_t kDeviceCounters = 4096;
cudaError_t device_counters(int32_t** counters);

// Enqueues a kernel that holds its stream for `microseconds`: until something else has started, and at
// random in the race tests.
cudaError_t delay(int64_t microseconds, cudaStream_t stream);

// Loads both kernels on the current device, so that neither is loaded while something waits.
cudaError_t load_signal_kernels();

}  // namespace overlap::kernels
