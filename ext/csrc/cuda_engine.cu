// The copy engine between a CUDA device and host memory.
//
// Rules, each of which was a bug somewhere:
// * The side stream waits for an event that `submit` records on the training stream.
// * Batches read their sources in stream order; under any weaker order a source may be read before that event.
// * The worker relaxes its capture mode: otherwise it would break a graph that training captures meanwhile. `submit`
//   refuses to run inside such a capture, where the event would become part of the graph.
// * Copy engines ignore priority, kernels do not: the stream has the highest, since packing takes microseconds and a
//   low one would wait for a gap in training. Pacing is the worker's, see engine.hpp.
// * A copy engine turns to another stream when this one has nothing queued: with a second chunk behind the first, a copy
//   of 4 KiB waited for 5 to 9 ms on an H100, with one chunk of 16 MiB for the rest of that chunk.
#include <cuda_runtime.h>

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda_device.hpp"
#include "cuda_error.hpp"
#include "cuda_pack.hpp"
#include "engine_abi.hpp"

namespace moe_ckpt {
namespace {

void expect(cudaError_t code, const char* call) {
  Error error{};
  if (code != cudaSuccess && fail_cuda(&error, call, code)) throw std::runtime_error(error.message);
}

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  // Blocking: a thread that waits sleeps. Without timing, recording is cheap.
  expect(cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

class CudaBackend {
 public:
  struct Ready {
    cudaEvent_t event = nullptr;
  };

  CudaBackend(int device, int depth) : device_(device) {
    try {
      on_own_thread(device, [&] { make(depth); });
    } catch (...) {
      release();
      throw;
    }
  }

  ~CudaBackend() { release(); }

  // Host memory that plans call pinned is registered by now; until then each copy is queued by itself.
  void set_registered(bool registered) { registered_ = registered; }

  int mark(void* stream, Ready* ready, Error* error) {
    const DeviceGuard guard(device_);
    const auto training = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    MOE_CUDA_CHECK(cudaStreamIsCapturing(training, &capture));
    if (capture != cudaStreamCaptureStatusNone)
      return fail(error, "a CUDA graph is being captured on this stream, and a snapshot must not become part of it: "
                         "submit before or after the capture");
    ready->event = take_event();
    if (const cudaError_t code = cudaEventRecord(ready->event, training)) {
      give_event(ready->event);
      return fail_cuda(error, "cudaEventRecord", code);
    }
    return 0;
  }

  int begin(Ready ready, Error* error) {
    bind();
    const cudaError_t code = cudaStreamWaitEvent(stream_, ready.event, 0);
    give_event(ready.event);  // the wait has taken note of this recording; the next one is none of its business
    return code == cudaSuccess ? 0 : fail_cuda(error, "cudaStreamWaitEvent", code);
  }

  // Once `stream` comes there.
  int call(void* stream, cudaHostFn_t function, void* data, Error* error) {
    const DeviceGuard guard(device_);
    MOE_CUDA_CHECK(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), function, data));
    return 0;
  }

  int copy(const Slice* slices, size_t count, const Plan&, Error* error) {
    queued_ = Clock::now();
    queued_nbytes_ = 0;
    for (size_t index = 0; index < count; ++index) queued_nbytes_ += slices[index].count;
    bool batch = has_batches_ && registered_ && count > 1;
    for (size_t index = 0; index < count; ++index)
      batch &= slices[index].dst_space != Space::kPageable && slices[index].src_space != Space::kPageable;
    if (batch) {
      const cudaError_t code = copy_batch(slices, count);
      if (code == cudaSuccess) return 0;
      cudaGetLastError();
      const cudaError_t after = cudaStreamQuery(stream_);
      if (after != cudaSuccess && after != cudaErrorNotReady)  // the device is lost, and one by one is no better
        return fail_cuda(error, "cudaMemcpyBatchAsync", code);
      has_batches_ = false;  // drivers refuse them for reasons of their own
    }
    for (size_t index = 0; index < count; ++index)
      MOE_CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(slices[index].dst),
                                     reinterpret_cast<const void*>(slices[index].src), slices[index].count,
                                     cudaMemcpyDefault, stream_));
    return 0;
  }

  int run_units(uint64_t units_on_device, const Slice*, size_t count, const Plan&, Error* error) {
    MOE_CUDA_CHECK(launch_units(reinterpret_cast<const Slice*>(units_on_device), count, stream_));
    return 0;
  }

  int record(size_t slot, Error* error) {
    MOE_CUDA_CHECK(cudaEventRecord(chunks_[slot].end, stream_));
    chunks_[slot].queued = queued_;
    chunks_[slot].nbytes = queued_nbytes_;
    return 0;
  }
  // An interrupt wakes a thread 60 to 80 us after the chunk has ended, in which the copy engine has nothing to do: sleep
  // for the time that bytes took so far, then look.
  int sync(size_t slot, Error* error) {
    const Queued& chunk = chunks_[slot];
    const auto expected = chunk.queued + std::chrono::nanoseconds(static_cast<int64_t>(chunk.nbytes * ns_per_byte_));
    std::this_thread::sleep_until(expected - kEarly);
    cudaError_t code = cudaErrorNotReady;
    while (code == cudaErrorNotReady && Clock::now() < expected + kLate) {
      code = cudaEventQuery(chunk.end);
      if (code == cudaErrorNotReady) std::this_thread::sleep_for(kPause);
    }
    if (code == cudaErrorNotReady) code = cudaEventSynchronize(chunk.end);
    if (code != cudaSuccess) return fail_cuda(error, "cudaEventSynchronize", code);
    note_rate(chunk);
    return 0;
  }
  int record_end(Error* error) {
    has_end_ = false;
    MOE_CUDA_CHECK(cudaEventRecord(end_, stream_));
    has_end_ = true;
    return 0;
  }
  // Where the end could not be marked, nobody may go on before all that the stream has is done.
  int sync_end(Error* error) {
    if (has_end_ && cudaEventSynchronize(end_) == cudaSuccess) return 0;
    cudaGetLastError();
    MOE_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return 0;
  }
  int follow_end(void* stream, Error* error) {
    const DeviceGuard guard(device_);
    MOE_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), end_, 0));
    return 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Queued {
    cudaEvent_t end = nullptr;
    Clock::time_point queued{};
    uint64_t nbytes = 0;
  };
  static constexpr std::chrono::microseconds kEarly{60}, kLate{200}, kPause{2};

  void make(int depth) {
    int least = 0, greatest = 0;
    expect(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    expect(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    has_batches_ = may_batch();
    end_ = make_event();
    chunks_.resize(depth);
    for (auto& chunk : chunks_) chunk.end = make_event();
  }

  // The first chunk of a list also waits for training, so a slow one counts for little.
  void note_rate(const Queued& chunk) {
    if (!chunk.nbytes) return;
    const double found = std::chrono::duration<double, std::nano>(Clock::now() - chunk.queued).count() / chunk.nbytes;
    ns_per_byte_ = found < ns_per_byte_ ? found : ns_per_byte_ + (std::min(found, 2 * ns_per_byte_) - ns_per_byte_) / 8;
  }

  // Where registered memory has another address on the device (WSL2), a batch that names the host's is an error that
  // nothing recovers from. Some drivers hang in batches: the environment can turn them off.
  bool may_batch() const {
    int driver = 0, same_address = 0;
    expect(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    expect(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device_),
           "cudaDeviceGetAttribute");
    const char* wanted = std::getenv("MOE_CKPT_CUDA_BATCHES");
    return CUDART_VERSION >= 12080 && driver >= 12080 && same_address && !(wanted && std::string(wanted) == "0");
  }

  void release() {
    on_own_thread(device_, [&] {
      for (const auto& chunk : chunks_)
        if (chunk.end) cudaEventDestroy(chunk.end);
      for (const auto event : spare_) cudaEventDestroy(event);
      if (end_) cudaEventDestroy(end_);
      if (stream_) cudaStreamDestroy(stream_);
    });
  }

  void bind() {
    if (bound_) return;
    cudaSetDevice(device_);
    auto mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; sleeps of this thread are otherwise 50 us too long
    bound_ = true;
  }

  cudaError_t copy_batch(const Slice* slices, size_t count) {
#if CUDART_VERSION >= 12080
    destinations_.resize(count);
    sources_.resize(count);
    sizes_.resize(count);
    for (size_t index = 0; index < count; ++index) {
      destinations_[index] = reinterpret_cast<void*>(slices[index].dst);
      sources_[index] = reinterpret_cast<void*>(slices[index].src);
      sizes_[index] = slices[index].count;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(const_cast<const void**>(destinations_.data()),
                                const_cast<const void**>(sources_.data()), sizes_.data(), count, &attributes, &first, 1,
                                stream_);
#else
    size_t failed = 0;
    return cudaMemcpyBatchAsync(destinations_.data(), sources_.data(), sizes_.data(), count, &attributes, &first, 1,
                                &failed, stream_);
#endif
#else
    return cudaErrorNotSupported;
#endif
  }

  cudaEvent_t take_event() {
    const std::lock_guard<std::mutex> lock(spare_mutex_);
    if (spare_.empty()) return make_event();
    const auto event = spare_.back();
    spare_.pop_back();
    return event;
  }
  void give_event(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(spare_mutex_);
    spare_.push_back(event);
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::vector<Queued> chunks_;  // by slot
  Clock::time_point queued_{};
  uint64_t queued_nbytes_ = 0;
  double ns_per_byte_ = 0.02;
  std::mutex spare_mutex_;
  std::vector<cudaEvent_t> spare_;
  std::vector<void*> destinations_, sources_;
  std::vector<size_t> sizes_;
  std::atomic<bool> registered_{true};
  bool has_batches_ = false, has_end_ = false, bound_ = false;
};

using CudaEngine = Engine<CudaBackend>;

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

MOE_DEFINE_ENGINE(cuda, CudaEngine)

// What kernels work on: `pack`, then `unpack`. To be copied to the device and given back by address.
MOE_API uint64_t moe_cuda_plan_num_units(void* plan) { return plan_of(plan)->pack.size() + plan_of(plan)->unpack.size(); }
MOE_API void moe_cuda_plan_units(void* plan, Slice* units) {
  const auto& found = *plan_of(plan);
  std::copy(found.unpack.begin(), found.unpack.end(), std::copy(found.pack.begin(), found.pack.end(), units));
}
MOE_API void moe_cuda_plan_set_units(void* plan, uint64_t units_on_device) {
  plan_of(plan)->units_on_device = units_on_device;
}

MOE_API int moe_cuda_engine_create(int32_t device, int32_t depth, void** engine, Error* error) {
  return guarded(error, [&] {
    *engine = new CudaEngine(std::make_unique<CudaBackend>(device, depth), depth);
    return 0;
  });
}
MOE_API void moe_cuda_engine_set_registered(void* engine, int32_t registered) {
  static_cast<CudaEngine*>(engine)->backend().set_registered(registered != 0);
}
MOE_API int moe_cuda_engine_submit(void* engine, void* plan, uint64_t base, void* stream, uint64_t* ticket,
                                   Error* error) {
  return guarded(error, [&] {
    return static_cast<CudaEngine*>(engine)->submit(plan_of(plan), base, stream, ticket, error);
  });
}
// What `stream` gets from now on is in this phase of a schedule.
MOE_API int moe_cuda_engine_enter(void* engine, int32_t phase, void* stream, Error* error) {
  return guarded(error, [&] {
    struct Turn {
      std::shared_ptr<Gate> gate;
      Phase phase;
    };
    auto turn = std::make_unique<Turn>(Turn{static_cast<CudaEngine*>(engine)->gate(), static_cast<Phase>(phase)});
    const auto take = [](void* data) {
      const std::unique_ptr<Turn> taken(static_cast<Turn*>(data));
      taken->gate->enter(taken->phase);
    };
    if (static_cast<CudaEngine*>(engine)->backend().call(stream, take, turn.get(), error)) return -1;
    turn.release();
    return 0;
  });
}
// What `stream` gets from now on runs after the copies of `ticket`; waits until they are queued.
MOE_API int moe_cuda_engine_fence(void* engine, uint64_t ticket, void* stream, Error* error) {
  return guarded(error, [&] { return static_cast<CudaEngine*>(engine)->fence(ticket, stream, error); });
}

// One piece of host memory, from then on copied to and from at full speed by every context.
MOE_API int moe_cuda_register(int32_t device, void* memory, uint64_t nbytes, Error* error) {
  return guarded(error, [&] {
    on_own_thread(device, [&] { expect(cudaHostRegister(memory, nbytes, cudaHostRegisterPortable), "cudaHostRegister"); });
    return 0;
  });
}
MOE_API int moe_cuda_unregister(int32_t device, void* memory, Error* error) {
  return guarded(error, [&] {
    on_own_thread(device, [&] { expect(cudaHostUnregister(memory), "cudaHostUnregister"); });
    return 0;
  });
}
