// Rows of text from columns: headers of files and lines of markers have a row per tensor, of which there may be a million.
#include <charconv>
#include <cstring>

#include "abi.hpp"

// Part of every row: three addresses.
struct SpelledColumn {
  const char* text;       // texts one behind the other; null for numbers
  const int64_t* bounds;  // begin of each text, and the end of the last
  const int64_t* values;  // number, or index of a text, by row; a negative one adds nothing
};

using namespace moe_ckpt;

// Writes `num_rows` rows with commas between them to `out`, which has room for `capacity` bytes; `written` takes their number.
MOE_API int moe_spell_rows(const SpelledColumn* columns, uint64_t num_columns, uint64_t num_rows, char* out,
                           uint64_t capacity, uint64_t* written, Error* error) {
  char *at = out, *const end = out + capacity;
  const auto full = [&] {
    return fail(error, "spell: %llu rows do not fit into %llu bytes", (unsigned long long)num_rows,
                (unsigned long long)capacity);
  };
  for (uint64_t row = 0; row < num_rows; ++row) {
    if (row > 0) {
      if (at == end) return full();
      *at++ = ',';
    }
    for (const SpelledColumn* column = columns; column < columns + num_columns; ++column) {
      const int64_t value = column->values[row];
      if (value < 0) continue;
      if (!column->text) {
        const auto [stop, problem] = std::to_chars(at, end, value);
        if (problem != std::errc()) return full();
        at = stop;
        continue;
      }
      const int64_t begin = column->bounds[value], nbytes = column->bounds[value + 1] - begin;
      if (nbytes > end - at) return full();
      std::memcpy(at, column->text + begin, static_cast<size_t>(nbytes));
      at += nbytes;
    }
  }
  *written = static_cast<uint64_t>(at - out);
  return 0;
}
