// The copy engine between host memory and host memory.
//
// Plans with a device can be run here too, with host memory in the device's place: staging, bounce, packing and pieces
// are then tested on machines without one.
#include "convert.hpp"
#include "engine.hpp"
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
    parallel_for(threads_, count, threads_ > 1 ? 16 : count, [&](size_t begin, size_t end) {
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
using SharedPlan = std::shared_ptr<Plan>;

CpuEngine& engine_of(void* handle) { return *static_cast<CpuEngine*>(handle); }
SharedPlan& plan_of(void* handle) { return *static_cast<SharedPlan*>(handle); }

}  // namespace
}  // namespace moe_ckpt

using namespace moe_ckpt;

MOE_API int moe_cpu_plan_create(const Slice* slices, uint64_t num_slices, const PlanOptions* options,
                                const Pieces* pieces, uint64_t num_pieces, void** plan, Error* error) {
  return guarded(error, [&] {
    *plan = new SharedPlan(std::make_shared<Plan>(slices, num_slices, *options, pieces, num_pieces));
    return 0;
  });
}
// Jobs that were submitted with the plan keep what they need of it.
MOE_API void moe_cpu_plan_free(void* plan) { delete &plan_of(plan); }
MOE_API uint64_t moe_cpu_plan_nbytes(void* plan) { return plan_of(plan)->nbytes(); }
MOE_API uint64_t moe_cpu_plan_bounce_nbytes(void* plan) { return plan_of(plan)->bounce_nbytes(); }
MOE_API int moe_cpu_plan_attach(void* plan, uint64_t staging, uint64_t bounce, Error* error) {
  return guarded(error, [&] {
    plan_of(plan)->attach(staging, bounce);
    return 0;
  });
}
MOE_API uint64_t moe_cpu_plan_num_chunks(void* plan) { return plan_of(plan)->chunks.size(); }
MOE_API uint64_t moe_cpu_plan_num_copies(void* plan) { return plan_of(plan)->copies.size(); }
// The copies in the order in which they are made.
MOE_API const Slice* moe_cpu_plan_copies(void* plan) { return plan_of(plan)->copies.data(); }

MOE_API int moe_cpu_engine_create(int32_t depth, int32_t threads, void** engine, Error* error) {
  return guarded(error, [&] {
    *engine = new CpuEngine(std::make_unique<CpuBackend>(threads), depth);
    return 0;
  });
}
// At once, on the calling thread and `threads - 1` others; for plans without a device.
MOE_API int moe_cpu_plan_run(void* plan, int32_t threads, Error* error) {
  return guarded(error, [&] {
    const auto& copies = plan_of(plan)->copies;
    return CpuBackend(threads).copy(copies.data(), copies.size(), *plan_of(plan), error);
  });
}

// Finishes what was submitted and ends the thread.
MOE_API void moe_cpu_engine_stop(void* engine) { engine_of(engine).stop(); }
MOE_API void moe_cpu_engine_free(void* engine) { delete &engine_of(engine); }
MOE_API int32_t moe_cpu_engine_event_fd(void* engine) { return engine_of(engine).event_fd(); }
MOE_API int moe_cpu_engine_submit(void* engine, void* plan, uint64_t* ticket, Error* error) {
  return guarded(error, [&] { return engine_of(engine).submit(plan_of(plan), nullptr, ticket, error); });
}
MOE_API int moe_cpu_engine_wait(void* engine, uint64_t ticket, int64_t timeout_us, Error* error) {
  return guarded(error, [&] { return engine_of(engine).wait(ticket, Stage::kDone, timeout_us, error); });
}
