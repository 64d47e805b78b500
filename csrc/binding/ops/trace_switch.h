// Tools and tests hook in here: the timeline's switch, and a delay that lets computation run ahead
// of communication.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "plan/plan.h"

namespace overlap::binding {

// The timeline of all calls between start() and stop().
class TraceSwitch {
 public:
  static bool on();
  static void start();  // throws if it is on

  // One row a chunk: call, chunk, ready_us, begin_us, end_us, from the call's start; one row a call with
  // chunk -1: call, -1, the GEMM's end, the call's start, the call's end, of which the start counts from an
  // instant of its device's own. And what was called, by the number of the call: group, device, op, m, n, k,
  // dtype, world_size.
  static std::tuple<at::Tensor, std::vector<c10::Dict<std::string, std::string>>> stop();

  // A call on CPU. Rows as above, with any number as call, and any start.
  static void add_call(const plan::Problem& problem, const std::string& group,
                       std::chrono::steady_clock::time_point start, std::vector<double> rows);
};

// Test hook: holds the side stream (CPU: the call) before each chunk's communication.
int64_t side_delay_us();

}  // namespace overlap::binding
