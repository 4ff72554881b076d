// The kernels, by format and number of tokens.
#pragma once

#include "activations.h"

namespace rl {

// Multiplies `count` consecutive tiles with a panel of M tokens: out[count][M][16]. `codes` are the
// tiles' codes as bytes, where the kernel is one for these.
using TileKernel = void (*)(const rl_matrix& matrix, const uint8_t* tiles, const uint8_t* codes,
                            int count, const Panels& panels, int64_t panel, float* out);

// What a panel fetches, while some tiles are multiplied with it, of the tiles that follow them: the
// panels of a block, one after the other, fetch them all.
struct PanelShare {
  int64_t first, bytes;

  PanelShare(const Panels& panels, int64_t panel, int64_t tiles_bytes) {
    const int64_t block = panel / panels.panels_each, begin = panels.first_of_block(block);
    bytes = tiles_bytes / (panels.last_of_block(block) - begin);
    first = (panel - begin) * bytes;
  }
};

// Fetches a panel's share of the tiles behind those that it is multiplied with, which the same thread
// takes next.
class NextTiles {
 public:
  // `turns`: how often `fetch` will be called.
  NextTiles(const rl_matrix& matrix, const uint8_t* tiles, int count, const Panels& panels,
            int64_t panel, int64_t turns) {
    const int64_t bytes = count * tile_bytes(matrix);
    const PanelShare share(panels, panel, bytes);
    at_ = tiles + bytes + share.first;
    bytes_each_ = round_up(ceil_div(share.bytes, turns), 64);
  }
  RL_INLINE void fetch() {
    for (int64_t i = 0; i < bytes_each_; i += 64) fetch_ahead(at_ + i);
    at_ += bytes_each_;
  }

 private:
  const uint8_t* at_;
  int64_t bytes_each_;
};

// A sum over columns of a float matrix is one chain of additions, each waiting for the one before.
// So with few tokens several tiles are taken together, as many as registers hold.
constexpr int float_tiles_together(int num_tokens) {
  constexpr int kVectors = kTileRows / W;
  int chains = num_tokens * kVectors;
  return chains <= 2 ? 4 : chains <= kRegisters / 4 ? 2 : 1;
}

// Nor is one stream all that main memory gives: Zen 3 reads four tiles, a block of each in turn, faster
// than one after the other, until products are what is waited for.
constexpr int quantized_tiles_together([[maybe_unused]] int num_tokens) {
#if defined(RL_SUMS_OF_16_BITS)
  return num_tokens <= 2 ? 4 : 1;
#else
  return 1;
#endif
}

TileKernel quantized_kernel(int format, int num_tokens, bool from_bytes);
TileKernel products_kernel(int num_tokens);  // of codes that were expanded with their factors
TileKernel float_kernel(int format, int num_tokens);
TileKernel amx_kernel(int format, int num_tokens);  // of the level that has AMX

// Codes are joined to bytes once where several panels use them, and where AMX does, which takes
// codes around a middle of 0: the size of an expanded tile (0 for what is read as it is), and the
// expansion of `count` tiles.
int64_t expanded_bytes(const rl_matrix& matrix, const Panels& panels);
void expand(const rl_matrix& matrix, const Panels& panels, const uint8_t* tiles, int count,
            uint8_t* codes);

}  // namespace rl
