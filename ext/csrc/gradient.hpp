// The format of a compressed gradient, and the rules that CPU and CUDA share so that both write the same bytes.
//
// Sparse (TierCheck, section 3.2): the elements whose magnitude reaches a threshold, as FP16 values and INT32 indices
// in ascending order, with a table of where each tile of 2048 elements starts. INT8: value = q * scale, scale = max|g|
// / 127.
//
// Magnitudes are compared as the integer bits of |g|: that order is the order of the numbers, with infinity and then
// NaN above all, and it is the same on every machine. What is not finite is never made finite: a sparse tensor keeps
// it, an INT8 tensor gets a NaN scale.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define MOE_BOTH __host__ __device__ __forceinline__
#else
#define MOE_BOTH inline
#endif

namespace moe_ckpt {

constexpr uint32_t kTile = 2048;            // elements; the unit of the sparse table and of the Adam replay
constexpr uint32_t kAbsMask = 0x7fffffffu;  // float bits without the sign
constexpr uint32_t kInfBits = 0x7f800000u;  // from here on: not finite
constexpr uint32_t kNanBits = 0x7fc00000u;
constexpr uint16_t kHalfNan = 0x7e00u;
constexpr float kHalfMax = 65504.0f;

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum GradientKind : int32_t { kDense32 = 0, kDenseBF16 = 1, kDenseF16 = 2, kSparse = 3, kInt8 = 4 };

// Element read as sample `i`: one out of each of `num_samples` equal strides, at a place inside the stride that only
// `i` decides.
MOE_BOTH uint32_t sample_position(uint32_t i, uint32_t stride) {
  uint32_t h = i * 2654435761u;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  return i * stride + h % stride;
}

// Zeros are never kept (a threshold of at least the smallest positive number), what is not finite always.
MOE_BOTH uint32_t clamp_threshold(uint32_t bits) { return bits < 1u ? 1u : bits > kInfBits ? kInfBits : bits; }

// One small tensor to turn into INT8: `count` elements of `dtype` to `count` bytes, one scale, and how many elements
// were not finite.
struct QuantizeJob {
  const void* source;
  int8_t* to;
  float* scale;
  int64_t* not_finite;
  uint64_t count;
  int32_t dtype;
};

// One optimizer step of Adam or AdamW: coefficients formed in double by the caller and rounded once, and the gradient
// it consumed.
struct AdamStep {
  const void* values;      // dense values, FP16 values (sparse) or int8 (kInt8)
  const int32_t* indices;  // sparse only
  const int32_t* tiles;    // sparse only: start of each tile in `values`, one more at the end
  const float* scale;      // kInt8 only; on the device for a CUDA replay
  int32_t kind;            // GradientKind
  int32_t maximize;        // the gradient is negated first
  float decay;             // 1 - lr * weight_decay (AdamW), 1 otherwise
  float l2;                // weight_decay (Adam), 0 otherwise
  float lerp;              // 1 - beta1
  float beta2;
  float one_minus_beta2;
  float minus_step_size;  // -lr / (1 - beta1 ** step)
  float bias2_sqrt;       // sqrt(1 - beta2 ** step)
  float eps;
};

}  // namespace moe_ckpt
