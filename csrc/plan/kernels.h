// The GEMM kernels, and the table of what tells them apart. Other files ask the table, and compare no kernels. It is apart
// from plan.h, so that the kernels, slow to compile, do not depend on the rest of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "plan/table.h"

namespace overlap::plan {

// The GEMM that counts the tiles. kLibrary computes chunk by chunk with cuBLAS (or, on CPU, tile by
// tile with the framework's GEMM); it takes every dtype, stride and alignment, so any rank can
// follow any plan with it.
enum class Kernel : int32_t {
  kLibrary = 0,
  kSm80 = 1,
  kSm90Pingpong = 2,
  kSm90Cooperative = 3,
  kSm90PingpongWide = 4,
};

enum Ability : uint32_t {
  kAges = 1,           // runs on newer GPUs, but lacks their faster instructions
  kTakesFp8 = 2,       // scales of tensors or rows, sums only by the tensor cores, to bfloat16
  kCopiesBeside = 4,   // reads whole tiles; idle warps await and copy rows, and end the call
  kStoresToPeers = 8,  // has two teams, which add a source and store into several outputs
  kAddsTerms = 16,     // adds up owners' terms of any ranks in registers, not only a source
  kAddsGroups = 32,    // rounds products of groups of K, and adds them by pairs
};

struct KernelShape {
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  int32_t cluster_m = 1;

  friend constexpr bool operator==(const KernelShape&, const KernelShape&) = default;
};

struct KernelTraits {
  const char* name;
  const char* doc;
  KernelShape shape;
  int32_t least_arch;  // compute capabilities of the GPUs that run it
  int32_t most_arch;
  int32_t block_bytes;  // shared memory, to which a plan may add; 0: a block fills an SM
  uint32_t abilities;

  constexpr bool can(Ability ability) const { return (abilities & ability) != 0; }
};

inline constexpr int32_t kAnyArch = 1 << 20;
// clang-format off
inline constexpr std::array<KernelTraits, 5> kKernels = {{
    {"library", "the framework's, a call for each chunk; takes every dtype, stride and alignment",
     {128, 128, 1}, 0, kAnyArch, 0, 0},
    {"sm80", "128 x 128, bfloat16 and float16, compute capability 8.0 and newer",
     {128, 128, 1}, 80, kAnyArch, 64 << 10, kAges},
    {"sm90_pingpong", "128 x 128, bfloat16, float16 and fp8, Hopper",
     {128, 128, 2}, 90, 90, 0, kTakesFp8 | kCopiesBeside | kStoresToPeers | kAddsTerms | kAddsGroups},
    {"sm90_cooperative", "128 x 256, bfloat16 and float16, Hopper",
     {128, 256, 2}, 90, 90, 0, kCopiesBeside},
    {"sm90_pingpong_wide", "128 x 192, bfloat16, float16 and fp8, Hopper",
     {128, 192, 2}, 90, 90, 0, kTakesFp8 | kCopiesBeside | kStoresToPeers},
}};
// clang-format on

constexpr const KernelTraits& traits(Kernel kernel) {
  return row_of(kKernels, kernel);
}
constexpr const char* name(Kernel kernel) {
  return traits(kernel).name;
}
constexpr bool can(Kernel kernel, Ability ability) {
  return traits(kernel).can(ability);
}
constexpr bool is_pingpong(Kernel kernel) {
  return can(kernel, kStoresToPeers);
}

// The first kernel in the table that fits(its traits); else the library.
template <typename Fits>
constexpr Kernel first_kernel(const Fits& fits) {
  for (size_t row = 0; row < kKernels.size(); ++row) {
    if (fits(kKernels[row])) return static_cast<Kernel>(row);
  }
  return Kernel::kLibrary;
}

}  // namespace overlap::plan
