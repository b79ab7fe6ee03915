// The copy engine between host memory and host memory.
//
// Plans with a device can be run here too, with host memory in the device's place: staging, bounce, packing and pieces
// are then tested on machines without one.
#include "convert.hpp"
#include "engine_abi.hpp"
#include "parallel.hpp"

namespace moe_ckpt {
namespace {

class CpuBackend {
 public:
  struct Ready {};

  explicit CpuBackend(int threads) : threads_(threads) {}

  int mark(void*, Ready*, Error*) { return 0; }
  int begin(Ready, Error*) { return 0; }
  int record(size_t, Error*) { return 0; }
  int sync(size_t, Error*) { return 0; }
  int record_end(Error*) { return 0; }
  int sync_end(Error*) { return 0; }
  int follow_end(void*, Error*) { return 0; }

  int copy(const Slice* slices, size_t count, const Plan& plan, Error*) {
    const auto nan = static_cast<uint16_t>(plan.bfloat16_nan());
    parallel_for(threads_, count, threads_ > 1 ? 16 : std::max<size_t>(count, 1), [&](size_t begin, size_t end) {
      for (size_t index = begin; index < end; ++index) copy_slice(slices[index], nan);
    });
    return 0;
  }

  int run_units(uint64_t, const Slice* units, size_t count, const Plan& plan, Error* error) {
    return count ? copy(units, count, plan, error) : 0;
  }

 private:
  const int threads_;
};

using CpuEngine = Engine<CpuBackend>;

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

MOE_DEFINE_ENGINE(cpu, CpuEngine)

// At once, on the calling thread and `threads - 1` others; for plans without a device.
MOE_API int moe_cpu_plan_run(void* plan, int32_t threads, Error* error) {
  return guarded(error, [&] {
    const auto& copies = plan_of(plan)->copies;
    return CpuBackend(threads).copy(copies.data(), copies.size(), *plan_of(plan), error);
  });
}

MOE_API int moe_cpu_engine_create(int32_t depth, int32_t threads, void** engine, Error* error) {
  return guarded(error, [&] {
    *engine = new CpuEngine(std::make_unique<CpuBackend>(threads), depth);
    return 0;
  });
}
MOE_API int moe_cpu_engine_submit(void* engine, void* plan, uint64_t base, uint64_t* ticket, Error* error) {
  return guarded(error, [&] {
    return static_cast<CpuEngine*>(engine)->submit(plan_of(plan), base, nullptr, ticket, error);
  });
}
// From here on the calling thread is in this phase of a schedule.
MOE_API int moe_cpu_engine_enter(void* engine, int32_t phase, Error* error) {
  return guarded(error, [&] {
    static_cast<CpuEngine*>(engine)->gate()->enter(static_cast<Phase>(phase));
    return 0;
  });
}
