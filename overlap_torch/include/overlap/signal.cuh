// The functions by which your CUDA kernel signals and awaits the communication of its tiles: see
// overlap_torch.produce and consume.
//
//   const int tile = overlap::tile(tile_order, blockIdx.x);   // in place of the block's number
//   ...
//   overlap::signal(counters, tile_chunk[tile]);              // after the last store of the tile, by all threads
//
// All threads of a block call these functions, at the same place; blocks are one-dimensional or not. Compute capability
// 8.0 or newer, those for bulk copies 9.0. `overlap_torch.include_path()` is the folder to compile with.
#pragma once

#include <cstdint>

namespace overlap {

// As the package's csrc/binding/kernels/kernel_job.h and csrc/runtime/group.h have them.
inline constexpr int kReport = 64;         // in counters: where the host looks for failures
inline constexpr int kDeadline = 66;       // nanoseconds
inline constexpr int32_t kLate = 1 << 30;  // in a flag: a kernel has given up waiting for it
inline constexpr uint64_t kCallersKernel = 254;

__device__ __forceinline__ bool first_thread() {
  return threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
}

// The tile to take as the index-th: its row times the number of columns of tiles, plus its column.
__device__ __forceinline__ int32_t tile(const int32_t* tile_order, int32_t index) {
  return tile_order[index];
}

// [A] One more tile of the chunk has been stored by this block's threads, with plain stores.
__device__ __forceinline__ void signal(int32_t* counters, int32_t chunk) {
  // All threads' stores come before the barrier, and the barrier before the one thread that adds.
  __syncthreads();
  if (first_thread()) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counters + chunk) : "memory");
  }
}

// [A] The same of a tile stored by bulk copies (TMA): each thread that has committed some waits until they are complete.
__device__ __forceinline__ void signal_bulk(int32_t* counters, int32_t chunk) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  signal(counters, chunk);
}

__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ int64_t now_ns() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

// [D] Returns when the chunk has arrived: what is read after it, is what arrived. At the group's deadline it returns all
// the same, and overlap_torch.check() and the next op raise.
__device__ __forceinline__ void wait(int32_t* arrived, int32_t chunk) {
  if (first_thread()) {
    const int32_t* const flag = arrived + chunk;
    const int64_t deadline = *reinterpret_cast<const int64_t*>(arrived + kDeadline);
    const int64_t start = now_ns();
    while (load_acquire(flag) == 0) {
      __nanosleep(100);
      if (now_ns() - start < deadline) continue;
      // One plain store, as host memory may take no atomics. Others that wait for the chunk end, too.
      auto* const report = *reinterpret_cast<uint64_t**>(arrived + kReport);
      const uint64_t failure =
          (static_cast<uint64_t>(chunk) << 8 | kCallersKernel) << 48 | 1ull << 24;
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(report), "l"(failure) : "memory");
      atomicOr(arrived + chunk, kLate);
    }
  }
  __syncthreads();
}

// [D] The same before bulk copies (TMA) of what arrived.
__device__ __forceinline__ void wait_bulk(int32_t* arrived, int32_t chunk) {
  wait(arrived, chunk);
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace overlap
