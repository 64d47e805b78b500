// What all-to-alls over NCCL and over peers share: whose rows lie where, and the GEMM of some of them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/signal.h"
#include "runtime/executor.h"
#include "runtime/executor_loop.h"

namespace overlap::runtime {

class AllToAllRows : protected ExecutorLoop {
 protected:
  AllToAllRows(Group& group, const AllToAllCall& call)
      : ExecutorLoop(group, *call.plan, call.stream, call.delay_us),
        call_(call),
        ranks_(group.world_size()),
        rank_(group.rank()),
        row_bytes_(plan_.problem.n * element_bytes_),
        send_begin_(offsets(call.send_rows)),
        receive_begin_(offsets(call.receive_rows)) {}

  // The rows for `peer` in the product.
  plan::Rows rows_for(int peer) const { return {send_begin_[peer], send_begin_[peer + 1]}; }

  // Begins with all rows, by the framework's GEMM. It waits for no peer: it need not be chained, and starts
  // while the host does the rest.
  void begin_with_all() {
    watch(call_.trace, 1);
    product_ = static_cast<char*>(call_.product());
    call_.library_gemm({0, send_begin_.back()}, product_);
    chain();
  }

  // Product rows by the plan's kernel, on so many SMs.
  void launch(plan::Rows rows, void* destination, int ctas) {
    kernels::GemmParams gemm = call_.gemm;
    gemm.m = rows.end - rows.begin;
    gemm.input =
        static_cast<const char*>(gemm.input) + rows.begin * gemm.input_stride * element_bytes_;
    gemm.output = destination;
    const int64_t cluster_rows = int64_t{plan_.tile_m} * plan_.cluster_m;
    const int64_t clusters = (gemm.m + cluster_rows - 1) / cluster_rows;
    gemm.order =
        plan::chunked_order(plan_, gemm.n, {static_cast<int32_t>(clusters * plan_.cluster_m)});
    gemm.ctas = ctas;
    check_cuda(kernels::launch_gemm(plan_.kernel, gemm, stream_), "launching the GEMM");
  }

  // The GEMM that goes on beside an exchange comes first: where NCCL's CTAs came first, each on an SM of
  // another pair, clusters of the GEMM had to wait for them, and it took 1.7 times as long.
  static void let_gemm_start(cudaStream_t side) {
    constexpr int64_t kGemmStartsUs = 4;
    check_cuda(kernels::delay(kGemmStartsUs, side), "launching a delay");
  }

  char* product_row(int64_t index) const { return product_ + index * row_bytes_; }
  char* output_row(int64_t index) const {
    return static_cast<char*>(call_.output) + index * row_bytes_;
  }

  const AllToAllCall& call_;
  const int ranks_;
  const int rank_;
  const int64_t row_bytes_;
  const std::vector<int64_t> send_begin_;  // one more than ranks
  const std::vector<int64_t> receive_begin_;
  char* product_ = nullptr;  // what is not stored where it goes at once

 private:
  // Where each rank's rows begin, and where the last ones end.
  static std::vector<int64_t> offsets(const std::vector<int64_t>& rows) {
    std::vector<int64_t> result{0};
    for (const int64_t count : rows) result.push_back(result.back() + count);
    return result;
  }
};

}  // namespace overlap::runtime
