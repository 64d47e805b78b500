// An all-gather's scales on CUDA. They are few, and come before the rows: where the plan is over peers, by the one
// kernel that gathers few rows there. The process group's collective takes longer, most of it on the host.
#include "binding/cuda/cuda_operands.h"
#include "plan/templates.h"

namespace overlap::binding {
namespace {

// One row of float32 from each rank.
class Rows : public runtime::Operands {
 public:
  Rows(at::Tensor own, at::Tensor all) : own_(std::move(own)), all_(std::move(all)) {}

  void* base(steps::Buffer buffer, int32_t) override {
    if (buffer == steps::Buffer::kInput) return const_cast<void*>(own_.const_data_ptr());
    return buffer == steps::Buffer::kGathered ? all_.data_ptr() : nullptr;
  }
  void* library(const steps::LibraryGemm&, const void*, const void*, void*) override {
    return nullptr;  // they are multiplied with by the op
  }
  const kernels::GemmParams& gemm(int32_t) override { unexpected(); }
  void add(const steps::CopyRows&, const void*, void*, cudaStream_t) override { unexpected(); }
  void name_chunk(int32_t) override {}
  int32_t* counters(int32_t) override { unexpected(); }

 private:
  [[noreturn]] static void unexpected() {
    TORCH_INTERNAL_ASSERT(false, "scales are gathered in one kernel");
  }

  at::Tensor own_;
  at::Tensor all_;
};

plan::Plan row_of_each_rank(int64_t count, int32_t ranks) {
  plan::Problem problem;
  problem.op = plan::Op::kAllGatherGemm;
  problem.m = ranks;
  problem.n = 1;
  problem.k = count;
  problem.dtype = plan::DType::kFloat32;
  problem.world_size = ranks;
  return plan::make_at_once(problem, plan::Kernel::kLibrary);
}

}  // namespace

at::Tensor gathered_scales(const OpCall& call, const CudaCall& cuda) {
  const at::Tensor& scales = call.scales->input;
  const auto ranks = static_cast<int32_t>(call.group->world_size());
  const int64_t count = scales.numel();
  if (call.scales->shared_input || ranks == 1 || count == 0 || !plan::over_peers(cuda.plan()) ||
      plan::hierarchical(cuda.plan())) {
    return gathered_scales(call);
  }
  constexpr int64_t kOfAccess = kernels::kPeerAccessBytes / sizeof(float);
  const int64_t padded = (count + kOfAccess - 1) / kOfAccess * kOfAccess;
  at::Tensor own = scales;
  if (padded > count) {
    own = at::empty({padded}, scales.options());
    own.narrow(0, 0, count).copy_(scales.view({count}));
  }
  own = aligned(own);
  at::Tensor all = empty({ranks, padded}, scales.options());
  const PlanEntry& entry = cuda.entry->of_scales([&] { return row_of_each_rank(padded, ranks); });
  runtime::Group& group = *cuda.group;
  const auto list = entry.lists.of(entry.plan, group.rank(), group.machine(), {});
  Rows rows(own, all);
  runtime::run(group, {.plan = &entry.plan,
                       .list = list.get(),
                       .operands = &rows,
                       .stream = cuda.stream,
                       .delay_us = side_delay_us()});
  if (padded > count) all = all.narrow(1, 0, count).contiguous();
  return all.view({ranks * scales.size(0), scales.size(1)});
}

}  // namespace overlap::binding
