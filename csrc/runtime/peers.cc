#include "runtime/peers.h"

#include <array>
#include <chrono>
#include <thread>

#include "plan/plan.h"
#include "runtime/error.h"

namespace overlap::runtime {
namespace {

constexpr int64_t kFlagBytes = int64_t{1} << 12;
constexpr int64_t kMinSlotBytes = int64_t{1} << 21;
constexpr std::chrono::seconds kPatience{1};
static_assert(plan::kMaxPeerRanks == kernels::kMaxPeers);

}  // namespace

Peers::Peers(Exchange exchange, int rank, int world_size, cudaStream_t stream)
    : exchange_(std::move(exchange)), rank_(rank), world_size_(world_size), stream_(stream) {}

std::unique_ptr<Peers> Peers::make(Exchange exchange, int rank, int world_size,
                                   cudaStream_t stream) {
  if (world_size < 2 || world_size > kernels::kMaxPeers) return nullptr;
  std::unique_ptr<Peers> peers(new Peers(std::move(exchange), rank, world_size, stream));
  peers->flags_ = PeerMemory::make(peers->exchange_, rank, world_size, kFlagBytes, stream);
  return peers->flags_ != nullptr ? std::move(peers) : nullptr;
}

Peers::~Peers() {
  if (flags_ == nullptr || leaked_) return;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  std::array<uint64_t, kernels::kMaxPeers> released = {};
  while (std::chrono::steady_clock::now() < end) {
    if (cudaMemcpy(released.data(), flag(Flag::kReleased, rank_, 0),
                   sizeof(uint64_t) * static_cast<size_t>(world_size_),
                   cudaMemcpyDeviceToHost) != cudaSuccess) {
      break;
    }
    bool all = true;
    for (int peer = 0; peer < world_size_; ++peer) {
      all = all && (peer == rank_ || released[static_cast<size_t>(peer)] >= calls_);
    }
    if (all) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  (void)cudaGetLastError();
  leak();
}

void Peers::leak() {
  leaked_ = true;
  if (flags_ != nullptr) flags_->leak();
  if (slots_ != nullptr) slots_->leak();
  for (const auto& old : outgrown_) old->leak();
}

void Peers::reserve(int64_t slot_bytes) {
  if (fits(slot_bytes)) return;
  int64_t rounded = kMinSlotBytes;
  while (rounded < slot_bytes) rounded *= 2;
  auto larger = PeerMemory::make(exchange_, rank_, world_size_, 2 * rounded, stream_);
  if (larger == nullptr) {
    throw Error(
        "overlap_torch: the ranks cannot map " + std::to_string(2 * rounded) +
        " bytes of each other's memory, as one of them has no more memory left. Free some, or "
        "set plans with the transport nccl.");
  }
  // The old memory may be in use, and waiting for the device is not allowed here: it is kept. All
  // of it together is less than the new one.
  if (slots_ != nullptr) outgrown_.push_back(std::move(slots_));
  slots_ = std::move(larger);
  slot_bytes_ = rounded;
}

uint64_t* Peers::flag(Flag flag, int owner, int writer) const {
  return reinterpret_cast<uint64_t*>(flags_->of(owner)) +
         static_cast<int>(flag) * kernels::kMaxPeers + writer;
}

void Peers::signal(Flag flag, uint32_t ranks, uint64_t value, cudaStream_t stream) const {
  kernels::PeerSignalParams params;
  for (int peer = 0; peer < world_size_; ++peer) {
    if ((ranks >> peer & 1) != 0) params.flags[params.count++] = this->flag(flag, peer, rank_);
  }
  params.value = value;
  check_cuda(kernels::signal_peers_release_sys(params, stream), "launching a signal");
}

kernels::PeerWaitParams Peers::wait_for(Flag flag, uint32_t ranks, uint64_t value) const {
  kernels::PeerWaitParams params;
  params.flags = this->flag(flag, rank_, 0);
  params.ranks = ranks;
  params.value = value;
  return params;
}

int64_t Peers::bytes() const {
  int64_t total = flags_->bytes();
  if (slots_ != nullptr) total += slots_->bytes();
  for (const auto& old : outgrown_) total += old->bytes();
  return total;
}

}  // namespace overlap::runtime
