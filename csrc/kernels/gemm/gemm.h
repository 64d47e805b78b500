// GEMMs that take their tiles in a plan's order, store each where the plan says and signal its
// chunk. output = input @ weight^T, accumulated in fp32. No torch here: plain pointers and structs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_signal.h"
#include "plan/gemm_types.h"
#include "plan/tile_order.h"

namespace overlap::kernels {

inline constexpr int kMaxMoreOutputs = kMaxPeers - 1;

// Scales of fp8 operands, in fp32: of their rows, or of all. Sums are those of the tensor cores, which have some 14 bits.
struct GemmScales {
  plan::DType weight_dtype = plan::DType::kFloat8E4M3;
  plan::DType output_dtype = plan::DType::kBFloat16;
  // One number after the other, each for `rows_per_scale` rows; with rows of mode kGather of all parts' rows, in order.
  const float* input = nullptr;
  int32_t rows_per_scale = 1;
  const float* weight = nullptr;  // of its rows, at a distance of weight_stride floats
  int64_t weight_stride = 0;      // 0: one number
};

// K in `count` equal groups, each of whole 64s: a group's product is rounded to the output's type, and products are added
// by pairs, pairs of pairs and so on, each sum rounded. Only kSm90Pingpong of 16-bit types multiplies in groups.
struct GemmGroups {
  int32_t count =
      0;  // 1, 2, 4 or 8; 0: K in one sum, which is not rounded before a source is added
  void* memory = nullptr;  // group_sums_bytes(ctas, count), only this launch's
};
inline constexpr int64_t kGroupSumBytes = 32 << 10;  // a tile's sums
// Sums of each team of a CTA that wait for their partner beside the one in registers.
constexpr int32_t group_levels(int32_t count) {
  return count == 8 ? 2 : count == 4 ? 1 : 0;
}
constexpr int64_t group_sums_bytes(int32_t ctas, int32_t count) {
  constexpr int32_t kTeams = 2;
  return kGroupSumBytes * kTeams * ctas * group_levels(count);
}

struct GemmOperands {
  int64_t m = 0;  // rows of the input
  int64_t n = 0;
  int64_t k = 0;
  plan::DType dtype = plan::DType::kBFloat16;
  const void* input = nullptr;   // [m, k], contiguous along k
  int64_t input_stride = 0;      // elements between rows
  int64_t input_rows = 0;        // rows that may be read, of any values after m; 0: m
  const void* weight = nullptr;  // [n, k]
  int64_t weight_stride = 0;  // elements between the vectors along the dim that is not contiguous
  bool weight_k_contiguous = true;   // false: contiguous along n
  std::optional<GemmScales> scales;  // of fp8
  GemmGroups groups;
};

// Where the product goes.
struct GemmStore {
  plan::Layout layout = plan::Layout::kRowMajor;
  void* output = nullptr;     // row-major, of m rows or as `rows` says, or the packed buffer
  int64_t output_stride = 0;  // elements between rows (row-major only)
  // Packed: the terms of a sum, one of each rank, that lie in a chunk's region of the buffer, and which of
  // them this GEMM makes.
  int32_t terms = 1;
  int32_t term = 0;
};

// The tiles that are computed, their order, the number of SMs, and who is told.
struct GemmSchedule {
  plan::TileOrder order;
  plan::RowMap rows;  // row-major: where tile rows lie in input and output
  // The tiles that this launch computes, one or more of whole clusters: [first_tile, end_tile) in the
  // order's index, by default all. Part of them only without GemmPeers.
  int32_t first_tile = 0;
  int32_t end_tile = -1;  // -1: the order's end
  int32_t* counters =
      nullptr;                 // one per chunk, zeroed earlier on the same stream; null: no signals
  int32_t ctas = 0;            // size of the persistent grid
  int32_t smem_pad_bytes = 0;  // shared memory added to each CTA

  int32_t tiles_end() const { return end_tile < 0 ? order.num_tiles() : end_tile; }
};

// Bytes to copy within the device: 16-byte aligned, and as many of them.
struct CopyRun {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t bytes = 0;
  // If `to` is the first of several blocks: their bytes, the distance between two, and where in the first the run begins. 0:
  // it is one block.
  int64_t block_bytes = 0;
  int64_t gap_bytes = 0;
  int64_t first = 0;
  int32_t chunk = 0;  // which GemmGather::arrivals announces; 0: the bytes are there
};

// With rows of mode kGather: rows that peers send meanwhile. Copies and arrivals need a kernel that can kCopiesBeside.
struct GemmGather {
  const void* own_input = nullptr;  // this rank's own part's: [part_rows, k], of the input's stride
  // Copies that an idle warp of each CTA makes.
  int32_t num_copies = 0;
  CopyRun copies[plan::kMaxCopyRuns] = {};
  // The flags that chunk 1's tiles and copies wait for; each later chunk waits for one number more. Without
  // flags: all rows are there. If the GEMM ends the call, this rank announces its rows to itself, too.
  PeerWaitParams arrivals;
};

// Rows that go to the ranks that own them, and come from them, in this launch (rows of mode kRanges): whoever
// stores the last tile for a rank announces its message by the first block flag of the meeting's first step,
// and idle warps copy what the others have announced.
struct GemmMessages {
  PeerMeeting meeting;
  int32_t* stored =
      nullptr;  // tiles stored for each rank, in the order in which they are computed; zero before
  // One entry for each other rank, in this rank's memory: source, destination, and bytes in pieces of 16.
  CopyRun received[kMaxPeers] = {};
};

// With kSplit: what all ranks have stored here of the part that is computed last, row-major, in their order, `stride`
// elements apart; this rank's own is not read.
struct PeerTerms {
  const void* first = nullptr;
  int64_t stride = 0;
  int64_t row_stride = 0;
  int32_t rows = 0;
  int32_t columns = 0;
};

// Stores into other ranks' memory (rows of mode kSplit or kRanges). Only ping-pong kernels,
// row-major, of all tiles.
struct GemmPeers {
  // The outputs of the parts after the first one, with its stride.
  int32_t num_more_outputs = 0;
  void* more_outputs[kMaxMoreOutputs] = {};
  // Where every tile, or with kSplit each of the part that is computed last, is stored, too.
  int32_t num_mirrors = 0;
  void* mirrors[kMaxMoreOutputs] = {};
  // With kSplit, of ranks that mirror to each other, or null: where the peers' mirrors arrive, in own memory,
  // and where the GEMM copies each of their tiles, once it has been announced. Both hold all parts, one after
  // the other, this rank's own one untouched, with the output's stride; what is collected ends with the input's rows.
  const void* arriving = nullptr;
  void* collected = nullptr;
  // For each part of the rows (else only the first): row-major with the output's shape and stride, or
  // null: added to the product in fp32, before it is rounded.
  const void* sources[1 + kMaxMoreOutputs] = {};
  // In place of sources, or null: where the ranks store their terms of the part that is computed last, one after the
  // other. They are added up in the ranks' order, this rank's own rounded as theirs. Only kSm90Pingpong does so.
  const void* terms = nullptr;
  // This rank's term is rounded to the output's type before a source is added.
  bool rounds = false;
  // The signals between the ranks' GEMMs: tiles of the first parts are announced to the rank that adds them,
  // those of the last parts are added to once they have been announced here. Where something is
  // collected, mirrored tiles are announced to all peers, too.
  PeerTiles tiles;
  // The CTAs' tiles that go to peers' memory leave over so long a time, but those of the last round. A round
  // of tiles is finished at once, and stores that wait for the link hold up the loads of the next one.
  int32_t spread_ns = 0;
  std::optional<GemmMessages> messages;
};

// The signals at the end of the call, after all work is done. They need a kernel that can kCopiesBeside.
struct GemmEnding {
  // Where tiles are counted as they are taken, in own memory: two words, zero before and after. Needed with
  // GemmPeers.
  uint32_t* tiles_taken = nullptr;
  PeerSignalParams signal;  // of no peers: nobody is told
};

struct GemmParams : GemmOperands, GemmStore, GemmSchedule {
  std::optional<GemmGather> gather;
  std::optional<GemmPeers> peers;
  GemmEnding ending;

  bool awaits_rows() const { return gather && gather->arrivals.flags != nullptr; }
};

// Returns true if this build holds `kernel` and it takes these operands: 16-bit type, or, with ping-pong, fp8 with scales that
// is contiguous along k, e4m3 at least the weight, to bfloat16; 16-byte aligned pointers and strides; GemmPeers only with
// ping-pong.
bool gemm_supported(plan::Kernel kernel, const GemmParams& params);

// The newest architecture whose kernels this build has for a device of compute capability `arch`; 0: none.
int32_t kernel_arch(int32_t arch);

// Enqueues the GEMM. gemm_supported(kernel, params) must hold. Returns what the launch returned.
cudaError_t launch_gemm(plan::Kernel kernel, const GemmParams& params, cudaStream_t stream);

// Loads every kernel of this library that `device` can run, so that no later launch loads a module
// while something waits (lazy loading synchronises the context and could hang). Once per process
// and device.
cudaError_t load_kernels();

}  // namespace overlap::kernels
