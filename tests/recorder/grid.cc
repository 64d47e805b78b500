#include "grid.h"

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
constexpr int kMaxWorld = 8;

// The ranks of a group that see different things: the first, the second, the last.
std::vector<int> ranks_of(int world) {
  if (world == 2) return {0, 1};
  if (world == 3 || world == 4 || world == 8) return {0, 1, world - 1};
  return {world - 1};
}

struct Place {
  int world;
  int rank;
};
std::vector<Place> places(Transport transport) {
  std::vector<Place> all;
  for (int world = 2; world <= kMaxWorld; ++world) {
    for (const int rank : ranks_of(world)) {
      // To NCCL's collectives all ranks but the first and the last are alike.
      const bool alike = rank > 0 && rank + 1 < world;
      if (transport == Transport::kPeer || !alike) all.push_back({world, rank});
    }
  }
  return all;
}

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

// Three calls in a row, all in this mode; on two streams by turns; or two captured ones between calls outside of
// the graph, the first of which makes what both use.
std::vector<Call> in_a_row(const Plan& plan, const Operands& operands, const Mode& mode) {
  const Call plain = {plan, operands, {}};
  const Call own = {plan, operands, mode};
  if (mode.captured) return {plain, own, own, plain};
  if (mode.other_stream) return {plain, own, plain};
  return {own, own, own};
}

// The same in all modes, or in the first one alone.
void visit_modes(const Visit& visit, const Case& base, const Plan& plan, const Operands& operands,
                 bool all = true) {
  for (const NamedMode& mode : modes()) {
    Case one = base;
    if (mode.mode.traced) one.family += ", traced";
    one.name = cat("rank ", base.rank, " ", base.name, ", ", mode.name);
    one.calls = in_a_row(plan, operands, mode.mode);
    visit(one);
    if (!all) return;
  }
}

std::string list(const Weights& weights) {
  std::string text;
  for (const int32_t weight : weights) text += cat(text.empty() ? "" : ":", weight);
  return text;
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

std::string describe(const Operands& operands) {
  std::string text = operands.takes.size() == 1 ? "" : cat(operands.takes.size(), " weights ");
  bool first = true;
  for (const bool takes : operands.takes) {
    text += cat(first ? "" : "+", takes ? "kernel" : "library");
    first = false;
  }
  return operands.bias ? text + " bias" : text;
}

const std::vector<Operands>& produce_operands() {
  static const std::vector<Operands> all = {taken(true, false), taken(true, true),
                                            taken(false, false), taken(false, true)};
  return all;
}

struct Shape {
  const char* name;
  int64_t rows;  // of each rank's part, or of an all-reduce
  int64_t columns;
};

// Whole tiles, and neither rows nor columns in whole tiles. Both in enough tile rows for 16 chunks.
constexpr Shape kWhole = {"", 4096, kColumns};
constexpr Shape kRagged = {" ragged", 4096 - 56, kColumns - 40};

const std::vector<Weights>& schedules() {
  static const std::vector<Weights> all = {
      Weights(1, 1), Weights(2, 1), Weights(4, 1), Weights(16, 1), {1, 3, 4}};
  return all;
}

int64_t all_rows(Op op, const Shape& shape, int world) {
  return op == Op::kGemmAllReduce ? shape.rows : shape.rows * world;
}

// --- computation first, over NCCL ---

void visit_panels(const Visit& visit, Op op) {
  for (const auto& [world, rank] : places(Transport::kNccl)) {
    const Case base = {
        .family = family(cat(plan::name(op), " panels"), world), .world = world, .rank = rank};
    for (const Shape& shape : {kWhole, kRagged}) {
      for (const Weights& weights : schedules()) {
        for (const int32_t lanes : {1, 2, 4}) {
          for (const Operands& operands : produce_operands()) {
            const Problem problem =
                problem_of(op, all_rows(op, shape, world), world, shape.columns);
            const bool whole = shape.rows == kWhole.rows;
            if (!whole && lanes != 2) continue;
            const bool all = whole && lanes == 2 && weights.size() > 1 && weights.size() < 16;
            with_plan(
                [&] {
                  return panels(problem, kPingpong, weights,
                                {.comm_sms = 8 * lanes, .lanes = lanes}, 8);
                },
                [&](const Plan& plan) {
                  Case one = base;
                  one.name = cat("chunks ", list(weights), " lanes ", lanes, " ",
                                 describe(operands), shape.name);
                  visit_modes(visit, one, plan, operands, all);
                });
          }
        }
      }
    }
  }
}

void visit_window_panels(const Visit& visit, Op op) {
  for (const auto& [world, rank] : places(Transport::kNccl)) {
    const Case base = {.family = family(cat(plan::name(op), " window panels"), world),
                       .world = world,
                       .rank = rank};
    for (const Shape& shape : {kWhole, kRagged}) {
      for (const Weights& weights : {Weights(2, 1), Weights{1, 3, 4}}) {
        for (const int32_t lanes : {1, 2}) {
          for (const Operands& operands : produce_operands()) {
            with_plan(
                [&] {
                  return panels(problem_of(op, all_rows(op, shape, world), world, shape.columns),
                                Kernel::kSm90Cooperative, weights,
                                {.comm_sms = 8 * lanes, .window = true, .lanes = lanes}, 8);
                },
                [&](const Plan& plan) {
                  Case one = base;
                  one.name = cat("chunks ", list(weights), " lanes ", lanes, " ",
                                 describe(operands), shape.name);
                  visit_modes(visit, one, plan, operands, lanes == 2 && shape.rows == kWhole.rows);
                });
          }
        }
      }
    }
  }
}

// Packed tiles, reduced by NCCL or, of two ranks, exchanged and added where they are unpacked.
void visit_packed(const Visit& visit, bool exchanges) {
  for (const auto& [world, rank] : places(Transport::kNccl)) {
    if (exchanges && world != 2) continue;
    const Case base = {
        .family = family(exchanges ? "gemm_allreduce exchange" : "gemm_allreduce packed", world),
        .world = world,
        .rank = rank};
    for (const Shape& shape : {kWhole, kRagged}) {
      for (const Weights& weights : schedules()) {
        for (const int32_t lanes : {1, 2}) {
          for (const bool window : {false, true}) {
            for (const Operands& operands : produce_operands()) {
              const Problem problem =
                  problem_of(Op::kGemmAllReduce, shape.rows, world, shape.columns);
              plan::Resources resources = {.comm_sms = 8 * lanes, .window = window, .lanes = lanes};
              if (shape.rows != kWhole.rows) {
                resources.finish_ctas = 96;
                resources.smem_pad_bytes = 1 << 14;
              }
              if (!exchanges && (window || shape.rows != kWhole.rows) && lanes != 2) continue;
              with_plan(
                  [&] {
                    Plan plan = packed(problem, kPingpong, weights, resources, 8);
                    if (exchanges) plan.collective = plan::Collective::kExchange;
                    plan::validate(plan);
                    return plan;
                  },
                  [&](const Plan& plan) {
                    Case one = base;
                    one.name = cat("chunks ", list(weights), " lanes ", lanes,
                                   window ? " window " : " ", describe(operands), shape.name);
                    const bool all = lanes == 2 && weights.size() == 4 && shape.rows == kWhole.rows;
                    visit_modes(visit, one, plan, operands, all);
                  });
            }
          }
        }
      }
    }
  }
}

// --- computation first, over peers ---

void visit_ring(const Visit& visit, Op op) {
  constexpr Shape kSmall = {" small", 256, 512};
  constexpr Shape kUnaligned = {" unaligned", 512, 1004};  // rows that are not whole accesses
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    const Case base = {
        .family = family(cat(plan::name(op), " ring"), world), .world = world, .rank = rank};
    for (const Shape& shape : {kWhole, kSmall, kUnaligned}) {
      for (const Kernel kernel : {kPingpong, Kernel::kSm90PingpongWide}) {
        for (const Operands& operands : produce_operands()) {
          with_plan(
              [&] {
                return panels(problem_of(op, shape.rows * world, world, shape.columns), kernel, {1},
                              {}, 0, Transport::kPeer);
              },
              [&](const Plan& plan) {
                Case one = base;
                if (shape.columns == kUnaligned.columns) one.family += ", unaligned";
                one.name = cat(plan::name(kernel), " chunks 1 ", describe(operands), shape.name);
                visit_modes(visit, one, plan, operands,
                            shape.rows == kWhole.rows && kernel == kPingpong);
              });
        }
      }
    }
  }
}

// Of which the last rank owns fewer rows than the others: one more than these have in all, and one less.
void visit_uneven_ring(const Visit& visit) {
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    const std::string base = family(cat(plan::name(Op::kGemmAllReduce), " ring"), world);
    for (const int64_t rows : {512 * world + 1, 512 * world - 1}) {
      for (const Kernel kernel : {kPingpong, Kernel::kSm90PingpongWide}) {
        for (const Operands& operands : produce_operands()) {
          with_plan(
              [&] {
                return panels(problem_of(Op::kGemmAllReduce, rows, world, 1004), kernel, {1}, {}, 0,
                              Transport::kPeer);
              },
              [&](const Plan& plan) {
                Case one = {.family = base + ", uneven", .world = world, .rank = rank};
                one.name = cat(plan::name(kernel), " rows ", rows, " ", describe(operands));
                visit_modes(visit, one, plan, operands, kernel == kPingpong);
              });
        }
      }
    }
  }
}

void visit_direct(const Visit& visit, Op op) {
  constexpr Shape kShapes[] = {{" of 128 rows", 128, kColumns}, {" of 512 rows", 512, 1024}};
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    const Case base = {
        .family = family(cat(plan::name(op), " direct"), world), .world = world, .rank = rank};
    for (const Shape& shape : kShapes) {
      for (const Kernel kernel : {kPingpong, Kernel::kSm90PingpongWide}) {
        for (const Operands& operands : produce_operands()) {
          with_plan(
              [&] {
                return plan::make_at_once(problem_of(op, shape.rows * world, world, shape.columns),
                                          kernel);
              },
              [&](const Plan& plan) {
                Case one = base;
                one.name = cat(plan::name(kernel), " ", describe(operands), shape.name);
                visit_modes(visit, one, plan, operands, kernel == kPingpong);
              });
        }
      }
    }
  }
}

// The framework's GEMM and one kernel; an all-reduce that is small enough by the low-latency one.
void visit_one_kernel(const Visit& visit, Op op, bool few_rows) {
  const std::vector<int64_t> rows =
      few_rows ? std::vector<int64_t>{1, 3, 17, 128, 320} : std::vector<int64_t>{1024, 1000, 2056};
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    const Case base = {
        .family = family(cat(plan::name(op), few_rows ? " low latency" : " one kernel"), world),
        .world = world,
        .rank = rank};
    for (const int64_t count : rows) {
      for (const plan::DType dtype : {plan::DType::kBFloat16, plan::DType::kFloat32}) {
        for (const bool bias : {false, true}) {
          with_plan(
              [&] {
                Problem problem =
                    problem_of(op, op == Op::kGemmAllReduce ? count : count * world, world);
                problem.dtype = dtype;
                return plan::make_at_once(problem, Kernel::kLibrary);
              },
              [&](const Plan& plan) {
                Case one = base;
                one.name = cat(plan::name(dtype), " rows ", count, bias ? " bias" : "");
                visit_modes(visit, one, plan, taken(false, bias), dtype == plan::DType::kBFloat16);
              });
        }
      }
    }
  }
}

// --- communication first ---

const std::vector<Operands>& gather_operands() {
  static const std::vector<Operands> all = {
      {.takes = {true}},
      {.takes = {false}},
      {.bias = true, .takes = {true}},
      {.takes = {true, true}},
      {.takes = {false, true}},
      {.takes = {true, false, true}},
      {.takes = {true, true, false}},
  };
  return all;
}

void visit_gather(const Visit& visit, Transport transport, bool window) {
  constexpr Op kOp = Op::kAllGatherGemm;
  const bool peers = transport == Transport::kPeer;
  const char* way = peers ? " over peers" : window ? " in a window" : " over NCCL";
  for (const auto& [world, rank] : places(transport)) {
    const Case base = {
        .family = family(cat(plan::name(kOp), way), world), .world = world, .rank = rank};
    for (const Shape& shape : {kWhole, kRagged}) {
      for (const Kernel kernel : {kPingpong, Kernel::kSm80}) {
        for (const Weights& weights : schedules()) {
          for (const int32_t lanes : {1, 2}) {
            if ((peers || window) && lanes != 1) continue;
            const bool usual = shape.rows == kWhole.rows && kernel == kPingpong;
            if (!usual && (lanes != 1 || weights.size() == 16 || weights.size() == 1)) continue;
            for (const Operands& operands : gather_operands()) {
              with_plan(
                  [&] {
                    return panels(
                        problem_of(kOp, shape.rows * world, world, shape.columns), kernel, weights,
                        {.comm_sms = peers ? 2 : 8 * lanes, .window = window, .lanes = lanes},
                        peers ? 0 : 8, transport);
                  },
                  [&](const Plan& plan) {
                    Case one = base;
                    one.name = cat(plan::name(kernel), " chunks ", list(weights), " lanes ", lanes,
                                   " ", describe(operands), shape.name);
                    const bool all = shape.rows == kWhole.rows && kernel == kPingpong &&
                                     weights.size() == 2 && (peers || window || lanes == 2);
                    visit_modes(visit, one, plan, operands, all);
                  });
            }
          }
        }
      }
    }
  }
}

// --- rows that go each their own way ---

struct Pattern {
  const char* name;
  int64_t (*rows)(int from, int to, int world);
};
constexpr Pattern kPatterns[] = {
    {"even", [](int, int, int) { return int64_t{1024}; }},
    {"uneven", [](int from, int to, int) { return int64_t{(from * 7 + to * 13) % 5} * 301; }},
    {"zeros", [](int from, int to, int) { return int64_t{(from + to) % 3 == 0 ? 0 : 640}; }},
    {"one long", [](int from, int to,
                    int world) { return int64_t{from == 0 && to == world - 1 ? 24000 : 130}; }},
    {"own", [](int from, int to, int) { return int64_t{from == to ? 512 : 0}; }},
    {"none", [](int, int, int) { return int64_t{0}; }},
    {"single", [](int, int, int) { return int64_t{1}; }},
    {"to rank 1", [](int, int to, int) { return int64_t{to == 1 ? 2000 : 0}; }},
    // More than are computed beside the exchange between two ranks.
    {"mostly own", [](int from, int to, int) { return int64_t{from == to ? 32768 : 4096}; }},
    // One to three pieces of 8 MiB.
    {"in pieces", [](int from, int to, int) { return int64_t{(3 * from + to) % 4 * 2048 + 100}; }},
    {"many", [](int from, int to, int) { return int64_t{12288 + 8 * from - 8 * to}; }},
    // More than fits a slot of two ranks.
    {"huge", [](int from, int to, int) { return int64_t{from == to ? 256 : 140000}; }},
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

void visit_all_to_all(const Visit& visit, Transport transport, bool one_launch = false) {
  const bool peers = transport == Transport::kPeer;
  const char* const way = one_launch ? "gemm_alltoall in one launch"
                          : peers    ? "gemm_alltoall over peers"
                                     : "gemm_alltoall over NCCL";
  for (const auto& [world, rank] : places(transport)) {
    const Case base = {.family = family(way, world), .world = world, .rank = rank};
    for (const int64_t columns : {kColumns, kColumns - 40}) {
      for (const Link link : {Link::kFast, Link::kSlow}) {
        if (link == Link::kSlow && (peers || columns != kColumns)) continue;
        for (const Pattern& pattern : kPatterns) {
          for (const Operands& taken_operands :
               {taken(true, false), taken(false, false), taken(true, true)}) {
            const Operands operands = all_to_all_operands(
                pattern, world, rank, taken_operands.takes[0], taken_operands.bias);
            with_plan(
                [&] {
                  const int32_t ctas = link == Link::kSlow ? 4 : world == 2 ? 24 : 16;
                  return plan::make_all_to_all(
                      problem_of(Op::kGemmAllToAll, 0, world, columns), kPingpong,
                      {.comm_sms = peers && world == 2 ? 0 : ctas, .one_launch = one_launch}, ctas,
                      transport);
                },
                [&](const Plan& plan) {
                  Case one = base;
                  one.link = link;
                  one.name = cat(pattern.name, " ", describe(operands),
                                 columns == kColumns ? "" : " ragged",
                                 link == Link::kSlow ? " slow link" : "");
                  visit_modes(visit, one, plan, operands,
                              columns == kColumns && link == Link::kFast && !operands.bias);
                });
          }
        }
      }
    }
  }
}

// --- one after the other ---

void visit_sequential(const Visit& visit, Op op, bool peers) {
  for (const auto& [world, rank] : places(peers ? Transport::kPeer : Transport::kNccl)) {
    const Case base = {
        .family = family(cat(plan::name(op), peers ? " one kernel" : " sequential"), world),
        .world = world,
        .rank = rank};
    for (const Shape& shape : {kWhole, kRagged}) {
      for (const size_t weights : {1, 3}) {
        if (weights > 1 && op != Op::kAllGatherGemm) continue;
        with_plan(
            [&] {
              const Problem problem =
                  problem_of(op, all_rows(op, shape, world), world, shape.columns);
              if (peers) return plan::make_at_once(problem, Kernel::kLibrary);
              return plan::make_sequential(problem, {.arch = 90});
            },
            [&](const Plan& plan) {
              Case one = base;
              Operands operands;
              operands.takes.assign(weights, false);
              one.name = cat(weights, weights == 1 ? " weight" : " weights", shape.name);
              visit_modes(visit, one, plan, operands);
            });
      }
    }
  }
}

// --- one of each ---

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
  const auto rows = [&](Op op) { return all_rows(op, kWhole, world); };
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
  add("ring", [&] {
    return panels(problem_of(kAllReduce, 512 * world, world), kPingpong, {1}, {}, 0,
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
      [&] { return plan::make_all_to_all(all_to_all, kPingpong, {.comm_sms = 16}, 16); },
      all_to_all_operands(pattern_of("many"), world, rank, true, false));
  add(
      "all-to-all over peers",
      [&] {
        return plan::make_all_to_all(all_to_all, kPingpong, {.comm_sms = 16}, 16, Transport::kPeer);
      },
      all_to_all_operands(pattern_of("even"), world, rank, true, false));
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

// Calls of different executors in a row, each pair of them once: chaining, slots, whose memory grows.
void visit_sequences(const Visit& visit) {
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    const std::vector<Example> all = examples(world, rank);
    for (size_t step = 1; step < all.size(); ++step) {
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
              return panels(problem_of(Op::kGemmAllReduce, kWhole.rows, world), kPingpong,
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
      return panels(problem_of(op, all_rows(op, kWhole, 2), 2), kPingpong, {1, 3},
                    {.comm_sms = 16, .lanes = 2, .low_priority = low}, 8);
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
  for (const auto& [world, rank] : places(Transport::kPeer)) {
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
  for (const auto& [world, rank] : places(Transport::kPeer)) {
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
  for (const auto& [world, rank] : places(Transport::kPeer)) {
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
  for (const auto& [world, rank] : places(transport)) {
    for (const Operands& operands : produce_operands()) {
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
            one.name = describe(operands);
            visit_modes(visit, one, plan, operands);
          });
    }
  }
}

// The same calls on other types.
void visit_dtypes(const Visit& visit) {
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    for (const Example& example : examples(world, rank)) {
      for (const plan::DType dtype :
           {plan::DType::kFloat16, plan::DType::kFloat32, plan::DType::kFloat64}) {
        Call call = example.call;
        call.plan.problem.dtype = dtype;
        // The kernels take 16-bit types.
        if (dtype != plan::DType::kFloat16) call.plan.kernel = Kernel::kLibrary;
        with_plan(
            [&] {
              plan::validate(call.plan);
              return call.plan;
            },
            [&](const Plan&) {
              Case one = {.family = family("dtypes", world), .world = world, .rank = rank};
              one.name = cat("rank ", rank, " ", example.name, " ", plan::name(dtype));
              one.calls = {call, call};
              visit(one);
            });
      }
    }
  }
}

// Links on which nothing is mapped or registered.
void visit_links(const Visit& visit) {
  for (const auto& [world, rank] : places(Transport::kPeer)) {
    for (const Example& example : examples(world, rank)) {
      for (const Link link : {Link::kNoWindows, Link::kSlow}) {
        if (link == Link::kNoWindows && plan::over_peers(example.call.plan)) continue;
        Case one = {.family = family(link == Link::kSlow ? "slow link" : "no windows", world),
                    .world = world,
                    .rank = rank};
        one.link = link;
        one.name = cat("rank ", rank, " ", example.name);
        one.calls = {example.call, example.call};
        visit(one);
      }
    }
  }
}

}  // namespace

void visit_grid(const Visit& visit) {
  for (const Op op : {Op::kGemmAllReduce, Op::kGemmReduceScatter}) {
    visit_panels(visit, op);
    visit_window_panels(visit, op);
    visit_ring(visit, op);
    visit_direct(visit, op);
    visit_one_kernel(visit, op, false);
  }
  for (const Op op : {Op::kGemmAllReduce, Op::kGemmReduceScatter, Op::kAllGatherGemm}) {
    for (const plan::Engine by :
         {plan::Engine::kNccl, plan::Engine::kSms, plan::Engine::kCopyEngine}) {
      visit_programs(visit, op, by);
    }
  }
  visit_uneven_ring(visit);
  visit_one_kernel(visit, Op::kGemmAllReduce, true);
  visit_packed(visit, false);
  visit_packed(visit, true);
  visit_gather(visit, Transport::kNccl, false);
  visit_gather(visit, Transport::kNccl, true);
  visit_gather(visit, Transport::kPeer, false);
  visit_all_to_all(visit, Transport::kNccl);
  visit_all_to_all(visit, Transport::kPeer);
  visit_all_to_all(visit, Transport::kPeer, true);
  for (const Op op : {Op::kGemmAllReduce, Op::kGemmReduceScatter, Op::kAllGatherGemm}) {
    visit_sequential(visit, op, false);
  }
  visit_sequential(visit, Op::kAllGatherGemm, true);
  visit_sequences(visit);
  visit_counters(visit);
  visit_low_priority(visit);
  visit_growing_rows(visit);
  visit_refused(visit);
  visit_thrown(visit);
  visit_dtypes(visit);
  visit_links(visit);
}

void visit_timed(const Visit& visit) {
  for (const int world : {2, 8}) {
    for (const Example& example : examples(world, 0)) {
      Case one = {.family = "timed", .name = cat(example.name, " ", world), .world = world};
      one.calls = {example.call};
      visit(one);
    }
  }
  for (const int32_t chunks : {16, 64}) {
    Case one = {.family = "timed", .name = cat("panels in ", chunks, " chunks"), .world = 2};
    const Plan plan =
        panels(problem_of(Op::kGemmAllReduce, 16384, 2), kPingpong,
               Weights(static_cast<size_t>(chunks), 1), {.comm_sms = 16, .lanes = 2}, 8);
    one.calls = {{plan, taken(true, false), {}}};
    visit(one);
  }
}

}  // namespace recorder
