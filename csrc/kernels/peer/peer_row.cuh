// A block's row in registers: its words, loaded, sent, awaited and added in the ranks' order.
// Instructions limit the kernels, so words lie at constant distances from one pointer of each thread.
#pragma once

#include <cstdint>

#include "kernels/peer/pair_sum.cuh"
#include "kernels/peer/peer_sum.cuh"
#include "kernels/peer/peer_unit.cuh"

namespace overlap::kernels {

inline constexpr int kLanes = 32;
inline constexpr int kRunWords = kLanes * kUnitWords;
inline constexpr int kVector = 2;  // elements of a word

// Where the words of this thread's units are in a row.
template <int kUnits>
struct RowPart {
  __device__ __forceinline__ explicit RowPart(int64_t columns)
      : words(static_cast<int>(columns) / kVector),
        runs((words + kRunWords - 1) / kRunWords),
        warps(static_cast<int>(blockDim.x) / kLanes),
        warp(static_cast<int>(threadIdx.x) / kLanes),
        lane(static_cast<int>(threadIdx.x) % kLanes),
        left_(words - first()) {}

  __device__ __forceinline__ int run(int u) const { return u * warps + warp; }
  // The first of this thread's words, and the first of its units.
  __device__ __forceinline__ int first() const { return warp * kRunWords + lane; }
  __device__ __forceinline__ int first_unit() const { return warp * kLanes + lane; }
  __device__ __forceinline__ int units() const { return runs * kLanes; }
  __device__ __forceinline__ bool has(int u) const { return has(u, 0); }
  __device__ __forceinline__ bool has(int u, int w) const {
    return left_ > u * warps * kRunWords + w * kLanes;
  }
  // From a thread's first word, or unit, to another one.
  __device__ __forceinline__ int to_word(int u, int w) const {
    return u * warps * kRunWords + w * kLanes;
  }
  __device__ __forceinline__ int to_unit(int u) const { return u * warps * kLanes; }

  const int words;
  const int runs;
  const int warps;
  const int warp;
  const int lane;

 private:
  const int left_;  // words from the first one to the row's end
};

template <int kUnits>
struct Words {
  uint32_t word[kUnits][kUnitWords];
};

template <int kUnits>
struct Floats {
  float value[kUnits][kUnitWords][kVector];
};

// Calls `body(u, w)` for each of a thread's words.
template <int kUnits, class Body>
__device__ __forceinline__ void each_word(Body body) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) body(u, w);
  }
}

// Zeros beyond the row's end.
template <int kUnits>
__device__ __forceinline__ Words<kUnits> load_words(const RowPart<kUnits>& part, const void* matrix,
                                                    int64_t row) {
  const uint32_t* const words =
      static_cast<const uint32_t*>(matrix) + (row * part.words + part.first());
  Words<kUnits> loaded;
  each_word<kUnits>(
      [&](int u, int w) { loaded.word[u][w] = part.has(u, w) ? words[part.to_word(u, w)] : 0; });
  return loaded;
}

template <int kUnits>
__device__ __forceinline__ void store_words(const RowPart<kUnits>& part, void* matrix, int64_t row,
                                            const Words<kUnits>& stored) {
  uint32_t* const words = static_cast<uint32_t*>(matrix) + (row * part.words + part.first());
  each_word<kUnits>([&](int u, int w) {
    if (part.has(u, w)) words[part.to_word(u, w)] = stored.word[u][w];
  });
}

template <int kUnits>
__device__ __forceinline__ void send_words(const RowPart<kUnits>& part, char* buffer, int64_t place,
                                           uint32_t number, const Words<kUnits>& sent) {
  Unit* const units = reinterpret_cast<Unit*>(buffer) + (place * part.units() + part.first_unit());
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!part.has(u)) continue;
    const Unit unit = {{sent.word[u][0], sent.word[u][1], sent.word[u][2]}, number};
    store_unit(units, part.to_unit(u), unit);
  }
}

// The elements of a word, unpacked from its bits: as pairs of elements, compilers would hold them in two registers.
__device__ __forceinline__ float2 unpacked(uint32_t word, __nv_bfloat16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpacked(uint32_t word, __half) {
  return __half22float2(bits_as<__half2>(word));
}
template <class T>
__device__ __forceinline__ void to_floats(uint32_t word, float (&value)[kVector]) {
  const float2 pair = unpacked(word, T());
  value[0] = pair.x;
  value[1] = pair.y;
}

template <class T, int kUnits>
__device__ __forceinline__ void add_words(Floats<kUnits>& sum, const Words<kUnits>& term) {
  each_word<kUnits>([&](int u, int w) {
    const float2 pair = unpacked(term.word[u][w], T());
    sum.value[u][w][0] += pair.x;
    sum.value[u][w][1] += pair.y;
  });
}

// Compilers look for no use of the words before this.
template <int kUnits>
__device__ __forceinline__ Words<kUnits> from_here(Words<kUnits> words) {
  each_word<kUnits>([&](int u, int w) { asm volatile("" : "+r"(words.word[u][w])); });
  return words;
}

__device__ __forceinline__ __nv_bfloat162 rounded_pair(float low, float high, __nv_bfloat16) {
  return __floats2bfloat162_rn(low, high);
}
__device__ __forceinline__ __half2 rounded_pair(float low, float high, __half) {
  return __floats2half2_rn(low, high);
}
template <class T>
__device__ __forceinline__ uint32_t rounded(const float (&value)[kVector]) {
  return bits_as<uint32_t>(rounded_pair(value[0], value[1], T()));
}

template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> rounded(const Floats<kUnits>& values) {
  Words<kUnits> words;
  each_word<kUnits>([&](int u, int w) { words.word[u][w] = rounded<T>(values.value[u][w]); });
  return words;
}

template <class T, int kUnits>
__device__ __forceinline__ Floats<kUnits> to_floats(const Words<kUnits>& words) {
  Floats<kUnits> values;
  each_word<kUnits>([&](int u, int w) { to_floats<T>(words.word[u][w], values.value[u][w]); });
  return values;
}

template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> plus(const Words<kUnits>& left,
                                              const Words<kUnits>& right) {
  Floats<kUnits> sum = to_floats<T>(left);
  add_words<T>(sum, right);
  return rounded<T>(sum);
}

// Units of a row from some ranks, which are loaded together and polled until all have come.
template <int kUnits, int kRanks>
struct Arriving {
  Unit unit[kRanks][kUnits] = {};  // zeros beyond the row's end

  // `wants(r)`: whether rank `first + r` has sent.
  template <class Wants>
  __device__ __forceinline__ void wait(const RowPart<kUnits>& part, const UnitCall& call,
                                       const UnitPeers& peers, int64_t place, int first,
                                       Wants wants) {
    const int64_t begin = place * part.units() + part.first_unit();
    const Unit* from[kRanks] = {};
    uint32_t missing = 0;  // a bit for each unit
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (!wants(r)) continue;
      from[r] = reinterpret_cast<const Unit*>(call.from(first + r)) + begin;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) missing |= part.has(u) ? 1u << (r * kUnits + u) : 0;
    }
    const auto load = [&] {
#pragma unroll
      for (int i = 0; i < kRanks * kUnits; ++i) {
        if ((missing >> i & 1) == 0) continue;
        unit[i / kUnits][i % kUnits] = load_unit(from[i / kUnits], part.to_unit(i % kUnits));
      }
#pragma unroll
      for (int i = 0; i < kRanks * kUnits; ++i) {
        if (unit[i / kUnits][i % kUnits].number == call.number()) missing &= ~(1u << i);
      }
      return missing == 0;
    };
#pragma unroll 1
    for (int poll = 0; poll < kHotPolls; ++poll) {
      if (load()) return;
    }
    spin(peers.deadline_ns, peers.report, load, [&] {
      const int rank = first + (__ffs(static_cast<int>(missing)) - 1) / kUnits;
      write_report(peers.report, missed_peer(peers.chunk, rank, call.number(), 0));
    });
  }

  __device__ __forceinline__ Words<kUnits> words(int r) const {
    Words<kUnits> all;
    each_word<kUnits>([&](int u, int w) { all.word[u][w] = unit[r][u].word[w]; });
    return all;
  }
};

// All ranks' terms of a row, added in the ranks' order; this rank's own are given, and peers' are at `place` in the
// buffers. Loads of kTogether ranks are in flight at a time.
template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> sum_row(const RowPart<kUnits>& part, const UnitCall& call,
                                                 const UnitPeers& peers,
                                                 const Words<kUnits>& own_words, int64_t place) {
  constexpr int kTogether = 4 / kUnits;
  Floats<kUnits> sum;
  each_word<kUnits>([&](int u, int w) { sum.value[u][w][0] = sum.value[u][w][1] = kNoSum; });
#pragma unroll 1
  for (int first = 0; first < peers.ranks; first += kTogether) {
    Arriving<kUnits, kTogether> arriving;
    const auto wants = [&](int r) { return first + r < peers.ranks && first + r != peers.rank; };
    arriving.wait(part, call, peers, place, first, wants);
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (first + r >= peers.ranks) break;
      const bool own = first + r == peers.rank;
      add_words<T>(sum, own ? own_words : arriving.words(r));
    }
  }
  return rounded<T>(sum);
}

}  // namespace overlap::kernels
