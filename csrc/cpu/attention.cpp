// Shares the row blocks and splits of a batch among threads.
#include <algorithm>
#include <atomic>
#include <new>

#include "attention_shares.h"
#include "pool.h"

namespace rl {

void take_thread(Arena& arena, const rl_kv_group& group, int out_stride, ThreadScratch* thread) {
  BlockScratch block = {};
  block.visible = arena.take<Visible>(kBlockRows);
  block.scores = arena.take<float>(kBlockRows * kChunkTokens);
  block.decay = arena.take<float>(kBlockRows);
  block.lane_sums = arena.take<float>(kBlockRows * W);
  block.q = arena.take<float>(kBlockRows * round_up(group.k_width, 4));
  block.q_starts = arena.take<int32_t>(kBlockRows);
  block.q_scales = arena.take<float>(kBlockRows);
  block.weights = arena.take<int16_t>(kBlockRows * kChunkTokens);
  block.weight_starts = arena.take<int32_t>(kBlockRows);
  block.weight_scales = arena.take<float>(kBlockRows);
  block.keys = arena.take<float>(int64_t{kSubTokens} * group.k_width);
  block.values = arena.take<float>(int64_t{kChunkTokens} * out_stride);
  block.gathered = arena.take<uint8_t>(kChunkSubBlocks * sub_block_layout(group).bytes);
  Partial total = take_partial(arena, kBlockRows, out_stride);
  Partial part = take_partial(arena, kBlockRows, out_stride);
  if (thread) *thread = {block, total, part};
}

void clear(const Partial& total, int num_rows, int out_stride) {
  std::fill_n(total.maximum, num_rows, kNoMaximum);
  std::fill_n(total.sum, num_rows, 0.0f);
  std::fill_n(total.out, int64_t{num_rows} * out_stride, 0.0f);
}

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
    float* from = total.out + r * block.out_stride;
    if (block.group->format == RL_INT4) rotate(from, block.out_width);
    // Adding 0 makes -0 and 0 one: how often 0 was added to it depends on the other rows.
    for (int i = 0; i < block.out_width; ++i) to[i] = from[i] * factor + 0.0f;
  }
}

namespace {

struct Scratch {
  Share* shares;                      // [sequences]
  std::atomic<int32_t>* splits_done;  // of each block whose splits are shared out, in this wave
  ThreadScratch* threads;
  uint8_t* totals;  // of these blocks, from one wave to the next
  uint8_t* partials;
  int64_t bytes;
};

Scratch take_scratch(void* memory, const rl_kv_group& group, const rl_attention& attention,
                     const rl_batch& batch, const Planner& plan, int num_threads) {
  Arena arena(memory);
  int out_stride = widths(group, attention).out_stride;
  Scratch scratch = {};
  scratch.shares = arena.take<Share>(batch.num_sequences);
  scratch.splits_done = arena.take<std::atomic<int32_t>>(plan.num_shared_blocks());
  scratch.threads = arena.take<ThreadScratch>(num_threads);
  for (int i = 0; i < num_threads; ++i)
    take_thread(arena, group, out_stride, memory ? scratch.threads + i : nullptr);
  if (plan.has_several_waves())
    scratch.totals =
        arena.take<uint8_t>(plan.num_shared_blocks() * partial_bytes(kBlockRows, out_stride));
  scratch.partials = arena.take<uint8_t>(plan.num_partial_bytes());
  scratch.bytes = arena.used();
  return scratch;
}

}  // namespace

void attend(Pool& pool, const rl_kv_group& group, int32_t group_index, int32_t layer,
            const rl_attention& attention, const rl_batch& batch, const float* q, int64_t q_stride,
            float* out, void* memory) {
  Planner plan(group, attention, batch, pool.num_threads());
  auto* shares = static_cast<Share*>(memory);
  for (int i = 0; i < batch.num_sequences; ++i) shares[i] = plan.next(batch.sequences[i]);
  Scratch scratch = take_scratch(memory, group, attention, batch, plan, pool.num_threads());
  Widths sizes = widths(group, attention);

  auto run_item = [&](int64_t item, int thread) {
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
    block.kv_head = static_cast<int>(share.splits_shared ? rest / share.wave_splits : rest);
    block.first_row = index / share.blocks_per_unit * share.unit_rows + in_unit;
    block.num_rows = std::min(kBlockRows, share.unit_rows - in_unit);
    block.out_width = sizes.out;
    block.out_stride = sizes.out_stride;

    ThreadScratch& own = scratch.threads[thread];
    begin_block(block, own.block);
    auto sees = [&](int split) { return sees_split(block, own.block, share.first_split + split); };
    int last = share.wave_start + share.wave_splits;
    if (!share.splits_shared) {
      clear(own.total, block.num_rows, block.out_stride);
      for (int split = 0; split < last; ++split) {
        if (!sees(split)) continue;
        attend_split(block, share.first_split + split, own.block, own.part);
        merge(own.total, own.part, block.num_rows, block.out_stride);
      }
      return finish(block, own.total, out);
    }
    int64_t index_of_all = int64_t{block.kv_head} * share.num_blocks + index;
    int64_t bytes = partial_bytes(share.block_rows(), block.out_stride);
    auto partial = [&](int split) {
      int64_t number = index_of_all * share.wave_splits + split - share.wave_start;
      Arena arena(scratch.partials + share.first_partial + number * bytes);
      return take_partial(arena, share.block_rows(), block.out_stride);
    };
    int split = share.wave_start + static_cast<int>(rest % share.wave_splits);
    if (sees(split)) attend_split(block, share.first_split + split, own.block, partial(split));
    int64_t shared_block = share.first_block + index_of_all;
    if (scratch.splits_done[shared_block].fetch_add(1) + 1 < share.wave_splits) return;
    Partial total = own.total;
    if (scratch.totals) {
      Arena arena(scratch.totals + shared_block * partial_bytes(kBlockRows, block.out_stride));
      total = take_partial(arena, kBlockRows, block.out_stride);
    }
    if (share.wave_start == 0) clear(total, block.num_rows, block.out_stride);
    for (split = share.wave_start; split < last; ++split)
      if (sees(split)) merge(total, partial(split), block.num_rows, block.out_stride);
    if (last == share.num_splits) finish(block, total, out);
  };
  while (int64_t num_items = plan.next_wave(shares, batch.num_sequences)) {
    for (int64_t i = 0; i < plan.num_shared_blocks(); ++i)
      new (scratch.splits_done + i) std::atomic<int32_t>(0);
    pool.run(num_items, run_item);
  }
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
