#include "matmul.h"

#include <algorithm>

#include "elementwise.h"
#include "matmul_tile.h"
#include "sample.h"

namespace rl {
namespace {

constexpr int64_t kItemBytes = 48 * 1024;  // of weights that one thread takes at a time
constexpr int kItemsPerThread = 8;         // at least, where there are tiles enough
constexpr int kTilesAtOnce = 4;            // whose results are kept before they are stored

constexpr int64_t kExpandedBytes = 144 * 1024;  // of codes that stay in a near cache meanwhile
constexpr int kFewestExpanded = 2;  // tiles, which kernels take together

// Consecutive tiles that are multiplied with one panel after another.
class Chunk {
 public:
  // Tiles [first, first + count); their codes are expanded into `codes` if that is not null.
  Chunk(const rl_matrix& matrix, const Panels& panels, int64_t first, int count, uint8_t* codes)
      : matrix_(matrix),
        panels_(panels),
        tiles_(tile_at(matrix, first)),
        codes_(codes),
        count_(count) {
    if (codes) expand(matrix, panels, tiles_, count, codes);
  }

  // out[count][M][16]
  void multiply(int64_t panel, float* out) const {
    int M = panels_.panel_tokens(panel);
    kernel(M)(matrix_, tiles_, codes_, count_, panels_, panel, out);
  }

 private:
  TileKernel kernel(int M) const {
#if defined(__AMX_TILE__)
    if (panels_.block_bytes) return amx_kernel(matrix_.format, M);
#endif
    if (codes_ && matrix_.has_factors) return products_kernel(M);
    return is_quantized(matrix_.format) ? quantized_kernel(matrix_.format, M, codes_ != nullptr)
                                        : float_kernel(matrix_.format, M);
  }

  const rl_matrix& matrix_;
  const Panels& panels_;
  const uint8_t* tiles_;
  const uint8_t* codes_;
  int count_;
};

// How many tiles of a matrix are a chunk, and the bytes of their expanded codes, if any.
struct ChunkSize {
  int tiles;
  int64_t bytes;
};

ChunkSize chunk_size(const rl_matrix& matrix, const Panels& panels) {
  int64_t bytes = expanded_bytes(matrix, panels);
  if (!bytes) return {kTilesAtOnce, 0};
  int64_t tiles = std::clamp<int64_t>(kExpandedBytes / bytes, kFewestExpanded, kTilesAtOnce);
  return {static_cast<int>(tiles), tiles * bytes};
}

// Tiles that one thread takes at a time: so many that its stream is long, and so few that threads
// end together. Several panels are read once for each chunk of tiles, so that less than a chunk is
// taken only where there is not one for each thread; with one panel, less than what the kernel takes
// together.
int64_t tiles_per_item(const rl_matrix& m, const Panels& panels, int64_t tiles_in_all,
                       int num_threads) {
  int64_t by_size = std::max<int64_t>(kItemBytes / tile_bytes(m), kTilesAtOnce);
  int64_t by_balance = tiles_in_all / (num_threads * kItemsPerThread);
  int64_t least = panels.num_panels() > 1  ? kTilesAtOnce
                  : is_quantized(m.format) ? quantized_tiles_together(panels.num_tokens)
                                           : float_tiles_together(panels.num_tokens);
  if (tiles_in_all < least * num_threads) least = 1;
  return std::max(std::min(by_size, by_balance) / least * least, least);
}

// `count` logits of a token, of which `place` is that of their largest among `maxima`.
void finish_logits(const LogitsOutput& logits, float* row, int count, int64_t place) {
  for (int i = 0; logits.scale != 1 && i < count; ++i) row[i] *= logits.scale;
  if (logits.softcap > 0) soft_cap(row, logits.softcap, count);
  if (logits.maxima) logits.maxima[place] = largest_of_run(row, count);
}

void store_tile(const Product& product, int64_t tile, int64_t first_token, int M,
                const float* result) {
  int64_t row = tile * kTileRows;
  auto rows = static_cast<int>(std::min<int64_t>(product.matrix->rows - row, kTileRows));
  float* out = product.out + first_token * product.stride + row;
  for (int m = 0; m < M; ++m, out += product.stride, result += kTileRows) {
    if (product.bias)
      for (int i = 0; i < rows; ++i) out[i] = result[i] + product.bias[row + i];
    else if (rows == kTileRows)
      std::memcpy(out, result, kTileRows * sizeof(float));  // of a size that the compiler knows
    else
      std::memcpy(out, result, static_cast<size_t>(rows) * sizeof(float));
    if (product.logits)
      finish_logits(*product.logits, out, rows,
                    (first_token + m) * num_tiles(*product.matrix) + tile);
  }
}

void add_bias(const rl_linear& linear, int64_t row, int rows, float* values) {
  for (int i = 0; linear.bias && i < rows; ++i) values[i] += linear.bias[row + i];
}

// Tiles [first, last) of a product, for panels [first_panel, last_panel). `codes` is room for those of
// a chunk, if it needs any.
void multiply_tiles(const Product& product, const Panels& panels, int64_t first, int64_t last,
                    int64_t first_panel, int64_t last_panel, uint8_t* codes) {
  float result[kTilesAtOnce * kMostPanelTokens * kTileRows];
  ChunkSize size = chunk_size(*product.matrix, panels);
  for (int64_t tile = first; tile < last; tile += size.tiles) {
    int count = last - tile < size.tiles ? static_cast<int>(last - tile) : size.tiles;
    Chunk chunk(*product.matrix, panels, tile, count, size.bytes ? codes : nullptr);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      int M = panels.panel_tokens(panel);
      chunk.multiply(panel, result);
      for (int n = 0; n < count; ++n)
        store_tile(product, tile + n, panels.first_token(panel), M, result + n * M * kTileRows);
    }
  }
}

}  // namespace

void multiply(Pool& pool, const Product* products, int num_products, const Panels& panels) {
  if (panels.num_tokens == 0) return;
  int64_t tiles_in_all = 0, num_items = 0;
  for (int i = 0; i < num_products; ++i) tiles_in_all += num_tiles(*products[i].matrix);
  auto item_tiles = [&](int i) {
    return tiles_per_item(*products[i].matrix, panels, tiles_in_all, pool.num_threads());
  };
  for (int i = 0; i < num_products; ++i)
    num_items += ceil_div(num_tiles(*products[i].matrix), item_tiles(i));
  for (int i = 0; i < num_products; ++i)
    pool.reserve(static_cast<size_t>(chunk_size(*products[i].matrix, panels).bytes));
  pool.run(num_items * panels.num_blocks(), [&](int64_t item, int thread) {
    int64_t block = item / num_items;
    item %= num_items;
    int i = 0;
    while (item >= ceil_div(num_tiles(*products[i].matrix), item_tiles(i))) {
      item -= ceil_div(num_tiles(*products[i].matrix), item_tiles(i));
      ++i;
    }
    const Product& product = products[i];
    int64_t first = item * item_tiles(i);
    int64_t last = std::min(first + item_tiles(i), num_tiles(*product.matrix));
    bool expands = chunk_size(*product.matrix, panels).bytes > 0;
    multiply_tiles(product, panels, first, last, panels.first_of_block(block),
                   panels.last_of_block(block), expands ? pool.scratch(thread) : nullptr);
  });
}

void multiply_each(Pool& pool, const Product* products, const Panels* panels, int count) {
  const rl_matrix& matrix = *products[0].matrix;
  int64_t tiles = num_tiles(matrix), threads = pool.num_threads();
  int64_t per_item = std::min(
      tiles, tiles_per_item(matrix, panels[0], tiles * count, static_cast<int>(threads)));
  int64_t items = ceil_div(tiles, per_item), bytes = chunk_size(matrix, panels[0]).bytes;
  pool.reserve(static_cast<size_t>(bytes));
  pool.run(items * count, [&](int64_t item, int thread) {
    int64_t i = item / items, first = item % items * per_item;
    multiply_tiles(products[i], panels[i], first, std::min(first + per_item, tiles), 0,
                   panels[i].num_panels(), bytes ? pool.scratch(thread) : nullptr);
  });
}

void multiply_gated(Pool& pool, const rl_linear& gate, const rl_linear& up,
                    const rl_activation& activation, float* out, int64_t stride,
                    const Panels& panels) {
  int64_t tiles_in_all = num_tiles(up.matrix);
  int64_t per_item = tiles_per_item(up.matrix, panels, 2 * tiles_in_all, pool.num_threads());
  ChunkSize gate_size = chunk_size(gate.matrix, panels), up_size = chunk_size(up.matrix, panels);
  int tiles_at_once = gate_size.tiles < up_size.tiles ? gate_size.tiles : up_size.tiles;
  pool.reserve(static_cast<size_t>(gate_size.bytes + up_size.bytes));
  int64_t num_items = ceil_div(tiles_in_all, per_item);
  pool.run(num_items * panels.num_blocks(), [&](int64_t item, int thread) {
    constexpr int kResults = kTilesAtOnce * kMostPanelTokens * kTileRows;
    float gates[kResults], ups[kResults];
    int64_t block = item / num_items;
    int64_t first = item % num_items * per_item, last = first + per_item;
    if (last > tiles_in_all) last = tiles_in_all;
    for (int64_t tile = first; tile < last; tile += tiles_at_once) {
      int count = last - tile < tiles_at_once ? static_cast<int>(last - tile) : tiles_at_once;
      uint8_t* scratch = gate_size.bytes + up_size.bytes ? pool.scratch(thread) : nullptr;
      Chunk of_gate(gate.matrix, panels, tile, count, gate_size.bytes ? scratch : nullptr);
      Chunk of_up(up.matrix, panels, tile, count,
                  up_size.bytes ? scratch + gate_size.bytes : nullptr);
      for (int64_t panel = panels.first_of_block(block); panel < panels.last_of_block(block);
           ++panel) {
        int M = panels.panel_tokens(panel);
        of_gate.multiply(panel, gates);
        of_up.multiply(panel, ups);
        for (int i = 0; i < count * M; ++i) {
          int64_t row = (tile + i / M) * kTileRows, left = up.matrix.rows - row;
          int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
          float *g = gates + i * kTileRows, *u = ups + i * kTileRows;
          add_bias(gate, row, rows, g);
          add_bias(up, row, rows, u);
          activate(activation, g, u, rows, out + (panels.first_token(panel) + i % M) * stride + row);
        }
      }
    }
  });
}

}  // namespace rl

extern "C" {

int64_t rl_matmul_scratch_bytes(const rl_matrix* matrix, int32_t num_tokens) {
  return rl::panel_bytes(*matrix, num_tokens);
}

int32_t rl_matmul(rl_pool* pool, const rl_matrix* matrix, const float* bias, const float* x,
                  int64_t x_stride, float* out, int64_t out_stride, int32_t num_tokens,
                  void* scratch) try {
  auto& threads = *reinterpret_cast<rl::Pool*>(pool);
  rl::Panels panels = rl::panels_in(*matrix, num_tokens, scratch);
  rl::fill_panels(threads, *matrix, {x, x_stride, num_tokens, matrix->columns}, panels);
  rl::Product product{matrix, bias, out, out_stride};
  rl::multiply(threads, &product, 1, panels);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

}  // extern "C"
