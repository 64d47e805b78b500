#include "steps/lower/hierarchy.h"

namespace overlap::steps {

HierarchicalReduction::HierarchicalReduction(const plan::Plan& plan, int32_t rank, List& list)
    : plan_(plan),
      at_(plan, rank),
      list_(list),
      levels_(plan, list),
      all_reduces_(plan.problem.traits().all_reduces()),
      peers_(plan::over_peers(plan)),
      row_bytes_(plan.problem.n * plan::moved_bytes(plan.problem)),
      heights_(plan::clique_rows(plan)),
      stride_(plan::clique_stride(plan)),
      chunks_(plan.chunks.size()),
      sent_(plan.chunks.size()) {
  int64_t first = 0;
  for (int32_t chunk = 0; chunk < static_cast<int32_t>(heights_.size()); ++chunk) {
    first_.push_back(std::exchange(first, first + heights_[at(chunk)]));
    far_first_.push_back(std::exchange(far_rows_, far_rows_ + grain(chunk)));
  }
}

void HierarchicalReduction::prepare() {
  levels_.add_communicators();
  if (peers_) list_.add_slot(plan::peer_slot_bytes(plan_));
  list_.add_scratch(Buffer::kPartial,
                    (peers_ ? 1 : 1 + at_.clique()) * stride_ + at_.cliques() * bytes(far_rows_));
}

// --- rows ---

int64_t HierarchicalReduction::height(int32_t chunk) const {
  return plan::chunk_rows(plan_, chunk).count();
}

// Rows that one clique adds up of what a rank does.
int64_t HierarchicalReduction::grain(int32_t chunk) const {
  return (heights_[at(chunk)] + at_.cliques() - 1) / at_.cliques();
}

// An all-reduce's last parts may have fewer rows, or none.
int64_t HierarchicalReduction::rows_of(int32_t chunk, int32_t place) const {
  const int64_t most = heights_[at(chunk)];
  return all_reduces_ ? std::clamp<int64_t>(height(chunk) - place * most, 0, most) : most;
}
int64_t HierarchicalReduction::rows_of(int32_t chunk, int32_t place, int32_t number) const {
  return std::clamp<int64_t>(rows_of(chunk, place) - number * grain(chunk), 0, grain(chunk));
}

// This rank's rows that the rank at `place` adds up for a clique.
Where HierarchicalReduction::cell(int32_t chunk, int32_t place, int32_t number) const {
  const Chunk& one = chunks_[at(chunk)];
  if (!all_reduces_) return one.parts[at(at_.rank(number, place))];
  const int64_t row = place * heights_[at(chunk)] + number * grain(chunk);
  return one.parts[0].behind(bytes(std::min(row, height(chunk))));
}

std::vector<HierarchicalReduction::Run> HierarchicalReduction::runs(int32_t chunk,
                                                                    int32_t place) const {
  if (all_reduces_) return {{cell(chunk, place, 0), 0, rows_of(chunk, place)}};
  std::vector<Run> all;
  for (int32_t number = 0; number < at_.cliques(); ++number) {
    all.push_back({cell(chunk, place, number), number * grain(chunk), grain(chunk)});
  }
  return all;
}

// --- memory ---

// Ranks of the clique receive there.
Where HierarchicalReduction::land(int32_t place, int64_t offset) const {
  if (peers_) return {Buffer::kSlot, offset, at_.rank(at_.number(), place)};
  return {Buffer::kPartial, stride_ + offset};
}

// The terms of rank `from`, as the clique counts, at rank `to`.
Where HierarchicalReduction::term(int32_t to, int32_t from, int32_t chunk) const {
  return land(to, from * stride_ + bytes(first_[at(chunk)]));
}
Where HierarchicalReduction::sums(int32_t chunk) const {
  return {Buffer::kPartial, bytes(first_[at(chunk)])};
}
Where HierarchicalReduction::far_term(int32_t number, int32_t chunk) const {
  const int64_t begin = (peers_ ? 1 : 1 + at_.clique()) * stride_;
  return {Buffer::kPartial, begin + bytes(number * far_rows_ + far_first_[at(chunk)])};
}

// --- within the clique ---

// Each rank's terms to the ranks that add them up.
void HierarchicalReduction::begin(int32_t chunk, Chunk where) {
  chunks_[at(chunk)] = std::move(where);
  Sent& sent = sent_[at(chunk)];
  if (!peers_) {
    sent.last = copy_own(chunk, Lane::kSide0, {});
    if (at_.clique() > 1) sent.last = list_.add(Lane::kSide0, terms(chunk));
    return;
  }
  send_terms(chunk);
  sent.signal = signals_++;
  sent.last = list_.add(Lane::kSide0, Signal{sent.signal});
}

// This rank's own terms; the last step. A rank alone in its clique adds nothing up.
StepId HierarchicalReduction::copy_own(int32_t chunk, Lane lane, std::vector<StepId> after) {
  const Where own = at_.clique() == 1 ? sums(chunk) : term(at_.place(), at_.place(), chunk);
  StepId last = list_.last();
  for (const Run& run : runs(chunk, at_.place())) {
    if (run.rows == 0) continue;
    const Copy copy = {run.source, own.behind(bytes(run.landing)), bytes(run.rows)};
    last = list_.add(lane, copy, std::exchange(after, {}));
  }
  return last;
}

void HierarchicalReduction::send_terms(int32_t chunk) {
  for (const int32_t place : at_.places()) {
    for (const Run& run : runs(chunk, place)) {
      if (run.rows == 0) continue;
      const Where to = term(place, at_.place(), chunk).behind(bytes(run.landing));
      list_.add_of_chunk(chunk, Lane::kSide0, Copy{run.source, to, bytes(run.rows)});
    }
  }
}

// The same as messages.
SendReceive HierarchicalReduction::terms(int32_t chunk) const {
  SendReceive messages = levels_.messages_within();
  for (const int32_t place : at_.places()) {
    const int32_t peer = at_.rank(at_.number(), place);
    for (const Run& run : runs(chunk, place)) {
      add_message(messages.sends, peer, run.source, bytes(run.rows));
    }
    for (const Run& run : runs(chunk, at_.place())) {
      add_message(messages.receives, peer,
                  term(at_.place(), place, chunk).behind(bytes(run.landing)), bytes(run.rows));
    }
  }
  return messages;
}

// Sums of the clique's terms; the step after which they are there.
StepId HierarchicalReduction::add_within(int32_t chunk) {
  const Sent& sent = sent_[at(chunk)];
  const int64_t rows = rows_of(chunk, at_.place());
  if (at_.clique() == 1 || rows == 0) return sent.last;
  if (peers_) {
    copy_own(chunk, Lane::kSide1, {sent.last});
    list_.add(Lane::kSide1, WaitForPeers{sent.signal});
  }
  AddTerms sum = {term(at_.place(), 0, chunk), sums(chunk), rows, plan_.resources.finish_ctas};
  sum.terms = at_.clique();
  sum.stride = stride_;
  sum.bias = false;
  return list_.add(Lane::kSide1, sum, peers_ ? std::vector<StepId>{} : std::vector{sent.last});
}

// --- between cliques ---

StepId HierarchicalReduction::finish(int32_t chunk) {
  const StepId last = exchange(chunk, add_within(chunk));
  if (!all_reduces_) return last;
  gather_across(chunk);
  return gather_within(chunk);
}

// Sums of each clique to the one that adds them up, and there into the result.
StepId HierarchicalReduction::exchange(int32_t chunk, StepId after) {
  const int32_t own = at_.number();
  const int64_t rows = rows_of(chunk, at_.place(), own);
  SendReceive messages = levels_.messages_across(chunk);
  for (const int32_t number : at_.numbers()) {
    const int32_t peer = at_.rank(number, at_.place());
    add_message(messages.sends, peer, sums(chunk).behind(bytes(number * grain(chunk))),
                bytes(rows_of(chunk, at_.place(), number)));
    add_message(messages.receives, peer, far_term(number, chunk), bytes(rows));
  }
  // Timelines show these of all messages.
  const StepId sent =
      list_.add_of_chunk(chunk, levels_.across(chunk), std::move(messages), {after});
  return rows == 0 ? sent : add_across(chunk);
}

StepId HierarchicalReduction::add_across(int32_t chunk) {
  const int32_t own = at_.number();
  const Lane lane = levels_.across(chunk);
  const int64_t rows = rows_of(chunk, at_.place(), own);
  const Where own_sums = sums(chunk).behind(bytes(own * grain(chunk)));
  const Where result = all_reduces_ ? cell(chunk, at_.place(), own) : chunks_[at(chunk)].result;
  list_.add(lane, Copy{own_sums, far_term(own, chunk), bytes(rows)});
  return list_.add(lane, AddTerms{far_term(0, chunk), result, rows, plan_.resources.finish_ctas,
                                  at_.cliques(), bytes(far_rows_), false});
}

void HierarchicalReduction::gather_across(int32_t chunk) {
  const int32_t own = at_.number();
  SendReceive messages = levels_.messages_across(chunk);
  for (const int32_t number : at_.numbers()) {
    const int32_t peer = at_.rank(number, at_.place());
    add_message(messages.sends, peer, cell(chunk, at_.place(), own),
                bytes(rows_of(chunk, at_.place(), own)));
    add_message(messages.receives, peer, cell(chunk, at_.place(), number),
                bytes(rows_of(chunk, at_.place(), number)));
  }
  list_.add(levels_.across(chunk), std::move(messages));
}

// All sums of this rank to its clique.
StepId HierarchicalReduction::gather_within(int32_t chunk) {
  const Where own = cell(chunk, at_.place(), 0);
  const int64_t own_bytes = bytes(rows_of(chunk, at_.place()));
  StepId last = list_.last();
  if (at_.clique() == 1) return last;
  if (!peers_) {
    SendReceive messages = levels_.messages_within();
    for (const int32_t place : at_.places()) {
      const int32_t peer = at_.rank(at_.number(), place);
      add_message(messages.sends, peer, own, own_bytes);
      add_message(messages.receives, peer, cell(chunk, place, 0), bytes(rows_of(chunk, place)));
    }
    return list_.add(Lane::kSide0, std::move(messages), {last});
  }
  for (const int32_t place : at_.places()) {
    if (own_bytes == 0) break;
    const Where to = term(place, at_.clique() + at_.place(), chunk);
    last = list_.add_of_chunk(chunk, levels_.across(chunk), Copy{own, to, own_bytes});
  }
  list_.add(Lane::kSide0, Signal{signals_}, {last});
  last = list_.add(Lane::kCopy, WaitForPeers{signals_++}, {last});
  for (const int32_t place : at_.places()) {
    const int64_t arrived = bytes(rows_of(chunk, place));
    if (arrived == 0) continue;
    const Where from = term(at_.place(), at_.clique() + place, chunk);
    last = list_.add(Lane::kCopy, Copy{from, cell(chunk, place, 0), arrived});
  }
  return last;
}

}  // namespace overlap::steps
