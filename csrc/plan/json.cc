#include "plan/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <stdexcept>

namespace overlap::plan {
namespace {

constexpr int kMaxDepth = 32;
constexpr size_t kMaxQuoted = 60;

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Json parse() {
    Json value = read_value(0);
    skip_space();
    if (at_ != text_.size()) fail("there is more after the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const auto begin = text_.begin();
    const auto here = begin + static_cast<ptrdiff_t>(std::min(at_, text_.size()));
    const auto line = std::count(begin, here, '\n') + 1;
    const size_t last = text_.rfind('\n', at_ == 0 ? 0 : at_ - 1);
    const size_t column = last == std::string::npos || last >= at_ ? at_ + 1 : at_ - last;
    throw std::invalid_argument("line " + std::to_string(line) + ", column " +
                                std::to_string(column) + " is not JSON: " + what);
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_space() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t') ++at_;
  }
  bool take(char wanted) {
    skip_space();
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("'") + wanted + "' is missing");
  }
  bool take_word(const std::string& word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    return true;
  }

  Json read_value(int depth) {
    if (depth > kMaxDepth) fail("it is nested too deep");
    skip_space();
    Json value;
    if (peek() == '{') {
      read_object(value, depth);
    } else if (peek() == '[') {
      read_array(value, depth);
    } else if (peek() == '"') {
      value.kind = Json::Kind::kString;
      value.text = read_string();
    } else if (take_word("true") || take_word("false")) {
      value.kind = Json::Kind::kBool;
      value.truth = text_.compare(at_ - 4, 4, "true") == 0;
    } else if (!take_word("null")) {
      value.kind = Json::Kind::kNumber;
      value.number = read_number();
    }
    return value;
  }

  void read_object(Json& value, int depth) {
    value.kind = Json::Kind::kObject;
    expect('{');
    if (take('}')) return;
    do {
      skip_space();
      if (peek() != '"') fail("a name in quotes is missing");
      std::string name = read_string();
      if (value.find(name) != nullptr) fail("'" + name + "' is there twice");
      expect(':');
      value.members.emplace_back(std::move(name), read_value(depth + 1));
    } while (take(','));
    expect('}');
  }

  void read_array(Json& value, int depth) {
    value.kind = Json::Kind::kArray;
    expect('[');
    if (take(']')) return;
    do {
      value.items.push_back(read_value(depth + 1));
    } while (take(','));
    expect(']');
  }

  static bool digit(char c) { return c >= '0' && c <= '9'; }
  bool skip_digits() {
    const size_t begin = at_;
    while (digit(peek())) ++at_;
    return at_ > begin;
  }

  double read_number() {
    const size_t begin = at_;
    if (peek() == '-') ++at_;
    const bool zero = peek() == '0';
    const size_t first = at_;
    bool whole = skip_digits();
    whole = whole && !(zero && at_ - first > 1);
    if (whole && peek() == '.') {
      ++at_;
      whole = skip_digits();
    }
    if (whole && (peek() == 'e' || peek() == 'E')) {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      whole = skip_digits();
    }
    if (!whole) fail("a value is missing");
    double number = 0.0;
    const auto read = std::from_chars(text_.data() + begin, text_.data() + at_, number);
    if (read.ec != std::errc()) fail("the number is beyond what 64 bits hold");
    return number;
  }

  std::string read_string() {
    ++at_;  // the quote
    std::string result;
    while (peek() != '"') {
      if (at_ >= text_.size()) fail("the string has no end");
      const char c = text_[at_++];
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character stands in a string");
      if (c == '\\') {
        read_escape(result);
      } else {
        result += c;
      }
    }
    ++at_;
    return result;
  }

  void read_escape(std::string& result) {
    static const std::string kNames = "\"\\/bfnrt";
    static const std::string kMeanings = "\"\\/\b\f\n\r\t";
    const char name = peek();
    ++at_;
    if (const size_t known = kNames.find(name); name != '\0' && known != std::string::npos) {
      result += kMeanings[known];
    } else if (name == 'u') {
      append_utf8(result, read_code_point());
    } else {
      fail("there is no such escape");
    }
  }

  uint32_t read_hex() {
    uint32_t code = 0;
    const char* begin = text_.data() + std::min(at_, text_.size());
    const char* end = begin + std::min<size_t>(4, text_.size() - std::min(at_, text_.size()));
    const auto read = std::from_chars(begin, end, code, 16);
    if (read.ec != std::errc() || read.ptr != begin + 4) fail("\\u takes four hexadecimal digits");
    at_ += 4;
    return code;
  }

  // Beyond 16 bits it is two escapes.
  uint32_t read_code_point() {
    const uint32_t high = read_hex();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || !take_word("\\u")) fail("half a character");
    const uint32_t low = read_hex();
    if (low < 0xDC00 || low > 0xDFFF) fail("half a character");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  static void append_utf8(std::string& result, uint32_t code) {
    const auto add = [&](uint32_t byte) { result += static_cast<char>(byte); };
    if (code < 0x80) {
      add(code);
    } else if (code < 0x800) {
      add(0xC0 | code >> 6);
      add(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      add(0xE0 | code >> 12);
      add(0x80 | (code >> 6 & 0x3F));
      add(0x80 | (code & 0x3F));
    } else {
      add(0xF0 | code >> 18);
      add(0x80 | (code >> 12 & 0x3F));
      add(0x80 | (code >> 6 & 0x3F));
      add(0x80 | (code & 0x3F));
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

const Json* Json::find(const std::string& name) const {
  for (const auto& [own, value] : members) {
    if (own == name) return &value;
  }
  return nullptr;
}

std::string Json::quoted() const {
  std::string result;
  switch (kind) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return truth ? "true" : "false";
    case Kind::kNumber:
      return json_number(number);
    case Kind::kString:
      result = json_string(text);
      break;
    case Kind::kArray:
      for (const Json& item : items) result += (result.empty() ? "[" : ", ") + item.quoted();
      result += result.empty() ? "[]" : "]";
      break;
    case Kind::kObject:
      return members.empty() ? "{}" : "an object";
  }
  return result.size() <= kMaxQuoted ? result : result.substr(0, kMaxQuoted) + "...";
}

Json parse_json(const std::string& text) {
  return Parser(text).parse();
}

std::string json_number(double number) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

std::string json_string(const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20) {
      result += "\\u00";
      result += kHex[byte >> 4];
      result += kHex[byte & 15];
    } else {
      result += c;
    }
  }
  return result + '"';
}

}  // namespace overlap::plan
