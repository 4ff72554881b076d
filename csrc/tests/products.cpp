// Packing, unpacking, and products in every format and number of tokens.
#include <cmath>

#include "checks.h"
#include "matrices.h"

namespace rl_test {
namespace {

struct Shape {
  int rows, columns;
};
constexpr Shape kShapes[] = {{1, 1}, {37, 100}, {50, 161}, {16, 544}};
constexpr int kTokens = 19;  // two panels and a part of one, on every level
constexpr int kMostInPanel = 8;
constexpr int kFullTiles[] = {16, 17, 32, 33};  // of AMX: one or two, and a token more
constexpr Shape kChunks = {130, 100};  // tiles together, and one that is left, not whole
constexpr Shape kItems = {210, 100};  // the same for items of each of three threads
constexpr int kExpandingTokens = 73;  // every level expands codes of Q5 and Q6 for so many
constexpr int kLongPrompt = 513;
constexpr Shape kWide = {17, 2100};  // so many columns of a long prompt are no longer in one block

// Sums in another order, or with other roundings, as a share of the sum of magnitudes.
constexpr double kRounding = 4e-7;
constexpr double kHalfOfBfloat = 0x1p-8;  // half a unit of the last of 8 bits

std::string named(const Format& format, const Shape& shape) {
  return name_of(format) + ", " + std::to_string(shape.rows) + " x " +
         std::to_string(shape.columns);
}

// Rows of activations and of results, farther apart than they are wide.
struct Product {
  const Matrix& matrix;
  const Floats* bias;
  int rows, columns;

  Product(const Matrix& m, const Floats* b)
      : matrix(m), bias(b), rows(m.description.rows), columns(m.description.columns) {}
  int x_stride() const { return columns + 5; }
  int out_stride() const { return rows + 3; }

  // Tokens [first, last) of x, as one batch.
  Floats run(const Level& level, rl_pool* pool, const Floats& x, int first, int last) const {
    int count = last - first;
    Floats out(static_cast<size_t>(count * out_stride()), -7.0f);
    Bytes scratch(level.rl_matmul_scratch_bytes(&matrix.description, count));
    level.rl_matmul(pool, &matrix.description, bias ? bias->data() : nullptr,
                    x.data() + first * x_stride(), x_stride(), out.data(), out_stride(), count,
                    scratch.data());
    return out;
  }
};

// For each result the sum of magnitudes of what is added up: of codes before their middle is taken
// off, where there are codes.
std::vector<double> magnitudes(const Product& product, const Floats& weights, const Floats& x,
                               int tokens, double top) {
  std::vector<double> out;
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < product.out_stride(); ++r) {
      double sum = 1e-30;
      for (int k = 0; k < product.columns && r < product.rows; ++k)
        sum += std::fabs(x[static_cast<size_t>(t * product.x_stride() + k)]) *
               (top > 0 ? top : std::fabs(weights[static_cast<size_t>(r * product.columns + k)]));
      out.push_back(sum);
    }
  }
  return out;
}

// What codes add to a sum at most: scales and minimums of random_codes and random_matrix are at most
// 1 and 10. 0 without codes.
double largest_code(const Format& format) {
  int largest = (1 << format.bits()) * (format.has_factors ? 16 : 1);
  return format.quantized() ? largest + (format.has_min ? 10 : 0) : 0;
}

Floats rounded_to_bfloats(const Floats& x) {
  Floats out = x;
  for (size_t i = 0; i < x.size(); ++i) {
    uint32_t word;
    std::memcpy(&word, x.data() + i, 4);
    word &= 0xffff0000;
    std::memcpy(&out[i], &word, 4);
  }
  return out;
}

Matrix random_packed(const Level& level, const Format& format, const Shape& shape) {
  if (!format.quantized()) return random_matrix(level, format, shape.rows, shape.columns, 7);
  return packed_codes(level, format, shape.rows, shape.columns,
                      random_codes(format, shape.rows, shape.columns, 7));
}

bool same_bits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

// Every batch of up to a panel, and every number of threads, gives a token the same bits.
void check_batches(const Product& product, const Level& level, const Floats& x, const Floats& all,
                   const std::string& what, Report& report) {
  auto stride = static_cast<size_t>(product.out_stride());
  Floats shared = product.run(level, level.threads, x, 0, kTokens);
  report.holds("batches of products", what + ", threads",
               same_bits(shared.data(), all.data(), all.size()));
  for (int count = 1; count <= kMostInPanel + 1; ++count) {
    int first = (count * 5) % (kTokens - count + 1);
    Floats some = product.run(level, level.alone, x, first, first + count);
    report.holds(
        "batches of products", what + ", " + std::to_string(count) + " tokens",
        same_bits(some.data(), all.data() + static_cast<size_t>(first) * stride, some.size()));
  }
}

// What is not a number fills its own row, and no other.
void check_odd_values(const Product& product, const Level& level, const Floats& x,
                      const Floats& all, const std::string& what, Report& report) {
  Floats odd = x;
  auto column = static_cast<size_t>(product.columns - 1);
  auto stride = static_cast<size_t>(product.out_stride());
  auto x_stride = static_cast<size_t>(product.x_stride());
  odd[1 * x_stride + column] = NAN;
  odd[3 * x_stride + column] = INFINITY;
  odd[9 * x_stride + column / 2] = -INFINITY;
  Floats out = product.run(level, level.alone, odd, 0, kTokens);
  bool others_same = true, none_finite = true;
  for (size_t t = 0; t < kTokens; ++t) {
    bool is_odd = t == 1 || t == 3 || t == 9;
    for (size_t r = 0; is_odd && r < static_cast<size_t>(product.rows); ++r)
      none_finite &= !std::isfinite(out[t * stride + r]);
    if (!is_odd) others_same &= same_bits(out.data() + t * stride, all.data() + t * stride, stride);
  }
  report.holds("what is not a number", what + ", own row", none_finite);
  report.holds("what is not a number", what + ", other rows", others_same);
}

void check_product(const Pair& pair, const Format& format, const Shape& shape, const Matrix& matrix,
                   Report& report) {
  std::string what = named(format, shape);
  Floats bias = normals(static_cast<size_t>(shape.rows), 3);
  Product product(matrix, shape.rows % 2 ? &bias : nullptr);
  Floats x = normals(static_cast<size_t>(kTokens * product.x_stride()), 4);
  // Rounded to bfloats, so that a level which does so loses nothing.
  Floats short_x = rounded_to_bfloats(x);
  Floats weights = matrix.unpacked(pair.reference);
  double top = largest_code(format);
  bool pairs = format.format == RL_BF16 && pair.tested.rounds_to_bfloat();
  for (bool rounded : {true, false}) {
    const Floats& in = rounded ? short_x : x;
    Floats want = product.run(pair.reference, pair.reference.alone, in, 0, kTokens);
    Floats got = product.run(pair.tested, pair.tested.alone, in, 0, kTokens);
    std::vector<double> sizes = magnitudes(product, weights, in, kTokens, top);
    double share = kRounding + (pairs && !rounded ? kHalfOfBfloat : 0);
    report.close(
        format.quantized() ? "products with codes" : "products with " + name_of(format), what,
        got.data(), want.data(), want.size(), [&](size_t i) { return share * sizes[i]; },
        pair.same_rounding() && !pairs);
    if (rounded) continue;
    check_batches(product, pair.tested, in, got, what, report);
    check_odd_values(product, pair.tested, in, got, what, report);
  }
}

// More tokens than share one reading of weights, whose kernels may be others: against another level,
// and against a few tokens at a time.
void check_prompt(const Pair& pair, const Format& format, const Shape& shape, int tokens,
                  Report& report) {
  constexpr int kAtOnce = 9;
  std::string what = named(format, shape) + ", " + std::to_string(tokens) + " tokens";
  Matrix matrix = random_packed(pair.reference, format, shape);
  Product product(matrix, nullptr);
  Floats x = rounded_to_bfloats(normals(static_cast<size_t>(tokens * product.x_stride()), 9));
  Floats want = product.run(pair.reference, pair.reference.threads, x, 0, tokens);
  Floats got = product.run(pair.tested, pair.tested.threads, x, 0, tokens);
  Floats alone = product.run(pair.tested, pair.tested.alone, x, 0, tokens);
  report.holds("threads of products", what, same_bits(alone.data(), got.data(), got.size()));
  std::vector<double> sizes = magnitudes(product, matrix.unpacked(pair.reference), x, tokens,
                                         largest_code(format));
  bool pairs = format.format == RL_BF16 && pair.tested.rounds_to_bfloat();
  report.close(
      "products of prompts", what, got.data(), want.data(), want.size(),
      [&](size_t i) { return kRounding * sizes[i]; }, pair.same_rounding() && !pairs);
  auto stride = static_cast<size_t>(product.out_stride());
  for (int first = 0; first < tokens; first += kAtOnce) {
    int last = first + kAtOnce < tokens ? first + kAtOnce : tokens;
    Floats some = product.run(pair.tested, pair.tested.alone, x, first, last);
    report.holds(
        "batches of products", what,
        same_bits(some.data(), got.data() + static_cast<size_t>(first) * stride, some.size()));
  }
}

// Codes and bytes of activations that are as large as can be, so that no sum may be held in too few
// bits: row r repeats one of some patterns of the largest and the smallest code, and token t one of
// the same patterns of signs.
void check_extremes(const Pair& pair, const Format& format, Report& report) {
  constexpr Shape kShape = {16, 256};
  auto pattern = [](int which, int k) {
    const bool up[] = {true, false, k % 2 == 0, k % 4 < 2, k % 32 < 16, k % 8 < 4};
    return up[which % 6];
  };
  Codes codes = random_codes(format, kShape.rows, kShape.columns, 8);
  std::fill(codes.scales.begin(), codes.scales.end(), 1.0f);
  for (int r = 0; r < kShape.rows; ++r)
    for (int k = 0; k < kShape.columns; ++k)
      codes.codes[static_cast<size_t>(r * kShape.columns + k)] =
          static_cast<uint8_t>(pattern(r, k) ? (1 << format.bits()) - 1 : 0);
  int blocks = kShape.columns / 32;
  for (int i = 0; i < kShape.rows * blocks; ++i)
    codes.factors[static_cast<size_t>(i)] = pattern(i / blocks, i % blocks) ? 16 : -15;
  Matrix matrix = packed_codes(pair.reference, format, kShape.rows, kShape.columns, codes);
  Product product(matrix, nullptr);
  Floats x(static_cast<size_t>(kTokens * product.x_stride()));
  for (int t = 0; t < kTokens; ++t)
    for (int k = 0; k < kShape.columns; ++k)
      x[static_cast<size_t>(t * product.x_stride() + k)] = pattern(t, k) ? 1.0f : -1.0f;
  double bound = kRounding * kShape.columns * largest_code(format);
  for (int count : {1, 2, 3, 4, kTokens}) {  // kernels differ by the number of tokens
    for (int first = 0; first + count <= kTokens; first += count) {
      Floats want = product.run(pair.reference, pair.reference.alone, x, first, first + count);
      Floats got = product.run(pair.tested, pair.tested.alone, x, first, first + count);
      report.close(
          "extreme codes and bytes", named(format, kShape), got.data(), want.data(), want.size(),
          [=](size_t) { return bound; }, pair.same_rounding());
    }
  }
}

double squared_distance(const Floats& a, const Floats& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    double difference = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += difference * difference;
  }
  return sum;
}

// Packing floats, as two ranges of rows and from each source format.
void check_pack(const Pair& pair, const Format& format, const Shape& shape, Report& report) {
  std::string what = named(format, shape);
  auto columns = static_cast<size_t>(shape.columns);
  Floats values = normals(static_cast<size_t>(shape.rows) * columns, 5);
  std::vector<uint16_t> words(values.size());
  for (size_t i = 0; i < values.size(); ++i) std::memcpy(&words[i], &values[i], 2);
  for (uint16_t& word : words) word = static_cast<uint16_t>((word & 0x83ff) | 0x3c00);
  for (int source : {RL_F32, RL_F16, RL_BF16}) {
    auto pack = [&](const Level& level) {
      Matrix matrix(level, format, shape.rows, shape.columns, 1.0f / 64);
      size_t size = source == RL_F32 ? 4 : 2;
      const auto* from = source == RL_F32 ? reinterpret_cast<const uint8_t*>(values.data())
                                          : reinterpret_cast<const uint8_t*>(words.data());
      int first = shape.rows > 16 ? 16 : 0;
      if (first) level.rl_pack(level.threads, &matrix.description, from, source, 0, first);
      level.rl_pack(level.threads, &matrix.description,
                    from + static_cast<size_t>(first) * columns * size, source, first,
                    shape.rows - first);
      return matrix;
    };
    Matrix want = pack(pair.reference), got = pack(pair.tested);
    if (!format.quantized() || pair.same_rounding()) {
      report.same_bytes("packing", what, got.data.data(), want.data.data(), want.data.size());
    } else if (source == RL_F32) {  // near ties either code is as good
      double lost = squared_distance(got.unpacked(pair.tested), values);
      double before = squared_distance(want.unpacked(pair.reference), values);
      report.holds("packing", what, lost <= before * 1.001 + 1e-9);
    }
  }
}

}  // namespace

void check_packing(const Pair& pair, Report& report) {
  for (const Format& format : all_formats()) {
    for (const Shape& shape : kShapes) {
      if (!format.has_min) check_pack(pair, format, shape, report);
      if (!format.quantized()) continue;
      std::string what = named(format, shape);
      Codes codes = random_codes(format, shape.rows, shape.columns, 6);
      Matrix want = packed_codes(pair.reference, format, shape.rows, shape.columns, codes);
      Matrix got = packed_codes(pair.tested, format, shape.rows, shape.columns, codes);
      report.same_bytes("packing codes", what, got.data.data(), want.data.data(), want.data.size());
      Floats rows = want.unpacked(pair.reference), same = want.unpacked(pair.tested);
      report.close("unpacking", what, same.data(), rows.data(), rows.size(), 1e-6,
                   pair.same_rounding());
    }
  }
}

void check_products(const Pair& pair, Report& report) {
  for (const Format& format : all_formats()) {
    if (format.quantized()) check_extremes(pair, format, report);
    for (const Shape& shape : kShapes) {
      check_product(pair, format, shape, random_packed(pair.reference, format, shape), report);
    }
    check_prompt(pair, format, {37, 100}, kExpandingTokens, report);
    for (int tokens : {1, 2}) check_prompt(pair, format, kItems, tokens, report);
    for (int tokens : kFullTiles) check_prompt(pair, format, kChunks, tokens, report);
    if ((format.group == 0 && !format.has_min) || format.has_factors)
      check_prompt(pair, format, kWide, kLongPrompt, report);
  }
}

}  // namespace rl_test
