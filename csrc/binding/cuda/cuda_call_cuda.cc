// The process groups' CUDA side, and what a call needs of it.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <atomic>
#include <string>

#include "binding/cuda/cuda_call.h"
#include "binding/cuda/cuda_trace.h"
#include "binding/ops/environment.h"
#include "binding/ops/op_call.h"
#include "runtime/error.h"

namespace overlap::binding {
namespace {

// The process group's store as the runtime's bootstrap. Keys of a group's store are its own.
runtime::Bootstrap bootstrap_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto store = group->getStore();
  runtime::Bootstrap bootstrap;
  bootstrap.set = [store](const std::string& key, const std::vector<uint8_t>& value) {
    store->set(key, value);
  };
  bootstrap.get = [store](const std::string& key) { return store->get(key); };
  bootstrap.has = [store](const std::string& key) { return store->check({key}); };
  bootstrap.remove = [store](const std::string& key) { store->deleteKey(key); };
  return bootstrap;
}

// GFLOP/s of the framework's GEMM on one SM, as the cost model counts them, where the profile is of another
// architecture; 0 where it is of this one. Takes some ten milliseconds, and draws no random numbers.
double measured_sm_gflops(const plan::Profile& profile) {
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  if (device->major * 10 + device->minor == profile.gemm.arch) return 0.0;
  constexpr int64_t kRows = 8192;
  constexpr int64_t kInner = 4096;
  constexpr int64_t kTile = 128;
  constexpr int kWarmUps = 3;
  constexpr int kCalls = 10;
  const c10::InferenceMode no_gradients;
  const auto options = at::TensorOptions().device(at::kCUDA, c10::cuda::current_device());
  const at::Tensor input = at::arange(kRows * kInner, options.dtype(at::kFloat))
                               .mul_(1.618)
                               .sin_()
                               .to(at::kBFloat16)
                               .view({kRows, kInner});
  at::Tensor output = at::empty({kRows, kRows}, options.dtype(at::kBFloat16));
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream().stream();
  runtime::Event begin(cudaEventDefault);
  runtime::Event end(cudaEventDefault);
  for (int call = 0; call < kWarmUps + kCalls; ++call) {
    if (call == kWarmUps) begin.record(stream);
    at::mm_out(output, input, input.t());
  }
  end.record(stream);
  runtime::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const double us = runtime::elapsed_us(begin, end) / kCalls - profile.gemm.start_us;
  const double rounds =
      static_cast<double>(kRows / kTile * (kRows / kTile)) / device->multiProcessorCount +
      profile.gemm.library_idle_rounds;
  return 2.0 * kTile * kTile * kInner * rounds * profile.gemm.library_factor / (1e3 * us);
}

}  // namespace

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
  options.bootstrap = bootstrap_of(entry->lock());
  options.alive = [weak = std::weak_ptr<GroupEntry>(entry)] {
    const auto alive = weak.lock();
    return alive != nullptr && !alive->expired();
  };
  options.peers = environment().peers;
  options.peer_source = environment().peer_source;
  options.abort_on_failure = environment().abort_on_failure;
  options.serial = find_serial();
  options.profile = environment().profile;
  options.sm_gflops = measured_sm_gflops(*options.profile);
  auto group = std::make_shared<runtime::Group>(std::move(options));
  runtime::watch_group(group);
  slot = group;
  return group;
}

runtime::Trace& cuda_trace() {
  static auto* trace =
      new runtime::Trace();  // never destroyed: its events would outlive the driver
  return *trace;
}

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
  return has_kernels(device) && group->runs_plans(at::kCUDA);
}

plan::Machine cuda_machine(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  TORCH_CHECK(device.is_cuda(), "overlap_torch: ", device, " is neither a CUDA device nor the CPU");
  const c10::cuda::OptionalCUDAGuard guard(device);
  const at::Device current(at::kCUDA, c10::cuda::current_device());
  if (!cuda_supported(group, current)) return {};
  return cuda_group(group, current.index(), at::cuda::getCurrentCUDAStream().stream())->machine();
}

CudaCall::CudaCall(const OpCall& call)
    : stream(at::cuda::getCurrentCUDAStream().stream()),
      group(cuda_group(call.group, call.input.device().index(), stream)),
      entry(call.group->plan(call.problem, at::kCUDA, group->machine())) {
  group->check();
  group->add_call(call.problem);
  if (entry->by_planner && entry->plan.resources.window) {
    const auto captured = call.group->capture_plan(call.problem, group->machine());
    if (runtime::capture_id(stream).has_value()) {
      entry = captured;
    } else if (!captured->prepared) {
      group->prepare(captured->plan);  // a capture can make no communicators
      captured->prepared = true;
    }
  }
  if (debug_enabled()) call.group->compare("plan", entry->plan.to_string(), at::kCUDA);
  entry->tally->count();
}

runtime::Trace* CudaCall::trace() const {
  return TraceSwitch::on() ? &cuda_trace() : nullptr;
}

bool takes_composition(const OpCall& call) {
  // float64 is the precision of tests, not of training: the composition serves it.
  std::string why;
  if (call.problem.dtype == plan::DType::kFloat64) {
    why = "float64 has no kernels";
  } else if (cuda_supported(call.group, call.input.device())) {
    return false;
  } else if (!has_kernels(call.input.device())) {
    why = "this build has no kernels for this device (" OVERLAP_BUILD_INFO ")";
  } else {
    why = call.group->why_no_plans(at::kCUDA);
  }
  call.group->count_unplanned(call.problem, at::kCUDA, why + ": a GEMM, then its collective");
  return true;
}

void check_cuda_groups() {
  for (const auto& entry : all_groups()) {
    const std::lock_guard<std::mutex> lock(entry->cuda_mutex);
    for (const auto& [device, weak] : entry->cuda) {
      const auto group = weak.lock();
      if (group == nullptr) continue;
      try {
        group->check_peers();
      } catch (const std::exception&) {
        if (entry->registered()) throw;  // of a group that was destroyed nobody wants to know
      }
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

std::string cuda_peer_memory(const std::shared_ptr<GroupEntry>& entry) {
  const std::lock_guard<std::mutex> lock(entry->cuda_mutex);
  for (const auto& [device, weak] : entry->cuda) {
    if (const auto group = weak.lock()) return group->peer_memory();
  }
  return "";
}

}  // namespace overlap::binding
