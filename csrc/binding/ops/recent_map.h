// A map that keeps what was used last.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

namespace overlap::binding {

// Holds the kHalf items that were used last, and at most as many again: items are in two generations, and when the newer
// one is full, items not used since the last time go. Items in the newer one are found as fast as in a map.
template <typename Key, typename Value, size_t kHalf>
class RecentMap {
 public:
  // The value, one made by default where there is none.
  Value& operator[](const Key& key) {
    if (const auto found = newer_.find(key); found != newer_.end()) return found->second;
    if (newer_.size() >= kHalf) older_ = std::exchange(newer_, {});
    Value& value = newer_[key];
    if (const auto found = older_.find(key); found != older_.end()) {
      value = std::move(found->second);
      older_.erase(found);
    }
    return value;
  }
  void erase(const Key& key) {
    newer_.erase(key);
    older_.erase(key);
  }
  void clear() {
    newer_.clear();
    older_.clear();
  }
  size_t size() const { return newer_.size() + older_.size(); }

 private:
  std::map<Key, Value> newer_;
  std::map<Key, Value> older_;
};

}  // namespace overlap::binding
