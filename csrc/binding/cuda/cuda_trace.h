#pragma once

#include "runtime/trace.h"

namespace overlap::binding {

// The process's timeline of CUDA calls.
runtime::Trace& cuda_trace();

}  // namespace overlap::binding
