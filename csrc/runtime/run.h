// The executor: enqueues a call's list of steps.
//
//   caller | fork | GEMM: chunk 0, 1, 2 ... signal [A] ......... | join |
//   side   |      | wait 0 [A] | NCCL 0 | wait 1 [A] | NCCL 1 | ^
//   copy   |                            | finish 0 | finish 1 | ^
//
// Lanes are streams of the device; a step that others follow records an event. The list
// (csrc/steps) says what is computed, communicated and waited for, where and in which order;
// deadlines, slots, counters and captures belong to every call. Nothing is made once a call is
// warm.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/gemm/gemm.h"
#include "kernels/peer/peer_finish.h"
#include "plan/plan.h"
#include "runtime/group.h"
#include "runtime/trace.h"
#include "steps/list/step.h"

namespace overlap::runtime {

// The parts of a call that a list of steps does not hold: where its memory is, and what the framework computes.
class Operands {
 public:
  virtual ~Operands() = default;

  // Where a buffer of the call begins; of what the call makes, made when it is first asked for. Null: kProduct,
  // where library() makes it.
  virtual void* base(steps::Buffer buffer, int32_t index) = 0;

  // The plan's kernel's operands of a weight; what a step says is not looked at.
  virtual const kernels::GemmParams& gemm(int32_t weight) = 0;

  // Enqueues the framework's GEMM on the call's stream. Without output: into memory that this makes and returns.
  virtual void* library(const steps::LibraryGemm& step, const void* input, const void* adds,
                        void* output) = 0;

  // Enqueues a sum of rows, the framework's, on this stream.
  virtual void add(const steps::CopyRows& step, const void* source, void* destination,
                   cudaStream_t on) = 0;

  // Names, for the framework's profiler, the chunk whose communication is enqueued from here on; -1: none.
  virtual void name_chunk(int32_t chunk) = 0;

  // In a capture: memory for at least `count` counters, which the graph owns.
  virtual int32_t* counters(int32_t count) = 0;
};

struct Call {
  const plan::Plan* plan = nullptr;
  const steps::StepList* list = nullptr;  // of the plan on this rank
  Operands* operands = nullptr;
  const void* bias = nullptr;  // [n] or null, what steps with a bias add
  const kernels::FinishParams* finish =
      nullptr;  // of a list that finishes rows, except for terms and sum
  // A reduce-scatter's input and an all-gather's results lie in memory as [blocks, ranks, rows of each, ...], where the
  // list has [ranks, blocks, ...]. More than one: of sequences over NCCL; of GEMMs whose tiles lie in one block each.
  int32_t blocks = 1;
  cudaStream_t stream = nullptr;
  int32_t* counters = nullptr;  // zero at first, of a kernel of the caller's; else the executor's
  Trace* trace = nullptr;       // records a timeline if set
  int64_t delay_us = 0;         // tests: hold the lane this long before each chunk's communication
};

// Enqueues the call; its stream continues after all of it. Throws before anything is enqueued if the group has
// failed, or if something would have to be made inside a capture.
[[gnu::visibility("default")]] void run(Group& group, const Call& call);

// A call whose kernel the caller launches: begin() enqueues what comes before that, finish() the rest. Meanwhile no
// other call may begin on the device.
class OpenCall {
 public:
  // The memory that `call` points to has to live as long as this object.
  OpenCall(Group& group, const Call& call);
  ~OpenCall();  // as abandon(), where the call was begun and not finished
  OpenCall(const OpenCall&) = delete;
  OpenCall& operator=(const OpenCall&) = delete;

  // Throws as run() does.
  void begin();
  void finish();

  // The call's part of the window, or its product in stripes, where its list has one. Between begin() and finish().
  void* window() const;

  // Instead of finish(): the caller's stream continues after what was begun, and nothing else is enqueued.
  void abandon() noexcept;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace overlap::runtime
