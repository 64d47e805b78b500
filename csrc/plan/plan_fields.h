// The parts of problems, machines and plans: each field and each member of an enumeration is named
// here once. Encoding, hashes, printing, Python's classes, their docstrings and JSON all follow
// from these lists; a check below shows that a list has all of its struct's fields.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace overlap::plan {

template <typename Enum>
struct Member {
  Enum value;
  const char* name;  // printed and in JSON; Python's is the same in capitals
  const char* doc = "";
};
template <typename Enum>
Member(Enum, const char*, const char* = "") -> Member<Enum>;

// The rows of a table, which have name and doc.
template <typename Enum, typename Row, size_t kRows>
constexpr std::array<Member<Enum>, kRows> members_of(const std::array<Row, kRows>& table) {
  std::array<Member<Enum>, kRows> members{};
  for (size_t i = 0; i < kRows; ++i) {
    members[i] = {static_cast<Enum>(i), table[i].name, table[i].doc};
  }
  return members;
}

// kName: in Python; kMembers: in order from 0.
template <typename Enum>
struct Enumeration;
#define OVERLAP_ENUM(Enum, doc, ...)                      \
  template <>                                             \
  struct Enumeration<Enum> {                              \
    static constexpr const char* kName = #Enum;           \
    static constexpr const char* kDoc = doc;              \
    static constexpr std::array kMembers = {__VA_ARGS__}; \
  };

OVERLAP_ENUM(Op, "The op that a problem describes.", Member{Op::kGemmAllReduce, "gemm_allreduce"},
             Member{Op::kGemmReduceScatter, "gemm_reducescatter"},
             Member{Op::kAllGatherGemm, "allgather_gemm"},
             Member{Op::kGemmAllToAll, "gemm_alltoall"})

OVERLAP_ENUM(DType, "Element type of operands or results.", Member{DType::kBFloat16, "bfloat16"},
             Member{DType::kFloat16, "float16"}, Member{DType::kFloat32, "float32"},
             Member{DType::kFloat64, "float64"}, Member{DType::kFloat8E4M3, "float8_e4m3fn"},
             Member{DType::kFloat8E5M2, "float8_e5m2"})

OVERLAP_ENUM(Recipe, "How both operands are scaled.",
             Member{Recipe::kNone, "none", "not scaled: operands that are not fp8"},
             Member{Recipe::kTensor, "tensor_wise", "one number for each operand"},
             Member{Recipe::kRow, "row_wise",
                    "one number for each row of the input and each row of the weight"},
             Member{Recipe::kBlock, "block_wise",
                    "one number for each block: 1 x 128 in the input, 128 x 128 in the weight"})

OVERLAP_ENUM(Invariance, "What the bits of a row of the result may depend on.",
             Member{Invariance::kNone, "none",
                    "on the plan, and so on the number of rows: the fastest plan runs"},
             Member{Invariance::kBatch, "batch",
                    "only on the row, the weight and the number of ranks"},
             Member{Invariance::kWorld, "world",
                    "only on the row and the weight, for 1, 2, 4 or 8 ranks"})

OVERLAP_ENUM(Schedule, "When an op communicates.",
             Member{Schedule::kSequential, "sequential",
                    "one GEMM, with one collective before or after it"},
             Member{
                 Schedule::kOverlapped, "overlapped",
                 "while the GEMM runs: chunk by chunk, or, over peers, by the GEMM's own stores"})

OVERLAP_ENUM(Kernel, "Which GEMM computes the tiles.", members_of<Kernel>(kKernels))

OVERLAP_ENUM(Transport, "How chunks travel.", members_of<Transport>(kTransports))

OVERLAP_ENUM(Collective, "What communicates a chunk.", members_of<Collective>(kCollectives))

OVERLAP_ENUM(Layout, "Where finished tiles are stored until their chunk has arrived.",
             Member{Layout::kRowMajor, "row_major",
                    "in place in the output: a chunk is whole rows"},
             Member{Layout::kPacked, "packed",
                    "one after the other in tile order: a chunk ends after any tile"})

OVERLAP_ENUM(Memory, "The memory that a program's transfers read and write.",
             Member{Memory::kProduct, "product",
                    "the rank's own product, into which sums are added; no allgather_gemm has it"},
             Member{Memory::kOutput, "output", "the result; no allgather_gemm has it"},
             Member{Memory::kInput, "input",
                    "allgather_gemm: the rank's own rows, which are only read"},
             Member{
                 Memory::kGathered, "gathered",
                 "allgather_gemm: the rows of all ranks; the rank's own are there from the start"},
             Member{Memory::kScratch, "scratch", "memory of the program's own"})

OVERLAP_ENUM(Way, "The rank whose stream makes a transfer.",
             Member{Way::kPush, "push", "the source's"},
             Member{Way::kPull, "pull", "the destination's"},
             Member{Way::kCopy, "copy", "the one rank that it reads and writes"})

OVERLAP_ENUM(Engine, "The engine that moves a transfer's bytes.",
             Member{Engine::kAny, "any", "whatever the plan's transport has"},
             Member{Engine::kCopyEngine, "copy_engine", "a copy engine, which takes no SM"},
             Member{Engine::kNccl, "nccl", "NCCL's messages"})

// kGroup: ranks whose plans differ in the field communicate differently, and so must agree on it.
// kRank: they need not.
enum class Scope { kGroup, kRank };

template <typename Owner, typename Value>
struct Field {
  using Type = Value;
  const char* name;
  Value Owner::* member;
  Scope scope;
  const char* doc;
  // How a plan's text says it, "{}" being the value; a field that has its default is left out where
  // `quiet`. Not used for what prints all of its fields by name.
  const char* phrase = "";
  bool quiet = false;
};
template <typename Owner, typename Value>
Field(const char*, Value Owner::*, Scope, const char*) -> Field<Owner, Value>;
template <typename Owner, typename Value>
Field(const char*, Value Owner::*, Scope, const char*, const char*) -> Field<Owner, Value>;
template <typename Owner, typename Value>
Field(const char*, Value Owner::*, Scope, const char*, const char*, bool) -> Field<Owner, Value>;

// kName: in Python; kRequired: how many of the first fields Python's constructor cannot do without, where it takes all.
template <typename Item>
struct Fields;
#define OVERLAP_FIELDS(Struct, required, doc, ...)    \
  template <>                                         \
  struct Fields<Struct> {                             \
    using Own = Struct;                               \
    static constexpr const char* kName = #Struct;     \
    static constexpr const char* kDoc = doc;          \
    static constexpr size_t kRequired = required;     \
    static constexpr std::tuple kAll = {__VA_ARGS__}; \
  };
#define FIELD(member, scope, ...)                    \
  Field {                                            \
    #member, &Own::member, Scope::scope, __VA_ARGS__ \
  }

OVERLAP_FIELDS(
    Problem, 0, "What all ranks of a call share, so that each makes the same plan.",
    FIELD(op, kGroup, "the op; the constructor takes its name as well."),
    FIELD(m, kGroup,
          "rows of the GEMM. allgather_gemm counts the rows of all ranks; gemm_alltoall has 0, as "
          "its rows differ by rank."),
    FIELD(n, kGroup, "columns of the output, of all weights together."),
    FIELD(k, kGroup, "inner dimension on one rank."),
    FIELD(dtype, kGroup,
          "element type of the operands (of the input, if they are two types of fp8) and, without "
          "scales, of the result; the constructor takes its name or a torch.dtype as well."),
    FIELD(world_size, kGroup, "number of ranks."),
    // Quiet where operands are not scaled, and fast_accum where it is not set.
    FIELD(recipe, kGroup, "see Recipe; the constructor takes its name as well.", "", true),
    FIELD(output_dtype, kGroup,
          "element type of the result; the constructor takes None for the operands' dtype, or for "
          "bfloat16 if they are scaled.",
          "", true),
    FIELD(fast_accum, kGroup,
          "whether sums of scaled operands may stay in the tensor cores, less exact than fp32: the "
          "ops' use_fast_accum.",
          "", true),
    FIELD(invariance, kGroup, "see Invariance; the constructor takes its name as well.", "", true))

OVERLAP_FIELDS(
    Machine, 0,
    "The device and the link that a plan is made for; overlap_torch.plan.machine() measures "
    "them.",
    FIELD(arch, kRank, "compute capability, 80, 89, 90 ...; 0: the CPU."),
    FIELD(sm_count, kRank, "SMs of the device."),
    FIELD(sm_gflops, kRank, "sustained 16-bit tensor-core rate of one SM, GFLOP/s."),
    FIELD(kernel_arch, kRank,
          "the newest compute capability, 80 or 90, whose kernels both this build and this device "
          "have; 0: none."),
    FIELD(link_latency_us, kRank, "fixed time of one all-reduce, microseconds."),
    FIELD(link_gbps, kRank, "all-reduced message bytes in a second, GB/s."),
    FIELD(windows, kRank, "whether NCCL's symmetric windows work in the group."),
    FIELD(peer_gbps, kRank,
          "copies into a peer's memory, GB/s; 0: the ranks cannot map each other's memory."),
    FIELD(profile, kRank,
          "the Profile with the times of kernels and copies on this device; by default the one "
          "that is shipped."),
    FIELD(serial, kRank,
          "whether kernels of a rank run one at a time (CUDA_LAUNCH_BLOCKING=1, a debugger): the "
          "planner then makes the sequence.",
          "", true),
    FIELD(clique, kRank,
          "number of ranks on each host, if the group has several hosts with equally many "
          "consecutive ranks; else 0.",
          "", true),
    FIELD(clique_gbps, kRank,
          "copies into the memory of a rank of the same host, GB/s; 0: it is not mapped.", "",
          true),
    FIELD(across_gbps, kRank,
          "NCCL's messages to another host, of all ranks at once, GB/s of each.", "", true),
    FIELD(across_latency_us, kRank, "fixed time of one such message, microseconds.", "", true))

OVERLAP_FIELDS(BandRun, 2,
               "Consecutive bands of equal height. Frozen: to change one, assign a new sequence to "
               "plan.bands.",
               FIELD(tile_rows, kGroup, "tile rows of each band."),
               FIELD(count, kGroup, "number of bands."))

OVERLAP_FIELDS(
    Chunk, 1,
    "A run of tiles in tile order, communicated as one unit. Frozen: to change one, assign a new "
    "sequence to plan.chunks.",
    FIELD(tiles, kGroup,
          "number of tiles; 0 in plans of gemm_alltoall, and of problems that have none.",
          "{} tiles"),
    FIELD(transport, kGroup, "how the chunk travels; all chunks of a plan have the same.", " ({}"),
    FIELD(max_ctas, kRank,
          "limit of CTAs of the communicator that carries the chunk; 0: NCCL's own choice.",
          ", {} CTAs", true))

OVERLAP_FIELDS(
    Resources, 0, "What the GEMM leaves to communication (arXiv 2606.09200).",
    FIELD(comm_sms, kRank, "SMs that the GEMM leaves free.", ", {} SMs left to communication"),
    FIELD(smem_pad_bytes, kRank, "shared memory added to each GEMM block, bytes.",
          ", smem pad {} bytes", true),
    FIELD(window, kRank, "whether chunks are staged in an NCCL symmetric window.", ", in a window",
          true),
    FIELD(finish_ctas, kRank, "CTAs that put chunks in place once they have come; 0: a default.",
          ", finished by {} CTAs", true),
    FIELD(lanes, kRank,
          "chunks in flight at the same time, each on its own stream and communicator.",
          ", {} lanes", true),
    FIELD(one_launch, kRank,
          "gemm_alltoall over peers: whether one launch computes, sends and receives all rows.",
          ", in one launch", true),
    FIELD(low_priority, kRank,
          "whether the streams of communication have the lowest priority instead of the highest.",
          ", at low priority", true))

OVERLAP_FIELDS(Rectangle, 4,
               "Rows and columns of a matrix, in elements. For gemm_alltoall a row is a share of a "
               "message, which has 64.",
               FIELD(row, kGroup, "the first row."), FIELD(rows, kGroup, "how many."),
               FIELD(column, kGroup, "the first column."), FIELD(columns, kGroup, "how many."))

OVERLAP_FIELDS(Region, 3, "A rectangle of a rank's memory.",
               FIELD(memory, kGroup, "the Memory that it lies in."),
               FIELD(rank, kGroup, "the rank whose memory it is."),
               FIELD(area, kGroup, "the Rectangle of it."))

OVERLAP_FIELDS(
    Transfer, 4,
    "A move of data from one region to another, with what must be ready before. Frozen: to change "
    "one, assign a new sequence to program.transfers.",
    FIELD(way, kGroup, "the Way it is made: by which rank."),
    FIELD(reduces, kGroup, "whether the data are added to the destination; else they replace it."),
    FIELD(source, kGroup, "the Region that is read."),
    FIELD(destination, kGroup, "the Region that is written, as high and as wide as the source."),
    FIELD(by, kGroup, "the Engine that moves the bytes."),
    FIELD(stream, kGroup,
          "0 to 3; transfers on the same stream of a rank run one after the other."),
    FIELD(tiles, kGroup,
          "Rectangles of the source rank's product: their tiles must be computed before."),
    FIELD(after, kGroup,
          "numbers of earlier transfers that must come first; each shares a rank with this one."))

OVERLAP_FIELDS(Program, 0, "The transfers of all ranks that replace a plan's collective.",
               FIELD(scratch_rows, kGroup,
                     "rows of scratch memory on each rank, each as wide as a row that travels."),
               FIELD(transfers, kGroup, "the Transfers; each rank makes its own in this order."))

OVERLAP_FIELDS(
    Plan, 0, "How one problem runs. Plain data: validate() says whether it can run.",
    FIELD(problem, kGroup, "the Problem that the plan solves.", "{}: "),
    FIELD(schedule, kGroup, "see Schedule.", "{}, "), FIELD(kernel, kRank, "see Kernel.", "{} "),
    FIELD(tile_m, kGroup, "rows of the kernel's tile, elements.", "{}x"),
    FIELD(tile_n, kGroup, "columns of the kernel's tile, elements.", "{}"),
    FIELD(cluster_m, kGroup, "tile rows that a cluster computes together.", " cluster {}, "),
    FIELD(layout, kGroup, "see Layout.", "{}, "),
    FIELD(bands, kGroup,
          "the BandRuns, which give the tile order: band after band, and within a band column "
          "after column.",
          "bands of {} tile rows, "),
    FIELD(chunks, kGroup, "the Chunks in tile order; together they have all tiles of the grid.",
          "chunks of {}"),
    // Quiet where it is the op's own.
    FIELD(collective, kGroup, "see Collective.", ", {}", true),
    FIELD(resources, kRank, "what the GEMM leaves to communication.", "{}"),
    FIELD(program, kGroup,
          "the Program that moves the data in place of the collective, if it has transfers.",
          ", {}", true),
    FIELD(clique, kGroup,
          "number of ranks on each host, for the collective hierarchical and for programs over "
          "peers on several hosts; else 0.",
          " in cliques of {}", true))

#undef OVERLAP_ENUM
#undef OVERLAP_FIELDS
#undef FIELD

template <typename T>
struct IsSequence : std::false_type {};
template <typename T>
struct IsSequence<std::vector<T>> : std::true_type {};
template <typename T>
inline constexpr bool kIsSequence = IsSequence<T>::value;
// True if it is a struct that has a list of fields.
template <typename T>
inline constexpr bool kHasFields = std::is_class_v<T> && !kIsSequence<T>;
template <typename Item>
inline constexpr size_t kFieldCount = std::tuple_size_v<decltype(Fields<Item>::kAll)>;

// visit(field) for each in order.
template <typename Item, typename Visit>
constexpr void for_each_field(Visit&& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, Fields<Item>::kAll);
}

// True of a value that goes without saying.
template <typename Item, typename Value>
bool is_usual(const Item& item, const Field<Item, Value>& field) {
  if constexpr (std::is_same_v<Item, Problem> &&
                (std::is_same_v<Value, bool> || std::is_same_v<Value, Invariance>)) {
    return item.*field.member == Value{};
  } else if constexpr (std::is_same_v<Item, Problem>) {
    return item.recipe == Recipe::kNone;
  } else if constexpr (std::is_same_v<Value, Collective>) {
    return item.*field.member == collective_of(item.problem.op);
  } else {
    return item.*field.member == Item{}.*field.member;
  }
}

template <typename Enum>
constexpr const char* member_name(Enum value) {
  for (const Member<Enum>& member : Enumeration<Enum>::kMembers) {
    if (member.value == value) return member.name;
  }
  return "unknown";
}

namespace checks {

struct Anything {
  template <typename T>
  operator T() const;
};

template <typename Item, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return requires { Item{(static_cast<void>(I), Anything{})...}; };
}

// A struct takes as many initialisers as it has fields, and not one more.
template <typename Item>
constexpr bool all_listed() {
  return takes<Item>(std::make_index_sequence<kFieldCount<Item>>()) &&
         !takes<Item>(std::make_index_sequence<kFieldCount<Item> + 1>());
}

template <typename Enum>
constexpr bool in_order() {
  int64_t next = 0;
  for (const Member<Enum>& member : Enumeration<Enum>::kMembers) {
    if (static_cast<int64_t>(member.value) != next++) return false;
  }
  return true;
}

static_assert(all_listed<Problem>() && all_listed<Machine>() && all_listed<BandRun>() &&
              all_listed<Chunk>() && all_listed<Resources>() && all_listed<Plan>() &&
              all_listed<Rectangle>() && all_listed<Region>() && all_listed<Transfer>() &&
              all_listed<Program>());
static_assert(in_order<Op>() && in_order<DType>() && in_order<Recipe>() && in_order<Invariance>() &&
              in_order<Schedule>() && in_order<Kernel>() && in_order<Transport>() &&
              in_order<Collective>() && in_order<Layout>() && in_order<Memory>() &&
              in_order<Way>() && in_order<Engine>());

}  // namespace checks
}  // namespace overlap::plan
