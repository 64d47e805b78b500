#include "runtime/peer_memory.h"

#include <cstdlib>
#include <fstream>
#include <string_view>

#include "plan/agreement.h"

namespace overlap::runtime {

std::array<char, 40> host_id() {
  std::array<char, 40> id = {};
  if (const char* const named = std::getenv("OVERLAP_HOST_ID"); named != nullptr) {
    std::string_view(named).copy(id.data(), id.size());
    return id;
  }
  std::ifstream("/proc/sys/kernel/random/boot_id").read(id.data(), id.size());
  return id;
}

Clique find_clique(const ByteAllGather& all_gather, int rank, int most) {
  std::vector<std::string> hosts;
  for (const auto& host : all_gather_values(all_gather, host_id())) {
    hosts.emplace_back(host.data(), host.size());
  }
  const int count = plan::ranks_of_each_host(hosts, most);
  return {rank / count * count, count, rank};
}

namespace {

struct Answer {
  int64_t error = cudaSuccess;
  int64_t free_bytes = 0;  // of the device
};

Answer answer_of(cudaError_t error) {
  Answer answer{.error = error};
  size_t free = 0;
  size_t all = 0;
  if (error != cudaSuccess && cudaMemGetInfo(&free, &all) == cudaSuccess) {
    answer.free_bytes = static_cast<int64_t>(free);
  }
  (void)cudaGetLastError();  // a failure here is an answer, not an error
  return answer;
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::make(const ByteAllGather& all_gather, const Clique& clique,
                                             int64_t bytes, cudaStream_t stream, std::string* why) {
  std::unique_ptr<PeerMemory> memory(new PeerMemory(clique, bytes));
  const Answer own = answer_of(memory->map(all_gather, stream));
  // A region that works between some ranks only is one that no rank may use.
  const std::vector<Answer> answers = all_gather_values(all_gather, own);
  for (size_t of = 0; of < answers.size(); ++of) {
    const Answer& answer = answers[of];
    if (answer.error == cudaSuccess) continue;
    if (memory != nullptr && why != nullptr) {
      *why = "on rank " + std::to_string(of) + ", whose device has " +
             std::to_string(answer.free_bytes >> 20) + " MiB free, CUDA said \"" +
             cudaGetErrorString(static_cast<cudaError_t>(answer.error)) + "\"";
    }
    memory.reset();
  }
  return memory;
}

// Every rank takes part in the all-gather, whatever went wrong before.
cudaError_t PeerMemory::map(const ByteAllGather& all_gather, cudaStream_t stream) {
  struct Offer {
    cudaIpcMemHandle_t handle;
    std::array<char, 40> host;
    int64_t works;
  };
  Offer own_offer = {};
  own_offer.host = host_id();
  void* own = nullptr;
  cudaError_t error = cudaMalloc(&own, static_cast<size_t>(bytes_));
  const auto and_then = [&error](auto&& next) {
    if (error == cudaSuccess) error = next();
  };
  addresses_[static_cast<size_t>(clique_.place())] = static_cast<char*>(own);
  and_then([&] { return cudaMemsetAsync(own, 0, static_cast<size_t>(bytes_), stream); });
  and_then([&] { return cudaStreamSynchronize(stream); });
  and_then([&] { return cudaIpcGetMemHandle(&own_offer.handle, own); });
  own_offer.works = error == cudaSuccess;
  const std::vector<Offer> offers = all_gather_values(all_gather, own_offer);
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (static_cast<int>(peer) == clique_.place()) continue;
    const Offer& offer = offers[static_cast<size_t>(clique_.first) + peer];
    if (offer.works == 0) return error;  // and says so itself
    void* address = nullptr;
    and_then([&] {
      if (offer.host != own_offer.host) return cudaErrorPeerAccessUnsupported;
      return cudaIpcOpenMemHandle(&address, offer.handle, cudaIpcMemLazyEnablePeerAccess);
    });
    addresses_[peer] = error == cudaSuccess ? static_cast<char*>(address) : nullptr;
  }
  return error;
}

PeerMemory::~PeerMemory() {
  if (leaked_) return;
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (addresses_[peer] == nullptr) continue;
    if (static_cast<int>(peer) == clique_.place()) {
      cudaFree(addresses_[peer]);
    } else {
      cudaIpcCloseMemHandle(addresses_[peer]);
    }
  }
}

}  // namespace overlap::runtime
