#include "plan/profile_fields.h"

#include <type_traits>
#include <utility>

namespace overlap::plan {
namespace {

constexpr Range kUs = {0.0, 1e6};
constexpr Range kRate = {1e-4, 1e4};  // also of factors and powers: they divide
constexpr Range kGbps = {1e-4, 1e6};
constexpr Range kShare = {0.0, 1.0};
constexpr Range kRounds = {0.0, 1e3};
constexpr Range kFlops = {0.0, 1e15};
constexpr Range kCount = {0.0, 1e9};
constexpr Range kBytes = {1.0, 1e12};
constexpr Range kCores = {1.0, 1e4};

template <typename Group>
struct Field {
  const char* name;
  std::variant<double Group::*, int64_t Group::*, Profile::Lists Group::*> member;
  Range range = {};
};

// The fields of a struct of numbers: a group of the file.
template <typename Group>
struct Fields;

template <>
struct Fields<Profile::Gemm> {
  using Own = Profile::Gemm;
  static constexpr Field<Own> kAll[] = {
      {"arch", &Own::arch, kCount},
      {"start_us", &Own::start_us, kUs},
      {"pingpong_rate", &Own::pingpong_rate, kRate},
      {"cooperative_rate", &Own::cooperative_rate, kRate},
      {"pingpong_wide_rate", &Own::pingpong_wide_rate, kRate},
      {"sm80_rate", &Own::sm80_rate, kRate},
      {"sm80_on_hopper_rate", &Own::sm80_on_hopper_rate, kRate},
      {"sm80_on_blackwell_rate", &Own::sm80_on_blackwell_rate, kRate},
      {"library_unaligned_rate", &Own::library_unaligned_rate, kRate},
      {"library_odd_rate", &Own::library_odd_rate, kRate},
      {"float32_rate", &Own::float32_rate, kRate},
      {"float64_rate", &Own::float64_rate, kRate},
      {"float8_rate", &Own::float8_rate, kRate},
      {"float8_row_rate", &Own::float8_row_rate, kRate},
      {"float8_exact_rate", &Own::float8_exact_rate, kRate},
      {"float8_pingpong_rate", &Own::float8_pingpong_rate, kRate},
      {"float8_pingpong_row_rate", &Own::float8_pingpong_row_rate, kRate},
      {"float8_pingpong_wide_rate", &Own::float8_pingpong_wide_rate, kRate},
      {"float8_pingpong_wide_row_rate", &Own::float8_pingpong_wide_row_rate, kRate},
      {"sustained_rate", &Own::sustained_rate, kRate},
      {"round_factor", &Own::round_factor, kRate},
      {"library_factor", &Own::library_factor, kRate},
      {"library_idle_rounds", &Own::library_idle_rounds, kRounds},
      {"fewer_sms_power", &Own::fewer_sms_power, kRounds},
      {"fewer_sms_power_large", &Own::fewer_sms_power_large, kRounds},
      {"low_band_rate", &Own::low_band_rate, kRate},
      {"low_band_rows", &Own::low_band_rows, kCount},
      {"weight_gbps", &Own::weight_gbps, kGbps},
      {"cool_us", &Own::cool_us, kUs},
      {"short_k", &Own::short_k, kCount},
      {"large_tile_rounds", &Own::large_tile_rounds, kRounds},
      {"large_tile_factor", &Own::large_tile_factor, kRate},
  };
};

template <>
struct Fields<Profile::Beside> {
  using Own = Profile::Beside;
  static constexpr Field<Own> kAll[] = {
      {"nccl_factor", &Own::nccl_factor, kRate},
      {"gather_factor", &Own::gather_factor, kRate},
      {"many_ctas_factor", &Own::many_ctas_factor, kRate},
      {"overlap_power", &Own::overlap_power, {1.0, 100.0}},
      {"sum_sm_gbps", &Own::sum_sm_gbps, kGbps},
  };
};

template <>
struct Fields<Profile::Host> {
  using Own = Profile::Host;
  static constexpr Field<Own> kAll[] = {
      {"first_issue_us", &Own::first_issue_us, kUs}, {"issue_us", &Own::issue_us, kUs},
      {"issue_sum_us", &Own::issue_sum_us, kUs},     {"launch_us", &Own::launch_us, kUs},
      {"few_rows", &Own::few_rows, kCount},          {"short_call_us", &Own::short_call_us, kUs},
  };
};

template <>
struct Fields<Profile::Sync> {
  using Own = Profile::Sync;
  static constexpr Field<Own> kAll[] = {
      {"wait_us", &Own::wait_us, kUs},
      {"fork_join_us", &Own::fork_join_us, kUs},
  };
};

template <>
struct Fields<Profile::Link> {
  using Own = Profile::Link;
  static constexpr Field<Own> kAll[] = {
      {"slow_most_gbps", &Own::slow_most_gbps, kGbps},
      {"fast_least_gbps", &Own::fast_least_gbps, kGbps},
      {"fast_most_gbps", &Own::fast_most_gbps, kGbps},
      {"alone_start_us", &Own::alone_start_us, kUs},
      {"alone_rate", &Own::alone_rate, kRate},
      {"slow_pair_rate", &Own::slow_pair_rate, kRate},
      {"one_way_rate", &Own::one_way_rate, kRate},
      {"default_ctas", &Own::default_ctas, kCtas},
      {"slow_default_ctas", &Own::slow_default_ctas, kCtas},
  };
};

template <>
struct Fields<Profile::Local> {
  using Own = Profile::Local;
  static constexpr Field<Own> kAll[] = {
      {"copy_start_us", &Own::copy_start_us, kUs},       {"copy_gbps", &Own::copy_gbps, kGbps},
      {"finish_start_us", &Own::finish_start_us, kUs},   {"finish_gbps", &Own::finish_gbps, kGbps},
      {"read_write_gbps", &Own::read_write_gbps, kGbps}, {"slot_gbps", &Own::slot_gbps, kGbps},
  };
};

template <>
struct Fields<Profile::Peer> {
  using Own = Profile::Peer;
  static constexpr Field<Own> kAll[] = {
      {"fast_gbps", &Own::fast_gbps, kGbps},
      {"sequential_us", &Own::sequential_us, kUs},
      {"direct_us", &Own::direct_us, kUs},
      {"ring_us", &Own::ring_us, kUs},
      {"low_part_us", &Own::low_part_us, kUs},
      {"final_us", &Own::final_us, kUs},
      {"gather_us", &Own::gather_us, kUs},
      {"gather_chunk_us", &Own::gather_chunk_us, kUs},
      {"first_copy_us", &Own::first_copy_us, kUs},
      {"copy_us", &Own::copy_us, kUs},
      {"collective_rate", &Own::collective_rate, kRate},
      {"least_bytes", &Own::least_bytes, kBytes},
      {"one_step_bytes", &Own::one_step_bytes, kBytes},
  };
};

template <>
struct Fields<Profile::AllToAll> {
  using Own = Profile::AllToAll;
  static constexpr Field<Own> kAll[] = {
      {"start_us", &Own::start_us, kUs},
      {"low_rate", &Own::low_rate, kRate},
      {"beside_rate", &Own::beside_rate, kRate},
      {"alone_rate", &Own::alone_rate, kRate},
      {"alone_start_us", &Own::alone_start_us, kUs},
      {"longer_message_share", &Own::longer_message_share, kShare},
      {"needed_gain_apart", &Own::needed_gain_apart, kRate},
      {"needed_gain_once", &Own::needed_gain_once, kRate},
      {"message_bytes", &Own::message_bytes, kBytes},
      {"gemm_first_us", &Own::gemm_first_us, {0.0, 1000.0}},
      {"pair_ctas", &Own::pair_ctas, kCtas},
      {"many_ctas", &Own::many_ctas, kCtas},
      {"slow_link_ctas", &Own::slow_link_ctas, kCtas},
  };
};

template <>
struct Fields<Profile::Cpu> {
  using Own = Profile::Cpu;
  static constexpr Field<Own> kAll[] = {
      {"cores", &Own::cores, kCores},
      {"core_gflops", &Own::core_gflops, kGbps},
      {"link_latency_us", &Own::link_latency_us, kUs},
      {"link_gbps", &Own::link_gbps, kGbps},
      {"float64_rate", &Own::float64_rate, kRate},
      {"wait_us", &Own::wait_us, kUs},
      {"fork_join_us", &Own::fork_join_us, kUs},
      {"call_us", &Own::call_us, kUs},
      {"copy_gbps", &Own::copy_gbps, kGbps},
      {"chunk_flops", &Own::chunk_flops, kFlops},
      {"message_bytes", &Own::message_bytes, kBytes},
  };
};

template <>
struct Fields<Profile::Call> {
  using Own = Profile::Call;
  static constexpr Field<Own> kAll[] = {
      {"start_us", &Own::start_us, kUs},
      {"link_rate", &Own::link_rate, kRate},
      {"cta_gbps", &Own::cta_gbps, kGbps},
      {"latencies", &Own::latencies, kRounds},
  };
};

template <>
struct Fields<Profile::Gain> {
  using Own = Profile::Gain;
  static constexpr Field<Own> kAll[] = {
      {"share", &Own::share, kShare},
      {"us", &Own::us, kUs},
  };
};

template <>
struct Fields<Profile::Ways> {
  using Own = Profile::Ways;
  static constexpr Field<Own> kAll[] = {
      {"plain", &Own::plain},
      {"all_reduce_window", &Own::all_reduce_window},
      {"one_way_window", &Own::one_way_window},
      {"exchange", &Own::exchange},
      {"library", &Own::library},
      {"slow_link", &Own::slow_link},
      {"slow_link_exchange", &Own::slow_link_exchange},
      {"slow_link_scatter", &Own::slow_link_scatter},
      {"slow_link_library", &Own::slow_link_library},
  };
};

template <>
struct Fields<Profile::Schedules> {
  using Own = Profile::Schedules;
  static constexpr Field<Own> kAll[] = {
      {"all_reduce", &Own::all_reduce},
      {"reduce_scatter", &Own::reduce_scatter},
      {"all_gather", &Own::all_gather},
      {"exchange", &Own::exchange},
      {"short_exchange", &Own::short_exchange},
      {"slow_link_exchange", &Own::slow_link_exchange},
      {"slow_link_exchange_in_many_lanes", &Own::slow_link_exchange_in_many_lanes},
      {"slow_link_scatter", &Own::slow_link_scatter},
      {"peer_all_gather", &Own::peer_all_gather},
      {"library", &Own::library},
      {"few_rows", &Own::few_rows},
  };
};

// The groups within a group, each a struct of the same fields.
template <typename Group, typename Inner>
struct Named {
  const char* name;
  Inner Group::* member;
};
constexpr Named<Profile::Calls, Profile::Call> kCalls[] = {
    {"all_reduce", &Profile::Calls::all_reduce},
    {"all_reduce_window", &Profile::Calls::all_reduce_window},
    {"all_reduce_of_many", &Profile::Calls::all_reduce_of_many},
    {"all_reduce_window_of_many", &Profile::Calls::all_reduce_window_of_many},
    {"exchange", &Profile::Calls::exchange},
    {"reduce_scatter", &Profile::Calls::reduce_scatter},
    {"reduce_scatter_window", &Profile::Calls::reduce_scatter_window},
    {"all_gather", &Profile::Calls::all_gather},
    {"all_gather_window", &Profile::Calls::all_gather_window},
    {"slow_link", &Profile::Calls::slow_link},
    {"slow_link_exchange", &Profile::Calls::slow_link_exchange},
};
constexpr Named<Profile::NeededGain, Profile::Gain> kGains[] = {
    {"usual", &Profile::NeededGain::usual},
    {"cpu", &Profile::NeededGain::cpu},
    {"library", &Profile::NeededGain::library},
    {"peer", &Profile::NeededGain::peer},
    {"exchange_window", &Profile::NeededGain::exchange_window},
    {"reduce_scatter_window", &Profile::NeededGain::reduce_scatter_window},
    {"no_sms_left", &Profile::NeededGain::no_sms_left},
};

template <typename Group>
void add(std::vector<ProfileEntry>& all, const std::string& name, const PlaceOf<Group>& group) {
  for (const Field<Group>& field : Fields<Group>::kAll) {
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

template <typename Group, typename Inner, size_t kGroups>
void add(std::vector<ProfileEntry>& all, const std::string& name, Group Profile::* outer,
         const Named<Group, Inner> (&groups)[kGroups]) {
  for (const auto& [inner, member] : groups) {
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
    add(all, "calls", &Profile::calls, kCalls);
    add(all, "local", &Profile::local);
    add(all, "peer", &Profile::peer);
    add(all, "all_to_all", &Profile::all_to_all);
    add(all, "cpu", &Profile::cpu);
    add(all, "needed_gain", &Profile::needed_gain, kGains);
    add(all, "ways", &Profile::ways);
    add(all, "schedules", &Profile::schedules);
    return all;
  }();
  return entries;
}

}  // namespace overlap::plan
