#include "steps/proof/contents.h"

#include <algorithm>
#include <iterator>

namespace overlap::steps {

Sum Sums::find(const std::vector<int32_t>& key) {
  const auto [at, is_new] = numbers_.try_emplace(key, static_cast<Sum>(ranks_.size()));
  if (!is_new) return at->second;
  std::set<int32_t> ranks;
  bool twice = false;
  if (key[0] == kTerm) {
    ranks.insert(key[1]);
  } else {
    for (size_t i = 1; i < key.size(); ++i) {
      twice = twice || twice_[static_cast<size_t>(key[i])];
      for (const int32_t rank : ranks_[static_cast<size_t>(key[i])]) {
        twice = !ranks.insert(rank).second || twice;
      }
    }
  }
  ranks_.push_back(std::move(ranks));
  twice_.push_back(twice);
  return at->second;
}

Sum Sums::add(const std::vector<Sum>& terms, bool by_library) {
  if (terms.size() == 1) return terms[0];
  std::vector<int32_t> key = {by_library ? kByLibrary : kOrdered};
  key.insert(key.end(), terms.begin(), terms.end());
  return find(key);
}

std::vector<Run> Contents::read(int64_t begin, int64_t bytes) const {
  std::vector<Run> runs;
  const int64_t end = begin + bytes;
  auto at = pieces_.upper_bound(begin);
  if (at != pieces_.begin() && std::prev(at)->second.end > begin) --at;
  int64_t place = begin;
  while (place < end) {
    const bool over = at == pieces_.end() || at->first >= end;
    if (over || at->first > place) {
      const int64_t next = over ? end : at->first;
      runs.push_back({next - place, 0, {}});
      place = next;
      continue;
    }
    const int64_t next = std::min(end, at->second.end);
    runs.push_back({next - place, place + at->second.shift, at->second.content});
    place = next;
    ++at;
  }
  return runs;
}

void Contents::erase(int64_t begin, int64_t end) {
  auto at = pieces_.lower_bound(begin);
  if (at != pieces_.begin()) {
    const auto before = std::prev(at);
    if (before->second.end > begin) {
      const Piece rest = before->second;
      before->second.end = begin;
      if (rest.end > end) at = pieces_.emplace(end, rest).first;
    }
  }
  while (at != pieces_.end() && at->first < end) {
    if (at->second.end > end) pieces_.emplace(end, at->second);
    at = pieces_.erase(at);
  }
}

void Contents::write(int64_t begin, const Run& run) {
  if (run.bytes == 0) return;
  int64_t end = begin + run.bytes;
  erase(begin, end);
  if (run.content.space == Content::Space::kNothing) return;
  const int64_t shift = run.position - begin;
  const auto joins = [&](const Piece& piece) {
    return piece.shift == shift && piece.content == run.content;
  };
  const auto behind = pieces_.find(end);
  if (behind != pieces_.end() && joins(behind->second)) {
    end = behind->second.end;
    pieces_.erase(behind);
  }
  const auto at = pieces_.lower_bound(begin);
  if (at != pieces_.begin()) {
    Piece& before = std::prev(at)->second;
    if (before.end == begin && joins(before)) {
      before.end = end;
      return;
    }
  }
  pieces_[begin] = {end, shift, run.content};
}

void Contents::write(int64_t begin, const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    write(begin, run);
    begin += run.bytes;
  }
}

}  // namespace overlap::steps
