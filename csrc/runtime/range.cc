#include "runtime/range.h"

#include <string>

// Not every CUDA toolkit's installation has it.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define OVERLAP_WITH_NVTX
#endif

namespace overlap::runtime {

#if defined(OVERLAP_WITH_NVTX)
namespace {

// Null where no tool is attached.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("overlap_torch");
  return handle;
}

void open(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  nvtxDomainRangePushEx(domain(), &attributes);
}

}  // namespace

Range::Range(const plan::Problem& problem) : open_(domain() != nullptr) {
  if (!open_) return;
  open(std::string(plan::name(problem.op)) + " " + std::to_string(problem.m) + " x " +
       std::to_string(problem.n) + " x " + std::to_string(problem.k));
}

Range::Range(int chunk) : open_(domain() != nullptr) {
  if (open_) open("chunk " + std::to_string(chunk));
}

Range::~Range() {
  if (open_) nvtxDomainRangePop(domain());
}
#else
Range::Range(const plan::Problem& /*problem*/) {}
Range::Range(int /*chunk*/) {}
Range::~Range() = default;
#endif

}  // namespace overlap::runtime
