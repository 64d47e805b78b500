// A call as data: what one rank enqueues, step by step, before any of it is. A step runs on a lane, which is a stream;
// the steps of a lane run in their order, and those of different lanes in any, except for what `after` says. The order
// of the list is that in which the host enqueues. Whoever walks a list decides nothing: what the planner or a threshold
// decides stands in its fields. Nothing here knows CUDA, NCCL or torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "plan/plan.h"

namespace overlap::steps {

// The memory of a call.
enum class Buffer : uint8_t {
  kInput,     // this rank's operand; offsets are those of contiguous rows
  kOutput,    // the result, or this rank's part of it; an all-gather has one for each weight
  kGathered,  // all ranks' inputs, a result
  kStaging,   // what chunks are communicated in, where that is not the output
  kWindow,    // the same, registered with NCCL
  kProduct,   // the whole product, where it is not made in the output
  kPartial,   // one part of a ring's product, made by the framework's GEMM
  kStripes,  // index 0: the product, each of whose parts lies in its owner's memory; 1: all ranks' rows of this
  // rank's part, in rank order
  kIndices,  // rows' numbers and counts, int64, which only the device knows. index 0: the caller's; 1: what peers send
  kSlot,     // what peers send to a rank in this call, one of each rank
};

struct Where {
  Buffer buffer = Buffer::kOutput;
  int64_t offset = 0;  // bytes
  int32_t index = 0;   // kOutput: of which weight; kSlot: of which rank; kIndices: of which of both

  Where behind(int64_t bytes) const { return {buffer, offset + bytes, index}; }
  friend bool operator==(const Where&, const Where&) = default;
};

// kSide0 and those after it: lane i of the plan is kSide0 + i.
enum class Lane : uint8_t { kCaller, kSide0, kSide1, kSide2, kSide3, kCopy };

constexpr Lane side_lane(int32_t lane) {
  return static_cast<Lane>(static_cast<int32_t>(Lane::kSide0) + lane);
}

// A step's place in its list.
using StepId = int32_t;

// The lanes continue after what the caller's stream has done so far.
struct Fork {
  int32_t side_lanes = 0;
  bool copies = false;  // the copy lane, too
};

// The caller's stream continues after all lanes that were forked.
struct Join {};

// Where a GEMM stores, and what it adds before it rounds.
struct Target {
  Where where;
  std::optional<Where> adds = {};
};

// Rows that idle warps of a GEMM copy.
struct Move {
  Where from;
  Where to;
  int64_t bytes = 0;
  int32_t arrival = 0;  // after how many arrived chunks, of a GEMM that awaits them; or whose
};

// One launch of the plan's kernel. `order` and `map` say which rows of input and output a tile
// stands for (plan::tile_row_place).
struct Gemm {
  int32_t weight = 0;
  plan::Rows rows;  // of the operand
  Where input;      // of all ranks' rows with map kGather, which has kInput as this rank's own ones
  // With map kSplit or kRanges, one for each part, in the ranks' order; else one.
  std::vector<Target> outputs;
  std::vector<Where> mirrors;  // where it stores as well; with kSplit the part that comes last
  plan::RowMap map;
  int32_t term = 0;  // of the terms of a packed chunk's sum, the one that is written
  int32_t terms = 1;
  int32_t order = 0;  // which of the list's
  int32_t first_tile = 0;
  int32_t end_tile = 0;
  int32_t ctas = 0;
  bool counts = false;            // the finished tiles of each chunk, in the call's counters
  bool announces = false;         // single tiles to the ranks' GEMMs, and awaits those that it adds
  bool awaits_chunks = false;     // until the chunks' rows have arrived, WaitForPeers' steps
  std::optional<Where> arriving;  // where peers' mirrors arrive, to be copied into the output
  std::optional<Where> terms_at;  // the ranks' terms of the part that comes last, in order
  bool rounds = false;            // this rank's term, before others are added to it
  int32_t spread_ns = 0;          // over which a round's stores to peers leave
  // Outputs are messages to their ranks, announced to each with its last tile; the moves are those that come in.
  bool sends_messages = false;
  bool ends_call = false;  // as EndCall does
  std::vector<Move> moves;

  // True if the kernel for peers stores tiles into peers' memory, or adds what came from there.
  bool stores_for_peers() const {
    return outputs.size() > 1 || !mirrors.empty() || outputs[0].adds.has_value();
  }
};

// Here the caller launches a kernel of its own, on the call's stream. The list's `tiles` say which
// tiles it takes.
struct CallersKernel {
  bool counts = false;  // the finished tiles of each chunk, in the call's counters
  bool awaits = false;  // chunks that arrive, in the same counters; else nothing arrives beside it
};

// The framework's GEMM, of rows of the product.
struct LibraryGemm {
  static constexpr int32_t kAllWeights = -1;

  int32_t weight = 0;  // or all, each into its output
  plan::Rows rows;
  Where input;
  Target output;
  std::optional<Where> count = {};  // as CopyRows has it; the rest may be computed, and is nobody's
};

// Until the launch has finished `tiles` tiles of the chunk; fails at the group's deadline, as all waits do.
struct WaitForTiles {
  int32_t chunk = 0;
  int32_t tiles = 0;
};

// Says to the watchdog that the chunk, which an event was waited for, is next.
struct Mark {
  int32_t chunk = 0;
};

// Sets the counter of a chunk that has arrived, which a kernel of the caller's awaits.
struct Arrive {
  int32_t chunk = 0;
};

// One of NCCL's collectives, on the communicator of this CTA limit and lane.
struct Collective {
  plan::Collective kind = plan::Collective::kAllReduce;  // an exchange is an all-gather in place
  int32_t max_ctas = 0;
  int32_t lane = 0;
  Where source;
  Where destination;
  int64_t count = 0;  // elements of each rank's part, or of an all-reduce
};

struct Message {
  int32_t peer = 0;
  Where where;
  int64_t bytes = 0;
};

// NCCL's messages, as one call; nothing where there are none.
struct SendReceive {
  int32_t max_ctas = 0;
  int32_t lane = 0;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

// By the copy engine.
struct Copy {
  Where source;
  Where destination;
  int64_t bytes = 0;
};

// Rows of a matrix into other memory, or added to what is there; strides in bytes. Numbers of the plan's dtype.
struct CopyRows {
  Where source;
  int64_t source_stride = 0;
  Where destination;
  int64_t destination_stride = 0;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  bool adds = false;  // false where one of the following is given
  // Only the device knows how many rows there are: this number of kIndices, and at most `rows`.
  std::optional<Where> count = {};
  // For each row its number in the source or in the destination, in kIndices; else they follow each other.
  std::optional<Where> from_rows = {};
  std::optional<Where> to_rows = {};
  bool by_indices() const { return count || from_rows || to_rows; }
};

// Holds the lane, so that a GEMM which was enqueued before has its SMs first.
struct Delay {
  int32_t us = 0;
};

// A row-major product's tiles of the chunk into the packed buffer, as one of its terms. CTAs of this step and the
// next two: at most; 0: as many as the device holds at once.
struct Pack {
  int32_t chunk = 0;
  int32_t order = 0;
  Where source;
  Where destination;  // the packed buffer
  int32_t term = 0;
  int32_t terms = 1;
  int32_t ctas = 0;
};

// The sum of the terms of the chunk's tiles into the row-major output, plus bias.
struct Unpack {
  int32_t chunk = 0;
  int32_t order = 0;
  Where source;  // the packed buffer
  Where destination;
  int32_t terms = 1;
  int32_t ctas = 0;
  bool bias = false;
};

// The sum of terms, rows of the matrix each, in their order, rounded once, plus bias.
struct AddTerms {
  Where source;
  Where destination;
  int64_t rows = 0;
  int32_t ctas = 0;
  int32_t terms = 1;
  int64_t stride = 0;  // bytes from term to term
  bool bias = true;
};

// Until all peers have read what the call before left in the slots that this one writes to. Nothing, where the call
// before has heard that.
struct WaitForSlots {};

// Until every peer has signalled this step of the call.
struct WaitForPeers {
  int32_t step = 0;
};

// To every peer that a step of the call is done: what its lane did before.
struct Signal {
  int32_t step = 0;
  bool to_self = false;  // as well, for a GEMM that ends the call
};

// To every peer that nothing of the call is left to read in this rank's slot.
struct EndCall {};

// Announces tiles to the rank `distance` behind, after what the lane did before, and awaits as many of the rank so far
// before, as GEMMs that announce do; or does one of both.
struct MeetTiles {
  int64_t first_announced = 0;
  int64_t first_awaited = 0;
  int64_t tiles = 0;
  int32_t distance = 1;
  bool announces = true;
  bool awaits = true;
};

// To a peer that the data of a transfer, which has this flag, are there: after what its lane did before.
struct Announce {
  int32_t flag = 0;
  int32_t peer = 0;
};

// Until a peer has announced so.
struct Await {
  int32_t flag = 0;
  int32_t peer = 0;
};

// One rank's share of a collective in one kernel.
struct Piece {
  int64_t bytes = 0;
  std::optional<Where> send;  // what goes to that rank and has not been stored there before
  std::optional<Where> destination;
  Where received;
  std::optional<Where> final_destination;  // the same of sums that are gathered
  std::optional<Where> final_received;
};

// A collective over peers in one kernel, which ends the call.
struct PeerCollective {
  bool reduces = false;
  bool gathers = false;
  bool bias = false;
  int64_t stride = 0;  // bytes between the ranks' pieces in the output
  int64_t first = 0;   // where this rank's own piece begins in rows, in bytes
  Where own;
  Where output;
  std::vector<Piece> pieces;  // in the ranks' order
};

// An all-reduce of few bytes over peers in one kernel, whose data are their own signal; takes no slot.
struct LowLatency {
  bool in_pieces = false;  // each rank adds up one and sends the sums to all
  bool bias = false;
  int64_t bytes = 0;
  Where own;
  Where output;
  bool finish = false;  // with the call's residual and norm; pieces are every n-th row then
};

// The messages between a rank and this one. The rank's own message goes from send to output.
struct PeerMessages {
  int64_t send_bytes = 0;
  std::optional<Where> send;
  std::optional<Where> destination;
  int64_t receive_bytes = 0;
  std::optional<Where> received;
  Where output;
};

// Messages over peers in one kernel, which ends the call.
struct PeerExchange {
  bool sends = false;                  // else they have been stored in the slots before
  std::vector<PeerMessages> messages;  // in the ranks' order
};

// All kinds of steps. Each handler of them declares its functions by this list.
// clang-format off
#define OVERLAP_STEP_KINDS(FIRST, NEXT)                                                            \
  FIRST(Fork) NEXT(Join) NEXT(Gemm) NEXT(CallersKernel) NEXT(LibraryGemm) NEXT(WaitForTiles)       \
  NEXT(Mark) NEXT(Arrive) NEXT(Collective) NEXT(SendReceive) NEXT(Copy) NEXT(CopyRows)             \
  NEXT(Delay) NEXT(Pack) NEXT(Unpack) NEXT(AddTerms) NEXT(WaitForSlots) NEXT(WaitForPeers)         \
  NEXT(Signal) NEXT(EndCall) NEXT(MeetTiles) NEXT(Announce) NEXT(Await)                            \
  NEXT(PeerCollective) NEXT(LowLatency) NEXT(PeerExchange)
// clang-format on
#define OVERLAP_FIRST_KIND(Kind) Kind
#define OVERLAP_NEXT_KIND(Kind) , Kind
using What = std::variant<OVERLAP_STEP_KINDS(OVERLAP_FIRST_KIND, OVERLAP_NEXT_KIND)>;
#undef OVERLAP_FIRST_KIND
#undef OVERLAP_NEXT_KIND

struct Step {
  Lane lane = Lane::kCaller;
  What what;
  std::vector<StepId> after;  // steps of other lanes that this one waits for
  // Waits for no peer, so it need not take its turn among the device's ops: only a list's first and last steps.
  bool unchained = false;
  // Begins a chunk's communication: tests hold the lane before it, or after a GEMM that communicates itself.
  bool held = false;
  // The chunk that the step is communication of, or -1: what a timeline shows as such.
  int32_t communicates = -1;
  // The number among the steps that steps of other lanes wait for, in the list's order; or -1.
  int32_t event = -1;
};

// NCCL's of a group, by CTA limit and lane.
struct Communicator {
  int32_t max_ctas = 0;
  int32_t lane = 0;

  friend bool operator==(const Communicator&, const Communicator&) = default;
};

// Memory of a call beside its operands and results: only the call's, except for kWindow, the group's, which is
// registered with the list's communicators.
struct Scratch {
  Buffer buffer = Buffer::kStaging;
  int64_t bytes = 0;
};

// The tiles that a kernel of the caller's takes: tile i is that of row i / columns of the tile grid, and of column
// i % columns. Rows of tiles begin where the matrix does, wherever parts of it do.
struct KernelTiles {
  int32_t columns = 0;
  std::vector<int32_t> chunks;  // for each tile the counter that it adds to, or that it awaits
  Buffer stores =
      Buffer::kOutput;  // where the kernel stores a row-major product of the call's rows
  Buffer result = Buffer::kOutput;
};

struct StepList {
  std::vector<Step> steps;
  std::vector<plan::TileOrder> orders;  // that steps name
  int32_t chunks = 1;                   // for the watchdog
  int32_t events = 0;                   // steps that steps of other lanes wait for
  uint64_t communication = 0;           // plan::communication_hash
  int32_t counters = 0;                 // of finished tiles, zero at first, one for each chunk
  KernelTiles tiles;                    // of a kernel of the caller's
  std::vector<Scratch> scratch;
  // All ranks make these, or find them made, before the first step:
  std::vector<Communicator> communicators;
  bool over_peers = false;
  int64_t slot_bytes = 0;    // of each rank's slot over peers
  int64_t stripe_bytes = 0;  // of each part of a product in stripes
  bool takes_slot = false;
  bool hears_all = false;  // before it ends, a signal of every peer is waited for
  bool finishes = false;   // the rows of a sum, where they are to be finished
};

// A weight of an all-gather.
struct Weight {
  int64_t columns = 0;
  bool kernel_takes = true;

  friend bool operator==(const Weight&, const Weight&) = default;
};

// The one who computes a call's product, or whatever else stands in its place.
enum class Compute : uint8_t {
  kKernel,   // the plan's kernel
  kLibrary,  // the framework's GEMM
  kCallers,  // a kernel that the caller launches itself
};
constexpr Compute kernel_if(bool takes) {
  return takes ? Compute::kKernel : Compute::kLibrary;
}

// The part of a rank's call that is its own: it changes only this rank's steps, and no
// communication. A caller's kernel has no weights and no bias, and all ranks have it.
struct Variant {
  Compute compute =
      Compute::kKernel;  // the framework's GEMM, where the kernel cannot take the operands
  bool bias = false;
  bool captured = false;  // into a CUDA graph, which owns its memory: nothing is staged in a window
  // An all-reduce's rows get a bias, a residual and a norm, by the kernel that adds them up or after the call. All ranks
  // have it, or none. The product stays as it is: it may be the caller's.
  bool finish = false;
  // For an overlapped all-gather.
  std::vector<Weight> weights = {};
  // For an all-to-all: one for each rank; and over peers, for more than two ranks, the most that
  // any rank's longest_message is known to be.
  std::vector<int64_t> send_rows = {};
  std::vector<int64_t> receive_rows = {};
  int64_t longest_message = 0;
  // For a caller's kernel: true if it begins before an all-gather's chunks have arrived, and awaits them itself; and the
  // number of pieces of each pair's rows of an all-to-all.
  bool awaits = false;
  int32_t pieces = 1;

  friend bool operator==(const Variant&, const Variant&) = default;
};

// The steps of a plan on a rank of this machine; of an all-to-all those of one call's rows. The plan must be valid. Throws
// std::invalid_argument, with what to do, where a kernel of the caller's would have to do what this package's do.
StepList lower(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
               const Variant& variant);

// True if the plan's kernel computes unless something keeps it from the operands. On CPU the
// framework's GEMM takes its part for packed tiles; it computes whole rows chunk by chunk.
bool takes_by_default(const plan::Plan& plan);

// Bytes of the longest message that a rank sends or receives in an all-to-all over peers, with what aligns it.
int64_t longest_message(const plan::Plan& plan, int32_t rank, const std::vector<int64_t>& send_rows,
                        const std::vector<int64_t>& receive_rows);

const char* name(Buffer buffer);
const char* name(Lane lane);

// {"communicators": [...], ..., "steps": [{"step": "gemm", "lane": ..., "after": [...], ...}]}, on one line.
std::string to_json(const StepList& list);

}  // namespace overlap::steps
