// Steps on one device, and NCCL's, taken apart.
#include <algorithm>

#include "steps/list/list.h"
#include "steps/proof/simulation.h"

namespace overlap::steps {
namespace {

// CTAs of NCCL's calls without a limit.
constexpr int32_t kNcclCtas = 32;

}  // namespace

// --- steps ---

void Simulation::take(Here& here, const Fork& step, Span& span) {
  here.forked.clear();
  for (int32_t lane = 0; lane < step.side_lanes; ++lane) here.forked.push_back(side_lane(lane));
  if (step.copies) here.forked.push_back(Lane::kCopy);
  for (const Lane lane : here.forked) {
    // A lane goes on after both: what it did before, and the caller's stream.
    const Node begin = node(here, "forks");
    graph_.edge(span.first, begin);
    follow(tail(here, lane), begin);
  }
}

void Simulation::take(Here& here, const Join&, Span& span) {
  for (const Lane lane : here.forked) graph_.edge(tail(here, lane), span.first);
  here.forked.clear();
}

void Simulation::take(Here&, const Mark&, Span&) {}
void Simulation::take(Here&, const Delay&, Span&) {}

// A kernel of the caller's takes the list's tiles. Each is the product of the rows beside it: of the input, or of what is
// gathered, once the tile's chunk has arrived.
void Simulation::take(Here& here, const CallersKernel& step, Span& span) {
  const plan::Plan& plan = *here.plan;
  const KernelTiles& tiles = here.list->tiles;
  const bool gathers = plan.problem.traits().gathers();
  const bool packed = !here.list->orders.empty();  // rows are not whole when their tiles are taken
  end_of(here, span, "ends");
  Gemm& gemm = callers_.emplace_back();
  gemm.input = {gathers ? Buffer::kGathered : Buffer::kInput};
  gemm.outputs = {{{gathers ? Buffer::kOutput : tiles.stores}}};
  int64_t rows = plan.problem.m;
  for (const int64_t count : here.variant->send_rows) rows += count;
  int64_t owned = rows;  // that lie one behind the other
  if (tiles.stores == Buffer::kStripes) {
    owned = plan::part_rows(plan);
    gemm.outputs.clear();
    for (int32_t owner = 0; owner < ranks_; ++owner) {
      gemm.outputs.push_back(
          {{Buffer::kStripes, here.rank * plan::stripe_stride(here.list->stripe_bytes),
            kOwners + owner}});
    }
  }
  std::map<int32_t, std::pair<Node, int32_t>> chunks;
  const auto count = static_cast<int32_t>(tiles.chunks.size());
  for (int32_t tile = 0, next = 0; tile < count; tile = next) {
    const int32_t chunk = tiles.chunks[at(tile)];
    next = tile + 1;
    while (next % tiles.columns != 0 && tiles.chunks[at(next)] == chunk) ++next;
    TileRows one;
    one.tile_row = tile / tiles.columns;
    one.first_column = tile % tiles.columns;
    one.columns = next - tile;
    if (!chunks.contains(chunk)) chunks[chunk] = {node_within(span, here), 0};
    auto& [by, taken] = chunks[chunk];
    taken += one.columns;
    if (packed) {
      touches({by, by}, {key(here.rank, kCallersTiles, 0), tile}, next - tile, true);
      continue;
    }
    const int64_t end_row = std::min(rows, (int64_t{one.tile_row} + 1) * plan.tile_m);
    one.input_row = int64_t{one.tile_row} * plan.tile_m;
    for (; one.input_row < end_row; one.input_row += one.rows) {
      one.output = static_cast<int32_t>(one.input_row / owned);
      one.output_row = one.input_row % owned;
      one.rows = one.stored_rows = std::min(end_row - one.input_row, owned - one.output_row);
      compute_rows(by, here, gemm, one, tiles.columns, false);
    }
  }
  if (packed) {
    TileRows all;
    all.rows = all.stored_rows = rows;
    all.columns = tiles.columns;
    compute_rows(span.first, here, gemm, all, tiles.columns, false);
  }
  for (const auto& [chunk, made] : chunks) {
    if (step.counts) here.counted[chunk] = made;
    if (step.awaits) here.awaited.push_back({{span.first, made.first}, chunk});
  }
  holds(here, span, ctas_beside(plan, machine_), 1, step.awaits);
}

void Simulation::take(Here& here, const Arrive& step, Span& span) {
  here.counted[step.chunk] = {span.first, 1};
  holds(here, span, 1, 1, false, true);
}

void Simulation::take(Here& here, const LibraryGemm& step, Span& span) {
  const int64_t from_row = input_row_bytes(here);
  const int64_t rows = step.rows.count();
  const Node by = span.first;
  const int32_t turn = here.turn;
  const Place from = reads(span, here, step.input, rows * from_row);
  const std::optional<Place> count = indices(by, here, step.count, 1);
  const bool all = step.weight == LibraryGemm::kAllWeights;
  const size_t weights = all ? std::max<size_t>(1, here.variant->weights.size()) : 1;
  for (size_t i = 0; i < weights; ++i) {
    const int32_t weight = all ? static_cast<int32_t>(i) : step.weight;
    const int64_t to_row = row_bytes(here, weight);
    Where to = step.output.where;
    if (all) to.index = weight;
    std::optional<Place> adds;
    if (step.output.adds) adds = reads(span, here, *step.output.adds, rows * to_row);
    const Place target = writes(span, here, to, rows * to_row);
    effect(by, [=, this] {
      const int64_t known = counted(count, rows, turn, by);
      std::vector<Run> made =
          product(read(from, known * from_row, by), from_row, to_row, weight, turn, by);
      if (adds) made = add({read(*adds, known * to_row, by), made}, false, by);
      made.push_back({(rows - known) * to_row, 0, {Content::Space::kBeyondCount}});
      write(target, made);
    });
  }
  holds(here, span, 1, 1, false);
}

void Simulation::await_counter(const Here& here, const Span& span, int32_t counter, int32_t count) {
  const auto counted = here.counted.find(counter);
  if (counter < 0 || counter >= here.list->counters || counted == here.counted.end() ||
      counted->second.second < count) {
    const bool tiles = counter < static_cast<int32_t>(here.plan->chunks.size());
    fail(Fault::Kind::kDeadlock, says(span.first), " waits for ", count,
         tiles ? " tiles of chunk " : " counts of counter ", counter, ", and ",
         tiles ? "no GEMM that" : "nothing that", " is enqueued before it counts as many");
  }
  // It looks from its begin on: the counter must be zero by then, and not be another call's before it has seen enough.
  touches(span, {key(here.rank, kCounters, 0), counter}, 1, false);
  // Fewer than there are may be any of them.
  if (counted->second.second == count) graph_.edge(counted->second.first, span.last);
}

void Simulation::take(Here& here, const WaitForTiles& step, Span& span) {
  end_of(here, span, "has seen its tiles");
  await_counter(here, span, step.chunk, step.tiles);
  holds(here, span, 1, 1, true, true);
}

void Simulation::take(Here& here, const Collective& step, Span& span) {
  end_of(here, span, "ends");
  const int64_t bytes = step.count * plan::moved_bytes(here.plan->problem);
  const bool scatters = step.kind == plan::Collective::kReduceScatter;
  const bool gathers =
      step.kind == plan::Collective::kAllGather || step.kind == plan::Collective::kExchange;
  const Place source = reads(span, here, step.source, bytes * (scatters ? ranks_ : 1));
  const Place destination = writes(span, here, step.destination, bytes * (gathers ? ranks_ : 1));
  auto& calls = collectives_[{step.max_ctas, step.lane}];
  calls.resize(at(ranks_));
  calls[at(here.rank)].push_back({span.first, span.last, &step, source, destination});
  const int32_t ctas = step.max_ctas > 0 ? step.max_ctas : kNcclCtas;
  holds(here, span, ctas, ctas, true);
}

void Simulation::take(Here& here, const SendReceive& step, Span& span) {
  if (step.sends.empty() && step.receives.empty()) return;
  end_of(here, span, "ends");
  for (const Message& one : step.sends) {
    const Place from = reads(span, here, one.where, one.bytes);
    sends_[{here.rank, one.peer, step.lane}].push_back({span.first, span.last, from, one.bytes});
  }
  for (const Message& one : step.receives) {
    const Place to = writes(span, here, one.where, one.bytes);
    receives_[{one.peer, here.rank, step.lane}].push_back({span.first, span.last, to, one.bytes});
  }
  const int32_t ctas = step.max_ctas > 0 ? step.max_ctas : kNcclCtas;
  holds(here, span, ctas, ctas, true);
}

void Simulation::take(Here& here, const Copy& step, Span& span) {
  moves(span.first, here, step.source, step.destination, step.bytes);
  holds_copy(here, span, step.source, step.destination);
}

void Simulation::move_rows(Node by, const Here& here, const Where& source, int64_t source_stride,
                           const Where& destination, int64_t destination_stride, int64_t rows,
                           int64_t row_bytes, bool adds) {
  const bool whole = source_stride == row_bytes && destination_stride == row_bytes;
  const int64_t count = whole ? 1 : rows;
  const int64_t bytes = whole ? rows * row_bytes : row_bytes;
  for (int64_t row = 0; row < count && bytes > 0; ++row) {
    const Place from = place(here, source.behind(row * source_stride), bytes, by);
    const Place to = place(here, destination.behind(row * destination_stride), bytes, by);
    if (!adds) {
      moves(by, from, to, bytes);
      continue;
    }
    touches({by, by}, from, bytes, false);
    touches({by, by}, to, bytes, true);
    effect(by, [=, this] {
      write(to, add({read(to, bytes, by), read(from, bytes, by)}, false, by, true));
    });
  }
}

std::optional<Simulation::Place> Simulation::indices(Node by, const Here& here,
                                                     const std::optional<Where>& where,
                                                     int64_t count) {
  if (!where) return std::nullopt;
  return reads({by, by}, here, *where, count * static_cast<int64_t>(sizeof(int64_t)));
}

std::vector<int64_t> Simulation::numbers(const Place& from, int64_t count, int32_t turn,
                                         Node by) const {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(int64_t));
  std::vector<int64_t> all;
  for (const Run& run : read(from, count * kBytes, by)) {
    if (run.content.space != Content::Space::kIndices || run.content.call != turn) {
      fail(Fault::Kind::kResult, says(by), " takes for indices what are none of this call");
    }
    const auto rank = static_cast<size_t>(*sums_.ranks(run.content.sum).begin());
    const auto first = (*turns_[static_cast<size_t>(turn)].indices)[rank].begin();
    const int64_t begin = run.position / kBytes;
    all.insert(all.end(), first + begin, first + begin + run.bytes / kBytes);
  }
  return all;
}

int64_t Simulation::counted(const std::optional<Place>& count, int64_t most, int32_t turn,
                            Node by) const {
  return count ? std::clamp<int64_t>(numbers(*count, 1, turn, by)[0], 0, most) : most;
}

// Any row of a buffer whose rows are listed may be touched; contents are those of the example.
void Simulation::move_by_indices(Node by, const Here& here, const CopyRows& step) {
  if (step.rows == 0) return;
  const auto side = [&](const Where& where, int64_t stride, bool listed, bool write) {
    const int64_t bytes =
        listed ? room(here, where) - where.offset : (step.rows - 1) * stride + step.row_bytes;
    return std::pair(use({by, by}, here, where, bytes, write), bytes);
  };
  const auto from = side(step.source, step.source_stride, step.from_rows.has_value(), false);
  const auto to = side(step.destination, step.destination_stride, step.to_rows.has_value(), true);
  const auto count = indices(by, here, step.count, 1);
  const auto from_rows = indices(by, here, step.from_rows, step.rows);
  const auto to_rows = indices(by, here, step.to_rows, step.rows);
  const int32_t turn = here.turn;
  effect(by, [=, this, &step] {
    const int64_t rows = counted(count, step.rows, turn, by);
    const auto places = [&](const std::optional<Place>& listed, int64_t stride, int64_t bytes) {
      std::vector<int64_t> all = listed ? numbers(*listed, rows, turn, by)
                                        : std::vector<int64_t>(static_cast<size_t>(rows));
      for (int64_t row = 0; row < rows; ++row) {
        int64_t& place = all[static_cast<size_t>(row)];
        place = (listed ? place : row) * stride;
        if (place >= 0 && place + step.row_bytes <= bytes) continue;
        fail(Fault::Kind::kResult, says(by), " takes a row that its buffer does not have");
      }
      return all;
    };
    const std::vector<int64_t> sources = places(from_rows, step.source_stride, from.second);
    const std::vector<int64_t> targets = places(to_rows, step.destination_stride, to.second);
    for (size_t row = 0; row < sources.size(); ++row) {
      copy(from.first.behind(sources[row]), to.first.behind(targets[row]), step.row_bytes, by);
    }
    for (int64_t row = rows; row < step.rows && !step.to_rows; ++row) {
      write(to.first.behind(row * step.destination_stride),
            Run{step.row_bytes, 0, {Content::Space::kBeyondCount}});
    }
  });
}

void Simulation::take(Here& here, const CopyRows& step, Span& span) {
  const Node by = span.first;
  if (step.by_indices()) {
    move_by_indices(by, here, step);
  } else {
    move_rows(by, here, step.source, step.source_stride, step.destination, step.destination_stride,
              step.rows, step.row_bytes, step.adds);
  }
  holds_copy(here, span, step.source, step.destination);
}

void Simulation::take(Here& here, const Pack& step, Span& span) {
  const plan::Plan& plan = *here.plan;
  const plan::TileOrder& order = here.list->orders[at(step.order)];
  const int64_t tile_bytes = int64_t{plan.tile_m} * plan.tile_n * plan::moved_bytes(plan.problem);
  const int32_t first = order.chunk_begin[step.chunk];
  const int32_t tiles = plan::chunk_tiles(order, step.chunk);
  const int64_t begin = (int64_t{first} * step.terms + int64_t{step.term} * tiles) * tile_bytes;
  const int64_t bytes = plan.problem.m * row_bytes(here, 0);
  const Place from = reads(span, here, step.source, bytes);
  const Place to = writes(span, here, step.destination.behind(begin), tiles * tile_bytes);
  if (!here.list->tiles.chunks.empty()) {
    for (int32_t index = first; index < first + tiles; ++index) {
      const plan::TileCoord tile = plan::tile_coord(order, index);
      const int32_t place = tile.row * order.tiles_n + tile.column;
      touches(span, {key(here.rank, kCallersTiles, 0), place}, 1, false);
    }
  }
  const Node by = span.first;
  effect(by, [=, this] {
    const std::vector<Run> runs = read(from, bytes, by);
    if (runs.size() != 1 || runs[0].content.space != Content::Space::kProduct ||
        runs[0].position != 0) {
      fail(Fault::Kind::kResult, says(by), " packs what is not the product from its begin on");
    }
    Content content = runs[0].content;
    content.space = Content::Space::kTiles;
    write(to, Run{tiles * tile_bytes, first * tile_bytes, content});
  });
  holds(here, span, 1, 1, false);
}

void Simulation::take(Here& here, const Unpack& step, Span& span) {
  const plan::Plan& plan = *here.plan;
  const plan::TileOrder& order = here.list->orders[at(step.order)];
  const int64_t tile_bytes = int64_t{plan.tile_m} * plan.tile_n * plan::moved_bytes(plan.problem);
  const int32_t first = order.chunk_begin[step.chunk];
  const int32_t tiles = plan::chunk_tiles(order, step.chunk);
  const Node by = span.first;
  const Place from = reads(span, here, step.source.behind(int64_t{first} * step.terms * tile_bytes),
                           step.terms * tiles * tile_bytes);
  // First and last column of each row.
  std::map<int32_t, std::pair<int32_t, int32_t>> columns;
  for (int32_t index = first; index < first + tiles; ++index) {
    const plan::TileCoord tile = plan::tile_coord(order, index);
    auto& range = columns.try_emplace(tile.row, tile.column, tile.column).first->second;
    range = {std::min(range.first, tile.column), std::max(range.second, tile.column)};
  }
  const int64_t to_row = row_bytes(here, 0);
  std::vector<TileRows> rows;
  for (const auto& [row, range] : columns) {
    TileRows one;
    one.tile_row = row;
    one.first_column = range.first;
    one.columns = range.second + 1 - range.first;
    one.output_row = int64_t{row} * plan.tile_m;
    one.rows = std::clamp<int64_t>(plan.problem.m - one.output_row, 0, plan.tile_m);
    writes(span, here, step.destination.behind(one.output_row * to_row), one.rows * to_row);
    if (one.rows > 0) rows.push_back(one);
  }
  const Place to = {key(here, step.destination), step.destination.offset};
  const int32_t all = order.tiles_n;
  effect(by, [=, this, &step] {
    std::vector<std::vector<Run>> terms;
    for (int32_t term = 0; term < step.terms; ++term) {
      const int64_t bytes = tiles * tile_bytes;
      terms.push_back(read(from.behind(term * bytes), bytes, by));
    }
    std::vector<Run> sum = add(terms, false, by);
    if (step.bias) add_bias(sum, by);
    if (sum.size() != 1 || sum[0].content.space != Content::Space::kTiles ||
        sum[0].position != int64_t{first} * tile_bytes) {
      fail(Fault::Kind::kResult, says(by), " unpacks what are not the tiles of its chunk");
    }
    Content content = sum[0].content;
    content.space = Content::Space::kProduct;
    for (const TileRows& one : rows) {
      const int64_t begin = one.output_row * to_row;
      write_columns(to.behind(begin), one, all, {Run{one.rows * to_row, begin, content}}, by);
    }
  });
  holds(here, span, 1, 1, false);
}

void Simulation::take(Here& here, const AddTerms& step, Span& span) {
  const int64_t bytes = step.rows * row_bytes(here, 0);
  const Node by = span.first;
  std::vector<Place> terms;
  for (int32_t term = 0; term < step.terms; ++term) {
    terms.push_back(place(here, step.source.behind(term * step.stride), bytes, by));
  }
  adds(by, terms, {place(here, step.destination, bytes, by)}, bytes, step.bias);
  holds(here, span, 1, 1, false);
}

}  // namespace overlap::steps
