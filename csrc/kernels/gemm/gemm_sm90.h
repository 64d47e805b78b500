// The Hopper GEMM of one rank: every CTA owns its share of the tiles. Rows of an all-gather may arrive meanwhile,
// and an idle warp of each CTA copies what the caller says.
#pragma once

#include "kernels/gemm/arrivals.cuh"
#include "kernels/gemm/gemm_sm90_body.h"

namespace overlap::kernels {

template <plan::Kernel kKernel, class Operands>
struct GemmSm90 : GemmSm90Body<GemmSm90Types<kKernel, Operands, false>> {
  using Types = GemmSm90Types<kKernel, Operands, false>;
  using Body = GemmSm90Body<Types>;
  using typename Types::Copier;
  using typename Types::Epilogue;
  using typename Types::Mainloop;
  using typename Types::SharedStorage;
  using typename Types::Step;
  static constexpr int kCopyWarp = Types::kSourceWarp;

  struct Params : GemmSm90Params<Types> {
    typename Mainloop::Params own_mainloop;  // with the input of this rank's own part's rows
    int32_t num_copies;
    CopyRun copies[plan::kMaxCopyRuns];
    PeerWaitParams arrivals;

    CUTLASS_DEVICE static constexpr bool has_source(const plan::TileRowPlace&) { return false; }
    CUTLASS_DEVICE static constexpr int32_t output(const plan::TileRowPlace&) { return 0; }
    CUTLASS_DEVICE static int32_t matrix(const plan::TileRowPlace& place) {
      return place.output_part;
    }
  };

  // Tiles of one CTA: every grid-th cluster tile of the launch's, this CTA's row of it.
  class Tiles {
   public:
    CUTLASS_DEVICE Tiles(const Params& params, int turn, int step)
        : params_(params),
          index_(params.first_tile + static_cast<int32_t>(blockIdx.x) +
                 turn * static_cast<int32_t>(gridDim.x)),
          step_(step * static_cast<int32_t>(gridDim.x)),
          first_(turn == 0) {}
    CUTLASS_DEVICE bool next(Step& step) {
      if (index_ >= params_.end_tile) return false;
      step = {index_, plan::tile_coord(params_.order, index_)};
      step.alone = first_ && index_ + static_cast<int32_t>(gridDim.x) >= params_.end_tile;
      index_ += step_;
      return true;
    }

   private:
    const Params& params_;
    int32_t index_;
    const int32_t step_;
    const bool first_;
  };

  // Where their operands begin, and which chunk of rows that arrive they belong to.
  class Places {
   public:
    struct Place {
      int32_t row = 0;
      int32_t column = 0;
      bool own_input = false;
      int32_t chunk = 0;
    };
    CUTLASS_DEVICE explicit Places(const Params& params) : params_(params), tiles_(params, 0, 1) {}
    CUTLASS_DEVICE bool next(Place& place) {
      Step step;
      if (!tiles_.next(step)) return false;
      const plan::TileRowPlace row = params_.place(step.coord.row);
      place = {row.input_row, step.coord.column, row.own_input, 0};
      if (params_.arrivals.flags != nullptr) {
        place.chunk = plan::tile_chunk(params_.order, step.index);
      }
      return true;
    }

   private:
    const Params& params_;
    Tiles tiles_;
  };

  CUTLASS_DEVICE static void produce(const Params& params, SharedStorage& shared,
                                     typename Types::MainloopPipeline& pipeline) {
    Places places(params);
    Arrivals arrivals(params.arrivals);
    Body::load(
        params, shared, pipeline, places,
        [&](const typename Places::Place& place) {
          arrivals.await_by_warp(place.chunk);
          const int32_t rows =
              place.own_input ? params.rows.part_rows : cute::get<0>(params.gemm_shape);
          return Body::loaded_row(params, place.row, rows);
        },
        [&](const typename Places::Place& place) -> const typename Mainloop::Params& {
          return place.own_input ? params.own_mainloop : params.mainloop;
        });
  }

  CUTLASS_DEVICE static void copy(const Params& params, SharedStorage& shared) {
    const RunRoute route;
    Copier copier(route, shared.copier);
    Arrivals arrivals(params.arrivals);
    copy_runs(params.copies, params.num_copies, blockIdx.x, gridDim.x, copier,
              [&](int32_t chunk) { arrivals.await(chunk); });
    copier.finish();
  }

  CUTLASS_DEVICE static void run(const Params& params, char* memory) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
    const typename Body::Role role;
    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Mainloop::prefetch_tma_descriptors(params.own_mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue[0]);
    }
    auto pipeline = Body::make_pipeline(params.mainloop, shared, role);
    auto load_pipeline = Body::make_load_pipeline(params.epilogue[0], shared, role);
    auto order = Body::make_team_order(shared, role);
    if (threadIdx.x == 0) Copier::init(shared.copier);

    // Barriers of both CTAs are initialised before either uses the other's.
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    wait_for_previous_kernel();

    if (role.produces()) {
      cutlass::arch::warpgroup_reg_dealloc<Types::kProducerRegisters>();
      if (role.warp == Types::kLoadWarp) produce(params, shared, pipeline);
      if (role.is_one_thread_of(kCopyWarp) && params.num_copies > 0) copy(params, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Types::kConsumerRegisters>();
      Tiles tiles(params, role.team(), Types::kTeams);
      const auto nothing = [](const auto&...) {};
      Body::consume(params, shared, pipeline, load_pipeline, order, role.team(), tiles, nothing,
                    nothing);
    }
    if (params.ending.signal.count > 0) end(params);
  }

  CUTLASS_DEVICE static void end(const Params& params) {
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
    if (cute::block_rank_in_cluster() == 0 && threadIdx.x == 0 &&
        TileFeed::last_to_leave(params.ending.tiles_taken, Types::kClusterM)) {
      await_own(params);
      Body::end_call(params.ending.signal);
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
};

}  // namespace overlap::kernels
