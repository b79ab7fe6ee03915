// Conversions between fp32 and the 16-bit formats, in integers: the same bits on every machine.
#pragma once
#include <cstdint>
#include <cstring>

#include "abi.hpp"
#include "gradient.hpp"

namespace moe_ckpt {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

MOE_CLONES inline void bfloat16_to_float(const uint16_t* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = bits_float(static_cast<uint32_t>(from[i]) << 16);
}

// Without branches, so that it vectorises: the exponent is re-biased by a multiplication, which also normalises
// subnormals.
MOE_CLONES inline void half_to_float(const uint16_t* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = static_cast<uint32_t>(from[i] & 0x7fffu) << 13;
    const uint32_t special = (from[i] & 0x7c00u) == 0x7c00u ? kInfBits : 0u;
    const float scaled = bits_float(magnitude) * 0x1p112f;
    to[i] = bits_float(float_bits(scaled) | special | static_cast<uint32_t>(from[i] & 0x8000u) << 16);
  }
}

// Rounds half to even. Finite values saturate at the largest half; infinities stay, every NaN becomes the one quiet
// NaN.
inline uint16_t saturated_half(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & kAbsMask;
  if (magnitude > kInfBits) return kHalfNan;
  if (magnitude == kInfBits) return sign | 0x7c00u;
  if (magnitude >= 0x477fe000u) return sign | 0x7bffu;  // 65504 and above
  const int exponent = static_cast<int>(magnitude >> 23) - 112;
  uint32_t mantissa = magnitude & 0x7fffffu;
  if (exponent < -10) return sign;
  if (exponent <= 0) {  // subnormal half
    mantissa |= 0x800000u;
    const int shift = 14 - exponent;
    const uint32_t rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
    uint32_t kept = mantissa >> shift;
    kept += rest > tie || (rest == tie && (kept & 1u));
    return static_cast<uint16_t>(sign | kept);
  }
  uint32_t kept = static_cast<uint32_t>(exponent) << 10 | mantissa >> 13;
  const uint32_t rest = mantissa & 0x1fffu;
  kept += rest > 0x1000u || (rest == 0x1000u && (kept & 1u));
  return static_cast<uint16_t>(sign | kept);
}

}  // namespace moe_ckpt
