// What a plan is expected to cost. A model of a few constants, each fitted to one measurement; see
// docs/design.md.
#include "plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "plan/gather_rounds.h"
#include "plan/planner.h"

namespace overlap::plan {
namespace {

// --- GEMM ------------------------------------------------------------------------------------
constexpr double kGemmStartUs = 3.0;  // launch and prologue, before the first tile is under way

// Rate of a kernel, of what the machine's library reaches (Machine::sm_gflops).
constexpr double kPingpongRate = 1.0;
constexpr double kCooperativeRate = 1.0;
// Rings of 12 shapes with wide tiles beside 128 x 128, per round of SMs.
constexpr double kPingpongWideRate = 1.04;
constexpr double kSm80Rate = 0.95;          // on the architectures it was made for
constexpr double kSm80RateOnHopper = 0.60;  // mma.sync reaches no more of wgmma's rate

// Rate of other dtypes, of the 16-bit tensor-core rate. fp32 without TF32, as PyTorch does by
// default.
constexpr double kFloat32Rate = 1.0 / 13.0;
constexpr double kFloat64Rate = 1.0 / 13.0;
constexpr double kFloat64RateOnCpu = 0.5;  // Machine::sm_gflops counts fp32 there

// --- communication on GPUs ---------------------------------------------------------------------
// All-reduce: fitted to 3,000 plans measured on two H200s (7 % root mean square). Reduce-scatter and
// all-gather: to 1,330 and 1,090 (6 % and 4.5 % beside a shape's mean), which set their calls' own
// constants and kBesideGather alone.
constexpr double kWaitUs = 7.0;            // from a chunk's last signal to the start of its call
constexpr double kForkJoinUs = 3.0;        // events that fork and join the side streams
constexpr double kFirstIssueUs = 30.0;     // host: until the first chunk's call is enqueued
constexpr double kIssueUs = 16.0;          // host: per chunk ...
constexpr double kIssueExchangeUs = 22.0;  // ... and with its sum
// A GEMM that leaves SMs loses less than their share: the chip is warm, not the SMs scarce.
constexpr double kFewerSmsExponent = 0.85;
// Larger tiles lose more: reduce-scatters over NCCL beside 8 and 16 CTAs.
constexpr double kFewerSmsExponentLarge = 1.1;
// Bands of less than 4 tile rows share less of the operands in L2.
constexpr double kLowBandRate = 0.95;
constexpr double kBesideCommunication = 1.02;  // the GEMM's time beside communication
constexpr double kBesideGather = 0.95;         // of launches that signal nothing

// What one kind of call costs, relative to the link as Machine measures it with small and large
// plain calls in a row.
struct CallModel {
  double start_us;         // beyond the link's latency, before bytes flow
  double link_rate;        // of link_gbps, all lanes together
  double cta_gbps;         // of one CTA
  double latencies = 1.0;  // link_latency_us that a call takes
};
constexpr CallModel kAloneCall = {9.0, 1.08, 1e9};  // a plain all-reduce that has the GPU to itself
constexpr CallModel kPlainCall = {23.0, 1.15, 15.7};
constexpr CallModel kWindowCall = {16.0, 0.91, 27.9};
// Between more than two ranks a reduction passes each byte on: set by benchmarks on four H200s.
constexpr CallModel kPlainCallOfMany = {23.0, 1.04, 15.0};
constexpr CallModel kWindowCallOfMany = {17.0, 0.80, 20.0};
constexpr CallModel kExchangeCall = {2.0, 1.03, 32.0};
constexpr CallModel kPlainReduceScatter = {6.0, 1.70, 31.0};
constexpr CallModel kWindowReduceScatter = {12.0, 1.30, 27.0};
constexpr CallModel kPlainAllGather = {24.0, 1.25, 30.0};
// Since own rows are staged first: what 15, 29 and 59 MB took beside a GEMM, 51, 99 and 206 us.
constexpr CallModel kWindowAllGather = {3.0, 2.2, 72.0};
// Bytes of a reduce-scatter or an all-gather that has the GPU to itself, of those of an all-reduce
// in the same time: 32 to 512 MiB alone went at 450 GB/s, beside start and latency.
constexpr double kOneWayRate = 1.45;
// Behind PCIe or host memory, fitted to 80 all-reduce plans of two H200s without peer access. Calls
// in a row hide most of the latency; a CTA carries no more than this; and beside more CTAs than fill
// the link the GEMM is slower. Between four ranks it was not.
constexpr CallModel kSlowLinkCall = {0.0, 1.0, 5.1, 0.3};
constexpr double kBesideManyCtas = 1.12;
// Between two ranks, fitted to 30 plans of 19 shapes: the messages of an exchange, which wait for no step of the
// other rank's, and the rate of an all-reduce that has the GPU to itself.
constexpr CallModel kSlowLinkExchangeCall = {0.0, 1.1, 6.0, 1.0};
constexpr double kSlowLinkPairRate = 1.1;

// The last chunk's way from the staging buffer to the output.
constexpr double kCopyStartUs = 4.0;
constexpr double kCopyGbps = 2200.0;
constexpr double kFinishStartUs = 19.0;
constexpr double kFinishGbps = 950.0;
// Sums of an exchange on one of the SMs that GEMM and communication leave; its CTAs find no other before
// the GEMM's end.
constexpr double kSumSmGbps = 10.0;
constexpr int32_t kDefaultCtas = 24;     // what NCCL takes without a limit on a fast link
constexpr int32_t kDefaultCtasSlow = 4;  // and what it needs on a slow one
constexpr double kNeverUs = 1e18;

// On CPU: waking the communication thread, and starting and joining it.
constexpr double kWaitCpuUs = 20.0;
constexpr double kForkJoinCpuUs = 50.0;
// A chunk's call beside the GEMM takes more than one alone: threads of the process group and of the GEMM share the
// cores, and wait for each other's ranks. 1500 x 64 x 64 over gloo, 2 ranks on 2 cores: 0.5 to 5 ms a chunk.
constexpr double kCallCpuUs = 1000.0;
constexpr double kCopyCpuGbps = 5.0;

bool on_cpu(const Machine& machine) {
  return machine.arch == 0;
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
    case Kernel::kSm90PingpongWide:
      return kPingpongWideRate;
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

// Bytes of a chunk's message, over all ranks' parts.
double message_bytes(const Plan& plan, int32_t chunk) {
  return static_cast<double>(chunk_extent(plan, chunk).count) * row_parts(plan.problem) *
         static_cast<double>(element_bytes(plan.problem.dtype));
}

// All tiles on all SMs, at least one round; on CPU one by one, by all cores together.
double full_machine_us(const Machine& machine, double tiles, double per_tile_us) {
  const double rounds = on_cpu(machine) ? tiles : std::max(1.0, tiles / machine.sm_count);
  return rounds * per_tile_us;
}

int32_t ctas_of(const Chunk& chunk, const Machine& machine) {
  if (chunk.max_ctas != 0) return chunk.max_ctas;
  return slow_link(machine) ? kDefaultCtasSlow : kDefaultCtas;
}

// All tiles of one launch on the SMs that are left.
double beside_communication_us(const Plan& plan, const Machine& machine, int64_t tiles,
                               double per_tile_us) {
  const int32_t at_once = tiles_at_once(plan, machine);
  if (on_cpu(machine)) return static_cast<double>(tiles) * per_tile_us;
  const double full_us = std::max(1.0, static_cast<double>(tiles) / machine.sm_count) * per_tile_us;
  const bool low = std::any_of(plan.bands.begin(), plan.bands.end(), [&](const BandRun& run) {
    return run.tile_rows < 4 && tiles_m(plan) >= 8 && run.count > 2;
  });
  const int32_t ctas = plan.resources.lanes * ctas_of(plan.chunks[0], machine);
  const bool many_ctas =
      slow_link(machine) && plan.problem.world_size == 2 && ctas > kDefaultCtasSlow;
  const bool large =
      plan.kernel == Kernel::kSm90Cooperative || plan.kernel == Kernel::kSm90PingpongWide;
  const double exponent = large ? kFewerSmsExponentLarge : kFewerSmsExponent;
  return full_us * kBesideCommunication * (many_ctas ? kBesideManyCtas : 1.0) /
         (low ? kLowBandRate : 1.0) *
         std::pow(static_cast<double>(machine.sm_count) / at_once, exponent);
}

// Rate of the collective's bytes, of that of an all-reduce's.
double one_way_rate(const Plan& plan) {
  const Collective collective = plan.collective;
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather
             ? kOneWayRate
             : 1.0;
}

// A collective that has the machine to itself.
double alone_us(const Plan& plan, const Machine& machine) {
  const Problem& problem = plan.problem;
  const int64_t width = problem.op == Op::kAllGatherGemm ? problem.k : problem.n;
  const int64_t bytes = problem.m * width * element_bytes(problem.dtype);
  if (problem.world_size == 1 || bytes == 0) return 0.0;
  const bool pair = problem.op == Op::kGemmAllReduce && problem.world_size == 2 && !on_cpu(machine);
  const double slow_rate = pair ? kSlowLinkPairRate : kSlowLinkCall.link_rate;
  const double rate = (slow_link(machine) ? slow_rate : kAloneCall.link_rate) * one_way_rate(plan);
  const double start_us = on_cpu(machine) ? 0.0 : kAloneCall.start_us;
  return start_us + machine.link_latency_us +
         static_cast<double>(bytes) / (1e3 * machine.link_gbps * rate);
}

CallModel call_model(const Plan& plan, const Machine& machine) {
  if (slow_link(machine)) {
    if (plan.collective == Collective::kExchange) return kSlowLinkExchangeCall;
    CallModel model = kSlowLinkCall;
    model.link_rate *= one_way_rate(plan);
    model.cta_gbps *= one_way_rate(plan);
    return model;
  }
  const bool many = plan.problem.world_size > 2;
  if (plan.collective == Collective::kReduceScatter) {
    return plan.resources.window ? kWindowReduceScatter : kPlainReduceScatter;
  }
  if (plan.collective == Collective::kAllGather) {
    return plan.resources.window ? kWindowAllGather : kPlainAllGather;
  }
  if (plan.collective == Collective::kExchange) return kExchangeCall;
  if (plan.resources.window) return many ? kWindowCallOfMany : kWindowCall;
  return many ? kPlainCallOfMany : kPlainCall;
}

// NCCL's CTAs stay outside while a persistent GEMM holds every SM that they would need.
bool waits_for_gemm_end(const Plan& plan, const Machine& machine, const Chunk& chunk) {
  if (plan.kernel == Kernel::kLibrary) return false;
  return plan.resources.comm_sms < ctas_of(chunk, machine) * plan.resources.lanes;
}

// An all-gather's chunk: this rank's rows on their way to the staging buffer.
double own_rows_us(const Plan& plan, const Machine& machine, int32_t chunk) {
  if (plan.collective != Collective::kAllGather) return 0.0;
  const double bytes = message_bytes(plan, chunk) / row_parts(plan.problem);
  return on_cpu(machine) ? bytes / (1e3 * kCopyCpuGbps) : kCopyStartUs + bytes / (1e3 * kCopyGbps);
}

// Communication of chunks that become ready at `ready_us`: `lanes` calls at a time, each first
// starts and then shares the link with the others. Returns when each ends; adds the calls' times to
// `busy_us`.
std::vector<double> communicate_us(const Plan& plan, const Machine& machine,
                                   const std::vector<double>& ready_us, double* busy_us) {
  struct Call {
    size_t chunk = 0;
    double flows_at_us = 0.0;  // start over, bytes flow
    double began_us = 0.0;
    double bytes = 0.0;
    bool active = false;
  };
  const CallModel model = call_model(plan, machine);
  const double link = machine.link_gbps * model.link_rate * 1e3;
  const double cta = model.cta_gbps * 1e3;
  const double start_us = model.start_us + model.latencies * machine.link_latency_us;
  const double chunk_issue_us =
      plan.collective == Collective::kExchange ? kIssueExchangeUs : kIssueUs;
  const auto begin = [&](size_t chunk, double lane_free_us) {
    Call call;
    if (chunk >= ready_us.size()) return call;
    const double issued_us = kFirstIssueUs + chunk_issue_us * static_cast<double>(chunk);
    call.chunk = chunk;
    call.began_us = std::max({ready_us[chunk], lane_free_us, issued_us});
    call.flows_at_us = call.began_us + start_us;
    call.bytes = message_bytes(plan, static_cast<int32_t>(chunk));
    call.active = true;
    return call;
  };

  const size_t lanes = static_cast<size_t>(plan.resources.lanes);
  std::vector<Call> calls;
  for (size_t lane = 0; lane < lanes; ++lane) calls.push_back(begin(lane, 0.0));
  double now_us = 0.0;
  std::vector<double> end_us(ready_us.size());
  while (true) {
    double flowing = 0.0;
    for (const Call& call : calls) flowing += call.active && call.flows_at_us <= now_us;
    const auto rate = [&](const Call& call) {
      return std::min(ctas_of(plan.chunks[call.chunk], machine) * cta, link / flowing);
    };
    // The next start of a flow, or end of a call.
    double next_us = kNeverUs;
    Call* next = nullptr;
    for (Call& call : calls) {
      if (!call.active) continue;
      const double at_us =
          call.flows_at_us > now_us ? call.flows_at_us : now_us + call.bytes / rate(call);
      if (at_us < next_us) {
        next_us = at_us;
        next = &call;
      }
    }
    if (next == nullptr) return end_us;
    const bool ends = next->flows_at_us <= now_us;
    for (Call& call : calls) {
      if (call.active && call.flows_at_us <= now_us) {
        call.bytes -= (next_us - now_us) * rate(call);
      }
    }
    now_us = next_us;
    if (ends) {
      end_us[next->chunk] = now_us;
      *busy_us += now_us - next->began_us;
      *next = begin(next->chunk + lanes, now_us);
    }
  }
}

// The same on CPU: one call after the other.
std::vector<double> communicate_cpu_us(const Plan& plan, const Machine& machine,
                                       const std::vector<double>& ready_us, double* busy_us) {
  std::vector<double> end_us;
  for (size_t chunk = 0; chunk < ready_us.size(); ++chunk) {
    const double call_us =
        kCallCpuUs + machine.link_latency_us +
        message_bytes(plan, static_cast<int32_t>(chunk)) / (1e3 * machine.link_gbps);
    *busy_us += call_us;
    const double begin_us = std::max(ready_us[chunk], end_us.empty() ? 0.0 : end_us.back()) +
                            own_rows_us(plan, machine, static_cast<int32_t>(chunk));
    end_us.push_back(begin_us + call_us);
  }
  return end_us;
}

// Communication before computation: the own rows' tiles first, then chunk after chunk, as they
// arrive.
Prediction predict_consume(const Plan& plan, const Machine& machine, double per_tile_us) {
  const bool cpu = on_cpu(machine);
  const std::vector<GatherLaunch> launches = gather_launches(plan, machine.sm_count);
  const auto launch_us = [&](const GatherLaunch& launch) {
    if (cpu) return static_cast<double>(launch.tiles()) * per_tile_us;
    if (launch.tiles() == 0) return 0.0;
    const double share = static_cast<double>(launch.at_once) / machine.sm_count;
    return kGemmStartUs + rounds_of(launch.tiles(), launch.at_once) * per_tile_us * kBesideGather *
                              std::pow(share, 1.0 - kFewerSmsExponent);
  };
  const double event_us = cpu ? 0.0 : kForkJoinUs;
  Prediction prediction;
  // On GPUs all of this rank's rows are copied before anything else.
  double start_us = event_us;
  for (size_t chunk = 0; chunk < plan.chunks.size() && !cpu; ++chunk) {
    start_us += own_rows_us(plan, machine, static_cast<int32_t>(chunk));
  }
  const std::vector<double> ready_us(plan.chunks.size(), cpu ? kWaitCpuUs : start_us);
  const std::vector<double> arrived_us =
      cpu ? communicate_cpu_us(plan, machine, ready_us, &prediction.communication_us)
          : communicate_us(plan, machine, ready_us, &prediction.communication_us);
  prediction.gemm_us = launch_us(launches[0]);
  // The host enqueues all communication between the first launch and the others.
  const double issued_us =
      cpu ? 0.0 : kFirstIssueUs + kIssueUs * static_cast<double>(plan.chunks.size());
  double now_us = std::max(start_us + prediction.gemm_us, issued_us);
  for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    const double chunk_us = launch_us(launches[chunk + 1]);
    prediction.gemm_us += chunk_us;
    now_us = std::max(now_us, arrived_us[chunk] + event_us) + chunk_us;
  }
  prediction.total_us = now_us + (cpu ? kForkJoinCpuUs : kForkJoinUs);
  return prediction;
}

// The last chunk's unpacking or copy, which nothing hides.
double finish_us(const Plan& plan, const Machine& machine) {
  const int32_t last = static_cast<int32_t>(plan.chunks.size()) - 1;
  const double bytes =
      static_cast<double>(chunk_extent(plan, last).count * element_bytes(plan.problem.dtype));
  if (plan.layout == Layout::kPacked) {
    return on_cpu(machine) ? bytes / (1e3 * kCopyCpuGbps)
                           : kFinishStartUs + bytes / (1e3 * kFinishGbps);
  }
  return plan.resources.window ? kCopyStartUs + bytes / (1e3 * kCopyGbps) : 0.0;
}

// When the sums of chunks that have been exchanged at `ends_us` are done: chunk after chunk, on what SMs the
// GEMM and communication leave, and after the GEMM on all.
double summed_us(const Plan& plan, const std::vector<double>& ends_us, double gemm_us) {
  std::vector<double> bytes;
  double all_bytes = 0.0;
  for (size_t chunk = 0; chunk < ends_us.size(); ++chunk) {
    bytes.push_back(message_bytes(plan, static_cast<int32_t>(chunk)));
    all_bytes += bytes.back();
  }
  const double busy = all_bytes / (1e3 * kExchangeCall.cta_gbps * gemm_us);
  const double left = std::max(0.0, plan.resources.comm_sms - busy);
  const double beside = 1e3 * kSumSmGbps * left;  // bytes per us
  double now_us = 0.0;
  for (size_t chunk = 0; chunk < ends_us.size(); ++chunk) {
    now_us = std::max(now_us, ends_us[chunk]);
    const double until_us = std::max(now_us, gemm_us);
    if (bytes[chunk] <= (until_us - now_us) * beside) {
      now_us += bytes[chunk] / beside;
    } else {
      now_us = until_us + (bytes[chunk] - (until_us - now_us) * beside) / (1e3 * kFinishGbps);
    }
  }
  return now_us + kFinishStartUs;
}

}  // namespace

double tile_us(const Plan& plan, const Machine& machine) {
  double flops = 2.0 * plan.tile_m * plan.tile_n * static_cast<double>(plan.problem.k);
  // On CPU tiles that reach beyond the matrix cost what is inside. An all-to-all's plan has no tiles.
  const double tiles = static_cast<double>(tiles_m(plan)) * tiles_n(plan);
  if (on_cpu(machine) && tiles > 0.0) {
    flops = 2.0 * static_cast<double>(plan.problem.m) * static_cast<double>(plan.problem.n) *
            static_cast<double>(plan.problem.k) / tiles;
  }
  const double units = on_cpu(machine) ? std::max(1, machine.sm_count) : 1;
  return flops / (1e3 * machine.sm_gflops * units * kernel_rate(plan.kernel, machine) *
                  dtype_rate(plan.problem.dtype, machine));
}

Prediction predict(const Plan& plan, const Machine& machine) {
  Prediction prediction;
  const int64_t tiles = static_cast<int64_t>(tiles_m(plan)) * tiles_n(plan);
  if (tiles == 0) return prediction;

  // A machine that nobody measured: no plan is better than another.
  const bool communicates = plan.problem.world_size > 1;
  if (machine.sm_count <= 0 || machine.sm_gflops <= 0.0 ||
      (communicates && machine.link_gbps <= 0.0)) {
    prediction.total_us = std::numeric_limits<double>::infinity();
    return prediction;
  }
  const double per_tile_us = tile_us(plan, machine);
  if (over_peers(plan)) return predict_peers(plan, machine, per_tile_us);
  if (plan.schedule == Schedule::kSequential) {
    const double work =
        on_cpu(machine) ? static_cast<double>(tiles) : library_tiles(plan, plan.problem.m);
    prediction.gemm_us = kGemmStartUs + full_machine_us(machine, work, per_tile_us);
    prediction.communication_us = alone_us(plan, machine);
    prediction.total_us = prediction.gemm_us + prediction.communication_us;
    return prediction;
  }
  if (plan.collective == Collective::kAllGather) {
    return predict_consume(plan, machine, per_tile_us);
  }
  const bool cpu = on_cpu(machine);
  // The library computes a chunk in one call, with a round of its own that is not full at the end
  // of each; the other kernels take all tiles in one launch. On CPU both are the same.
  const bool call_per_chunk = plan.kernel == Kernel::kLibrary && !cpu;
  std::vector<double> computed_us;
  int64_t tiles_before = 0;
  double gemm_us = 0.0;
  const double all_us = beside_communication_us(plan, machine, tiles, per_tile_us);
  for (const Chunk& chunk : plan.chunks) {
    tiles_before += chunk.tiles;
    gemm_us = call_per_chunk
                  ? gemm_us + kGemmStartUs +
                        rounds_of(chunk.tiles, tiles_at_once(plan, machine)) * per_tile_us
                  : kGemmStartUs +
                        all_us * static_cast<double>(tiles_before) / static_cast<double>(tiles);
    computed_us.push_back(gemm_us);
  }
  prediction.gemm_us = gemm_us;
  std::vector<double> ready_us;
  for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    const bool late = !cpu && waits_for_gemm_end(plan, machine, plan.chunks[chunk]);
    ready_us.push_back((late ? gemm_us : computed_us[chunk]) + (cpu ? kWaitCpuUs : kWaitUs));
  }
  double finished_us = 0.0;
  if (communicates) {
    const std::vector<double> ends =
        cpu ? communicate_cpu_us(plan, machine, ready_us, &prediction.communication_us)
            : communicate_us(plan, machine, ready_us, &prediction.communication_us);
    finished_us = plan.collective == Collective::kExchange && !cpu && !slow_link(machine)
                      ? summed_us(plan, ends, gemm_us)
                      : *std::max_element(ends.begin(), ends.end()) + finish_us(plan, machine);
  }
  prediction.total_us = std::max(finished_us, gemm_us) + (cpu ? kForkJoinCpuUs : kForkJoinUs);
  return prediction;
}

}  // namespace overlap::plan
