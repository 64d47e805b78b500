// Programs by the interpreter, with all "ranks" on one device: each on a stream of its own, in memory of its own.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checking.h"
#include "kernels/peer/interpreter.h"
#include "kernels/signal/signal.h"
#include "peer_case.h"

namespace overlap::check {

// An all-reduce of [rows, columns] in place, as tables.
template <class T>
class InterpreterCase {
 public:
  InterpreterCase(int ranks, int64_t rows, int64_t columns, int streams, int blocks)
      : ranks_(ranks), rows_(rows), columns_(columns), streams_(streams), blocks_(blocks) {
    CUDA_CHECK(cudaMallocHost(&report_, sizeof(*report_)));
    *report_ = {};
    for (int rank = 0; rank < ranks; ++rank) {
      memory_.push_back(std::make_unique<Memory>(*this));
      CUDA_CHECK(cudaStreamCreateWithFlags(&memory_.back()->stream, cudaStreamNonBlocking));
    }
    CUDA_CHECK(cudaStreamCreateWithFlags(&counting_, cudaStreamNonBlocking));
  }
  ~InterpreterCase() {
    for (const auto& memory : memory_) cudaStreamDestroy(memory->stream);
    cudaStreamDestroy(counting_);
    cudaFreeHost(report_);
  }
  InterpreterCase(const InterpreterCase&) = delete;
  InterpreterCase& operator=(const InterpreterCase&) = delete;

  // Rings of columns, the second one the other way round. They begin once something has been counted, and a copy
  // of all waits for what both have counted.
  void check_rings(int calls) {
    for (int call = 0; call < calls; ++call) {
      fill(call);
      for (int rank = 0; rank < ranks_; ++rank) {
        if (rank % 2 == call % 2) CUDA_CHECK(kernels::delay(300, memory(rank).stream));
        CUDA_CHECK(kernels::interpret(rings_of(rank), memory(rank).stream));
      }
      for (int rank = ranks_ - 1; rank >= 0; --rank) {
        CUDA_CHECK(kernels::delay(2'000, counting_));
        CUDA_CHECK(kernels::count(memory(rank).counters.data(), 1, counting_));
      }
      CUDA_CHECK(cudaDeviceSynchronize());
      if (report_->failure != 0)
        fail("interpreter: %s: a wait passed its deadline", name().c_str());
      for (int rank = 0; rank < ranks_; ++rank) {
        expect_sums(call, memory(rank).copied, rank, "the copy");
        expect_sums(call, memory(rank).data, rank, "the sums");
      }
    }
  }

  // In two steps, as the collective in one kernel does it.
  void check_two_shots(int calls) {
    for (int call = 0; call < calls; ++call) {
      fill(call);
      for (int rank = 0; rank < ranks_; ++rank) {
        CUDA_CHECK(kernels::interpret(two_shots_of(rank), memory(rank).stream));
      }
      CUDA_CHECK(cudaDeviceSynchronize());
      if (report_->failure != 0)
        fail("interpreter: %s: a wait passed its deadline", name().c_str());
      for (int rank = 0; rank < ranks_; ++rank) expect_sums(call, memory(rank).data, rank, "sums");
    }
  }

  // A wait in vain, for flags or a counter, is reported with its transfer.
  void check_reports() {
    fill(0);
    for (int rank = 0; rank < ranks_; ++rank) {
      kernels::InterpreterParams params = two_shots_of(rank);
      params.tag = tag_of(rank == 0 ? 1 : 2);
      params.deadline_ns = kShortWaitNs;
      CUDA_CHECK(kernels::interpret(params, memory(rank).stream));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    if (report_->failure == 0) fail("interpreter: ranks of other calls took each other's signals");
    const kernels::WaitFailure missed = kernels::unpack(report_->failure);
    if (missed.peer >= ranks_) fail("interpreter: the report names rank %d", missed.peer);
    *report_ = {};
    kernels::InterpreterParams params = rings_of(0);
    params.deadline_ns = kShortWaitNs;
    fill(0);
    CUDA_CHECK(kernels::interpret(params, memory(0).stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    const kernels::WaitFailure counted = kernels::unpack(report_->failure);
    if (counted.peer != kernels::kOwnGemm || counted.expected != 1 || counted.seen != 0) {
      fail("interpreter: the report of a counter says peer %d, expected %d, seen %d", counted.peer,
           counted.expected, counted.seen);
    }
  }

  // Microseconds of an all-reduce in two steps, one of many in a row.
  double two_shots_us(int calls) {
    const auto enqueue = [&] {
      for (int rank = 0; rank < ranks_; ++rank) {
        CUDA_CHECK(kernels::interpret(two_shots_of(rank), memory(rank).stream));
      }
    };
    return calls_us(calls, enqueue);
  }

 private:
  struct Memory {
    explicit Memory(const InterpreterCase& one)
        : data(one.rows_ * one.columns_),
          copied(one.rows_ * one.columns_),
          slot(one.landings() * one.part_rows() * one.columns_),
          flags(kHead + one.flag_count()),
          counters(4) {
      flags.zero(nullptr);
      slot.poison(nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
    }
    // Calls that each rank has ended, calls, blocks; then the transfers'.
    static constexpr int64_t kHead = kernels::kMaxPeers + 2;
    Buffer<T> data, copied, slot;
    Buffer<uint64_t> flags;
    Buffer<int32_t> counters;
    cudaStream_t stream = nullptr;
  };
  enum Base : uint8_t { kData, kCopied, kSlots };

  static constexpr int64_t kShortWaitNs = 50'000'000;
  static constexpr uint64_t tag_of(uint64_t call) { return call << kernels::kCallTagShift; }
  static constexpr int64_t kElement = sizeof(T);
  Memory& memory(int rank) const { return *memory_[static_cast<size_t>(rank)]; }

  int64_t part_rows() const { return (rows_ + ranks_ - 1) / ranks_; }
  int64_t first_row(int part) const { return std::min(part * part_rows(), rows_); }
  int64_t rows_of(int part) const { return first_row(part + 1) - first_row(part); }
  // A rank's landings over both kinds of tables: as many as transfers may come from others.
  int64_t landings() const { return 4 * ranks_; }
  int64_t flag_count() const { return 8 * int64_t{ranks_} * ranks_ * blocks_; }

  std::string name() const {
    return std::to_string(ranks_) + " ranks, " + std::to_string(rows_) + " x " +
           std::to_string(columns_) + ", " + std::to_string(streams_) + " streams of " +
           std::to_string(blocks_) + " blocks";
  }

  static float term(int call, int rank, int64_t index) {
    return static_cast<float>((index * 7 + rank * 3 + call) % 11 - 5);
  }
  void fill(int call) {
    const auto count = static_cast<size_t>(rows_ * columns_);
    std::vector<T> terms(count);
    for (int rank = 0; rank < ranks_; ++rank) {
      for (size_t i = 0; i < count; ++i) {
        terms[i] = static_cast<T>(term(call, rank, static_cast<int64_t>(i)));
      }
      CUDA_CHECK(cudaMemcpy(memory(rank).data.data(), terms.data(), count * sizeof(T),
                            cudaMemcpyHostToDevice));
      memory(rank).copied.poison(nullptr);
      memory(rank).counters.zero(nullptr);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  void expect_sums(int call, const Buffer<T>& found, int rank, const char* what) const {
    const auto count = static_cast<size_t>(rows_ * columns_);
    std::vector<T> got(count);
    CUDA_CHECK(cudaMemcpy(got.data(), found.data(), count * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; ++i) {
      float right = 0;
      for (int one = 0; one < ranks_; ++one) right += term(call, one, static_cast<int64_t>(i));
      if (static_cast<float>(got[i]) != right) {
        fail("interpreter: %s, rank %d: element %lld of %s is %g, expected %g", name().c_str(),
             rank, static_cast<long long>(i), what, static_cast<float>(got[i]), right);
      }
    }
  }

  kernels::InterpreterParams params_of(int rank) const {
    Memory& own = memory(rank);
    kernels::InterpreterParams params;
    params.rank = rank;
    params.ranks = ranks_;
    params.dtype = dtype_of<T>();
    params.streams = streams_;
    params.blocks = blocks_;
    params.bases[kData] = own.data.data();
    params.bases[kCopied] = own.copied.data();
    for (int peer = 0; peer < ranks_; ++peer) {
      params.bases[kSlots + peer] = memory(peer).slot.data();
      params.flags[peer] = memory(peer).flags.data() + Memory::kHead;
      params.announce_end[peer] = memory(peer).flags.data() + rank;
    }
    params.counters = own.counters.data();
    params.ended = own.flags.data();
    params.calls = own.flags.data() + kernels::kMaxPeers;
    params.blocks_done = reinterpret_cast<uint32_t*>(own.flags.data() + kernels::kMaxPeers + 1);
    params.tag = tag_of(3);
    params.deadline_ns = kWaitNs;
    params.report = report_;
    return params;
  }

  // Columns of a stream, in elements.
  int64_t first_column(int stream) const { return columns_ * stream / streams_; }

  // A part's columns of a stream, in place.
  kernels::InterpreterTransfer area(int part, int stream) const {
    kernels::InterpreterTransfer one;
    const int64_t first = first_column(stream);
    one.rows = rows_of(part);
    one.row_bytes = (first_column(stream + 1) - first) * kElement;
    one.source = one.destination = (first_row(part) * columns_ + first) * kElement;
    one.source_stride = one.destination_stride = columns_ * kElement;
    one.stream = static_cast<uint8_t>(stream);
    return one;
  }
  // From an area into the place of a landing, dense, and back.
  kernels::InterpreterTransfer leaving(int part, int stream, int to, int landing,
                                       int number) const {
    kernels::InterpreterTransfer one = area(part, stream);
    one.destination_base = static_cast<uint8_t>(kSlots + to);
    one.destination = landing * part_rows() * columns_ * kElement;
    one.destination_stride = one.row_bytes;
    one.to = static_cast<int8_t>(to);
    one.flag = number * blocks_;
    return one;
  }
  kernels::InterpreterTransfer coming(int part, int stream, int rank, int from, int landing,
                                      int number, bool adds) const {
    kernels::InterpreterTransfer one = area(part, stream);
    one.source_base = static_cast<uint8_t>(kSlots + rank);
    one.source = landing * part_rows() * columns_ * kElement;
    one.source_stride = one.row_bytes;
    one.from = static_cast<int8_t>(from);
    one.flag = number * blocks_;
    one.adds = adds;
    return one;
  }

  kernels::InterpreterParams rings_of(int rank) const {
    kernels::InterpreterParams params = params_of(rank);
    params.waits.push_back({0, 1});
    int received = 0;
    for (int step = 0; step < 2 * (ranks_ - 1); ++step) {
      const bool adds = step < ranks_ - 1;
      for (int stream = 0; stream < streams_; ++stream) {
        const int way = stream == 0 ? 1 : ranks_ - 1;
        const int to = (rank + way) % ranks_;
        const int from = (rank + ranks_ - way) % ranks_;
        // In the first round a rank begins with the part of the one before, so that it ends with its own.
        const int turn = adds ? step + 1 : step - (ranks_ - 1);
        const auto part_of = [&](int of) { return (of + turn * (ranks_ - way)) % ranks_; };
        const int landing = step * streams_ + stream;
        const auto number = [&](int of) { return landing * ranks_ + of; };
        kernels::InterpreterTransfer sent =
            leaving(part_of(rank), stream, to, landing, number(rank));
        if (step == 0) sent.end_wait = 1;
        params.transfers.push_back(sent);
        kernels::InterpreterTransfer put =
            coming(part_of(from), stream, rank, from, landing, number(from), adds);
        put.counter = static_cast<int16_t>(1 + stream);
        params.transfers.push_back(put);
        received += stream == 0 ? 1 : 0;
      }
    }
    kernels::InterpreterTransfer all;
    all.rows = rows_;
    all.row_bytes = all.source_stride = all.destination_stride = columns_ * kElement;
    all.destination_base = kCopied;
    all.stream = static_cast<uint8_t>(streams_ - 1);
    all.first_wait = 1;
    for (int stream = 0; stream < streams_; ++stream) {
      params.waits.push_back({1 + stream, received * blocks_});
    }
    all.end_wait = static_cast<uint16_t>(params.waits.size());
    params.transfers.push_back(all);
    return params;
  }

  // Each rank adds up its part, and sends it to all.
  kernels::InterpreterParams two_shots_of(int rank) const {
    kernels::InterpreterParams params = params_of(rank);
    params.streams = 1;
    const auto number = [&](bool sums, int from, int to) {
      return ((sums ? ranks_ : 0) + from) * ranks_ + to;
    };
    for (const bool sums : {false, true}) {
      for (int distance = 1; distance < ranks_; ++distance) {
        const int to = (rank + distance) % ranks_;
        auto sent =
            leaving(sums ? rank : to, 0, to, (sums ? ranks_ : 0) + rank, number(sums, rank, to));
        sent.row_bytes = sent.destination_stride = columns_ * kElement;
        params.transfers.push_back(sent);
      }
      for (int distance = 1; distance < ranks_; ++distance) {
        const int from = (rank + ranks_ - distance) % ranks_;
        auto put = coming(sums ? from : rank, 0, rank, from, (sums ? ranks_ : 0) + from,
                          number(sums, from, rank), !sums);
        put.row_bytes = put.source_stride = columns_ * kElement;
        params.transfers.push_back(put);
      }
    }
    return params;
  }

  const int ranks_;
  const int64_t rows_;
  const int64_t columns_;
  const int streams_;
  const int blocks_;
  kernels::WaitReport* report_ = nullptr;
  cudaStream_t counting_ = nullptr;
  std::vector<std::unique_ptr<Memory>> memory_;
};

inline void check_interpreter() {
  struct Shape {
    int64_t rows, columns;
  };
  int cases = 0;
  for (const int ranks : {2, 3, 4}) {
    for (const Shape& shape : {Shape{ranks * 1, 8}, {37, 13}, {130, 264}, {1024, 1000}}) {
      for (const int streams : {1, 2}) {
        for (const int blocks : {1, 5, 16}) {
          InterpreterCase<float> wide(ranks, shape.rows, shape.columns, streams, blocks);
          wide.check_rings(3);
          wide.check_two_shots(2);
          InterpreterCase<__nv_bfloat16> narrow(ranks, shape.rows, shape.columns, streams, blocks);
          narrow.check_rings(3);
          InterpreterCase<__half> half(ranks, shape.rows, shape.columns, streams, blocks);
          half.check_two_shots(2);
          cases += 4;
        }
      }
    }
  }
  for (const int ranks : {2, 4}) {
    InterpreterCase<float>(ranks, 64, 64, 1, 4).check_reports();
    // A long table.
    InterpreterCase<float>(ranks, 512, 96, 1, 32).check_rings(5);
  }
  InterpreterCase<__nv_bfloat16>(8, 333, 40, 2, 4).check_rings(4);
  std::printf("interpreter: %d cases good\n", cases);
  for (const int ranks : {2, 4}) {
    for (const int64_t elements : {1 << 14, 1 << 18, 1 << 22}) {
      constexpr int kCalls = 200;
      constexpr int64_t kColumns = 1024;
      const double own = PeerCase(ranks, elements).all_reduce_us(kCalls);
      std::printf("all-reduce of %lld KiB, %d ranks on one GPU: one kernel %.1f us, interpreter",
                  static_cast<long long>(elements * 4 / 1024), ranks, own);
      for (const int blocks : {8, 16, 32}) {
        InterpreterCase<float> program(ranks, elements / kColumns, kColumns, 1, blocks);
        std::printf(" %.1f (%d blocks)", program.two_shots_us(kCalls), blocks);
      }
      std::printf("\n");
    }
  }
}

}  // namespace overlap::check
