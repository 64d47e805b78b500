// Transfers of a plan's own in place of its collectives.
//
// Each rank comes to the rounds of plan::rounds in their order, each on its stream's lane. It first waits for whatever a round's
// transfer needs, as far as this rank knows of it.
//
// Over NCCL and gloo, sends and receives of a round are one call; what is added, or is no run of memory, lands in staging
// memory and is put in its place after the call.
//
//   caller | fork | GEMM: chunk 0, 1, 2 ... signal [A] ....................................... | join | result, bias |
//   side   |      | wait 0 [A] | send and receive | wait 1 [A] | add what was received | ...    | ^
//
// Over peers a copy engine brings data into a slot, and a flag of the transfer says that they are there.
//
// An all-gather computes its own rows first, and others once all transfers that write them have arrived.
#include <algorithm>
#include <utility>

#include "steps/lower/program_builder.h"

namespace overlap::steps {

using plan::Memory;
using plan::Rectangle;
using plan::Region;
using plan::Transfer;
using plan::Way;

namespace {

void add_cuts(const Rectangle& area, std::set<int64_t>& cuts) {
  cuts.insert({area.row, area.row + area.rows});
}

// True if each rank awaits a flag of every other one; an all-to-all's messages may be empty.
bool hears_all(const plan::Plan& plan) {
  std::set<std::pair<int32_t, int32_t>> pairs;
  for (const Transfer& one : plan.program.transfers) {
    if (lands(plan, one)) pairs.insert({one.source.rank, one.destination.rank});
  }
  const int32_t ranks = plan.problem.world_size;
  return !plan.problem.traits().rows_by_rank &&
         static_cast<int32_t>(pairs.size()) == ranks * (ranks - 1);
}

}  // namespace

ProgramBuilder::ProgramBuilder(const RankCall& call)
    : Family(call),
      places_(call),
      rounds_(plan::rounds(plan_.program)),
      lanes_(plan::streams(plan_.program)),
      waited_(at(lanes_)),
      arrived_(places_.transfers.size(), kNone),
      left_(places_.transfers.size(), kNone),
      lane_waited_for_slots_(at(lanes_), false) {
  if (!places_.to_all) staging_bytes_ = plan_.program.scratch_rows * places_.row_bytes;
}

StepList ProgramBuilder::lower() {
  for (int32_t lane = 0; lane < lanes_; ++lane) {
    const auto calls = [&](const Transfer& one) {
      return one.stream == lane && one.way != Way::kCopy && !lands(plan_, one);
    };
    if (!peers_ || std::any_of(places_.transfers.begin(), places_.transfers.end(), calls)) {
      list_.made.communicators.push_back({plan_.chunks[0].max_ctas, lane});
    }
  }
  if (peers_) list_.add_slot(places_.slot_bytes, hears_all(plan_));
  compute_before();
  communicate();
  if (places_.gathers) compute_arrived();
  list_.add(Lane::kCaller, Join{});
  if (peers_) list_.add(Lane::kCaller, EndCall{});
  finish();
  list_.made.chunks = std::max({1, calls_, peers_ ? 0 : list_.made.counters});
  if (places_.product == Buffer::kProduct) {
    const int64_t rows = places_.to_all    ? places_.send_begin.back()
                         : places_.gathers ? 0
                                           : plan_.problem.m;
    list_.add_scratch(Buffer::kProduct, rows * places_.row_bytes);
  }
  if (staging_bytes_ > 0) list_.add_scratch(Buffer::kStaging, staging_bytes_);
  return std::move(list_.made);
}

std::map<int32_t, std::vector<size_t>> ProgramBuilder::own_rounds() const {
  std::map<int32_t, std::vector<size_t>> of_round;
  for (size_t i = 0; i < places_.transfers.size(); ++i) {
    const Transfer& one = transfer(i);
    if (places_.is_sent(one) || one.destination.rank == rank_) {
      of_round[rounds_[i]].push_back(i);
    }
  }
  return of_round;
}

Where ProgramBuilder::stage(int64_t bytes) {
  const int64_t offset = ProgramPlaces::rounded_up(staging_bytes_);
  staging_bytes_ = offset + bytes;
  return {Buffer::kStaging, offset};
}

// --- what is computed ---

// The lanes begin, and what needs no transfer is computed.
void ProgramBuilder::compute_before() {
  const plan::Rows own = {rank_ * places_.part_rows, (rank_ + 1) * places_.part_rows};
  if (places_.gathers) {
    const Where there = {Buffer::kGathered, own.begin * places_.row_bytes};
    list_.add(Lane::kCaller, Copy{{Buffer::kInput}, there, places_.part_rows * places_.row_bytes});
  }
  list_.add(Lane::kCaller, Fork{lanes_, false});
  if (places_.gathers) {
    compute_gathered(own, {});
  } else if (places_.to_all) {
    compute_messages();
  } else {
    compute_product();
  }
}

void ProgramBuilder::compute_product() {
  list_.made.counters = chunks_;
  if (callers_) {
    tiles_.assign(plan::tile_order(plan_));
    list_.made.tiles.stores = places_.product;
    list_.add(Lane::kCaller, CallersKernel{true, false});
    return;
  }
  if (variant_.compute == Compute::kKernel) {
    Gemm gemm = gemm_of_all(plan::tile_order(plan_));
    gemm.outputs = {{{places_.product}}};
    gemm.counts = true;
    list_.add(Lane::kCaller, gemm);
    return;
  }
  for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    add_library(rows, {places_.product, rows.begin * places_.row_bytes});
    computed_.push_back(list_.last());
  }
}

void ProgramBuilder::add_library(plan::Rows rows, Where output) {
  list_.add(Lane::kCaller, library_gemm(rows, output));
}

// Messages in the pieces and the order in which they leave; the rows that stay, where they belong.
void ProgramBuilder::compute_messages() {
  std::set<int64_t> cuts;
  for (const Transfer& one : places_.transfers) {
    if (!places_.is_sent(one)) continue;
    add_cuts(one.source.area, cuts);
    for (const Rectangle& area : one.tiles) add_cuts(area, cuts);
  }
  for (const Transfer& one : places_.transfers) {
    if (!places_.is_sent(one)) continue;
    const Rectangle& area = one.source.area;
    for (auto cut = cuts.find(area.row); *cut < area.row + area.rows; ++cut) {
      Region piece = one.source;
      piece.area.row = *cut;
      piece.area.rows = *std::next(cut) - *cut;
      const plan::Rows rows = places_.rows_of(piece);
      if (rows.begin == rows.end) continue;
      add_library(rows, {Buffer::kProduct, rows.begin * places_.row_bytes});
      pieces_[*cut] = list_.last();
    }
  }
  const plan::Rows own = {places_.send_begin[at(rank_)], places_.send_begin[at(rank_) + 1]};
  if (own.begin == own.end) return;
  add_library(own, {Buffer::kOutput, places_.receive_begin[at(rank_)] * places_.row_bytes});
}

// Rows of an all-gather's product, of each weight.
void ProgramBuilder::compute_gathered(plan::Rows rows, const std::vector<StepId>& after) {
  const bool own = rows.begin / places_.part_rows == rank_;
  const Where input =
      own ? Where{Buffer::kInput, (rows.begin - rank_ * places_.part_rows) * places_.row_bytes}
          : Where{Buffer::kGathered, rows.begin * places_.row_bytes};
  std::vector<Weight> weights = variant_.weights;
  if (weights.empty()) weights.push_back({plan_.problem.n});
  for (size_t i = 0; i < weights.size(); ++i) {
    const Where output = {Buffer::kOutput, rows.begin * weights[i].columns * places_.element_bytes,
                          static_cast<int32_t>(i)};
    list_.add(Lane::kCaller, LibraryGemm{static_cast<int32_t>(i), rows, input, {output}},
              i == 0 ? after : std::vector<StepId>{});
  }
}

// Rows of other ranks, in the order in which the last transfers that write them come.
void ProgramBuilder::compute_arrived() {
  const int64_t part = places_.part_rows;
  std::set<int64_t> cuts;
  for (int64_t peer = 0; peer <= plan_.problem.world_size; ++peer) cuts.insert(peer * part);
  std::vector<size_t> writers;
  for (size_t i = 0; i < places_.transfers.size(); ++i) {
    const Region& to = transfer(i).destination;
    if (to.rank != rank_ || to.memory != Memory::kGathered) continue;
    writers.push_back(i);
    add_cuts(to.area, cuts);
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
      const Rectangle& area = transfer(i).destination.area;
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
    std::set<StepId> after;
    for (const size_t i : one.writers) after.insert(arrived_[i]);
    compute_gathered(one.rows, {after.begin(), after.end()});
  }
}

void ProgramBuilder::finish() {
  if (places_.gathers || places_.to_all) return;
  const bool copied = places_.product == Buffer::kProduct && !writes_output(plan_);
  const int64_t rows = plan_.problem.m / plan::op_row_parts(plan_.problem);
  const Where output = {Buffer::kOutput};
  const Where result =
      copied ? Where{places_.product,
                     (plan_.problem.traits().scatters() ? rank_ : 0) * rows * places_.row_bytes}
             : output;
  if (variant_.bias) {
    list_.add(Lane::kCaller, AddTerms{result, output, rows, plan_.resources.finish_ctas});
  } else if (copied) {
    list_.add(Lane::kCaller, Copy{result, output, rows * places_.row_bytes});
  }
}

// --- each transfer as a step ---

// The rows of a transfer on their way into a slot (`sends`), or out of it; or a copy.
CopyRows ProgramBuilder::rows_of(size_t number, bool sends, Where landing) const {
  const Transfer& one = transfer(number);
  CopyRows made;
  made.rows = places_.height(places_.own_side(one));
  made.row_bytes = places_.width(places_.own_side(one));
  const bool within = one.way == Way::kCopy;
  const bool reads = within || sends;
  const bool writes = within || !sends;
  made.source = reads ? places_.place(one.source) : landing;
  made.source_stride = reads ? places_.row_bytes : made.row_bytes;
  made.destination = writes ? places_.place(one.destination) : landing;
  made.destination_stride = writes ? places_.row_bytes : made.row_bytes;
  made.adds = writes && one.reduces;
  return made;
}

void ProgramBuilder::communicate() {
  for (const auto& [number, round] : own_rounds()) {
    std::vector<size_t> called;
    for (const size_t i : round) {
      if (transfer(i).way == Way::kCopy) {
        copy(i);
      } else if (!lands(plan_, transfer(i))) {
        called.push_back(i);
      }
    }
    const auto has_half = [&](size_t i, const Region& own) {
      return lands(plan_, transfer(i)) && own.rank == rank_ && places_.height(own) > 0;
    };
    for (const size_t i : round) {
      if (has_half(i, transfer(i).source)) send(i);
    }
    // After what this rank sends otherwise, and before it waits for what comes.
    if (!called.empty()) call(called);
    for (const size_t i : round) {
      if (has_half(i, transfer(i).destination)) receive(i);
    }
  }
}

void ProgramBuilder::copy(size_t number) {
  const Lane lane = side_lane(transfer(number).stream);
  std::vector<StepId> after;
  await_needs(number, lane, after);
  arrived_[number] = left_[number] = list_.add(lane, rows_of(number, true, {}), after);
}

// Both sides of a round of this rank, at most one send and one receive.
void ProgramBuilder::call(const std::vector<size_t>& round) {
  const int32_t stream = transfer(round[0]).stream;
  const Lane lane = side_lane(stream);
  std::vector<StepId> after;
  SendReceive made = no_messages();
  made.lane = stream;
  std::optional<Where> landing;
  for (const size_t i : round) {
    const Transfer& one = transfer(i);
    if (places_.height(places_.own_side(one)) == 0) continue;
    if (places_.is_sent(one)) {
      await_needs(i, lane, after);
      made.sends.push_back(
          {one.destination.rank, sent_place(one, lane, after), places_.bytes_of(one)});
    } else {
      if (!one.reduces && places_.one_run(one.destination)) {
        await_needs(i, lane, after);
      } else {
        landing = stage(places_.bytes_of(one));
      }
      made.receives.push_back({one.source.rank, landing.value_or(places_.place(one.destination)),
                               places_.bytes_of(one)});
    }
  }
  if (made.sends.empty() && made.receives.empty()) return;
  const StepId called = list_.add_of_chunk(calls_++, lane, made, after);
  for (const size_t i : round) {
    const Transfer& one = transfer(i);
    (places_.is_sent(one) ? left_ : arrived_)[i] = called;
    if (places_.is_sent(one) || !landing) continue;
    std::vector<StepId> put_after;
    await_needs(i, lane, put_after);
    arrived_[i] = list_.add(lane, rows_of(i, false, *landing), put_after);
  }
}

// Where what is sent lies in one run.
Where ProgramBuilder::sent_place(const Transfer& one, Lane lane, std::vector<StepId>& after) {
  CopyRows pack;
  pack.source = places_.place(one.source);
  if (places_.one_run(one.source)) return pack.source;
  pack.destination = stage(places_.bytes_of(one));
  pack.rows = places_.height(one.source);
  pack.row_bytes = pack.destination_stride = places_.width(one.source);
  pack.source_stride = places_.row_bytes;
  list_.add(lane, pack, std::exchange(after, {}));
  return pack.destination;
}

void ProgramBuilder::send(size_t number) {
  const Transfer& one = transfer(number);
  const Lane lane = side_lane(one.stream);
  std::vector<StepId> after;
  await_needs(number, lane, after);
  list_.communicates = calls_++;
  if (!lane_waited_for_slots_[at(one.stream)]) {
    lane_waited_for_slots_[at(one.stream)] = true;
    list_.add(lane, WaitForSlots{}, std::exchange(after, {}));
  }
  add_copy(rows_of(number, true, places_.landing(number)), lane, after);
  left_[number] = list_.add(lane, Announce{static_cast<int32_t>(number), one.destination.rank});
  list_.communicates = -1;
}

void ProgramBuilder::receive(size_t number) {
  const Transfer& one = transfer(number);
  const Lane lane = side_lane(one.stream);
  std::vector<StepId> after;
  await_needs(number, lane, after);
  CopyRows put = rows_of(number, false, places_.landing(number));
  list_.add_held(lane, Await{static_cast<int32_t>(number), one.source.rank},
                 std::exchange(after, {}));
  if (put.source.index != rank_ && put.adds) {
    // Data that is added lies at home.
    CopyRows fetched = put;
    fetched.destination = stage(put.rows * put.row_bytes);
    fetched.destination_stride = put.row_bytes;
    fetched.adds = false;
    add_copy(fetched, lane, {});
    put.source = fetched.destination;
  }
  arrived_[number] = add_copy(put, lane, {});
}

StepId ProgramBuilder::add_copy(const CopyRows& one, Lane lane, std::vector<StepId> after) {
  const bool dense = one.source_stride == one.row_bytes && one.destination_stride == one.row_bytes;
  if (!one.adds && (dense || one.rows == 1)) {
    return list_.add(lane, Copy{one.source, one.destination, one.rows * one.row_bytes},
                     std::move(after));
  }
  return list_.add(lane, one, std::move(after));
}

// --- what is waited for ---

// The transfer's needs, as far as this rank knows them; and this rank's tiles if data is put or
// added there.
void ProgramBuilder::await_needs(size_t number, Lane lane, std::vector<StepId>& after) {
  const Transfer& one = transfer(number);
  if (places_.is_sent(one)) {
    for (const Rectangle& area : one.tiles) await_tiles(area, lane, after);
  }
  for (const int32_t before : one.after) {
    const StepId there = arrived_[at(before)];
    await_step(there != kNone ? there : left_[at(before)], lane, after);
  }
  if (one.destination.rank == rank_ && one.destination.memory == Memory::kProduct) {
    await_tiles(one.destination.area, lane, after);
  }
}

void ProgramBuilder::await_tiles(const Rectangle& area, Lane lane, std::vector<StepId>& after) {
  if (places_.to_all) {
    for (const auto& [cut, id] : pieces_) {
      if (area.row <= cut && cut < area.row + area.rows) await_step(id, lane, after);
    }
    return;
  }
  std::set<int32_t>& seen =
      waited_[at(static_cast<int32_t>(lane) - static_cast<int32_t>(Lane::kSide0))];
  for (const int32_t chunk : plan::chunks_in(plan_, area)) {
    if (variant_.compute == Compute::kLibrary) {
      await_step(computed_[at(chunk)], lane, after);
    } else if (seen.insert(chunk).second) {
      list_.add_held(lane, WaitForTiles{chunk, tiles_of(chunk)});
    }
  }
}

// Steps of one lane follow each other anyhow.
void ProgramBuilder::await_step(StepId id, Lane lane, std::vector<StepId>& after) const {
  if (id == kNone || list_.made.steps[at(id)].lane == lane) return;
  if (std::find(after.begin(), after.end(), id) == after.end()) after.push_back(id);
}

StepList lower_program(const RankCall& call) {
  return ProgramBuilder(call).lower();
}

}  // namespace overlap::steps
