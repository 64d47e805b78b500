// The environment variables that C++ reads, parsed here; runtime/peer_memory.cc reads OVERLAP_HOST_ID. (Those of a build:
// tools/toolchain.py. All of them, Python's too: `python -m overlap_torch doctor`.)
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "plan/agreement.h"
#include "plan/plan.h"
#include "plan/profile.h"

namespace overlap::binding {

struct Environment {
  bool debug = false;                                // OVERLAP_DEBUG
  std::optional<std::chrono::milliseconds> timeout;  // OVERLAP_TIMEOUT_S
  bool plans = true;                                 // OVERLAP_PLANS
  bool peers = true;                                 // OVERLAP_PEERS
  std::string why_no_peers;                          // the setting that turns them off, NAME=value
  bool abort_on_failure = false;                     // OVERLAP_ON_FAILURE
  bool log_plans = false;                            // OVERLAP_LOG=plans
  plan::Invariance invariance = plan::Invariance::kNone;  // OVERLAP_INVARIANCE
  plan::PeerSource peer_source = plan::PeerSource::kAny;  // OVERLAP_PEER_MEMORY
  plan::SharedProfile profile;                            // OVERLAP_PROFILE
};

// The invariance of this name, or nothing.
std::optional<plan::Invariance> invariance_named(const std::string& name);

// As the variables are now. Throws a ValueError that says what is allowed.
Environment read_environment();

// As they were at the first call.
const Environment& environment();

// The tool or setting that makes this process's kernels run one at a time, as far as can be seen; a new group looks for it.
plan::Serial find_serial();

// A call failed after ranks had begun to communicate: throws the message, or ends the process with it where
// OVERLAP_ON_FAILURE=abort.
[[noreturn]] void communication_failed(const std::string& message);

}  // namespace overlap::binding
