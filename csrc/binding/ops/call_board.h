// The ranks of a group compare their calls on CPU before anything is communicated. Gloo pairs
// whatever comes: if ranks call with other shapes it adds up rows that do not belong together, or
// ends the process.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace overlap::binding {

// The rows of an all-to-all to and from each rank; else empty.
struct RowCounts {
  at::IntArrayRef sent;
  at::IntArrayRef received;
};

// A rank's note of a call.
struct CallNote {
  uint64_t plan = 0;                    // a hash: ranks with other plans do not communicate alike
  char problem[248] = {};               // text, cut off
  static constexpr size_t kRanks = 64;  // the first ones, whose rows are compared
  int64_t sent[kRanks] = {};
  int64_t received[kRanks] = {};
};

class SharedNotes;

// One line for each rank, in memory that the ranks of one host share: a rank writes its note when a call
// begins, and reads the others' before it communicates, when it would have to wait for them anyway.
// Ranks on several hosts gather their notes by gloo instead, beside the GEMM.
class CallBoard {
 public:
  struct Options {
    std::string name;  // of the group
    int rank = 0;
    int world_size = 1;
    std::chrono::milliseconds timeout{0};
    c10::intrusive_ptr<c10d::Store> store;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group{c10::intrusive_ptr<c10d::ProcessGroup>()};
  };

  // Collective: returns when all ranks have come, or one has not by the deadline, which every call says then.
  explicit CallBoard(Options options);
  ~CallBoard();
  CallBoard(const CallBoard&) = delete;
  CallBoard& operator=(const CallBoard&) = delete;

  // A call begins.
  void announce(const std::string& problem, uint64_t plan, const RowCounts& rows);

  // Returns when all ranks have announced the call that this one announced last, and throws on every rank if
  // their notes differ: nothing has been communicated then, and the next call may agree. Throws, and so
  // do all calls after it, if a rank does not come. Returns at once if there is nothing to compare.
  void agree();

 private:
  void meet();
  void gather();
  void compare(const std::vector<CallNote>& notes) const;
  void compare_rows(const std::vector<CallNote>& notes) const;
  std::string failure(const std::string& message) const;
  [[noreturn]] void fail(const std::string& message);

  Options options_;
  std::unique_ptr<SharedNotes> shared_;  // null: the ranks gather
  uint32_t call_ = 0;
  bool pending_ = false;
  CallNote own_;
  at::Tensor gathered_;
  c10::intrusive_ptr<c10d::Work> gathering_;
  std::string error_;
};

}  // namespace overlap::binding
