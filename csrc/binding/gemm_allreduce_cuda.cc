// gemm_allreduce on CUDA: looks the plan up, turns tensors into plain structs, hands them to the
// executor.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <atomic>

#include "binding/cuda_trace.h"
#include "binding/op_call.h"
#include "runtime/executor.h"
#include "runtime/group.h"

namespace overlap::binding {
namespace {

// The process group's store as the runtime's bootstrap. Keys of a group's store are its own.
runtime::Bootstrap bootstrap_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                std::chrono::milliseconds timeout) {
  const auto store = group->getStore();
  runtime::Bootstrap bootstrap;
  bootstrap.set = [store](const std::string& key, const std::vector<uint8_t>& value) {
    store->set(key, value);
  };
  bootstrap.get = [store, timeout](const std::string& key) {
    store->wait({key}, timeout);
    return store->get(key);
  };
  bootstrap.has = [store](const std::string& key) { return store->check({key}); };
  bootstrap.remove = [store](const std::string& key) { store->deleteKey(key); };
  return bootstrap;
}

// The group's CUDA side on the current device. Collective at its first call.
std::shared_ptr<runtime::Group> cuda_group(const std::shared_ptr<GroupEntry>& entry, int device,
                                           cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(entry->cuda_mutex);
  std::weak_ptr<runtime::Group>& slot = entry->cuda[device];
  if (auto group = slot.lock()) return group;
  TORCH_CHECK(!runtime::capture_id(stream).has_value(), "overlap_torch: the first call on group '",
              entry->name(),
              "' cannot be captured into a CUDA graph, because it makes communicators. Call the op "
              "once with the same "
              "shapes, dtype and group before the capture (torch.cuda.graph's warm-up).");
  runtime::GroupOptions options;
  options.name = entry->name();
  options.rank = entry->rank();
  options.world_size = entry->world_size();
  options.timeout = entry->timeout(at::kCUDA);
  options.bootstrap = bootstrap_of(entry->lock(), options.timeout);
  options.alive = [weak = std::weak_ptr<GroupEntry>(entry)] {
    const auto alive = weak.lock();
    return alive != nullptr && !alive->expired();
  };
  auto group = std::make_shared<runtime::Group>(std::move(options));
  runtime::watch_group(group);
  slot = group;
  return group;
}

// Rows must be contiguous along K for the signalling kernels; transposed or expanded inputs are
// copied once.
at::Tensor k_contiguous(const at::Tensor& input) {
  const bool fits = (input.size(1) == 1 || input.stride(1) == 1) &&
                    (input.size(0) == 1 || input.stride(0) >= input.size(1));
  return fits ? input : input.contiguous();
}

kernels::GemmParams gemm_params(const OpCall& call, const at::Tensor& input, const plan::Plan& plan,
                                int sm_count) {
  kernels::GemmParams params;
  params.m = call.problem.m;
  params.n = call.problem.n;
  params.k = call.problem.k;
  params.dtype = call.problem.dtype;
  params.input = input.const_data_ptr();
  params.input_stride = input.size(0) == 1 ? params.k : input.stride(0);
  params.weight = call.weight().const_data_ptr();
  params.weight_k_contiguous = call.weight().stride(1) == 1 || call.weight().size(1) == 1;
  params.weight_stride = params.weight_k_contiguous
                             ? (call.weight().size(0) == 1 ? params.k : call.weight().stride(0))
                             : call.weight().stride(1);
  params.output_stride = params.n;
  params.layout = plan.layout;
  params.ctas = std::max(1, sm_count - plan.resources.comm_sms);
  params.smem_pad_bytes = plan.resources.smem_pad_bytes;
  return params;
}

bool weight_fits(const at::Tensor& weight) {
  const bool along_k = (weight.stride(1) == 1 || weight.size(1) == 1) &&
                       (weight.size(0) == 1 || weight.stride(0) >= weight.size(1));
  const bool along_n = weight.stride(0) == 1 && weight.stride(1) >= weight.size(0);
  return along_k || along_n;
}

at::Tensor run_overlapped(const OpCall& call, const PlanEntry& entry, runtime::Group& group,
                          cudaStream_t stream) {
  const plan::Plan& plan = entry.plan;
  const at::TensorOptions options = call.input.options();
  const at::Tensor output = at::empty({call.problem.m, call.problem.n}, options);
  const at::Tensor input = k_contiguous(call.input);
  const bool packed = plan.layout == plan::Layout::kPacked;

  runtime::ProduceCall produce;
  produce.plan = &plan;
  produce.order = &entry.order;
  produce.output = output.data_ptr();
  produce.stream = stream;
  produce.delay_us = side_delay_us();
  if (TraceSwitch::on()) produce.trace = &cuda_trace();

  // Staging: the output itself; the group's window; or, where a capture must own its memory,
  // ordinary memory, with which NCCL takes its plain kernels.
  at::Tensor buffer;
  if (runtime::communicates_in_place(plan)) {
    produce.buffer = produce.output;
  } else if (!plan.resources.window || runtime::capture_id(stream).has_value()) {
    buffer = at::empty({plan::buffer_elements(plan)}, options);
    produce.buffer = buffer.data_ptr();
  }

  at::Tensor bias;
  if (call.bias().has_value()) {
    bias = call.bias()->contiguous();
    produce.bias = bias.const_data_ptr();
  }

  produce.gemm = gemm_params(call, input, plan, group.device().sm_count());
  at::Tensor counters;
  at::Tensor rows;
  // Whether the kernel takes these operands depends on this rank's strides alone. Either way the
  // same chunks are communicated.
  kernels::GemmParams probe = produce.gemm;
  probe.output = produce.buffer != nullptr ? produce.buffer : produce.output;
  produce.signals = weight_fits(call.weight()) && kernels::gemm_supported(plan.kernel, probe);
  counters = at::empty({plan::kMaxChunks}, options.dtype(at::kInt));
  produce.counters = counters.data_ptr<int32_t>();
  if (!produce.signals) {
    if (packed) {
      rows = at::empty({call.problem.m, call.problem.n}, options);
      produce.library_rows = rows.data_ptr();
    }
    produce.library_gemm = [&](plan::Rows range, void* destination) {
      if (range.end == range.begin) return;
      at::Tensor place =
          at::from_blob(destination, {range.end - range.begin, call.problem.n}, options);
      at::mm_out(place, input.narrow(0, range.begin, range.end - range.begin), call.weight().t());
    };
  }
  runtime::run_all_reduce(group, produce);
  return output;
}

at::Tensor run_sequential(const OpCall& call, const PlanEntry& entry, runtime::Group& group,
                          cudaStream_t stream) {
  at::Tensor output;
  const auto gemm = [&] {
    output = at::mm(call.input, call.weight().t());
    return output.data_ptr();
  };
  runtime::run_sequential_all_reduce(group, entry.plan, gemm, stream,
                                     TraceSwitch::on() ? &cuda_trace() : nullptr);
  if (call.bias().has_value()) output.add_(*call.bias());
  return output;
}

}  // namespace

runtime::Trace& cuda_trace() {
  static auto* trace =
      new runtime::Trace();  // never destroyed: its events would outlive the driver
  return *trace;
}

// Whether this build holds machine code for the device. Loads all kernels.
bool has_kernels(at::Device device) {
  constexpr int kUnknown = -1;
  static std::array<std::atomic<int>, 64>& known = *[] {
    auto* states = new std::array<std::atomic<int>, 64>();
    for (std::atomic<int>& state : *states) state = kUnknown;
    return states;
  }();
  std::atomic<int>& state = known.at(device.index());
  if (state == kUnknown) {
    const c10::cuda::CUDAGuard guard(device);
    state = kernels::load_kernels() == cudaSuccess;
    if (!state) {
      (void)cudaGetLastError();
      TORCH_WARN("overlap_torch was built without kernels for ", device, " (", OVERLAP_BUILD_INFO,
                 "): its tensors take the unfused composition. Rebuild with OVERLAP_ARCHS "
                 "naming its architecture; `python -m overlap_torch doctor` says more.");
    }
  }
  return state == 1;
}

bool cuda_supported(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  if (!has_kernels(device)) return false;
  // A group's backend does not change: asked for once.
  int known = group->cuda_is_nccl;
  if (known < 0) {
    known = group->lock()->getBackend(at::kCUDA)->getBackendName() == "nccl";
    group->cuda_is_nccl = known;
  }
  return known == 1;
}

plan::Machine cuda_machine(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  TORCH_CHECK(device.is_cuda(), "overlap_torch: ", device, " is neither a CUDA device nor the CPU");
  const c10::cuda::OptionalCUDAGuard guard(device);
  const at::Device current(at::kCUDA, c10::cuda::current_device());
  if (!cuda_supported(group, current)) return {};
  return cuda_group(group, current.index(), at::cuda::getCurrentCUDAStream().stream())->machine();
}

at::Tensor gemm_allreduce_cuda(const OpCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  // float64 is the precision of tests, not of training: the composition serves it.
  if (call.problem.dtype == plan::DType::kFloat64 ||
      !cuda_supported(call.group, call.input.device())) {
    return gemm_allreduce_composition(call);
  }
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream().stream();
  const std::shared_ptr<runtime::Group> group =
      cuda_group(call.group, call.input.device().index(), stream);
  auto entry = call.group->plan(call.problem, at::kCUDA, group->machine());
  if (entry->by_planner && entry->plan.resources.window) {
    const auto captured = call.group->capture_plan(call.problem, group->machine());
    if (runtime::capture_id(stream).has_value()) {
      entry = captured;
    } else if (!captured->prepared.exchange(true)) {
      group->prepare(captured->plan);  // a capture can make no communicators
    }
  }
  if (debug_enabled()) call.group->compare("plan", entry->plan.to_string(), at::kCUDA);
  return entry->plan.schedule == plan::Schedule::kOverlapped
             ? run_overlapped(call, *entry, *group, stream)
             : run_sequential(call, *entry, *group, stream);
}

void check_cuda_groups() {
  for (const auto& entry : all_groups()) {
    const std::lock_guard<std::mutex> lock(entry->cuda_mutex);
    for (const auto& [device, weak] : entry->cuda) {
      if (const auto group = weak.lock()) group->check();
    }
  }
}

std::vector<int64_t> cuda_memory(const std::shared_ptr<GroupEntry>& entry) {
  std::vector<int64_t> total{0, 0};
  const std::lock_guard<std::mutex> lock(entry->cuda_mutex);
  for (const auto& [device, weak] : entry->cuda) {
    if (const auto group = weak.lock()) {
      const std::vector<int64_t> held = group->memory();
      total[0] += held[0];
      total[1] += held[1];
    }
  }
  return total;
}

}  // namespace overlap::binding
