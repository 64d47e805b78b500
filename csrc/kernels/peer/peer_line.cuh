// Data that are their own signal: lines of 128 bytes, of which 120 are data and four the call's number, so that nothing is
// announced. A warp stores a run of four lines at a time. Kernels of few rows share it, and with it two buffers for each
// writer, used in turns.
//
//   lane    0 | 1 | 2 | 3 | 4 | 5 | 6 | 7         of a line
//   words   4 | 4 | 4 | 4 | 4 | 4 | 4 | 2, -, number
//
// Links that keep a line whole deliver its data with the number. On other links the number follows its data, after a fence.
#pragma once

#include <cstdint>

#include "kernels/peer/peer_block.cuh"
#include "kernels/peer/peer_low_latency.h"

namespace overlap::kernels {

inline constexpr int kLanes = 32;
inline constexpr int kLineLanes = 8;
inline constexpr int kLaneWords = 4;
inline constexpr int kRunWords = plan::kRunBytes / static_cast<int64_t>(sizeof(uint32_t));

// A lane's share of a line, stored and loaded as one access.
struct alignas(16) LineShare {
  uint32_t word[kLaneWords];
};

// A lane of a warp that stores or loads a run.
struct RunLane {
  __device__ __forceinline__ RunLane()
      : lane(static_cast<int>(threadIdx.x) % kLanes), line(lane / kLineLanes) {}
  // True if this lane's share holds two words, and the number of its line.
  __device__ __forceinline__ bool numbers() const { return lane % kLineLanes == kLineLanes - 1; }

  const int lane;
  const int line;  // of the run
};

__device__ __forceinline__ void store_share(LineShare* address, const LineShare& share) {
  const uint64_t low = uint64_t{share.word[1]} << 32 | share.word[0];
  const uint64_t high = uint64_t{share.word[3]} << 32 | share.word[2];
  asm volatile(
      "{\n"
      ".reg .b128 share;\n"
      "mov.b128 share, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], share;\n"
      "}" ::"l"(address),
      "l"(low), "l"(high)
      : "memory");
}

__device__ __forceinline__ LineShare load_share(const LineShare* address) {
  uint64_t low = 0;
  uint64_t high = 0;
  asm volatile(
      "{\n"
      ".reg .b128 share;\n"
      "ld.relaxed.sys.global.b128 share, [%2];\n"
      "mov.b128 {%0, %1}, share;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
           static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}

// One call on the buffers. Two are enough without any word on when one is free: whoever begins a call has the data of the
// call before, so that its peers have ended the one before that.
class LineCall {
 public:
  __device__ __forceinline__ explicit LineCall(const LinePeers& peers)
      : peers_(peers),
        calls_(*peers.calls / kMaxPeerBlocks),
        buffer_(calls_ % 2 == 0 ? 0 : peers.buffer_bytes) {}

  // Says to the peers which call it is: the data do not.
  __device__ __forceinline__ void announce() const {
    if (compares()) store_relaxed_sys(peers_.announce[threadIdx.x] + turn(), announced());
  }

  // The number that lines of the call carry.
  __device__ __forceinline__ uint32_t number() const { return static_cast<uint32_t>(calls_ + 1); }
  __device__ __forceinline__ bool whole_lines() const { return peers_.whole_lines; }
  __device__ __forceinline__ char* to(int rank) const {
    return static_cast<char*>(peers_.destination[rank]) + buffer_;
  }
  __device__ __forceinline__ const char* from(int rank) const {
    return static_cast<const char*>(peers_.received[rank]) + buffer_;
  }

  // The word of a peer, for compare(): loaded early, it takes no time of its own.
  __device__ __forceinline__ uint64_t look() const {
    return compares() ? load_relaxed_sys(peers_.arrived + turn() + threadIdx.x) : 0;
  }

  // Until the peers have said that they make the same call: nobody reads the results before that.
  __device__ __forceinline__ void compare(uint64_t seen) const {
    if (!compares() || has_reached(seen, announced())) return;
    const auto peer = static_cast<int32_t>(threadIdx.x);
    const uint64_t* flag = peers_.arrived + turn() + peer;
    spin(
        peers_.deadline_ns, peers_.report,
        [&] {
          seen = load_acquire_sys(flag);
          return has_reached(seen, announced());
        },
        [&] { write_report(peers_.report, missed_peer(peers_.chunk, peer, announced(), seen)); });
  }

  // All blocks together count the call once; none reads the count after its own share. Their number is a power of two.
  __device__ __forceinline__ void count() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(peers_.calls),
              static_cast<unsigned long long>(kMaxPeerBlocks / gridDim.x));
  }

 private:
  __device__ __forceinline__ bool compares() const {
    const auto peer = static_cast<int32_t>(threadIdx.x);
    return blockIdx.x == 0 && peer < peers_.ranks && peer != peers_.rank;
  }
  __device__ __forceinline__ uint64_t turn() const { return calls_ % 2 * kMaxPeers; }
  __device__ __forceinline__ uint64_t announced() const { return peers_.tag + calls_ + 1; }

  const LinePeers& peers_;
  const uint64_t calls_;
  const int64_t buffer_;
};

// Stores a run, as a warp. A lane whose line has no data stores nothing.
__device__ __forceinline__ void store_run(LineShare* address, LineShare share, bool has_line,
                                          const RunLane& lane, const LineCall& call) {
  if (lane.numbers()) share.word[kLaneWords - 1] = call.number();
  const bool stores_now = has_line & (call.whole_lines() | !lane.numbers());
  __syncwarp();  // a line is one access if its lanes store it together
  if (stores_now) store_share(address, share);
  if (call.whole_lines()) return;
  __syncwarp();
  __threadfence_system();
  if (has_line && lane.numbers()) store_share(address, share);
}

// Runs that are loaded together, and polled until all have come.
template <int kRuns>
struct ArrivingRuns {
  LineShare share[kRuns] = {};

  // As a warp. `missing` has a bit for each run to wait for. `address(i)`: this lane's share of one; `has_line(i)`:
  // whether its line has data; `rank(i)`: who sends it.
  template <class Address, class HasLine, class Rank>
  __device__ __forceinline__ void wait(uint32_t missing, const RunLane& lane, const LineCall& call,
                                       const LinePeers& peers, Address address, HasLine has_line,
                                       Rank rank) {
    uint32_t loads = missing;
    bool whole = call.whole_lines();
    const auto reached = [&] {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        if ((loads >> i & 1) == 0) continue;
        __syncwarp();
        if (has_line(i)) share[i] = load_share(address(i));
      }
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        if ((loads >> i & 1) == 0) continue;
        const bool here =
            !lane.numbers() || !has_line(i) || share[i].word[kLaneWords - 1] == call.number();
        if (__all_sync(~0u, here)) loads &= ~(1u << i);
      }
      if (loads != 0 || whole) return loads == 0;
      // The numbers have come: now the data.
      __threadfence_system();
      loads = missing;
      whole = true;
      return false;
    };
    Patience<true> patience(peers.deadline_ns, peers.report);
#pragma unroll 1
    for (int poll = 0; !reached(); ++poll) {
      if (poll < kHotPolls) continue;
      const bool late = patience.ends([&] {
        const int which = __ffs(static_cast<int>(loads)) - 1;
        write_report(peers.report, missed_peer(peers.chunk, rank(which), call.number(), 0));
      });
      if (late) break;
      patience.pause();
    }
    if (!lane.numbers()) return;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) share[i].word[kLaneWords - 1] = 0;
  }
};

}  // namespace overlap::kernels
