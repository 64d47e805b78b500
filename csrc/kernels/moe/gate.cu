// Rows of a mixture through the activation, and times their shares.
#include <cuda_runtime.h>

#include "kernels/moe/gate.cuh"
#include "kernels/moe/rows.cuh"

namespace overlap::kernels {
namespace {

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
