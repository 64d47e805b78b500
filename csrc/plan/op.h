// The ops, and the table of what tells them apart. Other files ask the table, and compare no ops.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace overlap::plan {

enum class Op : int32_t {
  kGemmAllReduce = 0,
  kGemmReduceScatter = 1,
  kAllGatherGemm = 2,
  kGemmAllToAll = 3,
};

// A chunk's communication. kAllReduce: one all-reduce. kExchange, for two ranks: one
// all-gather of the chunk and the peer's, which are then added up where the chunk is put back to
// row-major. It moves the same bytes over the link, and NCCL's all-gather fills the link with a
// third of the CTAs that its all-reduce takes. kRing, for reductions over kPeer: the rows are cut into
// the ranks' parts; a part's partial sums go from rank to rank, each adding its own in the GEMM's
// epilogue, and end at the part's owner, which for an all-reduce sends its finished chunks to all.
// kDirect, for reductions over kPeer: partial sums go straight to the ranks that need them, which add
// them up in one kernel; the fewest steps, for few rows. kStripes, for reductions over kPeer by the
// framework's GEMM: it stores each rank's rows of a chunk into that rank's memory. Their owner adds up the
// ranks' terms beside the next chunk, and copy engines bring an all-reduce's sums to all. kOwners, for reductions over
// kPeer: each rank's GEMM stores its partial sums into the slots of the parts' owners; an owner's epilogue adds the
// ranks' terms up in their order and rounds once, and an all-reduce's finished tiles go to all as a ring's do. kHierarchical,
// over any transport: ranks of a clique add up or share rows first, so that each row crosses between cliques once. The other
// ops have one collective each, over any transport.
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
