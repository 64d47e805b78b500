// The host functions of csrc/kernels: the name of each launch, the memory that it is given in the order of its parameters, and
// the numbers that say what it waits for and announces.
#include <limits>

#include "kernels/chunk/rectangles.h"
#include "kernels/chunk/reorder.h"
#include "kernels/gemm/gemm.h"
#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_exchange.h"
#include "kernels/peer/peer_finish.h"
#include "kernels/peer/peer_low_latency.h"
#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "record.h"

namespace overlap::kernels {
namespace {

using recorder::at;
using recorder::cat;
using recorder::record;

// A text, a number, or a place; or all of an array but its nulls and zeros.
template <typename Value>
std::string piece(const Value& value) {
  std::string text;
  if constexpr (std::convertible_to<const Value&, std::string_view>) {
    text = cat(std::string_view(value).empty() ? "" : " ", std::string_view(value));
  } else if constexpr (std::is_array_v<Value>) {
    for (const auto& one : value) text += one == 0 ? "" : piece(one);
  } else if constexpr (std::integral<Value>) {
    text = cat(" ", static_cast<int64_t>(value));
  } else {
    text = cat(" ", at(value, 1));
  }
  return text;
}
template <typename... Pieces>
std::string show(const Pieces&... pieces) {
  return (piece(pieces) + ...);
}

// Every number that a call announces has its plan's tag; every wait has the group's deadline and reports to the group.
template <typename Params>
const uint64_t* calls_of(const Params& p) {
  if (p.tag == 0) record().violation("a call without its plan's tag");
  if constexpr (requires { p.deadline_ns; }) record().expect_deadline(p.deadline_ns, p.report);
  return p.calls;
}

std::string signal_of(const PeerSignalParams& p) {
  return show("signals", p.ends_call ? "end" : cat("step ", p.step), p.flags, calls_of(p));
}

std::string wait_of(const PeerWaitParams& p) {
  return show("waits for", p.slot_is_free ? "slots" : cat("step ", p.step), "mask", p.ranks,
              "chunk", p.chunk, p.flags, calls_of(p));
}

std::string meeting_of(const PeerMeeting& p) {
  return ";" + show("meets", p.announce[0], p.arrived[0], p.announce[1], p.arrived[1], "end",
                    p.announce_end, p.ended, p.blocks_sent, p.blocks_done, calls_of(p));
}

std::string copy_of(const CopyRun& p) {
  if (p.bytes == 0) return "";
  return cat("; copies ", p.bytes, " bytes ", at(p.from, p.bytes), " -> ", at(p.to, p.bytes),
             " chunk ", p.chunk);
}

std::string peers_of(const GemmPeers& p) {
  std::string text = show("and", p.more_outputs, "mirrors", p.mirrors, p.arriving, p.collected,
                          p.terms, "adds", p.sources, "over", p.spread_ns, "ns");
  if (p.tiles.ranks != 1) {
    text += ";" + show("tiles", p.tiles.announce, p.tiles.arrived, calls_of(p.tiles));
  }
  if (!p.messages) return text;
  text += ";" + show("messages", p.messages->stored) + meeting_of(p.messages->meeting);
  for (const CopyRun& run : p.messages->received) text += copy_of(run);
  return text;
}

std::string gemm_of(const GemmParams& p) {
  std::string text =
      show("gemm of", p.m, "rows, tiles", p.first_tile, "to", p.tiles_end(), "by", p.ctas, "map",
           static_cast<int>(p.rows.mode), p.input, p.weight, "->", p.output, p.counters,
           p.terms == 1 ? "" : cat("term ", p.term, " of ", p.terms));
  if (p.gather) {
    text += show("own", p.gather->own_input);
    if (p.gather->arrivals.flags != nullptr) text += cat(";", wait_of(p.gather->arrivals));
    for (const CopyRun& run : p.gather->copies) text += copy_of(run);
  }
  if (p.peers) text += peers_of(*p.peers);
  if (p.ending.tiles_taken != nullptr) text += ";" + show("takes by", p.ending.tiles_taken);
  return p.ending.signal.calls == nullptr ? text : cat(text, ";", signal_of(p.ending.signal));
}

std::string lines_of(const LinePeers& p) {
  for (const void* place : p.received) (void)at(place, 2 * p.buffer_bytes);
  return ";" + show("sends to", p.destination, "receives", p.received, "announces", p.announce,
                    p.arrived, calls_of(p));
}

std::string reorder_of(const char* verb, const ReorderParams& p) {
  return show(verb, "chunk", p.chunk, "term", p.term, "of", p.terms, p.packed, p.row_major, p.bias);
}

std::string count_of(const WaitParams& p) {
  record().expect_deadline(p.deadline_ns, p.report);
  if (record().before_wait) record().before_wait(p.chunk);
  const bool at_once = p.expected == std::numeric_limits<int32_t>::min();
  return show("wait", p.counter, at_once ? "marks" : cat("= ", p.expected), "chunk", p.chunk);
}

}  // namespace

#define FAKE(...) FAKE_OF(cudaError_t, cudaSuccess, __VA_ARGS__)
// A kernel's text, and its parameters before the stream.
#define LAUNCH(function, text, ...)                  \
  FAKE(function, (__VA_ARGS__, cudaStream_t stream), \
       record().operation(stream, std::string(text).substr(1)))

LAUNCH(launch_gemm, gemm_of(p), plan::Kernel, const GemmParams& p)
LAUNCH(wait_counter, count_of(p), const WaitParams& p)
LAUNCH(signal_peers_release_sys, signal_of(p), const PeerSignalParams& p)
LAUNCH(wait_peers_acquire_sys, wait_of(p), const PeerWaitParams& p)
LAUNCH(peer_collective,
       show("peer collective", p.reduces ? "reduces" : "", p.gathers ? "gathers" : "", "by",
            p.stride, p.own, "->", p.output, p.bias, "accesses", p.count, "send", p.send, "->",
            p.destination, "received", p.received, "then ->", p.final_destination, "received",
            p.final_received) +
           meeting_of(p),
       const PeerCollectiveParams& p)
LAUNCH(peer_exchange,
       show("peer exchange", p.sends ? "sends" : "", p.send_count, p.send, "->", p.destination,
            "receives", p.receive_count, p.received, "->", p.output) +
           meeting_of(p),
       const PeerExchangeParams& p)
LAUNCH(peer_finish,
       show("all_reduce and norm in", p.in_two_steps ? "two steps" : "one step", p.finish.terms,
            "->", p.finish.sum, p.finish.normed, p.finish.bias, p.finish.residual) +
           lines_of(p),
       const PeerFinishParams& p)
LAUNCH(peer_all_reduce_low_latency,
       show("low latency all_reduce of", 4 * p.words, p.in_pieces ? "bytes in pieces" : "bytes",
            p.own, "->", p.output, p.bias) +
           lines_of(p),
       const PeerLowLatencyParams& p)
LAUNCH(unpack_chunk, reorder_of("unpack", p), const ReorderParams& p)
LAUNCH(pack_chunk, reorder_of("pack", p), const ReorderParams& p)
LAUNCH(add_terms,
       show("add", p.terms, "terms by", p.stride, "of", p.rows, "rows", p.source, "->",
            p.destination, p.bias),
       const TermsParams& p)
LAUNCH(zero_counters, show("zero", n, counters), int32_t* counters, int32_t n)
LAUNCH(delay, show("delay", us, "us"), int64_t us)
LAUNCH(meet_tiles,
       show("announces", to, "from", first_to, "awaits", from, "from", first_from, "distance",
            distance, p.announce, p.arrived, calls_of(p)),
       const PeerTiles& p, int64_t first_to, int64_t to, int64_t first_from, int64_t from,
       int32_t distance)
// No case has these.
LAUNCH(copy_rectangles, " copy rectangles", const std::vector<CopyRectangle>&)
LAUNCH(copy_listed_rows, " copy listed rows", const ListedRows&)
LAUNCH(write_step_numbers, " write numbers", uint64_t*, int32_t, const uint64_t*, uint64_t)

FAKE(load_kernels, ())
FAKE(device_counters, (int32_t** counters),
     *counters = static_cast<int32_t*>(record().allocate("counters", 4 * kDeviceCounters)))

bool gemm_supported(plan::Kernel, const GemmParams&) {
  return true;
}

int32_t kernel_arch(int32_t arch) {
  return arch;
}

}  // namespace overlap::kernels
