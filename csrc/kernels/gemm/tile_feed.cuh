// Tiles handed out to the clusters of a persistent grid as they come for them. Where kernels wait for
// what others compute, no cluster may own tiles before it runs: something else may hold its SMs, and
// wait for a kernel that waits for those tiles.
//
// One thread of a cluster draws tiles from a counter in memory, a few ahead, and passes them to all
// readers of both CTAs through a ring of entries in shared memory. The warp that loads operands has no
// time to lose between two tiles, so another warp reads the ring for it, and leaves it where to load
// from, one tile ahead.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace overlap::kernels {

struct TileFeed {
  static constexpr uint32_t kHalf = 8;  // entries; a half of the ring is given back at a time
  static constexpr uint32_t kSlots = 2 * kHalf;
  static constexpr int32_t kEnd = -1;
  static constexpr int kWarpThreads = 32;

  struct alignas(8) Entry {
    int32_t index = kEnd;  // of the cluster's first tile
    int32_t sources = 0;   // tiles with a source that came before
  };

  // Where a tile's operands begin; row kEnd: there are no more.
  struct alignas(8) Place {
    int32_t row = 0;
    int32_t column = 0;
  };

  struct SharedStorage {
    alignas(8) uint64_t full[kSlots];  // barriers: an entry is there
    // Barriers of the cluster's first CTA: a half has been read; the first readers have taken an entry.
    uint64_t read[2];
    uint64_t begun;
    Entry entries[kSlots];
    // For the warp that loads.
    uint64_t ahead_full;
    uint64_t ahead_empty;
    Place ahead;
  };

  // By one thread of each CTA, before the cluster's first meeting. `readers`: warps of a CTA.
  __device__ __forceinline__ static void init(SharedStorage& shared, int cluster_size,
                                              int readers) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) init_barrier(&shared.full[slot], 1);
    init_barrier(&shared.read[0], cluster_size * readers);
    init_barrier(&shared.read[1], cluster_size * readers);
    init_barrier(&shared.begun, cluster_size);
    init_barrier(&shared.ahead_full, 1);
    init_barrier(&shared.ahead_empty, kWarpThreads);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    expect_entry(shared, 0);
  }

  // The next tile that nobody has taken, by one thread of the cluster's first CTA. `taken`: a counter,
  // and how many clusters have left, both zero before and after the kernel.
  __device__ __forceinline__ static int32_t draw(uint32_t* taken, int cluster_size) {
    return static_cast<int32_t>(atomicAdd(taken, 1)) * cluster_size;
  }

  // By the same thread: passes on the tile that it has drawn and all others, then `ends` entries that
  // say that there are no more. A tile is drawn when the one before has been read, three tiles before its
  // operands are loaded: drawn earlier, it would be kept from clusters that are free.
  template <class HasSource>
  __device__ __forceinline__ static void feed(SharedStorage& shared, int32_t first, uint32_t* taken,
                                              int cluster_size, int num_tiles, int ends,
                                              HasSource has_source) {
    Entry entry{first, 0};
    for (uint32_t turn = 0; ends > 0; ++turn) {
      const bool valid = entry.index < num_tiles;
      if (turn % kHalf == 0 && turn >= kSlots) {
        wait(&shared.read[turn / kHalf % 2], (turn / kSlots + 1) % 2);
      }
      const uint32_t slot = turn % kSlots;
      for (int cta = 0; cta < cluster_size; ++cta) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%0], {%1, %2}, [%3];" ::
                "r"(in_cta(&shared.entries[slot], cta)),
            "r"(valid ? entry.index : kEnd), "r"(entry.sources),
            "r"(in_cta(&shared.full[slot], cta))
            : "memory");
      }
      if (valid) {
        entry.sources += has_source(entry.index) ? 1 : 0;
        wait(&shared.begun, turn % 2);
        entry.index = draw(taken, cluster_size);
      } else {
        --ends;
      }
    }
  }

  // By one thread of each cluster, after all that both CTAs do: whether it is the last one to leave.
  // Then the counter is given back.
  __device__ __forceinline__ static bool last_to_leave(uint32_t* taken, int cluster_size) {
    const uint32_t clusters = gridDim.x / cluster_size;
    __threadfence();
    if (atomicAdd(taken + 1, 1) + 1 != clusters) return false;
    __threadfence();
    taken[0] = taken[1] = 0;
    return true;
  }

  // By one warp: leaves a place for the warp that loads, once that has taken the one before.
  __device__ __forceinline__ static void put_ahead(SharedStorage& shared, uint32_t turn,
                                                   Place place) {
    wait(&shared.ahead_empty, turn % 2 ^ 1);
    if (threadIdx.x % kWarpThreads == 0) {
      shared.ahead = place;
      arrive(&shared.ahead_full);
    }
    __syncwarp();
  }

  // By the warp that loads.
  __device__ __forceinline__ static Place take_ahead(SharedStorage& shared, uint32_t turn) {
    wait(&shared.ahead_full, turn % 2);
    const Place place = shared.ahead;
    arrive(&shared.ahead_empty);
    return place;
  }

  // A warp's view of the entries: all of them, or every `step`-th from the `turn`-th on. `begins`: this
  // warp is the first to work on a tile.
  class Reader {
   public:
    __device__ __forceinline__ Reader(SharedStorage& shared, uint32_t turn, uint32_t step,
                                      bool begins)
        : shared_(shared), turn_(turn), step_(step), begins_(begins) {}

    __device__ __forceinline__ Entry next() {
      wait(&shared_.full[turn_ % kSlots], turn_ / kSlots % 2);
      const Entry entry = shared_.entries[turn_ % kSlots];
      __syncwarp();
      if (threadIdx.x % kWarpThreads == 0) {
        if (begins_) {
          expect_entry(shared_, (turn_ + 1) % kSlots);
          if (entry.index != kEnd) arrive_at_first_cta(&shared_.begun);
        }
        // The last one of this half that this warp reads.
        if (turn_ % kHalf + step_ >= kHalf) arrive_at_first_cta(&shared_.read[turn_ / kHalf % 2]);
      }
      turn_ += step_;
      return entry;
    }

   private:
    SharedStorage& shared_;
    uint32_t turn_;
    const uint32_t step_;
    const bool begins_;
  };

 private:
  __device__ __forceinline__ static uint32_t address_of(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  __device__ __forceinline__ static uint32_t in_cta(const void* shared, int cta) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(mapped)
                 : "r"(address_of(shared)), "r"(cta));
    return mapped;
  }
  __device__ __forceinline__ static void init_barrier(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count)
                 : "memory");
  }
  __device__ __forceinline__ static void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
  }
  // The slot's barrier completes with the entry's bytes.
  __device__ __forceinline__ static void expect_entry(SharedStorage& shared, uint32_t slot) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     address_of(&shared.full[slot])),
                 "n"(sizeof(Entry))
                 : "memory");
  }
  // Nothing is passed on: what was read is in registers.
  __device__ __forceinline__ static void arrive_at_first_cta(uint64_t* barrier) {
    asm volatile(
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_cta(barrier, 0))
        : "memory");
  }
  __device__ __forceinline__ static void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address_of(barrier)),
        "r"(parity)
        : "memory");
  }
};

}  // namespace overlap::kernels
