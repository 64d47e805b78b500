#include "kernels/peer/peer_low_latency.h"

#include "kernels/peer/peer_block.cuh"
#include "kernels/peer/peer_sum.cuh"

namespace overlap::kernels {
namespace {

constexpr int kUnitWords = kUnitBytes / sizeof(uint32_t);

// A unit is stored and loaded as one access.
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

__device__ __forceinline__ void write_unit(const PeerLowLatencyParams& params, int64_t index,
                                           const Unit& unit) {
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) {
    const int64_t word = index * kUnitWords + w;
    if (word < params.words) static_cast<uint32_t*>(params.output)[word] = unit.word[w];
  }
}

// This call's buffers, and the units of it that this thread has.
struct Share {
  uint32_t number;
  int64_t buffer;
  int64_t units;
  int64_t begin;
  int64_t step;

  __device__ __forceinline__ char* to(const PeerLowLatencyParams& params, int rank) const {
    return static_cast<char*>(params.destination[rank]) + buffer;
  }
  __device__ __forceinline__ const char* from(const PeerLowLatencyParams& params, int rank) const {
    return static_cast<const char*>(params.received[rank]) + buffer;
  }
};

// All ranks' terms of a unit, whose place in the buffers is `place`.
template <class T>
__device__ __forceinline__ Unit sum_unit(const PeerLowLatencyParams& params, const Share& share,
                                         int64_t unit, int64_t place) {
  constexpr int kVector = sizeof(uint32_t) / sizeof(T);
  const Unit own = own_unit(params, unit, share.number);
  Sum<T, kVector> sums[kUnitWords];
  for (int rank = 0; rank < params.ranks; ++rank) {
    Unit term = own;
    if (rank != params.rank) {
      term = wait_for_unit(share.from(params, rank), place, share.number, rank, params);
    }
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) sums[w].add(bits_as<Access<T, kVector>>(term.word[w]));
  }
  Unit result = {};
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) {
    const int64_t word = unit * kUnitWords + w;
    if (word < params.words) {
      result.word[w] = bits_as<uint32_t>(sums[w].rounded(params.bias, word, params.row_words));
    }
  }
  result.number = share.number;
  return result;
}

template <class T>
__device__ __forceinline__ void in_one_step(const PeerLowLatencyParams& params,
                                            const Share& share) {
  // All is on its way before anything is waited for.
#pragma unroll 2
  for (int64_t unit = share.begin; unit < share.units; unit += share.step) {
    const Unit own = own_unit(params, unit, share.number);
    for (int distance = 1; distance < params.ranks; ++distance) {
      store_unit(share.to(params, (params.rank + distance) % params.ranks), unit, own);
    }
  }
  for (int64_t unit = share.begin; unit < share.units; unit += share.step) {
    write_unit(params, unit, sum_unit<T>(params, share, unit, unit));
  }
}

// A buffer holds the writer's terms of the owner's piece, and after them the sums of the writer's piece.
template <class T>
__device__ __forceinline__ void in_pieces(const PeerLowLatencyParams& params, const Share& share) {
  const int64_t piece = (share.units + params.ranks - 1) / params.ranks;
  const auto each_of = [&](int rank, auto body) {
    const int64_t first = rank * piece;
    const int64_t count = share.units - first < piece ? share.units - first : piece;
    for (int64_t place = share.begin; place < count; place += share.step) {
      body(first + place, place);
    }
  };
  for (int distance = 1; distance < params.ranks; ++distance) {
    const int peer = (params.rank + distance) % params.ranks;
    each_of(peer, [&](int64_t unit, int64_t place) {
      store_unit(share.to(params, peer), place, own_unit(params, unit, share.number));
    });
  }
  each_of(params.rank, [&](int64_t unit, int64_t place) {
    const Unit sums = sum_unit<T>(params, share, unit, place);
    for (int distance = 1; distance < params.ranks; ++distance) {
      store_unit(share.to(params, (params.rank + distance) % params.ranks), piece + place, sums);
    }
    write_unit(params, unit, sums);
  });
  for (int distance = 1; distance < params.ranks; ++distance) {
    const int peer = (params.rank + params.ranks - distance) % params.ranks;
    each_of(peer, [&](int64_t unit, int64_t place) {
      write_unit(
          params, unit,
          wait_for_unit(share.from(params, peer), piece + place, share.number, peer, params));
    });
  }
}

__device__ __forceinline__ void wait_for_peer(const PeerLowLatencyParams& params,
                                              const uint64_t* flag, uint64_t number, int32_t peer) {
  uint64_t seen = 0;
  spin(
      params.deadline_ns, params.report,
      [&] {
        seen = load_acquire_sys(flag);
        return has_reached(seen, number);
      },
      [&] { write_report(params.report, missed_peer(params.chunk, peer, number, seen)); });
}

template <class T, bool kInPieces>
__global__ void __launch_bounds__(kThreads, 2)
    peer_low_latency_kernel(const __grid_constant__ PeerLowLatencyParams params) {
  wait_for_previous_kernel();
  const uint64_t calls = *params.calls / kMaxPeerBlocks;
  const auto peer = static_cast<int32_t>(threadIdx.x);
  const bool compares = blockIdx.x == 0 && peer < params.ranks && peer != params.rank;
  const uint64_t number = params.tag + calls + 1;
  if (compares) store_relaxed_sys(params.announce[peer] + calls % 2 * kMaxPeers, number);
  const Share share{static_cast<uint32_t>(calls + 1), calls % 2 == 0 ? 0 : params.buffer_bytes,
                    (params.words + kUnitWords - 1) / kUnitWords,
                    int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads};
  if constexpr (kInPieces) {
    in_pieces<T>(params, share);
  } else {
    in_one_step<T>(params, share);
  }
  // The peers' calls are compared before anybody reads the output.
  if (compares) {
    wait_for_peer(params, params.arrived + calls % 2 * kMaxPeers + peer, number, peer);
  }
  // All blocks together count the call once; none reads the count after its own share.
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(params.calls),
              static_cast<unsigned long long>(kMaxPeerBlocks / gridDim.x));
  }
}

template <class T>
cudaError_t launch_all_reduce(const PeerLowLatencyParams& params, cudaStream_t stream) {
  const int64_t bytes = params.words * static_cast<int64_t>(sizeof(uint32_t));
  if (params.in_pieces) {
    return launch(peer_low_latency_kernel<T, true>,
                  blocks_for(low_latency_piece(bytes, params.ranks), kMaxPeerBlocks), params,
                  stream);
  }
  return launch(peer_low_latency_kernel<T, false>,
                blocks_for(low_latency_units(bytes), kMaxPeerBlocks), params, stream);
}

template <class T>
cudaError_t load() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  const cudaError_t error = cudaFuncGetAttributes(&attributes, peer_low_latency_kernel<T, false>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, peer_low_latency_kernel<T, true>);
}

}  // namespace

cudaError_t peer_all_reduce_low_latency(const PeerLowLatencyParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case plan::DType::kBFloat16:
      return launch_all_reduce<__nv_bfloat16>(params, stream);
    case plan::DType::kFloat16:
      return launch_all_reduce<__half>(params, stream);
    case plan::DType::kFloat32:
      return launch_all_reduce<float>(params, stream);
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
