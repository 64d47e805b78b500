// The way of a tile's sums to memory. A warp stages sixteen rows, rounded, and takes them up again, 16 bytes a lane; rows of wide tiles are
// stored as runs.
#pragma once

#include "kernels/chunk/element.cuh"
#include "kernels/moe/gate.cuh"
#include "kernels/moe/grouped_gemm.h"
#include "kernels/moe/grouped_gemm_ptx.cuh"

namespace overlap::kernels {

constexpr int kLine = 128;  // bytes of k of a stage, which the swizzle repeats
constexpr int kTile = 128;  // rows, and columns
constexpr int kHalf = kTile / 2;
constexpr int kWideTile = 192;  // columns
constexpr int kWarpRows = 16;   // of a warp's sums at a time

// One kernel's product. A tile has kWidth columns; a gate makes half as many of them.
template <class Operand, GroupedForm kForm_, bool kTurned, int kWidth_ = kTile, bool kBlocks_ = false,
          bool kSwiglu_ = false>
struct Product {
  using T = Operand;
  static constexpr bool kScaled = std::is_same_v<T, __nv_fp8_e4m3>;
  using Result = std::conditional_t<kScaled, __nv_bfloat16, T>;
  static constexpr GroupedForm kForm = kForm_;
  static constexpr bool kWeights = kForm == GroupedForm::kWeights;
  static constexpr bool kGated = kForm == GroupedForm::kGate;
  static constexpr bool kBlocks = kBlocks_;
  static constexpr bool kTurnedA = kWeights;
  static constexpr bool kTurnedB = kTurned || kWeights;
  static constexpr int kK = kLine / static_cast<int>(sizeof(T));  // numbers of k of a stage
  static constexpr int kWidth = kWidth_;
  static constexpr bool kWide = kWidth == kWideTile;
  static_assert(!kWide || kWeights);
  // A gate that is a SwiGLU without biases, not interleaved: registers hold gate and up of a column.
  static constexpr bool kSwiglu = kSwiglu_;
  static_assert(!kSwiglu || kGated);
  static constexpr int kColumns = kGated ? kWidth / 2 : kWidth;  // of the output
  static constexpr int kSums = kWidth / 2;                       // a thread's, of 64 rows
  // Bytes of a staged row: no two rows of a store meet in a bank.
  static constexpr int kPitch = kWidth * 2 + 16;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rows of a warp's sums: which, and where in the output.
struct WarpRows {
  int expert;
  int tile;  // of columns
  int64_t first;
  int count;
};

// Stages `value(i)` of each sum i of kCount columns. Sums 4j and 4j + 1 are of row lane / 4 and columns 8j + lane % 4 * 2 and the next, 4j + 2
// and 4j + 3 of eight rows further.
template <class P, int kCount, class Value>
__device__ __forceinline__ void stage(char* staged, const Value& value) {
  using T = typename P::Result;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // nobody reads what was staged before
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    char* const to = staged + lane / 4 * P::kPitch + (8 * j + lane % 4 * 2) * 2;
    *reinterpret_cast<uint32_t*>(to) = round_pair<T>(value(4 * j), value(4 * j + 1));
    *reinterpret_cast<uint32_t*>(to + 8 * P::kPitch) =
        round_pair<T>(value(4 * j + 2), value(4 * j + 3));
  }
  __syncwarp();
}
template <class P>
__device__ __forceinline__ void stage(const float (&sums)[P::kSums], char* staged) {
  stage<P, P::kWidth>(staged, [&](int i) { return sums[i]; });
}

template <class T>
using Part = Access<T, 8>;

template <class T>
__device__ __forceinline__ Part<T>& part_at(const void* base, int64_t element) {
  return *reinterpret_cast<Part<T>*>(const_cast<T*>(static_cast<const T*>(base)) + element);
}

// Eight columns of gate and up.
struct Columns {
  float gate[8] = {};
  float up[8] = {};

  template <class T>
  __device__ void add(const Part<T>& first, const Part<T>& second, bool interleaved) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (interleaved) {
        const Part<T>& both = e < 4 ? first : second;
        gate[e] += to_float(both.element[e % 4 * 2]);
        up[e] += to_float(both.element[e % 4 * 2 + 1]);
      } else {
        gate[e] += to_float(first.element[e]);
        up[e] += to_float(second.element[e]);
      }
    }
  }
  // The expert's biases; only the gate's where there is no up.
  template <class T>
  __device__ void add(const GateParams& gate, int expert, int64_t column) {
    if (gate.gate_bias == nullptr) return;
    const int64_t at = expert * gate.bias_stride + (gate.interleaved ? 2 : 1) * column;
    const void* const up = gate.up_bias == nullptr ? gate.gate_bias : gate.up_bias;
    add<T>(part_at<T>(gate.gate_bias, at), part_at<T>(up, gate.interleaved ? at + 8 : at),
           gate.interleaved);
  }
};

template <class P>
class Epilogue {
 public:
  // A tile's columns of the weight begin at tile * step; their second half begins `second` further.
  __device__ Epilogue(const GroupedGemmParams& params, int step, int second, char* staged)
      : params_(params),
        step_(step),
        second_(second),
        staged_(staged),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void store(float (&sums)[P::kSums], const WarpRows& rows) {
    if (rows.count <= 0) return;
    if constexpr (P::kWide) return store_runs(sums, rows);
    if constexpr (P::kScaled && !P::kBlocks) scale(sums, rows);
    if constexpr (P::kSwiglu) {
      if (params_.gate.gate_grad != nullptr) {
        stage<P>(sums, staged_);
        keep_staged(rows);
      }
      stage_swiglu(sums, rows);
    } else {
      stage<P>(sums, staged_);
    }
    if constexpr (P::kSwiglu || kForm == GroupedForm::kRows) {
      if (kGated || params_.gate.gate_bias == nullptr) return store_staged(rows);
    }
    const int part = lane_ % kParts;
    const int64_t column = int64_t{rows.tile} * kColumns + part * 8;
    const bool inside = column < params_.gate.width;
    Columns bias;
    if (inside) bias.template add<T>(params_.gate, rows.expert, column);
    const Places own = lane_ < rows.count ? places(rows) : Places{};
#pragma unroll 1
    for (int first = 0; first < rows.count; first += kRows) {
      const int row = first + lane_ / kParts;
      char* const here = from_lane(own.here, row);
      char* const home = from_lane(own.home, row);
      if (row >= rows.count || !inside) continue;
      Part<T> value = staged(row, part);
      if constexpr (kGated) {
        value = gate(row, part, rows.first + row, column, bias);
      } else if (kForm == GroupedForm::kRows && params_.gate.gate_bias != nullptr) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          round_to(to_float(value.element[e]) + bias.gate[e], value.element[e]);
        }
      }
      if (home != nullptr) part_at<T>(home, column) = value;
      if (here != nullptr) part_at<T>(here, column) = value;
    }
  }

 private:
  using T = typename P::Result;
  static constexpr GroupedForm kForm = P::kForm;
  static constexpr bool kGated = P::kGated;
  static constexpr int kColumns = P::kColumns;
  static constexpr int kParts = kColumns / 8;
  static constexpr int kRows = 32 / kParts;  // that the warp takes up at a time

  // Staged rows that are done, all at once.
  __device__ __forceinline__ void store_staged(const WarpRows& rows) const {
    const int part = lane_ % kParts;
    const int64_t column = int64_t{rows.tile} * kColumns + part * 8;
    const Places own = lane_ < rows.count ? places(rows) : Places{};
    char* const place = own.home != nullptr ? own.home : own.here;
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kRows) {
      const int row = first + lane_ / kParts;
      char* const to = from_lane(place, row);
      if (row >= rows.count || column >= params_.gate.width) continue;
      part_at<T>(to, column) = staged(row, part);
    }
  }

  // Staged gates and ups, for backward.
  __device__ __forceinline__ void keep_staged(const WarpRows& rows) const {
    const int part = lane_ % kParts;
    const int64_t column = int64_t{rows.tile} * kColumns + part * 8;
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kRows) {
      const int row = first + lane_ / kParts;
      if (row >= rows.count || column >= params_.gate.width) continue;
      keep(rows.first + row, column, staged(row, part), staged(row, part + kParts));
    }
  }

  // Each row is a run, which the warp does not wait for: the other group's products leave the time to store it.
  __device__ void store_runs(const float (&sums)[P::kSums], const WarpRows& rows) {
    const int64_t column = int64_t{rows.tile} * kColumns;
    const auto bytes = 2 * static_cast<int>(min(int64_t{kColumns}, params_.gate.width - column));
    if (bytes <= 0) return;
    await_stores_read();
    stage<P>(sums, staged_);
    show_async();
    __syncwarp();
    if (lane_ < rows.count) {
      store_run(places(rows).here + column * 2, staged_ + lane_ * P::kPitch, bytes);
    }
    commit_stores();
  }

  __device__ static float swiglu(const float (&sums)[P::kSums], int i) {
    const float up = rounded(sums[P::kSums / 2 + i]);
    const Gated<float> active = apply(GateForm<float>(), true, rounded(sums[i]), up);
    return active.value * active.factor;
  }

  // As stage(), of a SwiGLU's columns.
  __device__ __forceinline__ void stage_swiglu(const float (&sums)[P::kSums],
                                               const WarpRows& rows) const {
    const auto* const shares = static_cast<const float*>(params_.gate.shares);
    const auto share_of = [&](int row) {
      return shares == nullptr || row >= rows.count ? 1.0f : shares[rows.first + row];
    };
    const float share[2] = {share_of(lane_ / 4), share_of(8 + lane_ / 4)};
    stage<P, kColumns>(staged_, [&](int i) { return swiglu(sums, i) * share[i / 2 % 2]; });
  }

  __device__ static float rounded(float sum) {
    T value;
    round_to(sum, value);
    return to_float(value);
  }

  // Sums become products with the scales of their rows, then of their columns; stage() says which a lane has.
  __device__ void scale(float (&sums)[P::kSums], const WarpRows& rows) const {
    float of_row[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + 8 * half;
      if (row < rows.count) {
        const int64_t packed =
            (rows.first + row) * (params_.k + scale_bytes(params_.k, false)) + params_.k;
        of_row[half] =
            *reinterpret_cast<const float*>(static_cast<const char*>(params_.input) + packed);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const scales =
          (half == 1 && params_.up_scale != nullptr ? params_.up_scale : params_.scale) +
          rows.expert * params_.n;
      const int64_t first = int64_t{rows.tile} * step_ + half * second_ + lane_ % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j) {
        float* const four = sums + 4 * (half * (kHalf / 8) + j);
        const int64_t column = first + 8 * j;
        float2 of_columns = {};
        if (column < params_.n) of_columns = *reinterpret_cast<const float2*>(scales + column);
        four[0] = four[0] * of_row[0] * of_columns.x;
        four[1] = four[1] * of_row[0] * of_columns.y;
        four[2] = four[2] * of_row[1] * of_columns.x;
        four[3] = four[3] * of_row[1] * of_columns.y;
      }
    }
  }

  __device__ const Part<T>& staged(int row, int part) const {
    return *reinterpret_cast<const Part<T>*>(staged_ + row * P::kPitch + part * 16);
  }

  __device__ Part<T> gate(int staged_row, int part, int64_t row, int64_t column,
                          const Columns& bias) const {
    const GateParams& gate = params_.gate;
    const bool turns = gate.interleaved;
    const Part<T> first = staged(staged_row, turns ? 2 * part : part);
    const Part<T> second = staged(staged_row, turns ? 2 * part + 1 : part + kParts);
    if (gate.gate_grad != nullptr) keep(row, column, first, second);
    Columns columns = bias;
    columns.template add<T>(first, second, turns);
    const auto* const shares = static_cast<const float*>(gate.shares);
    const float share = shares == nullptr ? 1.0f : shares[row];
    GateForm<float> form(gate);
    Part<T> result;
    // The activation is a constant within each loop: its code is short then.
    const auto apply_all = [&](auto activation) {
      form.activation = activation.value;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Gated<float> active = apply(form, true, columns.gate[e], columns.up[e]);
        round_to(active.value * active.factor * share, result.element[e]);
      }
    };
    switch (gate.activation) {
      case Activation::kNone:
        apply_all(std::integral_constant<Activation, Activation::kNone>{});
        break;
      case Activation::kSilu:
        apply_all(std::integral_constant<Activation, Activation::kSilu>{});
        break;
      case Activation::kGelu:
        apply_all(std::integral_constant<Activation, Activation::kGelu>{});
        break;
      case Activation::kGeluTanh:
        apply_all(std::integral_constant<Activation, Activation::kGeluTanh>{});
        break;
      case Activation::kRelu:
        apply_all(std::integral_constant<Activation, Activation::kRelu>{});
        break;
    }
    return result;
  }

  __device__ void keep(int64_t row, int64_t column, const Part<T>& first,
                       const Part<T>& second) const {
    const GateParams& gate = params_.gate;
    const int64_t begin = row * gate.grad_stride;
    if (gate.interleaved) {
      part_at<T>(gate.gate_grad, begin + 2 * column) = first;
      part_at<T>(gate.gate_grad, begin + 2 * column + 8) = second;
    } else {
      part_at<T>(gate.gate_grad, begin + column) = first;
      part_at<T>(gate.up_grad, begin + column) = second;
    }
  }

  // Where this lane's row goes: in the output, or home.
  struct Places {
    char* here = nullptr;
    char* home = nullptr;
  };
  __device__ Places places(const WarpRows& rows) const {
    const int64_t row_bytes = params_.gate.width * 2;
    const int64_t row = rows.first + lane_;
    Places found;
    if (params_.gate.output != nullptr) {
      const int64_t before = kForm == GroupedForm::kWeights ? rows.expert * params_.n : int64_t{0};
      found.here = static_cast<char*>(params_.gate.output) + (before + row) * row_bytes;
    }
    const HomeParams& home = params_.home;
    if (home.source != nullptr) {
      const int64_t source = home.source[row];
      const int64_t rank = source < 0 ? home.rank : source / home.stride;
      if (rank != home.rank) {
        found.home = home.slots[rank] + (source - rank * home.stride) * row_bytes;
        found.here = nullptr;
      }
    }
    return found;
  }
  __device__ static char* from_lane(char* pointer, int lane) {
    return reinterpret_cast<char*>(
        __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(pointer), lane));
  }

  const GroupedGemmParams& params_;
  const int step_;
  const int second_;
  char* const staged_;
  const int lane_;
};

#endif

}  // namespace overlap::kernels
