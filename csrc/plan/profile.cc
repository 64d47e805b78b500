#include "plan/profile.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string_view>
#include <variant>

#include "plan/profile_fields.h"
#include "plan/tile_order.h"

namespace overlap::plan {

extern const char* const kShippedProfile;  // the text of overlap_torch/profiles/h200.json

namespace {

constexpr size_t kMostLists = 64;
constexpr int32_t kMostWeight = 1000;
constexpr size_t kMostQuoted = 60;

// The shortest text that reads back to the same number.
std::string number_text(double number) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

std::string string_text(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

std::string range_text(const Range& range) {
  return number_text(range.least) + " to " + number_text(range.most);
}

std::string allowed_in(const ProfileEntry& field) {
  if (std::holds_alternative<PlaceOf<double>>(field.place)) {
    return "a number, " + range_text(field.range);
  }
  if (std::holds_alternative<PlaceOf<int64_t>>(field.place)) {
    return "a whole number, " + range_text(field.range);
  }
  const std::string lists = "1 to " + std::to_string(kMostLists) + " lists of ";
  if (field.has_ways) {
    return lists + "two whole numbers, CTAs from " + range_text(kCtas) + " and lanes from 1 to " +
           std::to_string(kMaxLanes);
  }
  return lists + "1 to " + std::to_string(kMaxChunks) + " whole numbers from 1 to " +
         std::to_string(kMostWeight);
}

// --- reading -----------------------------------------------------------------------------------

// One JSON object, taken apart from front to back: names, and values as their text.
class Text {
 public:
  Text(const std::string& text, const std::string& source) : text_(text), source_(source) {}

  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \n\r\t", text_[at_]) != nullptr) ++at_;
  }
  bool take(char wanted) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("'") + wanted + "' is missing");
  }
  void expect_end() {
    skip_space();
    if (at_ != text_.size()) fail("there is more after the object");
  }

  // A string with its quotes.
  std::string_view take_string() {
    const size_t begin = at_;
    expect('"');
    const size_t quote = at_ - 1;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    if (at_ >= text_.size()) {
      at_ = begin;
      fail("the string has no end");
    }
    return text_.substr(quote, ++at_ - quote);
  }

  std::string_view take_value() {
    skip_space();
    if (at_ < text_.size() && text_[at_] == '"') return take_string();
    const size_t begin = at_;
    for (int open = 0; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '[' || c == '{') ++open;
      if (open == 0 && std::strchr(", \n\r\t}]", c) != nullptr) break;
      if (c == ']' || c == '}') --open;
    }
    if (at_ == begin) fail("a value is missing");
    return text_.substr(begin, at_ - begin);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const auto line = 1 + std::ranges::count(text_.substr(0, at_), '\n');
    throw std::invalid_argument("profile " + source_ + ": line " + std::to_string(line) +
                                " is not JSON: " + what);
  }

  const std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
};

// False where the value is no string, or has other escapes than those of quotes and backslashes.
bool read_value(std::string_view value, std::string& text) {
  if (value.size() < 3 || value[0] != '"') return false;
  text.clear();
  for (size_t i = 1; i + 1 < value.size(); ++i) {
    if (value[i] == '\\' && value[++i] != '"' && value[i] != '\\') return false;
    text += value[i];
  }
  return true;
}

bool read_value(std::string_view value, double& number) {
  const auto read = std::from_chars(value.begin(), value.end(), number);
  return read.ec == std::errc() && read.ptr == value.end();
}

// Lists of whole numbers.
bool read_value(std::string_view value, Profile::Lists& lists) {
  lists.clear();
  size_t open = 0;
  for (size_t at = 0; at < value.size(); ++at) {
    const char c = value[at];
    if (c == '[' && ++open == 2) lists.emplace_back();
    if (c == ']') --open;
    if (open > 2 || std::strchr("[], \n\r\t", c) != nullptr) continue;
    int32_t number = 0;
    const auto read = std::from_chars(value.begin() + at, value.end(), number);
    if (open != 2 || read.ec != std::errc() || std::strchr(",] \n\r\t", *read.ptr) == nullptr) {
      return false;
    }
    lists.back().push_back(number);
    at = static_cast<size_t>(read.ptr - value.begin()) - 1;
  }
  return !lists.empty() && lists.size() <= kMostLists;
}

bool fits(double value, const Range& range) {
  return value >= range.least && value <= range.most;
}

// A value of each kind in its place; false where it does not fit.
bool set(double& place, const ProfileEntry& field, std::string_view value) {
  return read_value(value, place) && fits(place, field.range);
}
bool set(int64_t& place, const ProfileEntry& field, std::string_view value) {
  double number = 0.0;
  if (!read_value(value, number) || !fits(number, field.range)) return false;
  place = static_cast<int64_t>(number);
  return number == std::floor(number);
}
bool set(Profile::Lists& place, const ProfileEntry& field, std::string_view value) {
  constexpr Range kLanes = {1.0, kMaxLanes};
  constexpr Range kWeights = {1.0, kMostWeight};
  return read_value(value, place) && std::ranges::all_of(place, [&](const auto& list) {
           if (field.has_ways) {
             return list.size() == 2 && fits(list[0], kCtas) && fits(list[1], kLanes);
           }
           return !list.empty() && list.size() <= static_cast<size_t>(kMaxChunks) &&
                  std::ranges::all_of(list, [&](int32_t one) { return fits(one, kWeights); });
         });
}

std::map<std::string, std::string Profile::*> texts() {
  return {{"name", &Profile::name},
          {"made.by", &Profile::made_by},
          {"made.at", &Profile::made_at},
          {"made.note", &Profile::note},
          {"machine.gpu", &Profile::gpu}};
}

// The names that may stand in place of an unknown one: those of its group, else the first of each.
std::string names_beside(const std::string& unknown) {
  const std::string group = unknown.substr(0, unknown.find('.') + 1);
  std::string beside, groups;
  std::set<std::string> said;
  const auto add = [&](const std::string& name) {
    if (!group.empty() && name.starts_with(group)) beside += (beside.empty() ? "" : ", ") + name;
    if (!said.insert(name.substr(0, name.find('.'))).second) return;
    groups += (groups.empty() ? "" : ", ") + name;
  };
  for (const auto& [name, member] : texts()) add(name);
  for (const ProfileEntry& field : profile_entries()) add(field.name);
  return beside.empty() ? groups + " and those beside them" : beside;
}

SharedProfile read(const std::string& text, const std::string& source, const Profile* shipped) {
  auto profile = std::make_shared<Profile>();
  if (shipped != nullptr) *profile = *shipped;
  for (const auto& [name, member] : texts()) (*profile.*member).clear();
  profile->source = source;
  const auto fail = [&](const std::string& what, const std::string& allowed) {
    throw std::invalid_argument("profile " + source + ": " + what + "; allowed is " + allowed);
  };
  const auto& entries = profile_entries();
  std::set<std::string> given;
  const auto read_field = [&](const std::string& name, std::string_view value) {
    if (!given.insert(name).second) fail(name + " is there twice", "each field once");
    const std::string quoted(value.substr(0, kMostQuoted));
    if (const auto all = texts(); all.contains(name)) {
      std::string& place = *profile.*all.at(name);
      if (read_value(value, place)) return;
      fail(name + " is " + quoted, "a string that is not empty, without escapes but \\\" and \\\\");
    }
    const auto field = std::ranges::find(entries, name, &ProfileEntry::name);
    if (field == entries.end()) {
      fail("it has " + string_text(name) + ", which is no field", names_beside(name));
    }
    if (!std::visit([&](const auto& place) { return set(place(*profile), *field, value); },
                    field->place)) {
      fail(name + " is " + quoted, allowed_in(*field));
    }
  };
  Text file(text, source);
  file.expect('{');
  if (!file.take('}')) {
    do {
      const std::string name(file.take_string());
      file.expect(':');
      read_field(name.substr(1, name.size() - 2), file.take_value());
    } while (file.take(','));
    file.expect('}');
  }
  file.expect_end();
  if (!given.contains("name")) fail("name is missing", "a string that is not empty");
  profile->missing.clear();
  for (const ProfileEntry& field : entries) {
    if (!given.contains(field.name)) profile->missing.push_back(field.name);
  }
  return profile;
}

// --- writing -----------------------------------------------------------------------------------

std::string value_text(double number) {
  return number_text(number);
}
std::string value_text(int64_t number) {
  return std::to_string(number);
}
std::string value_text(const Profile::Lists& lists) {
  std::string result;
  for (const std::vector<int32_t>& list : lists) {
    std::string numbers;
    for (const int32_t number : list) {
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(number);
    }
    result += (result.empty() ? "[" : ", [") + numbers + "]";
  }
  return "[" + result + "]";
}

}  // namespace

std::string Profile::to_json() const {
  std::string result;
  const auto add = [&](const std::string& field, const std::string& value) {
    result += (result.empty() ? "{\n  " : ",\n  ") + string_text(field) + ": " + value;
  };
  for (const char* field : {"name", "made.by", "made.at", "made.note", "machine.gpu"}) {
    const std::string& text = this->*texts().at(field);
    if (!text.empty()) add(field, string_text(text));
  }
  Profile copy = *this;  // fields are places in one that can change
  const std::set<std::string> lacks(missing.begin(), missing.end());
  for (const ProfileEntry& field : profile_entries()) {
    if (lacks.contains(field.name)) continue;
    add(field.name,
        std::visit([&](const auto& place) { return value_text(place(copy)); }, field.place));
  }
  return result + "\n}\n";
}

const SharedProfile& shipped_profile() {
  static const SharedProfile shipped = [] {
    SharedProfile profile = read(kShippedProfile, "overlap_torch/profiles/h200.json", nullptr);
    if (!profile->missing.empty()) {
      throw std::logic_error("the shipped profile lacks " + profile->missing[0]);
    }
    return profile;
  }();
  return shipped;
}

SharedProfile parse_profile(const std::string& text, const std::string& source) {
  return read(text, source, shipped_profile().get());
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

const std::vector<ProfileField>& profile_fields() {
  static const std::vector<ProfileField> all = [] {
    std::vector<ProfileField> result;
    for (const ProfileEntry& field : profile_entries())
      result.push_back({field.name, allowed_in(field)});
    return result;
  }();
  return all;
}

}  // namespace overlap::plan
