// Adaptive compression of gradients on the CPU: INT8 for small tensors, the largest elements of big ones.
// Source: TierCheck, section 3.2. The twin of every function is in lightning_moe_ckpt/native/_gradient.py.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "abi.hpp"
#include "gradient.hpp"
#include "half.hpp"
#include "parallel.hpp"

namespace moe_ckpt {
namespace {

// Tiles are independent, so this many are one piece of work: 512 KiB of fp32, well inside a core's second-level cache.
constexpr size_t kTilesPerPiece = 64;

// The tile starting at `begin` as fp32: the source itself, or converted into `buffer`.
const float* load_tile(const void* source, int32_t dtype, size_t begin, size_t count, float* buffer) {
  if (dtype == kFloat32) return static_cast<const float*>(source) + begin;
  const uint16_t* from = static_cast<const uint16_t*>(source) + begin;
  if (dtype == kBFloat16)
    bfloat16_to_float(from, buffer, count);
  else
    half_to_float(from, buffer, count);
  return buffer;
}

MOE_CLONES uint32_t largest_bits(const float* from, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = float_bits(from[i]) & kAbsMask;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

MOE_CLONES int64_t count_not_finite(const float* from, size_t count) {
  int64_t found = 0;
  for (size_t i = 0; i < count; ++i) found += (float_bits(from[i]) & kAbsMask) >= kInfBits;
  return found;
}

// Round half to even, as torch.round. A division, not a product with 127 / max: that overflows for tiny tensors.
MOE_CLONES void quantize(const float* from, size_t count, float scale, int8_t* to) {
  for (size_t i = 0; i < count; ++i) {
    float q = __builtin_rintf(from[i] / scale);
    q = q > 127.0f ? 127.0f : q;
    q = q < -127.0f ? -127.0f : q;
    to[i] = static_cast<int8_t>(static_cast<int32_t>(q));
  }
}

void quantize_tensor(const QuantizeJob& job) {
  float buffer[kTile];
  uint32_t largest = 0;
  int64_t not_finite = 0;
  for (size_t begin = 0; begin < job.count; begin += kTile) {
    const size_t count = std::min<size_t>(kTile, job.count - begin);
    const float* from = load_tile(job.source, job.dtype, begin, count, buffer);
    const uint32_t bits = largest_bits(from, count);
    largest = std::max(largest, bits);
    if (bits >= kInfBits) not_finite += count_not_finite(from, count);
  }
  const float scale = largest >= kInfBits ? bits_float(kNanBits) : bits_float(largest) / 127.0f;
  *job.scale = scale;
  *job.not_finite = not_finite;
  if (!(scale > 0.0f)) {  // all zero, too small for a scale, or not finite: the scale alone says which
    std::memset(job.to, 0, job.count);
    return;
  }
  for (size_t begin = 0; begin < job.count; begin += kTile) {
    const size_t count = std::min<size_t>(kTile, job.count - begin);
    quantize(load_tile(job.source, job.dtype, begin, count, buffer), count, scale, job.to + begin);
  }
}

struct Kept {  // by one piece of work
  std::vector<uint16_t> values;
  std::vector<int32_t> indices;
  int64_t not_finite = 0;
};

void keep(float value, uint32_t threshold, int32_t index, Kept& kept) {
  const uint32_t bits = float_bits(value) & kAbsMask;
  if (bits < threshold) return;
  kept.values.push_back(saturated_half(value));
  kept.indices.push_back(index);
  kept.not_finite += bits >= kInfBits;
}

MOE_CLONES void keep_tile(const float* from, size_t begin, size_t count, uint32_t threshold, Kept& kept) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    uint32_t hit = 0;
    for (int k = 0; k < 16; ++k) hit |= (float_bits(from[i + k]) & kAbsMask) >= threshold;
    if (hit)
      for (int k = 0; k < 16; ++k) keep(from[i + k], threshold, static_cast<int32_t>(begin + i + k), kept);
  }
  for (; i < count; ++i) keep(from[i], threshold, static_cast<int32_t>(begin + i), kept);
}

// `tiles` gets where each tile starts within the piece.
void keep_piece(const void* source, int32_t dtype, size_t count, uint32_t threshold, size_t first, size_t last,
                int32_t* tiles, Kept& kept) {
  kept.values.reserve((last - first) * kTile / 64);
  kept.indices.reserve((last - first) * kTile / 64);
  float buffer[kTile];
  for (size_t tile = first; tile < last; ++tile) {
    tiles[tile] = static_cast<int32_t>(kept.values.size());
    const size_t begin = tile * kTile, size = std::min<size_t>(kTile, count - begin);
    keep_tile(load_tile(source, dtype, begin, size, buffer), begin, size, threshold, kept);
  }
}

// Concatenates what the pieces kept, in order, and fills the table. Entries past the capacity are dropped from the end.
int64_t join_pieces(const std::vector<Kept>& pieces, int64_t capacity, uint16_t* values, int32_t* indices) {
  int64_t total = 0;
  for (const Kept& kept : pieces) {
    const int64_t size = static_cast<int64_t>(kept.values.size());
    const int64_t fits = std::clamp<int64_t>(capacity - total, 0, size);
    std::copy_n(kept.values.begin(), fits, values + std::min(total, capacity));
    std::copy_n(kept.indices.begin(), fits, indices + std::min(total, capacity));
    total += size;
  }
  return total;
}

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

// INT8 of many tensors. `threads` share the tensors.
MOE_API int moe_quantize(const QuantizeJob* jobs, int64_t count, int threads, Error* error) {
  for (int64_t i = 0; i < count; ++i)
    if (jobs[i].dtype < kFloat32 || jobs[i].dtype > kFloat16)
      return fail(error, "quantize: tensor %lld has dtype code %d; known are 0 to 2", (long long)i, jobs[i].dtype);
  parallel_for(threads, count, 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) quantize_tensor(jobs[i]);
  });
  return 0;
}

// Bits of the `rank`-th smallest of `samples` sampled magnitudes, within the limits of `clamp_threshold`.
MOE_API int moe_sample_threshold(const void* source, int32_t dtype, int64_t count, int64_t samples, int64_t rank,
                                 uint32_t* threshold, Error* error) {
  if (count < 1 || count > INT32_MAX)
    return fail(error, "sample_threshold: %lld elements; wanted 1 to 2^31 - 1", (long long)count);
  if (samples < 1 || samples > count || rank < 0 || rank >= samples)
    return fail(error, "sample_threshold: rank %lld of %lld samples of %lld elements", (long long)rank,
                (long long)samples, (long long)count);
  return guarded(error, [&] {
    std::vector<uint32_t> found(samples);
    const uint32_t stride = static_cast<uint32_t>(count / samples);
    for (int64_t i = 0; i < samples; ++i) {
      float buffer;
      const size_t at = sample_position(static_cast<uint32_t>(i), stride);
      found[i] = float_bits(*load_tile(source, dtype, at, 1, &buffer)) & kAbsMask;
    }
    std::nth_element(found.begin(), found.begin() + rank, found.end());
    *threshold = clamp_threshold(found[rank]);
    return 0;
  });
}

// What reaches the threshold, in one pass. `tiles` has one entry per tile and one more. `counts`: kept before the
// capacity cut it, not finite.
MOE_API int moe_select(const void* source, int32_t dtype, int64_t count, uint32_t threshold, uint16_t* values,
                       int32_t* indices, int64_t capacity, int32_t* tiles, int64_t* counts, int threads, Error* error) {
  if (count < 0 || count > INT32_MAX)
    return fail(error, "select: %lld elements; wanted at most 2^31 - 1, split the tensor", (long long)count);
  const size_t num_tiles = (count + kTile - 1) / kTile;
  std::vector<Kept> pieces;
  if (guarded(error, [&] {
        pieces.resize((num_tiles + kTilesPerPiece - 1) / kTilesPerPiece);
        return 0;
      }))
    return -1;
  std::atomic<bool> no_memory{false};
  parallel_for(threads, num_tiles, kTilesPerPiece, [&](size_t first, size_t last) {
    try {
      keep_piece(source, dtype, count, threshold, first, last, tiles, pieces[first / kTilesPerPiece]);
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  });
  if (no_memory)
    return fail(error, "select: no memory for what reaches the threshold in %lld elements", (long long)count);
  int64_t before = 0;
  counts[1] = 0;
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    for (size_t tile = piece * kTilesPerPiece; tile < std::min(num_tiles, (piece + 1) * kTilesPerPiece); ++tile)
      tiles[tile] = static_cast<int32_t>(std::min(capacity, before + tiles[tile]));
    before += static_cast<int64_t>(pieces[piece].values.size());
    counts[1] += pieces[piece].not_finite;
  }
  tiles[num_tiles] = static_cast<int32_t>(std::min(capacity, before));
  counts[0] = join_pieces(pieces, capacity, values, indices);
  return 0;
}
