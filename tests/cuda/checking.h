// The base of the kernel checks: poisoned device memory, operands, references, and the comparison
// element by element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/signal/signal.h"
#include "plan/plan.h"
#include "plan/tile_order.h"

namespace overlap::check {

inline constexpr int64_t kGuard = 4096;  // poisoned elements on either side of an output

[[noreturn]] inline __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fputs("kernel_check: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  std::exit(1);
}

#define CUDA_CHECK(call)                                                    \
  do {                                                                      \
    const cudaError_t error_ = (call);                                      \
    if (error_ != cudaSuccess)                                              \
      fail("line %d: %s: %s", __LINE__, #call, cudaGetErrorString(error_)); \
  } while (false)

// Device memory, poisoned with 0xff: NaN in every float type.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t elements) : bytes_(std::max<int64_t>(elements, 1) * sizeof(T)) {
    CUDA_CHECK(cudaMalloc(&data_, bytes_));
    CUDA_CHECK(cudaMemset(data_, 0xff, bytes_));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  int64_t elements() const { return bytes_ / static_cast<int64_t>(sizeof(T)); }
  void poison(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(data_, 0xff, bytes_, stream)); }
  void zero(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(data_, 0, bytes_, stream)); }

 private:
  T* data_ = nullptr;
  int64_t bytes_;
};

template <class T>
void upload(T* to, const std::vector<T>& values) {
  CUDA_CHECK(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
}

template <class T>
std::vector<T> download(const T* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  CUDA_CHECK(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

template <class Word>
void expect_words(const Word* words, int64_t count, Word want, const std::string& what) {
  int64_t number = 0;
  for (const Word got : download(words, count)) {
    if (got != want) {
      fail("%s: number %lld is %llu, expected %llu", what.c_str(), static_cast<long long>(number),
           static_cast<unsigned long long>(got), static_cast<unsigned long long>(want));
    }
    ++number;
  }
}

class Stream {
 public:
  Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  explicit Stream(int priority) {
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// The report that waits leave, which says nothing at first.
class Report {
 public:
  Report() {
    CUDA_CHECK(cudaMallocHost(&report_, sizeof(*report_)));
    clear();
  }
  ~Report() { cudaFreeHost(report_); }
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  kernels::WaitReport* get() const { return report_; }
  void clear() { *report_ = {}; }
  bool failed() const { return *static_cast<const volatile uint64_t*>(&report_->failure) != 0; }
  kernels::WaitFailure failure() const { return kernels::unpack(report_->failure); }

 private:
  kernels::WaitReport* report_ = nullptr;
};

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Integers from -3 to 3, or thirds of them (which round), in [rows, columns]; what lies between the
// rows stays poisoned.
template <class T>
__global__ void fill_kernel(T* data, int64_t rows, int64_t columns, int64_t stride, uint32_t seed,
                            float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u + seed * 40503u;
    hash = (hash ^ (hash >> 15)) * 2246822519u;
    hash ^= hash >> 13;
    data[i / columns * stride + i % columns] =
        static_cast<T>(static_cast<float>(static_cast<int>(hash % 7) - 3) * scale);
  }
}

// input @ weight^T, times the scales of its rows and columns, plus source, where those are not null, in fp32, rounded once.
template <class In, class Weight, class T>
__global__ void reference_gemm_kernel(const In* input, int64_t input_stride, const Weight* weight,
                                      int64_t weight_stride_n, int64_t weight_stride_k,
                                      const T* source, int64_t source_stride, T* output, int64_t m,
                                      int64_t n, int64_t k, const float* row_scales = nullptr,
                                      const float* column_scales = nullptr) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < m * n;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum = 0.0f;
    for (int64_t j = 0; j < k; ++j) {
      sum += static_cast<float>(input[i / n * input_stride + j]) *
             static_cast<float>(weight[i % n * weight_stride_n + j * weight_stride_k]);
    }
    if (row_scales != nullptr) sum *= row_scales[i / n] * column_scales[i % n];
    if (source != nullptr) sum += static_cast<float>(source[i / n * source_stride + i % n]);
    output[i] = static_cast<T>(sum);
  }
}

template <class T>
__global__ void reference_bias_kernel(const T* source, const T* bias, T* output, int64_t m,
                                      int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < m * n;
       i += int64_t{gridDim.x} * blockDim.x) {
    output[i] =
        bias == nullptr
            ? source[i]
            : static_cast<T>(static_cast<float>(source[i]) + static_cast<float>(bias[i % n]));
  }
}

struct Mismatch {
  unsigned long long count;
  long long index;
  float got;
  float want;
};

// A buffer must hold the reference in row-major rows or in packed tiles (zeros where a tile
// leaves the matrix), and poison everywhere else.
template <class T>
struct Expectation {
  const T* reference;  // [m, n], contiguous
  int64_t m;
  int64_t n;
  int64_t stride;  // row-major
  bool packed;
  int32_t tile_m;
  int32_t tile_n;
  plan::TileOrder order;

  __host__ __device__ int64_t elements() const {
    return packed ? plan::packed_offset(order.num_tiles(), tile_m, tile_n) : m * stride;
  }
};

template <class T>
__global__ void check_kernel(const T* output, int64_t first, int64_t last,
                             const __grid_constant__ Expectation<T> expectation,
                             Mismatch* mismatch) {
  const Expectation<T>& e = expectation;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = first + blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < last; i += step) {
    int64_t row = e.m;
    int64_t column = e.n;
    const bool inside = i >= 0 && i < e.elements();
    if (inside && e.packed) {
      const int64_t tile = i / (int64_t{e.tile_m} * e.tile_n);
      const int64_t in_tile = i - tile * e.tile_m * e.tile_n;
      const plan::TileCoord coord = plan::tile_coord(e.order, static_cast<int32_t>(tile));
      row = int64_t{coord.row} * e.tile_m + in_tile / e.tile_n;
      column = int64_t{coord.column} * e.tile_n + in_tile % e.tile_n;
    } else if (inside) {
      row = i / e.stride;
      column = i % e.stride;
    }
    const bool in_matrix = row < e.m && column < e.n;
    const float got = static_cast<float>(output[i]);
    const float want = in_matrix ? static_cast<float>(e.reference[row * e.n + column]) : 0.0f;
    bool good = got == want;
    if (!in_matrix && !(inside && e.packed)) {
      good = true;
      for (size_t byte = 0; byte < sizeof(T); ++byte) {
        good = good && reinterpret_cast<const unsigned char*>(output + i)[byte] == 0xff;
      }
    }
    if (!good && atomicAdd(&mismatch->count, 1ull) == 0) {
      mismatch->index = i;
      mismatch->got = got;
      mismatch->want = in_matrix || (inside && e.packed) ? want : __int_as_float(-1);
    }
  }
}

template <class T>
void launch_check(const T* output, int64_t first, int64_t last, const Expectation<T>& expectation,
                  Mismatch* mismatch, cudaStream_t stream) {
  check_kernel<T><<<16, 256, 0, stream>>>(output, first, last, expectation, mismatch);
  CUDA_CHECK(cudaGetLastError());
}

inline void expect_no_mismatch(const Buffer<Mismatch>& device, const std::string& what) {
  Mismatch mismatch;
  CUDA_CHECK(cudaMemcpy(&mismatch, device.data(), sizeof(mismatch), cudaMemcpyDeviceToHost));
  if (mismatch.count != 0) {
    fail("%s: %llu elements are wrong; element %lld is %g, expected %g (nan: untouched)",
         what.c_str(), mismatch.count, mismatch.index, mismatch.got, mismatch.want);
  }
}

// Elements [first, last) of an output.
template <class T>
void expect_elements(const T* output, int64_t first, int64_t last,
                     const Expectation<T>& expectation, const std::string& what) {
  Buffer<Mismatch> mismatch(1);
  mismatch.zero(nullptr);
  launch_check(output, first, last, expectation, mismatch.data(), nullptr);
  expect_no_mismatch(mismatch, what);
}

// The whole allocation of an output that begins `guard` elements in.
template <class T>
void expect(const Buffer<T>& output, const Expectation<T>& expectation, const std::string& what,
            int64_t guard = kGuard) {
  expect_elements(output.data() + guard, -guard, output.elements() - guard, expectation, what);
}

// A rank's number in a call, and the sum of all ranks': small integers.
inline float term(int call, int rank, int64_t index) {
  return static_cast<float>((index * 7 + rank * 3 + call) % 11 - 5);
}
inline float sum_of_terms(int ranks, int call, int64_t index) {
  float total = 0;
  for (int rank = 0; rank < ranks; ++rank) total += term(call, rank, index);
  return total;
}

template <class T>
constexpr plan::DType dtype_of() {
  return std::is_same_v<T, float>           ? plan::DType::kFloat32
         : std::is_same_v<T, __half>        ? plan::DType::kFloat16
         : std::is_same_v<T, __nv_fp8_e4m3> ? plan::DType::kFloat8E4M3
         : std::is_same_v<T, __nv_fp8_e5m2> ? plan::DType::kFloat8E5M2
                                            : plan::DType::kBFloat16;
}

template <class T>
void fill(T* data, int64_t rows, int64_t columns, int64_t stride, uint32_t seed,
          float scale = 1.0f) {
  fill_kernel<<<256, 256>>>(data, rows, columns, stride, seed, scale);
  CUDA_CHECK(cudaGetLastError());
}

// The operands of one rank's GEMM: of the output's type, or fp8, with scales for rows and columns. The weight is then e4m3.
template <class T, class In>
struct TestOperands {
  static constexpr bool kScaled = !std::is_same_v<T, In>;
  using Weight = std::conditional_t<kScaled, __nv_fp8_e4m3, In>;
  static constexpr int64_t kPiece = 16 / sizeof(In);

  // Rows begin at whole pieces of 16 bytes, with a gap of `gap` elements or a few more between them.
  TestOperands(int64_t m, int64_t n, int64_t k, bool k_contiguous, uint32_t seed,
               int64_t gap = kPiece)
      : m(m),
        n(n),
        k(k),
        k_contiguous(k_contiguous),
        input_stride(round_up(k, kPiece) + round_up(gap, kPiece)),
        weight_stride(round_up(k_contiguous ? k : n, kPiece) + round_up(gap, kPiece)),
        input(m * input_stride),
        weight((k_contiguous ? n : k) * weight_stride),
        row_scales(m),
        column_scales(n) {
    fill(input.data(), m, k, input_stride, 10u + seed);
    fill(weight.data(), k_contiguous ? n : k, k_contiguous ? k : n, weight_stride, 20u + seed);
    fill(row_scales.data(), 1, m, m, 30u + seed);
    fill(column_scales.data(), 1, n, n, 40u + seed);
  }

  // The product of rows [begin, begin + count), plus source, whose rows are contiguous.
  void reference(int64_t begin, int64_t count, const T* source, T* output) const {
    reference(begin, count, source, n, output);
  }
  void reference(int64_t begin, int64_t count, const T* source, int64_t source_stride,
                 T* output) const {
    reference_gemm_kernel<<<2048, 256>>>(
        input.data() + begin * input_stride, input_stride, weight.data(),
        k_contiguous ? weight_stride : 1, k_contiguous ? 1 : weight_stride, source, source_stride,
        output, count, n, k, kScaled ? row_scales.data() + begin : nullptr,
        kScaled ? column_scales.data() : nullptr);
    CUDA_CHECK(cudaGetLastError());
  }

  void put_into(kernels::GemmParams& gemm) const {
    gemm.m = m;
    gemm.n = n;
    gemm.k = k;
    gemm.dtype = dtype_of<In>();
    gemm.input = input.data();
    gemm.input_stride = input_stride;
    gemm.weight = weight.data();
    gemm.weight_stride = weight_stride;
    gemm.weight_k_contiguous = k_contiguous;
    if constexpr (kScaled) {
      kernels::GemmScales& scales = gemm.scales.emplace();
      scales.input = row_scales.data();
      scales.weight = column_scales.data();
      scales.weight_stride = 1;
    }
  }

  const int64_t m, n, k;
  const bool k_contiguous;
  const int64_t input_stride, weight_stride;
  Buffer<In> input;
  Buffer<Weight> weight;
  Buffer<float> row_scales, column_scales;
};

}  // namespace overlap::check
