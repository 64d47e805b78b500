// Each step's name and its fields, in the one table that all printers walk. `visit` takes a name and a value: an integer, a
// bool, a text, a Where, or a vector of places or of structs with fields of their own. A field that a step lacks, or that
// nearly all steps of its kind have alike, is left out.
#pragma once

#include <iterator>
#include <optional>
#include <type_traits>
#include <vector>

#include "steps/list/step.h"

namespace overlap::steps {

inline const char* name(plan::RowMap::Mode mode) {
  constexpr const char* kNames[] = {"plain", "scatter", "gather", "split", "ranges"};
  return kNames[static_cast<size_t>(mode)];
}

template <typename Visit, typename Value>
void visit_given(Visit& visit, const char* name, const Value& value) {
  visit(name, value);
}
template <typename Visit, typename Value>
void visit_given(Visit& visit, const char* name, const std::optional<Value>& value) {
  if (value) visit(name, *value);
}

template <typename Value>
bool is_usual(const Value& value, const Value& usual) {
  return value == usual;
}
template <typename Item>
bool is_usual(const std::vector<Item>& items, const std::vector<Item>&) {
  return items.empty();
}

// FIELD: left out where it is not given. UNUSUAL: left out where it is as in a new item. AS: with a name of its own. WHEN:
// fields that depend on others.
#define FIELDS(Item, ...)                                                         \
  template <typename Visit>                                                       \
  void fields([[maybe_unused]] const Item& item, [[maybe_unused]] Visit& visit) { \
    __VA_ARGS__                                                                   \
  }
#define STEP(Kind, text, ...)            \
  inline const char* name(const Kind&) { \
    return text;                         \
  }                                      \
  FIELDS(Kind, __VA_ARGS__)
#define AS(text, value) visit_given(visit, text, value);
#define FIELD(member) AS(#member, item.member)
#define UNUSUAL(member)                                                \
  if (!is_usual(item.member, std::decay_t<decltype(item)>{}.member)) { \
    FIELD(member)                                                      \
  }
#define WHEN(condition, ...) \
  if (condition) {           \
    __VA_ARGS__              \
  }

// clang-format off
FIELDS(Target, AS("to", item.where) FIELD(adds))
FIELDS(Move, FIELD(from) FIELD(to) FIELD(bytes) FIELD(arrival))
FIELDS(Message, FIELD(peer) AS("at", item.where) FIELD(bytes))
FIELDS(Piece,
  FIELD(bytes) FIELD(send) FIELD(destination) FIELD(received)
  FIELD(final_destination) FIELD(final_received))
FIELDS(PeerMessages,
  FIELD(send_bytes) FIELD(send) FIELD(destination)
  FIELD(receive_bytes) FIELD(received) FIELD(output))
FIELDS(Communicator, FIELD(max_ctas) FIELD(lane))
FIELDS(Scratch, AS("buffer", name(item.buffer)) FIELD(bytes))
FIELDS(plan::BandRun, FIELD(tile_rows) FIELD(count))
FIELDS(plan::TileOrder,
  FIELD(tiles_m) FIELD(tiles_n) UNUSUAL(parts)
  AS("bands", std::vector(item.runs, item.runs + item.num_runs))
  AS("chunks_end_at", std::vector(item.chunk_begin + 1, item.chunk_begin + 1 + item.num_chunks)))
FIELDS(plan::RowMap,
  using Mode = plan::RowMap::Mode;
  AS("mode", name(item.mode))
  WHEN(item.mode == Mode::kRanges,
    FIELD(first_part)
    AS("begins", std::vector(std::begin(item.range_begin), std::end(item.range_begin))))
  WHEN(item.mode != Mode::kRanges, FIELD(part_rows))
  WHEN(item.mode == Mode::kGather, FIELD(own_part))
  WHEN(item.mode == Mode::kSplit,
    FIELD(part_tile_rows) FIELD(round_tile_rows) FIELD(first_part) FIELD(part_step)))

STEP(Fork, "fork", FIELD(side_lanes) FIELD(copies))
STEP(Join, "join", )
STEP(Gemm, "gemm",
  UNUSUAL(weight) AS("begin", item.rows.begin) AS("end", item.rows.end)
  FIELD(input) FIELD(outputs) UNUSUAL(mirrors)
  WHEN(item.map.mode != plan::RowMap::Mode::kPlain, AS("rows", item.map))
  WHEN(item.terms > 1, FIELD(term) FIELD(terms))
  FIELD(order) FIELD(first_tile) FIELD(end_tile) FIELD(ctas)
  UNUSUAL(counts) UNUSUAL(announces) UNUSUAL(awaits_chunks)
  FIELD(arriving) FIELD(terms_at) UNUSUAL(rounds) UNUSUAL(spread_ns)
  UNUSUAL(sends_messages) UNUSUAL(ends_call) UNUSUAL(moves))
STEP(CallersKernel, "callers_kernel", UNUSUAL(counts) UNUSUAL(awaits))
STEP(LibraryGemm, "library_gemm",
  UNUSUAL(weight) AS("begin", item.rows.begin) AS("end", item.rows.end)
  FIELD(input) AS("output", item.output.where) AS("adds", item.output.adds) FIELD(count))
STEP(WaitForTiles, "wait_for_tiles", FIELD(chunk) FIELD(tiles))
STEP(Mark, "mark", FIELD(chunk))
STEP(Arrive, "arrive", FIELD(chunk))
STEP(Collective, "collective",
  AS("kind", plan::name(item.kind)) FIELD(max_ctas) AS("communicator_lane", item.lane)
  FIELD(source) FIELD(destination) FIELD(count))
STEP(SendReceive, "send_receive",
  FIELD(max_ctas) AS("communicator_lane", item.lane) FIELD(sends) FIELD(receives))
STEP(Copy, "copy", FIELD(source) FIELD(destination) FIELD(bytes))
STEP(CopyRows, "copy_rows",
  FIELD(source) FIELD(source_stride) FIELD(destination) FIELD(destination_stride)
  FIELD(rows) FIELD(row_bytes) UNUSUAL(adds) FIELD(count) FIELD(from_rows) FIELD(to_rows))
STEP(Delay, "delay", FIELD(us))
STEP(Pack, "pack",
  FIELD(chunk) FIELD(order) FIELD(source) FIELD(destination) FIELD(term) FIELD(terms) FIELD(ctas))
STEP(Unpack, "unpack",
  FIELD(chunk) FIELD(order) FIELD(source) FIELD(destination) FIELD(terms) FIELD(ctas) FIELD(bias))
STEP(AddTerms, "add_terms",
  FIELD(source) FIELD(destination) FIELD(rows) FIELD(ctas)
  UNUSUAL(terms) UNUSUAL(stride) UNUSUAL(bias))
STEP(WaitForSlots, "wait_for_slots", )
STEP(WaitForPeers, "wait_for_peers", AS("number", item.step))
STEP(Signal, "signal", AS("number", item.step) FIELD(to_self))
STEP(EndCall, "end_call", )
STEP(MeetTiles, "meet_tiles",
  FIELD(first_announced) FIELD(first_awaited) FIELD(tiles) FIELD(distance)
  UNUSUAL(announces) UNUSUAL(awaits))
STEP(Announce, "announce", FIELD(flag) FIELD(peer))
STEP(Await, "await", FIELD(flag) FIELD(peer))
STEP(PeerCollective, "peer_collective",
  FIELD(reduces) FIELD(gathers) FIELD(bias) FIELD(stride) FIELD(first)
  FIELD(own) FIELD(output) FIELD(pieces))
STEP(LowLatency, "low_latency",
  FIELD(in_pieces) FIELD(bias) FIELD(bytes) FIELD(own) FIELD(output) UNUSUAL(finish))
STEP(PeerExchange, "peer_exchange", FIELD(sends) FIELD(messages))
// clang-format on

#undef FIELDS
#undef STEP
#undef AS
#undef FIELD
#undef UNUSUAL
#undef WHEN

}  // namespace overlap::steps
