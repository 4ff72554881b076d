// Attention of whole sequences to themselves, forwards and backwards: K and V of the pass are laid
// out as a KV cache of their own, which attention over the paged cache then reads.
#include "attention.h"
#include "attention_shares.h"
#include "kv_cache.h"
#include "program.h"

namespace rl {
namespace {

struct BidirectionalAttend : Op {
  int num_kv_heads;
  rl_attention attention;

  void run(Context& c) const override {
    rl_kv_group group{};
    group.format = RL_F32;
    group.block_tokens = kSubTokens;
    group.num_layers = 1;
    group.num_kv_heads = num_kv_heads;
    group.k_width = group.v_width = attention.out_width;
    rl_kv_group_sizes(&group);
    int64_t num_blocks = 0;
    for (int s = 0; s < c.batch.num_sequences; ++s)
      num_blocks += ceil_div(c.batch.sequences[s].num_tokens, kSubTokens);
    rl_batch batch = c.batch;
    auto take = [&](void* memory) {
      Arena arena(memory);
      group.data = arena.take<uint8_t>(num_blocks * group.block_bytes);
      auto* table = arena.take<int32_t>(num_blocks);
      auto* tables = arena.take<const int32_t*>(batch.num_sequences);
      auto* sequences = arena.take<rl_sequence>(batch.num_sequences);
      if (memory) fill(c.batch, num_blocks, table, tables, sequences);
      batch.sequences = sequences;
      return arena.used();
    };
    take(c.inner.get<char>(take(nullptr)));
    write_kv(c.pool, group, 0, 0, batch, c.buffers[RL_KEY], c.widths[RL_KEY], c.buffers[RL_VALUE],
             c.widths[RL_VALUE]);
    void* scratch = c.spare.get<char>(
        rl_attend_scratch_bytes(&group, &attention, &batch, c.pool.num_threads()));
    attend(c.pool, group, 0, 0, attention, batch, c.buffers[RL_QUERY], c.widths[RL_QUERY],
           c.buffers[RL_H], scratch);
  }

  // Each sequence has the blocks that follow those of the one before.
  static void fill(const rl_batch& batch, int64_t num_blocks, int32_t* table,
                   const int32_t** tables, rl_sequence* sequences) {
    for (int64_t i = 0; i < num_blocks; ++i) table[i] = static_cast<int32_t>(i);
    for (int s = 0; s < batch.num_sequences; ++s) {
      tables[s] = table;
      table += ceil_div(batch.sequences[s].num_tokens, kSubTokens);
      sequences[s] = batch.sequences[s];
      sequences[s].start = sequences[s].num_drafts = 0;
      sequences[s].ancestors = nullptr;
      sequences[s].block_tables = tables + s;
    }
  }
};

}  // namespace

std::unique_ptr<Op> make_bidirectional_attend(int num_kv_heads, const rl_attention& attention) {
  auto op = std::make_unique<BidirectionalAttend>();
  op->num_kv_heads = num_kv_heads;
  op->attention = attention;
  op->attention.bidirectional = 1;
  return op;
}

}  // namespace rl
