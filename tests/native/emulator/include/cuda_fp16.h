// In the place of CUDA's header: conversions round to nearest even, and a NaN becomes 0x7fff, as on a device.
#pragma once
#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float value) {
    const auto narrow = static_cast<_Float16>(value);
    std::memcpy(&bits, &narrow, sizeof bits);
    if (std::isnan(value)) bits = 0x7fff;
  }
  explicit operator float() const {
    _Float16 narrow;
    std::memcpy(&narrow, &bits, sizeof bits);
    return static_cast<float>(narrow);
  }
};
inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
