// The part of the C boundary of plans and engines that is the same in both libraries.
#pragma once
#include "engine.hpp"

namespace moe_ckpt {

using SharedPlan = std::shared_ptr<Plan>;

inline SharedPlan& plan_of(void* handle) { return *static_cast<SharedPlan*>(handle); }

}  // namespace moe_ckpt

// `part` is cpu or cuda, `EngineType` its engine. A plan may be freed while jobs use it: they keep what they need.
#define MOE_DEFINE_ENGINE(part, EngineType)                                                                        \
  MOE_API int moe_##part##_plan_create(const moe_ckpt::Slice* slices, uint64_t num_slices,                         \
                                       const moe_ckpt::PlanOptions* options, const moe_ckpt::Pieces* pieces,       \
                                       uint64_t num_pieces, void** plan, moe_ckpt::Error* error) {                 \
    return moe_ckpt::guarded(error, [&] {                                                                          \
      *plan = new moe_ckpt::SharedPlan(                                                                            \
          std::make_shared<moe_ckpt::Plan>(slices, num_slices, *options, pieces, num_pieces));                     \
      return 0;                                                                                                    \
    });                                                                                                            \
  }                                                                                                                \
  MOE_API void moe_##part##_plan_free(void* plan) { delete &moe_ckpt::plan_of(plan); }                             \
  MOE_API uint64_t moe_##part##_plan_nbytes(void* plan) { return moe_ckpt::plan_of(plan)->nbytes(); }              \
  MOE_API uint64_t moe_##part##_plan_bounce_nbytes(void* plan) { return moe_ckpt::plan_of(plan)->bounce_nbytes(); } \
  MOE_API uint64_t moe_##part##_plan_staging_nbytes(void* plan) { return moe_ckpt::plan_of(plan)->staging_nbytes(); } \
  MOE_API int moe_##part##_plan_attach(void* plan, uint64_t staging, uint64_t bounce, moe_ckpt::Error* error) {    \
    return moe_ckpt::guarded(error, [&] {                                                                          \
      moe_ckpt::plan_of(plan)->attach(staging, bounce);                                                            \
      return 0;                                                                                                    \
    });                                                                                                            \
  }                                                                                                                \
  MOE_API uint64_t moe_##part##_plan_num_chunks(void* plan) { return moe_ckpt::plan_of(plan)->chunks.size(); }     \
  /* How many copies a job with this `base` queues; the first `capacity` of them go to `copies`. */                 \
  MOE_API uint64_t moe_##part##_plan_copies(void* plan, uint64_t base, moe_ckpt::Slice* copies, uint64_t capacity) { \
    std::vector<moe_ckpt::Slice> placed;                                                                           \
    moe_ckpt::plan_of(plan)->place({0, moe_ckpt::plan_of(plan)->copies.size()}, base, &placed);                    \
    std::copy_n(placed.begin(), std::min<uint64_t>(capacity, placed.size()), copies);                              \
    return placed.size();                                                                                          \
  }                                                                                                                \
  /* 0, or 1 if the thread has not ended after `timeout_us`: then nothing was freed. Negative: no limit. */          \
  MOE_API int32_t moe_##part##_engine_stop(void* engine, int64_t timeout_us) {                                     \
    return static_cast<EngineType*>(engine)->stop(timeout_us) ? 0 : 1;                                             \
  }                                                                                                                \
  MOE_API int32_t moe_##part##_engine_free(void* engine, int64_t timeout_us) {                                     \
    if (!static_cast<EngineType*>(engine)->stop(timeout_us)) return 1;                                             \
    delete static_cast<EngineType*>(engine);                                                                       \
    return 0;                                                                                                      \
  }                                                                                                                \
  MOE_API int32_t moe_##part##_engine_event_fd(void* engine) { return static_cast<EngineType*>(engine)->event_fd(); } \
  MOE_API int moe_##part##_engine_wait(void* engine, uint64_t ticket, int64_t timeout_us, moe_ckpt::Error* error) { \
    return moe_ckpt::guarded(error, [&] {                                                                          \
      return static_cast<EngineType*>(engine)->wait(ticket, moe_ckpt::Stage::kDone, timeout_us, error);            \
    });                                                                                                            \
  }                                                                                                                 \
  MOE_API void moe_##part##_engine_fit(void* engine, uint64_t nbytes) {                                            \
    static_cast<EngineType*>(engine)->gate()->fit(nbytes);                                                         \
  }                                                                                                                \
  MOE_API void moe_##part##_engine_counts(void* engine, moe_ckpt::GateCounts* counts) {                            \
    *counts = static_cast<EngineType*>(engine)->gate()->counts();                                                  \
  }
