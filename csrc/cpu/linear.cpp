// Products of a program's rows: panels are filled once for all matrices that read the same ones.
#include <algorithm>
#include <vector>

#include "elementwise.h"
#include "matmul.h"
#include "program.h"

namespace rl {
namespace {

constexpr int64_t kPanelBytesAtOnce = 8 << 20;

const rl_adapter_part* part_of(const rl_adapter* adapter, int32_t slot) {
  for (int i = 0; adapter && slot && i < adapter->num_parts; ++i)
    if (adapter->parts[i].slot == slot) return &adapter->parts[i];
  return nullptr;
}

bool is_adapted(const Context& c, const rl_linear& linear) {
  for (int s = 0; c.adapters && s < c.batch.num_sequences; ++s)
    if (part_of(c.adapters[s], linear.slot)) return true;
  return false;
}

void multiply_rows(Context& c, const rl_matrix& matrix, const Rows& rows, float* out,
                   int64_t stride) {
  void* scratch = c.panels.get<char>(panel_bytes(matrix, rows.num_tokens));
  Panels panels = panels_in(matrix, rows.num_tokens, scratch);
  fill_panels(c.pool, matrix, rows, panels);
  Product product{&matrix, nullptr, out, stride};
  multiply(c.pool, &product, 1, panels);
}

void add_adapters(Context& c, const Rows& rows, const Target& target) {
  for (int s = 0; s < c.batch.num_sequences; ++s) {
    const rl_adapter_part* part = part_of(c.adapters[s], target.linear->slot);
    if (!part) continue;
    const rl_sequence& sequence = c.batch.sequences[s];
    int64_t first = sequence.first_row, count = sequence.num_tokens;
    int32_t rank = part->down.rows, width = part->up.rows;
    float* low = c.spare.get<float>(count * (rank + width));
    float* change = low + count * rank;
    Rows own{rows.data + first * rows.stride, rows.stride, sequence.num_tokens, rows.columns};
    multiply_rows(c, part->down, own, low, rank);
    multiply_rows(c, part->up, {low, rank, sequence.num_tokens, rank}, change, width);
    for (int64_t t = 0; t < count; ++t)
      add_scaled(target.out + (first + t) * target.stride, change + t * width, 1.0f, width);
  }
}

}  // namespace

void apply(Context& c, const Rows& rows, const Target* targets, int count, bool adapted) {
  for (int first = 0, last; first < count; first = last) {
    const rl_matrix& matrix = targets[first].linear->matrix;
    Product products[kMaxTargets];
    for (last = first; last < count && same_panels(matrix, targets[last].linear->matrix); ++last)
      products[last - first] = {&targets[last].linear->matrix, targets[last].linear->bias,
                                targets[last].out, targets[last].stride, targets[last].logits};
    void* scratch = c.panels.get<char>(panel_bytes(matrix, rows.num_tokens));
    Panels panels = panels_in(matrix, rows.num_tokens, scratch);
    fill_panels(c.pool, matrix, rows, panels);
    multiply(c.pool, products, last - first, panels);
  }
  for (int i = 0; adapted && i < count; ++i)
    if (is_adapted(c, *targets[i].linear)) add_adapters(c, rows, targets[i]);
}

void apply_each(Context& c, const Rows* rows, const Target* targets, int count) {
  const rl_matrix& matrix = targets[0].linear->matrix;
  int32_t num_tokens = rows[0].num_tokens;
  int64_t bytes = panel_bytes(matrix, num_tokens);
  int at_once = static_cast<int>(std::clamp<int64_t>(kPanelBytesAtOnce / bytes, 1, count));
  char* scratch = c.panels.get<char>(at_once * bytes);
  std::vector<Panels> panels;
  for (int i = 0; i < at_once; ++i)
    panels.push_back(panels_in(matrix, num_tokens, scratch + i * bytes));
  std::vector<Product> products;
  for (int i = 0; i < count; ++i)
    products.push_back({&targets[i].linear->matrix, targets[i].linear->bias, targets[i].out,
                        targets[i].stride});
  for (int first = 0; first < count; first += at_once) {
    int some = std::min(at_once, count - first);
    fill_each(c.pool, matrix, rows + first, panels.data(), some);
    multiply_each(c.pool, products.data() + first, panels.data(), some);
  }
}

void gate_up(Context& c, const FeedForward& network, const Rows& rows, float* inner, int64_t stride,
             bool adapted) {
  const rl_linear &gate = network.gate, &up = network.up;
  bool gated = gate.matrix.data != nullptr;
  int32_t width = up.matrix.rows, num_tokens = rows.num_tokens;
  bool fused = gated && same_panels(gate.matrix, up.matrix) &&
               !(adapted && (is_adapted(c, gate) || is_adapted(c, up)));
  if (fused) {
    void* scratch = c.panels.get<char>(panel_bytes(up.matrix, num_tokens));
    Panels panels = panels_in(up.matrix, num_tokens, scratch);
    fill_panels(c.pool, up.matrix, rows, panels);
    multiply_gated(c.pool, gate, up, network.activation, inner, stride, panels);
    return;
  }
  float* ups = gated ? c.up.get<float>(static_cast<int64_t>(num_tokens) * width) : inner;
  int64_t ups_stride = gated ? width : stride;
  Target targets[2] = {{&up, ups, ups_stride}, {&gate, inner, stride}};
  apply(c, rows, targets, gated ? 2 : 1, adapted);
  for_tokens(c.pool, num_tokens, [&](int32_t t) {
    float* row = inner + t * stride;
    activate(network.activation, gated ? row : nullptr, ups + t * ups_stride, width, row);
  });
}

void feed_forward(Context& c, const FeedForward& network, const Rows& rows, float* out,
                  int64_t stride, bool adapted) {
  int32_t width = network.up.matrix.rows;
  float* inner = c.inner.get<float>(static_cast<int64_t>(rows.num_tokens) * width);
  gate_up(c, network, rows, inner, width, adapted);
  Target down{&network.down, out, stride};
  apply(c, {inner, width, rows.num_tokens, width}, &down, 1, adapted);
}

}  // namespace rl
