#include "kernels/peer_signal.h"

#include "kernels/peer_spin.cuh"

namespace overlap::kernels {
namespace {

// Each lane releases for itself, and the warp's fences are one instruction.
__global__ void signal_peers_kernel(const __grid_constant__ PeerSignalParams params) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint64_t calls = *params.calls;
  __threadfence_system();
  if (lane < params.count) {
    store_relaxed_sys(params.flags[lane],
                      params.ends_call ? calls + 1 : peer_step_number(calls, params.step));  // [B]
  }
  __syncwarp();
  if (params.ends_call && lane == 0) *params.calls = calls + 1;
}

__global__ void wait_peers_kernel(const __grid_constant__ PeerWaitParams params) {
  if (threadIdx.x != 0) return;
  const uint64_t calls = *params.calls;
  const uint64_t value = params.slot_is_free ? calls : peer_step_number(calls, params.step);
  int32_t peer = 0;
  uint64_t seen = 0;
  spin(
      params.deadline_ns, params.report,
      [&] {
        for (; peer < kMaxPeers; ++peer) {
          if ((params.ranks >> peer & 1) == 0) continue;
          seen = load_acquire_sys(params.flags + peer);  // [B]
          if (seen < value) return false;
        }
        return true;
      },
      [&] { write_report(params.report, missed_peer(params.chunk, peer, value, seen)); });
  if (params.report != nullptr) {
    store_relaxed_sys(&params.report->reached, params.chunk);
  }
}

}  // namespace

cudaError_t signal_peers_release_sys(const PeerSignalParams& params, cudaStream_t stream) {
  PeerSignalParams kernel_params = params;
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(signal_peers_kernel, dim3(1), dim3(32), arguments, 0, stream);
}

cudaError_t wait_peers_acquire_sys(const PeerWaitParams& params, cudaStream_t stream) {
  PeerWaitParams kernel_params = params;
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(wait_peers_kernel, dim3(1), dim3(32), arguments, 0, stream);
}

cudaError_t load_peer_signal_kernels() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  const cudaError_t error = cudaFuncGetAttributes(&attributes, signal_peers_kernel);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, wait_peers_kernel);
}

}  // namespace overlap::kernels
