// The calls by plan: how often each plan ran, its expected gain, and why the other calls ran as the
// sequence.
#pragma once

#include <ATen/core/Dict.h>

#include <string>
#include <vector>

#include "binding/ops/groups.h"

namespace overlap::binding {

// One row for each group, problem and way in which it ran, in the order of their first calls; by column:
// group, op, m, n, k, dtype (for people), input_dtype, recipe, output_dtype and fast_accum (0 or 1) as a
// problem has them, world_size, device, calls, plan (encoded; "" without one), captured and overlapped (0
// or 1), predicted_us and sequence_us ("" where nothing is expected), why.
std::vector<c10::Dict<std::string, std::string>> plan_table();

// OVERLAP_LOG=plans: one line on stderr.
void log_plan(const GroupEntry& group, const Tally& tally);

}  // namespace overlap::binding
