// Cuts a batch's attention into work items that threads share, and bounds what they keep.
//
// One thread may walk over all splits of a block. Where there are few blocks their splits are shared
// out: each leaves a partial result, and who computes the last of them merges them in order. What is
// kept at a time is limited: more is computed in waves, between which only each block's total stays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "rounding.h"

namespace rl {

constexpr int kItemsPerThread = 8;  // at least, so that no thread waits long for another's last
// Partial results of whole blocks that are kept at a time. As fewer than kItemsPerThread blocks for
// each thread have their splits shared out, a wave takes several splits of each.
constexpr int kPartialsPerThread = 4 * kItemsPerThread;

struct Widths {
  int32_t heads;  // of a KV head
  int32_t out;
  int32_t out_stride;
};

inline Widths widths(const rl_kv_group& group, const rl_attention& attention) {
  int32_t out = group.v_width ? group.v_width : attention.out_width;
  return {attention.num_heads / group.num_kv_heads, out, static_cast<int32_t>(round_up(out, 16))};
}

// Takes pieces of memory one after another; without memory it only counts their bytes.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<uint8_t*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  uint8_t* memory_;
  int64_t used_ = 0;
};

inline Partial take_partial(Arena& arena, int num_rows, int out_stride) {
  Partial partial = {};
  partial.maximum = arena.take<float>(num_rows);
  partial.sum = arena.take<float>(num_rows);
  partial.out = arena.take<float>(int64_t{num_rows} * out_stride);
  return partial;
}

inline int64_t partial_bytes(int num_rows, int out_stride) {
  Arena arena(nullptr);
  take_partial(arena, num_rows, out_stride);
  return arena.used();
}

// What one thread works on.
struct ThreadScratch {
  BlockScratch block;
  Partial total;
  Partial part;
};

// `thread` is null where bytes are counted.
void take_thread(Arena& arena, const rl_kv_group& group, int out_stride, ThreadScratch* thread);

void clear(const Partial& total, int num_rows, int out_stride);

// Divides by the sum of the weights, a sink's among them, and writes the rows out.
void finish(const RowBlock& block, const Partial& total, float* out);

// One sequence's work. Its items are (KV head, split, block), blocks innermost, so that those that
// read the same part of the cache follow each other. Where splits are not shared out an item is
// (KV head, block), and walks over all splits.
struct Share {
  int32_t unit_rows;  // blocks do not extend over a multiple of this
  int32_t blocks_per_unit;
  int32_t num_blocks;
  int32_t first_split;
  int32_t num_splits;
  bool splits_shared;
  int64_t first_block;  // among the blocks whose splits are shared out, of all KV heads
  // Of a wave: splits [wave_start, wave_start + wave_splits), counted from the first one, and the
  // items and the bytes of partial results that are before its own.
  int32_t wave_start;
  int32_t wave_splits;
  int64_t first_item;
  int64_t first_partial;

  int block_rows() const { return std::min(unit_rows, kBlockRows); }  // at most
  int64_t cost_of_block() const { return int64_t{block_rows()} * num_splits; }
  int32_t splits_left() const { return num_splits - wave_start; }
};

// Cuts sequences up, one after another, and then all of them into waves.
class Planner {
 public:
  Planner(const rl_kv_group& group, const rl_attention& attention, const rl_batch& batch,
          int num_threads)
      : widths_(widths(group, attention)),
        attention_(attention),
        heads_(group.num_kv_heads),
        most_partial_bytes_(int64_t{num_threads} * kPartialsPerThread *
                            partial_bytes(kBlockRows, widths_.out_stride)) {
    int64_t total = 0;
    for (int i = 0; i < batch.num_sequences; ++i) {
      Share share = cut(batch.sequences[i]);
      total += heads_ * share.num_blocks * share.cost_of_block();
    }
    most_alone_ = num_threads > 1 ? total / (num_threads * kItemsPerThread) : total;
  }

  Share next(const rl_sequence& sequence) {
    Share share = cut(sequence);
    share.splits_shared = share.num_splits > 1 && share.cost_of_block() > most_alone_;
    if (!share.splits_shared) return share;
    share.first_block = num_shared_blocks_;
    num_shared_blocks_ += heads_ * share.num_blocks;
    all_partial_bytes_ += bytes_of_a_split(share) * share.num_splits;
    return share;
  }

  int64_t num_shared_blocks() const { return num_shared_blocks_; }
  int64_t num_partial_bytes() const { return std::min(all_partial_bytes_, most_partial_bytes_); }
  bool has_several_waves() const { return all_partial_bytes_ > most_partial_bytes_; }

  // Gives each share its part of the next wave. Returns the items of the wave; 0 if all is done.
  int64_t next_wave(Share* shares, int num_shares) const {
    int64_t bytes_of_one = 0, bytes_left = 0;  // of a split of each block, of all that are left
    for (Share* share = shares; share < shares + num_shares; ++share) {
      share->wave_start += share->wave_splits;
      if (!share->splits_shared || !share->splits_left()) continue;
      bytes_of_one += bytes_of_a_split(*share);
      bytes_left += bytes_of_a_split(*share) * share->splits_left();
    }
    bool last_wave = bytes_left <= most_partial_bytes_;
    int64_t num_items = 0, num_bytes = 0;
    for (Share* share = shares; share < shares + num_shares; ++share) {
      share->wave_splits = share->splits_left();
      share->first_item = num_items;
      share->first_partial = num_bytes;
      int64_t items_of_block = share->wave_splits > 0;
      if (share->splits_shared) {
        if (!last_wave)
          share->wave_splits = static_cast<int32_t>(
              std::min<int64_t>(share->wave_splits, most_partial_bytes_ / bytes_of_one));
        items_of_block = share->wave_splits;
        num_bytes += bytes_of_a_split(*share) * share->wave_splits;
      }
      num_items += heads_ * share->num_blocks * items_of_block;
    }
    return num_items;
  }

 private:
  Share cut(const rl_sequence& sequence) const {
    Share share = {};
    int rows = sequence.num_tokens * widths_.heads;
    // Each draft in a tree has a path of its own.
    share.unit_rows = sequence.ancestors ? widths_.heads : rows;
    share.blocks_per_unit = static_cast<int32_t>(ceil_div(share.unit_rows, kBlockRows));
    share.num_blocks = rows / share.unit_rows * share.blocks_per_unit;
    Visible seen = visible_slots(sequence, 0, attention_);
    // Where there are sinks, or will be for later tokens, splits are counted from theirs on.
    bool has_sinks = sequence.window > 0 && attention_.window == 0;
    share.first_split = has_sinks ? 0 : seen.first / kSplitTokens;
    int64_t last = int64_t{sequence.start} + sequence.num_tokens;
    share.num_splits = static_cast<int32_t>(ceil_div(last, kSplitTokens)) - share.first_split;
    return share;
  }

  // Partial results of one split of all blocks.
  int64_t bytes_of_a_split(const Share& share) const {
    return heads_ * share.num_blocks * partial_bytes(share.block_rows(), widths_.out_stride);
  }

  Widths widths_;
  const rl_attention& attention_;
  int64_t heads_;
  int64_t most_partial_bytes_;
  int64_t most_alone_;  // cost of a block whose splits are not shared out
  int64_t num_shared_blocks_ = 0;
  int64_t all_partial_bytes_ = 0;
};

}  // namespace rl
