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

// A chunk's communication; plan_fields.h says what each is. An exchange moves as many bytes as an all-reduce of two ranks, and
// NCCL's all-gather fills the link with a third of the CTAs that its all-reduce takes.
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
