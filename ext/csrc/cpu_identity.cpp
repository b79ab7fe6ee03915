// Which library this is, asked before anything else is called.
#include "abi.hpp"

MOE_API int32_t moe_cpu_abi() { return moe_ckpt::kAbi; }
MOE_API const char* moe_cpu_source_digest() { return MOE_CKPT_SOURCE_DIGEST; }
// What the build said of the CUDA part.
MOE_API const char* moe_cpu_build_note() { return MOE_CKPT_BUILD_NOTE; }
MOE_API const char* moe_cpu_compiler() { return "g++ " __VERSION__; }
