// What plans over the peers' memory are expected to cost.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "plan/cost_model.h"

namespace overlap::plan {
namespace {

constexpr double kStartUs = 10.0;      // host and device: until the first GEMM runs
constexpr double kPhaseUs = 8.0;       // launch, last signal of the phase before, idle last round
constexpr double kCopyUs = 9.0;        // wait, copy and signal of a chunk, beyond its bytes
constexpr double kIssueUs = 14.0;      // host: per chunk
constexpr double kStoreRate = 0.90;    // of peer_gbps: stores of a GEMM's epilogue
constexpr double kIdleRounds = 0.5;    // of a launch's last round of tiles
constexpr double kBeside = 1.02;       // the GEMM's time beside communication
constexpr double kLocalGbps = 1500.0;  // copies on the own device

constexpr double kCollectiveUs = 5.0;       // one kernel, beyond its bytes
constexpr double kCollectiveRate = 0.85;    // of peer_gbps: its stores to peers
constexpr double kCollectiveGbps = 2500.0;  // what it reads and writes on the own device

// Adding up, or copying, what has come from all ranks.
double take_us(const Plan& plan, double piece_bytes) {
  return (plan.problem.world_size + 1) * piece_bytes / (1e3 * kCollectiveGbps);
}

}  // namespace

double peer_collective_us(const Plan& plan, const Machine& machine) {
  const int32_t ranks = plan.problem.world_size;
  const bool gathers = plan.collective == Collective::kAllGather;
  const double piece_bytes = gathers ? static_cast<double>(part_rows(plan) * plan.problem.k *
                                                           element_bytes(plan.problem.dtype))
                                     : static_cast<double>(direct_piece_bytes(plan));
  const double once_us = kCollectiveUs +
                         (ranks - 1) * piece_bytes / (1e3 * kCollectiveRate * machine.peer_gbps) +
                         take_us(plan, piece_bytes);
  // An all-reduce in pieces goes on with an all-gather of the sums.
  const bool twice = plan.problem.op == Op::kGemmAllReduce && ranks > 2;
  return twice ? 2.0 * once_us : once_us;
}

Prediction predict_peers(const Plan& plan, const Machine& machine, double per_tile_us) {
  const int32_t parts = row_parts(plan);
  const int32_t at_once = std::max(1, machine.sm_count - plan.resources.comm_sms);
  const auto bytes_of = [&](int64_t rows, int64_t columns) {
    return static_cast<double>(rows * columns * element_bytes(plan.problem.dtype));
  };
  const auto gemm_us = [&](int64_t tiles) {
    const double rounds = static_cast<double>(tiles) / at_once + kIdleRounds;
    return kBeside * std::max(1.0, rounds) * per_tile_us;
  };
  const auto copy_us = [&](double bytes) { return kCopyUs + bytes / (1e3 * machine.peer_gbps); };
  const int64_t tiles = static_cast<int64_t>(tiles_m(plan)) * tiles_n(plan);
  Prediction prediction;

  if (plan.collective == Collective::kDirect) {
    const auto piece_bytes = static_cast<double>(direct_piece_bytes(plan));
    prediction.gemm_us = gemm_us(tiles);
    const double stored_us =
        (plan.problem.world_size - 1) * piece_bytes / (1e3 * kStoreRate * machine.peer_gbps);
    const bool gathers = plan.problem.op == Op::kGemmAllReduce && plan.problem.world_size > 2;
    const double gathered_us = gathers ? peer_collective_us(plan, machine) / 2.0 : 0.0;
    prediction.communication_us = stored_us + gathered_us;
    prediction.total_us = kStartUs + std::max(prediction.gemm_us, stored_us) + kCollectiveUs +
                          take_us(plan, piece_bytes) + gathered_us;
    return prediction;
  }
  if (plan.problem.op == Op::kAllGatherGemm) {
    prediction.gemm_us = gemm_us(tiles / parts);
    double now_us = kStartUs + prediction.gemm_us;
    double arrived_us = kStartUs;
    for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
      const Rows rows = chunk_rows(plan, static_cast<int32_t>(chunk));
      const double sent_us = copy_us((parts - 1) * bytes_of(rows.end - rows.begin, plan.problem.k));
      prediction.communication_us += sent_us;
      arrived_us = std::max(arrived_us, kStartUs + kIssueUs * static_cast<double>(chunk)) + sent_us;
      const double chunk_us = kPhaseUs + gemm_us(plan.chunks[chunk].tiles / parts * (parts - 1));
      prediction.gemm_us += chunk_us;
      now_us = std::max(now_us, arrived_us) + chunk_us;
    }
    prediction.total_us = now_us;
    return prediction;
  }

  // Phases of the ring: each computes a part and stores it into the next rank's memory.
  const double stored_us =
      bytes_of(part_rows(plan), plan.problem.n) / (1e3 * kStoreRate * machine.peer_gbps);
  const double phase_us = gemm_us(tiles / parts);
  prediction.gemm_us = parts * phase_us;
  prediction.communication_us = (parts - 1) * stored_us;
  double now_us = kStartUs + (parts - 1) * (std::max(phase_us, stored_us) + kPhaseUs);
  if (plan.problem.op == Op::kGemmReduceScatter) {
    prediction.total_us = now_us + phase_us;
    return prediction;
  }
  // The last one's chunks go to all peers while later ones are computed.
  double sent_us = now_us;
  double last_bytes = 0.0;
  for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    const Rows rows = chunk_rows(plan, static_cast<int32_t>(chunk));
    last_bytes = bytes_of(rows.end - rows.begin, plan.problem.n);
    now_us += phase_us * static_cast<double>(plan.chunks[chunk].tiles) / static_cast<double>(tiles);
    const double chunk_us = copy_us((parts - 1) * last_bytes);
    prediction.communication_us += chunk_us;
    sent_us = std::max(sent_us, now_us) + chunk_us;
  }
  prediction.total_us = sent_us + kCopyUs + (parts - 1) * last_bytes / (1e3 * kLocalGbps);
  return prediction;
}

}  // namespace overlap::plan
