// Signals between GPUs that see each other's memory: sequence numbers that only grow, each in the
// memory of the one that waits for it, written by one peer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/signal.h"

namespace overlap::kernels {

inline constexpr int kMaxPeers = 8;

struct PeerSignalParams {
  int32_t count = 0;
  uint64_t* flags[kMaxPeers] = {};  // in the peers' memory
  uint64_t value = 0;
};

// Enqueues a one-warp kernel that announces `value` to the peers: everything that the stream did
// before, copies to their memory included, is visible to whoever acquires it. [B]
cudaError_t signal_peers_release_sys(const PeerSignalParams& params, cudaStream_t stream);

struct PeerWaitParams {
  const uint64_t* flags = nullptr;  // own memory, one for each rank
  uint32_t ranks = 0;               // bit mask of those to wait for
  uint64_t value = 0;
  int64_t deadline_ns = 0;
  int32_t chunk = 0;             // for the report
  WaitReport* report = nullptr;  // pinned host memory mapped into the device
};

// Enqueues a one-warp kernel that ends once each of these flags is at least `value` (acquire) [B], or
// at the deadline, with a report that names the first rank that it missed. The report's counts are
// the low bits of the sequence numbers.
cudaError_t wait_peers_acquire_sys(const PeerWaitParams& params, cudaStream_t stream);

// Loads both kernels on the current device.
cudaError_t load_peer_signal_kernels();

}  // namespace overlap::kernels
