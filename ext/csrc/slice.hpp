// One copy between two places in memory, as it arrives from Python.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef __CUDACC__
#define __host__
#define __device__
#endif

namespace moe_ckpt {

// Conversion of elements; mirrors `Cast` of native/_plan.py.
enum class Cast : int32_t { kBytes = 0, kFloatToBfloat16 = 1, kFloatToHalf = 2, kBfloat16ToFloat = 3, kHalfToFloat = 4 };

// Where a pointer leads; mirrors `Space` of native/_plan.py.
enum class Space : int32_t { kPageable = 0, kPinned = 1, kDevice = 2 };

// `rows` runs of `count` contiguous elements; an element of kBytes is one byte. Mirrors `Slice` of _prototypes.py.
struct Slice {
  uint64_t dst, src;
  uint64_t count, rows;
  int64_t dst_stride, src_stride;  // bytes from row to row
  Cast cast;
  Space dst_space, src_space;
  int32_t is_relative;  // used by Plan
};

__host__ __device__ constexpr uint64_t src_itemsize(Cast cast) {
  return cast == Cast::kBytes ? 1 : cast == Cast::kFloatToBfloat16 || cast == Cast::kFloatToHalf ? 4 : 2;
}
__host__ __device__ constexpr uint64_t dst_itemsize(Cast cast) {
  return cast == Cast::kBytes ? 1 : cast == Cast::kFloatToBfloat16 || cast == Cast::kFloatToHalf ? 2 : 4;
}

inline uint64_t src_nbytes(const Slice& slice) { return slice.rows * slice.count * src_itemsize(slice.cast); }
inline uint64_t dst_nbytes(const Slice& slice) { return slice.rows * slice.count * dst_itemsize(slice.cast); }

// Host memory to host memory, no conversion.
inline void copy_bytes(const Slice& slice) {
  auto* dst = reinterpret_cast<char*>(slice.dst);
  const auto* src = reinterpret_cast<const char*>(slice.src);
  for (uint64_t row = 0; row < slice.rows; ++row, dst += slice.dst_stride, src += slice.src_stride)
    std::memcpy(dst, src, slice.count);
}

}  // namespace moe_ckpt
