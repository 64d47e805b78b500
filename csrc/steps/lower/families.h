// The families of plans, each with its lowering.
#pragma once

#include "steps/list/list.h"
#include "steps/price/costs.h"

namespace overlap::steps {

// The spread of stores of a GEMM that stores into peers' memory.
inline int32_t spread_ns(const plan::Plan& plan, const plan::Machine& machine) {
  return static_cast<int32_t>(1e3 * store_spread_us(plan, machine));
}

// Where each rank's rows begin, and where the last ones end.
inline std::vector<int64_t> offsets(const std::vector<int64_t>& rows) {
  std::vector<int64_t> result{0};
  for (const int64_t count : rows) result.push_back(result.back() + count);
  return result;
}

// A call on one of its ranks.
struct RankCall {
  const plan::Plan& plan;
  int32_t rank;
  const plan::Machine& machine;
  const Variant& variant;
};

// One rank's lowering of a plan: what all families look at, and the list that they make.
class Family {
 public:
  explicit Family(const RankCall& call)
      : plan_(call.plan),
        rank_(call.rank),
        machine_(call.machine),
        variant_(call.variant),
        ranks_(plan_.problem.world_size),
        chunks_(static_cast<int32_t>(plan_.chunks.size())),
        all_reduces_(plan_.problem.traits().all_reduces()),
        peers_(plan::over_peers(plan_)),
        callers_(variant_.compute == Compute::kCallers),
        element_bytes_(plan::moved_bytes(plan_.problem)),
        row_bytes_(plan::moved_columns(plan_.problem) * element_bytes_) {
    list_.made.chunks = chunks_;
  }

 protected:
  // The ranks at this distance after this one, and before it.
  int32_t rank_after(int32_t distance) const { return (rank_ + distance) % ranks_; }
  int32_t rank_before(int32_t distance) const { return (rank_ + ranks_ - distance) % ranks_; }

  // This rank's rows from this one on.
  Where input(int64_t row) const {
    return {Buffer::kInput, row * plan_.problem.k * plan::element_bytes(plan_.problem.dtype)};
  }
  LibraryGemm library_gemm(plan::Rows rows, Where output) const {
    return {0, rows, input(rows.begin), {output}};
  }
  // The plan's kernel's, of all rows; where it stores is left to the family.
  Gemm gemm_of_all(const plan::TileOrder& order) {
    Gemm gemm;
    gemm.rows = {0, plan_.problem.m};
    gemm.input = {Buffer::kInput};
    gemm.order = list_.add_order(order);
    gemm.end_tile = order.num_tiles();
    gemm.ctas = ctas_beside(plan_, machine_);
    return gemm;
  }
  SendReceive no_messages() const { return {plan_.chunks[0].max_ctas, 0, {}, {}}; }

  const plan::Plan& plan_;
  const int32_t rank_;
  const plan::Machine& machine_;
  const Variant& variant_;
  const int32_t ranks_;
  const int32_t chunks_;
  const bool all_reduces_;
  const bool peers_;
  const bool callers_;  // whose kernel computes
  const int64_t element_bytes_;
  const int64_t row_bytes_;  // of what travels
  List list_;
};

// The families; what lower says holds for each.
StepList lower_produce(const RankCall& call);
StepList lower_consume(const RankCall& call);
StepList lower_ring(const RankCall& call);
StepList lower_stripes(const RankCall& call);  // checks callers' plans, too
StepList lower_direct(const RankCall& call);
StepList lower_all_to_all(const RankCall& call);
StepList lower_all_to_all_over_peers(const RankCall& call);
StepList lower_program(const RankCall& call);

}  // namespace overlap::steps
