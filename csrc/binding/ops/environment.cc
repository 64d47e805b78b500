#include "binding/ops/environment.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace overlap::binding {
namespace {

// True for the second of two words; or `otherwise`, if it is not set.
bool read_choice(const char* name, const std::string& first, const std::string& second,
                 bool otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  TORCH_CHECK_VALUE(text == first || text == second, "overlap_torch: ", name, " is '", text,
                    "'; it must be ", first, " or ", second);
  return text == second;
}

plan::Invariance read_invariance(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return plan::Invariance::kNone;
  const auto named = invariance_named(text);
  TORCH_CHECK_VALUE(named.has_value(), "overlap_torch: ", name, " is '", text,
                    "'; it must be none, batch or world");
  return *named;
}

plan::PeerSource read_peer_source(const char* name) {
  using plan::PeerSource;
  if (std::getenv(name) == nullptr) return PeerSource::kAny;
  const bool nccl =
      read_choice(name, plan::name(PeerSource::kIpc), plan::name(PeerSource::kNccl), false);
  return nccl ? PeerSource::kNccl : PeerSource::kIpc;
}

std::optional<std::chrono::milliseconds> read_seconds(const char* name) {
  constexpr double kMost = 1e9;  // in milliseconds and nanoseconds they fit 64 bits
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  TORCH_CHECK_VALUE(end != text && *end == '\0' && seconds >= 1e-3 && seconds <= kMost,
                    "overlap_torch: ", name, " is '", text,
                    "'; it must be a number of seconds from 0.001 to 1e9");
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

// The file that the variable names, or the profile that is shipped.
plan::SharedProfile read_profile(const char* name) {
  const char* path = std::getenv(name);
  if (path == nullptr) return plan::shipped_profile();
  try {
    return plan::load_profile(path);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "overlap_torch: ", name, ": ", error.what());
  }
}

}  // namespace

std::optional<plan::Invariance> invariance_named(const std::string& name) {
  using plan::Invariance;
  for (const Invariance one : {Invariance::kNone, Invariance::kBatch, Invariance::kWorld}) {
    if (name == plan::name(one)) return one;
  }
  return std::nullopt;
}

Environment read_environment() {
  Environment read;
  read.debug = read_choice("OVERLAP_DEBUG", "0", "1", false);
  read.timeout = read_seconds("OVERLAP_TIMEOUT_S");
  read.abort_on_failure = read_choice("OVERLAP_ON_FAILURE", "raise", "abort", false);
  read.log_plans = read_choice("OVERLAP_LOG", "none", "plans", false);
  read.invariance = read_invariance("OVERLAP_INVARIANCE");
  read.profile = read_profile("OVERLAP_PROFILE");
  read_choice("OVERLAP_TUNE", "0", "1", false);  // Python's, checked with the others
  read.plans = read_choice("OVERLAP_PLANS", "0", "1", true);
  // Whoever keeps NCCL from the GPUs' access to each other has a reason that holds here, too.
  const char* p2p_disabled = std::getenv("NCCL_P2P_DISABLE");
  const bool wanted = p2p_disabled == nullptr || std::string(p2p_disabled) != "1";
  read.peers = read_choice("OVERLAP_PEERS", "0", "1", wanted);
  read.peer_source = read_peer_source("OVERLAP_PEER_MEMORY");
  if (!read.peers) {
    read.why_no_peers =
        std::getenv("OVERLAP_PEERS") != nullptr ? "OVERLAP_PEERS=0" : "NCCL_P2P_DISABLE=1";
  }
  return read;
}

const Environment& environment() {
  static const Environment read = read_environment();
  return read;
}

plan::Serial find_serial() {
  const auto text_of = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::istringstream status(text_of("/proc/self/status"));
  std::string tracer;
  for (std::string word; status >> word;) {
    if (word != "TracerPid:") continue;
    status >> word;
    if (word != "0") tracer = text_of("/proc/" + word + "/comm");
  }
  return plan::serial_by(std::getenv("CUDA_LAUNCH_BLOCKING"), text_of("/proc/self/maps"), tracer);
}

void communication_failed(const std::string& message) {
  if (environment().abort_on_failure) {
    std::fprintf(stderr, "%s (OVERLAP_ON_FAILURE=abort)\n", message.c_str());
    std::abort();
  }
  TORCH_CHECK(false, message);
}

}  // namespace overlap::binding
