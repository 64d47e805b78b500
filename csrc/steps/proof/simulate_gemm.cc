// GEMMs of a plan's kernel taken apart: by chunks that are counted or awaited, by phases and rows of tiles of a ring.
#include <algorithm>

#include "steps/proof/simulation.h"

namespace overlap::steps {

struct GemmPiece {
  int32_t chunk = 0;      // of the order
  int32_t phase = 0;      // with kSplit
  int32_t first_row = 0;  // with kSplit, of the part's tile rows
  int32_t end_row = 0;
  int32_t tiles = 0;
  std::vector<TileRows> rows;
};

namespace {

// A ring's tile meets only the same tile of other phases, so rows of tiles that are looked at together stand for each
// of them; this number of rows shows what comes first.
constexpr int32_t kRowGroups = 4;

// With map kSplit: the last part may have fewer rows than the others.
int64_t rows_of_part(const Gemm& step, int32_t part) {
  const int64_t rows = step.map.part_rows;
  return std::min(rows, step.rows.count() - part * rows);
}

TileRows tile_rows(const plan::Plan& plan, const Gemm& step, const plan::TileOrder& order,
                   int32_t tile_row) {
  using Mode = plan::RowMap::Mode;
  const int64_t tile = plan.tile_m;
  const plan::TileRowPlace place =
      plan::tile_row_place(order, step.map, static_cast<int32_t>(tile), tile_row);
  TileRows rows;
  rows.own_input = place.own_input;
  rows.input_row = place.input_row;
  rows.tile_row = tile_row;
  switch (step.map.mode) {
    case Mode::kPlain: {
      const int64_t all = step.rows.count();
      rows.rows = std::clamp<int64_t>(all - place.input_row, 0, tile);
      rows.output_row = place.input_row;
      break;
    }
    case Mode::kScatter: {
      const plan::PartRow part = plan::part_row(order, tile_row);
      const int64_t first = int64_t{part.row} * tile;
      rows.rows = std::clamp<int64_t>(step.map.part_rows - first, 0, tile);
      rows.stored_rows = tile;
      rows.output_row = int64_t{tile_row} * tile;
      break;
    }
    case Mode::kGather: {
      const int64_t first = int64_t{place.output_row} * tile;
      rows.rows = std::clamp<int64_t>(step.map.part_rows - first, 0, tile);
      rows.output_row = int64_t{place.output_part} * step.map.part_rows + first;
      break;
    }
    case Mode::kSplit: {
      const int64_t first = int64_t{place.output_row} * tile;
      rows.rows = std::clamp<int64_t>(rows_of_part(step, place.output_part) - first, 0, tile);
      rows.output = place.output_part;
      rows.output_row = first;
      break;
    }
    case Mode::kRanges: {
      const int32_t part = place.output_part;
      const int64_t all = step.rows.count();
      const int64_t end = part + 1 < order.parts ? step.map.range_begin[part + 1] : all;
      rows.rows = std::clamp<int64_t>(end - place.input_row, 0, tile);
      rows.output = part;
      rows.output_row = int64_t{place.output_row} * tile;
      break;
    }
  }
  rows.stored_rows = std::max(rows.stored_rows, rows.rows);
  return rows;
}

std::vector<GemmPiece> pieces(const plan::Plan& plan, const plan::TileOrder& order,
                              const Gemm& step) {
  const bool split = step.map.mode == plan::RowMap::Mode::kSplit;
  const int32_t height = step.map.part_tile_rows;
  const int32_t groups = !split ? 1 : step.announces ? std::min(kRowGroups, height) : 1;
  std::map<std::pair<int32_t, int32_t>, GemmPiece> found;
  if (plan.layout == plan::Layout::kPacked) {
    for (int32_t chunk = 0; chunk < order.num_chunks; ++chunk) {
      GemmPiece piece;
      piece.chunk = chunk;
      piece.tiles = plan::chunk_tiles(order, chunk);
      found[{chunk, 0}] = piece;
    }
  }
  for (int32_t row = 0; row < order.tiles_m && found.size() < at(plan::kMaxChunks + 1); ++row) {
    if (plan.layout == plan::Layout::kPacked) break;
    const int32_t index = plan::tile_index(order, {row, 0});
    const int32_t stride = order.tiles_n > 1 ? plan::tile_index(order, {row, 1}) - index : 1;
    const auto column_at = [&](int32_t tile) {
      return std::clamp((tile - index + stride - 1) / stride, 0, order.tiles_n);
    };
    // Rounded towards zero, what lies before the row has no columns either way.
    const int32_t first = step.first_tile <= index ? 0 : column_at(step.first_tile);
    const int32_t end = step.end_tile <= index ? 0 : column_at(step.end_tile);
    if (end <= first) continue;
    TileRows rows = tile_rows(plan, step, order, row);
    rows.first_column = first;
    rows.columns = end - first;
    std::pair<int32_t, int32_t> which = {plan::tile_chunk(order, index), 0};
    plan::SplitRow place;
    if (split) {
      place = plan::split_row(order, step.map, row);
      which = {place.phase, place.row * groups / height};
    }
    GemmPiece& piece = found[which];
    piece.chunk = which.first;
    piece.tiles += rows.columns;
    if (split) {
      piece.phase = place.phase;
      piece.first_row = (which.second * height + groups - 1) / groups;
      piece.end_row = ((which.second + 1) * height + groups - 1) / groups;
    }
    if (rows.stored_rows == 0) continue;
    if (!piece.rows.empty()) {
      TileRows& before = piece.rows.back();
      const bool whole = before.columns == order.tiles_n && rows.columns == order.tiles_n;
      if (whole && before.own_input == rows.own_input && before.output == rows.output &&
          before.rows == before.stored_rows && before.input_row + before.rows == rows.input_row &&
          before.output_row + before.rows == rows.output_row && rows.rows == rows.stored_rows) {
        before.rows += rows.rows;
        before.stored_rows = before.rows;
        continue;
      }
    }
    piece.rows.push_back(rows);
  }
  std::vector<GemmPiece> result;
  for (auto& [which, piece] : found) result.push_back(std::move(piece));
  return result;
}

}  // namespace

// The contents of a piece, and its places.
void Simulation::compute(Node by, Here& here, const Gemm& step, const GemmPiece& piece) {
  if (here.plan->layout == plan::Layout::kPacked) {
    compute_packed(by, here, step, piece);
    return;
  }
  const bool split = step.map.mode == plan::RowMap::Mode::kSplit;
  const bool last = !split || piece.phase + 1 == here.list->orders[at(step.order)].parts;
  const int32_t columns = here.list->orders[at(step.order)].tiles_n;
  for (const TileRows& rows : piece.rows) compute_rows(by, here, step, rows, columns, last);
}

void Simulation::compute_packed(Node by, Here& here, const Gemm& step, const GemmPiece& piece) {
  const plan::Plan& plan = *here.plan;
  const int64_t from_row = input_row_bytes(here);
  const int64_t to_row = row_bytes(here, step.weight);
  const int64_t tile_bytes = int64_t{plan.tile_m} * plan.tile_n * plan::moved_bytes(plan.problem);
  const int64_t first = here.list->orders[at(step.order)].chunk_begin[piece.chunk];
  const int64_t bytes = step.rows.count() * from_row;
  const int64_t made_bytes = piece.tiles * tile_bytes;
  const Place from = reads({by, by}, here, step.input, bytes);
  const Place to =
      writes({by, by}, here,
             step.outputs[0].where.behind(first * step.terms * tile_bytes + step.term * made_bytes),
             made_bytes);
  const int32_t turn = here.turn;
  effect(by, [=, this] {
    const std::vector<Run> made = product(read(from, bytes, by), from_row, to_row, 0, turn, by);
    if (made.size() != 1 || made[0].position != 0) {
      fail(Fault::Kind::kResult, says(by), " computes rows that are not the product's");
    }
    Content content = made[0].content;
    content.space = Content::Space::kTiles;
    write(to, Run{made_bytes, first * tile_bytes, content});
  });
}

void Simulation::compute_rows(Node by, Here& here, const Gemm& step, const TileRows& rows,
                              int32_t columns, bool last) {
  const int64_t from_row = input_row_bytes(here);
  const int64_t to_row = row_bytes(here, step.weight);
  const Where input = rows.own_input ? Where{Buffer::kInput} : step.input;
  const Place from =
      reads({by, by}, here, input.behind(rows.input_row * from_row), rows.rows * from_row);
  const Target& target = step.outputs[at(rows.output)];
  // The terms of the sum, in order; null: what this GEMM makes.
  std::vector<std::optional<Place>> terms;
  const auto adds = [&](const Where& base) {
    const Where source = base.behind(rows.output_row * to_row);
    terms.emplace_back(reads({by, by}, here, source, rows.rows * to_row));
  };
  if (target.adds) {
    adds(*target.adds);
    terms.emplace_back();
  }
  for (int32_t rank = 0; step.terms_at && last && rank < ranks_; ++rank) {
    if (rank == here.rank) {
      terms.emplace_back();
    } else {
      adds(step.terms_at->behind(rank * step.map.part_rows * to_row));
    }
  }
  std::vector<Place> targets;
  const auto stores = [&](const Where& base) {
    const Where to = base.behind(rows.output_row * to_row);
    targets.push_back(writes({by, by}, here, to, rows.stored_rows * to_row));
  };
  stores(target.where);
  for (const Where& mirror : step.mirrors) {
    if (last) stores(mirror);
  }
  const int32_t turn = here.turn;
  effect(by, [=, this, &step] {
    std::vector<Run> made =
        product(read(from, rows.rows * from_row, by), from_row, to_row, step.weight, turn, by);
    if (!terms.empty()) {
      std::vector<std::vector<Run>> parts;
      for (const std::optional<Place>& term : terms) {
        parts.push_back(term ? read(*term, rows.rows * to_row, by) : made);
      }
      made = add(parts, false, by);
    }
    // The padding of a part is nothing.
    if (rows.stored_rows > rows.rows) {
      made.push_back({(rows.stored_rows - rows.rows) * to_row, 0, {}});
    }
    for (const Place& to : targets) write_columns(to, rows, columns, made, by);
  });
}

// Flags of a ring's tiles.
void Simulation::pass_tiles(const Span& span, Here& here, const Gemm& step,
                            const GemmPiece& piece) {
  const plan::TileOrder& order = here.list->orders[at(step.order)];
  const int64_t part = part_tiles(here);
  const int64_t begin = int64_t{piece.first_row} * order.tiles_n;
  const int64_t end = int64_t{piece.end_row} * order.tiles_n;
  const Node by = span.last;
  reads_calls(span, here);
  const bool last = piece.phase + 1 == ranks_;
  if (step.terms_at) {
    for (int32_t distance = 1; last && distance < ranks_; ++distance) {
      await_tiles(span, here, (distance - 1) * part + begin, (distance - 1) * part + end);
    }
    if (!last) announce_tiles(by, here, ranks_ - 1 - piece.phase, begin, end);
  } else if (piece.phase > 0) {
    await_tiles(span, here, (piece.phase - 1) * part + begin, (piece.phase - 1) * part + end);
  }
  if (!last) {
    if (!step.terms_at) {
      announce_tiles(by, here, 1, piece.phase * part + begin, piece.phase * part + end);
    }
  } else if (!step.mirrors.empty()) {
    for (int32_t distance = 1; distance < ranks_; ++distance) {
      announce_tiles(by, here, distance, piece.phase * part + begin, piece.phase * part + end);
    }
  }
}

// The peers' final tiles.
void Simulation::collect(Here& here, const Gemm& step, const Span& span) {
  const int64_t to_row = row_bytes(here, step.weight);
  const int64_t part = part_tiles(here);
  const int32_t height = step.map.part_tile_rows;
  const int32_t columns = here.list->orders[at(step.order)].tiles_n;
  const int32_t groups = std::min(kRowGroups, height);
  for (int32_t distance = 1; distance < ranks_; ++distance) {
    const int32_t peer = (here.rank + ranks_ - distance) % ranks_;
    const int64_t rows = rows_of_part(step, peer);
    for (int32_t group = 0; group < groups; ++group) {
      const int64_t first = (int64_t{group} * height + groups - 1) / groups;
      const int64_t end = ((int64_t{group} + 1) * height + groups - 1) / groups;
      const int64_t begin_row = std::min(rows, first * here.plan->tile_m);
      const int64_t end_row = std::min(rows, end * here.plan->tile_m);
      const Node by = node_within(span, here, "collects");
      reads_calls({span.first, by}, here);
      const int64_t flags = (ranks_ - 1 + distance - 1) * part;
      await_tiles({span.first, by}, here, flags + first * columns, flags + end * columns);
      const int64_t offset = (int64_t{peer} * step.map.part_rows + begin_row) * to_row;
      moves(by, here, step.arriving->behind(offset), {Buffer::kOutput, offset},
            (end_row - begin_row) * to_row);
    }
  }
}

// Messages to all peers, and theirs: flags as in a kernel that exchanges them. (Each is announced by itself, at the
// latest when all have been made, which is what stands here.)
void Simulation::exchange(Here& here, const Gemm& step, const Span& span, Node made) {
  announce(made, here, 0);
  const Node met = node(here, "has met the peers");
  graph_.edge(span.first, met);
  await(met, here, 0);
  for (const Move& move : step.moves) {
    moves(node_within({met, span.last}, here, "receives"), here, move.from, move.to, move.bytes);
  }
  graph_.edge(met, span.last);
}

// Clusters draw tiles in their order, and wait with them in hand: what a tile adds has to come before it, so that
// whatever clusters run come to it.
void Simulation::check_drawing(const Here& here, const Gemm& step) const {
  const plan::TileOrder& order = here.list->orders[at(step.order)];
  const int32_t height = step.map.part_tile_rows;
  std::vector<int32_t> first(at(order.parts * height), -1);
  for (int32_t row = 0; row < order.tiles_m; ++row) {
    const plan::SplitRow place = plan::split_row(order, step.map, row);
    first[at(place.phase * height + place.row)] = plan::tile_index(order, {row, 0});
  }
  for (size_t i = at(height); i < first.size(); ++i) {
    if (first[i - at(height)] < first[i]) continue;
    fail(Fault::Kind::kProgress, says(here.turn, here.rank, here.id), " draws tile row ",
         i % at(height), " of phase ", i / at(height),
         " before that of the phase before, which it adds to: clusters that hold all SMs would "
         "wait for tiles that none of them has");
  }
}

void Simulation::take(Here& here, const Gemm& step, Span& span) {
  const Node end = end_of(here, span, "ends");
  const bool gathers = step.map.mode == plan::RowMap::Mode::kGather;
  const auto rows_arrive = [&](Node by, int32_t arrival) {
    if (!step.awaits_chunks || arrival == 0) return;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      if (peer != here.rank) await_arrival({span.first, by}, here, peer, arrival - 1);
    }
  };
  if (step.announces) check_drawing(here, step);
  if (step.sends_messages) meet(span.first, here, "peer_exchange");
  const Node made = step.sends_messages ? node(here, "has made all messages") : end;
  for (const GemmPiece& piece : pieces(*here.plan, here.list->orders[at(step.order)], step)) {
    const Node by = node_within({span.first, made}, here);
    compute(by, here, step, piece);
    if (step.counts) here.counted[piece.chunk] = {by, piece.tiles};
    if (gathers) rows_arrive(by, piece.chunk);
    if (step.announces) pass_tiles({span.first, by}, here, step, piece);
  }
  if (step.sends_messages) {
    graph_.edge(span.first, made);
    graph_.edge(made, end);
    exchange(here, step, span, made);
  }
  for (const Move& move : step.moves) {
    if (step.sends_messages) break;
    const Node by = node_within(span, here, "moves");
    rows_arrive(by, move.arrival);
    moves(by, here, move.from, move.to, move.bytes);
  }
  if (step.arriving) collect(here, step, span);
  if (step.ends_call) {
    // Numbers of a call must be sent before it is counted, those of this rank too.
    if (step.awaits_chunks) {
      const Node seen = node_within(span, here, "has seen its own signal");
      await_arrival({span.first, seen}, here, here.rank, here.list->chunks - 1);
    }
    ends_call(end, here);
  }
  const bool waits = step.awaits_chunks || step.announces || step.sends_messages;
  holds(here, span, step.ctas, here.plan->cluster_m, waits);
}

}  // namespace overlap::steps
