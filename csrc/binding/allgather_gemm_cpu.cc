// allgather_gemm on CPU: a communication thread gathers chunk after chunk, and the caller's computes
// the tiles of what has arrived, its own rows first.
//
//   caller | own tiles | wait 0 [A] | tiles of chunk 0 | wait 1 [A] | tiles of chunk 1 | join
//   comm.  | all-gather 0 | place 0, count [A] | all-gather 1 | place 1, count [A] | ...
#include "binding/collectives.h"
#include "binding/cpu_loop.h"
#include "binding/program_cpu.h"

namespace overlap::binding {
namespace {

class CpuConsumeLoop : CpuLoop {
 public:
  CpuConsumeLoop(const OpCall& call, const PlanEntry& entry)
      : CpuLoop(call, entry.plan.chunks.size()),
        plan_(entry.plan),
        order_(entry.order),
        parts_(plan::row_parts(plan_)),
        part_rows_(plan::part_rows(plan_)),
        own_(call.input.contiguous()) {
    const at::TensorOptions options = call.input.options();
    result_.gathered = at::empty({plan_.problem.m, plan_.problem.k}, options);
    for (const at::Tensor& weight : call.weights) {
      result_.outputs.push_back(at::empty({plan_.problem.m, weight.size(0)}, options));
    }
  }

  AllGatherGemmResult run() {
    CpuLoop::run([this] { compute_all(); },
                 [this] {
                   for (int chunk = 0; chunk < order_.num_chunks && !stopped(); ++chunk) {
                     gather(chunk);
                   }
                 });
    return std::move(result_);
  }

 private:
  void gather(int chunk) {
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t height = rows.end - rows.begin;
    const at::Tensor arrived = at::empty({parts_ * height, plan_.problem.k}, own_.options());
    hold();
    const Profiled profiled(chunk);
    begin_us_[chunk] = now_us();
    all_gather(*call_.group, arrived, own_.narrow(0, rows.begin, height), chunk);
    end_us_[chunk] = now_us();
    result_.gathered.view({parts_, part_rows_, plan_.problem.k})
        .narrow(1, rows.begin, height)
        .copy_(arrived.view({parts_, height, plan_.problem.k}));
    signal(chunk);
  }

  void compute_all() {
    for (int32_t tile = 0; tile < order_.num_tiles() && !stopped(); ++tile) compute(tile, true);
    for (int chunk = 0; chunk < order_.num_chunks; ++chunk) {
      // The all-gather has the deadline; this one only keeps the wait from lasting for ever.
      if (!wait(chunk, 1, "the gathered input", 2 * timeout())) return;
      ready_us_[chunk] = now_us();
      for (int32_t tile = order_.chunk_begin[chunk]; tile < order_.chunk_begin[chunk + 1]; ++tile) {
        compute(tile, false);
      }
    }
  }

  // The tile, if its rows are this rank's own, or if they are not.
  void compute(int32_t tile, bool own) {
    const plan::TileCoord coord = plan::tile_coord(order_, tile);
    const plan::PartRow place = plan::part_row(order_, coord.row);
    if ((place.part == call_.group->rank()) != own) return;
    const int64_t row = static_cast<int64_t>(place.row) * plan_.tile_m;
    const int64_t rows = std::min<int64_t>(plan_.tile_m, part_rows_ - row);
    if (rows <= 0) return;  // beyond the part: rounds clusters up
    const int64_t first = place.part * part_rows_ + row;
    const at::Tensor input =
        own ? own_.narrow(0, row, rows) : result_.gathered.narrow(0, first, rows);
    // The plan's columns are those of all weights, one after the other.
    const int64_t begin = static_cast<int64_t>(coord.column) * plan_.tile_n;
    const int64_t end = std::min<int64_t>(begin + plan_.tile_n, plan_.problem.n);
    int64_t offset = 0;
    for (size_t i = 0; i < call_.weights.size(); ++i) {
      const int64_t width = call_.weights[i].size(0);
      const int64_t from = std::max<int64_t>(begin - offset, 0);
      const int64_t columns = std::min(end - offset, width) - from;
      offset += width;
      if (columns <= 0) continue;
      at::Tensor output = result_.outputs[i].narrow(0, first, rows).narrow(1, from, columns);
      const at::Tensor weight = call_.weights[i].narrow(0, from, columns).t();
      if (call_.biases[i].has_value()) {
        at::addmm_out(output, call_.biases[i]->narrow(0, from, columns), input, weight);
      } else {
        at::mm_out(output, input, weight);
      }
    }
  }

  const plan::Plan& plan_;
  const plan::TileOrder& order_;
  const int64_t parts_;
  const int64_t part_rows_;
  const at::Tensor own_;
  AllGatherGemmResult result_;
};

}  // namespace

AllGatherGemmResult allgather_gemm_cpu(const OpCall& call) {
  const auto entry = cpu_plan(call);
  if (plan::has_program(entry->plan)) {
    const at::TensorOptions options = call.input.options();
    AllGatherGemmResult result;
    result.gathered = at::empty({call.problem.m, call.problem.k}, options);
    for (const at::Tensor& weight : call.weights) {
      result.outputs.push_back(at::empty({call.problem.m, weight.size(0)}, options));
    }
    run_program(call, *entry, result.outputs, result.gathered);
    return result;
  }
  return entry->plan.schedule == plan::Schedule::kOverlapped ? CpuConsumeLoop(call, *entry).run()
                                                             : allgather_gemm_composition(call);
}

}  // namespace overlap::binding
