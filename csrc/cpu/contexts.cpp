// Attention of ranks that share contexts: each has K and V of some runs of RL_SHARED_TOKENS slots.
//
// A range that ranks share (rl_sequence.cuts) is attended to where its tokens are computed, by attention
// as it is, over K and V that are staged: all blocks of one layer, each from the rank that has it or has
// computed it. Of other sequences every rank computes all tokens; it attends to the splits that it has,
// and all ranks merge all splits in their order. So results are those of one rank, bit for bit.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "attention_shares.h"
#include "kv_cache.h"
#include "program.h"

namespace rl {
namespace {

static_assert(kSplitTokens == RL_SHARED_TOKENS, "a split is one rank's");

// The shared ranges of a batch, as if their blocks were all here.
struct Staged {
  rl_kv_group group;
  std::vector<int32_t> table;  // of all ranges, one after the other
  std::vector<const int32_t*> tables;
  std::vector<rl_sequence> sequences;
  std::vector<const rl_sequence*> originals;

  uint8_t* block(int32_t number) const { return group.data + number * group.block_bytes; }
  rl_batch batch(const rl_batch& whole) const {
    rl_batch part = whole;
    part.num_sequences = static_cast<int32_t>(sequences.size()), part.sequences = sequences.data();
    return part;
  }
};

// Blocks before a position, the one that it is in included unless it begins there.
int32_t blocks_to(const rl_kv_group& group, int32_t position) {
  return static_cast<int32_t>(ceil_div(position, group.block_tokens));
}

Staged staged_ranges(Context& c, const rl_kv_group& group) {
  Staged staged{group, {}, {}, {}, {}};
  int num_ranks = c.group->num_ranks();
  int32_t num_blocks = 0;
  for (int32_t i = 0; i < c.batch.num_sequences; ++i) {
    const rl_sequence& sequence = c.batch.sequences[i];
    if (!sequence.cuts) continue;
    staged.originals.push_back(&sequence);
    staged.sequences.push_back(sequence);
    staged.sequences.back().cuts = nullptr;
    num_blocks += blocks_to(group, sequence.cuts[num_ranks]);
  }
  staged.group.num_layers = 1, staged.group.block_bytes = group.layer_bytes;
  staged.group.first_block = staged.group.num_blocks = 0;
  staged.group.data = c.staged.get<uint8_t>(num_blocks * group.layer_bytes);
  staged.table.resize(static_cast<size_t>(num_blocks));
  for (int32_t b = 0; b < num_blocks; ++b) staged.table[b] = b;
  const int32_t* next = staged.table.data();
  for (const rl_sequence* original : staged.originals) {
    staged.tables.push_back(next);
    next += blocks_to(group, original->cuts[num_ranks]);
  }
  for (size_t i = 0; i < staged.sequences.size(); ++i)
    staged.sequences[i].block_tables = &staged.tables[i];
  return staged;
}

// Has each of some blocks from its rank.
void exchange(Context& c, const Staged& staged, int32_t first, const std::vector<int32_t>& owners) {
  if (owners.empty()) return;
  int64_t bytes = staged.group.layer_bytes;
  if (!c.group->gather_rows(c.pool, staged.block(first), bytes, bytes, owners.data(),
                            static_cast<int32_t>(owners.size())))
    throw std::bad_alloc();
}

void write_shared_range(Context& c, const Staged& staged, size_t number, int32_t group_index,
                        int32_t layer) {
  const rl_kv_group& group = c.groups[group_index];
  const rl_sequence& sequence = *staged.originals[number];
  const int32_t* table = sequence.block_tables[group_index];
  const int32_t* cuts = sequence.cuts;
  int num_ranks = c.group->num_ranks();
  int32_t first = *staged.tables[number], tokens = group.block_tokens;
  auto stored = [&](int32_t b) {
    return group.data + table[b] * group.block_bytes + layer * group.layer_bytes;
  };
  auto copy = [&](int32_t begin, int32_t end, bool to_stage) {
    c.pool.run(end - begin, [&](int64_t i, int) {
      auto b = static_cast<int32_t>(begin + i);
      if (!is_here(group, table[b])) return;
      uint8_t *stage = staged.block(first + b), *kept = stored(b);
      std::memcpy(to_stage ? stage : kept, to_stage ? kept : stage, static_cast<size_t>(group.layer_bytes));
    });
  };
  int32_t num_context = blocks_to(group, cuts[0]), num_blocks = blocks_to(group, cuts[num_ranks]);
  std::vector<int32_t> owners;
  for (int32_t b = 0; b < num_context; ++b) owners.push_back(rank_of(group, table[b]));
  copy(0, num_context, true);
  exchange(c, staged, first, owners);

  rl_batch one = c.batch;
  one.num_sequences = 1, one.sequences = &staged.sequences[number];
  write_kv(c.pool, staged.group, 0, 0, one, c.buffers[RL_KEY], c.widths[RL_KEY], c.buffers[RL_VALUE],
           c.widths[RL_VALUE]);
  owners.clear();
  int32_t num_before = cuts[0] / tokens;
  for (int32_t b = num_before, rank = 0; b < num_blocks; ++b) {
    while (std::max(b * tokens, cuts[0]) >= cuts[rank + 1]) ++rank;
    owners.push_back(rank);
  }
  exchange(c, staged, first + num_before, owners);
  copy(num_before, num_blocks, false);
}

// What splits of other sequences have come to: [split][KV head][block of rows].
struct Splits {
  const rl_sequence* sequence;
  const int32_t* table;
  int64_t first;  // among all floats
  int32_t num_rows, num_splits;  // rows of a KV head
  int32_t unit_rows, blocks_per_unit, num_blocks;
  std::vector<int32_t> draft_table;  // of a tree whose drafts lie in several runs
};

struct SharedSplits {
  Context& c;
  int32_t group_index, layer;
  const rl_attention& attention;
  const float* q;
  int64_t q_stride;
  Widths sizes;
  std::vector<Splits> all;
  std::vector<int32_t> owners;  // of each row of each split
  int64_t row_floats;
  rl_kv_group drafts;

  const rl_kv_group& group() const { return c.groups[group_index]; }

  // Those of all sequences without cuts.
  void find() {
    row_floats = sizes.out_stride + 2;
    for (int32_t i = 0; i < c.batch.num_sequences; ++i) {
      const rl_sequence& sequence = c.batch.sequences[i];
      if (sequence.cuts) continue;
      Splits splits = {};
      splits.sequence = &sequence, splits.table = sequence.block_tables[group_index];
      splits.first = static_cast<int64_t>(owners.size()) * row_floats;
      splits.num_rows = sequence.num_tokens * sizes.heads;
      splits.unit_rows = sequence.ancestors ? sizes.heads : splits.num_rows;
      splits.blocks_per_unit = static_cast<int32_t>(ceil_div(splits.unit_rows, kBlockRows));
      splits.num_blocks = splits.num_rows / splits.unit_rows * splits.blocks_per_unit;
      splits.num_splits =
          static_cast<int32_t>(ceil_div(sequence.start + sequence.num_tokens, kSplitTokens));
      for (int32_t s = 0; s < splits.num_splits; ++s)
        owners.insert(owners.end(), splits.num_rows * group().num_kv_heads, owner(splits, s));
      all.push_back(splits);
    }
    stage_drafts();
  }

  // A draft's path may lead from one run to the next, which is another rank's: each has such drafts of
  // its own, too.
  void stage_drafts() {
    drafts = group(), drafts.num_layers = 1, drafts.block_bytes = drafts.layer_bytes;
    drafts.first_block = drafts.num_blocks = 0;
    int32_t tokens = drafts.block_tokens, count = 0;
    std::vector<rl_sequence> sequences;
    std::vector<const int32_t*> tables;
    for (Splits& splits : all) {
      rl_sequence part = *splits.sequence;
      if (!part.ancestors || !part.num_drafts) continue;
      part.first_row += part.num_tokens - part.num_drafts;
      part.start += part.num_tokens - part.num_drafts, part.num_tokens = part.num_drafts;
      int32_t last = part.start + part.num_tokens - 1;
      if (part.start / kSplitTokens == last / kSplitTokens) continue;
      splits.draft_table.resize(static_cast<size_t>(last / tokens + 1));
      for (int32_t b = part.start / tokens; b <= last / tokens; ++b) splits.draft_table[b] = count++;
      tables.push_back(splits.draft_table.data());
      sequences.push_back(part);
    }
    if (sequences.empty()) return;
    for (size_t i = 0; i < sequences.size(); ++i) sequences[i].block_tables = &tables[i];
    drafts.data = c.staged.get<uint8_t>(count * drafts.block_bytes);
    rl_batch batch = c.batch;
    batch.num_sequences = static_cast<int32_t>(sequences.size()), batch.sequences = sequences.data();
    write_kv(c.pool, drafts, 0, 0, batch, c.buffers[RL_KEY], c.widths[RL_KEY], c.buffers[RL_VALUE],
             c.widths[RL_VALUE]);
  }

  int32_t owner(const Splits& splits, int32_t split) const {
    return rank_of(group(), splits.table[int64_t{split} * kSplitTokens / group().block_tokens]);
  }

  RowBlock block(const Splits& splits, int64_t item) const {
    auto index = static_cast<int32_t>(item % splits.num_blocks);
    int32_t in_unit = index % splits.blocks_per_unit * kBlockRows;
    RowBlock block = {};
    block.group = &group(), block.attention = &attention;
    block.sequence = splits.sequence, block.block_table = splits.table;
    if (!splits.draft_table.empty())
      block.draft_group = &drafts, block.draft_table = splits.draft_table.data();
    block.q = q, block.q_stride = q_stride, block.layer = layer;
    block.kv_head = static_cast<int>(item / splits.num_blocks);
    block.first_row = index / splits.blocks_per_unit * splits.unit_rows + in_unit;
    block.num_rows = std::min(kBlockRows, splits.unit_rows - in_unit);
    block.out_width = sizes.out, block.out_stride = sizes.out_stride;
    return block;
  }

  // Of a block of rows, in c.partials.
  Partial partial(const Splits& splits, const RowBlock& block, int32_t split, float* memory) const {
    int64_t rows = (int64_t{split} * group().num_kv_heads + block.kv_head) * splits.num_rows;
    float* at = memory + splits.first + (rows + block.first_row) * row_floats;
    return {at, at + block.num_rows, at + 2 * block.num_rows};
  }

  // Calls body(splits, block, thread) for all blocks of rows of all sequences, or for each of the splits of
  // each that this rank has, with its number.
  template <class Body>
  void for_blocks(bool of_own_splits, const Body& body) const {
    struct Item {
      const Splits* splits;
      int32_t split;
      int64_t block;
    };
    std::vector<Item> items;
    for (const Splits& splits : all)
      for (int32_t s = 0; s < (of_own_splits ? splits.num_splits : 1); ++s) {
        if (of_own_splits && owner(splits, s) != c.group->rank()) continue;
        for (int64_t b = 0; b < int64_t{group().num_kv_heads} * splits.num_blocks; ++b)
          items.push_back({&splits, s, b});
      }
    c.pool.run(static_cast<int64_t>(items.size()), [&](int64_t i, int thread) {
      const Item& item = items[static_cast<size_t>(i)];
      body(*item.splits, block(*item.splits, item.block), item.split, thread);
    });
  }

  void run(float* out) {
    find();
    if (owners.empty()) return;
    float* memory = c.partials.get<float>(static_cast<int64_t>(owners.size()) * row_floats);
    Arena counted(nullptr);
    take_thread(counted, group(), sizes.out_stride, nullptr);
    int64_t bytes = counted.used();
    char* space = c.spare.get<char>(bytes * c.pool.num_threads());
    auto scratch = [&](int thread) {
      ThreadScratch own;
      Arena arena(space + thread * bytes);
      take_thread(arena, group(), sizes.out_stride, &own);
      return own;
    };
    for_blocks(true, [&](const Splits& splits, const RowBlock& block, int32_t split, int thread) {
      ThreadScratch own = scratch(thread);
      Partial part = partial(splits, block, split, memory);
      begin_block(block, own.block);
      if (sees_split(block, own.block, split))
        attend_split(block, split, own.block, part);
      else
        clear(part, block.num_rows, block.out_stride);
    });
    int64_t width = row_floats * int64_t{sizeof(float)};
    if (!c.group->gather_rows(c.pool, reinterpret_cast<uint8_t*>(memory), width, width, owners.data(),
                              static_cast<int32_t>(owners.size())))
      throw std::bad_alloc();
    for_blocks(false, [&](const Splits& splits, const RowBlock& block, int32_t, int thread) {
      Partial total = scratch(thread).total;
      clear(total, block.num_rows, block.out_stride);
      // What no row sees is clear, and leaves everything as it is.
      for (int32_t s = 0; s < splits.num_splits; ++s)
        merge(total, partial(splits, block, s, memory), block.num_rows, block.out_stride);
      finish(block, total, out);
    });
  }
};

}  // namespace

void write_kv(Context& c, int32_t group_index, int32_t layer) {
  const rl_kv_group& group = c.groups[group_index];
  write_kv(c.pool, group, group_index, layer, c.batch, c.buffers[RL_KEY], c.widths[RL_KEY],
           c.buffers[RL_VALUE], c.widths[RL_VALUE]);
  if (group.num_blocks == 0) return;
  Staged staged = staged_ranges(c, group);
  for (size_t i = 0; i < staged.sequences.size(); ++i)
    write_shared_range(c, staged, i, group_index, layer);
}

void attend(Context& c, int32_t group_index, int32_t layer, const rl_attention& attention,
            const float* q, int64_t q_stride, float* out) {
  const rl_kv_group& group = c.groups[group_index];
  auto attend_here = [&](const rl_kv_group& from, int32_t index, int32_t of_layer,
                         const rl_batch& batch) {
    void* scratch = c.spare.get<char>(
        rl_attend_scratch_bytes(&from, &attention, &batch, c.pool.num_threads()));
    attend(c.pool, from, index, of_layer, attention, batch, q, q_stride, out, scratch);
  };
  if (group.num_blocks == 0) return attend_here(group, group_index, layer, c.batch);
  Staged staged = staged_ranges(c, group);
  if (!staged.sequences.empty()) attend_here(staged.group, 0, 0, staged.batch(c.batch));
  SharedSplits{c, group_index, layer, attention, q, q_stride, widths(group, attention), {}, {}, 0,
               {}}
      .run(out);
}

}  // namespace rl
