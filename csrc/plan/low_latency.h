// How the data of all-reduces of few rows travel: they are their own signal.
#pragma once

#include <cstdint>

namespace overlap::plan {

inline constexpr int64_t kLowLatencyBytes = int64_t{1}
                                            << 22;    // the most that a rank sends to all peers
inline constexpr int64_t kLineBytes = 120;            // of the 128 of a line: the data
inline constexpr int64_t kRunBytes = 4 * kLineBytes;  // of the lines that a warp sends at a time

constexpr int64_t low_latency_runs(int64_t bytes) {
  return (bytes + kRunBytes - 1) / kRunBytes;
}

// Runs of each rank's piece.
constexpr int64_t low_latency_piece(int64_t bytes, int32_t ranks) {
  return (low_latency_runs(bytes) + ranks - 1) / ranks;
}

}  // namespace overlap::plan
