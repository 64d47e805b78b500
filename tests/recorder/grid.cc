#include "session.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "plan/templates.h"
#include "record.h"

namespace recorder {
namespace {

namespace plan = overlap::plan;
using overlap::plan::Kernel;
using overlap::plan::Op;
using overlap::plan::Plan;
using overlap::plan::Problem;
using overlap::plan::Transport;

using Visit = std::function<void(const Case&)>;
using Weights = std::vector<int32_t>;

constexpr Kernel kPingpong = Kernel::kSm90Pingpong;
constexpr int64_t kColumns = 2048;
constexpr int64_t kInner = 1024;
constexpr int64_t kRows = 4096;  // of each rank's part, or of an all-reduce

struct Place {
  int world;
  int rank;
};
// The ranks of a group that see different things: the first, the second, the last.
constexpr Place kPlaces[] = {{2, 0}, {2, 1}, {4, 0}, {4, 1}, {4, 3}, {8, 7}};

std::string family(const std::string& executor, int world) {
  return cat(executor, ", ", world, " ranks");
}

struct NamedMode {
  const char* name;
  Mode mode;
};
const std::vector<NamedMode>& modes() {
  static const std::vector<NamedMode> all = {
      {"in a row", {}},
      {"captured", {.captured = true}},
      {"traced", {.traced = true}},
      {"delayed", {.delay_us = 50}},
      {"streams", {.other_stream = true}},
  };
  return all;
}

// Two calls in a row, both in this mode; on two streams in turn; or two captured ones between calls outside of
// the graph, the first of which makes what both use.
std::vector<Call> in_a_row(const Plan& plan, const Operands& operands, const Mode& mode) {
  const Call plain = {plan, operands, {}};
  const Call own = {plan, operands, mode};
  if (mode.captured) return {plain, own, own, plain};
  if (mode.other_stream) return {plain, own, plain};
  return {own, own};
}

Problem problem_of(Op op, int64_t rows, int world, int64_t columns = kColumns) {
  Problem problem;
  problem.op = op;
  problem.m = rows;
  problem.n = columns;
  problem.k = kInner;
  problem.world_size = world;
  return problem;
}

// `total` tiles or tile rows in chunks as the weights say, in multiples of `grain`; empty where there are too few.
Weights cut(int32_t total, int32_t grain, const Weights& weights) {
  const int32_t sum = std::accumulate(weights.begin(), weights.end(), 0);
  Weights sizes;
  int32_t weight = 0;
  int32_t begin = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    weight += weights[i];
    const bool last = i + 1 == weights.size();
    const int32_t end =
        last ? total : static_cast<int32_t>(int64_t{total} * weight / sum / grain) * grain;
    if (end <= begin) return {};
    sizes.push_back(end - begin);
    begin = end;
  }
  return sizes;
}

// The grid of a plan of this problem and kernel, before it is cut.
Plan uncut(const Problem& problem, Kernel kernel, Transport transport) {
  Plan plan;
  plan.problem = problem;
  const plan::KernelShape shape = plan::kernel_shape(kernel, false);
  plan.tile_m = shape.tile_m;
  plan.tile_n = shape.tile_n;
  plan.cluster_m = shape.cluster_m;
  const bool reduces = problem.op == Op::kGemmAllReduce || problem.op == Op::kGemmReduceScatter;
  plan.collective = transport == Transport::kPeer && reduces ? plan::Collective::kRing
                                                             : plan::collective_of(problem.op);
  return plan;
}

Plan panels(const Problem& problem, Kernel kernel, const Weights& weights,
            const plan::Resources& resources, int32_t ctas,
            Transport transport = Transport::kNccl) {
  const Plan grid = uncut(problem, kernel, transport);
  const Weights heights =
      cut(plan::tiles_m(grid) / plan::row_parts(grid), plan::row_grain(grid), weights);
  return plan::make_row_panels(problem, kernel, heights, std::max(8, grid.cluster_m), resources,
                               ctas, transport);
}

Plan packed(const Problem& problem, Kernel kernel, const Weights& weights,
            const plan::Resources& resources, int32_t ctas) {
  const Plan grid = uncut(problem, kernel, Transport::kNccl);
  const Weights tiles = cut(plan::tiles_m(grid) * plan::tiles_n(grid), grid.cluster_m, weights);
  return plan::make_packed(problem, kernel, tiles, 8, resources, ctas);
}

// Visits with what `make` makes, unless no such plan is valid.
template <typename Make, typename Then>
void with_plan(Make make, Then then) {
  try {
    then(make());
  } catch (const std::invalid_argument&) {
  }
}

Operands taken(bool takes, bool bias) {
  return {.bias = bias, .takes = {takes}};
}

struct Pattern {
  const char* name;
  int64_t (*rows)(int from, int to, int world);
};
constexpr Pattern kPatterns[] = {
    {"even", [](int, int, int) { return int64_t{1024}; }},
    {"uneven", [](int from, int to, int) { return int64_t{(from * 7 + to * 13) % 5} * 301; }},
    {"one long", [](int from, int to,
                    int world) { return int64_t{from == 0 && to == world - 1 ? 24000 : 130}; }},
    {"single", [](int, int, int) { return int64_t{1}; }},
    {"many", [](int from, int to, int) { return int64_t{12288 + 8 * from - 8 * to}; }},
};

const Pattern& pattern_of(std::string_view name) {
  return *std::find_if(std::begin(kPatterns), std::end(kPatterns),
                       [&](const Pattern& pattern) { return name == pattern.name; });
}

Operands all_to_all_operands(const Pattern& pattern, int world, int rank, bool takes, bool bias) {
  Operands operands = taken(takes, bias);
  for (int peer = 0; peer < world; ++peer) {
    operands.send_rows.push_back(pattern.rows(rank, peer, world));
    operands.receive_rows.push_back(pattern.rows(peer, rank, world));
  }
  return operands;
}

struct Example {
  const char* name;
  Call call;
};

// A plain call of each executor.
std::vector<Example> examples(int world, int rank) {
  std::vector<Example> all;
  const auto add = [&](const char* name, auto make, Operands operands = taken(true, false)) {
    with_plan(make,
              [&](const Plan& plan) { all.push_back({name, {plan, std::move(operands), {}}}); });
  };
  const auto rows = [&](Op op) { return op == Op::kGemmAllReduce ? kRows : kRows * world; };
  constexpr Op kAllReduce = Op::kGemmAllReduce;
  constexpr Op kScatter = Op::kGemmReduceScatter;
  constexpr Op kGather = Op::kAllGatherGemm;
  const plan::Resources lanes = {.comm_sms = 16, .lanes = 2};
  add("panels", [&] {
    return panels(problem_of(kAllReduce, rows(kAllReduce), world), kPingpong, {1, 1, 1, 1}, lanes,
                  8);
  });
  add("packed", [&] {
    return packed(problem_of(kAllReduce, rows(kAllReduce), world), kPingpong, {1, 2, 1}, lanes, 8);
  });
  add("exchange", [&] {
    Plan plan = packed(problem_of(kAllReduce, rows(kAllReduce), world), kPingpong, {1, 2, 1},
                       {.comm_sms = 16, .window = true, .lanes = 2}, 8);
    plan.collective = plan::Collective::kExchange;
    plan::validate(plan);
    return plan;
  });
  add("window panels", [&] {
    return panels(problem_of(kScatter, rows(kScatter), world), kPingpong, {1, 1},
                  {.comm_sms = 8, .window = true}, 8);
  });
  add(
      "exchange by the library",
      [&] {
        Plan plan = packed(problem_of(kAllReduce, rows(kAllReduce), world), kPingpong, {1, 1},
                           {.comm_sms = 8, .window = true}, 8);
        plan.collective = plan::Collective::kExchange;
        plan::validate(plan);
        return plan;
      },
      taken(false, true));
  add("ring", [&] {
    return panels(problem_of(kAllReduce, kRows * world, world), kPingpong, {1}, {}, 0,
                  Transport::kPeer);
  });
  add("scattering ring", [&] {
    return panels(problem_of(kScatter, 1024 * world, world), kPingpong, {1}, {}, 0,
                  Transport::kPeer);
  });
  add("direct",
      [&] { return plan::make_at_once(problem_of(kAllReduce, 256 * world, world), kPingpong); });
  add(
      "one kernel",
      [&] {
        return plan::make_at_once(problem_of(kScatter, 256 * world, world), Kernel::kLibrary);
      },
      taken(false, true));
  add(
      "low latency",
      [&] { return plan::make_at_once(problem_of(kAllReduce, 16, world), Kernel::kLibrary); },
      taken(false, false));
  add("gather over NCCL", [&] {
    return panels(problem_of(kGather, rows(kGather), world), kPingpong, {1, 3}, {.comm_sms = 8}, 8);
  });
  add("gather over peers", [&] {
    return panels(problem_of(kGather, rows(kGather), world), kPingpong, {1, 1}, {.comm_sms = 2}, 0,
                  Transport::kPeer);
  });
  add(
      "gather in one kernel",
      [&] { return plan::make_at_once(problem_of(kGather, 128 * world, world), Kernel::kLibrary); },
      taken(false, false));
  const Problem all_to_all = problem_of(Op::kGemmAllToAll, 0, world);
  add(
      "all-to-all over NCCL",
      [&] {
        const int32_t ctas = world == 2 ? 24 : 16;
        return plan::make_all_to_all(all_to_all, kPingpong, {.comm_sms = ctas}, ctas);
      },
      all_to_all_operands(pattern_of("many"), world, rank, true, false));
  add(
      "all-to-all over peers",
      [&] {
        return plan::make_all_to_all(all_to_all, kPingpong, {.comm_sms = 16}, 16, Transport::kPeer);
      },
      all_to_all_operands(pattern_of("even"), world, rank, true, false));
  add(
      "all-to-all in one launch",
      [&] {
        return plan::make_all_to_all(all_to_all, kPingpong, {.one_launch = true}, 16,
                                     Transport::kPeer);
      },
      all_to_all_operands(pattern_of("uneven"), world, rank, true, false));
  add("gather of two weights",
      [&] {
        return panels(problem_of(kGather, rows(kGather), world), kPingpong, {1, 1},
                      {.comm_sms = 8, .window = true}, 8);
      },
      {.takes = {true, false}});
  for (const Op op : {kAllReduce, kScatter, kGather}) {
    add(
        op == kAllReduce ? "sequential all-reduce"
        : op == kScatter ? "sequential reduce-scatter"
                         : "sequential all-gather",
        [&] { return plan::make_sequential(problem_of(op, rows(op), world), {.arch = 90}); },
        taken(false, false));
  }
  return all;
}

// All-reduces whose rows are finished: in the sum's kernel, in one step and, of more than two ranks, in two; and after the
// call, whose product the caller gives.
std::vector<Example> finished_examples(int world) {
  Operands operands = taken(false, false);
  operands.finish = true;
  const Problem few = problem_of(Op::kGemmAllReduce, 16, world);
  const Problem many = problem_of(Op::kGemmAllReduce, 200, world);
  Problem given = many;
  given.k = 0;
  return {{"few rows finished", {plan::make_at_once(few, Kernel::kLibrary), operands, {}}},
          {"more rows finished", {plan::make_at_once(many, Kernel::kLibrary), operands, {}}},
          {"sequence finished", {plan::make_sequential(given, {.arch = 90}), operands, {}}}};
}

// Each executor in each mode.
void visit_examples(const Visit& visit) {
  for (const auto& [world, rank] : kPlaces) {
    std::vector<Example> all = examples(world, rank);
    std::ranges::move(finished_examples(world), std::back_inserter(all));
    for (const Example& example : all) {
      for (const NamedMode& mode : modes()) {
        Case one = {.family = family(example.name, world), .world = world, .rank = rank};
        one.name = cat("rank ", rank, ", ", mode.name);
        one.calls = in_a_row(example.call.plan, example.call.operands, mode.mode);
        one.unrecorded = static_cast<int>(one.calls.size()) / 2;
        visit(one);
      }
    }
  }
}

// Calls of different executors in a row, each pair of them once: chaining, slots, whose memory grows.
void visit_sequences(const Visit& visit) {
  for (const auto& [world, rank] : kPlaces) {
    const std::vector<Example> all = examples(world, rank);
    for (size_t step = 1; step < 4; ++step) {
      for (const bool captured : {false, true}) {
        Case one = {.family = family("sequences", world), .world = world, .rank = rank};
        one.name = cat("rank ", rank, " by ", step, captured ? ", captured" : "");
        one.prepared = captured;
        for (size_t i = 0, at = 0; i < 6; ++i, at = (at + step) % all.size()) {
          Call call = all[at].call;
          // An all-to-all's room and a window are made by a call.
          const bool made = !plan::over_peers(call.plan) && !call.plan.resources.window;
          call.mode.captured = captured && i % 3 == 1 && made;
          call.mode.other_stream = i % 4 == 3;
          one.calls.push_back(call);
        }
        visit(one);
      }
    }
  }
}

// More chunks than the device has counters: they are zeroed, and begin again.
void visit_counters(const Visit& visit) {
  for (const int world : {2, 8}) {
    for (const int32_t chunks : {3, 16}) {
      for (const bool takes : {true, false}) {
        with_plan(
            [&] {
              return panels(problem_of(Op::kGemmAllReduce, kRows, world), kPingpong,
                            Weights(static_cast<size_t>(chunks), 1), {.comm_sms = 16, .lanes = 2},
                            8);
            },
            [&](const Plan& plan) {
              Case one = {.family = family("counters", world), .world = world, .rank = 0};
              one.name = cat("chunks ", chunks, takes ? " kernel" : " library");
              one.unrecorded = overlap::kernels::kDeviceCounters / chunks - 2;
              const Call call = {plan, taken(takes, false), {}};
              one.calls.assign(static_cast<size_t>(one.unrecorded) + 4, call);
              visit(one);
            });
      }
    }
  }
}

// Plans whose communication has streams of low priority, by turns with those that have not: no stream is left behind.
void visit_low_priority(const Visit& visit) {
  for (const Op op : {Op::kGemmAllReduce, Op::kAllGatherGemm}) {
    const auto made = [&](bool low) {
      return panels(problem_of(op, op == Op::kGemmAllReduce ? kRows : 2 * kRows, 2), kPingpong,
                    {1, 3}, {.comm_sms = 16, .lanes = 2, .low_priority = low}, 8);
    };
    Case one = {.family = family("low priority", 2), .world = 2, .rank = 0};
    for (const bool captured : {false, true}) {
      one.name = cat(plan::name(op), captured ? ", captured" : "");
      one.prepared = captured;
      one.calls.clear();
      for (const bool low : {true, false, true}) {
        Call call = {made(low), taken(true, false), {}};
        call.mode.captured = captured;
        one.calls.push_back(call);
      }
      visit(one);
    }
  }
}

// Rows of an all-to-all that change from call to call: the room for messages grows when the ranks tell each other.
void visit_growing_rows(const Visit& visit) {
  for (const auto& [world, rank] : kPlaces) {
    with_plan(
        [&] {
          return plan::make_all_to_all(problem_of(Op::kGemmAllToAll, 0, world), kPingpong,
                                       {.comm_sms = 16}, 16, Transport::kPeer);
        },
        [&](const Plan& plan) {
          Case one = {.family = family("growing rows", world), .world = world, .rank = rank};
          for (const bool takes : {true, false}) {
            one.name = cat("rank ", rank, takes ? " kernel" : " library");
            one.calls.clear();
            for (const char* pattern :
                 {"single", "even", "one long", "many", "one long", "uneven", "many", "even"}) {
              one.calls.push_back(
                  {plan, all_to_all_operands(pattern_of(pattern), world, rank, takes, false), {}});
            }
            visit(one);
          }
        });
  }
}

// Calls that throw before they enqueue anything, and leave the next one as it was.
void visit_refused(const Visit& visit) {
  for (const auto& [world, rank] : kPlaces) {
    for (const Example& example : examples(world, rank)) {
      const Plan& plan = example.call.plan;
      Case one = {.family = family("refused", world), .world = world, .rank = rank};
      Call captured = example.call;
      captured.mode.captured = true;
      const auto visit_as = [&](const char* why) {
        one.name = cat("rank ", rank, " ", example.name, ", ", why);
        visit(one);
      };
      one.refused = 2;
      one.calls = {example.call, captured};
      one.failed = Failed::kWait;
      visit_as("the group has failed");
      one.failed = Failed::kNccl;
      visit_as("NCCL has failed");
      one.failed = Failed::kNo;
      if (plan::over_peers(plan)) {
        one.link = Link::kNoPeers;
        one.refused = 1;
        one.calls = {example.call};
        visit_as("no peers");
        continue;
      }
      // NCCL's own number of CTAs is that of the communicator that every group has.
      if (plan.chunks[0].max_ctas == 0) continue;
      one.refused = 1;
      one.calls = {captured, example.call, captured};
      visit_as("the first call is captured");
    }
  }
}

// The framework's GEMM throws in the midst of a call: what has been forked is joined, and the next call is sound.
void visit_thrown(const Visit& visit) {
  for (const auto& [world, rank] : kPlaces) {
    for (const Example& example : examples(world, rank)) {
      for (const int before : {0, 1, 3}) {
        Case one = {.family = family("thrown", world), .world = world, .rank = rank};
        one.name = cat("rank ", rank, " ", example.name, ", after ", before);
        Call call = example.call;
        call.operands.takes = {false};
        one.library_gemms = before;
        one.calls = {call, call};
        visit(one);
      }
    }
  }
}

// Transfers of a program over NCCL: each half of the columns goes round in a stream of its own, one of them the other way.
plan::Program ring_of(const Plan& plan) {
  const Problem& problem = plan.problem;
  const int32_t world = problem.world_size;
  const bool gathers = problem.op == Op::kAllGatherGemm;
  const plan::Memory memory = gathers ? plan::Memory::kGathered : plan::Memory::kProduct;
  const int64_t columns = (gathers ? problem.k : problem.n) / 2;
  const int64_t rows = problem.m / world;
  plan::Program program;
  const auto turn = [&](bool reduces) {
    for (int32_t step = reduces ? 1 : 0; step < world - (reduces ? 0 : 1); ++step) {
      for (int32_t stream = 0; stream < 2; ++stream) {
        for (int32_t rank = 0; rank < world; ++rank) {
          const int32_t way = stream == 0 ? 1 : world - 1;
          const int64_t part = (rank + step * (world - way)) % world;
          const plan::Rectangle area = {part * rows, rows, stream * columns, columns};
          plan::Transfer one;
          one.source = {memory, rank, area};
          one.destination = {memory, (rank + way) % world, area};
          one.reduces = reduces;
          one.stream = stream;
          if (reduces) one.tiles = {area};
          program.transfers.push_back(one);
        }
      }
    }
  };
  if (!gathers) turn(true);
  if (problem.op != Op::kGemmReduceScatter) turn(false);
  return program;
}

// `by`: the engine of all of its transfers over peers; kNccl: over NCCL.
void visit_programs(const Visit& visit, Op op, plan::Engine by = plan::Engine::kNccl) {
  const Transport transport = by == plan::Engine::kNccl ? Transport::kNccl : Transport::kPeer;
  const char* const name = by == plan::Engine::kNccl         ? " program"
                           : by == plan::Engine::kCopyEngine ? " program by copy engine"
                                                             : " program over peers";
  for (const auto& [world, rank] : kPlaces) {
    for (const Operands& operands : {taken(true, false), taken(false, true)}) {
      with_plan(
          [&] {
            const bool produces = op != Op::kAllGatherGemm;
            Plan plan = panels(problem_of(produces ? Op::kGemmAllReduce : op, 512 * world, world),
                               produces ? kPingpong : Kernel::kLibrary,
                               produces ? Weights{1, 1} : Weights{1}, {.comm_sms = 16}, 8);
            plan.problem.op = op;
            plan.collective = plan::collective_of(op);
            plan.program = ring_of(plan);
            for (plan::Chunk& chunk : plan.chunks) chunk.transport = transport;
            for (plan::Transfer& one : plan.program.transfers) one.by = by;
            plan::validate(plan);
            return plan;
          },
          [&](const Plan& plan) {
            Case one = {
                .family = family(cat(plan::name(op), name), world), .world = world, .rank = rank};
            const char* const by_whom = operands.takes[0] ? " kernel, " : " library, ";
            for (const NamedMode& mode : modes()) {
              one.name = cat("rank ", rank, by_whom, mode.name);
              one.calls = in_a_row(plan, operands, mode.mode);
              one.unrecorded = static_cast<int>(one.calls.size()) / 2;
              visit(one);
            }
          });
    }
  }
}

}  // namespace

void visit_grid(const Visit& visit) {
  visit_examples(visit);
  for (const Op op : {Op::kGemmAllReduce, Op::kGemmReduceScatter, Op::kAllGatherGemm}) {
    for (const plan::Engine by :
         {plan::Engine::kNccl, plan::Engine::kSms, plan::Engine::kCopyEngine}) {
      visit_programs(visit, op, by);
    }
  }
  visit_sequences(visit);
  visit_counters(visit);
  visit_low_priority(visit);
  visit_growing_rows(visit);
  visit_refused(visit);
  visit_thrown(visit);
}

void visit_timed(const Visit& visit) {
  for (const int world : {2, 8}) {
    for (const Example& example : examples(world, 0)) {
      Case one = {.family = "timed", .name = cat(example.name, " ", world), .world = world};
      one.calls = {example.call};
      visit(one);
    }
  }
}

}  // namespace recorder
