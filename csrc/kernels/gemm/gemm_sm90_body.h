// The common body of the Hopper GEMMs: it loads operands, and its teams multiply, store and signal.
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
// With groups of K the teams alternate groups of two tiles, except for peers:
//   team 0   | mma 0 | add   | mma 0 | add   | ... | store 0, signal
//   team 1   |       | mma 1 | add   | mma 1 | ... | add | store 1, signal
#pragma once

#include "kernels/gemm/early_launch.cuh"
#include "kernels/gemm/gemm_sm90_types.h"
#include "kernels/peer/peer_spin.cuh"
#include "kernels/signal/signal.h"

namespace overlap::kernels {

// The parameters of every kernel of these types. Scaling's and groups' are bases, which take no place where there are
// none: host and device do not agree on where members lie after an empty one of [[no_unique_address]].
template <class Types>
struct GemmSm90Params : Types::Scaling::Params, Types::Groups::Params {
  static constexpr int kMaxOutputs = Types::kForPeers ? 1 + kMaxMoreOutputs : 1;

  typename Types::Mainloop::Params mainloop;
  typename Types::Epilogue::Params epilogue[kMaxOutputs];  // of each output
  typename Types::ProblemShape gemm_shape;                 // of the operands
  // The output's shape: (rows, N, K, parts), or (tile_m, tile_n, K, tiles) if packed.
  typename Types::ProblemShape store_shape;
  bool packed;
  int32_t terms;
  int32_t term;
  plan::RowMap rows;
  plan::TileOrder order;
  int32_t first_tile;
  int32_t end_tile;
  int32_t* counters;
  GemmEnding ending;

  CUTLASS_DEVICE plan::TileRowPlace place(int32_t tile_row) const {
    return plan::tile_row_place(order, rows, Types::kTileM, tile_row);
  }
};

template <class Types>
struct GemmSm90Body : Types {
  using typename Types::Epilogue;
  using typename Types::LoadPipeline;
  using typename Types::Mainloop;
  using typename Types::MainloopPipeline;
  using typename Types::SharedStorage;
  using typename Types::Step;
  using typename Types::StorePipeline;
  using typename Types::TeamOrder;
  using typename Types::TiledMma;
  using typename Types::TileShape;
  using Types::kTeams;
  using Types::kTeamThreads;

  // The part of the CTA that a thread belongs to.
  struct Role {
    int warp_group;
    int warp;  // of the group
    CUTLASS_DEVICE Role()
        : warp_group(cutlass::canonical_warp_group_idx()),
          warp(cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup) {}
    CUTLASS_DEVICE bool produces() const { return warp_group == 0; }
    CUTLASS_DEVICE int team() const { return Types::kPingpong ? warp_group - 1 : 0; }
    CUTLASS_DEVICE bool is_one_thread_of(int producer_warp) const {
      return produces() && warp == producer_warp && cutlass::canonical_lane_idx() == 0;
    }
  };

  // --- what warps hand on to each other ---

  CUTLASS_DEVICE static MainloopPipeline make_pipeline(const typename Mainloop::Params& mainloop,
                                                       SharedStorage& shared, const Role& role) {
    typename MainloopPipeline::Params params;
    if (role.produces() && role.warp == Types::kLoadWarp)
      params.role = MainloopPipeline::ThreadCategory::Producer;
    if (!role.produces()) params.role = MainloopPipeline::ThreadCategory::Consumer;
    params.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    params.num_consumers = kTeamThreads;
    params.num_producers = Mainloop::NumProducerThreadEvents;
    params.transaction_bytes = mainloop.tma_transaction_bytes;
    return MainloopPipeline(shared.mainloop, params, typename Types::ClusterShape{});
  }

  CUTLASS_DEVICE static LoadPipeline make_load_pipeline(const typename Epilogue::Params& epilogue,
                                                        SharedStorage& shared, const Role& role) {
    typename LoadPipeline::Params params;
    if (role.produces() && role.warp == Types::kSourceWarp)
      params.role = LoadPipeline::ThreadCategory::Producer;
    if (!role.produces()) params.role = LoadPipeline::ThreadCategory::Consumer;
    params.dst_blockid = cute::block_rank_in_cluster();
    params.producer_arv_count = cutlass::NumThreadsPerWarp;
    params.consumer_arv_count = kTeamThreads;
    if constexpr (Epilogue::RequiresTransactionBytes) {
      params.transaction_bytes = epilogue.tma_transaction_bytes;
    }
    return LoadPipeline(shared.load, params);
  }

  CUTLASS_DEVICE static TeamOrder make_team_order(SharedStorage& shared, const Role& role) {
    typename TeamOrder::Params params;
    params.group_id = role.produces() ? 0 : role.team();
    params.group_size = kTeamThreads;
    return TeamOrder(shared.order, params);
  }

  // --- the producer's first warp ---

  // Where a tile's rows begin. A tile beyond the last of `rows` reads others, if nothing of it is stored: zeros that TMA
  // fills in come slower than they are multiplied.
  template <class Params>
  CUTLASS_DEVICE static int32_t loaded_row(const Params& params, int32_t row, int32_t rows) {
    return row < rows || params.packed ? row : 0;
  }

  // Operands of the tiles that begin at `places`. `rows_of(place)`: the row to load, once it is there;
  // `mainloop_of(place)`: what loads it.
  template <class Params, class Places, class RowsOf, class MainloopOf>
  CUTLASS_DEVICE static void load(const Params& params, SharedStorage& shared,
                                  MainloopPipeline& pipeline, Places& places, RowsOf rows_of,
                                  MainloopOf mainloop_of) {
    Mainloop mainloop;
    const auto inputs = mainloop.load_init(params.gemm_shape, params.mainloop);
    const int k_tiles = cute::size<3>(cute::get<0>(inputs));
    const auto [m, n, k, l] = params.gemm_shape;
    const auto rows = params.mainloop.tma_load_a.get_tma_tensor(cute::make_shape(m, k, l));
    auto state = cutlass::make_producer_start_state<MainloopPipeline>();
    // Loads `count` of the tile's steps along K.
    const auto load_steps = [&](const typename Places::Place& place, int32_t row, int first,
                                int count) {
      // The tile's input rows may begin anywhere: tiles are cut from there on.
      const auto input = cute::local_tile(cute::domain_offset(cute::make_coord(row, 0, 0), rows),
                                          TileShape{}, cute::make_coord(cute::_, cute::_, cute::_),
                                          cute::Step<cute::_1, cute::X, cute::_1>{});
      mainloop.load(mainloop_of(place), pipeline, state,
                    cute::make_tuple(input, cute::get<1>(inputs)),
                    cute::make_coord(0, place.column, cute::_, 0),
                    cute::make_coord_iterator(first, k_tiles), count, cutlass::canonical_lane_idx(),
                    cute::block_rank_in_cluster(), shared.tensors.mainloop);
      state.advance(count);
    };
    if constexpr (Types::kAlternates) {
      const int count = k_tiles / params.count;
      for (typename Places::Place place[kTeams]; places.next(place[0]);) {
        const bool alone = !places.next(place[1]);
        const int32_t row[kTeams] = {rows_of(place[0]), alone ? 0 : rows_of(place[1])};
        for (int group = 0; group < params.count; ++group) {
          load_steps(place[0], row[0], group * count, count);
          if (!alone) load_steps(place[1], row[1], group * count, count);
        }
        if (alone) break;
      }
    } else {
      for (typename Places::Place place; places.next(place);) {
        load_steps(place, rows_of(place), 0, k_tiles);
      }
    }
    // The other CTA of the cluster may still multicast into this one's shared memory: leave after
    // its last arrival.
    mainloop.load_tail(pipeline, state);
  }

  // --- the consumers ---

  // Turns of teams that alternate within a tile.
  CUTLASS_DEVICE static void await_turn(int team) {
    cutlass::arch::NamedBarrier::sync(2 * kTeamThreads, static_cast<uint32_t>(team));
  }
  CUTLASS_DEVICE static void pass_turn(int team) {
    cutlass::arch::NamedBarrier::arrive(2 * kTeamThreads, static_cast<uint32_t>(1 - team));
  }

  // Steps along K that a team multiplies before it is the other one's turn.
  template <class Params>
  CUTLASS_DEVICE static int begin_turns(const Params& params, int k_tiles, int team) {
    if constexpr (Types::kAlternates) {
      if (team == 1) pass_turn(team);
      return k_tiles / params.count;
    }
    return k_tiles;
  }

  // A tile's sums, of K in groups. Where teams alternate, one multiplies while the other one adds. A team that waited for
  // its loads out of turn could take the other one's for them: a stage's barrier tells only odd uses from even ones.
  template <class Params, class Sums>
  CUTLASS_DEVICE static void multiply_groups(const Params& params, SharedStorage& shared,
                                             MainloopPipeline& pipeline,
                                             typename Mainloop::PipelineState& state,
                                             TeamOrder& order, const Step& step, int team,
                                             int thread, int k_tiles, Sums& sums) {
    Mainloop mainloop;
    TiledMma tiled_mma;
    typename Types::Groups groups(params, team, thread);
    const bool alternates = Types::kAlternates && !step.alone;
    const int group_tiles = k_tiles / params.count;
    if constexpr (Types::kAlternates) order.arrive();
    for (int32_t group = 0; group < params.count; ++group) {
      auto product = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(TileShape{}));
      if (alternates || (Types::kAlternates && group == 0)) await_turn(team);
      mainloop.mma(pipeline, state, product, group_tiles, thread, shared.tensors.mainloop,
                   params.mainloop);
      if (alternates) pass_turn(team);
      if (!Types::kAlternates && group + 1 == params.count) order.arrive();
      mainloop.mma_tail(pipeline, state, group_tiles);
      state.advance(group_tiles * (alternates ? kTeams : 1));
      groups.add(product, group);
    }
    if constexpr (!Types::kAlternates) state.advance(k_tiles * (kTeams - 1));
    groups.put_into(sums);
  }

  // The team's first warp issued all its bulk stores, so only this warp must see them complete; it is idle until its next
  // tile anyway. Signal [A]: wait_counter acquires what is released here.
  template <class Params>
  CUTLASS_DEVICE static void signal_chunk(const Params& params, const Step& step) {
    wait_bulk_stores_complete();
    if (cutlass::canonical_lane_idx() == 0) {
      signal_release_gpu(params.counters + plan::tile_chunk(params.order, step.index));
    }
    __syncwarp();
  }

  // Multiplies and stores a team's tiles. By all of the team: `before_store(step, place, sums, thread)`, which may
  // change the sums; by its first warp, which issued the bulk stores, behind those: `behind_store(step, place)`.
  template <class Params, class Tiles, class BeforeStore, class BehindStore>
  CUTLASS_DEVICE static void consume(const Params& params, SharedStorage& shared,
                                     MainloopPipeline& pipeline, LoadPipeline& load_pipeline,
                                     TeamOrder& order, int team, Tiles& tiles,
                                     BeforeStore before_store, BehindStore behind_store) {
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
    const int turn_tiles = begin_turns(params, k_tiles, team);
    mainloop_state.advance(team * turn_tiles);
    store_state.advance(team * kStores);
    int32_t sources = 0;  // tiles of sources that this team read or skipped

    for (Step step; tiles.next(step);) {
      auto accumulators = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(TileShape{}));
      if constexpr (kTeams > 1) order.wait();
      if constexpr (Types::Groups::kInGroups) {
        multiply_groups(params, shared, pipeline, mainloop_state, order, step, team, thread,
                        k_tiles, accumulators);
      } else {
        mainloop.mma(pipeline, mainloop_state, accumulators, k_tiles, thread,
                     shared.tensors.mainloop, params.mainloop);
        if constexpr (kTeams > 1) order.arrive();
        mainloop.mma_tail(pipeline, mainloop_state, k_tiles);
        mainloop_state.advance(k_tiles * kTeams);
      }
      typename Types::Scaling(params, step.coord, thread).scale(accumulators);

      const plan::TileRowPlace rows = params.place(step.coord.row);
      const bool has_source = params.has_source(rows);
      if (has_source) load_state.advance((step.sources - sources) * kLoads);
      const auto place =
          params.packed
              ? cute::make_coord(
                    0, 0, cute::_,
                    plan::packed_slot(params.order, step.index, params.terms, params.term))
              : cute::make_coord(rows.output_row, step.coord.column, cute::_, params.matrix(rows));
      before_store(step, rows, accumulators, thread);
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

      if (thread < cutlass::NumThreadsPerWarp) {
        if (params.counters != nullptr) signal_chunk(params, step);
        behind_store(step, rows);
      }
    }
  }

  // --- the end ---

  // By whoever leaves last: no cluster reads anything that peers have stored any more.
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
