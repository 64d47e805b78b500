// Copies within a device, by its SMs: several rectangles in one launch, and rows that the device lists.
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

// Rows of any size, at most `rows`.
struct ListedRows {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t from_stride = 0;
  int64_t to_stride = 0;
  int64_t row_bytes = 0;
  int64_t rows = 0;
  const int64_t* count = nullptr;  // of the rows, or null: all
  const int64_t* from_rows =
      nullptr;  // for each row its number there, or null: they follow each other
  const int64_t* to_rows = nullptr;
};

// Enqueues the copy of these rows; rows beyond the count are not written.
cudaError_t copy_listed_rows(const ListedRows& rows, cudaStream_t stream);

// Loads the kernels on the current device.
cudaError_t load_rectangle_kernels();

}  // namespace overlap::kernels
