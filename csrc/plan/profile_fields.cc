#include "plan/profile_fields.h"

#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>

namespace overlap::plan {
namespace {

constexpr Range kUs = {0.0, 1e6};
constexpr Range kRate = {1e-4, 1e4};  // also of factors and powers: they divide
constexpr Range kGbps = {1e-4, 1e6};
constexpr Range kShare = {0.0, 1.0};
constexpr Range kRounds = {0.0, 1e3};
constexpr Range kCount = {0.0, 1e9};

// A name's last word is its unit, which says what is allowed.
Range range_of(const std::string_view name) {
  constexpr std::pair<std::string_view, Range> kUnits[] = {
      {"us", kUs},       {"rate", kRate},       {"factor", kRate},   {"gbps", kGbps},
      {"gflops", kGbps}, {"share", kShare},     {"rounds", kRounds}, {"rows", kCount},
      {"ctas", kCtas},   {"bytes", {1.0, 1e12}}};
  for (const auto& [unit, range] : kUnits) {
    if (name.substr(name.rfind('_') + 1) == unit) return range;
  }
  throw std::logic_error("no range is known for " + std::string(name));
}

template <typename Group>
struct Field {
  const char* name;
  std::variant<double Group::*, int64_t Group::*, Profile::Lists Group::*> member;
  Range range = {};
};

// The fields of a struct of numbers: a group of the file.
template <typename Group>
std::vector<Field<Group>> fields_of();
// The groups within a group, each a struct of the same fields.
template <typename Group, typename Inner>
std::vector<std::pair<const char*, Inner Group::*>> groups_of();

// clang-format off
#define FIELDS(Group, ...)                                          \
  template <>                                                       \
  std::vector<Field<Profile::Group>> fields_of<Profile::Group>() {  \
    using Own = Profile::Group;                                     \
    return {__VA_ARGS__};                                           \
  }
#define GROUPS(Group, Inner, ...)                                                  \
  template <>                                                                      \
  std::vector<std::pair<const char*, Profile::Inner Profile::Group::*>> groups_of() { \
    using Own = Profile::Group;                                                    \
    return {__VA_ARGS__};                                                          \
  }
#define NUMBER(member) {#member, &Own::member, range_of(#member)},
#define NUMBER_IN(member, ...) {#member, &Own::member, __VA_ARGS__},
#define NAMED(member) {#member, &Own::member},

FIELDS(Gemm,
  NUMBER_IN(arch, kCount) NUMBER(start_us)
  NUMBER(pingpong_rate) NUMBER(cooperative_rate) NUMBER(pingpong_wide_rate)
  NUMBER(mma_sync_rate) NUMBER(mma_sync_on_hopper_rate) NUMBER(mma_sync_on_blackwell_rate)
  NUMBER(library_unaligned_rate) NUMBER(library_odd_rate)
  NUMBER(float32_rate) NUMBER(float64_rate)
  NUMBER(float8_rate) NUMBER(float8_row_rate) NUMBER(float8_exact_rate)
  NUMBER(float8_pingpong_rate) NUMBER(float8_pingpong_row_rate)
  NUMBER(float8_pingpong_wide_rate) NUMBER(float8_pingpong_wide_row_rate)
  NUMBER(sustained_rate) NUMBER(round_factor)
  NUMBER(library_factor) NUMBER(library_idle_rounds)
  NUMBER_IN(fewer_sms_power, kRounds) NUMBER_IN(fewer_sms_power_large, kRounds)
  NUMBER(low_band_rate) NUMBER(low_band_rows)
  NUMBER(weight_gbps) NUMBER(cool_us) NUMBER_IN(short_k, kCount)
  NUMBER(large_tile_rounds) NUMBER(large_tile_factor))
FIELDS(Beside,
  NUMBER(nccl_factor) NUMBER(gather_factor) NUMBER(many_ctas_factor)
  NUMBER_IN(overlap_power, {1.0, 100.0}) NUMBER(sum_sm_gbps))
FIELDS(Host,
  NUMBER(first_issue_us) NUMBER(issue_us) NUMBER(issue_sum_us) NUMBER(launch_us)
  NUMBER(few_rows) NUMBER(short_call_us))
FIELDS(Sync, NUMBER(wait_us) NUMBER(fork_join_us))
FIELDS(Link,
  NUMBER(slow_most_gbps) NUMBER(fast_least_gbps) NUMBER(fast_most_gbps)
  NUMBER(alone_start_us) NUMBER(alone_rate) NUMBER(slow_pair_rate) NUMBER(one_way_rate)
  NUMBER(default_ctas) NUMBER(slow_default_ctas))
FIELDS(Local,
  NUMBER(copy_start_us) NUMBER(copy_gbps) NUMBER(finish_start_us) NUMBER(finish_gbps)
  NUMBER(read_write_gbps) NUMBER(slot_gbps))
FIELDS(Peer,
  NUMBER(fast_gbps) NUMBER(sequential_us) NUMBER(direct_us) NUMBER(ring_us) NUMBER(low_part_us)
  NUMBER(final_us) NUMBER(gather_us) NUMBER(gather_chunk_us) NUMBER(first_copy_us) NUMBER(copy_us)
  NUMBER(collective_rate) NUMBER(least_bytes) NUMBER(one_step_bytes))
FIELDS(AllToAll,
  NUMBER(start_us) NUMBER(low_rate) NUMBER(beside_rate) NUMBER(alone_rate) NUMBER(alone_start_us)
  NUMBER(longer_message_share)
  NUMBER_IN(needed_gain_apart, kRate) NUMBER_IN(needed_gain_once, kRate)
  NUMBER(message_bytes) NUMBER_IN(gemm_first_us, {0.0, 1000.0})
  NUMBER(pair_ctas) NUMBER(many_ctas) NUMBER(slow_link_ctas))
FIELDS(Cpu,
  NUMBER_IN(cores, {1.0, 1e4}) NUMBER(core_gflops) NUMBER(link_latency_us) NUMBER(link_gbps)
  NUMBER(float64_rate) NUMBER(wait_us) NUMBER(fork_join_us) NUMBER(call_us) NUMBER(copy_gbps)
  NUMBER_IN(chunk_flops, {0.0, 1e15}) NUMBER(message_bytes))
FIELDS(Call,
  NUMBER(start_us) NUMBER(link_rate) NUMBER(cta_gbps) NUMBER_IN(latencies, kRounds))
FIELDS(Gain, NUMBER(share) NUMBER(us))
FIELDS(Ways,
  NAMED(plain) NAMED(all_reduce_window) NAMED(one_way_window) NAMED(exchange) NAMED(library)
  NAMED(slow_link) NAMED(slow_link_exchange) NAMED(slow_link_scatter) NAMED(slow_link_library))
FIELDS(Schedules,
  NAMED(all_reduce) NAMED(reduce_scatter) NAMED(all_gather) NAMED(exchange) NAMED(short_exchange)
  NAMED(slow_link_exchange) NAMED(slow_link_exchange_in_many_lanes) NAMED(slow_link_scatter)
  NAMED(peer_all_gather) NAMED(library) NAMED(few_rows))
GROUPS(Calls, Call,
  NAMED(all_reduce) NAMED(all_reduce_window) NAMED(all_reduce_of_many)
  NAMED(all_reduce_window_of_many) NAMED(exchange) NAMED(reduce_scatter)
  NAMED(reduce_scatter_window) NAMED(all_gather) NAMED(all_gather_window)
  NAMED(slow_link) NAMED(slow_link_exchange))
GROUPS(NeededGain, Gain,
  NAMED(usual) NAMED(cpu) NAMED(library) NAMED(peer) NAMED(exchange_window)
  NAMED(reduce_scatter_window) NAMED(no_sms_left))
// clang-format on

template <typename Group>
void add(std::vector<ProfileEntry>& all, const std::string& name, const PlaceOf<Group>& group) {
  for (const Field<Group>& field : fields_of<Group>()) {
    ProfileEntry& entry = all.emplace_back();
    entry.name = name + "." + field.name;
    entry.range = field.range;
    entry.has_ways = std::is_same_v<Group, Profile::Ways>;
    std::visit(
        [&](auto member) {
          using Value = std::remove_reference_t<decltype(std::declval<Group&>().*member)>;
          entry.place = PlaceOf<Value>(
              [group, member](Profile& profile) -> Value& { return group(profile).*member; });
        },
        field.member);
  }
}

template <typename Group>
void add(std::vector<ProfileEntry>& all, const std::string& name, Group Profile::* member) {
  add<Group>(all, name, [member](Profile& profile) -> Group& { return profile.*member; });
}

template <typename Inner, typename Group>
void add_groups(std::vector<ProfileEntry>& all, const std::string& name, Group Profile::* outer) {
  for (const auto& [inner, member] : groups_of<Group, Inner>()) {
    add<Inner>(all, name + "." + inner, [outer, member = member](Profile& profile) -> Inner& {
      return profile.*outer.*member;
    });
  }
}

}  // namespace

const std::vector<ProfileEntry>& profile_entries() {
  static const std::vector<ProfileEntry> entries = [] {
    std::vector<ProfileEntry> all;
    add(all, "gemm", &Profile::gemm);
    add(all, "beside", &Profile::beside);
    add(all, "host", &Profile::host);
    add(all, "sync", &Profile::sync);
    add(all, "link", &Profile::link);
    add_groups<Profile::Call>(all, "calls", &Profile::calls);
    add(all, "local", &Profile::local);
    add(all, "peer", &Profile::peer);
    add(all, "all_to_all", &Profile::all_to_all);
    add(all, "cpu", &Profile::cpu);
    add_groups<Profile::Gain>(all, "needed_gain", &Profile::needed_gain);
    add(all, "ways", &Profile::ways);
    add(all, "schedules", &Profile::schedules);
    return all;
  }();
  return entries;
}

}  // namespace overlap::plan
