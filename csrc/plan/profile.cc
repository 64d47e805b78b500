#include "plan/profile.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "plan/tile_order.h"

namespace overlap::plan {

extern const char* const kShippedProfile;  // the text of overlap_torch/profiles/h200.json

namespace {

using Lists = Profile::Lists;

constexpr size_t kMostLists = 64;
constexpr size_t kMostQuoted = 60;

// The numbers that a field takes.
struct Range {
  double least;
  double most;

  bool has(double number) const { return number >= least && number <= most; }
};
constexpr Range kCtas = {1.0, 64.0};  // NCCL has no more channels
constexpr Range kLanes = {1.0, kMaxLanes};
constexpr Range kWeights = {1.0, 1000.0};

// A name's end is its unit, which says what is allowed; the first that fits counts.
Range range_of(std::string_view name) {
  static const std::vector<std::pair<Range, std::vector<std::string_view>>> all = {
      {{0.0, 1e3}, {"gemm_first_us", "rounds", "latencies", "sms_power", "sms_power_large"}},
      {{0.0, 1e6}, {"us"}},
      {{1e-4, 1e6}, {"gbps", "gflops"}},
      {{1e-4, 1e4}, {"rate", "factor", "needed_gain_apart", "needed_gain_once"}},  // they divide
      {{1.0, 100.0}, {"overlap_power"}},
      {{0.0, 1.0}, {"share"}},
      {{0.0, 1e9}, {"arch", "rows", "short_k"}},
      {kCtas, {"ctas"}},
      {{1.0, 1e4}, {"cores"}},
      {{1.0, 1e12}, {"bytes"}},
      {{0.0, 1e15}, {"flops"}}};
  for (const auto& [range, units] : all) {
    const auto ends = [&](std::string_view unit) { return name.ends_with(unit); };
    if (std::ranges::any_of(units, ends)) return range;
  }
  throw std::logic_error("no range is known for " + std::string(name));
}

// Values as the file has them; a number's is the shortest text that reads back to it.
template <typename Number>
  requires std::is_arithmetic_v<Number>
std::string text_of(Number number) {
  std::array<char, 32> digits{};
  return {digits.data(), std::to_chars(digits.begin(), digits.end(), number).ptr};
}
std::string text_of(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}
template <typename Item>
std::string text_of(const std::vector<Item>& items) {
  std::string result;
  for (const Item& item : items) result += (result.empty() ? "" : ", ") + text_of(item);
  return "[" + result + "]";
}
std::string text_of(const Range& range) {
  return text_of(range.least) + " to " + text_of(range.most);
}

// --- reading -----------------------------------------------------------------------------------

// JSON from front to back, as far as profiles have it.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool at_end() {
    at_ = std::min(text_.find_first_not_of(" \n\r\t", at_), text_.size());
    return at_ == text_.size();
  }
  bool take(char wanted) {
    if (at_end() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  // The text of the name or value that comes, up to what separates it from the next.
  std::string_view take_value() {
    if (at_end()) return {};
    const size_t begin = at_;
    int open = 0;
    for (bool quoted = false; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '"') quoted = !quoted;
      if (quoted && c == '\\') ++at_;
      if (quoted) continue;
      if (open == 0 && std::strchr(" \n\r\t,:]}", c) != nullptr) break;
      open += (c == '[' || c == '{') - (c == ']' || c == '}');
    }
    at_ = std::min(at_, text_.size());
    return text_.substr(begin, at_ - begin);
  }
  auto line() const { return 1 + std::ranges::count(text_.substr(0, at_), '\n'); }

  // False where the next is none of these, or a text with other escapes than those of quotes and backslashes.
  bool read(std::string& text) {
    text.clear();
    if (!take('"')) return false;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\' && (++at_ == text_.size() || !std::strchr("\"\\", text_[at_]))) {
        return false;
      }
      text += text_[at_];
    }
    return take('"');
  }
  template <typename Number>
    requires std::is_arithmetic_v<Number>
  bool read(Number& number) {
    if (at_end()) return false;
    const auto [end, error] = std::from_chars(text_.begin() + at_, text_.end(), number);
    at_ = static_cast<size_t>(end - text_.begin());
    return error == std::errc();
  }
  template <typename Item>
  bool read(std::vector<Item>& items) {
    items.clear();
    if (!take('[')) return false;
    do {
      if (!read(items.emplace_back())) return false;
    } while (take(','));
    return take(']');
  }

 private:
  const std::string_view text_;
  size_t at_ = 0;
};

// A value of each kind, in its place; false where it does not fit.
bool put(std::string_view, Reader& value, std::string& place) {
  return value.read(place) && !place.empty();
}
template <typename Number>
bool put(std::string_view name, Reader& value, Number& place) {
  double number = 0.0;
  if (!value.read(number) || !range_of(name).has(number)) return false;
  place = static_cast<Number>(number);
  return number == static_cast<double>(place);
}
bool has_ways(std::string_view name) {
  return name.starts_with("ways.");
}
bool put(std::string_view name, Reader& value, Lists& place) {
  const auto fits = [&](const std::vector<int32_t>& list) {
    if (has_ways(name)) return list.size() == 2 && kCtas.has(list[0]) && kLanes.has(list[1]);
    return list.size() <= static_cast<size_t>(kMaxChunks) &&
           std::ranges::all_of(list, [](int32_t one) { return kWeights.has(one); });
  };
  return value.read(place) && place.size() <= kMostLists && std::ranges::all_of(place, fits);
}

// The names that may stand in place of an unknown one: those of its group, else the first of each.
std::string names_beside(std::string_view unknown) {
  const auto group_of = [](std::string_view name) { return name.substr(0, name.find('.') + 1); };
  std::string beside, firsts;
  std::string_view before;
  for (const ProfileField& field : profile_fields()) {
    const std::string_view group = group_of(field.name);
    const auto add = [&](std::string& to) {
      to += (to.empty() ? "" : ", ") + std::string(field.name);
    };
    if (group.empty() || group != std::exchange(before, group)) add(firsts);
    if (!group.empty() && group == group_of(unknown)) add(beside);
  }
  return beside.empty() ? firsts + " and those beside them" : beside;
}

SharedProfile read(const std::string& text, const std::string& source, const Profile& usual) {
  auto profile = std::make_shared<Profile>(usual);
  profile->source = source;
  profile->missing.clear();
  Reader file(text);
  const auto fail = [&](const std::string& said) {
    throw std::invalid_argument("profile " + source + ": " + said);
  };
  const auto expect = [&](bool there, const char* wanted) {
    if (!there) fail("line " + text_of(file.line()) + " is not JSON: " + wanted);
  };
  std::set<std::string_view> given;
  expect(file.take('{'), "'{' is missing");
  while (!file.take('}')) {
    expect(given.empty() || file.take(','), "'}' is missing");
    std::string name;
    expect(Reader(file.take_value()).read(name), "a name in quotes is missing");
    expect(file.take(':'), "':' is missing");
    const std::string quoted(file.take_value());
    expect(!quoted.empty(), "a value is missing");
    const auto field = std::ranges::find(profile_fields(), name, &ProfileField::name);
    if (field == profile_fields().end()) {
      fail("it has " + text_of(name) + ", which is no field; allowed is " + names_beside(name));
    }
    if (!given.insert(field->name).second)
      fail(name + " is there twice; allowed is each field once");
    Reader value(quoted);
    const auto fits = [&](auto* place) { return put(name, value, *place) && value.at_end(); };
    if (!std::visit(fits, field->place(*profile))) {
      fail(name + " is " + quoted.substr(0, kMostQuoted) + "; allowed is " + field->allowed());
    }
  }
  expect(file.at_end(), "there is more after the object");
  if (!given.contains("name")) fail("name is missing; allowed is a string that is not empty");
  for (const ProfileField& field : profile_fields()) {
    if (given.contains(field.name)) continue;
    const ProfilePlace place = field.place(*profile);
    if (const auto* own = std::get_if<std::string*>(&place)) {
      (*own)->clear();
    } else {
      profile->missing.emplace_back(field.name);
    }
  }
  return profile;
}

}  // namespace

std::string ProfileField::allowed() const {
  Profile any{};
  const ProfilePlace kind = place(any);
  if (std::holds_alternative<std::string*>(kind)) {
    return R"(a string that is not empty, without escapes but \" and \\)";
  }
  if (std::holds_alternative<double*>(kind)) return "a number, " + text_of(range_of(name));
  if (std::holds_alternative<int64_t*>(kind)) return "a whole number, " + text_of(range_of(name));
  const std::string lists = "1 to " + text_of(kMostLists) + " lists of ";
  if (has_ways(name)) {
    return lists + "two whole numbers, CTAs from " + text_of(kCtas) + " and lanes from " +
           text_of(kLanes);
  }
  return lists + "1 to " + text_of(kMaxChunks) + " whole numbers from " + text_of(kWeights);
}

std::string Profile::to_json() const {
  std::string result;
  Profile copy = *this;  // fields are places in one that can change
  const std::set<std::string_view> lacks(missing.begin(), missing.end());
  for (const ProfileField& field : profile_fields()) {
    const std::string value =
        std::visit([](const auto* place) { return text_of(*place); }, field.place(copy));
    if (lacks.contains(field.name) || value == text_of("")) continue;
    result += (result.empty() ? "{\n  " : ",\n  ") + text_of(field.name) + ": " + value;
  }
  return result + "\n}\n";
}

const SharedProfile& shipped_profile() {
  static const SharedProfile shipped =
      read(kShippedProfile, "overlap_torch/profiles/h200.json", Profile{});
  return shipped;
}

SharedProfile parse_profile(const std::string& text, const std::string& source) {
  return read(text, source, *shipped_profile());
}

SharedProfile load_profile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file.is_open() || file.bad() || (text.empty() && file.fail() && !file.eof())) {
    throw std::invalid_argument("profile " + path + ": cannot be read (" + std::strerror(errno) +
                                "); allowed is the path of a profile's JSON file");
  }
  return parse_profile(text, path);
}

}  // namespace overlap::plan
