#include "plan/plan.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <sstream>
#include <string_view>
#include <utility>

#include "plan/message.h"
#include "plan/plan_fields.h"

namespace overlap::plan {
namespace {

constexpr int64_t kPeerAccessBytes = 16;  // what kernels move over peers

constexpr int64_t round_up_div(int64_t value, int64_t by) {
  return value / by + (value % by != 0 ? 1 : 0);
}

// As memory of the framework's is.
constexpr int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return round_up_div(bytes, kAlignment) * kAlignment;
}

std::string exact(double value) {
  char text[32];
  const std::to_chars_result result = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, result.ptr);
}

// All fields in order: enumerations by their members' names, numbers as name=value, in the shortest
// form that reads back exactly. A profile has a text of its own.
template <typename Item>
std::string by_name(const Item& item) {
  std::ostringstream out;
  const char* between = "";
  for_each_field<Item>([&](const auto& field) {
    const auto& value = item.*field.member;
    using Value = std::decay_t<decltype(value)>;
    if constexpr (!std::is_same_v<Value, SharedProfile>) {
      if (field.quiet && is_usual(item, field)) return;
      out << std::exchange(between, " ");
      if constexpr (std::is_enum_v<Value>) {
        out << member_name(value);
      } else if constexpr (std::is_floating_point_v<Value>) {
        out << field.name << "=" << exact(value);
      } else {
        out << field.name << "=" << value;
      }
    }
  });
  return out.str();
}

template <typename Value>
void print(std::ostringstream& out, const Value& value);

template <typename Item>
void print_phrases(std::ostringstream& out, const Item& item) {
  for_each_field<Item>([&](const auto& field) {
    if (field.quiet && is_usual(item, field)) return;
    const std::string_view phrase = field.phrase;
    const size_t place = phrase.find("{}");
    out << phrase.substr(0, place);
    if (place == phrase.npos) return;
    print(out, item.*field.member);
    out << phrase.substr(place + 2);
  });
}

void print_item(std::ostringstream& out, const BandRun& run) {
  out << run.count << " x " << run.tile_rows;
}

void print_item(std::ostringstream& out, const Chunk& chunk) {
  print_phrases(out, chunk);
  out << ")";
}

void print_item(std::ostringstream& out, const Program& program) {
  out << "program of " << program.transfers.size() << " transfers";
  if (program.scratch_rows > 0) out << " and " << program.scratch_rows << " rows of scratch";
}

// Equal neighbours are printed once, with their number in front.
template <typename Item>
void print_items(std::ostringstream& out, const std::vector<Item>& items) {
  for (size_t begin = 0; begin < items.size();) {
    size_t end = begin + 1;
    while (end < items.size() && items[end] == items[begin]) ++end;
    out << (begin == 0 ? "" : ", ");
    if (end - begin > 1) out << (end - begin) << " x ";
    print_item(out, items[begin]);
    begin = end;
  }
}

template <typename Value>
void print(std::ostringstream& out, const Value& value) {
  if constexpr (std::is_same_v<Value, std::vector<BandRun>>) {
    for (size_t r = 0; r < value.size(); ++r) {
      out << (r == 0 ? "" : ", ");
      print_item(out, value[r]);
    }
    if (value.empty()) out << "0";
  } else if constexpr (kIsSequence<Value>) {
    print_items(out, value);
    if (value.empty()) out << "0 tiles";
  } else if constexpr (std::is_same_v<Value, Program>) {
    print_item(out, value);
  } else if constexpr (std::is_same_v<Value, Problem>) {
    out << by_name(value);
  } else if constexpr (kHasFields<Value>) {
    print_phrases(out, value);
  } else if constexpr (std::is_enum_v<Value>) {
    out << member_name(value);
  } else {
    out << value;
  }
}

}  // namespace

int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
  }
  fail("unknown dtype ", static_cast<int32_t>(dtype));
}

#define OVERLAP_NAME(Enum)       \
  const char* name(Enum value) { \
    return member_name(value);   \
  }
OVERLAP_NAME(Op)
OVERLAP_NAME(DType)
OVERLAP_NAME(Invariance)
OVERLAP_NAME(Recipe)
OVERLAP_NAME(Schedule)
OVERLAP_NAME(Layout)
OVERLAP_NAME(Memory)
OVERLAP_NAME(Way)
OVERLAP_NAME(Engine)
#undef OVERLAP_NAME

std::string kernel_names(Ability with, uint32_t without) {
  return names_of(kKernels, " and ", [&](const KernelTraits& one) {
    return one.can(with) && (one.abilities & without) == 0;
  });
}

std::string collective_names(uint32_t any) {
  return names_of(kCollectives, " or ", [&](const CollectiveTraits& one) { return one.has(any); });
}

Kernel newest_kernel(const Machine& machine) {
  return first_kernel(
      [&](const KernelTraits& one) { return one.least_arch == machine.kernel_arch; });
}

std::string Problem::to_string() const {
  return by_name(*this);
}

// overlap_torch.plan parses it.
std::string Machine::to_string() const {
  return by_name(*this);
}

std::string Plan::to_string() const {
  std::ostringstream out;
  print_phrases(out, *this);
  return out.str();
}

DType output_dtype(const Problem& problem) {
  return problem.recipe == Recipe::kNone ? problem.dtype : problem.output_dtype;
}

std::string types_text(const Problem& problem) {
  const bool scaled = problem.recipe != Recipe::kNone;
  std::string text = name(problem.dtype);
  if (scaled) text += std::string(" ") + name(problem.recipe);
  if (scaled || problem.output_dtype != problem.dtype) {
    text += std::string(" to ") + name(problem.output_dtype);
  }
  if (problem.fast_accum) text += " fast_accum";
  return text;
}

int64_t output_bytes(const Problem& problem) {
  return element_bytes(output_dtype(problem));
}

DType moved_dtype(const Problem& problem) {
  return problem.traits().gathers() ? problem.dtype : output_dtype(problem);
}

int64_t moved_bytes(const Problem& problem) {
  return element_bytes(moved_dtype(problem));
}

int64_t moved_columns(const Problem& problem) {
  return problem.traits().gathers() ? problem.k : problem.n;
}

int32_t op_row_parts(const Problem& problem) {
  return problem.traits().parts_of_ranks ? problem.world_size : 1;
}

int32_t row_parts(const Plan& plan) {
  // Transfers name rows themselves.
  if (has_program(plan) && plan.problem.traits().scatters()) return 1;
  const bool owned = has(plan.collective, kOwnsParts) ||
                     (plan.collective == Collective::kDirect &&
                      plan.schedule == Schedule::kOverlapped && direct_in_pieces(plan));
  return owned ? plan.problem.world_size : op_row_parts(plan.problem);
}

int64_t part_rows(const Plan& plan) {
  return round_up_div(plan.problem.m, row_parts(plan));
}

Rows rows_of_part(const Plan& plan, int32_t part) {
  const int64_t rows = part_rows(plan);
  return {std::min(part * rows, plan.problem.m), std::min((part + 1) * rows, plan.problem.m)};
}

bool direct_in_pieces(const Plan& plan) {
  return !plan.problem.traits().all_reduces() || plan.problem.world_size > 2;
}

int64_t direct_piece_bytes(const Plan& plan) {
  const Problem& problem = plan.problem;
  const int64_t bytes = problem.m * problem.n * moved_bytes(problem);
  // As many bytes for each of two ranks, in one step instead of two.
  if (!direct_in_pieces(plan)) return bytes;
  return round_up_div(round_up_div(bytes, problem.world_size), kPeerAccessBytes) * kPeerAccessBytes;
}

bool is_invariant(const Plan& plan) {
  // The framework picks another GEMM for another number of rows. This package's of one GPU add along K alike.
  const bool own = plan.problem.invariance == Invariance::kWorld
                       ? can(plan.kernel, kAddsGroups) && kernel_takes_groups(plan.problem)
                       : plan.kernel != Kernel::kLibrary;
  const bool in_order = has(plan.collective, kSumsInOrder);
  return in_order && (own || plan.problem.given()) && over_peers(plan) && !has_program(plan);
}

int32_t k_groups(const Problem& problem) {
  return problem.invariance == Invariance::kWorld ? kWorldGroups / problem.world_size : 0;
}

bool kernel_takes_groups(const Problem& problem) {
  const bool takes_type = problem.dtype == DType::kBFloat16 || problem.dtype == DType::kFloat16;
  const int32_t groups = k_groups(problem);
  return takes_type && groups > 0 && problem.k > 0 && problem.k % (groups * kGroupStep) == 0 &&
         problem.n % kGroupColumns == 0;
}

bool adds_by_pairs(const Problem& problem) {
  return problem.invariance == Invariance::kWorld && problem.world_size > 1;
}

bool every_part_has_rows(const Problem& problem) {
  const int64_t ranks = problem.world_size;
  return (ranks - 1) * round_up_div(problem.m, ranks) < problem.m;
}

int64_t ring_tiles(const Plan& plan) {
  const int32_t parts = row_parts(plan);
  const int64_t part = static_cast<int64_t>(tiles_m(plan)) * tiles_n(plan) / parts;
  // An all-reduce passes on the final ones, too.
  return (plan.problem.traits().all_reduces() ? 2 : 1) * (parts - 1) * part;
}

int64_t stripe_bytes(const Plan& plan) {
  return aligned(part_rows(plan) * plan.problem.n * moved_bytes(plan.problem));
}

std::vector<int64_t> clique_rows(const Plan& plan) {
  const bool scatters = plan.problem.traits().scatters();
  const int64_t cliques = plan.problem.world_size / plan.clique;
  std::vector<int64_t> all;
  for (int32_t chunk = 0; chunk < static_cast<int32_t>(plan.chunks.size()); ++chunk) {
    const int64_t height = chunk_rows(plan, chunk).count();
    all.push_back(scatters ? cliques * height : round_up_div(height, plan.clique));
  }
  return all;
}

int64_t clique_stride(const Plan& plan) {
  const std::vector<int64_t> rows = clique_rows(plan);
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  return aligned(all * plan.problem.n * moved_bytes(plan.problem));
}

int64_t peer_slot_bytes(const Plan& plan) {
  const Problem& problem = plan.problem;
  const int64_t ranks = problem.world_size;
  const bool all_reduces = problem.traits().all_reduces();
  if (problem.traits().gathers()) return buffer_elements(plan) * moved_bytes(problem);
  if (hierarchical(plan)) {  // terms, and the sums of each part of a chunk
    return (all_reduces ? 2 : 1) * plan.clique * clique_stride(plan);
  }
  if (plan.collective == Collective::kDirect) {
    // A piece from each rank, and, for all to have the sums, the sums from each.
    return (all_reduces && direct_in_pieces(plan) ? 2 : 1) * ranks * direct_piece_bytes(plan);
  }
  if (plan.collective == Collective::kOwners) {  // terms, and every rank's finished part
    return (all_reduces ? 2 : 1) * ranks * part_rows(plan) * problem.n * moved_bytes(problem);
  }
  if (plan.collective == Collective::kStripes) {
    return (all_reduces ? 2 : 1) * ranks * stripe_bytes(plan);  // terms, and the sums of each part
  }
  // Partial sums of all phases but the last, and every rank's finished part.
  return (ranks - 1 + (all_reduces ? ranks : 0)) * part_rows(plan) * problem.n *
         moved_bytes(problem);
}

Collective collective_of(Op op) {
  const OpTraits own = traits(op);
  if (own.before.has_value()) return *own.before;
  if (own.after.has_value()) return *own.after;
  fail("unknown op ", static_cast<int32_t>(op));
}

int32_t row_grain(const Plan& plan) {
  // An all-gather's own part is computed apart, too.
  if (has(plan.collective, kOwnsParts) || plan.problem.traits().gathers()) {
    return plan.cluster_m;
  }
  const int32_t parts = row_parts(plan);
  return parts == 1 ? plan.cluster_m : plan.cluster_m / std::gcd(plan.cluster_m, parts);
}

int64_t grid_rows(const Plan& plan) {
  const int32_t parts = row_parts(plan);
  const int64_t grain = row_grain(plan);
  const int64_t tiles = round_up_div(part_rows(plan), plan.tile_m);
  return (grain == 1 ? tiles : round_up_div(tiles, grain) * grain) * parts;
}

int32_t tiles_m(const Plan& plan) {
  return static_cast<int32_t>(grid_rows(plan));
}

int32_t tiles_n(const Plan& plan) {
  return static_cast<int32_t>(round_up_div(plan.problem.n, plan.tile_n));
}

TileOrder tile_order(const Plan& plan) {
  TileOrder order;
  order.tiles_m = tiles_m(plan);
  order.tiles_n = tiles_n(plan);
  order.parts = row_parts(plan);
  for (const BandRun& run : plan.bands) order.runs[order.num_runs++] = run;
  for (const Chunk& chunk : plan.chunks) {
    order.chunk_begin[order.num_chunks + 1] = order.chunk_begin[order.num_chunks] + chunk.tiles;
    ++order.num_chunks;
  }
  return order;
}

void add_bands(TileOrder& order, int32_t tile_rows, int32_t count) {
  if (count == 0) return;
  if (order.num_runs > 0 && order.runs[order.num_runs - 1].tile_rows == tile_rows) {
    order.runs[order.num_runs - 1].count += count;
  } else {
    order.runs[order.num_runs++] = {tile_rows, count};
  }
}

TileOrder chunked_order(const Plan& plan, int64_t columns, const std::vector<int32_t>& heights,
                        size_t joined) {
  TileOrder order;
  order.tiles_n = static_cast<int32_t>(round_up_div(columns, plan.tile_n));
  // A chunk takes up to two runs; where the tables do not hold as many, all bands are alike.
  const bool fits = 2 * heights.size() <= static_cast<size_t>(kMaxBandRuns);
  const int32_t most = fits ? std::max(kBandRows, plan.cluster_m) : plan.cluster_m;
  for (size_t i = 0; i < heights.size(); ++i) {
    const int32_t height = heights[i];
    if (height > 0) {
      const int32_t band = std::min(height, most);
      add_bands(order, band, height / band);
      add_bands(order, height % band, height % band == 0 ? 0 : 1);
    }
    order.tiles_m += height;
    if (i >= joined) order.chunk_begin[++order.num_chunks] = order.num_tiles();
  }
  return order;
}

namespace {

// A reduce-scatter's kernels store whole tiles of each part; on CPU rows are computed, not tiles.
bool pads_rows(const Plan& plan) {
  return plan.problem.traits().scatters() && !plan.transport().on_cpu;
}

}  // namespace

int32_t buffer_parts(const Plan& plan) {
  return plan.collective == Collective::kExchange ? 2 : row_parts(plan);
}

int64_t buffer_elements(const Plan& plan) {
  if (plan.problem.traits().gathers()) return plan.problem.m * plan.problem.k;
  if (pads_rows(plan)) return static_cast<int64_t>(tiles_m(plan)) * plan.tile_m * plan.problem.n;
  if (plan.layout == Layout::kRowMajor) return plan.problem.m * plan.problem.n;
  return buffer_parts(plan) *
         packed_offset(tiles_m(plan) * tiles_n(plan), plan.tile_m, plan.tile_n);
}

Rows chunk_rows(const Plan& plan, int32_t chunk) {
  // Row-major chunks begin and end where bands do, so whole tile rows lie before each of them, and
  // as many of each part.
  const int64_t rows = part_rows(plan);
  const int64_t columns = static_cast<int64_t>(tiles_n(plan)) * row_parts(plan);
  if (columns == 0) return {0, rows};
  int64_t first_tile = 0;
  for (int32_t c = 0; c < chunk; ++c) first_tile += plan.chunks[c].tiles;
  const int64_t end_tile = first_tile + plan.chunks[chunk].tiles;
  const auto row_at = [&](int64_t tile) {
    const int64_t row = tile / columns * plan.tile_m;
    return row < rows ? row : rows;
  };
  return {row_at(first_tile), row_at(end_tile)};
}

Extent chunk_extent(const Plan& plan, int32_t chunk) {
  if (plan.layout == Layout::kRowMajor) {
    const int64_t parts = row_parts(plan);
    const Rows rows = chunk_rows(plan, chunk);
    if (pads_rows(plan)) {
      if (plan.problem.n == 0) return {};
      const int64_t tile_rows = plan.chunks[chunk].tiles / tiles_n(plan) / parts;
      return {parts * rows.begin * plan.problem.n, tile_rows * plan.tile_m * plan.problem.n};
    }
    const int64_t width = moved_columns(plan.problem);
    return {parts * rows.begin * width, rows.count() * width};
  }
  int32_t first_tile = 0;
  for (int32_t c = 0; c < chunk; ++c) first_tile += plan.chunks[c].tiles;
  return {buffer_parts(plan) * packed_offset(first_tile, plan.tile_m, plan.tile_n),
          packed_offset(plan.chunks[chunk].tiles, plan.tile_m, plan.tile_n)};
}

}  // namespace overlap::plan
