// When an engine may copy, beside a training that runs operations of a pipeline's schedule with gaps between them.
//
// Chunks are copied in gaps. What of a list does not fit into the gaps of one pass through the schedule is copied beside
// operations, whichever comes first. Nothing is held outside of a schedule, once somebody waits for the list, or when the
// engine stops. (MOETION, Sec. 5.3, Algorithm 4, with gaps that are measured.)
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>

namespace moe_ckpt {

enum class Phase : int32_t { kOutside = 0, kOperation = 1, kGap = 2 };

// What became of chunks since the engine began, by phase, and the gaps of the last pass that ended.
struct GateCounts {
  uint64_t outside = 0, beside = 0, in_gaps = 0, gap_ns = 0, passes = 0;
};

class Gate {
 public:
  void enter(Phase phase) {
    const auto now = Clock::now();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (phase_ == Phase::kGap) gap_ += now - since_;
      if (phase == Phase::kOutside && phase_ != Phase::kOutside) {
        counts_.gap_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(gap_).count();
        ++counts_.passes;
        gap_ = {};
      }
      phase_ = phase;
      since_ = now;
    }
    open_.notify_all();
  }

  // Bytes that are copied in the gaps of one pass.
  void fit(uint64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fits_ = nbytes;
  }

  // Called by the worker before the first chunk of a list, and before each.
  void begin(uint64_t nbytes, uint64_t chunks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t in_gaps = nbytes <= fits_ ? chunks : static_cast<uint64_t>(double(chunks) * double(fits_) / double(nbytes));
    beside_ = chunks - in_gaps;
  }
  void pass(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    open_.wait(lock, [&] { return phase_ != Phase::kOperation || beside_ > 0 || ticket <= hurried_; });
    if (phase_ == Phase::kOperation && beside_ > 0) --beside_;
    ++(phase_ == Phase::kOutside ? counts_.outside : phase_ == Phase::kGap ? counts_.in_gaps : counts_.beside);
  }

  // Hold nothing up to this ticket.
  void hurry(uint64_t ticket) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      hurried_ = std::max(hurried_, ticket);
    }
    open_.notify_all();
  }
  bool hurried(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ticket <= hurried_;
  }
  void open_for_ever() { hurry(std::numeric_limits<uint64_t>::max()); }

  GateCounts counts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::mutex mutex_;
  std::condition_variable open_;
  Phase phase_ = Phase::kOutside;
  Clock::time_point since_{};
  Clock::duration gap_{};
  uint64_t fits_ = 0, beside_ = 0, hurried_ = 0;
  GateCounts counts_;
};

}  // namespace moe_ckpt
