// The host functions of csrc/kernels: each launch with its parameters, but those that are 0 or null.
#include <algorithm>
#include <initializer_list>
#include <limits>

#include "kernels/chunk/rectangles.h"
#include "kernels/chunk/reorder.h"
#include "kernels/gemm/gemm.h"
#include "kernels/peer/interpreter.h"
#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_exchange.h"
#include "kernels/peer/peer_finish.h"
#include "kernels/peer/peer_low_latency.h"
#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "record.h"
#include "session.h"

namespace overlap::kernels {
namespace {

using recorder::at;
using recorder::cat;

constexpr int64_t kFlag = sizeof(uint64_t);

// A field as text; nothing if it is 0 or null.
struct Value {
  std::string text;

  template <std::integral Number>
  Value(Number number) : text(number == 0 ? "" : cat(static_cast<int64_t>(number))) {}
  Value(const void* pointer) : text(pointer == nullptr ? "" : at(pointer)) {}
  Value(std::string place) : text(place == "-" ? "" : std::move(place)) {}
  template <typename Enum>
    requires requires(Enum value) { plan::name(value); }
  Value(Enum value) : text(plan::name(value)) {}
};

// Each pointer's place, up to the first `count`.
template <size_t kSize, typename Pointer>
std::string each(Pointer* const (&pointers)[kSize], int count, int64_t bytes = 0) {
  std::string text;
  for (int i = 0; i < count; ++i) text += cat(i == 0 ? "" : " ", at(pointers[i], bytes));
  return text;
}

// `fields`: "p.m, at(p.counters, 4)", named by what follows the first point of each.
std::string show(std::string_view fields, std::initializer_list<Value> values) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz_.";
  std::string text;
  for (const Value& value : values) {
    size_t end = 0;
    for (int open = 0; end < fields.size() && (fields[end] != ',' || open > 0); ++end) {
      open += fields[end] == '(' ? 1 : fields[end] == ')' ? -1 : 0;
    }
    const size_t name = fields.find('.') + 1;
    const size_t name_end = fields.find_first_not_of(kLetters, name);
    if (!value.text.empty()) {
      text += cat(" ", fields.substr(name, name_end - name), " ", value.text);
    }
    fields.remove_prefix(std::min(end + 1, fields.size()));
  }
  return text;
}
#define SHOW(...) show(#__VA_ARGS__, {__VA_ARGS__})

cudaError_t launch(cudaStream_t stream, const std::string& text) {
  recorder::record().operation(stream, text);
  return cudaSuccess;
}

// Nothing of a wait that has the group's deadline and reports to the group.
template <typename Params>
std::string deadline(const Params& p) {
  std::string text;
  if (p.deadline_ns != recorder::kDeadlineNs) text += cat(" deadline ", p.deadline_ns, " ns");
  if (p.report != recorder::expected_report()) text += " reports elsewhere";
  return text;
}

// The slot's calls, by which flags are read, and the bits of the plan that stand above the numbers.
template <typename Params>
std::string call_of(const Params& p) {
  return SHOW(at(p.calls, kFlag), p.tag >> kCallTagShift);
}

std::string order_of(const plan::TileOrder& p) {
  std::string text = SHOW(p.tiles_m, p.tiles_n, p.parts) + " bands";
  for (int run = 0; run < p.num_runs; ++run) {
    text += cat(" ", p.runs[run].count, "x", p.runs[run].tile_rows);
  }
  text += " chunks end at";
  for (int chunk = 1; chunk <= p.num_chunks; ++chunk) text += cat(" ", p.chunk_begin[chunk]);
  return text;
}

std::string rows_of(const plan::RowMap& p) {
  constexpr const char* kModes[] = {"plain", "scatter", "gather", "split", "ranges"};
  std::string text = cat(" rows ", kModes[static_cast<int>(p.mode)]);
  text += SHOW(p.part_rows, p.own_part, p.block_rows, p.part_tile_rows, p.round_tile_rows,
               p.first_part, p.part_step);
  if (p.mode != plan::RowMap::Mode::kRanges) return text;
  text += " begin at";
  for (const int32_t begin : p.range_begin) text += cat(" ", begin);
  return text;
}

std::string signal_of(const PeerSignalParams& p) {
  return (p.ends_call ? " end" : cat(" step ", p.step)) + SHOW(each(p.flags, p.count, kFlag)) +
         call_of(p);
}

std::string wait_of(const PeerWaitParams& p) {
  std::string text = p.slot_is_free ? " free slot" : cat(" step ", p.step);
  text += " ranks";
  for (int rank = 0; rank < kMaxPeers; ++rank) {
    if ((p.ranks >> rank & 1) != 0) text += cat(" ", rank);
  }
  return text + SHOW(p.chunk, at(p.flags, kFlag)) + call_of(p) + deadline(p);
}

std::string tiles_of(const PeerTiles& p) {
  return SHOW(p.rank, p.ranks, each(p.announce, p.ranks - 1, kFlag), at(p.arrived, kFlag)) +
         call_of(p) + deadline(p);
}

std::string meeting_of(const PeerMeeting& p) {
  constexpr int64_t kFlags = kFlag * kMaxPeerBlocks;
  std::string text = SHOW(p.rank, p.ranks, p.chunk);
  for (int step = 0; step < 2; ++step) {
    text += SHOW(each(p.announce[step], p.ranks, kFlags), at(p.arrived[step], kFlags * p.ranks));
  }
  return text +
         SHOW(each(p.announce_end, p.ranks, kFlag), at(p.ended, kFlag * p.ranks),
              at(p.blocks_sent, 4), at(p.blocks_done, 4)) +
         call_of(p) + deadline(p);
}

std::string copy_of(const CopyRun& p) {
  return SHOW(p.bytes, at(p.from, p.bytes), at(p.to, p.bytes), p.chunk);
}

std::string gather_of(const GemmGather& p) {
  std::string text = SHOW(p.own_input);
  if (p.arrivals.flags != nullptr) text += cat("; arrivals", wait_of(p.arrivals));
  for (int i = 0; i < p.num_copies; ++i) text += cat("; carries", copy_of(p.copies[i]));
  return text;
}

std::string messages_of(const GemmMessages& p, int32_t chunks) {
  std::string text = cat("; messages", SHOW(at(p.stored, 4 * chunks)), meeting_of(p.meeting));
  for (const CopyRun& run : p.received) {
    if (run.bytes > 0) text += cat("; receives", copy_of(run));
  }
  return text;
}

std::string peers_of(const GemmPeers& p, int32_t chunks) {
  std::string text = SHOW(each(p.more_outputs, p.num_more_outputs), each(p.mirrors, p.num_mirrors),
                          p.arriving, p.collected, p.terms, p.rounds, p.spread_ns);
  for (int part = 0; part <= kMaxMoreOutputs; ++part) {
    if (p.sources[part] != nullptr) text += cat(", part ", part, " adds ", at(p.sources[part]));
  }
  if (p.tiles.ranks != 1) text += cat("; tiles", tiles_of(p.tiles));
  return p.messages ? text + messages_of(*p.messages, chunks) : text;
}

std::string gemm_of(plan::Kernel kernel, const GemmParams& p) {
  const int32_t chunks = p.order.num_chunks;
  std::string text =
      cat("gemm ", plan::name(kernel)) +
      SHOW(p.m, p.n, p.k, p.dtype, p.input, p.input_stride, p.weight, p.weight_stride, p.output,
           p.output_stride, p.layout, p.term, p.terms, p.first_tile, p.tiles_end(), p.ctas,
           p.smem_pad_bytes, at(p.counters, 4 * chunks), at(p.ending.tiles_taken, kFlag)) +
      rows_of(p.rows) + order_of(p.order);
  if (p.gather) text += gather_of(*p.gather);
  if (p.peers) text += peers_of(*p.peers, chunks);
  if (p.ending.signal.calls != nullptr) text += cat("; ending", signal_of(p.ending.signal));
  if (p.input_stride < p.k || p.output_stride < p.n || plan::element_bytes(p.dtype) != 2) {
    recorder::record().violation(cat("strides or dtype that no kernel takes: ", text));
  }
  return text;
}

std::string reorder_of(const ReorderParams& p) {
  return SHOW(p.chunk, p.m, p.n, p.dtype, p.tile_m, p.tile_n, p.packed, p.term, p.terms,
              p.row_major, p.bias, p.ctas) +
         order_of(p.order);
}

std::string transfer_of(const InterpreterParams& p, const InterpreterTransfer& one) {
  const auto place = [&](uint8_t base, int64_t offset, int64_t stride) {
    const auto* const begin = static_cast<const char*>(p.bases[base]) + offset;
    return at(begin, (one.rows - 1) * stride + one.row_bytes);
  };
  const auto flags = [&](int rank) { return at(p.flags[rank] + one.flag, kFlag * p.blocks); };
  std::string text = cat("; stream ", int{one.stream}, ": ", one.rows, " rows of ", one.row_bytes,
                         " bytes, ", place(one.source_base, one.source, one.source_stride), " by ",
                         one.source_stride, one.adds ? " added to " : " -> ",
                         place(one.destination_base, one.destination, one.destination_stride),
                         " by ", one.destination_stride);
  for (int wait = one.first_wait; wait < one.end_wait; ++wait) {
    const InterpreterWait& counter = p.waits[static_cast<size_t>(wait)];
    text += cat(" waits ", counter.counter, " = ", counter.count);
  }
  if (one.from >= 0) text += cat(" from ", int{one.from}, " at ", flags(p.rank));
  if (one.to >= 0) text += cat(" to ", int{one.to}, " at ", flags(one.to));
  return one.counter >= 0 ? text + cat(" counts ", one.counter) : text;
}

std::string interpreter_of(const InterpreterParams& p) {
  std::string text = "interpret" + SHOW(p.streams, p.blocks, p.dtype, p.ends_call,
                                        p.waits_for_slots, at(p.counters, 4));
  for (const InterpreterTransfer& one : p.transfers) text += transfer_of(p, one);
  return text + meeting_of(p);
}

std::string collective_of(const PeerCollectiveParams& p) {
  std::string text = "peer collective" + SHOW(p.reduces, p.gathers, p.dtype, p.own, p.output,
                                              p.stride, p.first, p.bias, p.row_count);
  for (int rank = 0; rank < p.ranks; ++rank) {
    const int64_t bytes = p.count[rank] * kPeerAccessBytes;
    text += cat("; rank ", rank);
    text += SHOW(p.count[rank], at(p.send[rank], bytes), at(p.destination[rank], bytes),
                 p.received[rank], p.final_destination[rank], at(p.final_received[rank], bytes));
  }
  return cat(text, ";", meeting_of(p));
}

std::string exchange_of(const PeerExchangeParams& p) {
  std::string text = "peer exchange" + SHOW(p.sends);
  for (int rank = 0; rank < p.ranks; ++rank) {
    const int64_t sent = p.send_count[rank] * kPeerAccessBytes;
    const int64_t received = p.receive_count[rank] * kPeerAccessBytes;
    text += cat("; rank ", rank);
    text +=
        SHOW(p.send_count[rank], at(p.send[rank], sent), at(p.destination[rank], sent),
             p.receive_count[rank], at(p.received[rank], received), at(p.output[rank], received));
  }
  return cat(text, ";", meeting_of(p));
}

std::string finish_of(const PeerFinishParams& p) {
  const int64_t bytes = 2 * p.finish.rows * p.finish.columns;
  return "all_reduce with a norm" +
         SHOW(p.in_two_steps, p.rank, p.ranks, p.finish.rows, p.finish.columns, p.finish.dtype,
              at(p.finish.terms, bytes), at(p.finish.sum, bytes), at(p.finish.normed, bytes),
              p.finish.bias, p.finish.residual) +
         call_of(p) + deadline(p);
}

std::string low_latency_of(const PeerLowLatencyParams& p) {
  constexpr int64_t kTurn = kFlag * kMaxPeers;  // the flags of one of two calls
  std::string text =
      "low latency all_reduce" + SHOW(p.in_pieces, p.rank, p.ranks, p.chunk, p.words, p.dtype,
                                      at(p.own, 4 * p.words), at(p.output, 4 * p.words), p.bias,
                                      p.row_words, p.buffer_bytes);
  for (int rank = 0; rank < p.ranks; ++rank) {
    text += cat("; rank ", rank);
    text += SHOW(at(p.destination[rank], 2 * p.buffer_bytes),
                 at(p.received[rank], 2 * p.buffer_bytes), at(p.announce[rank], kTurn + kFlag));
  }
  return cat(text, ";", SHOW(at(p.arrived, 2 * kTurn)), call_of(p), deadline(p));
}

std::string terms_of(const TermsParams& p) {
  const int64_t element = plan::element_bytes(p.dtype);
  const int64_t bytes = p.rows * p.n * element;
  const int64_t others = (p.terms - 1) * p.stride * element;
  return "add terms" + SHOW(p.terms, p.stride, p.rows, p.n, p.dtype, p.bias,
                            at(p.source, bytes + others), at(p.destination, bytes), p.ctas);
}

std::string count_of(const WaitParams& p) {
  const bool at_once = p.expected == std::numeric_limits<int32_t>::min();
  return cat("wait ", at(p.counter, 4), at_once ? " marks" : cat(" = ", p.expected), " chunk ",
             p.chunk, deadline(p));
}

}  // namespace

// A kernel with its parameters, and its text.
#define LAUNCH(function, Params, text)                         \
  cudaError_t function(const Params& p, cudaStream_t stream) { \
    return launch(stream, text);                               \
  }

LAUNCH(wait_counter, WaitParams, count_of(p))
LAUNCH(signal_peers_release_sys, PeerSignalParams, "signal" + signal_of(p))
LAUNCH(wait_peers_acquire_sys, PeerWaitParams, "wait for peers" + wait_of(p))
LAUNCH(interpret, InterpreterParams, interpreter_of(p))
LAUNCH(peer_collective, PeerCollectiveParams, collective_of(p))
LAUNCH(peer_exchange, PeerExchangeParams, exchange_of(p))
LAUNCH(peer_finish, PeerFinishParams, finish_of(p))
LAUNCH(peer_all_reduce_low_latency, PeerLowLatencyParams, low_latency_of(p))
LAUNCH(unpack_chunk, ReorderParams, "unpack" + reorder_of(p))
LAUNCH(pack_chunk, ReorderParams, "pack" + reorder_of(p))
LAUNCH(add_terms, TermsParams, terms_of(p))
// No case has these.
LAUNCH(copy_rectangles, std::vector<CopyRectangle>, cat("copy ", p.size(), " rectangles"))
LAUNCH(copy_listed_rows, ListedRows, "copy listed rows" + SHOW(p.rows))

cudaError_t load_kernels() {
  return cudaSuccess;
}

cudaError_t load_interpreter_kernels() {
  return cudaSuccess;
}

cudaError_t write_step_numbers(uint64_t*, int32_t, const uint64_t*, uint64_t, cudaStream_t) {
  return cudaErrorNotSupported;  // no case has it
}

bool gemm_supported(plan::Kernel, const GemmParams&) {
  return true;
}

bool copies_beside(plan::Kernel kernel) {
  return plan::is_sm90(kernel);
}

cudaError_t device_counters(int32_t** counters) {
  *counters = static_cast<int32_t*>(recorder::record().allocate("counters", 4 * kDeviceCounters));
  return cudaSuccess;
}

cudaError_t launch_gemm(plan::Kernel kernel, const GemmParams& p, cudaStream_t stream) {
  return launch(stream, gemm_of(kernel, p));
}

cudaError_t zero_counters(int32_t* counters, int32_t count, cudaStream_t stream) {
  return launch(stream, cat("zero ", count, " at ", at(counters, 4 * count)));
}

cudaError_t count(int32_t* counter, int32_t value, cudaStream_t stream) {
  return launch(stream, cat("count ", value, " at ", at(counter, 4)));
}

cudaError_t delay(int64_t microseconds, cudaStream_t stream) {
  return launch(stream, cat("delay ", microseconds, " us"));
}

cudaError_t meet_tiles(const PeerTiles& tiles, int64_t first_announced, int64_t announced,
                       int64_t first_awaited, int64_t awaited, int32_t distance,
                       cudaStream_t stream) {
  return launch(stream,
                cat("meet announces ", announced, " from ", first_announced, " awaits ", awaited,
                    " from ", first_awaited, " distance ", distance, tiles_of(tiles)));
}

}  // namespace overlap::kernels
