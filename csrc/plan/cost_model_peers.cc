// What plans over the peers' memory are expected to cost.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "plan/cost_model.h"
#include "plan/gather_rounds.h"
#include "plan/ring_order.h"

namespace overlap::plan {
namespace {

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
constexpr double kFinalUs =
    12.0;  // of an all-reduce's final tiles, for each peer: tail of stores and copies
constexpr double kOverlapPower = 4.0;    // of the sum of powers of what takes place at a time
constexpr double kGatherUs = 9.7;        // between what has arrived and its GEMM
constexpr double kGatherChunkUs = 6.0;   // of more than one chunk in one launch, each
constexpr double kFirstCopyUs = 9.0;     // before the copies that one launch waits for: host, fork
constexpr double kChunkUs = 14.0;        // of an all-reduce's finished rows: host, wait, copy, SMs
constexpr double kCopyUs = 6.6;          // wait, copy and signal of a chunk
constexpr double kCollectiveRate = 1.3;  // of peer_gbps: sends of a collective in one kernel
constexpr double kWeightGbps = 2500.0;   // at which a GEMM of few rows reads the weight, at most
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
constexpr double kLaunchUs = 10.0;     // of one more GEMM
constexpr double kLocalGbps = 2550.0;  // what it reads and writes on the own device
constexpr double kSlotsGbps = 3300.0;  // the same of what has just been written to a slot

// The framework's GEMM of so many rows.
double library_us(const Plan& plan, int64_t rows, int32_t sms, double per_tile_us) {
  const double rounds = library_tiles(plan, rows) / sms + kLibraryIdleRounds;
  return kLibraryRate * std::max(1.0, rounds) * per_tile_us;
}

// Rows of a GEMM of their own, which takes whole clusters of tiles.
double launch_us(const Plan& plan, int64_t rows, int32_t sms, double per_tile_us) {
  const int64_t grain = int64_t{plan.tile_m} * plan.cluster_m;
  const int64_t tiles = (rows + grain - 1) / grain * plan.cluster_m * tiles_n(plan);
  return kRoundRate * rounds_of(tiles, sms) * per_tile_us;
}

class PeerModel {
 public:
  PeerModel(const Plan& plan, const Machine& machine, double per_tile_us)
      : plan_(plan),
        sms_(std::max(1, machine.sm_count - plan.resources.comm_sms)),
        all_sms_(machine.sm_count),
        per_tile_us_(per_tile_us),
        bytes_per_us_(1e3 * machine.peer_gbps),
        tiles_(static_cast<int64_t>(tiles_m(plan)) * tiles_n(plan)),
        ranks_(plan.problem.world_size) {}

  // The framework's GEMM, and a collective in one kernel.
  Prediction sequential() const {
    const Problem& problem = plan_.problem;
    const bool gathers = plan_.collective == Collective::kAllGather;
    const double piece = gathers ? bytes_of(part_rows(plan_), problem.k)
                                 : static_cast<double>(direct_piece_bytes(plan_));
    const double once_us =
        sent_us((ranks_ - 1) * piece) / kCollectiveRate + local_us((ranks_ + 1) * piece);
    // The sums of an all-reduce's pieces go to everyone.
    const bool twice = problem.op == Op::kGemmAllReduce && direct_in_pieces(plan_);
    Prediction prediction;
    prediction.gemm_us = library_us(plan_, problem.m, all_sms_, per_tile_us_);
    prediction.communication_us = kSequentialUs + (twice ? 2.0 : 1.0) * once_us;
    prediction.total_us = prediction.gemm_us + prediction.communication_us;
    return prediction;
  }

  Prediction direct() const {
    const auto piece = static_cast<double>(direct_piece_bytes(plan_));
    const bool pieces = direct_in_pieces(plan_);
    Prediction prediction;
    prediction.gemm_us = gemm_us(tiles_, all_sms_);
    prediction.communication_us = sent_us((ranks_ - 1) * piece);
    // The own piece comes last, and is stored at home.
    const double share = !pieces ? 1.0 : tiles_ <= all_sms_ ? 1.0 - 1.0 / ranks_ : 0.0;
    prediction.total_us = kDirectUs +
                          std::max(prediction.gemm_us + share * last_round_us(tiles_, all_sms_),
                                   prediction.communication_us) +
                          local_us((ranks_ + 1) * piece, kSlotsGbps);
    if (pieces && plan_.problem.op == Op::kGemmAllReduce) {
      prediction.total_us += kSequentialUs + sent_us((ranks_ - 1) * piece) / kCollectiveRate +
                             local_us(2 * (ranks_ - 1) * piece);
    }
    return prediction;
  }

  Prediction gather() const {
    return gathers_in_one_launch(plan_) ? gather_in_one_launch() : gather_in_launches();
  }

  // Each chunk's tiles as it arrives.
  Prediction gather_in_one_launch() const {
    Prediction prediction;
    const std::vector<int32_t> arriving = gather_arrivals(plan_, tiles_n(plan_));
    const auto flow_us = [&](int64_t tiles) {
      return kRoundRate * static_cast<double>(tiles) / sms_ * per_tile_us_;
    };
    double now_us = kGatherUs + flow_us(arriving[0]);
    double arrived_us = kGatherUs + kFirstCopyUs;
    for (size_t chunk = 0; chunk < plan_.chunks.size(); ++chunk) {
      const double copied_us = chunk_copy_us(static_cast<int32_t>(chunk));
      prediction.communication_us += copied_us;
      arrived_us += copied_us;
      now_us = std::max(now_us, arrived_us) + flow_us(arriving[chunk + 1]);
    }
    prediction.gemm_us = gemm_us(tiles_, sms_);
    prediction.total_us = std::max(now_us, kGatherUs + prediction.gemm_us) +
                          kGatherChunkUs * static_cast<double>(plan_.chunks.size() - 1);
    return prediction;
  }

  Prediction gather_in_launches() const {
    const std::vector<GatherLaunch> launches = gather_launches(plan_, all_sms_);
    Prediction prediction;
    prediction.gemm_us = gemm_us(launches[0].tiles(), launches[0].at_once);
    double now_us = kGatherUs + prediction.gemm_us;
    double arrived_us = 0.0;
    for (size_t chunk = 0; chunk < plan_.chunks.size(); ++chunk) {
      const double copied_us = chunk_copy_us(static_cast<int32_t>(chunk));
      prediction.communication_us += copied_us;
      arrived_us += copied_us;
      const GatherLaunch& launch = launches[chunk + 1];
      const double chunk_us = gemm_us(launch.tiles(), launch.at_once) + kCopyUs / 2.0;
      prediction.gemm_us += chunk_us;
      now_us = std::max(now_us, arrived_us + kGatherUs) + chunk_us;
    }
    prediction.total_us = now_us;
    return prediction;
  }

  // One launch, which stores tiles into the next rank's memory, and an all-reduce's final ones into
  // everyone's; there they are collected beside the GEMM, or copied behind it in chunks.
  Prediction ring() const {
    const bool all_reduces = plan_.problem.op == Op::kGemmAllReduce;
    const double part_bytes = bytes_of(part_rows(plan_), plan_.problem.n);
    Prediction prediction;
    prediction.gemm_us = gemm_us(tiles_, sms_);
    prediction.communication_us = parts_sent() * sent_us(part_bytes);
    const bool low = tiles_m(plan_) / ranks_ <= plan_.cluster_m;
    prediction.total_us =
        kRingUs + (low ? kLowPartUs : 0.0) +
        bands_us(prediction.gemm_us / ranks_, sent_us(part_bytes), all_reduces ? ranks_ - 1 : 0);
    if (!all_reduces) return prediction;
    if (ring_collects(plan_)) {
      prediction.total_us += kFinalUs * (ranks_ - 1);
      return prediction;
    }
    const auto chunks = static_cast<double>(plan_.chunks.size());
    prediction.total_us += kSequentialUs + (chunks > 1 ? kChunkUs * chunks : 0.0) +
                           local_us(2 * (ranks_ - 1) * part_bytes / chunks);
    return prediction;
  }

  // As long as the link takes for the round, if there is room beside all that it carries in a tile's time.
  double spread_us() const {
    const double round_us = last_round_us(tiles_, sms_);
    if (plan_.collective == Collective::kDirect) return std::min(round_us, per_tile_us_ / 2.0);
    const double sent = static_cast<double>(parts_sent()) / ranks_;
    return std::clamp(per_tile_us_ - sent * round_us, 0.0, round_us);
  }

 private:
  // By a ring: partial sums to the next rank, and an all-reduce's finished part to everyone.
  int32_t parts_sent() const {
    return (ranks_ - 1) * (plan_.problem.op == Op::kGemmAllReduce ? 2 : 1);
  }
  double gemm_us(int64_t tiles, int32_t sms) const {
    return kRoundRate * rounds_of(tiles, sms) * per_tile_us_;
  }
  // A ring's bands, one after the other: what the GEMM computes in each, and what it stores into peers'
  // memory, once for each part but those in their last turn. The two hold each other up.
  double bands_us(double part_us, double sent_part_us, int32_t sent_finals) const {
    const int32_t rounds = tiles_m(plan_) / ranks_ / ring_round_rows(plan_);
    const int32_t last_turn = ranks_ - 1;
    double total_us = 0.0;
    for (int32_t band = 0; band < rounds + last_turn; ++band) {
      const RingBand turns = ring_band(ranks_, rounds, band);
      const int32_t count = turns.end_turn - turns.first_turn;
      const int32_t sent = turns.end_turn == ranks_ ? count - 1 + sent_finals : count;
      total_us += std::pow(std::pow(count * part_us / rounds, kOverlapPower) +
                               std::pow(sent * sent_part_us / rounds, kOverlapPower),
                           1.0 / kOverlapPower);
    }
    return total_us;
  }
  // The stores of the last round of tiles, which nothing hides.
  double last_round_us(int64_t tiles, int32_t sms) const {
    return static_cast<double>(std::min<int64_t>(tiles, sms)) *
           sent_us(bytes_of(plan_.tile_m, plan_.tile_n));
  }
  // An all-gather's chunk to every peer.
  double chunk_copy_us(int32_t chunk) const {
    const Rows rows = chunk_rows(plan_, chunk);
    return kCopyUs + sent_us((ranks_ - 1) * bytes_of(rows.end - rows.begin, plan_.problem.k));
  }
  double sent_us(double bytes) const { return bytes / bytes_per_us_; }
  static double local_us(double bytes, double gbps = kLocalGbps) { return bytes / (1e3 * gbps); }
  double bytes_of(int64_t rows, int64_t columns) const {
    return static_cast<double>(rows * columns * element_bytes(plan_.problem.dtype));
  }

  const Plan& plan_;
  const int32_t sms_;
  const int32_t all_sms_;
  const double per_tile_us_;
  const double bytes_per_us_;
  const int64_t tiles_;
  const int32_t ranks_;
};

// An all-to-all of two ranks over NCCL, on one of them.
class PairModel {
 public:
  PairModel(const Plan& plan, const Machine& machine, int32_t rank,
            const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
            int32_t sms_beside)
      : plan_(plan),
        machine_(machine),
        per_tile_us_(tile_us(plan, machine)),
        sms_(std::max(1, machine.sm_count)),
        sms_beside_(sms_beside),
        own_(send_rows[static_cast<size_t>(rank)]),
        sent_(send_rows[static_cast<size_t>(1 - rank)]),
        received_(receive_rows[static_cast<size_t>(1 - rank)]) {}

  // The peer's rows, then the own ones beside the exchange.
  double apart_us() const {
    const int64_t beside = own_rows_beside();
    const double behind_us = beside < own_ ? kLaunchUs + rounds_us(own_ - beside, sms_) : 0.0;
    return rounds_us(sent_, sms_) + kLaunchUs +
           std::max(rounds_us(beside, sms_beside_),
                    wait_us() + kExchangeStartUs + expected_us(kExchangeBesideRate)) +
           behind_us;
  }

  // The framework's GEMM, then the exchange.
  double in_turn_us() const {
    const double start_us = library_us(plan_, own_ + sent_, sms_, per_tile_us_);
    if (slow_link(machine_)) return start_us + kExchangeStartUs + expected_us(kExchangeBesideRate);
    return start_us + kExchangeAloneStartUs + expected_us(kExchangeAloneRate);
  }

  int64_t own_rows_beside() const {
    const int64_t grain = int64_t{plan_.tile_m} * plan_.cluster_m;
    const double exchange_us =
        wait_us() + kExchangeStartUs + message_us(std::max(sent_, received_), kExchangeRate);
    const double rounds = std::ceil(exchange_us / (kRoundRate * per_tile_us_));
    const auto tile_rows = static_cast<int64_t>(std::ceil(rounds * sms_beside_ / tiles_n(plan_)));
    const int64_t rows =
        std::min(own_, (tile_rows + plan_.cluster_m - 1) / plan_.cluster_m * grain);
    const bool saves = rounds_us(rows, sms_beside_) + rounds_us(own_ - rows, sms_) <
                       rounds_us(own_, sms_beside_) - kLaunchUs;
    return saves ? rows : own_;
  }

 private:
  // From when this rank's rows for the peer are computed, until the peer's are.
  double wait_us() const {
    return std::max(0.0, rounds_us(received_, sms_) - rounds_us(sent_, sms_));
  }
  double expected_us(double rate) const {
    const double mean_us = (message_us(sent_, rate) + message_us(received_, rate)) / 2;
    return kLongerMessageShare * message_us(std::max(sent_, received_), rate) +
           (1.0 - kLongerMessageShare) * mean_us;
  }
  double message_us(int64_t rows, double rate) const {
    const int64_t bytes = rows * plan_.problem.n * element_bytes(plan_.problem.dtype);
    return static_cast<double>(bytes) / (1e3 * rate * machine_.link_gbps);
  }
  double rounds_us(int64_t rows, int32_t sms) const {
    return launch_us(plan_, rows, sms, per_tile_us_);
  }

  const Plan& plan_;
  const Machine& machine_;
  const double per_tile_us_;
  const int32_t sms_;
  const int32_t sms_beside_;
  const int64_t own_;  // rows
  const int64_t sent_;
  const int64_t received_;
};

}  // namespace

bool stores_messages(const Plan& plan, const Machine& machine, int32_t rank,
                     const std::vector<int64_t>& send_rows) {
  const Problem& problem = plan.problem;
  const double per_tile_us = tile_us(plan, machine);
  const int32_t sms = std::max(1, machine.sm_count);
  const auto element = static_cast<double>(element_bytes(problem.dtype));
  const double weight_us =
      static_cast<double>(problem.n * problem.k) * element / (1e3 * kWeightGbps);
  int64_t rows = 0;
  double stored_us = -kLaunchUs;  // which is that of one more
  double sent_us = 0.0;
  for (size_t to = 0; to < send_rows.size(); ++to) {
    if (send_rows[to] == 0) continue;
    rows += send_rows[to];
    const double bytes_us =
        static_cast<double>(send_rows[to] * problem.n) * element / (1e3 * machine.peer_gbps);
    const bool own = static_cast<int32_t>(to) == rank;
    // Each launch reads the weight again.
    stored_us += kLaunchUs + std::max({launch_us(plan, send_rows[to], sms, per_tile_us), weight_us,
                                       own ? 0.0 : bytes_us});
    if (!own) sent_us += bytes_us / kCollectiveRate;
  }
  return stored_us < library_us(plan, rows, sms, per_tile_us) + sent_us;
}

int64_t rows_beside_exchange(const Plan& plan, const Machine& machine, int32_t rank,
                             const std::vector<int64_t>& send_rows,
                             const std::vector<int64_t>& receive_rows, int32_t sms_beside) {
  return PairModel(plan, machine, rank, send_rows, receive_rows, sms_beside).own_rows_beside();
}

bool computes_apart(const Plan& plan, const Machine& machine, int32_t rank,
                    const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
                    int32_t sms_beside) {
  const PairModel model(plan, machine, rank, send_rows, receive_rows, sms_beside);
  return kNeededGainApart * model.apart_us() < model.in_turn_us();
}

double store_spread_us(const Plan& plan, const Machine& machine) {
  if (machine.peer_gbps <= 0.0 || machine.sm_gflops <= 0.0) return 0.0;
  return PeerModel(plan, machine, tile_us(plan, machine)).spread_us();
}

Prediction predict_peers(const Plan& plan, const Machine& machine, double per_tile_us) {
  const PeerModel model(plan, machine, per_tile_us);
  if (plan.schedule == Schedule::kSequential) return model.sequential();
  if (plan.collective == Collective::kDirect) return model.direct();
  return plan.collective == Collective::kAllGather ? model.gather() : model.ring();
}

}  // namespace overlap::plan
