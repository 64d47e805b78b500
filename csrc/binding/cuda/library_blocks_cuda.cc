// The framework's GEMM on blocks of rows that lie apart: [blocks, rows, K] x [N, K] -> [blocks, rows, N].
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/addmm_cuda_dispatch.h>
#include <ATen/ops/baddbmm_cuda_dispatch.h>
#include <ATen/ops/bmm_cuda_dispatch.h>
#include <ATen/ops/mm_cuda_dispatch.h>
#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "binding/cuda/cuda_call.h"

namespace overlap::binding {
namespace {

// Functions of the cuBLASLt that torch has loaded; nothing here links it.
struct Lt {
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) choose = nullptr;
  decltype(&cublasLtMatmulDescCreate) create_product = nullptr;
  decltype(&cublasLtMatmulDescDestroy) destroy_product = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_product = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) set_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  bool complete = false;

  static const Lt& get() {
    static const Lt found;
    return found;
  }

 private:
  Lt() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          library == nullptr ? nullptr : dlsym(library, symbol));
      return function != nullptr;
    };
    complete = find(matmul, "cublasLtMatmul") && find(choose, "cublasLtMatmulAlgoGetHeuristic") &&
               find(create_product, "cublasLtMatmulDescCreate") &&
               find(destroy_product, "cublasLtMatmulDescDestroy") &&
               find(set_product, "cublasLtMatmulDescSetAttribute") &&
               find(create_layout, "cublasLtMatrixLayoutCreate") &&
               find(destroy_layout, "cublasLtMatrixLayoutDestroy") &&
               find(set_layout, "cublasLtMatrixLayoutSetAttribute") &&
               find(create_preference, "cublasLtMatmulPreferenceCreate") &&
               find(destroy_preference, "cublasLtMatmulPreferenceDestroy") &&
               find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
  }
};

void check(cublasStatus_t status, const char* what) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, what, " failed with cuBLAS status ",
              static_cast<int>(status));
}

// One of Lt's objects, and an attribute of it.
template <class Opaque>
class Owned {
 public:
  using Handle = Opaque*;
  template <class Create, class Destroy, class... Arguments>
  Owned(Create create, Destroy destroy, Arguments... arguments) : destroy_(destroy) {
    check(create(&handle_, arguments...), "cuBLASLt's create");
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { destroy_(handle_); }
  Handle get() const { return handle_; }
  template <class Set, class Attribute, class Value>
  void set(Set set, Attribute attribute, const Value& value) {
    check(set(handle_, attribute, &value, sizeof(value)), "cuBLASLt's set");
  }

 private:
  Handle handle_ = nullptr;
  cublasStatus_t (*destroy_)(Handle);
};

uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return address == 0 ? 256U : static_cast<uint32_t>(std::min<uintptr_t>(address & -address, 256));
}

// As one batch whose epilogue adds the bias. False: these types, or this cuBLASLt, have none, and nothing was launched.
bool batch_with_bias(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const at::Tensor& output) {
  const at::ScalarType type = input.scalar_type();
  const Lt& lt = Lt::get();
  const bool along_k = weight.stride(1) == 1 && weight.stride(0) >= weight.size(1);
  const bool along_n = weight.stride(0) == 1 && weight.stride(1) >= weight.size(0);
  if (!lt.complete || (type != at::kBFloat16 && type != at::kHalf) || (!along_k && !along_n) ||
      input.stride(2) != 1 || output.stride(2) != 1 || bias.stride(0) != 1) {
    return false;
  }
  const cudaDataType_t element = type == at::kHalf ? CUDA_R_16F : CUDA_R_16BF;
  // cuBLASLt's matrices are column-major: output.T = weight x input.T.
  Owned<cublasLtMatmulDescOpaque_t> product(lt.create_product, lt.destroy_product,
                                            CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const auto set_product = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    product.set(lt.set_product, attribute, value);
  };
  set_product(CUBLASLT_MATMUL_DESC_TRANSA, along_k ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_product(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  set_product(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.const_data_ptr());
  set_product(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, element);

  const int64_t n = weight.size(0);
  const int64_t k = weight.size(1);
  const auto rows = static_cast<uint64_t>(input.size(1));
  using Layout = Owned<cublasLtMatrixLayoutOpaque_t>;
  const auto height = static_cast<uint64_t>(along_k ? k : n);
  const auto width = static_cast<uint64_t>(along_k ? n : k);
  Layout left(lt.create_layout, lt.destroy_layout, element, height, width,
              along_k ? weight.stride(0) : weight.stride(1));
  Layout right(lt.create_layout, lt.destroy_layout, element, static_cast<uint64_t>(k), rows,
               input.stride(1));
  Layout result(lt.create_layout, lt.destroy_layout, element, static_cast<uint64_t>(n), rows,
                output.stride(1));
  const auto batched = [&](Layout& layout, int64_t distance) {
    layout.set(lt.set_layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
               static_cast<int32_t>(input.size(0)));
    layout.set(lt.set_layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, distance);
  };
  batched(left, 0);
  batched(right, input.stride(0));
  batched(result, output.stride(0));

  Owned<cublasLtMatmulPreferenceOpaque_t> preference(lt.create_preference, lt.destroy_preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    preference.set(lt.set_preference, attribute, value);
  };
  const uint64_t workspace_bytes = at::cuda::getCUDABlasLtWorkspaceSize();
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(weight.const_data_ptr()));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(input.const_data_ptr()));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(output.const_data_ptr()));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(output.const_data_ptr()));
  const auto reduction = type == at::kHalf ? at::globalContext().allowFP16ReductionCuBLAS()
                                           : at::globalContext().allowBF16ReductionCuBLAS();
  if (reduction != at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK) {
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
                                 CUBLASLT_REDUCTION_SCHEME_NONE));
  }

  cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  cublasLtMatmulHeuristicResult_t chosen{};
  int found = 0;
  const cublasStatus_t status =
      lt.choose(handle, product.get(), left.get(), right.get(), result.get(), result.get(),
                preference.get(), 1, &chosen, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) return false;
  const float one = 1.0F;
  const float zero = 0.0F;
  void* place = output.data_ptr();
  check(lt.matmul(handle, product.get(), &one, weight.const_data_ptr(), left.get(),
                  input.const_data_ptr(), right.get(), &zero, place, result.get(), place,
                  result.get(), &chosen.algo, at::cuda::getCUDABlasLtWorkspace(), workspace_bytes,
                  at::cuda::getCurrentCUDAStream()),
        "cublasLtMatmul");
  return true;
}

// The part of the GPU that computes, on average, while this number of tiles of the library's usual size runs in waves.
double used_part(int64_t tiles) {
  const double sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  return static_cast<double>(tiles) / (std::ceil(static_cast<double>(tiles) / sms) * sms);
}

// True if blocks [rows, ...] x [n, ...] fill the GPU as well one by one as in a batch.
bool fill_alone(int64_t blocks, int64_t rows, int64_t n) {
  constexpr int64_t kTileRows = 128;
  constexpr int64_t kTileColumns = 256;
  constexpr int64_t kMostBlocks = 16;  // more launches cost the host more than a batch does
  constexpr double kLoss = 0.95;
  const int64_t tiles =
      (rows + kTileRows - 1) / kTileRows * ((n + kTileColumns - 1) / kTileColumns);
  return blocks == 1 || tiles == 0 ||
         (blocks <= kMostBlocks && used_part(tiles) >= kLoss * used_part(blocks * tiles));
}

}  // namespace

void library_gemm_of_blocks(const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::Tensor output) {
  const int64_t blocks = input.size(0);
  if (fill_alone(blocks, input.size(1), weight.size(0))) {
    for (int64_t block = 0; block < blocks; ++block) {
      at::Tensor place = output.select(0, block);
      if (bias.has_value()) {
        at::cuda::addmm_out(place, *bias, input.select(0, block), transposed(weight));
      } else {
        at::cuda::mm_out(place, input.select(0, block), transposed(weight));
      }
    }
    return;
  }
  const at::Tensor weights = transposed(weight).expand({blocks, weight.size(1), weight.size(0)});
  if (!bias.has_value()) {
    at::cuda::bmm_out(output, input, weights);
  } else if (!batch_with_bias(input, weight, *bias, output)) {
    at::cuda::baddbmm_out(output, *bias, input, weights);
  }
}

}  // namespace overlap::binding
