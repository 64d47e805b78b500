// The messages of an all-to-all in one launch: each part of the rows goes to its rank, and is announced as a whole.
#pragma once

#include "kernels/gemm/gemm_sm90_peers_params.h"

namespace overlap::kernels {

template <class Types>
struct GemmSm90Messages {
  using RunCopier = typename Types::RunCopier;
  using SharedStorage = typename Types::SharedStorage;
  using Step = typename Types::Step;

  // The peers' messages, once each has been announced: of every one as many pieces as other CTAs copy.
  template <class Params>
  CUTLASS_DEVICE static void receive(const Params& params, SharedStorage& shared) {
    const PeerMeeting& meeting = params.messages.meeting;
    const uint64_t number = meeting.tag + *meeting.calls + 1;
    const RunRoute route;
    RunCopier copier(route, shared.run_copier);
    for (int32_t distance = 1; distance < meeting.ranks; ++distance) {
      const int32_t peer = (meeting.rank + meeting.ranks - distance) % meeting.ranks;
      const CopyRun& message = params.messages.received[peer];
      // An empty one is waited for, too: that the peer has come to this call lets the next one use its slot.
      if (message.bytes == 0 && blockIdx.x == 0) wait_for_block(meeting, peer, number);
      copy_runs(&message, 1, blockIdx.x, gridDim.x, copier, [&](int32_t) {
        wait_for_block(meeting, peer, number);
        fence_bulk_copies();  // which see what the flag acquired, too
      });
    }
    copier.finish();
  }

  // A message, with its last tile.
  template <class Params>
  CUTLASS_DEVICE static void count(const Params& params, const Step& step,
                                   const plan::TileRowPlace& place) {
    wait_bulk_stores_complete();
    __syncwarp();
    const PeerMeeting& meeting = params.messages.meeting;
    if (cutlass::canonical_lane_idx() == 0 && place.output_part != meeting.rank) {
      const int32_t chunk = plan::tile_chunk(params.order, step.index);
      // The flag also releases what other CTAs stored and released here.
      const int32_t before = add_acq_rel_gpu(params.messages.stored + chunk, 1);
      if (before + 1 == plan::chunk_tiles(params.order, chunk)) {
        announce(meeting, place.output_part);
      }
    }
    __syncwarp();
  }
  CUTLASS_DEVICE static void announce(const PeerMeeting& meeting, int32_t peer) {
    store_release_sys(meeting.announce[0][peer], meeting.tag + *meeting.calls + 1);  // [B]
  }

  // Messages without rows have no last tile. One thread of the grid announces them.
  template <class Params>
  CUTLASS_DEVICE static void announce_empty(const Params& params) {
    const PeerMeeting& meeting = params.messages.meeting;
    for (int32_t chunk = 0; chunk < params.order.num_chunks; ++chunk) {
      const int32_t peer =
          (params.rows.first_part + chunk * params.rows.part_step) % params.order.parts;
      if (peer != meeting.rank && plan::chunk_tiles(params.order, chunk) == 0) {
        announce(meeting, peer);
      }
    }
  }
};

}  // namespace overlap::kernels
