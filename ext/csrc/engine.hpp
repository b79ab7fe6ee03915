// One worker thread that runs plans in the order in which they were submitted, a few chunks at a time.
//
// Pacing: copy engines ignore stream priority and run what is queued, so a copy of training waits behind everything
// queued before it. The worker keeps at most `depth` chunks queued. With one, nobody waits longer than a chunk takes; with
// more, the device may go on with this stream for several.
// `hurry` lifts that, and what the gate holds, for a ticket that somebody waits for. The interpreter lock is never taken here.
//
// A job is *submitted* when all its copies are queued with the device, and *done* when the bytes are at their
// destination. The worker finishes a job before it begins the next one. A failed job spoils no other.
#pragma once
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "abi.hpp"
#include "gate.hpp"
#include "plan.hpp"

namespace moe_ckpt {

constexpr int64_t kFence = -2;

enum class Stage : int32_t { kSubmitted = 0, kDone = 1 };

// `Backend` queues copies on a device (or makes them, on the CPU):
//   Ready mark(stream)                         after the work that `stream` holds now; called by the submitting thread
//   begin(ready), copy(slices, n, plan), run_units(units_on_device, units, n, plan)
//   record(slot), sync(slot)                   the end of a chunk; slots are 0 .. depth - 1
//   record_end(), sync_end(), follow_end(stream)
// All but `mark` and `follow_end` are called by the worker. They return 0 or `fail(...)`.
template <class Backend>
class Engine {
 public:
  using Ready = typename Backend::Ready;

  Engine(std::unique_ptr<Backend> backend, int depth) : backend_(std::move(backend)), depth_(depth) {
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    try {
      worker_ = std::thread([this] {
        serve();
        const std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
        progress_.notify_all();
      });
    } catch (...) {
      close(event_fd_);
      throw;
    }
  }

  // `stop` has returned true.
  ~Engine() { close(event_fd_); }

  // Finishes everything that was submitted and ends the thread. Tickets can still be asked, nothing can be submitted.
  // False if the thread has not ended after `timeout_us` (negative: no limit), as beside a device that hangs: then the
  // engine must not be destroyed.
  bool stop(int64_t timeout_us) {
    gate_->open_for_ever();
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    const auto ended = [&] { return ended_; };
    if (timeout_us < 0)
      progress_.wait(lock, ended);
    else if (!progress_.wait_for(lock, std::chrono::microseconds(timeout_us), ended))
      return false;
    lock.unlock();
    const std::lock_guard<std::mutex> joining(join_mutex_);
    if (worker_.joinable()) worker_.join();
    return true;
  }

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // `base`: what the plan's destinations count from, 0 if they are addresses.
  int submit(std::shared_ptr<const Plan> plan, uint64_t base, void* stream, uint64_t* ticket, Error* error) {
    if (!plan->ready()) return fail(error, "the plan needs %llu bytes to be attached first",
                                    static_cast<unsigned long long>(plan->bounce_nbytes()));
    Ready ready{};
    if (backend_->mark(stream, &ready, error)) return -1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return fail(error, "the engine was stopped");
      *ticket = ++newest_;
      queue_.push_back({std::move(plan), base, ready, newest_});
    }
    work_.notify_one();
    return 0;
  }

  // 0 when `ticket` has reached `stage`, 1 if it has not after `timeout_us` (negative: no limit), -1 if it failed. kFence
  // waits without limit too, and lifts pacing and gate: training stands still meanwhile.
  int wait(uint64_t ticket, Stage stage, int64_t timeout_us, Error* error) {
    if (timeout_us == kFence) hurry(ticket);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto reached = [&] { return (stage == Stage::kDone ? done_ : submitted_) >= ticket; };
    if (timeout_us < 0) {
      progress_.wait(lock, reached);
    } else if (!progress_.wait_until(lock, std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us),
                                     reached)) {
      return 1;
    }
    return report(ticket, error);
  }

  // Stop pacing for all tickets up to this one.
  void hurry(uint64_t ticket) { gate_->hurry(ticket); }

  // Shared with what the device calls in the order of a stream, perhaps when the engine is no more.
  const std::shared_ptr<Gate>& gate() const { return gate_; }

  // Work that `stream` gets from now on runs after the copies of `ticket`. Waits until they are queued, not until made:
  // waiting for an event that was not recorded yet would do nothing, silently.
  int fence(uint64_t ticket, void* stream, Error* error) {
    hurry(ticket);
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [&] { return submitted_ >= ticket; });
    if (report(ticket, error)) return -1;
    return done_ >= ticket ? 0 : backend_->follow_end(stream, error);  // the lock keeps the event from being reused
  }

  // Readable when a ticket became done since it was last read.
  int event_fd() const { return event_fd_; }
  Backend& backend() { return *backend_; }

 private:
  struct Job {
    std::shared_ptr<const Plan> plan;
    uint64_t base;
    Ready ready;
    uint64_t ticket;
  };

  void serve() {
    for (;;) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      Error error{};
      bool failed = guarded(&error, [&] { return queue_copies(job, &error); }) != 0;
      // Also after a failure: copies that were queued may still write, and nobody may go on before they have.
      failed |= backend_->record_end(failed ? &scratch_ : &error) != 0;
      reach(job.ticket, Stage::kSubmitted, failed ? error.message : nullptr);
      failed |= backend_->sync_end(failed ? &scratch_ : &error) != 0;
      if (!failed)
        for (Slice op : job.plan->scatter) {
          op.dst += job.base;
          copy_bytes(op);
        }
      job.plan.reset();
      reach(job.ticket, Stage::kDone, failed ? error.message : nullptr);
      const uint64_t one = 1;
      // Fails only if 2^64 - 2 completions went unread.
      if (write(event_fd_, &one, sizeof one) < 0) continue;
    }
  }

  int queue_copies(const Job& job, Error* error) {
    const Plan& plan = *job.plan;
    if (backend_->begin(job.ready, error)) return -1;
    for (const auto& op : plan.gather) copy_bytes(Plan::moved(op, job.base));
    const uint64_t units = plan.units_on_device;
    if (backend_->run_units(units, plan.pack.data(), plan.pack.size(), plan, error)) return -1;
    gate_->begin(plan.nbytes(), plan.chunks.size());
    for (size_t index = 0; index < plan.chunks.size(); ++index) {
      const size_t slot = index % depth_;
      if (index >= static_cast<size_t>(depth_) && !gate_->hurried(job.ticket) && backend_->sync(slot, error)) return -1;
      gate_->pass(job.ticket);
      plan.place(plan.chunks[index], job.base, &placed_);
      if (backend_->copy(placed_.data(), placed_.size(), plan, error)) return -1;
      if (backend_->record(slot, error)) return -1;
    }
    return backend_->run_units(units + plan.pack.size() * sizeof(Slice), plan.unpack.data(), plan.unpack.size(), plan,
                               error);
  }

  void reach(uint64_t ticket, Stage stage, const char* failure) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure) failures_.emplace(ticket, failure);
      (stage == Stage::kDone ? done_ : submitted_) = ticket;
    }
    progress_.notify_all();
  }

  int report(uint64_t ticket, Error* error) const {
    const auto failure = failures_.find(ticket);
    return failure == failures_.end() ? 0 : fail(error, "%s", failure->second.c_str());
  }

  std::unique_ptr<Backend> backend_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  const int depth_;
  int event_fd_ = -1;
  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::deque<Job> queue_;
  std::map<uint64_t, std::string> failures_;  // kept: a ticket may be asked more than once, and failures are few
  uint64_t newest_ = 0, submitted_ = 0, done_ = 0;
  bool stopping_ = false, ended_ = false;
  std::mutex join_mutex_;
  std::vector<Slice> placed_;  // the worker's
  Error scratch_{};
  std::thread worker_;
};

}  // namespace moe_ckpt
