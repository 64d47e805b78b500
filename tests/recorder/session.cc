#include "session.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <numeric>

#include "plan/planner.h"
#include "record.h"
#include "replay.h"
#include "runtime/error.h"
#include "runtime/executor.h"
#include "runtime/group.h"
#include "runtime/trace.h"

namespace recorder {
namespace {

namespace plan = overlap::plan;
namespace kernels = overlap::kernels;
namespace runtime = overlap::runtime;

const kernels::WaitReport* group_report = nullptr;

void set_link(Link link) {
  Record& to = record();
  to.link_latency_us = link == Link::kSlow ? 60.0 : 9.0;
  to.link_gbps = link == Link::kSlow ? 18.0 : 260.0;
  to.peer_gbps = link == Link::kNoPeers ? 0.0 : link == Link::kSlow ? 12.0 : 365.0;
  to.windows = link != Link::kNoWindows && link != Link::kSlow;
}

// All ranks have come, whatever is asked for. Communicators are named as their keys in the store end.
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

std::unique_ptr<runtime::Group> make_group(const Case& one) {
  runtime::GroupOptions options;
  options.name = "recorded";
  options.rank = one.rank;
  options.world_size = one.world;
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::nanoseconds(kDeadlineNs));
  options.bootstrap = bootstrap();
  options.alive = [] { return true; };
  return std::make_unique<runtime::Group>(std::move(options));
}

bool takes(const Call& call, size_t weight = 0) {
  return call.plan.kernel != plan::Kernel::kLibrary && call.operands.takes.at(weight);
}

// Registered windows take parts between multiples of 16 bytes, and no captures.
bool in_window(const Call& call) {
  constexpr int64_t kBytes = 16;
  const plan::Plan& plan = call.plan;
  if (!plan.resources.window || call.mode.captured) return false;
  const int64_t element = plan::element_bytes(plan.problem.dtype);
  for (int chunk = 0; chunk < static_cast<int>(plan.chunks.size()); ++chunk) {
    const plan::Extent extent = plan::chunk_extent(plan, chunk);
    if (extent.offset * element % kBytes != 0 || extent.count * element % kBytes != 0) {
      return false;
    }
  }
  return true;
}

// A timeline is recorded by the executors alone.
bool has_list(const Call& call) {
  return overlap::steps::lowers(call.plan) && !call.mode.traced;
}

// One case's group, and calls on it with the operands and the memory that the bindings give them.
class Session {
 public:
  explicit Session(const Case& one, bool from_steps = false) : from_steps_(from_steps) {
    record().begin_case(one.world, one.rank);
    set_link(one.link);
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

  const plan::Machine& machine() const { return group_->machine(); }
  cudaStream_t stream_of(const Call& call) const {
    return call.mode.other_stream ? other_caller_ : caller_;
  }

  void run(const Call& call) {
    const plan::Plan& plan = call.plan;
    const plan::Op op = plan.problem.op;
    if (op == plan::Op::kGemmAllToAll) {
      all_to_all(call);
    } else if (plan.collective == plan::Collective::kDirect) {
      direct(call);
    } else if (plan.schedule == plan::Schedule::kSequential) {
      sequential(call);
    } else if (op == plan::Op::kAllGatherGemm) {
      consume(call);
    } else {
      produce(call);
    }
  }

 private:
  // A tensor of a call.
  static char* tensor(const Call& call, const std::string& name, int64_t rows, int64_t columns) {
    if (!record().on) return reinterpret_cast<char*>(uintptr_t{1} << 40);  // nobody looks
    const int64_t bytes = rows * columns * plan::element_bytes(call.plan.problem.dtype);
    return static_cast<char*>(record().allocate(name, bytes));
  }

  template <typename RuntimeCall>
  void set_common(const Call& call, RuntimeCall& made) {
    made.plan = &call.plan;
    made.stream = stream_of(call);
    made.trace = call.mode.traced ? &trace_ : nullptr;
  }

  kernels::GemmParams gemm(const Call& call, int64_t rows, int64_t columns, const void* input,
                           const std::string& weight) const {
    const plan::Problem& problem = call.plan.problem;
    kernels::GemmParams params;
    params.m = rows;
    params.n = columns;
    params.k = problem.k;
    params.dtype = problem.dtype;
    params.input = input;
    params.input_stride = problem.k;
    params.weight = tensor(call, weight, columns, problem.k);
    params.weight_stride = problem.k;
    params.output_stride = columns;
    params.layout = call.plan.layout;
    params.smem_pad_bytes = call.plan.resources.smem_pad_bytes;
    params.ctas = std::max(1, group_->device().sm_count() - call.plan.resources.comm_sms);
    return params;
  }

  static void* staging(const Call& call) {
    return in_window(call) ? nullptr : tensor(call, "staging", 1, plan::buffer_elements(call.plan));
  }

  static const void* bias(const Call& call) {
    return call.operands.bias ? tensor(call, "bias", 1, call.plan.problem.n) : nullptr;
  }

  // The framework's GEMM, which the bindings enqueue on the caller's stream.
  static void library(cudaStream_t stream, const char* what, plan::Rows rows, const void* from,
                      const void* to) {
    if (!record().on) return;
    if (record().library_gemms == 0) throw std::bad_alloc();
    if (record().library_gemms > 0) --record().library_gemms;
    std::string text = cat("library gemm", what, " rows ", rows.begin, " to ", rows.end);
    if (from != nullptr) text += cat(", ", at(from));
    if (to != nullptr) text += cat(" -> ", at(to));
    record().operation(stream, text);
  }

  // An all-reduce or a reduce-scatter, chunk by chunk or as a ring.
  void produce(const Call& call) {
    const plan::Plan& plan = call.plan;
    const plan::Problem& problem = plan.problem;
    const plan::TileOrder order = plan::tile_order(plan);
    const bool ring = plan::over_peers(plan);
    const bool scatters = problem.op == plan::Op::kGemmReduceScatter;
    runtime::ProduceCall made;
    set_common(call, made);
    made.order = &order;
    made.delay_us = call.mode.delay_us;
    made.output = tensor(call, "output", scatters ? plan::part_rows(plan) : problem.m, problem.n);
    if (!ring) {
      made.buffer = runtime::communicates_in_place(plan) ? made.output : staging(call);
    }
    made.bias = bias(call);
    const char* input = tensor(call, "input", problem.m, problem.k);
    made.gemm = gemm(call, problem.m, problem.n, input, "weight");
    made.signals = takes(call);
    made.counters = [&] {
      return static_cast<int32_t*>(record().allocate("captured counters", 4 * plan::kMaxChunks));
    };
    const cudaStream_t stream = made.stream;
    if (!made.signals) {
      if (ring || plan.layout == plan::Layout::kPacked) {
        const int64_t rows = ring ? plan::part_rows(plan) : problem.m;
        made.library_rows = tensor(call, "rows", rows, problem.n);
      }
      made.library_gemm = [stream](plan::Rows rows, void* destination) {
        library(stream, "", rows, nullptr, destination);
      };
      made.library_phase = [stream](plan::Rows rows, const void* source, void* destination) {
        library(stream, source == nullptr ? "" : " plus", rows, source, destination);
      };
    }
    if (from_steps_ && has_list(call)) {
      replay(*group_, made);
    } else if (ring) {
      runtime::run_ring(*group_, made);
    } else {
      runtime::run_produce(*group_, made);
    }
  }

  void direct(const Call& call) {
    const plan::Plan& plan = call.plan;
    const plan::Problem& problem = plan.problem;
    const plan::TileOrder order = plan::tile_order(plan);
    const bool all_reduces = problem.op == plan::Op::kGemmAllReduce;
    const bool overlapped = plan.schedule == plan::Schedule::kOverlapped;
    runtime::ProduceCall made;
    set_common(call, made);
    made.order = &order;
    made.delay_us = call.mode.delay_us;
    made.bias = bias(call);
    if (overlapped || !all_reduces) {
      const int64_t rows = all_reduces ? problem.m : problem.m / problem.world_size;
      made.output = tensor(call, "output", rows, problem.n);
    }
    if (overlapped) {
      const char* input = tensor(call, "input", problem.m, problem.k);
      made.gemm = gemm(call, problem.m, problem.n, input, "weight");
      made.signals = takes(call);
    }
    made.library_product = [&call, &problem, stream = made.stream]() -> void* {
      void* product = tensor(call, "product", problem.m, problem.n);
      library(stream, "", {0, problem.m}, nullptr, product);
      return product;
    };
    if (from_steps_ && has_list(call)) {
      replay(*group_, made);
    } else {
      runtime::run_direct(*group_, made);
    }
  }

  void consume(const Call& call) {
    const plan::Plan& plan = call.plan;
    const plan::Problem& problem = plan.problem;
    runtime::ConsumeCall made;
    set_common(call, made);
    made.delay_us = call.mode.delay_us;
    made.input = tensor(call, "input", plan::part_rows(plan), problem.k);
    made.gathered = tensor(call, "gathered", problem.m, problem.k);
    if (!plan::over_peers(plan)) made.buffer = staging(call);
    // The plan's columns are those of all weights; the last one has what is left.
    constexpr int64_t kAlignment = 8;
    const auto weights = static_cast<int64_t>(call.operands.takes.size());
    const int64_t most = problem.n / weights / kAlignment * kAlignment;
    for (int64_t i = 0; i < weights; ++i) {
      const int64_t columns = i + 1 < weights ? most : problem.n - i * most;
      runtime::ConsumeCall::Gemm one;
      one.params = gemm(call, problem.m, columns, made.input, cat("weight", i));
      one.params.output = tensor(call, cat("output", i), problem.m, columns);
      one.fast = takes(call, static_cast<size_t>(i)) && !call.operands.bias;
      made.gemms.push_back(one);
    }
    made.library_gemm = [stream = made.stream](size_t weight, const void* input, plan::Rows rows) {
      library(stream, cat(" of weight", weight).c_str(), rows, input, nullptr);
    };
    if (from_steps_ && has_list(call)) {
      replay(*group_, made);
    } else {
      runtime::run_consume(*group_, made);
    }
  }

  void all_to_all(const Call& call) {
    const plan::Plan& plan = call.plan;
    const plan::Problem& problem = plan.problem;
    const Operands& operands = call.operands;
    const auto sum = [](const std::vector<int64_t>& rows) {
      return std::accumulate(rows.begin(), rows.end(), int64_t{0});
    };
    const int64_t sent = sum(operands.send_rows);
    runtime::AllToAllCall made;
    set_common(call, made);
    made.delay_us = call.mode.delay_us;
    made.send_rows = operands.send_rows;
    made.receive_rows = operands.receive_rows;
    made.product = [&call, sent, &problem]() -> void* {
      return tensor(call, "product", sent, problem.n);
    };
    made.output = tensor(call, "output", sum(operands.receive_rows), problem.n);
    made.gemm = gemm(call, sent, problem.n, tensor(call, "input", sent, problem.k), "weight");
    made.fast = takes(call) && !operands.bias && sent > 0;
    made.library_gemm = [stream = made.stream](plan::Rows rows, void* destination) {
      if (rows.begin < rows.end) library(stream, "", rows, nullptr, destination);
    };
    if (from_steps_ && has_list(call)) {
      replay(*group_, made);
    } else if (plan::over_peers(plan)) {
      runtime::run_exchange(*group_, made);
    } else {
      runtime::run_all_to_all(*group_, made);
    }
  }

  void sequential(const Call& call) {
    const plan::Plan& plan = call.plan;
    const plan::Problem& problem = plan.problem;
    const bool gathers = problem.op == plan::Op::kAllGatherGemm;
    runtime::SequentialCall made;
    set_common(call, made);
    if (gathers) {
      made.input = tensor(call, "input", plan::part_rows(plan), problem.k);
      made.output = tensor(call, "gathered", problem.m, problem.k);
    }
    made.gemm = [&]() -> void* {
      if (gathers) {
        for (size_t i = 0; i < call.operands.takes.size(); ++i) {
          library(made.stream, cat(" of weight", i).c_str(), {0, problem.m}, made.output, nullptr);
        }
        return nullptr;
      }
      void* product = tensor(call, "product", problem.m, problem.n);
      library(made.stream, "", {0, problem.m}, nullptr, product);
      if (problem.op == plan::Op::kGemmReduceScatter) {
        made.output = tensor(call, "output", plan::part_rows(plan), problem.n);
      }
      return product;
    };
    if (from_steps_ && has_list(call)) {
      replay(*group_, made);
    } else {
      runtime::run_sequential(*group_, made);
    }
  }

  bool from_steps_ = false;  // calls that have lists of steps are made from these
  runtime::Trace trace_;
  std::unique_ptr<runtime::Group> group_;
  cudaStream_t caller_ = nullptr;
  cudaStream_t other_caller_ = nullptr;
};

}  // namespace

const kernels::WaitReport* expected_report() {
  return group_report;
}

std::string full_name(const Case& one) {
  return cat(one.family, ": ", one.name);
}

Steps has_steps(const Case& one) {
  bool lowers = false;
  for (const Call& call : one.calls) {
    if (has_list(call)) return Steps::kSome;
    lowers = lowers || overlap::steps::lowers(call.plan);
  }
  return lowers ? Steps::kTraced : Steps::kNone;
}

overlap::steps::StepList lowered(const Case& one) {
  Session session(one, true);
  session.run(one.calls.at(0));
  return last_list();
}

Recording run(const Case& one, bool from_steps) {
  Recording result;
  {
    Session session(one, from_steps);
    Record& to = record();
    for (size_t i = 0; i < one.calls.size(); ++i) {
      const Call& call = one.calls[i];
      const cudaStream_t stream = session.stream_of(call);
      if (static_cast<int>(i) == one.unrecorded) to.forget();
      to.begin_call(cat("call ", i + 1), stream, call.mode.captured);
      to.library_gemms = i == 0 ? one.library_gemms : -1;
      bool thrown = false;
      try {
        session.run(call);
      } catch (const runtime::Error&) {
        thrown = true;
        to.note("refused");
      } catch (const std::bad_alloc&) {
        to.note("throws half-way");
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
  result.text = cat("== ", full_name(one), "\n", record().text());
  result.canonical = cat("== ", full_name(one), "\n", record().canonical());
  result.violations = record().violations;
  return result;
}

std::string machine_of(const Case& one) {
  return Session(one).machine().to_string();
}

double host_us(const Case& one, int calls, int repeats) {
  using Clock = std::chrono::steady_clock;
  Session session(one);
  const Call& call = one.calls.at(0);
  session.run(call);  // makes what calls use
  record().on = false;
  double best = 0.0;
  for (int repeat = 0; repeat <= repeats; ++repeat) {  // the first one warms up
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < calls; ++i) session.run(call);
    const double us =
        std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / calls;
    if (repeat == 1 || (repeat > 1 && us < best)) best = us;
  }
  return best;
}

}  // namespace recorder
