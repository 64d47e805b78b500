#include "kernels/peer/peer_low_latency.h"

#include "kernels/peer/peer_line.cuh"
#include "kernels/peer/peer_sum.cuh"

namespace overlap::kernels {
namespace {

// The runs of a call that this warp has.
struct Share {
  const PeerLowLatencyParams& params;
  LineCall call;
  RunLane lane;
  int32_t words;
  int32_t runs;
  int32_t begin;
  int32_t step;

  __device__ __forceinline__ explicit Share(const PeerLowLatencyParams& given)
      : params(given),
        call(given),
        words(static_cast<int32_t>(given.words)),  // some MiB at most
        runs((words + kRunWords - 1) / kRunWords),
        begin(static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x) / kLanes),
        step(static_cast<int32_t>(gridDim.x) * kThreads / kLanes) {}

  // Calls `body(w, word)` for the message's words that this lane has of a run: it takes 32 in the order of the lanes, 32
  // more, and twice 28 of the lanes that hold no number.
  template <class Body>
  __device__ __forceinline__ void each_word(int32_t run, Body body) const {
#pragma unroll
    for (int w = 0; w < kLaneWords; ++w) {
      constexpr int kOthers = kLanes - kLanes / kLineLanes;
      if (w >= 2 && lane.numbers()) break;
      const int place =
          w < 2 ? w * kLanes + lane.lane : 2 * kLanes + (w - 2) * kOthers + lane.lane - lane.line;
      const int32_t word = run * kRunWords + place;
      if (word < words) body(w, word);
    }
  }

  __device__ __forceinline__ LineShare own(int32_t run) const {
    LineShare share = {};
    each_word(run, [&](int w, int32_t word) {
      share.word[w] = static_cast<const uint32_t*>(params.own)[word];
    });
    return share;
  }
  __device__ __forceinline__ void write(int32_t run, const LineShare& share) const {
    each_word(run, [&](int w, int32_t word) {
      static_cast<uint32_t*>(params.output)[word] = share.word[w];
    });
  }

  // A run's place in the buffers need not be that in the message.
  __device__ __forceinline__ void send_to_all(int32_t place, const LineShare& share) const {
    for (int distance = 1; distance < params.ranks; ++distance) {
      send((params.rank + distance) % params.ranks, place, share);
    }
  }
  __device__ __forceinline__ void send(int peer, int32_t place, const LineShare& share) const {
    store_run(reinterpret_cast<LineShare*>(call.to(peer)) + place * kLanes + lane.lane, share, true,
              lane, call);
  }
  __device__ __forceinline__ LineShare await(int peer, int32_t place) const {
    const auto* const address =
        reinterpret_cast<const LineShare*>(call.from(peer)) + place * kLanes + lane.lane;
    ArrivingRuns<1> arriving;
    arriving.wait(
        1, lane, call, params, [&](int) { return address; }, [](int) { return true; },
        [&](int) { return peer; });
    return arriving.share[0];
  }

  // All ranks' terms of a run.
  template <class T, bool kByPairs>
  __device__ __forceinline__ LineShare sum(int32_t run, int32_t place) const {
    constexpr int kVector = sizeof(uint32_t) / sizeof(T);
    const LineShare own_term = own(run);
    Sum<T, kVector, kByPairs> sums[kLaneWords];
    for (int rank = 0; rank < params.ranks; ++rank) {
      const LineShare term = rank == params.rank ? own_term : await(rank, place);
#pragma unroll
      for (int w = 0; w < kLaneWords; ++w) {
        sums[w].add(bits_as<Access<T, kVector>>(term.word[w]), rank);
      }
    }
    LineShare result = {};
    each_word(run, [&](int w, int32_t word) {
      result.word[w] = bits_as<uint32_t>(sums[w].rounded(params.bias, word, params.row_words));
    });
    return result;
  }
};

template <class T, bool kByPairs>
__device__ __forceinline__ void in_one_step(const Share& share) {
  // All is on its way before anything is waited for.
#pragma unroll 1
  for (int32_t run = share.begin; run < share.runs; run += share.step) {
    share.send_to_all(run, share.own(run));
  }
  for (int32_t run = share.begin; run < share.runs; run += share.step) {
    share.write(run, share.sum<T, kByPairs>(run, run));
  }
}

// A buffer holds the writer's terms of the owner's piece, and after them the sums of the writer's piece.
template <class T, bool kByPairs>
__device__ __forceinline__ void in_pieces(const Share& share) {
  const int ranks = share.params.ranks;
  const int own_rank = share.params.rank;
  const int32_t piece = (share.runs + ranks - 1) / ranks;
  const auto each_of = [&](int rank, auto body) {
    const int32_t first = rank * piece;
    const int32_t count = share.runs - first < piece ? share.runs - first : piece;
    for (int32_t place = share.begin; place < count; place += share.step) {
      body(first + place, place);
    }
  };
  for (int distance = 1; distance < ranks; ++distance) {
    const int peer = (own_rank + distance) % ranks;
    each_of(peer, [&](int32_t run, int32_t place) { share.send(peer, place, share.own(run)); });
  }
  each_of(own_rank, [&](int32_t run, int32_t place) {
    const LineShare sums = share.sum<T, kByPairs>(run, place);
    share.send_to_all(piece + place, sums);
    share.write(run, sums);
  });
  for (int distance = 1; distance < ranks; ++distance) {
    const int peer = (own_rank + ranks - distance) % ranks;
    each_of(peer, [&](int32_t run, int32_t place) {
      share.write(run, share.await(peer, piece + place));
    });
  }
}

template <class T, bool kInPieces, bool kByPairs>
__global__ void __launch_bounds__(kThreads, 2)
    peer_low_latency_kernel(const __grid_constant__ PeerLowLatencyParams params) {
  wait_for_previous_kernel();
  const Share share(params);
  share.call.announce();
  if constexpr (kInPieces) {
    in_pieces<T, kByPairs>(share);
  } else {
    in_one_step<T, kByPairs>(share);
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
  const int64_t runs = params.in_pieces ? plan::low_latency_piece(bytes, params.ranks)
                                        : plan::low_latency_runs(bytes);
  return launch(kernel_for<T>(params.in_pieces, params.by_pairs),
                blocks_for(runs * kLanes, kMaxPeerBlocks), params, stream);
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
