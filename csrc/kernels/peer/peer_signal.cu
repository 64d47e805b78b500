#include "kernels/peer/peer_signal.h"

#include "kernels/peer/peer_spin.cuh"

namespace overlap::kernels {
namespace {

constexpr int kTileThreads = 256;

// By a whole warp. Each lane releases for itself, and the warp's fences are one instruction.
__device__ __forceinline__ void signal_peers(const PeerSignalParams& params, uint64_t calls,
                                             int32_t step) {
  const int lane = static_cast<int>(threadIdx.x);
  __threadfence_system();
  if (lane < params.count) {
    store_relaxed_sys(params.flags[lane], params.ends_call
                                              ? calls + 1
                                              : params.tag + peer_step_number(calls, step));  // [B]
  }
  __syncwarp();
  if (params.ends_call && lane == 0) *params.calls = calls + 1;
}

// By one lane: many pollers would slow the GEMM down.
__device__ __forceinline__ void wait_peers(const PeerWaitParams& params, uint64_t calls) {
  const uint64_t value =
      params.slot_is_free ? calls : params.tag + peer_step_number(calls, params.step);
  wait_for_peers(params, value, params.chunk);
  if (params.report != nullptr) {
    store_relaxed_sys(&params.report->reached, params.chunk);
  }
}

__global__ void signal_peers_kernel(const __grid_constant__ PeerSignalParams params) {
  signal_peers(params, *params.calls, params.step);
}

__global__ void wait_peers_kernel(const __grid_constant__ PeerWaitParams params) {
  if (threadIdx.x == 0) wait_peers(params, *params.calls);
}

__global__ void step_numbers_kernel(uint64_t* numbers, int32_t count, const uint64_t* calls,
                                    uint64_t tag) {
  const int step = static_cast<int>(threadIdx.x);
  if (step < count) numbers[step] = tag + peer_step_number(*calls, step);
}

__global__ void meet_tiles_kernel(const __grid_constant__ PeerTiles tiles, int64_t first_announced,
                                  int64_t announced, int64_t first_awaited, int64_t awaited,
                                  int32_t distance) {
  const uint64_t number = tile_number(tiles);
  __threadfence_system();
  uint64_t* const flags = tiles.announce[distance - 1];
  for (int64_t i = threadIdx.x; i < announced; i += blockDim.x) {
    store_relaxed_sys(flags + first_announced + i, number);  // [B]
  }
  for (int64_t i = threadIdx.x; i < awaited; i += blockDim.x) {
    wait_for_tile(tiles, first_awaited + i, number, distance);
  }
}

}  // namespace

cudaError_t signal_peers_release_sys(const PeerSignalParams& params, cudaStream_t stream) {
  PeerSignalParams kernel_params = params;
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(signal_peers_kernel, dim3(1), dim3(32), arguments, 0, stream);
}

cudaError_t write_step_numbers(uint64_t* numbers, int32_t count, const uint64_t* calls,
                               uint64_t tag, cudaStream_t stream) {
  void* arguments[] = {&numbers, &count, &calls, &tag};
  return cudaLaunchKernel(step_numbers_kernel, dim3(1), dim3(kPeerSteps), arguments, 0, stream);
}

cudaError_t wait_peers_acquire_sys(const PeerWaitParams& params, cudaStream_t stream) {
  PeerWaitParams kernel_params = params;
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(wait_peers_kernel, dim3(1), dim3(32), arguments, 0, stream);
}

cudaError_t meet_tiles(const PeerTiles& tiles, int64_t first_announced, int64_t announced,
                       int64_t first_awaited, int64_t awaited, int32_t distance,
                       cudaStream_t stream) {
  PeerTiles params = tiles;
  void* arguments[] = {&params, &first_announced, &announced, &first_awaited, &awaited, &distance};
  return cudaLaunchKernel(meet_tiles_kernel, dim3(1), dim3(kTileThreads), arguments, 0, stream);
}

cudaError_t load_peer_signal_kernels() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const cudaError_t error : {cudaFuncGetAttributes(&attributes, signal_peers_kernel),
                                  cudaFuncGetAttributes(&attributes, wait_peers_kernel),
                                  cudaFuncGetAttributes(&attributes, step_numbers_kernel),
                                  cudaFuncGetAttributes(&attributes, meet_tiles_kernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
