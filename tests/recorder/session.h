// Cases: calls of the ops in a row, on one rank of a group that is like all groups to the executors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/signal/signal.h"
#include "plan/plan.h"
#include "runtime/call_history.h"

namespace recorder {

// Every wait of a group has its deadline and reports to it.
inline constexpr int64_t kDeadlineNs = 30'000'000'000;
const overlap::kernels::WaitReport* expected_report();

// A store to which all ranks have come, whatever is asked for. Communicators are named as their keys in it end.
overlap::runtime::Bootstrap bootstrap();

// grid.py makes calls and cases; their lines have the fields in this order.
struct Call {
  overlap::plan::Plan plan;
  bool bias = false;
  // For each weight, whether the plan's kernel takes it; one weight for all ops except all-gathers.
  std::vector<bool> takes = {};
  // For an all-to-all: one for each rank.
  std::vector<int64_t> send_rows = {};
  std::vector<int64_t> receive_rows = {};
  bool finish = false;  // the rows get a residual and a norm
  bool captured = false;
  bool traced = false;
  int64_t delay_us = 0;
  bool other_stream = false;  // not the stream of most calls
};

// The failure on the device: a wait whose deadline passed, or what NCCL met asynchronously.
enum class Failed { kNo, kWait, kNccl };

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

// Checks on calls made by hand; each gives what does not hold.

// The record finds what it is there to find.
std::vector<std::string> self_check();
// A group finds failures while the driver is busy, and agrees on memory where one rank has none left.
std::vector<std::string> group_check();

}  // namespace recorder
