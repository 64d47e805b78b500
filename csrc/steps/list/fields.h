// Each step's name and its fields, in the one list that text and JSON both walk. `visit` takes a name and a value:
// an integer, a bool, a text, a Where, or a vector of places or of structs with fields of their
// own. A field that a step lacks, or that nearly all steps of its kind have alike, is left out.
#pragma once

#include "steps/list/step.h"

namespace overlap::steps {

template <typename Visit>
void optional_field(Visit& visit, const char* name, const std::optional<Where>& where) {
  if (where.has_value()) visit(name, *where);
}
template <typename Visit, typename Value>
void unless(Visit& visit, const char* name, const Value& value, const Value& usual) {
  if (!(value == usual)) visit(name, value);
}
template <typename Visit, typename Item>
void unless_empty(Visit& visit, const char* name, const std::vector<Item>& items) {
  if (!items.empty()) visit(name, items);
}

template <typename Visit>
void fields(const Target& target, Visit& visit) {
  visit("to", target.where);
  optional_field(visit, "adds", target.adds);
}
template <typename Visit>
void fields(const Move& move, Visit& visit) {
  visit("from", move.from);
  visit("to", move.to);
  visit("bytes", move.bytes);
  visit("arrival", move.arrival);
}
template <typename Visit>
void fields(const Message& message, Visit& visit) {
  visit("peer", message.peer);
  visit("at", message.where);
  visit("bytes", message.bytes);
}
template <typename Visit>
void fields(const Piece& piece, Visit& visit) {
  visit("bytes", piece.bytes);
  optional_field(visit, "send", piece.send);
  optional_field(visit, "destination", piece.destination);
  visit("received", piece.received);
  optional_field(visit, "final_destination", piece.final_destination);
  optional_field(visit, "final_received", piece.final_received);
}
template <typename Visit>
void fields(const PeerMessages& messages, Visit& visit) {
  visit("send_bytes", messages.send_bytes);
  optional_field(visit, "send", messages.send);
  optional_field(visit, "destination", messages.destination);
  visit("receive_bytes", messages.receive_bytes);
  optional_field(visit, "received", messages.received);
  visit("output", messages.output);
}
template <typename Visit>
void fields(const CounterWait& wait, Visit& visit) {
  visit("counter", wait.counter);
  visit("count", wait.count);
}
template <typename Visit>
void fields(const Half& half, Visit& visit) {
  visit("flag", half.flag);
  unless(visit, "stream", half.stream, 0);
  visit("source", half.source);
  visit("source_stride", half.source_stride);
  visit("destination", half.destination);
  visit("destination_stride", half.destination_stride);
  visit("rows", half.rows);
  visit("row_bytes", half.row_bytes);
  unless(visit, "adds", half.adds, false);
  unless_empty(visit, "waits", half.waits);
  if (half.from) visit("from", *half.from);
  if (half.to) visit("peer", *half.to);
  if (half.counter) visit("counter", *half.counter);
}
template <typename Visit>
void fields(const Communicator& communicator, Visit& visit) {
  visit("max_ctas", communicator.max_ctas);
  visit("lane", communicator.lane);
}
template <typename Visit>
void fields(const Scratch& scratch, Visit& visit) {
  visit("buffer", name(scratch.buffer));
  visit("bytes", scratch.bytes);
}
template <typename Visit>
void fields(const plan::BandRun& run, Visit& visit) {
  visit("tile_rows", run.tile_rows);
  visit("count", run.count);
}
template <typename Visit>
void fields(const plan::TileOrder& order, Visit& visit) {
  visit("tiles_m", order.tiles_m);
  visit("tiles_n", order.tiles_n);
  unless(visit, "parts", order.parts, 1);
  visit("bands", std::vector<plan::BandRun>(order.runs, order.runs + order.num_runs));
  visit("chunks_end_at",
        std::vector<int32_t>(order.chunk_begin + 1, order.chunk_begin + 1 + order.num_chunks));
}

inline const char* name(plan::RowMap::Mode mode) {
  constexpr const char* kNames[] = {"plain", "scatter", "gather", "split", "ranges"};
  return kNames[static_cast<size_t>(mode)];
}

template <typename Visit>
void fields(const plan::RowMap& map, Visit& visit) {
  using Mode = plan::RowMap::Mode;
  visit("mode", name(map.mode));
  if (map.mode == Mode::kRanges) {
    visit("first_part", map.first_part);
    visit("begins", std::vector<int32_t>(std::begin(map.range_begin), std::end(map.range_begin)));
    return;
  }
  visit("part_rows", map.part_rows);
  if (map.mode == Mode::kGather) visit("own_part", map.own_part);
  if (map.mode != Mode::kSplit) return;
  visit("part_tile_rows", map.part_tile_rows);
  visit("round_tile_rows", map.round_tile_rows);
  visit("first_part", map.first_part);
  visit("part_step", map.part_step);
}

inline const char* name(const Fork&) {
  return "fork";
}
template <typename Visit>
void fields(const Fork& step, Visit& visit) {
  visit("side_lanes", step.side_lanes);
  visit("copies", step.copies);
}

inline const char* name(const Join&) {
  return "join";
}
template <typename Visit>
void fields(const Join&, Visit&) {}

inline const char* name(const Gemm&) {
  return "gemm";
}
template <typename Visit>
void fields(const Gemm& step, Visit& visit) {
  unless(visit, "weight", step.weight, 0);
  visit("begin", step.rows.begin);
  visit("end", step.rows.end);
  visit("input", step.input);
  visit("outputs", step.outputs);
  unless_empty(visit, "mirrors", step.mirrors);
  if (step.map.mode != plan::RowMap::Mode::kPlain) visit("rows", step.map);
  if (step.terms > 1) {
    visit("term", step.term);
    visit("terms", step.terms);
  }
  visit("order", step.order);
  visit("first_tile", step.first_tile);
  visit("end_tile", step.end_tile);
  visit("ctas", step.ctas);
  unless(visit, "counts", step.counts, false);
  unless(visit, "announces", step.announces, false);
  unless(visit, "awaits_chunks", step.awaits_chunks, false);
  optional_field(visit, "arriving", step.arriving);
  optional_field(visit, "terms_at", step.terms_at);
  unless(visit, "rounds", step.rounds, false);
  unless(visit, "spread_ns", step.spread_ns, 0);
  unless(visit, "sends_messages", step.sends_messages, false);
  unless(visit, "ends_call", step.ends_call, false);
  unless_empty(visit, "moves", step.moves);
}

inline const char* name(const LibraryGemm&) {
  return "library_gemm";
}
template <typename Visit>
void fields(const LibraryGemm& step, Visit& visit) {
  unless(visit, "weight", step.weight, 0);
  visit("begin", step.rows.begin);
  visit("end", step.rows.end);
  visit("input", step.input);
  visit("output", step.output.where);
  optional_field(visit, "adds", step.output.adds);
  optional_field(visit, "count", step.count);
}

inline const char* name(const WaitForTiles&) {
  return "wait_for_tiles";
}
template <typename Visit>
void fields(const WaitForTiles& step, Visit& visit) {
  visit("chunk", step.chunk);
  visit("tiles", step.tiles);
}

inline const char* name(const CallersKernel&) {
  return "callers_kernel";
}
template <typename Visit>
void fields(const CallersKernel& step, Visit& visit) {
  unless(visit, "counts", step.counts, false);
  unless(visit, "awaits", step.awaits, false);
}

inline const char* name(const Arrive&) {
  return "arrive";
}
template <typename Visit>
void fields(const Arrive& step, Visit& visit) {
  visit("chunk", step.chunk);
}

inline const char* name(const Mark&) {
  return "mark";
}
template <typename Visit>
void fields(const Mark& step, Visit& visit) {
  visit("chunk", step.chunk);
}

inline const char* name(const Collective&) {
  return "collective";
}
template <typename Visit>
void fields(const Collective& step, Visit& visit) {
  visit("kind", plan::name(step.kind));
  visit("max_ctas", step.max_ctas);
  visit("communicator_lane", step.lane);
  visit("source", step.source);
  visit("destination", step.destination);
  visit("count", step.count);
}

inline const char* name(const SendReceive&) {
  return "send_receive";
}
template <typename Visit>
void fields(const SendReceive& step, Visit& visit) {
  visit("max_ctas", step.max_ctas);
  visit("communicator_lane", step.lane);
  visit("sends", step.sends);
  visit("receives", step.receives);
}

inline const char* name(const Copy&) {
  return "copy";
}
template <typename Visit>
void fields(const Copy& step, Visit& visit) {
  visit("source", step.source);
  visit("destination", step.destination);
  visit("bytes", step.bytes);
}

inline const char* name(const CopyRows&) {
  return "copy_rows";
}
template <typename Visit>
void fields(const CopyRows& step, Visit& visit) {
  visit("source", step.source);
  visit("source_stride", step.source_stride);
  visit("destination", step.destination);
  visit("destination_stride", step.destination_stride);
  visit("rows", step.rows);
  visit("row_bytes", step.row_bytes);
  unless(visit, "adds", step.adds, false);
  optional_field(visit, "count", step.count);
  optional_field(visit, "from_rows", step.from_rows);
  optional_field(visit, "to_rows", step.to_rows);
}

inline const char* name(const Delay&) {
  return "delay";
}
template <typename Visit>
void fields(const Delay& step, Visit& visit) {
  visit("us", step.us);
}

inline const char* name(const Pack&) {
  return "pack";
}
template <typename Visit>
void fields(const Pack& step, Visit& visit) {
  visit("chunk", step.chunk);
  visit("order", step.order);
  visit("source", step.source);
  visit("destination", step.destination);
  visit("term", step.term);
  visit("terms", step.terms);
  visit("ctas", step.ctas);
}

inline const char* name(const Unpack&) {
  return "unpack";
}
template <typename Visit>
void fields(const Unpack& step, Visit& visit) {
  visit("chunk", step.chunk);
  visit("order", step.order);
  visit("source", step.source);
  visit("destination", step.destination);
  visit("terms", step.terms);
  visit("ctas", step.ctas);
  visit("bias", step.bias);
}

inline const char* name(const AddTerms&) {
  return "add_terms";
}
template <typename Visit>
void fields(const AddTerms& step, Visit& visit) {
  visit("source", step.source);
  visit("destination", step.destination);
  visit("rows", step.rows);
  visit("ctas", step.ctas);
  unless(visit, "terms", step.terms, 1);
  unless(visit, "stride", step.stride, int64_t{0});
  unless(visit, "bias", step.bias, true);
}

inline const char* name(const WaitForSlots&) {
  return "wait_for_slots";
}
template <typename Visit>
void fields(const WaitForSlots&, Visit&) {}

inline const char* name(const WaitForPeers&) {
  return "wait_for_peers";
}
template <typename Visit>
void fields(const WaitForPeers& step, Visit& visit) {
  visit("number", step.step);
}

inline const char* name(const Signal&) {
  return "signal";
}
template <typename Visit>
void fields(const Signal& step, Visit& visit) {
  visit("number", step.step);
  visit("to_self", step.to_self);
}

inline const char* name(const EndCall&) {
  return "end_call";
}
template <typename Visit>
void fields(const EndCall&, Visit&) {}

inline const char* name(const MeetTiles&) {
  return "meet_tiles";
}
template <typename Visit>
void fields(const MeetTiles& step, Visit& visit) {
  visit("first_announced", step.first_announced);
  visit("first_awaited", step.first_awaited);
  visit("tiles", step.tiles);
  visit("distance", step.distance);
  unless(visit, "announces", step.announces, true);
  unless(visit, "awaits", step.awaits, true);
}

inline const char* name(const Announce&) {
  return "announce";
}
template <typename Visit>
void fields(const Announce& step, Visit& visit) {
  visit("flag", step.flag);
  visit("peer", step.peer);
}

inline const char* name(const Await&) {
  return "await";
}
template <typename Visit>
void fields(const Await& step, Visit& visit) {
  visit("flag", step.flag);
  visit("peer", step.peer);
}

inline const char* name(const Count&) {
  return "count";
}
template <typename Visit>
void fields(const Count& step, Visit& visit) {
  visit("counter", step.counter);
  visit("count", step.count);
}

inline const char* name(const Interpret&) {
  return "interpret";
}
template <typename Visit>
void fields(const Interpret& step, Visit& visit) {
  visit("streams", step.streams);
  visit("blocks", step.blocks);
  unless(visit, "ends_call", step.ends_call, false);
  visit("halves", step.halves);
}

inline const char* name(const PeerCollective&) {
  return "peer_collective";
}
template <typename Visit>
void fields(const PeerCollective& step, Visit& visit) {
  visit("reduces", step.reduces);
  visit("gathers", step.gathers);
  visit("bias", step.bias);
  visit("stride", step.stride);
  visit("first", step.first);
  visit("own", step.own);
  visit("output", step.output);
  visit("pieces", step.pieces);
}

inline const char* name(const LowLatency&) {
  return "low_latency";
}
template <typename Visit>
void fields(const LowLatency& step, Visit& visit) {
  visit("in_pieces", step.in_pieces);
  visit("bias", step.bias);
  visit("bytes", step.bytes);
  visit("own", step.own);
  visit("output", step.output);
  if (step.finish) visit("finish", step.finish);
}

inline const char* name(const PeerExchange&) {
  return "peer_exchange";
}
template <typename Visit>
void fields(const PeerExchange& step, Visit& visit) {
  visit("sends", step.sends);
  visit("messages", step.messages);
}

}  // namespace overlap::steps
