// A CTA is a warp that loads and two groups that take tiles by turns: one multiplies while the other stores. Two CTAs of a cluster
// take the same rows and neighbouring columns; each loads half of the rows for both.
//
//   loads    | 0 | 1 | 2 | 3 | ...
//   group 0  |   | mma 0 | store 0 | mma 2 | ...
//   group 1  |           | mma 1   | store 1 | ...
//
// Tiles have 128 x 128 numbers. Gradients of weights also have tiles of 128 x 192, which need a sixth fewer loads for their products. In fp8,
// or with few numbers of k, the products are too short to hide a SwiGLU: one without biases is then applied to the sums in registers.
//
// With scales of blocks the groups share each tile, half of its rows each: one adds a stage's products to its sums while the other
// multiplies.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/gemm/tensor_map_encoder.h"
#include "kernels/moe/grouped_epilogue.cuh"
#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/grouped_gemm_ptx.cuh"
#include "kernels/moe/grouped_tiles.cuh"

namespace overlap::kernels {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp's part in the products of its group's tiles.
template <class P>
class Multiplier {
 public:
  __device__ Multiplier(Shared<P>& shared, int group) : shared_(shared), group_(group) {}

  __device__ void skip(int steps) { turn_.advance(steps); }

  // The products of a tile, or of its first kHalf rows. kWeights: of `left` rows of the input.
  template <bool kWhole>
  __device__ __forceinline__ void run(int steps, int left, float (&upper)[P::kSums],
                                      float (&lower)[P::kSums]) {
    if (kTurnedA && steps == 0) {
#pragma unroll
      for (int i = 0; i < P::kSums; ++i) upper[i] = lower[i] = 0.0f;
    }
    for (int step = 0; step < steps; ++step, left -= P::kK) {
      await(&shared_.full[turn_.stage], turn_.parity);
      char* const stage = shared_.stages[turn_.stage];
      if (kTurnedA && left < P::kK) clear_rows(stage, left);
      const Operand a(stage);
      const Operand b(stage + 2 * kHalfBytes, kTurnedB ? kHalfBytes : 16);
      begin_mma();
#pragma unroll
      for (int at = 0; at < kLine / 32; ++at) {
        const int adds = step > 0 || at > 0;
        const uint32_t of_a = at * step_of(kTurnedA);
        const uint64_t of_b = b.at(at * step_of(kTurnedB));
        multiply<typename P::T, kTurnedA, kTurnedB>(upper, a.at(of_a), of_b, adds);
        if constexpr (kWhole) {
          multiply<typename P::T, kTurnedA, kTurnedB>(lower, a.at(of_a + kHalfBytes), of_b, adds);
        }
      }
      commit_mma();
      await_mma<1>();
      release();
      last_ = turn_.stage;
      turn_.next();
    }
  }

  __device__ void finish() {
    await_mma<0>();
    release();
    last_ = -1;
  }

 private:
  static constexpr bool kTurnedA = P::kTurnedA;
  static constexpr bool kTurnedB = P::kTurnedB;
  // 32 bytes of each row or, turned, sixteen rows.
  static constexpr uint32_t step_of(bool turned) { return turned ? 16 * kLine : 32; }

  // Rows after the expert's last one are another's, or nobody's.
  __device__ void clear_rows(char* stage, int first) const {
    const int thread = static_cast<int>(threadIdx.x) % kGroup;
    for (int box = 0; box < (kTile + P::kWidth) / kHalf; ++box) {
      char* const rows = stage + box * kHalfBytes;
      for (int at = first * kLine + thread * 16; at < kHalfBytes; at += kGroup * 16) {
        *reinterpret_cast<uint4*>(rows + at) = uint4{};
      }
    }
    show_async();
    meet_group(group_);
  }

  // The stage before is free, in both CTAs: each loads a part of it.
  __device__ void release() const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (last_ >= 0 && lane < kCluster) arrive_at(&shared_.empty[last_], lane);
    __syncwarp();
  }

  Shared<P>& shared_;
  const int group_;
  Turn<Shared<P>::kStages> turn_;
  int last_ = -1;  // the stage whose products are under way
};

// The stages of a group's half of a tile. A stage is a block of k: its products are added to the sums after their scales.
template <class P>
class BlockMultiplier {
 public:
  __device__ BlockMultiplier(Shared<P>& shared, int group) : shared_(shared), group_(group) {}

  // Without rows of its own a group frees the stages.
  __device__ void skip(int steps) {
    for (int step = 0; step < steps; ++step) {
      await(&shared_.full[turn_.stage], turn_.parity);
      turn_.next();
      release();
    }
  }

  __device__ __forceinline__ void run(int steps, float (&sums)[P::kSums]) {
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
    float even[P::kSums];
    float odd[P::kSums];
    int step = 0;
    // One group waits for its products while the other one's are under way.
    if (group_ == 1) {
      begin(even);
      add<0>(even, sums);
      step = 1;
    }
    // Products are under way across no branch, or the compiler lets each one wait for the one before.
    for (; step + 1 < steps; step += 2) {
      begin(even);
      begin(odd);
      add<1>(even, sums);
      add<0>(odd, sums);
    }
    if (step < steps) {
      begin(even);
      add<0>(even, sums);
    }
  }

 private:
  __device__ __forceinline__ void begin(float (&products)[P::kSums]) {
    await(&shared_.full[turn_.stage], turn_.parity);
    const Operand operands(shared_.stages[turn_.stage]);
    begin_mma();
#pragma unroll
    for (int at = 0; at < kLine; at += 32) {
      multiply<typename P::T, 0, 0>(products, operands.at(group_ * kHalfBytes + at),
                                    operands.at(2 * kHalfBytes + at), at > 0);
    }
    commit_mma();
    turn_.next();
  }

  // Adds a stage's products, after which kLeft are under way.
  template <int kLeft>
  __device__ __forceinline__ void add(float (&products)[P::kSums], float (&sums)[P::kSums]) {
    const float* const scales = shared_.scales[used_];
    const int row = (static_cast<int>(threadIdx.x) - kGroup) / 32 * kWarpRows +
                    static_cast<int>(threadIdx.x) % 32 / 4;
    const float rows[2] = {scales[row], scales[row + 8]};
    const float halves[2] = {scales[kTile], scales[kTile + 1]};
    await_mma<kLeft>();
    hold(products);
    release();
    const float upper[2] = {rows[0] * halves[0], rows[0] * halves[1]};
    const float lower[2] = {rows[1] * halves[0], rows[1] * halves[1]};
#pragma unroll
    for (int i = 0; i < P::kSums; i += 4) {
      const int half = i / (P::kSums / 2);
      sums[i] += products[i] * upper[half];
      sums[i + 1] += products[i + 1] * upper[half];
      sums[i + 2] += products[i + 2] * lower[half];
      sums[i + 3] += products[i + 3] * lower[half];
    }
  }

  __device__ void release() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();  // all lanes have read the scales
    if (lane < kCluster) arrive_at(&shared_.empty[used_], lane);
    used_ = used_ + 1 == Shared<P>::kStages ? 0 : used_ + 1;
  }

  Shared<P>& shared_;
  const int group_;
  Turn<Shared<P>::kStages> turn_;  // whose products begin next
  int used_ = 0;                   // the stage that is given back next
};

template <class P>
__device__ void consume_blocks(const KernelParams& params, Shared<P>& shared) {
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1;
  const int warp = static_cast<int>(threadIdx.x) % kGroup / 32;
  Epilogue<P> epilogue(params.gemm, params.step, params.second, shared.staged[group * 4 + warp]);
  BlockMultiplier<P> multiplier(shared, group);
  Tiles<P> tiles(params, shared);
  for (Place place; tiles.next(place);) {
    const int first_row = place.first_row + group * kHalf;
    const int steps = tiles.steps(place);
    if (first_row >= place.end_row) {
      multiplier.skip(steps);
      continue;
    }
    float sums[P::kSums];
    const int tile = place.pair * kCluster + cluster_rank();
    const int own_row = first_row + warp * kWarpRows;
    multiplier.run(steps, sums);
    epilogue.store(sums, {place.expert, tile, own_row, min(place.end_row - own_row, kWarpRows)});
  }
}

template <class P>
__device__ void consume(const KernelParams& params, Shared<P>& shared) {
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1;
  const int warp = static_cast<int>(threadIdx.x) % kGroup / 32;
  Epilogue<P> epilogue(params.gemm, params.step, params.second, shared.staged[group * 4 + warp]);
  Multiplier<P> multiplier(shared, group);
  Tiles<P> tiles(params, shared);
  if (group == 1) pass_turn(group);
  int number = 0;
  for (Place place; tiles.next(place); ++number) {
    const int steps = tiles.steps(place);
    if (number % 2 != group) {
      multiplier.skip(steps);
      continue;
    }
    float upper[P::kSums];
    float lower[P::kSums];
    const int rows = place.end_row - place.first_row;
    const int left = place.end - place.begin;
    const int tile = place.pair * kCluster + cluster_rank();
    await_turn(group);
    if (rows > kHalf) {
      multiplier.template run<true>(steps, left, upper, lower);
    } else {
      multiplier.template run<false>(steps, left, upper, lower);
    }
    pass_turn(group);
    multiplier.finish();
    const auto store = [&](float (&sums)[P::kSums], int first) {
      epilogue.store(sums,
                     {place.expert, tile, place.first_row + first, min(rows - first, kWarpRows)});
    };
    store(upper, warp * kWarpRows);
    if (rows > kHalf) store(lower, kHalf + warp * kWarpRows);
  }
}

#endif

template <class P>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    grouped_gemm_kernel(const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  // Swizzled rows repeat after 1024 bytes.
  auto& shared =
      *reinterpret_cast<Shared<P>*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared<P>::kStages; ++stage) {
      init_barrier(&shared.full[stage], P::kBlocks ? 1 + 32 : 1);
      init_barrier(&shared.empty[stage], (P::kBlocks ? 2 : 1) * kCluster * kGroup / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < 32) count_tiles(params, shared);
  __syncthreads();
  meet_cluster();
  if (threadIdx.x < kGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce(params, shared);
    if constexpr (P::kBlocks) {
      if (threadIdx.x / 32 == 1) bring_scales(params, shared);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if constexpr (P::kBlocks) {
      consume_blocks(params, shared);
    } else {
      consume(params, shared);
    }
  }
  if constexpr (P::kWide) await_stores();
  // A CTA stays until the other one stores nothing more in its memory.
  meet_cluster();
#endif
}

struct Kernel {
  void (*launch)(KernelParams);
  int width;  // columns of a tile
  int shared_bytes;
};

template <class P>
Kernel kernel_of() {
  static_assert(kSharedBytes<P> <= 227 * 1024);
  return {grouped_gemm_kernel<P>, P::kWidth, kSharedBytes<P>};
}

// The kernel, or its other form: of a wide tile, or of a SwiGLU.
template <class T>
Kernel kernel_of(GroupedForm form, bool turned, bool other) {
  switch (form) {
    case GroupedForm::kRows:
      return turned ? kernel_of<Product<T, GroupedForm::kRows, true>>()
                    : kernel_of<Product<T, GroupedForm::kRows, false>>();
    case GroupedForm::kGate:
      if (other) return kernel_of<Product<T, GroupedForm::kGate, false, kTile, false, true>>();
      return turned ? kernel_of<Product<T, GroupedForm::kGate, true>>()
                    : kernel_of<Product<T, GroupedForm::kGate, false>>();
    case GroupedForm::kWeights:
      return other ? kernel_of<Product<T, GroupedForm::kWeights, true, kWideTile>>()
                   : kernel_of<Product<T, GroupedForm::kWeights, true>>();
  }
  return {};
}

Kernel scaled_kernel(GroupedForm form, bool by_blocks, bool other) {
  using T = __nv_fp8_e4m3;
  if (form == GroupedForm::kGate) {
    if (other) {
      return by_blocks ? kernel_of<Product<T, GroupedForm::kGate, false, kTile, true, true>>()
                       : kernel_of<Product<T, GroupedForm::kGate, false, kTile, false, true>>();
    }
    return by_blocks ? kernel_of<Product<T, GroupedForm::kGate, false, kTile, true>>()
                     : kernel_of<Product<T, GroupedForm::kGate, false>>();
  }
  return by_blocks ? kernel_of<Product<T, GroupedForm::kRows, false, kTile, true>>()
                   : kernel_of<Product<T, GroupedForm::kRows, false>>();
}

Kernel kernel_for(const GroupedGemmParams& gemm, bool other) {
  if (gemm.scale != nullptr) return scaled_kernel(gemm.form, gemm.by_blocks, other);
  return gemm.gate.element == Element::kFloat16
             ? kernel_of<__half>(gemm.form, gemm.turned, other)
             : kernel_of<__nv_bfloat16>(gemm.form, gemm.turned, other);
}

// The maps of boxes of rows of kLine bytes.
class Maps {
 public:
  explicit Maps(const GroupedGemmParams& gemm)
      : type_(gemm.scale != nullptr                    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
              : gemm.gate.element == Element::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
        bytes_(gemm.scale != nullptr ? 1 : 2) {}

  // The map of one matrix or, with a number of them, of that many. `after`: bytes between rows.
  bool make(CUtensorMap& map, const void* first, int64_t columns, int64_t rows,
            int64_t matrices = 0, int64_t after = 0, cuuint32_t box_rows = kHalf) const {
    const auto unsigned_of = [](int64_t number) { return static_cast<cuuint64_t>(number); };
    const cuuint64_t sizes[] = {unsigned_of(columns), unsigned_of(rows), unsigned_of(matrices)};
    const cuuint64_t row = unsigned_of(columns * bytes_ + after);
    const cuuint64_t strides[] = {row, row * unsigned_of(rows)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(kLine / bytes_), box_rows, 1};
    const cuuint32_t steps[] = {1, 1, 1};
    return call_cuTensorMapEncodeTiled(&map, type_, matrices == 0 ? 2u : 3u,
                                       const_cast<void*>(first), sizes, strides, box, steps,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

 private:
  CUtensorMapDataType type_;
  int64_t bytes_;  // of a number
};

bool make_maps(KernelParams& params) {
  const GroupedGemmParams& gemm = params.gemm;
  const Maps maps(gemm);
  const int64_t after = gemm.scale != nullptr ? scale_bytes(gemm.k, gemm.by_blocks) : 0;
  const void* const up = gemm.up_weight == nullptr ? gemm.weight : gemm.up_weight;
  const bool weights = gemm.form == GroupedForm::kWeights;
  const auto make_weight = [&](CUtensorMap& map, const void* weight) {
    if (weights) return maps.make(map, weight, gemm.k, gemm.rows);
    if (gemm.turned) return maps.make(map, weight, gemm.n, gemm.k, gemm.gate.experts);
    return gemm.k_slices ? maps.make(map, weight, gemm.k * gemm.gate.experts, gemm.n)
                         : maps.make(map, weight, gemm.k, gemm.n * gemm.gate.experts);
  };
  const int64_t width = weights ? gemm.n : gemm.k;
  return maps.make(params.input, gemm.input, width, gemm.rows, 0, after) &&
         maps.make(params.few, gemm.input, width, gemm.rows, 0, after, kFewRows) &&
         make_weight(params.weights[0], gemm.weight) && make_weight(params.weights[1], up);
}

int column_pairs(const GroupedGemmParams& gemm, int tile_width) {
  const int64_t pair = kCluster * (gemm.form == GroupedForm::kGate ? tile_width / 2 : tile_width);
  return static_cast<int>((gemm.gate.width + pair - 1) / pair);
}

// Up to this k the form of a SwiGLU is faster, and in fp8 always; measured.
constexpr int64_t kSwigluMaxK = 2048;

// A SwiGLU has its form where that is faster, and gradients of weights have the tile that is expected to end first. The bits are the same.
bool takes_other(const GroupedGemmParams& gemm) {
  if (gemm.form == GroupedForm::kRows) return false;
  if (gemm.form == GroupedForm::kGate) {
    const GateParams& gate = gemm.gate;
    const bool faster = gemm.scale != nullptr || gemm.k <= kSwigluMaxK;
    return faster && gate.activation == Activation::kSilu && gate.alpha == 1.0 &&
           gate.limit <= 0.0 && gate.offset == 0.0 && gate.gate_bias == nullptr &&
           !gate.interleaved && !gemm.turned;
  }
  const auto time = [&](int width) {
    constexpr int kCost = 28;  // columns that a tile takes longer than its products; measured
    const int64_t tiles =
        gemm.gate.experts * ((gemm.n + kTile - 1) / kTile) * column_pairs(gemm, width);
    const int clusters = gemm.ctas / kCluster;
    return (static_cast<double>(tiles) / clusters + 0.5) * (width + kCost);
  };
  return time(kWideTile) < time(kTile);
}

}  // namespace

cudaError_t load_grouped_gemm() {
  const auto set_memory = [](const Kernel& kernel) {
    return cudaFuncSetAttribute(kernel.launch, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kernel.shared_bytes);
  };
  for (const auto form : {GroupedForm::kRows, GroupedForm::kGate, GroupedForm::kWeights}) {
    for (const int options : {0, 1, 2}) {
      const bool turned = options == 1;
      const bool other = options == 2;
      for (const Kernel& kernel :
           {kernel_of<__nv_bfloat16>(form, turned, other), kernel_of<__half>(form, turned, other),
            scaled_kernel(form, false, other), scaled_kernel(form, true, other)}) {
        const cudaError_t error = set_memory(kernel);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_grouped_gemm(const GroupedGemmParams& gemm, cudaStream_t stream) {
  const GateParams& gate = gemm.gate;
  const bool weights = gemm.form == GroupedForm::kWeights;
  if (gemm.rows == 0 || gate.width == 0 || gate.experts == 0) return cudaSuccess;
  const Kernel kernel = kernel_for(gemm, takes_other(gemm));
  const bool gated = gemm.form == GroupedForm::kGate;
  const bool apart = gated && !gate.interleaved;  // gate and up are not neighbours
  KernelParams params{};
  params.gemm = gemm;
  params.step = apart ? kHalf : kernel.width;
  params.second = !apart ? kHalf : gemm.up_weight != nullptr ? 0 : static_cast<int32_t>(gate.width);
  params.column_pairs = column_pairs(gemm, kernel.width);
  params.expert_rows = gemm.k_slices ? 0 : static_cast<int32_t>(gemm.n);
  params.expert_k = gemm.k_slices ? static_cast<int32_t>(gemm.k) : 0;
  if (!make_maps(params)) return cudaErrorInvalidValue;
  const int64_t blocks = weights ? gate.experts * ((gemm.n + kTile - 1) / kTile)
                                 : (gemm.rows + kTile - 1) / kTile + gate.experts;
  const int64_t clusters =
      std::clamp<int64_t>(gemm.ctas / kCluster, 1, blocks * params.column_pairs);
  kernel.launch<<<static_cast<unsigned>(clusters * kCluster), kThreads,
                  static_cast<size_t>(kernel.shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace overlap::kernels
