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

// kName: in Python; kUnknown: printed for a value that is none of kMembers, which are in order from 0.
template <typename Enum>
struct Enumeration;

template <>
struct Enumeration<Op> {
  static constexpr const char* kName = "Op";
  static constexpr const char* kDoc = "The op that a problem is of.";
  static constexpr const char* kUnknown = "unknown op";
  static constexpr std::array kMembers = {
      Member<Op>{Op::kGemmAllReduce, "gemm_allreduce"},
      Member<Op>{Op::kGemmReduceScatter, "gemm_reducescatter"},
      Member<Op>{Op::kAllGatherGemm, "allgather_gemm"},
      Member<Op>{Op::kGemmAllToAll, "gemm_alltoall"},
  };
};

template <>
struct Enumeration<DType> {
  static constexpr const char* kName = "DType";
  static constexpr const char* kDoc = "Element type of operands, or of the result.";
  static constexpr const char* kUnknown = "unknown dtype";
  static constexpr std::array kMembers = {
      Member<DType>{DType::kBFloat16, "bfloat16"},
      Member<DType>{DType::kFloat16, "float16"},
      Member<DType>{DType::kFloat32, "float32"},
      Member<DType>{DType::kFloat64, "float64"},
      Member<DType>{DType::kFloat8E4M3, "float8_e4m3fn"},
      Member<DType>{DType::kFloat8E5M2, "float8_e5m2"},
  };
};

template <>
struct Enumeration<Recipe> {
  static constexpr const char* kName = "Recipe";
  static constexpr const char* kDoc = "How both operands are scaled.";
  static constexpr const char* kUnknown = "unknown recipe";
  static constexpr std::array kMembers = {
      Member<Recipe>{Recipe::kNone, "none", "not at all: not fp8"},
      Member<Recipe>{Recipe::kTensor, "tensor_wise", "by one number each"},
      Member<Recipe>{Recipe::kRow, "row_wise",
                     "by a number for each row of the input, and of the weight"},
      Member<Recipe>{Recipe::kBlock, "block_wise",
                     "by blocks: 1 x 128 of the input, 128 x 128 of the weight"},
  };
};

template <>
struct Enumeration<Invariance> {
  static constexpr const char* kName = "Invariance";
  static constexpr const char* kDoc = "What the bits of a row of a sum may depend on.";
  static constexpr const char* kUnknown = "unknown invariance";
  static constexpr std::array kMembers = {
      Member<Invariance>{Invariance::kNone, "none", "on the fastest plan, and so on all rows"},
      Member<Invariance>{Invariance::kBatch, "batch",
                         "on the row, the weight and the number of ranks alone"},
  };
};

template <>
struct Enumeration<Schedule> {
  static constexpr const char* kName = "Schedule";
  static constexpr const char* kDoc = "When an op communicates.";
  static constexpr const char* kUnknown = "unknown schedule";
  static constexpr std::array kMembers = {
      Member<Schedule>{Schedule::kSequential, "sequential",
                       "one GEMM, and one collective before or after it"},
      Member<Schedule>{Schedule::kOverlapped, "overlapped",
                       "beside the GEMM: chunk by chunk, or, over peers, by its own stores"},
  };
};

template <>
struct Enumeration<Kernel> {
  static constexpr const char* kName = "Kernel";
  static constexpr const char* kDoc = "Which GEMM computes the tiles.";
  static constexpr const char* kUnknown = "unknown kernel";
  static constexpr std::array kMembers = {
      Member<Kernel>{
          Kernel::kLibrary, "library",
          "the framework's, a call for each chunk; takes every dtype, stride and alignment"},
      Member<Kernel>{Kernel::kSm80, "sm80",
                     "128 x 128, bfloat16 and float16, compute capability 8.0 and newer"},
      Member<Kernel>{Kernel::kSm90Pingpong, "sm90_pingpong",
                     "128 x 128, bfloat16, float16 and fp8, Hopper"},
      Member<Kernel>{Kernel::kSm90Cooperative, "sm90_cooperative",
                     "128 x 256, bfloat16 and float16, Hopper"},
      Member<Kernel>{Kernel::kSm90PingpongWide, "sm90_pingpong_wide",
                     "128 x 192, bfloat16, float16 and fp8, Hopper"},
  };
};

template <>
struct Enumeration<Transport> {
  static constexpr const char* kName = "Transport";
  static constexpr const char* kDoc = "How chunks travel.";
  static constexpr const char* kUnknown = "unknown transport";
  static constexpr std::array kMembers = {
      Member<Transport>{Transport::kNccl, "nccl", "CUDA tensors, any ranks"},
      Member<Transport>{Transport::kGloo, "gloo", "tensors on CPU"},
      Member<Transport>{Transport::kPeer, "peer",
                        "memory that 2 to 8 ranks of one host map into each other: stores of the "
                        "GEMM, and copy engines"},
  };
};

template <>
struct Enumeration<Collective> {
  static constexpr const char* kName = "Collective";
  static constexpr const char* kDoc = "What communicates a chunk.";
  static constexpr const char* kUnknown = "unknown collective";
  static constexpr std::array kMembers = {
      Member<Collective>{Collective::kAllReduce, "all_reduce", "of gemm_allreduce"},
      Member<Collective>{
          Collective::kExchange, "exchange",
          "of gemm_allreduce between two ranks: an all-gather of both chunks, then a sum"},
      Member<Collective>{Collective::kReduceScatter, "reduce_scatter", "of gemm_reducescatter"},
      Member<Collective>{Collective::kAllGather, "all_gather", "of allgather_gemm"},
      Member<Collective>{Collective::kAllToAll, "all_to_all", "of gemm_alltoall"},
      Member<Collective>{
          Collective::kRing, "ring",
          "of reductions over peers: partial sums go from rank to rank, each adding its own"},
      Member<Collective>{Collective::kDirect, "direct",
                         "of reductions over peers: partial sums go to the ranks that need them, "
                         "which add them up"},
      Member<Collective>{Collective::kStripes, "stripes",
                         "of reductions over peers: the framework's GEMM stores each rank's rows "
                         "into its memory, and the rank adds them up, chunk by chunk"},
      Member<Collective>{Collective::kOwners, "owners",
                         "of reductions over peers: each tile goes to its rows' owner, whose GEMM "
                         "adds the ranks' terms in their order"},
      Member<Collective>{Collective::kHierarchical, "hierarchical",
                         "ranks of a host add up or share rows first, so that each row crosses "
                         "between hosts once; not of gemm_alltoall"},
  };
};

template <>
struct Enumeration<Layout> {
  static constexpr const char* kName = "Layout";
  static constexpr const char* kDoc =
      "Where finished tiles are stored until their chunk has arrived.";
  static constexpr const char* kUnknown = "unknown layout";
  static constexpr std::array kMembers = {
      Member<Layout>{Layout::kRowMajor, "row_major", "chunks are whole row panels of the output"},
      Member<Layout>{Layout::kPacked, "packed",
                     "one after the other in tile order: chunks end after any tile"},
  };
};

template <>
struct Enumeration<Memory> {
  static constexpr const char* kName = "Memory";
  static constexpr const char* kDoc = "The memory that a program's transfers read and write.";
  static constexpr const char* kUnknown = "unknown memory";
  static constexpr std::array kMembers = {
      Member<Memory>{Memory::kProduct, "product",
                     "each rank's own product, in place of which sums are made; not of "
                     "allgather_gemm"},
      Member<Memory>{Memory::kOutput, "output", "the result; not of allgather_gemm"},
      Member<Memory>{Memory::kInput, "input",
                     "of allgather_gemm: each rank's own rows, which are only read"},
      Member<Memory>{Memory::kGathered, "gathered",
                     "of allgather_gemm: all ranks' rows; a rank's own are there at first"},
      Member<Memory>{Memory::kScratch, "scratch", "the program's own"},
  };
};

template <>
struct Enumeration<Way> {
  static constexpr const char* kName = "Way";
  static constexpr const char* kDoc = "On whose stream a transfer is made.";
  static constexpr const char* kUnknown = "unknown way";
  static constexpr std::array kMembers = {
      Member<Way>{Way::kPush, "push", "the source's"},
      Member<Way>{Way::kPull, "pull", "the destination's"},
      Member<Way>{Way::kCopy, "copy", "the rank's, from and to which it is"},
  };
};

template <>
struct Enumeration<Engine> {
  static constexpr const char* kName = "Engine";
  static constexpr const char* kDoc = "What moves a transfer's bytes.";
  static constexpr const char* kUnknown = "unknown engine";
  static constexpr std::array kMembers = {
      Member<Engine>{Engine::kAny, "any", "what the plan's transport has"},
      Member<Engine>{Engine::kCopyEngine, "copy_engine", "a copy engine, which takes no SM"},
      Member<Engine>{Engine::kSms, "sms", "a kernel"},
      Member<Engine>{Engine::kNccl, "nccl", "NCCL's messages"},
  };
};

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

// kName: in Python; kRequired: how many of the first fields Python's constructor cannot do without.
template <typename Item>
struct Fields;

template <>
struct Fields<Problem> {
  static constexpr const char* kName = "Problem";
  static constexpr const char* kDoc =
      "What all ranks of a call share, so that each makes the same plan.";
  static constexpr std::tuple kAll = {
      Field{"op", &Problem::op, Scope::kGroup, "the op; the constructor takes its name as well."},
      Field{
          "m", &Problem::m, Scope::kGroup,
          "rows of the GEMM; of all ranks together for allgather_gemm, 0 for gemm_alltoall, whose "
          "rows differ by rank."},
      Field{"n", &Problem::n, Scope::kGroup, "columns of the output, of all weights together."},
      Field{"k", &Problem::k, Scope::kGroup, "inner dimension on one rank."},
      Field{"dtype", &Problem::dtype, Scope::kGroup,
            "of the operands (of the input, where two types of fp8 meet) and, unless they are "
            "scaled, "
            "of the result; the constructor takes its name or a torch.dtype as well."},
      Field{"world_size", &Problem::world_size, Scope::kGroup, "number of ranks."},
      // Quiet where operands are not scaled, and fast_accum where it is not set.
      Field{"recipe", &Problem::recipe, Scope::kGroup,
            "see Recipe; the constructor takes its name as well.", "", true},
      Field{"output_dtype", &Problem::output_dtype, Scope::kGroup,
            "of the result; the constructor takes None for the operands' dtype, or bfloat16 where "
            "they "
            "are scaled.",
            "", true},
      Field{"fast_accum", &Problem::fast_accum, Scope::kGroup,
            "whether scaled operands' sums may be the tensor cores' own, which are less exact than "
            "fp32: the ops' use_fast_accum.",
            "", true},
      Field{"invariance", &Problem::invariance, Scope::kGroup,
            "see Invariance; the constructor takes its name as well.", "", true},
  };
};

template <>
struct Fields<Machine> {
  static constexpr const char* kName = "Machine";
  static constexpr const char* kDoc =
      "The device and the link that a plan is made for; overlap_torch.plan.machine() measures "
      "them.";
  static constexpr size_t kRequired = 0;
  static constexpr std::tuple kAll = {
      Field{"arch", &Machine::arch, Scope::kRank,
            "compute capability, 80, 89, 90 ...; 0: the CPU."},
      Field{"sm_count", &Machine::sm_count, Scope::kRank, "SMs of the device."},
      Field{"sm_gflops", &Machine::sm_gflops, Scope::kRank,
            "sustained 16-bit tensor-core rate of one SM, GFLOP/s."},
      Field{"has_sm80_kernels", &Machine::has_sm80_kernels, Scope::kRank,
            "whether this build and this device can run the kernel sm80."},
      Field{"has_sm90_kernels", &Machine::has_sm90_kernels, Scope::kRank,
            "the same of those for Hopper."},
      Field{"link_latency_us", &Machine::link_latency_us, Scope::kRank,
            "fixed time of one all-reduce, microseconds."},
      Field{"link_gbps", &Machine::link_gbps, Scope::kRank,
            "all-reduced message bytes in a second, GB/s."},
      Field{"windows", &Machine::windows, Scope::kRank,
            "whether NCCL's symmetric windows work in the group."},
      Field{"peer_gbps", &Machine::peer_gbps, Scope::kRank,
            "copies into a peer's memory, GB/s; 0: the ranks do not map each other's."},
      Field{"profile", &Machine::profile, Scope::kRank,
            "the Profile that says what work takes there; the shipped one unless given."},
      Field{"serial", &Machine::serial, Scope::kRank,
            "whether some rank's kernels run one at a time (CUDA_LAUNCH_BLOCKING=1, debuggers): "
            "the planner then makes the sequence.",
            "", true},
      Field{"clique", &Machine::clique, Scope::kRank,
            "ranks of a host, where a group has several hosts with as many each, one after the "
            "other; else 0.",
            "", true},
      Field{"clique_gbps", &Machine::clique_gbps, Scope::kRank,
            "copies into the memory of a rank of the same host, GB/s; 0: it is not mapped.", "",
            true},
      Field{"across_gbps", &Machine::across_gbps, Scope::kRank,
            "NCCL's messages to another host, of all ranks at once, GB/s of each.", "", true},
      Field{"across_latency_us", &Machine::across_latency_us, Scope::kRank,
            "fixed time of one such message, microseconds.", "", true},
  };
};

template <>
struct Fields<BandRun> {
  static constexpr const char* kName = "BandRun";
  static constexpr const char* kDoc =
      "Bands of equal height, one after the other. Frozen: assign plan.bands a new sequence.";
  static constexpr size_t kRequired = 2;
  static constexpr std::tuple kAll = {
      Field{"tile_rows", &BandRun::tile_rows, Scope::kGroup, "tile rows of each band."},
      Field{"count", &BandRun::count, Scope::kGroup, "number of bands."},
  };
};

template <>
struct Fields<Chunk> {
  static constexpr const char* kName = "Chunk";
  static constexpr const char* kDoc =
      "A run of tiles in tile order, communicated as one unit. Frozen: assign plan.chunks a new "
      "sequence.";
  static constexpr size_t kRequired = 1;
  static constexpr std::tuple kAll = {
      Field{"tiles", &Chunk::tiles, Scope::kGroup,
            "number of tiles; 0 in plans of gemm_alltoall, and of problems that have none.",
            "{} tiles"},
      Field{"transport", &Chunk::transport, Scope::kGroup,
            "how it travels, the same for all chunks of a plan.", " ({}"},
      Field{"max_ctas", &Chunk::max_ctas, Scope::kRank,
            "CTA limit of the communicator that carries it; 0: NCCL's own choice.", ", {} CTAs",
            true},
  };
};

template <>
struct Fields<Resources> {
  static constexpr const char* kName = "Resources";
  static constexpr const char* kDoc = "What the GEMM leaves to communication (arXiv 2606.09200).";
  static constexpr size_t kRequired = 0;
  static constexpr std::tuple kAll = {
      Field{"comm_sms", &Resources::comm_sms, Scope::kRank, "SMs that the GEMM leaves free.",
            ", {} SMs left to communication"},
      Field{"smem_pad_bytes", &Resources::smem_pad_bytes, Scope::kRank,
            "shared memory added to each GEMM block, bytes.", ", smem pad {} bytes", true},
      Field{"window", &Resources::window, Scope::kRank,
            "whether chunks are staged in an NCCL symmetric window.", ", in a window", true},
      Field{"finish_ctas", &Resources::finish_ctas, Scope::kRank,
            "CTAs that put chunks in place after their communication; 0: a default.",
            ", finished by {} CTAs", true},
      Field{"lanes", &Resources::lanes, Scope::kRank,
            "chunks in flight at a time, each on a stream and a communicator of its own.",
            ", {} lanes", true},
      Field{"one_launch", &Resources::one_launch, Scope::kRank,
            "gemm_alltoall over peers: whether one launch computes, sends and receives all rows.",
            ", in one launch", true},
      Field{"low_priority", &Resources::low_priority, Scope::kRank,
            "whether communication's streams have the lowest priority, not the highest.",
            ", at low priority", true},
  };
};

template <>
struct Fields<Rectangle> {
  static constexpr const char* kName = "Rectangle";
  static constexpr const char* kDoc =
      "Rows and columns of a matrix, in elements. gemm_alltoall's rows are shares of messages: 64 "
      "of each.";
  static constexpr size_t kRequired = 4;
  static constexpr std::tuple kAll = {
      Field{"row", &Rectangle::row, Scope::kGroup, "the first row."},
      Field{"rows", &Rectangle::rows, Scope::kGroup, "how many."},
      Field{"column", &Rectangle::column, Scope::kGroup, "the first column."},
      Field{"columns", &Rectangle::columns, Scope::kGroup, "how many."},
  };
};

template <>
struct Fields<Region> {
  static constexpr const char* kName = "Region";
  static constexpr const char* kDoc = "A rectangle of a rank's memory.";
  static constexpr size_t kRequired = 3;
  static constexpr std::tuple kAll = {
      Field{"memory", &Region::memory, Scope::kGroup, "see Memory."},
      Field{"rank", &Region::rank, Scope::kGroup, "the rank that has it."},
      Field{"area", &Region::area, Scope::kGroup, "which part of it, a Rectangle."},
  };
};

template <>
struct Fields<Transfer> {
  static constexpr const char* kName = "Transfer";
  static constexpr const char* kDoc =
      "A move of data from one region to another, and its waits. Frozen: assign "
      "program.transfers a new sequence.";
  static constexpr size_t kRequired = 4;
  static constexpr std::tuple kAll = {
      Field{"way", &Transfer::way, Scope::kGroup, "see Way."},
      Field{"reduces", &Transfer::reduces, Scope::kGroup,
            "whether it is added to what the destination holds."},
      Field{"source", &Transfer::source, Scope::kGroup, "the Region that is read."},
      Field{"destination", &Transfer::destination, Scope::kGroup,
            "the Region that is written, of the same height and width."},
      Field{"by", &Transfer::by, Scope::kGroup, "see Engine."},
      Field{"stream", &Transfer::stream, Scope::kGroup,
            "0 to 3: those of a rank's stream come one after the other."},
      Field{"tiles", &Transfer::tiles, Scope::kGroup,
            "Rectangles of the source's product, whose tiles are computed before."},
      Field{"behind", &Transfer::behind, Scope::kGroup,
            "numbers of earlier transfers that come before, each of which shares a rank with it."},
  };
};

template <>
struct Fields<Program> {
  static constexpr const char* kName = "Program";
  static constexpr const char* kDoc = "Transfers in place of a plan's collective, of all ranks.";
  static constexpr size_t kRequired = 0;
  static constexpr std::tuple kAll = {
      Field{"scratch_rows", &Program::scratch_rows, Scope::kGroup,
            "rows of scratch memory on each rank, as wide as what travels."},
      Field{"transfers", &Program::transfers, Scope::kGroup,
            "Transfers, in the order in which each rank comes to its own."},
  };
};

template <>
struct Fields<Plan> {
  static constexpr const char* kName = "Plan";
  static constexpr const char* kDoc =
      "How one problem runs. Plain data; validate() says whether it can run.";
  static constexpr std::tuple kAll = {
      Field{"problem", &Plan::problem, Scope::kGroup, "the problem that it is a plan for.", "{}: "},
      Field{"schedule", &Plan::schedule, Scope::kGroup, "see Schedule.", "{}, "},
      Field{"kernel", &Plan::kernel, Scope::kRank, "see Kernel.", "{} "},
      Field{"tile_m", &Plan::tile_m, Scope::kGroup, "rows of the kernel's tile, elements.", "{}x"},
      Field{"tile_n", &Plan::tile_n, Scope::kGroup, "its columns, elements.", "{}"},
      Field{"cluster_m", &Plan::cluster_m, Scope::kGroup,
            "tile rows that a cluster computes together.", " cluster {}, "},
      Field{"layout", &Plan::layout, Scope::kGroup, "see Layout.", "{}, "},
      Field{"bands", &Plan::bands, Scope::kGroup,
            "BandRuns, the tile order: band after band, within each column after column.",
            "bands of {} tile rows, "},
      Field{"chunks", &Plan::chunks, Scope::kGroup,
            "Chunks, in tile order; their tiles sum up to the grid's.", "chunks of {}"},
      // Quiet where it is the op's own.
      Field{"collective", &Plan::collective, Scope::kGroup, "see Collective.", ", {}", true},
      Field{"resources", &Plan::resources, Scope::kRank, "what the GEMM leaves to communication.",
            "{}"},
      Field{"program", &Plan::program, Scope::kGroup,
            "a Program, which moves the chunks where it has transfers.", ", {}", true},
      Field{
          "clique", &Plan::clique, Scope::kGroup,
          "ranks of a host, of the collective hierarchical, and of programs over peers on several "
          "hosts; else 0.",
          " in cliques of {}", true},
  };
};

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
  return Enumeration<Enum>::kUnknown;
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
