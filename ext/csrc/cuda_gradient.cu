// Adaptive compression of gradients on the device, without waiting for it and without a second read of a big gradient.
// Writes the bytes that cpu_gradient.cpp writes: entries leave in index order (decoupled look-back: Merrill & Garland,
// "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016), and magnitudes are compared as integers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda_device.hpp"
#include "cuda_error.hpp"
#include "gradient.hpp"

namespace moe_ckpt {
namespace {

constexpr int kWarp = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int kSelectThreads = 256;
constexpr int kPerThread = kTile / kSelectThreads;
constexpr int kWideThreads = 1024;
constexpr int64_t kMaxSamples = 32768;
// Their magnitudes fit the shared memory of one block on the big chips (sm_80, sm_90, sm_100); the others have 99 KiB.
constexpr int kStagedNbytes = kMaxSamples * sizeof(uint32_t);
constexpr int kOtherSharedNbytes = 4096;  // more than the kernel and the driver take beside them

__device__ float as_float(float x) { return x; }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float as_float(__half x) { return __half2float(x); }

template <class T>
__device__ uint32_t magnitude(T x) {
  return __float_as_uint(as_float(x)) & kAbsMask;
}

// As saturated_half of half.hpp.
__device__ uint16_t saturated_half(float x) {
  const uint32_t bits = __float_as_uint(x) & kAbsMask;
  if (bits > kInfBits) return kHalfNan;
  if (bits == kInfBits) return __half_as_ushort(__float2half_rn(x));
  return __half_as_ushort(__float2half_rn(fminf(fmaxf(x, -kHalfMax), kHalfMax)));
}

template <class V>
__device__ V warp_sum(V v) {
  for (int k = kWarp / 2; k; k >>= 1) v += __shfl_xor_sync(kAll, v, k);
  return v;
}

__device__ uint32_t warp_max(uint32_t v) {
  for (int k = kWarp / 2; k; k >>= 1) v = max(v, __shfl_xor_sync(kAll, v, k));
  return v;
}

// ---- INT8: one block per tensor

template <class T>
__device__ void quantize_tensor(const QuantizeJob& job) {
  __shared__ uint32_t warp_largest[kWideThreads / kWarp];
  __shared__ uint32_t not_finite;
  const T* from = static_cast<const T*>(job.source);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (threadIdx.x == 0) not_finite = 0;
  uint32_t largest = 0, found = 0;
  for (uint64_t i = threadIdx.x; i < job.count; i += blockDim.x) {
    const uint32_t bits = magnitude(from[i]);
    largest = max(largest, bits);
    found += bits >= kInfBits;
  }
  largest = warp_max(largest);
  found = warp_sum(found);
  __syncthreads();
  if (lane == 0) {
    warp_largest[warp] = largest;
    if (found) atomicAdd(&not_finite, found);
  }
  __syncthreads();
  largest = warp_max(warp_largest[lane]);  // 32 warps, so each lane has one
  const float scale = largest >= kInfBits ? __uint_as_float(kNanBits) : __fdiv_rn(__uint_as_float(largest), 127.0f);
  if (threadIdx.x == 0) {
    *job.scale = scale;
    *job.not_finite = not_finite;
  }
  for (uint64_t i = threadIdx.x; i < job.count; i += blockDim.x) {
    const float q = scale > 0.0f ? rintf(__fdiv_rn(as_float(from[i]), scale)) : 0.0f;
    job.to[i] = static_cast<int8_t>(fminf(fmaxf(q, -127.0f), 127.0f));
  }
}

__global__ void __launch_bounds__(kWideThreads) quantize_kernel(const QuantizeJob* jobs) {
  const QuantizeJob job = jobs[blockIdx.x];
  if (job.dtype == kFloat32)
    quantize_tensor<float>(job);
  else if (job.dtype == kBFloat16)
    quantize_tensor<__nv_bfloat16>(job);
  else
    quantize_tensor<__half>(job);
}

// ---- threshold: radix selection among sampled magnitudes, in one block

// `kStaged`: they are read once and kept in shared memory; else they are read again for each of the four digits.
template <class T, bool kStaged>
__global__ void __launch_bounds__(kWideThreads)
    threshold_kernel(const T* from, uint32_t stride, uint32_t samples, uint32_t rank, uint32_t* threshold) {
  extern __shared__ uint32_t sampled[];
  __shared__ uint32_t histogram[256];
  __shared__ uint32_t prefix, remaining;
  const auto read = [&](uint32_t i) { return magnitude(from[sample_position(i, stride)]); };
  if constexpr (kStaged)
    for (uint32_t i = threadIdx.x; i < samples; i += blockDim.x) sampled[i] = read(i);
  if (threadIdx.x == 0) {
    prefix = 0;
    remaining = rank;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
    __syncthreads();
    const uint32_t known = shift == 24 ? 0u : kAll << (shift + 8);
    for (uint32_t i = threadIdx.x; i < samples; i += blockDim.x) {
      const uint32_t bits = kStaged ? sampled[i] : read(i);
      if ((bits & known) == (prefix & known)) atomicAdd(&histogram[bits >> shift & 255u], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t digit = 0, left = remaining;
      while (digit < 255u && left >= histogram[digit]) left -= histogram[digit++];
      prefix |= digit << shift;
      remaining = left;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *threshold = clamp_threshold(prefix);
}

// ---- selection in one pass

// State of a tile, one aligned word so that flag and number are always of one store: nothing yet, what the tile itself
// keeps, or what it and all before it keep.
constexpr uint64_t kOwn = 1ull << 62;
constexpr uint64_t kInclusive = 2ull << 62;
constexpr uint64_t kCount = (1ull << 62) - 1;

// Elements kept before `tile`, which keeps `own` itself. Called by one warp; earlier tiles have started, so they will
// publish.
__device__ uint64_t kept_before(volatile uint64_t* state, int64_t tile, uint64_t own) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) state[tile] = (tile == 0 ? kInclusive : kOwn) | own;
  if (tile == 0) return 0;
  uint64_t before = 0;
  for (int64_t look = tile - 1 - lane;; look -= kWarp) {
    uint64_t word;
    do {
      word = look >= 0 ? static_cast<uint64_t>(state[look]) : +kInclusive;
    } while (__any_sync(kAll, (word & ~kCount) == 0));
    const uint32_t inclusive = __ballot_sync(kAll, (word & kInclusive) != 0);
    const int nearest = inclusive ? __ffs(static_cast<int>(inclusive)) - 1 : kWarp;
    before += warp_sum(lane <= nearest ? word & kCount : 0ull);
    if (inclusive) break;
  }
  if (lane == 0) state[tile] = kInclusive | (before + own);
  return before;
}

template <class T>
__device__ void load(const T* from, int64_t begin, int64_t count, T (&out)[kPerThread]) {
  constexpr int kVectors = sizeof(T) * kPerThread / 16;
  const T* at = from + begin;
  if (begin + kPerThread <= count && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      reinterpret_cast<uint4*>(out)[k] = __ldcs(reinterpret_cast<const uint4*>(at) + k);
  } else {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) out[k] = begin + k < count ? at[k] : T(0.0f);
  }
}

struct Selection {
  uint16_t* values;
  int32_t* indices;
  int64_t capacity;
  int32_t* tiles;
  unsigned long long* counts;  // reached, not finite
  uint32_t* scratch;           // threshold, next tile, then the state of every tile
};

template <class T>
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const T* __restrict__ from, int64_t count, int64_t num_tiles, Selection to) {
  __shared__ uint32_t warp_kept[kSelectThreads / kWarp];
  __shared__ int64_t tile;
  __shared__ uint64_t before;
  if (threadIdx.x == 0)
    tile = atomicAdd(to.scratch + 1,
                     1u);  // in the order in which blocks start, so that nobody waits for a block that has not
  __syncthreads();
  const uint32_t threshold = to.scratch[0];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t begin = tile * kTile + threadIdx.x * kPerThread;
  alignas(16) T x[kPerThread];
  load(from, begin, count, x);
  uint32_t kept = 0, not_finite = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    kept += magnitude(x[k]) >= threshold;
    not_finite += magnitude(x[k]) >= kInfBits;
  }
  uint32_t inclusive = kept;
#pragma unroll
  for (int k = 1; k < kWarp; k <<= 1) {
    const uint32_t left = __shfl_up_sync(kAll, inclusive, k);
    if (lane >= k) inclusive += left;
  }
  not_finite = warp_sum(not_finite);
  if (lane == 0 && not_finite) atomicAdd(to.counts + 1, static_cast<unsigned long long>(not_finite));
  if (lane == kWarp - 1) warp_kept[warp] = inclusive;
  __syncthreads();
  uint32_t earlier_warps = 0, own = 0;
#pragma unroll
  for (int w = 0; w < kSelectThreads / kWarp; ++w) {
    if (w < warp) earlier_warps += warp_kept[w];
    own += warp_kept[w];
  }
  if (warp == 0) {
    const uint64_t found = kept_before(reinterpret_cast<uint64_t*>(to.scratch + 2), tile, own);
    if (lane == 0) {
      before = found;
      to.tiles[tile] = static_cast<int32_t>(min(static_cast<int64_t>(found), to.capacity));
      if (tile == num_tiles - 1) {
        to.counts[0] = found + own;
        to.tiles[num_tiles] = static_cast<int32_t>(min(static_cast<int64_t>(found + own), to.capacity));
      }
    }
  }
  __syncthreads();
  int64_t at = static_cast<int64_t>(before) + earlier_warps + inclusive - kept;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (magnitude(x[k]) < threshold) continue;
    if (at < to.capacity) {
      to.values[at] = saturated_half(as_float(x[k]));
      to.indices[at] = static_cast<int32_t>(begin + k);
    }
    ++at;
  }
}

template <class T>
int find_threshold(const T* from, int64_t count, int64_t samples, int64_t rank, uint32_t* threshold, int device,
                   cudaStream_t stream, Error* error) {
  int room = 0;
  MOE_CUDA_CHECK(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const bool staged = room >= kStagedNbytes + kOtherSharedNbytes;
  const auto kernel = staged ? threshold_kernel<T, true> : threshold_kernel<T, false>;
  // The same for all calls: the attribute is the kernel's, and another thread may be about to launch it.
  if (staged)
    MOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagedNbytes));
  kernel<<<1, kWideThreads, staged ? samples * sizeof(uint32_t) : 0, stream>>>(
      from, static_cast<uint32_t>(count / samples), static_cast<uint32_t>(samples), static_cast<uint32_t>(rank), threshold);
  MOE_CUDA_CHECK(cudaGetLastError());
  return 0;
}

template <class T>
int select(const T* from, int64_t count, int64_t samples, int64_t rank, const Selection& to, int device,
           cudaStream_t stream, Error* error) {
  const int64_t num_tiles = (count + kTile - 1) / kTile;
  MOE_CUDA_CHECK(cudaMemsetAsync(to.scratch, 0, sizeof(uint32_t) * 2 + sizeof(uint64_t) * num_tiles, stream));
  MOE_CUDA_CHECK(cudaMemsetAsync(to.counts, 0, 2 * sizeof *to.counts, stream));
  if (find_threshold(from, count, samples, rank, to.scratch, device, stream, error)) return -1;
  select_kernel<T><<<static_cast<unsigned>(num_tiles), kSelectThreads, 0, stream>>>(from, count, num_tiles, to);
  MOE_CUDA_CHECK(cudaGetLastError());
  return 0;
}

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

// As moe_quantize; `jobs` is on the device.
MOE_API int moe_cuda_quantize(const QuantizeJob* jobs, int64_t count, int device, void* stream, Error* error) {
  if (count == 0) return 0;
  const DeviceGuard guard(device);
  quantize_kernel<<<static_cast<unsigned>(count), kWideThreads, 0, static_cast<cudaStream_t>(stream)>>>(jobs);
  MOE_CUDA_CHECK(cudaGetLastError());
  return 0;
}

// Threshold and selection, as moe_sample_threshold and moe_select. `scratch`: two words and two for each tile, 8-byte
// aligned.
MOE_API int moe_cuda_select(const void* source, int32_t dtype, int64_t count, int64_t samples, int64_t rank,
                            uint16_t* values, int32_t* indices, int64_t capacity, int32_t* tiles, int64_t* counts,
                            uint32_t* scratch, int device, void* stream, Error* error) {
  if (count < 1 || count > INT32_MAX)
    return fail(error, "select: %lld elements; wanted 1 to 2^31 - 1, split the tensor", (long long)count);
  if (samples < 1 || samples > std::min(count, kMaxSamples) || rank < 0 || rank >= samples)
    return fail(error, "select: rank %lld of %lld samples of %lld elements; wanted at most %lld samples",
                (long long)rank, (long long)samples, (long long)count, (long long)kMaxSamples);
  const DeviceGuard guard(device);
  const Selection to{values, indices, capacity, tiles, reinterpret_cast<unsigned long long*>(counts), scratch};
  const auto on = static_cast<cudaStream_t>(stream);
  const auto run = [&](const auto* from) { return select(from, count, samples, rank, to, device, on, error); };
  if (dtype == kFloat32) return run(static_cast<const float*>(source));
  if (dtype == kBFloat16) return run(static_cast<const __nv_bfloat16*>(source));
  if (dtype == kFloat16) return run(static_cast<const __half*>(source));
  return fail(error, "select: dtype code %d; known are 0 to 2", dtype);
}
