// What tools and tests hook into: the timeline's switch, and a delay that lets computation run
// ahead of communication.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace overlap::binding {

// Rows of trace_stop(): call, chunk, ready_us, begin_us, end_us.
class TraceSwitch {
 public:
  static bool on();
  static void start();
  static at::Tensor stop();
  static void add_rows(const std::vector<double>& rows);  // CPU calls; `call` is filled in
};

// Test hook: holds the side stream (CPU: the communication thread) before each chunk.
int64_t side_delay_us();

}  // namespace overlap::binding
