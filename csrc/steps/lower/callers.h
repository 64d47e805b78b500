// A kernel of the caller's in a list: the table by which it counts tiles, or awaits what arrives, and waits for its counts.
// It takes the tiles of a row-major matrix in an order of its own.
//
//   produce  caller | fork | the kernel: signal [A] ............................... | join |
//            side   |      | wait 0 [A] | copy and communicate 0 | wait 1 [A] | ... | ^
//
//   consume  caller | own rows | fork | the kernel: await chunk 0, 1 ... [D] | join |
//            side   |                 | communicate 0 | arrive 0 [D] | communicate 1 ... | ^
//
// Rows of tiles need not end where parts of the matrix do. A tile that several chunks need counts for the first of them,
// and the others wait for that one, too; a tile that needs several chunks awaits the last one, as chunks arrive in order.
#pragma once

#include <set>
#include <vector>

#include "steps/list/list.h"

namespace overlap::steps {

// Rows of the kernel's matrix that a chunk communicates, or brings.
struct Claim {
  plan::Rows rows;
  int32_t chunk = 0;
};

class CallersTiles {
 public:
  CallersTiles(const plan::Plan& plan, List& list) : plan_(plan), list_(list) {}

  // Each tile's chunk: of those that claim its rows the first, or the last. Rows that nobody claims: chunk 0.
  void assign(int64_t rows, const std::vector<Claim>& claims, bool first);
  // Tiles as the plan's order cuts them into chunks.
  void assign(const plan::TileOrder& order);

  // How many tiles count for the chunk: none beyond the matrix, which this package's kernels do count.
  int32_t counted(int32_t chunk) const { return counts_[static_cast<size_t>(chunk)]; }
  // Until all tiles are finished that the chunk needs.
  void wait(Lane lane, int32_t chunk);

 private:
  const plan::Plan& plan_;
  List& list_;
  std::vector<int32_t> counts_;           // tiles that count for each chunk
  std::vector<std::set<int32_t>> needs_;  // of each chunk: whose counts it waits for
};

// A kernel that does not count or await, and whose tiles are all of one chunk.
void add_callers_kernel(const plan::Plan& plan, int64_t rows, List& list);

}  // namespace overlap::steps
