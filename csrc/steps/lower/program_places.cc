// Where things are in a program's memories and slots.
//
// A transfer over peers lands in a slot first, in a place of its own: a push in the slot of the
// destination, where the source stores it; a pull in the slot of the source, where the destination
// reads it. So nobody waits for room, and no rank touches another's memory except slots.
#include <algorithm>
#include <bit>

#include "steps/lower/program_builder.h"

namespace overlap::steps {
namespace {

using plan::Memory;
using plan::Transfer;
using plan::Way;

Buffer product_buffer(const plan::Plan& plan) {
  const bool in_output = plan.problem.traits().all_reduces() && !writes_output(plan);
  return in_output ? Buffer::kOutput : Buffer::kProduct;
}

}  // namespace

bool lands(const plan::Plan& plan, const Transfer& one) {
  return plan::over_peers(plan) && one.way != Way::kCopy && one.by != plan::Engine::kNccl &&
         plan::in_one_clique(plan, one.source.rank, one.destination.rank);
}

ProgramPlaces::ProgramPlaces(const RankCall& call)
    : plan(call.plan),
      transfers(plan.program.transfers),
      rank(call.rank),
      ranks(plan.problem.world_size),
      gathers(plan.problem.traits().gathers()),
      to_all(plan.problem.traits().rows_by_rank),
      part_rows(plan::part_rows(plan)),
      element_bytes(plan::moved_bytes(plan.problem)),
      row_bytes(plan::moved_columns(plan.problem) * element_bytes),
      product(product_buffer(plan)) {
  if (to_all) {
    send_begin = offsets(call.variant.send_rows);
    receive_begin = offsets(call.variant.receive_rows);
  }
  if (plan::over_peers(plan)) place_landings(call.variant);
}

void ProgramPlaces::place_landings(const Variant& variant) {
  if (to_all) {
    // Two ranks know all messages; of more, no pair knows those of another, but what the ranks have told each other.
    const int64_t longest =
        ranks == 2 ? longest_message(plan, rank, variant.send_rows, variant.receive_rows)
                   : variant.longest_message;
    room_ =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(longest, kAlignment))));
    slot_bytes = 2 * ranks * room_;
    return;
  }
  std::vector<int64_t> used(static_cast<size_t>(ranks), 0);
  for (const Transfer& one : transfers) {
    landings_.push_back(0);
    if (!lands(plan, one)) continue;
    const int32_t owner = one.way == Way::kPull ? one.source.rank : one.destination.rank;
    int64_t& end = used[static_cast<size_t>(owner)];
    landings_.back() = end;
    end += rounded_up(one.source.area.rows * one.source.area.columns * element_bytes);
    slot_bytes = std::max(slot_bytes, end);
  }
}

plan::Rows ProgramPlaces::rows_of(const plan::Region& region) const {
  const plan::Rectangle& area = region.area;
  if (!to_all) return {area.row, area.row + area.rows};
  const std::vector<int64_t>& begin =
      region.memory == Memory::kProduct ? send_begin : receive_begin;
  const auto peer = static_cast<size_t>(area.row / plan::kMessageShares);
  const int64_t rows = begin[peer + 1] - begin[peer];
  const int64_t share = area.row % plan::kMessageShares;
  return {begin[peer] + rows * share / plan::kMessageShares,
          begin[peer] + rows * (share + area.rows) / plan::kMessageShares};
}

Where ProgramPlaces::place(const plan::Region& region) const {
  const int64_t offset = rows_of(region).begin * row_bytes + region.area.column * element_bytes;
  switch (region.memory) {
    case Memory::kProduct:
      return {product, offset};
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

Where ProgramPlaces::landing(size_t number) const {
  const Transfer& one = transfers[number];
  const bool pulled = one.way == Way::kPull;
  const int32_t owner = pulled ? one.source.rank : one.destination.rank;
  if (!to_all) return {Buffer::kSlot, landings_[number], owner};
  // Messages that are pushed, and after them those that wait to be pulled, by the rank at the other end.
  const int64_t place = pulled ? ranks + one.destination.rank : one.source.rank;
  const plan::Region& own = own_side(one);
  plan::Region whole = own;
  whole.area.row -= own.area.row % plan::kMessageShares;
  const int64_t row = rows_of(own).begin - rows_of(whole).begin;
  return {Buffer::kSlot, place * room_ + row * row_bytes, owner};
}

}  // namespace overlap::steps
