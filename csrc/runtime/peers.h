// What the ranks of a group keep in each other's memory: flags, and slots of data for the calls that
// are in flight.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/peer_signal.h"
#include "runtime/peer_memory.h"

namespace overlap::runtime {

// Calls take two slots in turns. Whoever writes into a peer's slot first waits until the peer has
// released the call before last, which used the same one: normally long ago.
//
//   flags of rank r, one of each kind for every rank, written by that rank:
//     partial    the ring's previous rank has stored the partial sums of a phase
//     arrived    rows that are final have been copied here
//     released   that rank has read all that was written to its slot for a call
class Peers {
 public:
  enum class Flag : int { kPartial = 0, kArrived = 1, kReleased = 2 };

  // Collective. Null on all ranks where memory cannot be mapped. The stream is used, and
  // synchronised, whenever memory is made.
  static std::unique_ptr<Peers> make(Exchange exchange, int rank, int world_size,
                                     cudaStream_t stream);
  // Waits a moment for peers that still write to this rank's memory, and leaves it to the process if
  // they do not come to an end. Does not wait after leak().
  ~Peers();

  // Makes each slot at least this large. Collective when it grows, and slow then.
  void reserve(int64_t slot_bytes);
  bool fits(int64_t slot_bytes) const { return slots_ != nullptr && slot_bytes <= slot_bytes_; }

  // One call's slot and sequence numbers. Every rank makes the same calls in the same order.
  struct Call {
    uint64_t number = 0;  // from 1 on

    // Greater than that of any step before, of this call or earlier ones.
    uint64_t step(int index) const { return number * kSteps + static_cast<uint64_t>(index) + 1; }
  };
  Call next_call() { return {++calls_}; }
  uint64_t calls() const { return calls_; }

  // The slot of a call in the memory of `rank`.
  char* slot(const Call& call, int rank) const {
    return slots_->of(rank) + (call.number % 2 == 0 ? 0 : slot_bytes_);
  }

  // Announces `value` to all peers of the mask, after what the stream did before.
  void signal(Flag flag, uint32_t ranks, uint64_t value, cudaStream_t stream) const;

  // The wait for these ranks' values; the caller adds deadline and report.
  kernels::PeerWaitParams wait_for(Flag flag, uint32_t ranks, uint64_t value) const;

  uint32_t everyone_else() const { return ((1u << world_size_) - 1) & ~(1u << rank_); }

  int64_t bytes() const;
  // Leaves all memory to the process: peers that failed may still write to it.
  void leak();

 private:
  static constexpr uint64_t kSteps = 256;  // of a call, at most

  Peers(Exchange exchange, int rank, int world_size, cudaStream_t stream);
  uint64_t* flag(Flag flag, int owner, int writer) const;

  Exchange exchange_;
  int rank_ = 0;
  int world_size_ = 1;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<PeerMemory> flags_;
  std::unique_ptr<PeerMemory> slots_;
  std::vector<std::unique_ptr<PeerMemory>> outgrown_;
  int64_t slot_bytes_ = 0;
  uint64_t calls_ = 0;
  bool leaked_ = false;
};

}  // namespace overlap::runtime
