// Host side of the Hopper GEMM's instances: tensor maps and other parameters, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/early_launch.cuh"
#include "kernels/gemm_sm90.h"
#include "kernels/gemm_sm90_instance.h"

namespace overlap::kernels {

// What the kernel takes, of what the caller says.
template <class Gemm>
class GemmSm90ParamsOf {
  using Element = typename Gemm::Element;
  using Mainloop = typename Gemm::Mainloop;
  using Epilogue = typename Gemm::Epilogue;
  using ProblemShape = typename Gemm::ProblemShape;
  using Params = typename Gemm::Params;
  static constexpr int kTileM = Gemm::kTileM;
  static constexpr int kTileN = Gemm::kTileN;

 public:
  static Params make(const GemmParams& gemm) {
    const int m = static_cast<int>(gemm.m);
    const int n = static_cast<int>(gemm.n);
    const int k = static_cast<int>(gemm.k);
    const bool packed = gemm.layout == plan::Layout::kPacked;

    typename Mainloop::StrideA stride_a{};
    cute::get<0>(stride_a) = gemm.input_stride;
    typename Mainloop::StrideB stride_b{};
    if constexpr (Gemm::kWeightKContiguous) {
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
    params.first_tile = gemm.first_tile;
    params.end_tile = gemm.tiles_end();
    params.counters = gemm.counters;
    params.num_copies = gemm.num_copies;
    std::copy(std::begin(gemm.copies), std::end(gemm.copies), params.copies);
    params.arrivals = gemm.arrivals;
    params.tiles_taken = gemm.tiles_taken;
    params.ending = gemm.ending;
    typename Mainloop::Arguments mainloop{};
    mainloop.ptr_A = static_cast<const Element*>(gemm.input);
    mainloop.dA = stride_a;
    mainloop.ptr_B = static_cast<const Element*>(gemm.weight);
    mainloop.dB = stride_b;
    params.mainloop = Mainloop::to_underlying_arguments(params.gemm_shape, mainloop, nullptr);
    if constexpr (!Gemm::kForPeers) {
      params.own_mainloop = params.mainloop;
      if (gemm.own_input != nullptr) {
        mainloop.ptr_A = static_cast<const Element*>(gemm.own_input);
        params.own_mainloop = Mainloop::to_underlying_arguments(
            cute::make_shape(gemm.rows.part_rows, n, k, 1), mainloop, nullptr);
      }
    }
    typename Epilogue::Arguments epilogue{};
    epilogue.thread.alpha = 1.0f;
    epilogue.ptr_D = static_cast<Element*>(gemm.output);
    epilogue.dD = stride_d;
    epilogue.dC = stride_d;
    for (int output = 0; output < 1 + gemm.num_more_outputs; ++output) {
      if (output > 0) epilogue.ptr_D = static_cast<Element*>(gemm.more_outputs[output - 1]);
      if constexpr (Gemm::kForPeers) {
        const void* const source = gemm.sources[output];
        if (source != nullptr) params.sources |= 1u << output;
        epilogue.thread.beta = source != nullptr ? 1.0f : 0.0f;
        // Its tensor map is made in any case, and wants an address.
        epilogue.ptr_C = source != nullptr ? static_cast<const Element*>(source) : epilogue.ptr_D;
      }
      params.epilogue[output] =
          Epilogue::to_underlying_arguments(params.store_shape, epilogue, nullptr);
    }
    if constexpr (Gemm::kForPeers) {
      params.peer_tiles = gemm.peer_tiles;
      params.spread_ns = gemm.spread_ns;
      const uint32_t last = 1u << last_output(gemm);
      params.sent = (2u << gemm.num_more_outputs) - 1u;
      if (gemm.num_mirrors == 0) params.sent &= ~last;
      for (int mirror = 0; mirror < gemm.num_mirrors; ++mirror) {
        epilogue.ptr_D = static_cast<Element*>(gemm.mirrors[mirror]);
        const auto place = Epilogue::to_underlying_arguments(params.store_shape, epilogue, nullptr);
        params.mirrors[mirror] = *place.tma_store_d.get_tma_descriptor();
      }
      auto& store = params.epilogue[last_output(gemm)].tma_store_d;
      store.num_mirrors_ = gemm.num_mirrors;
      store.mirrors_at_ = static_cast<int32_t>(reinterpret_cast<const char*>(params.mirrors) -
                                               reinterpret_cast<const char*>(&store));
      if (gemm.collected != nullptr) {
        params.collected = Gemm::Collected::make(gemm.arriving, gemm.collected, gemm.rows.part_rows,
                                                 n, gemm.order.parts, gemm.output_stride);
      }
    }
    return params;
  }

 private:
  // Of a row-major output.
  static ProblemShape store_shape(const GemmParams& gemm) {
    const int n = static_cast<int>(gemm.n);
    const int k = static_cast<int>(gemm.k);
    switch (gemm.rows.mode) {
      case plan::RowMap::Mode::kScatter:
        return cute::make_shape(gemm.order.tiles_m * kTileM, n, k, 1);
      case plan::RowMap::Mode::kGather:
        return cute::make_shape(gemm.rows.part_rows, n, k, gemm.order.parts);
      case plan::RowMap::Mode::kSplit:
        return cute::make_shape(gemm.rows.part_rows, n, k, 1);
      default:
        return cute::make_shape(static_cast<int>(gemm.m), n, k, 1);
    }
  }

  // The output of the part that is computed last.
  static int last_output(const GemmParams& gemm) {
    if (gemm.rows.mode != plan::RowMap::Mode::kSplit) return 0;
    const int parts = gemm.order.parts;
    return (gemm.rows.first_part + (parts - 1) * gemm.rows.part_step) % parts;
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
  static_assert(kSharedBytes <= kMaxSharedBytes);

  static cudaError_t load() {
    return cudaFuncSetAttribute(gemm_sm90_kernel<Gemm>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kMaxSharedBytes);
  }

  static cudaError_t launch(const GemmParams& gemm, cudaStream_t stream) {
    const typename Gemm::Params params = GemmSm90ParamsOf<Gemm>::make(gemm);
    const int clusters = std::min(std::max(gemm.ctas / Gemm::kClusterM, 1),
                                  (gemm.tiles_end() - gemm.first_tile) / Gemm::kClusterM);
    cudaLaunchAttribute attributes[] = {{}, early_launch()};
    cudaLaunchAttribute& cluster = attributes[0];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = Gemm::kClusterM;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(clusters * Gemm::kClusterM);
    config.blockDim = dim3(Gemm::kThreads);
    config.dynamicSmemBytes = std::min(kSharedBytes + gemm.smem_pad_bytes, kMaxSharedBytes);
    config.stream = stream;
    config.attrs = attributes;
    // Nothing that comes in front of a gather lets it in; it waits for copies, not for a kernel.
    config.numAttrs = gemm.arrivals.flags == nullptr ? 2 : 1;
    return cudaLaunchKernelEx(&config, gemm_sm90_kernel<Gemm>, params);
  }
};

// Both weight layouts of one kernel and dtype.
template <plan::Kernel kKernel, class Element, bool kPeers = false>
GemmSm90Instance make_gemm_sm90_instance() {
  using KContiguous = GemmSm90Launcher<GemmSm90<kKernel, Element, true, kPeers>>;
  using NContiguous = GemmSm90Launcher<GemmSm90<kKernel, Element, false, kPeers>>;
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
