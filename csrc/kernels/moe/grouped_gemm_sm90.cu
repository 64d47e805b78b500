// A CTA is a warp that loads and two groups that take tiles by turns: one multiplies while the other stores. Two CTAs of a cluster
// take the same rows and neighbouring columns; each loads half of the rows for both.
//
//   loads    | 0 | 1 | 2 | 3 | ...
//   group 0  |   | mma 0 | store 0 | mma 2 | ...
//   group 1  |           | mma 1   | store 1 | ...
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/chunk/element.cuh"
#include "kernels/gemm/tensor_map_encoder.h"
#include "kernels/moe/gate.cuh"
#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/grouped_gemm_ptx.cuh"

namespace overlap::kernels {
namespace {

constexpr int kTile = 128;  // rows, and columns before a gate
constexpr int kK = 64;      // numbers of k of a stage: 128 bytes, which the swizzle repeats
constexpr int kHalf = kTile / 2;
constexpr int kHalfBytes = kHalf * kK * 2;
constexpr int kStageBytes = 4 * kHalfBytes;  // two halves of rows, two of columns
constexpr int kStages = 5;
constexpr int kCluster = 2;
constexpr int kGroup = 128;  // threads
constexpr int kThreads = 3 * kGroup;
constexpr int kWarpRows = 16;  // of a warp's sums at a time
constexpr int kPitch =
    kTile * 2 + 16;       // bytes of a staged row: no two rows of a store meet in a bank
constexpr int kBand = 8;  // tiles of rows that are computed together for each tile of columns

struct Shared {
  char stages[kStages][kStageBytes];
  char staged[2 * kGroup / 32][kWarpRows * kPitch];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int32_t ends[kMaxGroupedExperts];  // of each expert's cluster tiles
};
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;
static_assert(kSharedBytes <= 227 * 1024);

struct KernelParams {
  CUtensorMap input;
  CUtensorMap weights[2];  // of each half of a tile's columns
  GroupedGemmParams gemm;
  int32_t step;          // rows of weights from tile to tile
  int32_t second;        // the first row of the second half of tile 0
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

// A cluster's tile.
struct Place {
  int expert;
  int first_row;  // of the tile
  int end_row;    // of the expert
  int pair;       // of columns
};

// All tiles of all experts, in order of expert; an expert's by bands of rows, a band's by columns.
class Tiles {
 public:
  __device__ Tiles(const KernelParams& params, const Shared& shared)
      : params_(params), shared_(shared), tile_(static_cast<int>(blockIdx.x) / kCluster) {}

  __device__ bool next(Place& place) {
    const int experts = params_.gemm.gate.experts;
    while (expert_ < experts && shared_.ends[expert_] <= tile_) ++expert_;
    if (expert_ == experts) return false;
    const int32_t* offs = params_.gemm.gate.offs;
    const int begin = expert_ == 0 ? 0 : offs[expert_ - 1];
    const int end = offs[expert_];
    const int first = expert_ == 0 ? 0 : shared_.ends[expert_ - 1];
    const int blocks = (end - begin + kTile - 1) / kTile;
    const int index = tile_ - first;
    const int band = index / (kBand * params_.column_pairs);
    const int of_band = index - band * kBand * params_.column_pairs;
    const int height = min(kBand, blocks - band * kBand);
    const int pair = of_band / height;
    const int block = band * kBand + of_band - pair * height;
    place = {expert_, begin + block * kTile, end, pair};
    tile_ += static_cast<int>(gridDim.x) / kCluster;
    return true;
  }

 private:
  const KernelParams& params_;
  const Shared& shared_;
  int tile_;
  int expert_ = 0;
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

__device__ void count_tiles(const KernelParams& params, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x);
  int total = 0;
  for (int first = 0; first < params.gemm.gate.experts; first += 32) {
    const int expert = first + lane;
    int tiles = 0;
    if (expert < params.gemm.gate.experts) {
      const int32_t* offs = params.gemm.gate.offs;
      const int rows = offs[expert] - (expert == 0 ? 0 : offs[expert - 1]);
      tiles = (rows + kTile - 1) / kTile * params.column_pairs;
    }
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffff, tiles, distance);
      if (lane >= distance) tiles += before;
    }
    if (expert < params.gemm.gate.experts) shared.ends[expert] = total + tiles;
    total += __shfl_sync(0xffffffff, tiles, 31);
  }
}

__device__ void produce(const KernelParams& params, Shared& shared) {
  const int rank = cluster_rank();
  const int steps = static_cast<int>((params.gemm.k + kK - 1) / kK);
  Tiles tiles(params, shared);
  Turn turn;
  for (Place place; tiles.next(place);) {
    const int row = place.first_row + rank * kHalf;
    const int64_t expert = place.expert * params.gemm.n;
    const int64_t first = expert + int64_t{place.pair * kCluster + rank} * params.step;
    for (int step = 0; step < steps; ++step) {
      await(&shared.empty[turn.stage], turn.parity ^ 1);
      char* const stage = shared.stages[turn.stage];
      uint64_t* const full = &shared.full[turn.stage];
      expect_bytes(full, kStageBytes);
      load_box_for_both(params.input, stage + rank * kHalfBytes, full, step * kK, row);
      load_box(params.weights[0], stage + 2 * kHalfBytes, full, step * kK, static_cast<int>(first));
      load_box(params.weights[1], stage + 3 * kHalfBytes, full, step * kK,
               static_cast<int>(first + params.second));
      turn.next();
    }
  }
}

// A warp's way with its sums of sixteen rows: it stages them, rounded, and copies each row on, 16 bytes a lane, through gate and up with
// their biases. Sums 4j and 4j + 1 are of row lane / 4 and columns 8j + lane % 4 * 2 and the next, 4j + 2 and 4j + 3 of eight rows further.
template <class T, bool kGated>
class Epilogue {
 public:
  __device__ Epilogue(const KernelParams& params, char* staged)
      : params_(params.gemm), staged_(staged), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void store(const float (&sums)[kMmaSums], const Place& place, int tile,
                        int first_row) {
    const int rows = min(place.end_row - first_row, kWarpRows);
    if (rows <= 0) return;
    __syncwarp();  // nobody reads what was staged before
    const int row = lane_ / 4;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const int column = 8 * j + lane_ % 4 * 2;
      char* const to = staged_ + row * kPitch + column * 2;
      *reinterpret_cast<uint32_t*>(to) = round_pair<T>(sums[4 * j], sums[4 * j + 1]);
      *reinterpret_cast<uint32_t*>(to + 8 * kPitch) =
          round_pair<T>(sums[4 * j + 2], sums[4 * j + 3]);
    }
    __syncwarp();
    copy(place.expert, tile, first_row, rows);
  }

 private:
  using Part = Access<T, 8>;
  static constexpr int kColumns = kGated ? kHalf : kTile;  // of the output
  static constexpr int kParts = kColumns / 8;
  static constexpr int kRows = 32 / kParts;  // that the warp copies at a time

  __device__ const Part& staged(int row, int part) const {
    return *reinterpret_cast<const Part*>(staged_ + row * kPitch + part * 16);
  }

  // Eight columns of gate and up.
  struct Columns {
    float gate[8];
    float up[8];
  };
  __device__ void add(Columns& columns, const Part& first, const Part& second) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (params_.gate.interleaved) {
        const Part& both = e < 4 ? first : second;
        columns.gate[e] += to_float(both.element[e % 4 * 2]);
        columns.up[e] += to_float(both.element[e % 4 * 2 + 1]);
      } else {
        columns.gate[e] += to_float(first.element[e]);
        columns.up[e] += to_float(second.element[e]);
      }
    }
  }
  __device__ void add_bias(Columns& columns, int expert, int64_t column) const {
    const GateParams& gate = params_.gate;
    if (gate.gate_bias == nullptr) return;
    const auto at = [&](const void* bias, int64_t from) -> const Part& {
      return *reinterpret_cast<const Part*>(static_cast<const T*>(bias) +
                                            expert * gate.bias_stride + from);
    };
    if (gate.interleaved) {
      add(columns, at(gate.gate_bias, 2 * column), at(gate.gate_bias, 2 * column + 8));
    } else {
      add(columns, at(gate.gate_bias, column), at(gate.up_bias, column));
    }
  }

  // The activation is chosen outside of the loop: its code is short then.
  template <Activation kActivation>
  __device__ __forceinline__ void apply_all(GateForm<float> form, const Columns& columns,
                                            Part& result) const {
    form.activation = kActivation;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const Gated<float> active = apply(form, true, columns.gate[e], columns.up[e]);
      round_to(active.value * active.factor, result.element[e]);
    }
  }
  __device__ void apply_gate(const Columns& columns, Part& result) const {
    const GateForm<float> form(params_.gate);
    switch (form.activation) {
      case Activation::kNone:
        return apply_all<Activation::kNone>(form, columns, result);
      case Activation::kSilu:
        return apply_all<Activation::kSilu>(form, columns, result);
      case Activation::kGelu:
        return apply_all<Activation::kGelu>(form, columns, result);
      case Activation::kGeluTanh:
        return apply_all<Activation::kGeluTanh>(form, columns, result);
      case Activation::kRelu:
        return apply_all<Activation::kRelu>(form, columns, result);
    }
  }

  // A row's places: in the output, and at home.
  struct Places {
    char* here = nullptr;
    char* home = nullptr;
  };
  __device__ Places places(int64_t row) const {
    const int64_t row_bytes = params_.gate.width * 2;
    const HomeParams& home = params_.home;
    Places found;
    if (params_.gate.output != nullptr) {
      found.here = static_cast<char*>(params_.gate.output) + row * row_bytes;
    }
    if (home.source != nullptr) {
      const int64_t source = home.source[row];
      const int64_t rank = source < 0 ? home.rank : source / home.stride;
      if (rank != home.rank) {
        found.home = home.slots[rank] + (source - rank * home.stride) * row_bytes;
        if (!home.keep) found.here = nullptr;
      }
    }
    return found;
  }

  __device__ void copy(int expert, int tile, int first_row, int rows) const {
    const int part = lane_ % kParts;
    const int64_t column = int64_t{tile} * kColumns + part * 8;
    const Places own = lane_ < rows ? places(first_row + lane_) : Places{};
    const bool inside = column < params_.gate.width;
    Columns bias{};
    if (kGated && inside) add_bias(bias, expert, column);
    const bool turns = kGated && params_.gate.interleaved;
#pragma unroll 1
    for (int first = 0; first < rows; first += kRows) {
      const int row = first + lane_ / kParts;
      char* const here = from_lane(own.here, row);
      char* const home = from_lane(own.home, row);
      if (row >= rows || !inside) continue;
      Part value = staged(row, turns ? 2 * part : part);
      if constexpr (kGated) {
        Columns columns{};
        add(columns, value, staged(row, turns ? 2 * part + 1 : part + kParts));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          columns.gate[e] += bias.gate[e];
          columns.up[e] += bias.up[e];
        }
        apply_gate(columns, value);
      }
      if (home != nullptr) *reinterpret_cast<Part*>(home + column * 2) = value;
      if (here != nullptr) *reinterpret_cast<Part*>(here + column * 2) = value;
    }
  }
  __device__ static char* from_lane(char* pointer, int lane) {
    return reinterpret_cast<char*>(
        __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(pointer), lane));
  }

  const GroupedGemmParams& params_;
  char* const staged_;
  const int lane_;
};

// A warp's part in the products of its group's tiles.
class Multiplier {
 public:
  __device__ explicit Multiplier(Shared& shared) : shared_(shared) {}

  __device__ void skip(int steps) { turn_.advance(steps); }

  // The products of a tile, or of its first kHalf rows.
  template <class T, bool kWhole>
  __device__ __forceinline__ void run(int steps, float (&upper)[kMmaSums],
                                      float (&lower)[kMmaSums]) {
    for (int step = 0; step < steps; ++step) {
      await(&shared_.full[turn_.stage], turn_.parity);
      const char* const stage = shared_.stages[turn_.stage];
      const uint64_t a = operand(stage);
      const uint64_t b = operand(stage + 2 * kHalfBytes);
      begin_mma();
#pragma unroll
      for (int at = 0; at < kK / 16; ++at) {  // 32 bytes each
        const int adds = step > 0 || at > 0;
        multiply<T>(upper, a + 2 * at, b + 2 * at, adds);
        if constexpr (kWhole) multiply<T>(lower, a + (kHalfBytes >> 4) + 2 * at, b + 2 * at, adds);
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
  // The stage before is free, in both CTAs: each loads a part of it.
  __device__ void release() const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (last_ >= 0 && lane < kCluster) arrive_at(&shared_.empty[last_], lane);
    __syncwarp();
  }

  Shared& shared_;
  Turn turn_;
  int last_ = -1;  // the stage whose products are under way
};

template <class T, bool kGated>
__device__ void consume(const KernelParams& params, Shared& shared) {
  const int group = static_cast<int>(threadIdx.x) / kGroup - 1;
  const int warp = static_cast<int>(threadIdx.x) % kGroup / 32;
  const int steps = static_cast<int>((params.gemm.k + kK - 1) / kK);
  Epilogue<T, kGated> epilogue(params, shared.staged[group * 4 + warp]);
  Multiplier multiplier(shared);
  Tiles tiles(params, shared);
  if (group == 1) pass_turn(group);
  int number = 0;
  for (Place place; tiles.next(place); ++number) {
    if (number % 2 != group) {
      multiplier.skip(steps);
      continue;
    }
    float upper[kMmaSums];
    float lower[kMmaSums];
    const bool whole = place.end_row - place.first_row > kHalf;
    await_turn(group);
    if (whole) {
      multiplier.template run<T, true>(steps, upper, lower);
    } else {
      multiplier.template run<T, false>(steps, upper, lower);
    }
    pass_turn(group);
    multiplier.finish();
    const int tile = place.pair * kCluster + cluster_rank();
    epilogue.store(upper, place, tile, place.first_row + warp * kWarpRows);
    if (whole) epilogue.store(lower, place, tile, place.first_row + kHalf + warp * kWarpRows);
  }
}

#endif

template <class T, bool kGated>
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
  if (threadIdx.x < 32) count_tiles(params, shared);
  __syncthreads();
  meet_cluster();
  if (threadIdx.x < kGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce(params, shared);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<T, kGated>(params, shared);
  }
  // A CTA stays until the other one stores nothing more in its memory.
  meet_cluster();
#endif
}

using Kernel = void (*)(KernelParams);

Kernel kernel_of(Element element, bool gated) {
  if (element == Element::kFloat16) {
    return gated ? grouped_gemm_kernel<__half, true> : grouped_gemm_kernel<__half, false>;
  }
  return gated ? grouped_gemm_kernel<__nv_bfloat16, true>
               : grouped_gemm_kernel<__nv_bfloat16, false>;
}

CUresult make_map(CUtensorMap& map, Element element, const void* rows, int64_t count, int64_t k) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(k) * 2};
  const cuuint32_t box[] = {kK, kHalf};
  const cuuint32_t steps[] = {1, 1};
  return call_cuTensorMapEncodeTiled(
      &map,
      element == Element::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      2u, const_cast<void*>(rows), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace

cudaError_t load_grouped_gemm_sm90() {
  for (const Element element : {Element::kBFloat16, Element::kFloat16}) {
    for (const bool gated : {false, true}) {
      const cudaError_t error = cudaFuncSetAttribute(
          kernel_of(element, gated), cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_grouped_gemm_sm90(const GroupedGemmParams& gemm, cudaStream_t stream) {
  if (gemm.rows == 0 || gemm.gate.width == 0 || gemm.gate.experts == 0) return cudaSuccess;
  const GateParams& gate = gemm.gate;
  const bool apart = gemm.gated && !gate.interleaved;  // gate and up are not neighbours
  KernelParams params{};
  params.gemm = gemm;
  params.step = apart ? kHalf : kTile;
  params.second = !apart ? kHalf : gemm.up_weight != nullptr ? 0 : static_cast<int32_t>(gate.width);
  const int64_t columns = gemm.gated ? kHalf : kTile;  // of the output
  params.column_pairs =
      static_cast<int32_t>((gate.width + kCluster * columns - 1) / (kCluster * columns));
  const int64_t weights = gate.experts * gemm.n;
  const void* const up = gemm.up_weight == nullptr ? gemm.weight : gemm.up_weight;
  if (make_map(params.input, gate.element, gemm.input, gemm.rows, gemm.k) != CUDA_SUCCESS ||
      make_map(params.weights[0], gate.element, gemm.weight, weights, gemm.k) != CUDA_SUCCESS ||
      make_map(params.weights[1], gate.element, up, weights, gemm.k) != CUDA_SUCCESS) {
    return cudaErrorInvalidValue;
  }
  const int64_t most = ((gemm.rows + kTile - 1) / kTile + gate.experts) * params.column_pairs;
  const int64_t clusters = std::clamp<int64_t>(gemm.ctas / kCluster, 1, most);
  const Kernel kernel = kernel_of(gate.element, gemm.gated);
  kernel<<<static_cast<unsigned>(clusters * kCluster), kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace overlap::kernels
