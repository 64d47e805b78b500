// A CTA-level CUTLASS 2.x GEMM (cp.async pipeline, mma.sync, epilogue through shared memory) under
// a persistent kernel of our own, which takes tiles in the plan's order, stores each where the plan
// says and signals its chunk.
#include "kernels/gemm/gemm_sm80.h"

#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>

#include "kernels/signal/signal.h"
#include "plan/tile_order.h"

namespace overlap::kernels {
namespace {

using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

constexpr int kStages = 4;
constexpr int kElementsPerAccess = 8;  // 16 bytes

// The building blocks of one instance. LayoutB is that of weight^T, a [k, n] matrix: column-major
// where the weight is contiguous along k. Out-of-range loads are filled with zeros in every stage
// (kZfill), not merely skipped: a packed tile is stored whole, and its parts beyond m and n must
// hold zeros. ScaleType::Nothing: the epilogue only rounds.
template <class Element, class LayoutB>
using Blocks = typename cutlass::gemm::kernel::DefaultGemm<
    Element, RowMajor, kElementsPerAccess, Element, LayoutB, kElementsPerAccess, Element, RowMajor,
    float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<kGemmSm80TileM, kGemmSm80TileN, 32>,
    cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Element, kElementsPerAccess, float, float,
                                                 cutlass::epilogue::thread::ScaleType::Nothing>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, kStages, /*SplitKSerial=*/false,
    cutlass::arch::OpMultiplyAdd, cutlass::gemm::SharedMemoryClearOption::kZfill>::GemmKernel;

template <class Element, class LayoutB>
struct Instance {
  using Mma = typename Blocks<Element, LayoutB>::Mma;
  using Epilogue = typename Blocks<Element, LayoutB>::Epilogue;
  using OutputIterator = typename Epilogue::OutputTileIterator;
  using SharedStorage =
      typename Blocks<Element, LayoutB>::SharedStorage;  // a union of main loop and epilogue

  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;
  static_assert(sizeof(SharedStorage) == kGemmSm80SharedBytes);

  struct Params {
    int32_t m;  // rows of the input
    int32_t n;
    int32_t k;
    int32_t first_tile;
    int32_t end_tile;
    bool packed;
    int32_t terms;
    int32_t term;
    plan::RowMap rows;
    int64_t part_elements;  // of the output, from one part to the next
    int32_t output_rows;    // of a part
    Element* input;
    Element* own_input;
    Element* weight;
    Element* output;
    int32_t* counters;
    typename Mma::IteratorA::Params input_access;
    typename Mma::IteratorB::Params weight_access;
    typename OutputIterator::Params output_access;
    plan::TileOrder order;
  };
};

// Two CTAs on an SM hide each other's epilogue, and each has half of its registers.
template <class Element, class LayoutB>
__global__ void __launch_bounds__(Instance<Element, LayoutB>::kThreads, 2)
    gemm_sm80_kernel(const __grid_constant__ typename Instance<Element, LayoutB>::Params params) {
  using I = Instance<Element, LayoutB>;
  using Mma = typename I::Mma;
  using Epilogue = typename I::Epilogue;

  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename I::SharedStorage*>(shared_bytes);

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = cutlass::canonical_warp_idx_sync();
  const int lane = thread % 32;
  const int k_steps = (params.k + Mma::Shape::kK - 1) / Mma::Shape::kK;

  for (int32_t index = params.first_tile + static_cast<int32_t>(blockIdx.x);
       index < params.end_tile; index += static_cast<int32_t>(gridDim.x)) {
    const plan::TileCoord tile = plan::tile_coord(params.order, index);
    const plan::TileRowPlace place =
        plan::tile_row_place(params.order, params.rows, kGemmSm80TileM, tile.row);
    const int column = tile.column * kGemmSm80TileN;

    typename Mma::IteratorA input(params.input_access,
                                  place.own_input ? params.own_input : params.input,
                                  {place.own_input ? params.rows.part_rows : params.m, params.k},
                                  thread, {place.input_row, 0});
    typename Mma::IteratorB weight(params.weight_access, params.weight, {params.k, params.n},
                                   thread, {0, column});
    typename Mma::FragmentC accumulators;
    accumulators.clear();

    // The main loop drains its cp.async groups and passes a CTA barrier before it returns, so the
    // epilogue may take over the shared memory at once.
    Mma mma(shared.main_loop, thread, warp, lane);
    mma(k_steps, accumulators, input, weight, accumulators);

    // Row-major: the tile's place in the output, cut off at m and n. Packed: the tile's own slot,
    // stored whole.
    Element* base = params.output + place.output_part * params.part_elements;
    cutlass::MatrixCoord extent(params.output_rows, params.n);
    cutlass::MatrixCoord offset(place.output_row * kGemmSm80TileM, column);
    if (params.packed) {
      base += plan::packed_offset(plan::packed_slot(params.order, index, params.terms, params.term),
                                  kGemmSm80TileM, kGemmSm80TileN);
      extent = {kGemmSm80TileM, kGemmSm80TileN};
      offset = {0, 0};
    }
    typename I::OutputIterator output(params.output_access, base, extent, thread, offset);
    Epilogue epilogue(shared.epilogue, thread, warp, lane);
    epilogue(typename Epilogue::OutputOp({}), output, accumulators);

    // One barrier for two things: every thread has stored its part of the tile, and none still
    // reads the shared memory that the next tile's loads overwrite.
    __syncthreads();

    // [A] The barrier orders the CTA's stores before this thread's release, and a release is
    // cumulative: whoever acquires the counter sees the whole tile, without a fence of every
    // thread.
    if (thread == 0 && params.counters != nullptr) {
      signal_release_gpu(params.counters + plan::tile_chunk(params.order, index));
    }
  }
}

struct DeviceLimits {
  int sms = 0;
  int cta_shared = 0;  // bytes of shared memory that a CTA may have
  int sm_shared = 0;   // and all CTAs of an SM
};

// The current device's. Raises the kernel's limit of shared memory, the first time on each device; two threads that
// come first together do the same thing twice.
template <class Element, class LayoutB>
cudaError_t device_limits(DeviceLimits& limits) {
  constexpr int kCachedDevices = 64;
  static DeviceLimits cache[kCachedDevices];
  static std::atomic<bool> cached[kCachedDevices];

  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool caches = device < kCachedDevices;
  if (caches && cached[device].load(std::memory_order_acquire)) {
    limits = cache[device];
    return cudaSuccess;
  }
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(limits.sms, cudaDevAttrMultiProcessorCount);
  get(limits.cta_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(limits.sm_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(gemm_sm80_kernel<Element, LayoutB>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, limits.cta_shared);
  }
  static std::mutex writes;
  if (error == cudaSuccess && caches) {
    const std::lock_guard lock(writes);
    if (!cached[device].load(std::memory_order_relaxed)) {
      cache[device] = limits;
      cached[device].store(true, std::memory_order_release);
    }
  }
  return error;
}

struct LaunchSize {
  int grid = 0;
  int shared_bytes = 0;  // what the kernel needs and the padding, as far as the device has it
};

// Two CTAs on each SM, where both have room beside their padding. A grid that leaves SMs to others has one for each of
// its own: the hardware spreads CTAs over all SMs before it doubles up.
template <class Element, class LayoutB>
LaunchSize launch_size(const GemmParams& params, const DeviceLimits& limits) {
  constexpr int kNeeded = kGemmSm80SharedBytes;
  constexpr int kReserved = 1 << 10;  // by the hardware, for each CTA
  const int most = std::max(0, limits.cta_shared - kNeeded);
  const int bytes = kNeeded + std::clamp(params.smem_pad_bytes, 0, most);
  const bool two = params.ctas >= limits.sms && 2 * (bytes + kReserved) <= limits.sm_shared;
  const int tiles = params.tiles_end() - params.first_tile;
  return {.grid = std::min(two ? 2 * params.ctas : params.ctas, tiles), .shared_bytes = bytes};
}

const void* own_input(const GemmParams& params) {
  return params.gather ? params.gather->own_input : nullptr;
}

// Rows of a row-major output, or of a part of it.
int32_t output_rows(const GemmParams& params) {
  switch (params.rows.mode) {
    case plan::RowMap::Mode::kScatter:
      return params.order.tiles_m * kGemmSm80TileM;
    case plan::RowMap::Mode::kGather:
      return params.rows.part_rows * (params.rows.block_rows != 0 ? params.order.parts : 1);
    default:
      return static_cast<int32_t>(params.m);
  }
}

template <class Element, class LayoutB>
cudaError_t launch(const GemmParams& params, cudaStream_t stream) {
  using I = Instance<Element, LayoutB>;
  DeviceLimits limits;
  const cudaError_t error = device_limits<Element, LayoutB>(limits);
  if (error != cudaSuccess) return error;
  const auto [grid, shared_bytes] = launch_size<Element, LayoutB>(params, limits);
  const bool packed = params.layout == plan::Layout::kPacked;
  typename I::Params kernel_params{
      .m = static_cast<int32_t>(params.m),
      .n = static_cast<int32_t>(params.n),
      .k = static_cast<int32_t>(params.k),
      .first_tile = params.first_tile,
      .end_tile = params.tiles_end(),
      .packed = packed,
      .terms = params.terms,
      .term = params.term,
      .rows = params.rows,
      .part_elements = params.rows.part_rows * params.output_stride,
      .output_rows = output_rows(params),
      // CUTLASS's input iterators take pointers to non-const and only read.
      .input = static_cast<Element*>(const_cast<void*>(params.input)),
      .own_input = static_cast<Element*>(const_cast<void*>(own_input(params))),
      .weight = static_cast<Element*>(const_cast<void*>(params.weight)),
      .output = static_cast<Element*>(params.output),
      .counters = params.counters,
      .input_access = RowMajor(params.input_stride),
      .weight_access = LayoutB(params.weight_stride),
      .output_access = RowMajor(packed ? kGemmSm80TileN : params.output_stride),
      .order = params.order,
  };
  void* arguments[] = {&kernel_params};
  return cudaLaunchKernel(gemm_sm80_kernel<Element, LayoutB>, dim3(grid), dim3(I::kThreads),
                          arguments, static_cast<size_t>(shared_bytes), stream);
}

template <class Element, class LayoutB>
cudaError_t load() {
  DeviceLimits limits;
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, gemm_sm80_kernel<Element, LayoutB>);
  return error != cudaSuccess ? error : device_limits<Element, LayoutB>(limits);
}

// Calls `function.template operator()<Element, LayoutB>()` for the instance that `params` name.
template <class Function>
auto dispatch(const GemmParams& params, Function function) {
  if (params.dtype == plan::DType::kBFloat16) {
    return params.weight_k_contiguous
               ? function.template operator()<cutlass::bfloat16_t, ColumnMajor>()
               : function.template operator()<cutlass::bfloat16_t, RowMajor>();
  }
  return params.weight_k_contiguous ? function.template operator()<cutlass::half_t, ColumnMajor>()
                                    : function.template operator()<cutlass::half_t, RowMajor>();
}

bool aligned_pointer(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

bool aligned_count(int64_t elements) {
  return elements >= 0 && elements % kElementsPerAccess == 0;
}

// Coordinates are 32-bit in CUTLASS 2.x; a tile of slack keeps those of the last tile in range.
bool fits(int64_t extent) {
  return extent > 0 && extent <= std::numeric_limits<int32_t>::max() - 1024;
}

}  // namespace

bool gemm_sm80_supported(const GemmParams& params) {
  const bool packed = params.layout == plan::Layout::kPacked;
  return (params.dtype == plan::DType::kBFloat16 || params.dtype == plan::DType::kFloat16) &&
         fits(params.m) && fits(params.n) && fits(params.k) && aligned_pointer(params.input) &&
         aligned_pointer(own_input(params)) && aligned_pointer(params.weight) &&
         aligned_pointer(params.output) && aligned_count(params.k) &&
         aligned_count(params.input_stride) && aligned_count(params.weight_stride) &&
         (params.weight_k_contiguous || aligned_count(params.n)) &&
         (packed || (aligned_count(params.n) && aligned_count(params.output_stride)));
}

cudaError_t launch_gemm_sm80(const GemmParams& params, cudaStream_t stream) {
  const plan::TileOrder& order = params.order;
  const bool covers = (params.rows.mode == plan::RowMap::Mode::kGather ||
                       order.tiles_m * int64_t{kGemmSm80TileM} >= params.m) &&
                      order.tiles_n * int64_t{kGemmSm80TileN} >= params.n;
  if (!gemm_sm80_supported(params) || params.ctas <= 0 || !covers) {
    return cudaErrorInvalidValue;
  }
  return dispatch(params, [&]<class Element, class LayoutB>() {
    return launch<Element, LayoutB>(params, stream);
  });
}

cudaError_t load_gemm_sm80() {
  for (const cudaError_t error :
       {load<cutlass::bfloat16_t, ColumnMajor>(), load<cutlass::bfloat16_t, RowMajor>(),
        load<cutlass::half_t, ColumnMajor>(), load<cutlass::half_t, RowMajor>()}) {
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
