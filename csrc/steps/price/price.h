// The expected time of a plan: a walk over its list of steps, each at the cost that
// steps/price/costs.h has for its kind.
//
// A lane does its steps one by one; a step begins after the steps that it waits for, and not before the host has
// enqueued it. NCCL's calls on different lanes share the link. The ranks are taken to be alike: a peer's signal, rows
// and tiles come when this rank's own would.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "steps/list/step.h"

namespace overlap::steps {

// The cost model's expectation of a plan; times in microseconds.
struct Prediction {
  double gemm_us = 0.0;           // the GEMM beside communication
  double communication_us = 0.0;  // the sum of the communication calls
  double total_us = 0.0;          // the whole op
};

// When a step runs, in microseconds from the call's start.
struct Span {
  double begin_us = 0.0;
  double end_us = 0.0;
};

struct Price {
  Prediction expected;
  std::vector<Span> steps;
  std::vector<double> computed_us;  // by a GEMM that counts: when each chunk's tiles are finished
};

// The list must be one of the plan's, on that rank of that machine. `kernel_us`: what a kernel of the caller's takes on
// all SMs, by itself.
Price price(const StepList& list, const plan::Plan& plan, int32_t rank,
            const plan::Machine& machine, double kernel_us = 0.0);

// The expected time of a plan: the price of its list, as ranks run it whose operands the plan's
// kernel takes, without bias. The plan must be valid. Nothing for problems without tiles, such as
// all-to-alls, whose rows differ by call; infinite times on a machine that was not measured.
Prediction predict(const plan::Plan& plan, const plan::Machine& machine);

}  // namespace overlap::steps
