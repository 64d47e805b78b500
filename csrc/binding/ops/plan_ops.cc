// The operators beside those on tensors: plans, machines, what the build and the environment hold.
#include <torch/library.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>

#include "binding/ops/environment.h"
#include "binding/ops/groups.h"
#include "binding/ops/op_call.h"
#include "binding/ops/operands.h"
#include "binding/ops/trace_switch.h"
#include "plan/agreement.h"
#include "plan/plan_fields.h"

#ifndef OVERLAP_BUILD_INFO
#define OVERLAP_BUILD_INFO "cuda=none"
#endif

namespace overlap::binding {
namespace {

std::atomic<int64_t> side_delay{0};

// The member of this name; `what`: the enumeration's, in messages.
template <typename Enum>
Enum named(const char* what, const std::string& name) {
  std::string names;
  for (const plan::Member<Enum>& member : plan::Enumeration<Enum>::kMembers) {
    if (name == member.name) return member.value;
    names += (names.empty() ? "" : ", ") + std::string(member.name);
  }
  TORCH_CHECK_VALUE(false, "overlap_torch: no ", what, " is named '", name, "'; there are ", names);
}

plan::Machine machine_of(const std::shared_ptr<GroupEntry>& group, at::Device device) {
  return device.is_cpu() ? cpu_machine() : cuda_machine(group, device);
}

std::vector<int64_t> plan_for(const std::string& op, int64_t m, int64_t n, int64_t k,
                              at::ScalarType dtype, at::Device device,
                              const std::string& group_name, const std::string& recipe,
                              std::optional<at::ScalarType> output_dtype, bool fast_accum,
                              const std::optional<std::string>& invariance) {
  TORCH_CHECK_VALUE(m >= 0 && n >= 0 && k >= 0,
                    "plan_for: M, N and K must not be negative, but are ", m, ", ", n, ", ", k);
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
  plan::Problem problem;
  problem.op = named<plan::Op>("op", op);
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.dtype = to_plan_dtype(dtype);
  problem.world_size = group->world_size();
  problem.recipe = named<plan::Recipe>("recipe", recipe);
  const bool scaled = problem.recipe != plan::Recipe::kNone;
  problem.output_dtype = to_plan_dtype(output_dtype.value_or(scaled ? at::kBFloat16 : dtype));
  problem.fast_accum = fast_accum;
  if (problem.traits().sums()) set_invariance(problem, "plan_for", invariance);
  plan::check_problem(problem);
  return plan::encode(group->plan(problem, device.type(), machine_of(group, device))->plan);
}

void set_plan(at::IntArrayRef code, at::Device device, const std::string& group_name) {
  const std::shared_ptr<GroupEntry> group = find_group(group_name);
  const plan::Plan plan = plan::decode(code.vec());
  plan::validate(plan);
  const plan::Machine machine = machine_of(group, device);
  const int32_t arch = plan::traits(plan.kernel).least_arch;
  TORCH_CHECK_VALUE(arch <= machine.kernel_arch, "set_plan: the plan's kernel is ",
                    plan::name(plan.kernel),
                    ", which this build or device does not have: ", machine.to_string());
  plan::check_serial(plan, machine);
  const auto planned = group->planned(plan.problem, device.type(), machine);
  TORCH_CHECK_VALUE(
      plan.problem.invariance == plan::Invariance::kNone || plan == planned ||
          (plan::is_invariant(plan) && arch == plan::traits(planned.kernel).least_arch),
      "set_plan: the plan ", plan.to_string(), " has other bits than the planner's, ",
      planned.to_string(), "; take one of such a kernel");
  TORCH_CHECK_VALUE(!plan::over_peers(plan) || plan.clique > 0 || machine.peer_gbps > 0.0,
                    "set_plan: the plan's transport is peer, but the ranks of this group do not "
                    "map each other's memory; use nccl",
                    machine.clique > 0 ? ", or the collective hierarchical" : "");
  TORCH_CHECK_VALUE(
      !plan::over_peers(plan) || plan.clique == 0 || plan.clique == machine.clique,
      "set_plan: the plan is for hosts of ", plan.clique,
      " ranks that map each other's memory, but this group has ",
      machine.clique > 0 ? c10::str("hosts of ", machine.clique) : std::string("no such hosts"),
      "; use these numbers, or the transport nccl");
  // Setting the planner's own plan again, as use_plan does, is not a choice of the user's.
  group->set_plan(plan, device.type(), plan == planned, machine);
}

void clear_plans(const std::string& group_name) {
  find_group(group_name)->clear_plans();
}

std::string machine(at::Device device, const std::string& group_name) {
  return machine_of(find_group(group_name), device).to_string();
}

// The machine's profile: JSON text, and its origin.
std::vector<std::string> machine_profile(at::Device device, const std::string& group_name) {
  const plan::SharedProfile profile = machine_of(find_group(group_name), device).profile;
  return {profile->to_json(), profile->source};
}

// Problems of the group that a plan is held for.
int64_t plan_count(const std::string& group_name) {
  return find_group(group_name)->plan_count();
}

std::vector<int64_t> memory(const std::string& group_name) {
  return cuda_memory(find_group(group_name));
}

// For people: how the group's ranks map each other's memory on CUDA; "" before the group's first call there.
std::string peer_memory(const std::string& group_name) {
  return cuda_peer_memory(find_group(group_name));
}

std::string build_info() {
  char hash[17];
  std::snprintf(hash, sizeof(hash), "%016" PRIx64, plan::kSourceHash);
  return std::string(OVERLAP_BUILD_INFO ";sources=") + hash;
}

// True if the group's ranks map each other's memory on such a device, and their kernels may run beside each other.
// Collective at the group's first call.
bool copies_reach_peers(at::Device device, const std::string& group_name) {
  if (!device.is_cuda()) return false;
  const plan::Machine machine = cuda_machine(find_group(group_name), device);
  return machine.peer_gbps > 0 && !machine.serial;
}

// The environment's values now, by variable; `why_no_peers` is the setting that turns peers off, or
// ""; `profile` is the JSON text that OVERLAP_PROFILE names.
c10::Dict<std::string, std::string> environment_now() {
  const Environment now = read_environment();
  c10::Dict<std::string, std::string> values;
  values.insert("OVERLAP_DEBUG", now.debug ? "1" : "0");
  values.insert("OVERLAP_TIMEOUT_S",
                now.timeout ? c10::str(static_cast<double>(now.timeout->count()) / 1000.0) : "");
  values.insert("OVERLAP_PLANS", now.plans ? "1" : "0");
  values.insert("OVERLAP_PEERS", now.peers ? "1" : "0");
  values.insert("OVERLAP_PEER_MEMORY", plan::name(now.peer_source));
  values.insert("OVERLAP_ON_FAILURE", now.abort_on_failure ? "abort" : "raise");
  values.insert("OVERLAP_LOG", now.log_plans ? "plans" : "none");
  values.insert("OVERLAP_INVARIANCE", plan::name(now.invariance));
  values.insert("OVERLAP_PROFILE", now.profile->source);
  values.insert("profile", now.profile->to_json());
  values.insert("why_no_peers", now.why_no_peers);
  return values;
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

TORCH_LIBRARY_FRAGMENT(overlap, m) {
  m.def(
      "plan_for(str op, int m, int n, int k, ScalarType dtype, Device device, str group, str "
      "recipe='none', ScalarType? output_dtype=None, bool fast_accum=False, str? invariance=None) "
      "-> int[]",
      &plan_for);
  m.def("set_plan(int[] plan, Device device, str group) -> ()", &set_plan);
  m.def("clear_plans(str group) -> ()", &clear_plans);
  m.def("plan_count(str group) -> int", &plan_count);
  m.def("plan_table() -> Dict(str, str)[]", &plan_table);
  m.def("machine(Device device, str group) -> str", &machine);
  m.def("machine_profile(Device device, str group) -> str[]", &machine_profile);
  m.def("memory(str group) -> int[]", &memory);
  m.def("peer_memory(str group) -> str", &peer_memory);
  m.def("build_info() -> str", &build_info);
  m.def("_copies_reach_peers(Device device, str group) -> bool", &copies_reach_peers);
  m.def("environment() -> Dict(str, str)", &environment_now);
  m.def("delay_side_stream(int microseconds) -> ()", &delay_side_stream);
}

}  // namespace overlap::binding
