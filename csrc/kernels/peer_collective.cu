#include "kernels/peer_collective.h"

#include <algorithm>

#include "kernels/element.cuh"
#include "kernels/peer_spin.cuh"

namespace overlap::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBatch = 4;  // loads of a thread that are in flight at a time
constexpr int kMaxCollectiveBlocks = kMaxPeerBlocks / 2;  // about one on each SM
constexpr int kHotPolls = 64;  // without a pause: what is waited for is on its way

// Kernels here are launched before the one in front has ended, and wait for its end themselves.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Past L1: another device wrote it.
__device__ __forceinline__ uint4 load_access(const void* base, int64_t index) {
  return __ldcg(static_cast<const uint4*>(base) + index);
}

// The same bits as another type.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

__device__ __forceinline__ void store_access(void* base, int64_t index, uint4 value) {
  static_cast<uint4*>(base)[index] = value;
}

// Calls `body(index, valid)` for kBatch indices at a time of those that this thread has of `count`.
template <class Body>
__device__ __forceinline__ void for_each_batch(int64_t count, Body body) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < count;
       first += kBatch * step) {
    body(first, step);
  }
}

__device__ __forceinline__ void copy_accesses(void* destination, const void* source,
                                              int64_t count) {
  for_each_batch(count, [&](int64_t first, int64_t step) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < count) values[i] = load_access(source, first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * step < count) store_access(destination, first + i * step, values[i]);
    }
  });
}

template <class T, int kVector>
__device__ __forceinline__ Access<T, kVector> add_bias(Access<T, kVector> value, const void* bias,
                                                       int64_t index, int64_t row_count) {
  if (bias == nullptr) return value;
  const auto term = static_cast<const Access<T, kVector>*>(bias)[index % row_count];
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    round_to(to_float(value.element[e]) + to_float(term.element[e]), value.element[e]);
  }
  return value;
}

template <class T, int kVector>
struct Sum {
  float value[kVector] = {};

  __device__ __forceinline__ void add(const Access<T, kVector>& term) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) value[e] += to_float(term.element[e]);
  }
  // Rounded before the bias is added, as the unfused composition rounds it.
  __device__ __forceinline__ Access<T, kVector> rounded(const void* bias, int64_t index,
                                                        int64_t row_count) const {
    Access<T, kVector> result;
#pragma unroll
    for (int e = 0; e < kVector; ++e) round_to(value[e], result.element[e]);
    return add_bias(result, bias, index, row_count);
  }
};

// The own piece, into the output and, if it is gathered, into the peers' memory.
template <class T, bool kForward>
__device__ __forceinline__ void reduce(const PeerCollectiveParams& params) {
  constexpr int kVector = kPeerAccessBytes / sizeof(T);
  const int64_t count = params.count[params.rank];
  void* const output =
      static_cast<uint4*>(params.output) + (kForward ? params.rank * params.stride : 0);
  for_each_batch(count, [&](int64_t first, int64_t step) {
    Sum<T, kVector> sums[kBatch];
    for (int rank = 0; rank < params.ranks; ++rank) {
      const void* source = rank == params.rank ? params.own : params.received[rank];
      uint4 terms[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * step < count) terms[i] = load_access(source, first + i * step);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * step < count) {
          sums[i].add(bits_as<Access<T, kVector>>(terms[i]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t index = first + i * step;
      if (index >= count) break;
      const auto value =
          bits_as<uint4>(sums[i].rounded(params.bias, params.first + index, params.row_count));
      store_access(output, index, value);
      if constexpr (kForward) {
        for (int distance = 1; distance < params.ranks; ++distance) {
          store_access(params.final_destination[(params.rank + distance) % params.ranks], index,
                       value);
        }
      }
    }
  });
}

template <bool kReduced>
__device__ __forceinline__ void gather(const PeerCollectiveParams& params) {
  for (int rank = 0; rank < params.ranks; ++rank) {
    const bool own = rank == params.rank;
    if (own && kReduced) continue;
    const void* source = own        ? params.own
                         : kReduced ? params.final_received[rank]
                                    : params.received[rank];
    void* destination = static_cast<uint4*>(params.output) + rank * params.stride;
    if (source != destination) copy_accesses(destination, source, params.count[rank]);
  }
}

// Waits, as one thread, until the flag has this value.
__device__ __forceinline__ void wait_for_flag(const uint64_t* flag, uint64_t value, int32_t peer,
                                              const PeerCollectiveParams& params) {
  uint64_t seen = 0;
  const auto reached = [&] {
    seen = load_acquire_sys(flag);  // [B]
    return seen >= value;
  };
  for (int poll = 0; poll < kHotPolls; ++poll) {
    if (reached()) return;
  }
  spin(params.deadline_ns, params.report, reached,
       [&] { write_report(params.report, missed_peer(params.chunk, peer, value, seen)); });
}

// A step's flag: announced behind what the block has done, and waited for from all peers.
__device__ __forceinline__ void meet(const PeerCollectiveParams& params, int step, int32_t flag,
                                     uint64_t number) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  __syncthreads();
  if (thread < params.ranks && thread != params.rank) {
    if (static_cast<int32_t>(blockIdx.x) == flag) {
      __threadfence_system();
      store_relaxed_sys(params.announce[step][thread] + flag, number);  // [B]
    }
    wait_for_flag(params.arrived[step] + thread * kMaxPeerBlocks + flag, number, thread, params);
  }
  __syncthreads();
}

template <class T, bool kReduces, bool kGathers>
__global__ void __launch_bounds__(kThreads, 1)
    peer_collective_kernel(const __grid_constant__ PeerCollectiveParams params) {
  wait_for_previous_kernel();
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto block = static_cast<int32_t>(blockIdx.x);
  const bool is_peer = thread < params.ranks && thread != params.rank;
  const uint64_t calls = *params.calls;
  const bool sends = params.send[(params.rank + 1) % params.ranks] != nullptr;
  if (sends) {
    // The peers have read what the call before left where this one writes.
    if (is_peer) wait_for_flag(params.ended + thread, calls, thread, params);
    __syncthreads();
    for (int distance = 1; distance < params.ranks; ++distance) {
      const int peer = (params.rank + distance) % params.ranks;
      copy_accesses(params.destination[peer], params.send[peer],
                    params.count[kReduces ? peer : params.rank]);
    }
  }
  // Where the kernel before sent, one flag stands for all blocks.
  meet(params, 0, sends ? block : 0, calls + 1);
  if constexpr (kReduces) {
    reduce<T, kGathers>(params);
    if constexpr (kGathers) meet(params, 1, block, calls + 1);
  }
  if constexpr (kGathers) gather<kReduces>(params);

  __syncthreads();
  __shared__ bool last;
  if (thread == 0) {
    __threadfence();
    last = atomicAdd(params.blocks_done, 1) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last) return;
  if (is_peer) {
    __threadfence_system();
    store_relaxed_sys(params.announce_end[thread], calls + 1);  // [B]
  }
  if (thread == params.rank) {
    *params.blocks_done = 0;
    *params.calls = calls + 1;
  }
}

// --- low latency ---------------------------------------------------------------------------------

constexpr int kUnitWords = 3;

// What travels as one access, which is stored and loaded at once.
struct Unit {
  uint32_t word[kUnitWords];
  uint32_t number;
};

__device__ __forceinline__ void store_unit(void* base, int64_t index, const Unit& unit) {
  const uint64_t low = uint64_t{unit.word[1]} << 32 | unit.word[0];
  const uint64_t high = uint64_t{unit.number} << 32 | unit.word[2];
  asm volatile(
      "{\n"
      ".reg .b128 unit;\n"
      "mov.b128 unit, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], unit;\n"
      "}" ::"l"(static_cast<Unit*>(base) + index),
      "l"(low), "l"(high)
      : "memory");
}

__device__ __forceinline__ Unit load_unit(const void* base, int64_t index) {
  uint64_t low = 0;
  uint64_t high = 0;
  asm volatile(
      "{\n"
      ".reg .b128 unit;\n"
      "ld.relaxed.sys.global.b128 unit, [%2];\n"
      "mov.b128 {%0, %1}, unit;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(static_cast<const Unit*>(base) + index)
      : "memory");
  return {
      {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
      static_cast<uint32_t>(high >> 32)};
}

// Polls until the unit has come.
__device__ __forceinline__ Unit wait_for_unit(const void* place, int64_t index, uint32_t number,
                                              int32_t peer, const PeerLowLatencyParams& params) {
  Unit unit;
  const auto reached = [&] {
    unit = load_unit(place, index);
    return unit.number == number;
  };
  for (int poll = 0; poll < kHotPolls; ++poll) {
    if (reached()) return unit;
  }
  spin(params.deadline_ns, params.report, reached,
       [&] { write_report(params.report, missed_peer(params.chunk, peer, number, unit.number)); });
  return unit;
}

__device__ __forceinline__ Unit own_unit(const PeerLowLatencyParams& params, int64_t index,
                                         uint32_t number) {
  Unit unit = {};
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) {
    const int64_t word = index * kUnitWords + w;
    if (word < params.words) unit.word[w] = static_cast<const uint32_t*>(params.own)[word];
  }
  unit.number = number;
  return unit;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    peer_low_latency_kernel(const __grid_constant__ PeerLowLatencyParams params) {
  constexpr int kVector = sizeof(uint32_t) / sizeof(T);
  wait_for_previous_kernel();
  const uint64_t calls = *params.calls / kMaxPeerBlocks;
  const auto number = static_cast<uint32_t>(calls + 1);
  const int64_t buffer = calls % 2 == 0 ? 0 : params.buffer_bytes;
  const int64_t units = (params.words + kUnitWords - 1) / kUnitWords;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t begin = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // All is on its way before anything is waited for.
#pragma unroll 2
  for (int64_t unit = begin; unit < units; unit += step) {
    const Unit own = own_unit(params, unit, number);
    for (int distance = 1; distance < params.ranks; ++distance) {
      const int peer = (params.rank + distance) % params.ranks;
      store_unit(static_cast<char*>(params.destination[peer]) + buffer, unit, own);
    }
  }
  for (int64_t unit = begin; unit < units; unit += step) {
    const Unit own = own_unit(params, unit, number);
    Sum<T, kVector> sums[kUnitWords];
    for (int rank = 0; rank < params.ranks; ++rank) {
      Unit term = own;
      if (rank != params.rank) {
        term = wait_for_unit(static_cast<const char*>(params.received[rank]) + buffer, unit, number,
                             rank, params);
      }
#pragma unroll
      for (int w = 0; w < kUnitWords; ++w) sums[w].add(bits_as<Access<T, kVector>>(term.word[w]));
    }
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) {
      const int64_t word = unit * kUnitWords + w;
      if (word < params.words) {
        static_cast<Access<T, kVector>*>(params.output)[word] =
            sums[w].rounded(params.bias, word, params.row_words);
      }
    }
  }
  // All blocks together count the call once; none reads the count after its own share.
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(params.calls),
              static_cast<unsigned long long>(kMaxPeerBlocks / gridDim.x));
  }
}

// --- host ----------------------------------------------------------------------------------------

// A power of two, so that blocks can count a call in equal shares.
int blocks_for(int64_t threads_wanted, int most) {
  int blocks = 1;
  while (blocks < most && blocks * int64_t{kThreads} < threads_wanted) blocks *= 2;
  return blocks;
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), int blocks, const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <class T>
cudaError_t launch_collective(const PeerCollectiveParams& params, cudaStream_t stream) {
  const int blocks = blocks_for(*std::max_element(params.count, params.count + params.ranks),
                                kMaxCollectiveBlocks);
  if (!params.reduces) {
    return launch(peer_collective_kernel<T, false, true>, blocks, params, stream);
  }
  return params.gathers ? launch(peer_collective_kernel<T, true, true>, blocks, params, stream)
                        : launch(peer_collective_kernel<T, true, false>, blocks, params, stream);
}

template <class T>
cudaError_t load() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const cudaError_t error :
       {cudaFuncGetAttributes(&attributes, peer_collective_kernel<T, true, true>),
        cudaFuncGetAttributes(&attributes, peer_collective_kernel<T, true, false>),
        cudaFuncGetAttributes(&attributes, peer_collective_kernel<T, false, true>),
        cudaFuncGetAttributes(&attributes, peer_low_latency_kernel<T>)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t peer_collective(const PeerCollectiveParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case plan::DType::kBFloat16:
      return launch_collective<__nv_bfloat16>(params, stream);
    case plan::DType::kFloat16:
      return launch_collective<__half>(params, stream);
    case plan::DType::kFloat32:
      return launch_collective<float>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t peer_all_reduce_low_latency(const PeerLowLatencyParams& params, cudaStream_t stream) {
  const int blocks = blocks_for((params.words + kUnitWords - 1) / kUnitWords, kMaxPeerBlocks);
  switch (params.dtype) {
    case plan::DType::kBFloat16:
      return launch(peer_low_latency_kernel<__nv_bfloat16>, blocks, params, stream);
    case plan::DType::kFloat16:
      return launch(peer_low_latency_kernel<__half>, blocks, params, stream);
    case plan::DType::kFloat32:
      return launch(peer_low_latency_kernel<float>, blocks, params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t load_peer_collective_kernels() {
  for (const cudaError_t error : {load<__nv_bfloat16>(), load<__half>(), load<float>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
