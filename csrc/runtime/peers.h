// The memory that the ranks of a group map into each other: flags, and slots of data for the calls that
// are in flight.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_low_latency.h"
#include "kernels/peer/peer_signal.h"
#include "runtime/communicator.h"
#include "runtime/peer_memory.h"
#include "runtime/striped_memory.h"

namespace overlap::runtime {

// Calls take two slots in turns. Whoever writes into a peer's slot first waits until the peer has
// ended the call before that used it: outside CUDA graphs the call before last, normally long ago.
// How often a slot was used is counted on the device, so that the replay of a graph counts, too; all
// flags exist once for each slot.
//
// All ranks of a group, or those of a clique, map each other's memory. Ranks in a clique count as masks, flags and
// reports of waits have them: from its first rank on.
//
//   flags of rank r, one of each kind for every rank, written by that rank:
//     arrived    rows that are final have been copied here
//     ended      that rank has read all that was written to its slot for a call
//   and, for collectives in one kernel, one for each of its blocks; for a ring, one for each tile
//   that the previous rank has stored, and for each final one of every rank
class Peers {
 public:
  enum class Flag : int { kArrived = 0, kEnded = 1 };

  // Collective. Null on all ranks where memory cannot be mapped, and `why`. The stream is used, and
  // synchronised, whenever memory is made. `windows`: as PeerMemory has it, and used for nothing else, so that nobody
  // aborts it: that would take the windows away.
  static std::unique_ptr<Peers> make(ByteAllGather all_gather, const Clique& clique,
                                     cudaStream_t stream, std::unique_ptr<Communicator> windows,
                                     std::string* why);
  // Waits a moment for peers that still write to this rank's memory, and leaves it to the process if
  // they do not come to an end. Does not wait after leak().
  ~Peers();

  // Makes each slot at least this large. Collective when it grows, and slow then.
  void reserve(int64_t slot_bytes);
  int64_t slot_bytes() const { return slot_bytes_; }
  bool fits(int64_t slot_bytes) const { return slots_ != nullptr && slot_bytes <= slot_bytes_; }

  // The same of a product in stripes, whose parts are exactly so large. Each size has memory of its own, which is kept.
  void reserve_stripes(int64_t part_bytes);
  bool has_stripes(int64_t part_bytes) const { return stripes_.contains(part_bytes); }
  // True if a plan that nobody asked for may have such stripes: parts so large were not refused, and all stripes together, on
  // every rank the same, stay below 2 GiB.
  bool may_have_stripes(int64_t part_bytes) const;
  const StripedMemory& stripes(int64_t part_bytes) const { return *stripes_.at(part_bytes); }

  // One call's slot. Every rank makes the same calls, and captures the same, in the same order.
  struct Call {
    int slot = 0;
    bool slot_may_be_busy = true;  // the peers' slots have to be waited for
    uint64_t tag = 0;
  };
  // `hears_all`: this call, before it ends, waits for a signal of every peer. Then whoever has ended it
  // knows that the peers have ended the call before it, which used the other slot: the one that the
  // next call takes, unless a graph may have been replayed in between.
  // `hash`: of the call's plan.
  Call next_call(bool hears_all, std::optional<unsigned long long> capture, uint64_t hash);

  // The slot of a call in the memory of `rank` of the group.
  char* slot(const Call& call, int rank) const {
    return slots_->of(rank - clique_.first) + call.slot * slot_bytes_;
  }

  // Announces a step of the call to all peers of the mask, after what the stream did before.
  void signal(const Call& call, Flag flag, uint32_t ranks, int step, cudaStream_t stream) const;
  // Announces to all peers that the call has ended here. Comes last.
  void end(const Call& call, cudaStream_t stream) const;
  // The same for a kernel that does it.
  kernels::PeerSignalParams ending(const Call& call) const;
  // After an exception in the midst of the last call. One that has `told` peers anything ends, so that the next one has
  // other numbers: ranks that all failed alike go on. Else it was not made, and the next call meets the peers that wait.
  void abandon(const Call& call, bool told, cudaStream_t stream);

  // The same by copy engines: the numbers of the call's first `steps` steps, in this rank's memory; and a copy of one of
  // them to a peer, after what the stream copied there before.
  void write_numbers(const Call& call, int steps, cudaStream_t stream) const;
  void signal_by_copy(const Call& call, int peer, int step, cudaStream_t stream) const;

  // The wait for these ranks' step, or for their slots; the caller adds deadline and report.
  kernels::PeerWaitParams wait_for(const Call& call, Flag flag, uint32_t ranks, int step) const;
  kernels::PeerWaitParams wait_for_slots(const Call& call, uint32_t ranks) const;

  // Flags of a ring's tiles: to the next rank, and from the one before, and after those of its first
  // parts the final ones of all. The caller adds deadline and report.
  kernels::PeerTiles tiles(const Call& call, int64_t part_tiles) const;
  // Where a GEMM of the call counts the tiles that it takes.
  uint32_t* tiles_taken(const Call& call) const;

  // Flags and counts of a collective or an exchange in one kernel, which ends the call; the caller adds
  // deadline and report.
  kernels::PeerMeeting meeting(const Call& call) const;

  // Words for what each peer tells about its failures, and this rank's in the memory of each peer.
  const uint64_t* failures() const;
  std::vector<uint64_t*> failures_of_peers() const;

  // Buffers and count of an all-reduce of low latency, which takes no slot.
  kernels::LinePeers low_latency(uint64_t hash) const;
  // Copies to peers were measured at this rate. Faster than PCIe, links are NVLink's, which keep lines whole.
  void know_link(double gbps) { whole_lines_ = gbps > kMostPcieGbps; }

  const Clique& clique() const { return clique_; }
  uint32_t self() const { return 1u << rank_; }
  uint32_t everyone_else() const { return ((1u << world_size_) - 1) & ~self(); }

  int64_t bytes() const { return bytes_; }  // any thread's
  // Leaves all memory to the process: peers that failed may still write to it, and so may a graph.
  void leak();
  void mark_captured() { captured_ = true; }

 private:
  static constexpr int kSlots = 2;
  static constexpr double kMostPcieGbps = 128.0;  // of 16 lanes of PCIe 6

  Peers(ByteAllGather all_gather, const Clique& clique, cudaStream_t stream,
        std::unique_ptr<Communicator> windows);
  uint64_t* flag(int slot, Flag flag, int owner, int writer) const;
  kernels::PeerSignalParams signal_params(const Call& call, Flag flag, uint32_t ranks,
                                          int step) const;
  uint64_t* block_flags(int slot, int step, int owner, int writer) const;
  uint64_t* calls_ended(int slot) const;  // own memory, as all that follow

  ByteAllGather all_gather_;
  Clique clique_;
  int rank_ = 0;  // in the clique, as all that follow
  int world_size_ = 1;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Communicator> windows_;  // null: CUDA IPC
  std::unique_ptr<PeerMemory> flags_;
  std::unique_ptr<PeerMemory> slots_;
  std::vector<std::unique_ptr<PeerMemory>> outgrown_;
  std::atomic<int64_t> bytes_{0};  // of flags, slots and stripes
  int64_t slot_bytes_ = 0;
  std::map<int64_t, std::unique_ptr<StripedMemory>> stripes_;    // by the bytes of a part
  int64_t least_refused_ = std::numeric_limits<int64_t>::max();  // of a part
  uint64_t calls_ = 0;
  bool whole_lines_ = false;
  bool last_hears_all_ = false;
  std::optional<unsigned long long> last_capture_;
  bool leaked_ = false;
  bool captured_ = false;
};

}  // namespace overlap::runtime
