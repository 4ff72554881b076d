// What the parts of steps took: by op, by job of the pool, and by thread. A pool has a recorder only
// while it records; jobs then go through a path of their own (Pool::run_recorded).
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "ridgeline_cpu.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace rl {

inline int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The cheapest clock there is; its rate is found by comparing it with monotonic_ns.
inline int64_t ticks() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__rdtsc());
#else
  return monotonic_ns();
#endif
}

class Recorder {
 public:
  explicit Recorder(int num_threads);

  // Runs body as part `op` of a step: an op of the program, or one of RL_PART_*.
  template <class Body>
  void time(int32_t op, const Body& body) {
    op_ = op;
    int64_t begin = ticks();
    body();
    spans_.push_back({RL_SPAN_OP, op, 0, 0, begin, ticks(), 0});
  }

  // A job begins; its tiles follow, on any threads.
  void begin_job();
  void note_tile(int thread, int64_t begin, int64_t end) {
    Share& share = shares_[static_cast<size_t>(thread)];
    if (share.num_tiles++ == 0) share.begin = begin;
    share.end = end;
    share.busy += end - begin;
  }
  void end_job(int64_t num_tiles);

  int64_t num_spans() const { return static_cast<int64_t>(spans_.size()); }
  // Writes all spans in nanoseconds, and forgets them.
  void take(rl_span* spans);

 private:
  struct alignas(64) Share {  // a thread's part of the job
    int64_t begin, end, busy;
    int32_t num_tiles;
  };

  int32_t op_ = RL_PART_NONE;
  int64_t job_begin_ = 0;
  int64_t first_ticks_, first_ns_;
  std::vector<Share> shares_;
  std::vector<rl_span> spans_;  // in ticks
};

}  // namespace rl
