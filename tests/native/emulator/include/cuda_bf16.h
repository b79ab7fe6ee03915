// In the place of CUDA's header: conversions round to nearest even, and a NaN becomes 0x7fff, as on a device.
#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    const uint32_t wide = __float_as_uint(value);
    bits = std::isnan(value) ? 0x7fff : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
