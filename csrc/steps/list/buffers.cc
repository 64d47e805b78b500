// The sizes of a call's buffers.
#include <numeric>

#include "steps/list/step.h"

namespace overlap::steps {

int64_t buffer_bytes(const plan::Plan& plan, const Variant& variant, const StepList& list,
                     const Where& where) {
  const plan::Problem& problem = plan.problem;
  const plan::OpTraits op = problem.traits();
  const int64_t ranks = problem.world_size;
  const int64_t input_row = problem.k * plan::element_bytes(problem.dtype);
  const auto sum_of = [](const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  };
  switch (where.buffer) {
    case Buffer::kInput:
      return input_row * (op.gathers()      ? problem.m / ranks
                          : op.rows_by_rank ? sum_of(variant.send_rows)
                                            : problem.m);
    case Buffer::kOutput: {
      const int64_t rows = op.rows_by_rank ? sum_of(variant.receive_rows)
                           : op.scatters() ? problem.m / ranks
                                           : problem.m;
      const std::vector<Weight>& weights = variant.weights;
      const int64_t columns =
          weights.empty() ? problem.n : weights[static_cast<size_t>(where.index)].columns;
      return rows * columns * plan::output_bytes(problem);
    }
    case Buffer::kGathered:
      return problem.m * input_row;
    case Buffer::kSlot:
      return list.slot_bytes;
    case Buffer::kStripes:
      return ranks * plan::stripe_stride(list.stripe_bytes);
    default:
      for (const Scratch& scratch : list.scratch) {
        if (scratch.buffer == where.buffer) return scratch.bytes;
      }
      return 0;
  }
}

}  // namespace overlap::steps
