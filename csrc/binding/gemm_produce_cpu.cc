// gemm_allreduce and gemm_reducescatter on CPU: the same plan, tiles in plan order, atomic counters,
// and a communication thread that calls the group's collective on finished chunks.
//
//   caller | tile 0 | tile 1 | ... count [A] ...............................| join
//   comm.  | wait 0 [A] | collective 0 | finish 0 | wait 1 [A] | collective 1 ...
#include "binding/collectives.h"
#include "binding/cpu_loop.h"
#include "binding/program_cpu.h"

namespace overlap::binding {
namespace {

class CpuProduceLoop : CpuLoop {
 public:
  CpuProduceLoop(const OpCall& call, const PlanEntry& entry)
      : CpuLoop(call, entry.plan.chunks.size()),
        plan_(entry.plan),
        order_(entry.order),
        packed_(plan_.layout == plan::Layout::kPacked),
        parts_(plan::row_parts(plan_)),
        part_rows_(plan::part_rows(plan_)),
        output_(at::empty({part_rows_, plan_.problem.n}, call.input.options())),
        // Tile parts beyond the matrix travel too, if packed: they must be numbers.
        buffer_(packed_      ? at::zeros({plan::buffer_elements(plan_)}, call.input.options())
                : parts_ > 1 ? at::empty({plan_.problem.m, plan_.problem.n}, call.input.options())
                             : output_) {}

  at::Tensor run() {
    CpuLoop::run(
        [this] {
          for (int32_t tile = 0; tile < order_.num_tiles() && !stopped(); ++tile) compute(tile);
        },
        [this] {
          for (int chunk = 0; chunk < order_.num_chunks; ++chunk) {
            if (!wait(chunk, plan::chunk_tiles(order_, chunk), "its own GEMM", timeout())) return;
            communicate(chunk);
          }
        });
    return output_;
  }

 private:
  // Where a tile lies: rows of its part of the output, and columns.
  struct Block {
    int32_t part = 0;
    int64_t row = 0;
    int64_t column = 0;
    int64_t rows = 0;  // 0 or less for tiles beyond the part, which round clusters up
    int64_t columns = 0;
  };

  Block block(int32_t tile) const {
    const plan::TileCoord coord = plan::tile_coord(order_, tile);
    const plan::PartRow place = plan::part_row(order_, coord.row);
    Block block;
    block.part = place.part;
    block.row = static_cast<int64_t>(place.row) * plan_.tile_m;
    block.column = static_cast<int64_t>(coord.column) * plan_.tile_n;
    block.rows = std::min<int64_t>(plan_.tile_m, part_rows_ - block.row);
    block.columns = std::min<int64_t>(plan_.tile_n, plan_.problem.n - block.column);
    return block;
  }

  void compute(int32_t tile) {
    const Block where = block(tile);
    const int chunk = plan::tile_chunk(order_, tile);
    if (where.rows > 0) {
      at::Tensor place = packed_ ? packed_tile(tile, where) : staged_tile(chunk, where);
      at::mm_out(place, call_.input.narrow(0, where.part * part_rows_ + where.row, where.rows),
                 call_.weight().narrow(0, where.column, where.columns).t());
    }
    if (signal(chunk) == plan::chunk_tiles(order_, chunk)) ready_us_[chunk] = now_us();
  }

  // The chunk's rows of all parts, one part after the other.
  at::Tensor staged(int chunk) const {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    return buffer_.narrow(0, parts_ * rows.begin, parts_ * (rows.end - rows.begin));
  }

  at::Tensor staged_tile(int chunk, const Block& where) const {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t first = where.part * (rows.end - rows.begin) + where.row - rows.begin;
    return staged(chunk).narrow(0, first, where.rows).narrow(1, where.column, where.columns);
  }

  at::Tensor packed_tile(int32_t tile, const Block& where) const {
    const int64_t elements = static_cast<int64_t>(plan_.tile_m) * plan_.tile_n;
    return buffer_.narrow(0, plan::packed_offset(tile, plan_.tile_m, plan_.tile_n), elements)
        .view({plan_.tile_m, plan_.tile_n})
        .narrow(0, 0, where.rows)
        .narrow(1, 0, where.columns);
  }

  void communicate(int chunk) {
    hold();
    const Profiled profiled(chunk);
    begin_us_[chunk] = now_us();
    if (packed_) {
      const plan::Extent extent = plan::chunk_extent(plan_, chunk);
      all_reduce(*call_.group, buffer_.narrow(0, extent.offset, extent.count), chunk);
      end_us_[chunk] = now_us();
      unpack(chunk);
      return;
    }
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const at::Tensor result = output_.narrow(0, rows.begin, rows.end - rows.begin);
    if (parts_ > 1) {
      reduce_scatter(*call_.group, result, staged(chunk), chunk);
    } else {
      all_reduce(*call_.group, result, chunk);
    }
    end_us_[chunk] = now_us();
    if (call_.bias().has_value()) result.add_(*call_.bias());
  }

  void unpack(int chunk) {
    for (int32_t tile = order_.chunk_begin[chunk]; tile < order_.chunk_begin[chunk + 1]; ++tile) {
      const Block where = block(tile);
      if (where.rows <= 0) continue;
      at::Tensor place =
          output_.narrow(0, where.row, where.rows).narrow(1, where.column, where.columns);
      if (call_.bias().has_value()) {
        at::add_out(place, packed_tile(tile, where),
                    call_.bias()->narrow(0, where.column, where.columns));
      } else {
        place.copy_(packed_tile(tile, where));
      }
    }
  }

  const plan::Plan& plan_;
  const plan::TileOrder& order_;
  const bool packed_;
  const int64_t parts_;
  const int64_t part_rows_;
  const at::Tensor output_;
  const at::Tensor buffer_;
};

at::Tensor by_program(const OpCall& call, const PlanEntry& entry) {
  const int64_t rows = call.problem.m / plan::op_row_parts(call.problem);
  const at::Tensor output = at::empty({rows, call.problem.n}, call.input.options());
  run_program(call, entry, {output});
  return output;
}

}  // namespace

at::Tensor gemm_allreduce_cpu(const OpCall& call) {
  const auto entry = cpu_plan(call);
  if (plan::has_program(entry->plan)) return by_program(call, *entry);
  return entry->plan.schedule == plan::Schedule::kOverlapped ? CpuProduceLoop(call, *entry).run()
                                                             : gemm_allreduce_composition(call);
}

at::Tensor gemm_reducescatter_cpu(const OpCall& call) {
  const auto entry = cpu_plan(call);
  if (plan::has_program(entry->plan)) return by_program(call, *entry);
  return entry->plan.schedule == plan::Schedule::kOverlapped ? CpuProduceLoop(call, *entry).run()
                                                             : gemm_reducescatter_composition(call);
}

}  // namespace overlap::binding
