// recorder grid             each case's text and canonical form, family by family:
//                           a line "FAMILY<tab>NAME<tab>bytes<tab>bytes", and so many bytes of each
// recorder show NAME        one case, its machine and plans in front; with --canonical its canonical form
// recorder list             the names of all cases
// recorder lower NAME       the list of steps of a case's first call, and a line with the same as JSON
// recorder self-check       whether the record itself finds what it is there to find
// recorder history-check    whether ranks that make other calls find that out
// recorder group-check      what a group does where something fails
// recorder bench            host time of an executor's call, with fakes that do nothing
//
// A case's name is its family and its name in it, as `list` prints them.
#include <cstdio>
#include <cstring>

#include "grid.h"
#include "group_check.h"
#include "history_check.h"
#include "record.h"
#include "self_check.h"

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
    for (const std::string& violation : made.violations) {
      sound = false;
      std::fprintf(stderr, "%s: %s\n", recorder::full_name(one).c_str(), violation.c_str());
    }
    write(cat(one.family, "\t", one.name, "\t", made.text.size(), "\t", made.canonical.size(), "\n",
              made.text, made.canonical));
  });
  return sound ? 0 : 1;
}

int show(const std::string& name, bool canonical) {
  int found = 0;
  recorder::visit_grid([&](const Case& one) {
    if (recorder::full_name(one) != name || found++ > 0) return;
    write(cat("# ", recorder::machine_of(one), "\n"));
    for (size_t i = 0; i < one.calls.size(); ++i) {
      if (i > 0 && one.calls[i].plan == one.calls[i - 1].plan) continue;
      write(cat("# call ", i + 1, ": ", one.calls[i].plan.to_string(), "\n"));
    }
    const recorder::Recording made = recorder::run(one);
    write(canonical ? made.canonical : made.text);
    for (const std::string& violation : made.violations) write(cat("VIOLATION ", violation, "\n"));
  });
  if (found == 0) std::fprintf(stderr, "no case '%s': `recorder list` names all\n", name.c_str());
  return found == 1 ? 0 : 1;
}

int list() {
  recorder::visit_grid([](const Case& one) { write(recorder::full_name(one) + "\n"); });
  return 0;
}

int lower(const std::string& name) {
  int found = 0;
  recorder::visit_grid([&](const Case& one) {
    if (recorder::full_name(one) != name || found++ > 0) return;
    const overlap::steps::StepList list = recorder::lowered(one);
    write(overlap::steps::to_string(list) + overlap::steps::to_json(list) + "\n");
  });
  if (found == 0) std::fprintf(stderr, "no case '%s' \n", name.c_str());
  return found > 0 ? 0 : 1;
}

int say(const std::vector<std::string>& failures) {
  for (const std::string& failure : failures) write(cat("does not hold: ", failure, "\n"));
  return failures.empty() ? 0 : 1;
}

int bench() {
  constexpr int kCalls = 2000;
  constexpr int kRepeats = 5;
  recorder::visit_timed([](const Case& one) {
    std::printf("%8.2f us  %s\n", recorder::host_us(one, kCalls, kRepeats), one.name.c_str());
  });
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string command = count > 1 ? words[1] : "";
  if (command == "grid" && count == 2) return grid();
  if (command == "list" && count == 2) return list();
  if (command == "self-check" && count == 2) return say(recorder::self_check());
  if (command == "history-check" && count == 2) return say(recorder::history_check());
  if (command == "group-check" && count == 2) return say(recorder::group_check());
  if (command == "bench" && count == 2) return bench();
  if (command == "lower" && count == 3) return lower(words[2]);
  if (command == "show" && count == 3) return show(words[2], false);
  if (command == "show" && count == 4 && std::strcmp(words[3], "--canonical") == 0) {
    return show(words[2], true);
  }
  std::fprintf(stderr,
               "recorder grid | list | self-check | history-check | group-check | bench | "
               "lower NAME | show NAME [--canonical]\n");
  return 2;
}
