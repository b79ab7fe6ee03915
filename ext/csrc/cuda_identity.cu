// Which library this is, and whether it can be used on this machine, asked before anything else is called.
#include "cuda_error.hpp"

MOE_API int32_t moe_cuda_abi() { return moe_ckpt::kAbi; }
MOE_API const char* moe_cuda_source_digest() { return MOE_CKPT_SOURCE_DIGEST; }
// Version of the CUDA runtime inside this library, as in CUDART_VERSION: 13000 is 13.0.
MOE_API int32_t moe_cuda_runtime_version() { return CUDART_VERSION; }
// Newest CUDA version that the driver supports; 0 without a driver.
MOE_API int32_t moe_cuda_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

MOE_API int moe_cuda_device_count(int32_t* count, moe_ckpt::Error* error) {
  *count = 0;
  int found = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&found)) return moe_ckpt::fail_cuda(error, "cudaGetDeviceCount", code);
  *count = found;
  return 0;
}
