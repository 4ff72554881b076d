#include "group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

#include "program.h"
#include "spin.h"

namespace rl {
namespace {

uint32_t* word(std::atomic<uint32_t>& value) { return reinterpret_cast<uint32_t*>(&value); }

int64_t headers_bytes(int num_ranks) { return round_up(int64_t{64} * num_ranks, 4096); }

}  // namespace

int64_t Group::num_bytes(int num_ranks, int64_t slot_bytes) {
  return headers_bytes(num_ranks) + 2 * num_ranks * slot_bytes;
}

Group::Group(void* memory, int rank, int num_ranks, int64_t slot_bytes)
    : rank_(rank),
      num_ranks_(num_ranks),
      slot_bytes_(slot_bytes),
      headers_(static_cast<Header*>(memory)),
      slots_(static_cast<uint8_t*>(memory) + headers_bytes(num_ranks)) {}

uint8_t* Group::slot(int rank) const { return slots_ + (2 * rank + number_ % 2) * slot_bytes_; }

void Group::post() {
  Header& own = header(rank_);
  own.posted.store(number_);
  if (own.sleepers.load() > 0)
    syscall(SYS_futex, word(own.posted), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Group::wait_for(int rank) const {
  Header& other = header(rank);
  uint32_t seen = 0;
  // Numbers wrap around: a rank is at most one message ahead.
  auto missing = [&] { return static_cast<int32_t>((seen = other.posted.load()) - number_) < 0; };
  if (spin(missing)) return;
  other.sleepers.fetch_add(1);
  while (missing())
    syscall(SYS_futex, word(other.posted), FUTEX_WAIT, seen, nullptr, nullptr, 0);
  other.sleepers.fetch_sub(1);
}

bool Group::gather(Pool& pool, const Parts& parts) {
  int64_t widest = 0, own = parts.first[rank_ + 1] - parts.first[rank_];
  for (int r = 0; r < num_ranks_; ++r) widest = std::max(widest, parts.first[r + 1] - parts.first[r]);
  if (widest > slot_bytes_) return false;
  auto at_once = static_cast<int32_t>(
      std::min<int64_t>(parts.num_rows, widest ? slot_bytes_ / widest : parts.num_rows));
  // The last rows first: what is written then lies behind the rows that are still to be sent.
  for (int32_t stop = parts.num_rows; stop > 0; stop -= at_once) {
    int32_t start = std::max(0, stop - at_once);
    ++number_;
    uint8_t* sent = slot(rank_);
    for_tokens(pool, stop - start, [&](int32_t i) {
      std::memcpy(sent + i * own, parts.own + (start + i) * parts.own_stride, static_cast<size_t>(own));
    });
    post();
    for (int i = 0; i < num_ranks_; ++i) {
      int r = (rank_ + i) % num_ranks_;
      if (r != rank_) wait_for(r);
      const uint8_t* from = slot(r);
      int64_t width = parts.first[r + 1] - parts.first[r];
      for_tokens(pool, stop - start, [&](int32_t t) {
        std::memcpy(parts.all + (start + t) * parts.all_stride + parts.first[r], from + t * width,
                    static_cast<size_t>(width));
      });
    }
  }
  ++num_calls_;
  sent_bytes_ += own * parts.num_rows * (num_ranks_ - 1);
  return true;
}

bool Group::gather_rows(Pool& pool, uint8_t* rows, int64_t stride, int64_t width,
                        const int32_t* owners, int32_t num_rows) {
  if (width > slot_bytes_) return false;
  auto at_once = static_cast<int32_t>(std::min<int64_t>(num_rows, slot_bytes_ / width));
  for (int32_t start = 0; start < num_rows; start += at_once) {
    int32_t count = std::min(at_once, num_rows - start);
    ++number_;
    uint8_t* sent = slot(rank_);
    for_tokens(pool, count, [&](int32_t i) {
      if (owners[start + i] == rank_)
        std::memcpy(sent + i * width, rows + (start + i) * stride, static_cast<size_t>(width));
    });
    post();
    for (int r = 0; r < num_ranks_; ++r)
      if (r != rank_) wait_for(r);
    for_tokens(pool, count, [&](int32_t i) {
      int32_t owner = owners[start + i];
      if (owner != rank_)
        std::memcpy(rows + (start + i) * stride, slot(owner) + i * width, static_cast<size_t>(width));
    });
  }
  ++num_calls_;
  sent_bytes_ += width * std::count(owners, owners + num_rows, rank_) * (num_ranks_ - 1);
  return true;
}

}  // namespace rl

using rl::Group;

extern "C" {

int64_t rl_group_bytes(int32_t num_ranks, int64_t slot_bytes) {
  return Group::num_bytes(num_ranks, slot_bytes);
}

rl_group* rl_group_new(void* memory, int32_t rank, int32_t num_ranks, int64_t slot_bytes) {
  return reinterpret_cast<rl_group*>(new (std::nothrow) Group(memory, rank, num_ranks, slot_bytes));
}

void rl_group_free(rl_group* group) { delete reinterpret_cast<Group*>(group); }

int32_t rl_gather(rl_group* group, rl_pool* pool, const void* own, int64_t own_stride, void* all,
                  int64_t all_stride, const int64_t* first, int32_t num_rows) try {
  rl::Parts parts{static_cast<const uint8_t*>(own), own_stride, static_cast<uint8_t*>(all),
                  all_stride, first, num_rows};
  return reinterpret_cast<Group*>(group)->gather(*reinterpret_cast<rl::Pool*>(pool), parts) ? 0 : -2;
} catch (const std::bad_alloc&) {
  return -1;
}

int32_t rl_gather_rows(rl_group* group, rl_pool* pool, void* rows, int64_t stride, int64_t width,
                       const int32_t* owners, int32_t num_rows) try {
  return reinterpret_cast<Group*>(group)->gather_rows(*reinterpret_cast<rl::Pool*>(pool),
                                                      static_cast<uint8_t*>(rows), stride, width,
                                                      owners, num_rows)
             ? 0
             : -2;
} catch (const std::bad_alloc&) {
  return -1;
}

void rl_group_counts(rl_group* group, int64_t* sent_bytes, int64_t* num_calls) {
  *sent_bytes = reinterpret_cast<Group*>(group)->sent_bytes();
  *num_calls = reinterpret_cast<Group*>(group)->num_calls();
}

}  // extern "C"
