// A plan as a flat list of integers, and back.
#include <limits>
#include <stdexcept>
#include <string>

#include "plan/plan.h"

namespace overlap::plan {
namespace {

// First number of every list. It changes whenever the fields below do, so that a list that another
// version made is refused, not misread.
constexpr int64_t kCodeVersion = 1;

// Takes the list apart from front to back, and says which field was wrong.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& code) : code_(code) {}

  int64_t take(const char* field, int64_t low, int64_t high) {
    if (next_ == code_.size()) {
      throw std::invalid_argument("encoded plan ends after " + std::to_string(code_.size()) +
                                  " numbers, where " + field +
                                  " should follow: pass the whole list that encode() returned");
    }
    const int64_t value = code_[next_++];
    if (value < low || value > high) {
      throw std::invalid_argument(
          "encoded plan has " + std::string(field) + " = " + std::to_string(value) +
          " at position " + std::to_string(next_ - 1) + ", allowed are " + std::to_string(low) +
          " to " + std::to_string(high) + ": pass a list that encode() returned");
    }
    return value;
  }

  int64_t take_int64(const char* field) {
    return take(field, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  }

  int32_t take_int32(const char* field) {
    return static_cast<int32_t>(
        take(field, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
  }

  template <typename Enum>
  Enum take_enum(const char* field, Enum last) {
    return static_cast<Enum>(take(field, 0, static_cast<int64_t>(last)));
  }

  // A length that the rest of the list can hold, so that a broken list allocates nothing large.
  size_t take_length(const char* field, size_t numbers_each) {
    const size_t left = code_.size() - next_;
    const size_t limit = left == 0 ? 0 : (left - 1) / numbers_each;
    return static_cast<size_t>(take(field, 0, static_cast<int64_t>(limit)));
  }

  void finish() const {
    if (next_ != code_.size()) {
      throw std::invalid_argument("encoded plan has " + std::to_string(code_.size()) +
                                  " numbers, expected " + std::to_string(next_) +
                                  ": pass exactly the list that encode() returned");
    }
  }

 private:
  const std::vector<int64_t>& code_;
  size_t next_ = 0;
};

// FNV-1a, by numbers, and mixed once more: near numbers differ in all bits.
class Hash {
 public:
  void add(int64_t number) {
    value_ = (value_ ^ static_cast<uint64_t>(number)) * 0x100000001b3;
    value_ ^= value_ >> 29;
  }
  void add(const Problem& problem) {
    add(static_cast<int64_t>(problem.op));
    add(problem.m);
    add(problem.n);
    add(problem.k);
    add(static_cast<int64_t>(problem.dtype));
    add(problem.world_size);
  }
  uint64_t value() const {
    const uint64_t mixed = (value_ ^ value_ >> 32) * 0x9e3779b97f4a7c15;
    return mixed ^ mixed >> 32;
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace

uint64_t hash(const Problem& problem) {
  Hash all;
  all.add(problem);
  return all.value();
}

uint64_t communication_hash(const Plan& plan) {
  Hash all;
  all.add(plan.problem);
  for (const int64_t number :
       {static_cast<int64_t>(plan.schedule), static_cast<int64_t>(plan.layout),
        static_cast<int64_t>(plan.collective), static_cast<int64_t>(plan.tile_m),
        static_cast<int64_t>(plan.tile_n), static_cast<int64_t>(plan.cluster_m)}) {
    all.add(number);
  }
  for (const BandRun& run : plan.bands) {
    all.add(run.tile_rows);
    all.add(run.count);
  }
  for (const Chunk& chunk : plan.chunks) {
    all.add(chunk.tiles);
    all.add(static_cast<int64_t>(chunk.transport));
  }
  return all.value();
}

std::vector<int64_t> encode(const Plan& plan) {
  std::vector<int64_t> code = {
      kCodeVersion,
      static_cast<int64_t>(plan.problem.op),
      plan.problem.m,
      plan.problem.n,
      plan.problem.k,
      static_cast<int64_t>(plan.problem.dtype),
      plan.problem.world_size,
      static_cast<int64_t>(plan.schedule),
      static_cast<int64_t>(plan.kernel),
      plan.tile_m,
      plan.tile_n,
      plan.cluster_m,
      static_cast<int64_t>(plan.layout),
      plan.resources.comm_sms,
      plan.resources.smem_pad_bytes,
      plan.resources.window ? 1 : 0,
      plan.resources.finish_ctas,
      plan.resources.lanes,
      static_cast<int64_t>(plan.collective),
  };
  code.push_back(static_cast<int64_t>(plan.bands.size()));
  for (const BandRun& run : plan.bands) {
    code.push_back(run.tile_rows);
    code.push_back(run.count);
  }
  code.push_back(static_cast<int64_t>(plan.chunks.size()));
  for (const Chunk& chunk : plan.chunks) {
    code.push_back(chunk.tiles);
    code.push_back(static_cast<int64_t>(chunk.transport));
    code.push_back(chunk.max_ctas);
  }
  return code;
}

Plan decode(const std::vector<int64_t>& code) {
  Reader reader(code);
  reader.take("version", kCodeVersion, kCodeVersion);
  Plan plan;
  plan.problem.op = reader.take_enum("op", Op::kGemmAllToAll);
  plan.problem.m = reader.take_int64("m");
  plan.problem.n = reader.take_int64("n");
  plan.problem.k = reader.take_int64("k");
  plan.problem.dtype = reader.take_enum("dtype", DType::kFloat64);
  plan.problem.world_size = reader.take_int32("world_size");
  plan.schedule = reader.take_enum("schedule", Schedule::kOverlapped);
  plan.kernel = reader.take_enum("kernel", kLastKernel);
  plan.tile_m = reader.take_int32("tile_m");
  plan.tile_n = reader.take_int32("tile_n");
  plan.cluster_m = reader.take_int32("cluster_m");
  plan.layout = reader.take_enum("layout", Layout::kPacked);
  plan.resources.comm_sms = reader.take_int32("comm_sms");
  plan.resources.smem_pad_bytes = reader.take_int32("smem_pad_bytes");
  plan.resources.window = reader.take("window", 0, 1) == 1;
  plan.resources.finish_ctas = reader.take_int32("finish_ctas");
  plan.resources.lanes = reader.take_int32("lanes");
  plan.collective = reader.take_enum("collective", Collective::kDirect);
  plan.bands.resize(reader.take_length("number of band runs", 2));
  for (BandRun& run : plan.bands) {
    run.tile_rows = reader.take_int32("band height");
    run.count = reader.take_int32("band count");
  }
  plan.chunks.resize(reader.take_length("number of chunks", 3));
  for (Chunk& chunk : plan.chunks) {
    chunk.tiles = reader.take_int32("chunk tiles");
    chunk.transport = reader.take_enum("chunk transport", Transport::kPeer);
    chunk.max_ctas = reader.take_int32("chunk max_ctas");
  }
  reader.finish();
  return plan;
}

}  // namespace overlap::plan
