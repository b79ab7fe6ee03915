// A loop over pieces of a range on a few threads that live for one call.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace moe_ckpt {

// Calls `body(begin, end)` for pieces of at most `grain` of [0, count), each once, in no order, on at most `threads`
// threads, of which the caller is one. `body` must not throw.
template <class Body>
void parallel_for(int threads, size_t count, size_t grain, const Body& body) {
  if (!count) return;
  const size_t pieces = (count + grain - 1) / grain;
  const size_t workers = std::min<size_t>(std::max(threads, 1), pieces);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t piece; (piece = next.fetch_add(1)) < pieces;)
      body(piece * grain, std::min(count, (piece + 1) * grain));
  };
  std::vector<std::thread> others;
  for (size_t index = 1; index < workers; ++index) {
    try {
      others.emplace_back(work);
    } catch (...) {
      break;  // no thread to be had: those there are do all of it
    }
  }
  work();
  for (auto& other : others) other.join();
}

}  // namespace moe_ckpt
