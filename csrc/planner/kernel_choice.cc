#include "planner/candidates.h"

#include <algorithm>

#include "plan/templates.h"
#include "steps/price/costs.h"

namespace overlap::planner {

using namespace plan;  // whose types and templates these are
using steps::Prediction;
using steps::rounds_of;

namespace {

constexpr int64_t kAlignment = 8;  // elements: 16 bytes, what bulk copies of 16-bit types take

// Returns true if a kernel's larger tiles, in two rounds or more, fill about as many SMs as those of `usual`.
bool fills_tiles(const Problem& problem, const Profile::Gemm& gemm, int32_t sms,
                 Transport transport, Kernel kernel, Kernel usual) {
  const Plan large = base_plan(problem, kernel, transport, {});
  const Plan small = base_plan(problem, usual, transport, {});
  const auto rounds = [&](const Plan& plan) {
    return rounds_of(int64_t{tiles_m(plan)} * tiles_n(plan), sms);
  };
  const double larger = static_cast<double>(large.tile_n) / small.tile_n;
  return rounds(large) >= gemm.large_tile_rounds &&
         larger * rounds(large) <= gemm.large_tile_factor * rounds(small);
}

// In fp8 not every kernel runs: scales of tensors or rows, the tensor cores' own sums, bfloat16 output.
bool kernels_take(const Problem& problem, const Machine& machine) {
  const bool fp8 = is_fp8(problem.dtype);
  const int64_t k_alignment = fp8 ? 2 * kAlignment : kAlignment;
  if (problem.n % kAlignment != 0 || problem.k % k_alignment != 0) return false;
  if (!fp8) return element_bytes(problem.dtype) == 2;
  return can(newest_kernel(machine), kTakesFp8) && problem.fast_accum &&
         problem.recipe != Recipe::kBlock && output_dtype(problem) == DType::kBFloat16;
}

}  // namespace

Kernel larger_kernel(Kernel kernel, bool to_peers) {
  const KernelTraits& own = traits(kernel);
  const Kernel found = first_kernel([&](const KernelTraits& one) {
    return one.least_arch == own.least_arch && one.shape.tile_n > own.shape.tile_n &&
           one.can(kStoresToPeers) == to_peers;
  });
  return found == Kernel::kLibrary ? kernel : found;
}

std::vector<Kernel> one_way_kernels(const Problem& problem, const Machine& machine,
                                    const Prediction& sequence, Kernel kernel,
                                    Transport transport) {
  const Kernel wider = larger_kernel(kernel, true);
  const Kernel widest = larger_kernel(kernel, false);
  if (wider == kernel) return {kernel};
  const Profile& profile = *machine.profile;
  const bool gathers = problem.traits().gathers();
  // An all-gather's last launch has all SMs. A reduce-scatter's GEMM leaves some to NCCL.
  const std::vector<int32_t>& most = profile.ways.one_way_window.back();
  const int32_t sms = std::max(1, machine.sm_count - (gathers ? 0 : most[0] * most[1]));
  const auto fills = [&](Kernel own) {
    return fills_tiles(problem, profile.gemm, sms, transport, own, kernel);
  };
  const bool fp8 = is_fp8(problem.dtype);
  const bool wide = fills(wider);
  const bool large = (!fp8 || can(widest, kTakesFp8)) && fills(widest);
  const bool takes_wide = wide && (fp8 || problem.k <= profile.gemm.short_k);
  const Kernel shorter = takes_wide ? wider : large ? widest : kernel;
  if (!gathers) return {shorter};
  if (fp8 || sequence.gemm_us > profile.gemm.cool_us) {
    return {wide ? wider : kernel};
  }
  if (shorter == kernel) return {kernel};
  return {shorter, kernel};  // which takes fewer rounds for what arrives
}

std::vector<Kernel> peer_kernels(const Problem& problem, const Machine& machine,
                                 const Prediction& sequence, Kernel kernel) {
  if (problem.traits().gathers()) {
    return one_way_kernels(problem, machine, sequence, kernel, Transport::kPeer);
  }
  return {kernel, larger_kernel(kernel, true)};
}

Kernel best_kernel(const Problem& problem, const Machine& machine) {
  return kernels_take(problem, machine) ? newest_kernel(machine) : Kernel::kLibrary;
}

}  // namespace overlap::planner
