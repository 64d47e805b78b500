#include "runtime/run.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kernels/chunk/reorder.h"
#include "kernels/peer/interpreter.h"
#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_exchange.h"
#include "kernels/signal/signal.h"
#include "runtime/error.h"
#include "runtime/range.h"
#include "runtime/step_timer.h"

namespace overlap::runtime {
namespace {

using steps::Buffer;
using steps::Lane;
using steps::Where;

// Enqueues a write of 32 bits, behind all that the stream does before. The driver is not linked: a machine without one
// imports this library, too.
cudaError_t write_value(int32_t* address, uint32_t value, cudaStream_t stream) {
  static const auto write = [] {
    constexpr unsigned int kSinceCuda12 = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuStreamWriteValue32", &function, kSinceCuda12, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuStreamWriteValue32_v11070>(usable ? function : nullptr);
  }();
  if (write == nullptr) return cudaErrorNotSupported;
  const CUresult result =
      write(stream, reinterpret_cast<CUdeviceptr>(address), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

// One call. Made while the device's mutex is held.
class Run {
 public:
  Run(Group& group, const Call& call)
      : range_(call.plan->problem),
        group_(group),
        device_(group.device()),
        call_(call),
        plan_(*call.plan),
        list_(*call.list),
        caller_(call.stream),
        element_bytes_(plan::moved_bytes(plan_.problem)),
        capture_(capture_id(caller_)) {}

  // After an exception half-way: the caller's memory is not used again before what was forked ends.
  ~Run() {
    if (!forked_) return;
    try {
      join();
      device_.chained(caller_, capture_);
    } catch (const std::exception&) {
      // The first one is on its way to the caller.
    }
  }

  void operator()() {
    check_device();
    prepare();
    while (next_ < list_.steps.size()) enqueue_next();
    close();
  }

  // The same in two parts, with a kernel of the caller's in between.
  void begin() {
    check_device();
    prepare();
    while (!std::holds_alternative<steps::CallersKernel>(list_.steps[next_].what)) enqueue_next();
    come_to_next();
    name_chunk(-1);
    device_.open = true;
    open_ = true;
  }
  void finish() {
    leave();
    go_on();
    while (next_ < list_.steps.size()) enqueue_next();
    close();
  }
  void leave() {
    device_.open = false;
    open_ = false;
  }
  bool open() const { return open_; }
  void* window() const { return window_; }

 private:
  void check_device() const {
    if (!device_.open) return;
    throw Error(
        "overlap_torch: an op was called inside `with overlap_torch.produce(...)` or "
        "`consume(...)` on the same device; launch the job's kernel there, and call ops before or "
        "behind it");
  }

  // Everything that can fail or has to be made comes before the first step.
  void prepare() {
    group_.check();
    for (const steps::Communicator& one : list_.communicators) {
      keys_.push_back({one.max_ctas, one.lane});
      communicators_.push_back(&group_.communicator(keys_.back(), capture_.has_value()));
    }
    for (const steps::Scratch& one : list_.scratch) {
      if (one.buffer != Buffer::kWindow) continue;
      window_ = static_cast<char*>(group_.staging(one.bytes, keys_, capture_.has_value()));
    }
    if (list_.over_peers) {
      peers_ = &group_.peers(list_.slot_bytes, capture_.has_value());
      if (list_.takes_slot) {
        peer_call_ = peers_->next_call(list_.hears_all, capture_, list_.communication);
      }
    }
    device_.reserve_events(static_cast<size_t>(list_.events));
  }

  void time_steps() {
    if (call_.trace == nullptr || capture_) return;
    timer_.emplace(list_,
                   call_.trace->add(plan_.problem, group_.name(), device_.device(), list_.chunks),
                   caller_);
  }

  // From here on the op comes behind the device's last one.
  void chain() {
    device_.chain(caller_, capture_);
    if (list_.counters == 0) return;
    if (call_.counters != nullptr) {
      counters_ = call_.counters;
      return;
    }
    if (!capture_) {
      counters_ = device_.zeroed_counters(list_.counters, caller_);
      return;
    }
    // Replays would find the device's used.
    counters_ = call_.operands->counters(list_.counters);
    check_cuda(kernels::zero_counters(counters_, list_.counters, caller_), "zeroing counters");
  }

  // Steps that wait for no peer need not take their turn among the device's ops: the first ones start while the host
  // does the rest.
  size_t first_chained() const {
    size_t first = 0;
    while (first < list_.steps.size() && list_.steps[first].unchained) ++first;
    return first;
  }
  size_t end_chained() const {
    size_t end = list_.steps.size();
    while (end > first_ && list_.steps[end - 1].unchained) --end;
    return end;
  }

  void enqueue_next() {
    come_to_next();
    const steps::Step& step = list_.steps[next_];
    std::visit([&](const auto& what) { this->enqueue(what, stream(step.lane)); }, step.what);
    go_on();
  }

  // All that comes in front of the next step.
  void come_to_next() {
    if (next_ == first_) chain();
    if (next_ == 0) time_steps();
    const steps::Step& step = list_.steps[next_];
    const cudaStream_t on = stream(step.lane);
    name_chunk(step.communicates);
    if (timer_) observe_tiles(step);
    if (step.held && !held_behind(step)) hold(on);
    for (const steps::StepId before : step.after) {
      device_.event(list_.steps[static_cast<size_t>(before)].event).block(on);
    }
    if (timer_) timer_->before(static_cast<steps::StepId>(next_), on);
  }

  // All that comes behind it.
  void go_on() {
    const steps::Step& step = list_.steps[next_];
    const cudaStream_t on = stream(step.lane);
    if (step.held && held_behind(step)) hold(on);
    if (timer_) timer_->after(static_cast<steps::StepId>(next_), on);
    if (timer_) observe_arrival(static_cast<steps::StepId>(next_));
    if (step.event >= 0) device_.event(step.event).record(on);
    ++next_;
    if (next_ == end_) device_.chained(caller_, capture_);
  }

  static bool held_behind(const steps::Step& step) {
    return std::holds_alternative<steps::Gemm>(step.what);
  }

  void close() {
    name_chunk(-1);
    if (timer_) timer_->end(caller_);
    if (capture_) {
      group_.mark_captured();
    } else {
      group_.track(caller_, list_.chunks);
    }
  }

  // Names a chunk that is communicated, for profilers and tools that read NVTX.
  void name_chunk(int32_t chunk) {
    if (chunk == named_chunk_) return;
    chunk_range_.reset();
    if (chunk >= 0) chunk_range_.emplace(chunk);
    call_.operands->name_chunk(chunk);
    named_chunk_ = chunk;
  }

  // The delay that tests ask for.
  void hold(cudaStream_t on) {
    if (call_.delay_us > 0) check_cuda(kernels::delay(call_.delay_us, on), "launching a delay");
  }

  // Timelines: waits of their own.
  void observe_tiles(const steps::Step& step) {
    const auto* wait = std::get_if<steps::WaitForTiles>(&step.what);
    if (wait == nullptr || wait->chunk >= list_.chunks) return;
    const cudaStream_t observer = device_.observer.get();
    wait_for_count(wait->chunk, wait->tiles, observer);
    timer_->observed(wait->chunk, observer);
  }
  void observe_arrival(steps::StepId id) {
    int32_t chunk = -1;
    if (!timer_->arrives(id, chunk)) return;
    const cudaStream_t observer = device_.observer.get();
    wait_for_peers(arrivals(chunk), chunk, observer);
    timer_->observed(chunk, observer);
  }

  // --- where things are ---

  cudaStream_t stream(Lane lane) const {
    if (lane == Lane::kCaller) return caller_;
    if (lane == Lane::kCopy) return device_.copy.get();
    return side(static_cast<int32_t>(lane) - static_cast<int32_t>(Lane::kSide0));
  }
  cudaStream_t side(int32_t lane) const {
    return device_.side_stream(plan_.resources.low_priority, lane);
  }

  char* base(const Where& where) const {
    switch (where.buffer) {
      case Buffer::kWindow:
        return window_;
      case Buffer::kSlot:
        return peers_->slot(peer_call_, where.index);
      case Buffer::kProduct:
        if (product_ != nullptr) return product_;
        [[fallthrough]];
      default:
        return static_cast<char*>(call_.operands->base(where.buffer, where.index));
    }
  }
  char* at(const Where& where) const {
    char* const begin = base(where);
    return begin == nullptr ? nullptr : begin + where.offset;
  }
  char* at(const std::optional<Where>& where) const { return where ? at(*where) : nullptr; }

  Communicator& communicator(int32_t max_ctas, int32_t lane) const {
    const steps::Communicator wanted = {max_ctas, lane};
    const auto found = std::find(list_.communicators.begin(), list_.communicators.end(), wanted);
    return *communicators_[static_cast<size_t>(found - list_.communicators.begin())];
  }

  const plan::TileOrder& order(int32_t index) const {
    return list_.orders[static_cast<size_t>(index)];
  }

  int64_t deadline_ns() const { return std::chrono::nanoseconds(group_.timeout()).count(); }

  template <typename Params>
  Params with_deadline(Params params) const {
    params.deadline_ns = deadline_ns();
    params.report = group_.report();
    return params;
  }

  // --- steps: lanes ---

  void enqueue(const steps::Fork& step, cudaStream_t) {
    forked_ = true;
    lanes_ = step.side_lanes;
    copies_ = step.copies;
    device_.fork.record(caller_);
    for (int lane = 0; lane < lanes_; ++lane) device_.fork.block(side(lane));
    if (copies_) device_.fork.block(device_.copy.get());
    if (timer_) device_.fork.block(device_.observer.get());
  }

  void enqueue(const steps::Join&, cudaStream_t) { join(); }
  void join() {
    forked_ = false;
    for (int lane = 0; lane < lanes_; ++lane) {
      device_.join[lane].record(side(lane));
      device_.join[lane].block(caller_);
    }
    if (copies_) {
      device_.copied.record(device_.copy.get());
      device_.copied.block(caller_);
    }
  }

  void enqueue(const steps::Delay& step, cudaStream_t on) {
    check_cuda(kernels::delay(step.us, on), "launching a delay");
  }

  // --- steps: what computes ---

  void enqueue(const steps::Gemm& step, cudaStream_t on) {
    kernels::GemmParams gemm = call_.operands->gemm(step.weight);
    gemm.m = step.rows.end - step.rows.begin;
    place_operands(step, gemm);
    gemm.term = step.term;
    gemm.terms = step.terms;
    gemm.rows = step.map;
    if (call_.blocks > 1) gemm.rows.block_rows = step.map.part_rows / call_.blocks;
    gemm.order = order(step.order);
    gemm.first_tile = step.first_tile;
    gemm.end_tile = step.end_tile;
    gemm.ctas = step.ctas;
    if (step.counts) gemm.counters = counters_;
    if (step.ends_call) gemm.ending.signal = peers_->ending(peer_call_);
    if (step.ends_call || gemm.peers) {
      gemm.ending.tiles_taken = peers_->tiles_taken(peer_call_);
    }
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, on), "launching the GEMM");
  }

  void place_operands(const steps::Gemm& step, kernels::GemmParams& gemm) const {
    const Where input = {Buffer::kInput};
    if (step.input.buffer == Buffer::kInput) {
      // Rows of an operand that need not be contiguous.
      gemm.input = at(input) +
                   step.rows.begin * gemm.input_stride * plan::element_bytes(plan_.problem.dtype);
      if (gemm.scales) gemm.scales->input += step.rows.begin / gemm.scales->rows_per_scale;
    } else {
      gemm.input = at(step.input);
    }
    gemm.output = at(step.outputs[0].where);
    if (step.map.mode == plan::RowMap::Mode::kGather) gemm.gather = gather(step);
    if (step.stores_for_peers()) gemm.peers = peers(step);
  }

  // Bytes to a place among the gathered rows: where they go.
  kernels::CopyRun in_blocks(const Where& to, int64_t bytes) const {
    if (call_.blocks == 1) return {.to = at(to), .bytes = bytes};
    const int64_t part = plan::part_rows(plan_) * plan_.problem.k * element_bytes_;
    const int64_t block = part / call_.blocks;
    const int64_t number = to.offset / part;
    return {.to = base(to) + number * block,
            .bytes = bytes,
            .block_bytes = block,
            .gap_bytes = (plan_.problem.world_size - 1) * block,
            .first = to.offset - number * part};
  }

  kernels::GemmGather gather(const steps::Gemm& step) const {
    kernels::GemmGather gather;
    gather.own_input = at(Where{Buffer::kInput});
    if (step.awaits_chunks) gather.arrivals = with_deadline(arrivals(0));
    for (const steps::Move& move : step.moves) {
      kernels::CopyRun& run = gather.copies[gather.num_copies++];
      run = in_blocks(move.to, move.bytes);
      run.from = at(move.from);
      run.chunk = move.arrival;
    }
    return gather;
  }

  kernels::GemmPeers peers(const steps::Gemm& step) const {
    kernels::GemmPeers peers;
    for (size_t part = 0; part < step.outputs.size(); ++part) {
      if (part > 0) peers.more_outputs[part - 1] = at(step.outputs[part].where);
      peers.sources[part] = at(step.outputs[part].adds);
    }
    peers.num_more_outputs = static_cast<int32_t>(step.outputs.size()) - 1;
    for (const Where& mirror : step.mirrors) peers.mirrors[peers.num_mirrors++] = at(mirror);
    if (step.arriving) {
      peers.arriving = at(step.arriving);
      peers.collected = at(Where{Buffer::kOutput});
    }
    peers.spread_ns = step.spread_ns;
    if (step.announces) peers.tiles = peer_tiles();
    if (step.sends_messages) peers.messages = messages(step);
    return peers;
  }

  kernels::GemmMessages messages(const steps::Gemm& step) const {
    kernels::GemmMessages messages{with_deadline(peers_->meeting(peer_call_)), counters_};
    for (const steps::Move& move : step.moves) {
      messages.received[move.arrival] = {
          .from = at(move.from), .to = at(move.to), .bytes = move.bytes};
    }
    return messages;
  }

  // Between begin() and finish(), by the caller.
  void enqueue(const steps::CallersKernel&, cudaStream_t) {}

  // [D] By the stream itself, which takes no SM and orders what it did before: pairs with the acquire in the caller's
  // kernel (overlap/signal.cuh, triton.py).
  void enqueue(const steps::Arrive& step, cudaStream_t on) {
    check_cuda(write_value(counters_ + step.chunk, 1, on), "writing a flag");
  }

  void enqueue(const steps::LibraryGemm& step, cudaStream_t) {
    void* const made =
        call_.operands->library(step, at(step.input), at(step.output.adds), at(step.output.where));
    if (made != nullptr) product_ = static_cast<char*>(made);
  }

  void enqueue(const steps::Pack& step, cudaStream_t on) {
    kernels::ReorderParams params = reorder(step);
    params.row_major = at(step.source);
    params.packed = at(step.destination);
    params.term = step.term;
    check_cuda(kernels::pack_chunk(params, on), "packing a chunk");
  }

  void enqueue(const steps::Unpack& step, cudaStream_t on) {
    kernels::ReorderParams params = reorder(step);
    params.packed = at(step.source);
    params.row_major = at(step.destination);
    params.bias = step.bias ? call_.bias : nullptr;
    check_cuda(kernels::unpack_chunk(params, on), "unpacking a chunk");
  }

  template <typename PackOrUnpack>
  kernels::ReorderParams reorder(const PackOrUnpack& step) const {
    kernels::ReorderParams params;
    params.m = plan_.problem.m;
    params.n = plan_.problem.n;
    params.tile_m = plan_.tile_m;
    params.tile_n = plan_.tile_n;
    params.dtype = plan::moved_dtype(plan_.problem);
    params.order = order(step.order);
    params.chunk = step.chunk;
    params.terms = step.terms;
    params.ctas = step.ctas;
    return params;
  }

  void enqueue(const steps::AddBias& step, cudaStream_t on) {
    kernels::BiasParams params;
    params.rows = step.rows;
    params.n = plan_.problem.n;
    params.dtype = plan::moved_dtype(plan_.problem);
    params.source = at(step.source);
    params.destination = at(step.destination);
    params.bias = call_.bias;
    params.ctas = step.ctas;
    check_cuda(kernels::add_bias(params, on), "adding the bias");
  }

  // --- steps: the own GEMM's chunks and NCCL ---

  void wait_for_count(int32_t chunk, int32_t expected, cudaStream_t on) {
    kernels::WaitParams wait;
    wait.counter = counters_ + chunk;
    wait.expected = expected;
    wait.chunk = chunk;
    check_cuda(kernels::wait_counter(with_deadline(wait), on), "launching a wait");
  }
  void enqueue(const steps::WaitForTiles& step, cudaStream_t on) {
    wait_for_count(step.chunk, step.tiles, on);
  }
  void enqueue(const steps::Mark& step, cudaStream_t on) {
    wait_for_count(step.chunk, std::numeric_limits<int32_t>::min(), on);
  }

  void enqueue(const steps::Collective& step, cudaStream_t on) {
    Communicator& by = communicator(step.max_ctas, step.lane);
    const auto count = static_cast<size_t>(step.count);
    const plan::DType dtype = plan::moved_dtype(plan_.problem);
    // Chunks are staged as the list has them.
    const int blocks = plan_.schedule == plan::Schedule::kSequential ? call_.blocks : 1;
    switch (step.kind) {
      case plan::Collective::kReduceScatter:
        by.reduce_scatter(at(step.source), at(step.destination), count, dtype, on, blocks);
        return;
      case plan::Collective::kAllReduce:
        by.all_reduce(at(step.source), at(step.destination), count, dtype, on);
        return;
      default:
        by.all_gather(at(step.source), at(step.destination), count, dtype, on, blocks);
    }
  }

  void enqueue(const steps::SendReceive& step, cudaStream_t on) {
    if (step.sends.empty() && step.receives.empty()) return;
    const auto messages = [&](const std::vector<steps::Message>& all) {
      std::vector<Communicator::Message> made;
      made.reserve(all.size());
      for (const steps::Message& one : all) {
        made.push_back({one.peer, at(one.where), static_cast<size_t>(one.bytes)});
      }
      return made;
    };
    communicator(step.max_ctas, step.lane)
        .send_receive(messages(step.sends), messages(step.receives), on);
  }

  void enqueue(const steps::Copy& step, cudaStream_t on) {
    if (call_.blocks > 1 && step.destination.buffer == Buffer::kGathered) {
      copy_into_blocks(step, on);
      return;
    }
    copy_rows(at(step.destination), at(step.source), step.bytes, on);
  }
  static void copy_rows(void* to, const void* from, int64_t bytes, cudaStream_t on) {
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, on),
               "copying rows");
  }

  // Whole blocks at once, and what is left of the first and of the last.
  void copy_into_blocks(const steps::Copy& step, cudaStream_t on) {
    const kernels::CopyRun run = in_blocks(step.destination, step.bytes);
    const char* const from = at(step.source);
    char* const to = static_cast<char*>(run.to);
    for (int64_t done = 0; done < run.bytes;) {
      const int64_t place = run.first + done;
      const int64_t block = place / run.block_bytes;
      const int64_t left = run.bytes - done;
      char* const begin = to + place + block * run.gap_bytes;
      const int64_t whole = place % run.block_bytes == 0 ? left / run.block_bytes : 0;
      if (whole > 1) {
        const auto width = static_cast<size_t>(run.block_bytes);
        check_cuda(
            cudaMemcpy2DAsync(begin, width + static_cast<size_t>(run.gap_bytes), from + done, width,
                              width, static_cast<size_t>(whole), cudaMemcpyDeviceToDevice, on),
            "copying blocks of rows");
        done += whole * run.block_bytes;
      } else {
        const int64_t count = std::min(left, (block + 1) * run.block_bytes - place);
        copy_rows(begin, from + done, count, on);
        done += count;
      }
    }
  }

  void enqueue(const steps::CopyRows& step, cudaStream_t on) {
    if (step.adds) {
      call_.operands->add(step, at(step.source), at(step.destination), on);
      return;
    }
    check_cuda(cudaMemcpy2DAsync(at(step.destination), static_cast<size_t>(step.destination_stride),
                                 at(step.source), static_cast<size_t>(step.source_stride),
                                 static_cast<size_t>(step.row_bytes),
                                 static_cast<size_t>(step.rows), cudaMemcpyDeviceToDevice, on),
               "copying a rectangle");
  }

  // --- steps: peers ---

  kernels::PeerWaitParams arrivals(int32_t step) const {
    return peers_->wait_for(peer_call_, Peers::Flag::kArrived, peers_->everyone_else(), step);
  }
  void wait_for_peers(kernels::PeerWaitParams wait, int32_t chunk, cudaStream_t on) {
    wait.chunk = chunk;
    check_cuda(kernels::wait_peers_acquire_sys(with_deadline(wait), on), "launching a wait");
  }

  void enqueue(const steps::WaitForSlots&, cudaStream_t on) {
    if (!peer_call_.slot_may_be_busy) return;
    wait_for_peers(peers_->wait_for_slots(peer_call_, peers_->everyone_else()), 0, on);
  }
  void enqueue(const steps::WaitForPeers& step, cudaStream_t on) {
    wait_for_peers(arrivals(step.step), step.step, on);
  }
  void enqueue(const steps::Signal& step, cudaStream_t on) {
    const uint32_t self = step.to_self ? 1u << group_.rank() : 0;
    peers_->signal(peer_call_, Peers::Flag::kArrived, peers_->everyone_else() | self, step.step,
                   on);
  }
  void enqueue(const steps::EndCall&, cudaStream_t on) { peers_->end(peer_call_, on); }

  // The tile flags of a ring.
  kernels::PeerTiles peer_tiles() const {
    const int64_t part =
        static_cast<int64_t>(plan::tiles_m(plan_)) / group_.world_size() * plan::tiles_n(plan_);
    return with_deadline(peers_->tiles(peer_call_, part));
  }
  void enqueue(const steps::MeetTiles& step, cudaStream_t on) {
    check_cuda(kernels::meet_tiles(peer_tiles(), step.first_announced, step.tiles,
                                   step.first_awaited, step.tiles, step.distance, on),
               "launching a signal and a wait");
  }

  // The flags of a program, by number, the same in all ranks' memory.
  kernels::PeerTiles transfer_flags() const { return with_deadline(peers_->tiles(peer_call_, 0)); }
  int32_t distance(int32_t from, int32_t to) const {
    return (to - from + group_.world_size()) % group_.world_size();
  }
  void enqueue(const steps::Announce& step, cudaStream_t on) {
    check_cuda(kernels::meet_tiles(transfer_flags(), step.flag, 1, 0, 0,
                                   distance(group_.rank(), step.peer), on),
               "launching a signal");
  }
  void enqueue(const steps::Await& step, cudaStream_t on) {
    check_cuda(kernels::meet_tiles(transfer_flags(), 0, 0, step.flag, 1,
                                   distance(step.peer, group_.rank()), on),
               "launching a wait");
  }
  void enqueue(const steps::Count& step, cudaStream_t on) {
    check_cuda(kernels::count(counters_ + step.counter, step.count, on), "launching a count");
  }

  // Buffers' numbers, and behind them the ranks' slots.
  static uint8_t base_number(const Where& where) {
    if (where.buffer != Buffer::kSlot) return static_cast<uint8_t>(where.buffer);
    return static_cast<uint8_t>(static_cast<int32_t>(Buffer::kSlot) + where.index);
  }
  static_assert(static_cast<int>(Buffer::kSlot) + kernels::kMaxPeers <=
                kernels::kMaxInterpreterBases);

  void enqueue(const steps::Interpret& step, cudaStream_t on) {
    kernels::InterpreterParams params{with_deadline(peers_->meeting(peer_call_))};
    params.dtype = plan::moved_dtype(plan_.problem);
    params.streams = step.streams;
    params.blocks = step.blocks;
    params.ends_call = step.ends_call;
    params.counters = counters_;
    const kernels::PeerTiles flags = transfer_flags();
    for (int32_t peer = 0; peer < group_.world_size(); ++peer) {
      const int32_t behind = distance(group_.rank(), peer);
      params.flags[peer] =
          behind == 0 ? const_cast<uint64_t*>(flags.arrived) : flags.announce[behind - 1];
    }
    for (const steps::Half& half : step.halves) {
      kernels::InterpreterTransfer one;
      for (const Where* where : {&half.source, &half.destination}) {
        params.bases[base_number(*where)] = base(*where);
      }
      one.source_base = base_number(half.source);
      one.destination_base = base_number(half.destination);
      one.source = half.source.offset;
      one.destination = half.destination.offset;
      one.rows = half.rows;
      one.row_bytes = half.row_bytes;
      one.source_stride = half.source_stride;
      one.destination_stride = half.destination_stride;
      one.flag = half.flag;
      one.stream = static_cast<uint8_t>(half.stream);
      one.adds = half.adds;
      one.from = static_cast<int8_t>(half.from.value_or(-1));
      one.to = static_cast<int8_t>(half.to.value_or(-1));
      one.counter = static_cast<int16_t>(half.counter.value_or(-1));
      one.first_wait = static_cast<uint16_t>(params.waits.size());
      for (const steps::CounterWait& wait : half.waits) {
        params.waits.push_back({wait.counter, wait.count});
      }
      one.end_wait = static_cast<uint16_t>(params.waits.size());
      params.transfers.push_back(one);
    }
    check_cuda(kernels::interpret(params, on), "launching a program's transfers");
  }

  void enqueue(const steps::PeerCollective& step, cudaStream_t on) {
    constexpr int64_t kBytes = kernels::kPeerAccessBytes;
    kernels::PeerCollectiveParams params{with_deadline(peers_->meeting(peer_call_))};
    params.dtype = plan::moved_dtype(plan_.problem);
    params.reduces = step.reduces;
    params.gathers = step.gathers;
    params.stride = step.stride / kBytes;
    params.first = step.first / kBytes;
    if (step.reduces) params.row_count = plan_.problem.n * element_bytes_ / kBytes;
    params.own = at(step.own);
    params.output = at(step.output);
    params.bias = step.bias ? call_.bias : nullptr;
    for (size_t rank = 0; rank < step.pieces.size(); ++rank) {
      const steps::Piece& piece = step.pieces[rank];
      params.count[rank] = piece.bytes / kBytes;
      params.send[rank] = at(piece.send);
      params.destination[rank] = at(piece.destination);
      params.received[rank] = at(piece.received);
      params.final_destination[rank] = at(piece.final_destination);
      params.final_received[rank] = at(piece.final_received);
    }
    check_cuda(kernels::peer_collective(params, on), "launching a collective");
  }

  void enqueue(const steps::LowLatency& step, cudaStream_t on) {
    constexpr int64_t kWord = 4;
    kernels::PeerLowLatencyParams params = with_deadline(peers_->low_latency(list_.communication));
    params.dtype = plan::moved_dtype(plan_.problem);
    params.in_pieces = step.in_pieces;
    params.words = step.bytes / kWord;
    params.own = at(step.own);
    params.output = at(step.output);
    params.bias = step.bias ? call_.bias : nullptr;
    params.row_words = plan_.problem.n * element_bytes_ / kWord;
    check_cuda(kernels::peer_all_reduce_low_latency(params, on), "launching an all-reduce");
  }

  void enqueue(const steps::PeerExchange& step, cudaStream_t on) {
    constexpr int64_t kBytes = kernels::kPeerAccessBytes;
    kernels::PeerExchangeParams params{with_deadline(peers_->meeting(peer_call_))};
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
    check_cuda(kernels::peer_exchange(params, on), "launching an exchange");
  }

  const Range range_;  // while the host enqueues the call
  Group& group_;
  DeviceState& device_;
  const Call& call_;
  const plan::Plan& plan_;
  const steps::StepList& list_;
  const cudaStream_t caller_;
  const int64_t element_bytes_;
  const std::optional<unsigned long long> capture_;
  const size_t first_ = first_chained();
  const size_t end_ = end_chained();
  size_t next_ = 0;                    // step
  bool open_ = false;                  // between begin() and finish()
  std::vector<CommunicatorKey> keys_;  // those of the list, and what they stand for
  std::vector<Communicator*> communicators_;
  Peers* peers_ = nullptr;
  Peers::Call peer_call_;
  int32_t* counters_ = nullptr;
  char* window_ = nullptr;
  char* product_ = nullptr;  // once the framework has made it
  bool forked_ = false;
  int lanes_ = 0;
  bool copies_ = false;
  std::optional<StepTimer> timer_;
  std::optional<Range> chunk_range_;
  int32_t named_chunk_ = -1;
};

}  // namespace

void run(Group& group, const Call& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  Run(group, call)();
}

class OpenCall::State {
 public:
  State(Group& group, const Call& call) : group_(group), call_(call) {}

  Group& group_;
  const Call call_;
  std::optional<Run> run_;
};

OpenCall::OpenCall(Group& group, const Call& call) : state_(std::make_unique<State>(group, call)) {}

OpenCall::~OpenCall() {
  abandon();
}

void OpenCall::begin() {
  const std::lock_guard<std::mutex> lock(state_->group_.device().mutex);
  try {
    state_->run_.emplace(state_->group_, state_->call_).begin();
  } catch (...) {
    state_->run_.reset();
    throw;
  }
}

void* OpenCall::window() const {
  return state_->run_->window();
}

void OpenCall::finish() {
  const std::lock_guard<std::mutex> lock(state_->group_.device().mutex);
  try {
    state_->run_->finish();
  } catch (...) {
    state_->run_.reset();
    throw;
  }
  state_->run_.reset();
}

void OpenCall::abandon() noexcept {
  const std::lock_guard<std::mutex> lock(state_->group_.device().mutex);
  if (!state_->run_) return;
  if (state_->run_->open()) state_->run_->leave();
  state_->run_.reset();  // joins what was forked
}

}  // namespace overlap::runtime
