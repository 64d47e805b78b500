// An op whose rows' counts only the device knows, on the types of csrc/steps: each row goes to the rank that its caller
// lists it for, meets that rank's weight there, and comes home.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "steps/list/step.h"

namespace overlap {

plan::Plan plan_of(int64_t k, int64_t n, plan::DType dtype, int64_t world, bool on_cpu);

// Lists and memory are made for `capacity` rows of each pair. kIndices hold for each rank its number of rows, then for each
// rank the rows. The ranks send each other the numbers first.
steps::StepList lower(const plan::Plan& plan, int64_t capacity, int32_t rank);

// input [rows, K], weight [N, K], indices int64 [world + world * capacity] -> [rows, N]; each row is in one of the lists.
at::Tensor routed(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& indices,
                  int64_t capacity, const std::string& group);

}  // namespace overlap
