// A ring's GEMMs, or those of owners, which announce tiles to each other and wait for them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/ring_order.h"
#include "plan/templates.h"
#include "ranks_case.h"

namespace overlap::check {

// Three parts of 300 rows, six tile rows of 128 each, of which only some hold rows: the tile rows of the
// ring's rank 2 begin here.
constexpr bool split_begins_at(int32_t tile_row, int32_t input_row, int32_t output_row,
                               int32_t part, int32_t round_tile_rows = 0) {
  plan::TileOrder order;
  order.parts = 3;
  plan::RowMap map;
  map.mode = plan::RowMap::Mode::kSplit;
  map.part_rows = 300;
  map.part_tile_rows = 6;
  map.round_tile_rows = round_tile_rows;
  map.first_part = 1;
  map.part_step = 2;
  const plan::TileRowPlace place = plan::tile_row_place(order, map, 128, tile_row);
  return place.input_row == input_row && place.output_row == output_row &&
         place.output_part == part;
}
static_assert(split_begins_at(0, 300, 0, 1) && split_begins_at(2, 556, 2, 1));
static_assert(split_begins_at(6, 0, 0, 0) && split_begins_at(9, 384, 3, 0));
static_assert(split_begins_at(12, 600, 0, 2) && split_begins_at(14, 856, 2, 2));
// In rounds of two tile rows of each part: bands of 2, 4, 6, 4, 2.
static_assert(split_begins_at(1, 428, 1, 1, 2) && split_begins_at(3, 684, 3, 1, 2));
static_assert(split_begins_at(4, 0, 0, 0, 2) && split_begins_at(6, 812, 4, 1, 2));
static_assert(split_begins_at(9, 384, 3, 0, 2) && split_begins_at(11, 728, 1, 2, 2));
static_assert(split_begins_at(12, 512, 4, 0, 2) && split_begins_at(14, 856, 2, 2, 2));
static_assert(split_begins_at(17, 1240, 5, 2, 2));

// The last part has fewer rows than the others by `short_by`.
struct RingShape {
  int64_t part_rows, n, k;
  int64_t short_by = 0;
};

template <class T>
struct Terms {
  const T* of_rank[kernels::kMaxPeers];
};
template <class T>
__global__ void add_in_order(Terms<T> terms, int ranks, int64_t count, T* sum) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float total = 0;
  for (int rank = 0; rank < ranks; ++rank) total += static_cast<float>(terms.of_rank[rank][i]);
  sum[i] = static_cast<T>(total);
}

// In: of the operands, where that is fp8.
template <class T, class In = T>
class RingCase : RanksCase {
 public:
  RingCase(plan::Kernel kernel, int ranks, const RingShape& shape, bool k_contiguous, bool mirrors,
           bool owners = false)
      : RanksCase(
            kernel, ranks,
            std::string(plan::name(kernel)) + (owners ? ": owners, " : ": ring of ") +
                std::to_string(ranks) + " ranks, parts of " + std::to_string(shape.part_rows) +
                (shape.short_by == 0
                     ? ""
                     : " (the last " + std::to_string(shape.part_rows - shape.short_by) + ")") +
                " x " + std::to_string(shape.n) + ", k = " + std::to_string(shape.k) +
                (k_contiguous ? "" : ", weight along n") + (std::is_same_v<T, In> ? "" : ", fp8") +
                (mirrors ? ", mirrored and collected" : "")),
        shape_(shape),
        k_contiguous_(k_contiguous),
        mirrors_(mirrors),
        owners_(owners),
        output_stride_(shape.n + 16) {
    make_order();
    for (int rank = 0; rank < ranks; ++rank)
      memory_.push_back(std::make_unique<Memory>(*this, static_cast<uint32_t>(rank)));
    make_references();
  }

  void check() {
    check_calls(1);
    std::vector<int> unequal = shares();
    unequal[0] = 4;
    run(unequal, ranks_ - 1);
  }

  void check_deadline() {
    prepare();
    kernels::GemmParams gemm = params(0);
    gemm.peers->tiles.deadline_ns = 20'000'000;
    const int32_t peer = failure_alone(gemm).peer;
    if (peer != ranks_ - 1) fail("%s, alone: it waited for rank %d", name_.c_str(), peer);
    expect_words(memory(0).tiles_taken.data(), 2, uint32_t{0}, name_ + ", alone: tiles taken");
  }

 private:
  static constexpr uint64_t kTag = uint64_t{13} << kernels::kCallTagShift;
  static constexpr int64_t kSpareFlags = 64;  // that nobody may write

  struct Memory : RankWords {
    Memory(const RingCase& ring, uint32_t rank)
        : RankWords(ring.ranks_, ring.passed_tiles() + kSpareFlags),
          operands(ring.ranks_ * ring.shape_.part_rows - ring.shape_.short_by, ring.shape_.n,
                   ring.shape_.k, ring.k_contiguous_, rank),
          output(ring.part_elements()),
          mirrored(ring.all_elements()),
          collected(ring.all_elements()),
          terms(ring.all_elements()),
          counters(1) {
      for (int phase = 0; phase + 1 < ring.ranks_; ++phase) {
        partial.push_back(std::make_unique<Buffer<T>>(ring.part_elements()));
      }
    }

    TestOperands<T, In> operands;
    Buffer<T> output;
    Buffer<T> mirrored;   // of all parts: where the peers store their own ones, too
    Buffer<T> collected;  // and where those are copied
    Buffer<T> terms;      // of all ranks, of this one's part; its own is not read
    std::vector<std::unique_ptr<Buffer<T>>> partial;  // of each phase, from the rank before
    Buffer<int32_t> counters;
  };

  // In rounds of one cluster or two of each part, or all of it.
  void make_order() {
    const plan::KernelShape tile = plan::kernel_shape(kernel_, false);
    part_tile_rows_ = static_cast<int32_t>(
        round_up(round_up(shape_.part_rows, tile.tile_m) / tile.tile_m, tile.cluster_m));
    const auto tiles_n = static_cast<int32_t>(round_up(shape_.n, tile.tile_n) / tile.tile_n);
    const int32_t clusters = part_tile_rows_ / tile.cluster_m;
    round_tile_rows_ = !mirrors_           ? part_tile_rows_
                       : clusters % 2 == 0 ? 2 * tile.cluster_m
                                           : tile.cluster_m;
    order_ = plan::ring_order(ranks_, part_tile_rows_, tiles_n, round_tile_rows_);
  }

  int64_t rows_of(int part) const {
    return shape_.part_rows - (part + 1 == ranks_ ? shape_.short_by : 0);
  }
  int64_t part_stride() const { return shape_.part_rows * output_stride_; }
  int64_t part_elements() const { return 2 * kGuard + part_stride(); }
  int64_t all_elements() const { return 2 * kGuard + ranks_ * part_stride(); }
  int64_t part_tiles() const { return int64_t{part_tile_rows_} * order_.tiles_n; }
  // From the rank before, and, of final tiles, from each.
  int64_t passed_tiles() const { return (ranks_ - 1) * part_tiles() * (mirrors_ ? 2 : 1); }
  Memory& memory(int rank) const { return *memory_[static_cast<size_t>(rank % ranks_)]; }
  RankWords& words(int rank) const override { return memory(rank); }
  // The part after `hop` more ranks have added to it, the first of them the one after its owner. With owners: the term of
  // the rank that is `hop` + 1 after the owner, but for the last one, which is the sum.
  const T* reference(int part, int hop) const {
    return references_[static_cast<size_t>(part * ranks_ + hop)]->data();
  }
  // The part that a rank computes in a phase.
  int part_of(int rank, int phase) const { return (rank + 2 * ranks_ - 1 - phase) % ranks_; }

  void make_references() {
    for (int part = 0; part < ranks_; ++part) {
      for (int hop = 0; hop < ranks_; ++hop) {
        references_.push_back(std::make_unique<Buffer<T>>(rows_of(part) * shape_.n));
        memory(part + 1 + hop)
            .operands.reference(part * shape_.part_rows, rows_of(part),
                                hop == 0 || owners_ ? nullptr : reference(part, hop - 1),
                                references_.back()->data());
      }
      if (owners_) add_references(part);
    }
  }

  void add_references(int part) {
    Terms<T> terms{};
    for (int hop = 0; hop < ranks_; ++hop) {
      terms.of_rank[(part + 1 + hop) % ranks_] = reference(part, hop);
    }
    constexpr int kThreads = 256;
    const int64_t count = rows_of(part) * shape_.n;
    const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    add_in_order<<<blocks, kThreads>>>(
        terms, ranks_, count, references_[static_cast<size_t>(part * ranks_ + ranks_ - 1)]->data());
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  kernels::GemmParams params(int rank) const override {
    Memory& own = memory(rank);
    Memory& next = memory(rank + 1);
    kernels::GemmParams gemm;
    own.operands.put_into(gemm);
    gemm.output_stride = output_stride_;
    gemm.rows.mode = plan::RowMap::Mode::kSplit;
    gemm.rows.part_rows = static_cast<int32_t>(shape_.part_rows);
    gemm.rows.part_tile_rows = part_tile_rows_;
    gemm.rows.first_part = part_of(rank, 0);
    gemm.rows.part_step = ranks_ - 1;
    kernels::GemmPeers& peers = gemm.peers.emplace();
    peers.num_more_outputs = ranks_ - 1;
    if (owners_ && ranks_ > 2) peers.terms = own.terms.data() + kGuard;
    peers.rounds = owners_;
    if (owners_ && ranks_ == 2) {
      peers.sources[rank] = own.terms.data() + kGuard + (1 - rank) * part_stride();
    }
    for (int phase = 0; phase < ranks_; ++phase) {
      const int part = part_of(rank, phase);
      const auto place = static_cast<size_t>(phase);
      if (owners_) {
        (part == 0 ? gemm.output : peers.more_outputs[part - 1]) =
            part == rank ? own.output.data() + kGuard
                         : memory(part).terms.data() + kGuard + rank * part_stride();
        continue;
      }
      (part == 0 ? gemm.output : peers.more_outputs[part - 1]) =
          (phase + 1 == ranks_ ? own.output : *next.partial[place]).data() + kGuard;
      if (phase > 0) peers.sources[part] = own.partial[place - 1]->data() + kGuard;
    }
    gemm.rows.round_tile_rows = round_tile_rows_;
    for (int distance = 1; distance < ranks_; ++distance) {
      Memory& other = memory(rank + distance);
      if (mirrors_) {
        peers.mirrors[peers.num_mirrors++] = other.mirrored.data() + kGuard + rank * part_stride();
      }
      peers.tiles.announce[distance - 1] = other.flags.data() + (distance - 1) * part_tiles();
    }
    if (mirrors_) {
      peers.arriving = own.mirrored.data() + kGuard;
      peers.collected = own.collected.data() + kGuard;
    }
    peers.tiles.arrived = own.flags.data();
    peers.tiles.calls = own.calls.data();
    peers.tiles.tag = kTag;
    peers.tiles.deadline_ns = kWaitNs;
    peers.tiles.rank = rank;
    peers.tiles.ranks = ranks_;
    peers.tiles.report = report_.get();
    peers.spread_ns = rank % 2 == 0 ? 10'000 : 0;  // each rank's own affair
    put_ending_into(gemm, rank);
    gemm.order = order_;
    gemm.counters = own.counters.data();
    if (!kernels::gemm_supported(kernel_, gemm)) fail("%s: not supported", name_.c_str());
    return gemm;
  }

  void prepare() override {
    for (const auto& memory : memory_) {
      for (Buffer<T>* all :
           {&memory->output, &memory->mirrored, &memory->collected, &memory->terms})
        all->poison(nullptr);
      for (const auto& partial : memory->partial) partial->poison(nullptr);
      memory->counters.zero(nullptr);
    }
  }

  // A part's rows, and nothing behind them, where another part is longer.
  void expect_part(const Buffer<T>& buffer, int part, int hop, const std::string& what) {
    expect(buffer, {reference(part, hop), rows_of(part), shape_.n, output_stride_, false, 1, 1, {}},
           what);
  }

  // One of several parts in a buffer: with its final sums, or as it was.
  void expect_part_of_all(const Buffer<T>& all, int part, bool untouched, const std::string& what) {
    expect_one_of_all(all, part, part, ranks_ - 1, untouched, what);
  }
  void expect_one_of_all(const Buffer<T>& all, int place, int part, int hop, bool untouched,
                         const std::string& what) {
    const T* from = all.data() + kGuard + place * part_stride();
    if (untouched) {
      const std::vector<unsigned char> bytes =
          download(reinterpret_cast<const unsigned char*>(from),
                   part_stride() * static_cast<int64_t>(sizeof(T)));
      if (std::any_of(bytes.begin(), bytes.end(),
                      [](unsigned char byte) { return byte != 0xff; })) {
        fail("%s: was written", what.c_str());
      }
      return;
    }
    Buffer<T> alone(part_elements());
    CUDA_CHECK(cudaMemcpy(alone.data() + kGuard, from, part_stride() * sizeof(T),
                          cudaMemcpyDeviceToDevice));
    expect_part(alone, part, hop, what);
  }

  void expect_rank(int rank, const std::string& what) override {
    Memory& own = memory(rank);
    expect_part(own.output, rank, ranks_ - 1, what + ", the own part");
    for (int peer = 0; peer < ranks_; ++peer) {
      const int hop = (peer + 2 * ranks_ - 1 - rank) % ranks_;
      expect_one_of_all(own.terms, peer, rank, hop, !owners_ || peer == rank,
                        what + ", the term of rank " + std::to_string(peer));
    }
    for (int phase = 0; phase + 1 < ranks_ && !owners_; ++phase) {
      const int part = part_of(rank + ranks_ - 1, phase);
      expect_part(*own.partial[static_cast<size_t>(phase)], part, phase,
                  what + ", what came in phase " + std::to_string(phase));
    }
    for (int part = 0; part < ranks_; ++part) {
      const std::string whose = ", the part of rank " + std::to_string(part);
      const bool untouched = part == rank;
      expect_part_of_all(own.mirrored, part, untouched || !mirrors_, what + whose);
      expect_part_of_all(own.collected, part, untouched || !mirrors_, what + whose + ", collected");
    }
    expect_words(own.flags.data(), passed_tiles(), kTag + calls_, what + ": flags");
    expect_words(own.flags.data() + passed_tiles(), kSpareFlags, kFirstCalls,
                 what + ": spare flags");
    expect_words(own.counters.data(), 1, order_.num_tiles(), what + ": counters");
  }

  const RingShape shape_;
  const bool k_contiguous_;
  const bool mirrors_;
  const bool owners_;
  const int64_t output_stride_;
  int32_t part_tile_rows_ = 0;
  int32_t round_tile_rows_ = 0;
  plan::TileOrder order_;
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<std::unique_ptr<Buffer<T>>> references_;
};

// Rings whose last part is shorter: by a row, and by whole tiles and clusters, which then have no rows, or one.
inline int check_short_rings(plan::Kernel kernel, bool small, bool owners) {
  std::vector<RingShape> shapes = {{257, 264, 136, 1}, {513, 520, 40, 256}};
  std::vector<int> groups = {2, kernels::kMaxPeers};
  if (!small) {
    shapes.insert(shapes.end(), {{2, 8, 8, 1}, {131, 136, 24, 1}, {1025, 2048, 320, 1}});
    groups.insert(groups.end(), {3, 4});
  }
  int cases = 0;
  for (const int ranks : groups) {
    for (const RingShape& shape : shapes) {
      // Scattered sums have equal parts, so these are stored in all places, and collected.
      RingCase<__nv_bfloat16>(kernel, ranks, shape, cases % 2 == 0, true, owners).check();
      ++cases;
    }
    // One row left; and as many as fill a tile.
    for (const int64_t short_by : {int64_t{299}, int64_t{172}}) {
      RingCase<__half>(kernel, ranks, {300, 264, 72, short_by}, true, true, owners).check();
      ++cases;
    }
    RingCase<__nv_bfloat16, __nv_fp8_e5m2>(kernel, ranks, {257, 264, 528, 3}, true, true, owners)
        .check();
    ++cases;
  }
  return cases;
}

// The products are integers, exact in fp32; what a hop rounds, the references round alike.
inline void check_ring(plan::Kernel kernel, bool small, bool owners = false) {
  // Whole tiles; one element; parts that end inside a tile, in a cluster's first and second one; many
  // steps along k, and one; several tiles for each cluster; more clusters than SMs.
  std::vector<RingShape> shapes = {
      {256, 256, 64}, {1, 8, 8}, {131, 136, 24}, {300, 264, 520}, {513, 520, 40}};
  if (!small) shapes.insert(shapes.end(), {{1100, 4104, 320}, {2048, 2048, 1024}});
  const std::vector<RingShape> fp8_shapes = {
      {256, 256, 128}, {1, 8, 16}, {131, 136, 48}, {300, 264, 528}, {513, 520, 80}};
  int cases = 0;
  for (const int ranks : small ? std::vector<int>{2} : std::vector<int>{2, 3}) {
    for (const RingShape& shape : shapes) {
      for (const bool k_contiguous : {true, false}) {
        for (const bool mirrors : {false, true}) {
          if (small && k_contiguous == mirrors) continue;  // racecheck takes seconds for each case
          RingCase<__nv_bfloat16>(kernel, ranks, shape, k_contiguous, mirrors, owners).check();
          ++cases;
        }
      }
    }
    RingCase<__half>(kernel, ranks, shapes[3], true, ranks == 2, owners).check();
    ++cases;
    if (!owners || ranks == 2) {  // of several terms any may be missed first
      RingCase<__nv_bfloat16>(kernel, ranks, shapes[0], true, false, owners).check_deadline();
      ++cases;
    }
    for (const RingShape& shape : fp8_shapes) {
      RingCase<__nv_bfloat16, __nv_fp8_e4m3>(kernel, ranks, shape, true, false, owners).check();
      RingCase<__nv_bfloat16, __nv_fp8_e5m2>(kernel, ranks, shape, true, true, owners).check();
      cases += 2;
    }
  }
  // As many ranks as there can be, each with a few SMs.
  const size_t shapes_of_many = small ? 2 : 4;
  for (size_t shape = 0; shape < shapes_of_many; ++shape) {
    RingCase<__nv_bfloat16>(kernel, kernels::kMaxPeers, shapes[shape], true, true, owners).check();
    ++cases;
  }
  cases += check_short_rings(kernel, small, owners);
  std::printf("%s of %s: %d cases good\n", owners ? "owners" : "ring", plan::name(kernel), cases);
}

}  // namespace overlap::check
