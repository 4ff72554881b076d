// Threads that share a job's tiles. The caller works too. Each thread has a run of consecutive tiles,
// so that it reads memory in order, and takes them one by one; who has finished takes the others'. A
// core that is slow, or taken away, holds back no more than the tile that it is on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "recorder.h"

namespace rl {

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(runs_.size()); }

  // Calls body(tile, thread) for each tile in [0, num_tiles), thread in [0, num_threads()), and
  // returns when all are done, or throws what one of them threw. One caller at a time. Nothing is
  // shared out below two tiles.
  template <class Body>
  void run(int64_t num_tiles, const Body& body) {
    if (recorder_) return run_recorded(num_tiles, &call<Body>, &body);
    if (num_tiles <= 1 || workers_.empty()) {
      for (int64_t tile = 0; tile < num_tiles; ++tile) body(tile, 0);
      return;
    }
    share(static_cast<uint32_t>(num_tiles), &call<Body>, &body);
  }

  // From now on, or no longer, what `run` does is timed. Not while it runs.
  void record(bool on) { recorder_.reset(on ? new Recorder(num_threads()) : nullptr); }
  Recorder* recorder() const { return recorder_.get(); }

  // Memory of each thread's own, at least so much of it; the caller of `run` reserves it before.
  void reserve(size_t bytes_per_thread);
  uint8_t* scratch(int thread) { return scratch_[static_cast<size_t>(thread)].get(); }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  using Call = void (*)(const void* body, int64_t tile, int thread);

  template <class Body>
  static void call(const void* body, int64_t tile, int thread) {
    (*static_cast<const Body*>(body))(tile, thread);
  }

  void stop();
  void run_recorded(int64_t num_tiles, Call call, const void* body);
  void share(uint32_t num_tiles, Call call, const void* body);
  void work(int thread);
  void take_tiles(uint32_t epoch, int thread);
  uint32_t take_run(uint32_t epoch, int run, int thread);  // how many tiles it did
  void wait_for_epoch_after(uint32_t epoch);

  // A thread's run of tiles: the epoch in the high half, the next tile in the low one.
  struct alignas(64) Run {
    std::atomic<uint64_t> next{0};
  };

  // A job. Its fields may be read by a worker that is late; what it read is used only if the
  // exchange on a run's `next` then shows that this job is still the current one.
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<uint32_t> num_tiles_{0};

  std::vector<Run> runs_;  // of each thread
  std::unique_ptr<Recorder> recorder_;
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // of the first tile that failed
  alignas(64) std::atomic<uint32_t> epoch_{0};  // what sleepers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<uint8_t, Free>> scratch_;
  size_t scratch_bytes_ = 0;
  std::vector<std::thread> workers_;
};

// Runs body as part `part` of a step, timed if the pool records.
template <class Body>
void run_part(const Pool& pool, int32_t part, const Body& body) {
  if (Recorder* recorder = pool.recorder())
    recorder->time(part, body);
  else
    body();
}

}  // namespace rl
