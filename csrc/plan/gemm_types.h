// A GEMM kernel and a plan both name these. They are apart from plan.h, so that the kernels, slow
// to compile, do not depend on the rest of it.
#pragma once

#include <cstdint>

namespace overlap::plan {

enum class DType : int32_t {
  kBFloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
  kFloat64 = 3,
  kFloat8E4M3 = 4,
  kFloat8E5M2 = 5,
};

constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

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
inline constexpr Kernel kLastKernel = Kernel::kSm90PingpongWide;

// Two teams take turns, each with a tile: these add a source, and store into several outputs.
constexpr bool is_pingpong(Kernel kernel) {
  return kernel == Kernel::kSm90Pingpong || kernel == Kernel::kSm90PingpongWide;
}

// Kernels that need Hopper.
constexpr bool is_sm90(Kernel kernel) {
  return is_pingpong(kernel) || kernel == Kernel::kSm90Cooperative;
}

// K of the whole layer is cut into so many groups for Invariance::kWorld; each is a multiple of the Hopper kernel's step
// along K, of 16-bit elements.
inline constexpr int32_t kWorldGroups = 8;
inline constexpr int64_t kGroupStep = 64;
inline constexpr int64_t kGroupColumns = 8;  // N is a multiple

// Where finished tiles are stored. kRowMajor: chunks are whole row panels of the plain output.
// kPacked: tiles one after the other in tile order, put back to row-major after the next chunk's
// communication.
enum class Layout : int32_t { kRowMajor = 0, kPacked = 1 };

int64_t element_bytes(DType dtype);
const char* name(DType dtype);
const char* name(Kernel kernel);
const char* name(Layout layout);

}  // namespace overlap::plan
