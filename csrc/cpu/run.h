// The executor on CPU: does a call's list of steps on the calling thread.
//
//   caller | GEMM 0 | begin 0 | GEMM 1 | begin 1 | ... | join: finish 0 | finish 1 | ...
//   group  |                  | ===== chunk 0 ===== | ===== chunk 1 ===== | ...
//
// A lane but the caller's is what the process group has under way: what communicates there begins when the list comes
// to it, and is waited for by steps that come after it, and by the join. Steps of the copy lane are put off until then.
//
// A program's lanes are kept in order, as a transfer may pass on what another brought: its steps wait for what the lane has
// under way; so do those beside a caller's kernel. GEMMs that wait for nothing are put off until somebody waits for them, and fill the time of such waits.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/collectives.h"
#include "plan/plan.h"
#include "steps/list/step.h"

namespace overlap::cpu {

// Matrices are contiguous, except for the weights and, where no step communicates it, the input.
struct Call {
  const plan::Plan& plan;
  std::shared_ptr<const steps::StepList> list;  // of the plan on this rank
  const Group& group;
  at::Tensor input;
  const std::vector<at::Tensor>& weights;
  std::vector<std::optional<at::Tensor>> biases = {};  // that GEMMs add; none: empty
  std::optional<at::Tensor> bias = {};                 // that other steps add
  std::vector<at::Tensor> outputs = {};
  at::Tensor gathered = {};
  at::Tensor product = {};               // made here if it is not given
  std::vector<at::Tensor> indices = {};  // kIndices, int64, where the list has some
  // The GEMM of scaled operands, one for each weight: into the output, with this weight, over all rows, with
  // what is added.
  std::function<void(at::Tensor&, size_t, const at::Tensor&, const std::optional<at::Tensor>&)>
      scaled_product = {};
  at::Tensor counters = {};  // int32, zeros, of a kernel of the caller's
  int64_t delay_us = 0;      // tests: before each chunk's communication
  bool traced = false;
};

struct Timeline {
  std::chrono::steady_clock::time_point start;
  // A traced call's rows. One for each chunk: 0, chunk, when it was ready, when its communication began and ended; a last one:
  // 0, -1, when the last GEMM ended, 0, when the call did.
  std::vector<double> rows;
};

// Returns when the call is done. Steps that communicate fail at the group's deadline.
[[gnu::visibility("default")]] Timeline run(const Call& call);

// A call whose kernel the caller runs: begin() does what comes before it, and finish() the rest.
class OpenCall {
 public:
  // The call, and all that it refers to, has to live as long as this object.
  explicit OpenCall(const Call& call);
  ~OpenCall();
  OpenCall(const OpenCall&) = delete;
  OpenCall& operator=(const OpenCall&) = delete;

  void begin();
  Timeline finish();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace overlap::cpu
