#include "runtime/peer_memory.h"

#include <cstdlib>
#include <fstream>
#include <string_view>

#include "plan/agreement.h"
#include "runtime/communicator.h"
#include "runtime/window_addresses.h"

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

// A rank's answer after its attempt: CUDA's error or NCCL's, and its device's free bytes.
struct PeerMemory::Answer {
  int32_t cuda = cudaSuccess;
  int32_t nccl = ncclSuccess;
  int64_t no_window = 0;
  int64_t free_bytes = 0;

  bool works() const { return cuda == cudaSuccess && nccl == ncclSuccess && no_window == 0; }
  std::string said() const {
    if (no_window != 0) {
      return kNoWindow;
    }
    return nccl != ncclSuccess ? std::string("NCCL said \"") +
                                     ncclGetErrorString(static_cast<ncclResult_t>(nccl)) + "\""
                               : std::string("CUDA said \"") +
                                     cudaGetErrorString(static_cast<cudaError_t>(cuda)) + "\"";
  }
};

std::unique_ptr<PeerMemory> PeerMemory::make(const ByteAllGather& all_gather, const Clique& clique,
                                             int64_t bytes, cudaStream_t stream,
                                             Communicator* windows, std::string* why) {
  std::unique_ptr<PeerMemory> memory(new PeerMemory(clique, bytes, windows));
  Answer own;
  if (windows == nullptr) {
    own.cuda = memory->map_by_ipc(all_gather, stream);
  } else {
    own = memory->map_window(all_gather, stream);
  }
  size_t free = 0;
  size_t all = 0;
  if (!own.works() && cudaMemGetInfo(&free, &all) == cudaSuccess) {
    own.free_bytes = static_cast<int64_t>(free);
  }
  (void)cudaGetLastError();  // a failure here is an answer, not an error
  // A region that works between some ranks only is one that no rank may use.
  const std::vector<Answer> answers = all_gather_values(all_gather, own);
  for (size_t of = 0; of < answers.size(); ++of) {
    const Answer& answer = answers[of];
    if (answer.works()) continue;
    if (memory != nullptr && why != nullptr) {
      *why = "on rank " + std::to_string(of) + ", whose device has " +
             std::to_string(answer.free_bytes >> 20) + " MiB free, " + answer.said();
    }
    memory.reset();
  }
  return memory;
}

// Every rank takes part in the all-gather, whatever went wrong before.
cudaError_t PeerMemory::map_by_ipc(const ByteAllGather& all_gather, cudaStream_t stream) {
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

// Every rank registers its window, or none does: NCCL lets nobody out of it before all have come.
PeerMemory::Answer PeerMemory::map_window(const ByteAllGather& all_gather, cudaStream_t stream) {
  Answer answer;
  void* own = nullptr;
  answer.nccl = ncclMemAlloc(&own, static_cast<size_t>(bytes_));
  addresses_[static_cast<size_t>(clique_.place())] = static_cast<char*>(own);
  for (const Answer& one : all_gather_values(all_gather, answer)) {
    if (!one.works()) return answer;
  }
  window_ = windows_->register_window(own, static_cast<size_t>(bytes_));
  if (!is_symmetric(window_)) {
    answer.no_window = 1;
    return answer;
  }
  cudaError_t error = cudaSuccess;
  const auto and_then = [&error](auto&& next) {
    if (error == cudaSuccess) error = next();
  };
  // The memory itself holds the addresses for a moment, before it is zeroed.
  std::vector<char*> found(addresses_.size());
  and_then([&] {
    return write_window_addresses(window_, clique_.first, clique_.count, static_cast<char**>(own),
                                  stream);
  });
  and_then([&] {
    return cudaMemcpyAsync(found.data(), own, found.size() * sizeof(char*), cudaMemcpyDeviceToHost,
                           stream);
  });
  and_then([&] { return cudaMemsetAsync(own, 0, static_cast<size_t>(bytes_), stream); });
  and_then([&] { return cudaStreamSynchronize(stream); });
  for (size_t peer = 0; peer < found.size() && error == cudaSuccess; ++peer) {
    if (static_cast<int>(peer) != clique_.place()) addresses_[peer] = found[peer];
  }
  answer.cuda = error;
  return answer;
}

PeerMemory::~PeerMemory() {
  if (leaked_) return;
  if (window_ != nullptr) {
    (void)cudaDeviceSynchronize();  // as cudaFree does: kernels of this rank may still store
    windows_->deregister_window(window_);
  }
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (addresses_[peer] == nullptr) continue;
    if (static_cast<int>(peer) == clique_.place()) {
      windows_ == nullptr ? (void)cudaFree(addresses_[peer]) : (void)ncclMemFree(addresses_[peer]);
    } else if (windows_ == nullptr) {
      cudaIpcCloseMemHandle(addresses_[peer]);
    }
  }
}

}  // namespace overlap::runtime
