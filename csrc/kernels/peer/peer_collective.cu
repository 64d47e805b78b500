#include "kernels/peer/peer_collective.h"

#include <algorithm>

#include "kernels/peer/peer_block.cuh"
#include "kernels/peer/peer_sum.cuh"

namespace overlap::kernels {
namespace {

// The own piece, into the output and, if it is gathered, into the peers' memory.
template <class T, bool kForward, bool kByPairs>
__device__ __forceinline__ void reduce(const PeerCollectiveParams& params) {
  constexpr int kVector = kPeerAccessBytes / sizeof(T);
  const int64_t count = params.count[params.rank];
  void* const output =
      static_cast<uint4*>(params.output) + (kForward ? params.rank * params.stride : 0);
  for_each_batch(count, [&](int64_t first, int64_t step) {
    Sum<T, kVector, kByPairs> sums[kBatch];
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
          sums[i].add(bits_as<Access<T, kVector>>(terms[i]), rank);
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

// A step's flag: announced after what the block has done, and waited for from all peers.
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

template <class T, bool kReduces, bool kGathers, bool kByPairs>
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
  meet(params, 0, sends ? block : 0, params.tag + calls + 1);
  if constexpr (kReduces) {
    reduce<T, kGathers, kByPairs>(params);
    if constexpr (kGathers) meet(params, 1, block, params.tag + calls + 1);
  }
  if constexpr (kGathers) gather<kReduces>(params);
  end_call(params, calls);
}

using Kernel = void (*)(PeerCollectiveParams);

template <class T>
Kernel kernel_for(bool reduces, bool gathers, bool by_pairs) {
  if (!reduces) return peer_collective_kernel<T, false, true, false>;
  if constexpr (sizeof(T) == 2) {
    if (by_pairs) {
      return gathers ? peer_collective_kernel<T, true, true, true>
                     : peer_collective_kernel<T, true, false, true>;
    }
  }
  return gathers ? peer_collective_kernel<T, true, true, false>
                 : peer_collective_kernel<T, true, false, false>;
}

template <class T>
cudaError_t launch_collective(const PeerCollectiveParams& params, cudaStream_t stream) {
  const int blocks = blocks_for(*std::max_element(params.count, params.count + params.ranks),
                                kMaxCollectiveBlocks);
  return launch(kernel_for<T>(params.reduces, params.gathers, params.by_pairs), blocks, params,
                stream);
}

template <class T>
cudaError_t load() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  for (const bool reduces : {false, true}) {
    for (const bool gathers : {false, true}) {
      for (const bool by_pairs : {false, true}) {
        const cudaError_t error =
            cudaFuncGetAttributes(&attributes, kernel_for<T>(reduces, gathers, by_pairs));
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t peer_collective(const PeerCollectiveParams& params, cudaStream_t stream) {
  // A gather moves bytes, whatever the type.
  switch (params.reduces ? params.dtype : plan::DType::kBFloat16) {
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

cudaError_t load_peer_collective_kernels() {
  for (const cudaError_t error : {load<__nv_bfloat16>(), load<__half>(), load<float>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
