// Problem, machine and plan: plain, printable, comparable data. Nothing here knows CUDA, NCCL or
// torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/gemm_types.h"
#include "plan/op.h"
#include "plan/profile.h"
#include "plan/program.h"
#include "plan/table.h"
#include "plan/tile_order.h"

namespace overlap::plan {

// plan_fields.h says what each member and each field below means, for messages and for Python.

enum class Schedule : int32_t { kSequential = 0, kOverlapped = 1 };
enum class Recipe : int32_t { kNone = 0, kTensor = 1, kRow = 2, kBlock = 3 };
// kBatch: each rank's product is rounded to the output's type, these terms are added in float32 in the ranks' order, and
// the sum is rounded before a bias is added.
// kWorld: K of all ranks is cut into kWorldGroups. A group's product is rounded, and products are added by pairs, pairs of
// pairs and so on, each sum rounded. A rank adds up its groups, and the ranks add their terms in the same way.
enum class Invariance : int32_t { kNone = 0, kBatch = 1, kWorld = 2 };

enum class Transport : int32_t { kNccl = 0, kGloo = 1, kPeer = 2 };

struct TransportTraits {
  const char* name;
  const char* doc;
  bool on_cpu = false;       // the host's memory travels
  bool maps_memory = false;  // ranks store into each other's
  bool has_windows = false;  // and the gathers of an exchange
};

// Other files ask the table, and compare no transports.
inline constexpr std::array<TransportTraits, 3> kTransports = {{
    {.name = "nccl", .doc = "CUDA tensors, any ranks", .has_windows = true},
    {.name = "gloo", .doc = "tensors on CPU", .on_cpu = true},
    {.name = "peer",
     .doc =
         "memory that 2 to 8 ranks of one host map into each other: stores of the GEMM, and copy "
         "engines",
     .maps_memory = true},
}};

constexpr const TransportTraits& traits(Transport transport) {
  return row_of(kTransports, transport);
}
constexpr const char* name(Transport transport) {
  return traits(transport).name;
}

// Ranks whose steps are proved together.
inline constexpr int32_t kMaxProvedRanks = 16;

const char* name(Op op);
const char* name(Recipe recipe);
const char* name(Invariance invariance);
const char* name(Schedule schedule);
const char* name(Memory memory);
const char* name(Way way);
const char* name(Engine engine);

// Names of the kernels that have the one ability, and not the other; with "and" between them.
std::string kernel_names(Ability with, uint32_t without = 0);
// Names of the collectives that have one of these traits; with "or" between them.
std::string collective_names(uint32_t any);

// All ranks share this, and nothing else: ranks that agree on it make the same communication calls.
struct Problem {
  Op op = Op::kGemmAllReduce;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  DType dtype = DType::kBFloat16;
  int32_t world_size = 1;
  Recipe recipe = Recipe::kNone;
  DType output_dtype = DType::kBFloat16;  // of scaled operands' output; else see output_dtype()
  bool fast_accum = false;
  Invariance invariance = Invariance::kNone;

  OpTraits traits() const { return plan::traits(op); }
  // True of an all-reduce without a GEMM: the caller gives what is added up.
  bool given() const { return k == 0 && traits().all_reduces(); }
  friend bool operator==(const Problem&, const Problem&) = default;
  std::string to_string() const;
};

// The device a plan is made for, and what its link was measured to do (runtime/group_measure.cc).
struct Machine {
  int32_t arch = 0;
  int32_t sm_count = 0;
  double sm_gflops = 0.0;
  int32_t kernel_arch = 0;
  double link_latency_us = 0.0;
  double link_gbps = 0.0;
  bool windows = false;
  double peer_gbps = 0.0;
  SharedProfile profile = shipped_profile();  // never null
  bool serial = false;
  int32_t clique = 0;
  double clique_gbps = 0.0;
  double across_gbps = 0.0;
  double across_latency_us = 0.0;

  std::string to_string() const;
};

// The first kernel in the table of the newest architecture whose kernels the machine has; else the library.
Kernel newest_kernel(const Machine& machine);

// A chunk: a run of tiles in tile order, communicated as one unit.
struct Chunk {
  int32_t tiles = 0;
  Transport transport = Transport::kNccl;
  int32_t max_ctas = 0;

  friend bool operator==(const Chunk&, const Chunk&) = default;
};

// The GEMM leaves these to communication (arXiv 2606.09200).
struct Resources {
  int32_t comm_sms = 0;
  int32_t smem_pad_bytes = 0;
  bool window = false;
  int32_t finish_ctas = 0;
  int32_t lanes = 1;
  bool one_launch = false;
  bool low_priority = false;

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
  std::vector<BandRun> bands;
  std::vector<Chunk> chunks;
  Resources resources;
  Program program;
  int32_t clique = 0;

  // All chunks have one; a plan without chunks is as NCCL's.
  const TransportTraits& transport() const {
    return traits(chunks.empty() ? Transport::kNccl : chunks[0].transport);
  }
  friend bool operator==(const Plan&, const Plan&) = default;
  std::string to_string() const;
};

// Element type of the result, and of partial sums that travel: the operands' own, unless they are scaled.
DType output_dtype(const Problem& problem);
int64_t output_bytes(const Problem& problem);

// For people: "bfloat16", or "float8_e4m3fn row_wise to bfloat16", with "fast_accum" after it where sums are.
std::string types_text(const Problem& problem);

// The type of the bytes that travel: the operands' in an all-gather, else the output's.
DType moved_dtype(const Problem& problem);
int64_t moved_bytes(const Problem& problem);
int64_t moved_columns(const Problem& problem);

// True if transfers of the plan's own move the bytes.
inline bool has_program(const Plan& plan) {
  return !plan.program.empty();
}

// Parts that the rows of this op's output (reduce-scatter) or input (all-gather) are cut into whatever
// the plan, one for each rank; else 1.
int32_t op_row_parts(const Problem& problem);

// The parts that a plan cuts the rows into: its op's, but a ring and stripes cut the rows of an
// all-reduce, too, and so do direct plans between more than two ranks; with a program a
// reduce-scatter's are not cut.
int32_t row_parts(const Plan& plan);

// Rows of one part. An all-reduce's last part may have fewer: of a ring some, of stripes none, either.
int64_t part_rows(const Plan& plan);

// True if chunks travel through the peers' memory, at least within cliques.
inline bool over_peers(const Plan& plan) {
  return plan.transport().maps_memory;
}

// True if each row crosses between cliques once.
inline bool hierarchical(const Plan& plan) {
  return plan.collective == Collective::kHierarchical;
}

// Ranks whose memory a plan over peers maps: a clique, or all.
inline int32_t peer_ranks(const Plan& plan) {
  return plan.clique > 0 ? plan.clique : plan.problem.world_size;
}
inline bool in_one_clique(const Plan& plan, int32_t rank, int32_t other) {
  return rank / peer_ranks(plan) == other / peer_ranks(plan);
}

// Rows of each rank's terms that a rank of its clique adds up, of a reduction with the collective hierarchical: of each
// chunk, one after the other.
std::vector<int64_t> clique_rows(const Plan& plan);
// Bytes from one rank's terms to the next one's.
int64_t clique_stride(const Plan& plan);

// True if the kernel's GEMMs add up terms of the collective owners.
inline bool adds_terms(Kernel kernel, const Problem& problem) {
  return can(kernel, problem.world_size == 2 ? kStoresToPeers : kAddsTerms);
}

// True if a row's bits follow from the row, the weight and the number of ranks, whatever other rows there are:
// Invariance, whose other plan is the sequence, in place of which the op's composition runs.
bool is_invariant(const Plan& plan);

// Invariance::kWorld: the groups of K that each rank multiplies; else 0.
int32_t k_groups(const Problem& problem);
// True if kernels that add groups multiply these: they then do so for any number of ranks and rows.
bool kernel_takes_groups(const Problem& problem);
// True if the ranks' terms are added by pairs.
bool adds_by_pairs(const Problem& problem);

// Tile rows of a band, at most: it keeps a wave of tiles square. Higher ones finish later and share no
// more of the operands in L2.
inline constexpr int32_t kBandRows = 16;

// True if a ring can divide the rows into parts of equal numbers; the last part may be shorter, but
// has rows.
bool every_part_has_rows(const Problem& problem);

// Tiles that a ring passes on, at most: each has a flag.
inline constexpr int64_t kMaxRingTiles = int64_t{1} << 17;
int64_t ring_tiles(const Plan& plan);

// Bytes between the ranks' rows in a slot of the collective stripes. A kernel of the caller's stores them by addresses
// that change from rank to rank with whole pages.
int64_t stripe_bytes(const Plan& plan);
// Parts of a caller's product in stripes may begin anywhere in a page of a GPU's memory.
inline constexpr int64_t kStripePage = int64_t{1} << 21;
constexpr int64_t pages_of(int64_t bytes) {
  return (bytes + kStripePage - 1) / kStripePage;
}
// Bytes from a source's rows of a part to the next source's: pages that hold the part wherever it begins.
constexpr int64_t stripe_stride(int64_t part_bytes) {
  return (pages_of(part_bytes) + (part_bytes % kStripePage == 0 ? 0 : 1)) * kStripePage;
}

// Bytes of each rank's slot for what peers send it in one call, over peers.
int64_t peer_slot_bytes(const Plan& plan);

// Direct reductions: what each rank adds up, in bytes. The last ranks' pieces of an all-reduce may be
// shorter. Two ranks of an all-reduce both add up everything: as many bytes, in one step.
bool direct_in_pieces(const Plan& plan);
int64_t direct_piece_bytes(const Plan& plan);

// The chunks of this op do this, unless the plan says exchange.
Collective collective_of(Op op);

// Tile grid of a plan: ceil(part's rows / tile_m) for each part, rounded up so that clusters come
// out even, times ceil(N / tile_n).
int32_t row_grain(const Plan& plan);  // tile rows of a part come in multiples of it
int64_t grid_rows(const Plan& plan);  // also of a plan that is not valid
int32_t tiles_m(const Plan& plan);
int32_t tiles_n(const Plan& plan);

// Both throw std::invalid_argument, which says what is wrong with the plan or its problem, what is
// allowed and what to do.
void check_problem(const Problem& problem);
void validate(const Plan& plan);

// The plan's tables in the form that kernels take. The plan must be valid.
TileOrder tile_order(const Plan& plan);

// Appends bands to the order's runs.
void add_bands(TileOrder& order, int32_t tile_rows, int32_t count);

// Tiles of a launch with the plan's kernel whose chunks have these heights in tile rows (0: an empty
// one), whole clusters; they begin and end where bands do. The first `joined` heights belong to the
// chunk after them.
TileOrder chunked_order(const Plan& plan, int64_t columns, const std::vector<int32_t>& heights,
                        size_t joined = 0);

// Pieces of a chunk in its region of the staging buffer: the ranks' copies of an exchange, the
// ranks' parts of a reduce-scatter or an all-gather, else 1.
int32_t buffer_parts(const Plan& plan);

// Elements of the staging buffer; of no meaning for a ring, which has none. All-reduce and
// reduce-scatter: output tiles, whole ones if packed or scattered, else M * N. All-gather: the
// gathered input, M * K.
int64_t buffer_elements(const Plan& plan);

// Where chunk `chunk` lies in the buffer, in elements. Contiguous by construction; of several
// parts, the first: the others follow, `count` elements each.
struct Extent {
  int64_t offset = 0;
  int64_t count = 0;
};
Extent chunk_extent(const Plan& plan, int32_t chunk);

// Rows [begin, end) that a row-major chunk covers: of the output, or of each part.
struct Rows {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t count() const { return end - begin; }
  Rows behind(int64_t rows) const { return {rows + begin, rows + end}; }
};
Rows chunk_rows(const Plan& plan, int32_t chunk);

// Rows of all parts together that belong to this one.
Rows rows_of_part(const Plan& plan, int32_t part);

// A plan as a flat list of integers, the form in which it crosses the op library's schemas, and
// back. decode throws std::invalid_argument on a list that encode cannot have made.
std::vector<int64_t> encode(const Plan& plan);
Plan decode(const std::vector<int64_t>& code);

// Hashes: equal on all ranks whose problems are equal, or whose plans communicate alike, and hardly ever
// otherwise.
uint64_t hash(const Problem& problem);
uint64_t communication_hash(const Plan& plan);

}  // namespace overlap::plan
