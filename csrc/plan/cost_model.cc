// What a plan is expected to cost. A model of a few constants, each fitted to one measurement; see
// docs/design.md.
#include "plan/cost_model.h"

#include <algorithm>
#include <cstddef>

#include "plan/planner.h"

namespace overlap::plan {
namespace {

// --- GEMM
// -------------------------------------------------------------------------------------------------
constexpr double kGemmStartUs = 3.0;  // launch and prologue, before the first tile is under way

// Rate of a kernel, of what the machine's library reaches (Machine::sm_gflops).
constexpr double kPingpongRate = 0.97;
constexpr double kCooperativeRate = 1.0;
constexpr double kSm80Rate = 0.95;          // on the architectures it was made for
constexpr double kSm80RateOnHopper = 0.60;  // mma.sync reaches no more of wgmma's rate

// Rate of other dtypes, of the 16-bit tensor-core rate. fp32 without TF32, as PyTorch does by
// default.
constexpr double kFloat32Rate = 1.0 / 13.0;
constexpr double kFloat64Rate = 1.0 / 13.0;
constexpr double kFloat64RateOnCpu = 0.5;  // Machine::sm_gflops counts fp32 there

// --- communication
// ----------------------------------------------------------------------------------------
constexpr double kWaitUs = 4.0;      // from a chunk's last signal to the start of its call
constexpr double kForkJoinUs = 6.0;  // events that fork and join the side stream
constexpr double kCopyGbps =
    1500.0;  // device copies behind a call: out of a window, out of packed tiles
constexpr double kCopyStartUs = 3.0;        // launch of such a copy
constexpr int32_t kDefaultCtas = 24;        // what NCCL takes without a limit on a fast link
constexpr int32_t kDefaultCtasSlow = 4;     // and what it needs on a slow one
constexpr double kWindowDefaultRate = 0.8;  // window kernels without a limit take 7 to 9 CTAs

// On CPU: waking the communication thread, and starting and joining it.
constexpr double kWaitCpuUs = 20.0;
constexpr double kForkJoinCpuUs = 50.0;
constexpr double kCopyCpuGbps = 5.0;

// Share of the full all-reduce rate that a CTA limit leaves, linear between the points.
struct RatePoint {
  int32_t ctas;
  double rate;
};
constexpr RatePoint kPlainRate[] = {{0, 0.0},   {4, 0.30},  {8, 0.57},
                                    {12, 0.78}, {16, 0.91}, {24, 1.0}};
constexpr RatePoint kWindowRate[] = {{0, 0.0}, {4, 0.49}, {8, 0.76}, {16, 0.95}};

template <size_t kPoints>
double interpolate(const RatePoint (&points)[kPoints], int32_t ctas) {
  for (size_t i = 1; i < kPoints; ++i) {
    if (ctas <= points[i].ctas) {
      const double share = static_cast<double>(ctas - points[i - 1].ctas) /
                           static_cast<double>(points[i].ctas - points[i - 1].ctas);
      return points[i - 1].rate + share * (points[i].rate - points[i - 1].rate);
    }
  }
  return points[kPoints - 1].rate;
}

bool on_cpu(const Machine& machine) {
  return machine.arch == 0;
}

double rate_of_ctas(const Machine& machine, bool window, int32_t max_ctas) {
  if (slow_link(machine)) return 1.0;
  if (max_ctas == 0) return window ? kWindowDefaultRate : 1.0;
  return window ? interpolate(kWindowRate, max_ctas) : interpolate(kPlainRate, max_ctas);
}

double kernel_rate(Kernel kernel, const Machine& machine) {
  switch (kernel) {
    case Kernel::kLibrary:
      return 1.0;
    case Kernel::kSm80:
      return machine.arch >= 90 ? kSm80RateOnHopper : kSm80Rate;
    case Kernel::kSm90Pingpong:
      return kPingpongRate;
    case Kernel::kSm90Cooperative:
      return kCooperativeRate;
  }
  return 1.0;
}

double dtype_rate(DType dtype, const Machine& machine) {
  if (dtype == DType::kFloat64) return on_cpu(machine) ? kFloat64RateOnCpu : kFloat64Rate;
  if (dtype == DType::kFloat32) return on_cpu(machine) ? 1.0 : kFloat32Rate;
  return 1.0;
}

// Tiles computed at the same time. On CPU one, by all cores together.
int32_t tiles_at_once(const Plan& plan, const Machine& machine) {
  if (on_cpu(machine)) return 1;
  const int32_t left = plan.schedule == Schedule::kSequential ? 0 : plan.resources.comm_sms;
  return std::max(1, machine.sm_count - left);
}

double tile_us(const Plan& plan, const Machine& machine) {
  const double flops = 2.0 * plan.tile_m * plan.tile_n * static_cast<double>(plan.problem.k);
  const double units = on_cpu(machine) ? std::max(1, machine.sm_count) : 1;
  return flops / (1e3 * machine.sm_gflops * units * kernel_rate(plan.kernel, machine) *
                  dtype_rate(plan.problem.dtype, machine));
}

double rounds_of(int64_t tiles, int32_t at_once) {
  return static_cast<double>((tiles + at_once - 1) / at_once);
}

double call_us(const Plan& plan, const Machine& machine, int64_t bytes, int32_t max_ctas) {
  if (plan.problem.world_size == 1 || bytes == 0) return 0.0;
  const double gbps = machine.link_gbps * rate_of_ctas(machine, plan.resources.window, max_ctas);
  return machine.link_latency_us + static_cast<double>(bytes) / (1e3 * gbps);
}

// NCCL's CTAs stay outside while a persistent GEMM holds every SM that they would need.
bool waits_for_gemm_end(const Plan& plan, const Machine& machine, const Chunk& chunk) {
  if (plan.kernel == Kernel::kLibrary) return false;
  const int32_t default_ctas = slow_link(machine) ? kDefaultCtasSlow : kDefaultCtas;
  const int32_t ctas = chunk.max_ctas == 0 ? default_ctas : chunk.max_ctas;
  return plan.resources.comm_sms < ctas;
}

}  // namespace

Prediction predict(const Plan& plan, const Machine& machine) {
  Prediction prediction;
  const int64_t element = element_bytes(plan.problem.dtype);
  const int64_t tiles = static_cast<int64_t>(tiles_m(plan)) * tiles_n(plan);
  if (tiles == 0) return prediction;

  const int32_t at_once = tiles_at_once(plan, machine);
  const double per_tile_us = tile_us(plan, machine);
  if (plan.schedule == Schedule::kSequential) {
    prediction.gemm_us = kGemmStartUs + rounds_of(tiles, at_once) * per_tile_us;
    // The collective runs alone, so nothing limits its CTAs.
    prediction.communication_us =
        call_us(plan, machine, plan.problem.m * plan.problem.n * element, /*max_ctas=*/0);
    prediction.total_us = prediction.gemm_us + prediction.communication_us;
    return prediction;
  }

  // The library computes a chunk in one call, with a round of its own that is not full at the end
  // of each; the other kernels take all tiles in one launch. On CPU both are the same.
  const bool call_per_chunk = plan.kernel == Kernel::kLibrary && !on_cpu(machine);
  double gemm_end_us = kGemmStartUs + rounds_of(tiles, at_once) * per_tile_us;
  if (call_per_chunk) {
    gemm_end_us = 0.0;
    for (const Chunk& chunk : plan.chunks) {
      gemm_end_us += kGemmStartUs + rounds_of(chunk.tiles, at_once) * per_tile_us;
    }
  }

  const double wait_us = on_cpu(machine) ? kWaitCpuUs : kWaitUs;
  double chunks_us = 0.0;    // GEMM time up to the chunk's end, for call_per_chunk
  int64_t tiles_before = 0;  // the same in tiles
  double end_us = 0.0;       // of the last communication call
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    const Chunk& chunk = plan.chunks[c];
    tiles_before += chunk.tiles;
    chunks_us += kGemmStartUs + rounds_of(chunk.tiles, at_once) * per_tile_us;
    double ready_us =
        call_per_chunk ? chunks_us : kGemmStartUs + rounds_of(tiles_before, at_once) * per_tile_us;
    if (waits_for_gemm_end(plan, machine, chunk)) ready_us = gemm_end_us;
    const int64_t bytes = chunk_extent(plan, static_cast<int32_t>(c)).count * element;
    const double communication_us = call_us(plan, machine, bytes, chunk.max_ctas);
    prediction.communication_us += communication_us;
    end_us = std::max(ready_us + wait_us, end_us) + communication_us;
    // Copies of earlier chunks run behind the next chunk's call: only the last one shows.
    if (c + 1 == plan.chunks.size() && (plan.resources.window || plan.layout == Layout::kPacked)) {
      const double gbps = on_cpu(machine) ? kCopyCpuGbps : kCopyGbps;
      end_us += kCopyStartUs + static_cast<double>(bytes) / (1e3 * gbps);
    }
  }
  prediction.gemm_us = gemm_end_us;
  prediction.total_us =
      std::max(end_us, gemm_end_us) + (on_cpu(machine) ? kForkJoinCpuUs : kForkJoinUs);
  return prediction;
}

}  // namespace overlap::plan
