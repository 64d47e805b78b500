// The statements that a program may make, and the transfers that are made together.
#include "plan/program.h"

#include <algorithm>
#include <array>
#include <string>

#include "plan/message.h"
#include "plan/plan.h"

namespace overlap::plan {
namespace {

std::string text(const Rectangle& area) {
  return message("rows ", area.row, " to ", area.row + area.rows, ", columns ", area.column, " to ",
                 area.column + area.columns);
}

std::string text(const Region& region) {
  return message(name(region.memory), " of rank ", region.rank, " (", text(region.area), ")");
}

// One transfer's checks; messages begin with its number and what it is.
class Check {
 public:
  Check(const Plan& plan, size_t number)
      : plan_(plan),
        problem_(plan.problem),
        number_(number),
        one_(plan.program.transfers[number]),
        gathers_(problem_.traits().gathers()),
        to_all_(problem_.traits().rows_by_rank) {}

  void operator()() const {
    if (static_cast<uint32_t>(one_.way) > static_cast<uint32_t>(Way::kCopy) ||
        static_cast<uint32_t>(one_.by) > static_cast<uint32_t>(Engine::kNccl)) {
      fail("its way or engine is no member of the enumeration: take one of the names that it has");
    }
    check_region("source", one_.source);
    check_region("destination", one_.destination);
    check_pair();
    check_memories();
    if (one_.stream < 0 || one_.stream >= kMaxStreams) {
      fail("stream ", one_.stream, " is given, allowed are 0 to ", kMaxStreams - 1,
           ": take one of these");
    }
    for (const Rectangle& area : one_.tiles) check_tiles(area);
    for (const int32_t before : one_.after) check_after(before);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::string what;
    if (static_cast<uint32_t>(one_.way) <= static_cast<uint32_t>(Way::kCopy)) {
      what = message(", the ", name(one_.way), " from rank ", one_.source.rank, " to ",
                     one_.destination.rank);
    }
    plan::fail("program's transfer ", number_, what, ": ", parts...);
  }

  void check_region(const char* side, const Region& region) const {
    if (static_cast<uint32_t>(region.memory) > static_cast<uint32_t>(Memory::kScratch)) {
      fail("the ", side, "'s memory is no member of the enumeration: take one of its names");
    }
    if (region.rank < 0 || region.rank >= problem_.world_size) {
      fail("the ", side, " is of rank ", region.rank, ", allowed are 0 to ",
           problem_.world_size - 1, ": take ranks modulo their number");
    }
    const Extents all = extents(plan_, region.memory);
    if (all.rows == 0) {
      fail("the ", side, " is in ", name(region.memory), ", which ", name(problem_.op),
           region.memory == Memory::kScratch ? " has none of here: give the program scratch_rows"
                                             : " does not have: take its own memories");
    }
    check_area(side, region.area, all, name(region.memory));
  }

  void check_area(const char* what, const Rectangle& area, const Extents& all,
                  const char* of) const {
    const bool inside = area.row >= 0 && area.rows >= 1 && area.row <= all.rows - area.rows &&
                        area.column >= 0 && area.columns >= 1 &&
                        area.column <= all.columns - area.columns;
    if (!inside) {
      fail("the ", what, " is ", text(area), " of ", of, ", allowed are rows 0 to ", all.rows,
           " and columns 0 to ", all.columns, ": cut it to these, and leave empty ones out");
    }
  }

  void check_pair() const {
    const Region& from = one_.source;
    const Region& to = one_.destination;
    if (from.area.rows != to.area.rows || from.area.columns != to.area.columns) {
      fail("the source is ", from.area.rows, " x ", from.area.columns, ", the destination ",
           to.area.rows, " x ", to.area.columns, ": make them of one height and width");
    }
    const bool within = from.rank == to.rank;
    if (within != (one_.way == Way::kCopy)) {
      fail(within ? "it stays within a rank: take the way copy"
                  : "it goes to another rank: take the way push or pull");
    }
    if (within && from.memory == to.memory && from.area.overlaps(to.area)) {
      fail("its source and destination overlap in ", text(to), ": copy by way of scratch memory");
    }
    const bool by_copies = one_.by == Engine::kCopyEngine;
    if (!within && by_copies && !over_peers(plan_) && !plan_.transport().on_cpu) {
      fail("it goes by ", name(one_.by), ", the plan's chunks by nccl: take by = nccl or any");
    }
    if (by_copies && over_peers(plan_) && !in_one_clique(plan_, from.rank, to.rank)) {
      fail("it goes by ", name(one_.by), " to another host, as each has ", plan_.clique,
           " ranks: take by = nccl or any");
    }
  }

  void check_memories() const {
    if (one_.destination.memory == Memory::kInput) {
      fail("it writes to the input, which is the caller's: write to gathered or scratch");
    }
    if (one_.reduces && (gathers_ || to_all_)) {
      fail("it reduces, and ", name(problem_.op), " adds nothing up: leave reduces out");
    }
    if (!to_all_) return;
    const Rectangle& from = one_.source.area;
    const Rectangle& to = one_.destination.area;
    const bool own = one_.source.memory == Memory::kProduct &&
                     one_.destination.memory == Memory::kOutput &&
                     from.row / kMessageShares == one_.destination.rank &&
                     (from.row + from.rows - 1) / kMessageShares == one_.destination.rank &&
                     to.row / kMessageShares == one_.source.rank &&
                     from.row % kMessageShares == to.row % kMessageShares;
    if (!own || one_.way == Way::kCopy) {
      fail("it goes from ", text(one_.source), " to ", text(one_.destination),
           ", allowed are shares of one message, from product to output of another rank, as only "
           "these two know how many rows it has: rows ",
           kMessageShares, " x destination's rank and following to rows ", kMessageShares,
           " x source's rank and following");
    }
  }

  void check_tiles(const Rectangle& area) const {
    if (gathers_) {
      fail("it waits for tiles, but those of ", name(problem_.op),
           " wait for transfers: leave tiles out");
    }
    check_area("needed tiles' place", area, extents(plan_, Memory::kProduct), "product");
  }

  void check_after(int32_t before) const {
    if (before < 0 || static_cast<size_t>(before) >= number_) {
      fail("it waits for transfer ", before, ", allowed are those before it, 0 to ",
           static_cast<int64_t>(number_) - 1,
           ", so that none waits in a circle: put that one first");
    }
    const Transfer& other = plan_.program.transfers[static_cast<size_t>(before)];
    const auto shared = [&](int32_t rank) {
      return rank == one_.source.rank || rank == one_.destination.rank;
    };
    if (!shared(other.source.rank) && !shared(other.destination.rank)) {
      fail("it waits for transfer ", before, ", which goes from rank ", other.source.rank, " to ",
           other.destination.rank,
           ": neither of its own ranks knows when that has come; name one that ends at rank ",
           one_.source.rank, " or ", one_.destination.rank);
    }
  }

  const Plan& plan_;
  const Problem& problem_;
  const size_t number_;
  const Transfer& one_;
  const bool gathers_;
  const bool to_all_;
};

// Every share of every message once.
void check_messages(const Plan& plan) {
  const int32_t world = plan.problem.world_size;
  for (int32_t from = 0; from < world; ++from) {
    for (int32_t to = 0; to < world; ++to) {
      if (from == to) continue;
      std::vector<Rectangle> parts;
      for (const Transfer& one : plan.program.transfers) {
        if (one.source.rank == from && one.destination.rank == to) {
          parts.push_back(one.source.area);
        }
      }
      std::sort(parts.begin(), parts.end(),
                [](const Rectangle& a, const Rectangle& b) { return a.row < b.row; });
      int64_t next = kMessageShares * to;
      for (const Rectangle& part : parts) {
        if (part.columns != plan.problem.n) {
          fail("program's message from rank ", from, " to ", to, " is cut into columns (",
               text(part), "), allowed are whole rows of ", plan.problem.n);
        }
        if (part.row != next) {
          fail("program ", part.row < next ? "sends twice" : "leaves out", " shares of rows ",
               std::min(part.row, next) - kMessageShares * to, " to ",
               std::max(part.row, next) - kMessageShares * to, " of ", kMessageShares,
               " of the message from rank ", from, " to ", to, ": let each go once");
        }
        next += part.rows;
      }
      if (next != kMessageShares * (to + 1)) {
        fail("program leaves out shares ", next - kMessageShares * to, " to ", kMessageShares,
             " of the message from rank ", from, " to ", to, ": push these, too");
      }
    }
  }
}

}  // namespace

Extents extents(const Plan& plan, Memory memory) {
  const Problem& problem = plan.problem;
  const bool gathers = problem.traits().gathers();
  const bool to_all = problem.traits().rows_by_rank;
  const int64_t columns = moved_columns(problem);
  const int64_t rows = to_all ? kMessageShares * problem.world_size : problem.m;
  const Extents none;
  switch (memory) {
    case Memory::kProduct:
      return gathers ? none : Extents{rows, columns};
    case Memory::kOutput:
      return gathers ? none : Extents{to_all ? rows : rows / op_row_parts(problem), columns};
    case Memory::kInput:
      return gathers ? Extents{rows / problem.world_size, columns} : none;
    case Memory::kGathered:
      return gathers ? Extents{rows, columns} : none;
    case Memory::kScratch:
      return to_all || plan.program.scratch_rows == 0 ? none
                                                      : Extents{plan.program.scratch_rows, columns};
  }
  return none;
}

bool writes_output(const Plan& plan) {
  return std::any_of(plan.program.transfers.begin(), plan.program.transfers.end(),
                     [](const Transfer& one) { return one.destination.memory == Memory::kOutput; });
}

int32_t streams(const Program& program) {
  int32_t count = 0;
  for (const Transfer& one : program.transfers) count = std::max(count, one.stream + 1);
  return count;
}

std::vector<int32_t> rounds(const Program& program) {
  struct Open {
    int32_t round = -1;
    bool local = false;
    std::vector<int32_t> sources;
    std::vector<int32_t> destinations;
  };
  const auto has = [](const std::vector<int32_t>& ranks, int32_t rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  std::array<Open, kMaxStreams> open;
  std::vector<int32_t> made;
  int32_t next = 0;
  for (const Transfer& one : program.transfers) {
    Open& last = open[static_cast<size_t>(one.stream)];
    const bool local = one.way == Way::kCopy;
    const bool needs = std::any_of(one.after.begin(), one.after.end(), [&](int32_t before) {
      return made[static_cast<size_t>(before)] >= last.round;
    });
    if (last.round < 0 || needs || local != last.local || has(last.sources, one.source.rank) ||
        has(last.destinations, one.destination.rank)) {
      last = {next++, local, {}, {}};
    }
    last.sources.push_back(one.source.rank);
    last.destinations.push_back(one.destination.rank);
    made.push_back(last.round);
  }
  return made;
}

void check_program(const Plan& plan) {
  const Problem& problem = plan.problem;
  const Program& program = plan.program;
  const int32_t most = plan.clique > 0 ? kMaxProvedRanks : kMaxPeers;
  if (problem.world_size < 2 || problem.world_size > most) {
    fail("program is for ", problem.world_size, " ranks, allowed are 2 to ", most,
         ": take a plan without a program");
  }
  if (plan.schedule != Schedule::kOverlapped || plan.layout != Layout::kRowMajor ||
      plan.collective != collective_of(problem.op) || plan.resources.window) {
    fail("plan has a program beside ", name(plan.schedule), ", ", name(plan.layout), ", ",
         name(plan.collective), " over ", plan.transport().name,
         plan.resources.window ? " in a window" : "", ", allowed are overlapped, row_major and ",
         name(collective_of(problem.op)), " over nccl, peer or gloo, without a window: take these");
  }
  const bool produces = problem.traits().sums();
  if (!produces && plan.kernel != Kernel::kLibrary) {
    fail("program of ", name(problem.op), " has the kernel ", name(plan.kernel),
         ", allowed is library: take that");
  }
  if (plan.resources.lanes != 1) {
    fail("plan has a program and ", plan.resources.lanes,
         " lanes, allowed is 1: transfers name their streams themselves");
  }
  const int64_t columns = moved_columns(problem);
  constexpr int64_t kMostElements = int64_t{1} << 40;
  if (program.scratch_rows < 0 ||
      program.scratch_rows > kMostElements / std::max<int64_t>(columns, 1)) {
    fail("program has scratch_rows = ", program.scratch_rows, " of ", columns,
         " columns, allowed are 0 to ", kMostElements / std::max<int64_t>(columns, 1),
         ": use rows again that have been read");
  }
  if (program.transfers.empty() || program.transfers.size() > kMaxTransfers) {
    fail("program has ", program.transfers.size(), " transfers, allowed are 1 to ", kMaxTransfers,
         ": cut into fewer chunks, or leave the program out");
  }
  for (size_t i = 0; i < program.transfers.size(); ++i) Check(plan, i)();
  if (problem.traits().rows_by_rank) check_messages(plan);
}

std::vector<int32_t> chunks_in(const Plan& plan, const Rectangle& area) {
  // Row-major chunks are whole tile rows: of the product, or of each rank's part of it.
  std::vector<int32_t> chunks;
  const int64_t part = part_rows(plan);
  for (int32_t chunk = 0; chunk < static_cast<int32_t>(plan.chunks.size()); ++chunk) {
    const Rows rows = chunk_rows(plan, chunk);
    for (int32_t p = 0; p < row_parts(plan); ++p) {
      if (p * part + rows.begin < area.row + area.rows && area.row < p * part + rows.end) {
        chunks.push_back(chunk);
        break;
      }
    }
  }
  return chunks;
}

}  // namespace overlap::plan
