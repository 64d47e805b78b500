// Calls whose GEMM is a kernel of the caller's: what Python's overlap_torch.produce and consume run by.
#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "binding/ops/groups.h"
#include "plan/plan.h"
#include "steps/list/step.h"

namespace overlap::binding {

// A job's kernel finds these before its counters, and after them. overlap/signal.cuh and triton.py
// have the same numbers.
struct KernelCounters {
  static constexpr int64_t kReport = plan::kMaxChunks;  // address of the group's report, 64 bits
  static constexpr int64_t kDeadline = kReport + 2;     // nanoseconds, 64 bits
  static constexpr int64_t kSize = kDeadline + 2;
};

// A job as a group's ranks agree about it, for any number of calls. A call is begin(), the caller's kernel, finish().
class KernelJob : public torch::CustomClassHolder {
 public:
  // `code`: an encoded plan. Rows and pieces are an all-to-all's.
  KernelJob(const std::vector<int64_t>& code, at::Device device, const std::string& group,
            bool awaits, std::vector<int64_t> send_rows, std::vector<int64_t> receive_rows,
            int64_t pieces);

  // The tables that a kernel reads: each tile's chunk, and how many tiles a row of tiles has.
  std::vector<int64_t> tile_chunks() const;
  int64_t tile_columns() const { return list_->tiles.columns; }
  // The tiles that each counter counts.
  std::vector<int64_t> chunk_tiles() const;
  // Makes the memory that a planned call over peers needs, on all ranks. Returns false, on all of them, if it cannot be had.
  bool reserve() const;

  const plan::Plan& plan() const { return plan_; }
  const std::shared_ptr<GroupEntry>& group() const { return group_; }
  at::Device device() const { return device_; }
  const steps::Variant& job() const { return job_; }
  std::shared_ptr<const steps::StepList> list(bool captured) const;
  // The text of a call that ranks compare.
  std::string text() const;

 private:
  plan::Plan plan_;
  at::Device device_;
  std::shared_ptr<GroupEntry> group_;
  steps::Variant job_;
  plan::Machine machine_;
  std::shared_ptr<const steps::StepList> list_;
  std::shared_ptr<const steps::StepList> captured_;  // where it differs
};

// One call. `input`: the rows that are gathered, or not defined.
class KernelCall : public torch::CustomClassHolder {
 public:
  KernelCall(c10::intrusive_ptr<KernelJob> job, const std::optional<at::Tensor>& input);

  // Where the kernel stores its product [rows, N], or reads gathered rows [M, K].
  at::Tensor matrix() const;
  // int32, KernelCounters::kSize: zeros, then the address of the report and the deadline.
  at::Tensor counters() const { return counters_; }
  // Enqueues what follows the kernel; the result, or the gathered rows.
  at::Tensor finish();
  // Instead of it: the other ranks are told `why`, which names what was left, unless they need nothing of this one.
  void abandon(const std::string& why);

  // Runs the list on a kind of device.
  class Runner {
   public:
    virtual ~Runner() = default;
    virtual void begin() = 0;
    virtual void finish() = 0;
    virtual void abandon(const std::string& why) = 0;
    // Memory that the group keeps, where the list stages chunks in it.
    virtual void* window() { return nullptr; }
  };

  // Memory of the call, for runners.
  at::Tensor& memory(steps::Buffer buffer) { return memory_[static_cast<size_t>(buffer)]; }
  const KernelJob& job() const { return *job_; }
  const std::shared_ptr<const steps::StepList>& list() const { return list_; }
  void make_counters(const at::Tensor& counters) { counters_ = counters; }

 private:
  void make_memory(const std::optional<at::Tensor>& input);
  bool gathers() const { return job_->plan().problem.traits().gathers(); }

  c10::intrusive_ptr<KernelJob> job_;
  std::shared_ptr<const steps::StepList> list_;
  std::array<at::Tensor, static_cast<size_t>(steps::Buffer::kSlot) + 1> memory_;
  at::Tensor counters_;
  std::unique_ptr<Runner> runner_;  // null: a group of one
  bool open_ = true;
};

std::unique_ptr<KernelCall::Runner> cpu_runner(KernelCall& call);
std::unique_ptr<KernelCall::Runner> cuda_runner(KernelCall& call);

// capturing: a capture is on. kernel_machine: the machine that a job is for, its communicators made.
bool capturing(at::Device device);
plan::Machine kernel_machine(const std::shared_ptr<GroupEntry>& group, at::Device device);

at::ScalarType from_plan_dtype(plan::DType dtype);

}  // namespace overlap::binding
