#include "binding/kernels/kernel_job.h"

#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "binding/ops/environment.h"
#include "binding/ops/operands.h"
#include "plan/agreement.h"

namespace overlap::binding {

at::ScalarType from_plan_dtype(plan::DType dtype) {
  for (const at::ScalarType known : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    if (to_plan_dtype(known) == dtype) return known;
  }
  TORCH_CHECK_VALUE(false, "overlap_torch: a kernel of your own cannot produce or consume ",
                    plan::name(dtype), "; take bfloat16, float16, float32 or float64");
}

KernelJob::KernelJob(const std::vector<int64_t>& code, at::Device device, const std::string& group,
                     bool awaits, std::vector<int64_t> send_rows, std::vector<int64_t> receive_rows,
                     int64_t pieces)
    : plan_(plan::decode(code)),
      device_(device),
      group_(find_group(group)),
      job_{.compute = steps::Compute::kCallers,
           .send_rows = std::move(send_rows),
           .receive_rows = std::move(receive_rows),
           .awaits = awaits,
           .pieces = static_cast<int32_t>(pieces)} {
  plan::validate(plan_);
  TORCH_CHECK_VALUE(plan_.problem.world_size == group_->world_size(),
                    "overlap_torch: the plan is for ", plan_.problem.world_size,
                    " ranks, but group '", group_->name(), "' has ", group_->world_size());
  TORCH_CHECK_VALUE(device_.is_cpu() == plan_.transport().on_cpu || group_->world_size() == 1,
                    "overlap_torch: the plan's chunks travel by ", plan_.transport().name,
                    ", but the job is on ", device_,
                    ": take gloo on CPU, and nccl or peer on CUDA");
  if (plan_.problem.traits().rows_by_rank) {
    check_counts("send_rows", job_.send_rows, *group_);
    check_counts("recv_rows", job_.receive_rows, *group_);
    const auto rank = static_cast<size_t>(group_->rank());
    TORCH_CHECK_VALUE(job_.send_rows[rank] == job_.receive_rows[rank], "overlap_torch: rank ", rank,
                      " sends itself ", job_.send_rows[rank], " rows and expects ",
                      job_.receive_rows[rank], "; these must be equal");
    TORCH_CHECK_VALUE(pieces >= 1 && pieces < plan::kMaxChunks, "overlap_torch: chunks is ", pieces,
                      ", allowed are 1 to ", plan::kMaxChunks - 1);
  }
  (void)from_plan_dtype(plan_.problem.dtype);
  TORCH_CHECK(environment().plans, "overlap_torch: OVERLAP_PLANS=0 turns plans off, and with them ",
              "produce and consume: leave the variable out, or run the kernel and its collective");
  if (group_->world_size() > 1) machine_ = kernel_machine(group_, device_);
  plan::check_serial(plan_, machine_);
  list_ =
      std::make_shared<const steps::StepList>(steps::lower(plan_, group_->rank(), machine_, job_));
  if (plan_.resources.window) {
    steps::Variant captured = job_;
    captured.captured = true;
    captured_ = std::make_shared<const steps::StepList>(
        steps::lower(plan_, group_->rank(), machine_, captured));
  }
}

std::shared_ptr<const steps::StepList> KernelJob::list(bool captured) const {
  return captured && captured_ != nullptr ? captured_ : list_;
}

std::vector<int64_t> KernelJob::tile_chunks() const {
  return {list_->tiles.chunks.begin(), list_->tiles.chunks.end()};
}

std::vector<int64_t> KernelJob::chunk_tiles() const {
  std::vector<int64_t> counts(static_cast<size_t>(std::max(1, list_->counters)));
  for (const int32_t chunk : list_->tiles.chunks) ++counts[static_cast<size_t>(chunk)];
  return counts;
}

std::string KernelJob::text() const {
  const bool gathers = plan_.problem.traits().gathers();
  return c10::str(
      gathers ? "consume" : "produce", " of ", plan::name(plan_.collective), ", ", plan_.problem.m,
      " x ", plan::moved_columns(plan_.problem), " ", plan::name(plan_.problem.dtype), ", in ",
      plan_.problem.traits().rows_by_rank ? job_.pieces : static_cast<int32_t>(plan_.chunks.size()),
      " chunks");
}

KernelCall::KernelCall(c10::intrusive_ptr<KernelJob> job, const std::optional<at::Tensor>& input)
    : job_(std::move(job)) {
  list_ = job_->list(capturing(job_->device()));
  make_memory(input);
  if (job_->group()->world_size() == 1) {
    // The gathered rows are there.
    counters_ = at::full({KernelCounters::kSize}, gathers() ? 1 : 0,
                         at::TensorOptions(job_->device()).dtype(at::kInt));
    return;
  }
  runner_ = job_->device().is_cpu() ? cpu_runner(*this) : cuda_runner(*this);
  runner_->begin();
  const steps::Buffer stores = list_->tiles.stores;
  if (stores == steps::Buffer::kWindow || stores == steps::Buffer::kStripes) {
    const plan::Problem& problem = job_->plan().problem;
    const auto options = at::TensorOptions(job_->device()).dtype(from_plan_dtype(problem.dtype));
    memory(stores) = at::for_blob(runner_->window(), {problem.m, problem.n})
                         .options(options)
                         .target_device(job_->device())
                         .make_tensor();
  }
}

void KernelCall::make_memory(const std::optional<at::Tensor>& input) {
  using steps::Buffer;
  const plan::Problem& problem = job_->plan().problem;
  const at::TensorOptions options =
      at::TensorOptions(job_->device()).dtype(from_plan_dtype(problem.dtype));
  const auto rows_of = [](const std::vector<int64_t>& counts) {
    int64_t rows = 0;
    for (const int64_t count : counts) rows += count;
    return rows;
  };
  const bool alone = job_->group()->world_size() == 1;
  if (gathers()) {
    TORCH_CHECK_VALUE(input.has_value() && input->dim() == 2 && input->device() == job_->device() &&
                          input->scalar_type() == options.dtype().toScalarType() &&
                          input->size(0) * problem.world_size == problem.m &&
                          input->size(1) == problem.k,
                      "overlap_torch.consume: the rows do not fit the job, ", job_->text());
    memory(Buffer::kInput) = input->contiguous();
    memory(Buffer::kGathered) =
        alone ? memory(Buffer::kInput).clone() : at::empty({problem.m, problem.k}, options);
  } else {
    const bool to_all = problem.traits().rows_by_rank;
    const int64_t product = to_all ? rows_of(job_->job().send_rows) : problem.m;
    const int64_t result =
        to_all ? rows_of(job_->job().receive_rows) : problem.m / plan::op_row_parts(problem);
    if (list_->tiles.stores == Buffer::kProduct) {
      memory(Buffer::kProduct) = at::empty({product, problem.n}, options);
    }
    if (list_->tiles.result == Buffer::kOutput) {
      memory(Buffer::kOutput) = at::empty({alone ? product : result, problem.n}, options);
    }
  }
  if (job_->device().is_cpu()) return;  // the executor makes the rest
  const int64_t element = plan::moved_bytes(problem);
  for (const steps::Scratch& one : list_->scratch) {
    at::Tensor& place = memory(one.buffer);
    if (one.buffer == Buffer::kWindow || place.defined()) continue;
    place = at::empty({one.bytes / element}, options);
  }
}

at::Tensor KernelCall::matrix() const {
  const steps::Buffer buffer = gathers() ? steps::Buffer::kGathered : list_->tiles.stores;
  return memory_[static_cast<size_t>(buffer)];
}

at::Tensor KernelCall::finish() {
  TORCH_CHECK(open_, "overlap_torch: this call has been finished or abandoned");
  open_ = false;
  if (runner_ != nullptr) runner_->finish();
  const steps::Buffer buffer = gathers() ? steps::Buffer::kGathered : list_->tiles.result;
  return memory_[static_cast<size_t>(buffer)];
}

void KernelCall::abandon(const std::string& why) {
  if (!open_) return;
  open_ = false;
  if (runner_ != nullptr) runner_->abandon(why);
}

#if !defined(OVERLAP_WITH_CUDA)
bool capturing(at::Device) {
  return false;
}

std::unique_ptr<KernelCall::Runner> cuda_runner(KernelCall& call) {
  TORCH_CHECK(false, "overlap_torch was built without CUDA kernels: there are no jobs on ",
              call.job().device());
}

bool KernelJob::reserve() const {
  return true;
}

plan::Machine kernel_machine(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  return device.is_cpu() ? cpu_machine() : cuda_machine(group, device);
}
#endif

namespace {

// In one step from Python, while the GPU waits: the call, the kernel's matrix and its counters.
std::tuple<c10::intrusive_ptr<KernelCall>, at::Tensor, at::Tensor> begin(
    const c10::intrusive_ptr<KernelJob>& job, const std::optional<at::Tensor>& input) {
  auto call = c10::make_intrusive<KernelCall>(job, input);
  at::Tensor matrix = call->matrix();
  at::Tensor counters = call->counters();
  return {std::move(call), std::move(matrix), std::move(counters)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(overlap, m) {
  m.class_<KernelCall>("KernelCall")
      .def("finish", &KernelCall::finish)
      .def("abandon", &KernelCall::abandon);
  m.class_<KernelJob>("KernelJob")
      .def(torch::init<const std::vector<int64_t>&, at::Device, const std::string&, bool,
                       std::vector<int64_t>, std::vector<int64_t>, int64_t>())
      .def("tile_chunks", &KernelJob::tile_chunks)
      .def("tile_columns", &KernelJob::tile_columns)
      .def("chunk_tiles", &KernelJob::chunk_tiles)
      .def("reserve", &KernelJob::reserve)
      .def("begin", &begin);
}

}  // namespace overlap::binding
