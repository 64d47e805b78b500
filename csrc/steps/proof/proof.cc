// The calls that a plan's proof goes through, and what all ranks must do alike.
#include "steps/proof/proof.h"

#include <algorithm>
#include <sstream>

#include "plan/templates.h"
#include "steps/proof/simulation.h"

namespace overlap::steps {
namespace {

// The calls that a plan is proved over: plain ones in a row, on two streams; and the replays of a graph of one call,
// which uses one slot again and again, with a plain call in the same slot between them.
std::vector<Turn> in_a_row(const Ranks& ranks, const std::vector<StepList>& lists) {
  std::vector<Turn> turns;
  SlotTurns slots;
  for (const int32_t stream : {0, 0, 1, 0}) {
    turns.push_back({&ranks.plan, &ranks.variants, &lists, stream, 0, false});
    slots.next(turns.back());
  }
  return turns;
}

// A call that leaves slots of this number of bytes busy for as long as one can: an all-gather by one kernel, whose end on a rank
// says nothing of its peers' reads. Each byte that the plan's calls use is one that it reads.
struct Gather {
  Gather(const Ranks& ranks, int64_t slot_bytes) {
    constexpr int64_t kRow = 16;
    const auto world = static_cast<int32_t>(ranks.variants.size());
    plan::Problem problem;
    problem.op = plan::Op::kAllGatherGemm;
    problem.world_size = world;
    problem.m = world;
    problem.n = kRow;
    problem.k = (slot_bytes / kRow + 1) * kRow;
    made = {plan::make_at_once(problem, plan::Kernel::kLibrary), ranks.machine,
            std::vector<Variant>(ranks.variants.size(), Variant{.compute = Compute::kLibrary})};
    lists = lower_all(made, false);
    // Places that a rank does not write to itself come last: the first place is the next rank's.
    for (int32_t rank = 0; rank < world; ++rank) {
      auto& pieces = std::get<PeerCollective>(lists[at(rank)].steps[0].what).pieces;
      for (int32_t peer = 0; peer < world; ++peer) {
        Piece& piece = pieces[at(peer)];
        const auto place = [&](int32_t owner, int32_t writer) {
          return (writer - owner - 1 + world) % world * piece.bytes;
        };
        piece.received.offset = place(rank, peer);
        if (piece.destination) piece.destination->offset = place(peer, rank);
      }
    }
  }
  Ranks made;
  std::vector<StepList> lists;
};

std::vector<Turn> replayed(const Ranks& ranks, const std::vector<StepList>& lists,
                           const Gather& gather) {
  const Turn own = {&ranks.plan, &ranks.variants, &lists, 0, 0, true};
  const Turn other = {&gather.made.plan, &gather.made.variants, &gather.lists, 0, 0, true};
  return {own, own, other, own};
}

}  // namespace

void SlotTurns::next(Turn& turn, int32_t graph) {
  const StepList& list = turn.lists->front();
  if (!list.takes_slot) return;
  const bool replays = captured_ && graph == kEager;
  turn.slot = calls_++ % 2;
  turn.slots_may_be_busy = !last_hears_all_ || last_graph_ != graph || replays;
  last_hears_all_ = list.hears_all;
  last_graph_ = graph;
  captured_ = captured_ || graph != kEager;
}

std::vector<StepList> lower_all(const Ranks& ranks, bool captured) {
  std::vector<StepList> lists;
  for (size_t rank = 0; rank < ranks.variants.size(); ++rank) {
    Variant variant = ranks.variants[rank];
    variant.captured = captured;
    lists.push_back(lower(ranks.plan, static_cast<int32_t>(rank), ranks.machine, variant));
  }
  return lists;
}

std::optional<Fault> find_fault(const Ranks& ranks) {
  return find_fault(ranks, lower_all(ranks, false), lower_all(ranks, true));
}

std::optional<Fault> find_fault(const Ranks& ranks, const std::vector<StepList>& plain,
                                const std::vector<StepList>& captured) {
  const plan::Problem& problem = ranks.plan.problem;
  const bool alltoall = problem.traits().rows_by_rank;
  if ((problem.m == 0 && !alltoall) || problem.n == 0 || problem.k == 0) return std::nullopt;
  if (auto fault = find_fault_in_a_row(ranks, plain)) return fault;
  if (captured[0].takes_slot) {
    return find_fault(replayed(ranks, captured, Gather(ranks, captured[0].slot_bytes)),
                      ranks.machine);
  }
  // Without slots a graph's calls are as others, except for windows, which they do not have.
  if (!ranks.plan.resources.window) return std::nullopt;
  return find_fault_in_a_row(ranks, captured);
}

std::optional<Fault> find_fault_in_a_row(const Ranks& ranks, const std::vector<StepList>& lists) {
  return find_fault(in_a_row(ranks, lists), ranks.machine);
}

plan::Machine usual_machine(const plan::Plan& plan) {
  plan::Machine machine;
  if (plan.transport().on_cpu) return machine;
  machine.arch = 90;
  machine.sm_count = 132;
  machine.sm_gflops = 5600.0;
  machine.kernel_arch = 90;
  machine.link_latency_us = 9.0;
  machine.link_gbps = 260.0;
  machine.windows = true;
  machine.peer_gbps = 365.0;
  return machine;
}

std::optional<Fault> find_fault(const plan::Plan& plan, const plan::Machine& machine) {
  const int32_t world = plan.problem.world_size;
  if (world > plan::kMaxProvedRanks) return std::nullopt;
  const bool kernel = takes_by_default(plan);
  Ranks ranks = {plan, machine, std::vector<Variant>(at(world))};
  if (plan.problem.traits().rows_by_rank) {
    // Rows of different numbers, none among them.
    for (int32_t from = 0; from < world; ++from) {
      for (int32_t to = 0; to < world; ++to) {
        const int64_t rows = (from * 5 + to * 3) % 7 * int64_t{700};
        ranks.variants[at(from)].send_rows.push_back(rows);
        ranks.variants[at(to)].receive_rows.push_back(rows);
      }
    }
    int64_t longest = 0;
    for (int32_t rank = 0; rank < world; ++rank) {
      const Variant& variant = ranks.variants[at(rank)];
      longest =
          std::max(longest, longest_message(plan, rank, variant.send_rows, variant.receive_rows));
    }
    for (Variant& variant : ranks.variants) variant.longest_message = longest;
  }
  // The kernel on all ranks, on none, on all but the first; a bias with the first of these.
  for (const int32_t without :
       kernel ? std::vector<int32_t>{0, 1, world} : std::vector<int32_t>{world}) {
    for (int32_t rank = 0; rank < world; ++rank) {
      ranks.variants[at(rank)].compute = kernel_if(rank >= without);
      ranks.variants[at(rank)].bias = without == 0 && plan.problem.traits().sums();
    }
    if (auto fault = find_fault(ranks)) return fault;
  }
  return std::nullopt;
}

std::string communication(const StepList& list) {
  std::ostringstream out;
  out << "communicators";
  for (const Communicator& one : list.communicators) out << " " << one.max_ctas << "." << one.lane;
  out << ", over_peers " << list.over_peers << ", slot of " << list.slot_bytes << " bytes, takes "
      << list.takes_slot << ", hears_all " << list.hears_all << "\n";
  for (const Step& step : list.steps) {
    if (const auto* const call = std::get_if<Collective>(&step.what)) {
      out << plan::name(call->kind) << " " << call->max_ctas << "." << call->lane << " of "
          << call->count << "\n";
    }
  }
  return out.str();
}

std::optional<Fault> find_fault(const std::vector<Ranks>& calls) {
  std::vector<std::vector<StepList>> lists;
  for (const Ranks& ranks : calls) lists.push_back(lower_all(ranks, false));
  std::vector<Turn> turns;
  SlotTurns slots;
  for (size_t i = 0; i < calls.size(); ++i) {
    turns.push_back({&calls[i].plan, &calls[i].variants, &lists[i], 0, 0, false});
    slots.next(turns.back());
  }
  return find_fault(turns, calls.front().machine);
}

}  // namespace overlap::steps
