// The device of a call. The runtime inside this library and torch's share the thread's current context, so it is put
// back.
#pragma once
#include <cuda_runtime.h>

namespace moe_ckpt {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    if (before_ != device) cudaSetDevice(device);
    device_ = device;
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0, device_ = 0;
};

}  // namespace moe_ckpt
