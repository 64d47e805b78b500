#include "plan/agreement.h"

#include <algorithm>
#include <cstdlib>

#include "plan/message.h"

namespace overlap::plan {
namespace {

uint64_t hash_of(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char one : text) {
    value = (value ^ static_cast<uint8_t>(one)) * 0x100000001b3;
  }
  return value;
}

}  // namespace

Serial serial_by(const char* launch_blocking, const std::string& maps, const std::string& tracer) {
  const auto mapped = [&](const char* library) { return maps.find(library) != std::string::npos; };
  if (launch_blocking != nullptr && std::atoi(launch_blocking) != 0) return Serial::kLaunchBlocking;
  if (mapped("libsanitizer-collection.so")) return Serial::kSanitizer;
  if (tracer.starts_with("cuda-gdb") || mapped("libcudadebugger.so")) return Serial::kDebugger;
  // Nsight Systems lets kernels run beside each other.
  if (mapped("/nsight-compute") || mapped("/nsight_compute")) return Serial::kNsightCompute;
  return Serial::kNone;
}

const char* name(Serial serial) {
  constexpr const char* kNames[] = {"", "CUDA_LAUNCH_BLOCKING", "compute-sanitizer", "cuda-gdb",
                                    "Nsight Compute"};
  return kNames[static_cast<size_t>(serial)];
}

const char* name(PeerSource source) {
  constexpr const char* kNames[] = {"", "ipc", "nccl"};
  return kNames[static_cast<size_t>(source)];
}

void check_serial(const Plan& plan, const Machine& machine) {
  if (!machine.serial || !over_peers(plan)) return;
  fail(plan.to_string(),
       ": the transport is peer, whose kernels wait for those of other ranks, but some rank's "
       "kernels run one at a time (CUDA_LAUNCH_BLOCKING=1, compute-sanitizer, cuda-gdb or Nsight "
       "Compute) and might wait for ever; use nccl, or run without these");
}

RankFacts facts_of(const Machine& machine, int32_t nccl_version, uint64_t build, Serial serial) {
  RankFacts facts;
  facts.serial = static_cast<int32_t>(serial);
  facts.arch = machine.arch;
  facts.sm_count = machine.sm_count;
  facts.kernel_arch = machine.kernel_arch;
  facts.nccl_version = nccl_version;
  facts.sm_gflops = machine.sm_gflops;
  facts.profile = hash_of(machine.profile->to_json());
  facts.build = build;
  return facts;
}

int32_t ranks_of_each_host(const std::vector<std::string>& hosts, int32_t most) {
  const auto number_of = [&](const std::string& host) {
    return std::count(hosts.begin(), hosts.end(), host);
  };
  const auto count = static_cast<size_t>(number_of(hosts.at(0)));
  if (count > static_cast<size_t>(most) || hosts.size() % count != 0) return 1;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const bool follows = hosts[rank] == hosts[rank / count * count];
    if (!follows || number_of(hosts[rank]) != static_cast<int64_t>(count)) return 1;
  }
  return static_cast<int32_t>(count);
}

int32_t ranks_of_windows(int32_t host_ranks, int32_t team, int32_t world_size, int32_t most) {
  if (team == world_size && team <= most) return team;
  return team > 0 && team % host_ranks == 0 ? host_ranks : 1;
}

std::string why_no_peers(const std::vector<int32_t>& sources) {
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    if (sources[rank] < 0) {
      return message("rank ", rank, " has OVERLAP_PEERS=0 or NCCL_P2P_DISABLE=1");
    }
    if (sources[rank] != sources[0]) {
      return message("rank ", rank, " has another OVERLAP_PEER_MEMORY than rank 0");
    }
  }
  return "";
}

Agreement agree(const Machine& own, const std::vector<RankFacts>& all) {
  Agreement result = {own, "", ""};
  Machine& machine = result.machine;
  const RankFacts& first = all.at(0);
  machine.arch = first.arch;
  machine.sm_count = first.sm_count;
  machine.sm_gflops = first.sm_gflops;
  machine.kernel_arch = first.kernel_arch;
  bool plans_alike = true;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].serial == 0) continue;
    machine.serial = true;
    result.why_serial += message(result.why_serial.empty() ? "rank " : ", rank ", rank, " by ",
                                 name(static_cast<Serial>(all[rank].serial)));
  }
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const RankFacts& theirs = all[rank];
    std::string differs;
    const auto say = [&](bool same, const auto&... what) {
      if (!same) differs += message(differs.empty() ? "" : ", ", what...);
    };
    const auto compare = [&](const char* what, int32_t RankFacts::* of) {
      say(theirs.*of == first.*of, what, " ", theirs.*of, " (rank 0: ", first.*of, ")");
    };
    compare("compute capability", &RankFacts::arch);
    compare("SMs", &RankFacts::sm_count);
    say(theirs.kernel_arch == first.kernel_arch, "another set of kernels");
    compare("NCCL", &RankFacts::nccl_version);
    say(theirs.profile == first.profile, "another profile (OVERLAP_PROFILE)");
    say(theirs.build == first.build, "another build of overlap_torch");
    plans_alike = plans_alike && theirs.profile == first.profile && theirs.build == first.build &&
                  theirs.nccl_version == first.nccl_version;
    machine.arch = std::min(machine.arch, theirs.arch);
    machine.sm_count = std::min(machine.sm_count, theirs.sm_count);
    machine.sm_gflops = std::min(machine.sm_gflops, theirs.sm_gflops);
    machine.kernel_arch = std::min(machine.kernel_arch, theirs.kernel_arch);
    if (differs.empty()) continue;
    result.difference +=
        message(result.difference.empty() ? "rank " : "; rank ", rank, " has ", differs);
  }
  if (!plans_alike) {
    machine.link_gbps = 0.0;
    machine.peer_gbps = 0.0;
    result.difference += ": every call runs the sequence until they are the same";
  } else if (!result.difference.empty()) {
    result.difference += ": all ranks plan for the slowest, with what all have";
  }
  return result;
}

}  // namespace overlap::plan
