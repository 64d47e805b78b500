// Copies within a device, by its SMs: several rectangles in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace overlap::kernels {

inline constexpr int64_t kRectangleAccessBytes = 16;

// Rows of bytes at equal distances. Addresses, strides and sizes are multiples of kRectangleAccessBytes.
struct CopyRectangle {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t from_stride = 0;
  int64_t to_stride = 0;
  int64_t row_bytes = 0;
  int64_t rows = 0;
};

// Enqueues the copies; no two of them may overlap. [B]
cudaError_t copy_rectangles(const std::vector<CopyRectangle>& rectangles, cudaStream_t stream);

// Loads the kernel on the current device.
cudaError_t load_rectangle_kernels();

}  // namespace overlap::kernels
