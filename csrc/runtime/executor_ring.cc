// Reductions over memory that the ranks map into each other: no SM is given up to communication. The
// GEMM, one launch for all phases, sends partial sums by its epilogue's stores (as they are on their
// way, it goes on), announces each tile, and waits for each tile that it adds. It also sends and collects
// an all-reduce's final tiles; or, in chunks, copy engines do.
#include <algorithm>

#include "kernels/peer_collective.h"
#include "kernels/reorder.h"
#include "plan/ring_order.h"
#include "runtime/executor.h"
#include "runtime/executor_loop.h"

namespace overlap::runtime {
namespace {

constexpr int kSendLanes = 2;  // a chunk's copy starts while the one before is being signalled

class RingLoop : ExecutorLoop {
 public:
  RingLoop(Group& group, const ProduceCall& call)
      : ExecutorLoop(group, *call.plan, call.stream, call.delay_us),
        call_(call),
        chunks_(static_cast<int>(plan_.chunks.size())),
        ranks_(group.world_size()),
        rank_(group.rank()),
        sends_on_(plan_.problem.op == plan::Op::kGemmAllReduce),
        part_rows_(plan::part_rows(plan_)),
        row_bytes_(plan_.problem.n * element_bytes_),
        part_bytes_(part_rows_ * row_bytes_),
        collects_(plan::ring_collects(plan_)),
        by_chunk_(sends_on_ && !collects_) {}

  void run() {
    const bool hears_all = sends_on_ || ranks_ == 2;
    prepare_peers(plan::peer_slot_bytes(plan_), hears_all);
    begin(call_.trace, chunks_);
    if (counts()) counters_ = zeroed_counters(call_.counters, chunks_);
    wait_for_slots(stream_);
    if (by_chunk_) {
      finish_by_chunk();
    } else {
      finish_at_once();
    }
    end(chunks_);
  }

 private:
  // What is final is stored into the others' memory, too; in chunks between two ranks only.
  bool mirrors() const { return call_.signals && (collects_ || (sends_on_ && ranks_ == 2)); }
  bool counts() const { return by_chunk_ && call_.signals; }
  // Nothing is communicated after the GEMM, which then ends the call.
  bool ends_in_gemm() const { return !by_chunk_ && call_.signals; }

  // The finished parts in chunks beside the GEMM, which leaves SMs to their waits.
  void finish_by_chunk() {
    lanes_ = kSendLanes;
    fork(true);
    compute();
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    const bool relays = mirrors() && trace_ == nullptr && delay_us_ == 0;
    if (relays) relay();
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (!relays) send(chunk);
      receive(chunk);
    }
    join();
    release_slot();
    if (call_.bias != nullptr) add_bias();
  }

  // All inside the GEMM, or, where it knows no peers, after it.
  void finish_at_once() {
    const bool inside = ends_in_gemm();
    if (inside) record_begins();
    compute();
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    for (int chunk = 0; chunk < chunks_ && trace_ != nullptr; ++chunk) {
      trace_->ready[chunk]->record(stream_);
    }
    if (!inside) record_begins();
    if (sends_on_) hold(stream_);
    if (collects_ && !inside) collect();
    for (int chunk = 0; chunk < chunks_ && trace_ != nullptr; ++chunk) {
      trace_->finish[chunk]->record(stream_);
    }
    if (!inside) release_slot();
    if (call_.bias != nullptr) add_bias();
  }

  void record_begins() {
    for (int chunk = 0; chunk < chunks_ && trace_ != nullptr; ++chunk) {
      trace_->begin[chunk]->record(stream_);
    }
  }

  void compute() {
    if (call_.signals) {
      launch();
    } else {
      for (int phase = 0; phase < ranks_; ++phase) compute_by_library(phase);
      device_.computed.record(stream_);
    }
  }

  // The part that this rank computes in a phase. In each it adds what came from the rank before, and
  // passes the sum on to the next one, but for the last: its own.
  int part_of(int phase) const { return (rank_ + 2 * ranks_ - 1 - phase) % ranks_; }

  // What came from the rank before; of the first phase nothing.
  const char* source(int phase) const {
    return phase == 0 ? nullptr : peers_->slot(peer_call_, rank_) + (phase - 1) * part_bytes_;
  }

  char* destination(int phase) const {
    if (phase + 1 == ranks_) return own_rows(0);
    return peers_->slot(peer_call_, (rank_ + 1) % ranks_) + phase * part_bytes_;
  }

  kernels::PeerTiles peer_tiles() const {
    kernels::PeerTiles tiles = peers_->tiles(peer_call_, part_tiles());
    tiles.deadline_ns = deadline_ns();
    tiles.report = group_.report();
    return tiles;
  }

  int64_t part_tiles() const {
    return static_cast<int64_t>(plan::tiles_m(plan_)) / ranks_ * plan::tiles_n(plan_);
  }

  void compute_by_library(int phase) {
    const int part = part_of(phase);
    const bool last = phase + 1 == ranks_;
    void* place = last ? destination(phase) : call_.library_rows;
    call_.library_phase({part * part_rows_, (part + 1) * part_rows_}, source(phase), place);
    if (last) return;
    copy(destination(phase), place, part_bytes_, stream_);
    meet(peer_tiles(), phase * part_tiles(), phase * part_tiles(), 1);
  }

  // Announces and awaits all tiles of a phase.
  void meet(const kernels::PeerTiles& tiles, int64_t announced, int64_t awaited, int distance) {
    check_cuda(kernels::meet_tiles(tiles, announced, part_tiles(), awaited, part_tiles(), distance,
                                   stream_),
               "launching a signal and a wait");
  }

  // What the GEMM does with final tiles where it signals.
  void collect() {
    push({0, part_rows_}, stream_);
    const int64_t first = (ranks_ - 1) * part_tiles();
    for (int distance = 1; distance < ranks_; ++distance) {
      const kernels::PeerTiles tiles = peer_tiles();
      meet(tiles, first, first + (distance - 1) * part_tiles(), distance);
      const int part = tiles.before(distance);
      copy(static_cast<char*>(call_.output) + part * part_bytes_, finished(rank_, part),
           part_bytes_, stream_);
    }
  }

  // All phases in one launch, which announces and awaits single tiles.
  void launch() {
    kernels::GemmParams gemm = call_.gemm;
    gemm.rows.mode = plan::RowMap::Mode::kSplit;
    gemm.rows.part_rows = static_cast<int32_t>(part_rows_);
    gemm.rows.part_tile_rows = plan::tiles_m(plan_) / ranks_;
    gemm.rows.first_part = part_of(0);
    gemm.rows.part_step = ranks_ - 1;
    gemm.num_more_outputs = ranks_ - 1;
    for (int phase = 0; phase < ranks_; ++phase) {
      const int part = part_of(phase);
      (part == 0 ? gemm.output : gemm.more_outputs[part - 1]) = destination(phase);
      gemm.sources[part] = source(phase);
    }
    gemm.order = order();
    gemm.counters = counters_;
    if (!by_chunk_) gemm.rows.round_tile_rows = plan::ring_round_rows(plan_);
    for (int distance = 1; distance < ranks_ && mirrors(); ++distance) {
      gemm.mirrors[gemm.num_mirrors++] = finished((rank_ + distance) % ranks_, rank_);
    }
    if (collects_) {
      gemm.arriving = finished(rank_, 0);
      gemm.collected = call_.output;
    }
    gemm.peer_tiles = peer_tiles();
    gemm.spread_ns = spread_ns();
    gemm.tiles_taken = peers_->tiles_taken(peer_call_);
    if (ends_in_gemm()) gemm.ending = peers_->ending(peer_call_);
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  // Rounds of all parts; or the parts, one phase after the other, and the last one's chunks. The tiles of
  // the phases before count as the first chunk's.
  plan::TileOrder order() const {
    const int32_t rows = plan::tiles_m(plan_) / ranks_;
    const int32_t columns = plan::tiles_n(plan_);
    if (!by_chunk_) return plan::ring_order(ranks_, rows, columns, plan::ring_round_rows(plan_));
    std::vector<int32_t> heights(static_cast<size_t>(ranks_ - 1), rows);
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      heights.push_back(own_tiles(chunk) / columns);
    }
    plan::TileOrder order =
        plan::chunked_order(plan_, plan_.problem.n, heights, static_cast<size_t>(ranks_ - 1));
    order.parts = ranks_;
    return order;
  }

  // Of a chunk, in the own part.
  int32_t own_tiles(int chunk) const {
    return plan_.chunks[static_cast<size_t>(chunk)].tiles / ranks_;
  }

  // What a chunk's counter shows when it is finished.
  int32_t counted_tiles(int chunk) const {
    const int64_t before = chunk == 0 ? (ranks_ - 1) * part_tiles() : 0;
    return static_cast<int32_t>(own_tiles(chunk) + before);
  }

  // A finished chunk of the own part into every peer's memory.
  void send(int chunk) {
    const Range range(chunk);
    const cudaStream_t side = device_.side[chunk % kSendLanes].get();
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    hold(side);
    // One wait at a time: each keeps two SMs from the GEMM, its own and the other of a cluster.
    if (chunk > 0) device_.produced[chunk - 1].block(side);
    if (call_.signals) {
      enqueue_wait(counters_ + chunk, counted_tiles(chunk), chunk, side);  // [A]
    } else {
      device_.computed.block(side);
    }
    device_.produced[chunk].record(side);
    if (trace_ != nullptr) {
      trace_->ready[chunk]->record(side);
      trace_->begin[chunk]->record(side);
    }
    if (!mirrors()) push(rows, side);
    // A signal stands for all chunks before, too.
    if (chunk > 0) device_.communicated[chunk - 1].block(side);
    signal_peers(Peers::Flag::kArrived, peers_->everyone_else(), chunk, side);
    device_.communicated[chunk].record(side);
  }

  // Own rows that are final into every peer's memory, by the copy engine.
  void push(plan::Rows rows, cudaStream_t stream) {
    for (int distance = 1; distance < ranks_; ++distance) {
      const int peer = (rank_ + distance) % ranks_;
      copy(finished(peer, rank_) + rows.begin * row_bytes_, own_rows(rows.begin),
           (rows.end - rows.begin) * row_bytes_, stream);
    }
  }

  // All chunks' signals from one kernel: the GEMM has stored them where they belong.
  void relay() {
    kernels::PeerRelayParams params =
        peers_->relay(peer_call_, Peers::Flag::kArrived, peers_->everyone_else());
    params.counters = counters_;
    params.chunks = chunks_;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      params.expected[chunk] = counted_tiles(chunk);
    }
    params.deadline_ns = deadline_ns();
    params.report = group_.report();
    check_cuda(kernels::relay_chunks(params, device_.side[0].get()), "launching the signals");
  }

  // The same chunk of the other parts into the output.
  void receive(int chunk) {
    const Range range(chunk);
    const cudaStream_t copies = device_.copy.get();
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int64_t bytes = (rows.end - rows.begin) * row_bytes_;
    wait_peers(Peers::Flag::kArrived, peers_->everyone_else(), chunk, chunk, copies);
    if (trace_ != nullptr) trace_->finish[chunk]->record(copies);
    for (int distance = 1; distance < ranks_; ++distance) {
      const int part = (rank_ + distance) % ranks_;
      copy(static_cast<char*>(call_.output) + part * part_bytes_ + rows.begin * row_bytes_,
           finished(rank_, part) + rows.begin * row_bytes_, bytes, copies);
    }
  }

  void add_bias() {
    kernels::BiasParams params;
    params.rows = sends_on_ ? plan_.problem.m : part_rows_;
    params.n = plan_.problem.n;
    params.dtype = plan_.problem.dtype;
    params.source = call_.output;
    params.destination = call_.output;
    params.bias = call_.bias;
    check_cuda(kernels::add_bias(params, stream_), "adding the bias");
  }

  // Row `row` of the own part in the output.
  char* own_rows(int64_t row) const {
    return static_cast<char*>(call_.output) + (sends_on_ ? rank_ * part_bytes_ : 0) +
           row * row_bytes_;
  }

  // Where `part`, finished, arrives in the memory of `rank`.
  char* finished(int rank, int part) const {
    return peers_->slot(peer_call_, rank) + (ranks_ - 1 + part) * part_bytes_;
  }

  const ProduceCall& call_;
  const int chunks_;
  const int ranks_;
  const int rank_;
  const bool sends_on_;
  const int64_t part_rows_;
  const int64_t row_bytes_;
  const int64_t part_bytes_;
  const bool collects_;  // an all-reduce's final rows travel tile by tile
  const bool by_chunk_;  // or in chunks
  int32_t* counters_ = nullptr;
};

}  // namespace

void run_ring(Group& group, const ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  RingLoop(group, call).run();
}

}  // namespace overlap::runtime
