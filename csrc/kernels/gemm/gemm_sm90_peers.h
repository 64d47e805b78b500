// The Hopper GEMM whose tiles go to peers' memory, and come from there. As these GEMMs wait for one another, a warp
// hands the tiles out, instead of every CTA owning a share. In one launch, any of
//   sources    a warp loads what a peer has stored here, tile by tile, and the teams add it before they store
//   terms      the teams load what all peers have stored here of a tile, and add it up in the ranks' order
//   mirrors    a tile is stored in several places
//   outputs    each part of the rows goes to a place of its own; of any number of rows: messages, announced as a
//              whole by whoever stores the last tile
//   collected  what peers have stored here is copied to where it belongs, by warps that have time
#pragma once

#include "kernels/gemm/gemm_sm90_body.h"
#include "kernels/peer/pair_sum.cuh"

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

  struct Params : GemmSm90Params<Types> {
    using GemmSm90Params<Types>::end_tile;
    using GemmSm90Params<Types>::order;
    using GemmSm90Params<Types>::rows;

    uint32_t sources;  // bit mask of the outputs that have one
    uint32_t sent;     // and of those that peers' memory holds, too
    int32_t spread_ns;
    PeerTiles tiles;
    Collected collected;
    cute::TmaDescriptor mirrors[kMaxMoreOutputs];
    GemmMessages messages;  // stored: null: there are none
    PeerTerms peer_terms;   // first: null: there are none
    bool rounds;            // terms to which a source is added

    CUTLASS_DEVICE bool sends_messages() const { return messages.stored != nullptr; }
    CUTLASS_DEVICE bool has_outputs() const {
      return rows.mode == plan::RowMap::Mode::kSplit || rows.mode == plan::RowMap::Mode::kRanges;
    }
    // The output that a tile row goes to, and whether something is added there.
    CUTLASS_DEVICE int32_t output(const plan::TileRowPlace& place) const {
      return has_outputs() ? place.output_part : 0;
    }
    CUTLASS_DEVICE int32_t matrix(const plan::TileRowPlace& place) const {
      return has_outputs() ? 0 : place.output_part;
    }
    CUTLASS_DEVICE bool has_source(const plan::TileRowPlace& place) const {
      return (sources >> output(place) & 1) != 0;
    }
    // How long a tile waits for its turn on the link.
    CUTLASS_DEVICE int32_t hold_ns(int32_t index, const plan::TileRowPlace& place) const {
      const bool last_round = index + static_cast<int32_t>(gridDim.x) >= end_tile;
      if (last_round || (sent >> output(place) & 1) == 0) return 0;
      return static_cast<int32_t>(int64_t{spread_ns} * blockIdx.x / gridDim.x);
    }
    // Tiles between a rank's and those of the next rank that are added to it.
    CUTLASS_DEVICE int32_t part_tiles() const { return rows.part_tile_rows * order.tiles_n; }
    CUTLASS_DEVICE bool collects() const { return collected.rows != 0; }
    // A tile of this row is final if it belongs to this rank's part.
    CUTLASS_DEVICE bool is_final(int32_t tile_row) const {
      return plan::split_row(order, rows, tile_row).phase + 1 == order.parts;
    }
    // A tile is announced if another rank waits for it.
    CUTLASS_DEVICE bool is_announced(int32_t tile_row) const {
      return tiles.announce[0] != nullptr && (collects() || !is_final(tile_row));
    }
    // The number of a tile's flag: parts in the order in which they are computed.
    CUTLASS_DEVICE int32_t flag(const plan::SplitRow& row, int32_t column) const {
      return (row.phase * rows.part_tile_rows + row.row) * order.tiles_n + column;
    }
    CUTLASS_DEVICE int32_t flag(const plan::TileCoord& coord) const {
      return flag(plan::split_row(order, rows, coord.row), coord.column);
    }
    // With terms: that of a tile in its part, whichever it is. Each source has numbers of its own at the owner.
    CUTLASS_DEVICE int32_t flag_in_part(const plan::TileCoord& coord) const {
      return flag({0, plan::split_row(order, rows, coord.row).row}, coord.column);
    }
    CUTLASS_DEVICE bool adds_terms() const { return peer_terms.first != nullptr; }
    // The `index`-th of the tiles that are final, in this rank's own part; of rounds, as all that is collected.
    CUTLASS_DEVICE plan::TileCoord final_tile(int32_t index) const {
      const int32_t height = rows.round_tile_rows;
      const int32_t round_tiles = height * order.tiles_n;
      const int32_t round = index / round_tiles;
      const int32_t in_round = index - round * round_tiles;
      return {round * height + in_round % height, in_round / height};
    }
  };

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
        : order_(params.order),
          reader_(shared.feed, turn, step, begins),
          first_of_pairs_(turn == 0 && step == kTeams) {}
    CUTLASS_DEVICE bool next(Step& step) {
      bool alone = false;
      const bool looks = Types::Groups::kInGroups && first_of_pairs_;
      const TileFeed::Entry entry = reader_.next(looks ? &alone : nullptr);
      if (entry.index == TileFeed::kEnd) return false;
      const int32_t index = entry.index + static_cast<int32_t>(cute::block_rank_in_cluster());
      step = {index, plan::tile_coord(order_, index), entry.sources, alone};
      return true;
    }

   private:
    const plan::TileOrder& order_;
    TileFeed::Reader reader_;
    const bool first_of_pairs_;
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

  // The peers' messages, once each has been announced: of every one as many pieces as other CTAs copy.
  CUTLASS_DEVICE static void receive_messages(const Params& params, SharedStorage& shared) {
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

  // A tile's sum of the ranks' terms, each rounded to the output's type, in the ranks' order or, of groups of K, by pairs:
  // so a row's bits do not depend on its owner. Threads have the sums that wgmma leaves them: of every eight columns two next to each other, of
  // every 64 rows two of each warp's 16.
  template <class Sums>
  CUTLASS_DEVICE static void add_terms(const Params& params, const Step& step,
                                       const plan::TileRowPlace& place, Sums& sums, int thread) {
    using Output = typename Types::Output;
    constexpr int kSlabRows = 64;
    constexpr int kPieceColumns = 8;
    constexpr int kPieces = Types::kTileN / kPieceColumns;
    // Loads in flight of each thread. Wide tiles have no registers for any, and sums by pairs take many.
    constexpr int kAtOnce = Types::Groups::kInGroups ? 4 : 8;
    static_assert(kPieces % kAtOnce == 0);
    const PeerTiles& tiles = params.tiles;
    const int lane = thread % cutlass::NumThreadsPerWarp;
    if (lane + 1 < tiles.ranks) {
      wait_for_tile(tiles, params.flag_in_part(step.coord) + lane * params.part_tiles(),
                    tile_number(tiles), lane + 1);
    }
    __syncwarp();
    const PeerTerms& terms = params.peer_terms;
    const int first_row =
        place.output_row * Types::kTileM + thread / cutlass::NumThreadsPerWarp * 16 + lane / 4;
    const int first_column = step.coord.column * Types::kTileN + lane % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2 * Types::kTileM / kSlabRows; ++j) {
      const int row = first_row + j / 2 * kSlabRows + j % 2 * 8;
      const bool is_stored = row < terms.rows;
      CUTLASS_PRAGMA_UNROLL
      for (int begin = 0; begin < kPieces; begin += kAtOnce) {
        float total[2 * kAtOnce] = {};
        [[maybe_unused]] PairSum<2 * kAtOnce> pairs;
        for (int rank = 0; rank < tiles.ranks; ++rank) {
          Output term[kAtOnce][2];
          if (rank == tiles.rank) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 2 * kAtOnce; ++i) {
              const auto at =
                  cute::make_coord(cute::make_coord(i % 2, j % 2, begin + i / 2), j / 2, 0);
              term[i / 2][i % 2] = static_cast<Output>(sums(at));
            }
          } else {
            const auto* const from = static_cast<const Output*>(terms.first) + rank * terms.stride +
                                     row * terms.row_stride;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kAtOnce; ++i) {
              const int column = first_column + (begin + i) * kPieceColumns;
              uint32_t pair = 0;
              if (is_stored && column < terms.columns) {
                pair = *reinterpret_cast<const uint32_t*>(from + column);
              }
              *reinterpret_cast<uint32_t*>(term[i]) = pair;
            }
          }
          if constexpr (Types::Groups::kInGroups) {
            float terms[2 * kAtOnce];
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 2 * kAtOnce; ++i) {
              terms[i] = static_cast<float>(term[i / 2][i % 2]);
            }
            pairs.add(terms, rank,
                      [](float sum) { return static_cast<float>(static_cast<Output>(sum)); });
          } else {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 2 * kAtOnce; ++i) {
              total[i] += static_cast<float>(term[i / 2][i % 2]);
            }
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          const auto at = cute::make_coord(cute::make_coord(i % 2, j % 2, begin + i / 2), j / 2, 0);
          if constexpr (Types::Groups::kInGroups) {
            sums(at) = pairs.value[i];
          } else {
            sums(at) = total[i];
          }
        }
      }
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
        add_terms(params, step, place, sums, thread);
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
      if (params.adds_terms()) {  // the part's owner is so many ranks behind
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

  // A message, with its last tile.
  CUTLASS_DEVICE static void count_for_message(const Params& params, const Step& step,
                                               const plan::TileRowPlace& place) {
    wait_bulk_stores_complete();
    __syncwarp();
    const PeerMeeting& meeting = params.messages.meeting;
    if (cutlass::canonical_lane_idx() == 0 && place.output_part != meeting.rank) {
      const int32_t chunk = plan::tile_chunk(params.order, step.index);
      // The flag also releases what other CTAs stored and released here.
      const int32_t before = add_acq_rel_gpu(params.messages.stored + chunk, 1);
      if (before + 1 == plan::chunk_tiles(params.order, chunk)) {
        announce_message(meeting, place.output_part);
      }
    }
    __syncwarp();
  }
  CUTLASS_DEVICE static void announce_message(const PeerMeeting& meeting, int32_t peer) {
    store_release_sys(meeting.announce[0][peer], meeting.tag + *meeting.calls + 1);  // [B]
  }

  // Messages without rows have no last tile. One thread of the grid announces them.
  CUTLASS_DEVICE static void announce_empty_messages(const Params& params) {
    const PeerMeeting& meeting = params.messages.meeting;
    for (int32_t chunk = 0; chunk < params.order.num_chunks; ++chunk) {
      const int32_t peer =
          (params.rows.first_part + chunk * params.rows.part_step) % params.order.parts;
      if (peer != meeting.rank && plan::chunk_tiles(params.order, chunk) == 0) {
        announce_message(meeting, peer);
      }
    }
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
        if (params.sends_messages() && first_tile == 0) announce_empty_messages(params);
        feed(params, shared, first_tile);
      }
      if (role.warp == Types::kPlaceWarp) place_ahead(params, shared);
      if (role.warp == Types::kSourceWarp && params.sources != 0) {
        produce_sources(params, shared, load_pipeline);
      }
      if (role.is_one_thread_of(Types::kSourceWarp) && params.sends_messages()) {
        receive_messages(params, shared);
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
              count_for_message(params, step, place);
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
