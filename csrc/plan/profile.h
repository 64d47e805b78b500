// Profiles: every number that is fitted to a machine, as data. A profile is read from JSON; the one that is shipped,
// overlap_torch/profiles/h200.json, is compiled in, names all fields, and says what a profile from elsewhere lacks. Times
// are in microseconds, rates in GB/s (1e9 bytes a second), sizes in bytes.
//
// Machine::profile is the only way in: whoever makes a Machine for a group chooses the profile that its ranks plan by,
// and all of them must choose the same numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace overlap::plan {

// Below: "rate" multiplies a rate, "factor" a time.
struct Profile {
  // --- where it comes from ---------------------------------------------------------------------
  std::string source;                // the file, or what stands for one
  std::vector<std::string> missing;  // fields that the file lacks: the shipped profile's stand in
  std::string name;
  struct Made {
    std::string by;  // how its numbers were found
    std::string at;  // YYYY-MM-DD, with a time or without; "": not known
    std::string note;
  } made;
  struct MeasuredOn {
    std::string gpu;  // "": not known
  } machine;

  // --- GEMM ------------------------------------------------------------------------------------
  struct Gemm {
    int64_t arch;     // compute capability that these were measured on
    double start_us;  // launch and prologue, before the first tile is under way
    // Rates of kernels, of what the machine's library reaches in 16 bits (Machine::sm_gflops).
    double pingpong_rate;
    double cooperative_rate;
    double pingpong_wide_rate;
    double mma_sync_rate;               // on the architectures it was made for
    double mma_sync_on_hopper_rate;     // where mma.sync reaches no more of wgmma's rate,
    double mma_sync_on_blackwell_rate;  // and of tcgen05's: assumed
    // The library's in 16 bits, where rows of output or operands are no multiple of 16 bytes, or an odd number of elements.
    double library_unaligned_rate;
    double library_odd_rate;
    // Rates of other dtypes, of the 16-bit one. fp32 without TF32, as PyTorch does by default.
    double float32_rate;
    double float64_rate;
    // Scaled operands: the library's, with scales of tensors and of rows; the share of it that is left where sums are
    // fp32 throughout; and the kernels', which have only fast accumulation.
    double float8_rate;
    double float8_row_rate;
    double float8_exact_rate;
    double float8_pingpong_rate;
    double float8_pingpong_row_rate;
    double float8_pingpong_wide_rate;
    double float8_pingpong_wide_row_rate;
    double sustained_rate;       // of the tensor cores' rate at the highest clock
    double round_factor;         // of a tile's time: a round of tiles, all SMs together
    double library_factor;       // the same of the framework's GEMM,
    double library_idle_rounds;  // which takes smaller tiles at the end
    // A GEMM that leaves SMs loses less than their share: the chip is warm, not the SMs scarce. Larger tiles lose more.
    double fewer_sms_power;
    double fewer_sms_power_large;
    // Bands of fewer tile rows than these share less of the operands in L2.
    double low_band_rate;
    int64_t low_band_rows;
    double weight_gbps;  // at which a GEMM of few rows reads the weight, at most
    double cool_us;      // up to this it is over before the chip is at its power limit, if alone
    int64_t short_k;  // up to this the cooperative kernel's stores weigh: no products beside them
    // Larger tiles are taken where they make this number of rounds, and fill about as many SMs as ping-pong's of 128 x 128.
    double large_tile_rounds;
    double large_tile_factor;
  } gemm;

  // --- what goes on at a time ------------------------------------------------------------------
  struct Beside {
    double nccl_factor;       // the GEMM's time beside communication
    double gather_factor;     // of launches that signal nothing
    double many_ctas_factor;  // beside more CTAs than fill a slow link, between two ranks
    double overlap_power;     // of the sum of powers of what takes place at a time, over peers
    double sum_sm_gbps;  // an exchange's sums, on one of the SMs that GEMM and communication leave
  } beside;

  // --- the host --------------------------------------------------------------------------------
  struct Host {
    double first_issue_us;  // until the first chunk's call is enqueued
    double issue_us;        // per chunk ...
    double issue_sum_us;    // ... and its sum
    double launch_us;       // of one more GEMM
    // The host's time weighs in for few rows, in calls shorter than this.
    int64_t few_rows;
    double short_call_us;
  } host;

  struct Sync {
    double wait_us;       // from a chunk's last signal to the start of its call
    double fork_join_us;  // events that fork and join the side streams
  } sync;

  // --- NCCL ------------------------------------------------------------------------------------
  struct Link {
    // The links that were measured: slow ones, as over PCIe or host memory, which a few CTAs fill,
    // up to the first; fast ones from the second to the third. Between them numbers go from those
    // of slow links to those of fast ones with the link's logarithm; beyond the third a CTA carries
    // more in proportion.
    double slow_most_gbps;
    double fast_least_gbps;
    double fast_most_gbps;
    // A plain all-reduce that has the GPU to itself: start beyond the link's latency, rate of link_gbps.
    double alone_start_us;
    double alone_rate;
    double slow_pair_rate;  // the same rate between two ranks on a slow link
    // Bytes of only a reduce-scatter or an all-gather, of those of an all-reduce in the same time.
    double one_way_rate;
    int64_t default_ctas;  // what NCCL takes without a limit
    int64_t slow_default_ctas;
  } link;

  // The cost of one kind of call, relative to the link as Machine measures it with small and large
  // plain calls in a row.
  struct Call {
    double start_us;   // beyond the link's latency, before bytes flow
    double link_rate;  // of link_gbps, all lanes together
    double cta_gbps;   // of one CTA
    double latencies;  // link_latency_us that a call takes
  };
  struct Calls {
    Call all_reduce;
    Call all_reduce_window;
    // Between more than two ranks a reduction passes each byte on.
    Call all_reduce_of_many;
    Call all_reduce_window_of_many;
    Call exchange;
    Call reduce_scatter;
    Call reduce_scatter_window;
    Call all_gather;
    Call all_gather_window;  // whose own rows are staged first
    // Over PCIe or host memory. Calls in a row hide most of the latency.
    Call slow_link;
    Call slow_link_exchange;
  } calls;

  // --- on the rank's device -----------------------------------------------------------------------
  struct Local {
    // The last chunk's way from the staging buffer to the output. The chunks before it hide beside
    // communication.
    double copy_start_us;
    double copy_gbps;
    double finish_start_us;
    double finish_gbps;
    double read_write_gbps;  // what a collective over peers reads and writes
    double slot_gbps;        // the same of what has just been written to a slot
  } local;

  // --- over peers ------------------------------------------------------------------------------
  struct Peer {
    double fast_gbps;      // stores of the GEMM into a slower link would hold up the GEMM
    double sequential_us;  // of one kernel: starts and signals, beyond what follows
    double direct_us;
    double ring_us;
    double low_part_us;  // of parts of one cluster's tile rows, whose phases are computed at a time
    double final_us;     // of an all-reduce's final tiles, for each peer: tail of stores and copies
    double gather_us;    // between what has arrived and its GEMM
    double gather_chunk_us;  // of more than one chunk in one launch, each
    double first_copy_us;    // before the copies that one launch waits for: host, fork
    double copy_us;          // wait, copy and signal of a chunk
    double collective_rate;  // of peer_gbps: sends of a collective in one kernel
    int64_t least_bytes;  // smaller inputs and products NCCL gathers and scatters in as little time
    // From how much sent on, of more than two ranks, each adds up one piece and sends its sums on, a step later.
    int64_t one_step_bytes;
  } peer;

  // --- all-to-alls over NCCL -------------------------------------------------------------------
  struct AllToAll {
    // An exchange of two ranks beside a GEMM: start, rate of link_gbps at the slower end, as what is launched on all
    // SMs before its end waits for it, and rate to expect.
    double start_us;
    double low_rate;
    double beside_rate;
    // With nothing beside it. Where one rank sends more than the other, a link that goes one way only is faster.
    double alone_rate;
    double alone_start_us;
    double longer_message_share;
    double needed_gain_apart;  // of launches apart, on both ranks
    double needed_gain_once;   // over peers: of one launch of a rank's own
    int64_t message_bytes;     // smaller ones do not fill the link
    int64_t gemm_first_us;     // until a GEMM that goes first has its SMs
    int64_t pair_ctas;
    int64_t many_ctas;
    int64_t slow_link_ctas;
  } all_to_all;

  // --- CPU -------------------------------------------------------------------------------------
  struct Cpu {
    // Ranks with other numbers of threads must plan the same: these are not measured.
    int64_t cores;
    double core_gflops;  // fp32
    double link_latency_us;
    double link_gbps;
    double float64_rate;
    // Until a thread of the process group begins, and until the caller goes on after the last one.
    double wait_us;
    double fork_join_us;
    // A chunk's call beside the GEMM takes more than one alone: threads of the process group and of the GEMM share the
    // cores, and wait for each other's ranks.
    double call_us;
    double copy_gbps;
    double chunk_flops;     // less work hides no communication call
    int64_t message_bytes;  // smaller ones of an all-to-all cost more calls than they hide
  } cpu;

  // --- what is tried, and taken ----------------------------------------------------------------
  // How much better than the sequence a plan has to be expected: it needs less than this share of the sequence's time,
  // and saves this much.
  struct Gain {
    double share;
    double us;
  };
  struct NeededGain {
    Gain usual;
    Gain cpu;
    Gain library;  // a GEMM call per chunk, beside NCCL: least sure
    Gain peer;     // no collective of a library's that may not fit beside
    Gain exchange_window;
    Gain reduce_scatter_window;
    Gain no_sms_left;  // a kernel of the caller's on all SMs: communication waits for tiles to end
  } needed_gain;

  using Lists = std::vector<std::vector<int32_t>>;
  // Ways to communicate over NCCL that are tried: CTAs of a communicator, lanes. One communicator exists for each lane
  // and CTA limit. At least one each.
  struct Ways {
    Lists plain;
    Lists all_reduce_window;
    Lists one_way_window;  // reduce-scatter, all-gather: most SMs last
    Lists exchange;
    Lists library;
    Lists slow_link;
    Lists slow_link_exchange;
    Lists slow_link_scatter;
    Lists slow_link_library;
  } ways;

  // The chunks' shares of the output, first to last.
  struct Schedules {
    Lists all_reduce;
    Lists reduce_scatter;
    Lists all_gather;
    Lists exchange;
    Lists short_exchange;  // of short calls of few rows
    Lists slow_link_exchange;
    Lists slow_link_exchange_in_many_lanes;  // more than two
    Lists slow_link_scatter;                 // between two ranks
    Lists peer_all_gather;
    Lists library;
    Lists few_rows;  // of few tile rows, where the others' smallest chunk would hold none
  } schedules;

  // The file again, whole, in the shipped file's order: reads back to the same numbers.
  std::string to_json() const;
};

using SharedProfile = std::shared_ptr<const Profile>;

// The profile that is compiled in.
const SharedProfile& shipped_profile();

// A profile from JSON text; `source` names it in messages. The shipped profile supplies the fields
// that it lacks. Throws std::invalid_argument, which names source and field and says what is
// allowed.
SharedProfile parse_profile(const std::string& text, const std::string& source);

// The same from a file.
SharedProfile load_profile(const std::string& path);

// A field of the file: its name, which is its path in a Profile as well, and its place there.
using ProfilePlace = std::variant<std::string*, double*, int64_t*, Profile::Lists*>;
struct ProfileField {
  std::string_view name;  // "gemm.start_us"
  ProfilePlace (*place)(Profile&);
  std::string allowed() const;  // the values that it takes, for people
};

// All of them, in the shipped file's order: tools/profile_source.py makes this list of that file.
std::span<const ProfileField> profile_fields();

}  // namespace overlap::plan
