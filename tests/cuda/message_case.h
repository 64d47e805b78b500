// All-to-alls in one launch on all ranks, of rows of any number.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "plan/templates.h"
#include "ranks_case.h"

namespace overlap::check {

// Returns true if tile row `tile_row` of three parts of 100, 0 and 300 rows, the second taken first, begins there.
constexpr bool range_begins_at(int32_t tile_row, int32_t input_row, int32_t output_row,
                               int32_t part) {
  plan::TileOrder order;
  order.tiles_m = 6;
  order.tiles_n = 2;
  order.num_runs = 1;
  order.runs[0] = {2, 3};
  order.num_chunks = 3;
  order.chunk_begin[1] = 0;
  order.chunk_begin[2] = 8;
  order.chunk_begin[3] = 12;
  order.parts = 3;
  plan::RowMap map;
  map.mode = plan::RowMap::Mode::kRanges;
  map.first_part = 1;
  map.range_begin[1] = 100;
  map.range_begin[2] = 100;
  const plan::TileRowPlace place = plan::tile_row_place(order, map, 128, tile_row);
  return place.input_row == input_row && place.output_row == output_row &&
         place.output_part == part;
}
static_assert(range_begins_at(0, 100, 0, 2) && range_begins_at(3, 484, 3, 2));
static_assert(range_begins_at(4, 0, 0, 0) && range_begins_at(5, 128, 1, 0));

struct MessageShape {
  std::vector<std::vector<int64_t>> rows;  // of each rank for each rank, at least one of each
  int64_t n, k;
};

// In: of the operands, where that is fp8.
template <class T, class In = T>
class MessageCase : RanksCase {
 public:
  MessageCase(plan::Kernel kernel, const MessageShape& shape, bool k_contiguous)
      : RanksCase(kernel, static_cast<int>(shape.rows.size()),
                  std::string(plan::name(kernel)) + ": messages between " +
                      std::to_string(shape.rows.size()) + " ranks, the first one's first of " +
                      std::to_string(shape.rows[0][0]) + " x " + std::to_string(shape.n) +
                      ", k = " + std::to_string(shape.k) +
                      (k_contiguous ? "" : ", weight along n") +
                      (std::is_same_v<T, In> ? "" : ", fp8")),
        shape_(shape),
        k_contiguous_(k_contiguous) {
    for (const auto& rows : shape.rows)
      room_ = std::max(room_, *std::max_element(rows.begin(), rows.end()));
    for (int rank = 0; rank < ranks_; ++rank) {
      memory_.push_back(std::make_unique<Memory>(*this, rank));
    }
    make_wanted();
  }

  void check(int rounds) { check_calls(rounds); }

  // It waits for messages without rows, too: the next call takes a slot without asking whether the peers still use it.
  void check_deadline() {
    prepare();
    kernels::GemmParams gemm = params(0);
    gemm.peers->messages->meeting.deadline_ns = 20'000'000;
    failure_alone(gemm);
  }

 private:
  static constexpr uint64_t kTag = uint64_t{29} << kernels::kCallTagShift;

  struct Memory : RankWords {
    Memory(const MessageCase& all, int rank)
        : RankWords(all.ranks_, all.ranks_ * kernels::kMaxPeerBlocks),
          operands(all.sent(rank), all.shape_.n, all.shape_.k, all.k_contiguous_,
                   static_cast<uint32_t>(rank)),
          slot(all.ranks_ * all.message_elements()),
          output(2 * kGuard + all.received(rank) * all.shape_.n),
          want(all.received(rank) * all.shape_.n),
          product(all.sent(rank) * all.shape_.n),
          stored(kernels::kMaxPeers) {}

    TestOperands<T, In> operands;
    Buffer<T> slot;  // what each rank sends here
    Buffer<T> output, want, product;
    Buffer<int32_t> stored;
  };

  Memory& memory(int rank) const { return *memory_[static_cast<size_t>(rank % ranks_)]; }
  RankWords& words(int rank) const override { return memory(rank); }
  int64_t rows(int from, int to) const {
    return shape_.rows[static_cast<size_t>(from)][static_cast<size_t>(to)];
  }
  int64_t message_elements() const { return round_up(room_ * shape_.n, 64); }
  // Where the rows for a rank begin in `from`'s operand, and in `to`'s output those of a rank.
  int64_t send_begin(int from, int to) const {
    int64_t begin = 0;
    for (int rank = 0; rank < to; ++rank) begin += rows(from, rank);
    return begin;
  }
  int64_t receive_begin(int to, int from) const {
    int64_t begin = 0;
    for (int rank = 0; rank < from; ++rank) begin += rows(rank, to);
    return begin;
  }
  int64_t sent(int rank) const { return send_begin(rank, ranks_); }
  int64_t received(int rank) const { return receive_begin(rank, ranks_); }
  T* message(int to, int from) const { return memory(to).slot.data() + from * message_elements(); }

  void make_wanted() {
    const int64_t n = shape_.n;
    for (int rank = 0; rank < ranks_; ++rank) {
      memory(rank).operands.reference(0, sent(rank), nullptr, memory(rank).product.data());
    }
    for (int to = 0; to < ranks_; ++to) {
      for (int from = 0; from < ranks_; ++from) {
        CUDA_CHECK(cudaMemcpy(memory(to).want.data() + receive_begin(to, from) * n,
                              memory(from).product.data() + send_begin(from, to) * n,
                              static_cast<size_t>(rows(from, to) * n) * sizeof(T),
                              cudaMemcpyDeviceToDevice));
      }
    }
  }

  kernels::GemmParams params(int rank) const override {
    const plan::KernelShape tile = plan::kernel_shape(kernel_, false);
    Memory& own = memory(rank);
    kernels::GemmParams gemm;
    own.operands.put_into(gemm);
    gemm.output_stride = shape_.n;
    gemm.rows.mode = plan::RowMap::Mode::kRanges;
    gemm.rows.first_part = (rank + 1) % ranks_;
    gemm.order.tiles_n = static_cast<int32_t>(round_up(shape_.n, tile.tile_n) / tile.tile_n);
    gemm.order.parts = ranks_;
    for (int distance = 1; distance <= ranks_; ++distance) {
      const int64_t count = rows(rank, (rank + distance) % ranks_);
      const auto height = static_cast<int32_t>(
          round_up(round_up(count, tile.tile_m) / tile.tile_m, tile.cluster_m));
      plan::add_bands(gemm.order, tile.cluster_m, height / tile.cluster_m);
      gemm.order.tiles_m += height;
      gemm.order.chunk_begin[++gemm.order.num_chunks] = gemm.order.num_tiles();
    }
    kernels::GemmPeers& peers = gemm.peers.emplace();
    peers.num_more_outputs = ranks_ - 1;
    peers.spread_ns = rank % 2 == 0 ? 10'000 : 0;  // each rank's own affair
    kernels::GemmMessages& messages = peers.messages.emplace();
    kernels::PeerMeeting& meeting = messages.meeting;
    meeting.rank = rank;
    meeting.ranks = ranks_;
    meeting.arrived[0] = own.flags.data();
    meeting.calls = own.calls.data();
    meeting.tag = kTag;
    meeting.deadline_ns = kWaitNs;
    meeting.report = report_.get();
    messages.stored = own.stored.data();
    for (int peer = 0; peer < ranks_; ++peer) {
      gemm.rows.range_begin[peer] = static_cast<int32_t>(send_begin(rank, peer));
      T* const place = peer == rank
                           ? own.output.data() + kGuard + receive_begin(rank, rank) * shape_.n
                           : message(peer, rank);
      (peer == 0 ? gemm.output : peers.more_outputs[peer - 1]) = place;
      if (peer == rank) continue;
      meeting.announce[0][peer] = memory(peer).flags.data() + rank * kernels::kMaxPeerBlocks;
      messages.received[peer] = {message(rank, peer),
                                 own.output.data() + kGuard + receive_begin(rank, peer) * shape_.n,
                                 rows(peer, rank) * shape_.n * static_cast<int64_t>(sizeof(T))};
    }
    put_ending_into(gemm, rank);
    if (!kernels::gemm_supported(kernel_, gemm)) fail("%s: not supported", name_.c_str());
    return gemm;
  }

  void prepare() override {
    for (const auto& memory : memory_) {
      memory->slot.poison(nullptr);
      memory->output.poison(nullptr);
      memory->stored.zero(nullptr);
    }
  }

  void expect_rank(int rank, const std::string& what) override {
    Memory& own = memory(rank);
    expect(own.output, {own.want.data(), received(rank), shape_.n, shape_.n, false, 1, 1, {}},
           what);
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank) continue;
      expect_words(own.flags.data() + peer * kernels::kMaxPeerBlocks, 1, kTag + calls_,
                   what + ": flag of rank " + std::to_string(peer));
    }
  }

  const MessageShape shape_;
  const bool k_contiguous_;
  int64_t room_ = 0;  // rows of the longest message
  std::vector<std::unique_ptr<Memory>> memory_;
};

// Whole tiles; rows that end inside a tile; one row; a rank that sends nothing, or all, to one; nothing to oneself;
// several tiles for each cluster.
inline void check_messages(plan::Kernel kernel, bool small, int rounds) {
  std::vector<MessageShape> shapes = {
      {{{256, 256}, {256, 256}}, 256, 64},
      {{{131, 1}, {0, 300}}, 136, 24},
      {{{0, 513}, {129, 0}}, 520, 40},
      {{{100, 0, 300}, {0, 0, 7}, {260, 128, 0}}, 264, 520},
      {{{5, 300, 0, 17}, {128, 256, 384, 1}, {0, 0, 0, 640}, {77, 77, 77, 77}}, 136, 320}};
  if (!small) {
    shapes.push_back({{{2048, 1024}, {1500, 2500}}, 2048, 1024});
    std::vector<std::vector<int64_t>> many(8, std::vector<int64_t>(8));
    for (size_t from = 0; from < 8; ++from) {
      for (size_t to = 0; to < 8; ++to)
        many[from][to] = static_cast<int64_t>((from * 5 + to * 3) % 7 * 90);
    }
    shapes.push_back({many, 1032, 256});
  }
  int cases = 0;
  for (const MessageShape& shape : shapes) {
    for (const bool k_contiguous : {true, false}) {
      MessageCase<__nv_bfloat16> one(kernel, shape, k_contiguous);
      one.check(rounds);
      one.check_deadline();
      ++cases;
      if (k_contiguous) MessageCase<__half>(kernel, shape, k_contiguous).check(1);
    }
    if (shape.k % 16 != 0) continue;
    MessageCase<__nv_bfloat16, __nv_fp8_e4m3>(kernel, shape, true).check(rounds);
    MessageCase<__nv_bfloat16, __nv_fp8_e5m2>(kernel, shape, true).check(1);
    cases += 2;
  }
  std::printf("%s: messages good in %d cases\n", plan::name(kernel), cases);
}

}  // namespace overlap::check
