// A block's row in registers: its words, loaded, sent, awaited and added in the ranks' order.
// Instructions limit the kernels, so words lie at constant distances from one pointer of each thread.
#pragma once

#include <cstdint>

#include "kernels/peer/pair_sum.cuh"
#include "kernels/peer/peer_line.cuh"
#include "kernels/peer/peer_sum.cuh"

namespace overlap::kernels {

inline constexpr int kVector = 2;       // elements of a word
inline constexpr int kPairsOfLane = 2;  // of words, that lie together
static_assert(kLaneWords == 2 * kPairsOfLane);

// Where the words of this thread's units are in a row. A warp takes runs of 120 words: the first 64 by pairs in the
// order of the lanes, the others by pairs of those lanes that hold no line's number.
template <int kUnits>
struct RowPart : RunLane {
  __device__ __forceinline__ explicit RowPart(int64_t columns)
      : words(static_cast<int>(columns) / kVector),
        runs((words + kRunWords - 1) / kRunWords),
        warps(static_cast<int>(blockDim.x) / kLanes),
        warp(static_cast<int>(threadIdx.x) / kLanes),
        first_{warp * kRunWords + 2 * lane, warp * kRunWords + 2 * kLanes + 2 * (lane - line)},
        left_{words - first_[0], numbers() ? 0 : words - first_[1]},
        left_of_line_(words - warp * kRunWords - 2 * kLineLanes * line) {}

  __device__ __forceinline__ int run(int u) const { return u * warps + warp; }
  // The first of a thread's pairs of words.
  __device__ __forceinline__ int first(int pair) const { return first_[pair]; }
  __device__ __forceinline__ bool has(int u) const { return run(u) < runs; }
  __device__ __forceinline__ bool has(int u, int pair) const { return left_[pair] > to_words(u); }
  __device__ __forceinline__ bool has_line(int u) const { return left_of_line_ > to_words(u); }
  // From the words of a thread's first unit to those of another one; from its share of a line.
  __device__ __forceinline__ int to_words(int u) const { return u * warps * kRunWords; }
  __device__ __forceinline__ int to_share(int u) const { return u * warps * kLanes; }
  // The place of the first unit's share in the lines of rows.
  __device__ __forceinline__ int64_t first_share(int64_t row) const {
    return (row * runs + warp) * kLanes + lane;
  }

  const int words;
  const int runs;
  const int warps;
  const int warp;

 private:
  const int first_[kPairsOfLane];
  const int left_[kPairsOfLane];  // words from the first one to the row's end
  const int left_of_line_;
};

template <int kUnits>
struct Words {
  uint32_t word[kUnits][kLaneWords];
};

template <int kUnits>
struct Floats {
  float value[kUnits][kLaneWords][kVector];
};

// Calls `body(u, w)` for each of a thread's words.
template <int kUnits, class Body>
__device__ __forceinline__ void each_word(Body body) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int w = 0; w < kLaneWords; ++w) body(u, w);
  }
}

// Calls `body(u, pair)` for each of a thread's pairs of words.
template <int kUnits, class Body>
__device__ __forceinline__ void each_pair(const RowPart<kUnits>& part, Body body) {
#pragma unroll
  for (int pair = 0; pair < kPairsOfLane; ++pair) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (part.has(u, pair)) body(u, pair);
    }
  }
}

// Calls `body(u, pair, words)` with the pairs' words in this row of a matrix.
template <int kUnits, class Word, class Body>
__device__ __forceinline__ void each_pair(const RowPart<kUnits>& part, Word* matrix, int64_t row,
                                          Body body) {
  Word* const words = matrix + row * part.words;
  each_pair(part, [&](int u, int pair) {
    body(u, pair, words + part.first(pair) + part.to_words(u));
  });
}

// Zeros where the thread has no words.
template <int kUnits>
__device__ __forceinline__ Words<kUnits> load_words(const RowPart<kUnits>& part, const void* matrix,
                                                    int64_t row) {
  Words<kUnits> loaded = {};
  each_pair(part, static_cast<const uint32_t*>(matrix), row,
            [&](int u, int pair, const uint32_t* words) {
              const uint2 both = *reinterpret_cast<const uint2*>(words);
              loaded.word[u][2 * pair] = both.x;
              loaded.word[u][2 * pair + 1] = both.y;
            });
  return loaded;
}

template <int kUnits>
__device__ __forceinline__ void store_words(const RowPart<kUnits>& part, void* matrix, int64_t row,
                                            const Words<kUnits>& stored) {
  each_pair(part, static_cast<uint32_t*>(matrix), row, [&](int u, int pair, uint32_t* words) {
    *reinterpret_cast<uint2*>(words) = {stored.word[u][2 * pair], stored.word[u][2 * pair + 1]};
  });
}

template <int kUnits>
__device__ __forceinline__ void send_words(const RowPart<kUnits>& part, const LineCall& call,
                                           int peer, int64_t place, const Words<kUnits>& sent) {
  LineShare* const first = reinterpret_cast<LineShare*>(call.to(peer)) + part.first_share(place);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!part.has(u)) continue;
    const auto& word = sent.word[u];
    store_run(first + part.to_share(u), {{word[0], word[1], word[2], word[3]}}, part.has_line(u),
              part, call);
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

// The words of a row that some ranks send.
template <int kUnits, int kRanks>
struct ArrivingRows {
  ArrivingRuns<kRanks * kUnits> runs;

  // `wants(r)`: whether rank `first + r` sends.
  template <class Wants>
  __device__ __forceinline__ void wait(const RowPart<kUnits>& part, const LineCall& call,
                                       const LinePeers& peers, int64_t place, int first,
                                       Wants wants) {
    const int64_t share = part.first_share(place);
    const LineShare* from[kRanks] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (!wants(r)) continue;
      from[r] = reinterpret_cast<const LineShare*>(call.from(first + r)) + share;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) missing |= part.has(u) ? 1u << (r * kUnits + u) : 0;
    }
    runs.wait(
        missing, part, call, peers,
        [&](int i) { return from[i / kUnits] + part.to_share(i % kUnits); },
        [&](int i) { return part.has_line(i % kUnits); },
        [&](int i) { return first + i / kUnits; });
  }

  __device__ __forceinline__ Words<kUnits> words(int r) const {
    Words<kUnits> all;
    each_word<kUnits>([&](int u, int w) { all.word[u][w] = runs.share[r * kUnits + u].word[w]; });
    return all;
  }
};

// All ranks' terms of a row, added in the ranks' order; this rank's own are given, and peers' are at `place` in the
// buffers. Loads of kTogether ranks are in flight at a time.
template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> sum_row(const RowPart<kUnits>& part, const LineCall& call,
                                                 const LinePeers& peers,
                                                 const Words<kUnits>& own_words, int64_t place) {
  constexpr int kTogether = 4 / kUnits;
  Floats<kUnits> sum;
  each_word<kUnits>([&](int u, int w) { sum.value[u][w][0] = sum.value[u][w][1] = kNoSum; });
#pragma unroll 1
  for (int first = 0; first < peers.ranks; first += kTogether) {
    ArrivingRows<kUnits, kTogether> arriving;
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
