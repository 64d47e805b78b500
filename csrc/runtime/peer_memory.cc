#include "runtime/peer_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>

namespace overlap::runtime {
namespace {

// The same for all processes of a host, since it was booted; zeros where the kernel does not say. A
// handle names processes by number, and must not meet a process of the same number elsewhere.
std::array<char, 40> host_id() {
  std::array<char, 40> id = {};
  std::ifstream("/proc/sys/kernel/random/boot_id").read(id.data(), id.size());
  return id;
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::make(const ByteAllGather& all_gather, int rank,
                                             int world_size, int64_t bytes, cudaStream_t stream) {
  std::unique_ptr<PeerMemory> memory(new PeerMemory(rank, world_size, bytes));
  const bool mapped = memory->map(all_gather, stream);
  // A region that works between some ranks only is one that no rank may use.
  const std::vector<uint8_t> answers = all_gather({mapped, mapped});
  if (std::find(answers.begin(), answers.end(), 0) != answers.end()) memory.reset();
  return memory;
}

// Every rank takes part in the all-gather, whatever went wrong before.
bool PeerMemory::map(const ByteAllGather& all_gather, cudaStream_t stream) {
  struct Offer {
    cudaIpcMemHandle_t handle;
    std::array<char, 40> host;
    int64_t works;
  };
  Offer offer = {};
  const std::array<char, 40> host = host_id();
  offer.host = host;
  void* own = nullptr;
  bool works = cudaMalloc(&own, static_cast<size_t>(bytes_)) == cudaSuccess;
  addresses_[static_cast<size_t>(rank_)] = static_cast<char*>(own);
  works = works && cudaMemsetAsync(own, 0, static_cast<size_t>(bytes_), stream) == cudaSuccess &&
          cudaStreamSynchronize(stream) == cudaSuccess &&
          cudaIpcGetMemHandle(&offer.handle, own) == cudaSuccess;
  offer.works = works;
  std::vector<uint8_t> value(sizeof(offer));
  std::memcpy(value.data(), &offer, sizeof(offer));
  const std::vector<uint8_t> offers = all_gather(value);
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    std::memcpy(&offer, offers.data() + peer * sizeof(offer), sizeof(offer));
    void* address = nullptr;
    works =
        works && offer.works != 0 && offer.host == host &&
        cudaIpcOpenMemHandle(&address, offer.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    addresses_[peer] = works ? static_cast<char*>(address) : nullptr;
  }
  (void)cudaGetLastError();  // a failure here is an answer, not an error
  return works;
}

PeerMemory::~PeerMemory() {
  if (leaked_) return;
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (addresses_[peer] == nullptr) continue;
    if (static_cast<int>(peer) == rank_) {
      cudaFree(addresses_[peer]);
    } else {
      cudaIpcCloseMemHandle(addresses_[peer]);
    }
  }
}

}  // namespace overlap::runtime
