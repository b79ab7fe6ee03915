// What both libraries share at their C boundary. No header of Python or torch anywhere: `ctypes` binds the symbols.
//
// Rules of the boundary:
// * A function that can fail returns 0 on success and takes an `Error*` last; the message is complete English and says
//   what was found and what was wanted. The Python wrapper raises it. No C++ exception crosses: use `guarded`.
// * Pointers arrive as the plain integers of `Tensor.data_ptr()`; the caller keeps their owners alive.
// * Every symbol is declared once in lightning_moe_ckpt/native/_prototypes.py. Change a signature or the meaning of
//   an argument, and raise kAbi here and ABI there.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>

#define MOE_API extern "C" __attribute__((visibility("default")))

// Compiles a hot loop for several processors and picks one when the library is loaded. Sanitizers cannot instrument
// the function that picks.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__CUDACC__)
#define MOE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MOE_CLONES
#endif

#ifndef MOE_CKPT_SOURCE_DIGEST
#define MOE_CKPT_SOURCE_DIGEST ""
#endif
#ifndef MOE_CKPT_BUILD_NOTE
#define MOE_CKPT_BUILD_NOTE ""
#endif

namespace moe_ckpt {

constexpr int32_t kAbi = 5;

struct Error {
  char message[512];
};

__attribute__((format(printf, 2, 3))) inline int fail(Error* error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error->message, sizeof error->message, format, arguments);
  va_end(arguments);
  return -1;
}

// Runs `body`, which returns 0 or `fail(...)`, and turns an exception (no memory, no thread) into a message.
template <class Body>
int guarded(Error* error, Body&& body) {
  try {
    return body();
  } catch (const std::exception& exception) {
    return fail(error, "%s", exception.what());
  }
}

}  // namespace moe_ckpt
