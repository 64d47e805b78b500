// The parts of a Hopper GEMM: CUTLASS's TMA + wgmma collectives, their pipelines, warps and registers.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "kernels/gemm/tensor_map_encoder.h"

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "kernels/gemm/bulk_copier.cuh"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_sm90_epilogue.h"
#include "kernels/gemm/gemm_sm90_groups.h"
#include "kernels/gemm/tile_feed.cuh"

namespace overlap::kernels {

// Sums of products that are the output.
template <class Types>
struct Unscaled {
  struct Params {};
  template <class KernelParams>
  CUTLASS_DEVICE Unscaled(const KernelParams&, const plan::TileCoord&, int) {}
  template <class Sums>
  CUTLASS_DEVICE void scale(Sums&) const {}
};

// Operands of one 16-bit type. gemm_sm90_scales.h has those of fp8.
template <class Element, bool kKContiguous, bool kInGroups = false>
struct PlainOperands {
  using Input = Element;
  using Weight = Element;
  using Output = Element;
  static constexpr bool kWeightKContiguous = kKContiguous;
  static constexpr bool kFp8 = false;
  template <class Types>
  using Scaling = Unscaled<Types>;
  template <class Types>
  using Groups = std::conditional_t<kInGroups, GroupSums<Types>, OneGroup<Types>>;
};

template <plan::Kernel kKernel, class Operands, bool kPeers>
struct GemmSm90Types {
  using Input = typename Operands::Input;
  using Weight = typename Operands::Weight;
  using Output = typename Operands::Output;
  static constexpr bool kWeightKContiguous = Operands::kWeightKContiguous;
  using Scaling = typename Operands::template Scaling<GemmSm90Types>;
  using Groups = typename Operands::template Groups<GemmSm90Types>;
  static constexpr bool kPingpong = plan::is_pingpong(kKernel);
  static constexpr bool kWide = kKernel == plan::Kernel::kSm90PingpongWide;
  static constexpr bool kForPeers = kPeers;
  // Teams alternate groups of K. For peers they alternate tiles: a team that stores has the other one's whole tile to
  // send its own, or to wait for a peer's.
  static constexpr bool kAlternates = Groups::kInGroups && !kPeers;
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
  static constexpr int kColumns = kWide ? 192 : kPingpong ? 128 : 256;
  using TileShape = cute::Shape<cute::_128, cute::Int<kColumns>, cute::Int<128 / sizeof(Input)>>;
  using PlainSchedule =
      std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Fp8Schedule =
      std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>;
  using MainloopSchedule = std::conditional_t<Operands::kFp8, Fp8Schedule, PlainSchedule>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using LayoutWeight = std::conditional_t<kWeightKContiguous, cutlass::layout::ColumnMajor,
                                          cutlass::layout::RowMajor>;
  static constexpr int kAlignment = 16 / sizeof(Input);
  static constexpr int kOutputAlignment = 16 / sizeof(Output);

  // The piece stored at a time. Stores to peers need rows of 128 bytes; the builder's own, of 64, do not fill the link.
  using EpilogueTile = std::conditional_t<kPeers, cute::Shape<cute::_64, cute::_64>,
                                          cutlass::epilogue::collective::EpilogueTileAuto>;
  // Alpha = 1, and beta = 1 for a source: the epilogue adds it, converts and stores.
  using Fusion =
      std::conditional_t<kPeers,
                         cutlass::epilogue::fusion::LinearCombination<Output, float, Output>,
                         cutlass::epilogue::fusion::ScaledAcc<Output, float>>;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTile,
      float, float, std::conditional_t<kPeers, Output, void>, cutlass::layout::RowMajor,
      kOutputAlignment, Output, cutlass::layout::RowMajor, kOutputAlignment, EpilogueSchedule,
      Fusion>::CollectiveOp;
  using Epilogue = typename std::conditional_t<kPeers, WithStore<BuiltEpilogue, MirroredStore>,
                                               std::type_identity<BuiltEpilogue>>::type;
  // Idle warps copy tiles that a peer has finished, or the caller's runs.
  using Collected = TileRoute<Output, cute::size<1>(TileShape{})>;
  using RunCopier = BulkCopier<RunRoute>;
  using Copier = BulkCopier<std::conditional_t<kPeers, Collected, RunRoute>>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Input, cutlass::layout::RowMajor,
      kAlignment, Weight, LayoutWeight, kAlignment, float, TileShape, ClusterShape,
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
  static constexpr bool kCrowded = kWide || Groups::kInGroups;
  static constexpr uint32_t kProducerRegisters = kCrowded ? 24 : 40;
  static constexpr uint32_t kConsumerRegisters = kCrowded ? 240 : 232;
  // A launch gets 168 a thread; who takes more than others gave away waits for ever.
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168);

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
    TileFeed::SharedStorage feed;
    union {  // a launch needs one of them
      typename Copier::SharedStorage copier;
      typename RunCopier::SharedStorage run_copier;
    };
  };

  // A tile for the collectives: where its operands lie, and where its output goes.
  struct Step {
    int32_t index;
    plan::TileCoord coord;
    int32_t sources = 0;  // tiles with a source that come before
    bool alone = false;   // the other team has no tile at the same time
  };
};

}  // namespace overlap::kernels
