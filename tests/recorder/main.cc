// recorder run      reads cases, as grid.py writes them; a line "NAME<tab>bytes" and that many bytes of text for each
// recorder check    what does not hold of the record itself, and of groups that fail
#include <cstdio>
#include <iostream>

#include "record.h"
#include "session.h"

namespace {

using recorder::Case;
using recorder::cat;

template <typename Value = int64_t>
Value read() {
  int64_t value = 0;
  if (!(std::cin >> value)) throw std::runtime_error("a case's line is short");
  return static_cast<Value>(value);
}

// A number of values, and the values.
template <typename Value = int64_t>
std::vector<Value> read_all() {
  std::vector<Value> all(read<size_t>());
  for (size_t i = 0; i < all.size(); ++i) all[i] = read<Value>();
  return all;
}

recorder::Call read_call() {
  return {overlap::plan::decode(read_all()),
          read<bool>(),
          read_all<bool>(),
          read_all(),
          read_all(),
          read<bool>(),
          read<bool>(),
          read<bool>(),
          read(),
          read<bool>()};
}

Case read_case(const std::string& name) {
  Case one = {name,         read<int>(),  read<int>(),
              read<bool>(), read<bool>(), read<recorder::Failed>(),
              read<int>(),  read<int>(),  read<int>()};
  one.calls.resize(read<size_t>());
  for (recorder::Call& call : one.calls) call = read_call();
  std::cin >> std::ws;
  return one;
}

int run() {
  bool sound = true;
  for (std::string name; std::getline(std::cin, name);) {
    const recorder::Recording made = recorder::run(read_case(name));
    for (const std::string& violation : made.violations) {
      sound = false;
      std::fprintf(stderr, "%s: %s\n", name.c_str(), violation.c_str());
    }
    std::cout << name << '\t' << made.text.size() << '\n' << made.text;
  }
  return sound ? 0 : 1;
}

int check() {
  bool holds = true;
  for (const auto each : {recorder::self_check, recorder::group_check}) {
    for (const std::string& failure : each()) {
      holds = false;
      std::cout << "does not hold: " << failure << '\n';
    }
  }
  return holds ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  const std::string command = count == 2 ? words[1] : "";
  if (command == "run") return run();
  if (command == "check") return check();
  std::fprintf(stderr, "recorder run | check\n");
  return 2;
}
