// The common parts of the kernels that move data between peers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "kernels/gemm/early_launch.cuh"
#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_spin.cuh"

namespace overlap::kernels {

inline constexpr int kThreads = 512;
inline constexpr int kBatch = 4;  // loads of a thread that are in flight at a time

// About one on each SM: blocks that wait for each other have to be there together.
inline constexpr int kMaxCollectiveBlocks = kMaxPeerBlocks / 2;
inline constexpr int kHotPolls = 64;  // without a pause: what is waited for is on its way

// Past L1: another device wrote it.
__device__ __forceinline__ uint4 load_access(const void* base, int64_t index) {
  return __ldcg(static_cast<const uint4*>(base) + index);
}

// The same bits as another type.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

__device__ __forceinline__ void store_access(void* base, int64_t index, uint4 value) {
  static_cast<uint4*>(base)[index] = value;
}

// Calls `body(first, step)` for kBatch indices at a time, `step` apart, of those that this thread has
// of `count`.
template <class Body>
__device__ __forceinline__ void for_each_batch(int64_t count, Body body) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < count;
       first += kBatch * step) {
    body(first, step);
  }
}

__device__ __forceinline__ void copy_accesses(void* destination, const void* source,
                                              int64_t count) {
  for_each_batch(count, [&](int64_t first, int64_t step) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < count) values[i] = load_access(source, first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < count) store_access(destination, first + i * step, values[i]);
    }
  });
}

// Waits, as one thread, until the flag has reached this value.
__device__ __forceinline__ void wait_for_flag(const uint64_t* flag, uint64_t value, int32_t peer,
                                              const PeerMeeting& meeting) {
  uint64_t seen = 0;
  const auto reached = [&] {
    seen = load_acquire_sys(flag);  // [B]
    return has_reached(seen, value);
  };
  for (int poll = 0; poll < kHotPolls; ++poll) {
    if (reached()) return;
  }
  spin(meeting.deadline_ns, meeting.report, reached,
       [&] { write_report(meeting.report, missed_peer(meeting.chunk, peer, value, seen)); });
}

// Returns true in the last block that arrives here, after its threads' work. The count lies in
// own memory, which is zero before and after.
__device__ __forceinline__ bool last_to_come(uint32_t* count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(count, 1) + 1 == gridDim.x;
    if (last) *count = 0;
  }
  __syncthreads();
  return last;
}

// The last block announces that the call has ended, and counts it.
__device__ __forceinline__ void end_call(const PeerMeeting& meeting, uint64_t calls) {
  let_next_kernel_in();  // nothing is awaited any more
  if (!last_to_come(meeting.blocks_done)) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread >= meeting.ranks) return;
  if (thread == meeting.rank) {
    *meeting.calls = calls + 1;
  } else {
    __threadfence_system();
    store_relaxed_sys(meeting.announce_end[thread], calls + 1);  // [B]
  }
}

// A power of two, so that blocks can count a call in equal shares.
inline int blocks_for(int64_t threads_wanted, int most) {
  int blocks = 1;
  while (blocks < most && blocks * int64_t{kThreads} < threads_wanted) blocks *= 2;
  return blocks;
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), int blocks, const Params& params, cudaStream_t stream) {
  return launch_early(kernel, blocks, kThreads, stream, params);
}

}  // namespace overlap::kernels
