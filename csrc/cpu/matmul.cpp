#include "matmul.h"

#include "elementwise.h"
#include "matmul_tile.h"

namespace rl {
namespace {

constexpr int64_t kItemBytes = 48 * 1024;  // of weights that one thread takes at a time
constexpr int kTilesAtOnce = 4;            // whose results are kept before they are stored

// Tiles [tile, tile + count) of a matrix times a panel: out[count][M][16].
void multiply_tiles(const rl_matrix& matrix, int64_t tile, int count, const Panels& panels,
                    int64_t panel, float* out) {
  int M = panels.panel_tokens(panel);
  TileKernel kernel = is_quantized(matrix.format) ? quantized_kernel(matrix.format, M)
                                                  : float_kernel(matrix.format, M);
  kernel(matrix, tile_at(matrix, tile), count, panels, panel, out);
}

int tiles_at_once(int64_t tile, int64_t last) {
  return last - tile < kTilesAtOnce ? static_cast<int>(last - tile) : kTilesAtOnce;
}

int64_t tiles_per_item(const rl_matrix& m, int64_t tiles_in_all, int num_threads) {
  int64_t by_size = kItemBytes / tile_bytes(m);
  int64_t by_balance = tiles_in_all / (num_threads * 8);
  int64_t tiles = by_size < by_balance ? by_size : by_balance;
  int64_t least = tiles_in_all < kTilesAtOnce * num_threads ? 1 : kTilesAtOnce;
  return tiles < least ? least : tiles;
}

void store_tile(const Product& product, int64_t tile, int64_t first_token, int M,
                const float* result) {
  int64_t row = tile * kTileRows;
  int rows = product.matrix->rows - row < kTileRows
                 ? static_cast<int>(product.matrix->rows - row)
                 : kTileRows;
  for (int m = 0; m < M; ++m) {
    float* out = product.out + (first_token + m) * product.stride + row;
    const float* in = result + m * kTileRows;
    if (product.bias)
      for (int i = 0; i < rows; ++i) out[i] = in[i] + product.bias[row + i];
    else
      std::memcpy(out, in, static_cast<size_t>(rows) * 4);
  }
}

void add_bias(const rl_linear& linear, int64_t row, int rows, float* values) {
  for (int i = 0; linear.bias && i < rows; ++i) values[i] += linear.bias[row + i];
}

}  // namespace

void multiply(Pool& pool, const Product* products, int num_products, const Panels& panels) {
  int64_t tiles_in_all = 0, num_items = 0;
  for (int i = 0; i < num_products; ++i) tiles_in_all += num_tiles(*products[i].matrix);
  auto item_tiles = [&](int i) {
    return tiles_per_item(*products[i].matrix, tiles_in_all, pool.num_threads());
  };
  for (int i = 0; i < num_products; ++i)
    num_items += ceil_div(num_tiles(*products[i].matrix), item_tiles(i));
  pool.run(num_items, [&](int64_t item, int) {
    int i = 0;
    while (item >= ceil_div(num_tiles(*products[i].matrix), item_tiles(i))) {
      item -= ceil_div(num_tiles(*products[i].matrix), item_tiles(i));
      ++i;
    }
    const Product& product = products[i];
    int64_t first = item * item_tiles(i), last = first + item_tiles(i);
    if (last > num_tiles(*product.matrix)) last = num_tiles(*product.matrix);
    float result[kTilesAtOnce * kPanelTokens * kTileRows];
    for (int64_t panel = 0; panel < panels.num_panels(); ++panel) {
      int M = panels.panel_tokens(panel);
      for (int64_t tile = first; tile < last; tile += kTilesAtOnce) {
        int count = tiles_at_once(tile, last);
        multiply_tiles(*product.matrix, tile, count, panels, panel, result);
        for (int n = 0; n < count; ++n)
          store_tile(product, tile + n, panel * kPanelTokens, M, result + n * M * kTileRows);
      }
    }
  });
}

void multiply_gated(Pool& pool, const rl_linear& gate, const rl_linear& up,
                    const rl_activation& activation, float* out, int64_t stride,
                    const Panels& panels) {
  int64_t tiles_in_all = num_tiles(up.matrix);
  int64_t per_item = tiles_per_item(up.matrix, 2 * tiles_in_all, pool.num_threads());
  pool.run(ceil_div(tiles_in_all, per_item), [&](int64_t item, int) {
    constexpr int kResults = kTilesAtOnce * kPanelTokens * kTileRows;
    float gates[kResults], ups[kResults];
    int64_t first = item * per_item, last = first + per_item;
    if (last > tiles_in_all) last = tiles_in_all;
    for (int64_t panel = 0; panel < panels.num_panels(); ++panel) {
      int M = panels.panel_tokens(panel);
      for (int64_t tile = first; tile < last; tile += kTilesAtOnce) {
        int count = tiles_at_once(tile, last);
        multiply_tiles(gate.matrix, tile, count, panels, panel, gates);
        multiply_tiles(up.matrix, tile, count, panels, panel, ups);
        for (int i = 0; i < count * M; ++i) {
          int64_t row = (tile + i / M) * kTileRows, left = up.matrix.rows - row;
          int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
          float *g = gates + i * kTileRows, *u = ups + i * kTileRows;
          add_bias(gate, row, rows, g);
          add_bias(up, row, rows, u);
          activate(activation, g, u, rows, out + (panel * kPanelTokens + i % M) * stride + row);
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

void rl_matmul(rl_pool* pool, const rl_matrix* matrix, const float* bias, const float* x,
               int64_t x_stride, float* out, int64_t out_stride, int32_t num_tokens,
               void* scratch) {
  auto& threads = *reinterpret_cast<rl::Pool*>(pool);
  rl::Panels panels = rl::panels_in(*matrix, num_tokens, scratch);
  rl::fill_panels(threads, *matrix, {x, x_stride, num_tokens, matrix->columns}, panels);
  rl::Product product{matrix, bias, out, out_stride};
  rl::multiply(threads, &product, 1, panels);
}

}  // extern "C"
