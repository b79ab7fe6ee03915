// Conversions of elements on the CPU with the bits that torch gives.
#pragma once
#include "slice.hpp"

namespace moe_ckpt {

// Copies one slice, converting as it says. Neither side need be aligned.
// `bfloat16_nan` is what any NaN becomes in bfloat16: torch's answer depends on the processor.
void copy_slice(const Slice& slice, uint16_t bfloat16_nan);

}  // namespace moe_ckpt
