// Cases: calls of the ops in a row, on one rank of a group that is like all groups to the executors.
#pragma once

#include <cstdint>
#include <functional>
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

// How a call goes.
struct Mode {
  bool captured = false;
  bool traced = false;
  int64_t delay_us = 0;
  bool other_stream = false;  // not the stream of most calls
};

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

struct Call {
  overlap::plan::Plan plan;
  Operands operands;
  Mode mode;
};

// The failure on the device: a wait whose deadline passed, or what NCCL met asynchronously.
enum class Failed { kNo, kWait, kNccl };

enum class Link { kFast, kSlow, kNoWindows, kNoPeers };

struct Case {
  std::string family = {};  // cases that are pinned together
  std::string name = {};    // of this one in it
  int world = 2;
  int rank = 0;
  std::vector<Call> calls = {};
  Link link = Link::kFast;
  bool prepared = false;        // all plans, before the first call
  Failed failed = Failed::kNo;  // before the first call; no watchdog has looked
  int unrecorded = 0;           // calls of which no text is kept, the first ones
  int refused = 0;              // calls that must throw before anything is enqueued, the first ones
  int library_gemms = -1;  // of the first call; the one after them throws, as where memory is short
};

std::string full_name(const Case& one);

struct Recording {
  std::string text;
  std::vector<std::string> violations;
};
Recording run(const Case& one);

// Microseconds that the host takes for the case's first call, with fakes that do nothing: the best of `repeats` times
// the mean of `calls`.
double host_us(const Case& one, int calls, int repeats);

// Visits every case, the cases of a family one after the other. A plan that is not valid makes no case.
void visit_grid(const std::function<void(const Case&)>& visit);

// Calls whose host time is measured.
void visit_timed(const std::function<void(const Case&)>& visit);

}  // namespace recorder
