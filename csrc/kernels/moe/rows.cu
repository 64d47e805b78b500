// Rows between a mixture's GEMMs and collectives: a block takes a row, its threads 16 bytes each where alignment allows it.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/chunk/element.cuh"
#include "kernels/moe/gate.cuh"
#include "kernels/moe/moe.h"

namespace overlap::kernels {
namespace {

constexpr int kMostThreads = 256;
constexpr int kBatch = 4;  // loads of a thread that are under way together

// The type of sums and products.
template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
template <class T>
using wide_t = typename Wide<T>::type;

// Products that are rounded before they are added, as the composition's are.
__device__ __forceinline__ float add_product(float sum, float a, float b) {
  return __fadd_rn(sum, __fmul_rn(a, b));
}
__device__ __forceinline__ double add_product(double sum, double a, double b) {
  return __dadd_rn(sum, __dmul_rn(a, b));
}

template <class T, int kVector>
__device__ __forceinline__ Access<T, kVector> load(const void* base, int64_t element) {
  return *reinterpret_cast<const Access<T, kVector>*>(static_cast<const T*>(base) + element);
}
template <class T, int kVector>
__device__ __forceinline__ void store(void* base, int64_t element,
                                      const Access<T, kVector>& value) {
  *reinterpret_cast<Access<T, kVector>*>(static_cast<T*>(base) + element) = value;
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMostThreads)
    gather_kernel(const __grid_constant__ RowsParams params) {
  const int64_t row = blockIdx.x;
  const int64_t index = params.index[row];
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
  for (int64_t column = threadIdx.x * kVector; column < params.width; column += step * kBatch) {
    Access<T, kVector> values[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (from >= 0 && column + i * step < params.width) {
        values[i] = load<T, kVector>(source, from * params.width + column + i * step);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (column + i * step < params.width) {
        store(params.output, row * params.width + column + i * step, values[i]);
      }
    }
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
  for (int64_t column = threadIdx.x * kVector; column < params.width;
       column += int64_t{blockDim.x} * kVector) {
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

template <class A>
__device__ A sum_of_block(A value) {
  __shared__ A parts[kMostThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(~0u, value, step);
  }
  if (threadIdx.x % 32 == 0) {
    parts[threadIdx.x / 32] = value;
  }
  __syncthreads();
  A total = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
    total += parts[warp];
  }
  return total;
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMostThreads)
    weigh_kernel(const __grid_constant__ WeighParams params) {
  using A = wide_t<T>;
  const int64_t row = blockIdx.x;
  const A share = static_cast<const A*>(params.shares)[row];
  A dot = 0;
  for (int64_t column = threadIdx.x * kVector; column < params.width;
       column += int64_t{blockDim.x} * kVector) {
    const int64_t at = row * params.width + column;
    const auto grad = load<T, kVector>(params.grad, at);
    if (params.dots != nullptr) {
      const auto result = load<T, kVector>(params.results, at);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        dot += to_float(grad.element[e]) * to_float(result.element[e]);
      }
    }
    if (params.scaled != nullptr) {
      Access<T, kVector> scaled;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        round_to(to_float(grad.element[e]) * share, scaled.element[e]);
      }
      store(params.scaled, at, scaled);
    }
  }
  if (params.dots != nullptr) {
    const A total = sum_of_block(dot);
    if (threadIdx.x == 0) {
      static_cast<A*>(params.dots)[row] = total;
    }
  }
}

// The expert that a row is for: the first whose rows end after it.
__device__ int expert_of(const int32_t* offs, int experts, int64_t row) {
  int low = 0;
  int high = experts - 1;  // rows after the last one are the last expert's, too
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offs[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Gate and up of kVector elements from `element` on, as they lie: in two rows, or by turns in one.
template <class T, int kVector, bool kTurns>
__device__ __forceinline__ void load_pair(const void* gate, const void* up, int64_t element,
                                          wide_t<T> (&left)[kVector], wide_t<T> (&right)[kVector]) {
  if constexpr (kTurns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto both = load<T, kVector>(gate, 2 * element + half * kVector);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const int at = half * kVector + e;
        (at % 2 == 0 ? left : right)[at / 2] += to_float(both.element[e]);
      }
    }
  } else {
    const auto own = load<T, kVector>(gate, element);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      left[e] += to_float(own.element[e]);
    }
    if (up != nullptr) {
      const auto other = load<T, kVector>(up, element);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        right[e] += to_float(other.element[e]);
      }
    }
  }
}

// Gradients of one column, whose row has a share.
template <class A, class T>
struct GateGradient {
  A gate;
  A up;
  A dot;     // the share's
  T scaled;  // not a gradient: the gate's value, rounded, times the share
};

template <class A, class T>
__device__ __forceinline__ GateGradient<A, T> gate_gradient(const GateForm<A>& form, bool gated,
                                                            A gate, A up, A grad, A share) {
  const Gated<A> active = apply(form, gated, gate, up);
  const bool clamps = form.limit > 0 && gated;
  const bool gate_open = !clamps || gate <= form.limit;
  const bool up_open = !clamps || (up <= form.limit && up >= -form.limit);
  T returned;
  round_to(gated ? active.value * active.factor : active.value, returned);
  GateGradient<A, T> found;
  found.gate = gate_open ? grad * share * active.factor * active.slope : A{0};
  found.up = up_open ? grad * share * active.value : A{0};
  found.dot = grad * to_float(returned);
  round_to(to_float(returned) * share, found.scaled);
  return found;
}

template <class T, int kVector, bool kTurns, bool kBackward>
__global__ void __launch_bounds__(kMostThreads)
    gate_kernel(const __grid_constant__ GateParams params) {
  using A = wide_t<T>;
  const int64_t row = blockIdx.x;
  const bool gated = kTurns || params.up != nullptr;
  const GateForm<A> form(params);
  const int64_t bias_row = params.gate_bias == nullptr
                               ? 0
                               : expert_of(params.offs, params.experts, row) * params.bias_stride;
  const T* gate_row = static_cast<const T*>(params.gate) + row * params.row_stride;
  const T* up_row =
      params.up == nullptr ? nullptr : static_cast<const T*>(params.up) + row * params.row_stride;
  const A share = params.shares == nullptr ? A{1} : static_cast<const A*>(params.shares)[row];
  A dot = 0;
  for (int64_t column = threadIdx.x * kVector; column < params.width;
       column += int64_t{blockDim.x} * kVector) {
    A gate[kVector] = {};
    A up[kVector] = {};
    load_pair<T, kVector, kTurns>(gate_row, up_row, column, gate, up);
    if (params.gate_bias != nullptr) {
      const T* gate_bias = static_cast<const T*>(params.gate_bias) + bias_row;
      const T* up_bias =
          params.up_bias == nullptr ? nullptr : static_cast<const T*>(params.up_bias) + bias_row;
      load_pair<T, kVector, kTurns>(gate_bias, up_bias, column, gate, up);
    }
    Access<T, kVector> grad = {};
    if constexpr (kBackward) {
      grad = load<T, kVector>(params.grad, row * params.width + column);
    }
    Access<T, kVector> result;  // backward: the gate's gradient
    Access<T, kVector> others;  // the up's
    Access<T, kVector> scaled;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if constexpr (kBackward) {
        const GateGradient<A, T> found =
            gate_gradient<A, T>(form, gated, gate[e], up[e], to_float(grad.element[e]), share);
        round_to(found.gate, result.element[e]);
        round_to(found.up, others.element[e]);
        scaled.element[e] = found.scaled;
        dot += found.dot;
      } else {
        const Gated<A> active = apply(form, gated, gate[e], up[e]);
        round_to((gated ? active.value * active.factor : active.value) * share, result.element[e]);
      }
    }
    if (kBackward && params.output != nullptr) {
      store(params.output, row * params.width + column, scaled);
    }
    if constexpr (!kBackward) {
      store(params.output, row * params.width + column, result);
    } else if constexpr (kTurns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Access<T, kVector> both;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const int at = half * kVector + e;
          both.element[e] = (at % 2 == 0 ? result : others).element[at / 2];
        }
        store(params.gate_grad, row * params.grad_stride + 2 * column + half * kVector, both);
      }
    } else {
      store(params.gate_grad, row * params.grad_stride + column, result);
      if (gated) {
        store(params.up_grad, row * params.grad_stride + column, others);
      }
    }
  }
  if (kBackward && params.dots != nullptr) {
    const A total = sum_of_block(dot);
    if (threadIdx.x == 0) {
      static_cast<A*>(params.dots)[row] = total;
    }
  }
}

template <class T>
int vector_of(std::initializer_list<int64_t> elements,
              std::initializer_list<const void*> pointers) {
  constexpr int kVector = 16 / sizeof(T);
  const bool whole =
      std::all_of(elements.begin(), elements.end(), [](int64_t n) { return n % kVector == 0; });
  const bool aligned = std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  });
  return whole && aligned ? kVector : 1;
}

// Whole warps, as many threads as a row has accesses.
unsigned threads_of(int64_t width, int vector) {
  const int64_t accesses = (width + vector - 1) / vector;
  return static_cast<unsigned>(std::clamp<int64_t>((accesses + 31) / 32 * 32, 32, kMostThreads));
}

// Calls launch(T{}) with the element's type.
template <class Launch>
cudaError_t by_element(Element element, int64_t rows, int64_t width, const Launch& launch) {
  if (rows > 0 && width > 0) {
    switch (element) {
      case Element::kBFloat16:
        launch(__nv_bfloat16{});
        break;
      case Element::kFloat16:
        launch(__half{});
        break;
      case Element::kFloat32:
        launch(float{});
        break;
      case Element::kFloat64:
        launch(double{});
        break;
    }
  }
  return cudaGetLastError();
}

template <class T, bool kBackward>
void launch_gate(const GateParams& params, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  const int vector =
      vector_of<T>({params.width, params.row_stride, params.bias_stride, params.grad_stride},
                   {params.gate, params.up, params.gate_bias, params.up_bias, params.output,
                    params.grad, params.gate_grad, params.up_grad});
  const auto grid = static_cast<unsigned>(params.rows);
  const unsigned threads = threads_of(params.width, vector);
  const auto kernel = params.interleaved
                          ? (vector == 1 ? gate_kernel<T, 1, true, kBackward>
                                         : gate_kernel<T, kVector, true, kBackward>)
                          : (vector == 1 ? gate_kernel<T, 1, false, kBackward>
                                         : gate_kernel<T, kVector, false, kBackward>);
  kernel<<<grid, threads, 0, stream>>>(params);
}

}  // namespace

cudaError_t gather_rows(const RowsParams& params, cudaStream_t stream) {
  return by_element(params.element, params.rows, params.width, [&](auto type) {
    using T = decltype(type);
    constexpr int kVector = 16 / sizeof(T);
    const int vector = vector_of<T>({params.width}, {params.source, params.own, params.output});
    const auto kernel = vector == 1 ? gather_kernel<T, 1> : gather_kernel<T, kVector>;
    kernel<<<static_cast<unsigned>(params.rows), threads_of(params.width, vector), 0, stream>>>(
        params);
  });
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
    kernel<<<static_cast<unsigned>(params.tokens), threads_of(params.width, vector), 0, stream>>>(
        params);
  });
}

cudaError_t weigh_rows(const WeighParams& params, cudaStream_t stream) {
  return by_element(params.element, params.rows, params.width, [&](auto type) {
    using T = decltype(type);
    constexpr int kVector = 16 / sizeof(T);
    const int vector = vector_of<T>({params.width}, {params.grad, params.results, params.scaled});
    const auto kernel = vector == 1 ? weigh_kernel<T, 1> : weigh_kernel<T, kVector>;
    kernel<<<static_cast<unsigned>(params.rows), threads_of(params.width, vector), 0, stream>>>(
        params);
  });
}

cudaError_t apply_gate(const GateParams& params, cudaStream_t stream) {
  return by_element(params.element, params.rows, params.width,
                    [&](auto type) { launch_gate<decltype(type), false>(params, stream); });
}

cudaError_t apply_gate_backward(const GateParams& params, cudaStream_t stream) {
  return by_element(params.element, params.rows, params.width,
                    [&](auto type) { launch_gate<decltype(type), true>(params, stream); });
}

}  // namespace overlap::kernels
