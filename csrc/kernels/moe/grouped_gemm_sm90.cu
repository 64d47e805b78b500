// A CTA is a warp that loads and two groups that take tiles by turns: one multiplies while the other stores. Two CTAs of a cluster
// take the same rows and neighbouring columns; each loads half of the rows for both.
//
//   loads    | 0 | 1 | 2 | 3 | ...
//   group 0  |   | mma 0 | store 0 | mma 2 | ...
//   group 1  |           | mma 1   | store 1 | ...
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/gemm/tensor_map_encoder.h"
#include "kernels/moe/grouped_epilogue.cuh"
#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/grouped_gemm_ptx.cuh"

namespace overlap::kernels {
namespace {

constexpr int kLine = 128;  // bytes of k of a stage, which the swizzle repeats
constexpr int kHalfBytes = kHalf * kLine;
constexpr int kStageBytes = 4 * kHalfBytes;  // two halves of rows, two of columns
constexpr int kStages = 5;
constexpr int kCluster = 2;
constexpr int kGroup = 128;  // threads
constexpr int kThreads = 3 * kGroup;
constexpr int kBand = 8;  // tiles of rows that are computed together for each tile of columns

struct Shared {
  char stages[kStages][kStageBytes];
  char staged[2 * kGroup / 32][kWarpRows * kPitch];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int32_t ends[kMaxGroupedExperts];  // of each range's cluster tiles
};
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;
static_assert(kSharedBytes <= 227 * 1024);

// Numbers of k of a stage.
template <class T>
constexpr int kK = kLine / static_cast<int>(sizeof(T));

struct KernelParams {
  CUtensorMap input;
  CUtensorMap weights[2];  // of each half of a tile's columns
  GroupedGemmParams gemm;
  int32_t step;          // columns of weights from tile to tile
  int32_t second;        // the first column of the second half of tile 0
  int32_t column_pairs;  // cluster tiles of columns
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The groups of a CTA multiply by turns. A group's loads are the only ones that can have come then, so that a stage's parity says which.
__device__ __forceinline__ void await_turn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(2 * kGroup) : "memory");
}
__device__ __forceinline__ void pass_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(2 - group), "n"(2 * kGroup) : "memory");
}
__device__ __forceinline__ void meet_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(kGroup) : "memory");
}

// Rows of an expert.
struct Range {
  int begin;
  int end;
};
__device__ __forceinline__ Range range_of(const GroupedGemmParams& gemm, int range) {
  if (gemm.ranges != nullptr) return {gemm.ranges[2 * range], gemm.ranges[2 * range + 1]};
  return {range == 0 ? 0 : gemm.gate.offs[range - 1], gemm.gate.offs[range]};
}
__device__ __forceinline__ int ranges_of(const GroupedGemmParams& gemm) {
  return gemm.gate.experts * gemm.ranges_of_expert;
}

// A cluster's tile.
struct Place {
  int expert;
  int begin;      // the range's first row of the input
  int end;        // after its last one
  int first_row;  // of the tile; of kWeights, a row of the weight
  int end_row;
  int pair;  // of columns
};

// All tiles of all ranges, in order of range; a range's by bands of rows, a band's by columns.
template <class T, GroupedForm kForm>
class Tiles {
 public:
  __device__ Tiles(const KernelParams& params, const Shared& shared)
      : params_(params), shared_(shared), tile_(static_cast<int>(blockIdx.x) / kCluster) {}

  __device__ bool next(Place& place) {
    const int ranges = ranges_of(params_.gemm);
    while (range_ < ranges && shared_.ends[range_] <= tile_) ++range_;
    if (range_ == ranges) return false;
    const Range rows = range_of(params_.gemm, range_);
    place.expert = range_ / params_.gemm.ranges_of_expert;
    place.begin = rows.begin;
    place.end = rows.end;
    const int origin = kForm == GroupedForm::kWeights ? 0 : place.begin;
    place.end_row = kForm == GroupedForm::kWeights ? static_cast<int>(params_.gemm.n) : place.end;
    const int first = range_ == 0 ? 0 : shared_.ends[range_ - 1];
    const int blocks = (place.end_row - origin + kTile - 1) / kTile;
    const int index = tile_ - first;
    const int band = index / (kBand * params_.column_pairs);
    const int of_band = index - band * kBand * params_.column_pairs;
    const int height = min(kBand, blocks - band * kBand);
    place.pair = of_band / height;
    place.first_row = origin + (band * kBand + of_band - place.pair * height) * kTile;
    tile_ += static_cast<int>(gridDim.x) / kCluster;
    return true;
  }

  // The stages of a tile.
  __device__ int steps(const Place& place) const {
    const int k =
        kForm == GroupedForm::kWeights ? place.end - place.begin : static_cast<int>(params_.gemm.k);
    return (k + kK<T> - 1) / kK<T>;
  }

 private:
  const KernelParams& params_;
  const Shared& shared_;
  int tile_;
  int range_ = 0;
};

// The stage that comes next, and how often it was used.
struct Turn {
  int stage = 0;
  int parity = 0;
  __device__ void advance(int steps) {
    stage += steps;
    parity ^= (stage / kStages) & 1;
    stage %= kStages;
  }
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <GroupedForm kForm>
__device__ void count_tiles(const KernelParams& params, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x);
  int total = 0;
  const int ranges = ranges_of(params.gemm);
  for (int first = 0; first < ranges; first += 32) {
    const int range = first + lane;
    int tiles = 0;
    if (range < ranges) {
      const Range of_input = range_of(params.gemm, range);
      const int rows = kForm == GroupedForm::kWeights ? static_cast<int>(params.gemm.n)
                                                      : of_input.end - of_input.begin;
      tiles = (rows + kTile - 1) / kTile * params.column_pairs;
    }
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffff, tiles, distance);
      if (lane >= distance) tiles += before;
    }
    if (range < ranges) shared.ends[range] = total + tiles;
    total += __shfl_sync(0xffffffff, tiles, 31);
  }
}

template <class T, GroupedForm kForm, bool kTurned>
__device__ void produce(const KernelParams& params, Shared& shared) {
  const int rank = cluster_rank();
  Tiles<T, kForm> tiles(params, shared);
  Turn turn;
  for (Place place; tiles.next(place);) {
    const int row = place.first_row + rank * kHalf;
    const int column = (place.pair * kCluster + rank) * params.step;
    const int steps = tiles.steps(place);
    for (int step = 0; step < steps; ++step) {
      await(&shared.empty[turn.stage], turn.parity ^ 1);
      char* const stage = shared.stages[turn.stage];
      uint64_t* const full = &shared.full[turn.stage];
      expect_bytes(full, kStageBytes);
      const int k = step * kK<T>;
      if constexpr (kForm == GroupedForm::kWeights) {
        load_box_for_both(params.input, stage + rank * kHalfBytes, full, row, place.begin + k);
      } else {
        load_box_for_both(params.input, stage + rank * kHalfBytes, full, k, row);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const CUtensorMap& map = params.weights[half];
        char* const to = stage + (2 + half) * kHalfBytes;
        const int from = column + half * params.second;
        if constexpr (kForm == GroupedForm::kWeights) {
          load_box(map, to, full, from, place.begin + k);
        } else if constexpr (kTurned) {
          load_box(map, to, full, from, k, place.expert);
        } else {
          load_box(map, to, full, k, static_cast<int>(place.expert * params.gemm.n) + from);
        }
      }
      turn.next();
    }
  }
}

// A warp's part in the products of its group's tiles.
template <class T, GroupedForm kForm, bool kTurned>
class Multiplier {
 public:
  __device__ Multiplier(Shared& shared, int group) : shared_(shared), group_(group) {}

  __device__ void skip(int steps) { turn_.advance(steps); }

  // The products of a tile, or of its first kHalf rows. kWeights: of `left` rows of the input.
  template <bool kWhole>
  __device__ __forceinline__ void run(int steps, int left, float (&upper)[kMmaSums],
                                      float (&lower)[kMmaSums]) {
    if (kTurnedA && steps == 0) {
#pragma unroll
      for (int i = 0; i < kMmaSums; ++i) upper[i] = lower[i] = 0.0f;
    }
    for (int step = 0; step < steps; ++step, left -= kK<T>) {
      await(&shared_.full[turn_.stage], turn_.parity);
      char* const stage = shared_.stages[turn_.stage];
      if (kTurnedA && left < kK<T>) clear_rows(stage, left);
      const uint64_t a = operand(stage);
      const uint64_t b = operand(stage + 2 * kHalfBytes, kTurnedB ? kHalfBytes : 16);
      begin_mma();
#pragma unroll
      for (int at = 0; at < kLine / 32; ++at) {
        const int adds = step > 0 || at > 0;
        const uint64_t of_a = a + at * step_of(kTurnedA);
        const uint64_t of_b = b + at * step_of(kTurnedB);
        multiply<T, kTurnedA, kTurnedB>(upper, of_a, of_b, adds);
        if constexpr (kWhole) {
          multiply<T, kTurnedA, kTurnedB>(lower, of_a + (kHalfBytes >> 4), of_b, adds);
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
  static constexpr bool kTurnedA = kForm == GroupedForm::kWeights;
  static constexpr bool kTurnedB = kTurned || kTurnedA;
  // 32 bytes of each row or, turned, sixteen rows.
  static constexpr uint64_t step_of(bool turned) { return (turned ? 16 * kLine : 32) >> 4; }

  // Rows after the expert's last one are another's, or nobody's.
  __device__ void clear_rows(char* stage, int first) const {
    const int thread = static_cast<int>(threadIdx.x) % kGroup;
    for (int half = 0; half < 4; ++half) {
      char* const rows = stage + half * kHalfBytes;
      for (int at = first * kLine + thread * 16; at < kHalfBytes; at += kGroup * 16) {
        *reinterpret_cast<uint4*>(rows + at) = uint4{};
      }
    }
    show_mma();
    meet_group(group_);
  }

  // The stage before is free, in both CTAs: each loads a part of it.
  __device__ void release() const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (last_ >= 0 && lane < kCluster) arrive_at(&shared_.empty[last_], lane);
    __syncwarp();
  }

  Shared& shared_;
  const int group_;
  Turn turn_;
  int last_ = -1;  // the stage whose products are under way
};

template <class T, GroupedForm kForm, bool kTurned>
__device__ void consume(const KernelParams& params, Shared& shared) {
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1;
  const int warp = static_cast<int>(threadIdx.x) % kGroup / 32;
  Epilogue<T, kForm> epilogue(params.gemm, params.step, params.second,
                              shared.staged[group * 4 + warp]);
  Multiplier<T, kForm, kTurned> multiplier(shared, group);
  Tiles<T, kForm> tiles(params, shared);
  if (group == 1) pass_turn(group);
  int number = 0;
  for (Place place; tiles.next(place); ++number) {
    const int steps = tiles.steps(place);
    if (number % 2 != group) {
      multiplier.skip(steps);
      continue;
    }
    float upper[kMmaSums];
    float lower[kMmaSums];
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
    const auto store = [&](float (&sums)[kMmaSums], int first) {
      epilogue.store(sums,
                     {place.expert, tile, place.first_row + first, min(rows - first, kWarpRows)});
    };
    store(upper, warp * kWarpRows);
    if (rows > kHalf) store(lower, kHalf + warp * kWarpRows);
  }
}

#endif

template <class T, GroupedForm kForm, bool kTurned>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    grouped_gemm_kernel(const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  // Swizzled rows repeat after 1024 bytes.
  Shared& shared =
      *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&shared.full[stage], 1);
      init_barrier(&shared.empty[stage], kCluster * kGroup / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < 32) count_tiles<kForm>(params, shared);
  __syncthreads();
  meet_cluster();
  if (threadIdx.x < kGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce<T, kForm, kTurned>(params, shared);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<T, kForm, kTurned>(params, shared);
  }
  // A CTA stays until the other one stores nothing more in its memory.
  meet_cluster();
#endif
}

using Kernel = void (*)(KernelParams);

template <GroupedForm kForm, bool kTurned>
Kernel kernel_for(Element element) {
  return element == Element::kFloat16 ? grouped_gemm_kernel<__half, kForm, kTurned>
                                      : grouped_gemm_kernel<__nv_bfloat16, kForm, kTurned>;
}

Kernel kernel_of(Element element, GroupedForm form, bool turned, bool fp8 = false) {
  if (fp8) {
    return form == GroupedForm::kGate
               ? grouped_gemm_kernel<__nv_fp8_e4m3, GroupedForm::kGate, false>
               : grouped_gemm_kernel<__nv_fp8_e4m3, GroupedForm::kRows, false>;
  }
  switch (form) {
    case GroupedForm::kRows:
      return turned ? kernel_for<GroupedForm::kRows, true>(element)
                    : kernel_for<GroupedForm::kRows, false>(element);
    case GroupedForm::kGate:
      return turned ? kernel_for<GroupedForm::kGate, true>(element)
                    : kernel_for<GroupedForm::kGate, false>(element);
    case GroupedForm::kWeights:
      return kernel_for<GroupedForm::kWeights, true>(element);
  }
  return nullptr;
}

// The maps of boxes of kHalf rows of kLine bytes.
class Maps {
 public:
  explicit Maps(const GroupedGemmParams& gemm)
      : type_(gemm.scale != nullptr                    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
              : gemm.gate.element == Element::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
        bytes_(gemm.scale != nullptr ? 1 : 2) {}

  // The map of one matrix or, with a number of them, of that many. `after`: bytes between rows.
  bool make(CUtensorMap& map, const void* first, int64_t columns, int64_t rows,
            int64_t matrices = 0, int64_t after = 0) const {
    const auto unsigned_of = [](int64_t number) { return static_cast<cuuint64_t>(number); };
    const cuuint64_t sizes[] = {unsigned_of(columns), unsigned_of(rows), unsigned_of(matrices)};
    const cuuint64_t row = unsigned_of(columns * bytes_ + after);
    const cuuint64_t strides[] = {row, row * unsigned_of(rows)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(kLine / bytes_), kHalf, 1};
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
  const int64_t after = gemm.scale != nullptr ? kPackedBytes : 0;
  const void* const up = gemm.up_weight == nullptr ? gemm.weight : gemm.up_weight;
  const bool weights = gemm.form == GroupedForm::kWeights;
  const auto make_weight = [&](CUtensorMap& map, const void* weight) {
    if (weights) return maps.make(map, weight, gemm.k, gemm.rows);
    return gemm.turned ? maps.make(map, weight, gemm.n, gemm.k, gemm.gate.experts)
                       : maps.make(map, weight, gemm.k, gemm.n * gemm.gate.experts);
  };
  return maps.make(params.input, gemm.input, weights ? gemm.n : gemm.k, gemm.rows, 0, after) &&
         make_weight(params.weights[0], gemm.weight) && make_weight(params.weights[1], up);
}

cudaError_t set_memory(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
}

}  // namespace

cudaError_t load_grouped_gemm_sm90() {
  for (const Element element : {Element::kBFloat16, Element::kFloat16}) {
    for (const auto form : {GroupedForm::kRows, GroupedForm::kGate, GroupedForm::kWeights}) {
      for (const bool turned : {false, true}) {
        const cudaError_t error = set_memory(kernel_of(element, form, turned));
        if (error != cudaSuccess) return error;
      }
    }
  }
  for (const auto form : {GroupedForm::kRows, GroupedForm::kGate}) {
    const cudaError_t error = set_memory(kernel_of(Element::kBFloat16, form, false, true));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_grouped_gemm_sm90(const GroupedGemmParams& gemm, cudaStream_t stream) {
  const GateParams& gate = gemm.gate;
  const bool weights = gemm.form == GroupedForm::kWeights;
  if (gemm.rows == 0 || gate.width == 0 || gate.experts == 0) return cudaSuccess;
  const bool gated = gemm.form == GroupedForm::kGate;
  const bool apart = gated && !gate.interleaved;  // gate and up are not neighbours
  KernelParams params{};
  params.gemm = gemm;
  params.step = apart ? kHalf : kTile;
  params.second = !apart ? kHalf : gemm.up_weight != nullptr ? 0 : static_cast<int32_t>(gate.width);
  const int64_t columns = gated ? kHalf : kTile;  // of the output
  params.column_pairs =
      static_cast<int32_t>((gate.width + kCluster * columns - 1) / (kCluster * columns));
  if (!make_maps(params)) return cudaErrorInvalidValue;
  const int64_t blocks =
      weights ? gate.experts * ((gemm.n + kTile - 1) / kTile)
              : (gemm.rows + kTile - 1) / kTile + gate.experts * gemm.ranges_of_expert;
  const int64_t clusters =
      std::clamp<int64_t>(gemm.ctas / kCluster, 1, blocks * params.column_pairs);
  const Kernel kernel = kernel_of(gate.element, gemm.form, gemm.turned, gemm.scale != nullptr);
  kernel<<<static_cast<unsigned>(clusters * kCluster), kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace overlap::kernels
