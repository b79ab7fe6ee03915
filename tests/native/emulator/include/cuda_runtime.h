// In the place of CUDA's header: declares what the extension uses of the runtime and of device code, for a device made
// of threads. Kernels compile as C++; see fibers.cpp for how they run, runtime.cpp for the rules that are checked.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
// One thread of the system runs one block at a time, and all threads of the block are fibers of it.
#define __shared__ static thread_local
#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureIsolation = 905,
};
using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated,
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed,
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderInvalid, cudaMemcpySrcAccessOrderStream };
enum { cudaMemcpyFlagPreferOverlapWithCompute = 1 };
enum { cudaHostRegisterPortable = 1 };
enum { cudaStreamNonBlocking = 1 };
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum cudaDeviceAttr {
  cudaDevAttrCanUseHostPointerForRegisteredMem = 91,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
  unsigned flags;
};

extern "C" {
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t);
const char* cudaGetErrorName(cudaError_t);
cudaError_t cudaGetDevice(int*);
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetDeviceCount(int*);
cudaError_t cudaDriverGetVersion(int*);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int device);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned flags);
using cudaHostFn_t = void (*)(void*);
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t, void*);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventQuery(cudaEvent_t);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*);
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t);
cudaError_t cudaMemcpyBatchAsync(const void** destinations, const void** sources, const size_t* sizes, size_t count,
                                 cudaMemcpyAttributes*, size_t* first, size_t num_attributes, cudaStream_t);
cudaError_t cudaHostRegister(void*, size_t, unsigned flags);
cudaError_t cudaHostUnregister(void*);
}

namespace emulated __attribute__((visibility("default"))) {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
// What stands between <<< and >>>.
struct Grid {
  unsigned blocks, threads;
  size_t shared_nbytes = 0;
  cudaStream_t stream = nullptr;
};

// Of the thread that asks.
const Index& thread_index();
const Index& block_index();
const Index& block_size();
const Index& grid_size();
unsigned lane();
void* dynamic_shared();

enum class Warp { kShuffleXor, kShuffleUp, kBallot };
void sync_threads();
// What every lane of this warp brought to the same call, by lane.
const uint64_t* exchange(Warp operation, unsigned mask, uint64_t value);

void allow_dynamic_shared(const void* kernel, size_t nbytes);
size_t allowed_dynamic_shared(const void* kernel);
void enqueue(const Grid& grid, const void* kernel, std::function<void()> body);
void run_grid(const Grid& grid, const std::function<void()>& body);
// A setting, by name; tests change them while nothing runs.
int64_t setting(const char* name);
// Sleeps sometimes, up to the setting "jitter_us".
void jitter();
[[noreturn]] void die(const char* what);

template <class... Parameters, class... Arguments>
void launch(const Grid& grid, void (*kernel)(Parameters...), Arguments&&... arguments) {
  std::tuple<Parameters...> packed{static_cast<Parameters>(arguments)...};
  enqueue(grid, reinterpret_cast<const void*>(kernel), [=] { std::apply(kernel, packed); });
}

template <class Value>
uint64_t to_bits(Value value) {
  static_assert(sizeof value <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class Value>
Value from_bits(uint64_t bits) {
  Value value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulated

#define threadIdx (emulated::thread_index())
#define blockIdx (emulated::block_index())
#define blockDim (emulated::block_size())
#define gridDim (emulated::grid_size())
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int nbytes) {
  emulated::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), nbytes);
  return cudaSuccess;
}

inline void __syncthreads() { emulated::sync_threads(); }
template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int distance) {
  const auto* lanes = emulated::exchange(emulated::Warp::kShuffleXor, mask, emulated::to_bits(value));
  return emulated::from_bits<Value>(lanes[emulated::lane() ^ distance]);
}
template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned distance) {
  const auto* lanes = emulated::exchange(emulated::Warp::kShuffleUp, mask, emulated::to_bits(value));
  const unsigned lane = emulated::lane();
  return lane < distance ? value : emulated::from_bits<Value>(lanes[lane - distance]);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const auto* lanes = emulated::exchange(emulated::Warp::kBallot, mask, predicate);
  unsigned found = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1) && lanes[lane]) found |= 1u << lane;
  return found;
}
inline int __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __ffs(int value) { return __builtin_ffs(value); }
template <class Value>
Value atomicAdd(Value* at, Value value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <class Value>
Value __ldcs(const Value* at) {
  return *at;
}
template <class Value>
Value max(Value a, Value b) {
  return a < b ? b : a;
}
template <class Value>
Value min(Value a, Value b) {
  return b < a ? b : a;
}
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(emulated::to_bits(value)); }
inline float __uint_as_float(unsigned bits) { return emulated::from_bits<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
