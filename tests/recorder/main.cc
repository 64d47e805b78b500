// recorder grid     the text of each case: a line "NAME<tab>bytes", and that many bytes
// recorder list     the names of all cases, family and name in it
// recorder check    what does not hold of the record itself, of call histories, of groups that fail
// recorder bench    host time of an executor's call, with fakes that do nothing
#include <cstdio>

#include "checks.h"
#include "record.h"
#include "session.h"

namespace {

using recorder::Case;
using recorder::cat;

void write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

int grid() {
  bool sound = true;
  recorder::visit_grid([&](const Case& one) {
    const recorder::Recording made = recorder::run(one);
    const std::string name = recorder::full_name(one);
    for (const std::string& violation : made.violations) {
      sound = false;
      std::fprintf(stderr, "%s: %s\n", name.c_str(), violation.c_str());
    }
    write(cat(name, "\t", made.text.size(), "\n", made.text));
  });
  return sound ? 0 : 1;
}

int check() {
  bool holds = true;
  for (const auto each : {recorder::self_check, recorder::history_check, recorder::group_check}) {
    for (const std::string& failure : each()) {
      holds = false;
      write(cat("does not hold: ", failure, "\n"));
    }
  }
  return holds ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  constexpr int kCalls = 2000;
  constexpr int kRepeats = 5;
  const std::string command = count == 2 ? words[1] : "";
  if (command == "grid") return grid();
  if (command == "check") return check();
  if (command == "list") {
    recorder::visit_grid([](const Case& one) { write(recorder::full_name(one) + "\n"); });
  } else if (command == "bench") {
    recorder::visit_timed([](const Case& one) {
      const double us = recorder::host_us(one, kCalls, kRepeats);
      std::printf("%8.2f us  %s\n", us, one.name.c_str());
    });
  } else {
    std::fprintf(stderr, "recorder grid | list | check | bench\n");
    return 2;
  }
  return 0;
}
