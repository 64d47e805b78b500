#include "steps/proof/graph.h"

#include <algorithm>

namespace overlap::steps {

bool Graph::close() {
  const auto count = static_cast<size_t>(count_);
  std::vector<size_t> first(count + 1, 0);  // of each node's edges
  std::vector<int32_t> missing(count, 0);
  for (const auto& [from, to] : edges_) {
    ++first[static_cast<size_t>(from) + 1];
    ++missing[static_cast<size_t>(to)];
  }
  for (size_t i = 0; i < count; ++i) first[i + 1] += first[i];
  std::vector<Node> behind(edges_.size());  // each node
  std::vector<size_t> next(first.begin(), first.end() - 1);
  for (const auto& [from, to] : edges_) behind[next[static_cast<size_t>(from)]++] = to;

  sequence_.reserve(count);
  for (Node node = 0; node < count_; ++node) {
    if (missing[static_cast<size_t>(node)] == 0) sequence_.push_back(node);
  }
  for (size_t i = 0; i < sequence_.size(); ++i) {
    const auto node = static_cast<size_t>(sequence_[i]);
    for (size_t e = first[node]; e < first[node + 1]; ++e) {
      const Node to = behind[e];
      if (--missing[static_cast<size_t>(to)] == 0) sequence_.push_back(to);
    }
  }
  if (sequence_.size() < count) return false;

  place_.resize(count);
  for (size_t i = 0; i < count; ++i) place_[static_cast<size_t>(sequence_[i])] = i;
  words_ = (count + 63) / 64;
  ancestors_.assign(count * words_, 0);
  for (size_t i = 0; i < count; ++i) {
    const auto node = static_cast<size_t>(sequence_[i]);
    const uint64_t* const own = &ancestors_[i * words_];
    const size_t used = i / 64 + 1;
    for (size_t e = first[node]; e < first[node + 1]; ++e) {
      uint64_t* const other = &ancestors_[place_[static_cast<size_t>(behind[e])] * words_];
      for (size_t w = 0; w < used; ++w) other[w] |= own[w];
      other[i / 64] |= uint64_t{1} << (i % 64);
    }
  }
  return true;
}

std::vector<Graph::Node> Graph::circle() const {
  std::vector<bool> sorted(static_cast<size_t>(count_), false);
  for (const Node node : sequence_) sorted[static_cast<size_t>(node)] = true;
  // Whoever is not sorted has somebody before it who is not: so the way back comes to a node twice.
  std::vector<Node> behind(static_cast<size_t>(count_), -1);
  for (const auto& [from, to] : edges_) {
    if (!sorted[static_cast<size_t>(from)] && !sorted[static_cast<size_t>(to)]) {
      behind[static_cast<size_t>(to)] = from;
    }
  }
  std::vector<int32_t> seen(static_cast<size_t>(count_), -1);
  std::vector<Node> way;
  Node node = 0;
  while (node < count_ && sorted[static_cast<size_t>(node)]) ++node;
  while (seen[static_cast<size_t>(node)] < 0) {
    seen[static_cast<size_t>(node)] = static_cast<int32_t>(way.size());
    way.push_back(node);
    node = behind[static_cast<size_t>(node)];
  }
  way.erase(way.begin(), way.begin() + seen[static_cast<size_t>(node)]);
  std::reverse(way.begin(), way.end());
  return way;
}

}  // namespace overlap::steps
