// The family of each plan, and plans that do one thing after the other.
#include "plan/message.h"
#include "steps/list/step.h"
#include "steps/lower/callers.h"
#include "steps/lower/families.h"

namespace overlap::steps {
namespace {

// One GEMM and one of NCCL's collectives over whole tensors.
StepList lower_one_collective(const plan::Plan& plan, bool finish) {
  const plan::Problem& problem = plan.problem;
  const bool gathers = problem.traits().gathers();
  const Where product = {Buffer::kProduct};
  Collective collective = {plan.collective,
                           plan.chunks[0].max_ctas,
                           0,
                           product,
                           product,
                           plan::part_rows(plan) * plan::moved_columns(problem)};
  if (gathers) collective.source = {Buffer::kInput};
  if (gathers) collective.destination = {Buffer::kGathered};
  if (problem.traits().scatters() || finish) collective.destination = {Buffer::kOutput};
  LibraryGemm gemm = {0, {0, problem.m}, {Buffer::kInput}, {product}};
  if (gathers) {
    gemm = {LibraryGemm::kAllWeights, {0, problem.m}, {Buffer::kGathered}, {{Buffer::kOutput}}};
  }
  List list;
  list.add_communicators(plan);
  if (!gathers) {
    const int64_t elements = problem.m * problem.n;
    list.add_scratch(Buffer::kProduct, elements * plan::moved_bytes(problem));
  }
  if (!gathers) list.add_unchained(Lane::kCaller, gemm);
  list.add_of_chunk(0, Lane::kCaller, collective);
  if (gathers) list.add_unchained(Lane::kCaller, gemm);
  return std::move(list.made);
}

// An all-gather over peers in one kernel, then the GEMM.
StepList lower_gather_in_one_kernel(const plan::Plan& plan, int32_t rank, bool callers) {
  const plan::Problem& problem = plan.problem;
  const int64_t bytes = plan::part_rows(plan) * problem.k * plan::moved_bytes(problem);
  PeerCollective gather;
  gather.gathers = true;
  gather.stride = bytes;
  gather.own = {Buffer::kInput};
  gather.output = {Buffer::kGathered};
  for (int32_t peer = 0; peer < problem.world_size; ++peer) {
    Piece piece;
    piece.bytes = bytes;
    piece.received = {Buffer::kSlot, peer * bytes, rank};
    if (peer != rank) {
      piece.send = {Buffer::kInput};
      piece.destination = {Buffer::kSlot, rank * bytes, peer};
    }
    gather.pieces.push_back(piece);
  }
  List list;
  list.add_slot(plan::peer_slot_bytes(plan));
  list.add_of_chunk(0, Lane::kCaller, gather);
  if (callers) {
    list.add(Lane::kCaller, Arrive{0});
    add_callers_kernel(plan, problem.m, list);
  } else {
    list.add(
        Lane::kCaller,
        LibraryGemm{
            LibraryGemm::kAllWeights, {0, problem.m}, {Buffer::kGathered}, {{Buffer::kOutput}}});
  }
  return std::move(list.made);
}

}  // namespace

void number_events(StepList& list) {
  for (const Step& step : list.steps) {
    for (const StepId id : step.after) list.steps[static_cast<size_t>(id)].event = 0;
  }
  for (Step& step : list.steps) {
    if (step.event == 0) step.event = list.events++;
  }
}

bool windows_take(const plan::Plan& plan, const std::vector<plan::Extent>& extents) {
  constexpr int64_t kBytes = 16;
  const int64_t element = plan::moved_bytes(plan.problem);
  return std::all_of(extents.begin(), extents.end(), [&](const plan::Extent& extent) {
    return extent.offset * element % kBytes == 0 && extent.count * element % kBytes == 0;
  });
}

bool takes_by_default(const plan::Plan& plan) {
  return plan.kernel != plan::Kernel::kLibrary ||
         (plan.transport().on_cpu && plan.layout == plan::Layout::kPacked);
}

namespace {

// On one rank the kernel is all that there is.
StepList lower_alone(const plan::Plan& plan, const Variant& variant) {
  List list;
  add_callers_kernel(plan, plan.problem.m + offsets(variant.send_rows).back(), list);
  return std::move(list.made);
}

// Refuses plans that need a GEMM of this package: one that communicates as it stores, or awaits a program's transfers.
void check_callers(const plan::Plan& plan) {
  const plan::OpTraits op = plan.problem.traits();
  if (plan::has_program(plan)) {
    if (op.sums()) return;
    plan::fail(
        "a kernel of your own runs by programs of gemm_allreduce and gemm_reducescatter, not of ",
        plan::name(plan.problem.op), ": take a plan whose chunks travel by its collective");
  }
  const bool stores = op.rows_by_rank || plan::has(plan.collective, plan::kFlagsTiles);
  if (!plan::over_peers(plan) || !stores) return;
  plan::fail(
      "a kernel of your own cannot run by the plan's collective ", plan::name(plan.collective),
      " over peers, which this package's GEMMs do as they store; take the collective direct or "
      "stripes, a program, or the transport nccl");
}

StepList lower_family(const RankCall& call) {
  const plan::Plan& plan = call.plan;
  const bool callers = call.variant.compute == Compute::kCallers;
  const bool peers = plan::over_peers(plan);
  if (callers && plan.problem.world_size == 1) return lower_alone(plan, call.variant);
  if (callers) check_callers(plan);
  if (plan::has_program(plan)) return lower_program(call);
  if (plan.problem.traits().rows_by_rank) {
    return peers ? lower_all_to_all_over_peers(call) : lower_all_to_all(call);
  }
  if (plan.collective == plan::Collective::kDirect) return lower_direct(call);
  if (plan.collective == plan::Collective::kStripes) return lower_stripes(call);
  if (plan.schedule == plan::Schedule::kSequential) {
    if (peers) return lower_gather_in_one_kernel(plan, call.rank, callers);
    // A caller's kernel and one of NCCL's collectives are one chunk.
    if (!callers) return lower_one_collective(plan, call.variant.finish);
  }
  if (plan.problem.traits().gathers()) return lower_consume(call);
  if (plan::has(plan.collective, plan::kFlagsTiles)) return lower_ring(call);
  return lower_produce(call);
}

}  // namespace

StepList lower(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
               const Variant& variant) {
  // Calls whose rows are finished are not taken for those whose rows are not.
  constexpr uint64_t kFinishes = 0x9e3779b97f4a7c15;
  StepList list = lower_family({plan, rank, machine, variant});
  number_events(list);
  list.communication = plan::communication_hash(plan) ^ (variant.finish ? kFinishes : 0);
  return list;
}

}  // namespace overlap::steps
