// Signals between GPUs that see each other's memory: sequence numbers that only grow, each in the
// memory of the one that waits for it, written by one peer.
//
// Above the number a flag has bits of the call's plan: a rank that makes another call is waited for in vain,
// and nothing that it stores is taken for what was awaited. Only `ended` has none.
//
// The numbers are made on the device, so that a CUDA graph that is replayed makes new ones: a slot
// of memory counts the calls that have ended in it, and each rank's count of the same slot goes
// through the same values, as all ranks make the same calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/signal/signal.h"
#include "plan/tile_order.h"

namespace overlap::kernels {

inline constexpr uint64_t kPeerSteps = 256;  // of a call, at most

// The number that stands for a step of the call in progress, after `calls` that have ended: more
// than that of any step before.
OVERLAP_HOST_DEVICE constexpr uint64_t peer_step_number(uint64_t calls, int32_t step) {
  return calls * kPeerSteps + static_cast<uint64_t>(step) + 1;
}

inline constexpr int kCallTagShift = 40;

// The bits that stand for a plan, of its hash.
constexpr uint64_t peer_call_tag(uint64_t hash) {
  return hash >> kCallTagShift << kCallTagShift;
}

// Returns true if a flag has reached this number of the same call, or a later one.
OVERLAP_HOST_DEVICE constexpr bool has_reached(uint64_t flag, uint64_t number) {
  return flag >= number && (flag ^ number) >> kCallTagShift == 0;
}

struct PeerSignalParams {
  int32_t count = 0;
  uint64_t* flags[kMaxPeers] = {};  // in the peers' memory
  uint64_t* calls = nullptr;        // own memory: calls that have ended in this slot
  uint64_t tag = 0;                 // of the call, for steps
  int32_t step = 0;
  bool ends_call = false;  // announces, in place of a step, that the call has ended, and counts it
};

// Enqueues a one-warp kernel that announces a step to the peers: everything that the stream did
// before, copies to their memory included, is visible to whoever acquires it. [B]
cudaError_t signal_peers_release_sys(const PeerSignalParams& params, cudaStream_t stream);

// Enqueues a kernel that writes the numbers of the first `count` steps, at most kPeerSteps, of the call in progress.
cudaError_t write_step_numbers(uint64_t* numbers, int32_t count, const uint64_t* calls,
                               uint64_t tag, cudaStream_t stream);

struct PeerWaitParams {
  const uint64_t* flags = nullptr;  // own memory, one for each rank
  uint32_t ranks = 0;               // bit mask of those to wait for
  const uint64_t* calls = nullptr;  // as above
  uint64_t tag = 0;
  int32_t step = 0;
  bool slot_is_free = false;  // waits, in place of a step, until the peers' calls before have ended
  int64_t deadline_ns = 0;
  int32_t chunk = 0;             // for the report
  WaitReport* report = nullptr;  // pinned host memory mapped into the device
};

// Enqueues a one-warp kernel that ends once each of these flags has reached the step's number
// (acquire) [B], or at the deadline, with a report that names the first rank that it missed. The
// report's counts are the low bits of the sequence numbers.
cudaError_t wait_peers_acquire_sys(const PeerWaitParams& params, cudaStream_t stream);

// Flags of single tiles, of those that one rank's GEMM stores into the next rank's memory, and of final
// ones that it stores into everyone's: the call's number (calls that have ended, plus one) and tag.
struct PeerTiles {
  // The flags in each peer's memory, the next rank's first, with the numbers that tiles have on
  // this rank; or null: nothing is announced. The peer `distance` ranks before announces here by
  // its own tile numbers, `distance - 1` times a part's tiles further on.
  uint64_t* announce[kMaxPeers - 1] = {};
  const uint64_t* arrived = nullptr;  // own memory
  const uint64_t* calls = nullptr;    // own memory: calls that have ended in this slot
  uint64_t tag = 0;
  int64_t deadline_ns = 0;
  int32_t rank = 0;
  int32_t ranks = 1;
  WaitReport* report = nullptr;

  OVERLAP_HOST_DEVICE constexpr int32_t before(int32_t distance) const {
    return (rank + ranks - distance) % ranks;
  }
};

// Enqueues a kernel that does for GEMMs that know no flags what they would do: announces `announced`
// tiles from the `first_announced`-th on to the rank that is `distance` behind [B], after what the stream
// did before, and then waits for as many from the `first_awaited`-th on, of the rank that is `distance`
// before, or until the deadline, with a report.
cudaError_t meet_tiles(const PeerTiles& tiles, int64_t first_announced, int64_t announced,
                       int64_t first_awaited, int64_t awaited, int32_t distance,
                       cudaStream_t stream);

// Loads all of these kernels on the current device.
cudaError_t load_peer_signal_kernels();

}  // namespace overlap::kernels
