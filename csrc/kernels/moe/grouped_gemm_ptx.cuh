// Hopper's instructions for a GEMM by hand: barriers in shared memory, loads by the tensor memory accelerator, and products of warp groups.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace overlap::kernels {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count));
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void arrive_at(uint64_t* barrier, int cta) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
      "r"(cta)
      : "memory");
}
__device__ __forceinline__ void await(uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void load_box(const CUtensorMap& map, char* to, uint64_t* barrier,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
// A box of one of several matrices.
__device__ __forceinline__ void load_box(const CUtensorMap& map, char* to, uint64_t* barrier,
                                         int column, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}
// Into the memory of both CTAs.
__device__ __forceinline__ void load_box_for_both(const CUtensorMap& map, char* to,
                                                  uint64_t* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4}], "
      "[%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// Stores a run of multiples of 16 bytes, after this thread's other ones; its source can be written after await_stores_read().
__device__ __forceinline__ void store_run(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void await_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Four bytes, on their own; and their arrival, with those that this thread began before.
__device__ __forceinline__ void copy_number(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// An operand in rows of 128 bytes, swizzled; eight of them repeat after 1024 bytes. Its rows are along k, and it has `bytes` to the next 64
// rows; or, turned, each of its rows is one number of k, and `bytes` lead to the next 64 columns.
struct Operand {
  uint32_t low;  // the high word is a constant, so that one word is added to

  __device__ explicit Operand(const char* pointer, uint32_t bytes = 16)
      : low((shared_address(pointer) & 0x3ffff) >> 4 | bytes >> 4 << 16) {}
  // As it is `further` bytes on.
  __device__ uint64_t at(uint32_t further) const {
    constexpr uint64_t kHigh = 1024 >> 4 | 1u << 30;
    return kHigh << 32 | (low + (further >> 4));
  }
};
// This thread's stores in shared memory come before products and stores of runs that read it.
__device__ __forceinline__ void show_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_mma() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_mma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void await_mma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Nothing reads the sums before this point.
template <int kSums>
__device__ __forceinline__ void hold(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define OVERLAP_SUMS4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OVERLAP_SUMS32(d, i)                                                                     \
  OVERLAP_SUMS4(d, i), OVERLAP_SUMS4(d, i + 4), OVERLAP_SUMS4(d, i + 8),                         \
      OVERLAP_SUMS4(d, i + 12), OVERLAP_SUMS4(d, i + 16), OVERLAP_SUMS4(d, i + 20),              \
      OVERLAP_SUMS4(d, i + 24), OVERLAP_SUMS4(d, i + 28)
// The first 64 operands, and 32 more.
#define OVERLAP_FIRST64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OVERLAP_NEXT32 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OVERLAP_MMA(columns, k, type, registers, left, right, flag, turned, ...)               \
  asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " flag                                      \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" columns k ".f32." type "." type               \
               " {" registers "}, " left ", " right ", adds, 1, 1" turned "; }"                  \
               : __VA_ARGS__                                                                     \
               : "l"(a), "l"(b), "r"(adds), "n"(kTurnedA), "n"(kTurnedB))
#define OVERLAP_MMA128(k, type, turned)                                                          \
  OVERLAP_MMA("128", k, type, OVERLAP_FIRST64, "%64", "%65", "%66", turned, OVERLAP_SUMS32(d, 0), \
              OVERLAP_SUMS32(d, 32))
#define OVERLAP_MMA192(k, type, turned)                                                          \
  OVERLAP_MMA("192", k, type, OVERLAP_FIRST64 OVERLAP_NEXT32, "%96", "%97", "%98", turned,       \
              OVERLAP_SUMS32(d, 0), OVERLAP_SUMS32(d, 32), OVERLAP_SUMS32(d, 64))

// 64 rows of A and 2 * kSums columns of B, 128 or 192; 32 bytes of k. Operands of one byte are not turned.
template <class T, int kTurnedA, int kTurnedB, int kSums>
__device__ __forceinline__ void multiply(float (&d)[kSums], uint64_t a, uint64_t b, int adds) {
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    static_assert(kSums == 64);
    OVERLAP_MMA128("k32", "e4m3", "");
  } else if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kSums == 64) {
      OVERLAP_MMA128("k16", "f16", ", %67, %68");
    } else {
      OVERLAP_MMA192("k16", "f16", ", %99, %100");
    }
  } else {
    if constexpr (kSums == 64) {
      OVERLAP_MMA128("k16", "bf16", ", %67, %68");
    } else {
      OVERLAP_MMA192("k16", "bf16", ", %99, %100");
    }
  }
}
#undef OVERLAP_MMA192
#undef OVERLAP_MMA128
#undef OVERLAP_MMA
#undef OVERLAP_NEXT32
#undef OVERLAP_FIRST64
#undef OVERLAP_SUMS32
#undef OVERLAP_SUMS4

#endif

}  // namespace overlap::kernels
