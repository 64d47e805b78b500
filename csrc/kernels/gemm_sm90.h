// Hopper GEMM: CUTLASS's TMA + wgmma collectives under a kernel of our own, which takes tiles in
// the plan's order, stores each where the plan says and signals its chunk.
//
// A CTA is one producer warp group and two consumer warp groups. The consumers form teams:
//   ping-pong    two teams of one warp group; they alternate tiles, one multiplies while the other
//                stores.
//   cooperative  one team of two warp groups, half a tile each.
//
//   producer | load 0 | load 1 | load 2 | load 3 | ...  (TMA, as far ahead as memory allows)
//   team 0   |        | mma 0  | store 0, signal | mma 2 | ...
//   team 1   |                 | mma 1  | store 1, signal | ...
//
// For peers (kPeers) there may be a source: a second producer warp loads its tiles, which the teams
// add before they store. And each tile may be stored twice, or in the output of its rows' part.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "kernels/gemm.h"
#include "kernels/gemm_sm90_instance.h"
#include "kernels/signal.h"

namespace overlap::kernels {

// A tile's bulk store, from the same shared memory to two places.
struct MirroredStore : cute::SM90_TMA_STORE {};

}  // namespace overlap::kernels

// The traits of SM90_TMA_STORE, with the mirror's tensor map beside the first one.
template <class Bits, class Aux>
struct cute::Copy_Traits<overlap::kernels::MirroredStore, Bits, Aux> {
  using Plain = Copy_Traits<SM90_TMA_STORE, Bits, Aux>;
  using ThrID = typename Plain::ThrID;
  using SrcLayout = typename Plain::SrcLayout;
  using DstLayout = typename Plain::DstLayout;
  using RefLayout = typename Plain::RefLayout;
  using AuxParams = Aux;

  TmaDescriptor tma_desc_;
  AuxParams aux_params_;
  TmaDescriptor mirror_ = {};
  bool mirrored_ = false;

  CUTE_HOST_DEVICE constexpr TmaDescriptor const* get_tma_descriptor() const { return &tma_desc_; }

  template <class GShape>
  CUTE_HOST_DEVICE constexpr auto get_tma_tensor(GShape const& shape) const {
    return make_coord_tensor(make_layout(shape, aux_params_.g_stride_));
  }

  template <class TS, class SLayout, class TD, class DLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(Copy_Traits const& traits,
                                                     Tensor<TS, SLayout> const& source,
                                                     Tensor<TD, DLayout>& destination) {
    const void* const memory = raw_pointer_cast(source.data());
    const auto place = destination.data().coord_;
    const auto store = [&](const TmaDescriptor& map) {
      const void* const address = &map;
      detail::explode_tuple(detail::CallCOPY<SM90_TMA_STORE>{}, make_tuple(address, memory),
                            seq<0, 1>{}, place, tuple_seq<decltype(place)>{});
    };
    store(traits.tma_desc_);
    if (traits.mirrored_) store(traits.mirror_);
  }
};

namespace overlap::kernels {

// An epilogue as the builder makes it, with another bulk store.
template <class Epilogue, class Store>
struct WithStore;
template <class Policy, class Tile, class EpilogueTile, class C, class StrideC, class D,
          class StrideD, class Fusion, class LoadC, class LayoutC, class ReadC, class StoreD,
          class LayoutD, class WriteD, class AtomC, class RegisterD, class Store>
struct WithStore<cutlass::epilogue::collective::CollectiveEpilogue<
                     Policy, Tile, EpilogueTile, C, StrideC, D, StrideD, Fusion, LoadC, LayoutC,
                     ReadC, StoreD, LayoutD, WriteD, AtomC, RegisterD>,
                 Store> {
  using type =
      cutlass::epilogue::collective::CollectiveEpilogue<Policy, Tile, EpilogueTile, C, StrideC, D,
                                                        StrideD, Fusion, LoadC, LayoutC, ReadC,
                                                        Store, LayoutD, WriteD, AtomC, RegisterD>;
};

template <bool kPingpong, class Element_, bool kWeightKContiguous_, bool kPeers>
struct GemmSm90 {
  using Element = Element_;
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using TileShape = std::conditional_t<kPingpong, cute::Shape<cute::_128, cute::_128, cute::_64>,
                                       cute::Shape<cute::_128, cute::_256, cute::_64>>;
  using MainloopSchedule =
      std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using LayoutWeight = std::conditional_t<kWeightKContiguous_, cutlass::layout::ColumnMajor,
                                          cutlass::layout::RowMajor>;
  static constexpr int kAlignment = 16 / sizeof(Element);

  // Alpha = 1, and beta = 1 for a source: the epilogue adds it, converts and stores.
  using Fusion =
      std::conditional_t<kPeers,
                         cutlass::epilogue::fusion::LinearCombination<Element, float, Element>,
                         cutlass::epilogue::fusion::ScaledAcc<Element, float>>;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float,
      std::conditional_t<kPeers, Element, void>, cutlass::layout::RowMajor, kAlignment, Element,
      cutlass::layout::RowMajor, kAlignment, EpilogueSchedule, Fusion>::CollectiveOp;
  using Epilogue = typename std::conditional_t<kPeers, WithStore<BuiltEpilogue, MirroredStore>,
                                               std::type_identity<BuiltEpilogue>>::type;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlignment, Element, LayoutWeight, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
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
  // A consumer holds its accumulators in registers; the producer gives its registers away.
  static constexpr uint32_t kProducerRegisters = 40;
  static constexpr uint32_t kConsumerRegisters = 232;

  // Two ordered phases per tile, multiply and store, each held by one team at a time.
  using TeamOrder = cutlass::OrderedSequenceBarrier<2, kTeams>;
  using MainloopPipeline = typename Mainloop::MainloopPipeline;
  using LoadPipeline = typename Epilogue::LoadPipeline;  // of the source
  using StorePipeline = typename Epilogue::StorePipeline;

  struct SharedStorage {
    struct Tensors {
      typename Epilogue::TensorStorage epilogue;
      typename Mainloop::TensorStorage mainloop;
    } tensors;
    alignas(16) typename Mainloop::PipelineStorage mainloop;
    alignas(16) typename Epilogue::PipelineStorage load;
    alignas(16) typename TeamOrder::SharedStorage order;
  };

  static constexpr int kMaxOutputs = kPeers ? 1 + kMaxMoreOutputs : 1;

  struct Params {
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue[kMaxOutputs];
    bool has_source;
    ProblemShape gemm_shape;   // of the operands
    ProblemShape store_shape;  // of the output: (rows, N, K, parts), or (tile_m, tile_n, K, tiles)
                               // if packed
    bool packed;
    int32_t parts;
    int32_t part;
    plan::RowMap rows;
    plan::TileOrder order;
    int32_t* counters;
  };

  // A tile for the collectives: where its operands lie, and where its output goes.
  struct Step {
    int32_t index;
    plan::TileCoord coord;
  };

  // Tiles of one CTA: every grid-th cluster tile, this CTA's row of it.
  class Tiles {
   public:
    CUTLASS_DEVICE Tiles(const plan::TileOrder& order, int first_step)
        : order_(order),
          index_(static_cast<int32_t>(blockIdx.x) + first_step * static_cast<int32_t>(gridDim.x)) {}
    CUTLASS_DEVICE bool valid() const { return index_ < order_.num_tiles(); }
    CUTLASS_DEVICE Step step() const { return {index_, plan::tile_coord(order_, index_)}; }
    CUTLASS_DEVICE void advance(int steps) { index_ += steps * static_cast<int32_t>(gridDim.x); }

   private:
    const plan::TileOrder& order_;
    int32_t index_;
  };

  // Of a row-major output.
  static ProblemShape store_shape(const GemmParams& gemm) {
    const int n = static_cast<int>(gemm.n);
    const int k = static_cast<int>(gemm.k);
    switch (gemm.rows.mode) {
      case plan::RowMap::Mode::kScatter:
        return cute::make_shape(gemm.order.tiles_m * kTileM, n, k, 1);
      case plan::RowMap::Mode::kGather:
        return cute::make_shape(gemm.rows.part_rows, n, k, gemm.rows.output_parts);
      case plan::RowMap::Mode::kSplit:
        return cute::make_shape(gemm.rows.part_rows, n, k, 1);
      default:
        return cute::make_shape(static_cast<int>(gemm.m), n, k, 1);
    }
  }

  static Params make_params(const GemmParams& gemm) {
    const int m = static_cast<int>(gemm.m);
    const int n = static_cast<int>(gemm.n);
    const int k = static_cast<int>(gemm.k);
    const bool packed = gemm.layout == plan::Layout::kPacked;

    typename Mainloop::StrideA stride_a{};
    cute::get<0>(stride_a) = gemm.input_stride;
    typename Mainloop::StrideB stride_b{};
    if constexpr (kWeightKContiguous_) {
      cute::get<0>(stride_b) = gemm.weight_stride;
    } else {
      cute::get<1>(stride_b) = gemm.weight_stride;
    }
    typename Epilogue::StrideD stride_d{};
    cute::get<0>(stride_d) = packed ? kTileN : gemm.output_stride;
    cute::get<2>(stride_d) =
        packed ? static_cast<int64_t>(kTileM) * kTileN : gemm.rows.part_rows * gemm.output_stride;

    Params params{};
    params.gemm_shape = cute::make_shape(m, n, k, 1);
    params.store_shape =
        packed ? cute::make_shape(kTileM, kTileN, k, gemm.parts * gemm.order.num_tiles())
               : store_shape(gemm);
    params.packed = packed;
    params.parts = gemm.parts;
    params.part = gemm.part;
    params.rows = gemm.rows;
    params.order = gemm.order;
    params.counters = gemm.counters;
    typename Mainloop::Arguments mainloop{};
    mainloop.ptr_A = static_cast<const Element*>(gemm.input);
    mainloop.dA = stride_a;
    mainloop.ptr_B = static_cast<const Element*>(gemm.weight);
    mainloop.dB = stride_b;
    params.mainloop = Mainloop::to_underlying_arguments(params.gemm_shape, mainloop, nullptr);
    typename Epilogue::Arguments epilogue{};
    epilogue.thread.alpha = 1.0f;
    epilogue.ptr_D = static_cast<Element*>(gemm.output);
    epilogue.dD = stride_d;
    params.has_source = gemm.source != nullptr;
    if constexpr (kPeers) {
      epilogue.thread.beta = params.has_source ? 1.0f : 0.0f;
      // Its tensor map is made in any case, and wants an address.
      epilogue.ptr_C = static_cast<const Element*>(params.has_source ? gemm.source : gemm.output);
      epilogue.dC = stride_d;
      if (params.has_source) cute::get<0>(epilogue.dC) = gemm.source_stride;
    }
    for (int output = 0; output < 1 + gemm.num_more_outputs; ++output) {
      if (output > 0) epilogue.ptr_D = static_cast<Element*>(gemm.more_outputs[output - 1]);
      params.epilogue[output] =
          Epilogue::to_underlying_arguments(params.store_shape, epilogue, nullptr);
    }
    if constexpr (kPeers) {
      if (gemm.num_more_outputs > 0 && gemm.rows.mode != plan::RowMap::Mode::kSplit) {
        auto& store = params.epilogue[0].tma_store_d;
        store.mirror_ = *params.epilogue[1].tma_store_d.get_tma_descriptor();
        store.mirrored_ = true;
      }
    }
    return params;
  }

  CUTLASS_DEVICE static void produce(const Params& params, SharedStorage& shared,
                                     MainloopPipeline& pipeline) {
    Mainloop mainloop;
    const auto inputs = mainloop.load_init(params.gemm_shape, params.mainloop);
    const int k_tiles = cute::size<3>(cute::get<0>(inputs));
    const auto [m, n, k, l] = params.gemm_shape;
    const auto rows = params.mainloop.tma_load_a.get_tma_tensor(cute::make_shape(m, k, l));
    auto state = cutlass::make_producer_start_state<MainloopPipeline>();
    for (Tiles tiles(params.order, 0); tiles.valid(); tiles.advance(1)) {
      const Step step = tiles.step();
      // The tile's input rows may begin anywhere: tiles are cut from there on.
      const int first_row =
          plan::tile_row_place(params.order, params.rows, kTileM, step.coord.row).input_row;
      const auto input = cute::local_tile(
          cute::domain_offset(cute::make_coord(first_row, 0, 0), rows), TileShape{},
          cute::make_coord(cute::_, cute::_, cute::_), cute::Step<cute::_1, cute::X, cute::_1>{});
      mainloop.load(params.mainloop, pipeline, state, cute::make_tuple(input, cute::get<1>(inputs)),
                    cute::make_coord(0, step.coord.column, cute::_, 0),
                    cute::make_coord_iterator(k_tiles), k_tiles, cutlass::canonical_lane_idx(),
                    cute::block_rank_in_cluster(), shared.tensors.mainloop);
      state.advance(k_tiles);
    }
    // The other CTA of the cluster may still multicast into this one's shared memory: leave after
    // its last arrival.
    mainloop.load_tail(pipeline, state);
  }

  // The source's tiles, in the order in which the teams store theirs.
  CUTLASS_DEVICE static void produce_source(const Params& params, SharedStorage& shared,
                                            LoadPipeline& pipeline) {
    Epilogue epilogue(params.epilogue[0], shared.tensors.epilogue);
    TiledMma tiled_mma;
    auto state = cutlass::make_producer_start_state<LoadPipeline>();
    for (Tiles tiles(params.order, 0); tiles.valid(); tiles.advance(1)) {
      const Step step = tiles.step();
      state = epilogue.load(pipeline, state, params.store_shape, TileShape{},
                            cute::make_coord(step.coord.row, step.coord.column, cute::_, 0),
                            tiled_mma, cutlass::canonical_lane_idx(), shared.tensors.epilogue);
    }
    epilogue.load_tail(pipeline, state);
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
    load_state.advance(team * kLoads);
    store_state.advance(team * kStores);

    for (Tiles tiles(params.order, team); tiles.valid(); tiles.advance(kTeams)) {
      const Step step = tiles.step();
      auto accumulators = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(TileShape{}));

      if constexpr (kTeams > 1) order.wait();
      mainloop.mma(pipeline, mainloop_state, accumulators, k_tiles, thread, shared.tensors.mainloop,
                   params.mainloop);
      if constexpr (kTeams > 1) order.arrive();
      mainloop.mma_tail(pipeline, mainloop_state, k_tiles);
      mainloop_state.advance(k_tiles * kTeams);

      const plan::TileRowPlace rows =
          plan::tile_row_place(params.order, params.rows, kTileM, step.coord.row);
      const bool split = kPeers && params.rows.mode == plan::RowMap::Mode::kSplit;
      const auto place = params.packed
                             ? cute::make_coord(0, 0, cute::_,
                                                plan::packed_slot(params.order, step.index,
                                                                  params.parts, params.part))
                             : cute::make_coord(rows.output_row, step.coord.column, cute::_,
                                                split ? 0 : rows.output_part);
      if constexpr (kTeams > 1) order.wait();
      Epilogue epilogue(params.epilogue[split ? rows.output_part : 0], shared.tensors.epilogue);
      auto [load_next, store_next] = epilogue.store(
          load_pipeline, load_state, store_pipeline, store_state, params.store_shape, TileShape{},
          place, accumulators, tiled_mma, thread, shared.tensors.epilogue);
      if constexpr (kTeams > 1) {
        // The other team writes the same shared memory next: the copy engine must have read it.
        auto [load_end, store_end] =
            epilogue.store_tail(load_pipeline, load_next, store_pipeline, store_next);
        load_state = load_end;
        store_state = store_end;
        load_state.advance(kLoads);
        store_state.advance(kStores);
        order.arrive();
      } else {
        load_state = load_next;
        store_state = store_next;
      }

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
    }
  }

  CUTLASS_DEVICE static void run(const Params& params, char* memory) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
    const int warp_group = cutlass::canonical_warp_group_idx();
    const bool producer = warp_group == 0;
    const int warp_in_group = cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup;
    const int team = kPingpong ? warp_group - 1 : 0;

    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
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

    // Barriers of both CTAs are initialised before either uses the other's.
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();

    if (producer) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (warp_in_group == kLoadWarp) produce(params, shared, pipeline);
      if constexpr (kPeers) {
        if (warp_in_group == kSourceWarp && params.has_source)
          produce_source(params, shared, load_pipeline);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, shared, pipeline, load_pipeline, order, team);
    }
  }
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ typename Gemm::Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  // Swizzled shared-memory layouts repeat every 1024 bytes.
  Gemm::run(params, memory);
#endif
}

// One instance's host side.
template <class Gemm>
struct GemmSm90Launcher {
  static constexpr int kSharedBytes = static_cast<int>(sizeof(typename Gemm::SharedStorage));
  static constexpr int kMaxSharedBytes = 227 * 1024;

  static cudaError_t load() {
    return cudaFuncSetAttribute(gemm_sm90_kernel<Gemm>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kMaxSharedBytes);
  }

  static cudaError_t launch(const GemmParams& gemm, cudaStream_t stream) {
    const typename Gemm::Params params = Gemm::make_params(gemm);
    const int clusters = std::min(std::max(gemm.ctas / Gemm::kClusterM, 1),
                                  gemm.order.num_tiles() / Gemm::kClusterM);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = Gemm::kClusterM;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(clusters * Gemm::kClusterM);
    config.blockDim = dim3(Gemm::kThreads);
    config.dynamicSmemBytes = std::min(kSharedBytes + gemm.smem_pad_bytes, kMaxSharedBytes);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gemm_sm90_kernel<Gemm>, params);
  }
};

// Both weight layouts of one schedule and dtype.
template <bool kPingpong, class Element, bool kPeers = false>
GemmSm90Instance make_gemm_sm90_instance() {
  using KContiguous = GemmSm90Launcher<GemmSm90<kPingpong, Element, true, kPeers>>;
  using NContiguous = GemmSm90Launcher<GemmSm90<kPingpong, Element, false, kPeers>>;
  GemmSm90Instance instance;
  instance.launch = [](const GemmParams& params, cudaStream_t stream) {
    return params.weight_k_contiguous ? KContiguous::launch(params, stream)
                                      : NContiguous::launch(params, stream);
  };
  instance.load = [] {
    const cudaError_t error = KContiguous::load();
    return error != cudaSuccess ? error : NContiguous::load();
  };
  return instance;
}

}  // namespace overlap::kernels
