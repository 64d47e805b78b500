#include "kernels/peer/peer_exchange.h"

#include <algorithm>

#include "kernels/peer/peer_block.cuh"

namespace overlap::kernels {
namespace {

__device__ __forceinline__ void send(const PeerExchangeParams& params, uint64_t calls) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  // The peers have read what the call before left where this one writes.
  if (thread < params.ranks && thread != params.rank) {
    wait_for_flag(params.ended + thread, calls, thread, params);
  }
  __syncthreads();
  for (int distance = 1; distance < params.ranks; ++distance) {
    const int peer = (params.rank + distance) % params.ranks;
    copy_accesses(params.destination[peer], params.send[peer], params.send_count[peer]);
  }
}

// To all peers, by one block.
__device__ __forceinline__ void announce(const PeerExchangeParams& params, uint64_t calls) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < params.ranks && thread != params.rank) {
    __threadfence_system();
    store_relaxed_sys(params.announce[0][thread], params.tag + calls + 1);  // [B]
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    peer_exchange_kernel(const __grid_constant__ PeerExchangeParams params) {
  wait_for_previous_kernel();
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const uint64_t calls = *params.calls;
  if (params.sends) {
    send(params, calls);
    if (last_to_come(params.blocks_sent)) announce(params, calls);
  } else if (blockIdx.x == 0) {
    announce(params, calls);
  }
  copy_accesses(params.output[params.rank], params.send[params.rank],
                params.send_count[params.rank]);
  if (thread < params.ranks && thread != params.rank) {
    wait_for_flag(params.arrived[0] + thread * kMaxPeerBlocks, params.tag + calls + 1, thread,
                  params);
  }
  __syncthreads();
  for (int distance = 1; distance < params.ranks; ++distance) {
    const int peer = (params.rank + params.ranks - distance) % params.ranks;
    copy_accesses(params.output[peer], params.received[peer], params.receive_count[peer]);
  }
  end_call(params, calls);
}

}  // namespace

cudaError_t peer_exchange(const PeerExchangeParams& params, cudaStream_t stream) {
  int64_t most = 1;
  for (int rank = 0; rank < params.ranks; ++rank) {
    if (params.sends || rank == params.rank) most = std::max(most, params.send_count[rank]);
    most = std::max(most, params.receive_count[rank]);
  }
  return launch(peer_exchange_kernel, blocks_for(most, kMaxCollectiveBlocks), params, stream);
}

cudaError_t load_peer_exchange_kernel() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  return cudaFuncGetAttributes(&attributes, peer_exchange_kernel);
}

}  // namespace overlap::kernels
