// The contents of the ranks' memory while a simulation goes through their steps: not numbers, but
// the call, rows and ranks that they come from, and the order in which they were added.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace overlap::steps {

// A sum in the order in which it was added, or one rank's term.
using Sum = int32_t;

class Sums {
 public:
  Sum of_rank(int32_t rank) { return find({kTerm, rank}); }
  // Terms in this order; of a library's collective in one that only the library knows, the same on all ranks.
  Sum add(const std::vector<Sum>& terms, bool by_library);
  // Ranks in it; a rank whose term was added twice is in `twice`.
  const std::set<int32_t>& ranks(Sum sum) const { return ranks_[static_cast<size_t>(sum)]; }
  bool twice(Sum sum) const { return twice_[static_cast<size_t>(sum)]; }

 private:
  static constexpr int32_t kTerm = 0;
  static constexpr int32_t kOrdered = 1;
  static constexpr int32_t kByLibrary = 2;
  Sum find(const std::vector<int32_t>& key);

  std::map<std::vector<int32_t>, Sum> numbers_;
  std::vector<std::set<int32_t>> ranks_;
  std::vector<bool> twice_;
};

// The meaning of a byte, up to its place.
struct Content {
  // Rows of inputs (of an all-gather, of all ranks' rows, one part after the other), of products, or of products tile
  // by tile in tile order; numbers of a rank's kIndices; or rows beyond a count, which may travel and are nobody's.
  enum class Space : uint8_t {
    kNothing,
    kInput,
    kProduct,
    kTiles,
    kIndices,
    kBeyondCount
  } space = Space::kNothing;
  bool biased = false;
  int32_t weight = 0;
  int32_t call = 0;
  Sum sum = 0;

  friend bool operator==(const Content&, const Content&) = default;
};

// A run of bytes that follow each other both in memory and in what they are of, from `position` on.
struct Run {
  int64_t bytes = 0;
  int64_t position = 0;
  Content content;

  friend bool operator==(const Run&, const Run&) = default;
};

// The contents of one buffer.
class Contents {
 public:
  // All bytes of a range; what was never written is kNothing.
  std::vector<Run> read(int64_t begin, int64_t bytes) const;
  void write(int64_t begin, const std::vector<Run>& runs);
  void write(int64_t begin, const Run& run);
  void clear() { pieces_.clear(); }

 private:
  struct Piece {
    int64_t end = 0;
    int64_t shift = 0;  // of the position after the place
    Content content;
  };
  void erase(int64_t begin, int64_t end);
  std::map<int64_t, Piece> pieces_;  // by where they begin
};

}  // namespace overlap::steps
