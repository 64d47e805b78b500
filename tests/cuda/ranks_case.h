// GEMMs of several "ranks" that wait for each other, all on one device: each on a stream of its own, in memory of its own,
// with a share of the SMs, so that all of them run at the same time.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checking.h"
#include "gemm_case.h"
#include "kernels/gemm/gemm.h"
#include "kernels/peer/peer_signal.h"

namespace overlap::check {

inline constexpr uint64_t kFirstCalls = (uint64_t{1} << 32) - 4;  // numbers grow past 32 bits

// The words that a rank's GEMM and its peers' count in, as the calls before have left them.
struct RankWords {
  RankWords(int ranks, int64_t num_flags)
      : flags(num_flags), calls(1), ended(ranks), tiles_taken(2) {
    for (Buffer<uint64_t>* words : {&flags, &calls, &ended}) {
      upload(words->data(),
             std::vector<uint64_t>(static_cast<size_t>(words->elements()), kFirstCalls));
    }
    tiles_taken.zero(nullptr);
  }

  Buffer<uint64_t> flags, calls;
  Buffer<uint64_t> ended;  // as the peers say, by rank
  Buffer<uint32_t> tiles_taken;
  const Stream stream;
};

class RanksCase {
 public:
  virtual ~RanksCase() = default;

 protected:
  RanksCase(plan::Kernel kernel, int ranks, std::string name)
      : kernel_(kernel), ranks_(ranks), name_(std::move(name)) {}

  virtual void prepare() = 0;  // memory for a call
  virtual kernels::GemmParams params(int rank) const = 0;
  virtual void expect_rank(int rank, const std::string& what) = 0;
  virtual RankWords& words(int rank) const = 0;

  std::vector<int> shares() const {
    return std::vector<int>(static_cast<size_t>(ranks_), std::max(2, sm_count() / ranks_ / 2 * 2));
  }

  // So many calls with equal shares; whoever is late is waited for; one cluster for all tiles; more clusters than get SMs:
  // the others hold theirs, and wait for this rank.
  void check_calls(int rounds) {
    for (int round = 0; round < rounds; ++round) run(shares(), -1);
    for (int late = 0; late < ranks_; ++late) run(shares(), late);
    run(std::vector<int>(static_cast<size_t>(ranks_), 2), -1);
    std::vector<int> crowded = shares();
    crowded.back() = 2 * sm_count();
    run(crowded, ranks_ - 1);
  }

  // Rank 0 alone: its GEMM ends at the deadline, and says for whom it waited.
  kernels::WaitFailure failure_alone(kernels::GemmParams gemm) {
    gemm.ctas = 4;
    gemm.ending.signal = {};
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(kernels::launch_gemm(kernel_, gemm, words(0).stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    const kernels::WaitFailure failure = report_.failure();
    const auto low = [](uint64_t count) { return static_cast<int32_t>(count & 0xffffff); };
    if (!report_.failed() || failure.chunk != 0 || failure.peer == 0 ||
        failure.expected != low(calls_ + 1) || failure.seen != low(calls_)) {
      fail("%s, alone: the report says chunk %d, peer %d, expected %d, seen %d", name_.c_str(),
           failure.chunk, failure.peer, failure.expected, failure.seen);
    }
    report_.clear();
    return failure;
  }

  // One call, of which a rank (-1: none) comes late. It is launched last: whatever SMs it asks for, the
  // others have theirs.
  void run(const std::vector<int>& ctas, int late) {
    prepare();
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int turn = 1; turn <= ranks_; ++turn) {
      const int rank = (std::max(late, 0) + turn) % ranks_;
      kernels::GemmParams gemm = params(rank);
      gemm.ctas = ctas[static_cast<size_t>(rank)];
      if (rank == late) CUDA_CHECK(kernels::delay(kLateUs, words(rank).stream));
      CUDA_CHECK(kernels::launch_gemm(kernel_, gemm, words(rank).stream));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    ++calls_;
    const std::string what = name_ + ", call " + std::to_string(calls_ - kFirstCalls) +
                             (late < 0 ? "" : ", rank " + std::to_string(late) + " late");
    if (report_.failed()) {
      const kernels::WaitFailure failure = report_.failure();
      fail("%s: a wait for rank %d passed its deadline: expected %d, seen %d", what.c_str(),
           failure.peer, failure.expected, failure.seen);
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::string whose = what + ", rank " + std::to_string(rank);
      expect_rank(rank, whose);
      expect_ended(rank, whose);
    }
  }

  void put_ending_into(kernels::GemmParams& gemm, int rank) const {
    gemm.ending.tiles_taken = words(rank).tiles_taken.data();
    gemm.ending.signal.calls = words(rank).calls.data();
    gemm.ending.signal.count = ranks_ - 1;
    for (int distance = 1; distance < ranks_; ++distance) {
      gemm.ending.signal.flags[distance - 1] =
          words((rank + distance) % ranks_).ended.data() + rank;
    }
  }

  const plan::Kernel kernel_;
  const int ranks_;
  const std::string name_;
  Report report_;
  uint64_t calls_ = kFirstCalls;  // that have ended

 private:
  static constexpr int64_t kLateUs = 2000;

  void expect_ended(int rank, const std::string& what) {
    const RankWords& own = words(rank);
    expect_words(own.tiles_taken.data(), 2, uint32_t{0}, what + ": tiles taken");
    expect_words(own.calls.data(), 1, calls_, what + ": calls");
    for (int peer = 0; peer < ranks_; ++peer) {
      expect_words(own.ended.data() + peer, 1, peer == rank ? kFirstCalls : calls_,
                   what + ": calls of rank " + std::to_string(peer));
    }
  }
};

}  // namespace overlap::check
