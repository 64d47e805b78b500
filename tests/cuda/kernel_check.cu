// Checks the CUDA kernels alone, without torch: results bit by bit, what must stay untouched,
// counters, and whether a chunk is complete at the moment it is signalled. The operands are small
// integers, so every sum is exact in fp32.
//
//   kernel_check [TARGET] [--repeat N] [--small]
//
// --repeat: rounds of the race check (0: none). --small: small shapes only, for compute-sanitizer.
// Ends with 1 and a message at the first mismatch. `list` names the targets that this build and this device have;
// `all`, the default, checks those.
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "checking.h"
#include "finish_case.h"
#include "gemm_case.h"
#include "kernels/chunk/reorder.h"
#include "kernels/gemm/gemm.h"
#include "kernels/peer/peer_signal.h"
#include "kernels/signal/signal.h"
#include "message_case.h"
#include "peer_case.h"
#include "plan/templates.h"
#include "ring_case.h"

namespace {

using namespace overlap;
using namespace overlap::check;
using plan::Kernel;
using plan::Layout;

struct Shape {
  int64_t m, n, k;
};

// Operands of type In: fp8's are contiguous along k only, in whole pieces of 16 bytes.
template <class In>
constexpr bool kIsFp8 = sizeof(In) == 1;
template <class In>
int64_t whole_k(int64_t k) {
  return kIsFp8<In> ? round_up(k, 16) : k;
}
template <class In>
std::vector<bool> weight_layouts() {
  return kIsFp8<In> ? std::vector<bool>{true} : std::vector<bool>{true, false};
}

template <class T, class In = T>
void check_gemm(Kernel kernel, bool small, int rounds, int& cases, int& races) {
  // Nice, thin, prime along m, barely above and below a tile, more K steps than stages and fewer;
  // odd n and k last.
  std::vector<Shape> shapes = {{256, 256, 64}, {1, 8, 8},       {7, 136, 24},   {127, 264, 72},
                               {129, 512, 40}, {257, 520, 328}, {131, 137, 64}, {131, 137, 67}};
  if (!small) {
    shapes.insert(shapes.end(), {{1024, 1024, 512},
                                 {1031, 2056, 1016},
                                 {509, 3000, 8},
                                 {2048, 2048, 4096},
                                 {3001, 264, 200}});
  }
  for (const Shape& shape : shapes) {
    for (const bool k_contiguous : weight_layouts<In>()) {
      for (const Layout layout : {Layout::kRowMajor, Layout::kPacked}) {
        for (const int chunks : {1, 4}) {
          const int64_t gap = chunks == 1 ? 0 : 16;
          GemmCase<T, In> gemm(kernel, shape.m, shape.n, whole_k<In>(shape.k), k_contiguous, layout,
                               chunks, chunks == 1 ? 8 : 2, gap);
          if (!gemm.supported()) {
            if (shape.n % 8 == 0 && (kIsFp8<In> || shape.k % 8 == 0))
              fail("%s: not supported", gemm.name().c_str());
            continue;
          }
          gemm.fill_reference();
          gemm.check(gemm_ctas(), 0, true);
          gemm.check(4, 16 * 1024, true);              // many tiles a CTA
          gemm.check(2 * sm_count(), 1 << 20, false);  // padding beyond what a CTA can have
          if (plan::is_pingpong(kernel) && layout == Layout::kRowMajor) {
            gemm.check_source(gemm_ctas());
            gemm.check_source(4);
            gemm.check_mirror(gemm_ctas());
            for (const int32_t parts : {2, 3}) gemm.check_split(gemm_ctas(), parts);
          }
          ++cases;
        }
      }
    }
  }
  if (rounds == 0) return;
  const Shape shape = small ? Shape{300, 520, 64} : Shape{4000, 4096, 512};
  for (const bool k_contiguous : weight_layouts<In>()) {
    for (const Layout layout : {Layout::kRowMajor, Layout::kPacked}) {
      for (const int band_rows : {1, 4}) {
        GemmCase<T, In> gemm(kernel, shape.m, shape.n, shape.k, k_contiguous, layout, 7, band_rows,
                             8);
        gemm.fill_reference();
        gemm.check(gemm_ctas(), 0, true);  // also loads every kernel before anything waits
        gemm.race(rounds);
        races += rounds;
      }
    }
  }
}

// Rows of which one part is there and the others arrive in chunks: whole tiles and ragged ends, more
// chunks and fewer, own parts in front, in between and behind; on a few CTAs, so that launches take
// some rounds, and on most, where they take what is there.
template <class T, class In = T>
void check_gathers(Kernel kernel, bool small, int& cases) {
  struct Gather {
    int32_t parts;
    int64_t part_rows, n, k;
    int64_t chunks;
  };
  std::vector<Gather> gathers = {
      {2, 512, 256, 64, 2}, {2, 40, 136, 24, 1}, {3, 300, 264, 72, 2}, {3, 1157, 520, 40, 3}};
  if (!small) {
    gathers.insert(gathers.end(), {{4, 1024, 1032, 328, 4},
                                   {2, 4000, 2048, 512, 3},
                                   {5, 700, 3000, 200, 3},
                                   {2, 2 * plan::kMaxChunks * 128, 264, 16, plan::kMaxChunks}});
  }
  const plan::KernelShape shape = plan::kernel_shape(kernel, false);
  for (const Gather& gather : gathers) {
    const int64_t tile_rows =
        round_up(round_up(gather.part_rows, shape.tile_m) / shape.tile_m, shape.cluster_m);
    const bool many = gather.chunks == plan::kMaxChunks;
    const std::vector<int32_t> heights =
        many ? std::vector<int32_t>(plan::kMaxChunks,
                                    static_cast<int32_t>(tile_rows / gather.chunks))
             : unequal_parts(tile_rows, gather.chunks, shape.cluster_m);
    for (const bool k_contiguous : weight_layouts<In>()) {
      for (const int64_t gap : {0, 16}) {
        GemmCase<T, In> gemm(kernel, gather.parts * gather.part_rows, gather.n,
                             whole_k<In>(gather.k), k_contiguous, Layout::kRowMajor, 1, 8, gap);
        gemm.fill_reference();
        for (const int32_t own : {0, 1, gather.parts - 1}) {
          for (const int32_t ctas : {4, 15, gemm_ctas()}) {
            gemm.check_gather(ctas, gather.parts, own, heights);
            ++cases;
            const size_t runs = 1 + heights.size() * static_cast<size_t>(gather.parts - 1);
            if (!plan::can(kernel, plan::kCopiesBeside) || runs > plan::kMaxCopyRuns) continue;
            gemm.check_gather(ctas, gather.parts, own, heights, true);
            ++cases;
          }
        }
      }
    }
  }
}

// pack, unpack with and without bias, add_terms; 16-byte and element paths (odd n, pointers off by
// one element).
template <class T>
void check_reorder(Kernel kernel, int64_t m, int64_t n, int64_t shift, int32_t ctas) {
  // The tile order does not depend on the dtype, and kernels' plans are of 16-bit types.
  const plan::Problem problem = problem_of<__nv_bfloat16>(plan::Op::kGemmAllReduce, m, n, 64, 2);
  const plan::Plan plan = make_plan(kernel, problem, Layout::kPacked, 3, 2);
  const std::string name = plan.to_string() + ", reorder of " + std::to_string(sizeof(T)) +
                           "-byte elements, shift " + std::to_string(shift) + ", " +
                           std::to_string(ctas) + " CTAs";
  Buffer<T> source(m * n + shift), bias(n + shift), sum(m * n);
  fill(source.data() + shift, m, n, n, 3, 1.0f / 3);
  fill(bias.data() + shift, 1, n, n, 4, 1.0f / 7);

  kernels::ReorderParams params;
  params.m = m;
  params.n = n;
  params.tile_m = plan.tile_m;
  params.tile_n = plan.tile_n;
  params.dtype = dtype_of<T>();
  params.order = plan::tile_order(plan);
  params.ctas = ctas;
  Buffer<T> packed(2 * kGuard + plan::buffer_elements(plan));
  params.packed = packed.data() + kGuard;
  params.row_major = source.data() + shift;
  for (params.chunk = params.order.num_chunks - 1; params.chunk >= 0; --params.chunk) {
    CUDA_CHECK(kernels::pack_chunk(params, nullptr));
  }
  const T* reference = source.data() + shift;
  expect(packed, {reference, m, n, 0, true, plan.tile_m, plan.tile_n, params.order},
         name + ", pack");

  const Expectation<T> rows{sum.data(), m, n, n, false, 1, 1, {}};
  for (const T* added :
       {static_cast<const T*>(nullptr), static_cast<const T*>(bias.data() + shift)}) {
    reference_bias_kernel<<<256, 256>>>(reference, added, sum.data(), m, n);
    CUDA_CHECK(cudaGetLastError());
    // A guard of kGuard + shift elements in front, so that the output is as misaligned as the
    // input.
    Buffer<T> unpacked(2 * kGuard + m * n + shift), biased(2 * kGuard + m * n + shift);
    params.row_major = unpacked.data() + kGuard + shift;
    params.bias = added;
    for (params.chunk = 0; params.chunk < params.order.num_chunks; ++params.chunk) {
      CUDA_CHECK(kernels::unpack_chunk(params, nullptr));
    }
    kernels::TermsParams add{.rows = m,
                             .n = n,
                             .dtype = dtype_of<T>(),
                             .source = reference,
                             .destination = biased.data() + kGuard + shift,
                             .bias = added,
                             .ctas = ctas};
    CUDA_CHECK(kernels::add_terms(add, nullptr));
    for (const Buffer<T>* result : {&unpacked, &biased}) {
      expect(*result, rows,
             name + (result == &biased ? ", add_terms" : ", unpack") + (added ? " with bias" : ""),
             kGuard + shift);
    }
    // Twice the same term, exactly.
    Buffer<T> twice(m * n + shift), doubled(2 * kGuard + m * n + shift);
    fill(twice.data() + shift, m, n, n, 3, 2.0f / 3);
    reference_bias_kernel<<<256, 256>>>(twice.data() + shift, added, sum.data(), m, n);
    CUDA_CHECK(cudaGetLastError());
    kernels::TermsParams terms = add;
    terms.terms = 2;
    terms.destination = doubled.data() + kGuard + shift;
    CUDA_CHECK(kernels::add_terms(terms, nullptr));
    expect(doubled, rows, name + ", add_terms of two" + (added ? " with bias" : ""),
           kGuard + shift);
    reference_bias_kernel<<<256, 256>>>(reference, added, sum.data(), m, n);
    if (added != nullptr) {  // last use of the source: in place
      add.destination = source.data() + shift;
      CUDA_CHECK(kernels::add_terms(add, nullptr));
      expect_elements(reference, 0, m * n, rows, name + ", add_terms in place");
    }
  }
}

void check_reorder_all(bool small) {
  std::vector<Shape> shapes = {{1, 1, 0}, {130, 264, 0}, {257, 131, 0}, {300, 520, 0}};
  if (!small) shapes.insert(shapes.end(), {{1031, 4096, 0}, {2048, 2051, 0}, {5, 7168, 0}});
  int cases = 0;
  for (const Kernel kernel : {Kernel::kSm80, Kernel::kSm90Pingpong, Kernel::kSm90PingpongWide,
                              Kernel::kSm90Cooperative}) {
    for (const Shape& shape : shapes) {
      for (const int64_t shift : {0, 1}) {
        const int32_t ctas = shift == 0 ? 0 : 5;
        check_reorder<__nv_bfloat16>(kernel, shape.m, shape.n, shift, ctas);
        check_reorder<__half>(kernel, shape.m, shape.n, shift, ctas);
        check_reorder<float>(kernel, shape.m, shape.n, shift, ctas);
        cases += 3;
      }
    }
  }
  std::printf("reorder: %d cases good\n", cases);
}

double milliseconds(cudaStream_t stream, auto enqueue) {
  CUDA_CHECK(cudaStreamSynchronize(stream));
  const auto start = std::chrono::steady_clock::now();
  enqueue();
  CUDA_CHECK(cudaStreamSynchronize(stream));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// A wait that is met ends at once and silently; one that is not ends at its deadline and reports;
// the first report stays.
void check_signal() {
  const Stream stream;
  Buffer<int32_t> counter(1);
  upload(counter.data(), {3});
  Report report;

  kernels::WaitParams wait{counter.data(), 3, kWaitNs, 6, report.get()};
  const double met = milliseconds(stream, [&] { CUDA_CHECK(kernels::wait_counter(wait, stream)); });
  if (report.failed() || met > 1000) {
    fail("signal: a met wait took %g ms, failure = %llx", met,
         static_cast<unsigned long long>(report.get()->failure));
  }

  wait.expected = 4;
  wait.deadline_ns = 50'000'000;
  const double missed =
      milliseconds(stream, [&] { CUDA_CHECK(kernels::wait_counter(wait, stream)); });
  const auto expect_report = [&] {
    const kernels::WaitFailure wait = report.failure();
    if (wait.chunk != 6 || wait.expected != 4 || wait.seen != 3) {
      fail("signal: the report says chunk %d, expected %d, seen %d; it should say 6, 4, 3",
           wait.chunk, wait.expected, wait.seen);
    }
  };
  expect_report();
  if (missed < 49 || missed > 1000)
    fail("signal: a wait with a deadline of 50 ms took %g ms", missed);

  wait.chunk = 7;
  wait.deadline_ns = kWaitNs;  // a failed report cuts later waits short
  const double later =
      milliseconds(stream, [&] { CUDA_CHECK(kernels::wait_counter(wait, stream)); });
  expect_report();
  if (later > 1000) fail("signal: a wait after a failed one took %g ms", later);

  // Zeroes what the kernel in front has left, and no more.
  Buffer<int32_t> counters(100);
  CUDA_CHECK(kernels::delay(500, stream));
  counters.poison(stream);
  CUDA_CHECK(kernels::zero_counters(counters.data(), 70, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  expect_words(counters.data(), 70, 0, "signal: counters");
  expect_words(counters.data() + 70, 30, -1, "signal: other counters");

  // The same with flags that peers would write: here, this device's own.
  Buffer<uint64_t> flags(kernels::kMaxPeers);
  flags.zero(nullptr);
  report.clear();
  Buffer<uint64_t> calls(1);
  upload(calls.data(), {uint64_t{7}});
  kernels::PeerSignalParams signal;
  signal.count = 2;
  signal.flags[0] = flags.data() + 1;
  signal.flags[1] = flags.data() + 5;
  signal.calls = calls.data();
  signal.tag = uint64_t{9} << kernels::kCallTagShift;
  signal.step = 2;
  kernels::PeerWaitParams peers;
  peers.flags = flags.data();
  peers.ranks = 1u << 1 | 1u << 5;
  peers.calls = calls.data();
  peers.tag = signal.tag;
  peers.step = 2;
  peers.deadline_ns = kWaitNs;
  peers.chunk = 3;
  peers.report = report.get();
  CUDA_CHECK(kernels::signal_peers_release_sys(signal, stream));
  CUDA_CHECK(kernels::wait_peers_acquire_sys(peers, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  if (report.failed()) fail("signal: a met wait for peers failed");
  // The same step of another call, by a larger and by a smaller tag.
  for (const uint64_t other : {8, 10}) {
    kernels::PeerWaitParams wait = peers;
    wait.tag = other << kernels::kCallTagShift;
    wait.deadline_ns = 50'000'000;
    CUDA_CHECK(kernels::wait_peers_acquire_sys(wait, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (report.failure().peer != 1) {
      fail("signal: another call's step was taken for this one's");
    }
    report.clear();
  }
  peers.ranks |= 1u << 6;
  peers.deadline_ns = 50'000'000;
  CUDA_CHECK(kernels::wait_peers_acquire_sys(peers, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  const kernels::WaitFailure failure = report.failure();
  // The third step after seven calls of 256 steps each.
  if (failure.chunk != 3 || failure.peer != 6 || failure.expected != 7 * 256 + 3 ||
      failure.seen != 0) {
    fail(
        "signal: the report says chunk %d, peer %d, expected %d, seen %d; it should say 3, 6, "
        "1795, 0",
        failure.chunk, failure.peer, failure.expected, failure.seen);
  }
  // Whoever synchronizes after a wait that failed sees its report at once.
  constexpr int kFailures = 200;
  peers.deadline_ns = 1'000'000;
  for (int repeat = 0; repeat < kFailures; ++repeat) {
    report.clear();
    CUDA_CHECK(kernels::wait_peers_acquire_sys(peers, stream));
    CUDA_CHECK(cudaDeviceSynchronize());
    if (!report.failed()) {
      fail("signal: no report right behind a synchronization, repeat %d", repeat);
    }
  }
  signal.ends_call = true;
  CUDA_CHECK(kernels::signal_peers_release_sys(signal, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  expect_words(calls.data(), 1, uint64_t{8}, "signal: calls after a call's end");
  expect_words(flags.data() + 5, 1, uint64_t{8}, "signal: a flag after a call's end");

  const double held = milliseconds(stream, [&] { CUDA_CHECK(kernels::delay(20'000, stream)); });
  if (held < 19.5 || held > 1000) fail("signal: a delay of 20 ms took %g ms", held);
  std::printf("signal: good (deadline of 50 ms: %.1f ms, delay of 20 ms: %.1f ms)\n", missed, held);
}

bool available(Kernel kernel, int major) {
  kernels::GemmParams params;
  params.m = params.n = params.k = 256;
  params.input_stride = params.weight_stride = params.output_stride = 256;
  const plan::KernelTraits& own = plan::traits(kernel);
  return own.least_arch <= 10 * major && 10 * major <= own.most_arch &&
         kernels::gemm_supported(kernel, params);
}

// The targets, and the kernels that each one needs.
struct Target {
  const char* name;
  std::vector<Kernel> kernels;
  std::function<void()> check;
};

std::vector<Target> targets(bool small, int rounds) {
  const std::vector<Kernel> pingpong = {Kernel::kSm90Pingpong, Kernel::kSm90PingpongWide};
  std::vector<Target> all = {
      {"signal", {}, check_signal},
      {"peers", {}, check_peers},
      {"finish", {}, check_finish},
      {"reorder", {}, [=] { check_reorder_all(small); }},
      {"ring", {Kernel::kSm90Pingpong}, [=] { check_ring(Kernel::kSm90Pingpong, small); }},
      {"ringwide",
       {Kernel::kSm90PingpongWide},
       [=] { check_ring(Kernel::kSm90PingpongWide, small); }},
      {"owners", {Kernel::kSm90Pingpong}, [=] { check_ring(Kernel::kSm90Pingpong, small, true); }},
      {"messages", pingpong,
       [=] {
         for (const Kernel kernel : pingpong) check_messages(kernel, small, rounds);
       }},
      {"fp8", pingpong,
       [=] {
         int cases = 0, races = 0;
         for (const Kernel kernel : pingpong) {
           check_gemm<__nv_bfloat16, __nv_fp8_e4m3>(kernel, small, rounds, cases, races);
           check_gemm<__nv_bfloat16, __nv_fp8_e5m2>(kernel, small, rounds, cases, races);
           check_gathers<__nv_bfloat16, __nv_fp8_e4m3>(kernel, small, cases);
         }
         std::printf("fp8: %d cases and %d race rounds good\n", cases, races);
       }},
  };
  for (const auto& [name, kernel] :
       {std::pair{"sm80", Kernel::kSm80}, std::pair{"sm90pp", Kernel::kSm90Pingpong},
        std::pair{"sm90ppwide", Kernel::kSm90PingpongWide},
        std::pair{"sm90coop", Kernel::kSm90Cooperative}}) {
    all.push_back({name, {kernel}, [=, name = name, kernel = kernel] {
                     int cases = 0, races = 0;
                     check_gemm<__nv_bfloat16>(kernel, small, rounds, cases, races);
                     check_gemm<__half>(kernel, small, rounds, cases, races);
                     check_gathers<__nv_bfloat16>(kernel, small, cases);
                     check_gathers<__half>(kernel, small, cases);
                     std::printf("%s: %d cases and %d race rounds good\n", name, cases, races);
                   }});
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  std::string wanted = "all";
  int rounds = 20;
  bool small = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--small") == 0) {
      small = true;
    } else if (std::strcmp(argv[i], "--repeat") == 0 && i + 1 < argc) {
      rounds = std::atoi(argv[++i]);
    } else {
      wanted = argv[i];
    }
  }
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CUDA_CHECK(kernels::load_kernels());

  bool known = wanted == "all" || wanted == "list";
  std::string names;
  for (const Target& target : targets(small, rounds)) {
    names += std::string(target.name) + ", ";
    known = known || wanted == target.name;
    const bool here = std::all_of(target.kernels.begin(), target.kernels.end(),
                                  [&](Kernel kernel) { return available(kernel, major); });
    if (wanted == "list" && here) std::puts(target.name);
    if (wanted != "all" && wanted != target.name) continue;
    if (here) {
      target.check();
    } else if (wanted == "all") {
      std::printf("%s: skipped, this build or this device does not have the kernel\n", target.name);
    } else {
      fail("%s: this build or this device does not have the kernel", target.name);
    }
  }
  if (!known) fail("unknown target '%s': take %slist or all", wanted.c_str(), names.c_str());
  return 0;
}
