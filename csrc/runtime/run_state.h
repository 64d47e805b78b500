// A call while its steps are enqueued: where its memory is, and what its group lends it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/peer/peer_signal.h"
#include "plan/plan.h"
#include "runtime/group.h"
#include "runtime/run.h"
#include "steps/list/step.h"

namespace overlap::runtime {

struct RunState {
  using Buffer = steps::Buffer;
  using Lane = steps::Lane;
  using Where = steps::Where;

  RunState(Group& its_group, const Call& its_call)
      : group(its_group),
        device(its_group.device()),
        call(its_call),
        plan(*its_call.plan),
        list(*its_call.list),
        caller(its_call.stream),
        element_bytes(plan::moved_bytes(plan.problem)),
        capture(capture_id(caller)) {}

  // --- where things are ---

  cudaStream_t stream(Lane lane) const {
    if (lane == Lane::kCaller) return caller;
    if (lane == Lane::kCopy) return device.copy.get();
    return side(static_cast<int32_t>(lane) - static_cast<int32_t>(Lane::kSide0));
  }
  cudaStream_t side(int32_t lane) const {
    return device.side_stream(plan.resources.low_priority, lane);
  }

  char* base(const Where& where) const {
    switch (where.buffer) {
      case Buffer::kWindow:
        return window;
      case Buffer::kSlot:
        return peers->slot(peer_call, where.index);
      case Buffer::kStripes: {
        const StripedMemory& stripes = peers->stripes(list.stripe_bytes);
        return where.index == 0 ? stripes.matrix(peer_call.slot) : stripes.terms(peer_call.slot);
      }
      case Buffer::kProduct:
        if (product != nullptr) return product;
        [[fallthrough]];
      default:
        return static_cast<char*>(call.operands->base(where.buffer, where.index));
    }
  }
  char* at(const Where& where) const {
    char* const begin = base(where);
    return begin == nullptr ? nullptr : begin + where.offset;
  }
  char* at(const std::optional<Where>& where) const { return where ? at(*where) : nullptr; }

  Communicator& communicator(int32_t max_ctas, int32_t lane) const {
    const steps::Communicator wanted = {max_ctas, lane};
    const auto found = std::find(list.communicators.begin(), list.communicators.end(), wanted);
    return *communicators[static_cast<size_t>(found - list.communicators.begin())];
  }

  const plan::TileOrder& order(int32_t index) const {
    return list.orders[static_cast<size_t>(index)];
  }

  template <typename Params>
  Params with_deadline(Params params) const {
    return group.with_deadline(params);
  }

  // Bytes to a place among the gathered rows: where they go.
  kernels::CopyRun in_blocks(const Where& to, int64_t bytes) const {
    if (call.blocks == 1) return {.to = at(to), .bytes = bytes};
    const int64_t part = plan::part_rows(plan) * plan.problem.k * element_bytes;
    const int64_t block = part / call.blocks;
    const int64_t number = to.offset / part;
    return {.to = base(to) + number * block,
            .bytes = bytes,
            .block_bytes = block,
            .gap_bytes = (plan.problem.world_size - 1) * block,
            .first = to.offset - number * part};
  }

  kernels::PeerWaitParams arrivals(int32_t step) const {
    return peers->wait_for(peer_call, Peers::Flag::kArrived, peers->everyone_else(), step);
  }
  // The tile flags of a ring.
  kernels::PeerTiles peer_tiles() const {
    const int64_t part =
        static_cast<int64_t>(plan::tiles_m(plan)) / group.world_size() * plan::tiles_n(plan);
    return with_deadline(peers->tiles(peer_call, part));
  }
  // The flags of a program, by number, the same in all ranks' memory.
  kernels::PeerTiles transfer_flags() const { return with_deadline(peers->tiles(peer_call, 0)); }
  // Ranks whose memory is mapped are so far apart.
  int32_t distance(int32_t from, int32_t to) const {
    const int32_t ranks = peers->clique().count;
    return (to - from + ranks) % ranks;
  }

  Group& group;
  DeviceState& device;
  const Call& call;
  const plan::Plan& plan;
  const steps::StepList& list;
  const cudaStream_t caller;
  const int64_t element_bytes;
  const std::optional<unsigned long long> capture;
  std::vector<Communicator*> communicators;  // the list's, in its order
  Peers* peers = nullptr;
  Peers::Call peer_call;
  bool told = false;  // peers, of this call, by what is enqueued
  bool ended = true;  // the call over peers, by what is enqueued; true without one
  int32_t* counters = nullptr;
  char* window = nullptr;
  char* product = nullptr;  // once the framework has made it
};

// How each kind of step is enqueued. Fork, Join and CallersKernel are the executor's own.
#define OVERLAP_ENQUEUE(Kind) void enqueue(RunState& run, const steps::Kind& step, cudaStream_t on);
OVERLAP_STEP_KINDS(OVERLAP_ENQUEUE, OVERLAP_ENQUEUE)
#undef OVERLAP_ENQUEUE

// On the observer's stream, too: a timeline's waits of its own.
void wait_for_count(const RunState& run, int32_t chunk, int32_t expected, cudaStream_t on);
void wait_for_peers(const RunState& run, kernels::PeerWaitParams wait, int32_t chunk,
                    cudaStream_t on);

}  // namespace overlap::runtime
