// The operators' schemas, their checks, and the device-independent part of each.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

#include "binding/gemm_allreduce.h"

#ifndef OVERLAP_BUILD_INFO
#define OVERLAP_BUILD_INFO "cuda=none"
#endif

namespace overlap::binding {
namespace {

std::atomic<int64_t> side_delay{0};

void check_operands(const char* op, const at::Tensor& input, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(input.dim() >= 1 && weight.dim() == 2, op,
                    ": input must be [..., K] and weight [N, K], but got shapes ", input.sizes(),
                    " and ", weight.sizes());
  TORCH_CHECK_VALUE(input.size(-1) == weight.size(1), op,
                    ": the last dims of input and weight must be equal, but got shapes ",
                    input.sizes(), " and ", weight.sizes());
  TORCH_CHECK_TYPE(has_plan_dtype(input.scalar_type()), op, ": input is ", input.scalar_type(),
                   "; supported are bfloat16, float16, float32 and float64");
  TORCH_CHECK_TYPE(weight.scalar_type() == input.scalar_type(), op, ": input is ",
                   input.scalar_type(), " but weight is ", weight.scalar_type(),
                   "; convert one of them, or use torch.autocast");
  TORCH_CHECK_VALUE(weight.device() == input.device(), op, ": input is on ", input.device(),
                    " but weight on ", weight.device(), "; move them to one device");
  TORCH_CHECK_VALUE(input.layout() == at::kStrided && weight.layout() == at::kStrided, op,
                    ": only dense tensors are supported, but got layouts ", input.layout(), " and ",
                    weight.layout());
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == weight.size(0), op,
                    ": bias must be [N] = [", weight.size(0), "], but got shape ", bias->sizes());
  TORCH_CHECK_TYPE(bias->scalar_type() == input.scalar_type(), op, ": input is ",
                   input.scalar_type(), " but bias is ", bias->scalar_type(),
                   "; convert one of them");
  TORCH_CHECK_VALUE(bias->device() == input.device(), op, ": input is on ", input.device(),
                    " but bias on ", bias->device(), "; move them to one device");
}

// [..., K] -> [M, K] without a copy where strides allow it.
at::Tensor as_rows(const at::Tensor& input) {
  if (input.dim() == 2) return input;
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < input.dim(); ++dim) rows *= input.size(dim);
  return input.reshape({rows, input.size(-1)});
}

at::Tensor gemm_allreduce(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const std::string& group_name) {
  check_operands("gemm_allreduce", input, weight, bias);
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;

  const at::Tensor rows = as_rows(input);
  plan::Problem problem;
  problem.op = plan::Op::kGemmAllReduce;
  problem.m = rows.size(0);
  problem.n = weight.size(0);
  problem.k = weight.size(1);
  problem.dtype = to_plan_dtype(input.scalar_type());
  problem.world_size = group->world_size();
  if (debug_enabled() && problem.world_size > 1) {
    group->compare("problem", problem.to_string(), input.device().type());
  }
  const GemmAllReduce call{rows, weight, bias, group, problem};

  at::Tensor output;
  if (problem.m == 0 || problem.n == 0) {
    output = at::empty({problem.m, problem.n}, input.options());
  } else if (problem.k == 0 || problem.world_size == 1) {
    // Nothing to add up between ranks: zeros everywhere, or one rank's own product.
    output = at::mm(rows, weight.t());
    if (bias.has_value()) output.add_(*bias);
  } else if (input.is_cpu()) {
    output = gemm_allreduce_cpu(call);
  } else {
#if defined(OVERLAP_WITH_CUDA)
    output = gemm_allreduce_cuda(call);
#else
    TORCH_WARN_ONCE(
        "overlap_torch was built without CUDA kernels: CUDA tensors take the unfused composition "
        "(GEMM, then "
        "all-reduce). Rebuild it where an nvcc of torch's CUDA version is installed; `python -m "
        "overlap_torch doctor` "
        "says what is missing.");
    output = gemm_allreduce_composition(call);
#endif
  }
  if (input.dim() == 2) return output;
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = problem.n;
  return output.view(sizes);
}

// Casts as F.linear does under autocast.
template <c10::DispatchKey kKey, at::DeviceType kDevice>
at::Tensor gemm_allreduce_autocast(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias,
                                   const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet{kKey});
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("overlap::gemm_allreduce", "")
                             .typed<decltype(gemm_allreduce)>();
  return op.call(at::autocast::cached_cast(dtype, input, kDevice),
                 at::autocast::cached_cast(dtype, weight, kDevice),
                 at::autocast::cached_cast(dtype, bias, kDevice), group);
}

plan::Op to_op(const std::string& name) {
  TORCH_CHECK_VALUE(name == plan::name(plan::Op::kGemmAllReduce), "overlap_torch: no op is named '",
                    name, "'; there is ", plan::name(plan::Op::kGemmAllReduce));
  return plan::Op::kGemmAllReduce;
}

plan::Machine machine_of(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  if (device.is_cpu()) return cpu_machine();
#if defined(OVERLAP_WITH_CUDA)
  return cuda_machine(group, device);
#else
  TORCH_CHECK(false, "overlap_torch: built without CUDA kernels, there are no plans for ", device);
#endif
}

std::vector<int64_t> plan_for(const std::string& op, int64_t m, int64_t n, int64_t k,
                              at::ScalarType dtype, at::Device device,
                              const std::string& group_name) {
  TORCH_CHECK_VALUE(m >= 0 && n >= 0 && k >= 0,
                    "plan_for: M, N and K must not be negative, but are ", m, ", ", n, ", ", k);
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
  plan::Problem problem;
  problem.op = to_op(op);
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.dtype = to_plan_dtype(dtype);
  problem.world_size = group->world_size();
  return plan::encode(group->plan(problem, device.type(), machine_of(group, device))->plan);
}

void set_plan(at::IntArrayRef code, at::Device device, const std::string& group_name) {
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
  const plan::Plan plan = plan::decode(code.vec());
  plan::validate(plan);
  const plan::Machine machine = machine_of(group, device);
  const bool sm80 = plan.kernel != plan::Kernel::kSm80 || machine.has_sm80_kernels;
  const bool sm90 = (plan.kernel != plan::Kernel::kSm90Pingpong &&
                     plan.kernel != plan::Kernel::kSm90Cooperative) ||
                    machine.has_sm90_kernels;
  TORCH_CHECK_VALUE(sm80 && sm90, "set_plan: the plan's kernel is ", plan::name(plan.kernel),
                    ", which this build or device does not have: ", machine.to_string());
  // Setting the planner's own plan again, as use_plan does, is not a choice of the user's.
  group->set_plan(plan, device.type(), plan == plan::make_plan(plan.problem, machine));
}

void clear_plans(const std::string& group_name) {
  find_group(group_name)->clear_plans();
}

void check() {
#if defined(OVERLAP_WITH_CUDA)
  check_cuda_groups();
#endif
}

std::string machine(at::Device device, const std::string& group_name) {
  return machine_of(find_group(group_name), device).to_string();
}

std::vector<int64_t> memory(const std::string& group_name) {
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
#if defined(OVERLAP_WITH_CUDA)
  return cuda_memory(group);
#else
  return {0, 0};
#endif
}

std::string build_info() {
  return OVERLAP_BUILD_INFO;
}

void delay_side_stream(int64_t microseconds) {
  TORCH_CHECK_VALUE(microseconds >= 0,
                    "delay_side_stream: microseconds must not be negative, but is ", microseconds);
  side_delay = microseconds;
}

}  // namespace

int64_t side_delay_us() {
  return side_delay;
}

TORCH_LIBRARY(overlap, m) {
  m.def("gemm_allreduce(Tensor input, Tensor weight, Tensor? bias=None, *, str group) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "plan_for(str op, int m, int n, int k, ScalarType dtype, Device device, str group) -> int[]",
      &plan_for);
  m.def("set_plan(int[] plan, Device device, str group) -> ()", &set_plan);
  m.def("clear_plans(str group) -> ()", &clear_plans);
  m.def("check() -> ()", &check);
  m.def("trace_start() -> ()", &TraceSwitch::start);
  m.def("trace_stop() -> Tensor", &TraceSwitch::stop);
  m.def("machine(Device device, str group) -> str", &machine);
  m.def("memory(str group) -> int[]", &memory);
  m.def("build_info() -> str", &build_info);
  m.def("delay_side_stream(int microseconds) -> ()", &delay_side_stream);
}

TORCH_LIBRARY_IMPL(overlap, CPU, m) {
  m.impl("gemm_allreduce", &gemm_allreduce);
}
TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  m.impl("gemm_allreduce", &gemm_allreduce);
}

TORCH_LIBRARY_IMPL(overlap, AutocastCPU, m) {
  m.impl("gemm_allreduce", &gemm_allreduce_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}
TORCH_LIBRARY_IMPL(overlap, AutocastCUDA, m) {
  m.impl("gemm_allreduce", &gemm_allreduce_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

}  // namespace overlap::binding
