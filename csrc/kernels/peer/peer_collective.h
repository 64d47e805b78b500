// Whole collectives in one kernel each, over memory that the ranks map into each other: for messages
// so small that starting a library's collective, or several kernels, would take longer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "plan/gemm_types.h"

namespace overlap::kernels {

inline constexpr int kPeerAccessBytes = 16;  // what is moved is counted in these
inline constexpr int kMaxPeerBlocks = 256;   // CTAs of a collective, and flags of each rank for it

// Where the blocks of a kernel meet those of the peers', and what ends the call whose slot it uses.
struct PeerMeeting {
  int32_t rank = 0;
  int32_t ranks = 1;
  // kMaxPeerBlocks flags of this rank in the peers' memory, and those of each rank in this rank's own, for
  // each of two steps.
  uint64_t* announce[2][kMaxPeers] = {};
  const uint64_t* arrived[2] = {};
  const uint64_t* ended = nullptr;  // one of each rank: the calls that it has ended in this slot
  uint64_t* announce_end[kMaxPeers] = {};  // this rank's, in the peers' memory
  uint64_t* calls = nullptr;               // own memory: calls that have ended in this slot
  uint64_t tag = 0;                        // of the call, in what blocks announce
  uint32_t* blocks_sent = nullptr;         // own memory, zero before and after, as the next
  uint32_t* blocks_done = nullptr;
  int64_t deadline_ns = 0;
  int32_t chunk = 0;
  WaitReport* report = nullptr;
};

// A collective of a call that has a slot, in up to three steps:
//   send     this rank's terms, or its piece, into the peers' memory, unless the kernel before did it
//   reduce   own piece = the sum of all ranks' terms (+ bias)
//   gather   output = the pieces of all ranks; a reduced one goes to the peers as it is made
// Each block of the kernel does its share of a step, announces it by a flag of its own, and waits for
// the same block of every peer.
struct PeerCollectiveParams : PeerMeeting {
  plan::DType dtype = plan::DType::kBFloat16;
  bool reduces = false;
  bool gathers = false;
  bool by_pairs = false;  // terms of 16 bits are added by pairs (pair_sum.cuh)

  // In accesses of 16 bytes: the piece of each rank, and the distance between pieces in the output.
  int64_t count[kMaxPeers] = {};
  int64_t stride = 0;
  // Own terms for this rank's own piece, or this rank's own piece.
  const void* own = nullptr;
  void* output = nullptr;      // gathers: all pieces; else the rank's own; may be where `own` is
  const void* bias = nullptr;  // added to what is reduced, in rows of row_count accesses; or null
  int64_t row_count = 0;
  int64_t first = 0;  // where this rank's own piece begins in rows

  // The data for each peer, and its place in the peer's memory. Null: it has been stored there before, on the
  // same stream.
  const void* send[kMaxPeers] = {};
  void* destination[kMaxPeers] = {};
  const void* received[kMaxPeers] = {};  // where theirs arrives, in own memory
  // Where reduced pieces that are gathered go in the peers' memory, and arrive in this rank's own.
  void* final_destination[kMaxPeers] = {};
  const void* final_received[kMaxPeers] = {};
};

// Enqueues the collective, which ends the call. Sums are taken in fp32 in the ranks' order and rounded
// once, so that all ranks get the same bits; a bias is added after the rounding. bf16, fp16, fp32.
cudaError_t peer_collective(const PeerCollectiveParams& params, cudaStream_t stream);

// Loads all of these kernels on the current device.
cudaError_t load_peer_collective_kernels();

}  // namespace overlap::kernels
