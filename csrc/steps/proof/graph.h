// The order of events: nodes, edges, and reachability as bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace overlap::steps {

class Graph {
 public:
  using Node = int32_t;

  Node add() { return count_++; }
  void edge(Node from, Node to) { edges_.emplace_back(from, to); }
  int32_t size() const { return count_; }

  // Sorts the nodes and computes reachability. False where there is a circle; `sequence` then lacks its nodes and those
  // after it.
  bool close();
  // One order of all nodes that keeps to the edges.
  const std::vector<Node>& sequence() const { return sequence_; }
  // True if a path leads from one to the other.
  bool before(Node a, Node b) const {
    const size_t bit = place_[static_cast<size_t>(a)];
    return (ancestors_[place_[static_cast<size_t>(b)] * words_ + bit / 64] >> (bit % 64) & 1) != 0;
  }
  // A circle, in its order.
  std::vector<Node> circle() const;

 private:
  int32_t count_ = 0;
  std::vector<std::pair<Node, Node>> edges_;
  std::vector<Node> sequence_;
  std::vector<size_t> place_;  // of each node in the sequence
  size_t words_ = 0;
  std::vector<uint64_t> ancestors_;  // of each place, a bit for each place
};

}  // namespace overlap::steps
