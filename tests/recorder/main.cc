// The program reads cases, as grid.py writes them, and prints the text of each, beginning with "== NAME". With the word
// `check` it checks the record itself, and groups that fail. Failures go to stderr.
#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <new>

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
using plan::decode;
using steps::Buffer;

// grid.py says what the fields mean, and writes them in this order.
struct Call {
  plan::Plan plan;
  std::vector<int64_t> takes;
  bool bias = false;
  std::vector<int64_t> send_rows;
  std::vector<int64_t> receive_rows;
  bool finish = false;
  bool captured = false;
  bool traced = false;
  int64_t delay_us = 0;
  bool other_stream = false;
};

int next() {
  int number = 0;
  std::cin >> number;
  return number;
}
bool flag() {
  return next() != 0;
}
std::vector<int64_t> list() {
  std::vector<int64_t> all(static_cast<size_t>(next()));
  for (int64_t& one : all) std::cin >> one;
  return all;
}
std::vector<Call> calls() {
  std::vector<Call> all(static_cast<size_t>(next()));
  for (Call& one : all)
    one = {decode(list()), list(), flag(), list(), list(), flag(), flag(), flag(), next(), flag()};
  return all;
}

bool is(const Call& call, plan::Op op) {
  return call.plan.problem.op == op;
}
bool takes(const Call& call, size_t weight = 0) {
  return call.plan.kernel != plan::Kernel::kLibrary && call.takes.at(weight) != 0;
}
int64_t columns_of(const Call& call) {  // of each weight
  return call.plan.problem.n / static_cast<int64_t>(call.takes.size());
}

// A call's memory and the framework's GEMM, as the bindings have them. No buffer of the call has an end here: the proof of
// lists finds what reaches beyond.
class CallOperands : public runtime::Operands {
 public:
  CallOperands(const Call& call, const steps::StepList& list, cudaStream_t stream)
      : list_(list), stream_(stream) {
    for (size_t weight = 0; weight < call.takes.size(); ++weight) {
      kernels::GemmParams& gemm = gemms_.emplace_back();
      gemm.n = columns_of(call);
      gemm.k = gemm.input_stride = call.plan.problem.k;
      gemm.dtype = call.plan.problem.dtype;
      gemm.weight = memory(cat("weight", weight));
    }
  }

  void* base(Buffer buffer, int32_t index) override {
    const auto found = std::ranges::find(list_.scratch, buffer, &steps::Scratch::buffer);
    if (buffer == Buffer::kProduct && found == list_.scratch.end()) return nullptr;
    const std::string name = steps::name(buffer);
    return memory(index == 0 ? name : cat(name, index));
  }
  const kernels::GemmParams& gemm(int32_t weight) override {
    return gemms_.at(static_cast<size_t>(weight));
  }
  void* library(const steps::LibraryGemm& step, const void* input, const void* adds,
                void* output) override {
    if (record().library_gemms-- == 0) throw std::bad_alloc();
    void* const made = output == nullptr ? memory("product") : nullptr;
    record().operation(stream_, cat("library gemm of weight ", step.weight, " rows ",
                                    step.rows.begin, " to ", step.rows.end, ", ", at(input), " + ",
                                    at(adds), " -> ", at(made == nullptr ? output : made)));
    return made;
  }
  void add(const steps::CopyRows& step, const void* source, void* destination,
           cudaStream_t on) override {
    record().operation(
        on, cat("add ", step.rows, " rows of ", step.row_bytes, " bytes, ", at(source), " by ",
                step.source_stride, " -> ", at(destination), " by ", step.destination_stride));
  }
  void name_chunk(int32_t chunk) override { record().chunk = chunk; }
  int32_t* counters(int32_t count) override {
    return static_cast<int32_t*>(record().allocate("captured counters", 4 * count));
  }

 private:
  void* memory(const std::string& name) {
    void*& memory = memory_[name];
    if (memory == nullptr) memory = record().allocate(name);
    return memory;
  }

  const steps::StepList& list_;
  const cudaStream_t stream_;
  std::vector<kernels::GemmParams> gemms_;
  std::map<std::string, void*> memory_;
};

// The list of a call, as the bindings make it. The kernels add no bias, the framework's GEMM does.
steps::StepList lower(runtime::Group& group, const Call& call) {
  const plan::Plan& plan = call.plan;
  steps::Variant variant = {.compute = steps::kernel_if(takes(call)),
                            .bias = call.bias,
                            .captured = call.captured,
                            .finish = call.finish,
                            .send_rows = call.send_rows,
                            .receive_rows = call.receive_rows};
  for (size_t weight = 0; is(call, plan::Op::kAllGatherGemm) && weight < call.takes.size();
       ++weight) {
    variant.weights.push_back({columns_of(call), takes(call, weight) && !call.bias});
  }
  if (is(call, plan::Op::kGemmAllToAll) && plan::over_peers(plan) && group.world_size() > 2) {
    variant.longest_message = group.longest_message(
        steps::longest_message(plan, group.rank(), call.send_rows, call.receive_rows),
        call.captured);
  }
  return steps::lower(plan, group.rank(), group.machine(), variant);
}

void run(runtime::Group& group, const Call& call, cudaStream_t stream) {
  const steps::StepList list = lower(group, call);
  CallOperands operands(call, list, stream);
  const plan::Problem& problem = call.plan.problem;
  const void* const bias = call.bias ? record().allocate("bias") : nullptr;
  kernels::FinishParams finish{
      .dtype = problem.dtype, .rows = problem.m, .columns = problem.n, .bias = bias};
  if (call.finish) {
    finish.residual = record().allocate("residual");
    finish.normed = record().allocate("normed");
  }
  runtime::Trace trace;
  runtime::run(group, {.plan = &call.plan,
                       .list = &list,
                       .operands = &operands,
                       .bias = bias,
                       .finish = &finish,
                       .stream = stream,
                       .trace = call.traced ? &trace : nullptr,
                       .delay_us = call.delay_us});
  // Throws if an event of the timeline has not been recorded.
  if (call.traced) (void)trace.take();
}

void run_case() {
  Record& to = record();
  const int world = next();
  to.begin_case(world, next());
  const std::vector<Call> all = calls();
  to.maps_peers = flag();
  const bool prepared = flag();
  const int failed = next(), hidden = next(), refused = next(), library_gemms = next();
  runtime::GroupOptions options = options_of("recorded", kDeadlineNs / 1'000'000);
  // The shipped profile, but that all-to-alls in one launch are so whatever their rows.
  auto profile = std::make_shared<plan::Profile>(*plan::shipped_profile());
  profile->all_to_all.needed_gain_once = 1e-4;
  options.profile = std::move(profile);
  runtime::Group group(std::move(options));
  to.report = group.report();
  const cudaStream_t callers[] = {to.new_stream("caller"), to.new_stream("caller2")};
  for (const Call& call : all) {
    if (prepared) group.prepare(call.plan);
  }
  const uint64_t late = kernels::pack({.chunk = 0, .peer = 0, .expected = 1});
  if (failed == 1) group.report()->failure = late;
  to.nccl_failed = failed == 2;
  if (failed == 3) {
    to.before_wait = [&](int32_t chunk) {
      if (chunk != 1) return;
      group.report()->failure = late;
      (void)group.watch();
      group.abort_communicators();
    };
  }
  for (int i = 0; const Call& call : all) {
    const cudaStream_t stream = callers[call.other_stream];
    if (i == hidden) to.hide();
    to.begin_call(stream, call.captured);
    to.library_gemms = i == 0 ? library_gemms : -1;
    std::string thrown;
    try {
      run(group, call, stream);
    } catch (const runtime::Error& error) {
      thrown = error.what();
    } catch (const std::bad_alloc&) {  // the framework's GEMM, as the case asks
    }
    if (thrown.empty() == (i < refused))
      to.violation("refused or not, against the case: " + thrown);
    if (failed == 3 && thrown.find("group 'recorded', rank ") == std::string::npos)
      to.violation("a call on aborted communicators does not say why: " + thrown);
    to.end_call(stream, !thrown.empty() && failed != 3);
    ++i;
  }
}

}  // namespace
}  // namespace recorder

int main(int count, char** words) {
  using namespace recorder;
  std::vector<std::string> failures;
  if (count == 2 && words[1] == std::string("check")) failures = failed_checks();
  for (std::string name; std::getline(std::cin, name);) {
    run_case();
    std::cin >> std::ws;
    std::cout << "== " << name << '\n' << record().text();
    for (const std::string& what : record().violations) failures.push_back(name + ": " + what);
  }
  for (const std::string& failure : failures) std::cerr << failure << '\n';
  return failures.empty() ? 0 : 1;
}
