// All-to-alls over NCCL and over peers share this: the rows of each rank, their places, and the
// GEMM of some of them.
#pragma once

#include <algorithm>
#include <vector>

#include "steps/lower/families.h"

namespace overlap::steps {

class AllToAllSteps : protected Family {
 protected:
  static constexpr int32_t kStepsOfRank = 8;
  static constexpr int32_t kOrdersOfRank = 4;

  explicit AllToAllSteps(const RankCall& call)
      : Family(call),
        send_begin_(offsets(variant_.send_rows)),
        receive_begin_(offsets(variant_.receive_rows)) {
    // Made anew where rows change from call to call: in one piece.
    list_.made.steps.reserve(static_cast<size_t>(kStepsOfRank * ranks_));
    list_.made.orders.reserve(static_cast<size_t>(kOrdersOfRank * ranks_));
  }

  int64_t send_rows(int32_t rank) const { return variant_.send_rows[at(rank)]; }
  int64_t receive_rows(int32_t rank) const { return variant_.receive_rows[at(rank)]; }

  // The rows for `peer` in the product.
  plan::Rows rows_for(int32_t peer) const {
    return {send_begin_[at(peer)], send_begin_[at(peer) + 1]};
  }
  Where product_row(int64_t row) const { return {Buffer::kProduct, row * row_bytes_}; }
  Where output_row(int64_t row) const { return {Buffer::kOutput, row * row_bytes_}; }
  // Where the rows from `peer` go.
  Where output_of(int32_t peer) const { return output_row(receive_begin_[at(peer)]); }

  // Begins with all rows, by the framework's GEMM, which waits for no peer.
  void begin_with_all() {
    const plan::Rows all = {0, send_begin_.back()};
    if (all.end > 0) list_.add_unchained(Lane::kCaller, library_gemm(all, {Buffer::kProduct}));
  }

  // Product rows by the plan's kernel, on `ctas` SMs.
  void launch(plan::Rows rows, Where destination, int32_t ctas) {
    Gemm gemm;
    gemm.rows = rows;
    gemm.input = input(rows.begin);
    gemm.outputs = {{destination}};
    gemm.order = order_of(tile_rows(rows.count()));
    gemm.end_tile = list_.made.orders[at(gemm.order)].num_tiles();
    gemm.ctas = ctas;
    list_.add(Lane::kCaller, gemm);
  }

  // The tile rows of `rows` rows, in whole clusters.
  int32_t tile_rows(int64_t rows) const {
    const int64_t cluster_rows = int64_t{plan_.tile_m} * plan_.cluster_m;
    return static_cast<int32_t>((rows + cluster_rows - 1) / cluster_rows) * plan_.cluster_m;
  }

  // A chunk's messages on the side lane, of what has been computed on the caller's so far. A GEMM of the plan's kernel that goes
  // on beside them comes first: where NCCL's CTAs came first, each on an SM of another pair, clusters of the GEMM
  // would wait for them until they end.
  void send_beside(int32_t chunk, SendReceive messages, bool gemm_first) {
    const StepId before = last_on_caller();
    if (gemm_first) {
      list_.add_held(Lane::kSide0,
                     Delay{static_cast<int32_t>(machine_.profile->all_to_all.gemm_first_us)},
                     {before});
      list_.add_of_chunk(chunk, Lane::kSide0, std::move(messages));
    } else {
      list_.hold(list_.add_of_chunk(chunk, Lane::kSide0, std::move(messages), {before}));
    }
  }

  // Memory for what is sent.
  void add_product() { list_.add_scratch(Buffer::kProduct, send_begin_.back() * row_bytes_); }

  const std::vector<int64_t> send_begin_;  // one more than ranks
  const std::vector<int64_t> receive_begin_;

 private:
  // The order of that number of tile rows; messages are often alike.
  int32_t order_of(int32_t tile_rows) {
    const std::vector<plan::TileOrder>& made = list_.made.orders;
    const auto same = [&](const plan::TileOrder& one) { return one.tiles_m == tile_rows; };
    const auto found = std::find_if(made.begin(), made.end(), same);
    if (found != made.end()) return static_cast<int32_t>(found - made.begin());
    return list_.add_order(plan::chunked_order(plan_, plan_.problem.n, {tile_rows}));
  }

  StepId last_on_caller() const {
    StepId id = list_.last();
    while (list_.made.steps[at(id)].lane != Lane::kCaller) --id;
    return id;
  }
};

}  // namespace overlap::steps
