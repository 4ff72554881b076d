#include "matmul.h"

#include "elementwise.h"
#include "matmul_tile.h"

namespace rl {
namespace {

constexpr int64_t kItemBytes = 48 * 1024;  // of weights that one thread takes at a time

int64_t tiles_per_item(const rl_matrix& m, int64_t tiles_in_all, int num_threads) {
  int64_t by_size = kItemBytes / tile_bytes(m);
  int64_t by_balance = tiles_in_all / (num_threads * 8);
  int64_t tiles = by_size < by_balance ? by_size : by_balance;
  return tiles < 1 ? 1 : tiles;
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

void multiply_tile(const rl_matrix& matrix, int64_t tile, const Panels& panels, int64_t panel,
                   float* out) {
  int M = panels.panel_tokens(panel);
  TileKernel kernel =
      is_quantized(matrix.format) ? quantized_kernel(matrix.format, M) : float_kernel(matrix.format, M);
  kernel(matrix, tile_at(matrix, tile), panels, panel, out);
}

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
    float result[kPanelTokens * kTileRows];
    for (int64_t panel = 0; panel < panels.num_panels(); ++panel) {
      for (int64_t tile = first; tile < last; ++tile) {
        multiply_tile(*product.matrix, tile, panels, panel, result);
        store_tile(product, tile, panel * kPanelTokens, panels.panel_tokens(panel), result);
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
    float gates[kPanelTokens * kTileRows], ups[kPanelTokens * kTileRows];
    int64_t first = item * per_item, last = first + per_item;
    if (last > tiles_in_all) last = tiles_in_all;
    for (int64_t panel = 0; panel < panels.num_panels(); ++panel) {
      for (int64_t tile = first; tile < last; ++tile) {
        multiply_tile(gate.matrix, tile, panels, panel, gates);
        multiply_tile(up.matrix, tile, panels, panel, ups);
        int64_t row = tile * kTileRows, left = up.matrix.rows - row;
        int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
        for (int m = 0; m < panels.panel_tokens(panel); ++m) {
          float *g = gates + m * kTileRows, *u = ups + m * kTileRows;
          add_bias(gate, row, rows, g);
          add_bias(up, row, rows, u);
          activate(activation, g, u, rows, out + (panel * kPanelTokens + m) * stride + row);
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
