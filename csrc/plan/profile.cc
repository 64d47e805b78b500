#include "plan/profile.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>
#include <variant>

#include "plan/json.h"
#include "plan/profile_fields.h"
#include "plan/tile_order.h"

namespace overlap::plan {

extern const char* const kShippedProfile;  // the text of overlap_torch/profiles/h200.json

namespace {

constexpr double kSchema = 1;
const char* const kKind = "overlap_torch.profile";

constexpr size_t kMostLists = 64;
constexpr int32_t kMostWeight = 1000;

std::string range_text(const Range& range) {
  return json_number(range.least) + " to " + json_number(range.most);
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

class Reader {
 public:
  Reader(std::string source, Profile& profile) : source_(std::move(source)), profile_(profile) {}

  void read(const Json& file) {
    if (file.kind != Json::Kind::kObject) fail("the file is " + file.quoted(), "an object");
    read_header(file);
    std::set<std::string> given;
    for (const auto& [name, value] : file.members) {
      if (name == "schema" || name == "kind") continue;
      if (texts().contains(name) || value.kind != Json::Kind::kObject) {
        read_leaf(name, value, given);
      } else {
        read_group(name, value, given);
      }
    }
    if (!given.contains("name")) fail("name is missing", "a string that is not empty");
    for (const ProfileEntry& field : profile_entries()) {
      if (!given.contains(field.name)) profile_.missing.push_back(field.name);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& allowed) const {
    throw std::invalid_argument("profile " + source_ + ": " + what + "; allowed is " + allowed);
  }

  // Before anything else: a file of another schema has other fields.
  void read_header(const Json& file) const {
    const Json* kind = file.find("kind");
    if (kind == nullptr || kind->text != kKind) {
      fail(kind == nullptr ? "kind is missing" : "kind is " + kind->quoted(), json_string(kKind));
    }
    const Json* schema = file.find("schema");
    if (schema == nullptr || schema->kind != Json::Kind::kNumber || schema->number != kSchema) {
      fail(schema == nullptr ? "schema is missing" : "schema is " + schema->quoted(),
           json_number(kSchema) + ", the version of this release: make the profile again with it");
    }
  }

  std::map<std::string, std::string*> texts() {
    return {{"name", &profile_.name},
            {"made.by", &profile_.made_by},
            {"made.at", &profile_.made_at},
            {"made.note", &profile_.note},
            {"machine.gpu", &profile_.gpu}};
  }

  void read_group(const std::string& path, const Json& group, std::set<std::string>& given) {
    if (!is_group(path)) unknown(path);
    for (const auto& [name, value] : group.members) {
      const std::string full = path + "." + name;
      if (value.kind == Json::Kind::kObject && is_group(full)) {
        read_group(full, value, given);
      } else {
        read_leaf(full, value, given);
      }
    }
  }

  void read_leaf(const std::string& name, const Json& value, std::set<std::string>& given) {
    given.insert(name);
    if (const auto all = texts(); all.contains(name)) {
      if (value.kind != Json::Kind::kString || value.text.empty()) {
        fail(name + " is " + value.quoted(), "a string that is not empty");
      }
      if (name == "made.at" && !is_date(value.text)) {
        fail(name + " is " + value.quoted(), "a date, YYYY-MM-DD, and if known the time after it");
      }
      *all.at(name) = value.text;
      return;
    }
    if (is_group(name)) fail(name + " is " + value.quoted(), "an object");
    const auto& all = profile_entries();
    const auto field = std::find_if(all.begin(), all.end(),
                                    [&](const ProfileEntry& one) { return one.name == name; });
    if (field == all.end()) unknown(name);
    if (!std::visit([&](const auto& place) { return set(place, *field, value); }, field->place)) {
      fail(name + " is " + value.quoted(), allowed_in(*field));
    }
  }

  bool set(const PlaceOf<double>& place, const ProfileEntry& field, const Json& value) {
    if (!fits(value, field.range)) return false;
    place(profile_) = value.number;
    return true;
  }
  bool set(const PlaceOf<int64_t>& place, const ProfileEntry& field, const Json& value) {
    if (!fits(value, field.range) || !whole(value)) return false;
    place(profile_) = static_cast<int64_t>(value.number);
    return true;
  }
  bool set(const PlaceOf<Profile::Lists>& place, const ProfileEntry& field, const Json& value) {
    constexpr Range kLanes = {1.0, kMaxLanes};
    constexpr Range kWeights = {1.0, kMostWeight};
    const auto is_way = [&](const Json& way) {
      return way.items.size() == 2 && fits(way.items[0], kCtas) && fits(way.items[1], kLanes);
    };
    const auto is_schedule = [&](const Json& list) {
      return !list.items.empty() && list.items.size() <= static_cast<size_t>(kMaxChunks) &&
             std::all_of(list.items.begin(), list.items.end(),
                         [&](const Json& weight) { return fits(weight, kWeights); });
    };
    Profile::Lists& lists = place(profile_);
    return field.has_ways ? set_lists(lists, value, is_way) : set_lists(lists, value, is_schedule);
  }

  template <typename Fits>
  static bool set_lists(Profile::Lists& lists, const Json& value, const Fits& fits_one) {
    if (value.items.empty() || value.items.size() > kMostLists) return false;
    lists.clear();
    for (const Json& list : value.items) {
      if (!fits_one(list) || !std::all_of(list.items.begin(), list.items.end(), whole))
        return false;
      std::vector<int32_t>& numbers = lists.emplace_back();
      for (const Json& item : list.items) numbers.push_back(static_cast<int32_t>(item.number));
    }
    return true;
  }

  static bool fits(const Json& value, const Range& range) {
    return value.kind == Json::Kind::kNumber && value.number >= range.least &&
           value.number <= range.most;
  }
  static bool whole(const Json& value) { return value.number == std::floor(value.number); }

  static bool is_date(const std::string& text) {
    if (text.size() < 10 || text[4] != '-' || text[7] != '-') return false;
    const auto part = [&](size_t begin, size_t count) {
      int number = -1;
      const char* end = text.data() + begin + count;
      const auto read = std::from_chars(text.data() + begin, end, number);
      return read.ec == std::errc() && read.ptr == end ? number : -1;
    };
    const int month = part(5, 2);
    const int day = part(8, 2);
    if (part(0, 4) < 1 || month < 1 || day < 1) return false;
    return std::chrono::year_month_day(std::chrono::year(part(0, 4)),
                                       std::chrono::month(static_cast<unsigned>(month)),
                                       std::chrono::day(static_cast<unsigned>(day)))
        .ok();
  }

  // Names of all that a file may hold.
  std::vector<std::string> names() {
    std::vector<std::string> all = {"schema", "kind"};
    for (const auto& [name, text] : texts()) all.push_back(name);
    for (const ProfileEntry& field : profile_entries()) all.push_back(field.name);
    return all;
  }
  bool is_group(const std::string& path) {
    const auto all = names();
    return std::any_of(all.begin(), all.end(),
                       [&](const std::string& name) { return name.starts_with(path + "."); });
  }

  // With what stands beside it, as it may be a slip.
  [[noreturn]] void unknown(const std::string& name) {
    const size_t dot = name.rfind('.');
    const std::string group = dot == std::string::npos ? "" : name.substr(0, dot + 1);
    std::string beside;
    std::set<std::string> said;
    for (const std::string& one : names()) {
      if (!one.starts_with(group)) continue;
      const std::string own = one.substr(0, one.find('.', group.size()));
      if (said.insert(own).second) beside += (beside.empty() ? "" : ", ") + own;
    }
    throw std::invalid_argument("profile " + source_ + ": it has " + json_string(name) +
                                ", which is no field; allowed are " + beside);
  }

  const std::string source_;
  Profile& profile_;
};

SharedProfile read(const std::string& text, const std::string& source, const Profile* shipped) {
  Json file;
  try {
    file = parse_json(text);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("profile " + source + ": " + error.what());
  }
  auto profile = std::make_shared<Profile>();
  if (shipped != nullptr) *profile = *shipped;
  profile->source = source;
  profile->name = profile->made_by = profile->made_at = profile->note = profile->gpu = "";
  profile->missing.clear();
  Reader(source, *profile).read(file);
  return profile;
}

// --- writing -----------------------------------------------------------------------------------

std::string lists_json(const Profile::Lists& lists) {
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

std::string value_json(const ProfileEntry& field, Profile& profile) {
  if (const auto* number = std::get_if<PlaceOf<double>>(&field.place)) {
    return json_number((*number)(profile));
  }
  if (const auto* whole = std::get_if<PlaceOf<int64_t>>(&field.place)) {
    return std::to_string((*whole)(profile));
  }
  return lists_json(std::get<PlaceOf<Profile::Lists>>(field.place)(profile));
}

// Members by their full names, which come group by group, as nested objects.
std::string nested(const std::vector<std::pair<std::string, std::string>>& members, size_t depth) {
  const auto group_of = [&](const std::string& name) {
    size_t begin = 0;
    for (size_t i = 0; i < depth; ++i) begin = name.find('.', begin) + 1;
    const size_t end = name.find('.', begin);
    return std::pair(name.substr(begin, end - begin), end != std::string::npos);
  };
  const std::string indent(2 * (depth + 1), ' ');
  std::string result;
  for (size_t i = 0; i < members.size();) {
    const auto [own, is_group] = group_of(members[i].first);
    size_t end = i + 1;
    while (is_group && end < members.size() && group_of(members[end].first).first == own) ++end;
    const auto at = [&](size_t index) { return members.begin() + static_cast<ptrdiff_t>(index); };
    result += (result.empty() ? "" : ",\n") + indent + json_string(own) + ": " +
              (is_group ? nested({at(i), at(end)}, depth + 1) : members[i].second);
    i = end;
  }
  return "{\n" + result + "\n" + indent.substr(2) + "}";
}

}  // namespace

std::string Profile::to_json() const {
  std::vector<std::pair<std::string, std::string>> members = {
      {"schema", json_number(kSchema)}, {"kind", json_string(kKind)}, {"name", json_string(name)}};
  const auto add = [&](const char* own, const std::string& text) {
    if (!text.empty()) members.emplace_back(own, json_string(text));
  };
  add("made.by", made_by);
  add("made.at", made_at);
  add("made.note", note);
  add("machine.gpu", gpu);
  Profile copy = *this;  // fields are places in one that can change
  const std::set<std::string> lacks(missing.begin(), missing.end());
  for (const ProfileEntry& field : profile_entries()) {
    if (!lacks.contains(field.name)) members.emplace_back(field.name, value_json(field, copy));
  }
  return nested(members, 0) + "\n";
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
