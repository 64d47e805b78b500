// Problem, machine and plan: plain, printable, comparable data. Nothing here knows CUDA, NCCL or
// torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/tile_order.h"

namespace overlap::plan {

enum class Op : int32_t {
  kGemmAllReduce = 0,
  kGemmReduceScatter = 1,
  kAllGatherGemm = 2,
  kGemmAllToAll = 3
};
enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// How the op runs: one GEMM, then one collective; or chunk by chunk, communication beside
// computation.
enum class Schedule : int32_t { kSequential = 0, kOverlapped = 1 };

// Which GEMM counts the tiles. kLibrary computes chunk by chunk with cuBLAS (or, on CPU, tile by
// tile with the framework's GEMM); it takes every dtype, stride and alignment, so any rank can
// follow any plan with it.
enum class Kernel : int32_t { kLibrary = 0, kSm80 = 1, kSm90Pingpong = 2, kSm90Cooperative = 3 };

enum class Transport : int32_t { kNccl = 0, kGloo = 1 };

// Where finished tiles are stored. kRowMajor: chunks are whole row panels of the plain output.
// kPacked: tiles one after the other in tile order, put back to row-major behind the next chunk's
// communication.
enum class Layout : int32_t { kRowMajor = 0, kPacked = 1 };

// What a chunk's communication is. kAllReduce: one all-reduce. kExchange, for two ranks: one
// all-gather of the chunk and the peer's, which are then added up where the chunk is put back to
// row-major. It moves the same bytes over the link, and NCCL's all-gather fills the link with a
// third of the CTAs that its all-reduce takes.
enum class Collective : int32_t { kAllReduce = 0, kExchange = 1 };

int64_t element_bytes(DType dtype);
const char* name(Op op);
const char* name(DType dtype);
const char* name(Schedule schedule);
const char* name(Kernel kernel);
const char* name(Transport transport);
const char* name(Layout layout);
const char* name(Collective collective);

// What all ranks share, and nothing else: ranks that agree on it make the same communication calls.
struct Problem {
  Op op = Op::kGemmAllReduce;
  int64_t m = 0;  // rows of the output
  int64_t n = 0;  // columns of the output
  int64_t k = 0;  // inner dimension on one rank
  DType dtype = DType::kBFloat16;
  int32_t world_size = 1;

  friend bool operator==(const Problem&, const Problem&) = default;
  std::string to_string() const;
};

// The device a plan is made for, and what its link was measured to do (runtime/communicator
// measures it).
struct Machine {
  int32_t arch = 0;  // 0: CPU; otherwise compute capability, 80, 89, 90 ...
  int32_t sm_count = 0;
  double sm_gflops = 0.0;         // sustained 16-bit tensor-core rate of one SM, GFLOP/s
  bool has_sm80_kernels = false;  // what this build and this device can run
  bool has_sm90_kernels = false;
  double link_latency_us = 0.0;  // fixed time of one all-reduce call
  double link_gbps = 0.0;  // all-reduce: message bytes per second with the default CTA limit, GB/s
  bool windows = false;    // NCCL symmetric windows work on this group

  std::string to_string() const;
};

// A chunk: a run of tiles in tile order, communicated as one unit.
struct Chunk {
  int32_t tiles = 0;
  Transport transport = Transport::kNccl;
  int32_t max_ctas = 0;  // CTA limit of the communicator that carries it; 0: NCCL's own choice

  friend bool operator==(const Chunk&, const Chunk&) = default;
};

// What the GEMM leaves to communication (arXiv 2606.09200).
struct Resources {
  int32_t comm_sms = 0;        // SMs that the persistent grid leaves free
  int32_t smem_pad_bytes = 0;  // shared memory added to each GEMM CTA, to lower its occupancy
  bool window = false;         // chunks are staged in an NCCL symmetric window
  int32_t finish_ctas =
      0;              // CTAs that put chunks back to row-major, add bias or parts; 0: a default
  int32_t lanes = 1;  // chunks in flight at a time, each on a stream and communicator of its own

  friend bool operator==(const Resources&, const Resources&) = default;
};

struct Plan {
  Problem problem;
  Schedule schedule = Schedule::kSequential;
  Kernel kernel = Kernel::kLibrary;
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  int32_t cluster_m = 1;
  Layout layout = Layout::kRowMajor;
  Collective collective = Collective::kAllReduce;
  std::vector<BandRun> bands;  // tile order
  std::vector<Chunk> chunks;
  Resources resources;

  friend bool operator==(const Plan&, const Plan&) = default;
  std::string to_string() const;
};

// Tile grid of a plan: ceil(M / tile_m) rounded up to cluster_m, times ceil(N / tile_n).
int32_t tiles_m(const Plan& plan);
int32_t tiles_n(const Plan& plan);

// Throws std::invalid_argument, which says what is wrong with the plan, what is allowed and what to
// do.
void validate(const Plan& plan);

// The plan's tables in the form that kernels take. The plan must be valid.
TileOrder tile_order(const Plan& plan);

// Copies of a chunk in its region of the staging buffer: 2 for an exchange, else 1.
int32_t buffer_parts(const Plan& plan);

// Elements of the staging buffer (packed: whole tiles, of all parts; row-major: M * N).
int64_t buffer_elements(const Plan& plan);

// Where chunk `chunk` lies in the buffer, in elements. Contiguous by construction; of several
// parts, the first: the others follow, `count` elements each.
struct Extent {
  int64_t offset = 0;
  int64_t count = 0;
};
Extent chunk_extent(const Plan& plan, int32_t chunk);

// Rows [begin, end) of the output that a row-major chunk covers.
struct Rows {
  int64_t begin = 0;
  int64_t end = 0;
};
Rows chunk_rows(const Plan& plan, int32_t chunk);

// A plan as a flat list of integers, the form in which it crosses the op library's schemas, and
// back. decode throws std::invalid_argument on a list that encode cannot have made.
std::vector<int64_t> encode(const Plan& plan);
Plan decode(const std::vector<int64_t>& code);

}  // namespace overlap::plan
