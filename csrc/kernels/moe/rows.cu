// Rows between a mixture's GEMMs and collectives.
#include <cuda_runtime.h>

#include "kernels/chunk/fp8.cuh"
#include "kernels/moe/rows.cuh"

namespace overlap::kernels {
namespace {

// Loads of a thread that are under way together: of a row, or of a token's choices.
constexpr int kRowBatch = 8;
constexpr int kBatch = 4;
constexpr int64_t kSumBlocks = 1024;  // of a sum, if tokens are fewer

template <class T, int kVector>
__global__ void __launch_bounds__(kMostThreads)
    gather_kernel(const __grid_constant__ RowsParams params) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t index = row < params.rows ? params.index[row] : -2;
  if (index == -2) {
    return;
  }
  int64_t from = index < 0 ? -1 : index / params.divisor;
  const void* source = params.source;
  if (from >= params.own_first && from - params.own_first < params.own_count) {
    from -= params.own_first;
    source = params.own;
  }
  const int64_t step = int64_t{blockDim.x} * kVector;
  for (int64_t column = threadIdx.x * kVector; column < params.width; column += step * kRowBatch) {
    Access<T, kVector> values[kRowBatch] = {};
#pragma unroll
    for (int i = 0; i < kRowBatch; ++i) {
      if (from >= 0 && column + i * step < params.width) {
        values[i] = load<T, kVector>(source, from * params.width + column + i * step);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowBatch; ++i) {
      if (column + i * step < params.width) {
        store(params.output, row * params.width + column + i * step, values[i]);
      }
    }
  }
}

// A warp takes a row, and each lane eight numbers at a time. With a scale of the row it takes the numbers twice: for the largest one, and
// for all; with scales of blocks once.
template <bool kBlocks>
__global__ void __launch_bounds__(kMostThreads)
    pack_kernel(const __grid_constant__ PackParams params) {
  using T = __nv_bfloat16;
  constexpr int kVector = 8;
  constexpr int kLanes = kBlocks ? kScaledBlock / kVector : 32;  // that share a scale
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= (params.end != nullptr ? min(params.rows, int64_t{*params.end}) : params.rows)) {
    return;
  }
  const auto lane = static_cast<int>(threadIdx.x);
  // All lanes take part in each turn; those after the row's end have zeros.
  const auto each = [&](const auto& body) {
#pragma unroll 4
    for (int64_t first = 0; first < params.width; first += 32 * kVector) {
      const int64_t column = first + lane * kVector;
      Access<T, kVector> values = {};
      if (column < params.width)
        values = load<T, kVector>(params.source, row * params.width + column);
      body(column, values);
    }
  };
  const auto largest_of = [](float largest, const Access<T, kVector>& values) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      largest = larger(largest, fabsf(to_float(values.element[e])));
    }
    return largest;
  };
  const auto shared_scale = [](float largest) {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      largest = larger(largest, __shfl_xor_sync(~0u, largest, distance));
    }
    return scale_of(largest);
  };
  char* const output =
      static_cast<char*>(params.output) + row * (params.width + scale_bytes(params.width, kBlocks));
  const auto cast = [&](int64_t column, const Access<T, kVector>& values, float scale) {
    if (column >= params.width) return;
    Access<uint16_t, kVector / 2> packed;
#pragma unroll
    for (int e = 0; e < kVector; e += 2) {
      packed.element[e / 2] =
          to_fp8(to_float(values.element[e]), to_float(values.element[e + 1]), scale);
    }
    store(output, column / 2, packed);
  };
  auto* const scales = reinterpret_cast<float*>(output + params.width);
  const auto room = static_cast<int>(scale_bytes(params.width, kBlocks) / 4);
  if constexpr (kBlocks) {
    each([&](int64_t column, const Access<T, kVector>& values) {
      const float scale = shared_scale(largest_of(0.0f, values));
      cast(column, values, scale);
      if (lane % kLanes == 0 && column < params.width) scales[column / kScaledBlock] = scale;
    });
    const auto blocks = static_cast<int>(scale_blocks(params.width));
    if (lane < room - blocks) scales[blocks + lane] = 0.0f;
  } else {
    float largest = 0.0f;
    each([&](int64_t, const Access<T, kVector>& values) { largest = largest_of(largest, values); });
    const float scale = shared_scale(largest);
    each([&](int64_t column, const Access<T, kVector>& values) { cast(column, values, scale); });
    if (lane < room) scales[lane] = lane == 0 ? scale : 0.0f;
  }
}

__global__ void invert_kernel(const int64_t* route, int64_t routes, int64_t* where) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < routes && route[i] >= 0) {
    where[route[i]] = i;
  }
}

// Where a token's row for one of its choices lies, or null.
template <class T, bool kHome>
__device__ __forceinline__ const T* row_of(const SumParams& params, int64_t place, int64_t row) {
  const void* rows = params.rows;
  if (kHome && row < -1) {
    rows = params.arrived;
    row = row == -2 - params.rank ? -1 : place;  // an own row that had no room: the call has failed
  }
  return row < 0 ? nullptr : static_cast<const T*>(rows) + row * params.width;
}

template <class T, int kVector, bool kHome>
__global__ void __launch_bounds__(kMostThreads)
    sum_kernel(const __grid_constant__ SumParams params) {
  using A = wide_t<T>;
  const int64_t token = blockIdx.x;
  const int64_t* where = (kHome ? params.home : params.where) + token * params.choices;
  const A* shares = static_cast<const A*>(params.shares);
  T* output = static_cast<T*>(params.output) + token * params.width;
  if (!kHome && params.stride > 0) {
    bool any = false;
    for (int choice = 0; choice < params.choices; ++choice) {
      any |= where[choice] >= 0;
    }
    if (!any) {
      return;
    }
    const int64_t rank = token / params.stride;
    output =
        static_cast<T*>(params.outputs[rank]) +
        (token - rank * params.stride) * (rank == params.rank ? params.width : params.output_step);
  }
  for (int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kVector;
       column < params.width; column += int64_t{gridDim.y} * blockDim.x * kVector) {
    A total[kVector] = {};
    for (int first = 0; first < params.choices; first += kBatch) {
      Access<T, kVector> parts[kBatch] = {};
      A share[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int choice = first + i;
        const int64_t place = token * params.choices + choice;
        const int64_t row = choice < params.choices ? where[choice] : -1;
        const T* from = row_of<T, kHome>(params, place, row);
        if (from != nullptr) {
          parts[i] = load<T, kVector>(from, column);
          share[i] = shares == nullptr ? A{1} : shares[params.row_shares ? row : place];
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          total[e] = add_product(total[e], to_float(parts[i].element[e]), share[i]);
        }
      }
    }
    Access<T, kVector> result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      round_to(total[e], result.element[e]);
    }
    store<T, kVector>(output, column, result);
  }
}

// The threads of a row, whole warps with a batch of accesses each, and the rows of a block.
dim3 threads_of_rows(int64_t width, int vector) {
  const unsigned threads = threads_of((width + kRowBatch - 1) / kRowBatch, vector);
  return {threads, kMostThreads / threads};
}

unsigned blocks_of_rows(int64_t rows, unsigned of_block) {
  return static_cast<unsigned>((rows + of_block - 1) / of_block);
}

}  // namespace

cudaError_t gather_rows(const RowsParams& params, cudaStream_t stream) {
  return by_element(params.element, params.rows, params.width, [&](auto type) {
    using T = decltype(type);
    constexpr int kVector = 16 / sizeof(T);
    const int vector = vector_of<T>({params.width}, {params.source, params.own, params.output});
    const auto kernel = vector == 1 ? gather_kernel<T, 1> : gather_kernel<T, kVector>;
    const dim3 threads = threads_of_rows(params.width, vector);
    kernel<<<blocks_of_rows(params.rows, threads.y), threads, 0, stream>>>(params);
  });
}

cudaError_t pack_rows(const PackParams& params, cudaStream_t stream) {
  if (params.rows > 0 && params.width > 0) {
    const dim3 threads(32, kMostThreads / 32);
    const auto kernel = params.by_blocks ? pack_kernel<true> : pack_kernel<false>;
    kernel<<<blocks_of_rows(params.rows, threads.y), threads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t sum_choices(const SumParams& params, cudaStream_t stream) {
  const int64_t places = params.tokens * params.choices;
  if (places == 0) {
    return cudaSuccess;
  }
  if (params.home == nullptr) {
    if (const cudaError_t error =
            cudaMemsetAsync(params.where, 0xff, places * sizeof(int64_t), stream);
        error != cudaSuccess) {
      return error;
    }
    if (params.routes > 0) {
      invert_kernel<<<static_cast<unsigned>((params.routes + 255) / 256), 256, 0, stream>>>(
          params.route, params.routes, params.where);
    }
  }
  return by_element(params.element, params.tokens, params.width, [&](auto type) {
    using T = decltype(type);
    constexpr int kVector = 16 / sizeof(T);
    int vector = vector_of<T>({params.width}, {params.rows, params.output, params.arrived});
    for (void* output : params.outputs) {
      vector = std::min(vector, vector_of<T>({params.output_step}, {output}));
    }
    const auto kernel =
        params.home != nullptr
            ? (vector == 1 ? sum_kernel<T, 1, true> : sum_kernel<T, kVector, true>)
            : (vector == 1 ? sum_kernel<T, 1, false> : sum_kernel<T, kVector, false>);
    // Few tokens: several blocks share the columns of each.
    const unsigned threads = threads_of(params.width, vector);
    const int64_t turns = (params.width + threads * vector - 1) / (threads * vector);
    const int64_t parts = std::clamp<int64_t>(kSumBlocks / params.tokens, 1, turns);
    const dim3 blocks(static_cast<unsigned>(params.tokens), static_cast<unsigned>(parts));
    kernel<<<blocks, threads, 0, stream>>>(params);
  });
}

}  // namespace overlap::kernels
