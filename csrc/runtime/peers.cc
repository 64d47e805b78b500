#include "runtime/peers.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "plan/plan.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

// The layout of each rank's flags.
struct Flags {
  static constexpr int kKinds = 2;
  static constexpr int kSteps = 2;
  struct Slot {
    uint64_t flags[kKinds][kernels::kMaxPeers];
    uint64_t blocks[kSteps][kernels::kMaxPeers][kernels::kMaxPeerBlocks];
    uint64_t calls;        // that have ended on the owner
    uint32_t blocks_sent;  // of a collective in one kernel that is running
    uint32_t blocks_done;
    uint32_t tiles_taken[2];                // of a GEMM that is running
    uint64_t numbers[kernels::kPeerSteps];  // of the steps that copies announce
  };
  Slot slots[2];
  uint64_t low_latency_calls;
  uint64_t low_latency_flags[2][kernels::kMaxPeers];  // of the writers
  uint64_t failures[kernels::kMaxPeers];              // of the writers
};

// The flags, after them each slot's of tiles, and after those for each writer the buffers of
// low-latency calls, whose data have meaning only there.
constexpr int64_t kFlagBytes = (sizeof(Flags) + 4095) / 4096 * 4096;
constexpr int64_t kTileFlagBytes = 2 * plan::kMaxRingTiles * sizeof(uint64_t);
// Bytes of one writer and call; each message goes to all peers.
int64_t low_latency_buffer(int world_size) {
  return kernels::low_latency_bytes(plan::kLowLatencyBytes / (world_size - 1));
}
static_assert(kTileFlagBytes % kernels::kRunRoom == 0);  // lines lie in the memory's own lines

Flags& flags_of(const PeerMemory& memory, int owner) {
  return *reinterpret_cast<Flags*>(memory.of(owner));
}

constexpr int64_t kMinSlotBytes = int64_t{1} << 21;
constexpr std::chrono::seconds kPatience{1};

}  // namespace

Peers::Peers(ByteAllGather all_gather, const Clique& clique, cudaStream_t stream,
             std::unique_ptr<Communicator> windows)
    : all_gather_(std::move(all_gather)),
      clique_(clique),
      rank_(clique.place()),
      world_size_(clique.count),
      stream_(stream),
      windows_(std::move(windows)) {}

std::unique_ptr<Peers> Peers::make(ByteAllGather all_gather, const Clique& clique,
                                   cudaStream_t stream, std::unique_ptr<Communicator> windows,
                                   std::string* why) {
  const int world_size = clique.count;
  if (world_size < 2 || world_size > kernels::kMaxPeers) {
    *why = "not every host has the same number, 2 to " + std::to_string(plan::kMaxPeers) +
           ", of consecutive ranks";
    return nullptr;
  }
  std::unique_ptr<Peers> peers(
      new Peers(std::move(all_gather), clique, stream, std::move(windows)));
  peers->flags_ = PeerMemory::make(
      peers->all_gather_, clique,
      kFlagBytes + kTileFlagBytes + (world_size - 1) * 2 * low_latency_buffer(world_size), stream,
      peers->windows_.get(), why);
  if (peers->flags_ == nullptr) return nullptr;
  peers->bytes_ = peers->flags_->bytes();
  return peers;
}

Peers::~Peers() {
  if (flags_ == nullptr || leaked_) return;
  if (captured_) {
    leak();
    return;
  }
  const auto end = std::chrono::steady_clock::now() + kPatience;
  Flags flags;
  while (std::chrono::steady_clock::now() < end) {
    if (cudaMemcpy(&flags, flags_->of(rank_), sizeof(flags), cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      break;
    }
    bool all = true;
    for (const Flags::Slot& slot : flags.slots) {
      for (int peer = 0; peer < world_size_; ++peer) {
        all = all &&
              (peer == rank_ || slot.flags[static_cast<int>(Flag::kEnded)][peer] >= slot.calls);
      }
    }
    if (all) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  (void)cudaGetLastError();
  leak();
}

void Peers::leak() {
  leaked_ = true;
  if (windows_ != nullptr) windows_->mark_captured();
  if (flags_ != nullptr) flags_->leak();
  if (slots_ != nullptr) slots_->leak();
  for (const auto& old : outgrown_) old->leak();
  for (const auto& [part, memory] : stripes_) memory->leak();
}

void Peers::reserve(int64_t slot_bytes) {
  if (fits(slot_bytes)) return;
  int64_t rounded = kMinSlotBytes;
  while (rounded < slot_bytes) rounded *= 2;
  std::string why;
  auto larger = PeerMemory::make(all_gather_, clique_, 2 * rounded, stream_, windows_.get(), &why);
  if (larger == nullptr) {
    throw PeerMemoryError(
        "overlap_torch: the ranks cannot map " + std::to_string(2 * rounded) +
        " bytes of each other's memory: " + why +
        ". Free some (torch.cuda.empty_cache() gives back what PyTorch keeps), or set plans "
        "with the transport nccl.");
  }
  // The old memory may be in use, and waiting for the device is not allowed here: it is kept. All
  // of it together is less than the new one.
  if (slots_ != nullptr) outgrown_.push_back(std::move(slots_));
  slots_ = std::move(larger);
  bytes_ += slots_->bytes();
  slot_bytes_ = rounded;
}

void Peers::reserve_stripes(int64_t part_bytes) {
  if (has_stripes(part_bytes)) return;
  std::string why;
  auto memory = StripedMemory::make(all_gather_, rank_, world_size_, part_bytes, &why);
  if (memory == nullptr) {
    least_refused_ = std::min(least_refused_, part_bytes);
    throw PeerMemoryError(
        "overlap_torch: the ranks cannot have a matrix whose parts lie in each other's memory, "
        "of " +
        std::to_string(part_bytes) + " bytes each: " + why +
        ". Set plans with the collective direct, or the transport nccl.");
  }
  bytes_ += memory->bytes();
  stripes_[part_bytes] = std::move(memory);
}

bool Peers::may_have_stripes(int64_t part_bytes) const {
  if (has_stripes(part_bytes)) return true;
  constexpr int64_t kMost = int64_t{1} << 31;
  int64_t parts = part_bytes;
  for (const auto& [bytes, memory] : stripes_) parts += bytes;
  return part_bytes < least_refused_ && parts * world_size_ * StripedMemory::kTurns <= kMost;
}

uint64_t* Peers::flag(int slot, Flag flag, int owner, int writer) const {
  return &flags_of(*flags_, owner).slots[slot].flags[static_cast<int>(flag)][writer];
}

uint64_t* Peers::block_flags(int slot, int step, int owner, int writer) const {
  return flags_of(*flags_, owner).slots[slot].blocks[step][writer];
}

uint64_t* Peers::calls_ended(int slot) const {
  return &flags_of(*flags_, rank_).slots[slot].calls;
}

Peers::Call Peers::next_call(bool hears_all, std::optional<unsigned long long> capture,
                             uint64_t hash) {
  // A graph may be replayed between two calls outside of it, and uses whatever slots it captured.
  const bool replays = captured_ && !capture.has_value();
  Call call;
  call.slot = static_cast<int>(calls_++ % kSlots);
  call.tag = kernels::peer_call_tag(hash);
  call.slot_may_be_busy = !last_hears_all_ || last_capture_ != capture || replays;
  last_hears_all_ = hears_all;
  last_capture_ = capture;
  return call;
}

kernels::PeerSignalParams Peers::signal_params(const Call& call, Flag flag, uint32_t ranks,
                                               int step) const {
  kernels::PeerSignalParams params;
  for (int peer = 0; peer < world_size_; ++peer) {
    if ((ranks >> peer & 1) != 0) {
      params.flags[params.count++] = this->flag(call.slot, flag, peer, rank_);
    }
  }
  params.calls = calls_ended(call.slot);
  params.tag = call.tag;
  params.step = step;
  params.ends_call = flag == Flag::kEnded;
  return params;
}

void Peers::signal(const Call& call, Flag flag, uint32_t ranks, int step,
                   cudaStream_t stream) const {
  check_cuda(kernels::signal_peers_release_sys(signal_params(call, flag, ranks, step), stream),
             "launching a signal");
}

void Peers::write_numbers(const Call& call, int steps, cudaStream_t stream) const {
  uint64_t* const numbers = flags_of(*flags_, rank_).slots[call.slot].numbers;
  check_cuda(kernels::write_step_numbers(numbers, steps, calls_ended(call.slot), call.tag, stream),
             "launching the numbers of steps");
}

void Peers::signal_by_copy(const Call& call, int peer, int step, cudaStream_t stream) const {
  const Flags::Slot& own = flags_of(*flags_, rank_).slots[call.slot];
  check_cuda(cudaMemcpyAsync(flag(call.slot, Flag::kArrived, peer, rank_), &own.numbers[step],
                             sizeof(uint64_t), cudaMemcpyDeviceToDevice, stream),
             "copying a flag");
}

kernels::PeerTiles Peers::tiles(const Call& call, int64_t part_tiles) const {
  const auto flags = [&](int owner) {
    return reinterpret_cast<uint64_t*>(flags_->of(owner) + kFlagBytes) +
           call.slot * plan::kMaxRingTiles;
  };
  kernels::PeerTiles tiles;
  tiles.arrived = flags(rank_);
  tiles.calls = calls_ended(call.slot);
  tiles.tag = call.tag;
  tiles.rank = rank_;
  tiles.ranks = world_size_;
  for (int distance = 1; distance < world_size_; ++distance) {
    tiles.announce[distance - 1] =
        flags((rank_ + distance) % world_size_) + (distance - 1) * part_tiles;
  }
  return tiles;
}

uint32_t* Peers::tiles_taken(const Call& call) const {
  return flags_of(*flags_, rank_).slots[call.slot].tiles_taken;
}

void Peers::abandon(const Call& call, bool told, cudaStream_t stream) {
  last_hears_all_ = false;
  if (told) {
    end(call, stream);
  } else {
    --calls_;
  }
}

kernels::PeerSignalParams Peers::ending(const Call& call) const {
  return signal_params(call, Flag::kEnded, everyone_else(), 0);
}

void Peers::end(const Call& call, cudaStream_t stream) const {
  check_cuda(kernels::signal_peers_release_sys(ending(call), stream), "launching a signal");
}

kernels::PeerWaitParams Peers::wait_for(const Call& call, Flag flag, uint32_t ranks,
                                        int step) const {
  kernels::PeerWaitParams params;
  params.flags = this->flag(call.slot, flag, rank_, 0);
  params.ranks = ranks;
  params.calls = calls_ended(call.slot);
  params.tag = call.tag;
  params.step = step;
  return params;
}

kernels::PeerWaitParams Peers::wait_for_slots(const Call& call, uint32_t ranks) const {
  kernels::PeerWaitParams params = wait_for(call, Flag::kEnded, ranks, 0);
  params.slot_is_free = true;
  return params;
}

kernels::PeerMeeting Peers::meeting(const Call& call) const {
  kernels::PeerMeeting params;
  params.rank = rank_;
  params.ranks = world_size_;
  for (int step = 0; step < Flags::kSteps; ++step) {
    for (int peer = 0; peer < world_size_; ++peer) {
      params.announce[step][peer] = block_flags(call.slot, step, peer, rank_);
    }
    params.arrived[step] = block_flags(call.slot, step, rank_, 0);
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    params.announce_end[peer] = flag(call.slot, Flag::kEnded, peer, rank_);
  }
  params.ended = flag(call.slot, Flag::kEnded, rank_, 0);
  params.calls = calls_ended(call.slot);
  params.tag = call.tag;
  Flags::Slot& own = flags_of(*flags_, rank_).slots[call.slot];
  params.blocks_sent = &own.blocks_sent;
  params.blocks_done = &own.blocks_done;
  return params;
}

kernels::LinePeers Peers::low_latency(uint64_t hash) const {
  kernels::LinePeers params;
  params.rank = rank_;
  params.ranks = world_size_;
  params.buffer_bytes = low_latency_buffer(world_size_);
  params.whole_lines = whole_lines_;
  // Each owner has a place for every other rank.
  const auto place = [&](int owner, int writer) {
    const int index = (writer - owner - 1 + world_size_) % world_size_;
    return flags_->of(owner) + kFlagBytes + kTileFlagBytes + index * 2 * params.buffer_bytes;
  };
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    params.destination[peer] = place(peer, rank_);
    params.received[peer] = place(rank_, peer);
  }
  params.calls = &flags_of(*flags_, rank_).low_latency_calls;
  for (int peer = 0; peer < world_size_; ++peer) {
    params.announce[peer] = &flags_of(*flags_, peer).low_latency_flags[0][rank_];
  }
  params.arrived = flags_of(*flags_, rank_).low_latency_flags[0];
  params.tag = kernels::peer_call_tag(hash);
  return params;
}

const uint64_t* Peers::failures() const {
  return flags_of(*flags_, rank_).failures;
}

std::vector<uint64_t*> Peers::failures_of_peers() const {
  std::vector<uint64_t*> words;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    words.push_back(&flags_of(*flags_, peer).failures[rank_]);
  }
  return words;
}

}  // namespace overlap::runtime
