#include "runtime/run_state.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/chunk/reorder.h"
#include "kernels/signal/signal.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

using steps::Buffer;
using steps::Where;

// Enqueues a write of 32 bits, after all that the stream does before. The driver is not linked: a machine without one
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

kernels::GemmGather gather(const RunState& run, const steps::Gemm& step) {
  kernels::GemmGather gather;
  gather.own_input = run.at(Where{Buffer::kInput});
  if (step.awaits_chunks) gather.arrivals = run.with_deadline(run.arrivals(0));
  for (const steps::Move& move : step.moves) {
    kernels::CopyRun& copy = gather.copies[gather.num_copies++];
    copy = run.in_blocks(move.to, move.bytes);
    copy.from = run.at(move.from);
    copy.chunk = move.arrival;
  }
  return gather;
}

kernels::GemmMessages messages(const RunState& run, const steps::Gemm& step) {
  kernels::GemmMessages messages{run.with_deadline(run.peers->meeting(run.peer_call)),
                                 run.counters};
  for (const steps::Move& move : step.moves) {
    messages.received[move.arrival] = {
        .from = run.at(move.from), .to = run.at(move.to), .bytes = move.bytes};
  }
  return messages;
}

kernels::GemmPeers peers(const RunState& run, const steps::Gemm& step) {
  kernels::GemmPeers peers;
  for (size_t part = 0; part < step.outputs.size(); ++part) {
    if (part > 0) peers.more_outputs[part - 1] = run.at(step.outputs[part].where);
    peers.sources[part] = run.at(step.outputs[part].adds);
  }
  peers.num_more_outputs = static_cast<int32_t>(step.outputs.size()) - 1;
  for (const Where& mirror : step.mirrors) peers.mirrors[peers.num_mirrors++] = run.at(mirror);
  if (step.arriving) {
    peers.arriving = run.at(step.arriving);
    peers.collected = run.at(Where{Buffer::kOutput});
  }
  peers.terms = run.at(step.terms_at);
  peers.rounds = step.rounds;
  peers.spread_ns = step.spread_ns;
  if (step.announces) peers.tiles = run.peer_tiles();
  if (step.sends_messages) peers.messages = messages(run, step);
  return peers;
}

void place_operands(const RunState& run, const steps::Gemm& step, kernels::GemmParams& gemm) {
  const Where input = {Buffer::kInput};
  if (step.input.buffer == Buffer::kInput) {
    // Rows of an operand that need not be contiguous.
    gemm.input = run.at(input) +
                 step.rows.begin * gemm.input_stride * plan::element_bytes(run.plan.problem.dtype);
    if (gemm.scales) gemm.scales->input += step.rows.begin / gemm.scales->rows_per_scale;
  } else {
    gemm.input = run.at(step.input);
  }
  gemm.output = run.at(step.outputs[0].where);
  if (step.map.mode == plan::RowMap::Mode::kGather) gemm.gather = gather(run, step);
  if (step.stores_for_peers()) gemm.peers = peers(run, step);
}

template <typename PackOrUnpack>
kernels::ReorderParams reorder(const RunState& run, const PackOrUnpack& step) {
  kernels::ReorderParams params;
  params.m = run.plan.problem.m;
  params.n = run.plan.problem.n;
  params.tile_m = run.plan.tile_m;
  params.tile_n = run.plan.tile_n;
  params.dtype = plan::moved_dtype(run.plan.problem);
  params.order = run.order(step.order);
  params.chunk = step.chunk;
  params.terms = step.terms;
  params.ctas = step.ctas;
  return params;
}

}  // namespace

void enqueue(RunState&, const steps::Delay& step, cudaStream_t on) {
  check_cuda(kernels::delay(step.us, on), "launching a delay");
}

void enqueue(RunState& run, const steps::Gemm& step, cudaStream_t on) {
  kernels::GemmParams gemm = run.call.operands->gemm(step.weight);
  gemm.m = step.rows.end - step.rows.begin;
  place_operands(run, step, gemm);
  gemm.term = step.term;
  gemm.terms = step.terms;
  gemm.rows = step.map;
  if (run.call.blocks > 1) gemm.rows.block_rows = step.map.part_rows / run.call.blocks;
  gemm.order = run.order(step.order);
  gemm.first_tile = step.first_tile;
  gemm.end_tile = step.end_tile;
  gemm.ctas = step.ctas;
  if (step.counts) gemm.counters = run.counters;
  if (step.ends_call) gemm.ending.signal = run.peers->ending(run.peer_call);
  if (step.ends_call || gemm.peers) {
    gemm.ending.tiles_taken = run.peers->tiles_taken(run.peer_call);
  }
  check_cuda(kernels::launch_gemm(run.plan.kernel, gemm, on), "launching the GEMM");
  run.told = run.told || step.announces;
  run.ended = run.ended || step.ends_call;
}

// [D] By the stream itself, which takes no SM and orders what it did before: pairs with the acquire in the caller's
// kernel (overlap/signal.cuh, triton.py).
void enqueue(RunState& run, const steps::Arrive& step, cudaStream_t on) {
  check_cuda(write_value(run.counters + step.chunk, 1, on), "writing a flag");
}

void enqueue(RunState& run, const steps::LibraryGemm& step, cudaStream_t) {
  void* const made = run.call.operands->library(step, run.at(step.input), run.at(step.output.adds),
                                                run.at(step.output.where));
  if (made != nullptr) run.product = static_cast<char*>(made);
}

void enqueue(RunState& run, const steps::Pack& step, cudaStream_t on) {
  kernels::ReorderParams params = reorder(run, step);
  params.row_major = run.at(step.source);
  params.packed = run.at(step.destination);
  params.term = step.term;
  check_cuda(kernels::pack_chunk(params, on), "packing a chunk");
}

void enqueue(RunState& run, const steps::Unpack& step, cudaStream_t on) {
  kernels::ReorderParams params = reorder(run, step);
  params.packed = run.at(step.source);
  params.row_major = run.at(step.destination);
  params.bias = step.bias ? run.call.bias : nullptr;
  check_cuda(kernels::unpack_chunk(params, on), "unpacking a chunk");
}

void enqueue(RunState& run, const steps::AddTerms& step, cudaStream_t on) {
  kernels::TermsParams params;
  params.rows = step.rows;
  params.terms = step.terms;
  params.stride = step.stride / run.element_bytes;
  params.n = run.plan.problem.n;
  params.dtype = plan::moved_dtype(run.plan.problem);
  params.source = run.at(step.source);
  params.destination = run.at(step.destination);
  params.bias = step.bias ? run.call.bias : nullptr;
  params.ctas = step.ctas;
  check_cuda(kernels::add_terms(params, on), "adding terms");
}

}  // namespace overlap::runtime
