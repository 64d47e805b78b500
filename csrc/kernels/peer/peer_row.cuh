// A block's row in registers: its words, loaded, sent, awaited and added in the ranks' order.
#pragma once

#include <cstdint>

#include "kernels/peer/peer_sum.cuh"
#include "kernels/peer/peer_unit.cuh"

namespace overlap::kernels {

inline constexpr int kLanes = 32;
inline constexpr int kRunWords = kLanes * kUnitWords;
inline constexpr int kVector = 2;  // elements of a word

template <class T>
using Pair = Access<T, kVector>;

// Where the words of this thread's units are in a row.
template <int kUnits>
struct RowPart {
  __device__ __forceinline__ explicit RowPart(int64_t columns)
      : words(static_cast<int>(columns / kVector)),
        warp(static_cast<int>(threadIdx.x) / kLanes),
        lane(static_cast<int>(threadIdx.x) % kLanes),
        warps(static_cast<int>(blockDim.x) / kLanes),
        runs((words + kRunWords - 1) / kRunWords) {}

  __device__ __forceinline__ int run(int u) const { return u * warps + warp; }
  __device__ __forceinline__ int word(int u, int w) const {
    return run(u) * kRunWords + w * kLanes + lane;
  }
  // The number among the row's units, `runs * kLanes`.
  __device__ __forceinline__ int unit(int u) const { return run(u) * kLanes + lane; }
  __device__ __forceinline__ int units() const { return runs * kLanes; }
  __device__ __forceinline__ bool has(int u) const { return run(u) < runs; }
  __device__ __forceinline__ bool has(int u, int w) const { return word(u, w) < words; }

  const int words;
  const int warp;
  const int lane;
  const int warps;
  const int runs;
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
  const uint32_t* const words = static_cast<const uint32_t*>(matrix) + row * part.words;
  Words<kUnits> loaded;
  each_word<kUnits>(
      [&](int u, int w) { loaded.word[u][w] = part.has(u, w) ? words[part.word(u, w)] : 0; });
  return loaded;
}

template <int kUnits>
__device__ __forceinline__ void store_words(const RowPart<kUnits>& part, void* matrix, int64_t row,
                                            const Words<kUnits>& stored) {
  uint32_t* const words = static_cast<uint32_t*>(matrix) + row * part.words;
  each_word<kUnits>([&](int u, int w) {
    if (part.has(u, w)) words[part.word(u, w)] = stored.word[u][w];
  });
}

template <int kUnits>
__device__ __forceinline__ void send_words(const RowPart<kUnits>& part, char* buffer, int64_t place,
                                           uint32_t number, const Words<kUnits>& sent) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (!part.has(u)) continue;
    const Unit unit = {{sent.word[u][0], sent.word[u][1], sent.word[u][2]}, number};
    store_unit(buffer, place * part.units() + part.unit(u), unit);
  }
}

template <class T, int kUnits>
__device__ __forceinline__ void add_words(Floats<kUnits>& sum, const Words<kUnits>& term) {
  each_word<kUnits>([&](int u, int w) {
    const auto pair = bits_as<Pair<T>>(term.word[u][w]);
    sum.value[u][w][0] += to_float(pair.element[0]);
    sum.value[u][w][1] += to_float(pair.element[1]);
  });
}

template <class T>
__device__ __forceinline__ uint32_t rounded(const float (&value)[kVector]) {
  Pair<T> pair;
  round_to(value[0], pair.element[0]);
  round_to(value[1], pair.element[1]);
  return bits_as<uint32_t>(pair);
}

template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> rounded(const Floats<kUnits>& values) {
  Words<kUnits> words;
  each_word<kUnits>([&](int u, int w) { words.word[u][w] = rounded<T>(values.value[u][w]); });
  return words;
}

template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> plus(const Words<kUnits>& left,
                                              const Words<kUnits>& right) {
  Floats<kUnits> sum = {};
  add_words<T>(sum, left);
  add_words<T>(sum, right);
  return rounded<T>(sum);
}

// Units of a row from `count` ranks, which are loaded together and polled until all have come.
template <int kUnits, int kRanks>
struct Arriving {
  Unit unit[kRanks][kUnits] = {};  // zeros beyond the row's end

  // `wants(r)`: whether rank `first + r` has sent.
  template <class Wants>
  __device__ __forceinline__ void wait(const RowPart<kUnits>& part, const UnitCall& call,
                                       const UnitPeers& peers, int64_t place, int first,
                                       Wants wants) {
    int missing = 0;
    const auto load = [&](bool all) {
      bool reached = true;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (!wants(r) || !part.has(u)) continue;
          if (!all && unit[r][u].number == call.number()) continue;
          unit[r][u] = load_unit(call.from(first + r), place * part.units() + part.unit(u));
        }
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (!wants(r) || !part.has(u) || unit[r][u].number == call.number()) continue;
          reached = false;
          missing = r;
        }
      }
      return reached;
    };
    if (load(true)) return;
    for (int poll = 1; poll < kHotPolls; ++poll) {
      if (load(false)) return;
    }
    spin(
        peers.deadline_ns, peers.report, [&] { return load(false); },
        [&] {
          write_report(peers.report, missed_peer(peers.chunk, first + missing, call.number(), 0));
        });
  }

  __device__ __forceinline__ Words<kUnits> words(int r) const {
    Words<kUnits> all;
    each_word<kUnits>([&](int u, int w) { all.word[u][w] = unit[r][u].word[w]; });
    return all;
  }
};

// All ranks' terms of a row, added in the ranks' order; peers' are at `place` in the buffers. Loads of kTogether ranks
// are in flight at a time.
template <class T, int kUnits>
__device__ __forceinline__ Words<kUnits> sum_row(const RowPart<kUnits>& part, const UnitCall& call,
                                                 const UnitPeers& peers, const void* terms,
                                                 int64_t row, int64_t place) {
  constexpr int kTogether = 4 / kUnits;
  Floats<kUnits> sum = {};
  for (int first = 0; first < peers.ranks; first += kTogether) {
    Arriving<kUnits, kTogether> arriving;
    const auto wants = [&](int r) { return first + r < peers.ranks && first + r != peers.rank; };
    arriving.wait(part, call, peers, place, first, wants);
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (first + r >= peers.ranks) break;
      const bool own = first + r == peers.rank;
      add_words<T>(sum, own ? load_words(part, terms, row) : arriving.words(r));
    }
  }
  return rounded<T>(sum);
}

}  // namespace overlap::kernels
