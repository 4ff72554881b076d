#include "recorder.h"

#include <algorithm>

#include "pool.h"

namespace rl {
namespace {

constexpr size_t kSpansAtFirst = 1 << 14;
constexpr int64_t kLeastNs = 1000000;  // over which the rate of ticks is found

}  // namespace

Recorder::Recorder(int num_threads)
    : first_ticks_(ticks()), first_ns_(monotonic_ns()), shares_(static_cast<size_t>(num_threads)) {
  spans_.reserve(kSpansAtFirst);
}

void Recorder::begin_job() {
  for (Share& share : shares_) share = {};
  job_begin_ = ticks();
}

// Clocks of cores may differ by some ticks, and a core may read its own before it has seen the job:
// shares are cut to it.
void Recorder::end_job(int64_t num_tiles) {
  int64_t job_end = ticks();
  spans_.push_back({RL_SPAN_JOB, op_, 0, static_cast<int32_t>(num_tiles), job_begin_, job_end, 0});
  for (size_t thread = 0; thread < shares_.size(); ++thread) {
    const Share& share = shares_[thread];
    if (!share.num_tiles) continue;
    int64_t begin = std::clamp(share.begin, job_begin_, job_end);
    int64_t end = std::clamp(share.end, begin, job_end);
    spans_.push_back({RL_SPAN_SHARE, op_, static_cast<int32_t>(thread), share.num_tiles, begin, end,
                      std::min(share.busy, end - begin)});
  }
}

void Recorder::take(rl_span* spans) {
  while (monotonic_ns() - first_ns_ < kLeastNs) {
  }
  double ns_per_tick = static_cast<double>(monotonic_ns() - first_ns_) /
                       static_cast<double>(std::max<int64_t>(ticks() - first_ticks_, 1));
  auto ns = [&](int64_t count) {
    return static_cast<int64_t>(static_cast<double>(count) * ns_per_tick);
  };
  for (const rl_span& span : spans_) {
    *spans = span;
    spans->begin_ns = first_ns_ + ns(span.begin_ns - first_ticks_);
    spans->end_ns = first_ns_ + ns(span.end_ns - first_ticks_);
    spans->busy_ns = ns(span.busy_ns);
    ++spans;
  }
  spans_.clear();
}

}  // namespace rl

extern "C" {

int32_t rl_record(rl_pool* pool, int32_t on) try {
  reinterpret_cast<rl::Pool*>(pool)->record(on != 0);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

int64_t rl_num_spans(rl_pool* pool) {
  rl::Recorder* recorder = reinterpret_cast<rl::Pool*>(pool)->recorder();
  return recorder ? recorder->num_spans() : 0;
}

void rl_take_spans(rl_pool* pool, rl_span* spans) {
  if (rl::Recorder* recorder = reinterpret_cast<rl::Pool*>(pool)->recorder()) recorder->take(spans);
}

}  // extern "C"
