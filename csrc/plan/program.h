// Programs: what the ranks of a call move, transfer by transfer, in place of a plan's collectives.
//
// A program is one list for all ranks. Its order is the order in which each rank comes to its transfers on a stream, and
// transfers name only earlier ones as what they need, so that no program waits in a circle.
#pragma once

#include <cstdint>
#include <vector>

namespace overlap::plan {

struct Plan;

// The memory that transfers read and write, one of each on every rank: matrices of as many columns as what travels has.
enum class Memory : int32_t {
  kProduct = 0,   // this rank's own product, in place of which sums are made; not of an all-gather
  kOutput = 1,    // the result; not of an all-gather
  kInput = 2,     // of an all-gather: this rank's rows; only read
  kGathered = 3,  // of an all-gather: all ranks' rows; this rank's own ones are there at first
  kScratch = 4,   // the program's own
};

// kPush: at the source's behest, kPull: at the destination's, kCopy: within a rank.
enum class Way : int32_t { kPush = 0, kPull = 1, kCopy = 2 };

// The engine that moves the bytes. kAny: whatever the plan's transport has.
enum class Engine : int32_t { kAny = 0, kCopyEngine = 1, kNccl = 2 };

// Rows and columns of a matrix. An all-to-all's rows, which differ by call, are counted in shares of messages: those of
// what rank s sends to rank d are rows kMessageShares * d and following of s's product, and kMessageShares * s and
// following of d's output.
struct Rectangle {
  int64_t row = 0;
  int64_t rows = 0;
  int64_t column = 0;
  int64_t columns = 0;

  bool overlaps(const Rectangle& other) const {
    return row < other.row + other.rows && other.row < row + rows &&
           column < other.column + other.columns && other.column < column + columns;
  }
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};
inline constexpr int64_t kMessageShares = 64;

struct Region {
  Memory memory = Memory::kProduct;
  int32_t rank = 0;
  Rectangle area;

  friend bool operator==(const Region&, const Region&) = default;
};

struct Transfer {
  Way way = Way::kPush;
  bool reduces = false;  // added to what the destination holds
  Region source;
  Region destination;
  Engine by = Engine::kAny;
  int32_t stream = 0;            // a rank's transfers on it run one after the other
  std::vector<Rectangle> tiles;  // of the source rank's product, computed before
  // Numbers of transfers that come first, each of which shares a rank with this one: if it ends on that rank, its data have
  // arrived; if it only begins there, they have left.
  std::vector<int32_t> after;

  friend bool operator==(const Transfer&, const Transfer&) = default;
};

struct Program {
  int64_t scratch_rows = 0;
  std::vector<Transfer> transfers;

  bool empty() const { return transfers.empty() && scratch_rows == 0; }
  friend bool operator==(const Program&, const Program&) = default;
};

inline constexpr int32_t kMaxTransfers = 1024;
inline constexpr int32_t kMaxStreams = 4;

// Rows and columns that a memory of the plan's program has; {0, 0} where there is none.
struct Extents {
  int64_t rows = 0;
  int64_t columns = 0;
};
Extents extents(const Plan& plan, Memory memory);

// True if the program writes results itself; else they are where the product was, or the part of it
// that is the rank's.
bool writes_output(const Plan& plan);

// One more than the last stream that transfers name.
int32_t streams(const Program& program);

// The round of each transfer: transfers of a round have different sources and different
// destinations, and none needs another. Each rank does the rounds of a stream in their order, and a
// round needs only earlier rounds.
std::vector<int32_t> rounds(const Program& program);

// Throws std::invalid_argument, which says which transfer cannot be made, what is allowed and what to do.
void check_program(const Plan& plan);

// The chunks whose tiles have a place in the rectangle of the product.
std::vector<int32_t> chunks_in(const Plan& plan, const Rectangle& area);

}  // namespace overlap::plan
