#include "steps/price/price.h"

#include <algorithm>
#include <span>
#include <utility>

#include "steps/price/price_walk.h"

namespace overlap::steps {
namespace {

bool is_gemm(const Step& step) {
  return std::holds_alternative<Gemm>(step.what) ||
         std::holds_alternative<LibraryGemm>(step.what) ||
         std::holds_alternative<CallersKernel>(step.what);
}

// The lanes' steps, and when the host has come to those that depend on it. It issues the first GEMM at once.
void enqueue(Walk& w) {
  w.price.steps.assign(w.list.steps.size(), {0.0, kNever});
  w.next_of_lane.assign(w.list.steps.size(), kNone);
  double host_us = 0.0;
  for (size_t id = 0; id < w.list.steps.size(); ++id) {
    const Step& step = w.list.steps[id];
    LaneState& lane = w.lanes[w.lane_of(step)];
    (lane.last == kNone ? lane.next : w.next_of_lane[at(lane.last)]) = static_cast<StepId>(id);
    lane.last = static_cast<StepId>(id);
    double& begin_us = w.price.steps[id].begin_us;
    if (const auto* fork = std::get_if<Fork>(&step.what)) {
      w.lanes_beside = fork->side_lanes;
    } else if (const auto* call = std::get_if<Collective>(&step.what)) {
      w.all_bytes += w.bytes_of(*call);
      if (w.lanes_beside > 0) begin_us = host_us;
      host_us += w.profile.host.issue_us;
    } else if (const auto* unpack = std::get_if<Unpack>(&step.what)) {
      if (unpack->terms > 1) host_us += w.profile.host.issue_sum_us;
    } else if (is_gemm(step)) {
      if (const auto* gemm = std::get_if<Gemm>(&step.what)) w.awaits |= gemm->awaits_chunks;
      if (!step.after.empty()) begin_us = host_us;
      host_us = std::max(host_us, w.profile.host.first_issue_us);
    }
    if (w.cpu || w.peers || w.all_to_all) begin_us = 0.0;
  }
}

void finish(Walk& w, LaneState& lane, double end_us) {
  if (end_us == kNever) return;
  const size_t id = at(lane.next);
  lane.free_us = w.price.steps[id].end_us = end_us;
  lane.next = w.next_of_lane[id];
}

// Does the lane's steps, as far as it is known when they begin. Returns true if any has ended.
bool go_on(Walk& w, LaneState& lane) {
  const StepId first = lane.next;
  while (lane.next != kNone && !lane.calls) {
    const size_t id = at(lane.next);
    const double after_us = w.after_us(id);
    if (after_us == kNever) break;
    double& begin_us = w.price.steps[id].begin_us;
    begin_us = std::max({begin_us, lane.free_us, after_us});
    const auto end_of_step = [&](const auto& what) { return end_of(what, w, id, begin_us); };
    finish(w, lane, std::visit(end_of_step, w.list.steps[id].what));
    if (w.price.steps[id].end_us == kNever) break;
  }
  return lane.next != first;
}

// Lets the calls under way share the link, until one has ended; false if there is none.
bool carry(Walk& w) {
  const plan::Profile::Call model = call_model(w);
  const double link = w.machine.link_gbps * model.link_rate * 1e3;
  while (true) {
    const auto flows = [&](const LaneState& lane) {
      return lane.calls && lane.flows_at_us <= w.now_us;
    };
    const auto sides = std::span(w.lanes).subspan(1, at(w.lanes_beside));
    const auto flowing = static_cast<double>(std::count_if(sides.begin(), sides.end(), flows));
    const auto rate = [&](const LaneState& lane) { return std::min(lane.most, link / flowing); };
    // The next start of a flow, or end of a call.
    double next_us = kNever;
    LaneState* next = nullptr;
    for (LaneState& lane : sides) {
      if (!lane.calls) continue;
      const double at_us = flows(lane) ? w.now_us + lane.bytes / rate(lane) : lane.flows_at_us;
      if (at_us < next_us) {
        next_us = at_us;
        next = &lane;
      }
    }
    if (next == nullptr) return false;
    const bool ends = flows(*next);
    for (LaneState& lane : sides) {
      if (flows(lane)) lane.bytes -= (next_us - w.now_us) * rate(lane);
    }
    w.now_us = next_us;
    if (!ends) continue;
    next->calls = false;
    w.price.expected.communication_us += w.now_us - w.price.steps[at(next->next)].begin_us;
    finish(w, *next, w.now_us);
    return true;
  }
}

void run(Walk& w) {
  enqueue(w);
  do {
    for (bool ended = true; ended;) {  // with what waited for other lanes
      ended = false;
      for (LaneState& lane : w.lanes) ended |= go_on(w, lane);
    }
  } while (carry(w));
  w.price.expected.total_us = w.lanes[0].free_us;
}

}  // namespace

double end_of(const Fork& fork, Walk& w, size_t, double& begin_us) {
  const double end_us = begin_us + (w.gathers && !w.cpu && !w.peers ? w.fork_join_us : 0.0);
  for (int32_t lane = 0; lane < fork.side_lanes; ++lane) {
    w.lanes[static_cast<size_t>(side_lane(lane))].free_us =
        end_us + (w.cpu && w.gathers ? w.wait_us : 0.0);
  }
  return end_us;
}

double end_of(const Join&, Walk& w, size_t, double& begin_us) {
  for (const LaneState& lane : w.lanes) {
    if (&lane != &w.lanes[0] && lane.next != kNone) return kNever;
    begin_us = std::max(begin_us, lane.free_us);
  }
  if (w.peers || w.all_to_all) return begin_us;
  return begin_us + w.fork_join_us;
}

// The steps around these count their time.
double end_of(const Delay&, Walk&, size_t, double& begin_us) {
  return begin_us;
}
double end_of(const EndCall&, Walk&, size_t, double& begin_us) {
  return begin_us;
}

Price price(const StepList& list, const plan::Plan& plan, int32_t rank,
            const plan::Machine& machine, double kernel_us) {
  Walk walk = {list, plan, rank, machine, kernel_us};
  run(walk);
  return std::move(walk.price);
}

Prediction predict(const plan::Plan& plan, const plan::Machine& machine) {
  if (plan::tiles_m(plan) == 0 || plan::tiles_n(plan) == 0) return {};
  // A machine that nobody measured: no plan is better than another.
  if (machine.sm_count <= 0 || machine.sm_gflops <= 0.0 ||
      (plan.problem.world_size > 1 && machine.link_gbps <= 0.0)) {
    return {.total_us = kNever};
  }
  Variant variant;
  variant.compute = kernel_if(takes_by_default(plan));
  return price(lower(plan, 0, machine, variant), plan, 0, machine).expected;
}

}  // namespace overlap::steps
