// Where routes and tokens go: a stable sort of the routes by expert and of the tokens by rank. A block takes some tokens and
// keeps their routes in shared memory; a thread follows one expert or rank through them, so that no atomics decide an order.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/moe/moe.h"
#include "kernels/signal/spin.cuh"

namespace overlap::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kSharedIntegers = 12000;  // of a block: 48 KB at most without asking
constexpr int kMostTokens = 64;         // of a block
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // rows

__host__ __device__ int all_experts(const ExpertRanks& experts) {
  return experts.first[experts.ranks];
}

struct Shape {
  int32_t columns;       // one for each expert, then one for each rank
  int32_t block_tokens;  // 0: the call is too large for shared memory
  int64_t blocks;
  bool alone;  // one block and one kernel do all
};

Shape shape_of(const RoutesParams& params) {
  Shape shape{};
  shape.columns = all_experts(params.experts) + params.experts.ranks;
  const int32_t token = params.choices + params.experts.ranks;  // integers of a token
  const int32_t room = kSharedIntegers - shape.columns;
  shape.block_tokens = std::clamp(room / std::max(1, token), 0, kMostTokens);
  shape.blocks =
      shape.block_tokens == 0
          ? 0
          : std::max<int64_t>(1, (params.tokens + shape.block_tokens - 1) / shape.block_tokens);
  shape.alone =
      shape.blocks == 1 && shape.block_tokens * token + 2 * shape.columns <= kSharedIntegers;
  return shape;
}

// The block's routes as experts; -1: no route. Returns how many tokens it has.
__device__ int load_experts(const RoutesParams& params, int block_tokens, int32_t* experts) {
  const int64_t first = int64_t{blockIdx.x} * block_tokens;
  const int tokens =
      static_cast<int>(max(int64_t{0}, min(int64_t{block_tokens}, params.tokens - first)));
  const int64_t begin = first * params.choices;
  const int all = all_experts(params.experts);
  for (int i = threadIdx.x; i < tokens * params.choices; i += kThreads) {
    const int64_t id = params.wide_ids ? static_cast<const int64_t*>(params.ids)[begin + i]
                                       : static_cast<const int32_t*>(params.ids)[begin + i];
    experts[i] = id >= 0 && id < all ? static_cast<int32_t>(id) : -1;
  }
  __syncthreads();
  return tokens;
}

__device__ bool visits(const int32_t* chosen, int choices, int first, int end) {
  bool found = false;
  for (int k = 0; k < choices; ++k) {
    found |= chosen[k] >= first && chosen[k] < end;
  }
  return found;
}

// visited[rank][block_tokens]: 1 for a token that goes to the rank, else 0.
__device__ void find_visited(const RoutesParams& params, const Shape& shape, int tokens,
                             const int32_t* experts, int32_t* visited) {
  for (int i = threadIdx.x; i < params.experts.ranks * tokens; i += kThreads) {
    const int rank = i / tokens;
    const int token = i % tokens;
    const int32_t* first = params.experts.first + rank;
    visited[rank * shape.block_tokens + token] =
        visits(experts + token * params.choices, params.choices, first[0], first[1]);
  }
  __syncthreads();
}

// counts[column]: the block's routes to each expert and tokens to each rank.
__device__ void count_columns(const RoutesParams& params, const Shape& shape, int tokens,
                              const int32_t* experts, const int32_t* visited, int32_t* counts) {
  const int all = all_experts(params.experts);
  for (int column = threadIdx.x; column < shape.columns; column += kThreads) {
    int found = 0;
    if (column < all) {
      for (int i = 0; i < tokens * params.choices; ++i) {
        found += experts[i] == column;
      }
    } else {
      for (int t = 0; t < tokens; ++t) {
        found += visited[(column - all) * shape.block_tokens + t];
      }
    }
    counts[column] = found;
  }
}

// counts[block][column]
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ RoutesParams params, Shape shape) {
  extern __shared__ int32_t experts[];
  int32_t* visited = experts + shape.block_tokens * params.choices;
  const int tokens = load_experts(params, shape.block_tokens, experts);
  find_visited(params, shape, tokens, experts, visited);
  count_columns(params, shape, tokens, experts, visited,
                params.scratch + int64_t{blockIdx.x} * shape.columns);
}

template <class Sum>
__device__ Sum inclusive_in_warp(Sum value, int lane) {
  for (int step = 1; step < 32; step *= 2) {
    const Sum other = __shfl_up_sync(~0u, value, step);
    value += lane >= step ? other : 0;
  }
  return value;
}

// counts[block][column] becomes the sum over the blocks before; the sums over all follow the last block's. A warp takes a column.
__global__ void __launch_bounds__(kThreads) scan_kernel(int32_t* counts, Shape shape) {
  const int column = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (column >= shape.columns) {
    return;
  }
  int before = 0;
  for (int64_t block = lane; block - lane < shape.blocks; block += 32) {
    int32_t* own = counts + block * shape.columns + column;
    const int value = block < shape.blocks ? *own : 0;
    const int sum = inclusive_in_warp(value, lane);
    if (block < shape.blocks) {
      *own = before + sum - value;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) {
    counts[shape.blocks * shape.columns + column] = before;
  }
}

// sums[i] = the sum of values[0..i), or with values[i] and at most kMost, by one warp.
template <bool kInclusive = false>
__device__ void scan_by_warp(const int32_t* values, int32_t* sums, int count) {
  using Sum = std::conditional_t<kInclusive, int64_t, int>;
  const int lane = threadIdx.x % 32;
  const int each = (count + 31) / 32;
  const int begin = min(lane * each, count);
  const int end = min(begin + each, count);
  Sum own = 0;
  for (int i = begin; i < end; ++i) {
    own += values[i];
  }
  Sum sum = inclusive_in_warp(own, lane) - own;
  for (int i = begin; i < end; ++i) {
    const int value = values[i];  // values may be sums
    sums[i] = kInclusive ? static_cast<int32_t>(min(int64_t{sum + value}, kMost)) : sum;
    sum += value;
  }
}

// Each token's place among those that go to a rank, for tokens that do: slots[rank][block_tokens], which said who goes.
template <class Before>
__device__ void place_tokens(const RoutesParams& params, const Shape& shape, int tokens,
                             const int32_t* starts, Before before, int32_t* slots) {
  const int ranks = params.experts.ranks;
  const int lane = threadIdx.x % 32;
  for (int rank = threadIdx.x / 32; rank < ranks; rank += kThreads / 32) {  // a warp for each
    int32_t* own = slots + rank * shape.block_tokens;
    int slot = before(rank);
    for (int first = 0; first < tokens; first += 32) {
      const int token = first + lane;
      const bool goes = token < tokens && own[token] != 0;
      const unsigned going = __ballot_sync(~0u, goes);
      if (goes) {
        own[token] = slot + __popc(going & ((1u << lane) - 1));
        const int64_t number = int64_t{blockIdx.x} * shape.block_tokens + token;
        params.sent[starts[rank] + own[token]] = number * ranks + rank;
      }
      slot += __popc(going);
    }
  }
}

// By one block: the message to each rank, and where its routes begin.
__device__ void write_message(const RoutesParams& params, const int32_t* starts,
                              const int32_t* totals) {
  const int all = all_experts(params.experts);
  const int ranks = params.experts.ranks;
  const int width = params.message_width;
  for (int rank = threadIdx.x; params.begins != nullptr && rank <= ranks; rank += kThreads) {
    const int first = params.experts.first[rank];
    params.begins[rank] = first < all ? starts[first] : starts[all - 1] + totals[all - 1];
  }
  for (int i = threadIdx.x; i < ranks * width; i += kThreads) {
    const int rank = i / width;
    const int expert = i % width;
    const int first = params.experts.first[rank];
    const bool own = expert < params.experts.first[rank + 1] - first;
    params.message[i] = expert == width - 1 ? totals[all + rank] : own ? totals[first + expert] : 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ RoutesParams params, Shape shape) {
  extern __shared__ int32_t shared[];
  const int all = all_experts(params.experts);
  const int ranks = params.experts.ranks;
  int32_t* experts = shared;                                       // [block_tokens][choices]
  int32_t* slots = experts + shape.block_tokens * params.choices;  // [ranks][block_tokens]
  int32_t* starts = slots + shape.block_tokens * ranks;            // [columns]
  int32_t* counted = starts + shape.columns;                       // [columns], alone
  const int32_t* totals = params.scratch + shape.blocks * shape.columns;
  const auto before = [&](int column) {
    return shape.alone ? 0 : params.scratch[int64_t{blockIdx.x} * shape.columns + column];
  };
  const int tokens = load_experts(params, shape.block_tokens, experts);
  if (shape.alone || params.sent != nullptr) find_visited(params, shape, tokens, experts, slots);
  if (shape.alone) {
    count_columns(params, shape, tokens, experts, slots, counted);
    totals = counted;
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    scan_by_warp(totals, starts, all);
  } else if (threadIdx.x < 64) {
    scan_by_warp(totals + all, starts + all, ranks);
  }
  __syncthreads();
  const int64_t first_token = int64_t{blockIdx.x} * shape.block_tokens;

  if (params.sent != nullptr) {
    place_tokens(
        params, shape, tokens, starts + all, [&](int rank) { return before(all + rank); }, slots);
  }
  __syncthreads();

  for (int expert = threadIdx.x; expert < all; expert += kThreads) {
    int rank = 0;
    while (params.experts.first[rank + 1] <= expert) {
      ++rank;
    }
    const int32_t* own = slots + rank * shape.block_tokens;
    int64_t at = starts[expert] + before(expert);
    for (int i = 0; i < tokens * params.choices; ++i) {
      if (experts[i] == expert) {
        params.routes[at] = first_token * params.choices + i;
        if (params.sent != nullptr) {
          params.slots[at] = own[i / params.choices] * params.choices + i % params.choices;
        }
        ++at;
      }
    }
  }

  if (blockIdx.x == 0) write_message(params, starts, totals);
}

// After a wait that failed, counts and routes are whatever lies in the slot: rows go nowhere else for that.
__global__ void __launch_bounds__(kThreads)
    count_arrivals_kernel(const __grid_constant__ ArrivalsParams params) {
  const int last = params.message_width - 1;
  const int ranks = params.ranks;
  const int lane = threadIdx.x % 32;
  for (int item = threadIdx.x / 32; item < 2 * ranks; item += kThreads / 32) {
    const bool in = item >= ranks;  // or sent
    const int64_t* message =
        (in ? params.met : params.message) + int64_t{item % ranks} * params.message_width;
    int sum = 0;
    for (int x = lane; x < (in ? params.experts : last); x += 32) {
      sum += static_cast<int>(message[x]);
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) {
      params.known[item] = sum;
      params.known[2 * ranks + item] = message[last];
    }
  }
  for (int x = threadIdx.x; x < params.experts; x += kThreads) {
    int64_t count = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      count += params.met[int64_t{rank} * params.message_width + x];
    }
    params.counts[x] = count;
    const int64_t rows = count < 0 ? kMost : min(count, kMost);
    const int64_t padded = (rows + params.align - 1) / params.align * params.align;
    params.offs[x] = static_cast<int32_t>(min(padded, kMost));
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    scan_by_warp<true>(params.offs, params.offs, params.experts);
    __syncwarp();
  }
  if (threadIdx.x == 0) {
    const int32_t end = params.experts == 0 ? 0 : params.offs[params.experts - 1];
    params.known[4 * ranks] = end;
    if (params.longest != nullptr) {
      int64_t longest = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        longest = max(longest, params.met[int64_t{rank} * params.message_width + last]);
      }
      *params.longest = longest;
    }
    if (params.most_rows >= 0 && end > params.most_rows) {
      const auto most = static_cast<int32_t>(params.most_rows);
      write_report(params.report, {0, kTooManyRows, most, end});
      tell_peers(params.report);
      for (int x = 0; x < params.experts; ++x) {
        params.offs[x] = min(params.offs[x], most);
      }
    }
  }
}

// A block takes the routes from one rank to one expert, and its part of the rows after the last.
__global__ void __launch_bounds__(kThreads)
    place_arrivals_kernel(const __grid_constant__ ArrivalsParams params) {
  __shared__ int64_t parts[kThreads];
  const int64_t end = params.experts == 0 ? 0 : params.offs[params.experts - 1];
  for (int64_t i = end + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.room;
       i += int64_t{gridDim.x} * kThreads) {
    params.source[i] = -2;
  }
  if (params.experts == 0) {
    return;
  }
  const bool apart = params.rank_slots > 0;  // each rank's routes
  const int rank = blockIdx.x / params.experts;
  const int expert = blockIdx.x % params.experts;
  const int width = params.message_width;
  int64_t earlier = 0;  // routes of earlier messages, and of earlier experts in this one
  for (int i = threadIdx.x + (apart ? rank * params.experts : 0);
       i < rank * params.experts + expert; i += kThreads) {
    earlier += params.met[int64_t{i / params.experts} * width + i % params.experts];
  }
  parts[threadIdx.x] = earlier;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) {
      parts[threadIdx.x] += parts[threadIdx.x + step];
    }
    __syncthreads();
  }
  const int64_t from = parts[0] + rank * params.rank_slots;
  const int64_t begin = expert == 0 ? 0 : params.offs[expert - 1];
  int64_t row = begin;
  int64_t tokens = 0;
  for (int r = 0; r < rank; ++r) {
    row += params.met[int64_t{r} * width + expert];
    tokens += params.met[int64_t{r} * width + width - 1];
  }
  const int64_t first = apart ? rank * params.rank_slots : tokens * params.choices;
  int64_t count = params.met[int64_t{rank} * width + expert];
  if (params.most_rows >= 0) {  // of a call that has failed
    row = max(begin, min(row, int64_t{params.offs[expert]}));
    count = max(int64_t{0}, min(count, params.offs[expert] - row));
  }
  const auto has = [&](int64_t place) {
    return !apart || (place >= 0 && place < params.rank_slots);
  };
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int32_t slot = has(parts[0] + i) ? params.slots[from + i] : -1;
    params.source[row + i] = has(slot) ? first + slot : -1;
    if (params.place != nullptr) {
      params.place[from + i] = row + i;
    }
    if (apart && rank == params.rank && slot >= 0 && slot < params.own_routes) {
      params.home[slot] = row + i;
    }
  }
  if (rank == params.ranks - 1) {
    for (int64_t i = row + count + threadIdx.x; i < params.offs[expert]; i += kThreads) {
      params.source[i] = -1;
    }
  }
}

}  // namespace

int64_t routes_scratch(const RoutesParams& params) {
  const Shape shape = shape_of(params);
  return (shape.blocks + 1) * shape.columns;
}

cudaError_t find_routes(const RoutesParams& params, cudaStream_t stream) {
  const Shape shape = shape_of(params);
  if (shape.block_tokens == 0 || params.experts.ranks < 1) {
    return cudaErrorInvalidValue;
  }
  const auto grid = static_cast<unsigned>(shape.blocks);
  const size_t chosen =
      shape.block_tokens * (params.choices + params.experts.ranks) * sizeof(int32_t);
  if (!shape.alone) {
    count_kernel<<<grid, kThreads, chosen, stream>>>(params, shape);
    scan_kernel<<<(shape.columns * 32 + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
        params.scratch, shape);
  }
  const size_t more = (shape.alone ? 2 : 1) * shape.columns * sizeof(int32_t);
  place_kernel<<<grid, kThreads, chosen + more, stream>>>(params, shape);
  return cudaGetLastError();
}

cudaError_t count_arrivals(const ArrivalsParams& params, cudaStream_t stream) {
  count_arrivals_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t place_arrivals(const ArrivalsParams& params, cudaStream_t stream) {
  if (params.experts == 0 && params.room == 0) {
    return cudaSuccess;
  }
  const int blocks = std::max(1, params.ranks * params.experts);
  place_arrivals_kernel<<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace overlap::kernels
