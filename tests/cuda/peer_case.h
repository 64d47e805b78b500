// Collectives in one kernel, with all "ranks" on one device: each on a stream of its own, in memory
// of its own.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checking.h"
#include "kernels/peer/peer_collective.h"
#include "kernels/peer/peer_exchange.h"
#include "kernels/peer/peer_low_latency.h"
#include "kernels/peer/peer_signal.h"

namespace overlap::check {

// Ranks that reduce or gather small integers, call after call.
class PeerCase {
 public:
  PeerCase(int ranks, int64_t elements)
      : ranks_(ranks), elements_(elements), piece_((elements / 4 + ranks - 1) / ranks * 4) {
    for (int rank = 0; rank < ranks; ++rank) {
      memory_.push_back(std::make_unique<Memory>(ranks, elements + 4 * ranks));
    }
  }

  void check(int calls) {
    for (int call = 0; call < calls; ++call) {
      low_latency(call, call % 3 != 0);
      reduce(call, false);
      reduce(call, true);
      gather(call);
      exchange(call);
    }
  }

  // Ranks whose calls have other tags wait in vain for each other, and say so.
  void check_disagreement() {
    for (const bool low_latency_call : {false, true}) {
      fill(0);
      for (int rank = 0; rank < ranks_; ++rank) {
        const uint64_t tag = tag_of(rank == 0 ? 1 : 2);
        if (low_latency_call) {
          kernels::PeerLowLatencyParams params = low_latency_of(rank, false);
          params.tag = tag;
          params.deadline_ns = kShortWaitNs;
          CUDA_CHECK(kernels::peer_all_reduce_low_latency(params, memory(rank).stream));
        } else {
          kernels::PeerCollectiveParams params = reduce_of(rank, true);
          params.tag = tag;
          params.deadline_ns = kShortWaitNs;
          CUDA_CHECK(kernels::peer_collective(params, memory(rank).stream));
        }
      }
      CUDA_CHECK(cudaDeviceSynchronize());
      if (!report_.failed()) {
        fail("peers: %d ranks with other %s took each other's signals", ranks_,
             low_latency_call ? "low-latency calls" : "calls");
      }
      report_.clear();
    }
  }

 private:
  struct Memory {
    Memory(int ranks, int64_t elements)
        : flags(kFlags),
          slot(2 * ranks * elements),
          low_latency(2 * ranks * low_latency_room(elements, ranks) / 4),
          own(elements),
          output(elements * ranks) {
      flags.zero(nullptr);
      low_latency.zero(nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
    }
    // Blocks' flags of both steps, then the calls that each rank has ended, calls, blocks, calls, blocks
    // that have sent, and low-latency calls' flags.
    static constexpr int64_t kBlocks = kernels::kMaxPeers * kernels::kMaxPeerBlocks;
    static constexpr int64_t kFlags = 2 * kBlocks + kernels::kMaxPeers + 4 + 2 * kernels::kMaxPeers;
    uint64_t* blocks(int step, int writer) {
      return flags.data() + step * kBlocks + writer * kernels::kMaxPeerBlocks;
    }
    uint64_t* ended(int writer) { return flags.data() + 2 * kBlocks + writer; }
    uint64_t* counts(int index) { return ended(kernels::kMaxPeers) + index; }
    uint64_t* compared(int writer) { return counts(4) + writer; }

    Buffer<uint64_t> flags;
    Buffer<float> slot, low_latency, own, output;
    const Stream stream;
  };

  static constexpr int64_t kShortWaitNs = 50'000'000;
  static constexpr uint64_t tag_of(uint64_t call) { return call << kernels::kCallTagShift; }
  Memory& memory(int rank) { return *memory_[static_cast<size_t>(rank)]; }

  // Bytes of one writer's message.
  static int64_t low_latency_room(int64_t elements, int ranks) {
    // All of it in one step, or, in pieces, terms of the peer's and sums of the own.
    const int64_t bytes = elements * 4;
    const int64_t piece = plan::low_latency_piece(bytes, ranks) * plan::kRunBytes;
    return kernels::low_latency_bytes(std::max(bytes, 2 * piece));
  }

  void fill(int call) {
    for (int rank = 0; rank < ranks_; ++rank) {
      std::vector<float> terms(static_cast<size_t>(elements_));
      for (int64_t i = 0; i < elements_; ++i) terms[static_cast<size_t>(i)] = term(call, rank, i);
      Memory& own = memory(rank);
      upload(own.own.data(), terms);
      own.output.poison(nullptr);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  void expect(int rank, int64_t first, int64_t count, const std::string& what, auto right) {
    CUDA_CHECK(cudaDeviceSynchronize());
    if (report_.failed()) fail("%s: a wait passed its deadline", what.c_str());
    const std::vector<float> got = download(memory(rank).output.data() + first, count);
    for (int64_t i = 0; i < count; ++i) {
      if (got[static_cast<size_t>(i)] != right(first + i)) {
        fail("%s, %d ranks, rank %d: element %lld is %g, expected %g", what.c_str(), ranks_, rank,
             static_cast<long long>(first + i), got[static_cast<size_t>(i)], right(first + i));
      }
    }
  }

  kernels::PeerLowLatencyParams low_latency_of(int rank, bool in_pieces) {
    const int64_t buffer = low_latency_room(elements_, ranks_);
    Memory& own = memory(rank);
    kernels::PeerLowLatencyParams params;
    params.dtype = plan::DType::kFloat32;
    params.rank = rank;
    params.ranks = ranks_;
    params.in_pieces = in_pieces;
    params.words = elements_;
    params.own = own.own.data();
    params.output = own.output.data();
    for (int peer = 0; peer < ranks_; ++peer) {
      params.destination[peer] =
          reinterpret_cast<char*>(memory(peer).low_latency.data()) + 2 * rank * buffer;
      params.received[peer] = reinterpret_cast<char*>(own.low_latency.data()) + 2 * peer * buffer;
      params.announce[peer] = memory(peer).compared(rank);
    }
    params.arrived = own.compared(0);
    params.buffer_bytes = buffer;
    params.whole_lines = elements_ != 12;  // else the number follows its data
    params.calls = own.counts(2);
    params.tag = tag_of(3);
    params.deadline_ns = kWaitNs;
    params.report = report_.get();
    return params;
  }

  void low_latency(int call, bool in_pieces) {
    fill(call);
    for (int rank = 0; rank < ranks_; ++rank) {
      CUDA_CHECK(kernels::peer_all_reduce_low_latency(low_latency_of(rank, in_pieces),
                                                      memory(rank).stream));
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      expect(rank, 0, elements_, in_pieces ? "low latency, in pieces" : "low latency",
             [&](int64_t i) { return sum_of_terms(ranks_, call, i); });
    }
  }

  kernels::PeerCollectiveParams params_of(int rank) {
    Memory& own = memory(rank);
    kernels::PeerCollectiveParams params;
    params.dtype = plan::DType::kFloat32;
    params.rank = rank;
    params.ranks = ranks_;
    params.stride = piece_ / 4;
    params.own = own.own.data();
    params.output = own.output.data();
    for (int peer = 0; peer < ranks_; ++peer) {
      Memory& theirs = memory(peer);
      params.count[peer] =
          (std::min((peer + 1) * piece_, elements_) - std::min(peer * piece_, elements_)) / 4;
      params.received[peer] = own.slot.data() + peer * piece_;
      params.final_received[peer] = own.slot.data() + (ranks_ + peer) * piece_;
      params.final_destination[peer] = theirs.slot.data() + (ranks_ + rank) * piece_;
      if (peer != rank) params.destination[peer] = theirs.slot.data() + rank * piece_;
      for (int step = 0; step < 2; ++step) {
        params.announce[step][peer] = theirs.blocks(step, rank);
        params.arrived[step] = own.blocks(step, 0);
      }
      params.announce_end[peer] = theirs.ended(rank);
    }
    params.ended = own.ended(0);
    params.calls = own.counts(0);
    params.tag = tag_of(5);
    params.blocks_done = reinterpret_cast<uint32_t*>(own.counts(1));
    params.deadline_ns = kWaitNs;
    params.report = report_.get();
    return params;
  }

  kernels::PeerCollectiveParams reduce_of(int rank, bool gathers) {
    const float* terms = memory(rank).own.data();
    kernels::PeerCollectiveParams params = params_of(rank);
    params.reduces = true;
    params.gathers = gathers;
    params.own = terms + std::min(rank * piece_, elements_);
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank) params.send[peer] = terms + std::min(peer * piece_, elements_);
    }
    return params;
  }

  void reduce(int call, bool gathers) {
    fill(call);
    for (int rank = 0; rank < ranks_; ++rank) {
      CUDA_CHECK(kernels::peer_collective(reduce_of(rank, gathers), memory(rank).stream));
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t first = std::min(rank * piece_, elements_);
      const int64_t count = std::min(first + piece_, elements_) - first;
      if (gathers) {
        expect(rank, 0, elements_, "reduce and gather",
               [&](int64_t i) { return sum_of_terms(ranks_, call, i); });
      } else {
        expect(rank, 0, count, "reduce",
               [&](int64_t i) { return sum_of_terms(ranks_, call, first + i); });
      }
    }
  }

  void gather(int call) {
    fill(call);
    for (int rank = 0; rank < ranks_; ++rank) {
      Memory& own = memory(rank);
      kernels::PeerCollectiveParams params = params_of(rank);
      params.gathers = true;
      for (int peer = 0; peer < ranks_; ++peer) {
        params.count[peer] = params.stride;
        if (peer != rank) params.send[peer] = own.own.data();
      }
      CUDA_CHECK(kernels::peer_collective(params, own.stream));
    }
    const int64_t count = std::min(piece_, elements_);
    for (int rank = 0; rank < ranks_; ++rank) {
      for (int peer = 0; peer < ranks_; ++peer) {
        expect(rank, peer * piece_, count, "gather",
               [&](int64_t i) { return term(call, peer, i - peer * piece_); });
      }
    }
  }

  // Elements of the message between two ranks, a multiple of 4: all, less, or none.
  int64_t message(int call, int from, int to) const {
    const int64_t share = (from * 5 + to * 3 + call) % 4;
    return elements_ / 4 * share / 3 * 4;
  }
  static float letter(int call, int from, int to, int64_t index) {
    return term(call, from, index + 2 * to);
  }

  // Every second rank has stored its messages before, the others send them; in the next call the other
  // way about.
  void exchange(int call) {
    const int64_t room = elements_;  // of a message
    for (int rank = 0; rank < ranks_; ++rank) {
      memory(rank).output.poison(nullptr);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<std::unique_ptr<Buffer<float>>> outgoing;
    std::vector<std::vector<float>> expected(static_cast<size_t>(ranks_));
    std::vector<kernels::PeerExchangeParams> all;
    for (int rank = 0; rank < ranks_; ++rank) {
      Memory& own = memory(rank);
      kernels::PeerExchangeParams params{params_of(rank)};
      params.blocks_sent = reinterpret_cast<uint32_t*>(own.counts(3));
      params.sends = (rank + call) % 2 == 0;
      outgoing.push_back(std::make_unique<Buffer<float>>(ranks_ * room));
      int64_t place = 0;
      for (int peer = 0; peer < ranks_; ++peer) {
        const int64_t count = message(call, rank, peer);
        const bool to_self = peer == rank;
        std::vector<float> letters(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) {
          letters[static_cast<size_t>(i)] = letter(call, rank, peer, i);
        }
        float* slot = memory(peer).slot.data() + rank * room;
        // The data stored before: in the slot, and this rank's own where it belongs.
        float* from = params.sends ? outgoing.back()->data() + peer * room : slot;
        const int64_t received = message(call, peer, rank);
        params.output[peer] = own.output.data() + place;
        if (to_self && !params.sends) from = own.output.data() + place;
        if (count > 0) upload(from, letters);
        if (params.sends) {
          params.send[peer] = from;
          params.send_count[peer] = count / 4;
        }
        if (!to_self) {
          params.destination[peer] = slot;
          params.received[peer] = own.slot.data() + peer * room;
          params.receive_count[peer] = received / 4;
        }
        for (int64_t i = 0; i < received; ++i) {
          expected[static_cast<size_t>(rank)].push_back(letter(call, peer, rank, i));
        }
        place += received;
      }
      all.push_back(params);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int rank = 0; rank < ranks_; ++rank) {
      CUDA_CHECK(kernels::peer_exchange(all[static_cast<size_t>(rank)], memory(rank).stream));
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::vector<float>& right = expected[static_cast<size_t>(rank)];
      expect(rank, 0, static_cast<int64_t>(right.size()), "exchange",
             [&](int64_t i) { return right[static_cast<size_t>(i)]; });
    }
  }

  const int ranks_;
  const int64_t elements_;  // of a message: a multiple of 4
  const int64_t piece_;
  Report report_;
  std::vector<std::unique_ptr<Memory>> memory_;
};

inline void check_peers() {
  int cases = 0;
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t elements : {4, 12, 400, 100'000}) {
      PeerCase(ranks, elements).check(5);
      ++cases;
    }
  }
  for (const int ranks : {2, 4}) PeerCase(ranks, 400).check_disagreement();
  std::printf("peers: %d cases good\n", cases);
}

}  // namespace overlap::check
