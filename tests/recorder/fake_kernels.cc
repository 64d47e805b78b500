// The host functions of csrc/kernels: each launch with all its parameters, except those that are as usual.
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

// Nothing of a wait that has the group's deadline and reports to the group.
std::string deadline(int64_t deadline_ns, const WaitReport* report) {
  std::string text;
  if (deadline_ns != recorder::kDeadlineNs) text += cat(" deadline ", deadline_ns, " ns");
  if (report != recorder::expected_report()) text += " reports elsewhere";
  return text;
}

// The bits of the call's plan that stand above the numbers in its flags.
std::string tag_of(uint64_t tag) {
  return cat(" tag ", tag >> kCallTagShift);
}

std::string order_of(const plan::TileOrder& order) {
  std::string text = cat(order.tiles_m, "x", order.tiles_n, " tiles");
  if (order.parts != 1) text += cat(", ", order.parts, " parts");
  text += ", bands";
  for (int run = 0; run < order.num_runs; ++run) {
    text += cat(" ", order.runs[run].count, "x", order.runs[run].tile_rows);
  }
  text += ", chunks end at";
  for (int chunk = 1; chunk <= order.num_chunks; ++chunk) {
    text += cat(" ", order.chunk_begin[chunk]);
  }
  return text;
}

std::string rows_of(const plan::RowMap& rows) {
  using Mode = plan::RowMap::Mode;
  switch (rows.mode) {
    case Mode::kPlain:
      return "";
    case Mode::kScatter:
      return cat(", scatter rows of ", rows.part_rows);
    case Mode::kGather:
      return cat(", gather rows of ", rows.part_rows, " own ", rows.own_part);
    case Mode::kSplit:
      return cat(", split rows of ", rows.part_rows, " in ", rows.part_tile_rows, " rounds of ",
                 rows.round_tile_rows, " from ", rows.first_part, " by ", rows.part_step);
    case Mode::kRanges: {
      std::string text =
          cat(", rows from ", rows.first_part, " by ", rows.part_step, " that begin at");
      for (const int32_t begin : rows.range_begin) text += cat(" ", begin);
      return text;
    }
  }
  return ", rows of an unknown mode";
}

std::string signal_of(const PeerSignalParams& signal) {
  std::string text = signal.ends_call ? "end" : cat("step ", signal.step);
  text += " at";
  for (int i = 0; i < signal.count; ++i) text += cat(" ", at(signal.flags[i], 8));
  return text + cat(" calls ", at(signal.calls, 8)) + tag_of(signal.tag);
}

std::string wait_of(const PeerWaitParams& wait) {
  std::string text = wait.slot_is_free ? "free slot" : cat("step ", wait.step);
  text += cat(" chunk ", wait.chunk, " of ranks");
  for (int rank = 0; rank < kMaxPeers; ++rank) {
    if ((wait.ranks >> rank & 1) != 0) text += cat(" ", rank);
  }
  return text + cat(" at ", at(wait.flags, 8), " calls ", at(wait.calls, 8)) + tag_of(wait.tag) +
         deadline(wait.deadline_ns, wait.report);
}

std::string tiles_of(const PeerTiles& tiles) {
  std::string text = cat("rank ", tiles.rank, " of ", tiles.ranks, " announce");
  for (int peer = 0; peer + 1 < tiles.ranks; ++peer) {
    text += cat(" ", at(tiles.announce[peer], 8));
  }
  return text + cat(" arrived ", at(tiles.arrived, 8), " calls ", at(tiles.calls, 8)) +
         tag_of(tiles.tag) + deadline(tiles.deadline_ns, tiles.report);
}

std::string meeting_of(const PeerMeeting& meeting) {
  std::string text = cat("rank ", meeting.rank, " of ", meeting.ranks, " chunk ", meeting.chunk);
  for (int step = 0; step < 2; ++step) {
    text += cat(", announce", step);
    for (int peer = 0; peer < meeting.ranks; ++peer) {
      text += cat(" ", at(meeting.announce[step][peer], 8 * kMaxPeerBlocks));
    }
    text += cat(" arrived ", at(meeting.arrived[step], 8 * kMaxPeerBlocks * meeting.ranks));
  }
  text += ", end";
  for (int peer = 0; peer < meeting.ranks; ++peer) {
    text += cat(" ", at(meeting.announce_end[peer], 8));
  }
  return text +
         cat(" ended ", at(meeting.ended, 8 * meeting.ranks), " calls ", at(meeting.calls, 8),
             " blocks ", at(meeting.blocks_sent, 4), " ", at(meeting.blocks_done, 4)) +
         tag_of(meeting.tag) + deadline(meeting.deadline_ns, meeting.report);
}

std::string ctas_of(int32_t ctas) {
  return ctas == std::numeric_limits<int32_t>::max() ? "any CTAs" : cat(ctas, " CTAs");
}

std::string peers_of(const GemmParams& gemm) {
  if (!gemm.peers) return {};
  const GemmPeers& peers = *gemm.peers;
  std::string text;
  for (int i = 0; i < peers.num_more_outputs; ++i) text += cat(" ", at(peers.more_outputs[i]));
  if (peers.num_mirrors > 0) text += ", mirrors";
  for (int i = 0; i < peers.num_mirrors; ++i) text += cat(" ", at(peers.mirrors[i]));
  for (int part = 0; part <= kMaxMoreOutputs; ++part) {
    if (peers.sources[part] == nullptr) continue;
    text += cat(", part ", part, " adds ", at(peers.sources[part]));
  }
  if (peers.arriving != nullptr || peers.collected != nullptr) {
    text += cat(", collects ", at(peers.arriving), " -> ", at(peers.collected));
  }
  return text;
}

std::string messages_of(const GemmParams& gemm) {
  if (!gemm.peers || !gemm.peers->messages) return {};
  const GemmMessages& messages = *gemm.peers->messages;
  std::string text = cat(", messages {", meeting_of(messages.meeting), "} stored ",
                         at(messages.stored, 4 * gemm.order.num_chunks));
  for (int rank = 0; rank < messages.meeting.ranks; ++rank) {
    const CopyRun& run = messages.received[rank];
    if (run.bytes == 0) continue;
    text += cat(", receives ", at(run.from, run.bytes), " -> ", at(run.to, run.bytes), " ",
                run.bytes, " bytes");
  }
  return text;
}

std::string gemm_of(plan::Kernel kernel, const GemmParams& gemm) {
  const int64_t element = plan::element_bytes(gemm.dtype);
  std::string text = cat("gemm ", plan::name(kernel), " ", gemm.m, "x", gemm.n, "x", gemm.k, " ",
                         plan::name(gemm.dtype), " ", at(gemm.input), "/", gemm.input_stride);
  if (gemm.gather && gemm.gather->own_input != nullptr) {
    text += cat(" own ", at(gemm.gather->own_input));
  }
  text += cat(" ", at(gemm.weight), "/", gemm.weight_stride,
              gemm.weight_k_contiguous ? "" : " contiguous along n");
  text += cat(" -> ", at(gemm.output), "/", gemm.output_stride, peers_of(gemm));
  text += cat(", ", plan::name(gemm.layout));
  if (gemm.terms != 1 || gemm.term != 0) text += cat(" part ", gemm.term, " of ", gemm.terms);
  text += rows_of(gemm.rows);
  text += cat(" [", order_of(gemm.order), "] tiles ", gemm.first_tile, " to ", gemm.tiles_end(),
              ", ", ctas_of(gemm.ctas));
  if (gemm.smem_pad_bytes != 0) text += cat(", pad ", gemm.smem_pad_bytes);
  if (gemm.counters != nullptr) {
    text += cat(", counters ", at(gemm.counters, 4 * gemm.order.num_chunks));
  }
  if (gemm.ending.tiles_taken != nullptr) text += cat(", taken ", at(gemm.ending.tiles_taken, 8));
  if (gemm.peers) {
    if (gemm.peers->spread_ns != 0) text += cat(", spread ", gemm.peers->spread_ns, " ns");
    if (gemm.peers->tiles.ranks != 1) text += cat(", tiles {", tiles_of(gemm.peers->tiles), "}");
  }
  if (gemm.awaits_rows()) text += cat(", arrivals {", wait_of(gemm.gather->arrivals), "}");
  text += messages_of(gemm);
  if (gemm.ending.signal.calls != nullptr) {
    text += cat(", ending {", signal_of(gemm.ending.signal), "}");
  }
  for (int i = 0; gemm.gather && i < gemm.gather->num_copies; ++i) {
    const CopyRun& run = gemm.gather->copies[i];
    text += cat(", carries ", at(run.from, run.bytes), " -> ", at(run.to, run.bytes), " ",
                run.bytes, " bytes chunk ", run.chunk);
  }
  if (gemm.input_stride < gemm.k || gemm.output_stride < gemm.n || element != 2) {
    recorder::record().violation(cat("strides or dtype that no kernel takes: ", text));
  }
  return text;
}

// Writes the operation down, unless nothing is.
template <typename Text>
cudaError_t launch(cudaStream_t stream, Text text) {
  if (recorder::record().on) recorder::record().operation(stream, text());
  return cudaSuccess;
}

std::string reorder_of(const ReorderParams& params) {
  return cat("chunk ", params.chunk, " of ", params.m, "x", params.n, " ", plan::name(params.dtype),
             " tiles of ", params.tile_m, "x", params.tile_n, " [", order_of(params.order), "] ",
             at(params.packed), " part ", params.term, " of ", params.terms, ", rows ",
             at(params.row_major), ", bias ", at(params.bias), ", ", ctas_of(params.ctas));
}

}  // namespace

bool gemm_supported(plan::Kernel, const GemmParams&) {
  return true;
}

bool copies_beside(plan::Kernel kernel) {
  return plan::is_sm90(kernel);
}

cudaError_t load_kernels() {
  return cudaSuccess;
}

cudaError_t launch_gemm(plan::Kernel kernel, const GemmParams& params, cudaStream_t stream) {
  return launch(stream, [&] { return gemm_of(kernel, params); });
}

cudaError_t wait_counter(const WaitParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    const bool at_once = params.expected == std::numeric_limits<int32_t>::min();
    return cat("wait ", at(params.counter, 4), at_once ? " marks" : cat(" = ", params.expected),
               " chunk ", params.chunk, deadline(params.deadline_ns, params.report));
  });
}

cudaError_t zero_counters(int32_t* counters, int32_t count, cudaStream_t stream) {
  return launch(stream, [&] { return cat("zero ", count, " at ", at(counters, 4 * count)); });
}

cudaError_t device_counters(int32_t** counters) {
  *counters = static_cast<int32_t*>(recorder::record().allocate("counters", 4 * kDeviceCounters));
  return cudaSuccess;
}

cudaError_t delay(int64_t microseconds, cudaStream_t stream) {
  return launch(stream, [&] { return cat("delay ", microseconds, " us"); });
}

cudaError_t signal_peers_release_sys(const PeerSignalParams& params, cudaStream_t stream) {
  return launch(stream, [&] { return cat("signal ", signal_of(params)); });
}

cudaError_t wait_peers_acquire_sys(const PeerWaitParams& params, cudaStream_t stream) {
  return launch(stream, [&] { return cat("wait for peers ", wait_of(params)); });
}

cudaError_t write_step_numbers(uint64_t* numbers, int32_t count, const uint64_t* calls, uint64_t,
                               cudaStream_t stream) {
  return launch(stream, [&] {
    return cat("numbers of ", count, " steps after ", at(calls), " to ", at(numbers));
  });
}

cudaError_t copy_rectangles(const std::vector<CopyRectangle>& rectangles, cudaStream_t stream) {
  return launch(stream, [&] { return cat("copy ", rectangles.size(), " rectangles"); });
}

cudaError_t copy_listed_rows(const ListedRows& rows, cudaStream_t stream) {
  return launch(stream, [&] { return cat("copy up to ", rows.rows, " listed rows"); });
}

cudaError_t meet_tiles(const PeerTiles& tiles, int64_t first_announced, int64_t announced,
                       int64_t first_awaited, int64_t awaited, int32_t distance,
                       cudaStream_t stream) {
  return launch(stream, [&] {
    return cat("meet announces ", announced, " from ", first_announced, " awaits ", awaited,
               " from ", first_awaited, " distance ", distance, ", ", tiles_of(tiles));
  });
}

cudaError_t load_interpreter_kernels() {
  return cudaSuccess;
}

cudaError_t count(int32_t* counter, int32_t value, cudaStream_t stream) {
  return launch(stream, [&] { return cat("count ", value, " at ", at(counter, 4)); });
}

cudaError_t interpret(const InterpreterParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    std::string text = cat("interpret ", params.streams, " streams of ", params.blocks, " blocks ",
                           plan::name(params.dtype), params.ends_call ? ", ends the call" : "",
                           params.waits_for_slots ? "" : ", waits for no slots", ", counters ",
                           at(params.counters, 4));
    const auto reach = [](const InterpreterTransfer& one, int64_t stride) {
      return (one.rows - 1) * stride + one.row_bytes;
    };
    for (const InterpreterTransfer& one : params.transfers) {
      const auto* const from = static_cast<const char*>(params.bases[one.source_base]) + one.source;
      const auto* const to =
          static_cast<const char*>(params.bases[one.destination_base]) + one.destination;
      text += cat("; stream ", int{one.stream}, ": ", one.rows, " rows of ", one.row_bytes,
                  " bytes, ", at(from, reach(one, one.source_stride)), " by ", one.source_stride,
                  one.adds ? " added to " : " -> ", at(to, reach(one, one.destination_stride)),
                  " by ", one.destination_stride);
      for (int wait = one.first_wait; wait < one.end_wait; ++wait) {
        const InterpreterWait& counter = params.waits[static_cast<size_t>(wait)];
        text += cat(" waits ", counter.counter, " = ", counter.count);
      }
      const auto flags = [&](int rank) {
        return at(params.flags[rank] + one.flag, 8 * params.blocks);
      };
      if (one.from >= 0) text += cat(" from ", int{one.from}, " at ", flags(params.rank));
      if (one.to >= 0) text += cat(" to ", int{one.to}, " at ", flags(one.to));
      if (one.counter >= 0) text += cat(" counts ", one.counter);
    }
    return text + cat(", ", meeting_of(params));
  });
}

cudaError_t peer_collective(const PeerCollectiveParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    constexpr int64_t kBytes = kPeerAccessBytes;
    std::string text = cat(
        "peer collective", params.reduces ? " reduces" : "", params.gathers ? " gathers" : "", " ",
        plan::name(params.dtype), " own ", at(params.own), " -> ", at(params.output), ", stride ",
        params.stride, " first ", params.first, ", bias ", at(params.bias), "/", params.row_count);
    for (int rank = 0; rank < params.ranks; ++rank) {
      const int64_t bytes = params.count[rank] * kBytes;
      text += cat(", rank ", rank, ": ", params.count[rank]);
      if (params.send[rank] != nullptr) text += cat(" send ", at(params.send[rank], bytes));
      if (params.destination[rank] != nullptr) {
        text += cat(" to ", at(params.destination[rank], bytes));
      }
      text += cat(" received ", at(params.received[rank]));
      if (params.final_destination[rank] != nullptr) {
        text += cat(" final to ", at(params.final_destination[rank]));
      }
      if (params.final_received[rank] != nullptr) {
        text += cat(" received ", at(params.final_received[rank], bytes));
      }
    }
    return text + cat(", ", meeting_of(params));
  });
}

cudaError_t peer_exchange(const PeerExchangeParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    constexpr int64_t kBytes = kPeerAccessBytes;
    std::string text = cat("peer exchange", params.sends ? " sends" : "");
    for (int rank = 0; rank < params.ranks; ++rank) {
      const int64_t sent = params.send_count[rank] * kBytes;
      const int64_t received = params.receive_count[rank] * kBytes;
      text +=
          cat(", rank ", rank, ": send ", params.send_count[rank], " ", at(params.send[rank], sent),
              " to ", at(params.destination[rank], sent), " receive ", params.receive_count[rank],
              " ", at(params.received[rank], received), " to ", at(params.output[rank], received));
    }
    return text + cat(", ", meeting_of(params));
  });
}

cudaError_t peer_finish(const PeerFinishParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    const FinishParams& finish = params.finish;
    const int64_t bytes = 2 * finish.rows * finish.columns;
    return cat("all_reduce with a norm", params.in_two_steps ? " in two steps" : "", " rank ",
               params.rank, " of ", params.ranks, ", ", finish.rows, " x ", finish.columns, " ",
               plan::name(finish.dtype), " ", at(finish.terms, bytes), " -> ",
               at(finish.sum, bytes), " and ", at(finish.normed, bytes), ", bias ", at(finish.bias),
               ", residual ", at(finish.residual)) +
           tag_of(params.tag) + deadline(params.deadline_ns, params.report);
  });
}

cudaError_t peer_all_reduce_low_latency(const PeerLowLatencyParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    std::string text =
        cat("low latency all_reduce", params.in_pieces ? " in pieces" : "", " rank ", params.rank,
            " of ", params.ranks, " chunk ", params.chunk, ", ", params.words, " words ",
            plan::name(params.dtype), " ", at(params.own, 4 * params.words), " -> ",
            at(params.output, 4 * params.words), ", bias ", at(params.bias), "/", params.row_words);
    for (int rank = 0; rank < params.ranks; ++rank) {
      if (rank == params.rank) continue;
      text += cat(", rank ", rank, ": to ", at(params.destination[rank], 2 * params.buffer_bytes),
                  " received ", at(params.received[rank], 2 * params.buffer_bytes));
    }
    constexpr int64_t kTurnBytes = 8 * kMaxPeers;  // of the flags for one of two calls
    text += ", announce";
    for (int rank = 0; rank < params.ranks; ++rank) {
      text += cat(" ", at(params.announce[rank], kTurnBytes + 8));
    }
    return text +
           cat(" arrived ", at(params.arrived, 2 * kTurnBytes), ", buffers of ",
               params.buffer_bytes, " calls ", at(params.calls, 8)) +
           tag_of(params.tag) + deadline(params.deadline_ns, params.report);
  });
}

cudaError_t unpack_chunk(const ReorderParams& params, cudaStream_t stream) {
  return launch(stream, [&] { return cat("unpack ", reorder_of(params)); });
}

cudaError_t pack_chunk(const ReorderParams& params, cudaStream_t stream) {
  return launch(stream, [&] { return cat("pack ", reorder_of(params)); });
}

cudaError_t add_terms(const TermsParams& params, cudaStream_t stream) {
  return launch(stream, [&] {
    const int64_t element = plan::element_bytes(params.dtype);
    const int64_t bytes = params.rows * params.n * element;
    const int64_t others = (params.terms - 1) * params.stride * element;
    const std::string terms =
        params.terms == 1 ? "" : cat(" ", params.terms, " terms by ", params.stride, " of");
    return cat("add bias ", at(params.bias), " to", terms, " ", params.rows, "x", params.n, " ",
               plan::name(params.dtype), " ", at(params.source, bytes + others), " -> ",
               at(params.destination, bytes), ", ", ctas_of(params.ctas));
  });
}

}  // namespace overlap::kernels
