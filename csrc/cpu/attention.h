// Softmax attention over the paged cache, with online softmax and no S x S matrix.
//
// A *row* is one head of one token; the rows of a KV head are packed, token after token, so that
// all of them share one pass over K and V. KV slots are taken in chunks of 64 and splits of 512
// that lie at absolute slots. Each split of a row gives (maximum, sum, out), and a row's splits are
// merged in their order, whether one thread walks over them or several share them. Rows are taken
// in blocks; what one of them sees and another does not, numbers or not, reaches the one alone. So a
// row's result depends on nothing but the row and the slots that it sees.
//
// A draft in a tree sees slots that are not consecutive. They are gathered, so that the row
// computes what it would if its path alone were stored: speculation does not change the output.
#pragma once

#include <cstdint>

#include "attention_tiles.h"
#include "pool.h"
#include "ridgeline_cpu.h"

namespace rl {

// rl_attend for tokens whose q begin q_stride floats apart.
void attend(Pool& pool, const rl_kv_group& group, int32_t group_index, int32_t layer,
            const rl_attention& attention, const rl_batch& batch, const float* q, int64_t q_stride,
            float* out, void* scratch);

constexpr int kSplitTokens = 512;
constexpr int kBlockRows = 48;

constexpr float kLog2E = 1.44269504f;
constexpr float kNoMaximum = -3.402823466e38f;  // finite, so that subtracting it from itself is 0

// The KV slots [first, last) that a row sees, and [0, sinks) before them, where sinks is less than first.
// In a tree those from the first draft on are counted along the row's path.
struct Visible {
  int32_t first;
  int32_t last;
  int32_t sinks;
};

Visible visible_slots(const rl_sequence& sequence, int token, const rl_attention& attention);

// What the softmax of some rows has come to, in powers of two: out = sum of 2^(score - maximum) V.
struct Partial {
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* out;      // [rows][out_stride]
};

// What one work item reads.
struct RowBlock {
  const rl_kv_group* group;
  const rl_attention* attention;
  const rl_sequence* sequence;
  const int32_t* block_table;
  const rl_kv_group* draft_group;  // one layer that has the drafts of a tree; null: where all is
  const int32_t* draft_table;
  const float* q;  // [T][H, k_width], tokens q_stride apart
  int64_t q_stride;
  int layer;
  int kv_head;
  int first_row;  // of the sequence and KV head
  int num_rows;
  int out_width;
  int out_stride;  // out_width rounded up to 16
};

// The space that one work item needs.
struct BlockScratch {
  Visible* visible;   // [rows]
  float* scores;      // [rows][64], then weights
  float* decay;       // [rows] what earlier weights are multiplied by
  float* lane_sums;   // [rows][W]
  float* q;           // panels [k][rows of the panel], or as codes (attention_bytes.h)
  int32_t* q_starts;  // [rows], of codes
  float* q_scales;
  int16_t* weights;  // [rows][64], of codes
  int32_t* weight_starts;
  float* weight_scales;
  float* keys;        // [k_width][16], of a sub-block
  float* values;      // [64][out_stride]
  uint8_t* gathered;  // the sub-blocks of a chunk
};

// Prepares q and visible; then any number of splits of the same block may follow.
void begin_block(const RowBlock& block, BlockScratch& scratch);

// Whether any row of the block sees a slot of the split.
bool sees_split(const RowBlock& block, const BlockScratch& scratch, int split);

// Computes one split, overwriting `partial`.
void attend_split(const RowBlock& block, int split, BlockScratch& scratch, const Partial& partial);

// total = total and part, part being the later splits.
void merge(const Partial& total, const Partial& part, int num_rows, int out_stride);

}  // namespace rl
