// Hopper GEMM: CUTLASS's TMA + wgmma collectives under a kernel of our own, which takes tiles in
// the plan's order, stores each where the plan says and signals its chunk.
//
// A CTA is one producer warp group and two consumer warp groups. The consumers form teams:
//   ping-pong    two teams of one warp group; they alternate tiles, one multiplies while the other
//                stores. Tiles of 128 columns, or 192 (wide): those read less of the operands for the same
//                product, but fit a small grid worse.
//   cooperative  one team of two warp groups, half a tile each.
//
//   producer | load 0 | load 1 | load 2 | load 3 | ...  (TMA, as far ahead as memory allows)
//   team 0   |        | mma 0  | store 0, signal | mma 2 | ...
//   team 1   |                 | mma 1  | store 1, signal | ...
//
// For peers (kPeers) there may be sources: a second producer warp loads their tiles, once the rank that
// makes them has announced them, and the teams add them before they store. Tiles may be stored twice,
// or each in the output of its rows' part; what a peer has stored here may be collected. And as these
// GEMMs wait for one another, a third warp hands the tiles out, instead of every CTA owning a share.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "kernels/tensor_map_encoder.h"

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "kernels/arrivals.cuh"
#include "kernels/bulk_copier.cuh"
#include "kernels/early_launch.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_sm90_peers.h"
#include "kernels/peer_spin.cuh"
#include "kernels/signal.h"
#include "kernels/tile_feed.cuh"

namespace overlap::kernels {

template <plan::Kernel kKernel, class Element_, bool kWeightKContiguous_, bool kPeers>
struct GemmSm90 {
  static constexpr bool kPingpong = plan::is_pingpong(kKernel);
  static constexpr bool kWide = kKernel == plan::Kernel::kSm90PingpongWide;
  using Element = Element_;
  static constexpr bool kWeightKContiguous = kWeightKContiguous_;
  static constexpr bool kForPeers = kPeers;
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
  static constexpr int kColumns = kWide ? 192 : kPingpong ? 128 : 256;
  using TileShape = cute::Shape<cute::_128, cute::Int<kColumns>, cute::_64>;
  using MainloopSchedule =
      std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using LayoutWeight = std::conditional_t<kWeightKContiguous_, cutlass::layout::ColumnMajor,
                                          cutlass::layout::RowMajor>;
  static constexpr int kAlignment = 16 / sizeof(Element);

  // What is stored at a time. Over a link, rows of 128 bytes: with the builder's own, of 64, GEMMs that
  // fill the link took 12 % longer.
  using EpilogueTile = std::conditional_t<kPeers, cute::Shape<cute::_64, cute::_64>,
                                          cutlass::epilogue::collective::EpilogueTileAuto>;
  // Alpha = 1, and beta = 1 for a source: the epilogue adds it, converts and stores.
  using Fusion =
      std::conditional_t<kPeers,
                         cutlass::epilogue::fusion::LinearCombination<Element, float, Element>,
                         cutlass::epilogue::fusion::ScaledAcc<Element, float>>;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTile,
      float, float, std::conditional_t<kPeers, Element, void>, cutlass::layout::RowMajor,
      kAlignment, Element, cutlass::layout::RowMajor, kAlignment, EpilogueSchedule,
      Fusion>::CollectiveOp;
  using Epilogue = typename std::conditional_t<kPeers, WithStore<BuiltEpilogue, MirroredStore>,
                                               std::type_identity<BuiltEpilogue>>::type;
  // What idle warps copy: tiles that a peer has finished, or whatever the caller says.
  using Collected = TileRoute<Element, cute::size<1>(TileShape{})>;
  using Copier = BulkCopier<std::conditional_t<kPeers, Collected, RunRoute>>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlignment, Element, LayoutWeight, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage) + sizeof(typename Copier::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  using TiledMma = typename Mainloop::TiledMma;
  using ProblemShape = cute::Shape<int, int, int, int>;  // M, N, K, L

  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kClusterM = cute::size<0>(ClusterShape{});
  static constexpr int kTeams = kPingpong ? 2 : 1;
  static constexpr int kTeamThreads = cute::size(TiledMma{});
  static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup + kTeams * kTeamThreads;
  static_assert(kThreads == 384);
  static constexpr int kLoadWarp = 0;  // of the producer's warp group
  static constexpr int kSourceWarp = 1;
  static constexpr int kFeedWarp = 2;
  static constexpr int kPlaceWarp = 3;
  // A consumer holds its accumulators in registers; the producer gives its registers away.
  static constexpr uint32_t kProducerRegisters = kWide ? 24 : 40;
  static constexpr uint32_t kConsumerRegisters = kWide ? 240 : 232;
  // A launch gets 168 a thread; who takes more than others gave away waits for ever.
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168);

  // Two ordered phases per tile, multiply and store, each held by one team at a time.
  using TeamOrder = cutlass::OrderedSequenceBarrier<2, kTeams>;
  using MainloopPipeline = typename Mainloop::MainloopPipeline;
  using LoadPipeline = typename Epilogue::LoadPipeline;  // of the source
  using StorePipeline = typename Epilogue::StorePipeline;

  struct Nothing {};

  struct SharedStorage {
    struct Tensors {
      typename Epilogue::TensorStorage epilogue;
      typename Mainloop::TensorStorage mainloop;
    } tensors;
    alignas(16) typename Mainloop::PipelineStorage mainloop;
    alignas(16) typename Epilogue::PipelineStorage load;
    alignas(16) typename TeamOrder::SharedStorage order;
    TileFeed::SharedStorage feed;
    typename Copier::SharedStorage copier;
  };

  static constexpr int kMaxOutputs = kPeers ? 1 + kMaxMoreOutputs : 1;

  struct Params {
    typename Mainloop::Params mainloop;
    // The same with the input of the own part's rows.
    std::conditional_t<kPeers, Nothing, typename Mainloop::Params> own_mainloop;
    typename Epilogue::Params epilogue[kMaxOutputs];  // of each output
    uint32_t sources;                                 // bit mask of the outputs that have one
    uint32_t sent;                                    // and of those that peers' memory holds, too
    int32_t spread_ns;
    ProblemShape gemm_shape;   // of the operands
    ProblemShape store_shape;  // of the output: (rows, N, K, parts), or (tile_m, tile_n, K, tiles)
                               // if packed
    bool packed;
    int32_t parts;
    int32_t part;
    plan::RowMap rows;
    plan::TileOrder order;
    int32_t first_tile;
    int32_t end_tile;
    int32_t* counters;
    PeerTiles peer_tiles;
    uint32_t* tiles_taken;
    PeerSignalParams ending;
    std::conditional_t<kPeers, Collected, Nothing> collected;
    cute::TmaDescriptor mirrors[kPeers ? kMaxMoreOutputs : 1];
    int32_t num_copies;
    CopyRun copies[plan::kMaxCopyRuns];
    PeerWaitParams arrivals;

    CUTLASS_DEVICE plan::TileRowPlace place(int32_t tile_row) const {
      return plan::tile_row_place(order, rows, kTileM, tile_row);
    }
    CUTLASS_DEVICE bool split() const { return kPeers && rows.mode == plan::RowMap::Mode::kSplit; }
    // Of a tile row: which output it goes to, and whether something is added there.
    CUTLASS_DEVICE int32_t output(const plan::TileRowPlace& place) const {
      return split() ? place.output_part : 0;
    }
    CUTLASS_DEVICE bool has_source(const plan::TileRowPlace& place) const {
      return kPeers && (sources >> output(place) & 1) != 0;
    }
    // How long a tile waits for its turn on the link.
    CUTLASS_DEVICE int32_t hold_ns(int32_t index, const plan::TileRowPlace& place) const {
      const bool last_round = index + static_cast<int32_t>(gridDim.x) >= end_tile;
      if (last_round || (sent >> output(place) & 1) == 0) return 0;
      return static_cast<int32_t>(int64_t{spread_ns} * blockIdx.x / gridDim.x);
    }
    // Tiles between a rank's and those of the next rank that are added to it.
    CUTLASS_DEVICE int32_t part_tiles() const { return rows.part_tile_rows * order.tiles_n; }
    CUTLASS_DEVICE bool collects() const {
      if constexpr (kPeers) return collected.rows != 0;
      return false;
    }
    // Whether a tile of this row is final: it is the own part's.
    CUTLASS_DEVICE bool is_final(int32_t tile_row) const {
      return plan::split_row(order, rows, tile_row).turn + 1 == order.parts;
    }
    // Whether another rank waits for it.
    CUTLASS_DEVICE bool is_announced(int32_t tile_row) const {
      return peer_tiles.announce[0] != nullptr && (collects() || !is_final(tile_row));
    }
    // The number of a tile's flag: parts in the order in which they are computed.
    CUTLASS_DEVICE int32_t flag(const plan::SplitRow& row, int32_t column) const {
      return (row.turn * rows.part_tile_rows + row.row) * order.tiles_n + column;
    }
    CUTLASS_DEVICE int32_t flag(const plan::TileCoord& coord) const {
      return flag(plan::split_row(order, rows, coord.row), coord.column);
    }
    // The `index`-th of the tiles that are final, in the own part; of rounds, as all that is collected.
    CUTLASS_DEVICE plan::TileCoord final_tile(int32_t index) const {
      const int32_t height = rows.round_tile_rows;
      const int32_t round_tiles = height * order.tiles_n;
      const int32_t round = index / round_tiles;
      const int32_t in_round = index - round * round_tiles;
      return {round * height + in_round % height, in_round / height};
    }
  };

  // A tile for the collectives: where its operands lie, and where its output goes.
  struct Step {
    int32_t index;
    plan::TileCoord coord;
    int32_t sources = 0;  // tiles with a source that come before
  };

  // Tiles of one CTA: every grid-th cluster tile of the launch's, this CTA's row of it.
  class OwnedTiles {
   public:
    CUTLASS_DEVICE OwnedTiles(const Params& params, SharedStorage&, int turn, int step,
                              bool = false)
        : params_(params),
          index_(params.first_tile + static_cast<int32_t>(blockIdx.x) +
                 turn * static_cast<int32_t>(gridDim.x)),
          step_(step * static_cast<int32_t>(gridDim.x)) {}
    CUTLASS_DEVICE bool next(Step& step) {
      if (index_ >= params_.end_tile) return false;
      step = {index_, plan::tile_coord(params_.order, index_)};
      index_ += step_;
      return true;
    }

   private:
    const Params& params_;
    int32_t index_;
    const int32_t step_;
  };

  // The same as they are handed out.
  class FedTiles {
   public:
    CUTLASS_DEVICE FedTiles(const Params& params, SharedStorage& shared, int turn, int step,
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

  using Tiles = std::conditional_t<kPeers, FedTiles, OwnedTiles>;

  // Where the operands of this CTA's tiles begin.
  class OwnedPlaces {
   public:
    struct Place : TileFeed::Place {
      bool own_input = false;
      int32_t chunk = 0;
    };
    CUTLASS_DEVICE OwnedPlaces(const Params& params, SharedStorage& shared)
        : params_(params), tiles_(params, shared, 0, 1) {}
    CUTLASS_DEVICE bool next(Place& place) {
      Step step;
      if (!tiles_.next(step)) return false;
      const plan::TileRowPlace row = params_.place(step.coord.row);
      place = {{row.input_row, step.coord.column}, row.own_input, 0};
      if (params_.arrivals.flags != nullptr) {
        place.chunk = plan::tile_chunk(params_.order, step.index);
      }
      return true;
    }

   private:
    const Params& params_;
    OwnedTiles tiles_;
  };

  class FedPlaces {
   public:
    using Place = TileFeed::Place;
    CUTLASS_DEVICE FedPlaces(const Params&, SharedStorage& shared) : shared_(shared) {}
    CUTLASS_DEVICE bool next(Place& place) {
      place = TileFeed::take_ahead(shared_.feed, turn_++);
      return place.row != TileFeed::kEnd;
    }

   private:
    SharedStorage& shared_;
    uint32_t turn_ = 0;
  };

  using LoadPlaces = std::conditional_t<kPeers, FedPlaces, OwnedPlaces>;

  // What loads the operands that begin there.
  static CUTLASS_DEVICE const typename Mainloop::Params& mainloop_of(
      const Params& params, const typename LoadPlaces::Place& place) {
    if constexpr (!kPeers) {
      if (place.own_input) return params.own_mainloop;
    }
    return params.mainloop;
  }

  // Where its rows begin; of a tile that has none, some others, if nothing of it is stored: zeros that TMA
  // fills in come slower than they are multiplied, and with one such tile in twelve a GEMM took 1.3 times
  // as long.
  static CUTLASS_DEVICE int32_t loaded_row(const Params& params,
                                           const typename LoadPlaces::Place& place) {
    int32_t rows = cute::get<0>(params.gemm_shape);
    if constexpr (!kPeers) {
      if (place.own_input) rows = params.rows.part_rows;
    }
    return place.row < rows || params.packed ? place.row : 0;
  }

  CUTLASS_DEVICE static void produce(const Params& params, SharedStorage& shared,
                                     MainloopPipeline& pipeline) {
    Mainloop mainloop;
    const auto inputs = mainloop.load_init(params.gemm_shape, params.mainloop);
    const int k_tiles = cute::size<3>(cute::get<0>(inputs));
    const auto [m, n, k, l] = params.gemm_shape;
    const auto rows = params.mainloop.tma_load_a.get_tma_tensor(cute::make_shape(m, k, l));
    auto state = cutlass::make_producer_start_state<MainloopPipeline>();
    LoadPlaces places(params, shared);
    Arrivals arrivals(params.arrivals);
    for (typename LoadPlaces::Place place; places.next(place);) {
      if constexpr (!kPeers) arrivals.await_by_warp(place.chunk);
      // The tile's input rows may begin anywhere: tiles are cut from there on.
      const auto input = cute::local_tile(
          cute::domain_offset(cute::make_coord(loaded_row(params, place), 0, 0), rows), TileShape{},
          cute::make_coord(cute::_, cute::_, cute::_), cute::Step<cute::_1, cute::X, cute::_1>{});
      mainloop.load(mainloop_of(params, place), pipeline, state,
                    cute::make_tuple(input, cute::get<1>(inputs)),
                    cute::make_coord(0, place.column, cute::_, 0),
                    cute::make_coord_iterator(k_tiles), k_tiles, cutlass::canonical_lane_idx(),
                    cute::block_rank_in_cluster(), shared.tensors.mainloop);
      state.advance(k_tiles);
    }
    // The other CTA of the cluster may still multicast into this one's shared memory: leave after
    // its last arrival.
    mainloop.load_tail(pipeline, state);
  }

  // The sources' tiles, in the order in which the teams store theirs.
  CUTLASS_DEVICE static void produce_sources(const Params& params, SharedStorage& shared,
                                             LoadPipeline& pipeline) {
    TiledMma tiled_mma;
    const int lane = cutlass::canonical_lane_idx();
    const PeerTiles& peer_tiles = params.peer_tiles;
    const bool awaits = peer_tiles.announce[0] != nullptr;
    const uint64_t number = awaits ? tile_number(peer_tiles) : 0;
    auto state = cutlass::make_producer_start_state<LoadPipeline>();
    Tiles tiles(params, shared, 0, 1);
    for (Step step; tiles.next(step);) {
      const plan::TileRowPlace place = params.place(step.coord.row);
      if (!params.has_source(place)) continue;
      if (awaits) {
        if (lane == 0) {
          wait_for_tile(peer_tiles, params.flag(step.coord) - params.part_tiles(), number);
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

  // Of the rank that is `distance` before.
  CUTLASS_DEVICE static void collect_tile(const Params& params, const plan::TileCoord& tile,
                                          int32_t distance, Copier& copier) {
    const int32_t turn = params.order.parts - 1;
    wait_for_tile(params.peer_tiles,
                  params.flag({turn, tile.row}, tile.column) + (distance - 1) * params.part_tiles(),
                  tile_number(params.peer_tiles), distance);
    fence_bulk_copies();  // which see what the flag acquired, too
    const int32_t begin = tile.row * kTileM;
    const int32_t end = min(begin + kTileM, params.collected.rows);
    for (int32_t at = begin; at < end; at += Collected::kRows) {
      copier.copy({at, tile.column * kTileN, params.peer_tiles.before(distance)});
    }
  }

  CUTLASS_DEVICE static void feed(const Params& params, SharedStorage& shared, int32_t first) {
    TileFeed::feed(
        shared.feed, first, params.tiles_taken, kClusterM, params.order.num_tiles(), kTeams,
        [&](int32_t index) {
          return params.has_source(params.place(plan::tile_coord(params.order, index).row));
        });
  }

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

  CUTLASS_DEVICE static void consume(const Params& params, SharedStorage& shared,
                                     MainloopPipeline& pipeline, LoadPipeline& load_pipeline,
                                     TeamOrder& order, int team) {
    Mainloop mainloop;
    typename StorePipeline::Params store_params;
    store_params.always_wait = true;
    StorePipeline store_pipeline(store_params);

    const int thread =
        (static_cast<int>(threadIdx.x) - cutlass::NumThreadsPerWarpGroup) % kTeamThreads;
    const int k_tiles =
        cute::size<3>(cute::get<0>(mainloop.load_init(params.gemm_shape, params.mainloop)));
    constexpr auto kLoads = Epilogue::get_load_pipe_increment(TileShape{});
    constexpr auto kStores = Epilogue::get_store_pipe_increment(TileShape{});
    TiledMma tiled_mma;

    // All teams read one sequence of loads: each skips the tiles of the others.
    typename Mainloop::PipelineState mainloop_state;
    typename Epilogue::LoadPipelineState load_state;
    auto store_state = cutlass::make_producer_start_state<StorePipeline>();
    mainloop_state.advance(team * k_tiles);
    store_state.advance(team * kStores);
    int32_t sources = 0;  // tiles of sources that this team read or skipped

    Tiles tiles(params, shared, team, kTeams);
    for (Step step; tiles.next(step);) {
      auto accumulators = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(TileShape{}));

      if constexpr (kTeams > 1) order.wait();
      mainloop.mma(pipeline, mainloop_state, accumulators, k_tiles, thread, shared.tensors.mainloop,
                   params.mainloop);
      if constexpr (kTeams > 1) order.arrive();
      mainloop.mma_tail(pipeline, mainloop_state, k_tiles);
      mainloop_state.advance(k_tiles * kTeams);

      const plan::TileRowPlace rows = params.place(step.coord.row);
      const bool has_source = params.has_source(rows);
      if (has_source) load_state.advance((step.sources - sources) * kLoads);
      const auto place = params.packed
                             ? cute::make_coord(0, 0, cute::_,
                                                plan::packed_slot(params.order, step.index,
                                                                  params.parts, params.part))
                             : cute::make_coord(rows.output_row, step.coord.column, cute::_,
                                                params.split() ? 0 : rows.output_part);
      if constexpr (kPeers) pause(params.hold_ns(step.index, rows));
      if constexpr (kTeams > 1) order.wait();
      Epilogue epilogue(params.epilogue[params.output(rows)], shared.tensors.epilogue);
      auto [load_next, store_next] = epilogue.store(
          load_pipeline, load_state, store_pipeline, store_state, params.store_shape, TileShape{},
          place, accumulators, tiled_mma, thread, shared.tensors.epilogue);
      if constexpr (kTeams > 1) {
        // The other team writes the same shared memory next: the copy engine must have read it.
        auto [load_end, store_end] =
            epilogue.store_tail(load_pipeline, load_next, store_pipeline, store_next);
        load_state = load_end;
        store_state = store_end;
        store_state.advance(kStores);
        order.arrive();
      } else {
        load_state = load_next;
        store_state = store_next;
      }
      if (has_source) sources = step.sources + 1;

      // The team's first warp issued all its bulk stores, so this warp alone must see them
      // complete; it is idle until its next tile anyway. Signal [A]: wait_counter acquires what is
      // released here.
      if (params.counters != nullptr && thread < cutlass::NumThreadsPerWarp) {
        wait_bulk_stores_complete();
        if (cutlass::canonical_lane_idx() == 0) {
          signal_release_gpu(params.counters + plan::tile_chunk(params.order, step.index));
        }
        __syncwarp();
      }
      if constexpr (kPeers) {
        if (thread < cutlass::NumThreadsPerWarp && params.is_announced(step.coord.row)) {
          announce(params, step);
        }
      }
    }
  }

  // To the rank that adds to this tile, or, of a final one, to all peers. By the warp that issued its
  // bulk stores.
  CUTLASS_DEVICE static void announce(const Params& params, const Step& step) {
    wait_bulk_stores_complete();
    __syncwarp();
    const PeerTiles& tiles = params.peer_tiles;
    const bool is_final = params.is_final(step.coord.row);
    const int lane = cutlass::canonical_lane_idx();
    if (lane < (is_final ? params.order.parts - 1 : 1)) {
      // Releases what the other lanes saw complete, too. A fence and a plain store take longer.
      store_release_sys(tiles.announce[lane] + params.flag(step.coord), tile_number(tiles));  // [B]
    }
    __syncwarp();
  }

  CUTLASS_DEVICE static void run(const Params& params, char* memory) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
    const int warp_group = cutlass::canonical_warp_group_idx();
    const bool producer = warp_group == 0;
    const int warp_in_group = cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup;
    const int team = kPingpong ? warp_group - 1 : 0;

    // On its way while everything else is set up.
    if constexpr (kPeers) wait_for_previous_kernel();
    const bool feeds = kPeers && producer && warp_in_group == kFeedWarp &&
                       cute::block_rank_in_cluster() == 0 && cutlass::canonical_lane_idx() == 0;
    const int32_t first_tile = feeds ? TileFeed::draw(params.tiles_taken, kClusterM) : 0;

    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      if constexpr (!kPeers) Mainloop::prefetch_tma_descriptors(params.own_mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue[0]);
    }

    typename MainloopPipeline::Params mainloop_params;
    if (producer && warp_in_group == kLoadWarp)
      mainloop_params.role = MainloopPipeline::ThreadCategory::Producer;
    if (!producer) mainloop_params.role = MainloopPipeline::ThreadCategory::Consumer;
    mainloop_params.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    mainloop_params.num_consumers = kTeamThreads;
    mainloop_params.num_producers = Mainloop::NumProducerThreadEvents;
    mainloop_params.transaction_bytes = params.mainloop.tma_transaction_bytes;
    MainloopPipeline pipeline(shared.mainloop, mainloop_params, ClusterShape{});

    typename LoadPipeline::Params load_params;
    if (producer && warp_in_group == kSourceWarp)
      load_params.role = LoadPipeline::ThreadCategory::Producer;
    if (!producer) load_params.role = LoadPipeline::ThreadCategory::Consumer;
    load_params.dst_blockid = cute::block_rank_in_cluster();
    load_params.producer_arv_count = cutlass::NumThreadsPerWarp;
    load_params.consumer_arv_count = kTeamThreads;
    if constexpr (Epilogue::RequiresTransactionBytes) {
      load_params.transaction_bytes = params.epilogue[0].tma_transaction_bytes;
    }
    LoadPipeline load_pipeline(shared.load, load_params);

    typename TeamOrder::Params order_params;
    order_params.group_id = producer ? 0 : team;
    order_params.group_size = kTeamThreads;
    TeamOrder order(shared.order, order_params);

    if (threadIdx.x == 0) Copier::init(shared.copier);
    if constexpr (kPeers) {
      // The warps of the teams, the one that reads for loads, and the one that loads sources.
      constexpr int kTeamWarps = kTeams * kTeamThreads / cutlass::NumThreadsPerWarp;
      const int readers = kTeamWarps + 1 + (params.sources != 0 ? 1 : 0);
      if (threadIdx.x == 0) TileFeed::init(shared.feed, kClusterM, readers);
    }

    // Barriers of both CTAs are initialised before either uses the other's.
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    if constexpr (!kPeers) wait_for_previous_kernel();

    if (producer) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (warp_in_group == kLoadWarp) produce(params, shared, pipeline);
      if constexpr (kPeers) {
        if (feeds) feed(params, shared, first_tile);
        if (warp_in_group == kPlaceWarp) place_ahead(params, shared);
        if (warp_in_group == kSourceWarp && params.sources != 0) {
          produce_sources(params, shared, load_pipeline);
        }
        // Of each CTA the warp that has time.
        const int collects = cute::block_rank_in_cluster() == 0 ? kSourceWarp : kFeedWarp;
        if (params.collects() && warp_in_group == collects && cutlass::canonical_lane_idx() == 0) {
          collect(params, shared);
        }
      } else if (warp_in_group == kSourceWarp && cutlass::canonical_lane_idx() == 0 &&
                 params.num_copies > 0) {
        const RunRoute route;
        Copier copier(route, shared.copier);
        Arrivals arrivals(params.arrivals);
        copy_runs(params.copies, params.num_copies, blockIdx.x, gridDim.x, copier,
                  [&](int32_t chunk) { arrivals.await(chunk); });
        copier.finish();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, shared, pipeline, load_pipeline, order, team);
    }
    // For peers, the other CTA still tells the feeding one what it has read.
    if (kPeers || params.ending.count > 0) {
      __syncwarp();
      cute::cluster_arrive();
      cute::cluster_wait();
      if constexpr (kPeers) let_next_kernel_in();  // nothing is awaited any more
      if (cute::block_rank_in_cluster() == 0 && threadIdx.x == 0 &&
          TileFeed::last_to_leave(params.tiles_taken, kClusterM)) {
        if constexpr (!kPeers) await_own(params);
        end_call(params.ending);
      }
    }
  }

  // Until what this rank sends has been announced, to itself, too: by the number of a call that has not
  // ended yet.
  CUTLASS_DEVICE static void await_own(const Params& params) {
    if (params.arrivals.flags == nullptr) return;
    PeerWaitParams own = params.arrivals;
    own.ranks = 1u << params.rows.own_part;
    const int32_t last_chunk = params.order.num_chunks - 2;
    wait_for_peers(own, own.tag + peer_step_number(*own.calls, own.step + last_chunk), last_chunk);
  }

  // No cluster reads anything that peers have stored any more.
  CUTLASS_DEVICE static void end_call(const PeerSignalParams& ending) {
    if (ending.count == 0) return;
    const uint64_t calls = *ending.calls + 1;
    for (int32_t peer = 0; peer < ending.count; ++peer) {
      store_release_sys(ending.flags[peer], calls);  // [B]
    }
    *ending.calls = calls;
  }
};

}  // namespace overlap::kernels
