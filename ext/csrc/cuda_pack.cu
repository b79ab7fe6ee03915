// One block copies one unit of at most 32 KiB. Conversions are those of the intrinsics that torch's own kernels use, so
// the bits agree, NaN included.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda_pack.hpp"

namespace moe_ckpt {
namespace {

constexpr int kThreads = 256;
constexpr size_t kMaxBlocks = 1u << 20;

template <class Vector>
__device__ void copy_vectors(char* dst, const char* src, uint64_t nbytes) {
  const uint64_t vectors = nbytes / sizeof(Vector);
  for (uint64_t i = threadIdx.x; i < vectors; i += kThreads)
    reinterpret_cast<Vector*>(dst)[i] = __ldcs(reinterpret_cast<const Vector*>(src) + i);
  for (uint64_t i = vectors * sizeof(Vector) + threadIdx.x; i < nbytes; i += kThreads) dst[i] = src[i];
}

__device__ void copy_row(char* dst, const char* src, uint64_t nbytes) {
  const uint64_t addresses = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src);
  if (addresses % 16 == 0) return copy_vectors<uint4>(dst, src, nbytes);
  if (addresses % 4 == 0) return copy_vectors<unsigned>(dst, src, nbytes);
  copy_vectors<unsigned char>(dst, src, nbytes);
}

template <class To, class From>
__device__ void convert_row(char* dst, const char* src, uint64_t count) {
  for (uint64_t i = threadIdx.x; i < count; i += kThreads)
    reinterpret_cast<To*>(dst)[i] = To(reinterpret_cast<const From*>(src)[i]);
}

__device__ void run_row(const Slice& unit, char* dst, const char* src) {
  switch (unit.cast) {
    case Cast::kBytes: return copy_row(dst, src, unit.count);
    case Cast::kFloatToBfloat16: return convert_row<__nv_bfloat16, float>(dst, src, unit.count);
    case Cast::kFloatToHalf: return convert_row<__half, float>(dst, src, unit.count);
    case Cast::kBfloat16ToFloat: return convert_row<float, __nv_bfloat16>(dst, src, unit.count);
    case Cast::kHalfToFloat: return convert_row<float, __half>(dst, src, unit.count);
  }
}

__global__ void __launch_bounds__(kThreads) run_units(const Slice* __restrict__ units, size_t count) {
  for (size_t index = blockIdx.x; index < count; index += gridDim.x) {
    const Slice unit = units[index];
    for (uint64_t row = 0; row < unit.rows; ++row)
      run_row(unit, reinterpret_cast<char*>(unit.dst) + row * unit.dst_stride,
              reinterpret_cast<const char*>(unit.src) + row * unit.src_stride);
  }
}

}  // namespace

cudaError_t launch_units(const Slice* units_on_device, size_t count, cudaStream_t stream) {
  if (!count) return cudaSuccess;
  run_units<<<static_cast<unsigned>(std::min(count, kMaxBlocks)), kThreads, 0, stream>>>(units_on_device, count);
  return cudaGetLastError();
}

}  // namespace moe_ckpt
