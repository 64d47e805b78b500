// An activation of gate and up, for kernels that apply it to rows and for GEMMs that apply it to their sums.
#pragma once

#include "kernels/moe/moe.h"

namespace overlap::kernels {

template <class A>
struct Activated {
  A value;
  A slope;
};

// 1 / (1 + exp(-x)) and its products. In float a division by the compiler branches, so that columns would follow each other: here they are
// by a reciprocal and two corrections, off by one unit in the last place at most.
template <class A>
struct Sigmoid {
  A divisor;
  A value;
  __device__ explicit Sigmoid(A x) : divisor(A{1} + exp(-x)), value(A{1} / divisor) {}
  __device__ A times(A x) const { return x / divisor; }
};
template <>
struct Sigmoid<float> {
  float divisor;
  float value;
  __device__ explicit Sigmoid(float x) : divisor(1.0f + expf(fminf(-x, 87.0f))) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(divisor));
    value = fmaf(estimate, fmaf(-divisor, estimate, 1.0f), estimate);
  }
  __device__ float times(float x) const {
    const float quotient = x * value;
    const float corrected = fmaf(fmaf(-divisor, quotient, x), value, quotient);
    return isinf(quotient) ? quotient : corrected;
  }
};

template <class A>
__device__ __forceinline__ Activated<A> activate(Activation activation, A x) {
  constexpr A kSqrtHalf = A(0.70710678118654752440);
  constexpr A kDensity = A(0.39894228040143267794);  // 1 / sqrt(2 pi)
  switch (activation) {
    case Activation::kSilu: {
      const Sigmoid<A> sigmoid(x);
      return {sigmoid.times(x), sigmoid.value * (A{1} + x * (A{1} - sigmoid.value))};
    }
    case Activation::kGelu: {
      const A below = A(0.5) * (A{1} + erf(x * kSqrtHalf));
      return {x * below, below + x * kDensity * exp(A(-0.5) * x * x)};
    }
    case Activation::kGeluTanh: {
      constexpr A kBeta = A(0.79788456080286535588);  // sqrt(2 / pi)
      constexpr A kCubic = A(0.044715);
      const A t = tanh(kBeta * (x + kCubic * x * x * x));
      const A inner = kBeta * (A{1} + A{3} * kCubic * x * x);
      return {A(0.5) * x * (A{1} + t), A(0.5) * (A{1} + t) + A(0.5) * x * (A{1} - t * t) * inner};
    }
    case Activation::kRelu:
      return {x > 0 || x != x ? x : A{0}, x > 0 ? A{1} : A{0}};
    case Activation::kNone:
      return {x, A{1}};
  }
  return {};
}

// GateParams's numbers, in the type of sums.
template <class A>
struct GateForm {
  Activation activation;
  A alpha;
  A limit;
  A offset;
  // A SwiGLU's.
  __device__ GateForm() : activation(Activation::kSilu), alpha(1), limit(0), offset(0) {}
  __device__ explicit GateForm(const GateParams& params)
      : activation(params.activation),
        alpha(static_cast<A>(params.alpha)),
        limit(static_cast<A>(params.limit)),
        offset(static_cast<A>(params.offset)) {}
};

template <class A>
struct Gated {
  A value;   // of the gate
  A factor;  // by the up, 1 without one
  A slope;   // of the gate's activation
};

template <class A>
__device__ __forceinline__ Gated<A> apply(const GateForm<A>& form, bool gated, A gate, A up) {
  const A limit = form.limit;
  const bool clamps = limit > 0 && gated;
  const A x = clamps && gate > limit ? limit : gate;
  const A y = clamps ? (up > limit ? limit : up < -limit ? -limit : up) : up;
  const bool scales = form.alpha != A{1};
  const Activated<A> active = activate<A>(form.activation, scales ? form.alpha * x : x);
  const A value = scales ? active.value / form.alpha : active.value;
  return {value, gated ? y + form.offset : A{1}, active.slope};
}

}  // namespace overlap::kernels
