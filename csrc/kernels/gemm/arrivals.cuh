// Rows that peers send while a kernel works on those that are there.
#pragma once

#include <cstdint>

#include "kernels/peer/peer_signal.h"
#include "kernels/peer/peer_spin.cuh"

namespace overlap::kernels {

// Chunks of rows that peers send, awaited in order. All that was acquired, bulk loads see, too.
class Arrivals {
 public:
  __device__ __forceinline__ explicit Arrivals(const PeerWaitParams& params) : params_(params) {}
  // By one thread.
  __device__ __forceinline__ void await(int32_t chunk) {
    if (is_there(chunk)) return;
    wait(chunk);
    fence_bulk_copies();
  }
  // By a whole warp.
  __device__ __forceinline__ void await_by_warp(int32_t chunk) {
    if (is_there(chunk)) return;
    if (threadIdx.x % kWarpThreads == 0) wait(chunk);
    __syncwarp();
    fence_bulk_copies();
  }

 private:
  static constexpr int kWarpThreads = 32;
  __device__ __forceinline__ bool is_there(int32_t chunk) {
    if (params_.flags == nullptr || chunk <= there_) return true;
    there_ = chunk;
    return false;
  }
  __device__ __forceinline__ void wait(int32_t chunk) const {
    wait_for_peers(params_,
                   params_.tag + peer_step_number(*params_.calls, params_.step + chunk - 1),
                   chunk - 1);
  }

  const PeerWaitParams& params_;
  int32_t there_ = 0;
};

}  // namespace overlap::kernels
