// Rows of a mixture into the memory of peers. Kernels that follow on the stream announce what these have stored.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/moe/moe.h"

namespace overlap::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // loads of a thread that are under way together
constexpr int64_t kMostBlocks = 2048;

// The threads of a block that carry a row together, a power of two; what one of them does.
struct Team {
  int size;
  __device__ int lane() const { return threadIdx.x % size; }
  __device__ int64_t first_row() const {
    return int64_t{blockIdx.x} * (kThreads / size) + threadIdx.x / size;
  }
  __device__ int64_t rows() const { return int64_t{gridDim.x} * (kThreads / size); }
};

// The team's thread loads its accesses of a row in batches, and calls store(column, access) with each.
template <class A, class Store>
__device__ __forceinline__ void carry(Team team, const A* from, int64_t accesses,
                                      const Store& store) {
  for (int64_t first = team.lane(); first < accesses; first += team.size * kBatch) {
    A values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * team.size < accesses) {
        values[i] = from[first + i * team.size];
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * team.size < accesses) {
        store(first + i * team.size, values[i]);
      }
    }
  }
}

__device__ __forceinline__ int rank_of_home(int64_t home) {
  return static_cast<int>(-2 - home);
}

__global__ void __launch_bounds__(kThreads)
    counts_kernel(const __grid_constant__ CountsParams params) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int32_t ranks = params.experts.ranks;
  if (i < params.tokens * params.choices) {
    const int64_t id = params.wide_ids ? static_cast<const int64_t*>(params.ids)[i]
                                       : static_cast<const int32_t*>(params.ids)[i];
    int64_t home = -1;
    if (id >= 0 && id < params.experts.first[ranks]) {
      int rank = 0;
      while (params.experts.first[rank + 1] <= id) {
        ++rank;
      }
      home = -2 - rank;
    }
    params.home[i] = home;
  }
  const int width = params.message_width;
  for (int64_t at = i; at < int64_t{ranks} * width; at += int64_t{gridDim.x} * kThreads) {
    const auto rank = static_cast<int>(at / width);
    const int64_t column = at % width;
    int64_t* message = reinterpret_cast<int64_t*>(params.slots[rank]) + params.rank * width;
    message[column] = column == width - 1 ? params.tokens : params.message[at];
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    tokens_kernel(const __grid_constant__ TokensParams params, Team team) {
  const int64_t stride = params.longest == nullptr ? params.stride : *params.longest;
  if (stride > params.stride) {
    return;
  }
  const TokenPlaces places =
      token_places(params.ranks, params.message_width, params.choices, params.row_bytes, stride);
  if (params.message_width > 0) {
    const int64_t all = params.begins[params.ranks];
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
         i += int64_t{gridDim.x} * kThreads) {
      int rank = 0;
      while (params.begins[rank + 1] <= i) {
        ++rank;
      }
      int32_t* routes = reinterpret_cast<int32_t*>(params.slots[rank] + places.routes) +
                        params.rank * stride * params.choices;
      routes[i - params.begins[rank]] = static_cast<int32_t>(params.routes[i]);
    }
  }
  const int64_t accesses = params.row_bytes / sizeof(A);
  for (int64_t token = team.first_row(); token < params.tokens; token += team.rows()) {
    uint32_t visits = 0;
    for (int choice = 0; choice < params.choices; ++choice) {
      const int64_t home = params.home[token * params.choices + choice];
      visits |= home < -1 ? 1u << rank_of_home(home) : 0;
    }
    visits &= ~(1u << params.rank);
    if (visits == 0) {
      continue;
    }
    const int64_t to = places.rows + (params.rank * stride + token) * params.row_bytes;
    carry(team, static_cast<const A*>(params.source) + token * accesses, accesses,
          [&](int64_t column, A value) {
            for (int distance = 1; distance < params.ranks; ++distance) {
              const int peer = (params.rank + distance) % params.ranks;
              if (visits >> peer & 1) {
                reinterpret_cast<A*>(params.slots[peer] + to)[column] = value;
              }
            }
          });
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    results_kernel(const __grid_constant__ ResultsParams params, Team team) {
  const int64_t accesses = params.row_bytes / sizeof(A);
  for (int64_t row = team.first_row(); row < params.rows; row += team.rows()) {
    const int64_t source = params.source[row];
    const int64_t rank = source < 0 ? params.rank : source / params.stride;
    if (rank == params.rank) {
      continue;
    }
    A* to = reinterpret_cast<A*>(params.slots[rank]) + (source - rank * params.stride) * accesses;
    carry(team, static_cast<const A*>(params.results) + row * accesses, accesses,
          [&](int64_t column, A value) { to[column] = value; });
  }
}

__global__ void __launch_bounds__(kThreads)
    visits_kernel(const int64_t* home, int64_t tokens, int32_t choices, int32_t rank, int32_t ranks,
                  int64_t* visits) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= tokens * ranks) {
    return;
  }
  const int64_t token = i / ranks;
  const auto other = static_cast<int>(i % ranks);
  bool found = false;
  for (int choice = 0; choice < choices; ++choice) {
    const int64_t at = home[token * choices + choice];
    found |= other == rank ? at >= 0 : at < -1 && rank_of_home(at) == other;
  }
  visits[i] = !found ? -1 : other == rank ? token : -2 - other;
}

// Calls launch(A{}, blocks, team) with the widest access that rows and base allow.
template <class Launch>
cudaError_t by_access(const void* base, int64_t rows, int64_t row_bytes, const Launch& launch) {
  const auto bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(base)) | row_bytes;
  const auto with = [&](auto access) {
    Team team{1};
    while (team.size < kThreads && team.size * int64_t{sizeof(access)} < row_bytes) {
      team.size *= 2;
    }
    const int64_t blocks = (rows * team.size + kThreads - 1) / kThreads;
    launch(access, static_cast<unsigned>(std::min(blocks, kMostBlocks)), team);
  };
  if (rows > 0 && row_bytes > 0) {
    bits % 16 == 0  ? with(uint4{})
    : bits % 8 == 0 ? with(uint64_t{})
    : bits % 4 == 0 ? with(uint32_t{})
                    : with(uint16_t{});
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t send_counts(const CountsParams& params, cudaStream_t stream) {
  const int64_t items = std::max<int64_t>(params.tokens * params.choices, 1);
  counts_kernel<<<static_cast<unsigned>((items + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      params);
  return cudaGetLastError();
}

cudaError_t send_tokens(const TokensParams& params, cudaStream_t stream) {
  return by_access(params.source, params.tokens, params.row_bytes,
                   [&](auto access, unsigned blocks, Team team) {
                     tokens_kernel<decltype(access)><<<blocks, kThreads, 0, stream>>>(params, team);
                   });
}

cudaError_t send_results(const ResultsParams& params, cudaStream_t stream) {
  return by_access(
      params.results, params.rows, params.row_bytes, [&](auto access, unsigned blocks, Team team) {
        results_kernel<decltype(access)><<<blocks, kThreads, 0, stream>>>(params, team);
      });
}

cudaError_t find_visits(const int64_t* home, int64_t tokens, int32_t choices, int32_t rank,
                        int32_t ranks, int64_t* visits, cudaStream_t stream) {
  if (tokens == 0) {
    return cudaSuccess;
  }
  visits_kernel<<<static_cast<unsigned>((tokens * ranks + kThreads - 1) / kThreads), kThreads, 0,
                  stream>>>(home, tokens, choices, rank, ranks, visits);
  return cudaGetLastError();
}

}  // namespace overlap::kernels
