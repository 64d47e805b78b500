// The headers of torch that most files here read, precompiled once for all of them (setup.py): a compiler takes ten seconds
// to read them. Files still include what they use.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
