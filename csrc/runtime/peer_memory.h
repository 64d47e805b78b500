// Memory that the ranks of one host map into each other.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace overlap::runtime {

// Every rank's bytes in rank order, given this rank's; as many from each. Collective.
using ByteAllGather = std::function<std::vector<uint8_t>(const std::vector<uint8_t>& own)>;

// The same of values. Groups gather bytes two by two.
template <typename Value>
std::vector<Value> all_gather_values(const ByteAllGather& all_gather, const Value& own) {
  static_assert(std::is_trivially_copyable_v<Value> && sizeof(Value) % 2 == 0);
  std::vector<uint8_t> bytes(sizeof(Value));
  std::memcpy(bytes.data(), &own, sizeof(Value));
  bytes = all_gather(bytes);
  std::vector<Value> all(bytes.size() / sizeof(Value));
  std::memcpy(all.data(), bytes.data(), all.size() * sizeof(Value));
  return all;
}

// A name that is the same for all processes of a host, since it was booted; zeros where the kernel does not say. A
// handle names processes by number, and must not meet a process of the same number elsewhere. Tests name hosts
// themselves, by OVERLAP_HOST_ID.
std::array<char, 40> host_id();

// The ranks that map each other's memory, one after the other, and this rank among them.
struct Clique {
  int first = 0;
  int count = 1;
  int rank = 0;  // in the group

  int place() const { return rank - first; }
};

// This rank's clique: the ranks on its host. One rank where hosts have unlike numbers of ranks, more than map each other,
// or ranks that do not follow each other. Collective.
Clique find_clique(const ByteAllGather& all_gather, int rank, int most);

class Communicator;

inline constexpr const char* kNoWindow =
    "NCCL registered no symmetric window: it has no peer access, or NCCL_CUMEM_ENABLE=0 or "
    "NCCL_WIN_ENABLE=0 forbids it";

// One allocation on each rank, mapped by all others. Where that does not work (no peer access, a process or a container
// that CUDA refuses, one process for several ranks) the calls fail without harm, so that trying is asking.
class PeerMemory {
 public:
  // Collective. Null on all ranks of the group if any of them cannot map the memory of any other of its clique, and `why`
  // says the same on all. The memory is zeroed on the stream, which is synchronised. Without `windows` it is mapped through
  // CUDA IPC. With them it is a symmetric window of this communicator of the group's ranks, of whose load/store teams each
  // clique is part, and which outlives it.
  static std::unique_ptr<PeerMemory> make(const ByteAllGather& all_gather, const Clique& clique,
                                          int64_t bytes, cudaStream_t stream, Communicator* windows,
                                          std::string* why);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  char* of(int place) const { return addresses_[static_cast<size_t>(place)]; }  // in the clique
  int64_t bytes() const { return bytes_; }

  // Leaves the memory to the process: peers may still access it. A window's communicator is then to be left, too.
  void leak() { leaked_ = true; }

 private:
  struct Answer;

  PeerMemory(const Clique& clique, int64_t bytes, Communicator* windows)
      : clique_(clique),
        bytes_(bytes),
        windows_(windows),
        addresses_(static_cast<size_t>(clique.count)) {}
  cudaError_t map_by_ipc(const ByteAllGather& all_gather, cudaStream_t stream);
  Answer map_window(const ByteAllGather& all_gather, cudaStream_t stream);

  Clique clique_;
  int64_t bytes_ = 0;
  Communicator* windows_ = nullptr;
  ncclWindow_t window_ = nullptr;
  bool leaked_ = false;
  std::vector<char*> addresses_;  // null: not mapped
};

}  // namespace overlap::runtime
