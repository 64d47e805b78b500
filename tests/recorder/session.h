// Cases: calls of the ops in a row, on one rank of a group that is like all groups to the executors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/signal/signal.h"
#include "plan/plan.h"
#include "runtime/bootstrap.h"

namespace recorder {

// Every wait of a group has its deadline and reports to it.
inline constexpr int64_t kDeadlineNs = 30'000'000'000;
const overlap::kernels::WaitReport* expected_report();

// A store to which all ranks have come, whatever is asked for. Communicators are named as their keys in it end.
overlap::runtime::Bootstrap bootstrap();

// A rank brings these to a call, beside the plan.
struct Operands {
  bool bias = false;
  // For each weight, whether the plan's kernel takes it; one weight for all ops except all-gathers.
  std::vector<bool> takes = {true};
  // For an all-to-all: one for each rank.
  std::vector<int64_t> send_rows = {};
  std::vector<int64_t> receive_rows = {};
  bool finish = false;  // the rows get a residual and a norm
};

// How a call goes.
struct Mode {
  bool captured = false;
  bool traced = false;
  int64_t delay_us = 0;
  bool other_stream = false;  // not the stream of most calls
};

struct Call {
  overlap::plan::Plan plan;
  Operands operands;
  Mode mode;
};

// The failure on the device: a wait whose deadline passed, or what NCCL met asynchronously.
enum class Failed { kNo, kWait, kNccl };

// grid.py makes them; a case's line has the fields in this order.
struct Case {
  std::string name = {};
  int world = 2;
  int rank = 0;
  bool peers = true;            // the ranks map each other's memory
  bool prepared = false;        // all plans, before the first call
  Failed failed = Failed::kNo;  // before the first call; no watchdog has looked
  int unrecorded = 0;           // calls of which no text is kept, the first ones
  int refused = 0;              // calls that must throw before anything is enqueued, the first ones
  int library_gemms = -1;  // of the first call; the one after them throws, as where memory is short
  std::vector<Call> calls = {};
};

struct Recording {
  std::string text;
  std::vector<std::string> violations;
};
Recording run(const Case& one);

}  // namespace recorder
