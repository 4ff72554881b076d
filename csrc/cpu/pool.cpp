#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <exception>
#include <utility>

#include "spin.h"

namespace rl {
namespace {

uint32_t* word(std::atomic<uint32_t>& value) { return reinterpret_cast<uint32_t*>(&value); }

// What a thread needs to throw is allocated when it is first asked for, and without memory that ends
// the process.
void be_ready_to_throw() {
  volatile int count = std::uncaught_exceptions();  // volatile: a call without a use is left out
  static_cast<void>(count);
}

uint32_t epoch_of(uint64_t next) { return static_cast<uint32_t>(next >> 32); }

// The tile that a thread's run begins with.
uint32_t first_of_run(size_t run, size_t num_runs, uint32_t num_tiles) {
  return static_cast<uint32_t>(uint64_t{num_tiles} * run / num_runs);
}

}  // namespace

Pool::Pool(int num_threads) : runs_(static_cast<size_t>(num_threads)) {
  try {
    for (int thread = 1; thread < num_threads; ++thread)
      workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::reserve(size_t bytes_per_thread) {
  if (bytes_per_thread <= scratch_bytes_) return;
  scratch_.clear();
  scratch_bytes_ = 0;
  for (int thread = 0; thread < num_threads(); ++thread)
    scratch_.emplace_back(
        static_cast<uint8_t*>(::operator new(bytes_per_thread, std::align_val_t{64})));
  scratch_bytes_ = bytes_per_thread;
}

void Pool::stop() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  syscall(SYS_futex, word(epoch_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  for (auto& worker : workers_) worker.join();
}

void Pool::run_recorded(int64_t num_tiles, Call call, const void* body) {
  struct Job {
    Call call;
    const void* body;
    Recorder* recorder;
  } job{call, body, recorder_.get()};
  Call timed = [](const void* data, int64_t tile, int thread) {
    const Job& wrapped = *static_cast<const Job*>(data);
    int64_t begin = ticks();
    wrapped.call(wrapped.body, tile, thread);
    wrapped.recorder->note_tile(thread, begin, ticks());
  };
  recorder_->begin_job();
  if (num_tiles <= 1 || workers_.empty())
    for (int64_t tile = 0; tile < num_tiles; ++tile) timed(&job, tile, 0);
  else
    share(static_cast<uint32_t>(num_tiles), timed, &job);
  recorder_->end_job(num_tiles);
}

void Pool::share(uint32_t num_tiles, Call call, const void* body) {
  be_ready_to_throw();
  uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  // Closed first: a late worker that reads the new fields cannot then win a tile of the old job.
  for (Run& run : runs_) run.next.store(static_cast<uint64_t>(epoch) << 32 | UINT32_MAX);
  done_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_release);
  body_.store(body, std::memory_order_release);
  num_tiles_.store(num_tiles, std::memory_order_release);
  for (size_t i = 0; i < runs_.size(); ++i)
    runs_[i].next.store(static_cast<uint64_t>(epoch) << 32 | first_of_run(i, runs_.size(), num_tiles),
                        std::memory_order_release);
  epoch_.store(epoch);
  if (sleepers_.load() > 0)
    syscall(SYS_futex, word(epoch_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  take_tiles(epoch, 0);
  auto unfinished = [&] { return done_.load(std::memory_order_acquire) != num_tiles; };
  while (!spin(unfinished)) std::this_thread::yield();
  if (failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Pool::take_tiles(uint32_t epoch, int thread) {
  int num_runs = num_threads();
  for (int i = 0; i < num_runs; ++i) {
    // A run's at once: a counter that all threads write takes each of them from its stream of memory.
    const uint32_t done = take_run(epoch, (thread + i) % num_runs, thread);
    if (done > 0) done_.fetch_add(done, std::memory_order_release);
  }
}

uint32_t Pool::take_run(uint32_t epoch, int run, int thread) {
  uint32_t done = 0;
  std::atomic<uint64_t>& next = runs_[static_cast<size_t>(run)].next;
  uint64_t seen = next.load(std::memory_order_acquire);
  while (epoch_of(seen) == epoch) {
    Call call = call_.load(std::memory_order_acquire);
    const void* body = body_.load(std::memory_order_acquire);
    uint32_t num_tiles = num_tiles_.load(std::memory_order_acquire);
    uint32_t tile = static_cast<uint32_t>(seen);
    if (tile >= first_of_run(static_cast<size_t>(run) + 1, runs_.size(), num_tiles)) break;
    if (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    // The body lives on the caller's stack, so nobody leaves before all tiles are done.
    try {
      call(body, tile, thread);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
    ++done;
    seen = next.load(std::memory_order_acquire);
  }
  return done;
}

void Pool::work(int thread) {
  be_ready_to_throw();
  uint32_t epoch = 0;
  while (!stopping_.load()) {
    wait_for_epoch_after(epoch);
    epoch = epoch_.load();
    take_tiles(epoch, thread);
  }
}

void Pool::wait_for_epoch_after(uint32_t epoch) {
  auto unchanged = [&] { return epoch_.load() == epoch; };
  if (spin(unchanged)) return;
  sleepers_.fetch_add(1);
  while (unchanged())
    syscall(SYS_futex, word(epoch_), FUTEX_WAIT_PRIVATE, epoch, nullptr, nullptr, 0);
  sleepers_.fetch_sub(1);
}

}  // namespace rl
