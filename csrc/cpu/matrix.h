// Packed weights ("R16"): tiles of 16 rows, each of them contiguous, so that one thread streams
// one tile. Within a tile rows are the innermost axis, so that a vector's lanes are rows and the
// sum over columns runs in one order for any number of tokens.
//
// Float formats: [columns][16 rows] elements; bfloats in pairs of columns, [columns / 2][16 rows][2],
// as the instruction that multiplies pairs reads them.
//
// Quantized formats, columns padded to whole activation groups (below), 32 of them a *block*. A tile is
// read from its first byte to its last, since that is what memory is fastest at: *spans*, each of one or
// two groups of columns, or of a whole row. First what belongs to the groups, one after the other,
//   scales  [16 rows] half
//   mins    [16 rows] half, if the matrix has minimums
//   factors [group / 32][16 rows] signed bytes, if the matrix has factors
// padded to 64 bytes, then
//   blocks  [columns / 32] of lines of 64 bytes, a line being [16 rows][4 columns] bytes
// The 32 columns of a block are eight *quads*. An element is a code of 2 to 6 or 8 bits:
//   Q2: 2 lines; quads 0 to 3 are pairs of bits of the first, from the lowest on, 4 to 7 of the second
//   Q3: 3 lines; line t has quad t in its lowest three bits and quad t + 4 in the next three. The two
//       bits above are, from the first line to the third, the six of quads 3 and 7
//   Q4: 4 lines; line t has quad t in its low and quad t + 4 in its high nibbles
//   Q5: as Q4, then 1 line whose bit t is the fifth bit of quad t
//   Q6: as Q4, then 2 lines; the fifth and sixth bits of quad t are bits 2(t mod 4) of line t / 4
//   Q8: 8 lines; line t is quad t
// Its value is multiplier * (scale * (code - 2^(bits - 1))), or with minimums
// multiplier * (scale * code + min). The multiplier, a power of two, keeps scales within a half.
// With factors, in [-15, 16], it is multiplier * (scale * (factor * (code - 2^(bits - 1)))): each block has a scale
// of its own, and yet the sums over a group of 128 columns are integers, and what is in brackets a byte.
//
// Lines of Q8 are rows of an AMX B tile; other vector widths read parts of a line.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ridgeline_cpu.h"
#include "rounding.h"

namespace rl {

constexpr int kTileRows = 16;
constexpr int kBlockColumns = 32;
constexpr int kQuads = 8;  // of a block
constexpr int kLeastFactor = -15, kLargestFactor = 16;

inline bool is_quantized(int format) { return format >= RL_Q4; }

// The bits of a code. They are the lines of a block, too: it has 32 x 16 codes, a line 64 x 8 bits.
constexpr int code_bits(int format) {
  return format >= RL_Q2 ? format - RL_Q2 + 2 : format;
}
constexpr int block_lines(int format) { return code_bits(format); }
constexpr int middle_code(int format) { return 1 << (code_bits(format) - 1); }

// Columns between two conversions from integer sums to floats: scales change no more often.
inline int step_columns(const rl_matrix& m) { return m.group <= 128 ? m.group : 64; }

// Columns that share a scale of the activations.
inline int activation_group(const rl_matrix& m) {
  int step = step_columns(m);
  return step < kBlockColumns ? kBlockColumns : step;
}

inline int64_t num_groups(const rl_matrix& m) { return ceil_div(m.columns, m.group); }
inline int64_t num_blocks(const rl_matrix& m) {
  return round_up(m.columns, activation_group(m)) / kBlockColumns;
}
inline int64_t num_tiles(const rl_matrix& m) { return ceil_div(m.rows, kTileRows); }

// What belongs to a group, and where in it the factors begin.
inline int64_t factors_offset(const rl_matrix& m) { return kTileRows * 2 * (m.has_min ? 2 : 1); }
inline int64_t group_bytes(const rl_matrix& m) {
  return factors_offset(m) + (m.has_factors ? m.group / kBlockColumns * kTileRows : 0);
}
inline int64_t header_bytes(const rl_matrix& m, int64_t groups) {
  return round_up(groups * group_bytes(m), 64);
}

// Spans, of which the last may be shorter: two groups where one would leave a line, or a block, in half.
inline int64_t groups_per_span(const rl_matrix& m) {
  return group_bytes(m) % 64 == 0 && m.group >= kBlockColumns ? 1 : 2;
}
inline int64_t blocks_per_span(const rl_matrix& m) {
  return num_groups(m) == 1 ? num_blocks(m) : groups_per_span(m) * m.group / kBlockColumns;
}
inline int64_t span_bytes(const rl_matrix& m) {
  return header_bytes(m, groups_per_span(m)) + blocks_per_span(m) * block_lines(m.format) * 64;
}

// Where a group's scales begin in a tile, and a block.
inline int64_t group_offset(const rl_matrix& m, int64_t group) {
  return group / groups_per_span(m) * span_bytes(m) + group % groups_per_span(m) * group_bytes(m);
}
inline int64_t block_offset(const rl_matrix& m, int64_t block) {
  int64_t span = block / blocks_per_span(m), each = groups_per_span(m);
  return span * span_bytes(m) + header_bytes(m, std::min(each, num_groups(m) - span * each)) +
         block % blocks_per_span(m) * block_lines(m.format) * 64;
}

inline int64_t tile_bytes(const rl_matrix& m) {
  if (is_quantized(m.format)) return block_offset(m, num_blocks(m) - 1) + block_lines(m.format) * 64;
  if (m.format == RL_BF16) return round_up(m.columns, 2) * kTileRows * 2;
  return static_cast<int64_t>(m.columns) * kTileRows * (m.format == RL_F32 ? 4 : 2);
}

// Where an element of a float tile is, in elements.
inline int64_t float_index(const rl_matrix& m, int64_t column, int row) {
  if (m.format == RL_BF16) return (column / 2 * kTileRows + row) * 2 + column % 2;
  return column * kTileRows + row;
}

inline const uint8_t* tile_at(const rl_matrix& m, int64_t tile) {
  return static_cast<const uint8_t*>(m.data) + tile * tile_bytes(m);
}

}  // namespace rl
