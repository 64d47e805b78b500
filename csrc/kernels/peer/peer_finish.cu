#include "kernels/peer/peer_finish.h"

#include <algorithm>

#include "kernels/chunk/fp8.cuh"
#include "kernels/peer/peer_row.cuh"

namespace overlap::kernels {
namespace {

constexpr int kMostWarps = 24;  // of a block
// Threads that hold more words are fewer: registers of a block have a limit.
constexpr int most_warps(int units) {
  return units == 1 ? kMostWarps : units == 2 ? 20 : 18;
}
constexpr int kBlockWords = 64;  // of 128 elements, with a scale
constexpr int kMostBlocks = kMostFinishColumns / kVector / kBlockWords;

template <class Combine>
__device__ __forceinline__ float over_warp(float value, Combine combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}

// The value of all warps, combined in their order. The barrier is in it. Zero, where there is no warp, changes no sum of
// squares and no largest absolute value.
template <class Combine>
__device__ __forceinline__ float over_block(float value, float (&place)[kMostWarps],
                                            Combine combine) {
  value = over_warp(value, combine);
  if (threadIdx.x % kLanes == 0) place[threadIdx.x / kLanes] = value;
  __syncthreads();
  const auto* const fours = reinterpret_cast<const float4*>(place);
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostWarps / 4; ++i) {
    const float4 four = fours[i];
    all = combine(combine(combine(combine(all, four.x), four.y), four.z), four.w);
  }
  return all;
}

// Calls `body(row)` for the rows that this block has.
template <class Body>
__device__ __forceinline__ void each_row(int64_t rows, Body body) {
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) body(row);
}

// One block's way through its rows, in the order in which its threads share arrays: by turns, so that one barrier for each
// array and row is enough.
template <class T, int kUnits>
class Finisher {
 public:
  __device__ __forceinline__ Finisher(const FinishParams& params, const RowPart<kUnits>& part)
      : params_(params), part_(part), gain_(load_words(part_, params.gain, 0)) {
    // Read after a barrier, and stored in by no other thread.
    for (int i = part.warps + static_cast<int>(threadIdx.x); i < kMostWarps; i += blockDim.x) {
      for (int turn = 0; turn < 2; ++turn) {
        shared().squares[turn][i] = shared().largest[turn][i] = 0.0f;
      }
    }
    clear_blocks(1);
  }

  // A row of the residual, or zeros. Loaded before a row is awaited, it takes no time of its own.
  __device__ __forceinline__ Words<kUnits> residual(int64_t row) const {
    if (params_.residual == nullptr) return {};
    return load_words(part_, params_.residual, row);
  }

  // From the rounded sum of a row to its results. All threads of the block come here.
  __device__ __forceinline__ void finish(int64_t row, Words<kUnits> sum,
                                         const Words<kUnits>& residual) {
    if (params_.bias != nullptr) sum = plus<T>(sum, load_words(part_, params_.bias, 0));
    if (params_.residual != nullptr) sum = plus<T>(sum, from_here(residual));
    store_words(part_, params_.sum, row, sum);
    turn_ ^= 1;
    const Words<kUnits> normed = rounded<T>(norm_of(to_floats<T>(sum)));
    if (params_.normed != nullptr) store_words(part_, params_.normed, row, normed);
    if (params_.values != nullptr) cast(row, to_floats<T>(normed));
  }

 private:
  struct Shared {
    alignas(16) float squares[2][kMostWarps];
    alignas(16) float largest[2][kMostWarps];
    uint32_t largest_of_block[2][kMostBlocks];
  };
  __device__ __forceinline__ static Shared& shared() {
    __shared__ Shared memory;
    return memory;
  }

  __device__ __forceinline__ Floats<kUnits> norm_of(Floats<kUnits> value) const {
    float squares = 0.0f;
    each_word<kUnits>([&](int u, int w) {
#pragma unroll
      for (const float one : value.value[u][w]) squares = fmaf(one, one, squares);
    });
    squares = over_block(squares, shared().squares[turn_], [](float a, float b) { return a + b; });
    const float factor = rsqrtf(squares / static_cast<float>(params_.columns) + params_.eps);
    each_word<kUnits>([&](int u, int w) {
#pragma unroll
      for (float& one : value.value[u][w]) one *= factor;
    });
    if (params_.round_before_gain) value = to_floats<T>(rounded<T>(value));
    const Floats<kUnits> gain = to_floats<T>(from_here(gain_));
    each_word<kUnits>([&](int u, int w) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        value.value[u][w][e] *= gain.value[u][w][e] + params_.gain_offset;
      }
    });
    return value;
  }

  __device__ __forceinline__ void cast(int64_t row, const Floats<kUnits>& normed) const {
    float scale[kUnits][kLaneWords];
    const auto set_all = [&](float value) {
      each_word<kUnits>([&](int u, int w) { scale[u][w] = value; });
    };
    const auto of_word = [&](int u, int w) {
      return larger(fabsf(normed.value[u][w][0]), fabsf(normed.value[u][w][1]));
    };
    if (params_.given_scale != nullptr) {
      set_all(*params_.given_scale);
    } else if (!params_.by_blocks) {
      float largest = 0.0f;
      each_word<kUnits>([&](int u, int w) { largest = larger(largest, of_word(u, w)); });
      set_all(scale_of(over_block(largest, shared().largest[turn_], larger)));
      if (threadIdx.x == 0) params_.scales[row] = scale[0][0];
    } else {
      clear_blocks(turn_ ^ 1);  // read before the last barrier, and stored in after the next one
      // A block of 128 elements is 64 words, of several lanes and perhaps two warps. The bits of absolute values are
      // in the order of the values, and NaN is the largest.
      uint32_t* const largests = shared().largest_of_block[turn_];
      const auto block = [&](int u, int pair) {
        return (part_.first(pair) + part_.to_words(u)) / kBlockWords;
      };
      each_pair(part_, [&](int u, int pair) {
        const float largest = larger(of_word(u, 2 * pair), of_word(u, 2 * pair + 1));
        atomicMax(largests + block(u, pair), __float_as_uint(largest));
      });
      __syncthreads();
      each_pair(part_, [&](int u, int pair) {
        const float value = scale_of(__uint_as_float(largests[block(u, pair)]));
        scale[u][2 * pair] = scale[u][2 * pair + 1] = value;
        if ((part_.first(pair) + part_.to_words(u)) % kBlockWords == 0) {
          params_.scales[block(u, pair) * params_.rows + row] = value;
        }
      });
    }
    each_pair(part_, static_cast<uint16_t*>(params_.values), row,
              [&](int u, int pair, uint16_t* values) {
                const auto cast = [&](int w) {
                  const auto& two = normed.value[u][w];
                  return uint32_t{to_fp8(two[0], two[1], scale[u][w])};
                };
                *reinterpret_cast<uint32_t*>(values) = cast(2 * pair) | cast(2 * pair + 1) << 16;
              });
  }

  __device__ __forceinline__ void clear_blocks(int turn) const {
    if (!params_.by_blocks) return;
    for (int i = static_cast<int>(threadIdx.x); i < kMostBlocks; i += blockDim.x) {
      shared().largest_of_block[turn][i] = 0;
    }
  }

  const FinishParams& params_;
  const RowPart<kUnits>& part_;
  const Words<kUnits> gain_;
  int turn_ = 0;
};

// A block's only row, in one step: nothing is kept for another one. Or all its rows, in one step or two.
enum class Form { kOneRow, kOneStep, kTwoSteps };

// A block sends all its rows before it waits for any. Returns LineCall::look().
template <class T, int kUnits, Form kForm>
__device__ __forceinline__ uint64_t take_rows(const PeerFinishParams& params, const LineCall& call,
                                              const RowPart<kUnits>& part) {
  const FinishParams& rows = params.finish;
  const auto each = [&](auto body) {
    if constexpr (kForm == Form::kOneRow) {
      if (blockIdx.x < rows.rows) body(int64_t{blockIdx.x});
    } else {
      each_row(rows.rows, body);
    }
  };
  const auto send = [&](int peer, int64_t place, const Words<kUnits>& words) {
    send_words(part, call, peer, place, words);
  };
  const auto send_to_all = [&](int64_t place, const Words<kUnits>& words) {
    int peer = params.rank;
#pragma unroll 1
    for (int distance = 1; distance < params.ranks; ++distance) {
      if (++peer == params.ranks) peer = 0;
      send(peer, place, words);
    }
  };
  const auto begin = [&] {
    call.announce();
    return Finisher<T, kUnits>(rows, part);
  };
  uint64_t seen = 0;
  const auto end = [&] {
    let_next_kernel_in();
    seen = call.look();
  };
  if constexpr (kForm != Form::kTwoSteps) {
    Words<kUnits> own;
    each([&](int64_t row) {
      own = load_words(part, rows.terms, row);
      send_to_all(row, own);
    });
    Finisher<T, kUnits> finisher = begin();
    each([&](int64_t row) {
      const Words<kUnits> residual = finisher.residual(row);
      if constexpr (kForm != Form::kOneRow) own = load_words(part, rows.terms, row);
      const Words<kUnits> sum = sum_row<T>(part, call, params, own, row);
      if (kForm == Form::kOneRow || row + gridDim.x >= rows.rows) end();
      finisher.finish(row, sum, residual);
    });
  } else {
    // A buffer holds the writer's terms of the owner's rows, and after them the sums of the writer's rows.
    const auto owner = [&](int64_t row) { return static_cast<int>(row % params.ranks); };
    const auto place = [&](int64_t row) { return row / params.ranks; };
    const int64_t sums = (rows.rows + params.ranks - 1) / params.ranks;
    each([&](int64_t row) {
      if (owner(row) == params.rank) return;
      send(owner(row), place(row), load_words(part, rows.terms, row));
    });
    Finisher<T, kUnits> finisher = begin();
    each([&](int64_t row) {
      if (owner(row) != params.rank) return;
      const Words<kUnits> residual = finisher.residual(row);
      const Words<kUnits> sum =
          sum_row<T>(part, call, params, load_words(part, rows.terms, row), place(row));
      send_to_all(sums + place(row), sum);
      finisher.finish(row, sum, residual);
    });
    each([&](int64_t row) {
      if (owner(row) == params.rank) return;
      const Words<kUnits> residual = finisher.residual(row);
      ArrivingRows<kUnits, 1> sum;
      sum.wait(part, call, params, sums + place(row), owner(row), [](int) { return true; });
      finisher.finish(row, sum.words(0), residual);
    });
    end();
  }
  return seen;
}

template <class T, int kUnits, Form kForm>
__global__ void __launch_bounds__(most_warps(kUnits) * kLanes, 1)
    peer_finish_kernel(const __grid_constant__ PeerFinishParams params) {
  const RowPart<kUnits> part(params.finish.columns);
  wait_for_previous_kernel();
  const LineCall call(params);
  call.compare(take_rows<T, kUnits, kForm>(params, call, part));
  call.count();
}

template <class T, int kUnits>
__global__ void __launch_bounds__(most_warps(kUnits) * kLanes, 1)
    finish_rows_kernel(const __grid_constant__ FinishParams params) {
  wait_for_previous_kernel();
  let_next_kernel_in();
  const RowPart<kUnits> part(params.columns);
  Finisher<T, kUnits> finisher(params, part);
  each_row(params.rows, [&](int64_t row) {
    finisher.finish(row, load_words(part, params.terms, row), finisher.residual(row));
  });
}

struct Shape {
  int units;  // of a thread
  int threads;
};

// By the number of columns and by nothing else: a row's sums keep their order.
Shape shape_of(int64_t columns) {
  const auto runs = static_cast<int>(plan::low_latency_runs(columns * 2));
  int units = 1;
  while (units * most_warps(units) < runs) units *= 2;
  return {units, (runs + units - 1) / units * kLanes};
}

int sm_count() {
  int device = 0;
  int sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return sms;
}

// Calls `with` for the kernels of a type and of a number of units of a thread.
template <class With>
cudaError_t for_instance(plan::DType dtype, int64_t columns, const With& with) {
  if (!finish_takes(dtype, columns)) return cudaErrorInvalidValue;
  const auto of_type = [&]<class T>(T) {
    switch (shape_of(columns).units) {
      case 1:
        return with.template operator()<T, 1>();
      case 2:
        return with.template operator()<T, 2>();
      default:
        return with.template operator()<T, 4>();
    }
  };
  return dtype == plan::DType::kBFloat16 ? of_type(__nv_bfloat16()) : of_type(__half());
}

}  // namespace

cudaError_t peer_finish(const PeerFinishParams& params, cudaStream_t stream) {
  const FinishParams& finish = params.finish;
  // One block for each row, as many as are there at once, as each SM has room for one: a power of two, so that they can
  // count a call in equal shares.
  const int most = std::min(sm_count(), params.most_blocks);
  int blocks = 1;
  while (2 * blocks <= most && blocks < finish.rows) blocks *= 2;
  return for_instance(finish.dtype, finish.columns, [&]<class T, int kUnits>() {
    const auto kernel = params.in_two_steps     ? peer_finish_kernel<T, kUnits, Form::kTwoSteps>
                        : blocks >= finish.rows ? peer_finish_kernel<T, kUnits, Form::kOneRow>
                                                : peer_finish_kernel<T, kUnits, Form::kOneStep>;
    return launch_early(kernel, blocks, shape_of(finish.columns).threads, stream, params);
  });
}

cudaError_t finish_rows(const FinishParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const int64_t blocks = std::min(int64_t{2} * sm_count(), params.rows);
  return for_instance(params.dtype, params.columns, [&]<class T, int kUnits>() {
    return launch_early(finish_rows_kernel<T, kUnits>, static_cast<int>(blocks),
                        shape_of(params.columns).threads, stream, params);
  });
}

cudaError_t load_peer_finish_kernels() {
  for (const plan::DType dtype : {plan::DType::kBFloat16, plan::DType::kFloat16}) {
    for (const int64_t columns : {int64_t{8}, kMostFinishColumns / 2, kMostFinishColumns}) {
      const cudaError_t error = for_instance(dtype, columns, [&]<class T, int kUnits>() {
        cudaFuncAttributes attributes;  // asking for them loads the kernel
        cudaError_t loaded = cudaFuncGetAttributes(&attributes, finish_rows_kernel<T, kUnits>);
        for (const auto kernel : {peer_finish_kernel<T, kUnits, Form::kOneRow>,
                                  peer_finish_kernel<T, kUnits, Form::kOneStep>,
                                  peer_finish_kernel<T, kUnits, Form::kTwoSteps>}) {
          if (loaded == cudaSuccess) loaded = cudaFuncGetAttributes(&attributes, kernel);
        }
        return loaded;
      });
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
