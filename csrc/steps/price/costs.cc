#include "steps/price/costs.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace overlap::steps {

using namespace plan;  // whose types these are

namespace {

// The profile's fields of a kernel's rates.
struct KernelRates {
  double Profile::Gemm::* of_16_bits;
  double Profile::Gemm::* of_fp8 = &Profile::Gemm::float8_rate;
  double Profile::Gemm::* of_fp8_rows = &Profile::Gemm::float8_row_rate;
};
using Gemm = Profile::Gemm;
// Rows are kKernels' rows. The library's rate of 16 bits is library_rate_of's.
constexpr std::array<KernelRates, kKernels.size()> kRates = {{
    {nullptr},
    {&Gemm::mma_sync_rate},
    {&Gemm::pingpong_rate, &Gemm::float8_pingpong_rate, &Gemm::float8_pingpong_row_rate},
    {&Gemm::cooperative_rate},
    {&Gemm::pingpong_wide_rate, &Gemm::float8_pingpong_wide_rate,
     &Gemm::float8_pingpong_wide_row_rate},
}};

// The rate of scaled operands on a GPU.
double float8_rate_of(const Plan& plan, const Gemm& gemm) {
  const Problem& problem = plan.problem;
  const KernelRates& rates = kRates[static_cast<size_t>(plan.kernel)];
  const bool exact = !problem.fast_accum || problem.recipe == Recipe::kBlock;
  return gemm.*(problem.recipe == Recipe::kRow ? rates.of_fp8_rows : rates.of_fp8) *
         (exact ? gemm.float8_exact_rate : 1.0);
}

// The rate of the library in 16 bits: its fast kernels read and write 16 bytes at a time.
double library_rate_of(const Problem& problem, const Profile::Gemm& gemm) {
  if (problem.n % 2 != 0 || problem.k % 2 != 0) return gemm.library_odd_rate;
  const int64_t at_once = 16 / element_bytes(problem.dtype);
  const bool aligned = problem.n % at_once == 0 && problem.k % at_once == 0;
  return aligned ? 1.0 : gemm.library_unaligned_rate;
}

// The share of the rate of the machine's library in 16 bits.
double rate_of(const Plan& plan, const Machine& machine) {
  const Profile& profile = *machine.profile;
  const DType dtype = plan.problem.dtype;
  if (is_fp8(dtype) && !on_cpu(machine)) return float8_rate_of(plan, profile.gemm);
  double rate = 1.0;
  if (dtype == DType::kFloat64)
    rate = on_cpu(machine) ? profile.cpu.float64_rate : profile.gemm.float64_rate;
  if (dtype == DType::kFloat32 && !on_cpu(machine)) rate = profile.gemm.float32_rate;
  if (element_bytes(dtype) == 2 && !on_cpu(machine) && plan.kernel == Kernel::kLibrary) {
    rate = library_rate_of(plan.problem, profile.gemm);
  }
  if (plan.kernel == Kernel::kLibrary) return rate;
  double Gemm::* own = kRates[static_cast<size_t>(plan.kernel)].of_16_bits;
  const bool blackwell = machine.arch >= 100 && machine.arch < 120;  // with tcgen05
  if (can(plan.kernel, kAges) && machine.arch == 90) own = &Gemm::mma_sync_on_hopper_rate;
  if (can(plan.kernel, kAges) && blackwell) own = &Gemm::mma_sync_on_blackwell_rate;
  return rate * profile.gemm.*own;
}

// A GEMM takes whole clusters of tiles: as many rows.
int64_t rows_of_clusters(const Plan& plan, int64_t rows) {
  const int64_t grain = int64_t{plan.tile_m} * plan.cluster_m;
  return (rows + grain - 1) / grain * grain;
}

// An all-to-all of two ranks over NCCL, on one of them.
struct Pair {
  Pair(const Plan& for_plan, const Machine& on, int32_t rank, const std::vector<int64_t>& send_rows,
       const std::vector<int64_t>& receive_rows)
      : plan(for_plan),
        machine(on),
        own(send_rows[static_cast<size_t>(rank)]),
        sent(send_rows[static_cast<size_t>(1 - rank)]),
        received(receive_rows[static_cast<size_t>(1 - rank)]) {}

  double bytes(int64_t rows) const {
    return static_cast<double>(rows * plan.problem.n * moved_bytes(plan.problem));
  }
  double rounds_us(int64_t rows, int32_t at_once) const {
    return launch_us(plan, machine, rows, at_once);
  }

  const Plan& plan;
  const Machine& machine;
  const int64_t own;  // rows
  const int64_t sent;
  const int64_t received;
  const int32_t sms = std::max(1, machine.sm_count);
  // From when this rank's rows for the peer are computed, until the peer's are.
  const double wait_us = std::max(0.0, rounds_us(received, sms) - rounds_us(sent, sms));
};

int64_t rows_beside(const Pair& pair, int32_t sms_beside) {
  const Plan& plan = pair.plan;
  const Profile& profile = *pair.machine.profile;
  const double message_us = pair.bytes(std::max(pair.sent, pair.received)) /
                            (1e3 * profile.all_to_all.low_rate * pair.machine.link_gbps);
  const double rounds = std::ceil((pair.wait_us + profile.all_to_all.start_us + message_us) /
                                  (profile.gemm.round_factor * tile_us(plan, pair.machine)));
  const auto tile_rows = static_cast<int64_t>(std::ceil(rounds * sms_beside / tiles_n(plan)));
  const int64_t clusters = (tile_rows + plan.cluster_m - 1) / plan.cluster_m;
  const int64_t rows = std::min(pair.own, clusters * plan.cluster_m * plan.tile_m);
  const bool saves = pair.rounds_us(rows, sms_beside) + pair.rounds_us(pair.own - rows, pair.sms) <
                     pair.rounds_us(pair.own, sms_beside) - profile.host.launch_us;
  return saves ? rows : pair.own;
}

}  // namespace

double fast_link_share(const Machine& machine) {
  const Profile::Link& link = machine.profile->link;
  if (on_cpu(machine) || machine.link_gbps <= link.slow_most_gbps) return 0.0;
  if (machine.link_gbps >= link.fast_least_gbps) return 1.0;
  return std::log(machine.link_gbps / link.slow_most_gbps) /
         std::log(link.fast_least_gbps / link.slow_most_gbps);
}

double between_links(double slow, double fast, double share) {
  if (share <= 0.0) return slow;
  if (share >= 1.0) return fast;
  if (slow <= 0.0 || fast <= 0.0) return slow + share * (fast - slow);
  return slow * std::pow(fast / slow, share);
}

double tile_us(const Plan& plan, const Machine& machine) {
  double flops = 2.0 * plan.tile_m * plan.tile_n * static_cast<double>(plan.problem.k);
  // On CPU tiles that reach beyond the matrix cost what is inside. An all-to-all's plan has no tiles.
  const double tiles = static_cast<double>(tiles_m(plan)) * tiles_n(plan);
  if (on_cpu(machine) && tiles > 0.0) {
    flops = 2.0 * static_cast<double>(plan.problem.m) * static_cast<double>(plan.problem.n) *
            static_cast<double>(plan.problem.k) / tiles;
  }
  const double units = on_cpu(machine) ? std::max(1, machine.sm_count) : 1;
  return flops / (1e3 * machine.sm_gflops * units * rate_of(plan, machine));
}

double library_tiles(const Plan& plan, int64_t rows) {
  const auto along = [](int64_t size, int32_t tile) {
    return std::max(1.0, static_cast<double>(size) / tile);
  };
  return along(rows, plan.tile_m) * along(plan.problem.n, plan.tile_n);
}

double library_us(const Plan& plan, const Machine& machine, int64_t rows, int32_t sms) {
  const Profile::Gemm& gemm = machine.profile->gemm;
  const double rounds = library_tiles(plan, rows) / sms + gemm.library_idle_rounds;
  return gemm.library_factor * std::max(1.0, rounds) * tile_us(plan, machine);
}

double launch_us(const Plan& plan, const Machine& machine, int64_t rows, int32_t sms) {
  const int64_t tiles = rows_of_clusters(plan, rows) / plan.tile_m * tiles_n(plan);
  return machine.profile->gemm.round_factor * rounds_of(tiles, sms) * tile_us(plan, machine);
}

double exchange_us(const Machine& machine, double sent_bytes, double received_bytes, bool beside) {
  const Profile& profile = *machine.profile;
  // With nothing beside it a fast link is faster yet.
  const Profile::AllToAll& calls = profile.all_to_all;
  const double share = beside ? 0.0 : fast_link_share(machine);
  const double rate =
      1e3 * between_links(calls.beside_rate, calls.alone_rate, share) * machine.link_gbps;
  const double mean = (sent_bytes + received_bytes) / 2;
  const double longer = std::max(sent_bytes, received_bytes);
  return between_links(calls.start_us, calls.alone_start_us, share) +
         (calls.longer_message_share * longer + (1.0 - calls.longer_message_share) * mean) / rate;
}

int32_t parts_sent(const Plan& plan) {
  return (plan.problem.world_size - 1) * (plan.problem.traits().all_reduces() ? 2 : 1);
}

double last_round_us(const Plan& plan, const Machine& machine, int64_t tiles, int32_t sms) {
  const int64_t bytes = int64_t{plan.tile_m} * plan.tile_n * moved_bytes(plan.problem);
  return static_cast<double>(std::min<int64_t>(tiles, sms)) *
         (static_cast<double>(bytes) / (1e3 * machine.peer_gbps));
}

double store_spread_us(const Plan& plan, const Machine& machine) {
  if (machine.peer_gbps <= 0.0 || machine.sm_gflops <= 0.0) return 0.0;
  const double per_tile_us = tile_us(plan, machine);
  const bool messages = plan.collective == Collective::kAllToAll;  // whose rows are not known
  const int32_t sms = std::max(1, machine.sm_count - (messages ? 0 : plan.resources.comm_sms));
  const int64_t tiles = messages ? sms : int64_t{tiles_m(plan)} * tiles_n(plan);
  const double round_us = last_round_us(plan, machine, tiles, sms);
  if (plan.collective == Collective::kDirect) return std::min(round_us, per_tile_us / 2.0);
  // As long as the link takes for the round, if there is room beside all that it carries in a tile's time.
  const double sent =
      messages ? 1.0 : static_cast<double>(parts_sent(plan)) / plan.problem.world_size;
  return std::clamp(per_tile_us - sent * round_us, 0.0, round_us);
}

bool stores_messages(const Plan& plan, const Machine& machine, int32_t rank,
                     const std::vector<int64_t>& send_rows) {
  const Profile& profile = *machine.profile;
  const Problem& problem = plan.problem;
  const int32_t sms = std::max(1, machine.sm_count);
  const auto element = static_cast<double>(moved_bytes(problem));
  const double weight_us =
      static_cast<double>(problem.n * problem.k * element_bytes(problem.dtype)) /
      (1e3 * profile.gemm.weight_gbps);
  int64_t rows = 0;
  int64_t whole_rows = 0;                     // of each rank's in whole clusters
  double apart_us = -profile.host.launch_us;  // which is that of one more
  double sent_us = 0.0;
  for (size_t to = 0; to < send_rows.size(); ++to) {
    if (send_rows[to] == 0) continue;
    rows += send_rows[to];
    whole_rows += rows_of_clusters(plan, send_rows[to]);
    const double bytes_us =
        static_cast<double>(send_rows[to] * problem.n) * element / (1e3 * machine.peer_gbps);
    const bool own = static_cast<int32_t>(to) == rank;
    // Each launch reads the weight again.
    apart_us += profile.host.launch_us + std::max({launch_us(plan, machine, send_rows[to], sms),
                                                   weight_us, own ? 0.0 : bytes_us});
    if (!own) sent_us += bytes_us;
  }
  const double in_turn_us =
      library_us(plan, machine, rows, sms) + sent_us / profile.peer.collective_rate;
  if (!plan.resources.one_launch) return apart_us < in_turn_us;
  const double once_us = std::max({launch_us(plan, machine, whole_rows, sms), weight_us, sent_us});
  return profile.all_to_all.needed_gain_once * once_us < in_turn_us;
}

int64_t rows_beside_exchange(const Plan& plan, const Machine& machine, int32_t rank,
                             const std::vector<int64_t>& send_rows,
                             const std::vector<int64_t>& receive_rows, int32_t sms_beside) {
  return rows_beside(Pair(plan, machine, rank, send_rows, receive_rows), sms_beside);
}

bool computes_apart(const Plan& plan, const Machine& machine, int32_t rank,
                    const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
                    int32_t sms_beside) {
  const Profile& profile = *machine.profile;
  const Pair pair(plan, machine, rank, send_rows, receive_rows);
  const double sent = pair.bytes(pair.sent);
  const double received = pair.bytes(pair.received);
  // The peer's rows, then this rank's own ones beside the exchange.
  const int64_t beside = rows_beside(pair, sms_beside);
  const double behind_us = profile.host.launch_us + pair.rounds_us(pair.own - beside, pair.sms);
  const double apart_us = pair.rounds_us(pair.sent, pair.sms) + profile.host.launch_us +
                          std::max(pair.rounds_us(beside, sms_beside),
                                   pair.wait_us + exchange_us(machine, sent, received, true)) +
                          (beside < pair.own ? behind_us : 0.0);
  // The framework's GEMM, then the exchange.
  const double in_turn_us = library_us(plan, machine, pair.own + pair.sent, pair.sms) +
                            exchange_us(machine, sent, received, false);
  return profile.all_to_all.needed_gain_apart * apart_us < in_turn_us;
}

}  // namespace overlap::steps
