// Digests of many ranges of a buffer, and of all of it, in one pass over memory.
//
// XXH3 itself is that of the `xxhash` package, by addresses of its functions: one implementation, one set of bits.
#include <algorithm>
#include <new>

#include "abi.hpp"
#include "background.hpp"

namespace moe_ckpt {
namespace {

struct Hash128 {
  uint64_t low, high;
};

}  // namespace

// Functions of xxhash.h, in this order; mirrors `Xxh3` of _prototypes.py.
struct Xxh3 {
  Hash128 (*once)(const void*, size_t);
  void* (*create)();
  int (*free)(void*);
  int (*reset)(void*);
  int (*update)(void*, const void*, size_t);
  Hash128 (*digest)(const void*);
};

namespace {

// What was read for one digest is still in the second level of the cache when the other one reads it.
constexpr size_t kChunk = size_t{128} << 10;
constexpr size_t kHexDigits = 32;
// Takes less time than to begin a thread.
constexpr size_t kForeground = size_t{256} << 10;

class Stream {
 public:
  explicit Stream(const Xxh3& xxh3) : xxh3_(xxh3), state_(xxh3.create()) {
    if (!state_) throw std::bad_alloc();
    xxh3_.reset(state_);
  }
  ~Stream() { xxh3_.free(state_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void reset() { xxh3_.reset(state_); }
  void update(const uint8_t* bytes, size_t nbytes) { xxh3_.update(state_, bytes, nbytes); }
  Hash128 digest() const { return xxh3_.digest(state_); }

 private:
  const Xxh3& xxh3_;
  void* const state_;
};

void write_hex(Hash128 hash, char* text) {
  for (const uint64_t half : {hash.high, hash.low})
    for (int shift = 60; shift >= 0; shift -= 4) *text++ = "0123456789abcdef"[half >> shift & 15];
}

// The digest of everything from the first byte on; `reach` says how far its bytes have been read for something else.
class Whole {
 public:
  Whole(const Xxh3& xxh3, const uint8_t* bytes) : stream_(xxh3), bytes_(bytes) {}

  void reach(size_t end, bool all = false) {
    if (end <= done_ || (!all && end - done_ < kChunk)) return;
    stream_.update(bytes_ + done_, end - done_);
    done_ = end;
  }
  Hash128 digest() const { return stream_.digest(); }

 private:
  Stream stream_;
  const uint8_t* const bytes_;
  size_t done_ = 0;
};

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

// Digests `bytes[0, nbytes)` and `count` ranges of it, given as pairs of begin and end.
//
// `whole` takes 32 hexadecimal digits. `texts` takes as many for each range, with `separator` (whatever its length)
// behind each but the last.
MOE_API int moe_digest_ranges(const Xxh3* xxh3, const uint8_t* bytes, uint64_t nbytes, const uint64_t* ranges,
                              uint64_t count, const char* separator, char* texts, char* whole, Error* error) {
  const auto digest = [&] {
    Stream part(*xxh3);
    Whole all(*xxh3, bytes);
    for (uint64_t index = 0; index < count; ++index) {
      const uint64_t begin = ranges[2 * index], end = ranges[2 * index + 1];
      if (begin > end || end > nbytes)
        return fail(error, "digest: range %llu is [%llu, %llu) of %llu bytes", (unsigned long long)index,
                    (unsigned long long)begin, (unsigned long long)end, (unsigned long long)nbytes);
      Hash128 hash;
      if (end - begin <= kChunk) {
        hash = xxh3->once(bytes + begin, end - begin);
      } else {
        part.reset();
        for (uint64_t at = begin; at < end; at += kChunk) {
          const uint64_t next = std::min(end, at + kChunk);
          part.update(bytes + at, next - at);
          all.reach(next);
        }
        hash = part.digest();
      }
      all.reach(end);
      write_hex(hash, texts);
      texts += kHexDigits;
      if (index + 1 < count)
        for (const char* from = separator; *from;) *texts++ = *from++;
    }
    all.reach(nbytes, true);
    write_hex(all.digest(), whole);
    return 0;
  };
  return guarded(error, [&] { return nbytes < kForeground ? digest() : in_background(digest); });
}
