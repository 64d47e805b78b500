// A matrix on each rank whose parts lie in the memory of the ranks that own them.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/peer_memory.h"

namespace overlap::runtime {

// One range of addresses for each rank and turn: part p of it is mapped to memory of rank p, so that a kernel which
// stores a row-major matrix sends each rank its rows. Every rank has as many bytes for each source. The ranks hand each
// other file descriptors of the memory over sockets of the host.
class StripedMemory {
 public:
  static constexpr int kTurns = 2;

  // Collective. Null on all ranks if any of them cannot have it, and `why` says the same on all. `part_bytes` are a
  // multiple of plan::kStripePage.
  static std::unique_ptr<StripedMemory> make(const ByteAllGather& all_gather, int rank,
                                             int world_size, int64_t part_bytes, std::string* why);
  ~StripedMemory();
  StripedMemory(const StripedMemory&) = delete;
  StripedMemory& operator=(const StripedMemory&) = delete;

  // This rank's matrix, of as many parts as there are ranks.
  char* matrix(int turn) const { return pointer(matrices_, turn); }
  // All ranks' rows of this rank's part, in rank order, in this rank's memory.
  char* terms(int turn) const { return pointer(terms_, turn); }
  int64_t bytes() const { return kTurns * world_size_ * part_bytes_; }

  // Leaves the memory to the process: peers may still access it.
  void leak() { leaked_ = true; }

 private:
  using Handle = CUmemGenericAllocationHandle;

  StripedMemory(int rank, int world_size, int64_t part_bytes)
      : rank_(rank), world_size_(world_size), part_bytes_(part_bytes) {}
  static char* pointer(const std::array<CUdeviceptr, kTurns>& all, int turn) {
    return reinterpret_cast<char*>(all[static_cast<size_t>(turn)]);
  }
  size_t size() const { return static_cast<size_t>(world_size_ * part_bytes_); }

  // These say what went wrong, or nothing.
  std::string map(const ByteAllGather& all_gather);
  std::string create();
  std::string exchange(int socket, const std::vector<std::string>& names);
  std::string send(int socket, int peer, const std::string& name) const;
  std::string receive(int socket);
  std::string map_turn(int turn);
  std::string map_range(CUdeviceptr& range, const std::vector<Handle>& handles);
  void release();

  int rank_ = 0;
  int world_size_ = 1;
  int64_t part_bytes_ = 0;
  int device_ = 0;
  bool leaked_ = false;
  // Until they are mapped: by turn, of own memory for each source, and of each owner's for this rank.
  std::array<std::vector<Handle>, kTurns> own_ = {};
  std::array<std::vector<Handle>, kTurns> owners_ = {};
  std::array<CUdeviceptr, kTurns> matrices_ = {};  // 0: not reserved
  std::array<CUdeviceptr, kTurns> terms_ = {};
};

}  // namespace overlap::runtime
