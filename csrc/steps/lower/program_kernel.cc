// All transfers of a program over peers in one kernel, waits included.
//
//   caller | fork | GEMM: chunk 0, 1, 2 ... signal [A] ......................... | join | result, bias |
//   side   |      | interpreter: wait 0 [A], store, flag [B], wait [B], add, ... | ^
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

// The limits of the interpreter's tables (kernels/peer/interpreter.h).
constexpr size_t kMaxHalves = 384;
constexpr size_t kMaxWaits = 768;

}  // namespace

// A transfer on its way into a slot (`sends`), or out of it; or a copy.
Half ProgramBuilder::half(size_t number, bool sends, Where landing) const {
  const Transfer& one = transfer(number);
  Half made;
  made.flag = static_cast<int32_t>(number) * blocks_;
  made.rows = places_.height(places_.own_side(one));
  made.row_bytes = places_.width(places_.own_side(one));
  if (one.way == Way::kCopy) {
    made.source = places_.place(one.source);
    made.destination = places_.place(one.destination);
    made.source_stride = made.destination_stride = places_.row_bytes;
    made.adds = one.reduces;
  } else if (sends) {
    made.source = places_.place(one.source);
    made.source_stride = places_.row_bytes;
    made.destination = landing;
    made.destination_stride = made.row_bytes;
    made.to = one.destination.rank;
  } else {
    made.source = landing;
    made.source_stride = made.row_bytes;
    made.destination = places_.place(one.destination);
    made.destination_stride = places_.row_bytes;
    made.adds = one.reduces;
    made.from = one.source.rank;
  }
  return made;
}

void ProgramBuilder::communicate_in_one_kernel() {
  if (!places_.to_all) list_.made.counters = static_cast<int32_t>(plan_.chunks.size());
  if (places_.gathers) list_.made.counters = 0;
  for (const auto& [round, transfers] : own_rounds()) {
    for (const size_t i : transfers) {
      if (transfer(i).way == Way::kCopy) add_half(i, true, true);
    }
    each_half(
        transfers, [&](size_t i) { add_half(i, true, false); },
        [&](size_t i) { add_half(i, false, true); });
  }
  if (!launch_.halves.empty()) {
    launch_.ends_call = ends_in_kernel_ = true;
    add_launch();
  }
}

void ProgramBuilder::add_launch() {
  launch_.streams = lanes_;
  launch_.blocks = blocks_;
  list_.communicates = calls_++;
  list_.add_held(Lane::kSide0, std::exchange(launch_, {}));
  list_.communicates = -1;
  launch_waits_ = 0;
  made_.clear();
}

void ProgramBuilder::add_half(size_t number, bool reads, bool writes) {
  const Transfer& one = transfer(number);
  Half next = half(number, reads, one.way == Way::kCopy ? Where{} : places_.landing(number));
  next.stream = one.stream;
  next.waits = waits(number, reads, writes);
  const size_t count = launch_waits_ + next.waits.size();
  if (launch_.halves.size() == kMaxHalves || count > kMaxWaits) {
    // The work of the launch before needs no wait.
    add_launch();
    next.waits = waits(number, reads, writes);
  }
  for (const CounterWait& wait : next.waits) seen_[at(one.stream)].insert(wait.counter);
  launch_waits_ += next.waits.size();
  const Made made = {number, reads, writes, launch_.halves.size()};
  launch_.halves.push_back(std::move(next));
  made_.push_back(made);
  // For the GEMM of what has arrived.
  if (places_.gathers && writes && one.destination.memory == Memory::kGathered) (void)counter(made);
}

// The counter of a half of this launch.
int32_t ProgramBuilder::counter(const Made& made) {
  int32_t& known = counter_of_[2 * made.transfer + (made.writes ? 1 : 0)];
  if (known < 0) {
    known = list_.made.counters++;
    launch_.halves[made.place].counter = known;
  }
  return known;
}

std::vector<CounterWait> ProgramBuilder::waits(size_t number, bool reads, bool writes) {
  const Transfer& one = transfer(number);
  const std::set<int32_t>& seen = seen_[at(one.stream)];
  std::vector<CounterWait> all;
  const auto add = [&](int32_t counter, int32_t count) {
    const bool known = seen.count(counter) != 0 ||
                       std::any_of(all.begin(), all.end(), [&](const CounterWait& wait) {
                         return wait.counter == counter;
                       });
    if (!known) all.push_back({counter, count});
  };
  const auto tiles = [&](const Rectangle& area) {
    if (places_.to_all) {
      for (const auto& [cut, counter] : piece_counters_) {
        if (area.row <= cut && cut < area.row + area.rows) add(counter, 1);
      }
      return;
    }
    for (const int32_t chunk : plan::chunks_in(plan_, area)) {
      add(chunk, tiles_of(chunk));
    }
  };
  if (reads) {
    for (const Rectangle& area : one.tiles) tiles(area);
  }
  if (writes && one.destination.memory == Memory::kProduct) tiles(one.destination.area);
  for (const Made& before : made_) {
    const Transfer& other = places_.transfers[before.transfer];
    const bool needed = other.stream != one.stream &&
                        std::find(one.behind.begin(), one.behind.end(),
                                  static_cast<int32_t>(before.transfer)) != one.behind.end();
    if (needed || disturbs(before, {number, reads, writes, 0})) add(counter(before), blocks_);
  }
  return all;
}

// True if two halves touch the same data, at least one writes, and not by the same blocks one after
// the other.
bool ProgramBuilder::disturbs(const Made& a, const Made& b) const {
  const Transfer& first = places_.transfers[a.transfer];
  const Transfer& second = places_.transfers[b.transfer];
  const auto apart = [&](const Region& x, const Region& y) {
    return x.memory == y.memory && x.area.overlaps(y.area) &&
           !(first.stream == second.stream && x.area == y.area);
  };
  return (a.writes && b.reads && apart(first.destination, second.source)) ||
         (a.writes && b.writes && apart(first.destination, second.destination)) ||
         (a.reads && b.writes && apart(first.source, second.destination));
}

}  // namespace overlap::steps
