// Jobs on CPU: the kernel is done when it returns, so that the list is walked on this thread, up to the kernel and then on
// from there.
#include <map>

#include "binding/kernels/kernel_job.h"
#include "binding/ops/profiled.h"
#include "cpu/collectives.h"

namespace overlap::binding {
namespace {

using steps::Buffer;
using steps::Where;

class CpuRunner : public KernelCall::Runner {
 public:
  explicit CpuRunner(KernelCall& call)
      : call_(call), job_(call.job()), plan_(job_.plan()), group_(*job_.group()) {
    call.make_counters(at::zeros({KernelCounters::kSize}, at::kInt));
  }

  void begin() override {
    if (communicates_first()) announce(job_.text());
    while (!std::holds_alternative<steps::CallersKernel>(steps()[next_].what)) take_next();
  }

  void finish() override {
    if (communicates_first()) {
      check_arrivals();
    } else {
      check_counts();
      announce(job_.text());
    }
    ++next_;
    while (next_ < steps().size()) take_next();
  }

  // Ranks compare announcements: the ranks that have not left the call hear of it and communicate
  // nothing.
  void abandon(const std::string& why) override {
    if (communicates_first()) return;
    announce(why);
    try {
      group_.agree();
    } catch (const std::exception&) {
      // This rank has an error of its own.
    }
  }

 private:
  const std::vector<steps::Step>& steps() const { return call_.list().steps; }
  bool communicates_first() const { return plan_.problem.traits().gathers(); }
  void announce(const std::string& text) {
    job_.group()->announce(text, plan::communication_hash(plan_));
  }

  void take_next() {
    const steps::Step& step = steps()[next_++];
    std::visit([&](const auto& what) { take(what, step); }, step.what);
  }

  void check_counts() {
    const std::vector<int64_t> expected = job_.chunk_tiles();
    const int32_t* const seen = call_.counters().const_data_ptr<int32_t>();
    for (size_t chunk = 0; chunk < expected.size(); ++chunk) {
      if (!counts() || seen[chunk] == expected[chunk]) continue;
      const std::string what =
          c10::str(job_.text(), ": the kernel has signalled ", seen[chunk], " tiles of chunk ",
                   chunk, ", but it has ", expected[chunk]);
      abandon(what);
      TORCH_CHECK(false, "overlap_torch: group '", group_.name(), "', rank ", group_.rank(), ": ",
                  what, ". OVERLAP_DEBUG=1 names the tiles.");
    }
  }
  bool counts() const { return std::get<steps::CallersKernel>(steps()[next_].what).counts; }

  // A kernel that has given up waiting sets a flag's highest bits.
  void check_arrivals() const {
    const int32_t* const seen = call_.counters().const_data_ptr<int32_t>();
    for (int32_t chunk = 0; chunk < call_.list().counters; ++chunk) {
      TORCH_CHECK(seen[chunk] == 1, "overlap_torch: group '", group_.name(), "', rank ",
                  group_.rank(), ": ", job_.text(), ": the flag of chunk ", chunk, " is ",
                  seen[chunk], " behind the kernel and not 1; the kernel has written to it");
    }
  }

  // --- where things are ---

  int64_t element() const { return plan::moved_bytes(plan_.problem); }
  at::Tensor flat(const Where& where, int64_t elements) const {
    return call_.memory(where.buffer).view({-1}).narrow(0, where.offset / element(), elements);
  }
  at::Tensor rows(const Where& where, int64_t count, int64_t width, int64_t stride) const {
    const at::Tensor& all = call_.memory(where.buffer);
    return all.as_strided({count, width}, {stride, 1}, where.offset / element());
  }

  // --- steps ---

  void take(const steps::Fork&, const steps::Step&) {}
  void take(const steps::Join&, const steps::Step&) {}
  void take(const steps::WaitForTiles&, const steps::Step&) {}  // all are finished
  void take(const steps::Arrive& step, const steps::Step&) {
    call_.counters().narrow(0, step.chunk, 1).fill_(1);
  }

  void take(const steps::Collective& step, const steps::Step& of) {
    const Profiled profiled(of.communicates);
    const int64_t all = step.count * plan_.problem.world_size;
    switch (step.kind) {
      case plan::Collective::kReduceScatter:
        cpu::reduce_scatter(group_, flat(step.destination, step.count), flat(step.source, all),
                            of.communicates)
            .wait();
        return;
      case plan::Collective::kAllReduce:
        cpu::all_reduce(group_, flat(step.destination, step.count), of.communicates).wait();
        return;
      default:
        cpu::all_gather(group_, flat(step.destination, all), flat(step.source, step.count),
                        of.communicates)
            .wait();
    }
  }

  void take(const steps::SendReceive& step, const steps::Step& of) {
    group_.agree();  // also where there is nothing to send and receive
    const Profiled profiled(of.communicates);
    std::vector<cpu::Communication> under_way;
    for (const steps::Message& one : step.receives) {
      under_way.push_back(cpu::receive(group_, flat(one.where, one.bytes / element()), one.peer,
                                       messages_[one.peer].received++));
    }
    for (const steps::Message& one : step.sends) {
      under_way.push_back(cpu::send(group_, flat(one.where, one.bytes / element()), one.peer,
                                    messages_[one.peer].sent++));
    }
    for (cpu::Communication& one : under_way) one.wait();
  }

  void take(const steps::Copy& step, const steps::Step&) {
    const int64_t count = step.bytes / element();
    flat(step.destination, count).copy_(flat(step.source, count));
  }

  void take(const steps::CopyRows& step, const steps::Step&) {
    const int64_t width = step.row_bytes / element();
    at::Tensor to = rows(step.destination, step.rows, width, step.destination_stride / element());
    const at::Tensor from = rows(step.source, step.rows, width, step.source_stride / element());
    if (step.adds) {
      to.add_(from);
    } else {
      to.copy_(from);
    }
  }

  void take(const steps::Pack& step, const steps::Step&) {
    const at::Tensor product = call_.memory(step.source.buffer);
    for_tiles(
        step.chunk, step.order, step.destination, step.terms, step.term,
        [&](at::Tensor packed, int64_t row, int64_t column) {
          packed.copy_(product.narrow(0, row, packed.size(0)).narrow(1, column, packed.size(1)));
        });
  }

  void take(const steps::Unpack& step, const steps::Step&) {
    const at::Tensor output = call_.memory(step.destination.buffer);
    for (int32_t term = 0; term < step.terms; ++term) {
      for_tiles(step.chunk, step.order, step.source, step.terms, term,
                [&](const at::Tensor& packed, int64_t row, int64_t column) {
                  at::Tensor place =
                      output.narrow(0, row, packed.size(0)).narrow(1, column, packed.size(1));
                  if (term == 0) {
                    place.copy_(packed);
                  } else {
                    place.add_(packed);
                  }
                });
    }
  }

  // The elements of each packed tile that are in the matrix, and their places.
  template <typename Do>
  void for_tiles(int32_t chunk, int32_t number, const Where& where, int32_t terms, int32_t term,
                 const Do& act) const {
    const plan::TileOrder& order = call_.list().orders[static_cast<size_t>(number)];
    const int64_t size = int64_t{plan_.tile_m} * plan_.tile_n;
    for (int32_t tile = order.chunk_begin[chunk]; tile < order.chunk_begin[chunk + 1]; ++tile) {
      const plan::TileCoord coord = plan::tile_coord(order, tile);
      const int64_t row = int64_t{coord.row} * plan_.tile_m;
      const int64_t column = int64_t{coord.column} * plan_.tile_n;
      const int64_t height = std::min<int64_t>(plan_.tile_m, plan_.problem.m - row);
      const int64_t width = std::min<int64_t>(plan_.tile_n, plan_.problem.n - column);
      if (height <= 0) continue;
      Where place = where;
      place.offset += plan::packed_slot(order, tile, terms, term) * size * element();
      act(flat(place, size)
              .view({plan_.tile_m, plan_.tile_n})
              .narrow(0, 0, height)
              .narrow(1, 0, width),
          row, column);
    }
  }

  template <typename Other>
  void take(const Other&, const steps::Step&) {
    TORCH_INTERNAL_ASSERT(false, "a job on CPU has no such step: ", job_.describe());
  }

  KernelCall& call_;
  const KernelJob& job_;
  const plan::Plan& plan_;
  GroupEntry& group_;
  size_t next_ = 0;
  struct Messages {
    int sent = 0;
    int received = 0;
  };
  std::map<int32_t, Messages> messages_;  // so far, with each rank
};

}  // namespace

std::unique_ptr<KernelCall::Runner> cpu_runner(KernelCall& call) {
  return std::make_unique<CpuRunner>(call);
}

}  // namespace overlap::binding
