// The checks once the calls have been taken apart: circles, races, SMs, results.
#include <algorithm>

#include "steps/list/fields.h"
#include "steps/proof/simulation.h"

namespace overlap::steps {
namespace {

constexpr const char* kNotThePlan =
    "no value of the plan mends that: take another collective or transport, and report the plan";

// The remedy for the writer of a program.
const char* remedy_of_program(Fault::Kind kind) {
  switch (kind) {
    case Fault::Kind::kDeadlock:
      return "let each transfer need only what comes before it";
    case Fault::Kind::kRace:
      return "add the tiles or the transfer to what the other one needs, or put both on one stream";
    case Fault::Kind::kResult:
      return "let every rank's rows be added once, and every row of the result be written";
    default:
      return "write one program for all ranks";
  }
}

}  // namespace

const char* Simulation::remedy(Fault::Kind kind) const {
  const bool program = plan::has_program(*turns_.front().plan);
  return program ? remedy_of_program(kind) : kNotThePlan;
}

std::string Simulation::says(int32_t turn, int32_t rank, StepId step) const {
  const std::string text = plan::message("rank ", rank, ", call ", turn);
  if (step < 0) return text;
  const Step& one = (*turns_[at(turn)].lists)[at(rank)].steps[at(step)];
  const char* const kind = std::visit([](const auto& what) { return name(what); }, one.what);
  return plan::message(text, ", step #", step, " (", kind, " on ", name(one.lane), ")");
}

std::string Simulation::says(Node node) const {
  const Label& label = labels_[at(node)];
  const std::string note = label.note[0] != '\0' ? std::string(", where it ") + label.note : "";
  if (label.step < 0) return says(label.turn, label.rank, -1) + ", " + label.note;
  return says(label.turn, label.rank, label.step) + note;
}

std::string Simulation::name_of(Key key) const {
  const int64_t index = key / 2 % 4096;
  const int64_t kind = key / 2 / 4096 % 64;
  const std::string rank = "rank " + std::to_string(key / 2 / 4096 / 64);
  switch (kind) {
    case kCallsEnded:
      return rank + "'s number of calls in slot " + std::to_string(index);
    case kArrivedFlag:
      return rank + "'s flag of rank " + std::to_string(index / 2);
    case kBlockFlag:
      return rank + "'s flags of blocks of rank " + std::to_string(index / 4);
    case kTileFlags:
      return rank + "'s flags of tiles";
    case kCounters:
      return rank + "'s counters";
    case kCallersTiles:
      return rank + "'s tiles of the caller's kernel";
    case kLowLatency:
      return rank + "'s low-latency buffer " + std::to_string(index % 2) + " of rank " +
             std::to_string(index / 2);
    default:
      return rank + "'s " + name(static_cast<Buffer>(kind)) +
             (kind == static_cast<int64_t>(Buffer::kSlot) ? " " + std::to_string(index) : "");
  }
}

void Simulation::check_circles() {
  if (graph_.close()) return;
  std::string text;
  for (const Node node : graph_.circle()) text += (text.empty() ? "" : "; for ") + says(node);
  fail(Fault::Kind::kDeadlock, "these wait for each other: ", text);
}

// A later call's number in place of what an earlier one waits for; not the other way round, as numbers only grow.
bool Simulation::flags_disturb(const Access& a, const Access& b) const {
  const int32_t first = labels_[at(a.first)].turn;
  const int32_t second = labels_[at(b.first)].turn;
  return first != second && (first < second ? b.write : a.write);
}

void Simulation::check_races() {
  std::sort(accesses_.begin(), accesses_.end(), [](const Access& a, const Access& b) {
    return std::pair(a.key, a.begin) < std::pair(b.key, b.begin);
  });
  for (size_t i = 0; i < accesses_.size(); ++i) {
    const Access& a = accesses_[i];
    for (size_t j = i + 1; j < accesses_.size(); ++j) {
      const Access& b = accesses_[j];
      if (b.key != a.key || b.begin >= a.end) break;
      if (!a.write && !b.write) continue;
      if (a.first == b.first && a.last == b.last) continue;
      if (a.flag && !flags_disturb(a, b)) continue;
      if (graph_.before(a.last, b.first) || graph_.before(b.last, a.first)) continue;
      const Access& from = a.write ? a : b;
      const Access& to = a.write ? b : a;
      fail(Fault::Kind::kRace, says(from.last), " writes ", name_of(a.key), " from ",
           std::max(a.begin, b.begin), " to ", std::min(a.end, b.end), " while ", says(to.last),
           to.write ? " writes it, too" : " reads it");
    }
  }
}

// SMs that others may hold when a step is to start: those that wait, at the most one on each lane. `ended`: of each
// holder, whether it ends in any case.
int32_t Simulation::held_beside(const Holder& one, const std::vector<bool>& ended,
                                std::string* who) const {
  std::map<Lane, const Holder*> most;
  for (size_t i = 0; i < holders_.size(); ++i) {
    const Holder& other = holders_[i];
    if (!other.waits || other.rank != one.rank || ended[i] || &other == &one) continue;
    if (graph_.before(other.last, one.first) || graph_.before(one.first, other.first)) continue;
    const Holder*& found = most[other.lane];
    if (found == nullptr || found->held < other.held) found = &other;
  }
  int32_t held = 0;
  for (const auto& [lane, other] : most) {
    // A warp keeps a cluster from the SM beside it, too.
    held += other->one_warp ? std::max(other->held, one.needed > 1 ? 2 : 1) : other->held;
    if (who != nullptr) *who += (who->empty() ? "" : "; ") + says(other->first);
  }
  return held;
}

// Whatever steps that wait have come to their SMs first, all continue: a step starts once all
// before it have ended and the steps that may never end leave it room; it ends once all that it
// waits for have started, or ended. The first calls are enough, as the later ones are alike.
void Simulation::check_progress() {
  constexpr int32_t kTurns = 3;
  std::erase_if(holders_, [&](const Holder& one) { return labels_[at(one.first)].turn >= kTurns; });
  const std::vector<bool> none(holders_.size(), false);
  const bool fit = std::all_of(holders_.begin(), holders_.end(), [&](const Holder& one) {
    return held_beside(one, none, nullptr) + one.needed <= machine_.sm_count;
  });
  if (fit) return;
  std::vector<bool> started = none;
  std::vector<bool> ended = none;
  const auto all_before = [&](const Holder& one, Node node) {
    for (size_t i = 0; i < holders_.size(); ++i) {
      if (&holders_[i] == &one) continue;
      if (!started[i] && graph_.before(holders_[i].first, node)) return false;
      if (!ended[i] && graph_.before(holders_[i].last, node)) return false;
    }
    return true;
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < holders_.size(); ++i) {
      const Holder& one = holders_[i];
      if (!started[i] && all_before(one, one.first) &&
          held_beside(one, ended, nullptr) + one.needed <= machine_.sm_count) {
        started[i] = changed = true;
      }
      if (started[i] && !ended[i] && all_before(one, one.last)) ended[i] = changed = true;
    }
  }
  for (size_t i = 0; i < holders_.size(); ++i) {
    const Holder& one = holders_[i];
    if (started[i] || !all_before(one, one.first)) continue;
    std::string who;
    const int32_t held = held_beside(one, ended, &who);
    const std::string what =
        plan::message(says(one.first), " takes ", one.needed, " of ", machine_.sm_count,
                      " SMs, and these, which may wait at that time, hold ", held, ": ", who,
                      ": lower max_ctas or lanes, or raise comm_sms");
    throw Found{{Fault::Kind::kProgress, what}};
  }
}

void Simulation::check_results() {
  for (const Node node : graph_.sequence()) {
    for (const auto& what : effects_[at(node)]) what();
  }
}

// The result of NCCL's collective on all ranks' memory. `calls`: of each rank.
void Simulation::share(Node hub, const std::vector<CommunicatorCall>& calls) {
  const Collective& step = *calls[0].step;
  const int64_t bytes = step.count * plan::moved_bytes(turns_[at(call_)].plan->problem);
  effect(hub, [=, this, &step] {
    const auto of_all = [&](size_t part) {
      std::vector<std::vector<Run>> all;
      for (const CommunicatorCall& call : calls) {
        const int64_t begin = call.source.offset + static_cast<int64_t>(part) * bytes;
        all.push_back(contents_[call.source.key].read(begin, bytes));
      }
      return all;
    };
    if (step.kind == plan::Collective::kAllGather || step.kind == plan::Collective::kExchange) {
      const std::vector<std::vector<Run>> parts = of_all(0);
      for (const CommunicatorCall& call : calls) {
        for (size_t rank = 0; rank < parts.size(); ++rank) {
          write(call.destination.behind(static_cast<int64_t>(rank) * bytes), parts[rank]);
        }
      }
      return;
    }
    const bool scatters = step.kind == plan::Collective::kReduceScatter;
    std::vector<std::vector<Run>> sums;
    for (size_t part = 0; part < (scatters ? calls.size() : 1); ++part) {
      sums.push_back(add(of_all(part), true, hub));
    }
    for (size_t rank = 0; rank < calls.size(); ++rank) {
      write(calls[rank].destination, sums[scatters ? rank : 0]);
    }
  });
}

// --- contents ---

std::vector<Run> Simulation::read(const Place& from, int64_t bytes, Node by) const {
  static const Contents nothing;
  const auto found = contents_.find(from.key);
  const Contents& contents = found != contents_.end() ? found->second : nothing;
  std::vector<Run> runs = contents.read(from.offset, bytes);
  for (const Run& run : runs) {
    if (run.content.space != Content::Space::kNothing) continue;
    fail(Fault::Kind::kResult, says(by), " reads what was never written, in ", name_of(from.key),
         " from ", from.offset, " to ", from.offset + bytes);
  }
  return runs;
}

void Simulation::copy(const Place& from, const Place& to, int64_t bytes, Node by) {
  write(to, read(from, bytes, by));
}

// Some columns of a row of tiles; the row is there once all of them are.
void Simulation::write_columns(const Place& to, const TileRows& rows, int32_t columns,
                               const std::vector<Run>& what, Node by) {
  if (rows.columns == columns) return write(to, what);
  BegunRow& row = begun_rows_[to.key][rows.tile_row];
  if (row.columns.empty()) row = {to.offset, what, std::vector<bool>(at(columns), false)};
  bool fits = row.place == to.offset && row.what == what;
  for (int32_t column = 0; column < rows.columns; ++column) {
    auto there = row.columns[at(rows.first_column + column)];
    fits = fits && !there;
    there = true;
  }
  if (!fits) {
    fail(Fault::Kind::kResult, says(by), " writes tiles of tile row ", rows.tile_row,
         " twice, or not beside the others, or of other ranks");
  }
  if (std::all_of(row.columns.begin(), row.columns.end(), [](bool there) { return there; })) {
    write(to, what);
  }
}

std::vector<Run> Simulation::product(const std::vector<Run>& inputs, int64_t from_row_bytes,
                                     int64_t to_row_bytes, int32_t weight, int32_t turn,
                                     Node by) const {
  std::vector<Run> made;
  for (const Run& run : inputs) {
    const bool rows = run.position % from_row_bytes == 0 && run.bytes % from_row_bytes == 0;
    if (run.content.space != Content::Space::kInput || run.content.call != turn || !rows) {
      fail(Fault::Kind::kResult, says(by), " computes with what are not rows of this call's input");
    }
    Content content = run.content;
    content.space = Content::Space::kProduct;
    content.weight = weight;
    made.push_back({run.bytes / from_row_bytes * to_row_bytes,
                    run.position / from_row_bytes * to_row_bytes, content});
  }
  return made;
}

std::vector<Run> Simulation::add(const std::vector<std::vector<Run>>& terms, bool by_library,
                                 Node by, bool commutes) {
  std::vector<Run> sum;
  std::vector<size_t> index(terms.size(), 0);
  std::vector<int64_t> used(terms.size(), 0);
  std::vector<Sum> parts(terms.size());
  while (index[0] < terms[0].size()) {
    int64_t bytes = terms[0][index[0]].bytes - used[0];
    for (size_t i = 1; i < terms.size(); ++i) {
      bytes = std::min(bytes, terms[i][index[i]].bytes - used[i]);
    }
    const Run& first = terms[0][index[0]];
    Content content = first.content;
    const int64_t position = first.position + used[0];
    bool nothing = false;
    for (size_t i = 0; i < terms.size(); ++i) {
      const Run& run = terms[i][index[i]];
      parts[i] = run.content.sum;
      nothing = nothing || run.content.space == Content::Space::kNothing;
      Content like = run.content;
      like.sum = content.sum;
      // Padding of parts is added to padding, and goes nowhere.
      const bool alike = like == content && run.position + used[i] == position &&
                         (!content.biased || terms.size() == 1);
      const bool filling = run.content.space == Content::Space::kNothing &&
                           content.space == Content::Space::kNothing;
      if (!alike && !filling && !(nothing && by_library)) {
        fail(Fault::Kind::kResult, says(by),
             " adds rows that do not belong together, or have their bias already");
      }
      used[i] += bytes;
      if (used[i] == run.bytes) {
        ++index[i];
        used[i] = 0;
      }
    }
    if (nothing) {
      sum.push_back({bytes, 0, {}});
      continue;
    }
    if (commutes) std::sort(parts.begin(), parts.end());
    content.sum = sums_.add(parts, by_library);
    if (sums_.twice(content.sum)) {
      fail(Fault::Kind::kResult, says(by), " adds what a rank contributes a second time");
    }
    const bool joins = !sum.empty() && sum.back().content == content &&
                       sum.back().position + sum.back().bytes == position;
    if (joins) {
      sum.back().bytes += bytes;
    } else {
      sum.push_back({bytes, position, content});
    }
  }
  return sum;
}

void Simulation::add_bias(std::vector<Run>& runs, Node by) const {
  for (Run& run : runs) {
    if (run.content.biased) fail(Fault::Kind::kResult, says(by), " adds the bias again");
    run.content.biased = true;
  }
}

void Simulation::expect_runs(const std::vector<Run>& runs, int64_t offset, Content::Space space,
                             int32_t weight, int64_t position, const std::set<int32_t>& ranks,
                             const Here& here, Node by, bool biased, const char* what) {
  int64_t place = 0;
  for (const Run& run : runs) {
    const Content& content = run.content;
    std::string wrong;
    if (content.space == Content::Space::kNothing) {
      wrong = "was never written";
    } else if (content.space != space || content.weight != weight ||
               run.position != position + place) {
      wrong = "has other rows";
    } else if (content.call != here.turn) {
      wrong = "is of call " + std::to_string(content.call);
    } else if (sums_.ranks(content.sum) != ranks) {
      wrong = "is of ranks";
      for (const int32_t rank : sums_.ranks(content.sum)) wrong += " " + std::to_string(rank);
      wrong += " in place of";
      for (const int32_t rank : ranks) wrong += " " + std::to_string(rank);
    } else if (content.biased != biased) {
      wrong = biased ? "has no bias" : "has a bias";
    }
    if (!wrong.empty()) {
      fail(Fault::Kind::kResult, says(by), " reads results, and its ", what, " from byte ",
           offset + place, " on ", wrong);
    }
    place += run.bytes;
  }
}

// The results, as the op's contract has them.
void Simulation::expect(const Here& here, Node by) {
  const plan::Problem& problem = here.plan->problem;
  using Space = Content::Space;
  const auto runs = [&](Where where, int64_t bytes) {
    return contents_[key(here, where)].read(where.offset, bytes);
  };
  if (problem.traits().rows_by_rank) {
    int64_t begin = 0;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      const std::vector<int64_t>& sent = (*here.call->variants)[at(peer)].send_rows;
      int64_t first = 0;
      for (int32_t rank = 0; rank < here.rank; ++rank) first += sent[at(rank)];
      const int64_t row = row_bytes(here, 0);
      const int64_t bytes = here.variant->receive_rows[at(peer)] * row;
      expect_runs(runs({Buffer::kOutput, begin}, bytes), begin, Space::kProduct, 0, first * row,
                  {peer}, here, by, false, "output");
      begin += bytes;
    }
    return;
  }
  if (problem.traits().gathers()) {
    const int64_t part = problem.m / ranks_;
    const auto weights = static_cast<int32_t>(std::max<size_t>(1, here.variant->weights.size()));
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const int64_t row = input_row_bytes(here);
      const int64_t begin = rank * part * row;
      expect_runs(runs({Buffer::kGathered, begin}, part * row), begin, Space::kInput, 0, begin,
                  {rank}, here, by, false, "gathered input");
      for (int32_t weight = 0; weight < weights; ++weight) {
        const int64_t width = row_bytes(here, weight);
        const int64_t first = rank * part * width;
        expect_runs(runs({Buffer::kOutput, first, weight}, part * width), first, Space::kProduct,
                    weight, first, {rank}, here, by, false, "output");
      }
    }
    return;
  }
  std::set<int32_t> all;
  for (int32_t rank = 0; rank < ranks_; ++rank) all.insert(all.end(), rank);
  const bool scatters = problem.traits().scatters();
  // By the framework's GEMM and one collective the product becomes the result, and a bias comes after the call.
  const bool one_after_the_other = here.plan->schedule == plan::Schedule::kSequential;
  const bool in_product = one_after_the_other && !scatters && !here.variant->finish;
  const bool biased = here.variant->bias && (!one_after_the_other || plan::over_peers(*here.plan));
  const int64_t bytes = (scatters ? problem.m / ranks_ : problem.m) * row_bytes(here, 0);
  const std::vector<Run> found = runs({in_product ? Buffer::kProduct : Buffer::kOutput}, bytes);
  expect_runs(found, 0, Space::kProduct, 0, scatters ? here.rank * bytes : 0, all, here, by, biased,
              "output");
  if (scatters) return;
  // Bitwise the same on all ranks: added in one order. A program may choose another one on each.
  if (plan::has_program(*here.plan)) return;
  results_.resize(turns_.size());
  std::vector<Run>& first = results_[at(here.turn)];
  if (first.empty()) first = found;
  const bool same = std::equal(
      first.begin(), first.end(), found.begin(), found.end(),
      [](const Run& a, const Run& b) { return a.bytes == b.bytes && a.content == b.content; });
  if (!same) {
    fail(Fault::Kind::kResult, says(by), " reads sums that another rank adds in another order");
  }
}

std::optional<Fault> find_fault(const std::vector<Turn>& turns, const plan::Machine& machine) {
  try {
    Simulation(turns, machine).run();
  } catch (const Found& found) {
    return found.fault;
  }
  return std::nullopt;
}

}  // namespace overlap::steps
