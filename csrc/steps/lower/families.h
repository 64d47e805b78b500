// The families of plans, each with its lowering.
#pragma once

#include "steps/list/list.h"
#include "steps/price/costs.h"

namespace overlap::steps {

// The spread of stores of a GEMM that stores into peers' memory.
inline int32_t spread_ns(const plan::Plan& plan, const plan::Machine& machine) {
  return static_cast<int32_t>(1e3 * store_spread_us(plan, machine));
}

// The families; what lower says holds for each.
StepList lower_produce(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                       const Variant& variant);
StepList lower_consume(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                       const Variant& variant);
StepList lower_ring(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                    const Variant& variant);
StepList lower_stripes(const plan::Plan& plan, int32_t rank,
                       const Variant& variant);  // checks callers' plans, too
StepList lower_direct(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                      const Variant& variant);
StepList lower_all_to_all(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                          const Variant& variant);
StepList lower_all_to_all_over_peers(const plan::Plan& plan, int32_t rank,
                                     const plan::Machine& machine, const Variant& variant);
StepList lower_sequential(const plan::Plan& plan, int32_t rank, const Variant& variant);
StepList lower_program(const plan::Plan& plan, int32_t rank, const plan::Machine& machine,
                       const Variant& variant);

}  // namespace overlap::steps
