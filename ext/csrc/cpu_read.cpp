// A marker's line of records, as our writers spell it, by column: the counterpart of cpu_spell.cpp.
//
// Whatever is spelled otherwise (escapes, spaces, signs, a name twice) is no error here: the caller parses such a line as
// JSON, which also says what is wrong with it. So nothing is accepted that JSON, and the checks behind it, would refuse.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "abi.hpp"

using namespace moe_ckpt;

namespace {

constexpr int kDigest = 32;

struct Token {
  const char* begin;
  size_t nbytes;
};

// Text that is taken from the front, never beyond its end.
struct Text {
  const char* at;
  const char* end;

  bool take(char wanted) {
    if (at == end || *at != wanted) return false;
    ++at;
    return true;
  }

  template <size_t N>
  bool take(const char (&wanted)[N]) {
    if (static_cast<size_t>(end - at) < N - 1 || std::memcmp(at, wanted, N - 1) != 0) return false;
    at += N - 1;
    return true;
  }

  // A string, with its quotes; the text has no escapes.
  bool string() {
    if (!take('"')) return false;
    const void* const quote = std::memchr(at, '"', static_cast<size_t>(end - at));
    if (!quote) return false;
    at = static_cast<const char*>(quote) + 1;
    return true;
  }

  // A whole number of zero or more, below 10**18.
  bool number(int64_t* value) {
    const char* const begin = at;
    int64_t found = 0;
    for (; at < end && *at >= '0' && *at <= '9' && at - begin < 18; ++at) found = found * 10 + (*at - '0');
    *value = found;
    return at - begin == 1 || (at > begin && *begin != '0');  // JSON has no leading zeros
  }

  // Whole numbers in brackets.
  bool numbers() {
    int64_t value;
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      if (!number(&value)) return false;
    } while (take(','));
    return take(']');
  }

  bool flag() { return take("true") || take("false"); }
  bool box() { return take('[') && numbers() && take(',') && numbers() && take(']'); }
};

// Numbers different tokens in the order in which they appear.
class Numbering {
 public:
  int64_t of(const Token& token) {
    if (last_ >= 0) {
      if (same(last_, token)) return last_;
      const int64_t likely = next_[static_cast<size_t>(last_)];  // tensors of a shard come in the same order
      if (likely >= 0 && same(likely, token)) return last_ = likely;
    }
    const int64_t found = lookup(token);
    if (last_ >= 0) next_[static_cast<size_t>(last_)] = found;
    return last_ = found;
  }

  const std::vector<Token>& tokens() const { return tokens_; }

 private:
  int64_t lookup(const Token& token) {
    if (tokens_.size() * 2 >= slots_.size()) grow();
    for (size_t slot = hash(token) & (slots_.size() - 1);; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot] >= 0 && same(slots_[slot], token)) return slots_[slot];
      if (slots_[slot] >= 0) continue;
      tokens_.push_back(token);
      next_.push_back(-1);
      return slots_[slot] = static_cast<int64_t>(tokens_.size()) - 1;
    }
  }

  bool same(int64_t number, const Token& token) const {
    const Token& known = tokens_[static_cast<size_t>(number)];
    return known.nbytes == token.nbytes && std::memcmp(known.begin, token.begin, token.nbytes) == 0;
  }

  static uint64_t hash(const Token& token) {
    constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;
    uint64_t found = token.nbytes * kPrime, word;
    size_t at = 0;
    for (; at + 8 <= token.nbytes; at += 8) {
      std::memcpy(&word, token.begin + at, 8);
      found = ((found ^ word) * kPrime);
      found ^= found >> 29;
    }
    word = 0;
    std::memcpy(&word, token.begin + at, token.nbytes - at);
    found = (found ^ word) * kPrime;
    return found ^ (found >> 32);
  }

  void grow() {
    slots_.assign(slots_.empty() ? 64 : slots_.size() * 4, -1);
    for (size_t number = 0; number < tokens_.size(); ++number) {
      size_t slot = hash(tokens_[number]) & (slots_.size() - 1);
      while (slots_[slot] >= 0) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = static_cast<int64_t>(number);
    }
  }

  std::vector<Token> tokens_;
  std::vector<int64_t> slots_, next_;
  int64_t last_ = -1;
};

struct Out {
  char* at;
  char* end;

  void put(const char* bytes, size_t nbytes) {
    if (static_cast<size_t>(end - at) < nbytes) throw std::length_error("read: the texts are longer than their line");
    std::memcpy(at, bytes, nbytes);
    at += nbytes;
  }
};

bool read_token(Text* text, char kind, int64_t* value) {
  switch (kind) {
    case 'n':
    case 't':
      return text->string();
    case 'i':
    case 'c':
      return text->number(value);
    case 's':
      return text->numbers();
    default:
      return text->flag();
  }
}

// Whether all bytes are printable characters that JSON has in strings as they are, or quotes.
MOE_CLONES bool is_plain(const char* at, uint64_t nbytes) {
  uint32_t strange = 0;
  for (uint64_t i = 0; i < nbytes; ++i) {
    const auto byte = static_cast<uint8_t>(at[i]);
    strange |= (byte < 0x20) | (byte > 0x7e) | (byte == 0x5c);
  }
  return !strange;
}

// Reads `{"digests":["...",...],"rows":[[...],...]}` and a newline; false for anything else.
bool read_line(Text text, const char* kinds, uint64_t count, int64_t* values, Out names, int64_t* bounds, Out distinct,
               uint64_t* written) {
  const size_t columns = std::strlen(kinds);
  std::vector<Numbering> numberings(columns + 1);
  const char* const first = names.at;
  if (text.at == text.end || !is_plain(text.at, static_cast<uint64_t>(text.end - text.at - 1))) return false;
  if (!text.take("{\"digests\":[")) return false;
  for (uint64_t row = 0; row < count; ++row) {
    const char* const begin = text.at;
    if ((row > 0 && !text.take(',')) || !text.string()) return false;
    if (text.at - begin != kDigest + 2 + (row > 0)) return false;
  }
  if (!text.take("],\"rows\":[")) return false;
  for (uint64_t row = 0; row < count; ++row) {
    if ((row > 0 && !text.take(',')) || !text.take('[')) return false;
    for (size_t column = 0; column < columns; ++column) {
      if (column > 0 && !text.take(',')) return false;
      const char* const begin = text.at;
      int64_t value = 0;
      if (!read_token(&text, kinds[column], &value)) return false;
      const Token token{begin, static_cast<size_t>(text.at - begin)};
      if (kinds[column] != 'i') value = numberings[column].of(token);
      if (kinds[column] == 'n') {
        if (value != static_cast<int64_t>(row)) return false;
        if (row > 0) names.put(",", 1);
        bounds[row] = names.at - first;
        names.put(token.begin, token.nbytes);
      }
      values[column * count + row] = value;
    }
    int64_t box = -1;
    if (text.take(',')) {
      const char* const begin = text.at;
      if (!text.box()) return false;
      box = numberings[columns].of({begin, static_cast<size_t>(text.at - begin)});
    }
    values[columns * count + row] = box;
    if (!text.take(']')) return false;
  }
  if (!text.take("]}\n") || text.at != text.end) return false;
  bounds[count] = names.at - first + 1;
  const char* const start = distinct.at;
  for (size_t column = 0; column <= columns; ++column) {
    distinct.put(column > 0 ? ",[" : "[[", 2);
    if (column < columns && kinds[column] == 'n') numberings[column] = {};
    bool more = false;
    for (const Token& token : numberings[column].tokens()) {
      if (more) distinct.put(",", 1);
      distinct.put(token.begin, token.nbytes);
      more = true;
    }
    distinct.put("]", 1);
  }
  distinct.put("]", 1);
  *written = static_cast<uint64_t>(distinct.at - start);
  return true;
}

}  // namespace

// Reads a line of `count` records. By column `kinds` has a letter: `n` names, all different; `t` texts, `s` shapes, `b`
// flags and `c` whole numbers, of which there are few different ones; `i` whole numbers. A box may follow.
//
// `values` takes a value per column and row, column by column, boxes last: a whole number itself, else the number of the
// value among the different ones, -1 without a box. `distinct` takes these as JSON, a list per column; `names` takes
// the names, `bounds` the first byte of each, and two bytes behind the last. Both texts have room for `nbytes` and four
// bytes per column. `written` takes the bytes of `distinct`, 0 if the line is spelled otherwise; then the rest is undefined.
MOE_API int moe_read_records(const char* line, uint64_t nbytes, const char* kinds, uint64_t count, int64_t* values,
                             char* names, int64_t* bounds, char* distinct, uint64_t* written, Error* error) {
  return guarded(error, [&] {
    const size_t room = nbytes + 4 * (std::strlen(kinds) + 2);
    *written = 0;
    read_line({line, line + nbytes}, kinds, count, values, {names, names + room}, bounds, {distinct, distinct + room},
              written);
    return 0;
  });
}
