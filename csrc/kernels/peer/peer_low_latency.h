// All-reduces of few rows over memory that the ranks map into each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "plan/gemm_types.h"
#include "plan/low_latency.h"

namespace overlap::kernels {

inline constexpr int64_t kRunRoom = 4 * 128;  // the memory that a run takes

// The memory that a low-latency message of this many bytes takes.
constexpr int64_t low_latency_bytes(int64_t bytes) {
  return plan::low_latency_runs(bytes) * kRunRoom;
}

// Where the ranks' lines travel, and how a call on them is told from others. Two buffers are used in turns, without any
// word on when one is free: whoever begins a call has the data of the call before, so that its peers have ended the one
// before that.
struct LinePeers {
  int32_t rank = 0;
  int32_t ranks = 1;
  void* destination[kMaxPeers] = {};     // this rank's place in the peers' memory
  const void* received[kMaxPeers] = {};  // the peers' places in own memory
  int64_t buffer_bytes = 0;              // of a place's two buffers: each holds a peer's message
  bool whole_lines = false;   // the links keep 128 bytes together that a warp stores at a time
  uint64_t* calls = nullptr;  // own memory: these calls, each counted kMaxPeerBlocks times
  // Flags for two calls by turns, of this rank in the peers' memory, and of each rank in this rank's own: the data do
  // not say which call they are of.
  uint64_t* announce[kMaxPeers] = {};
  const uint64_t* arrived = nullptr;  // kMaxPeers for each of the two
  uint64_t tag = 0;
  int64_t deadline_ns = 0;
  int32_t chunk = 0;
  WaitReport* report = nullptr;
};

// An all-reduce whose data are their own signal: each line travels with the call's number, so that nothing is fenced or
// announced. In one step, all to all, or in pieces: each rank adds up one of them and sends the sums to all.
struct PeerLowLatencyParams : LinePeers {
  plan::DType dtype = plan::DType::kBFloat16;
  bool in_pieces = false;
  bool by_pairs = false;      // terms of 16 bits are added by pairs (pair_sum.cuh)
  int64_t words = 0;          // of 4 bytes
  const void* own = nullptr;  // this rank's term
  void* output = nullptr;     // may be `own`
  const void* bias = nullptr;
  int64_t row_words = 0;
};

cudaError_t peer_all_reduce_low_latency(const PeerLowLatencyParams& params, cudaStream_t stream);

// Loads these kernels on the current device.
cudaError_t load_peer_low_latency_kernels();

}  // namespace overlap::kernels
