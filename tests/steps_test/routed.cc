#include "routed.h"

#include <array>

#include "binding/ops/groups.h"
#include "cpu/run.h"
#include "plan/templates.h"
#include "steps/list/list.h"
#if defined(OVERLAP_WITH_CUDA)
#include <ATen/cuda/CUDAContext.h>

#include "binding/cuda/cuda_call.h"
#include "runtime/run.h"
#endif

namespace overlap {

using at::Tensor;
using steps::Buffer;
using steps::Where;

plan::Plan plan_of(int64_t k, int64_t n, plan::DType dtype, int64_t world, bool on_cpu) {
  const auto transport = on_cpu ? plan::Transport::kGloo : plan::Transport::kNccl;
  const plan::Problem problem = {plan::Op::kGemmAllToAll,    0, n, k, dtype,
                                 static_cast<int32_t>(world)};
  return plan::make_all_to_all(problem, plan::Kernel::kLibrary, {}, 0, transport);
}

steps::StepList lower(const plan::Plan& plan, int64_t capacity, int32_t rank) {
  const int32_t world = plan.problem.world_size;
  const int64_t element = plan::moved_bytes(plan.problem);
  const int64_t row = plan.problem.k * element;
  const int64_t made = plan.problem.n * element;
  const auto count = [](int32_t of, int32_t index) {
    return Where{Buffer::kIndices, of * 8, index};
  };
  const auto listed = [&](int32_t of) {
    return Where{Buffer::kIndices, (world + of * capacity) * 8};
  };
  // Scratch has two halves: what goes to each rank, and what comes from it.
  const auto out = [&](Buffer buffer, int32_t of) {
    return Where{buffer, of * capacity * (buffer == Buffer::kStaging ? row : made)};
  };
  const auto in = [&](Buffer buffer, int32_t of) { return out(buffer, world + of); };
  steps::List list;
  const auto add = [&](const auto& step) { list.add(steps::Lane::kCaller, step); };
  const auto exchange = [&](Buffer buffer, int64_t bytes, bool counts) {
    steps::SendReceive step;
    if (counts) add(steps::Copy{count(rank, 0), count(rank, 1), 8});
    add(steps::Copy{out(buffer, rank), in(buffer, rank), bytes});
    for (int32_t peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      if (counts) step.sends.push_back({peer, count(peer, 0), 8});
      if (counts) step.receives.push_back({peer, count(peer, 1), 8});
      step.sends.push_back({peer, out(buffer, peer), bytes});
      step.receives.push_back({peer, in(buffer, peer), bytes});
    }
    add(step);
  };
  list.add_scratch(Buffer::kStaging, 2 * world * capacity * row);
  list.add_scratch(Buffer::kProduct, 2 * world * capacity * made);
  list.add_communicators(plan);
  for (int32_t to = 0; to < world; ++to) {
    steps::CopyRows step = {{Buffer::kInput}, row, out(Buffer::kStaging, to), row, capacity, row};
    step.count = count(to, 0);
    step.from_rows = listed(to);
    add(step);
  }
  exchange(Buffer::kStaging, capacity * row, true);
  for (int32_t from = 0; from < world; ++from) {
    steps::LibraryGemm step = {
        0, {0, capacity}, in(Buffer::kStaging, from), {out(Buffer::kProduct, from)}};
    step.count = count(from, 1);
    add(step);
  }
  exchange(Buffer::kProduct, capacity * made, false);
  for (int32_t to = 0; to < world; ++to) {
    steps::CopyRows step = {
        in(Buffer::kProduct, to), made, {Buffer::kOutput}, made, capacity, made};
    step.count = count(to, 0);
    step.to_rows = listed(to);
    add(step);
  }
  steps::number_events(list.made);
  return list.made;
}

#if defined(OVERLAP_WITH_CUDA)
struct Memory : runtime::Operands {
  std::array<Tensor, static_cast<size_t>(Buffer::kSlot) + 1> buffers;
  std::array<Tensor, 2> indices;
  Tensor weight;

  void* base(Buffer buffer, int32_t index) override {
    const auto number = static_cast<size_t>(buffer);
    return (buffer == Buffer::kIndices ? indices.at(index) : buffers.at(number)).data_ptr();
  }
  void* library(const steps::LibraryGemm& step, const void* input, const void*,
                void* output) override {
    const auto matrix = [&](const void* data, int64_t columns) {
      return at::from_blob(const_cast<void*>(data), {step.rows.end, columns}, weight.options());
    };
    Tensor place = matrix(output, weight.size(0));
    at::mm_out(place, matrix(input, weight.size(1)), weight.t());
    return nullptr;
  }
  const kernels::GemmParams& gemm(int32_t) override { TORCH_CHECK(false, "no GEMM"); }
  void add(const steps::CopyRows&, const void*, void*, cudaStream_t) override {}
  void name_chunk(int32_t) override {}
  int32_t* counters(int32_t) override { return nullptr; }
};
#endif

Tensor routed(const Tensor& input, const Tensor& weight, const Tensor& indices, int64_t capacity,
              const std::string& name) {
  const auto group = binding::find_group(name);
  const plan::Plan plan =
      plan_of(input.size(1), weight.size(0),
              input.scalar_type() == at::kFloat ? plan::DType::kFloat32 : plan::DType::kBFloat16,
              group->world_size(), input.is_cpu());
  const auto list = std::make_shared<const steps::StepList>(lower(plan, capacity, group->rank()));
  Tensor output = at::empty({input.size(0), weight.size(0)}, input.options());
  const std::array<Tensor, 2> numbers = {indices, at::empty_like(indices)};
  if (input.is_cpu()) {
    const std::vector<Tensor> weights = {weight};
    group->announce("routed rows", 0);
    cpu::run({.plan = plan,
              .list = list,
              .group = *group,
              .input = input,
              .weights = weights,
              .outputs = {output},
              .indices = {numbers[0], numbers[1]}});
    return output;
  }
#if defined(OVERLAP_WITH_CUDA)
  Memory memory;
  memory.weight = weight;
  memory.indices = numbers;
  memory.buffers[static_cast<size_t>(Buffer::kInput)] = input;
  memory.buffers[static_cast<size_t>(Buffer::kOutput)] = output;
  for (const steps::Scratch& one : list->scratch) {
    memory.buffers[static_cast<size_t>(one.buffer)] =
        at::empty({one.bytes}, input.options().dtype(at::kByte));
  }
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  runtime::run(*binding::cuda_group(group, input.get_device(), stream),
               {.plan = &plan, .list = list.get(), .operands = &memory, .stream = stream});
#endif
  return output;
}

}  // namespace overlap
