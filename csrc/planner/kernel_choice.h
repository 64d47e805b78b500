// The GEMM kernels that candidates of a problem have.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "steps/price/price.h"

namespace overlap::planner {

// The kernel of this package that takes the problem on the machine, or kLibrary. In a row ping-pong is the faster one: see
// one_way_kernels.
plan::Kernel best_kernel(const plan::Problem& problem, const plan::Machine& machine);

// The kernels of what moves each byte once, the preferred one first. Larger tiles need less of shared memory's rate, but
// the cooperative kernel's stores come between products, which weighs at small K. Where an all-gather's GEMM is long the
// chip reaches its power limit, and ping-pong needs less power. In fp8 tiles of 128 x 128 were the slower ones wherever wide
// ones fill the SMs. benchmarks/notes.md has the times ("Tile shapes on Hopper", "All-gathers in fp8").
std::vector<plan::Kernel> one_way_kernels(const plan::Problem& problem,
                                          const plan::Machine& machine,
                                          const steps::Prediction& sequence, plan::Kernel kernel,
                                          plan::Transport transport);

// The kernels that store into peers' memory and add what peers stored: ping-pong. Wide tiles take more of a round that
// is not full, which the model counts.
std::vector<plan::Kernel> peer_kernels(const plan::Problem& problem, const plan::Machine& machine,
                                       const steps::Prediction& sequence, plan::Kernel kernel);

}  // namespace overlap::planner
