#include "binding/ops/groups.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <sstream>
#include <unordered_map>

#include "binding/ops/environment.h"

namespace overlap::binding {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10d::ProcessGroup*, std::shared_ptr<GroupEntry>> entries;
};

Registry& registry() {
  static Registry* instance =
      new Registry();  // never destroyed: ops may still run while the process ends
  return *instance;
}

}  // namespace

std::shared_ptr<const steps::StepList> StepLists::of(const plan::Plan& plan, int rank,
                                                     const plan::Machine& machine,
                                                     const steps::Variant& variant) {
  constexpr size_t kMost = 16;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Made& one : made_) {
    if (one.variant == variant) return one.list;
  }
  Made one = {variant,
              std::make_shared<const steps::StepList>(steps::lower(plan, rank, machine, variant))};
  if (made_.size() < kMost) {
    made_.push_back(one);
  } else {
    made_[next_++ % kMost] = one;
  }
  return one.list;
}

PlanEntry::PlanEntry(plan::Plan made, bool planned) : plan(std::move(made)), by_planner(planned) {
  plan::validate(plan);
  communication_hash = plan::communication_hash(plan);
}

const PlanEntry& PlanEntry::of_scales(const std::function<plan::Plan()>& make) const {
  std::call_once(scales_made_, [&] { scales_ = std::make_unique<PlanEntry>(make(), true); });
  return *scales_;
}

GroupEntry::GroupEntry(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string name)
    : group_(group),
      name_(std::move(name)),
      rank_(group->getRank()),
      world_size_(group->getSize()) {}

c10::intrusive_ptr<c10d::ProcessGroup> GroupEntry::lock() const {
  auto group = group_.lock();
  TORCH_CHECK(group, "overlap_torch: group '", name_, "', rank ", rank_,
              ": the process group was destroyed. Make a new one, and with it what was made for "
              "this one: jobs belong to their group.");
  return group;
}

bool GroupEntry::registered() const {
  const auto group = group_.lock();
  if (!group) return false;
  try {
    return c10d::resolve_process_group(name_) == group;
  } catch (const std::exception&) {
    return false;
  }
}

std::string GroupEntry::backend(at::DeviceType device) const {
  const auto group = group_.lock();
  if (!group) return "";
  try {
    return group->getBackend(device)->getBackendName();
  } catch (const std::exception&) {
    return group->getBackendName();
  }
}

std::string GroupEntry::why_no_plans(at::DeviceType device) {
  if (!environment().plans) return "OVERLAP_PLANS=0";
  // A group's backend does not change: asked for once.
  std::atomic<int>& known = runs_plans_[device == at::kCPU ? 0 : 1];
  const char* const needed = device == at::kCPU ? "gloo" : "nccl";
  if (known < 0) known = backend(device) == needed ? 1 : 0;
  if (known == 1) return "";
  return c10::str("the group's backend for ", device == at::kCPU ? "CPU" : "CUDA", " tensors is ",
                  backend(device), ", not ", needed);
}

std::chrono::milliseconds GroupEntry::timeout(at::DeviceType device) const {
  if (environment().timeout) return *environment().timeout;
  try {
    if (const auto group = group_.lock()) {
      const auto options = group->getBackend(device)->getBackendOptions();
      if (options) return options->timeout;
    }
  } catch (const std::exception&) {
    // The group has no such backend, or the backend knows no options.
  }
  return ::kProcessGroupDefaultTimeout;
}

GroupEntry::Key GroupEntry::key(const plan::Problem& problem, at::DeviceType device) {
  return {static_cast<int>(device),
          static_cast<int>(problem.op),
          problem.m,
          problem.n,
          problem.k,
          static_cast<int>(problem.dtype),
          static_cast<int>(problem.recipe),
          static_cast<int>(plan::output_dtype(problem)),
          problem.fast_accum,
          static_cast<int>(problem.invariance)};
}

// By what is called, and by what plan or why without one. A new one is logged where that is wanted.
std::shared_ptr<Tally> GroupEntry::tally(const plan::Problem& problem, at::DeviceType device,
                                         const std::string& way,
                                         const std::function<void(Tally&)>& describe) {
  const Way by = {key(problem, device), way};
  if (const auto one = tally_by_way_.find(by); one != tally_by_way_.end()) return one->second;
  if (tallies_.size() >= kTallies) drop_old_tallies();
  std::shared_ptr<Tally> found = std::make_shared<Tally>();
  tally_by_way_[by] = found;
  found->problem = problem;
  found->device = device;
  describe(*found);
  tallies_.push_back(found);
  if (environment().log_plans && rank_ == 0) log_plan(*this, *found);
  return found;
}

// The older half of those that no plan counts by. Nobody has called the others for long.
void GroupEntry::drop_old_tallies() {
  constexpr long kOwn = 2;  // references from here
  size_t left = tallies_.size() / 2;
  std::erase_if(tallies_, [&](const std::shared_ptr<Tally>& one) {
    if (left == 0 || one.use_count() > kOwn) return false;
    --left;
    one->dropped = true;
    return true;
  });
  std::erase_if(tally_by_way_, [](const auto& item) { return item.second->dropped; });
}

std::shared_ptr<const PlanEntry> GroupEntry::make_entry(plan::Plan plan, at::DeviceType device,
                                                        bool by_planner,
                                                        const plan::Machine& machine,
                                                        bool captured) {
  auto entry = std::make_shared<PlanEntry>(std::move(plan), by_planner);
  std::string way = captured ? "captured" : "";
  for (const int64_t number : plan::encode(entry->plan)) way += " " + std::to_string(number);
  entry->tally = tally(entry->plan.problem, device, way, [&](Tally& made) {
    made.plan = entry->plan;
    made.machine = machine;
    made.by_planner = by_planner;
    made.captured = captured;
  });
  return entry;
}

void GroupEntry::count_unplanned(const plan::Problem& problem, at::DeviceType device,
                                 const std::string& why) {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  tally(problem, device, why, [&](Tally& made) { made.why_unplanned = why; })->count();
}

std::vector<std::shared_ptr<const Tally>> GroupEntry::tallies() {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  return {tallies_.begin(), tallies_.end()};
}

plan::Plan GroupEntry::make_plan(const plan::Problem& problem, at::DeviceType device,
                                 const plan::Machine& machine) {
  const auto neighbours = planner::neighbours(problem, machine);
  if (!neighbours) return planner::make_plan(problem, machine);
  const auto families_at = [&](const plan::Problem& other) {
    Families& found = families_[{key(other, device), machine.windows}];
    if (found == nullptr) {
      found = std::make_shared<const std::vector<planner::Family>>(
          planner::best_families(other, machine));
    }
    return found;
  };
  const Families below = families_at((*neighbours)[0]);
  const Families above = families_at((*neighbours)[1]);
  return planner::make_plan_between(problem, machine, *below, *above);
}

plan::Plan GroupEntry::planned(const plan::Problem& problem, at::DeviceType device,
                               const plan::Machine& machine) {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  return make_plan(problem, device, machine);
}

std::shared_ptr<const PlanEntry> GroupEntry::plan(const plan::Problem& problem,
                                                  at::DeviceType device,
                                                  const plan::Machine& machine) {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  const Key by = key(problem, device);
  if (!set_plans_.empty()) {
    if (const auto set = set_plans_.find(by); set != set_plans_.end()) return set->second;
  }
  std::shared_ptr<const PlanEntry>& entry = plans_[by];
  if (entry == nullptr) {
    entry = make_entry(make_plan(problem, device, machine), device, true, machine, false);
  }
  return entry;
}

std::shared_ptr<const PlanEntry> GroupEntry::capture_plan(const plan::Problem& problem,
                                                          plan::Machine machine) {
  machine.windows = false;
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  std::shared_ptr<const PlanEntry>& entry = capture_plans_[key(problem, at::kCUDA)];
  if (entry == nullptr) {
    entry = make_entry(make_plan(problem, at::kCUDA, machine), at::kCUDA, true, machine, true);
  }
  return entry;
}

void GroupEntry::set_plan(const plan::Plan& plan, at::DeviceType device, bool by_planner,
                          const plan::Machine& machine) {
  TORCH_CHECK(plan.problem.world_size == world_size_, "overlap_torch: the plan is for ",
              plan.problem.world_size, " ranks, but group '", name_, "' has ", world_size_);
  plan::validate(plan);
  for (const plan::Chunk& chunk : plan.chunks) {
    const bool fits = (device == at::kCPU) == plan::traits(chunk.transport).on_cpu;
    TORCH_CHECK(fits, "overlap_torch: the plan's transport is ", plan::name(chunk.transport),
                ", which does not work on ", c10::DeviceTypeName(device, true), " tensors; use ",
                device == at::kCPU ? "gloo" : "nccl or peer");
  }
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  const Key by = key(plan.problem, device);
  set_plans_.erase(by);
  auto entry = make_entry(plan, device, by_planner, machine, false);
  if (by_planner) {
    plans_[by] = entry;
  } else {
    set_plans_[by] = entry;
  }
}

std::vector<std::string> GroupEntry::texts_of_ranks(const std::string& own, at::DeviceType device) {
  const auto store = lock()->getStore();
  const std::string prefix = "overlap_torch/debug/" + c10::DeviceTypeName(device, true) + "/" +
                             std::to_string(compared_++) + "/";
  store->set(prefix + std::to_string(rank_), own);
  std::vector<std::string> texts;
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::string key = prefix + std::to_string(peer);
    try {
      store->wait({key}, timeout(device));
    } catch (const std::exception&) {
      TORCH_CHECK(false, "overlap_torch: group '", name_, "', rank ", rank_, ": rank ", peer,
                  " made no call to compare within ", timeout(device).count() / 1000.0,
                  " s (OVERLAP_DEBUG=1)");
    }
    texts.push_back(store->get_to_str(key));
  }
  // The last one to read takes the keys away: a later group of the same name on the same store must not find them.
  if (store->add(prefix + "read", 1) == world_size_) {
    for (int peer = 0; peer < world_size_; ++peer) store->deleteKey(prefix + std::to_string(peer));
    store->deleteKey(prefix + "read");
  }
  return texts;
}

bool GroupEntry::has_peers(at::DeviceType device) const {
  return world_size_ > 1 && backend(device) != "fake" && lock()->getStore();
}

void GroupEntry::compare(const std::string& what, const std::string& text, at::DeviceType device) {
  if (!has_peers(device)) return;
  const std::vector<std::string> texts = texts_of_ranks(text, device);
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::string& other = texts[static_cast<size_t>(peer)];
    TORCH_CHECK(other == text, "overlap_torch: ranks of group '", name_, "' disagree about the ",
                what, " of a call: rank ", rank_, " has ", text, ", rank ", peer, " has ", other,
                ". All ranks must call the op with the same M, N, K, dtype and plan.");
  }
}

void GroupEntry::compare_counts(at::IntArrayRef send_rows, at::IntArrayRef recv_rows,
                                at::DeviceType device) {
  if (!has_peers(device)) return;
  std::ostringstream mine;
  for (const at::IntArrayRef rows : {send_rows, recv_rows}) {
    for (const int64_t count : rows) mine << count << ' ';
  }
  const std::vector<std::string> texts = texts_of_ranks(mine.str(), device);
  const auto world_size = static_cast<size_t>(world_size_);
  std::vector<std::vector<int64_t>> sends(world_size, std::vector<int64_t>(world_size));
  std::vector<std::vector<int64_t>> receives = sends;
  for (size_t peer = 0; peer < world_size; ++peer) {
    std::istringstream text(texts[peer]);
    for (int64_t& count : sends[peer]) text >> count;
    for (int64_t& count : receives[peer]) text >> count;
  }
  for (size_t from = 0; from < world_size; ++from) {
    for (size_t to = 0; to < world_size; ++to) {
      TORCH_CHECK(sends[from][to] == receives[to][from], "overlap_torch: ranks of group '", name_,
                  "' disagree about the rows of an all-to-all: rank ", from, " sends ",
                  sends[from][to], " rows to rank ", to, ", which expects ", receives[to][from]);
    }
  }
}

void GroupEntry::announce(const std::string& problem, uint64_t plan, const RowCounts& rows) {
  if (board_ == nullptr) {
    // Other backends pair our calls as they pair those of PyTorch.
    if (!runs_plans(at::kCPU)) return;
    CallBoard::Options options;
    options.name = name_;
    options.rank = rank_;
    options.world_size = world_size_;
    options.timeout = timeout(at::kCPU);
    options.store = lock()->getStore();
    options.group = group_;
    board_ = std::make_unique<CallBoard>(std::move(options));
  }
  board_->announce(problem, plan, rows);
}

void GroupEntry::agree() const {
  if (board_ != nullptr) board_->agree();
}

void GroupEntry::fail(const std::string& message) const {
  communication_failed(message);
}

void GroupEntry::clear_plans() {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  set_plans_.clear();
  plans_.clear();
  capture_plans_.clear();
  families_.clear();
}

int64_t GroupEntry::plan_count() {
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  return static_cast<int64_t>(set_plans_.size() + plans_.size() + capture_plans_.size());
}

std::shared_ptr<GroupEntry> find_group(const std::string& name) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    TORCH_CHECK_VALUE(
        false, "overlap_torch: no process group is named '", name,
        "'. Give a ProcessGroup's group_name (torch.distributed.group.WORLD.group_name), after "
        "torch.distributed.init_process_group.");
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(group.get());
  if (found != all.entries.end() && found->second->is_of(group)) return found->second;
  std::erase_if(all.entries, [](const auto& item) { return item.second->expired(); });
  auto entry = std::make_shared<GroupEntry>(group, name);
  all.entries[group.get()] = entry;
  return entry;
}

std::vector<std::shared_ptr<GroupEntry>> all_groups() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::shared_ptr<GroupEntry>> groups;
  for (const auto& [pointer, entry] : all.entries) {
    if (!entry->expired()) groups.push_back(entry);
  }
  return groups;
}

const plan::Machine& cpu_machine() {
  static const plan::Machine machine = [] {
    const plan::SharedProfile& profile = environment().profile;
    plan::Machine made;
    made.sm_count = static_cast<int32_t>(profile->cpu.cores);
    made.sm_gflops = profile->cpu.core_gflops;
    made.link_latency_us = profile->cpu.link_latency_us;
    made.link_gbps = profile->cpu.link_gbps;
    made.profile = profile;
    return made;
  }();
  return machine;
}

bool has_plan_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat ||
         dtype == at::kDouble;
}

bool is_fp8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

plan::DType to_plan_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return plan::DType::kBFloat16;
    case at::kHalf:
      return plan::DType::kFloat16;
    case at::kFloat:
      return plan::DType::kFloat32;
    case at::kDouble:
      return plan::DType::kFloat64;
    case at::kFloat8_e4m3fn:
      return plan::DType::kFloat8E4M3;
    case at::kFloat8_e5m2:
      return plan::DType::kFloat8E5M2;
    default:
      TORCH_CHECK_TYPE(false, "overlap_torch: dtype ", dtype,
                       " is not supported; use bfloat16, float16, float32 or float64, or "
                       "float8_e4m3fn or float8_e5m2 with scales");
  }
}

bool debug_enabled() {
  return environment().debug;
}

}  // namespace overlap::binding
