// What work takes on a machine: the cost model's constants, each fitted to measurements, and the times of single GEMMs;
// see docs/design.md. steps/price.h walks a plan's steps with them. Times are in microseconds, rates in GB/s.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace overlap::steps {

namespace costs {

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
constexpr double kWaitUs = 7.0;         // from a chunk's last signal to the start of its call
constexpr double kForkJoinUs = 3.0;     // events that fork and join the side streams
constexpr double kFirstIssueUs = 30.0;  // host: until the first chunk's call is enqueued
constexpr double kIssueUs = 16.0;       // host: per chunk ...
constexpr double kIssueSumUs = 6.0;     // ... and its sum
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
// A plain all-reduce that has the GPU to itself.
constexpr CallModel kAloneCall = {9.0, 1.08, 1e9};
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

// The last chunk's way from the staging buffer to the output. Those before it hide beside communication.
constexpr double kCopyStartUs = 4.0;
constexpr double kCopyGbps = 2200.0;
constexpr double kFinishStartUs = 19.0;
constexpr double kFinishGbps = 950.0;
// Sums of an exchange on one of the SMs that GEMM and communication leave; its CTAs find no other before
// the GEMM's end.
constexpr double kSumSmGbps = 10.0;
constexpr int32_t kDefaultCtas = 24;     // what NCCL takes without a limit on a fast link
constexpr int32_t kDefaultCtasSlow = 4;  // and what it needs on a slow one

// On CPU: waking the communication thread, and starting and joining it.
constexpr double kWaitCpuUs = 20.0;
constexpr double kForkJoinCpuUs = 50.0;
// A chunk's call beside the GEMM takes more than one alone: threads of the process group and of the GEMM share the
// cores, and wait for each other's ranks. 1500 x 64 x 64 over gloo, 2 ranks on 2 cores: 0.5 to 5 ms a chunk.
constexpr double kCallCpuUs = 1000.0;
constexpr double kCopyCpuGbps = 5.0;

// --- over peers ----------------------------------------------------------------------------------
// Fitted to 168 times of plans on two H200s, M = 512 to 16384, in graphs and in a row (5 % root mean
// square; the plan that it picks needs 0.7 % more than the best one).
constexpr double kRoundRate = 1.035;        // of a tile's time: a round of tiles, all SMs together
constexpr double kLibraryRate = 1.02;       // the same of the framework's GEMM
constexpr double kLibraryIdleRounds = 0.3;  // which takes smaller tiles at the end
constexpr double kSequentialUs = 5.2;       // starts and signals, beyond what follows
// Of 96 times of rings and direct plans in graphs, M = 512 to 2048, on the same GPUs: the plan that they pick needs
// 0.3 % more.
constexpr double kDirectUs = 13.0;
constexpr double kRingUs = 13.5;
// Of parts of one cluster's tile rows, whose phases are computed at the same time.
constexpr double kLowPartUs = 14.0;
// Of an all-reduce's final tiles, for each peer: tail of stores and copies.
constexpr double kFinalUs = 12.0;
constexpr double kOverlapPower = 4.0;    // of the sum of powers of what takes place at a time
constexpr double kGatherUs = 9.7;        // between what has arrived and its GEMM
constexpr double kGatherChunkUs = 6.0;   // of more than one chunk in one launch, each
constexpr double kFirstCopyUs = 9.0;     // before the copies that one launch waits for: host, fork
constexpr double kCopyUs = 6.6;          // wait, copy and signal of a chunk
constexpr double kCollectiveRate = 1.3;  // of peer_gbps: sends of a collective in one kernel
constexpr double kLocalGbps = 2550.0;    // what it reads and writes on the own device
constexpr double kSlotsGbps = 3300.0;    // the same of what has just been written to a slot

// --- all-to-alls -----------------------------------------------------------------------------------
constexpr double kLaunchUs = 10.0;      // of one more GEMM
constexpr double kWeightGbps = 2500.0;  // at which a GEMM of few rows reads the weight, at most
// Of the link's rate: an exchange of two ranks over NCCL beside a GEMM, of 45 to 360 MB; the slower end, as what
// is launched on all SMs before its end waits for it.
constexpr double kExchangeRate = 0.7;
constexpr double kExchangeStartUs = 30.0;
// What to expect of it beside a GEMM, and of one with nothing beside it, of 3 to 220 MB; where one rank sends more
// than the other, a link that goes one way only is faster.
constexpr double kExchangeBesideRate = 1.02;
constexpr double kExchangeAloneRate = 1.12;
constexpr double kExchangeAloneStartUs = 15.0;
constexpr double kLongerMessageShare = 0.55;
// Of 40 all-to-alls those that this model sees gain more than 0.95x by launches apart on both ranks gained 1.04x to
// 1.42x, the others 0.58x to 1.07x.
constexpr double kNeededGainApart = 0.95;

}  // namespace costs

inline bool on_cpu(const plan::Machine& machine) {
  return machine.arch == 0;
}

// GB/s: below it, as over PCIe or host memory, a few CTAs fill the link.
constexpr double kSlowLinkGbps = 60.0;

inline bool slow_link(const plan::Machine& machine) {
  return on_cpu(machine) || machine.link_gbps < kSlowLinkGbps;
}

// Rounds of tiles, the last one whether full or not.
inline double rounds_of(int64_t tiles, int32_t at_once) {
  return static_cast<double>((tiles + at_once - 1) / at_once);
}

// Time of one tile on an SM; on CPU on all cores.
double tile_us(const plan::Plan& plan, const plan::Machine& machine);

// Tiles of the framework's GEMM as work: it takes other tiles where these would reach beyond the matrix. (That of
// 1026 x 28672 x 4096 runs at the rate of whole tiles, and has a ninth less to do than nine rows of them.)
double library_tiles(const plan::Plan& plan, int64_t rows);

// The framework's GEMM of so many rows, where nothing is beside it over peers or in an all-to-all.
double library_us(const plan::Plan& plan, int64_t rows, int32_t sms, double per_tile_us);

// Rows of a GEMM of their own, which takes whole clusters of tiles.
double launch_us(const plan::Plan& plan, int64_t rows, int32_t sms, double per_tile_us);

// An exchange of two ranks over NCCL, once both are there, of so many bytes each way.
double exchange_us(const plan::Machine& machine, double sent_bytes, double received_bytes,
                   bool beside);

// What a rank's GEMM sends its peers by a ring: partial sums to the next rank, and an all-reduce's finished part to
// everyone; in parts.
int32_t parts_sent(const plan::Plan& plan);

// The stores of the last round of a GEMM's tiles into peers' memory, which nothing hides.
double last_round_us(const plan::Plan& plan, const plan::Machine& machine, int64_t tiles,
                     int32_t sms);

// Reductions over peers by a GEMM that stores into their memory: over how long a round of its tiles should leave,
// CTA after CTA, in microseconds. Stored at once, they fill the way to the link, and the loads of the next round,
// which share it, wait.
double store_spread_us(const plan::Plan& plan, const plan::Machine& machine);

// The same of messages to the peers, of which every tile is stored there.
double message_spread_us(const plan::Plan& plan, const plan::Machine& machine);

// gemm_alltoall over peers, on one rank: whether its GEMM is better launched once for each rank's rows,
// storing them where they go, than the framework's once for all, with the rows sent after it.
bool stores_messages(const plan::Plan& plan, const plan::Machine& machine, int32_t rank,
                     const std::vector<int64_t>& send_rows);

// Of an all-to-all of two ranks over NCCL: how many of the own rows to compute beside the exchange, on
// `sms_beside`; the others come behind its expected end, on all SMs. All of them if that saves nothing.
int64_t rows_beside_exchange(const plan::Plan& plan, const plan::Machine& machine, int32_t rank,
                             const std::vector<int64_t>& send_rows,
                             const std::vector<int64_t>& receive_rows, int32_t sms_beside);

// Of the same, on one rank: whether the peer's rows are better computed first and exchanged beside the own
// ones, in launches of their own, than all by the framework's GEMM and exchanged after it.
bool computes_apart(const plan::Plan& plan, const plan::Machine& machine, int32_t rank,
                    const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
                    int32_t sms_beside);

}  // namespace overlap::steps
