// The planner: a pure function from problem and machine to plan. Candidates, a cost model, the
// smallest time.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace overlap::plan {

// Tile shape and cluster of a kernel.
struct KernelShape {
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  int32_t cluster_m = 1;
};
KernelShape kernel_shape(Kernel kernel, bool on_cpu);

// What the cost model expects of a plan; times in microseconds.
struct Prediction {
  double gemm_us = 0.0;           // the GEMM beside communication
  double communication_us = 0.0;  // the sum of the communication calls
  double total_us = 0.0;          // the whole op
};

// The plan must be valid.
Prediction predict(const Plan& plan, const Machine& machine);

// GEMM, then one collective.
Plan make_sequential(const Problem& problem, const Machine& machine);

// The templates below make overlapped plans, valid ones: they throw as validate does. Plans over
// gloo are CPU plans. `shape` replaces the kernel's own tile shape where its tile_m is not 0; only
// kLibrary takes any.

// Row panels: `chunk_rows_of_tiles` are the chunks' heights in tile rows, top to bottom (they must
// sum up to the tile grid's height, or to that of one part: such a chunk holds as many rows of each
// part), each cut into bands of at most `band_rows` tile rows.
Plan make_row_panels(const Problem& problem, Kernel kernel,
                     const std::vector<int32_t>& chunk_rows_of_tiles, int32_t band_rows,
                     const Resources& resources, int32_t max_ctas,
                     Transport transport = Transport::kNccl, const KernelShape& shape = {});

// Packed tiles, cut anywhere: `chunk_tiles` sum up to the number of tiles.
Plan make_packed(const Problem& problem, Kernel kernel, const std::vector<int32_t>& chunk_tiles,
                 int32_t band_rows, const Resources& resources, int32_t max_ctas,
                 Transport transport = Transport::kNccl, const KernelShape& shape = {});

// Over peers in one step: reductions are direct, from the kernel's own stores, or with kLibrary from
// one kernel after its GEMM; an all-gather, with kLibrary, is one kernel before it.
Plan make_direct(const Problem& problem, Kernel kernel);

// gemm_alltoall: kernel, resources and transport of what is sent. In how many pieces follows, pair by
// pair, from the rows that the two ranks exchange. Over peers `max_ctas` is that of long messages, which
// travel by NCCL.
Plan make_all_to_all(const Problem& problem, Kernel kernel, const Resources& resources,
                     int32_t max_ctas, Transport transport = Transport::kNccl);

// Reductions over peers by a GEMM that stores into their memory: over how long a round of its tiles should leave,
// CTA after CTA, in microseconds. Stored at once, they fill the way to the link, and the loads of the next round,
// which share it, wait.
double store_spread_us(const Plan& plan, const Machine& machine);

// gemm_alltoall over peers, on one rank: whether its GEMM is better launched once for each rank's rows,
// storing them where they go, than the framework's once for all, with the rows sent after it.
bool stores_messages(const Plan& plan, const Machine& machine, int32_t rank,
                     const std::vector<int64_t>& send_rows);

// Of an all-to-all of two ranks over NCCL: how many of the own rows to compute beside the exchange, on
// `sms_beside`; the others come behind its expected end, on all SMs. All of them if that saves nothing.
int64_t rows_beside_exchange(const Plan& plan, const Machine& machine, int32_t rank,
                             const std::vector<int64_t>& send_rows,
                             const std::vector<int64_t>& receive_rows, int32_t sms_beside);

// Of the same, on one rank: whether the peer's rows are better computed first and exchanged beside the own
// ones, in launches of their own, than all by the framework's GEMM and exchanged after it.
bool computes_apart(const Plan& plan, const Machine& machine, int32_t rank,
                    const std::vector<int64_t>& send_rows, const std::vector<int64_t>& receive_rows,
                    int32_t sms_beside);

// All candidates that the planner weighs, the sequential plan first.
std::vector<Plan> candidates(const Problem& problem, const Machine& machine);

// The candidate with the smallest predicted time; sequential unless overlap is predicted to win
// clearly.
Plan make_plan(const Problem& problem, const Machine& machine);

}  // namespace overlap::plan
