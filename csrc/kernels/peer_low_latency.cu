#include "kernels/peer_low_latency.h"

#include "kernels/peer_block.cuh"
#include "kernels/peer_sum.cuh"

namespace overlap::kernels {
namespace {

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

template <class T>
cudaError_t load() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  return cudaFuncGetAttributes(&attributes, peer_low_latency_kernel<T>);
}

}  // namespace

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

cudaError_t load_peer_low_latency_kernels() {
  for (const cudaError_t error : {load<__nv_bfloat16>(), load<__half>(), load<float>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
