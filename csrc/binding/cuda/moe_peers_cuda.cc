// A mixture's rows over memory that the ranks map into each other. Every rank makes the same calls; each is one CopyCall.
//
//   dispatch | routes | counts, tokens to peers | flag | wait | offs, source | rows |
//   exact    | routes | counts to peers | flag | wait | offs | tokens to peers | flag | wait | source | rows |
//                                            the host waits ^ for the counts, while tokens travel
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "binding/cuda/moe_cuda.h"
#include "binding/cuda/moe_exchange.h"

namespace overlap::binding {
namespace {

using at::Tensor;
using runtime::CopyCall;

// Findings of a dispatch: by kernels, and, in exact mode, by the host.
struct Found {
  Routes routes;
  Tensor home;    // [T * K]
  Tensor known;   // [4 * W + 2]
  Tensor offs;    // [e]
  Tensor counts;  // [e]
};

kernels::ArrivalsParams arrivals_params(const Exchange& exchange, const CopyCall& call,
                                        const Found& found, int64_t align, int64_t max_rows) {
  kernels::ArrivalsParams params;
  params.ranks = exchange.ranks();
  params.rank = exchange.rank();
  params.experts = static_cast<int32_t>(found.offs.size(0));
  params.message_width = static_cast<int32_t>(found.routes.message.size(1));
  params.align = align;
  params.message = found.routes.message.const_data_ptr<int64_t>();
  params.met = reinterpret_cast<const int64_t*>(call.slot());
  params.known = found.known.data_ptr<int64_t>();
  params.longest = params.known + 4 * params.ranks + 1;
  params.offs = found.offs.data_ptr<int32_t>();
  params.counts = found.counts.data_ptr<int64_t>();
  params.home = found.home.data_ptr<int64_t>();
  params.own_routes = found.home.numel();
  params.most_rows = max_rows > 0 ? max_rows : -1;
  params.report = exchange.group().report();
  return params;
}

// The rows of the tokens in the slot from `at` on, `stride` of a rank, or in x.
Tensor expand(const Exchange& exchange, const CopyCall& call, const Tensor& x, int64_t at,
              const Tensor& source, int64_t choices, int64_t stride) {
  Tensor rows = at::empty({source.numel(), x.size(1)}, x.options());
  kernels::RowsParams params;
  params.element = element_of(x);
  params.rows = source.numel();
  params.width = x.size(1);
  params.source = call.slot() + at;
  params.index = source.const_data_ptr<int64_t>();
  params.divisor = choices;
  params.own = x.const_data_ptr();
  params.own_first = exchange.rank() * stride;
  params.own_count = x.size(0);
  params.output = rows.data_ptr();
  C10_CUDA_CHECK(kernels::gather_rows(params, exchange.stream()));
  return rows;
}

kernels::TokensParams tokens_params(const Exchange& exchange, const CopyCall& call, const Tensor& x,
                                    const Tensor& home, int64_t choices, int64_t stride) {
  kernels::TokensParams params;
  params.rank = exchange.rank();
  params.ranks = exchange.ranks();
  params.choices = static_cast<int32_t>(choices);
  params.tokens = x.size(0);
  params.row_bytes = row_bytes(x);
  params.source = x.const_data_ptr();
  params.home = home.const_data_ptr<int64_t>();
  params.stride = stride;
  exchange.set_slots(params, call);
  return params;
}

void send_counts(const Exchange& exchange, const CopyCall& call, const Tensor& ids,
                 const Found& found) {
  kernels::CountsParams params;
  params.experts = found.routes.experts;
  params.ids = ids.const_data_ptr();
  params.wide_ids = ids.scalar_type() == at::kLong;
  params.tokens = ids.size(0);
  params.choices = static_cast<int32_t>(ids.size(1));
  params.rank = exchange.rank();
  params.message_width = static_cast<int32_t>(found.routes.message.size(1));
  params.message = found.routes.message.const_data_ptr<int64_t>();
  params.home = found.home.data_ptr<int64_t>();
  exchange.set_slots(params, call);
  C10_CUDA_CHECK(kernels::send_counts(params, exchange.stream()));
}

// Steps of a dispatch that each rank announces; a wait also ends by a later one.
enum Step : int32_t { kCounts, kTokens };

using Dispatched = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// A dispatch's call, from the counts on.
class Dispatch {
 public:
  // `home_bytes`: of a result's row; 0: as many as x's.
  Dispatch(const Exchange& exchange, const Tensor& x, const Tensor& ids, at::IntArrayRef experts,
           int64_t align, bool ranks_first, int64_t max_rows, int64_t home_bytes)
      : exchange_(exchange),
        x_(x.contiguous()),
        ids_(ids.contiguous()),
        experts_(experts),
        align_(align),
        ranks_first_(ranks_first),
        max_rows_(max_rows),
        home_bytes_(home_bytes > 0 ? home_bytes : row_bytes(x_)) {
    found_.routes = find_routes(ids_, experts, false);
    found_.home = empty_longs(ids, ids.numel());
    found_.known = empty_longs(ids, 4 * exchange.ranks() + 2);
    const auto own = experts[static_cast<size_t>(exchange.rank())];
    found_.offs = at::empty({own}, ids.options().dtype(at::kInt));
    found_.counts = empty_longs(ids, own);
  }

  // The bytes of a slot for this number of a rank's tokens, for this call and the way home.
  int64_t bytes(int64_t tokens) const {
    const int64_t home_rows = ranks_first_ ? exchange_.ranks() : ids_.size(1);
    return std::max(places(tokens).end, tokens * home_rows * home_bytes_);
  }

  // Nothing waits for the host.
  Dispatched run(int64_t max_tokens) {
    CopyCall call = begin(bytes(max_tokens), max_tokens);
    send_counts(exchange_, call, ids_, found_);
    send_tokens(call, max_tokens, nullptr);
    call.await(kTokens);
    C10_CUDA_CHECK(kernels::count_arrivals(arrivals(call), exchange_.stream()));
    return finish(call, max_tokens, max_rows_);
  }

  // The host waits for the counts. Slots of more than `limit` bytes are not made, on all ranks.
  Dispatched run_exact(int64_t limit) {
    int64_t wanted = bytes(0);
    while (true) {
      CopyCall call = begin(wanted, 0);
      const int64_t fits = most_tokens(call.room());
      send_counts(exchange_, call, ids_, found_);
      call.announce(kCounts);
      call.await(kCounts);
      C10_CUDA_CHECK(kernels::count_arrivals(arrivals(call), exchange_.stream()));
      const Tensor known =
          at::empty(found_.known.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
      C10_CUDA_CHECK(cudaMemcpyAsync(known.data_ptr(), found_.known.const_data_ptr(),
                                     known.nbytes(), cudaMemcpyDeviceToHost, exchange_.stream()));
      runtime::Event came;
      came.record(exchange_.stream());
      send_tokens(call, fits, found_.known.const_data_ptr<int64_t>() + known.numel() - 1);
      C10_CUDA_CHECK(cudaEventSynchronize(came.get()));
      exchange_.group().check();  // a wait that failed lets any numbers pass
      const int64_t* numbers = known.const_data_ptr<int64_t>() + known.numel() - 2;
      call.await(kTokens);
      if (numbers[1] <= fits) return finish(call, numbers[1], numbers[0]);
      call.end();
      wanted = bytes(numbers[1]);
      if (wanted > limit) {
        const Tensor none = empty_longs(ids_, 0);
        return {x_, none, none, none, none, at::empty({0}, at::kLong)};
      }
    }
  }

 private:
  // The most tokens of a rank for which this number of bytes is enough.
  int64_t most_tokens(int64_t room) const {
    int64_t fits = 0;
    for (int64_t step = int64_t{1} << 32; step > 0; step /= 2) {
      if (bytes(fits + step) <= room) fits += step;
    }
    return fits;
  }

  kernels::TokenPlaces places(int64_t tokens) const {
    return kernels::token_places(exchange_.ranks(), found_.routes.message.size(1), ids_.size(1),
                                 row_bytes(x_), tokens);
  }

  CopyCall begin(int64_t bytes, int64_t max_tokens) const {
    return exchange_.begin(
        bytes, {kDispatch, max_tokens, x_.size(1), x_.element_size(), ids_.size(1), ranks_first_},
        experts_);
  }

  kernels::ArrivalsParams arrivals(const CopyCall& call) const {
    return arrivals_params(exchange_, call, found_, align_, max_rows_);
  }

  // Routes and tokens; announced.
  void send_tokens(CopyCall& call, int64_t stride, const int64_t* longest) const {
    kernels::TokensParams params =
        tokens_params(exchange_, call, x_, found_.home, ids_.size(1), stride);
    params.message_width = static_cast<int32_t>(found_.routes.message.size(1));
    params.longest = longest;
    params.routes = found_.routes.routes.const_data_ptr<int64_t>();
    params.begins = found_.routes.begins.const_data_ptr<int64_t>();
    C10_CUDA_CHECK(kernels::send_tokens(params, exchange_.stream()));
    call.announce(kTokens);
  }

  Dispatched finish(CopyCall& call, int64_t stride, int64_t rows) const {
    const int64_t choices = ids_.size(1);
    const Tensor source = empty_longs(ids_, rows);
    kernels::ArrivalsParams params = arrivals(call);
    params.rank_slots = stride * choices;
    params.slots = reinterpret_cast<const int32_t*>(call.slot() + places(stride).routes);
    params.source = source.data_ptr<int64_t>();
    params.room = rows;
    C10_CUDA_CHECK(kernels::place_arrivals(params, exchange_.stream()));
    const Tensor output = expand(exchange_, call, x_, places(stride).rows, source, choices, stride);
    call.end();
    Tensor splits = at::zeros({4, exchange_.ranks()}, at::kLong);
    splits.data_ptr<int64_t>()[0] = -1 - stride * choices;
    return {output, found_.offs, found_.counts, found_.home, source, splits};
  }

  const Exchange& exchange_;
  const Tensor x_;
  const Tensor ids_;
  const at::IntArrayRef experts_;
  const int64_t align_;
  const bool ranks_first_;
  const int64_t max_rows_;
  const int64_t home_bytes_;
  Found found_;
};

Dispatched dispatch(const Tensor& x, const Tensor& ids, at::IntArrayRef experts, int64_t align,
                    bool ranks_first, int64_t max_tokens, int64_t max_rows, int64_t limit,
                    const std::string& group, int64_t home_bytes) {
  const Exchange exchange(x, group);
  TORCH_CHECK(max_rows > 0 || !runtime::capture_id(exchange.stream()),
              "overlap_torch: the host waits for the numbers of rows of a mixture of experts, "
              "which cannot be captured "
              "in a CUDA graph: give max_rows= and max_tokens=");
  Dispatch call(exchange, x, ids, experts, align, ranks_first, max_rows, home_bytes);
  return max_rows > 0 ? call.run(max_tokens) : call.run_exact(limit);
}

// [T, D] to [R, D]; `stride`: routes of a rank.
Tensor spread(const Tensor& x, int64_t choices, const Tensor& home, const Tensor& source,
              int64_t stride, const std::string& group) {
  const Exchange exchange(x, group);
  const Tensor given = x.contiguous();
  const int64_t tokens = stride / choices;
  CopyCall call = exchange.begin(exchange.ranks() * tokens * row_bytes(x),
                                 {kSpread, tokens, x.size(1), x.element_size(), choices});
  C10_CUDA_CHECK(kernels::send_tokens(tokens_params(exchange, call, given, home, choices, tokens),
                                      exchange.stream()));
  call.announce(0);
  call.await(0);
  Tensor rows = expand(exchange, call, given, 0, source, choices, tokens);
  call.end();
  return rows;
}

}  // namespace

TORCH_LIBRARY_IMPL(overlap, CUDA, m) {
  m.impl("_moe_peer_dispatch", &dispatch);
  m.impl("_moe_peer_spread", &spread);
}

}  // namespace overlap::binding
