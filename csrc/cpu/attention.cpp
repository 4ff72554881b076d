// Shares the row blocks and splits of a batch among threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "pool.h"

namespace rl {
namespace {

constexpr int64_t kLine = 64;
constexpr int kItemsPerThread = 8;  // at least, so that no thread waits long for another's last

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Widths {
  int32_t heads;  // of a KV head
  int32_t out;
  int32_t out_stride;
};

Widths widths(const rl_kv_group& group, const rl_attention& attention) {
  int32_t out = group.v_width ? group.v_width : attention.out_width;
  return {attention.num_heads / group.num_kv_heads, out,
          static_cast<int32_t>(ceil_div(out, 16) * 16)};
}

// Takes pieces of memory one after another; without memory it only counts their bytes.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<uint8_t*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), kLine) * kLine;
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  uint8_t* memory_;
  int64_t used_ = 0;
};

Partial take_partial(Arena& arena, int num_rows, int out_stride) {
  Partial partial = {};
  partial.maximum = arena.take<float>(num_rows);
  partial.sum = arena.take<float>(num_rows);
  partial.out = arena.take<float>(int64_t{num_rows} * out_stride);
  return partial;
}

int64_t partial_bytes(int num_rows, int out_stride) {
  Arena arena(nullptr);
  take_partial(arena, num_rows, out_stride);
  return arena.used();
}

// One sequence's work. Its items are (KV head, split, block), blocks innermost, so that those that
// read the same part of the cache follow each other. Where splits are not shared out an item is
// (KV head, block), and walks over all splits.
struct Share {
  int64_t first_item;
  int64_t first_block;    // among the blocks whose splits are shared out, of all KV heads
  int64_t first_partial;  // bytes of the partial results before its own
  int32_t unit_rows;      // blocks do not extend over a multiple of this
  int32_t blocks_per_unit;
  int32_t num_blocks;
  int32_t first_split;
  int32_t num_splits;
  bool splits_shared;

  int block_rows() const { return std::min(unit_rows, kBlockRows); }  // at most
  int64_t cost_of_block() const { return int64_t{block_rows()} * num_splits; }
};

// Cuts sequences up, one after another.
class Planner {
 public:
  Planner(const rl_kv_group& group, const rl_attention& attention, const rl_batch& batch,
          int num_threads)
      : widths_(widths(group, attention)), window_(attention.window), heads_(group.num_kv_heads) {
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
    share.first_item = num_items;
    share.first_block = num_shared_blocks;
    share.first_partial = num_partial_bytes;
    int64_t blocks = heads_ * share.num_blocks;
    num_items += blocks * (share.splits_shared ? share.num_splits : 1);
    num_shared_blocks += share.splits_shared ? blocks : 0;
    if (share.splits_shared)
      num_partial_bytes += blocks * share.num_splits *
                           partial_bytes(share.block_rows(), widths_.out_stride);
    return share;
  }

  int64_t num_items = 0;
  int64_t num_shared_blocks = 0;
  int64_t num_partial_bytes = 0;

 private:
  Share cut(const rl_sequence& sequence) const {
    Share share = {};
    int rows = sequence.num_tokens * widths_.heads;
    // Each draft in a tree has a path of its own.
    share.unit_rows = sequence.ancestors ? widths_.heads : rows;
    share.blocks_per_unit = static_cast<int32_t>(ceil_div(share.unit_rows, kBlockRows));
    share.num_blocks = rows / share.unit_rows * share.blocks_per_unit;
    share.first_split = visible_slots(sequence, 0, window_).first / kSplitTokens;
    int64_t last = int64_t{sequence.start} + sequence.num_tokens;
    share.num_splits = static_cast<int32_t>(ceil_div(last, kSplitTokens)) - share.first_split;
    return share;
  }

  Widths widths_;
  int32_t window_;
  int64_t heads_;
  int64_t most_alone_;  // cost of a block whose splits are not shared out
};

struct ThreadScratch {
  BlockScratch block;
  Partial total;
  Partial part;
};

void take_thread(Arena& arena, const rl_kv_group& group, int out_stride, ThreadScratch* thread) {
  BlockScratch block = {};
  block.visible = arena.take<Visible>(kBlockRows);
  block.scores = arena.take<float>(kBlockRows * kChunkTokens);
  block.decay = arena.take<float>(kBlockRows);
  block.lane_sums = arena.take<float>(kBlockRows * W);
  block.q = arena.take<float>(int64_t{kBlockRows} * ceil_div(group.k_width, 4) * 4);
  block.q_starts = arena.take<int32_t>(kBlockRows);
  block.q_scales = arena.take<float>(kBlockRows);
  block.weights = arena.take<int16_t>(kBlockRows * kChunkTokens);
  block.weight_scales = arena.take<float>(kBlockRows);
  block.keys = arena.take<float>(int64_t{kSubTokens} * group.k_width);
  block.values = arena.take<float>(int64_t{kChunkTokens} * out_stride);
  block.gathered = arena.take<uint8_t>(kChunkSubBlocks * sub_block_layout(group).bytes);
  Partial total = take_partial(arena, kBlockRows, out_stride);
  Partial part = take_partial(arena, kBlockRows, out_stride);
  if (thread) *thread = {block, total, part};
}

struct Scratch {
  Share* shares;                      // [sequences]
  std::atomic<int32_t>* splits_done;  // of each block whose splits are shared out
  ThreadScratch* threads;
  uint8_t* partials;
  int64_t bytes;
};

Scratch take_scratch(void* memory, const rl_kv_group& group, const rl_attention& attention,
                     const rl_batch& batch, const Planner& plan, int num_threads) {
  Arena arena(memory);
  int out_stride = widths(group, attention).out_stride;
  Scratch scratch = {};
  scratch.shares = arena.take<Share>(batch.num_sequences);
  scratch.splits_done = arena.take<std::atomic<int32_t>>(plan.num_shared_blocks);
  scratch.threads = arena.take<ThreadScratch>(num_threads);
  for (int i = 0; i < num_threads; ++i)
    take_thread(arena, group, out_stride, memory ? scratch.threads + i : nullptr);
  scratch.partials = arena.take<uint8_t>(plan.num_partial_bytes);
  scratch.bytes = arena.used();
  return scratch;
}

void clear(const Partial& total, int num_rows, int out_stride) {
  std::fill_n(total.maximum, num_rows, kNoMaximum);
  std::fill_n(total.sum, num_rows, 0.0f);
  std::fill_n(total.out, int64_t{num_rows} * out_stride, 0.0f);
}

// Divides by the sum of the weights, a sink's among them, and writes the rows out.
void finish(const RowBlock& block, const Partial& total, float* out) {
  int num_heads = block.attention->num_heads, heads = num_heads / block.group->num_kv_heads;
  for (int r = 0; r < block.num_rows; ++r) {
    int row = block.first_row + r, head = block.kv_head * heads + row % heads;
    float factor = 1 / total.sum[r];
    if (block.attention->sinks) {
      float sink = block.attention->sinks[head] * kLog2E;
      float maximum = std::max(total.maximum[r], sink);
      vf decay = exp2_of_negative(splat(total.maximum[r] - maximum));
      vf weight = exp2_of_negative(splat(sink - maximum));
      factor = (decay / fma(splat(total.sum[r]), decay, weight))[0];
    }
    int64_t token = int64_t{block.sequence->first_row} + row / heads;
    float* to = out + (token * num_heads + head) * block.out_width;
    const float* from = total.out + r * block.out_stride;
    // Adding 0 makes -0 and 0 one: how often 0 was added to it depends on the other rows.
    for (int i = 0; i < block.out_width; ++i) to[i] = from[i] * factor + 0.0f;
  }
}

}  // namespace

void attend(Pool& pool, const rl_kv_group& group, int32_t group_index, int32_t layer,
            const rl_attention& attention, const rl_batch& batch, const float* q, int64_t q_stride,
            float* out, void* memory) {
  Planner plan(group, attention, batch, pool.num_threads());
  auto* shares = static_cast<Share*>(memory);
  for (int i = 0; i < batch.num_sequences; ++i) shares[i] = plan.next(batch.sequences[i]);
  Scratch scratch = take_scratch(memory, group, attention, batch, plan, pool.num_threads());
  for (int64_t i = 0; i < plan.num_shared_blocks; ++i)
    new (scratch.splits_done + i) std::atomic<int32_t>(0);
  Widths sizes = widths(group, attention);

  pool.run(plan.num_items, [&](int64_t item, int thread) {
    const Share& share =
        *(std::upper_bound(shares, shares + batch.num_sequences, item,
                           [](int64_t i, const Share& s) { return i < s.first_item; }) -
          1);
    const rl_sequence& sequence = batch.sequences[&share - shares];
    int64_t local = item - share.first_item, rest = local / share.num_blocks;
    // Later tokens see more, and come first.
    int index = share.num_blocks - 1 - static_cast<int>(local % share.num_blocks);
    int in_unit = index % share.blocks_per_unit * kBlockRows;
    RowBlock block = {};
    block.group = &group;
    block.attention = &attention;
    block.sequence = &sequence;
    block.block_table = sequence.block_tables[group_index];
    block.q = q;
    block.q_stride = q_stride;
    block.layer = layer;
    block.kv_head = static_cast<int>(share.splits_shared ? rest / share.num_splits : rest);
    block.first_row = index / share.blocks_per_unit * share.unit_rows + in_unit;
    block.num_rows = std::min(kBlockRows, share.unit_rows - in_unit);
    block.out_width = sizes.out;
    block.out_stride = sizes.out_stride;

    ThreadScratch& own = scratch.threads[thread];
    begin_block(block, own.block);
    clear(own.total, block.num_rows, block.out_stride);
    auto add = [&](const Partial& part) {
      merge(own.total, part, block.num_rows, block.out_stride);
    };
    auto sees = [&](int split) { return sees_split(block, own.block, share.first_split + split); };
    if (!share.splits_shared) {
      for (int split = 0; split < share.num_splits; ++split) {
        if (!sees(split)) continue;
        attend_split(block, share.first_split + split, own.block, own.part);
        add(own.part);
      }
    } else {
      int64_t index_of_all = int64_t{block.kv_head} * share.num_blocks + index;
      int64_t bytes = partial_bytes(share.block_rows(), block.out_stride);
      auto partial = [&](int64_t split) {
        int64_t number = index_of_all * share.num_splits + split;
        Arena arena(scratch.partials + share.first_partial + number * bytes);
        return take_partial(arena, share.block_rows(), block.out_stride);
      };
      int split = static_cast<int>(rest % share.num_splits);
      if (sees(split))
        attend_split(block, share.first_split + split, own.block, partial(split));
      int done = scratch.splits_done[share.first_block + index_of_all].fetch_add(1) + 1;
      if (done < share.num_splits) return;
      for (split = 0; split < share.num_splits; ++split)
        if (sees(split)) add(partial(split));
    }
    finish(block, own.total, out);
  });
}

}  // namespace rl

using namespace rl;

void rl_attend(rl_pool* pool, const rl_kv_group* group, int32_t group_index, int32_t layer,
               const rl_attention* attention, const rl_batch* batch, const float* q, float* out,
               void* scratch) {
  attend(*reinterpret_cast<Pool*>(pool), *group, group_index, layer, *attention, *batch, q,
         int64_t{attention->num_heads} * group->k_width, out, scratch);
}

int64_t rl_attend_scratch_bytes(const rl_kv_group* group, const rl_attention* attention,
                                const rl_batch* batch, int32_t num_threads) {
  Planner plan(*group, *attention, *batch, num_threads);
  for (int i = 0; i < batch->num_sequences; ++i) plan.next(batch->sequences[i]);
  return take_scratch(nullptr, *group, *attention, *batch, plan, num_threads).bytes;
}
