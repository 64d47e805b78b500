// All-reduces of few rows over memory that the ranks map into each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/peer_signal.h"
#include "kernels/signal.h"
#include "plan/gemm_types.h"

namespace overlap::kernels {

// What a low-latency message of so many bytes takes in memory: 12 of 16 bytes are data.
constexpr int64_t low_latency_bytes(int64_t bytes) {
  return (bytes + 11) / 12 * 16;
}

// An all-reduce whose data are their own signal: 12 bytes at a time travel with the call's number,
// so that nothing is fenced or announced.
struct PeerLowLatencyParams {
  plan::DType dtype = plan::DType::kBFloat16;
  int32_t rank = 0;
  int32_t ranks = 1;
  int64_t words = 0;          // of 4 bytes
  const void* own = nullptr;  // this rank's term
  void* output = nullptr;     // may be `own`
  const void* bias = nullptr;
  int64_t row_words = 0;
  void* destination[kMaxPeers] = {};     // this rank's place in the peers' memory
  const void* received[kMaxPeers] = {};  // the peers' places in own memory
  int64_t buffer_bytes = 0;              // of a place's two buffers, used in turns
  uint64_t* calls = nullptr;  // own memory: these calls, each counted kMaxPeerBlocks times
  int64_t deadline_ns = 0;
  int32_t chunk = 0;
  WaitReport* report = nullptr;
};

// Enqueues it. Two buffers are enough without any word on when one is free: whoever begins a call
// has the data of the call before, so that its peers have ended the one before that.
cudaError_t peer_all_reduce_low_latency(const PeerLowLatencyParams& params, cudaStream_t stream);

// Loads these kernels on the current device.
cudaError_t load_peer_low_latency_kernels();

}  // namespace overlap::kernels
