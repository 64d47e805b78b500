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

OVERLAP_ENUM(Op, "The op that a problem is of.", Member{Op::kGemmAllReduce, "gemm_allreduce"},
             Member{Op::kGemmReduceScatter, "gemm_reducescatter"},
             Member{Op::kAllGatherGemm, "allgather_gemm"},
             Member{Op::kGemmAllToAll, "gemm_alltoall"})

OVERLAP_ENUM(DType, "Element type of operands, or of the result.",
             Member{DType::kBFloat16, "bfloat16"}, Member{DType::kFloat16, "float16"},
             Member{DType::kFloat32, "float32"}, Member{DType::kFloat64, "float64"},
             Member{DType::kFloat8E4M3, "float8_e4m3fn"}, Member{DType::kFloat8E5M2, "float8_e5m2"})

OVERLAP_ENUM(Recipe, "How both operands are scaled.",
             Member{Recipe::kNone, "none", "not at all: not fp8"},
             Member{Recipe::kTensor, "tensor_wise", "by one number each"},
             Member{Recipe::kRow, "row_wise",
                    "by a number for each row of the input, and of the weight"},
             Member{Recipe::kBlock, "block_wise",
                    "by blocks: 1 x 128 of the input, 128 x 128 of the weight"})

OVERLAP_ENUM(Invariance, "What the bits of a row of a sum may depend on.",
             Member{Invariance::kNone, "none", "on the fastest plan, and so on all rows"},
             Member{Invariance::kBatch, "batch",
                    "on the row, the weight and the number of ranks alone"},
             Member{Invariance::kWorld, "world",
                    "on the row and the weight alone: 1, 2, 4 or 8 ranks"})

OVERLAP_ENUM(Schedule, "When an op communicates.",
             Member{Schedule::kSequential, "sequential",
                    "one GEMM, and one collective before or after it"},
             Member{Schedule::kOverlapped, "overlapped",
                    "beside the GEMM: chunk by chunk, or, over peers, by its own stores"})

OVERLAP_ENUM(Kernel, "Which GEMM computes the tiles.", members_of<Kernel>(kKernels))

OVERLAP_ENUM(Transport, "How chunks travel.", members_of<Transport>(kTransports))

OVERLAP_ENUM(
    Collective, "What communicates a chunk.",
    Member{Collective::kAllReduce, "all_reduce", "of gemm_allreduce"},
    Member{Collective::kExchange, "exchange",
           "of gemm_allreduce between two ranks: an all-gather of both chunks, then a sum"},
    Member{Collective::kReduceScatter, "reduce_scatter", "of gemm_reducescatter"},
    Member{Collective::kAllGather, "all_gather", "of allgather_gemm"},
    Member{Collective::kAllToAll, "all_to_all", "of gemm_alltoall"},
    Member{Collective::kRing, "ring",
           "of reductions over peers: partial sums go from rank to rank, each adding its own"},
    Member{Collective::kDirect, "direct",
           "of reductions over peers: partial sums go to the ranks that need them, "
           "which add them up"},
    Member{Collective::kStripes, "stripes",
           "of reductions over peers: the framework's GEMM stores each rank's rows "
           "into its memory, and the rank adds them up, chunk by chunk"},
    Member{Collective::kOwners, "owners",
           "of reductions over peers: each tile goes to its rows' owner, whose GEMM "
           "adds the ranks' terms in their order"},
    Member{Collective::kHierarchical, "hierarchical",
           "ranks of a host add up or share rows first, so that each row crosses "
           "between hosts once; not of gemm_alltoall"})

OVERLAP_ENUM(Layout, "Where finished tiles are stored until their chunk has arrived.",
             Member{Layout::kRowMajor, "row_major", "chunks are whole row panels of the output"},
             Member{Layout::kPacked, "packed",
                    "one after the other in tile order: chunks end after any tile"})

OVERLAP_ENUM(Memory, "The memory that a program's transfers read and write.",
             Member{
                 Memory::kProduct, "product",
                 "each rank's own product, in place of which sums are made; not of allgather_gemm"},
             Member{Memory::kOutput, "output", "the result; not of allgather_gemm"},
             Member{Memory::kInput, "input",
                    "of allgather_gemm: each rank's own rows, which are only read"},
             Member{Memory::kGathered, "gathered",
                    "of allgather_gemm: all ranks' rows; a rank's own are there at first"},
             Member{Memory::kScratch, "scratch", "the program's own"})

OVERLAP_ENUM(Way, "On whose stream a transfer is made.", Member{Way::kPush, "push", "the source's"},
             Member{Way::kPull, "pull", "the destination's"},
             Member{Way::kCopy, "copy", "the rank's, from and to which it is"})

OVERLAP_ENUM(Engine, "What moves a transfer's bytes.",
             Member{Engine::kAny, "any", "what the plan's transport has"},
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
          "rows of the GEMM; of all ranks together for allgather_gemm, 0 for gemm_alltoall, "
          "whose rows differ by rank."),
    FIELD(n, kGroup, "columns of the output, of all weights together."),
    FIELD(k, kGroup, "inner dimension on one rank."),
    FIELD(dtype, kGroup,
          "of the operands (of the input, where two types of fp8 meet) and, unless they are "
          "scaled, of the result; the constructor takes its name or a torch.dtype as well."),
    FIELD(world_size, kGroup, "number of ranks."),
    // Quiet where operands are not scaled, and fast_accum where it is not set.
    FIELD(recipe, kGroup, "see Recipe; the constructor takes its name as well.", "", true),
    FIELD(output_dtype, kGroup,
          "of the result; the constructor takes None for the operands' dtype, or bfloat16 where "
          "they are scaled.",
          "", true),
    FIELD(fast_accum, kGroup,
          "whether scaled operands' sums may be the tensor cores' own, which are less exact than "
          "fp32: the ops' use_fast_accum.",
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
          "the newest compute capability whose kernels this build and this device have: 80, 90; 0: "
          "none."),
    FIELD(link_latency_us, kRank, "fixed time of one all-reduce, microseconds."),
    FIELD(link_gbps, kRank, "all-reduced message bytes in a second, GB/s."),
    FIELD(windows, kRank, "whether NCCL's symmetric windows work in the group."),
    FIELD(peer_gbps, kRank,
          "copies into a peer's memory, GB/s; 0: the ranks do not map each other's."),
    FIELD(profile, kRank,
          "the Profile that says what work takes there; the shipped one unless given."),
    FIELD(serial, kRank,
          "whether some rank's kernels run one at a time (CUDA_LAUNCH_BLOCKING=1, debuggers): "
          "the planner then makes the sequence.",
          "", true),
    FIELD(clique, kRank,
          "ranks of a host, where a group has several hosts with as many each, one after the "
          "other; else 0.",
          "", true),
    FIELD(clique_gbps, kRank,
          "copies into the memory of a rank of the same host, GB/s; 0: it is not mapped.", "",
          true),
    FIELD(across_gbps, kRank,
          "NCCL's messages to another host, of all ranks at once, GB/s of each.", "", true),
    FIELD(across_latency_us, kRank, "fixed time of one such message, microseconds.", "", true))

OVERLAP_FIELDS(
    BandRun, 2,
    "Bands of equal height, one after the other. Frozen: assign plan.bands a new sequence.",
    FIELD(tile_rows, kGroup, "tile rows of each band."), FIELD(count, kGroup, "number of bands."))

OVERLAP_FIELDS(
    Chunk, 1,
    "A run of tiles in tile order, communicated as one unit. Frozen: assign plan.chunks a new "
    "sequence.",
    FIELD(tiles, kGroup,
          "number of tiles; 0 in plans of gemm_alltoall, and of problems that have none.",
          "{} tiles"),
    FIELD(transport, kGroup, "how it travels, the same for all chunks of a plan.", " ({}"),
    FIELD(max_ctas, kRank, "CTA limit of the communicator that carries it; 0: NCCL's own choice.",
          ", {} CTAs", true))

OVERLAP_FIELDS(
    Resources, 0, "What the GEMM leaves to communication (arXiv 2606.09200).",
    FIELD(comm_sms, kRank, "SMs that the GEMM leaves free.", ", {} SMs left to communication"),
    FIELD(smem_pad_bytes, kRank, "shared memory added to each GEMM block, bytes.",
          ", smem pad {} bytes", true),
    FIELD(window, kRank, "whether chunks are staged in an NCCL symmetric window.", ", in a window",
          true),
    FIELD(finish_ctas, kRank,
          "CTAs that put chunks in place after their communication; 0: a default.",
          ", finished by {} CTAs", true),
    FIELD(lanes, kRank,
          "chunks in flight at a time, each on a stream and a communicator of its own.",
          ", {} lanes", true),
    FIELD(one_launch, kRank,
          "gemm_alltoall over peers: whether one launch computes, sends and receives all rows.",
          ", in one launch", true),
    FIELD(low_priority, kRank,
          "whether communication's streams have the lowest priority, not the highest.",
          ", at low priority", true))

OVERLAP_FIELDS(
    Rectangle, 4,
    "Rows and columns of a matrix, in elements. gemm_alltoall's rows are shares of messages: 64 "
    "of each.",
    FIELD(row, kGroup, "the first row."), FIELD(rows, kGroup, "how many."),
    FIELD(column, kGroup, "the first column."), FIELD(columns, kGroup, "how many."))

OVERLAP_FIELDS(Region, 3, "A rectangle of a rank's memory.", FIELD(memory, kGroup, "see Memory."),
               FIELD(rank, kGroup, "the rank that has it."),
               FIELD(area, kGroup, "which part of it, a Rectangle."))

OVERLAP_FIELDS(
    Transfer, 4,
    "A move of data from one region to another, and its waits. Frozen: assign program.transfers "
    "a new sequence.",
    FIELD(way, kGroup, "see Way."),
    FIELD(reduces, kGroup, "whether it is added to what the destination holds."),
    FIELD(source, kGroup, "the Region that is read."),
    FIELD(destination, kGroup, "the Region that is written, of the same height and width."),
    FIELD(by, kGroup, "see Engine."),
    FIELD(stream, kGroup, "0 to 3: those of a rank's stream come one after the other."),
    FIELD(tiles, kGroup, "Rectangles of the source's product, whose tiles are computed before."),
    FIELD(behind, kGroup,
          "numbers of earlier transfers that come before, each of which shares a rank with it."))

OVERLAP_FIELDS(Program, 0, "Transfers in place of a plan's collective, of all ranks.",
               FIELD(scratch_rows, kGroup,
                     "rows of scratch memory on each rank, as wide as what travels."),
               FIELD(transfers, kGroup,
                     "Transfers, in the order in which each rank comes to its own."))

OVERLAP_FIELDS(
    Plan, 0, "How one problem runs. Plain data; validate() says whether it can run.",
    FIELD(problem, kGroup, "the problem that it is a plan for.", "{}: "),
    FIELD(schedule, kGroup, "see Schedule.", "{}, "), FIELD(kernel, kRank, "see Kernel.", "{} "),
    FIELD(tile_m, kGroup, "rows of the kernel's tile, elements.", "{}x"),
    FIELD(tile_n, kGroup, "its columns, elements.", "{}"),
    FIELD(cluster_m, kGroup, "tile rows that a cluster computes together.", " cluster {}, "),
    FIELD(layout, kGroup, "see Layout.", "{}, "),
    FIELD(bands, kGroup,
          "BandRuns, the tile order: band after band, within each column after column.",
          "bands of {} tile rows, "),
    FIELD(chunks, kGroup, "Chunks, in tile order; their tiles sum up to the grid's.",
          "chunks of {}"),
    // Quiet where it is the op's own.
    FIELD(collective, kGroup, "see Collective.", ", {}", true),
    FIELD(resources, kRank, "what the GEMM leaves to communication.", "{}"),
    FIELD(program, kGroup, "a Program, which moves the chunks where it has transfers.", ", {}",
          true),
    FIELD(clique, kGroup,
          "ranks of a host, of the collective hierarchical, and of programs over peers on "
          "several hosts; else 0.",
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
