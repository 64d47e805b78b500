#include "replay.h"

#include <limits>

#include "bindings.h"
#include "kernels/peer_exchange.h"
#include "kernels/reorder.h"
#include "record.h"
#include "runtime/executor_loop.h"

namespace recorder {
namespace {

namespace kernels = overlap::kernels;
namespace plan = overlap::plan;
namespace runtime = overlap::runtime;
namespace steps = overlap::steps;

steps::StepList list_of_last_call;

// Walks a list.
class Replay : runtime::ExecutorLoop {
 public:
  Replay(runtime::Group& group, Bindings bindings, const steps::StepList& list)
      : ExecutorLoop(group, *bindings.plan, bindings.stream, bindings.delay_us),
        bindings_(std::move(bindings)),
        list_(list) {}

  void run() {
    prepare();
    const std::vector<steps::Step>& all = list_.steps;
    size_t first = 0;
    while (first < all.size() && all[first].unchained) ++first;
    size_t end = all.size();
    while (end > first && all[end - 1].unchained) --end;
    events_.resize(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (i == first) {
        chain();
        if (list_.counters > 0) counters_ = zeroed_counters(bindings_.counters, list_.counters);
      }
      enqueue(i);
      if (i + 1 == end) device_.chained(stream_, capture_);
    }
    check_scratch();
    // Its destructor would join, as after an exception.
    if (forked_) record().violation("the list forks and does not join");
    // As ExecutorLoop::end, which takes all steps for chained ones.
    if (capture_) {
      group_.mark_captured();
    } else {
      group_.track(stream_, list_.chunks);
    }
  }

 private:
  // Everything that can fail or has to be made comes before the first step.
  void prepare() {
    group_.check();
    for (const steps::Communicator& one : list_.communicators) {
      keys_.push_back({one.max_ctas, one.lane});
      (void)group_.communicator(keys_.back(), capture_.has_value());
    }
    if (has(steps::Buffer::kWindow)) window_ = window();
    if (list_.over_peers) prepare_peers(list_.slot_bytes, list_.hears_all, list_.takes_slot);
  }

  bool has(steps::Buffer buffer) const {
    return std::any_of(list_.scratch.begin(), list_.scratch.end(),
                       [&](const steps::Scratch& one) { return one.buffer == buffer; });
  }

  // What the list says of its memory is what the call has.
  void check_scratch() const {
    for (const steps::Scratch& one : list_.scratch) {
      const bool in_window = one.buffer == steps::Buffer::kWindow;
      const int64_t bytes = in_window ? plan::buffer_elements(plan_) * element_bytes_
                                      : record().bytes_at(base({one.buffer}));
      if (bytes != one.bytes) {
        record().violation(cat("the ", steps::name(one.buffer), " holds ", bytes,
                               " bytes, and the list has ", one.bytes));
      }
    }
  }

  cudaStream_t stream(steps::Lane lane) const {
    if (lane == steps::Lane::kCaller) return stream_;
    if (lane == steps::Lane::kCopy) return device_.copy.get();
    return device_.side[static_cast<size_t>(lane) - static_cast<size_t>(steps::Lane::kSide0)].get();
  }

  char* at(const steps::Where& where) const {
    return static_cast<char*>(base(where)) + where.offset;
  }
  char* at(const std::optional<steps::Where>& where) const {
    return where.has_value() ? at(*where) : nullptr;
  }

  void* base(const steps::Where& where) const {
    const bool scratch =
        where.buffer == steps::Buffer::kStaging || where.buffer == steps::Buffer::kWindow ||
        where.buffer == steps::Buffer::kProduct || where.buffer == steps::Buffer::kPartial;
    if (scratch && !has(where.buffer)) {
      record().violation(
          cat("a step names the ", steps::name(where.buffer), ", which the list does not hold"));
    }
    if (where.buffer == steps::Buffer::kWindow) return window_;
    if (where.buffer == steps::Buffer::kSlot) return peers_->slot(peer_call_, where.index);
    if (where.buffer == steps::Buffer::kProduct && product_ != nullptr) return product_;
    return const_cast<void*>(bindings_.base(where.buffer, where.index));
  }

  void enqueue(size_t index) {
    const steps::Step& step = list_.steps[index];
    const cudaStream_t on = stream(step.lane);
    const bool held_behind = std::holds_alternative<steps::Gemm>(step.what);
    if (step.held && !held_behind) hold(on);
    for (const steps::StepId id : step.after) events_[static_cast<size_t>(id)].value().block(on);
    std::visit([&](const auto& what) { this->enqueue(what, on); }, step.what);
    if (step.held && held_behind) hold(on);
    // An event for what another lane waits for.
    for (size_t later = index + 1; later < list_.steps.size(); ++later) {
      const std::vector<steps::StepId>& after = list_.steps[later].after;
      if (std::find(after.begin(), after.end(), static_cast<steps::StepId>(index)) == after.end()) {
        continue;
      }
      events_[index].emplace().record(on);
      break;
    }
  }

  void enqueue(const steps::Fork& step, cudaStream_t) {
    lanes_ = step.side_lanes;
    fork(step.copies);
  }
  void enqueue(const steps::Join&, cudaStream_t) { join(); }

  void enqueue(const steps::Gemm& step, cudaStream_t on) {
    kernels::GemmParams gemm = bindings_.gemm(step.weight);
    gemm.m = step.rows.end - step.rows.begin;
    place_operands(step, gemm);
    gemm.part = step.part;
    gemm.parts = step.parts;
    gemm.rows = step.map;
    gemm.order = list_.orders[static_cast<size_t>(step.order)];
    gemm.first_tile = step.first_tile;
    gemm.end_tile = step.end_tile;
    gemm.ctas = step.ctas;
    gemm.spread_ns = step.spread_ns;
    if (step.counts) gemm.counters = counters_;
    if (step.announces) gemm.peer_tiles = peer_tiles();
    if (step.awaits_chunks) gemm.arrivals = with_deadline(arrivals(0), 0);
    if (step.ends_call) gemm.ending = peers_->ending(peer_call_);
    if (step.ends_call || !step.mirrors.empty() || step.outputs.size() > 1) {
      gemm.tiles_taken = peers_->tiles_taken(peer_call_);
    }
    for (const steps::Move& move : step.moves) {
      gemm.copies[gemm.num_copies++] = {at(move.from), at(move.to), move.bytes, move.arrival};
    }
    runtime::check_cuda(kernels::launch_gemm(plan_.kernel, gemm, on), "launching the GEMM");
  }

  void place_operands(const steps::Gemm& step, kernels::GemmParams& gemm) const {
    const void* const input = base({steps::Buffer::kInput});
    gemm.input = at(step.input);
    if (step.input.buffer == steps::Buffer::kInput) {
      const int64_t row = step.rows.begin * element_bytes_;
      if (step.input.offset != row * gemm.k) record().violation("a GEMM has other input rows");
      gemm.input = static_cast<const char*>(input) + row * gemm.input_stride;
    }
    if (step.map.mode == plan::RowMap::Mode::kGather) gemm.own_input = input;
    for (size_t part = 0; part < step.outputs.size(); ++part) {
      void* const output = at(step.outputs[part].where);
      (part == 0 ? gemm.output : gemm.more_outputs[part - 1]) = output;
      gemm.sources[part] = at(step.outputs[part].adds);
    }
    gemm.num_more_outputs = static_cast<int32_t>(step.outputs.size()) - 1;
    for (const steps::Where& mirror : step.mirrors) {
      gemm.mirrors[gemm.num_mirrors++] = at(mirror);
    }
    if (step.arriving.has_value()) {
      gemm.arriving = at(step.arriving);
      gemm.collected = base({steps::Buffer::kOutput});
    }
  }

  void enqueue(const steps::LibraryGemm& step, cudaStream_t) {
    void* const output = bindings_.makes_product ? nullptr : at(step.output.where);
    void* const product = bindings_.library(step, at(step.input), at(step.output.adds), output);
    if (product != nullptr) product_ = product;
  }

  void enqueue(const steps::WaitForTiles& step, cudaStream_t on) {
    enqueue_wait(counters_ + step.chunk, step.tiles, step.chunk, on);
  }
  void enqueue(const steps::Mark& step, cudaStream_t on) {
    enqueue_wait(counters_ + step.chunk, std::numeric_limits<int32_t>::min(), step.chunk, on);
  }

  void enqueue(const steps::Collective& step, cudaStream_t on) {
    runtime::Communicator& to = group_.communicator({step.max_ctas, step.lane}, false);
    const auto count = static_cast<size_t>(step.count);
    const plan::DType dtype = plan_.problem.dtype;
    switch (step.kind) {
      case plan::Collective::kReduceScatter:
        to.reduce_scatter(at(step.source), at(step.destination), count, dtype, on);
        return;
      case plan::Collective::kAllReduce:
        to.all_reduce(at(step.source), at(step.destination), count, dtype, on);
        return;
      default:
        to.all_gather(at(step.source), at(step.destination), count, dtype, on);
    }
  }

  void enqueue(const steps::Copy& step, cudaStream_t on) {
    copy(at(step.destination), at(step.source), step.bytes, on);
  }

  void enqueue(const steps::SendReceive& step, cudaStream_t on) {
    if (step.sends.empty() && step.receives.empty()) return;
    const auto messages = [&](const std::vector<steps::Message>& all) {
      std::vector<runtime::Communicator::Message> made;
      for (const steps::Message& one : all) {
        made.push_back({one.peer, at(one.where), static_cast<size_t>(one.bytes)});
      }
      return made;
    };
    runtime::Communicator& by = group_.communicator({step.max_ctas, step.lane}, false);
    by.exchange(messages(step.sends), messages(step.receives), on);
  }

  void enqueue(const steps::Delay& step, cudaStream_t on) {
    runtime::check_cuda(kernels::delay(step.us, on), "launching a delay");
  }

  kernels::ReorderParams reorder(int32_t order, int32_t chunk, int32_t ctas) const {
    kernels::ReorderParams params;
    params.m = plan_.problem.m;
    params.n = plan_.problem.n;
    params.tile_m = plan_.tile_m;
    params.tile_n = plan_.tile_n;
    params.dtype = plan_.problem.dtype;
    params.order = list_.orders[static_cast<size_t>(order)];
    params.chunk = chunk;
    params.ctas = ctas;
    return params;
  }

  void enqueue(const steps::Pack& step, cudaStream_t on) {
    kernels::ReorderParams params = reorder(step.order, step.chunk, step.ctas);
    params.row_major = at(step.source);
    params.packed = at(step.destination);
    params.part = step.part;
    params.parts = step.parts;
    runtime::check_cuda(kernels::pack_chunk(params, on), "packing a chunk");
  }

  void enqueue(const steps::Unpack& step, cudaStream_t on) {
    kernels::ReorderParams params = reorder(step.order, step.chunk, step.ctas);
    params.packed = at(step.source);
    params.row_major = at(step.destination);
    params.parts = step.parts;
    params.bias = step.bias ? bindings_.bias : nullptr;
    runtime::check_cuda(kernels::unpack_chunk(params, on), "unpacking a chunk");
  }

  void enqueue(const steps::AddBias& step, cudaStream_t on) {
    kernels::BiasParams params;
    params.rows = step.rows;
    params.n = plan_.problem.n;
    params.dtype = plan_.problem.dtype;
    params.source = at(step.source);
    params.destination = at(step.destination);
    params.bias = bindings_.bias;
    params.ctas = step.ctas;
    runtime::check_cuda(kernels::add_bias(params, on), "adding the bias to a chunk");
  }

  kernels::PeerWaitParams arrivals(int32_t step) const {
    return peers_->wait_for(peer_call_, runtime::Peers::Flag::kArrived, peers_->everyone_else(),
                            step);
  }
  int64_t part_tiles() const {
    return static_cast<int64_t>(plan::tiles_m(plan_)) / group_.world_size() * plan::tiles_n(plan_);
  }
  kernels::PeerTiles peer_tiles() const {
    kernels::PeerTiles tiles = peers_->tiles(peer_call_, part_tiles());
    tiles.deadline_ns = deadline_ns();
    tiles.report = group_.report();
    return tiles;
  }

  void enqueue(const steps::WaitForSlots&, cudaStream_t on) { wait_for_slots(on); }
  void enqueue(const steps::WaitForPeers& step, cudaStream_t on) {
    enqueue_peer_wait(arrivals(step.step), step.step, on);
  }
  void enqueue(const steps::Signal& step, cudaStream_t on) {
    const uint32_t self = step.to_self ? 1u << group_.rank() : 0;
    signal_peers(runtime::Peers::Flag::kArrived, peers_->everyone_else() | self, step.step, on);
  }
  void enqueue(const steps::EndCall&, cudaStream_t on) { peers_->end(peer_call_, on); }
  void enqueue(const steps::MeetTiles& step, cudaStream_t on) {
    runtime::check_cuda(kernels::meet_tiles(peer_tiles(), step.first_announced, step.tiles,
                                            step.first_awaited, step.tiles, step.distance, on),
                        "launching a signal and a wait");
  }

  void enqueue(const steps::PeerCollective& step, cudaStream_t on) {
    constexpr int64_t kBytes = kernels::kPeerAccessBytes;
    kernels::PeerCollectiveParams params = collective();
    params.reduces = step.reduces;
    params.gathers = step.gathers;
    params.stride = step.stride / kBytes;
    params.first = step.first / kBytes;
    if (step.reduces) params.row_count = plan_.problem.n * element_bytes_ / kBytes;
    params.own = at(step.own);
    params.output = at(step.output);
    params.bias = step.bias ? bindings_.bias : nullptr;
    for (size_t rank = 0; rank < step.pieces.size(); ++rank) {
      const steps::Piece& piece = step.pieces[rank];
      params.count[rank] = piece.bytes / kBytes;
      params.send[rank] = at(piece.send);
      params.destination[rank] = at(piece.destination);
      params.received[rank] = at(piece.received);
      params.final_destination[rank] = at(piece.final_destination);
      params.final_received[rank] = at(piece.final_received);
    }
    runtime::check_cuda(kernels::peer_collective(params, on), "launching a collective");
  }

  void enqueue(const steps::LowLatency& step, cudaStream_t on) {
    constexpr int64_t kWord = 4;
    kernels::PeerLowLatencyParams params = peers_->low_latency(plan::communication_hash(plan_));
    params.dtype = plan_.problem.dtype;
    params.in_pieces = step.in_pieces;
    params.words = step.bytes / kWord;
    params.own = at(step.own);
    params.output = at(step.output);
    params.bias = step.bias ? bindings_.bias : nullptr;
    params.row_words = plan_.problem.n * element_bytes_ / kWord;
    params.deadline_ns = deadline_ns();
    params.report = group_.report();
    runtime::check_cuda(kernels::peer_all_reduce_low_latency(params, on),
                        "launching an all-reduce");
  }

  void enqueue(const steps::PeerExchange& step, cudaStream_t on) {
    constexpr int64_t kBytes = kernels::kPeerAccessBytes;
    kernels::PeerExchangeParams params{meeting()};
    params.sends = step.sends;
    for (size_t rank = 0; rank < step.messages.size(); ++rank) {
      const steps::PeerMessages& messages = step.messages[rank];
      params.send_count[rank] = messages.send_bytes / kBytes;
      params.send[rank] = at(messages.send);
      params.destination[rank] = at(messages.destination);
      params.receive_count[rank] = messages.receive_bytes / kBytes;
      params.received[rank] = at(messages.received);
      params.output[rank] = at(messages.output);
    }
    runtime::check_cuda(kernels::peer_exchange(params, on), "launching an exchange");
  }

  Bindings bindings_;
  const steps::StepList& list_;
  int32_t* counters_ = nullptr;
  void* window_ = nullptr;
  void* product_ = nullptr;  // once the framework has made it
  std::vector<std::optional<runtime::Event>> events_;
};

// Lists are made, and walked, while the device is this call's.
template <typename Call>
void walk(runtime::Group& group, const Call& call, const steps::Variant& variant) {
  list_of_last_call = steps::lower(*call.plan, group.rank(), group.machine(), variant);
  Replay(group, bindings_of(call), list_of_last_call).run();
}

}  // namespace

void replay(runtime::Group& group, const runtime::ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  walk(group, call,
       {.kernel_takes = call.signals,
        .bias = call.bias != nullptr,
        .captured = runtime::capture_id(call.stream).has_value()});
}

void replay(runtime::Group& group, const runtime::ConsumeCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  steps::Variant variant = {.captured = runtime::capture_id(call.stream).has_value()};
  for (const runtime::ConsumeCall::Gemm& gemm : call.gemms) {
    variant.weights.push_back({gemm.params.n, gemm.fast});
  }
  walk(group, call, variant);
}

void replay(runtime::Group& group, const runtime::AllToAllCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  steps::Variant variant = {
      .kernel_takes = call.fast, .send_rows = call.send_rows, .receive_rows = call.receive_rows};
  if (plan::over_peers(*call.plan) && group.world_size() > 2) {
    const int64_t own =
        steps::longest_message(*call.plan, group.rank(), call.send_rows, call.receive_rows);
    variant.longest_message =
        group.longest_message(own, runtime::capture_id(call.stream).has_value());
  }
  walk(group, call, variant);
}

void replay(runtime::Group& group, const runtime::SequentialCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  walk(group, call, {});
}

const steps::StepList& last_list() {
  return list_of_last_call;
}

}  // namespace recorder
