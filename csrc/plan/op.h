// The ops and the collectives, each with the table of what tells them apart. Other files ask the tables, and compare no ops.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "plan/table.h"

namespace overlap::plan {

enum class Op : int32_t {
  kGemmAllReduce = 0,
  kGemmReduceScatter = 1,
  kAllGatherGemm = 2,
  kGemmAllToAll = 3,
};

// A chunk's communication. An exchange moves as many bytes as an all-reduce of two ranks, and NCCL's all-gather fills the link
// with a third of the CTAs that its all-reduce takes.
enum class Collective : int32_t {
  kAllReduce = 0,
  kExchange = 1,
  kReduceScatter = 2,
  kAllGather = 3,
  kAllToAll = 4,
  kRing = 5,
  kDirect = 6,
  kStripes = 7,
  kOwners = 8,
  kHierarchical = 9,
};

enum CollectiveTrait : uint32_t {
  kForAllReduces = 1,  // all-reduces may have it in place of their own
  kForSums = 2,        // all-reduces and reduce-scatters may
  kPeersOnly = 4,      // it stores into peers' memory
  kOrMessages = 8,     // or, on CPU, sends messages
  kOverlaps = 16,      // it has no form that follows the GEMM
  kOneChunk = 32,      // nothing of it waits for a chunk
  kOwnsParts = 64,  // each rank has a part of the rows, which the GEMMs compute one after the other
  kFlagsTiles = 128,     // the GEMM passes tiles on as it stores them; each has a flag
  kSumsInOrder = 256,    // terms are added in the order of ranks
  kMovesAccesses = 512,  // over peers a kernel moves rows by whole accesses
};

struct CollectiveTraits {
  const char* name;
  const char* doc;
  uint32_t traits = 0;

  constexpr bool has(uint32_t any) const { return (traits & any) != 0; }
};

inline constexpr std::array<CollectiveTraits, 10> kCollectives = {{
    {"all_reduce", "gemm_allreduce: NCCL's or gloo's all-reduce"},
    {"exchange", "gemm_allreduce between two ranks: each gathers both chunks and adds them up",
     kForAllReduces | kOverlaps},
    {"reduce_scatter", "gemm_reducescatter"},
    {"all_gather", "allgather_gemm"},
    {"all_to_all", "gemm_alltoall", kMovesAccesses},
    {"ring", "reductions over peers: partial sums go from rank to rank, and each rank adds its own",
     kForSums | kPeersOnly | kOverlaps | kOneChunk | kOwnsParts | kFlagsTiles},
    {"direct",
     "reductions over peers: partial sums go to the ranks that need them, which add them up",
     kForSums | kPeersOnly | kOneChunk | kSumsInOrder | kMovesAccesses},
    {"stripes",
     "reductions over peers: the framework's GEMM stores each rank's rows into that rank's memory, "
     "and the rank adds them up, chunk by chunk",
     kForSums | kPeersOnly | kOrMessages | kOverlaps | kOwnsParts},
    {"owners",
     "reductions over peers: each tile goes to the rank that owns its rows, whose GEMM adds the "
     "terms in rank order",
     kForSums | kPeersOnly | kOverlaps | kOneChunk | kOwnsParts | kFlagsTiles | kSumsInOrder},
    {"hierarchical",
     "several hosts: the ranks of a host add up or share rows first, so that each row crosses "
     "between hosts once; all ops but gemm_alltoall",
     kOverlaps},
}};

constexpr const CollectiveTraits& traits(Collective collective) {
  return row_of(kCollectives, collective);
}
constexpr const char* name(Collective collective) {
  return traits(collective).name;
}
constexpr bool has(Collective collective, uint32_t any) {
  return traits(collective).has(any);
}

// An op is a GEMM with a movement of rows before or after it.
struct OpTraits {
  std::optional<Collective> before = {};  // moves rows of the input
  std::optional<Collective> after = {};   // moves rows of the product
  // The ranks have equal parts of the rows: of the input, where they move before the GEMM, else of the output.
  bool parts_of_ranks = false;
  // The ranks have any numbers of rows. Each call says them, and the problem leaves them out.
  bool rows_by_rank = false;

  constexpr bool gathers() const { return before == Collective::kAllGather; }
  constexpr bool all_reduces() const { return after == Collective::kAllReduce; }
  constexpr bool scatters() const { return after == Collective::kReduceScatter; }
  // Partial products are added up.
  constexpr bool sums() const { return all_reduces() || scatters(); }
};

inline constexpr std::array<OpTraits, 4> kOps = {{
    {.after = Collective::kAllReduce},                              // kGemmAllReduce
    {.after = Collective::kReduceScatter, .parts_of_ranks = true},  // kGemmReduceScatter
    {.before = Collective::kAllGather, .parts_of_ranks = true},     // kAllGatherGemm
    {.after = Collective::kAllToAll, .rows_by_rank = true},         // kGemmAllToAll
}};

// A number that is no op's, which check_problem refuses, moves nothing.
constexpr OpTraits traits(Op op) {
  const auto row = static_cast<size_t>(op);
  return row < kOps.size() ? kOps[row] : OpTraits{};
}

}  // namespace overlap::plan
