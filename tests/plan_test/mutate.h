// Lists that lack something, which of them the proof does not notice, and what lists are compared by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "steps/proof/proof.h"

namespace overlap::steps {

// A hash of a list without its sizes: lists of one structure have the same steps, lanes and dependencies.
uint64_t structure(const StepList& list);

// A list in which something is missing, or in another place.
struct Changed {
  StepId step = 0;
  std::string what;  // "wait_for_tiles left out"
  StepList list;
};
// One wait, dependency, signal or join less.
std::vector<Changed> weakened(const StepList& list);
// One step's work left out, or one place that it reads or writes 16 bytes further on.
std::vector<Changed> disturbed(const StepList& list);

enum class Change : int32_t { kOrder, kWork };

// The changes of a rank's list, of plain or of captured calls, that have no fault, and how many
// were tried.
struct Unnoticed {
  StepId step = 0;
  std::string what;
  bool captured = false;
};
std::vector<Unnoticed> unnoticed(const Ranks& ranks, int32_t rank, Change change, int64_t& tried);

}  // namespace overlap::steps
