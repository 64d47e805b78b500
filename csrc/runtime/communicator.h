// One NCCL communicator with one CTA limit, and the memory registered with it.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace overlap::runtime {

// Owner of an ncclComm_t. Its destructor aborts, which waits for no peer. A communicator that a
// CUDA graph captured is leaked instead (mark_captured): the graph may be replayed after the group
// is gone, and NCCL would wait for the graph.
class Communicator {
 public:
  struct Options {
    int rank = 0;
    int world_size = 1;
    int max_ctas = 0;  // 0: NCCL's own choice
  };

  // Collective, and blocks until all ranks construct it with the same id and CTA limit: let them
  // meet, with a deadline, before.
  Communicator(const ncclUniqueId& id, const Options& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Sum of `count` elements over the ranks; source and destination may be the same. Enqueued on
  // `stream`.
  void all_reduce(const void* source, void* destination, size_t count, plan::DType dtype,
                  cudaStream_t stream);

  // Gathers `count` elements of every rank into `destination`, in rank order. In place: this rank's
  // elements lie there already.
  void all_gather_in_place(void* destination, size_t count, plan::DType dtype, cudaStream_t stream);

  // The same from `source`, `count` elements that may lie anywhere. Several blocks each have an
  // equal part of `count`, one after the other in both.
  void all_gather(const void* source, void* destination, size_t count, plan::DType dtype,
                  cudaStream_t stream, int blocks = 1);

  // Sums parts of `count` elements over the ranks: rank r's part of `source`, which holds all of
  // them in rank order, ends up in its `destination`; that may be its place in `source`. Several blocks are as above.
  void reduce_scatter(const void* source, void* destination, size_t count, plan::DType dtype,
                      cudaStream_t stream, int blocks = 1);

  // A message between this rank and a peer.
  struct Message {
    int peer = 0;
    void* data = nullptr;
    size_t bytes = 0;
  };

  // Sends and receives at the same time; a pair's messages match in their order.
  void send_receive(const std::vector<Message>& sends, const std::vector<Message>& receives,
                    cudaStream_t stream);

  // Registers [pointer, pointer + bytes) of ncclMemAlloc memory as a symmetric window. Collective
  // and slow, so once per buffer. Null where NCCL cannot; it then takes its plain
  // kernels for this memory.
  ncclWindow_t register_window(void* pointer, size_t bytes);
  // Takes a window back, without the other ranks.
  void deregister_window(ncclWindow_t window);

  // Ranks in a row, as many for each rank, that load and store each other's windows; 0: unknown.
  int load_store_ranks();

  // An error that NCCL met asynchronously.
  std::optional<std::string> async_error();

  // Ends what the communicator has in flight; later calls throw. Callable from any thread.
  void abort();

  void mark_captured() { captured_ = true; }

 private:
  void check_alive(const char* call) const;

  ncclComm_t comm_ = nullptr;
  int rank_ = 0;
  int world_size_ = 1;
  std::timed_mutex mutex_;  // held while a call enqueues
  std::atomic<bool> aborted_{false};
  std::atomic<bool> captured_{false};
};

}  // namespace overlap::runtime
