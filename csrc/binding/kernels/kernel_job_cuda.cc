// Jobs on CUDA: the executor enqueues the list up to the caller's kernel, and from there on.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <chrono>
#include <map>
#include <mutex>
#include <tuple>

#include "binding/cuda/cuda_call.h"
#include "binding/cuda/cuda_trace.h"
#include "binding/kernels/kernel_job.h"
#include "binding/ops/profiled.h"
#include "runtime/error.h"
#include "runtime/run.h"

namespace overlap::binding {
namespace {

// A group's counters as a call finds them: zeros, where its waits leave reports, and for how long they wait. Made outside
// of captures, and copied within the device in each call.
at::Tensor first_counters(const runtime::Group& group, at::Device device) {
  static std::mutex mutex;
  using Key = std::tuple<const kernels::WaitReport*, int64_t, c10::DeviceIndex>;
  static auto* made = new std::map<Key, at::Tensor>();
  const std::lock_guard<std::mutex> lock(mutex);
  // A little before the watchdog's deadline for the whole call, which knows less.
  const int64_t deadline = std::chrono::nanoseconds(group.timeout()).count() / 10 * 9;
  at::Tensor& counters = (*made)[{group.report(), deadline, device.index()}];
  if (!counters.defined()) {
    const at::Tensor host = at::zeros({KernelCounters::kSize}, at::kInt);
    int32_t* const numbers = host.mutable_data_ptr<int32_t>();
    // Pinned memory has one address for host and device.
    const auto report = reinterpret_cast<uint64_t>(group.report());
    std::memcpy(numbers + KernelCounters::kReport, &report, sizeof(report));
    std::memcpy(numbers + KernelCounters::kDeadline, &deadline, sizeof(deadline));
    counters = host.to(device);
  }
  return counters;
}

class CudaRunner : public KernelCall::Runner, public runtime::Operands {
 public:
  explicit CudaRunner(KernelCall& call)
      : call_(call),
        job_(call.job()),
        plan_(job_.plan()),
        stream_(c10::cuda::getCurrentCUDAStream(job_.device().index())),
        group_(cuda_group(job_.group(), job_.device().index(), stream_.stream())) {}

  void begin() override {
    const c10::cuda::CUDAGuard guard(job_.device());
    group_->check();
    group_->add_call(plan_.problem);
    if (debug_enabled()) job_.group()->compare("job", job_.text(), at::kCUDA);
    const at::Tensor first = first_counters(*group_, job_.device());
    at::Tensor counters = at::empty_like(first);
    counters.copy_(first);
    call_.make_counters(counters);
    open_.emplace(*group_, runtime::Call{.plan = &plan_,
                                         .list = call_.list().get(),
                                         .operands = this,
                                         .stream = stream_.stream(),
                                         .counters = counters.data_ptr<int32_t>(),
                                         .trace = TraceSwitch::on() ? &cuda_trace() : nullptr,
                                         .delay_us = side_delay_us()});
    open_->begin();
  }

  void finish() override {
    const c10::cuda::CUDAGuard guard(job_.device());
    const auto current = c10::cuda::getCurrentCUDAStream(job_.device().index());
    if (current.stream() != stream_.stream()) {
      const std::string why =
          job_.text() + " on another stream than it was begun on, which its kernel ran on";
      abandon(why);
      TORCH_CHECK(false, "overlap_torch: the rank left ", why,
                  ": leave the `with` on the stream on which it was entered");
    }
    open_->finish();
  }

  void* window() override { return open_->window(); }

  void abandon(const std::string& why) override {
    const c10::cuda::CUDAGuard guard(job_.device());
    if (plan_.problem.traits().gathers()) {
      open_->finish();  // the other ranks' rows have been enqueued, and this rank's for them
      return;
    }
    open_->abandon();
    group_->abandon(why);
  }

  // --- the executor's ---

  void* base(steps::Buffer buffer, int32_t) override {
    const at::Tensor& tensor = call_.memory(buffer);
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  }
  const kernels::GemmParams& gemm(int32_t) override {
    TORCH_INTERNAL_ASSERT(false, "a job has no GEMM of this package's");
  }
  void* library(const steps::LibraryGemm&, const void*, const void*, void*) override {
    TORCH_INTERNAL_ASSERT(false, "a job has no GEMM of the framework's");
  }
  void add(const steps::CopyRows& step, const void* source, void* destination,
           cudaStream_t on) override {
    const auto dtype = from_plan_dtype(plan_.problem.dtype);
    add_rows(step, source, destination, on, at::TensorOptions(job_.device()).dtype(dtype));
  }
  void name_chunk(int32_t chunk) override {
    chunk_name_.reset();
    if (chunk >= 0) chunk_name_.emplace(chunk);
  }
  int32_t* counters(int32_t) override {
    TORCH_INTERNAL_ASSERT(false, "a job's counters are in its call");
  }

 private:
  KernelCall& call_;
  const KernelJob& job_;
  const plan::Plan& plan_;
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<runtime::Group> group_;
  std::optional<runtime::OpenCall> open_;
  std::optional<Profiled> chunk_name_;
};

}  // namespace

bool capturing(at::Device device) {
  if (!device.is_cuda()) return false;
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  return runtime::capture_id(stream.stream()).has_value();
}

plan::Machine kernel_machine(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  if (device.is_cpu()) return cpu_machine();
  TORCH_CHECK(cuda_supported(group, device), "overlap_torch: a job on ", device,
              " needs a group whose backend for CUDA tensors is nccl, and a build with kernels for "
              "the device; `python -m overlap_torch doctor` says more");
  const c10::cuda::CUDAGuard guard(device);
  const auto made =
      cuda_group(group, device.index(), c10::cuda::getCurrentCUDAStream(device.index()).stream());
  (void)first_counters(*made, device);
  return made->machine();
}

bool KernelJob::reserve() const {
  if (!list_->over_peers) return true;
  const c10::cuda::CUDAGuard guard(device_);
  const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  const auto group = cuda_group(group_, device_.index(), stream);
  const std::lock_guard<std::mutex> lock(group->device().mutex);
  group->check();
  if (!group->peers(plan_, 0, false).may_have_stripes(list_->stripe_bytes)) return false;
  try {
    group->peers(plan_, 0, false, list_->stripe_bytes);
    group->peers(plan_, list_->slot_bytes, false);
  } catch (const runtime::PeerMemoryError&) {
    return false;  // on all ranks
  }
  return true;
}

std::unique_ptr<KernelCall::Runner> cuda_runner(KernelCall& call) {
  return std::make_unique<CudaRunner>(call);
}

}  // namespace overlap::binding
