#include "kernels/peer/peer_low_latency.h"

#include "kernels/peer/peer_sum.cuh"
#include "kernels/peer/peer_unit.cuh"

namespace overlap::kernels {
namespace {

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

// The units of a call that this thread has.
struct Share {
  UnitCall call;
  int64_t units;
  int64_t begin;
  int64_t step;
};

// All ranks' terms of a unit, whose place in the buffers is `place`.
template <class T, bool kByPairs>
__device__ __forceinline__ Unit sum_unit(const PeerLowLatencyParams& params, const Share& share,
                                         int64_t unit, int64_t place) {
  constexpr int kVector = sizeof(uint32_t) / sizeof(T);
  const Unit own = own_unit(params, unit, share.call.number());
  Sum<T, kVector, kByPairs> sums[kUnitWords];
  for (int rank = 0; rank < params.ranks; ++rank) {
    Unit term = own;
    if (rank != params.rank) {
      term = wait_for_unit(share.call.from(rank), place, share.call.number(), rank, params);
    }
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) {
      sums[w].add(bits_as<Access<T, kVector>>(term.word[w]), rank);
    }
  }
  Unit result = {};
#pragma unroll
  for (int w = 0; w < kUnitWords; ++w) {
    const int64_t word = unit * kUnitWords + w;
    if (word < params.words) {
      result.word[w] = bits_as<uint32_t>(sums[w].rounded(params.bias, word, params.row_words));
    }
  }
  result.number = share.call.number();
  return result;
}

template <class T, bool kByPairs>
__device__ __forceinline__ void in_one_step(const PeerLowLatencyParams& params,
                                            const Share& share) {
  // All is on its way before anything is waited for.
#pragma unroll 2
  for (int64_t unit = share.begin; unit < share.units; unit += share.step) {
    const Unit own = own_unit(params, unit, share.call.number());
    for (int distance = 1; distance < params.ranks; ++distance) {
      store_unit(share.call.to((params.rank + distance) % params.ranks), unit, own);
    }
  }
  for (int64_t unit = share.begin; unit < share.units; unit += share.step) {
    write_unit(params, unit, sum_unit<T, kByPairs>(params, share, unit, unit));
  }
}

// A buffer holds the writer's terms of the owner's piece, and after them the sums of the writer's piece.
template <class T, bool kByPairs>
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
      store_unit(share.call.to(peer), place, own_unit(params, unit, share.call.number()));
    });
  }
  each_of(params.rank, [&](int64_t unit, int64_t place) {
    const Unit sums = sum_unit<T, kByPairs>(params, share, unit, place);
    for (int distance = 1; distance < params.ranks; ++distance) {
      store_unit(share.call.to((params.rank + distance) % params.ranks), piece + place, sums);
    }
    write_unit(params, unit, sums);
  });
  for (int distance = 1; distance < params.ranks; ++distance) {
    const int peer = (params.rank + params.ranks - distance) % params.ranks;
    each_of(peer, [&](int64_t unit, int64_t place) {
      write_unit(
          params, unit,
          wait_for_unit(share.call.from(peer), piece + place, share.call.number(), peer, params));
    });
  }
}

template <class T, bool kInPieces, bool kByPairs>
__global__ void __launch_bounds__(kThreads, 2)
    peer_low_latency_kernel(const __grid_constant__ PeerLowLatencyParams params) {
  wait_for_previous_kernel();
  const Share share{UnitCall(params), (params.words + kUnitWords - 1) / kUnitWords,
                    int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads};
  share.call.announce();
  if constexpr (kInPieces) {
    in_pieces<T, kByPairs>(params, share);
  } else {
    in_one_step<T, kByPairs>(params, share);
  }
  share.call.compare(share.call.look());
  share.call.count();
}

template <class T>
auto kernel_for(bool in_pieces, bool by_pairs) {
  if constexpr (sizeof(T) == 2) {
    if (by_pairs) {
      return in_pieces ? peer_low_latency_kernel<T, true, true>
                       : peer_low_latency_kernel<T, false, true>;
    }
  }
  return in_pieces ? peer_low_latency_kernel<T, true, false>
                   : peer_low_latency_kernel<T, false, false>;
}

template <class T>
cudaError_t launch_all_reduce(const PeerLowLatencyParams& params, cudaStream_t stream) {
  const int64_t bytes = params.words * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t units =
      params.in_pieces ? low_latency_piece(bytes, params.ranks) : low_latency_units(bytes);
  return launch(kernel_for<T>(params.in_pieces, params.by_pairs), blocks_for(units, kMaxPeerBlocks),
                params, stream);
}

template <class T>
cudaError_t load() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const bool in_pieces : {false, true}) {
    for (const bool by_pairs : {false, true}) {
      const cudaError_t error =
          cudaFuncGetAttributes(&attributes, kernel_for<T>(in_pieces, by_pairs));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
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
