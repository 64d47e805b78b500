// Host side of the Hopper GEMM's instances: tensor maps and other parameters, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <type_traits>

#include "kernels/gemm/early_launch.cuh"
#include "kernels/gemm/gemm_sm90.h"
#include "kernels/gemm/gemm_sm90_instance.h"
#include "kernels/gemm/gemm_sm90_peers.h"

namespace overlap::kernels {

// Makes the kernels' parameters from the caller's.
template <class Gemm>
class GemmSm90ParamsOf {
  using Input = typename Gemm::Types::Input;
  using Weight = typename Gemm::Types::Weight;
  using Output = typename Gemm::Types::Output;
  using Mainloop = typename Gemm::Types::Mainloop;
  using Epilogue = typename Gemm::Types::Epilogue;
  using ProblemShape = typename Gemm::Types::ProblemShape;
  using Params = typename Gemm::Params;
  static constexpr int kTileM = Gemm::Types::kTileM;
  static constexpr int kTileN = Gemm::Types::kTileN;

 public:
  explicit GemmSm90ParamsOf(const GemmParams& gemm)
      : gemm_(gemm), packed_(gemm.layout == plan::Layout::kPacked) {}

  Params make() {
    Params params{};
    params.gemm_shape = cute::make_shape(extent(gemm_.m), extent(gemm_.n), extent(gemm_.k), 1);
    params.packed = packed_;
    params.terms = gemm_.terms;
    params.term = gemm_.term;
    params.rows = gemm_.rows;
    params.order = gemm_.order;
    params.first_tile = gemm_.first_tile;
    params.end_tile = gemm_.tiles_end();
    params.counters = gemm_.counters;
    params.ending = gemm_.ending;
    params.mainloop = mainloop(gemm_.input, std::max(gemm_.m, gemm_.input_rows));
    using Scales = typename Gemm::Types::Scaling::Params;
    if constexpr (!std::is_empty_v<Scales>) static_cast<Scales&>(params) = *gemm_.scales;
    if constexpr (Gemm::Types::Groups::kInGroups) {
      static_cast<GemmGroups&>(params) = gemm_.groups;
    }
    if constexpr (Gemm::Types::kForPeers) {
      for_peers(params);
    } else {
      params.store_shape = packed_ ? cute::make_shape(kTileM, kTileN, extent(gemm_.k),
                                                      gemm_.terms * gemm_.order.num_tiles())
                                   : store_shape(rows_stored());
      params.epilogue[0] = epilogue(gemm_.output, rows_stored(), nullptr);
      for_own(params);
    }
    return params;
  }

 private:
  static int extent(int64_t value) { return static_cast<int>(value); }

  typename Mainloop::Params mainloop(const void* input, int64_t rows) const {
    typename Mainloop::Arguments arguments{};
    cute::get<0>(arguments.dA) = gemm_.input_stride;
    if constexpr (Gemm::Types::kWeightKContiguous) {
      cute::get<0>(arguments.dB) = gemm_.weight_stride;
    } else {
      cute::get<1>(arguments.dB) = gemm_.weight_stride;
    }
    arguments.ptr_A = static_cast<const Input*>(input);
    arguments.ptr_B = static_cast<const Weight*>(gemm_.weight);
    return Mainloop::to_underlying_arguments(
        cute::make_shape(extent(rows), extent(gemm_.n), extent(gemm_.k), 1), arguments, nullptr);
  }

  // Rows of a row-major output, or of each part of it.
  int64_t rows_stored() const {
    switch (gemm_.rows.mode) {
      case plan::RowMap::Mode::kScatter:
        return int64_t{gemm_.order.tiles_m} * kTileM;
      case plan::RowMap::Mode::kGather:
        return gemm_.rows.part_rows * int64_t{in_blocks() ? gemm_.order.parts : 1};
      case plan::RowMap::Mode::kSplit:
        return gemm_.rows.part_rows;
      default:
        return gemm_.m;
    }
  }
  // True if tiles of all parts are stored in one matrix, block by block.
  bool in_blocks() const { return gemm_.rows.block_rows != 0; }
  ProblemShape store_shape(int64_t rows) const {
    const bool gathers = gemm_.rows.mode == plan::RowMap::Mode::kGather;
    return cute::make_shape(extent(rows), extent(gemm_.n), extent(gemm_.k),
                            gathers && !in_blocks() ? gemm_.order.parts : 1);
  }

  typename Epilogue::Params epilogue(void* output, int64_t rows, const void* source) const {
    typename Epilogue::Arguments arguments{};
    arguments.thread.alpha = 1.0f;
    arguments.ptr_D = static_cast<Output*>(output);
    cute::get<0>(arguments.dD) = packed_ ? kTileN : gemm_.output_stride;
    cute::get<2>(arguments.dD) = packed_ ? static_cast<int64_t>(kTileM) * kTileN
                                         : gemm_.rows.part_rows * gemm_.output_stride;
    arguments.dC = arguments.dD;
    if constexpr (Gemm::Types::kForPeers) {
      arguments.thread.beta = source != nullptr ? 1.0f : 0.0f;
      // Its tensor map is made in any case, and wants an address.
      arguments.ptr_C = static_cast<const Output*>(source != nullptr ? source : output);
    }
    const ProblemShape shape = packed_ ? cute::make_shape(kTileM, kTileN, extent(gemm_.k),
                                                          gemm_.terms * gemm_.order.num_tiles())
                                       : store_shape(rows);
    return Epilogue::to_underlying_arguments(shape, arguments, nullptr);
  }

  void for_own(Params& params) const {
    params.own_mainloop = params.mainloop;
    if (!gemm_.gather) return;
    const GemmGather& gather = *gemm_.gather;
    if (gather.own_input != nullptr) {
      params.own_mainloop = mainloop(gather.own_input, gemm_.rows.part_rows);
    }
    params.num_copies = gather.num_copies;
    std::copy(std::begin(gather.copies), std::end(gather.copies), params.copies);
    params.arrivals = gather.arrivals;
  }

  void for_peers(Params& params) const {
    const GemmPeers& peers = *gemm_.peers;
    const int outputs = 1 + peers.num_more_outputs;
    for (int output = 0; output < outputs; ++output) {
      const void* const source = peers.sources[output];
      if (source != nullptr) params.sources |= 1u << output;
      params.epilogue[output] = epilogue(output_of(output), rows_of(output), source);
    }
    // Only coordinates follow from it: how far each output goes, its tensor map knows.
    params.store_shape = store_shape(rows_stored());
    params.tiles = peers.tiles;
    params.spread_ns = peers.spread_ns;
    const uint32_t last = 1u << last_output();
    params.sent = (1u << outputs) - 1u;
    if (peers.num_mirrors == 0) params.sent &= ~last;
    for (int mirror = 0; mirror < peers.num_mirrors; ++mirror) {
      const auto place = epilogue(peers.mirrors[mirror], rows_of(last_output()), nullptr);
      params.mirrors[mirror] = *place.tma_store_d.get_tma_descriptor();
    }
    auto& store = params.epilogue[last_output()].tma_store_d;
    store.num_mirrors_ = peers.num_mirrors;
    store.mirrors_at_ = static_cast<int32_t>(reinterpret_cast<const char*>(params.mirrors) -
                                             reinterpret_cast<const char*>(&store));
    if (peers.collected != nullptr) {
      params.collected =
          Gemm::Collected::make(peers.arriving, peers.collected, gemm_.rows.part_rows,
                                extent(rows_of(gemm_.order.parts - 1)), extent(gemm_.n),
                                gemm_.order.parts, gemm_.output_stride);
    }
    if (peers.messages) params.messages = *peers.messages;
    params.rounds = peers.rounds;
    if (peers.terms != nullptr) {
      params.peer_terms = {peers.terms, gemm_.rows.part_rows * gemm_.output_stride,
                           gemm_.output_stride, static_cast<int32_t>(rows_of(last_output())),
                           extent(gemm_.n)};
    }
  }

  void* output_of(int output) const {
    return output == 0 ? gemm_.output : gemm_.peers->more_outputs[output - 1];
  }
  // Rows that an output has. So nothing is stored or added beyond a part that is shorter than the others.
  int64_t rows_of(int output) const {
    if (gemm_.rows.mode == plan::RowMap::Mode::kSplit) {
      const int64_t rows = gemm_.rows.part_rows;
      return std::min(rows, gemm_.m - output * rows);
    }
    if (gemm_.rows.mode != plan::RowMap::Mode::kRanges) return rows_stored();
    const int32_t* const begin = gemm_.rows.range_begin;
    const int64_t end = output + 1 < gemm_.order.parts ? begin[output + 1] : gemm_.m;
    return std::max<int64_t>(end - begin[output],
                             1);  // a tensor map has a row, though nothing is stored there
  }

  // The output of the part that is computed last.
  int last_output() const {
    if (gemm_.peers->num_more_outputs == 0) return 0;
    const int parts = gemm_.order.parts;
    return (gemm_.rows.first_part + (parts - 1) * gemm_.rows.part_step) % parts;
  }

  const GemmParams& gemm_;
  const bool packed_;
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::Types::kThreads, 1)
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
  static constexpr int kClusterM = Gemm::Types::kClusterM;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(typename Gemm::Types::SharedStorage));
  static constexpr int kMaxSharedBytes = 227 * 1024;
  static_assert(kSharedBytes <= kMaxSharedBytes);

  static cudaError_t load() {
    return cudaFuncSetAttribute(gemm_sm90_kernel<Gemm>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kMaxSharedBytes);
  }

  static cudaError_t launch(const GemmParams& gemm, cudaStream_t stream) {
    const typename Gemm::Params params = GemmSm90ParamsOf<Gemm>(gemm).make();
    const int clusters = std::min(std::max(gemm.ctas / kClusterM, 1),
                                  (gemm.tiles_end() - gemm.first_tile) / kClusterM);
    cudaLaunchAttribute attributes[] = {{}, early_launch()};
    cudaLaunchAttribute& cluster = attributes[0];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kClusterM;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(clusters * kClusterM);
    config.blockDim = dim3(Gemm::Types::kThreads);
    config.dynamicSmemBytes = std::min(kSharedBytes + gemm.smem_pad_bytes, kMaxSharedBytes);
    config.stream = stream;
    config.attrs = attributes;
    // Nothing that comes before a gather lets it in; it waits for copies, not for a kernel.
    config.numAttrs = gemm.awaits_rows() ? 1 : 2;
    return cudaLaunchKernelEx(&config, gemm_sm90_kernel<Gemm>, params);
  }
};

template <plan::Kernel kKernel, class Operands, bool kPeers>
using GemmSm90Of =
    std::conditional_t<kPeers, GemmSm90Peers<kKernel, Operands>, GemmSm90<kKernel, Operands>>;

// Both weight layouts of one kernel and dtype.
template <plan::Kernel kKernel, class Element, bool kPeers, bool kInGroups>
GemmSm90Instance make_gemm_sm90_instance() {
  using KContiguous =
      GemmSm90Launcher<GemmSm90Of<kKernel, PlainOperands<Element, true, kInGroups>, kPeers>>;
  using NContiguous =
      GemmSm90Launcher<GemmSm90Of<kKernel, PlainOperands<Element, false, kInGroups>, kPeers>>;
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
