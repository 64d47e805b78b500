// An NVTX injection library: writes a line for each range that the domain "overlap_torch" opens or closes to the
// file that NVTX_NAMES names. Loaded by the process where NVTX_INJECTION64_PATH is its path.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::FILE* output = nullptr;
nvtxDomainHandle_t const ours = reinterpret_cast<nvtxDomainHandle_t>(&output);
nvtxDomainHandle_t const other = nullptr;

nvtxDomainHandle_t NVTX_API create(const char* name) {
  return std::strcmp(name, "overlap_torch") == 0 ? ours : other;
}

int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  if (domain == ours) {
    std::fprintf(output, "push %s\n", attributes->message.ascii);
    std::fflush(output);
  }
  return 0;
}

int NVTX_API pop(nvtxDomainHandle_t domain) {
  if (domain == ours) {
    std::fprintf(output, "pop\n");
    std::fflush(output);
  }
  return 0;
}

template <class Function>
NvtxFunctionPointer pointer(Function* function) {
  return reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_table) {
  const char* path = std::getenv("NVTX_NAMES");
  if (path == nullptr || (output = std::fopen(path, "a")) == nullptr) return 0;
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr) return 0;
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  if (size <= NVTX_CBID_CORE2_DomainCreateA) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = pointer(create);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = pointer(push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = pointer(pop);
  return 1;
}
