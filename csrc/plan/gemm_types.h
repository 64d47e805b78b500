// A GEMM kernel and a plan both name these. They are apart from plan.h, so that the kernels, slow
// to compile, do not depend on the rest of it.
#pragma once

#include <cstdint>

#include "plan/kernels.h"

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

// The groups that K of the whole layer is cut into for Invariance::kWorld; each is a multiple of the Hopper kernel's step
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
const char* name(Layout layout);

}  // namespace overlap::plan
