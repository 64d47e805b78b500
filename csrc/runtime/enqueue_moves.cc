#include "runtime/run_state.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/chunk/rectangles.h"
#include "kernels/signal/signal.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

using steps::Buffer;
using steps::Where;

void copy_rows(void* to, const void* from, int64_t bytes, cudaStream_t on) {
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, on),
             "copying rows");
}

constexpr int64_t kMostPitch = std::numeric_limits<int32_t>::max();  // of CUDA's copies

// Whole blocks at once, and what is left of the first and of the last.
void copy_into_blocks(const RunState& run, const steps::Copy& step, cudaStream_t on) {
  const kernels::CopyRun copy = run.in_blocks(step.destination, step.bytes);
  const char* const from = run.at(step.source);
  char* const to = static_cast<char*>(copy.to);
  for (int64_t done = 0; done < copy.bytes;) {
    const int64_t place = copy.first + done;
    const int64_t block = place / copy.block_bytes;
    const int64_t left = copy.bytes - done;
    char* const begin = to + place + block * copy.gap_bytes;
    const int64_t whole = place % copy.block_bytes == 0 ? left / copy.block_bytes : 0;
    const int64_t pitch = copy.block_bytes + copy.gap_bytes;
    if (whole > 1 && pitch <= kMostPitch) {
      const auto width = static_cast<size_t>(copy.block_bytes);
      check_cuda(cudaMemcpy2DAsync(begin, static_cast<size_t>(pitch), from + done, width, width,
                                   static_cast<size_t>(whole), cudaMemcpyDeviceToDevice, on),
                 "copying blocks of rows");
      done += whole * copy.block_bytes;
    } else {
      const int64_t count = std::min(left, (block + 1) * copy.block_bytes - place);
      copy_rows(begin, from + done, count, on);
      done += count;
    }
  }
}

}  // namespace

void wait_for_count(const RunState& run, int32_t chunk, int32_t expected, cudaStream_t on) {
  kernels::WaitParams wait;
  wait.counter = run.counters + chunk;
  wait.expected = expected;
  wait.chunk = chunk;
  check_cuda(kernels::wait_counter(run.with_deadline(wait), on), "launching a wait");
}
void enqueue(RunState& run, const steps::WaitForTiles& step, cudaStream_t on) {
  wait_for_count(run, step.chunk, step.tiles, on);
}
void enqueue(RunState& run, const steps::Mark& step, cudaStream_t on) {
  wait_for_count(run, step.chunk, std::numeric_limits<int32_t>::min(), on);
}

void enqueue(RunState& run, const steps::Collective& step, cudaStream_t on) {
  Communicator& by = run.communicator(step.max_ctas, step.lane);
  const auto count = static_cast<size_t>(step.count);
  const plan::DType dtype = plan::moved_dtype(run.plan.problem);
  // Chunks are staged as the list has them.
  const int blocks = run.plan.schedule == plan::Schedule::kSequential ? run.call.blocks : 1;
  switch (step.kind) {
    case plan::Collective::kReduceScatter:
      by.reduce_scatter(run.at(step.source), run.at(step.destination), count, dtype, on, blocks);
      return;
    case plan::Collective::kAllReduce:
      by.all_reduce(run.at(step.source), run.at(step.destination), count, dtype, on);
      return;
    default:
      by.all_gather(run.at(step.source), run.at(step.destination), count, dtype, on, blocks);
  }
}

void enqueue(RunState& run, const steps::SendReceive& step, cudaStream_t on) {
  if (step.sends.empty() && step.receives.empty()) return;
  const auto messages = [&](const std::vector<steps::Message>& all) {
    std::vector<Communicator::Message> made;
    made.reserve(all.size());
    for (const steps::Message& one : all) {
      made.push_back({one.peer, run.at(one.where), static_cast<size_t>(one.bytes)});
    }
    return made;
  };
  run.communicator(step.max_ctas, step.lane)
      .send_receive(messages(step.sends), messages(step.receives), on);
}

void enqueue(RunState& run, const steps::Copy& step, cudaStream_t on) {
  if (run.call.blocks > 1 && step.destination.buffer == Buffer::kGathered) {
    copy_into_blocks(run, step, on);
    return;
  }
  copy_rows(run.at(step.destination), run.at(step.source), step.bytes, on);
}
void enqueue(RunState& run, const steps::CopyRows& step, cudaStream_t on) {
  if (step.by_indices()) {
    const auto numbers = [&](const std::optional<Where>& where) {
      return reinterpret_cast<const int64_t*>(run.at(where));
    };
    check_cuda(kernels::copy_listed_rows({.from = run.at(step.source),
                                          .to = run.at(step.destination),
                                          .from_stride = step.source_stride,
                                          .to_stride = step.destination_stride,
                                          .row_bytes = step.row_bytes,
                                          .rows = step.rows,
                                          .count = numbers(step.count),
                                          .from_rows = numbers(step.from_rows),
                                          .to_rows = numbers(step.to_rows)},
                                         on),
               "copying listed rows");
    return;
  }
  if (step.adds) {
    run.call.operands->add(step, run.at(step.source), run.at(step.destination), on);
    return;
  }
  check_cuda(
      cudaMemcpy2DAsync(run.at(step.destination), static_cast<size_t>(step.destination_stride),
                        run.at(step.source), static_cast<size_t>(step.source_stride),
                        static_cast<size_t>(step.row_bytes), static_cast<size_t>(step.rows),
                        cudaMemcpyDeviceToDevice, on),
      "copying a rectangle");
}

}  // namespace overlap::runtime
