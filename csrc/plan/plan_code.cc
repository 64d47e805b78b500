// A plan as a flat list of integers, and back.
#include <limits>
#include <string>

#include "plan/message.h"
#include "plan/plan.h"
#include "plan/plan_fields.h"

namespace overlap::plan {
namespace {

// First number of every list. It changes whenever the fields or their order do, so that a list that
// another version made is refused, not misread.
constexpr int64_t kCodeVersion = 8;

// Numbers of an item without sequences.
template <typename Item>
constexpr size_t numbers() {
  if constexpr (!kHasFields<Item>) {
    return 1;
  } else {
    size_t sum = 0;
    for_each_field<Item>(
        [&](const auto& field) { sum += numbers<typename std::decay_t<decltype(field)>::Type>(); });
    return sum;
  }
}

// Takes the list apart from front to back, and says which field was wrong.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& code) : code_(code) {
    if (!code.empty() && code[0] != kCodeVersion) {
      fail("encoded plan has version = ", code[0], ", this release reads ", kCodeVersion,
           ": make the plan again, or save and load plans as JSON, which releases share");
    }
    take("version", kCodeVersion, kCodeVersion);
  }

  template <typename Value>
  void read(const std::string& name, Value& value) {
    if constexpr (kIsSequence<Value>) {
      using Item = typename Value::value_type;
      value.resize(take_length("number of " + name, numbers<Item>()));
      for (size_t i = 0; i < value.size(); ++i) {
        read(name + "[" + std::to_string(i) + "]", value[i]);
      }
    } else if constexpr (kHasFields<Value>) {
      for_each_field<Value>([&](const auto& field) {
        read(name.empty() ? field.name : name + "." + field.name, value.*field.member);
      });
    } else if constexpr (std::is_enum_v<Value>) {
      constexpr int64_t kLast = Enumeration<Value>::kMembers.size() - 1;
      value = static_cast<Value>(take(name, 0, kLast));
    } else {
      using Limits = std::numeric_limits<Value>;
      value = static_cast<Value>(take(name, Limits::min(), Limits::max()));
    }
  }

  void finish() const {
    if (next_ != code_.size()) {
      fail("encoded plan has ", code_.size(), " numbers, expected ", next_,
           ": pass exactly the list that encode() returned");
    }
  }

 private:
  int64_t take(const std::string& field, int64_t low, int64_t high) {
    if (next_ == code_.size()) {
      fail("encoded plan ends after ", code_.size(), " numbers, where ", field,
           " should follow: pass the whole list that encode() returned");
    }
    const int64_t value = code_[next_++];
    if (value < low || value > high) {
      fail("encoded plan has ", field, " = ", value, " at position ", next_ - 1, ", allowed are ",
           low, " to ", high, ": pass a list that encode() returned");
    }
    return value;
  }

  // A length that the rest of the list can hold, so that a broken list allocates nothing large.
  size_t take_length(const std::string& field, size_t numbers_each) {
    const size_t left = code_.size() - next_;
    const size_t limit = left == 0 ? 0 : (left - 1) / numbers_each;
    return static_cast<size_t>(take(field, 0, static_cast<int64_t>(limit)));
  }

  const std::vector<int64_t>& code_;
  size_t next_ = 0;
};

// FNV-1a, by numbers, and mixed once more: near numbers differ in all bits.
class Hash {
 public:
  void add(int64_t number) {
    value_ = (value_ ^ static_cast<uint64_t>(number)) * 0x100000001b3;
    value_ ^= value_ >> 29;
  }
  uint64_t value() const {
    const uint64_t mixed = (value_ ^ value_ >> 32) * 0x9e3779b97f4a7c15;
    return mixed ^ mixed >> 32;
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

// add(number) for each number of the value in order; with `shared`, only for what all ranks agree on.
template <typename Value, typename Add>
void for_each_number(const Value& value, bool shared, const Add& add) {
  if constexpr (std::is_same_v<Value, Program>) {
    if (shared && value.empty()) return;  // plans without one keep their hashes
  }
  if constexpr (kIsSequence<Value>) {
    add(static_cast<int64_t>(value.size()));
    for (const auto& item : value) for_each_number(item, shared, add);
  } else if constexpr (kHasFields<Value>) {
    for_each_field<Value>([&](const auto& field) {
      if (shared && field.scope == Scope::kRank) return;
      // So a problem without scales, or fast_accum, keeps its hash from one release to the next.
      if constexpr (std::is_same_v<Value, Problem>) {
        if (shared && field.quiet && is_usual(value, field)) return;
      }
      if constexpr (std::is_same_v<Value, Plan> &&
                    std::is_same_v<std::decay_t<decltype(value.*field.member)>, int32_t>) {
        if (shared && field.quiet && is_usual(value, field)) return;
      }
      for_each_number(value.*field.member, shared, add);
    });
  } else {
    add(static_cast<int64_t>(value));
  }
}

template <typename Item>
uint64_t shared_hash(const Item& item) {
  Hash all;
  for_each_number(item, true, [&](int64_t number) { all.add(number); });
  return all.value();
}

}  // namespace

uint64_t hash(const Problem& problem) {
  return shared_hash(problem);
}

uint64_t communication_hash(const Plan& plan) {
  return shared_hash(plan);
}

std::vector<int64_t> encode(const Plan& plan) {
  std::vector<int64_t> code = {kCodeVersion};
  for_each_number(plan, false, [&](int64_t number) { code.push_back(number); });
  return code;
}

Plan decode(const std::vector<int64_t>& code) {
  Reader reader(code);
  Plan plan;
  reader.read("", plan);
  reader.finish();
  return plan;
}

}  // namespace overlap::plan
