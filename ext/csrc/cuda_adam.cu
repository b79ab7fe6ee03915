// Several Adam or AdamW steps in one pass over the state: parameter and moments stay in registers for all steps, the
// gradient of a tile is expanded into shared memory. Source: TierCheck, section 3.2 (fused multi-step replay).
//
// Every operation is named (`__fmaf_rn`, ...), so nothing is contracted that is not meant to be: the result is, bit for
// bit, that of cpu_adam.cpp with fused multiply-adds and correctly rounded roots.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_device.hpp"
#include "cuda_error.hpp"
#include "gradient.hpp"

namespace moe_ckpt {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = kTile / kThreads;

// Stages the gradient of one tile as fp32. Called by all threads; they must not be reading `to` any more.
__device__ void expand(const AdamStep& step, int64_t tile, int size, float* to) {
  const int64_t begin = tile * kTile;
  if (step.kind == kSparse) {
    for (int i = threadIdx.x; i < static_cast<int>(kTile); i += kThreads) to[i] = 0.0f;
    __syncthreads();
    const __half* values = static_cast<const __half*>(step.values);
    for (int32_t k = step.tiles[tile] + threadIdx.x; k < step.tiles[tile + 1]; k += kThreads)
      to[step.indices[k] - begin] = __half2float(values[k]);
    return;
  }
  for (int i = threadIdx.x; i < size; i += kThreads) {
    if (step.kind == kDense32)
      to[i] = static_cast<const float*>(step.values)[begin + i];
    else if (step.kind == kDenseBF16)
      to[i] = __bfloat162float(static_cast<const __nv_bfloat16*>(step.values)[begin + i]);
    else if (step.kind == kDenseF16)
      to[i] = __half2float(static_cast<const __half*>(step.values)[begin + i]);
    else
      to[i] = __fmul_rn(static_cast<float>(static_cast<const int8_t*>(step.values)[begin + i]), *step.scale);
  }
}

__device__ void advance(const AdamStep& step, float g, float& p, float& m, float& v, float* top) {
  p = __fmul_rn(p, step.decay);
  if (step.maximize) g = -g;
  if (step.l2 != 0.0f) g = __fmaf_rn(p, step.l2, g);
  const bool near_start = step.lerp < 0.5f;
  const float weight = near_start ? step.lerp : __fsub_rn(step.lerp, 1.0f);
  m = __fmaf_rn(weight, __fsub_rn(g, m), near_start ? m : g);
  v = __fmaf_rn(__fmul_rn(step.one_minus_beta2, g), g, __fmul_rn(v, step.beta2));
  float under = v;
  if (top) under = *top = *top > v || *top != *top ? *top : v;
  const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(under), step.bias2_sqrt), step.eps);
  p = __fadd_rn(p, __fdiv_rn(__fmul_rn(step.minus_step_size, m), root));
}

// The fourth state of AMSGrad does not fit into the 64 registers that four blocks of a multiprocessor leave each thread.
template <bool kAmsgrad>
__global__ void __launch_bounds__(kThreads, kAmsgrad ? 3 : 4)
    replay_kernel(float* __restrict__ param, float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq,
                  float* __restrict__ max_exp_avg_sq, int64_t count, const AdamStep* __restrict__ steps,
                  int64_t num_steps) {
  __shared__ float gradient[kTile];
  const int64_t tile = blockIdx.x, begin = tile * kTile;
  const int size = static_cast<int>(min(static_cast<int64_t>(kTile), count - begin));
  float p[kPerThread], m[kPerThread], v[kPerThread], top[kAmsgrad ? kPerThread : 1];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = k * kThreads + threadIdx.x;
    const bool inside = i < size;
    p[k] = inside ? param[begin + i] : 0.0f;
    m[k] = inside ? exp_avg[begin + i] : 0.0f;
    v[k] = inside ? exp_avg_sq[begin + i] : 0.0f;
    if constexpr (kAmsgrad) top[k] = inside ? max_exp_avg_sq[begin + i] : 0.0f;
  }
  for (int64_t s = 0; s < num_steps; ++s) {
    const AdamStep step = steps[s];
    __syncthreads();
    expand(step, tile, size, gradient);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int i = k * kThreads + threadIdx.x;
      advance(step, i < size ? gradient[i] : 0.0f, p[k], m[k], v[k], kAmsgrad ? &top[kAmsgrad ? k : 0] : nullptr);
    }
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = k * kThreads + threadIdx.x;
    if (i >= size) continue;
    param[begin + i] = p[k];
    exp_avg[begin + i] = m[k];
    exp_avg_sq[begin + i] = v[k];
    if constexpr (kAmsgrad) max_exp_avg_sq[begin + i] = top[k];
  }
}

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

// As moe_adam_replay with `fused` and correctly rounded roots; `steps` and what they point to are on the device.
MOE_API int moe_cuda_adam_replay(float* param, float* exp_avg, float* exp_avg_sq, float* max_exp_avg_sq, int64_t count,
                                 const AdamStep* steps, int64_t num_steps, int device, void* stream, Error* error) {
  if (count == 0 || num_steps == 0) return 0;
  const DeviceGuard guard(device);
  const auto blocks = static_cast<unsigned>((count + kTile - 1) / kTile);
  const auto kernel = max_exp_avg_sq ? replay_kernel<true> : replay_kernel<false>;
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(param, exp_avg, exp_avg_sq, max_exp_avg_sq, count,
                                                                     steps, num_steps);
  MOE_CUDA_CHECK(cudaGetLastError());
  return 0;
}
