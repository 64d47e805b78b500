// Reductions over memory that the ranks map into each other: no SM is given up to communication, the
// GEMM's epilogue sends partial sums (as its stores are on their way, it goes on), copy engines what
// is final.
#include <algorithm>

#include "kernels/peer_collective.h"
#include "kernels/reorder.h"
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
        by_chunk_(sends_on_ && (chunks_ > 1 || row_bytes_ % kernels::kPeerAccessBytes != 0)) {}

  void run() {
    const bool hears_all = sends_on_ || ranks_ == 2;
    prepare_peers(plan::peer_slot_bytes(plan_), hears_all);
    begin(call_.trace, chunks_);
    if (counts()) {
      check_cuda(cudaMemsetAsync(call_.counters, 0, sizeof(int32_t) * static_cast<size_t>(chunks_),
                                 stream_),
                 "cudaMemsetAsync");
    }
    wait_for_slots(stream_);
    for (int phase = 0; phase + 1 < ranks_; ++phase) compute(phase);
    if (by_chunk_) {
      finish_by_chunk();
    } else {
      finish_at_once();
    }
    end(chunks_);
  }

 private:
  // Of two ranks, each stores what is final into the other's memory, too.
  bool mirrors() const { return sends_on_ && call_.signals && ranks_ == 2; }
  bool counts() const { return by_chunk_ && call_.signals; }

  // The last phase, and the finished parts in chunks beside it.
  void finish_by_chunk() {
    // Not earlier: a wait that holds an SM keeps a CTA of the GEMM out, and with it, as tiles are
    // dealt out in advance, a share of the tiles until all others are done. The last phase leaves
    // SMs to the waits.
    lanes_ = kSendLanes;
    fork(true);
    compute(ranks_ - 1);
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

  // The last phase, and then, in an all-reduce, all finished parts.
  void finish_at_once() {
    compute(ranks_ - 1);
    if (trace_ != nullptr) trace_->gemm_end.record(stream_);
    for (int chunk = 0; chunk < chunks_ && trace_ != nullptr; ++chunk) {
      trace_->ready[chunk]->record(stream_);
      trace_->begin[chunk]->record(stream_);
    }
    if (sends_on_) {
      if (delay_us_ > 0) check_cuda(kernels::delay(delay_us_, stream_), "launching a delay");
      if (!mirrors()) push({0, part_rows_}, stream_);
      gather();
    }
    for (int chunk = 0; chunk < chunks_ && trace_ != nullptr; ++chunk) {
      trace_->finish[chunk]->record(stream_);
    }
    if (!sends_on_) release_slot();
    if (call_.bias != nullptr) add_bias();
  }

  // One part: this rank's product, plus what came from the rank before, to the rank behind.
  void compute(int phase) {
    const int part = (rank_ + 2 * ranks_ - 1 - phase) % ranks_;
    const int previous = (rank_ + ranks_ - 1) % ranks_;
    const int next = (rank_ + 1) % ranks_;
    const bool last = phase + 1 == ranks_;
    const void* source =
        phase == 0 ? nullptr : peers_->slot(peer_call_, rank_) + (phase - 1) * part_bytes_;
    char* destination = last ? own_rows(0) : peers_->slot(peer_call_, next) + phase * part_bytes_;
    if (call_.signals) {
      launch(part, source, destination, last);
    } else {
      void* place = last ? destination : call_.library_rows;
      call_.library_phase({part * part_rows_, (part + 1) * part_rows_}, source, place);
      if (!last) copy(destination, place, part_bytes_, stream_);
      if (last) device_.computed.record(stream_);
    }
    if (!last) {
      // What comes from the rank before is the next phase's source.
      signal_then_wait(Peers::Flag::kPartial, 1u << next, 1u << previous, phase, phase + 1,
                       stream_);
    }
  }

  void launch(int part, const void* source, void* destination, bool last) {
    kernels::GemmParams gemm = call_.gemm;
    gemm.m = part_rows_;
    gemm.input = static_cast<const char*>(gemm.input) +
                 part * part_rows_ * gemm.input_stride * element_bytes_;
    gemm.output = destination;
    gemm.source = source;
    gemm.source_stride = gemm.output_stride;
    gemm.order = order(last);
    gemm.counters = last && counts() ? call_.counters : nullptr;
    if (last && mirrors()) {
      gemm.num_more_outputs = 1;
      gemm.more_outputs[0] = finished(1 - rank_, rank_);
    }
    if (!last) gemm.ctas = device_.sm_count();
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  // One part's tiles; in the last phase cut into chunks, which begin and end where bands do.
  plan::TileOrder order(bool last) const {
    const int32_t rows = plan::tiles_m(plan_) / ranks_;
    const int32_t columns = plan::tiles_n(plan_);
    std::vector<int32_t> heights;
    if (!last || !by_chunk_) {
      heights.push_back(rows);
    } else {
      for (const plan::Chunk& chunk : plan_.chunks) {
        heights.push_back(chunk.tiles / columns / ranks_);
      }
    }
    return chunked_order(plan_.problem.n, heights);
  }

  // A finished chunk of the own part into every peer's memory.
  void send(int chunk) {
    const cudaStream_t side = device_.side[chunk % kSendLanes].get();
    const plan::Rows rows = plan::chunk_rows(plan_, chunk);
    const int32_t expected = plan_.chunks[static_cast<size_t>(chunk)].tiles / ranks_;
    if (delay_us_ > 0) check_cuda(kernels::delay(delay_us_, side), "launching a delay");
    // One wait at a time: each keeps two SMs from the GEMM, its own and the other of a cluster.
    if (chunk > 0) device_.produced[chunk - 1].block(side);
    if (call_.signals) {
      enqueue_wait(call_.counters + chunk, expected, chunk, side);  // [A]
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
    params.counters = call_.counters;
    params.chunks = chunks_;
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      params.expected[chunk] = plan_.chunks[static_cast<size_t>(chunk)].tiles / ranks_;
    }
    params.deadline_ns = deadline_ns();
    params.report = group_.report();
    check_cuda(kernels::relay_chunks(params, device_.side[0].get()), "launching the signals");
  }

  // All finished parts of the others into the output, behind a signal of each.
  void gather() {
    kernels::PeerCollectiveParams params = collective();
    params.gathers = true;
    params.own = own_rows(0);
    params.output = call_.output;
    params.stride = part_bytes_ / kernels::kPeerAccessBytes;
    for (int rank = 0; rank < ranks_; ++rank) {
      params.count[rank] = params.stride;
      params.received[rank] = finished(rank_, rank);
    }
    check_cuda(kernels::peer_collective(params, stream_), "launching an all-gather");
  }

  // The same chunk of the other parts into the output.
  void receive(int chunk) {
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
  const bool by_chunk_;  // finished rows travel in chunks, else in one kernel after the GEMM
};

}  // namespace

void run_ring(Group& group, const ProduceCall& call) {
  const std::lock_guard<std::mutex> lock(group.device().mutex);
  RingLoop(group, call).run();
}

}  // namespace overlap::runtime
