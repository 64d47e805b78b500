// A call as data: what one rank enqueues, step by step, before any of it is. A step runs on a lane, which is a stream;
// the steps of a lane run in their order, and those of different lanes in any, but for what `after` says. The order
// of the list is that in which the host enqueues. Nothing here knows CUDA, NCCL or torch.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "plan/plan.h"

namespace overlap::steps {

// The memory of a call.
enum class Buffer : uint8_t {
  kInput,     // this rank's operand
  kOutput,    // the result, or this rank's part of it
  kGathered,  // all ranks' inputs, a result
  kStaging,   // what chunks are communicated in, where that is not the output
  kWindow,    // the same, registered with NCCL
  kProduct,   // the whole product, made by the framework's GEMM
};

struct Where {
  Buffer buffer = Buffer::kOutput;
  int64_t offset = 0;  // bytes

  friend bool operator==(const Where&, const Where&) = default;
};

// kSide0 and those behind it: lane i of the plan is kSide0 + i.
enum class Lane : uint8_t { kCaller, kSide0, kSide1, kSide2, kSide3, kCopy };

constexpr Lane side_lane(int32_t lane) {
  return static_cast<Lane>(static_cast<int32_t>(Lane::kSide0) + lane);
}

// A step's place in its list.
using StepId = int32_t;

// The lanes continue behind what the caller's stream has done so far.
struct Fork {
  int32_t side_lanes = 0;
  bool copies = false;  // the copy lane, too
};

// The caller's stream continues behind all lanes that were forked.
struct Join {};

// One launch of the plan's kernel for all tiles, which counts those of each chunk as they are finished.
struct Gemm {
  Where output;
  int32_t part = 0;  // of a packed chunk's copies, the one that is written
  int32_t parts = 1;
  int64_t scattered_rows =
      0;  // of each rank's part, where the output is in chunks of all parts; else 0
};

// The framework's GEMM, of rows of the product.
struct LibraryGemm {
  plan::Rows rows;
  Where output;
};

// Until the launch has finished so many tiles of the chunk; fails at the group's deadline.
struct WaitForTiles {
  int32_t chunk = 0;
  int32_t tiles = 0;
};

// Says to the watchdog that the chunk, which an event was waited for, is next.
struct Mark {
  int32_t chunk = 0;
};

// Which of NCCL's collectives, on the communicator of this CTA limit and lane.
struct Collective {
  plan::Collective kind = plan::Collective::kAllReduce;  // an exchange is an all-gather in place
  int32_t max_ctas = 0;
  int32_t lane = 0;
  Where source;
  Where destination;
  int64_t count = 0;  // elements of each rank's part, or of an all-reduce
};

// By the copy engine.
struct Copy {
  Where source;
  Where destination;
  int64_t bytes = 0;
};

// A row-major product's tiles of the chunk into the packed buffer, as one of its copies.
struct Pack {
  int32_t chunk = 0;
  Where source;
  Where destination;  // the packed buffer
  int32_t part = 0;
  int32_t parts = 1;
};

// The sum of the copies of the chunk's tiles into the row-major output, plus bias.
struct Unpack {
  int32_t chunk = 0;
  Where source;  // the packed buffer
  Where destination;
  int32_t parts = 1;
  bool bias = false;
};

struct AddBias {
  Where source;
  Where destination;
  int64_t rows = 0;
};

using What = std::variant<Fork, Join, Gemm, LibraryGemm, WaitForTiles, Mark, Collective, Copy, Pack,
                          Unpack, AddBias>;

struct Step {
  Lane lane = Lane::kCaller;
  What what;
  // Steps of other lanes that this one waits for.
  std::vector<StepId> after;
  // Waits for no peer, so that it need not take its turn among all ops of the device: of a list's first and last
  // steps alone.
  bool unchained = false;
};

struct StepList {
  std::vector<Step> steps;
  int32_t counters = 0;  // of finished tiles, zero at first, one for each chunk
};

// What of a rank's call is its own: it changes steps of this rank alone, and no communication.
struct Variant {
  bool kernel_takes =
      true;  // the plan's kernel takes the operands; else the framework's GEMM computes
  bool bias = false;
  bool in_window = false;  // chunks are staged in the group's window
};

// The steps of a plan on a rank. Of all-reduces and reduce-scatters over NCCL, overlapped or one after the other, and
// of sequential all-gathers; throws std::invalid_argument for other plans. The plan must be valid.
StepList lower(const plan::Plan& plan, int32_t rank, const Variant& variant);

// Whether lower takes such a plan.
bool lowers(const plan::Plan& plan);

// Whether the plan's chunks are communicated in the output itself, without staging.
bool communicates_in_place(const plan::Plan& plan);

const char* name(Buffer buffer);
const char* name(Lane lane);

// A line for each step: "#1 side0 wait_for_tiles chunk=0 tiles=1024", with what it comes after.
std::string to_string(const StepList& list);
// {"counters": ..., "steps": [{"step": "gemm", "lane": ..., "after": [...], ...}]}, on one line.
std::string to_json(const StepList& list);

}  // namespace overlap::steps
