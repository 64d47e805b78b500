// Additions to CUTLASS's epilogue for the Hopper GEMM's instances for peers.
#pragma once

#include <type_traits>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>

namespace overlap::kernels {

// A tile's bulk store, from the same shared memory to several places.
struct MirroredStore : cute::SM90_TMA_STORE {};

}  // namespace overlap::kernels

// The traits of SM90_TMA_STORE, and where in the kernel's parameters the mirrors' tensor maps lie.
template <class Bits, class Aux>
struct cute::Copy_Traits<overlap::kernels::MirroredStore, Bits, Aux> {
  using Plain = Copy_Traits<SM90_TMA_STORE, Bits, Aux>;
  using ThrID = typename Plain::ThrID;
  using SrcLayout = typename Plain::SrcLayout;
  using DstLayout = typename Plain::DstLayout;
  using RefLayout = typename Plain::RefLayout;
  using AuxParams = Aux;

  TmaDescriptor tma_desc_;
  AuxParams aux_params_;
  int32_t mirrors_at_ = 0;  // bytes after this object
  int32_t num_mirrors_ = 0;

  CUTE_HOST_DEVICE constexpr TmaDescriptor const* get_tma_descriptor() const { return &tma_desc_; }

  template <class GShape>
  CUTE_HOST_DEVICE constexpr auto get_tma_tensor(GShape const& shape) const {
    return make_coord_tensor(make_layout(shape, aux_params_.g_stride_));
  }

  template <class TS, class SLayout, class TD, class DLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(Copy_Traits const& traits,
                                                     Tensor<TS, SLayout> const& source,
                                                     Tensor<TD, DLayout>& destination) {
    const void* const memory = raw_pointer_cast(source.data());
    const auto place = destination.data().coord_;
    const auto store = [&](const void* address) {
      detail::explode_tuple(detail::CallCOPY<SM90_TMA_STORE>{}, make_tuple(address, memory),
                            seq<0, 1>{}, place, tuple_seq<decltype(place)>{});
    };
    store(&traits.tma_desc_);
    const char* const mirrors = reinterpret_cast<const char*>(&traits) + traits.mirrors_at_;
    for (int32_t mirror = 0; mirror < traits.num_mirrors_; ++mirror) {
      store(mirrors + mirror * sizeof(TmaDescriptor));
    }
  }
};

namespace overlap::kernels {

// An epilogue as the builder makes it, but with another bulk store, and with its own memory for the
// source, so that only tiles that have one take part in its pipeline. It has two stages: fewer
// leave memory to the collector.
inline constexpr int kSourceStages = 2;
template <class Epilogue, class Store>
struct WithStore;
template <int kStagesC, int kStagesD, int kFragment, bool kReuse, bool kDelay, class Tile,
          class EpilogueTile, class C, class StrideC, class D, class StrideD, class Fusion,
          class LoadC, class LayoutC, class ReadC, class StoreD, class LayoutD, class WriteD,
          class AtomC, class RegisterD, class Store>
struct WithStore<
    cutlass::epilogue::collective::CollectiveEpilogue<
        cutlass::epilogue::Sm90TmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuse, kDelay>,
        Tile, EpilogueTile, C, StrideC, D, StrideD, Fusion, LoadC, LayoutC, ReadC, StoreD, LayoutD,
        WriteD, AtomC, RegisterD>,
    Store> {
  using Policy =
      cutlass::epilogue::Sm90TmaWarpSpecialized<kSourceStages, kStagesD, kFragment, false, kDelay>;
  using type =
      cutlass::epilogue::collective::CollectiveEpilogue<Policy, Tile, EpilogueTile, C, StrideC, D,
                                                        StrideD, Fusion, LoadC, LayoutC, ReadC,
                                                        Store, LayoutD, WriteD, AtomC, RegisterD>;
};

}  // namespace overlap::kernels
