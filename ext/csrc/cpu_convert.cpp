// Rounding is to nearest, ties to even. A NaN stays one. Its bits are those that torch gives in whole vectors of
// contiguous elements (elsewhere torch gives others): to half the upper bits of the payload stay and it becomes quiet;
// from half it becomes quiet too; from bfloat16 every bit stays; to bfloat16 see the header.
#include "convert.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define MOE_F16C __attribute__((target("avx,f16c")))
#endif

#include "abi.hpp"

namespace moe_ckpt {
namespace {

// Elements at addresses that are no multiple of their size are moved through aligned buffers of this many.
constexpr uint64_t kBlock = 1024;

MOE_CLONES void float_to_bfloat16(const uint32_t* src, uint16_t* dst, uint64_t count, uint16_t nan) {
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = src[i];
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    dst[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
}

MOE_CLONES void bfloat16_to_float(const uint16_t* src, uint32_t* dst, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) dst[i] = static_cast<uint32_t>(src[i]) << 16;
}

uint16_t float_to_half(uint32_t bits) {
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and more
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);             // less than half the least subnormal
  const int32_t exponent = static_cast<int32_t>(magnitude >> 23) - 112;
  const uint32_t mantissa = (magnitude & 0x7fffffu) | (exponent <= 0 ? 0x800000u : 0u);
  const uint32_t shift = exponent <= 0 ? 14 - exponent : 13;
  const uint32_t base = exponent <= 0 ? 0u : static_cast<uint32_t>(exponent) << 10;
  const uint32_t kept = base + (mantissa >> shift), lost = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  // A carry out of the mantissa is the next exponent, and from the largest number infinity: both are right.
  return static_cast<uint16_t>(sign | (kept + (lost > half || (lost == half && (kept & 1u)))));
}

uint32_t half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 31) return sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u);
  if (exponent) return sign | (exponent + 112) << 23 | mantissa << 13;
  const float value = static_cast<float>(mantissa) * 0x1p-24f;  // exact
  uint32_t found;
  std::memcpy(&found, &value, sizeof found);
  return sign | found;
}

#if defined(__x86_64__)
MOE_F16C uint64_t float_to_half_fast(const uint32_t* src, uint16_t* dst, uint64_t count) {
  uint64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 values = _mm256_loadu_ps(reinterpret_cast<const float*>(src + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

MOE_F16C uint64_t half_to_float_fast(const uint16_t* src, uint32_t* dst, uint64_t count) {
  uint64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(reinterpret_cast<float*>(dst + i), _mm256_cvtph_ps(values));
  }
  return i;
}

bool has_f16c() {
  static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return found;
}
#else
bool has_f16c() { return false; }
uint64_t float_to_half_fast(const uint32_t*, uint16_t*, uint64_t) { return 0; }
uint64_t half_to_float_fast(const uint16_t*, uint32_t*, uint64_t) { return 0; }
#endif

void convert(Cast cast, const void* src, void* dst, uint64_t count, uint16_t nan) {
  switch (cast) {
    case Cast::kFloatToBfloat16:
      return float_to_bfloat16(static_cast<const uint32_t*>(src), static_cast<uint16_t*>(dst), count, nan);
    case Cast::kBfloat16ToFloat:
      return bfloat16_to_float(static_cast<const uint16_t*>(src), static_cast<uint32_t*>(dst), count);
    case Cast::kFloatToHalf: {
      const auto* in = static_cast<const uint32_t*>(src);
      auto* out = static_cast<uint16_t*>(dst);
      for (uint64_t i = has_f16c() ? float_to_half_fast(in, out, count) : 0; i < count; ++i) out[i] = float_to_half(in[i]);
      return;
    }
    case Cast::kHalfToFloat: {
      const auto* in = static_cast<const uint16_t*>(src);
      auto* out = static_cast<uint32_t*>(dst);
      for (uint64_t i = has_f16c() ? half_to_float_fast(in, out, count) : 0; i < count; ++i) out[i] = half_to_float(in[i]);
      return;
    }
    case Cast::kBytes:
      std::memcpy(dst, src, count);
  }
}

void convert_row(const Slice& slice, const char* src, char* dst, uint16_t nan) {
  alignas(64) char in[kBlock * 4], out[kBlock * 4];
  const uint64_t src_size = src_itemsize(slice.cast), dst_size = dst_itemsize(slice.cast);
  const bool src_aligned = reinterpret_cast<uintptr_t>(src) % src_size == 0;
  const bool dst_aligned = reinterpret_cast<uintptr_t>(dst) % dst_size == 0;
  if (src_aligned && dst_aligned) return convert(slice.cast, src, dst, slice.count, nan);
  for (uint64_t start = 0; start < slice.count; start += kBlock) {
    const uint64_t count = slice.count - start < kBlock ? slice.count - start : kBlock;
    std::memcpy(in, src + start * src_size, count * src_size);
    convert(slice.cast, in, out, count, nan);
    std::memcpy(dst + start * dst_size, out, count * dst_size);
  }
}

}  // namespace

void copy_slice(const Slice& slice, uint16_t bfloat16_nan) {
  if (slice.cast == Cast::kBytes) return copy_bytes(slice);
  auto* dst = reinterpret_cast<char*>(slice.dst);
  const auto* src = reinterpret_cast<const char*>(slice.src);
  for (uint64_t row = 0; row < slice.rows; ++row, dst += slice.dst_stride, src += slice.src_stride)
    convert_row(slice, src, dst, bfloat16_nan);
}

}  // namespace moe_ckpt
