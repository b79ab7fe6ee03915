// Kernels on the CPU: a block runs on one thread of the system, its threads are fibers that run until they must wait.
//
// Warps take turns in any order, and so do lanes: nothing may depend on it. Blocks run on a few threads at a time. The
// thread sanitizer never sees this file; it is told of fibers, and that barriers are all that orders them, so it finds
// races between threads of a block, in shared memory and in memory of the device.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#ifdef EMULATOR_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#define IF_TSAN(...) __VA_ARGS__
#else
#define IF_TSAN(...)
#endif

// Saves the registers that a call preserves on the stack it leaves, and takes up those of the stack it goes to.
extern "C" void emulator_switch(void** left, void* entered);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace emulated {
namespace {

constexpr size_t kStackNbytes = 128 << 10;
constexpr size_t kSavedRegisters = 6;
constexpr unsigned kLanes = 32;
constexpr unsigned kNoOrder = 1;  // of __tsan_switch_to_fiber: what one fiber did is not seen by the next one

std::mt19937& random_numbers() {
  thread_local std::mt19937 generator(std::random_device{}());
  return generator;
}

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Fiber {
  void* stack_pointer = nullptr;
  State state = State::kReady;
  Index index;
  void* tsan = nullptr;
};

// One call of a warp function: who has come, and what they brought. Two sets, since a lane may be in the next call
// before another has read what this one gave.
struct WarpCall {
  uint64_t brought[kLanes], given[2][kLanes];
  unsigned arrived = 0, mask = 0;
  Warp operation = Warp::kBallot;
  int turn = 0;
};

struct Block {
  Index index, size, grid;
  std::vector<Fiber> fibers;
  std::vector<WarpCall> warps;
  std::vector<char> dynamic_shared;
  const std::function<void()>* body = nullptr;
  void* scheduler = nullptr;
  Fiber* current = nullptr;
  unsigned live = 0, at_barrier = 0;
  void* tsan = nullptr;
  long barrier = 0, begin = 0, end = 0;  // addresses that the sanitizer knows an order by
};

thread_local Block* block;

class Stacks {
 public:
  char* at(size_t index) {
    while (stacks_.size() <= index) {
      void* mapped = mmap(nullptr, kStackNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) die("no memory for the stack of a fiber");
      stacks_.push_back(static_cast<char*>(mapped));
    }
    return stacks_[index];
  }
  ~Stacks() {
    for (auto* stack : stacks_) munmap(stack, kStackNbytes);
  }

 private:
  std::vector<char*> stacks_;
};
thread_local Stacks stacks;

#ifdef EMULATOR_TSAN
// The sanitizer has room for a few thousand fibers in the life of a process, so they are used again.
class TsanFibers {
 public:
  void* take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return __tsan_create_fiber(0);
    void* fiber = free_.back();
    free_.pop_back();
    return fiber;
  }
  void give(void* fiber) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(fiber);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> free_;
};
TsanFibers& tsan_fibers() {
  static auto* fibers = new TsanFibers;
  return *fibers;
}
#endif

void yield_as(State state) {
  block->current->state = state;
  IF_TSAN(__tsan_switch_to_fiber(block->tsan, kNoOrder);)
  emulator_switch(&block->current->stack_pointer, block->scheduler);
}

void open_barrier() {
  for (auto& fiber : block->fibers)
    if (fiber.state == State::kAtBarrier) fiber.state = State::kReady;
  block->at_barrier = 0;
}

void fiber_entry() {
  IF_TSAN(__tsan_acquire(&block->begin);)
  (*block->body)();
  IF_TSAN(__tsan_release(&block->end);)
  --block->live;
  if (block->live && block->at_barrier == block->live) open_barrier();
  yield_as(State::kDone);
}

void prepare_fibers(Block& own) {
  for (size_t index = 0; index < own.fibers.size(); ++index) {
    auto** top = reinterpret_cast<void**>(stacks.at(index) + kStackNbytes - 64);
    top[0] = reinterpret_cast<void*>(fiber_entry);
    own.fibers[index].stack_pointer = top - kSavedRegisters;
    IF_TSAN(own.fibers[index].tsan = tsan_fibers().take();)
  }
}

void run_block(Block& own) {
  block = &own;
  prepare_fibers(own);
  IF_TSAN(own.tsan = __tsan_get_current_fiber(); __tsan_release(&own.begin);)
  std::vector<size_t> order(own.fibers.size());
  for (size_t index = 0; index < order.size(); ++index) order[index] = index;
  while (own.live) {
    if (random_numbers()() % 2)
      std::shuffle(order.begin(), order.end(), random_numbers());
    else
      std::reverse(order.begin(), order.end());
    bool ran = false;
    for (const size_t index : order) {
      if (own.fibers[index].state != State::kReady) continue;
      ran = true;
      own.current = &own.fibers[index];
      IF_TSAN(__tsan_switch_to_fiber(own.current->tsan, kNoOrder);)
      emulator_switch(&own.scheduler, own.current->stack_pointer);
    }
    if (!ran) die("threads of a block wait for each other in different places");
  }
  IF_TSAN(__tsan_acquire(&own.end); for (auto& fiber : own.fibers) tsan_fibers().give(fiber.tsan);)
  block = nullptr;
}

std::mutex allowed_mutex;
std::map<const void*, size_t>& allowed() {
  static auto* found = new std::map<const void*, size_t>;
  return *found;
}

}  // namespace

void die(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

void jitter() {
  const int64_t limit = setting("jitter_us");
  if (limit > 0 && random_numbers()() % 4 == 0) usleep(random_numbers()() % limit);
}

const Index& thread_index() { return block->current->index; }
const Index& block_index() { return block->index; }
const Index& block_size() { return block->size; }
const Index& grid_size() { return block->grid; }
unsigned lane() { return block->current->index.x % kLanes; }
void* dynamic_shared() { return block->dynamic_shared.data(); }

void sync_threads() {
  jitter();
  // A block that is held back is what look-back from later blocks has to wait for.
  if (static_cast<int64_t>(block->index.x) == setting("held_block") && block->current->index.x == 0) usleep(100000);
  IF_TSAN(__tsan_release(&block->barrier);)
  if (++block->at_barrier == block->live) {
    open_barrier();
    yield_as(State::kReady);
  } else {
    yield_as(State::kAtBarrier);
  }
  IF_TSAN(__tsan_acquire(&block->barrier);)
}

const uint64_t* exchange(Warp operation, unsigned mask, uint64_t value) {
  Block& own = *block;
  const unsigned first = own.current->index.x / kLanes * kLanes, bit = 1u << lane();
  WarpCall& call = own.warps[first / kLanes];
  if (!(mask & bit)) die("a lane calls a warp function whose mask leaves it out");
  if (call.arrived && (call.operation != operation || call.mask != mask))
    die("lanes of a warp call different functions");
  call.operation = operation;
  call.mask = mask;
  call.brought[lane()] = value;
  call.arrived |= bit;
  const int turn = call.turn;
  if (call.arrived != mask) {
    yield_as(State::kInWarp);
    return call.given[turn];
  }
  // A loop, and compiled as one: the thread sanitizer looks into every memcpy, this file's too.
  for (unsigned index = 0; index < kLanes; ++index) call.given[turn][index] = call.brought[index];
  call.arrived = 0;
  call.turn ^= 1;
  for (unsigned index = first; index < std::min<size_t>(first + kLanes, own.fibers.size()); ++index)
    if (own.fibers[index].state == State::kInWarp) own.fibers[index].state = State::kReady;
  if (operation == Warp::kBallot) {  // loops that wait for another block ask by it: let that block run
    std::this_thread::yield();
    jitter();
  }
  yield_as(State::kReady);
  return call.given[turn];
}

void allow_dynamic_shared(const void* kernel, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  allowed()[kernel] = nbytes;
}

size_t allowed_dynamic_shared(const void* kernel) {
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  const auto found = allowed().find(kernel);
  return found == allowed().end() ? 48 << 10 : found->second;
}

void run_grid(const Grid& grid, const std::function<void()>& body) {
  std::atomic<unsigned> next{0};
  const auto work = [&] {
    for (unsigned index; (index = next.fetch_add(1)) < grid.blocks;) {
      Block own;
      own.index.x = index;
      own.size = {grid.threads, 1, 1};
      own.grid = {grid.blocks, 1, 1};
      own.fibers.resize(grid.threads);
      own.warps.resize((grid.threads + kLanes - 1) / kLanes);
      own.dynamic_shared.assign(grid.shared_nbytes, static_cast<char>(0xA5));  // never what a kernel hopes to find
      for (unsigned thread = 0; thread < grid.threads; ++thread) own.fibers[thread].index = {thread, 0, 0};
      own.body = &body;
      own.live = grid.threads;
      run_block(own);
    }
  };
  std::vector<std::thread> others;
  const auto width = std::min<int64_t>(setting("blocks_at_once"), grid.blocks);
  for (int64_t index = 1; index < width; ++index) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
}

}  // namespace emulated
