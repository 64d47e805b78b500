// One GEMM to check: its operands, its plan, its reference, and the two ways to run it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "checking.h"
#include "kernels/gemm/gemm.h"
#include "plan/gather_rounds.h"
#include "plan/templates.h"

namespace overlap::check {

inline constexpr int64_t kWaitNs = 10'000'000'000;

inline int sm_count() {
  int count = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// Leaves eight SMs to the checks beside the GEMM.
inline int gemm_ctas() {
  return std::max(2, sm_count() - 8);
}

// `total` in at most `parts` parts that grow from the first on, each a multiple of `unit`.
inline std::vector<int32_t> unequal_parts(int64_t total, int64_t parts, int64_t unit) {
  std::vector<int32_t> result;
  int64_t left = total;
  for (int64_t part = 1; left > 0; ++part) {
    const int64_t share =
        round_up(std::max<int64_t>(total * part / (parts * (parts + 1) / 2), 1), unit);
    result.push_back(static_cast<int32_t>(part >= parts ? left : std::min(share, left)));
    left -= result.back();
  }
  return result;
}

// The problem of operands of type In: with scales of rows, where these are fp8.
template <class In>
plan::Problem problem_of(plan::Op op, int64_t m, int64_t n, int64_t k, int32_t world) {
  plan::Problem problem{op, m, n, k, dtype_of<In>(), world};
  if (sizeof(In) == 1) {
    problem.recipe = plan::Recipe::kRow;
    problem.fast_accum = true;
  }
  return problem;
}

inline plan::Plan make_plan(plan::Kernel kernel, const plan::Problem& problem, plan::Layout layout,
                            int chunks, int band_rows) {
  const plan::KernelShape shape = plan::kernel_shape(kernel, false);
  const auto [m, n] = std::pair{problem.m, problem.n};
  const int64_t tiles_m = round_up(round_up(m, shape.tile_m) / shape.tile_m, shape.cluster_m);
  const int64_t tiles_n = round_up(n, shape.tile_n) / shape.tile_n;
  const plan::Plan plan =
      layout == plan::Layout::kPacked
          ? plan::make_packed(problem, kernel,
                              unequal_parts(tiles_m * tiles_n, chunks, shape.cluster_m),
                              band_rows * shape.cluster_m, {}, 0)
          : plan::make_row_panels(problem, kernel, unequal_parts(tiles_m, chunks, shape.cluster_m),
                                  band_rows * shape.cluster_m, {}, 0);
  plan::validate(plan);
  return plan;
}

// One GEMM: operands with gaps between their rows (poisoned, so that a read of a gap shows), its
// plan, its reference. In: of the operands, where that is fp8; the weight is then e4m3, and both have scales.
template <class T, class In = T>
class GemmCase {
 public:
  GemmCase(plan::Kernel kernel, int64_t m, int64_t n, int64_t k, bool k_contiguous,
           plan::Layout layout, int chunks, int band_rows, int64_t gap)
      : kernel_(kernel),
        plan_(make_plan(kernel, problem_of<In>(plan::Op::kGemmAllReduce, m, n, k, 2), layout,
                        chunks, band_rows)),
        operands_(m, n, k, k_contiguous, 0, gap),
        output_stride_(round_up(n, 8) + gap),
        reference_(m * n),
        output_(2 * kGuard + (layout == plan::Layout::kPacked ? plan::buffer_elements(plan_)
                                                              : m * output_stride_)),
        counters_(plan::kMaxChunks),
        tiles_taken_(2),
        expectation_{reference_.data(),
                     m,
                     n,
                     output_stride_,
                     layout == plan::Layout::kPacked,
                     plan_.tile_m,
                     plan_.tile_n,
                     plan::tile_order(plan_)} {
    operands_.put_into(params_);
    params_.output = output_.data() + kGuard;
    params_.output_stride = output_stride_;
    params_.layout = layout;
    params_.order = expectation_.order;
    params_.counters = counters_.data();
    tiles_taken_.zero(nullptr);
    params_.ending.tiles_taken = tiles_taken_.data();
    params_.ctas = gemm_ctas();
    name_ = plan_.to_string() + (operands_.kScaled ? ", fp8" : "") +
            (k_contiguous ? ", weight along k" : ", weight along n") + ", gap " +
            std::to_string(gap);
  }

  bool supported() const { return kernels::gemm_supported(kernel_, params_); }
  const std::string& name() const { return name_; }

  void fill_reference(const T* source = nullptr) {
    operands_.reference(0, params_.m, source, output_stride_, reference_.data());
  }

  // The same with a source, which the kernel adds.
  void check_source(int32_t ctas) {
    Buffer<T> source(params_.m * output_stride_);
    fill(source.data(), params_.m, params_.n, output_stride_, 3);
    fill_reference(source.data());
    const std::optional<kernels::GemmPeers> before = params_.peers;
    if (!params_.peers) params_.peers.emplace();
    params_.peers->sources[0] = source.data();
    if (!supported()) fail("%s: not supported with a source", name().c_str());
    check(ctas, 0, true);
    params_.peers = before;
    fill_reference();
  }

  // The same with a second output, without and with a source.
  void check_mirror(int32_t ctas) {
    Buffer<T> mirror(output_.elements());
    mirror_ = &mirror;
    kernels::GemmPeers& peers = params_.peers.emplace();
    peers.num_mirrors = 1;
    peers.mirrors[0] = mirror.data() + kGuard;
    if (!supported()) fail("%s: not supported with a second output", name().c_str());
    check(ctas, 0, true);
    check_source(ctas);
    params_.peers.reset();
    mirror_ = nullptr;
  }

  // The same in parts of the rows, each with an output of its own, here one after the other.
  void check_split(int32_t ctas, int32_t parts) {
    if (params_.m % parts != 0) return;
    const kernels::GemmParams whole = params_;
    const int64_t part_rows = params_.m / parts;
    const auto rows = static_cast<int32_t>((part_rows + plan_.tile_m - 1) / plan_.tile_m);
    const int32_t height = (rows + plan_.cluster_m - 1) / plan_.cluster_m * plan_.cluster_m;
    params_.rows.mode = plan::RowMap::Mode::kSplit;
    params_.rows.part_rows = static_cast<int32_t>(part_rows);
    params_.rows.part_tile_rows = height;
    params_.rows.first_part = parts - 1;
    params_.order = {};
    params_.order.tiles_m = height * parts;
    params_.order.tiles_n = whole.order.tiles_n;
    params_.order.parts = parts;
    params_.order.num_runs = 1;
    params_.order.runs[0] = {plan_.cluster_m, height * parts / plan_.cluster_m};
    params_.order.num_chunks = 1;
    params_.order.chunk_begin[1] = params_.order.num_tiles();
    kernels::GemmPeers& peers = params_.peers.emplace();
    peers.num_more_outputs = parts - 1;
    for (int32_t part = 1; part < parts; ++part) {
      peers.more_outputs[part - 1] = output_.data() + kGuard + part * part_rows * output_stride_;
    }
    if (!supported()) fail("%s: not supported in parts", name().c_str());
    check(ctas, 0, true);
    params_ = whole;
  }

  // All rows as they are in the input, and nothing around them.
  void expect_copy(const Buffer<In>& gathered) const {
    using Word = std::conditional_t<sizeof(In) == 1, uint8_t, uint16_t>;
    const auto words = [](const Buffer<In>& buffer) {
      return download(reinterpret_cast<const Word*>(buffer.data()), buffer.elements());
    };
    const Buffer<In> poisoned(kGuard);
    std::vector<Word> want = words(poisoned);
    const std::vector<Word> guard = want, rows = words(operands_.input);
    want.insert(want.end(), rows.begin(), rows.end());
    want.insert(want.end(), guard.begin(), guard.end());
    const std::vector<Word> got = words(gathered);
    const auto [at, where] = std::mismatch(got.begin(), got.end(), want.begin(), want.end());
    if (at != got.end() || where != want.end()) {
      fail("%s: element %lld of what was copied is %04x, expected %04x", name().c_str(),
           static_cast<long long>(at - got.begin()), *at, *where);
    }
  }

  // The same of rows that arrive in chunks, beside this rank's own: the launches of an all-gather's
  // GEMM, after each of which the rows of the next chunk come. Until then they are poison, and so is
  // the room for the own rows, as over peers. Kernels that copy collect all rows meanwhile. Or one launch,
  // which `awaits` the rows itself, and ends the call.
  void check_gather(int32_t ctas, int32_t parts, int32_t own, const std::vector<int32_t>& heights,
                    bool awaits = false) {
    const kernels::GemmParams whole = params_;
    kernels::GemmGather& gather = params_.gather.emplace();
    const plan::Problem problem =
        problem_of<In>(plan::Op::kAllGatherGemm, params_.m, params_.n, params_.k, parts);
    const plan::Plan plan = plan::make_row_panels(
        problem, kernel_, heights, std::max(plan::kBandRows, plan_.cluster_m), {}, 0);
    const int64_t part_rows = plan::part_rows(plan);
    Buffer<In> own_input(part_rows * operands_.input_stride),
        staged(params_.m * operands_.input_stride);
    Buffer<In> gathered(kGuard + params_.m * operands_.input_stride + kGuard);
    const bool copies = plan::can(kernel_, plan::kCopiesBeside);
    const auto copy_beside = [&](const In* from, int64_t to_row, int64_t rows, int32_t chunk) {
      if (!copies) return;
      gather.copies[gather.num_copies++] = {
          from, gathered.data() + kGuard + to_row * operands_.input_stride,
          rows * operands_.input_stride * static_cast<int64_t>(sizeof(In)), chunk};
    };
    const auto copy_rows = [&](In* to, int64_t from_row, int64_t rows, cudaStream_t stream) {
      const size_t bytes = static_cast<size_t>(rows * operands_.input_stride) * sizeof(In);
      CUDA_CHECK(cudaMemcpyAsync(to, operands_.input.data() + from_row * operands_.input_stride,
                                 bytes, cudaMemcpyDeviceToDevice, stream));
    };
    copy_rows(own_input.data(), own * part_rows, part_rows, nullptr);
    // The rows of a chunk: where they are staged, where they belong, how many.
    const auto for_each_part = [&](int32_t chunk, auto use) {
      const plan::Rows rows = plan::chunk_rows(plan, chunk);
      const int64_t count = rows.end - rows.begin;
      for (int32_t part = 0; part < parts; ++part) {
        if (part == own) continue;
        use(staged.data() + (parts * rows.begin + part * count) * operands_.input_stride,
            part * part_rows + rows.begin, count);
      }
    };
    const auto arrive = [&](int32_t chunk, cudaStream_t stream) {
      for_each_part(chunk,
                    [&](In* to, int64_t row, int64_t count) { copy_rows(to, row, count, stream); });
    };
    const auto copy_arrived = [&](int32_t chunk, int32_t awaited) {
      for_each_part(chunk, [&](In* from, int64_t row, int64_t count) {
        copy_beside(from, row, count, awaited);
      });
    };

    params_.input = staged.data();
    gather.own_input = own_input.data();
    params_.rows.mode = plan::RowMap::Mode::kGather;
    params_.rows.part_rows = static_cast<int32_t>(part_rows);
    params_.rows.own_part = own;
    params_.order = plan::gather_order(plan, params_.n);
    params_.counters = nullptr;
    if (!supported()) fail("%s: not supported as rows arrive", name().c_str());
    const auto arriving = plan::gather_arrivals(plan, params_.order.tiles_n);
    const auto launches = plan::gather_launches(arriving, plan.cluster_m, ctas, ctas + 4);
    output_.poison(nullptr);
    gathered.poison(nullptr);
    const int32_t chunks = static_cast<int32_t>(heights.size());
    if (awaits) {
      copy_beside(own_input.data(), own * part_rows, part_rows, 0);
      for (int32_t chunk = 0; chunk < chunks; ++chunk) copy_arrived(chunk, chunk + 1);
      params_.ctas = std::min(ctas, gemm_ctas());
      launch_awaiting(parts, own, chunks, arrive);
    }
    for (size_t i = 0; i < launches.size() && !awaits; ++i) {
      gather.num_copies = 0;
      if (i > 0) {
        arrive(static_cast<int32_t>(i) - 1, nullptr);
        copy_arrived(static_cast<int32_t>(i) - 1, 0);
      } else {
        copy_beside(own_input.data(), own * part_rows, part_rows, 0);
      }
      if (launches[i].tiles() == 0) fail("%s: an empty launch", name().c_str());
      params_.first_tile = launches[i].first_tile;
      params_.end_tile = launches[i].end_tile;
      params_.ctas = launches[i].at_once;
      CUDA_CHECK(kernels::launch_gemm(kernel_, params_, nullptr));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    expect(output_, expectation_,
           plan.to_string() + ", rank " + std::to_string(own) + ", " + std::to_string(ctas) +
               " CTAs, gap " + std::to_string(operands_.input_stride - params_.k) +
               (awaits ? ", awaited inside" : ""));
    if (copies) expect_copy(gathered);
    params_ = whole;
  }

  // The GEMM first, then chunk after chunk with its signals. `arrive` enqueues a chunk's rows.
  template <class Arrive>
  void launch_awaiting(int32_t parts, int32_t own, int32_t chunks, Arrive arrive) {
    constexpr uint64_t kCalls = 7;
    constexpr int32_t kStep = 2;
    constexpr int64_t kPauseUs = 50;
    constexpr int64_t kLateUs = 1000;
    Buffer<uint64_t> flags(parts), ended(1), calls(1);
    for (Buffer<uint64_t>* words : {&flags, &ended}) words->zero(nullptr);
    upload(calls.data(), {kCalls});
    kernels::PeerWaitParams& arrivals = params_.gather->arrivals;
    arrivals.flags = flags.data();
    arrivals.ranks = ((1u << parts) - 1) & ~(1u << own);
    arrivals.calls = calls.data();
    arrivals.tag = kTag;
    arrivals.step = kStep;
    arrivals.deadline_ns = kWaitNs;
    params_.ending.signal.calls = calls.data();
    params_.ending.signal.count = 1;
    params_.ending.signal.flags[0] = ended.data();
    const Stream main_stream, side_stream;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(kernels::launch_gemm(kernel_, params_, main_stream));
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      CUDA_CHECK(kernels::delay(kPauseUs, side_stream));
      arrive(chunk, side_stream);
      kernels::PeerSignalParams signal;
      for (int32_t part = 0; part < parts; ++part) {
        if (part != own) signal.flags[signal.count++] = flags.data() + part;
      }
      signal.calls = calls.data();
      signal.tag = kTag;
      signal.step = kStep + chunk;
      CUDA_CHECK(kernels::signal_peers_release_sys(signal, side_stream));
      // This rank's own rows are on their way when all others are there.
      if (chunk + 1 < chunks) continue;
      signal.count = 1;
      signal.flags[0] = flags.data() + own;
      CUDA_CHECK(kernels::delay(kLateUs, side_stream));
      CUDA_CHECK(kernels::signal_peers_release_sys(signal, side_stream));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    // All ranks have announced the last step, before the call was counted as ended.
    const std::string what = name_ + ", awaiting: ";
    expect_words(flags.data(), parts, kTag + kernels::peer_step_number(kCalls, kStep + chunks - 1),
                 what + "flags");
    expect_words(ended.data(), 1, kCalls + 1, what + "ended");
    expect_words(calls.data(), 1, kCalls + 1, what + "calls");
    expect_words(tiles_taken_.data(), 2, uint32_t{0}, what + "tiles taken");
  }

  static constexpr uint64_t kTag = uint64_t{11} << kernels::kCallTagShift;

  // Result, untouched bytes and counters of one run.
  void check(int32_t ctas, int32_t smem_pad_bytes, bool signals) {
    kernels::GemmParams params = params_;
    params.ctas = ctas;
    params.smem_pad_bytes = smem_pad_bytes;
    params.counters = signals ? counters_.data() : nullptr;
    output_.poison(nullptr);
    if (mirror_ != nullptr) mirror_->poison(nullptr);
    counters_.zero(nullptr);
    CUDA_CHECK(kernels::launch_gemm(kernel_, params, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    expect(output_, expectation_, name_ + ", " + std::to_string(ctas) + " CTAs");
    if (mirror_ != nullptr) expect(*mirror_, expectation_, name_ + ", the second output");
    const std::vector<int32_t> counters = download(counters_.data(), plan::kMaxChunks);
    for (int32_t c = 0; c < plan::kMaxChunks; ++c) {
      const int32_t want =
          signals && c < params.order.num_chunks ? plan::chunk_tiles(params.order, c) : 0;
      if (counters[c] != want) {
        fail("%s: the counter of chunk %d of %d is %d, expected %d", name_.c_str(), c,
             params.order.num_chunks, counters[c], want);
      }
    }
  }

  // Each chunk is checked on a second stream right after its signal, while the GEMM goes on.
  void race(int rounds) {
    cudaEvent_t fork, join;
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    const Stream main_stream(least), side_stream(greatest);
    CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    const Report report;
    Buffer<Mismatch> mismatch(1);
    mismatch.zero(nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());

    for (int round = 0; round < rounds; ++round) {
      output_.poison(main_stream);
      CUDA_CHECK(kernels::zero_counters(counters_.data(), plan::kMaxChunks, main_stream));
      CUDA_CHECK(cudaEventRecord(fork, main_stream));
      CUDA_CHECK(cudaStreamWaitEvent(side_stream, fork));
      CUDA_CHECK(kernels::launch_gemm(kernel_, params_, main_stream));
      for (int32_t c = 0; c < params_.order.num_chunks; ++c) {
        const kernels::WaitParams wait{counters_.data() + c, plan::chunk_tiles(params_.order, c),
                                       kWaitNs, c, report.get()};
        if (round % 3 == 1) CUDA_CHECK(kernels::delay(std::rand() % 20, side_stream));
        CUDA_CHECK(kernels::wait_counter(wait, side_stream));
        int64_t first = 0, last = 0;
        if (expectation_.packed) {
          const plan::Extent extent = plan::chunk_extent(plan_, c);
          first = extent.offset;
          last = extent.offset + extent.count;
        } else {
          const plan::Rows rows = plan::chunk_rows(plan_, c);
          first = rows.begin * output_stride_;
          last = rows.end * output_stride_;
        }
        launch_check(output_.data() + kGuard, first, last, expectation_, mismatch.data(),
                     side_stream);
      }
      CUDA_CHECK(cudaEventRecord(join, side_stream));
      CUDA_CHECK(cudaStreamWaitEvent(main_stream, join));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    if (report.failed()) {
      const kernels::WaitFailure wait = report.failure();
      fail("%s: waiting for chunk %d passed the deadline: expected %d, seen %d", name_.c_str(),
           wait.chunk, wait.expected, wait.seen);
    }
    expect_no_mismatch(mismatch, name_ + ", right behind the signal");
    CUDA_CHECK(cudaEventDestroy(fork));
    CUDA_CHECK(cudaEventDestroy(join));
  }

 private:
  plan::Kernel kernel_;
  plan::Plan plan_;
  TestOperands<T, In> operands_;
  int64_t output_stride_;
  Buffer<T> reference_, output_;
  Buffer<int32_t> counters_;
  Buffer<uint32_t> tiles_taken_;  // stays zero between launches
  Buffer<T>* mirror_ = nullptr;
  Expectation<T> expectation_;
  kernels::GemmParams params_;
  std::string name_;
};

}  // namespace overlap::check
