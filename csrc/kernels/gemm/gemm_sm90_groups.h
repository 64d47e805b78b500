// Sums of one K for any number of ranks: K is multiplied in groups, whose products are added by pairs, each sum rounded
// to the output's type. A rank of few ranks has many groups; it adds up what more ranks would have added.
//
//   group   0   1   2   3
//            \ /     \ /
//             +       +      in registers
//              \     /
//                 +          the first of them waits in memory
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>

#include "kernels/gemm/gemm.h"

namespace overlap::kernels {

// The whole K in one sum.
template <class Types>
struct OneGroup {
  static constexpr bool kInGroups = false;
  struct Params {};
};

// Two numbers of 16 bits in one register. As arrays compilers would hold them in memory.
template <class Output>
struct HalfPair;
template <>
struct HalfPair<cutlass::bfloat16_t> {
  CUTLASS_DEVICE static uint32_t rounded(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  CUTLASS_DEVICE static uint32_t sum(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
  }
  CUTLASS_DEVICE static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  CUTLASS_DEVICE static float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
};
template <>
struct HalfPair<cutlass::half_t> {
  CUTLASS_DEVICE static uint32_t rounded(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  CUTLASS_DEVICE static uint32_t sum(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
  }
  CUTLASS_DEVICE static float low(uint32_t pair) { return to_float(pair & 0xffffu); }
  CUTLASS_DEVICE static float high(uint32_t pair) { return to_float(pair >> 16); }

 private:
  CUTLASS_DEVICE static float to_float(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
  }
};

// A thread's sums of the groups so far.
template <class Types>
class GroupSums {
  using Pair = HalfPair<typename Types::Output>;
  static constexpr int kSums = Types::kTileM * Types::kTileN / Types::kTeamThreads;
  static constexpr int kPairs = kSums / 2;
  static constexpr int kAccesses = kPairs / 4;
  static_assert(kAccesses * 4 == kPairs);

 public:
  static constexpr bool kInGroups = true;
  using Params = GemmGroups;
  static_assert(Types::kTeamThreads * kPairs * sizeof(uint32_t) == kGroupSumBytes);

  CUTLASS_DEVICE GroupSums(const GemmGroups& groups, int team, int thread)
      : groups_(groups),
        waiting_(static_cast<uint4*>(groups.memory) +
                 (static_cast<int64_t>(blockIdx.x) * Types::kTeams + team) *
                     group_levels(groups.count) * kAccesses * Types::kTeamThreads +
                 thread) {}

  // Takes a group's product.
  template <class Product>
  CUTLASS_DEVICE void add(const Product& product, int32_t group) {
    if (group % 2 == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairs; ++i) pair_[i] = rounded(product, i);
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      pair_[i] = Pair::sum(pair_[i], rounded(product, i));
    }
    int32_t level = 1;
    for (; group >> level & 1; ++level) add_waiting(level);
    if (group + 1 < groups_.count) leave(level);
  }

  // After the last group.
  template <class Sums>
  CUTLASS_DEVICE void put_into(Sums& sums) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      sums(2 * i) = Pair::low(pair_[i]);
      sums(2 * i + 1) = Pair::high(pair_[i]);
    }
  }

 private:
  template <class Product>
  CUTLASS_DEVICE static uint32_t rounded(const Product& product, int i) {
    return Pair::rounded(product(2 * i), product(2 * i + 1));
  }
  CUTLASS_DEVICE uint4* at(int32_t level, int access) const {
    return waiting_ + ((level - 1) * kAccesses + access) * Types::kTeamThreads;
  }
  CUTLASS_DEVICE void leave(int32_t level) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccesses; ++i) {
      *at(level, i) = {pair_[4 * i], pair_[4 * i + 1], pair_[4 * i + 2], pair_[4 * i + 3]};
    }
  }
  CUTLASS_DEVICE void add_waiting(int32_t level) {
    uint4 waiting[kAccesses];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccesses; ++i) waiting[i] = *at(level, i);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccesses; ++i) {
      pair_[4 * i] = Pair::sum(waiting[i].x, pair_[4 * i]);
      pair_[4 * i + 1] = Pair::sum(waiting[i].y, pair_[4 * i + 1]);
      pair_[4 * i + 2] = Pair::sum(waiting[i].z, pair_[4 * i + 2]);
      pair_[4 * i + 3] = Pair::sum(waiting[i].w, pair_[4 * i + 3]);
    }
  }

  const GemmGroups& groups_;
  uint4* const waiting_;
  uint32_t pair_[kPairs];
};

}  // namespace overlap::kernels
