// Ranks of one host that exchange rows through memory that all of them have mapped.
//
// Each rank has two slots. It writes its part of message number n into slot n mod 2, and then says in
// its header that n is there. Who has seen n of all others is done with reading n - 1: the slot of
// n - 1 may then be written again. Rows that do not fit a slot go in several messages.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool.h"
#include "ridgeline_cpu.h"

namespace rl {

// Rows [T, own] of this rank, and where [T, all] go. Widths are bytes, `first` what is left of the
// parts of each rank: [num_ranks + 1]. The rows may lie within where they go, each not behind its place.
struct Parts {
  const uint8_t* own;
  int64_t own_stride;
  uint8_t* all;
  int64_t all_stride;
  const int64_t* first;
  int32_t num_rows;
};

class Group {
 public:
  static int64_t num_bytes(int num_ranks, int64_t slot_bytes);
  // `memory` begins as zeros, at a page.
  Group(void* memory, int rank, int num_ranks, int64_t slot_bytes);

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // Every row becomes all ranks' parts of it, side by side. False if one part of a row does not fit a
  // slot.
  bool gather(Pool& pool, const Parts& parts);

  // Row t becomes that of rank owners[t], whose rows alone are exchanged.
  bool gather_rows(Pool& pool, uint8_t* rows, int64_t stride, int64_t width, const int32_t* owners,
                   int32_t num_rows);

  int64_t sent_bytes() const { return sent_bytes_; }
  int64_t num_calls() const { return num_calls_; }

 private:
  struct alignas(64) Header {
    std::atomic<uint32_t> posted;
    std::atomic<uint32_t> sleepers;
  };

  Header& header(int rank) const { return headers_[rank]; }
  uint8_t* slot(int rank) const;
  void post();
  void wait_for(int rank) const;

  int rank_, num_ranks_;
  int64_t slot_bytes_;
  Header* headers_;
  uint8_t* slots_;
  uint32_t number_ = 0;  // of the message that is being made, from 1 on
  int64_t sent_bytes_ = 0, num_calls_ = 0;
};

}  // namespace rl
