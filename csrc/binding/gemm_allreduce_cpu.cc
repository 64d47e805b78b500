// gemm_allreduce on CPU: the same plan, tiles in plan order, atomic counters, and a communication
// thread that calls the group's collective on finished chunks.
//
//   caller     | tile 0 | tile 1 | ... count [A] ...............................| join
//   comm.      | wait 0 [A] | all-reduce 0 | finish 0 | wait 1 [A] | all-reduce 1 ...
#include <ATen/ThreadLocalState.h>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

#include "binding/collectives.h"
#include "binding/op_call.h"

namespace overlap::binding {
namespace {

using Clock = std::chrono::steady_clock;

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// One call. The caller's thread computes, a second one communicates.
class CpuProduceLoop {
 public:
  CpuProduceLoop(const OpCall& call, const PlanEntry& entry)
      : call_(call),
        plan_(entry.plan),
        order_(entry.order),
        chunks_(static_cast<int>(plan_.chunks.size())),
        packed_(plan_.layout == plan::Layout::kPacked),
        output_(at::empty({plan_.problem.m, plan_.problem.n}, call.input.options())),
        // Tile parts beyond the matrix travel too: they must be numbers.
        buffer_(packed_ ? at::zeros({plan::buffer_elements(plan_)}, call.input.options())
                        : output_.view({-1})) {}

  at::Tensor run() {
    const at::ThreadLocalState state;
    std::thread communication([this, &state] {
      const at::ThreadLocalStateGuard guard(state);
      try {
        for (int chunk = 0; chunk < chunks_ && wait(chunk); ++chunk) communicate(chunk);
      } catch (...) {
        communication_error_ = std::current_exception();
      }
    });
    std::exception_ptr compute_error;
    try {
      for (int32_t tile = 0; tile < order_.num_tiles(); ++tile) compute(tile);
    } catch (...) {
      compute_error = std::current_exception();
      stop_ = true;
    }
    const double gemm_us = since_us(start_);
    communication.join();
    if (compute_error) std::rethrow_exception(compute_error);
    if (communication_error_) std::rethrow_exception(communication_error_);
    if (TraceSwitch::on()) trace(gemm_us);
    return output_;
  }

 private:
  void compute(int32_t tile) {
    const plan::TileCoord coord = plan::tile_coord(order_, tile);
    const int64_t row = static_cast<int64_t>(coord.row) * plan_.tile_m;
    const int64_t column = static_cast<int64_t>(coord.column) * plan_.tile_n;
    const int64_t rows = std::min<int64_t>(plan_.tile_m, plan_.problem.m - row);
    const int64_t columns = std::min<int64_t>(plan_.tile_n, plan_.problem.n - column);
    const int chunk = plan::tile_chunk(order_, tile);
    if (rows > 0 && columns > 0) {  // a cluster's last row of tiles may lie beyond the matrix
      at::Tensor place = packed_ ? tile_block(tile).narrow(0, 0, rows).narrow(1, 0, columns)
                                 : output_.narrow(0, row, rows).narrow(1, column, columns);
      at::mm_out(place, call_.input.narrow(0, row, rows),
                 call_.weight().narrow(0, column, columns).t());
    }
    // [A] the tile is stored: wait() acquires what is released here.
    if (counters_[chunk].fetch_add(1, std::memory_order_release) + 1 ==
        plan::chunk_tiles(order_, chunk)) {
      ready_us_[chunk] = since_us(start_);
    }
  }

  // False if the computation ended early.
  bool wait(int chunk) {
    const int32_t expected = plan::chunk_tiles(order_, chunk);
    const auto timeout = call_.group->timeout(at::kCPU);
    const Clock::time_point deadline = Clock::now() + timeout;
    while (counters_[chunk].load(std::memory_order_acquire) < expected) {  // [A]
      if (stop_) return false;
      TORCH_CHECK(Clock::now() < deadline, "overlap_torch: group '", call_.group->name(),
                  "', rank ", call_.group->rank(), ": the wait for chunk ", chunk,
                  " of its own GEMM passed its deadline of ", timeout.count() / 1000.0,
                  " s: expected ", expected, " finished tiles, saw ", counters_[chunk].load());
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  void communicate(int chunk) {
    if (side_delay_us() > 0)
      std::this_thread::sleep_for(std::chrono::microseconds(side_delay_us()));
    const plan::Extent extent = plan::chunk_extent(plan_, chunk);
    begin_us_[chunk] = since_us(start_);
    all_reduce(*call_.group, buffer_.narrow(0, extent.offset, extent.count), chunk);
    end_us_[chunk] = since_us(start_);
    if (packed_) unpack(chunk);
    if (call_.bias().has_value() && !packed_) {
      const plan::Rows rows = plan::chunk_rows(plan_, chunk);
      output_.narrow(0, rows.begin, rows.end - rows.begin).add_(*call_.bias());
    }
  }

  void unpack(int chunk) {
    for (int32_t tile = order_.chunk_begin[chunk]; tile < order_.chunk_begin[chunk + 1]; ++tile) {
      const plan::TileCoord coord = plan::tile_coord(order_, tile);
      const int64_t row = static_cast<int64_t>(coord.row) * plan_.tile_m;
      const int64_t column = static_cast<int64_t>(coord.column) * plan_.tile_n;
      const int64_t rows = std::min<int64_t>(plan_.tile_m, plan_.problem.m - row);
      const int64_t columns = std::min<int64_t>(plan_.tile_n, plan_.problem.n - column);
      if (rows <= 0 || columns <= 0) continue;
      at::Tensor place = output_.narrow(0, row, rows).narrow(1, column, columns);
      const at::Tensor block = tile_block(tile).narrow(0, 0, rows).narrow(1, 0, columns);
      if (call_.bias().has_value()) {
        at::add_out(place, block, call_.bias()->narrow(0, column, columns));
      } else {
        place.copy_(block);
      }
    }
  }

  at::Tensor tile_block(int32_t tile) const {
    const int64_t elements = static_cast<int64_t>(plan_.tile_m) * plan_.tile_n;
    return buffer_.narrow(0, plan::packed_offset(tile, plan_.tile_m, plan_.tile_n), elements)
        .view({plan_.tile_m, plan_.tile_n});
  }

  void trace(double gemm_us) const {
    std::vector<double> rows;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      rows.insert(rows.end(), {0.0, static_cast<double>(chunk), ready_us_[chunk], begin_us_[chunk],
                               end_us_[chunk]});
    }
    rows.insert(rows.end(), {0.0, -1.0, gemm_us, 0.0, since_us(start_)});
    TraceSwitch::add_rows(rows);
  }

  const OpCall& call_;
  const plan::Plan& plan_;
  const plan::TileOrder& order_;
  const int chunks_;
  const bool packed_;
  const at::Tensor output_;
  const at::Tensor buffer_;
  const Clock::time_point start_ = Clock::now();
  std::array<std::atomic<int32_t>, plan::kMaxChunks> counters_{};
  std::array<double, plan::kMaxChunks> ready_us_{};
  std::array<double, plan::kMaxChunks> begin_us_{};
  std::array<double, plan::kMaxChunks> end_us_{};
  std::atomic<bool> stop_{false};
  std::exception_ptr communication_error_;
};

}  // namespace

at::Tensor gemm_allreduce_cpu(const OpCall& call) {
  const auto entry = call.group->plan(call.problem, at::kCPU, cpu_machine());
  if (debug_enabled()) call.group->compare("plan", entry->plan.to_string(), at::kCPU);
  if (entry->plan.schedule == plan::Schedule::kOverlapped)
    return CpuProduceLoop(call, *entry).run();
  const Clock::time_point start = Clock::now();
  at::Tensor output = at::mm(call.input, call.weight().t());
  const double gemm_us = since_us(start);
  all_reduce(*call.group, output, 0);
  const double end_us = since_us(start);
  if (call.bias().has_value()) output.add_(*call.bias());
  if (TraceSwitch::on()) {
    TraceSwitch::add_rows(
        {0.0, 0.0, gemm_us, gemm_us, end_us, 0.0, -1.0, gemm_us, 0.0, since_us(start)});
  }
  return output;
}

}  // namespace overlap::binding
