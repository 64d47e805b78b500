#include "kernels/chunk/rectangles.h"

#include <algorithm>

namespace overlap::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // of one thread, all before its first store
constexpr int kMostBlocks = 512;
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

}  // namespace

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
  return cudaFuncGetAttributes(&attributes, copy_rectangles_kernel);
}

}  // namespace overlap::kernels
