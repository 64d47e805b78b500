// All-reduces whose rows are finished, with all "ranks" on one device: each on a stream of its own, in memory of its own,
// and with a number of blocks of its own.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "checking.h"
#include "kernels/peer/peer_finish.h"
#include "kernels/peer/peer_signal.h"

namespace overlap::check {

class FinishCase {
 public:
  FinishCase(int ranks, int64_t rows, int64_t columns)
      : ranks_(ranks), rows_(rows), columns_(columns), gain_(columns), bias_(columns), given_(1) {
    for (int rank = 0; rank < ranks; ++rank) {
      memory_.push_back(std::make_unique<Memory>(rows * columns, 2 * ranks * room()));
    }
    upload(gain_, columns, [&](int64_t i) { return gain(i) - kOffset; });
    upload(bias_, columns, [&](int64_t i) { return bias(i); });
    upload(given_, 1, [](int64_t) { return kScale; });
  }

  // Calls in one step and in two by turns, which share the buffers. Casts, by turns as well, leave the rest as it is; what
  // they store is checked by tests/ops/test_rmsnorm.py.
  void check(int calls) {
    for (int call = 0; call < calls; ++call) {
      const auto cast = static_cast<Cast>(call % 4);
      fill(call);
      for (int rank = 0; rank < ranks_; ++rank) {
        kernels::PeerFinishParams params = params_of(rank, cast);
        params.in_two_steps = call % 3 == 1;
        params.most_blocks = 1 << (call + rank) % 5;
        CUDA_CHECK(kernels::peer_finish(params, memory(rank).stream));
      }
      for (int rank = 0; rank < ranks_; ++rank) {
        expect(call, rank, [&](int64_t i) { return sum_of_terms(ranks_, call, i); });
      }
      // Without peers, of this rank's terms and no others.
      fill(call);
      CUDA_CHECK(kernels::finish_rows(params_of(0, cast).finish, memory(0).stream));
      expect(call, 0, [&](int64_t i) { return term(call, 0, i); });
    }
  }

 private:
  using Element = __nv_bfloat16;
  enum class Cast { kNone, kGiven, kRows, kBlocks };
  static constexpr float kEps = 1e-5f;
  static constexpr float kScale = 0.25f;
  static constexpr float kOffset = 1.0f;

  struct Memory {
    Memory(int64_t elements, int64_t bytes)
        : own(elements),
          sum(elements),
          residual(elements),
          normed(elements),
          values(elements),
          scales(elements),
          units(bytes),
          flags(2 * kernels::kMaxPeers + 1) {
      units.zero(nullptr);
      flags.zero(nullptr);
    }
    Buffer<Element> own, sum, residual, normed;
    Buffer<uint8_t> values;
    Buffer<float> scales;
    Buffer<char> units;
    Buffer<uint64_t> flags;
    const Stream stream;
  };

  Memory& memory(int rank) { return *memory_[static_cast<size_t>(rank)]; }

  // Bytes of one writer's message: all rows, or its terms of a peer's rows and its own sums.
  int64_t room() const {
    return kernels::low_latency_bytes(columns_ * 2) * (2 * ((rows_ + ranks_ - 1) / ranks_) + rows_);
  }

  static float residual(int64_t i) { return static_cast<float>(i % 13 - 6); }
  float gain(int64_t i) const { return static_cast<float>(i % columns_ % 7 - 3) / 4 + kOffset; }
  float bias(int64_t i) const { return static_cast<float>(i % columns_ % 3); }

  template <class T, class Value>
  static void upload(Buffer<T>& buffer, int64_t count, Value value) {
    std::vector<T> numbers;
    for (int64_t i = 0; i < count; ++i) numbers.push_back(T(value(i)));
    check::upload(buffer.data(), numbers);
  }

  void fill(int call) {
    for (int rank = 0; rank < ranks_; ++rank) {
      Memory& own = memory(rank);
      upload(own.own, rows_ * columns_, [&](int64_t i) { return term(call, rank, i); });
      upload(own.residual, rows_ * columns_, residual);
      own.sum.poison(nullptr);
      own.normed.poison(nullptr);
      own.values.poison(nullptr);
      own.scales.poison(nullptr);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  kernels::PeerFinishParams params_of(int rank, Cast cast) {
    Memory& own = memory(rank);
    kernels::PeerFinishParams params;
    params.rank = rank;
    params.ranks = ranks_;
    for (int peer = 0; peer < ranks_; ++peer) {
      params.destination[peer] = memory(peer).units.data() + 2 * rank * room();
      params.received[peer] = own.units.data() + 2 * peer * room();
      params.announce[peer] = memory(peer).flags.data() + rank;
    }
    params.arrived = own.flags.data();
    params.buffer_bytes = room();
    params.whole_lines = rows_ % 2 == 1;
    params.calls = own.flags.data() + 2 * kernels::kMaxPeers;
    params.tag = uint64_t{3} << kernels::kCallTagShift;
    params.deadline_ns = 10'000'000'000;
    params.report = report_.get();
    params.finish = {.rows = rows_,
                     .columns = columns_,
                     .terms = own.own.data(),
                     .sum = own.sum.data(),
                     .bias = bias_.data(),
                     .residual = own.residual.data(),
                     .gain = gain_.data(),
                     .eps = kEps,
                     .gain_offset = kOffset,
                     .normed = own.normed.data(),
                     .values = cast == Cast::kNone ? nullptr : own.values.data(),
                     .given_scale = cast == Cast::kGiven ? given_.data() : nullptr,
                     .scales = own.scales.data(),
                     .by_blocks = cast == Cast::kBlocks};
    return params;
  }

  template <class Right>
  void expect(int call, int rank, Right terms) {
    CUDA_CHECK(cudaDeviceSynchronize());
    if (report_.failed()) fail("finish: a wait passed its deadline");
    const std::vector<Element> sums = download(memory(rank).sum.data(), rows_ * columns_);
    const std::vector<Element> normed = download(memory(rank).normed.data(), rows_ * columns_);
    for (int64_t row = 0; row < rows_; ++row) {
      double squares = 0;
      const auto total = [&](int64_t i) { return terms(i) + bias(i) + residual(i); };
      const int64_t first = row * columns_;
      for (int64_t i = first; i < first + columns_; ++i) squares += double{total(i)} * total(i);
      const double factor = 1.0 / std::sqrt(squares / static_cast<double>(columns_) + double{kEps});
      for (int64_t i = first; i < first + columns_; ++i) {
        const auto at = static_cast<size_t>(i);
        const double right = total(i) * factor * gain(i);
        const double got = static_cast<float>(normed[at]);
        if (static_cast<float>(sums[at]) != total(i) ||
            !(std::fabs(got - right) <= std::fabs(right) / 128.0)) {
          fail(
              "finish: call %d, %d ranks, rank %d, %lld x %lld: element %lld is %g and %g, "
              "expected %g and %g",
              call, ranks_, rank, static_cast<long long>(rows_), static_cast<long long>(columns_),
              static_cast<long long>(i), static_cast<float>(sums[at]), got, total(i), right);
        }
      }
    }
  }

  const int ranks_;
  const int64_t rows_;
  const int64_t columns_;
  Buffer<Element> gain_, bias_;
  Buffer<float> given_;
  Report report_;
  std::vector<std::unique_ptr<Memory>> memory_;
};

inline void check_finish() {
  int cases = 0;
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int64_t rows : {1, 3, 16}) {
      for (const int64_t columns : {8, 264, 4096, 8192, 16384}) {
        FinishCase(ranks, rows, columns).check(8);
        ++cases;
      }
    }
  }
  std::printf("finish: %d cases good\n", cases);
}

}  // namespace overlap::check
