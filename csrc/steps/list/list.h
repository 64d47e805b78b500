// How the families' lowerings build their lists.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "steps/list/step.h"

namespace overlap::steps {

// A number of a rank, chunk or step as a place in a vector.
inline size_t at(int64_t number) {
  return static_cast<size_t>(number);
}

// The unit in bytes in which one kernel's movement over peers is counted.
inline constexpr int64_t kPeerAccessBytes = 16;

class List {
 public:
  // `what`: a step of any kind, made where it stays, as the planner makes lists by the dozen.
  template <typename Kind>
  StepId add(Lane lane, Kind what, std::vector<StepId> after = {}) {
    Step& step = made.steps.emplace_back();
    step.lane = lane;
    step.what = std::move(what);
    step.after = std::move(after);
    step.communicates = communicates;
    return last_ = static_cast<StepId>(made.steps.size()) - 1;
  }
  // Only a list's first and last steps.
  template <typename Kind>
  StepId add_unchained(Lane lane, Kind what) {
    const StepId id = add(lane, std::move(what));
    made.steps.back().unchained = true;
    return id;
  }
  // A step that begins a chunk's communication.
  StepId hold(StepId id) {
    made.steps[at(id)].held = true;
    return id;
  }
  template <typename Kind>
  StepId add_held(Lane lane, Kind what, std::vector<StepId> after = {}) {
    return hold(add(lane, std::move(what), std::move(after)));
  }
  // A step of a chunk's communication.
  template <typename Kind>
  StepId add_of_chunk(int32_t chunk, Lane lane, Kind what, std::vector<StepId> after = {}) {
    communicates = chunk;
    const StepId id = add(lane, std::move(what), std::move(after));
    communicates = -1;
    return id;
  }
  int32_t add_order(const plan::TileOrder& order) {
    made.orders.push_back(order);
    return static_cast<int32_t>(made.orders.size()) - 1;
  }
  // The communicators that carry a plan's chunks.
  void add_communicators(const plan::Plan& plan) {
    for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
      const Communicator one = {plan.chunks[chunk].max_ctas,
                                static_cast<int32_t>(chunk) % plan.resources.lanes};
      std::vector<Communicator>& all = made.communicators;
      if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
    }
  }
  void add_scratch(Buffer buffer, int64_t bytes) { made.scratch.push_back({buffer, bytes}); }
  void add_slot(int64_t bytes, bool hears_all = true) {
    made.over_peers = true;
    made.slot_bytes = bytes;
    made.takes_slot = true;
    made.hears_all = hears_all;
  }
  StepId last() const { return last_; }

  StepList made;
  int32_t communicates = -1;  // the steps that are added

 private:
  StepId last_ = 0;
};

// Where each chunk lies; rows only where it has whole ones. `matrix`: these are all that travels, and nothing that tiles
// have beyond them.
struct ChunkPlaces {
  explicit ChunkPlaces(const plan::Plan& plan, bool matrix = false) {
    const int64_t columns = plan::moved_columns(plan.problem);
    rows.reserve(plan.chunks.size());
    extents.reserve(plan.chunks.size());
    for (int32_t chunk = 0; chunk < static_cast<int32_t>(plan.chunks.size()); ++chunk) {
      const bool whole = plan.layout == plan::Layout::kRowMajor;
      rows.push_back(whole ? plan::chunk_rows(plan, chunk) : plan::Rows{});
      if (whole && matrix) {
        extents.push_back(
            {plan::row_parts(plan) * rows.back().begin * columns, rows.back().count() * columns});
      } else {
        extents.push_back(plan::chunk_extent(plan, chunk));
      }
    }
  }

  std::vector<plan::Rows> rows;
  std::vector<plan::Extent> extents;
};

// True if chunks in such places can be staged in a window: NCCL's window kernels leave wrong elements in parts that begin
// between multiples of 16 bytes (NCCL 2.28.9).
bool windows_take(const plan::Plan& plan, const std::vector<plan::Extent>& extents);

// Where the plan's chunks are staged.
inline Buffer staging_of(const plan::Plan& plan, const Variant& variant,
                         const std::vector<plan::Extent>& extents) {
  const bool in_window = plan.resources.window && !variant.captured && windows_take(plan, extents);
  return in_window ? Buffer::kWindow : Buffer::kStaging;
}
inline int64_t staging_bytes(const plan::Plan& plan) {
  return plan::buffer_elements(plan) * plan::moved_bytes(plan.problem);
}

// Gives the steps that others come after their numbers.
void number_events(StepList& list);

// CTAs of a GEMM that leaves SMs to communication.
inline int32_t ctas_beside(const plan::Plan& plan, const plan::Machine& machine) {
  return std::max(1, machine.sm_count - plan.resources.comm_sms);
}

}  // namespace overlap::steps
