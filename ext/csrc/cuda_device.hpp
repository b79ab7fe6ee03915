// The device of a call. The runtime inside this library and torch's share the thread's current context, so a thread of
// the user's gets it back. But for a thread that has none yet, "back" is device 0, and that makes a context there, of
// some hundred megabytes for every rank of a node: what may come from any thread is done `on_own_thread`.
#pragma once
#include <cuda_runtime.h>

#include <exception>
#include <thread>

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

// Runs `body` on a thread that has `device` and ends with it; throws what it throws. What it does can break no capture
// of a graph: only the thread that captures is in the way of that.
template <class Body>
void on_own_thread(int device, Body&& body) {
  std::exception_ptr thrown;
  std::thread([&] {
    try {
      cudaSetDevice(device);
      auto mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
      body();
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace moe_ckpt
