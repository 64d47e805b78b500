// Transfers of a program over memory that the ranks map into each other: one kernel goes through a table of them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "kernels/peer/peer_collective.h"
#include "plan/gemm_types.h"

namespace overlap::kernels {

inline constexpr int kMaxInterpreterBases = 17;
inline constexpr int kMaxInterpreterTransfers = 384;  // of a launch, and
inline constexpr int kMaxInterpreterWaits = 768;

// Rows of one memory into another one, or added to what is there. The rectangle is cut into runs of bytes, row after
// row, which the blocks of the stream take in turns: the same block takes the same run of each rectangle of one shape.
struct InterpreterTransfer {
  int64_t source = 0;  // bytes after its base
  int64_t destination = 0;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t source_stride = 0;
  int64_t destination_stride = 0;
  int32_t flag = 0;  // the first of its flags, of which each block of a stream has one
  uint8_t source_base = 0;
  uint8_t destination_base = 0;
  uint8_t stream = 0;
  bool adds = false;
  int8_t from = -1;         // after this rank's flags; each block waits for the same one's
  int8_t to = -1;           // sets flags of this rank
  int16_t counter = -1;     // counted by each block that has done its share
  uint16_t first_wait = 0;  // of the table's waits
  uint16_t end_wait = 0;
};

// Until a counter has come so far.
struct InterpreterWait {
  int32_t counter = 0;
  int32_t count = 0;
};

struct InterpreterParams : PeerMeeting {
  plan::DType dtype = plan::DType::kBFloat16;
  int32_t streams = 1;
  int32_t blocks = 1;  // of each stream
  bool waits_for_slots =
      true;  // before the first transfer: the peers have ended the call before in this slot
  bool ends_call = true;
  void* bases[kMaxInterpreterBases] = {};
  uint64_t* flags[kMaxPeers] =
      {};  // in each rank's memory, those of all transfers, this rank's own ones among them
  int32_t* counters = nullptr;  // own memory, zero before the call
  std::vector<InterpreterTransfer> transfers = {};
  std::vector<InterpreterWait> waits = {};
};

// Enqueues it. Blocks of a stream take its transfers in their order, each its share, and wait for others only where
// the table says so: for counters, and for the same block of a peer. All blocks have to be on the device at a time, or
// to come there once what holds their SMs ends. Sums are taken in fp32 and rounded. bf16, fp16, fp32. Every wait ends
// at the deadline, with a report, as of peer_collective, that names the transfer in place of a chunk.
cudaError_t interpret(const InterpreterParams& params, cudaStream_t stream);

// Enqueues a kernel that adds to a counter, after what the stream did before, for what waits in interpret().
cudaError_t count(int32_t* counter, int32_t value, cudaStream_t stream);

// Loads these kernels on the current device.
cudaError_t load_interpreter_kernels();

}  // namespace overlap::kernels
