// The tiles of a grouped GEMM in their order, the shared memory that they pass through, and the warps that load them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/moe/grouped_epilogue.cuh"
#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/grouped_gemm_ptx.cuh"

namespace overlap::kernels {

constexpr int kHalfBytes = kHalf * kLine;
constexpr int kFewRows = 16;  // of a box that replaces one of kHalf rows
constexpr int kCluster = 2;
constexpr int kGroup = 128;  // threads
constexpr int kThreads = 3 * kGroup;
constexpr int kBand = 8;  // tiles of rows that are computed together for each tile of columns

template <class P>
struct Shared {
  static constexpr int kStages = P::kWide ? 4 : 5;
  char stages[kStages][2 * kHalfBytes + P::kWidth * kLine];  // rows, columns
  char staged[2 * kGroup / 32][kWarpRows * P::kPitch];
  float scales[kStages][kTile + 2];  // of blocks: of rows, and of the columns' two halves
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int32_t ends[kMaxGroupedExperts];  // of each expert's cluster tiles
  int32_t offs[kMaxGroupedExperts];  // GateParams
};
template <class P>
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<P>)) + 1024;

struct KernelParams {
  CUtensorMap input;
  CUtensorMap few;         // the same rows, kFewRows at a time
  CUtensorMap weights[2];  // of the first part of a tile's columns, and of the others
  GroupedGemmParams gemm;
  int32_t step;          // columns of weights from tile to tile
  int32_t second;        // columns from a part of a tile, of kHalf columns, to the next one
  int32_t column_pairs;  // cluster tiles of columns
  int32_t expert_rows;   // from an expert's weight to the next one's
  int32_t expert_k;
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

// A cluster's tile.
struct Place {
  int expert;
  int begin;      // the expert's first row of the input
  int end;        // after its last one
  int first_row;  // of the tile; of kWeights, a row of the weight
  int end_row;
  int pair;  // of columns
};

// All tiles of all experts, in order of expert; an expert's by bands of rows, a band's by columns.
template <class P>
class Tiles {
 public:
  __device__ Tiles(const KernelParams& params, const Shared<P>& shared)
      : params_(params), shared_(shared), tile_(static_cast<int>(blockIdx.x) / kCluster) {}

  __device__ bool next(Place& place) {
    const int experts = params_.gemm.gate.experts;
    while (expert_ < experts && shared_.ends[expert_] <= tile_) ++expert_;
    if (expert_ == experts) return false;
    place.expert = expert_;
    place.begin = expert_ == 0 ? 0 : shared_.offs[expert_ - 1];
    place.end = shared_.offs[expert_];
    const int origin = P::kWeights ? 0 : place.begin;
    place.end_row = P::kWeights ? static_cast<int>(params_.gemm.n) : place.end;
    const int first = expert_ == 0 ? 0 : shared_.ends[expert_ - 1];
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
        P::kWeights ? place.end - place.begin : static_cast<int>(params_.gemm.k);
    return (k + P::kK - 1) / P::kK;
  }

 private:
  const KernelParams& params_;
  const Shared<P>& shared_;
  int tile_;
  int expert_ = 0;
};

// The stage that comes next, and how often it was used.
template <int kStages>
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

template <class P>
__device__ void count_tiles(const KernelParams& params, Shared<P>& shared) {
  const int lane = static_cast<int>(threadIdx.x);
  int total = 0;
  for (int first = 0; first < params.gemm.gate.experts; first += 32) {
    const int expert = first + lane;
    int tiles = 0;
    if (expert < params.gemm.gate.experts) {
      const int32_t* offs = params.gemm.gate.offs;
      const int rows = P::kWeights
                           ? static_cast<int>(params.gemm.n)
                           : offs[expert] - (expert == 0 ? 0 : offs[expert - 1]);
      tiles = (rows + kTile - 1) / kTile * params.column_pairs;
    }
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffff, tiles, distance);
      if (lane >= distance) tiles += before;
    }
    if (expert < params.gemm.gate.experts) {
      shared.ends[expert] = total + tiles;
      shared.offs[expert] = params.gemm.gate.offs[expert];
    }
    total += __shfl_sync(0xffffffff, tiles, 31);
  }
}

// The loads of a tile, of whose rows the first kRows are loaded.
template <class P, int kRows>
__device__ __forceinline__ void load_tile(const KernelParams& params, Shared<P>& shared,
                                          const Place& place, int steps,
                                          Turn<Shared<P>::kStages>& turn) {
  constexpr int kParts = P::kWidth / kHalf;
  const CUtensorMap& input = kRows == kFewRows ? params.few : params.input;
  const int rank = cluster_rank();
  const int row = place.first_row + rank * kHalf;
  const int column = (place.pair * kCluster + rank) * params.step;
  const int expert_row = place.expert * params.expert_rows;
  const int expert_k = place.expert * params.expert_k;
#pragma unroll(kRows == kTile ? 4 : 1)
  for (int step = 0; step < steps; ++step) {
    await(&shared.empty[turn.stage], turn.parity ^ 1);
    char* const stage = shared.stages[turn.stage];
    uint64_t* const full = &shared.full[turn.stage];
    expect_bytes(full, kRows * kLine + kParts * kHalfBytes);
    const int k = step * P::kK;
    if (kRows == kTile || rank == 0) {
      char* const to = stage + rank * kHalfBytes;
      if constexpr (P::kWeights) {
        load_box_for_both(input, to, full, row, place.begin + k);
      } else {
        load_box_for_both(input, to, full, k, row);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const CUtensorMap& map = params.weights[part == 0 ? 0 : 1];
      char* const to = stage + (2 + part) * kHalfBytes;
      const int from = column + part * params.second;
      if constexpr (P::kWeights) {
        load_box(map, to, full, from, place.begin + k);
      } else if constexpr (P::kTurnedB) {
        load_box(map, to, full, from, k, place.expert);
      } else {
        load_box(map, to, full, expert_k + k, expert_row + from);
      }
    }
    turn.next();
  }
}

template <class P>
__device__ void produce(const KernelParams& params, Shared<P>& shared) {
  Tiles<P> tiles(params, shared);
  Turn<Shared<P>::kStages> turn;
  for (Place place; tiles.next(place);) {
    const auto load = [&]<int kRows>() {
      load_tile<P, kRows>(params, shared, place, tiles.steps(place), turn);
    };
    // An expert of few rows has one tile of them, and its weights take all the time: no other rows are loaded then.
    const int rows = P::kWeights ? kTile : place.end - place.begin;
    if (rows > kHalf) {
      load.template operator()<kTile>();
    } else if (rows > kFewRows) {
      load.template operator()<kHalf>();
    } else {
      load.template operator()<kFewRows>();
    }
  }
}

// A warp that loads the scales of blocks beside the operands: those of a tile's rows, and of its columns' two halves.
template <class P>
__device__ void bring_scales(const KernelParams& params, Shared<P>& shared) {
  constexpr int kRowsOfLane = kTile / 32;
  const GroupedGemmParams& gemm = params.gemm;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_bytes = gemm.k + scale_bytes(gemm.k, true);
  const char* const of_rows = static_cast<const char*>(gemm.input) + gemm.k;
  const auto blocks = static_cast<int>(scale_blocks(gemm.n));
  Tiles<P> tiles(params, shared);
  Turn<Shared<P>::kStages> turn;
  for (Place place; tiles.next(place);) {
    // Rows after the last one have the scales of that one, and are not stored. So have columns.
    const float* rows[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = min(place.first_row + 32 * i + lane, place.end_row - 1);
      rows[i] = reinterpret_cast<const float*>(of_rows + row * row_bytes);
    }
    const int half = lane % 2;
    const int column =
        (place.pair * kCluster + cluster_rank()) * params.step + half * params.second;
    const int block = min(column / static_cast<int>(kScaledBlock), blocks - 1);
    const float* const columns =
        (half == 1 && gemm.up_scale != nullptr ? gemm.up_scale : gemm.scale) +
        (int64_t{place.expert} * blocks + block) * scale_blocks(gemm.k);
    const int steps = tiles.steps(place);
    for (int step = 0; step < steps; ++step) {
      await(&shared.empty[turn.stage], turn.parity ^ 1);
      float* const to = shared.scales[turn.stage];
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) copy_number(&to[32 * i + lane], rows[i] + step);
      if (lane < 2) copy_number(&to[kTile + lane], columns + step);
      arrive_when_copied(&shared.full[turn.stage]);
      turn.next();
    }
  }
}

#endif

}  // namespace overlap::kernels
