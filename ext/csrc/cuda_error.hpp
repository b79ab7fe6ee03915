// Messages for failed calls of the CUDA runtime.
#pragma once
#include <cuda_runtime.h>

#include "abi.hpp"

namespace moe_ckpt {

inline int fail_cuda(Error* error, const char* call, cudaError_t code) {
  cudaGetLastError();  // ours only: the runtime is linked statically, torch has its own
  return fail(error, "%s: %s (%s)", call, cudaGetErrorString(code), cudaGetErrorName(code));
}

}  // namespace moe_ckpt

// Returns from the enclosing function, which has an `Error* error`, if a call of the CUDA runtime fails.
#define MOE_CUDA_CHECK(call)                                                                 \
  do {                                                                                       \
    if (const cudaError_t code_ = (call)) return moe_ckpt::fail_cuda(error, #call, code_);   \
  } while (false)
