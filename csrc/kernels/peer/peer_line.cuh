// Data that are their own signal: 12 bytes travel with the call's number as one access of 16 bytes, so that nothing is
// fenced or announced. Kernels of few rows share it, and with it two buffers for each writer, used in turns.
#pragma once

#include <cstdint>

#include "kernels/peer/peer_block.cuh"
#include "kernels/peer/peer_low_latency.h"

namespace overlap::kernels {

inline constexpr int kUnitWords = kUnitBytes / sizeof(uint32_t);

// A unit is stored and loaded as one access.
struct Unit {
  uint32_t word[kUnitWords];
  uint32_t number;
};

__device__ __forceinline__ void store_unit(void* base, int64_t index, const Unit& unit) {
  const uint64_t low = uint64_t{unit.word[1]} << 32 | unit.word[0];
  const uint64_t high = uint64_t{unit.number} << 32 | unit.word[2];
  asm volatile(
      "{\n"
      ".reg .b128 unit;\n"
      "mov.b128 unit, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], unit;\n"
      "}" ::"l"(static_cast<Unit*>(base) + index),
      "l"(low), "l"(high)
      : "memory");
}

__device__ __forceinline__ Unit load_unit(const void* base, int64_t index) {
  uint64_t low = 0;
  uint64_t high = 0;
  asm volatile(
      "{\n"
      ".reg .b128 unit;\n"
      "ld.relaxed.sys.global.b128 unit, [%2];\n"
      "mov.b128 {%0, %1}, unit;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(static_cast<const Unit*>(base) + index)
      : "memory");
  return {
      {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
      static_cast<uint32_t>(high >> 32)};
}

// One call on the buffers. Two are enough without any word on when one is free: whoever begins a call has the data of the
// call before, so that its peers have ended the one before that.
class UnitCall {
 public:
  __device__ __forceinline__ explicit UnitCall(const UnitPeers& peers)
      : peers_(peers),
        calls_(*peers.calls / kMaxPeerBlocks),
        buffer_(calls_ % 2 == 0 ? 0 : peers.buffer_bytes) {}

  // Says to the peers which call it is: the data do not.
  __device__ __forceinline__ void announce() const {
    if (compares()) store_relaxed_sys(peers_.announce[threadIdx.x] + turn(), announced());
  }

  // The number that units of the call carry.
  __device__ __forceinline__ uint32_t number() const { return static_cast<uint32_t>(calls_ + 1); }
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

  const UnitPeers& peers_;
  const uint64_t calls_;
  const int64_t buffer_;
};

}  // namespace overlap::kernels
