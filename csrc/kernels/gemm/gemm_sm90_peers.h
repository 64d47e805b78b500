// The Hopper GEMM whose tiles go to peers' memory, and come from there. As these GEMMs wait for one another, a warp
// hands the tiles out, instead of every CTA owning a share. In one launch, any of
//   sources    a warp loads what a peer has stored here, tile by tile, and the teams add it before they store
//   terms      the teams load what all peers have stored here of a tile, and add it up in the ranks' order
//   mirrors    a tile is stored in several places
//   outputs    each part of the rows goes to a place of its own; of any number of rows: messages, announced as a
//              whole by whoever stores the last tile
//   collected  what peers have stored here is copied to where it belongs, by warps that have time
#pragma once

#include "kernels/gemm/gemm_sm90_messages.h"
#include "kernels/gemm/gemm_sm90_peers_params.h"

namespace overlap::kernels {

template <plan::Kernel kKernel, class Operands>
struct GemmSm90Peers : GemmSm90Body<GemmSm90Types<kKernel, Operands, true>> {
  using Types = GemmSm90Types<kKernel, Operands, true>;
  using Body = GemmSm90Body<Types>;
  using typename Types::Collected;
  using typename Types::Copier;
  using typename Types::Epilogue;
  using typename Types::LoadPipeline;
  using typename Types::Mainloop;
  using typename Types::RunCopier;
  using typename Types::SharedStorage;
  using typename Types::Step;
  using typename Types::TileShape;
  using Types::kClusterM;
  using Types::kTeams;
  using Types::kTeamThreads;
  using Types::kTileM;

  using Messages = GemmSm90Messages<Types>;
  using Params = GemmSm90PeersParams<Types>;

  // --- the tiles, as they are handed out ---

  CUTLASS_DEVICE static void feed(const Params& params, SharedStorage& shared, int32_t first) {
    TileFeed::feed(
        shared.feed, first, params.ending.tiles_taken, kClusterM, params.order.num_tiles(), kTeams,
        [&](int32_t index) {
          return params.has_source(params.place(plan::tile_coord(params.order, index).row));
        });
  }

  class Tiles {
   public:
    CUTLASS_DEVICE Tiles(const Params& params, SharedStorage& shared, int turn, int step,
                         bool begins = false)
        : order_(params.order), reader_(shared.feed, turn, step, begins) {}
    CUTLASS_DEVICE bool next(Step& step) {
      const TileFeed::Entry entry = reader_.next();
      if (entry.index == TileFeed::kEnd) return false;
      const int32_t index = entry.index + static_cast<int32_t>(cute::block_rank_in_cluster());
      step = {index, plan::tile_coord(order_, index), entry.sources};
      return true;
    }

   private:
    const plan::TileOrder& order_;
    TileFeed::Reader reader_;
  };

  // Reads what is fed for the warp that loads.
  CUTLASS_DEVICE static void place_ahead(const Params& params, SharedStorage& shared) {
    Tiles tiles(params, shared, 0, 1, true);
    uint32_t turn = 0;
    for (Step step; tiles.next(step); ++turn) {
      TileFeed::put_ahead(shared.feed, turn,
                          {params.place(step.coord.row).input_row, step.coord.column});
    }
    TileFeed::put_ahead(shared.feed, turn, {TileFeed::kEnd, 0});
  }

  class Places {
   public:
    using Place = TileFeed::Place;
    CUTLASS_DEVICE explicit Places(SharedStorage& shared) : shared_(shared) {}
    CUTLASS_DEVICE bool next(Place& place) {
      place = TileFeed::take_ahead(shared_.feed, turn_++);
      return place.row != TileFeed::kEnd;
    }

   private:
    SharedStorage& shared_;
    uint32_t turn_ = 0;
  };

  // --- what comes in ---

  CUTLASS_DEVICE static void produce(const Params& params, SharedStorage& shared,
                                     typename Types::MainloopPipeline& pipeline) {
    Places places(shared);
    Body::load(
        params, shared, pipeline, places,
        [&](const TileFeed::Place& place) {
          return Body::loaded_row(params, place.row, cute::get<0>(params.gemm_shape));
        },
        [&](const TileFeed::Place&) -> const typename Mainloop::Params& {
          return params.mainloop;
        });
  }

  // The sources' tiles, in the order in which the teams store theirs.
  CUTLASS_DEVICE static void produce_sources(const Params& params, SharedStorage& shared,
                                             LoadPipeline& pipeline) {
    typename Types::TiledMma tiled_mma;
    const int lane = cutlass::canonical_lane_idx();
    const bool awaits = params.tiles.announce[0] != nullptr;
    const uint64_t number = awaits ? tile_number(params.tiles) : 0;
    auto state = cutlass::make_producer_start_state<LoadPipeline>();
    Tiles tiles(params, shared, 0, 1);
    for (Step step; tiles.next(step);) {
      const plan::TileRowPlace place = params.place(step.coord.row);
      if (!params.has_source(place)) continue;
      if (awaits) {
        if (lane == 0) {
          wait_for_tile(params.tiles, params.flag(step.coord) - params.part_tiles(), number);
        }
        __syncwarp();
        fence_bulk_copies();  // which see what the flag acquired, too
      }
      Epilogue epilogue(params.epilogue[params.output(place)], shared.tensors.epilogue);
      state = epilogue.load(pipeline, state, params.store_shape, TileShape{},
                            cute::make_coord(place.output_row, step.coord.column, cute::_, 0),
                            tiled_mma, lane, shared.tensors.epilogue);
    }
    Epilogue(params.epilogue[0], shared.tensors.epilogue).load_tail(pipeline, state);
  }

  // The peers' final tiles, in the order in which all make theirs: of those, every grid-th cluster tile is
  // this cluster's. One thread of its second CTA takes them all but, so that the last ones are not waited for
  // twice as long, one of the last two: that is the first CTA's, whose thread has loaded sources until then.
  // No GEMM waits for this.
  CUTLASS_DEVICE static void collect(const Params& params, SharedStorage& shared) {
    static_assert(kClusterM == 2);
    const auto cta = static_cast<int32_t>(cute::block_rank_in_cluster());
    const auto grid = static_cast<int32_t>(gridDim.x);
    const int32_t end = params.part_tiles();
    const int32_t parts = params.order.parts;
    Copier copier(params.collected, shared.copier);
    for (int32_t first = static_cast<int32_t>(blockIdx.x) - cta; first < end; first += grid) {
      const bool last = first + grid >= end;
      if (cta == 0 && !last) continue;
      for (int32_t row = last ? cta : 0; row <= cta; ++row) {
        const plan::TileCoord tile = params.final_tile(first + row);
        for (int32_t distance = 1; distance < parts; ++distance) {
          collect_tile(params, tile, distance, copier);
        }
      }
    }
    copier.finish();
  }

  // Collects from the rank that is `distance` before this one.
  CUTLASS_DEVICE static void collect_tile(const Params& params, const plan::TileCoord& tile,
                                          int32_t distance, Copier& copier) {
    const int32_t phase = params.order.parts - 1;
    wait_for_tile(
        params.tiles,
        params.flag({phase, tile.row}, tile.column) + (distance - 1) * params.part_tiles(),
        tile_number(params.tiles), distance);
    fence_bulk_copies();  // which see what the flag acquired, too
    const int32_t begin = tile.row * kTileM;
    const int32_t end = min(begin + kTileM, params.collected.rows);
    for (int32_t at = begin; at < end; at += Collected::kRows) {
      copier.copy({at, tile.column * Types::kTileN, params.tiles.before(distance)});
    }
  }

  template <class Sums>
  CUTLASS_DEVICE static void finish_sums(const Params& params, const Step& step,
                                         const plan::TileRowPlace& place, Sums& sums, int thread) {
    if (params.rounds && params.has_source(place)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(sums); ++i) {
        sums(i) = static_cast<float>(static_cast<typename Types::Output>(sums(i)));
      }
    }
    if constexpr (!Types::kWide) {
      if (params.adds_terms() && params.is_final(step.coord.row)) {
        add_peer_terms<Types>(params, step, place, sums, thread);
      }
    }
  }

  // --- what goes out: by the warp that issued a tile's bulk stores ---

  // To the rank that adds to this tile or adds it, or, of a final one, to all peers.
  CUTLASS_DEVICE static void announce_tile(const Params& params, const Step& step) {
    wait_bulk_stores_complete();
    __syncwarp();
    const PeerTiles& tiles = params.tiles;
    const int lane = cutlass::canonical_lane_idx();
    const int last = params.order.parts - 1;
    int first = 0;
    int end = last;
    int32_t flag = params.flag(step.coord);
    if (!params.is_final(step.coord.row)) {
      if (params.adds_terms()) {  // the part's owner is this number of ranks before
        first = last - 1 - plan::split_row(params.order, params.rows, step.coord.row).phase;
        flag = params.flag_in_part(step.coord);
      }
      end = first + 1;
    }
    if (lane >= first && lane < end) {
      // Releases what the other lanes saw complete, too. A fence and a plain store take longer.
      store_release_sys(tiles.announce[lane] + flag, tile_number(tiles));  // [B]
    }
    __syncwarp();
  }

  // --- a CTA ---

  CUTLASS_DEVICE static void run(const Params& params, char* memory) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
    const typename Body::Role role;
    wait_for_previous_kernel();
    // The first tile is on its way while everything else is set up.
    const bool feeds =
        role.is_one_thread_of(Types::kFeedWarp) && cute::block_rank_in_cluster() == 0;
    const int32_t first_tile = feeds ? TileFeed::draw(params.ending.tiles_taken, kClusterM) : 0;

    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue[0]);
    }
    auto pipeline = Body::make_pipeline(params.mainloop, shared, role);
    auto load_pipeline = Body::make_load_pipeline(params.epilogue[0], shared, role);
    auto order = Body::make_team_order(shared, role);
    if (threadIdx.x == 0) {
      if (params.sends_messages()) {
        RunCopier::init(shared.run_copier);
      } else {
        Copier::init(shared.copier);
      }
      // Who reads the feed: the warps of the teams, the one that reads for loads, and the one that loads sources.
      constexpr int kTeamWarps = kTeams * kTeamThreads / cutlass::NumThreadsPerWarp;
      TileFeed::init(shared.feed, kClusterM, kTeamWarps + 1 + (params.sources != 0 ? 1 : 0));
    }

    // Barriers of both CTAs are initialised before either uses the other's.
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();

    if (role.produces()) {
      cutlass::arch::warpgroup_reg_dealloc<Types::kProducerRegisters>();
      if (role.warp == Types::kLoadWarp) produce(params, shared, pipeline);
      if (feeds) {
        if (params.sends_messages() && first_tile == 0) Messages::announce_empty(params);
        feed(params, shared, first_tile);
      }
      if (role.warp == Types::kPlaceWarp) place_ahead(params, shared);
      if (role.warp == Types::kSourceWarp && params.sources != 0) {
        produce_sources(params, shared, load_pipeline);
      }
      if (role.is_one_thread_of(Types::kSourceWarp) && params.sends_messages()) {
        Messages::receive(params, shared);
      }
      // The warp that has time, in each CTA.
      const int collects =
          cute::block_rank_in_cluster() == 0 ? Types::kSourceWarp : Types::kFeedWarp;
      if (params.collects() && role.is_one_thread_of(collects)) collect(params, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Types::kConsumerRegisters>();
      Tiles tiles(params, shared, role.team(), kTeams);
      Body::consume(
          params, shared, pipeline, load_pipeline, order, role.team(), tiles,
          [&](const Step& step, const plan::TileRowPlace& place, auto& sums, int thread) {
            pause(params.hold_ns(step.index, place));
            finish_sums(params, step, place, sums, thread);
          },
          [&](const Step& step, const plan::TileRowPlace& place) {
            if (params.sends_messages()) {
              Messages::count(params, step, place);
            } else if (params.is_announced(step.coord.row)) {
              announce_tile(params, step);
            }
          });
    }
    // The other CTA still tells the feeding one what it has read.
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
    let_next_kernel_in();  // nothing is awaited any more
    if (cute::block_rank_in_cluster() == 0 && threadIdx.x == 0 &&
        TileFeed::last_to_leave(params.ending.tiles_taken, kClusterM)) {
      Body::end_call(params.ending.signal);
    }
  }
};

}  // namespace overlap::kernels
