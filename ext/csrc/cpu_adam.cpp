// Several Adam or AdamW steps in one pass over the state, on the CPU: each tile of parameters and moments is read once,
// taken through all steps while it is in the first-level cache, and written once. Source: TierCheck, section 3.2 (fused
// multi-step replay).
//
// The arithmetic is torch's, operation for operation (`_single_tensor_adam`, foreach=False), and so are the bits. Two
// things differ between builds of torch and processors, so the caller says which holds (`Arithmetic`):
// * with AVX2 torch contracts lerp, addcmul and the weight decay of Adam into fused multiply-adds, without it does not;
// * torch takes square roots with MKL where it has it, and MKL's are not always the correctly rounded ones.
// Nothing else is contracted: this file is compiled with -ffp-contract=off. The twin is
// lightning_moe_ckpt/native/_adam.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "abi.hpp"
#include "gradient.hpp"
#include "half.hpp"
#include "parallel.hpp"

namespace moe_ckpt {
namespace {

constexpr size_t kTilesPerPiece = 32;

struct State {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // nullptr without amsgrad
};

// The gradient of one tile as fp32: the source itself where it is plain fp32, else written into `buffer`.
const float* tile_gradient(const AdamStep& step, size_t tile, size_t count, float* buffer) {
  const size_t begin = tile * kTile;
  switch (step.kind) {
    case kDense32:
      return static_cast<const float*>(step.values) + begin;
    case kDenseBF16:
      bfloat16_to_float(static_cast<const uint16_t*>(step.values) + begin, buffer, count);
      return buffer;
    case kDenseF16:
      half_to_float(static_cast<const uint16_t*>(step.values) + begin, buffer, count);
      return buffer;
    case kInt8: {
      const int8_t* from = static_cast<const int8_t*>(step.values) + begin;
      for (size_t i = 0; i < count; ++i) buffer[i] = static_cast<float>(from[i]) * *step.scale;
      return buffer;
    }
    default:
      break;
  }
  std::memset(buffer, 0, count * sizeof(float));
  const int32_t first = step.tiles[tile], last = step.tiles[tile + 1];
  float values[kTile];
  half_to_float(static_cast<const uint16_t*>(step.values) + first, values, last - first);
  for (int32_t k = first; k < last; ++k) buffer[step.indices[k] - static_cast<int64_t>(begin)] = values[k - first];
  return buffer;
}

template <bool kFused>
inline __attribute__((always_inline)) float multiply_add(float a, float b, float c) {
  if constexpr (kFused)
    return __builtin_fmaf(a, b, c);
  else
    return c + a * b;
}

// Moments and decayed parameter of one tile; `under` gets what the denominator is the root of.
template <bool kFused, bool kL2, bool kAmsgrad>
inline __attribute__((always_inline)) void moments(const State& s, size_t at, const float* gradient, size_t count,
                                                   const AdamStep& step, float* under) {
  float *p = s.param + at, *m = s.exp_avg + at, *v = s.exp_avg_sq + at,
        *top = kAmsgrad ? s.max_exp_avg_sq + at : nullptr;
  const float decay = step.decay, l2 = step.l2, beta2 = step.beta2, rest2 = step.one_minus_beta2;
  const float sign = step.maximize ? -1.0f : 1.0f;
  // torch's lerp starts from the nearer end, so that a weight of one gives exactly the end
  const bool near_start = step.lerp < 0.5f;
  const float weight = near_start ? step.lerp : step.lerp - 1.0f;
  for (size_t i = 0; i < count; ++i) {
    const float param = p[i] * decay;
    float g = gradient[i] * sign;
    if constexpr (kL2) g = multiply_add<kFused>(param, l2, g);
    const float mean = multiply_add<kFused>(weight, g - m[i], near_start ? m[i] : g);
    const float square = multiply_add<kFused>(rest2 * g, g, v[i] * beta2);
    p[i] = param;
    m[i] = mean;
    v[i] = square;
    under[i] = square;
    if constexpr (kAmsgrad)
      under[i] = top[i] = top[i] > square || top[i] != top[i] ? top[i] : square;  // a NaN on either side stays
  }
}

template <bool kFused>
inline __attribute__((always_inline)) void dispatch(const State& s, size_t at, const float* g, size_t count,
                                                    const AdamStep& step, float* under) {
  if (s.max_exp_avg_sq) {
    if (step.l2 != 0)
      moments<kFused, true, true>(s, at, g, count, step, under);
    else
      moments<kFused, false, true>(s, at, g, count, step, under);
  } else if (step.l2 != 0)
    moments<kFused, true, false>(s, at, g, count, step, under);
  else
    moments<kFused, false, false>(s, at, g, count, step, under);
}

using Moments = void (*)(const State&, size_t, const float*, size_t, const AdamStep&, float*);

void moments_fused(const State& s, size_t at, const float* g, size_t count, const AdamStep& step, float* under) {
  dispatch<true>(s, at, g, count, step, under);  // where the processor has no such instruction: exact, and slow
}

#ifdef __x86_64__
__attribute__((target("avx2,fma"))) void moments_avx2(const State& s, size_t at, const float* g, size_t count,
                                                      const AdamStep& step, float* under) {
  dispatch<true>(s, at, g, count, step, under);
}

__attribute__((target("avx512f,fma"))) void moments_avx512(const State& s, size_t at, const float* g, size_t count,
                                                           const AdamStep& step, float* under) {
  dispatch<true>(s, at, g, count, step, under);
}

Moments fastest_fused() {
  if (__builtin_cpu_supports("avx512f")) return moments_avx512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? moments_avx2 : moments_fused;
}
#else
Moments fastest_fused() { return moments_fused; }
#endif

MOE_CLONES void moments_plain(const State& s, size_t at, const float* g, size_t count, const AdamStep& step,
                              float* under) {
  dispatch<false>(s, at, g, count, step, under);
}

MOE_CLONES void square_roots(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = std::sqrt(values[i]);
}

MOE_CLONES void move(float* param, const float* mean, const float* root, size_t count, const AdamStep& step) {
  const float size = step.minus_step_size, bias2 = step.bias2_sqrt, eps = step.eps;
  for (size_t i = 0; i < count; ++i) param[i] = param[i] + size * mean[i] / (root[i] / bias2 + eps);
}

// MKL's vmsSqrt(n, a, r, mode), with the mode torch calls it in: high accuracy, subnormals kept, errors ignored.
using MklRoot = void (*)(int32_t, const float*, float*, int64_t);
constexpr int64_t kMklMode = 0x2 | 0x140000 | 0x100;

struct Arithmetic {
  Moments moments;
  MklRoot mkl_root;  // nullptr: correctly rounded roots
};

void replay_tile(const State& s, size_t tile, size_t count, const AdamStep* steps, int64_t num_steps,
                 const Arithmetic& how) {
  alignas(64) float buffer[kTile], under[kTile];
  const size_t at = tile * kTile;
  for (int64_t k = 0; k < num_steps; ++k) {
    how.moments(s, at, tile_gradient(steps[k], tile, count, buffer), count, steps[k], under);
    if (how.mkl_root)
      how.mkl_root(static_cast<int32_t>(count), under, under, kMklMode);
    else
      square_roots(under, count);
    move(s.param + at, s.exp_avg + at, under, count, steps[k]);
  }
}

int check_steps(const AdamStep* steps, int64_t num_steps, Error* error) {
  for (int64_t k = 0; k < num_steps; ++k) {
    const AdamStep& step = steps[k];
    if (step.kind < kDense32 || step.kind > kInt8)
      return fail(error, "adam_replay: step %lld has gradient kind %d; known are 0 to 4", (long long)k, step.kind);
    if (step.kind == kSparse && (!step.indices || !step.tiles))
      return fail(error, "adam_replay: step %lld is sparse and has no indices or table", (long long)k);
  }
  return 0;
}

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

// `count` elements of state through `num_steps` steps. `max_exp_avg_sq` is null without amsgrad. `fused` and `mkl_root`
// (the address of MKL's vmsSqrt, or null): see the head of this file.
MOE_API int moe_adam_replay(float* param, float* exp_avg, float* exp_avg_sq, float* max_exp_avg_sq, int64_t count,
                            const AdamStep* steps, int64_t num_steps, int fused, void* mkl_root, int threads,
                            Error* error) {
  if (int failed = check_steps(steps, num_steps, error)) return failed;
  const State state{param, exp_avg, exp_avg_sq, max_exp_avg_sq};
  const Arithmetic how{fused ? fastest_fused() : moments_plain, reinterpret_cast<MklRoot>(mkl_root)};
  parallel_for(threads, (count + kTile - 1) / kTile, kTilesPerPiece, [&](size_t first, size_t last) {
    for (size_t tile = first; tile < last; ++tile)
      replay_tile(state, tile, std::min<size_t>(kTile, count - tile * kTile), steps, num_steps, how);
  });
  return 0;
}
