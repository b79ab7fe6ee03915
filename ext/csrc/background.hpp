// Work that training does not wait for: on a thread of its own, at a lower priority than training's.
//
// The priority is that of a thread which never takes the interpreter lock. A thread of Python must keep its own: while
// it waits for a core, it may hold the lock, or be the one that the lock was handed to.
#pragma once
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>
#include <system_error>
#include <thread>

namespace moe_ckpt {

// Added to the nice value: a tenth of the weight of a thread of training on the same core. Less would let storage fall
// behind for as long as all cores are busy.
constexpr int kNicer = 10;

inline void lower_priority() {
#ifdef __linux__
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));  // nice values are per thread on Linux
  setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + kNicer);
#endif
}

// Calls `body`, which returns an int or throws, and returns when it has.
template <class Body>
int in_background(const Body& body) {
  std::packaged_task<int()> task([&] {
    lower_priority();
    return body();
  });
  auto result = task.get_future();
  try {
    std::thread(std::ref(task)).join();
  } catch (const std::system_error&) {
    return body();  // no thread to be had
  }
  return result.get();
}

}  // namespace moe_ckpt
