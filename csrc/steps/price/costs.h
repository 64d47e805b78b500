// The times of work on a machine: single GEMMs and exchanges, in microseconds, by the machine's
// profile; see docs/internals.md. steps/price/price.h walks a plan's steps with them.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace overlap::steps {

inline bool on_cpu(const plan::Machine& machine) {
  return machine.arch == 0;
}

// This link's place between the profile's two kinds of links: 0 for slow ones, 1 for fast ones,
// between them by its logarithm.
double fast_link_share(const plan::Machine& machine);

inline bool slow_link(const plan::Machine& machine) {
  return fast_link_share(machine) < 0.5;
}

// A number of slow links and of fast ones, for a link between them. Rates in their logarithms; exact at both ends.
double between_links(double slow, double fast, double share);

// Rounds of tiles, the last one whether full or not.
inline double rounds_of(int64_t tiles, int32_t at_once) {
  return static_cast<double>((tiles + at_once - 1) / at_once);
}

// Time of one tile on an SM; on CPU on all cores.
double tile_us(const plan::Plan& plan, const plan::Machine& machine);

// Tiles of the framework's GEMM as work: it takes other tiles where these would reach beyond the matrix. (That of
// 1026 x 28672 x 4096 runs at the rate of whole tiles, and has a ninth less to do than nine rows of them.)
double library_tiles(const plan::Plan& plan, int64_t rows);

// The framework's GEMM of `rows` rows, where nothing is beside it over peers or in an all-to-all.
double library_us(const plan::Plan& plan, const plan::Machine& machine, int64_t rows, int32_t sms);

// Rows of a GEMM of their own, which takes whole clusters of tiles.
double launch_us(const plan::Plan& plan, const plan::Machine& machine, int64_t rows, int32_t sms);

// An exchange of two ranks over NCCL, once both are there, of these bytes each way.
double exchange_us(const plan::Machine& machine, double sent_bytes, double received_bytes,
                   bool beside);

// The parts that a rank's GEMM sends its peers by a ring: partial sums to the next rank, and an
// all-reduce's finished part to everyone.
int32_t parts_sent(const plan::Plan& plan);

// The stores of the last round of a GEMM's tiles into peers' memory, which nothing hides.
double last_round_us(const plan::Plan& plan, const plan::Machine& machine, int64_t tiles,
                     int32_t sms);

// Plans over peers whose GEMM stores into their memory: over how long a round of its tiles should leave,
// CTA after CTA, in microseconds. Stored at once, they fill the way to the link, and the loads of the next round,
// which share it, wait.
double store_spread_us(const plan::Plan& plan, const plan::Machine& machine);

// gemm_alltoall over peers, on one rank: whether its GEMM is better launched once for each rank's rows, or, where the
// plan wants that, once for all, storing them where they go, than the framework's for all, with the rows sent after it.
bool stores_messages(const plan::Plan& plan, const plan::Machine& machine, int32_t rank,
                     const std::vector<int64_t>& send_rows);

// For an all-to-all of two ranks over NCCL: how many of this rank's own rows to compute beside the
// exchange, on `sms_beside`; the others come after its expected end, on all SMs. All of them if
// that saves nothing.
int64_t rows_beside_exchange(const plan::Plan& plan, const plan::Machine& machine, int32_t rank,
                             const std::vector<int64_t>& send_rows,
                             const std::vector<int64_t>& receive_rows, int32_t sms_beside);

// The same on one rank: true if the peer's rows are better computed first and exchanged beside the
// own ones, in launches of their own, than all by the framework's GEMM and exchanged after it.
bool computes_apart(const plan::Plan& plan, const plan::Machine& machine, int32_t rank,
                    const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
                    int32_t sms_beside);

}  // namespace overlap::steps
