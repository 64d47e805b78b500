// Flags of peers, as kernels see them.
#pragma once

#include <cstdint>

#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_signal.h"
#include "kernels/signal/spin.cuh"

namespace overlap::kernels {

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ WaitFailure missed_peer(int32_t chunk, int32_t peer, uint64_t expected,
                                                   uint64_t seen) {
  constexpr uint64_t kLowBits = 0xffffff;
  return {chunk, peer, static_cast<int32_t>(expected & kLowBits),
          static_cast<int32_t>(seen & kLowBits)};
}

// The number that the flags of the call's tiles reach.
__device__ __forceinline__ uint64_t tile_number(const PeerTiles& tiles) {
  return tiles.tag + *tiles.calls + 1;
}

// Until the flags of all these ranks have reached `value`; or the deadline, with a report on `chunk`.
__device__ __forceinline__ void wait_for_peers(const PeerWaitParams& params, uint64_t value,
                                               int32_t chunk) {
  int32_t peer = 0;
  uint64_t seen = 0;
  spin(
      params.deadline_ns, params.report,
      [&] {
        for (; peer < kMaxPeers; ++peer) {
          if ((params.ranks >> peer & 1) == 0) continue;
          seen = load_acquire_sys(params.flags + peer);  // [B]
          if (!has_reached(seen, value)) return false;
        }
        return true;
      },
      [&] { write_report(params.report, missed_peer(chunk, peer, value, seen)); });
}

// Until this tile has been announced, by the rank that is `distance` before; or the deadline, with a report.
__device__ __forceinline__ void wait_for_tile(const PeerTiles& tiles, int64_t tile, uint64_t number,
                                              int32_t distance = 1) {
  uint64_t seen = 0;
  spin(
      tiles.deadline_ns, tiles.report,
      [&] {
        seen = load_acquire_sys(tiles.arrived + tile);  // [B]
        return has_reached(seen, number);
      },
      [&] { write_report(tiles.report, missed_peer(0, tiles.before(distance), number, seen)); });
}

// Until this rank has announced the first step of a meeting, by its first block; or the deadline, with a report.
__device__ __forceinline__ void wait_for_block(const PeerMeeting& meeting, int32_t peer,
                                               uint64_t number) {
  uint64_t seen = 0;
  spin(
      meeting.deadline_ns, meeting.report,
      [&] {
        seen = load_acquire_sys(meeting.arrived[0] + peer * kMaxPeerBlocks);  // [B]
        return has_reached(seen, number);
      },
      [&] { write_report(meeting.report, missed_peer(meeting.chunk, peer, number, seen)); });
}

}  // namespace overlap::kernels
