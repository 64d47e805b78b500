#include "kernels/chunk/rectangles.h"

#include <algorithm>

namespace overlap::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // of one thread, all before its first store
constexpr int kMostBlocks = 512;
constexpr int64_t kMostRowBlocks = 4096;
constexpr size_t kMostRectangles = 64;  // of a launch

struct Rectangles {
  CopyRectangle item[kMostRectangles];
};

__global__ void __launch_bounds__(kThreads)
    copy_rectangles_kernel(const __grid_constant__ Rectangles rectangles) {
  const CopyRectangle& one = rectangles.item[blockIdx.y];
  const auto width = static_cast<uint32_t>(one.row_bytes / kRectangleAccessBytes);
  const int64_t words = one.rows * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < words;
       first += kLoads * step) {
    uint4 value[kLoads];
    char* to[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t word = first + i * step;
      if (word >= words) continue;
      const int64_t row = words >> 32 == 0 ? static_cast<uint32_t>(word) / width : word / width;
      const int64_t column = (word - row * width) * kRectangleAccessBytes;
      value[i] = *reinterpret_cast<const uint4*>(static_cast<const char*>(one.from) +
                                                 row * one.from_stride + column);
      to[i] = static_cast<char*>(one.to) + row * one.to_stride + column;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * step < words) *reinterpret_cast<uint4*>(to[i]) = value[i];
    }
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_listed_rows_kernel(const __grid_constant__ ListedRows p) {
  const int64_t rows = p.count == nullptr || *p.count > p.rows ? p.rows : *p.count;
  const auto words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t source = p.from_rows == nullptr ? row : p.from_rows[row];
    const int64_t target = p.to_rows == nullptr ? row : p.to_rows[row];
    const auto* const from =
        reinterpret_cast<const Word*>(static_cast<const char*>(p.from) + source * p.from_stride);
    auto* const to = reinterpret_cast<Word*>(static_cast<char*>(p.to) + target * p.to_stride);
    for (int64_t word = threadIdx.x; word < words; word += kThreads) to[word] = from[word];
  }
}

bool wide(const ListedRows& rows) {
  const auto all = reinterpret_cast<uintptr_t>(rows.from) | reinterpret_cast<uintptr_t>(rows.to) |
                   static_cast<uintptr_t>(rows.from_stride | rows.to_stride | rows.row_bytes);
  return all % sizeof(uint4) == 0;
}

}  // namespace

cudaError_t copy_listed_rows(const ListedRows& rows, cudaStream_t stream) {
  if (rows.rows == 0 || rows.row_bytes == 0) return cudaSuccess;
  ListedRows params = rows;
  void* arguments[] = {&params};
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(rows.rows, kMostRowBlocks)));
  return wide(rows) ? cudaLaunchKernel(copy_listed_rows_kernel<uint4>, grid, dim3(kThreads),
                                       arguments, 0, stream)
                    : cudaLaunchKernel(copy_listed_rows_kernel<char>, grid, dim3(kThreads),
                                       arguments, 0, stream);
}

cudaError_t copy_rectangles(const std::vector<CopyRectangle>& rectangles, cudaStream_t stream) {
  for (size_t begin = 0; begin < rectangles.size(); begin += kMostRectangles) {
    const size_t count = std::min(kMostRectangles, rectangles.size() - begin);
    Rectangles params{};
    int64_t most = 0;
    for (size_t i = 0; i < count; ++i) {
      params.item[i] = rectangles[begin + i];
      most = std::max(most, params.item[i].rows * params.item[i].row_bytes / kRectangleAccessBytes);
    }
    if (most == 0) continue;
    const int64_t wanted = (most + kThreads * kLoads - 1) / (kThreads * kLoads);
    const int64_t blocks =
        std::min<int64_t>(wanted, std::max<int64_t>(1, kMostBlocks / static_cast<int64_t>(count)));
    void* arguments[] = {&params};
    const cudaError_t error = cudaLaunchKernel(
        copy_rectangles_kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)),
        dim3(kThreads), arguments, 0, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t load_rectangle_kernels() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const cudaError_t error :
       {cudaFuncGetAttributes(&attributes, copy_rectangles_kernel),
        cudaFuncGetAttributes(&attributes, copy_listed_rows_kernel<uint4>),
        cudaFuncGetAttributes(&attributes, copy_listed_rows_kernel<char>)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
