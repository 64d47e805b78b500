// Transfers of a plan's own over peers.
//
// What a transfer moves lands in a slot first, in a place of its own: a push's in that of the destination, where the source
// stores it, a pull's in that of the source, where the destination reads it. A flag of the transfer says that it is there. So
// nobody waits for room, and no rank touches memory of another but slots.
//
// Where all transfers go by SMs, one kernel makes them, waits included:
//
//   caller | fork | GEMM: chunk 0, 1, 2 ... signal [A] ......................... | join | result, bias |
//   side   |      | interpreter: wait 0 [A], store, flag [B], wait [B], add, ... | ^
//
// Else each is a step of its stream's lane: a copy by the copy engine, the interpreter with this one transfer, or NCCL's.
#include <bit>

#include "steps/program_steps.h"

namespace overlap::steps {
namespace {

using plan::Engine;
using plan::Way;

// Of the interpreter's tables (kernels/peer/interpreter.h).
constexpr size_t kMaxHalves = 384;
constexpr size_t kMaxWaits = 768;

class OverPeers : ProgramSteps {
 public:
  OverPeers(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
            const Variant& variant)
      : ProgramSteps(plan, rank, machine, variant),
        ranks_(plan.problem.world_size),
        in_lanes_(std::any_of(program_.transfers.begin(), program_.transfers.end(),
                              [](const Transfer& one) {
                                return one.by == Engine::kCopyEngine || one.by == Engine::kNccl;
                              })),
        blocks_(plan::interpreter_blocks(plan)),
        lane_waited_for_slots_(at(lanes_), false),
        seen_(at(lanes_)) {
    counts_ = !in_lanes_;
    place_landings();
  }

  StepList lower() {
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      const bool calls = std::any_of(
          program_.transfers.begin(), program_.transfers.end(), [&](const Transfer& one) {
            return one.by == Engine::kNccl && one.way != Way::kCopy && one.stream == lane;
          });
      if (calls) list_.made.communicators.push_back({plan_.chunks[0].max_ctas, lane});
    }
    list_.add_slot(slot_bytes_, hears_all());
    begin(in_lanes_ ? lanes_ : 1);
    if (in_lanes_) {
      communicate_in_lanes();
    } else {
      communicate_in_one_kernel();
    }
    if (gathers_) {
      compute_arrived([&](const std::set<size_t>& writers) {
        return in_lanes_ ? arrivals(writers) : await_counters(writers);
      });
    }
    list_.add(Lane::kCaller, Join{});
    if (!ends_in_kernel_) list_.add(Lane::kCaller, EndCall{});
    return end();
  }

 private:
  // --- slots ---

  // In whose slot a transfer lands.
  static int32_t owner(const Transfer& one) {
    return one.way == Way::kPull ? one.source.rank : one.destination.rank;
  }
  static bool lands(const Transfer& one) {
    return one.way != Way::kCopy && one.by != Engine::kNccl;
  }

  void place_landings() {
    std::vector<int64_t> used(at(ranks_), 0);
    for (const Transfer& one : program_.transfers) {
      landings_.push_back(0);
      if (to_all_ || !lands(one)) continue;
      int64_t& end = used[at(owner(one))];
      landings_.back() = end;
      end += round_up(one.source.area.rows * one.source.area.columns * element_bytes_);
    }
    slot_bytes_ = std::max(kAlignment, *std::max_element(used.begin(), used.end()));
    if (!to_all_) return;
    // Two ranks know all messages; of more, no pair knows those of another, but what the ranks have told each other.
    const int64_t longest =
        ranks_ == 2 ? longest_message(plan_, rank_, variant_.send_rows, variant_.receive_rows)
                    : variant_.longest_message;
    room_ =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(longest, kAlignment))));
    slot_bytes_ = 2 * ranks_ * room_;
  }
  static int64_t round_up(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  Where landing(size_t number) const {
    const Transfer& one = program_.transfers[number];
    if (!to_all_) return {Buffer::kSlot, landings_[number], owner(one)};
    // Messages that are pushed, and behind them those that wait to be pulled, by the rank at the other end.
    const bool pulled = one.way == Way::kPull;
    const int64_t place = pulled ? ranks_ + one.destination.rank : one.source.rank;
    const Region& own = own_side(one);
    Region whole = own;
    whole.area.row -= own.area.row % plan::kMessageShares;
    const int64_t row = rows_of(own).begin - rows_of(whole).begin;
    return {Buffer::kSlot, place * room_ + row * row_bytes_, owner(one)};
  }

  // Whether each rank awaits a flag of every other one.
  bool hears_all() const {
    if (to_all_) return false;  // messages may be empty
    std::set<std::pair<int32_t, int32_t>> pairs;
    for (const Transfer& one : program_.transfers) {
      if (lands(one)) pairs.insert({one.source.rank, one.destination.rank});
    }
    return static_cast<int32_t>(pairs.size()) == ranks_ * (ranks_ - 1);
  }

  const Region& own_side(const Transfer& one) const {
    return one.source.rank == rank_ ? one.source : one.destination;
  }
  int32_t other_rank(const Transfer& one) const {
    return one.source.rank == rank_ ? one.destination.rank : one.source.rank;
  }
  int32_t flag(size_t number) const { return static_cast<int32_t>(number) * blocks_; }

  // --- transfers as halves ---

  Half half(size_t number, bool sends) const {
    const Transfer& one = program_.transfers[number];
    Half made;
    made.flag = flag(number);
    made.rows = height(own_side(one));
    made.row_bytes = width(own_side(one));
    if (one.way == Way::kCopy) {
      made.source = place(one.source);
      made.destination = place(one.destination);
      made.source_stride = made.destination_stride = row_bytes_;
      made.adds = one.reduces;
    } else if (sends) {
      made.source = place(one.source);
      made.source_stride = row_bytes_;
      made.destination = landing(number);
      made.destination_stride = made.row_bytes;
      made.to = one.destination.rank;
    } else {
      made.source = landing(number);
      made.source_stride = made.row_bytes;
      made.destination = place(one.destination);
      made.destination_stride = row_bytes_;
      made.adds = one.reduces;
      made.from = one.source.rank;
    }
    return made;
  }

  // Of a round's transfers those that this rank sends, and then those that it gets.
  template <typename Send, typename Receive>
  void each_half(const std::vector<size_t>& transfers, Send send, Receive receive) {
    for (const size_t i : transfers) {
      const Transfer& one = program_.transfers[i];
      if (lands(one) && one.source.rank == rank_ && height(one.source) > 0) send(i);
    }
    for (const size_t i : transfers) {
      const Transfer& one = program_.transfers[i];
      if (lands(one) && one.destination.rank == rank_ && height(one.destination) > 0) receive(i);
    }
  }

  // --- each transfer as a step ---

  void communicate_in_lanes() {
    for (const auto& [round, transfers] : own_rounds()) {
      if (program_.transfers[transfers[0]].way == Way::kCopy) {
        for (const size_t i : transfers) copy(i);
        continue;
      }
      std::vector<size_t> by_nccl;
      for (const size_t i : transfers) {
        if (!lands(program_.transfers[i])) by_nccl.push_back(i);
      }
      bool called = false;
      const auto call = [&] {
        if (!std::exchange(called, true) && !by_nccl.empty()) exchange(by_nccl);
      };
      each_half(
          transfers, [&](size_t i) { send(i); },
          [&](size_t i) {
            call();
            receive(i);
          });
      call();
    }
  }

  void send(size_t number) {
    const Transfer& one = program_.transfers[number];
    const Lane lane = side_lane(one.stream);
    std::vector<StepId> after;
    await_needs(number, lane, after);
    const Half sent = half(number, true);
    list_.communicates = calls_++;
    if (one.by != Engine::kSms && !lane_waited_for_slots_[at(one.stream)]) {
      lane_waited_for_slots_[at(one.stream)] = true;
      list_.add(lane, WaitForSlots{}, std::exchange(after, {}));
    }
    if (one.by == Engine::kSms) {
      left_[number] = interpret(sent, lane, after);
    } else {
      add_copy(sent, lane, after);
      left_[number] = list_.add(lane, Announce{sent.flag, *sent.to});
    }
    list_.communicates = -1;
  }

  void receive(size_t number) {
    const Transfer& one = program_.transfers[number];
    const Lane lane = side_lane(one.stream);
    std::vector<StepId> after;
    await_needs(number, lane, after);
    await_place(one, lane, after);
    Half put = half(number, false);
    if (one.by == Engine::kSms) {
      arrived_[number] = interpret(put, lane, after);
      return;
    }
    list_.add_held(lane, Await{put.flag, one.source.rank}, std::exchange(after, {}));
    if (put.source.index != rank_ && put.adds) {
      // What is added lies at home.
      Half fetched = put;
      fetched.destination = stage(put.rows * put.row_bytes);
      fetched.destination_stride = put.row_bytes;
      fetched.adds = false;
      add_copy(fetched, lane, {});
      put.source = fetched.destination;
    }
    arrived_[number] = add_copy(put, lane, {});
  }

  StepId interpret(const Half& one, Lane lane, const std::vector<StepId>& after) {
    Interpret step;
    step.blocks = blocks_;
    step.halves = {one};
    return list_.add_held(lane, step, after);
  }

  StepId add_copy(const Half& one, Lane lane, std::vector<StepId> after) {
    const bool dense =
        one.source_stride == one.row_bytes && one.destination_stride == one.row_bytes;
    if (!one.adds && (dense || one.rows == 1)) {
      return list_.add(lane, Copy{one.source, one.destination, one.rows * one.row_bytes},
                       std::move(after));
    }
    return list_.add(lane,
                     CopyRows{one.source, one.source_stride, one.destination,
                              one.destination_stride, one.rows, one.row_bytes, one.adds},
                     std::move(after));
  }

  // --- all transfers in one kernel ---

  // A half that is in the table, and what it touches of this rank's memory beside slots.
  struct Made {
    size_t transfer = 0;
    bool reads = false;
    bool writes = false;
    size_t place = 0;  // in the launch
  };

  void communicate_in_one_kernel() {
    if (!to_all_) list_.made.counters = static_cast<int32_t>(plan_.chunks.size());
    if (gathers_) list_.made.counters = 0;
    counter_of_.assign(2 * program_.transfers.size(), -1);
    for (const auto& [round, transfers] : own_rounds()) {
      for (const size_t i : transfers) {
        if (program_.transfers[i].way == Way::kCopy) add_half(i, true, true);
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

  void add_launch() {
    launch_.streams = lanes_;
    launch_.blocks = blocks_;
    list_.communicates = calls_++;
    list_.add_held(Lane::kSide0, std::exchange(launch_, {}));
    list_.communicates = -1;
    launch_waits_ = 0;
    made_.clear();
  }

  void add_half(size_t number, bool reads, bool writes) {
    const Transfer& one = program_.transfers[number];
    Half next = half(number, reads);
    next.stream = one.stream;
    next.waits = waits(number, reads, writes);
    const size_t count = launch_waits_ + next.waits.size();
    if (launch_.halves.size() == kMaxHalves || count > kMaxWaits) {
      // What the launch before has done needs no wait.
      add_launch();
      next.waits = waits(number, reads, writes);
    }
    for (const CounterWait& wait : next.waits) seen_[at(one.stream)].insert(wait.counter);
    launch_waits_ += next.waits.size();
    const Made made = {number, reads, writes, launch_.halves.size()};
    launch_.halves.push_back(std::move(next));
    made_.push_back(made);
    // For the GEMM of what has arrived.
    if (gathers_ && writes && one.destination.memory == Memory::kGathered) (void)counter(made);
  }

  // The counter of a half of this launch.
  int32_t counter(const Made& made) {
    int32_t& known = counter_of_[2 * made.transfer + (made.writes ? 1 : 0)];
    if (known < 0) {
      known = list_.made.counters++;
      launch_.halves[made.place].counter = known;
    }
    return known;
  }

  std::vector<CounterWait> waits(size_t number, bool reads, bool writes) {
    const Transfer& one = program_.transfers[number];
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
      if (to_all_) {
        for (const auto& [cut, counter] : piece_counters_) {
          if (area.row <= cut && cut < area.row + area.rows) add(counter, 1);
        }
        return;
      }
      for (const int32_t chunk : plan::chunks_in(plan_, area)) {
        add(chunk, plan_.chunks[at(chunk)].tiles);
      }
    };
    if (reads) {
      for (const Rectangle& area : one.tiles) tiles(area);
    }
    if (writes && one.destination.memory == Memory::kProduct) tiles(one.destination.area);
    for (const Made& before : made_) {
      const Transfer& other = program_.transfers[before.transfer];
      const bool needed = other.stream != one.stream &&
                          std::find(one.behind.begin(), one.behind.end(),
                                    static_cast<int32_t>(before.transfer)) != one.behind.end();
      if (needed || disturbs(before, {number, reads, writes, 0})) add(counter(before), blocks_);
    }
    return all;
  }

  // Whether two halves touch the same data, of which one writes, and not by the same blocks one after the other.
  bool disturbs(const Made& a, const Made& b) const {
    const Transfer& first = program_.transfers[a.transfer];
    const Transfer& second = program_.transfers[b.transfer];
    const auto apart = [&](const Region& x, const Region& y) {
      const bool overlap = x.memory == y.memory && x.area.row < y.area.row + y.area.rows &&
                           y.area.row < x.area.row + x.area.rows &&
                           x.area.column < y.area.column + y.area.columns &&
                           y.area.column < x.area.column + x.area.columns;
      return overlap && !(first.stream == second.stream && x.area == y.area);
    };
    return (a.writes && b.reads && apart(first.destination, second.source)) ||
           (a.writes && b.writes && apart(first.destination, second.destination)) ||
           (a.reads && b.writes && apart(first.source, second.destination));
  }

  std::vector<StepId> await_counters(const std::set<size_t>& writers) {
    for (const size_t i : writers) {
      list_.add(Lane::kCaller, WaitForTiles{counter_of_[2 * i + 1], blocks_});
    }
    return {};
  }

  const int32_t ranks_;
  const bool in_lanes_;
  const int32_t blocks_;           // of each stream of the interpreter
  std::vector<int64_t> landings_;  // where each transfer's is in its slot
  int64_t slot_bytes_ = 0;
  int64_t room_ = 0;  // of an all-to-all's message
  std::vector<bool> lane_waited_for_slots_;
  bool ends_in_kernel_ = false;
  Interpret launch_;
  size_t launch_waits_ = 0;
  std::vector<Made> made_;  // of this launch
  std::vector<int32_t>
      counter_of_;  // of each transfer's halves, the one that reads and the one that writes here
  std::vector<std::set<int32_t>> seen_;  // counters that a stream has waited for
};

}  // namespace

StepList lower_program_over_peers(const plan::Plan& plan, int32_t rank,
                                  const plan::Machine& machine, const Variant& variant) {
  return OverPeers(plan, rank, machine, variant).lower();
}

}  // namespace overlap::steps
