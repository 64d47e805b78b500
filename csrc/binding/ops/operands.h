// Checks of what an op is given, and its flattening into an OpCall.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "binding/ops/op_call.h"

namespace overlap::binding {

// A call of `op` with all but the counts of rows; problem.m is the number of input's rows. Throws
// ValueError or TypeError for operands that do not fit, naming the op and what was given. `scales`: of fp8 operands.
OpCall make_call(plan::Op op, const at::Tensor& input, std::vector<at::Tensor> weights,
                 std::vector<std::optional<at::Tensor>> biases, const std::string& group_name,
                 const std::optional<GivenScales>& scales = std::nullopt);

// Gives the problem of a call the invariance that it asks for by name; where it names none, OVERLAP_INVARIANCE's.
// ValueError for an unknown one, and for a problem that cannot have it.
void set_invariance(plan::Problem& problem, const char* op,
                    const std::optional<std::string>& given);

// The dim that is cut between the ranks, counted from the front: input must have it apart from K. Scaled operands are cut
// along dim 0.
int64_t row_dim(plan::Op op, const at::Tensor& input, int64_t dim = 0, bool scaled = false);

// Tells the call which dim is cut, where dims of more than one element come before it.
void set_blocks(OpCall& call, const at::Tensor& input, int64_t dim);

// Throws unless `rows` holds a count >= 0 for each of the group's ranks.
void check_counts(const char* name, at::IntArrayRef rows, const GroupEntry& group);

// [rows, columns] -> [..., columns], with input's dims except for the last, and `dim`, which has `size` elements.
at::Tensor as_shape_of(const at::Tensor& rows, const at::Tensor& input, int64_t dim, int64_t size);

}  // namespace overlap::binding
