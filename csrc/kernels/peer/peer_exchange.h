// Rows of any number between each pair of ranks, over memory that they map into each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/peer/peer_collective.h"

namespace overlap::kernels {

// Three steps, of which each rank does what it has to:
//   send     a message into each peer's memory, unless kernels before stored it there
//   keep     this rank's own message into its place
//   receive  each peer's message, from this rank's own memory into its place
// The ranks' kernels differ in blocks and in how they send: a rank announces once, by the first of its
// block flags, that all it has for a peer is there.
struct PeerExchangeParams : PeerMeeting {
  bool sends = false;  // else everything has been stored before, on the same stream

  // In accesses of 16 bytes; this rank's own message is send[rank], to output[rank], or empty.
  int64_t send_count[kMaxPeers] = {};
  const void* send[kMaxPeers] = {};
  void* destination[kMaxPeers] = {};  // in the peers' memory
  int64_t receive_count[kMaxPeers] = {};
  const void* received[kMaxPeers] = {};  // in own memory
  void* output[kMaxPeers] = {};
};

// Enqueues the exchange, which ends the call.
cudaError_t peer_exchange(const PeerExchangeParams& params, cudaStream_t stream);

// Loads the kernel on the current device.
cudaError_t load_peer_exchange_kernel();

}  // namespace overlap::kernels
