// The tiles of a grouped GEMM in their order, and the shared memory that they pass through.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/moe/grouped_epilogue.cuh"
#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/grouped_gemm_ptx.cuh"

namespace overlap::kernels {

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
  float scales[kStages][kTile + 2];  // of blocks: of rows, and of the columns' two halves
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

#endif

}  // namespace overlap::kernels
