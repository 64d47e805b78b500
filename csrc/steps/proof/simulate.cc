// Calls one after the other, and the steps of each rank's list: lanes, buffers, and what goes through all of them.
#include <algorithm>

#include "steps/proof/simulation.h"

namespace overlap::steps {

Graph::Node Simulation::node(const Here& here, const char* note) {
  labels_.push_back({here.turn, here.rank, here.id, note});
  effects_.emplace_back();
  return graph_.add();
}

// A node after the one and before the other.
Graph::Node Simulation::node_within(const Span& span, const Here& here, const char* note) {
  const Node by = node(here, note);
  graph_.edge(span.first, by);
  graph_.edge(by, span.last);
  return by;
}

void Simulation::effect(Node node, std::function<void()> what) {
  effects_[at(node)].push_back(std::move(what));
}

void Simulation::follow(Node& tail, Node next) {
  graph_.edge(tail, next);
  tail = next;
}

Graph::Node& Simulation::tail(const Here& here, Lane lane) {
  const int32_t index =
      lane == Lane::kCaller ? here.call->stream : kStreams + static_cast<int32_t>(lane);
  return tails_[at(here.rank)][at(index)];
}

Simulation::Key Simulation::key(int32_t rank, int32_t kind, int32_t index, int32_t stream) const {
  return ((int64_t{rank} * 64 + kind) * 4096 + index) * kStreams + stream;
}

Simulation::Key Simulation::key(const Here& here, const Where& where) const {
  const auto kind = static_cast<int32_t>(where.buffer);
  if (where.buffer == Buffer::kSlot) return key(where.index, kind, here.call->slot);
  if (where.buffer == Buffer::kWindow) return key(here.rank, kind, 0);
  if (where.buffer == Buffer::kStripes) {
    return key(where.index < kOwners ? here.rank : where.index - kOwners, kind, here.call->slot);
  }
  return key(here.rank, kind, where.index, here.call->stream);
}

int64_t Simulation::columns(const Here& here, int32_t weight) const {
  const std::vector<Weight>& weights = here.variant->weights;
  return weights.empty() ? here.plan->problem.n : weights[at(weight)].columns;
}

int64_t Simulation::row_bytes(const Here& here, int32_t weight) const {
  return columns(here, weight) * plan::output_bytes(here.plan->problem);
}

int64_t Simulation::input_row_bytes(const Here& here) const {
  return here.plan->problem.k * plan::element_bytes(here.plan->problem.dtype);
}

namespace {
int64_t sum_of(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return sum;
}
}  // namespace

// Bytes of a buffer.
int64_t Simulation::room(const Here& here, const Where& where) const {
  const plan::Problem& problem = here.plan->problem;
  const bool gathers = problem.traits().gathers();
  const bool alltoall = problem.traits().rows_by_rank;
  switch (where.buffer) {
    case Buffer::kInput: {
      const int64_t rows = gathers    ? problem.m / ranks_
                           : alltoall ? sum_of(here.variant->send_rows)
                                      : problem.m;
      return rows * input_row_bytes(here);
    }
    case Buffer::kOutput: {
      const int64_t rows = alltoall                      ? sum_of(here.variant->receive_rows)
                           : problem.traits().scatters() ? problem.m / ranks_
                                                         : problem.m;
      return rows * row_bytes(here, where.index);
    }
    case Buffer::kGathered:
      return problem.m * input_row_bytes(here);
    case Buffer::kSlot:
      return here.list->slot_bytes;
    case Buffer::kStripes:
      return ranks_ * plan::stripe_stride(here.list->stripe_bytes);
    case Buffer::kIndices: {
      const auto* const indices = here.call->indices;
      return indices == nullptr ? 0 : static_cast<int64_t>((*indices)[at(here.rank)].size() * 8);
    }
    default:
      for (const Scratch& scratch : here.list->scratch) {
        if (scratch.buffer == where.buffer) return scratch.bytes;
      }
      return 0;
  }
}

// Bytes of a buffer that has them.
Simulation::Place Simulation::place(const Here& here, const Where& where, int64_t bytes,
                                    Node by) const {
  if (bytes > 0 && (where.offset < 0 || where.offset + bytes > room(here, where))) {
    fail(Fault::Kind::kResult, says(by), " takes bytes ", where.offset, " to ",
         where.offset + bytes, " of ", name(where.buffer), ", which has ", room(here, where));
  }
  return {key(here, where), where.offset};
}

Simulation::Place Simulation::use(const Span& span, const Here& here, const Where& where,
                                  int64_t bytes, bool write) {
  const Place found = place(here, where, bytes, span.last);
  if (bytes > 0 && !accesses_.empty()) {
    Access& before = accesses_.back();
    if (before.key == found.key && before.first == span.first && before.last == span.last &&
        before.write == write && !before.flag && before.end == found.offset) {
      before.end += bytes;
      return found;
    }
  }
  touches(span, found, bytes, write);
  return found;
}

void Simulation::touches(const Span& span, const Place& place, int64_t bytes, bool write) {
  if (bytes == 0) return;
  accesses_.push_back(
      {place.key, place.offset, place.offset + bytes, span.first, span.last, write, false});
}

void Simulation::moves(Node by, const Place& from, const Place& to, int64_t bytes) {
  touches({by, by}, from, bytes, false);
  touches({by, by}, to, bytes, true);
  effect(by, [=, this] { copy(from, to, bytes, by); });
}

// The sum of the terms, in their order, to all targets.
void Simulation::adds(Node by, const std::vector<Place>& terms, const std::vector<Place>& targets,
                      int64_t bytes, bool bias) {
  for (const Place& term : terms) touches({by, by}, term, bytes, false);
  for (const Place& target : targets) touches({by, by}, target, bytes, true);
  effect(by, [=, this] {
    std::vector<std::vector<Run>> runs;
    for (const Place& term : terms) runs.push_back(read(term, bytes, by));
    std::vector<Run> sum = add(runs, false, by);
    if (bias) add_bias(sum, by);
    for (const Place& target : targets) write(target, sum);
  });
}

void Simulation::use_flag(const Span& span, int32_t owner, Kind kind, int32_t index, int64_t begin,
                          int64_t end, bool write) {
  accesses_.push_back({key(owner, kind, index), begin, end, span.first, span.last, write, true});
}

// A number that is sent, or waited for, is above that of the calls that have ended in the slot.
void Simulation::reads_calls(const Span& span, const Here& here) {
  touches(span, {key(here.rank, kCallsEnded, here.call->slot), 0}, 1, false);
}

void Simulation::ends_call(Node node, Here& here) {
  if (here.ended || !here.list->takes_slot) {
    fail(Fault::Kind::kDeadlock, says(node),
         here.ended ? " ends a call that has been ended" : " ends a call that takes no slot");
  }
  touches({node, node}, {key(here.rank, kCallsEnded, here.call->slot), 0}, 1, true);
  here.ended = node;
}

void Simulation::holds(const Here& here, const Span& span, int32_t held, int32_t needed, bool waits,
                       bool one_warp) {
  if (machine_.arch == 0) return;
  const int32_t most = machine_.sm_count;
  holders_.push_back({here.rank, here.lane, here.id, span.first, span.last, std::min(held, most),
                      std::min(needed, most), waits, one_warp});
}

// A copy within a device is a kernel, whatever its name.
void Simulation::holds_copy(const Here& here, const Span& span, const Where& source,
                            const Where& destination) {
  const auto remote = [&](const Where& where) {
    return where.buffer == Buffer::kSlot && where.index != here.rank;
  };
  if (!remote(source) && !remote(destination)) holds(here, span, 1, 1, false);
}

// --- the calls ---

void Simulation::run() {
  if (ranks_ == 0) return;
  tails_.resize(at(ranks_));
  chain_.resize(at(ranks_));
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    Here here;
    here.rank = rank;
    here.id = -1;
    const Node start = node(here, "start");
    tails_[at(rank)].fill(start);
    chain_[at(rank)] = start;
  }
  for (int32_t turn = 0; turn < static_cast<int32_t>(turns_.size()); ++turn) {
    if (turn == 0 || turns_[at(turn)].lists != turns_[at(turn) - 1].lists) {
      agree(turns_[at(turn)], turn);
    }
    expand(turn);
  }
  check_circles();
  check_races();
  check_progress();
  check_results();
}

void Simulation::expand(int32_t turn) {
  call_ = turn;
  const Turn& call = turns_[at(turn)];
  arrivals_.assign(at(ranks_), {});
  tile_signals_.assign(at(ranks_), {});
  tile_waits_.assign(at(ranks_), {});
  arrival_waits_.clear();
  collectives_.clear();
  sends_.clear();
  receives_.clear();
  bool low_latency = false;
  std::vector<Here> all(at(ranks_));
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    Here& here = all[at(rank)];
    here.turn = turn;
    here.rank = rank;
    here.call = &call;
    here.plan = call.plan;
    here.variant = &(*call.variants)[at(rank)];
    here.list = &(*call.lists)[at(rank)];
    expand_rank(here);
    for (const Step& step : here.list->steps) {
      low_latency = low_latency || std::holds_alternative<LowLatency>(step.what);
    }
  }
  match_arrivals();
  match_tiles();
  match_collectives();
  match_messages();
  match_meetings(all);
  if (low_latency) ++low_latency_calls_;
  const bool takes_slot = all[0].list->takes_slot;
  if (!takes_slot) return;
  std::vector<Node> ends;
  for (Here& here : all) {
    if (!here.ended) {
      here.id = -1;
      fail(Fault::Kind::kDeadlock, says(turn, here.rank, -1),
           ": nothing ends the call, so the peers wait in vain for its slot, and its next "
           "call in this slot for numbers that the peers do not send");
    }
    ends.push_back(*here.ended);
  }
  slot_ends_[at(call.slot)] = std::move(ends);
}

void Simulation::expand_rank(Here& here) {
  const std::vector<Step>& steps = here.list->steps;
  here.id = -1;
  // The input is there; the memory that the call takes may have been another's.
  Node begin = node(here, "begin");
  follow(tail(here, Lane::kCaller), begin);
  here.begin = begin;
  const plan::Problem& problem = here.plan->problem;
  const bool gathers = problem.traits().gathers();
  const Key input = key(here, {Buffer::kInput});
  const int64_t bytes = room(here, {Buffer::kInput});
  std::vector<Key> cleared;
  for (const Buffer buffer :
       {Buffer::kStaging, Buffer::kProduct, Buffer::kPartial, Buffer::kGathered}) {
    cleared.push_back(key(here, {buffer}));
  }
  const size_t outputs = std::max<size_t>(1, here.variant->weights.size());
  for (size_t i = 0; i < outputs; ++i) {
    cleared.push_back(key(here, {Buffer::kOutput, 0, static_cast<int32_t>(i)}));
  }
  cleared.push_back(key(here, {Buffer::kIndices, 0, 1}));
  const Key indices = key(here, {Buffer::kIndices});
  const int64_t index_bytes = room(here, {Buffer::kIndices});
  const int32_t rank = here.rank;
  const int32_t turn = here.turn;
  effect(begin, [=, this] {
    for (const Key key : cleared) {
      contents_[key].clear();
      begun_rows_[key].clear();
    }
    Content content = {Content::Space::kInput, false, 0, turn, sums_.of_rank(rank)};
    contents_[input].write(0, Run{bytes, gathers ? rank * bytes : 0, content});
    content.space = Content::Space::kIndices;
    contents_[indices].write(0, Run{index_bytes, 0, content});
  });

  check_joins(here);

  here.ends.resize(steps.size());
  bool chained = false;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    here.id = static_cast<StepId>(i);
    here.lane = step.lane;
    Span span = begin_step(here);
    if (step.lane == Lane::kCaller && !step.unchained && !chained) {
      graph_.edge(chain_[at(here.rank)], span.first);
      chained = true;
      if (here.list->counters > 0) {
        touches(span, {key(rank, kCounters, 0), 0}, here.list->counters, true);
      }
    }
    // The host launches it when what it launched before has ended.
    if (machine_.serial && i > 0) graph_.edge(here.ends[i - 1], span.first);
    for (const StepId id : step.after) {
      if (id < 0 || id >= here.id) {
        fail(Fault::Kind::kDeadlock, says(span.first), " comes after #", id,
             ", which is not enqueued before it");
      }
      graph_.edge(here.ends[at(id)], span.first);
    }
    tail(here, step.lane) = span.first;
    std::visit([&](const auto& what) { take(here, what, span); }, step.what);
    here.ends[i] = span.last;
    if (span.last != span.first) tail(here, step.lane) = span.last;
    if (step.lane == Lane::kCaller && !step.unchained) here.last_chained = span.last;
  }
  // Arrivals come after the kernel that awaits them.
  for (const auto& [span, chunk] : here.awaited) await_counter(here, span, chunk, 1);
  if (chained) chain_[at(here.rank)] = here.last_chained;
  consume_results(here);
}

// All that was forked comes together again by events, as capturing asks for.
void Simulation::check_joins(Here& here) const {
  const std::vector<Step>& steps = here.list->steps;
  std::vector<bool> joined(steps.size(), false);
  std::map<Lane, bool> lanes;
  bool all = false;
  for (size_t i = steps.size(); i-- > 0;) {
    const Step& step = steps[i];
    if (std::holds_alternative<Join>(step.what)) all = true;
    if (std::holds_alternative<Fork>(step.what)) all = false;
    if (all || step.lane == Lane::kCaller) lanes[step.lane] = true;
    joined[i] = joined[i] || lanes[step.lane];
    if (!joined[i]) {
      fail(Fault::Kind::kRace, says(here.turn, here.rank, static_cast<StepId>(i)),
           " is not joined: the caller's stream goes on without it, and no CUDA graph can "
           "capture it");
    }
    lanes[step.lane] = true;
    for (const StepId id : step.after) {
      if (id >= 0 && static_cast<size_t>(id) < i) joined[at(id)] = true;
    }
  }
}

Simulation::Span Simulation::begin_step(Here& here) {
  const Node first = node(here);
  graph_.edge(tail(here, here.lane), first);
  return {first, first};
}

Graph::Node Simulation::end_of(Here& here, Span& span, const char* note) {
  span.last = node(here, note);
  graph_.edge(span.first, span.last);
  return span.last;
}

// The caller's work after the call: it reads results, writes over the input, and gives the call's
// memory to others.
void Simulation::consume_results(Here& here) {
  here.id = -1;
  here.lane = Lane::kCaller;
  const Node end = node(here, "what follows the call");
  follow(tail(here, Lane::kCaller), end);
  for (const Where& given :
       {Where{Buffer::kInput}, Where{Buffer::kIndices}, Where{Buffer::kIndices, 0, 1}}) {
    writes({end, end}, here, given, room(here, given));
  }
  for (const Scratch& scratch : here.list->scratch) {
    if (scratch.buffer != Buffer::kWindow) {
      writes({end, end}, here, {scratch.buffer}, scratch.bytes);
    }
  }
  const bool gathers = here.plan->problem.traits().gathers();
  if (gathers) writes({end, end}, here, {Buffer::kGathered}, room(here, {Buffer::kGathered}));
  const auto outputs = static_cast<int32_t>(std::max<size_t>(1, here.variant->weights.size()));
  for (int32_t i = 0; i < outputs; ++i) {
    const Where output = {Buffer::kOutput, 0, i};
    writes({end, end}, here, output, room(here, output));
  }
  const Here at_end = here;
  effect(end, [this, at_end, end] { expect(at_end, end); });
}

void Simulation::agree(const Turn& turn, int32_t number) const {
  const std::string first = communication((*turn.lists)[0]);
  for (int32_t rank = 1; rank < ranks_; ++rank) {
    const std::string own = communication((*turn.lists)[at(rank)]);
    if (own == first) continue;
    fail(Fault::Kind::kDisagreement, says(number, rank, -1),
         " communicates otherwise than rank 0:\n", own, "and rank 0:\n", first);
  }
}

}  // namespace overlap::steps
