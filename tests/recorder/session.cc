#include "session.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <new>
#include <numeric>

#include "plan/templates.h"
#include "record.h"
#include "runtime/error.h"
#include "runtime/group.h"
#include "runtime/run.h"
#include "runtime/trace.h"

namespace recorder {
namespace {

namespace plan = overlap::plan;
namespace kernels = overlap::kernels;
namespace runtime = overlap::runtime;
namespace steps = overlap::steps;
using steps::Buffer;

const kernels::WaitReport* group_report = nullptr;

// The shipped one, but that all-to-alls in one launch are so whatever their rows.
const plan::SharedProfile& profile() {
  static const plan::SharedProfile made = [] {
    auto copy = std::make_shared<plan::Profile>(*plan::shipped_profile());
    copy->all_to_all.needed_gain_once = 1e-4;
    return copy;
  }();
  return made;
}

std::unique_ptr<runtime::Group> make_group(const Case& one) {
  runtime::GroupOptions options;
  options.name = "recorded";
  options.rank = one.rank;
  options.world_size = one.world;
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::nanoseconds(kDeadlineNs));
  options.bootstrap = bootstrap();
  options.profile = profile();
  options.alive = [] { return true; };
  return std::make_unique<runtime::Group>(std::move(options));
}

bool takes(const Call& call, size_t weight = 0) {
  return call.plan.kernel != plan::Kernel::kLibrary && call.takes.at(weight);
}

// A call's memory and the framework's GEMM, as the bindings have them.
class CallOperands : public runtime::Operands {
 public:
  CallOperands(const Call& call, const steps::StepList& list, cudaStream_t stream)
      : call_(call), plan_(call.plan), list_(list), stream_(stream) {
    for (size_t weight = 0; weight < call.takes.size(); ++weight) {
      const plan::Problem& problem = plan_.problem;
      kernels::GemmParams gemm;
      gemm.n = columns_of(call, weight);
      gemm.k = problem.k;
      gemm.dtype = problem.dtype;
      gemm.input_stride = problem.k;
      gemm.weight = tensor(gathers() ? cat("weight", weight) : "weight", gemm.n, problem.k);
      gemm.weight_stride = problem.k;
      gemm.output_stride = gemm.n;
      gemm.layout = plan_.layout;
      gemm.smem_pad_bytes = plan_.resources.smem_pad_bytes;
      gemms_.push_back(gemm);
    }
  }

  // The plan's are those of all weights; the last one has what is left.
  static int64_t columns_of(const Call& call, size_t weight) {
    constexpr int64_t kAlignment = 8;
    const int64_t n = call.plan.problem.n;
    const auto weights = static_cast<int64_t>(call.takes.size());
    const int64_t most = n / weights / kAlignment * kAlignment;
    const auto index = static_cast<int64_t>(weight);
    return index + 1 < weights ? most : n - index * most;
  }

  void* base(Buffer buffer, int32_t index) override {
    char*& memory = memory_[{buffer, index}];
    if (memory == nullptr) memory = make(buffer, index);
    return memory;
  }

  const kernels::GemmParams& gemm(int32_t weight) override {
    return gemms_.at(static_cast<size_t>(weight));
  }

  void* library(const steps::LibraryGemm& step, const void* input, const void* adds,
                void* output) override {
    const plan::Problem& problem = plan_.problem;
    if (step.weight == steps::LibraryGemm::kAllWeights) {
      for (size_t weight = 0; weight < gemms_.size(); ++weight) {
        enqueue(cat(" of weight", weight), step.rows, input, nullptr);
      }
      return nullptr;
    }
    if (gathers()) {
      enqueue(cat(" of weight", step.weight), step.rows, input, nullptr);
      return nullptr;
    }
    if (makes_product()) output = tensor("product", problem.m, problem.n);
    enqueue(adds == nullptr ? "" : " plus", step.rows, adds, output);
    return makes_product() ? output : nullptr;
  }

  void add(const steps::CopyRows& step, const void* source, void* destination,
           cudaStream_t on) override {
    const int64_t from = (step.rows - 1) * step.source_stride + step.row_bytes;
    const int64_t to = (step.rows - 1) * step.destination_stride + step.row_bytes;
    record().operation(on, cat("add ", step.rows, " rows of ", step.row_bytes, " bytes, ",
                               record().at(source, from), " by ", step.source_stride, " -> ",
                               record().at(destination, to), " by ", step.destination_stride));
  }

  // A chunk is named before anything of it is enqueued, by the list, and none when the call has ended.
  void name_chunk(int32_t chunk) override {
    if (chunk == chunk_) record().violation(cat("chunk ", chunk, " is named twice in a row"));
    if (chunk >= list_.chunks) record().violation(cat("chunk ", chunk, " is not there"));
    chunk_ = chunk;
    names_ += chunk >= 0 ? 1 : 0;
  }
  void expect_names() const {
    const int32_t chunks = list_.chunks;
    if (chunk_ >= 0 || names_ < chunks) {
      record().violation(cat(names_, " names of ", chunks, " chunks, the last one ", chunk_));
    }
  }

  int32_t* counters(int32_t count) override {
    return static_cast<int32_t*>(
        record().allocate("captured counters", 4 * std::max(count, plan::kMaxChunks)));
  }

 private:
  bool gathers() const { return plan_.problem.op == plan::Op::kAllGatherGemm; }
  bool exchanges() const { return plan_.problem.op == plan::Op::kGemmAllToAll; }
  // True if the framework's GEMM makes the memory of its product.
  bool makes_product() const {
    return !exchanges() && (plan_.schedule == plan::Schedule::kSequential ||
                            plan_.collective == plan::Collective::kDirect);
  }

  static int64_t sum(const std::vector<int64_t>& rows) {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0});
  }

  char* tensor(const std::string& name, int64_t rows, int64_t columns) const {
    if (!record().on) return reinterpret_cast<char*>(uintptr_t{1} << 40);  // nobody looks
    const int64_t bytes = rows * columns * plan::element_bytes(plan_.problem.dtype);
    return static_cast<char*>(record().allocate(name, bytes));
  }

  // Memory that the list names among what the call makes, of as many bytes.
  char* scratch(Buffer buffer, const std::string& name) const {
    const auto found = std::ranges::find(list_.scratch, buffer, &steps::Scratch::buffer);
    if (found != list_.scratch.end()) {
      return static_cast<char*>(record().allocate(name, found->bytes));
    }
    record().violation(cat("the list holds no ", name));
    return nullptr;
  }

  char* make(Buffer buffer, int32_t index) const {
    const plan::Problem& problem = plan_.problem;
    const bool sequential = plan_.schedule == plan::Schedule::kSequential;
    switch (buffer) {
      case Buffer::kInput:
        return tensor("input",
                      gathers()     ? plan::part_rows(plan_)
                      : exchanges() ? sum(call_.send_rows)
                                    : problem.m,
                      problem.k);
      case Buffer::kOutput:
        if (gathers() && sequential) return nullptr;  // the framework's GEMM makes them
        if (gathers()) {
          const auto weight = static_cast<size_t>(index);
          return tensor(cat("output", index), problem.m, columns_of(call_, weight));
        }
        if (exchanges()) return tensor("output", sum(call_.receive_rows), problem.n);
        return tensor(
            "output",
            problem.op == plan::Op::kGemmReduceScatter ? problem.m / problem.world_size : problem.m,
            problem.n);
      case Buffer::kGathered:
        return tensor("gathered", problem.m, problem.k);
      case Buffer::kStaging:
        return scratch(buffer, "staging");
      case Buffer::kProduct:
        if (makes_product()) return nullptr;
        return scratch(buffer, exchanges() ? "product" : "rows");
      case Buffer::kPartial:
        return scratch(buffer, "rows");
      default:
        record().violation(cat("a step names the ", steps::name(buffer), ", which no call has"));
        return nullptr;
    }
  }

  // The framework's GEMM, on the caller's stream.
  void enqueue(const std::string& what, plan::Rows rows, const void* from, const void* to) const {
    if (record().library_gemms == 0) throw std::bad_alloc();
    if (record().library_gemms > 0) --record().library_gemms;
    std::string text = cat("library gemm", what, " rows ", rows.begin, " to ", rows.end);
    if (from != nullptr) text += cat(", ", at(from));
    if (to != nullptr) text += cat(" -> ", at(to));
    record().operation(stream_, text);
  }

  const Call& call_;
  const plan::Plan& plan_;
  const steps::StepList& list_;
  const cudaStream_t stream_;
  std::vector<kernels::GemmParams> gemms_;
  std::map<std::pair<Buffer, int32_t>, char*> memory_;
  int32_t chunk_ = -1;  // that is named now
  int32_t names_ = 0;
};

// One case's group, and calls on it with the operands and the memory that the bindings give them.
class Session {
 public:
  explicit Session(const Case& one) {
    record().begin_case(one.world, one.rank);
    record().maps_peers = one.peers;
    group_ = make_group(one);
    group_report = group_->report();
    caller_ = record().new_stream("caller");
    other_caller_ = record().new_stream("caller2");
    if (one.prepared) {
      for (const Call& call : one.calls) group_->prepare(call.plan);
    }
    if (one.failed == Failed::kWait) {
      group_->report()->failure = kernels::pack({.chunk = 0, .peer = 0, .expected = 1});
    }
    record().nccl_failed = one.failed == Failed::kNccl;
  }
  ~Session() {
    group_report = nullptr;
    record().nccl_failed = false;
  }

  cudaStream_t stream_of(const Call& call) const {
    return call.other_stream ? other_caller_ : caller_;
  }

  // The list of a call, as the bindings make it.
  steps::StepList lower(const Call& call) const {
    const plan::Plan& plan = call.plan;
    steps::Variant variant = {.compute = steps::kernel_if(takes(call)),
                              .bias = call.bias,
                              .captured = call.captured,
                              .finish = call.finish,
                              .send_rows = call.send_rows,
                              .receive_rows = call.receive_rows};
    // The kernels add no bias, the framework's GEMM does.
    if (plan.problem.op == plan::Op::kAllGatherGemm) {
      for (size_t weight = 0; weight < call.takes.size(); ++weight) {
        variant.weights.push_back(
            {CallOperands::columns_of(call, weight), takes(call, weight) && !call.bias});
      }
    }
    if (plan.problem.op == plan::Op::kGemmAllToAll) {
      const bool some = std::any_of(call.send_rows.begin(), call.send_rows.end(),
                                    [](int64_t rows) { return rows > 0; });
      variant.compute = steps::kernel_if(takes(call) && !call.bias && some);
      if (plan::over_peers(plan) && group_->world_size() > 2) {
        variant.longest_message = group_->longest_message(
            steps::longest_message(plan, group_->rank(), call.send_rows, call.receive_rows),
            call.captured);
      }
    }
    return steps::lower(plan, group_->rank(), group_->machine(), variant);
  }

  void run(const Call& call) {
    const steps::StepList list = lower(call);
    const cudaStream_t stream = stream_of(call);
    CallOperands operands(call, list, stream);
    const plan::Problem& problem = call.plan.problem;
    const int64_t row_bytes = problem.n * plan::element_bytes(problem.dtype);
    const void* const bias = call.bias ? record().allocate("bias", row_bytes) : nullptr;
    kernels::FinishParams finish{
        .dtype = problem.dtype, .rows = problem.m, .columns = problem.n, .bias = bias};
    if (call.finish) {
      finish.residual = record().allocate("residual", problem.m * row_bytes);
      finish.normed = record().allocate("normed", problem.m * row_bytes);
    }
    runtime::run(*group_, {.plan = &call.plan,
                           .list = &list,
                           .operands = &operands,
                           .bias = bias,
                           .finish = &finish,
                           .stream = stream,
                           .trace = call.traced ? &trace_ : nullptr,
                           .delay_us = call.delay_us});
    operands.expect_names();
    if (call.traced) expect_timeline();
  }

 private:
  // Every event of the call's timeline has been recorded.
  void expect_timeline() {
    try {
      (void)trace_.take();
    } catch (const runtime::Error& error) {
      record().violation(cat("no timeline: ", error.what()));
    }
  }

  runtime::Trace trace_;
  std::unique_ptr<runtime::Group> group_;
  cudaStream_t caller_ = nullptr;
  cudaStream_t other_caller_ = nullptr;
};

}  // namespace

runtime::Bootstrap bootstrap() {
  const auto is_id = [](const std::string& key) {
    const std::string kId = "/nccl_id/";
    const size_t found = key.find(kId);
    if (found == std::string::npos) return false;
    record().communicator = key.substr(found + kId.size());
    return true;
  };
  runtime::Bootstrap result;
  result.set = [is_id](const std::string& key, const std::vector<uint8_t>&) { (void)is_id(key); };
  result.get = [is_id](const std::string& key) {
    return std::vector<uint8_t>(is_id(key) ? sizeof(ncclUniqueId) : 1);
  };
  result.has = [](const std::string&) { return true; };
  result.remove = [](const std::string&) {};
  return result;
}

const kernels::WaitReport* expected_report() {
  return group_report;
}

Recording run(const Case& one) {
  Recording result;
  {
    Session session(one);
    Record& to = record();
    for (size_t i = 0; i < one.calls.size(); ++i) {
      const Call& call = one.calls[i];
      const cudaStream_t stream = session.stream_of(call);
      if (static_cast<int>(i) == one.unrecorded) to.forget();
      to.begin_call(stream, call.captured);
      to.library_gemms = i == 0 ? one.library_gemms : -1;
      bool thrown = false;
      try {
        session.run(call);
      } catch (const runtime::Error&) {
        thrown = true;
      } catch (const std::bad_alloc&) {  // the framework's GEMM, as the case asks
      }
      const bool expected = static_cast<int>(i) < one.refused;
      if (thrown != expected) {
        to.violation(cat("call ", i + 1, expected ? " is not refused" : " is refused"));
      }
      if (thrown && to.call_operations() > 0) {
        to.violation(
            cat("call ", i + 1, " is refused after ", to.call_operations(), " operations"));
      }
      to.end_call(stream);
    }
  }
  result.text = cat("== ", one.name, "\n", record().text());
  result.violations = record().violations;
  return result;
}

}  // namespace recorder
