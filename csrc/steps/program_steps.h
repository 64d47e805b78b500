// What programs over NCCL or gloo and over peers share: where things are, what is computed and what waits for it, and
// the result.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "steps/list.h"

namespace overlap::steps {

class ProgramSteps {
 protected:
  using Memory = plan::Memory;
  using Rectangle = plan::Rectangle;
  using Region = plan::Region;
  using Transfer = plan::Transfer;
  static constexpr StepId kNone = -1;
  static constexpr int64_t kAlignment = 256;

  ProgramSteps(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
               const Variant& variant)
      : plan_(plan),
        program_(plan.program),
        rank_(rank),
        variant_(variant),
        ctas_(ctas_beside(plan, machine)),
        gathers_(plan.problem.op == plan::Op::kAllGatherGemm),
        to_all_(plan.problem.op == plan::Op::kGemmAllToAll),
        scatters_(plan.problem.op == plan::Op::kGemmReduceScatter),
        element_bytes_(plan::moved_bytes(plan.problem)),
        row_bytes_((gathers_ ? plan.problem.k : plan.problem.n) * element_bytes_),
        rounds_(plan::rounds(program_)),
        lanes_(plan::streams(program_)),
        product_(product_buffer()),
        arrived_(program_.transfers.size(), kNone),
        left_(program_.transfers.size(), kNone) {
    waited_.resize(at(lanes_));
    if (!to_all_) staging_bytes_ = program_.scratch_rows * row_bytes_;
    if (to_all_) {
      send_begin_ = offsets(variant.send_rows);
      receive_begin_ = offsets(variant.receive_rows);
    }
  }

  static size_t at(int64_t index) { return static_cast<size_t>(index); }

  // The transfers of this rank, round by round.
  std::map<int32_t, std::vector<size_t>> own_rounds() const {
    std::map<int32_t, std::vector<size_t>> of_round;
    for (size_t i = 0; i < program_.transfers.size(); ++i) {
      const Transfer& one = program_.transfers[i];
      if (one.source.rank == rank_ || one.destination.rank == rank_) {
        of_round[rounds_[i]].push_back(i);
      }
    }
    return of_round;
  }

  // Before anything is communicated: the lanes begin, and what needs no transfer is computed.
  void begin(int32_t lanes) {
    if (gathers_) {
      const Where own = {Buffer::kGathered, rank_ * plan::part_rows(plan_) * row_bytes_};
      list_.add(Lane::kCaller, Copy{{Buffer::kInput}, own, plan::part_rows(plan_) * row_bytes_});
    }
    list_.add(Lane::kCaller, Fork{lanes, false});
    if (gathers_) {
      compute_gathered({rank_ * plan::part_rows(plan_), (rank_ + 1) * plan::part_rows(plan_)}, {});
    } else if (to_all_) {
      compute_messages();
    } else {
      compute_product();
    }
  }

  StepList end() {
    finish();
    list_.made.chunks = std::max(1, calls_);
    if (product_ == Buffer::kProduct) list_.add_scratch(Buffer::kProduct, product_bytes());
    if (staging_bytes_ > 0) list_.add_scratch(Buffer::kStaging, staging_bytes_);
    return std::move(list_.made);
  }

  // --- where things are ---

  Buffer product_buffer() const {
    const bool in_output = plan_.problem.op == plan::Op::kGemmAllReduce && !writes_output(plan_);
    return in_output ? Buffer::kOutput : Buffer::kProduct;
  }
  int64_t product_bytes() const {
    return (to_all_ ? send_begin_.back() : gathers_ ? 0 : plan_.problem.m) * row_bytes_;
  }

  static std::vector<int64_t> offsets(const std::vector<int64_t>& rows) {
    std::vector<int64_t> result{0};
    for (const int64_t count : rows) result.push_back(result.back() + count);
    return result;
  }

  // Rows of a memory; an all-to-all's are shares of messages.
  plan::Rows rows_of(const Region& region) const {
    const Rectangle& area = region.area;
    if (!to_all_) return {area.row, area.row + area.rows};
    const bool sent = region.memory == Memory::kProduct;
    const std::vector<int64_t>& begin = sent ? send_begin_ : receive_begin_;
    const int64_t peer = area.row / plan::kMessageShares;
    const int64_t rows = begin[at(peer) + 1] - begin[at(peer)];
    const int64_t share = area.row % plan::kMessageShares;
    return {begin[at(peer)] + rows * share / plan::kMessageShares,
            begin[at(peer)] + rows * (share + area.rows) / plan::kMessageShares};
  }
  int64_t height(const Region& region) const {
    const plan::Rows rows = rows_of(region);
    return rows.end - rows.begin;
  }
  int64_t width(const Region& region) const { return region.area.columns * element_bytes_; }

  Where place(const Region& region) const {
    const int64_t offset = rows_of(region).begin * row_bytes_ + region.area.column * element_bytes_;
    switch (region.memory) {
      case Memory::kProduct:
        return {product_, offset};
      case Memory::kOutput:
        return {Buffer::kOutput, offset};
      case Memory::kInput:
        return {Buffer::kInput, offset};
      case Memory::kGathered:
        return {Buffer::kGathered, offset};
      case Memory::kScratch:
        break;
    }
    return {Buffer::kStaging, offset};
  }
  // Whether its rows follow each other without a gap.
  bool one_run(const Region& region) const {
    return width(region) == row_bytes_ || height(region) == 1;
  }
  Where stage(int64_t bytes) {
    const int64_t offset = (staging_bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    staging_bytes_ = offset + bytes;
    return {Buffer::kStaging, offset};
  }

  int64_t bytes_of(const Transfer& one) const {
    const Region& own = one.source.rank == rank_ ? one.source : one.destination;
    return height(own) * width(own);
  }

  // --- what is computed ---

  void compute_product() {
    const auto chunks = static_cast<int32_t>(plan_.chunks.size());
    list_.made.counters = chunks;
    if (variant_.kernel_takes) {
      Gemm gemm;
      gemm.rows = {0, plan_.problem.m};
      gemm.input = {Buffer::kInput};
      gemm.outputs = {{{product_}}};
      gemm.order = list_.add_order(plan::tile_order(plan_));
      gemm.end_tile = list_.made.orders[0].num_tiles();
      gemm.ctas = ctas_;
      gemm.counts = true;
      list_.add(Lane::kCaller, gemm);
      return;
    }
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const plan::Rows rows = plan::chunk_rows(plan_, chunk);
      add_library(rows, {product_, rows.begin * row_bytes_});
      computed_.push_back(list_.last());
      if (counts_) list_.add(Lane::kCaller, Count{chunk, plan_.chunks[at(chunk)].tiles});
    }
  }

  void add_library(plan::Rows rows, Where output) {
    const int64_t input = rows.begin * plan_.problem.k * plan::element_bytes(plan_.problem.dtype);
    list_.add(Lane::kCaller, LibraryGemm{0, rows, {Buffer::kInput, input}, {output}});
  }

  // Messages in the pieces and the order in which they leave; the rows that stay, where they belong.
  void compute_messages() {
    std::set<int64_t> cuts;
    for (int64_t peer = 0; peer <= plan_.problem.world_size; ++peer) {
      cuts.insert(peer * plan::kMessageShares);
    }
    const auto sent = [&](const Transfer& one) { return one.source.rank == rank_; };
    for (const Transfer& one : program_.transfers) {
      if (!sent(one)) continue;
      cuts.insert(one.source.area.row);
      cuts.insert(one.source.area.row + one.source.area.rows);
      for (const Rectangle& area : one.tiles) {
        cuts.insert(area.row);
        cuts.insert(area.row + area.rows);
      }
    }
    for (const Transfer& one : program_.transfers) {
      if (!sent(one)) continue;
      const Rectangle& area = one.source.area;
      for (auto cut = cuts.find(area.row); *cut < area.row + area.rows; ++cut) {
        Region piece = one.source;
        piece.area.row = *cut;
        piece.area.rows = *std::next(cut) - *cut;
        const plan::Rows rows = rows_of(piece);
        if (rows.begin == rows.end) continue;
        add_library(rows, {Buffer::kProduct, rows.begin * row_bytes_});
        pieces_[*cut] = list_.last();
        if (!counts_) continue;
        piece_counters_[*cut] = list_.made.counters;
        list_.add(Lane::kCaller, Count{list_.made.counters++, 1});
      }
    }
    const plan::Rows own = {send_begin_[at(rank_)], send_begin_[at(rank_) + 1]};
    if (own.begin == own.end) return;
    add_library(own, {Buffer::kOutput, receive_begin_[at(rank_)] * row_bytes_});
  }

  // Rows of an all-gather's product, of each weight.
  void compute_gathered(plan::Rows rows, const std::vector<StepId>& after) {
    const bool own = rows.begin / plan::part_rows(plan_) == rank_;
    const Where input =
        own ? Where{Buffer::kInput, (rows.begin - rank_ * plan::part_rows(plan_)) * row_bytes_}
            : Where{Buffer::kGathered, rows.begin * row_bytes_};
    std::vector<Weight> weights = variant_.weights;
    if (weights.empty()) weights.push_back({plan_.problem.n});
    for (size_t i = 0; i < weights.size(); ++i) {
      const Where output = {Buffer::kOutput, rows.begin * weights[i].columns * element_bytes_,
                            static_cast<int32_t>(i)};
      list_.add(Lane::kCaller, LibraryGemm{static_cast<int32_t>(i), rows, input, {output}},
                i == 0 ? after : std::vector<StepId>{});
    }
  }

  // Where transfers that end here have put their data.
  std::vector<StepId> arrivals(const std::set<size_t>& transfers) const {
    std::set<StepId> after;
    for (const size_t i : transfers) after.insert(arrived_[i]);
    return {after.begin(), after.end()};
  }

  // Rows of other ranks, in the order in which the last transfers that write them come. `behind`: waits for transfers,
  // and says behind which steps the GEMM comes.
  template <typename Behind>
  void compute_arrived(Behind behind) {
    const int64_t part = plan::part_rows(plan_);
    std::set<int64_t> cuts;
    for (int64_t peer = 0; peer <= plan_.problem.world_size; ++peer) cuts.insert(peer * part);
    std::vector<size_t> writers;
    for (size_t i = 0; i < program_.transfers.size(); ++i) {
      const Region& to = program_.transfers[i].destination;
      if (to.rank != rank_ || to.memory != Memory::kGathered) continue;
      writers.push_back(i);
      cuts.insert(to.area.row);
      cuts.insert(to.area.row + to.area.rows);
    }
    struct Rows {
      int32_t last = -1;
      plan::Rows rows;
      std::set<size_t> writers;
    };
    std::vector<Rows> all;
    for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) {
      if (*cut / part == rank_) continue;
      Rows one = {-1, {*cut, *std::next(cut)}, {}};
      for (const size_t i : writers) {
        const Rectangle& area = program_.transfers[i].destination.area;
        if (area.row >= one.rows.end || one.rows.begin >= area.row + area.rows) continue;
        one.last = std::max(one.last, rounds_[i]);
        one.writers.insert(i);
      }
      const bool joins =
          !all.empty() && all.back().last == one.last && all.back().rows.end == one.rows.begin;
      if (joins) {
        all.back().rows.end = one.rows.end;
        all.back().writers.insert(one.writers.begin(), one.writers.end());
      } else {
        all.push_back(std::move(one));
      }
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const Rows& a, const Rows& b) { return a.last < b.last; });
    for (const Rows& one : all) {
      compute_gathered(one.rows, behind(one.writers));
    }
  }

  // --- by NCCL or gloo ---

  // Both sides of a round of this rank, at most one send and one receive.
  void exchange(const std::vector<size_t>& transfers) {
    const int32_t stream = program_.transfers[transfers[0]].stream;
    const Lane lane = side_lane(stream);
    std::vector<StepId> after;
    SendReceive call = {plan_.chunks[0].max_ctas, stream, {}, {}};
    std::optional<Where> landing;
    for (const size_t i : transfers) {
      const Transfer& one = program_.transfers[i];
      if (height(one.source.rank == rank_ ? one.source : one.destination) == 0) continue;
      if (one.source.rank == rank_) {
        await_needs(i, lane, after);
        call.sends.push_back({one.destination.rank, sent_place(one, lane, after), bytes_of(one)});
      } else {
        if (lands_at_once(one)) {
          await_needs(i, lane, after);
          await_place(one, lane, after);
        } else {
          landing = stage(bytes_of(one));
        }
        call.receives.push_back(
            {one.source.rank, landing.value_or(place(one.destination)), bytes_of(one)});
      }
    }
    if (call.sends.empty() && call.receives.empty()) return;
    list_.communicates = calls_++;
    const StepId called = list_.add(lane, call, after);
    list_.communicates = -1;
    for (const size_t i : transfers) {
      const Transfer& one = program_.transfers[i];
      (one.source.rank == rank_ ? left_ : arrived_)[i] = called;
      if (one.source.rank == rank_ || !landing) continue;
      std::vector<StepId> put_after;
      await_needs(i, lane, put_after);
      await_place(one, lane, put_after);
      CopyRows put = {*landing,   width(one.destination),  place(one.destination),
                      row_bytes_, height(one.destination), width(one.destination),
                      one.reduces};
      arrived_[i] = list_.add(lane, put, put_after);
    }
  }

  bool lands_at_once(const Transfer& one) const { return !one.reduces && one_run(one.destination); }

  // Where what is sent lies in one run.
  Where sent_place(const Transfer& one, Lane lane, std::vector<StepId>& after) {
    const Where from = place(one.source);
    if (one_run(one.source)) return from;
    const Where packed = stage(bytes_of(one));
    list_.add(lane,
              CopyRows{from, row_bytes_, packed, width(one.source), height(one.source),
                       width(one.source), false},
              std::exchange(after, {}));
    return packed;
  }

  // --- what is waited for ---

  // What the transfer needs, as far as this rank knows of it.
  void await_needs(size_t number, Lane lane, std::vector<StepId>& after) {
    const Transfer& one = program_.transfers[number];
    if (one.source.rank == rank_) {
      for (const Rectangle& area : one.tiles) await_tiles(area, lane, after);
    }
    for (const int32_t before : one.behind) {
      const StepId there = arrived_[at(before)];
      await_step(there != kNone ? there : left_[at(before)], lane, after);
    }
  }

  // The own tiles where something is to be put or added.
  void await_place(const Transfer& one, Lane lane, std::vector<StepId>& after) {
    if (one.destination.memory != Memory::kProduct) return;
    await_tiles(one.destination.area, lane, after);
  }

  void await_tiles(const Rectangle& area, Lane lane, std::vector<StepId>& after) {
    if (to_all_) {
      for (const auto& [cut, id] : pieces_) {
        if (area.row <= cut && cut < area.row + area.rows) await_step(id, lane, after);
      }
      return;
    }
    std::set<int32_t>& seen =
        waited_[at(static_cast<int32_t>(lane) - static_cast<int32_t>(Lane::kSide0))];
    for (const int32_t chunk : plan::chunks_in(plan_, area)) {
      if (!variant_.kernel_takes) {
        await_step(computed_[at(chunk)], lane, after);
      } else if (seen.insert(chunk).second) {
        list_.add_held(lane, WaitForTiles{chunk, plan_.chunks[at(chunk)].tiles});
      }
    }
  }

  // Steps of one lane follow each other anyhow.
  void await_step(StepId id, Lane lane, std::vector<StepId>& after) const {
    if (id == kNone || list_.made.steps[at(id)].lane == lane) return;
    if (std::find(after.begin(), after.end(), id) == after.end()) after.push_back(id);
  }

  void copy(size_t number) {
    const Transfer& one = program_.transfers[number];
    const Lane lane = side_lane(one.stream);
    std::vector<StepId> after;
    await_needs(number, lane, after);
    await_place(one, lane, after);
    arrived_[number] = left_[number] =
        list_.add(lane,
                  CopyRows{place(one.source), row_bytes_, place(one.destination), row_bytes_,
                           height(one.source), width(one.source), one.reduces},
                  after);
  }

  // --- the result ---

  void finish() {
    if (gathers_ || to_all_) return;
    const bool copied = product_ == Buffer::kProduct && !writes_output(plan_);
    const int64_t rows = plan_.problem.m / plan::op_row_parts(plan_.problem);
    const Where output = {Buffer::kOutput};
    const Where result =
        copied ? Where{product_, (scatters_ ? rank_ : 0) * rows * row_bytes_} : output;
    if (variant_.bias) {
      list_.add(Lane::kCaller, AddBias{result, output, rows, plan_.resources.finish_ctas});
    } else if (copied) {
      list_.add(Lane::kCaller, Copy{result, output, rows * row_bytes_});
    }
  }

  const plan::Plan& plan_;
  const plan::Program& program_;
  const int32_t rank_;
  const Variant& variant_;
  const int32_t ctas_;
  const bool gathers_;
  const bool to_all_;
  const bool scatters_;
  const int64_t element_bytes_;
  const int64_t row_bytes_;
  const std::vector<int32_t> rounds_;
  const int32_t lanes_;
  const Buffer product_;
  bool counts_ = false;  // what the framework computes, for a kernel that waits for it
  int32_t calls_ = 0;    // messages, which timelines show as chunks
  int64_t staging_bytes_ = 0;
  std::vector<int64_t> send_begin_;  // of an all-to-all's messages, one more than ranks
  std::vector<int64_t> receive_begin_;
  std::vector<StepId> computed_;      // each chunk, by the framework's GEMM
  std::map<int64_t, StepId> pieces_;  // of messages, by their first share
  std::map<int64_t, int32_t> piece_counters_;
  std::vector<std::set<int32_t>> waited_;  // of each lane: chunks
  std::vector<StepId> arrived_;            // of each transfer that ends here
  std::vector<StepId> left_;               // of each that begins here
  List list_;
};

}  // namespace overlap::steps
