// The CUDA runtime on the CPU: streams are threads, and rules of the API are checked as CUDA's documentation has them.
//
// Checked: what makes a context, and where; streams, events and launches of other devices; memory that is registered,
// twice, in part or never, or given back while copies use it; copies from and to ordinary memory; batches, which have no order within; stream capture, and
// what breaks one. Failures are planted by name: the n-th call from now on returns a code, or its work never ends. A
// code that is sticky on a device is so here: every later call returns it, until `emulator_heal`.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

namespace {

constexpr int kDevices = 2;
constexpr int kHangs = -1;  // planted in the place of a code

// ---- settings, planted failures, counts of calls

std::mutex tables_mutex;
std::map<std::string, int64_t>& settings() {
  static auto* found = new std::map<std::string, int64_t>{
      {"blocks_at_once", 3},    {"jitter_us", 0},       {"held_block", -1},
      {"shared_nbytes", 232448}, {"driver", 13000},      {"host_pointer_for_registered", 1},
  };
  return *found;
}
struct Planted {
  int calls_left, code;
};
std::map<std::string, Planted>& planted() {
  static auto* found = new std::map<std::string, Planted>;
  return *found;
}
std::map<std::string, int64_t>& calls() {
  static auto* found = new std::map<std::string, int64_t>;
  return *found;
}
std::atomic<int> sticky{0};
thread_local cudaError_t last_error = cudaSuccess;

bool is_sticky(int code) { return code == cudaErrorIllegalAddress || code == cudaErrorLaunchFailure; }

void finish_what_runs();

cudaError_t fails(int code) {
  if (is_sticky(code) && !sticky) {
    finish_what_runs();  // a device that is lost writes nothing any more
    sticky = code;
  }
  return last_error = static_cast<cudaError_t>(code);
}

int count_call(const char* name) {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  ++calls()[name];
  const auto found = planted().find(name);
  if (found == planted().end() || --found->second.calls_left > 0) return 0;
  const int code = found->second.code;
  planted().erase(found);
  return code;
}

// ---- devices: which have a context, and which one a thread works with

std::atomic<unsigned> contexts{0};
thread_local int device = 0;
void make_context() { contexts |= 1u << device; }

// ---- streams and events

struct Moment {  // in the life of a stream, that an event was recorded for
  std::mutex mutex;
  std::condition_variable passing;
  bool passed = false;
  void pass() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      passed = true;
    }
    passing.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    passing.wait(lock, [&] { return passed; });
  }
  bool wait_for(int64_t ms) {
    std::unique_lock<std::mutex> lock(mutex);
    return passing.wait_for(lock, std::chrono::milliseconds(ms), [&] { return passed; });
  }
};

}  // namespace

struct EmulatedEvent {
  const int of_device = device;
  std::mutex mutex;
  std::shared_ptr<Moment> newest;
  std::shared_ptr<Moment> moment() {
    const std::lock_guard<std::mutex> lock(mutex);
    return newest;
  }
};

struct EmulatedStream {
  explicit EmulatedStream(int of_device) : of_device(of_device) {
    const std::lock_guard<std::mutex> lock(streams_mutex());
    streams().insert(this);
  }
  ~EmulatedStream() {
    {
      const std::lock_guard<std::mutex> lock(streams_mutex());
      streams().erase(this);
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    work_.notify_one();
    thread_.join();
  }
  void push(std::function<void()> operation) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      operations_.push_back(std::move(operation));
    }
    work_.notify_one();
  }
  std::shared_ptr<Moment> end() {
    auto found = std::make_shared<Moment>();
    push([found] { found->pass(); });
    return found;
  }
  void drain() { end()->wait(); }
  const int of_device;
  std::atomic<int> capture{cudaStreamCaptureStatusNone};
  static std::mutex& streams_mutex() {
    static auto* found = new std::mutex;
    return *found;
  }
  static std::set<EmulatedStream*>& streams() {
    static auto* found = new std::set<EmulatedStream*>;
    return *found;
  }

 private:
  void serve() {
    for (;;) {
      std::function<void()> operation;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [&] { return ending_ || !operations_.empty(); });
        if (operations_.empty()) return;
        operation = std::move(operations_.front());
        operations_.pop_front();
      }
      emulated::jitter();
      operation();
    }
  }
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::function<void()>> operations_;
  bool ending_ = false;
  std::thread thread_{[this] { serve(); }};
};

namespace {

void finish_what_runs() {
  const std::lock_guard<std::mutex> lock(EmulatedStream::streams_mutex());
  for (auto* stream : EmulatedStream::streams()) stream->drain();
}

EmulatedStream& stream_of(cudaStream_t stream) {
  static auto* defaults = new std::map<int, EmulatedStream*>;  // of every device, handle 0
  if (stream) return *stream;
  const std::lock_guard<std::mutex> lock(tables_mutex);
  auto*& found = (*defaults)[device];
  if (!found) found = new EmulatedStream(device);
  return *found;
}

// What never ends, until `emulator_release`.
std::shared_ptr<Moment>& latch() {
  static auto* found = new std::shared_ptr<Moment>(std::make_shared<Moment>());
  return *found;
}
std::shared_ptr<Moment> current_latch() {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  return latch();
}

// ---- stream capture

std::atomic<EmulatedStream*> capturing{nullptr};
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// Calls that may wait for a device, or change memory that it sees, are forbidden to all threads in the global mode
// while somebody captures; the capture is lost as well.
bool breaks_capture() {
  EmulatedStream* stream = capturing.load();
  if (!stream || capture_mode == cudaStreamCaptureModeRelaxed) return false;
  stream->capture = cudaStreamCaptureStatusInvalidated;
  return true;
}

// ---- memory: of a device, page-locked, or neither

std::mutex memory_mutex;
struct Range {
  size_t nbytes;
  int of_device;
  bool registered;  // else it came page-locked from an allocator
};
std::map<uintptr_t, Range>& page_locked() {
  static auto* found = new std::map<uintptr_t, Range>;
  return *found;
}
std::map<uintptr_t, Range>& on_device() {
  static auto* found = new std::map<uintptr_t, Range>;
  return *found;
}

// What copies that are queued, or being made, read and write.
class UnderWay {
 public:
  UnderWay() = default;
  UnderWay(const UnderWay&) = delete;
  void add(const void* at, size_t nbytes) {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    noted_.push_back(all().emplace(reinterpret_cast<uintptr_t>(at), nbytes));
  }
  ~UnderWay() {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    for (const auto& each : noted_) all().erase(each);
  }
  // `memory_mutex` is held.
  static void expect_none(uintptr_t begin, size_t nbytes) {
    for (const auto& [at, size] : all())
      if (at < begin + nbytes && begin < at + size) emulated::die("page-locked memory is given back under copies");
  }

 private:
  using Ranges = std::multimap<uintptr_t, size_t>;
  static Ranges& all() {
    static auto* found = new Ranges;
    return *found;
  }
  std::vector<Ranges::iterator> noted_;
};

enum class Kind { kOrdinary, kPageLocked, kRegistered, kDevice, kMixed };

Kind kind_of(const void* at, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto begin = reinterpret_cast<uintptr_t>(at), end = begin + nbytes;
  auto device_range = on_device().upper_bound(begin);
  if (device_range != on_device().begin()) {
    --device_range;
    if (begin < device_range->first + device_range->second.nbytes) return Kind::kDevice;
  }
  int touched = 0;
  Kind whole = Kind::kMixed;
  for (const auto& [base, range] : page_locked()) {
    if (end <= base || base + range.nbytes <= begin) continue;
    ++touched;
    if (begin >= base && end <= base + range.nbytes) whole = range.registered ? Kind::kRegistered : Kind::kPageLocked;
  }
  return touched == 0 ? Kind::kOrdinary : touched == 1 ? whole : Kind::kMixed;
}

}  // namespace

#define EMULATED_CALL()                                                  \
  do {                                                                   \
    if (const int code_ = sticky) return fails(code_);                   \
    make_context();                                                      \
    if (const int code_ = count_call(__func__)) return fails(code_);     \
  } while (false)

namespace emulated {

int64_t setting(const char* name) {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  return settings().at(name);
}

void enqueue(const Grid& grid, const void* kernel, std::function<void()> body) {
  const int code = sticky ? sticky.load() : count_call("launch");
  const bool fits = grid.blocks && grid.threads && grid.threads <= 1024 &&
                    grid.shared_nbytes <= allowed_dynamic_shared(kernel);
  EmulatedStream& stream = stream_of(grid.stream);
  if (code > 0)
    fails(code);
  else if (!fits)
    fails(cudaErrorInvalidValue);
  else if (stream.of_device != device)
    fails(cudaErrorInvalidResourceHandle);
  else if (stream.capture == cudaStreamCaptureStatusActive)
    die("a kernel of the extension became part of a capture");
  else
    stream.push([grid, code, never = current_latch(), body = std::move(body)] {
      if (code == kHangs) never->wait();
      run_grid(grid, body);
    });
}

}  // namespace emulated

extern "C" {

cudaError_t cudaGetLastError() {
  if (sticky) return static_cast<cudaError_t>(sticky.load());
  const auto found = last_error;
  last_error = cudaSuccess;
  return found;
}
const char* cudaGetErrorString(cudaError_t) { return "planted, or found by the emulation"; }
const char* cudaGetErrorName(cudaError_t code) {
  static thread_local char name[32];
  std::snprintf(name, sizeof name, "error %d", code);
  return name;
}

cudaError_t cudaGetDevice(int* found) {
  *found = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int wanted) {
  if (sticky) return fails(sticky);
  if (wanted < 0 || wanted >= kDevices) return fails(cudaErrorInvalidDevice);
  device = wanted;
  make_context();  // since CUDA 12
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = static_cast<int>(emulated::setting("driver"));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* name = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? "shared_nbytes" : "host_pointer_for_registered";
  *value = static_cast<int>(emulated::setting(name));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  EMULATED_CALL();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  EMULATED_CALL();
  *stream = new EmulatedStream(device);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  EMULATED_CALL();
  return cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  EMULATED_CALL();
  if (breaks_capture()) return fails(cudaErrorStreamCaptureUnsupported);
  stream_of(stream).drain();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  EMULATED_CALL();
  *status = static_cast<cudaStreamCaptureStatus>(stream_of(stream).capture.load());
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  EMULATED_CALL();
  const auto moment = event->moment();
  if (!moment) emulated::die("a stream waits for an event that was never recorded, which does nothing");
  EmulatedStream& waiting = stream_of(stream);
  if (waiting.capture != cudaStreamCaptureStatusNone) {
    waiting.capture = cudaStreamCaptureStatusInvalidated;
    return fails(cudaErrorStreamCaptureIsolation);
  }
  waiting.push([moment] { moment->wait(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  EMULATED_CALL();
  *event = new EmulatedEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  EMULATED_CALL();
  EmulatedStream& recording = stream_of(stream);
  if (recording.of_device != event->of_device) return fails(cudaErrorInvalidResourceHandle);
  const auto moment = std::make_shared<Moment>();
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->newest = moment;
  }
  recording.push([moment] { moment->pass(); });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  EMULATED_CALL();
  if (breaks_capture()) return fails(cudaErrorStreamCaptureUnsupported);
  const auto moment = event->moment();
  if (!moment) emulated::die("somebody waits for an event that was never recorded, which does nothing");
  moment->wait();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  EMULATED_CALL();
  if (breaks_capture()) return fails(cudaErrorStreamCaptureUnsupported);
  const auto moment = event->moment();
  if (!moment) emulated::die("somebody asks for an event that was never recorded, which is over for CUDA");
  return moment->wait_for(0) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  EMULATED_CALL();
  stream_of(stream).push([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t nbytes, cudaStream_t stream) {
  EMULATED_CALL();
  stream_of(stream).push([=] { std::memset(at, value, nbytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  EMULATED_CALL();
  const Kind to = kind_of(dst, nbytes), from = kind_of(src, nbytes);
  if (to == Kind::kMixed || from == Kind::kMixed) return fails(cudaErrorInvalidValue);
  EmulatedStream& copying = stream_of(stream);
  const auto noted = std::make_shared<UnderWay>();
  noted->add(dst, nbytes);
  if (from != Kind::kOrdinary) noted->add(src, nbytes);
  if (from == Kind::kOrdinary) {  // the driver has read it when the call returns
    const auto* bytes = static_cast<const char*>(src);
    const auto staged = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
    copying.push([=] { (void)noted, std::memcpy(dst, staged->data(), nbytes); });
  } else {
    copying.push([=] { (void)noted, std::memcpy(dst, src, nbytes); });
  }
  if (to == Kind::kOrdinary) copying.drain();  // and here it has written it
  return cudaSuccess;
}
cudaError_t cudaMemcpyBatchAsync(const void** destinations, const void** sources, const size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first, size_t num_attributes,
                                 cudaStream_t stream) {
  if (sticky) return fails(sticky);
  const int code = count_call(__func__);
  if (code > 0) return fails(code);
  if (!stream || num_attributes != 1 || first[0] != 0) return fails(cudaErrorInvalidValue);
  if (attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream)
    emulated::die("a batch may read its sources before the stream has come to it");
  struct Copy {
    void* dst;
    const void* src;
    size_t nbytes;
  };
  std::vector<Copy> copies;
  for (size_t index = 0; index < count; ++index) {
    if (!sizes[index]) return fails(cudaErrorInvalidValue);
    for (const void* at : {destinations[index], sources[index]}) {
      const Kind kind = kind_of(at, sizes[index]);
      if (kind == Kind::kOrdinary || kind == Kind::kMixed) return fails(cudaErrorInvalidValue);
      // Such a device knows registered memory by another address only.
      if (kind == Kind::kRegistered && !emulated::setting("host_pointer_for_registered"))
        return fails(cudaErrorIllegalAddress);
    }
    copies.push_back({const_cast<void*>(destinations[index]), sources[index], sizes[index]});
  }
  std::shuffle(copies.begin(), copies.end(), std::mt19937(std::random_device{}()));
  const auto noted = std::make_shared<UnderWay>();
  for (const auto& copy : copies) noted->add(copy.dst, copy.nbytes), noted->add(copy.src, copy.nbytes);
  stream->push([code, noted, never = current_latch(), copies = std::move(copies)] {
    if (code == kHangs) never->wait();
    for (const auto& copy : copies) {
      emulated::jitter();
      std::memcpy(copy.dst, copy.src, copy.nbytes);
    }
  });
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* at, size_t nbytes, unsigned) {
  EMULATED_CALL();
  if (breaks_capture()) return fails(cudaErrorStreamCaptureUnsupported);
  if (kind_of(at, nbytes) != Kind::kOrdinary) return fails(cudaErrorHostMemoryAlreadyRegistered);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  page_locked()[reinterpret_cast<uintptr_t>(at)] = {nbytes, device, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* at) {
  EMULATED_CALL();
  if (breaks_capture()) return fails(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = page_locked().find(reinterpret_cast<uintptr_t>(at));
  if (found == page_locked().end() || !found->second.registered) return fails(cudaErrorHostMemoryNotRegistered);
  UnderWay::expect_none(found->first, found->second.nbytes);
  page_locked().erase(found);
  return cudaSuccess;
}

// ---- what tests ask and change

#define EMULATOR_API __attribute__((visibility("default")))

EMULATOR_API void emulator_set(const char* name, int64_t value) {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  settings().at(name) = value;
}
EMULATOR_API void emulator_plant(const char* call, int nth, int code) {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  planted()[call] = {nth, code};
}
// As in a process that begins.
EMULATOR_API void emulator_forget_registered() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  for (auto at = page_locked().begin(); at != page_locked().end();)
    at = at->second.registered ? page_locked().erase(at) : std::next(at);
}
// No failure is planted any more, and the device is as after a start.
EMULATOR_API void emulator_heal() {
  {
    const std::lock_guard<std::mutex> lock(tables_mutex);
    planted().clear();
  }
  if (sticky) emulator_forget_registered();  // a process whose device is lost has to end
  sticky = 0;
  last_error = cudaSuccess;
  contexts = 0;
}
EMULATOR_API void emulator_release() {
  auto released = std::make_shared<Moment>();
  {
    const std::lock_guard<std::mutex> lock(tables_mutex);
    latch().swap(released);
  }
  released->pass();
}
EMULATOR_API int64_t emulator_calls(const char* name) {
  const std::lock_guard<std::mutex> lock(tables_mutex);
  return calls()[name];
}
EMULATOR_API unsigned emulator_contexts() { return contexts; }
EMULATOR_API int emulator_last_error() { return last_error; }

EMULATOR_API void* emulator_stream(int of_device) { return new EmulatedStream(of_device); }
// Whether all that a stream has was done in time.
EMULATOR_API int emulator_drain(void* stream, int64_t ms) { return static_cast<EmulatedStream*>(stream)->end()->wait_for(ms); }
EMULATOR_API void emulator_sleep(void* stream, unsigned us) {
  static_cast<EmulatedStream*>(stream)->push([us] { usleep(us); });
}
EMULATOR_API void emulator_fill(void* stream, void* at, int value, size_t nbytes) {
  static_cast<EmulatedStream*>(stream)->push([=] { std::memset(at, value, nbytes); });
}
EMULATOR_API void emulator_capture(void* stream, int begins) {
  auto* captured = static_cast<EmulatedStream*>(stream);
  captured->capture = begins ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  capturing = begins ? captured : nullptr;
}
EMULATOR_API int emulator_capture_status(void* stream) { return static_cast<EmulatedStream*>(stream)->capture; }

EMULATOR_API void emulator_add_device_memory(const void* at, size_t nbytes, int of_device) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  on_device()[reinterpret_cast<uintptr_t>(at)] = {nbytes, of_device, false};
}
EMULATOR_API void emulator_remove_device_memory(const void* at) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  on_device().erase(reinterpret_cast<uintptr_t>(at));
}
// -1 if it is not of a device.
EMULATOR_API int emulator_device_of(const void* at) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  auto found = on_device().upper_bound(reinterpret_cast<uintptr_t>(at));
  if (found == on_device().begin()) return -1;
  --found;
  return reinterpret_cast<uintptr_t>(at) < found->first + found->second.nbytes ? found->second.of_device : -1;
}
EMULATOR_API void emulator_add_page_locked(const void* at, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  page_locked()[reinterpret_cast<uintptr_t>(at)] = {nbytes, 0, false};
}
EMULATOR_API void emulator_remove_page_locked(const void* at) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = page_locked().find(reinterpret_cast<uintptr_t>(at));
  UnderWay::expect_none(found->first, found->second.nbytes);
  page_locked().erase(found);
}
EMULATOR_API int emulator_is_page_locked(const void* at, size_t nbytes) {
  const Kind kind = kind_of(at, nbytes);
  return kind == Kind::kPageLocked || kind == Kind::kRegistered;
}
EMULATOR_API int64_t emulator_num_registered() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return std::count_if(page_locked().begin(), page_locked().end(), [](const auto& each) { return each.second.registered; });
}

}  // extern "C"
