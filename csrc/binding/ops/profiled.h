// Names in torch.profiler for what an op does; next to nothing while no profiler records.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "binding/ops/op_call.h"

namespace overlap::binding {

class Profiled {
 public:
  // The call: op, and what its GEMM multiplies.
  explicit Profiled(const OpCall& call) {
    if (!range_.isActive()) return;
    const plan::Problem& problem = call.problem;
    const bool by_rank = problem.traits().rows_by_rank;
    range_.before(c10::str("overlap::", plan::name(problem.op), " ",
                           by_rank ? call.input.size(0) : problem.m, " x ", problem.n, " x ",
                           problem.k));
  }

  // A chunk's communication.
  explicit Profiled(int chunk) {
    if (range_.isActive()) range_.before(c10::str("overlap::chunk ", chunk));
  }

 private:
  at::RecordFunction range_{at::RecordScope::USER_SCOPE};
};

}  // namespace overlap::binding
