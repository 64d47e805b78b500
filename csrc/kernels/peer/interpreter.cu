#include "kernels/peer/interpreter.h"

#include <algorithm>
#include <limits>

#include "kernels/chunk/element.cuh"
#include "kernels/peer/peer_block.cuh"

namespace overlap::kernels {
namespace {

constexpr int64_t kRunBytes = int64_t{kThreads} * kPeerAccessBytes;

// The part of InterpreterParams that a launch needs, as kernel parameters: they take no memory that somebody has to keep,
// in graphs either. Short programs take the short table, which is copied faster.
template <int kTransfers>
struct Table {
  PeerMeeting meeting;
  int32_t blocks;
  int32_t transfers_count;
  bool waits_for_slots;
  bool ends_call;
  void* bases[kMaxInterpreterBases];
  uint64_t* flags[kMaxPeers];
  int32_t* counters;
  InterpreterTransfer transfers[kTransfers];
  InterpreterWait waits[2 * kTransfers];
};
constexpr int kShortTransfers = 32;
constexpr size_t kMostParameterBytes = 32764;
static_assert(sizeof(InterpreterTransfer) == 64);
static_assert(2 * kMaxInterpreterTransfers == kMaxInterpreterWaits);
static_assert(sizeof(Table<kShortTransfers>) <= 4096);
static_assert(sizeof(Table<kMaxInterpreterTransfers>) <= kMostParameterBytes);

// As one thread.
__device__ __forceinline__ void wait_for_count(const int32_t* counter, int32_t expected,
                                               int32_t transfer, const PeerMeeting& meeting) {
  int32_t seen = 0;
  const auto reached = [&] {
    seen = load_acquire_gpu(counter);  // [A]
    return seen >= expected;
  };
  for (int poll = 0; poll < kHotPolls; ++poll) {
    if (reached()) return;
  }
  spin(meeting.deadline_ns, meeting.report, reached,
       [&] { write_report(meeting.report, {transfer, kOwnGemm, expected, seen}); });
}

__device__ __forceinline__ void wait_for_rank(const uint64_t* flag, uint64_t number, int32_t rank,
                                              int32_t transfer, const PeerMeeting& meeting) {
  uint64_t seen = 0;
  const auto reached = [&] {
    seen = load_acquire_sys(flag);  // [B]
    return has_reached(seen, number);
  };
  for (int poll = 0; poll < kHotPolls; ++poll) {
    if (reached()) return;
  }
  spin(meeting.deadline_ns, meeting.report, reached,
       [&] { write_report(meeting.report, missed_peer(transfer, rank, number, seen)); });
}

// Row and column, both counted in accesses, of an access of a rectangle.
__device__ __forceinline__ int64_t row_of(int64_t index, int64_t row_accesses) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  if (index > kMost || row_accesses > kMost) return index / row_accesses;
  return static_cast<uint32_t>(index) / static_cast<uint32_t>(row_accesses);
}

__device__ __forceinline__ uint4 load_bits(const char* from, uint4) {
  return __ldcg(reinterpret_cast<const uint4*>(from));
}
__device__ __forceinline__ uint32_t load_bits(const char* from, uint32_t) {
  return __ldcg(reinterpret_cast<const uint32_t*>(from));
}
__device__ __forceinline__ uint16_t load_bits(const char* from, uint16_t) {
  return __ldcg(reinterpret_cast<const uint16_t*>(from));
}

// This block's runs of the rectangle, by accesses of the type `Bits`.
template <class T, class Bits, bool kAdds>
__device__ __forceinline__ void move_by(const InterpreterTransfer& transfer, const char* source,
                                        char* destination, int32_t block, int32_t blocks) {
  constexpr int kBytes = sizeof(Bits);
  constexpr int kVector = kBytes / static_cast<int>(sizeof(T));
  constexpr int64_t kRun = kRunBytes / kBytes;  // accesses of a run
  const int64_t count = transfer.rows * transfer.row_bytes / kBytes;
  const bool dense = transfer.rows == 1 || (transfer.source_stride == transfer.row_bytes &&
                                            transfer.destination_stride == transfer.row_bytes);
  const int64_t row_accesses = dense ? count : transfer.row_bytes / kBytes;
  const auto access = [&](int64_t index) {
    // Access `index` of this block's runs, one after the other.
    return (index / kRun * blocks + block) * kRun + index % kRun;
  };
  for (int64_t first = threadIdx.x; access(first) < count; first += kBatch * kThreads) {
    Bits values[kBatch];
    Bits terms[kBatch];
    char* to[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t index = access(first + i * kThreads);
      to[i] = nullptr;
      if (index >= count) continue;
      const int64_t row = dense ? 0 : row_of(index, row_accesses);
      const int64_t column = (index - row * row_accesses) * kBytes;
      to[i] = destination + row * transfer.destination_stride + column;
      values[i] = load_bits(source + row * transfer.source_stride + column, Bits{});
      if constexpr (kAdds) terms[i] = load_bits(to[i], Bits{});
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (to[i] == nullptr) continue;
      if constexpr (kAdds) {
        const auto value = bits_as<Access<T, kVector>>(values[i]);
        const auto term = bits_as<Access<T, kVector>>(terms[i]);
        Access<T, kVector> sum;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          round_to(to_float(term.element[e]) + to_float(value.element[e]), sum.element[e]);
        }
        values[i] = bits_as<Bits>(sum);
      }
      *reinterpret_cast<Bits*>(to[i]) = values[i];
    }
  }
}

template <class T, class Bits>
__device__ __forceinline__ void move_by(const InterpreterTransfer& transfer, const char* source,
                                        char* destination, int32_t block, int32_t blocks) {
  if (transfer.adds) {
    move_by<T, Bits, true>(transfer, source, destination, block, blocks);
  } else {
    move_by<T, Bits, false>(transfer, source, destination, block, blocks);
  }
}

// By the widest accesses that all of its rows allow. The runs are the same in either case.
template <class T>
__device__ __forceinline__ void move(const InterpreterTransfer& transfer, const char* source,
                                     char* destination, int32_t block, int32_t blocks) {
  uint64_t bits = reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(destination) |
                  static_cast<uint64_t>(transfer.row_bytes);
  if (transfer.rows > 1) {
    bits |= static_cast<uint64_t>(transfer.source_stride) |
            static_cast<uint64_t>(transfer.destination_stride);
  }
  if (bits % kPeerAccessBytes == 0) {
    move_by<T, uint4>(transfer, source, destination, block, blocks);
  } else if constexpr (sizeof(T) == 4) {
    move_by<T, uint32_t>(transfer, source, destination, block, blocks);
  } else {
    move_by<T, uint16_t>(transfer, source, destination, block, blocks);
  }
}

// Two blocks fit an SM.
template <class T, int kTransfers>
__global__ void __launch_bounds__(kThreads, 2)
    interpreter_kernel(const __grid_constant__ Table<kTransfers> table) {
  const PeerMeeting& meeting = table.meeting;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t stream = static_cast<int32_t>(blockIdx.x) / table.blocks;
  const int32_t block = static_cast<int32_t>(blockIdx.x) % table.blocks;
  const uint64_t calls = *meeting.calls;
  const uint64_t number = meeting.tag + calls + 1;
  if (table.waits_for_slots && thread < meeting.ranks && thread != meeting.rank) {
    wait_for_flag(meeting.ended + thread, calls, thread, meeting);
  }
  for (int32_t i = 0; i < table.transfers_count; ++i) {
    const InterpreterTransfer& transfer = table.transfers[i];
    if (transfer.stream != stream) continue;
    const int32_t name = transfer.flag / table.blocks;
    for (int32_t wait = transfer.first_wait + thread; wait < transfer.end_wait; wait += kThreads) {
      wait_for_count(table.counters + table.waits[wait].counter, table.waits[wait].count, name,
                     meeting);
    }
    if (transfer.from >= 0 && thread == kThreads - 1) {
      wait_for_rank(table.flags[meeting.rank] + transfer.flag + block, number, transfer.from, name,
                    meeting);
    }
    // Also after what other threads of this block did for the transfers before.
    __syncthreads();
    move<T>(transfer, static_cast<const char*>(table.bases[transfer.source_base]) + transfer.source,
            static_cast<char*>(table.bases[transfer.destination_base]) + transfer.destination,
            block, table.blocks);
    if (transfer.to < 0 && transfer.counter < 0) continue;
    __syncthreads();
    if (thread != 0) continue;
    if (transfer.to >= 0) {
      __threadfence_system();
      store_relaxed_sys(table.flags[transfer.to] + transfer.flag + block, number);  // [B]
    }
    if (transfer.counter >= 0) signal_release_gpu(table.counters + transfer.counter);  // [A]
  }
  if (table.ends_call) end_call(meeting, calls);
}

__global__ void count_kernel(int32_t* counter, int32_t value) {
  add_acq_rel_gpu(counter, value);  // [A]
}

template <class T, int kTransfers>
cudaError_t launch_table(const InterpreterParams& params, cudaStream_t stream) {
  Table<kTransfers> table;
  table.meeting = params;
  table.blocks = params.blocks;
  table.transfers_count = static_cast<int32_t>(params.transfers.size());
  table.waits_for_slots = params.waits_for_slots;
  table.ends_call = params.ends_call;
  std::copy(std::begin(params.bases), std::end(params.bases), table.bases);
  std::copy(std::begin(params.flags), std::end(params.flags), table.flags);
  table.counters = params.counters;
  std::copy(params.transfers.begin(), params.transfers.end(), table.transfers);
  std::copy(params.waits.begin(), params.waits.end(), table.waits);
  void* arguments[] = {&table};
  return cudaLaunchKernel(interpreter_kernel<T, kTransfers>,
                          dim3(static_cast<unsigned int>(params.streams * params.blocks)),
                          dim3(kThreads), arguments, 0, stream);
}

template <class T>
cudaError_t launch_interpreter(const InterpreterParams& params, cudaStream_t stream) {
  const bool is_short = params.transfers.size() <= kShortTransfers &&
                        params.waits.size() <= size_t{2 * kShortTransfers};
  return is_short ? launch_table<T, kShortTransfers>(params, stream)
                  : launch_table<T, kMaxInterpreterTransfers>(params, stream);
}

template <class T>
cudaError_t load() {
  cudaFuncAttributes attributes;  // asking for them loads the kernel
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, interpreter_kernel<T, kShortTransfers>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, interpreter_kernel<T, kMaxInterpreterTransfers>);
}

}  // namespace

cudaError_t interpret(const InterpreterParams& params, cudaStream_t stream) {
  if (params.transfers.size() > kMaxInterpreterTransfers ||
      params.waits.size() > kMaxInterpreterWaits || params.blocks < 1 || params.streams < 1) {
    return cudaErrorInvalidValue;
  }
  switch (params.dtype) {
    case plan::DType::kBFloat16:
      return launch_interpreter<__nv_bfloat16>(params, stream);
    case plan::DType::kFloat16:
      return launch_interpreter<__half>(params, stream);
    case plan::DType::kFloat32:
      return launch_interpreter<float>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t count(int32_t* counter, int32_t value, cudaStream_t stream) {
  void* arguments[] = {&counter, &value};
  return cudaLaunchKernel(count_kernel, dim3(1), dim3(1), arguments, 0, stream);
}

cudaError_t load_interpreter_kernels() {
  cudaFuncAttributes attributes;
  for (const cudaError_t error : {load<__nv_bfloat16>(), load<__half>(), load<float>(),
                                  cudaFuncGetAttributes(&attributes, count_kernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace overlap::kernels
