// A matrix on each rank whose parts lie in the memory of the ranks that own them.
#pragma once

#include <cuda.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "runtime/peer_memory.h"

namespace overlap::runtime {

// One range of addresses for each rank and turn: part p of it is mapped to memory of rank p, so that a kernel which
// stores a row-major matrix sends each rank its rows. Every rank has as many bytes for each source. The ranks hand each
// other file descriptors of the memory over sockets of the host.
//
// A page in which part p ends and part p + 1 begins is rank p + 1's. Rank p reads its rows there over the link.
//
//   matrix of a rank   | rank 0's pages      | shared | rank 1's pages      | shared | ...
//   part               | 0                       | 1                           | 2
class StripedMemory {
 public:
  static constexpr int kTurns = 2;

  // Collective. Null on all ranks if any of them cannot have it, and `why` says the same on all. `part_bytes` are at
  // least plan::kStripePage.
  static std::unique_ptr<StripedMemory> make(const ByteAllGather& all_gather, int rank,
                                             int world_size, int64_t part_bytes, std::string* why);
  ~StripedMemory();
  StripedMemory(const StripedMemory&) = delete;
  StripedMemory& operator=(const StripedMemory&) = delete;

  // This rank's matrix, of as many parts as there are ranks.
  char* matrix(int turn) const { return pointer(matrices_, turn); }
  // All ranks' rows of this rank's part, in rank order, plan::stripe_stride() bytes apart.
  char* terms(int turn) const {
    return pointer(terms_, turn) + rank_ * part_bytes_ % plan::kStripePage;
  }
  int64_t bytes() const;  // of this rank's memory

  // Leaves the memory to the process: peers may still access it.
  void leak() { leaked_ = true; }

 private:
  using Handle = CUmemGenericAllocationHandle;
  // A rank's memory for the rows of one source: the page that it shares with the part before, or the pages after it.
  struct Piece {
    int turn = 0;
    int owner = 0;
    int source = 0;
    bool shared = false;
    auto operator<=>(const Piece&) const = default;
  };
  struct Mapped {
    CUdeviceptr at = 0;
    size_t bytes = 0;
  };

  StripedMemory(int rank, int world_size, int64_t part_bytes)
      : rank_(rank), world_size_(world_size), part_bytes_(part_bytes) {}
  static char* pointer(const std::array<CUdeviceptr, kTurns>& all, int turn) {
    return reinterpret_cast<char*>(all[static_cast<size_t>(turn)]);
  }
  size_t matrix_bytes() const;
  size_t terms_bytes() const;
  size_t bytes_of(const Piece& piece) const;
  // The pieces of an owner that a rank maps, in the order of their descriptors.
  std::vector<Piece> mapped_by(int rank, int owner) const;

  // These say what went wrong, or nothing.
  std::string map(const ByteAllGather& all_gather);
  std::string create();
  std::string exchange(int socket, const std::vector<std::string>& names);
  std::string send(int socket, int peer, const std::string& name) const;
  std::string receive(int socket);
  std::string map_turn(int turn);
  std::string map_piece(const Piece& piece, CUdeviceptr& at);
  void release();

  int rank_ = 0;
  int world_size_ = 1;
  int64_t part_bytes_ = 0;
  int device_ = 0;
  bool leaked_ = false;
  std::map<Piece, Handle> handles_;  // until they are mapped
  std::vector<Mapped> mapped_;
  std::array<CUdeviceptr, kTurns> matrices_ = {};  // 0: not reserved
  std::array<CUdeviceptr, kTurns> terms_ = {};
};

}  // namespace overlap::runtime
