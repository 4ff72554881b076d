#include "matrices.h"

#include <cmath>
#include <numeric>

namespace rl_test {
namespace {

constexpr float kMultiplier = 0x1p-6f;

int group_of(const Format& format, int columns) {
  if (!format.quantized()) return 0;
  return format.group ? format.group : (columns + 31) / 32 * 32;
}

rl_matrix described(const Format& format, int rows, int columns, float multiplier) {
  return {format.format,  rows,               columns,    group_of(format, columns),
          format.has_min, format.has_factors, multiplier, nullptr};
}

int64_t bytes_of(const Level& level, const rl_matrix& matrix) {
  return level.rl_matrix_bytes(&matrix);
}

}  // namespace

std::string name_of(const Format& format) {
  if (!format.quantized())
    return format.format == RL_F32 ? "float32" : format.format == RL_F16 ? "float16" : "bfloat16";
  return std::to_string(format.bits()) + " bits in groups of " +
         (format.group ? std::to_string(format.group) : "a row") +
         (format.has_min ? " with minimums" : "") + (format.has_factors ? " with factors" : "");
}

std::vector<Format> all_formats() {
  std::vector<Format> out = {{RL_F32, 0, false}, {RL_F16, 0, false}, {RL_BF16, 0, false}};
  for (int format : {RL_Q2, RL_Q3, RL_Q4, RL_Q5, RL_Q6, RL_Q8})
    for (int group : {16, 32, 64, 128, 0})
      for (bool has_min : {false, true}) out.push_back({format, group, has_min});
  for (int format : {RL_Q2, RL_Q3, RL_Q4}) out.push_back({format, 128, false, true});
  return out;
}

Matrix::Matrix(const Level& level, const Format& format, int rows, int columns, float multiplier)
    : description(described(format, rows, columns, multiplier)),
      data(bytes_of(level, description)) {
  description.data = data.data();
}

Floats Matrix::unpacked(const Level& level) const {
  std::vector<int32_t> rows(static_cast<size_t>(description.rows));
  std::iota(rows.begin(), rows.end(), 0);
  Floats out(rows.size() * static_cast<size_t>(description.columns));
  level.rl_unpack_rows(level.alone, &description, rows.data(), description.rows, out.data());
  return out;
}

Matrix random_matrix(const Level& level, const Format& format, int rows, int columns, uint64_t seed,
                     float size) {
  if (format.has_min) {  // which packing of floats does not choose
    Codes codes = random_codes(format, rows, columns, seed);
    float largest = static_cast<float>((1 << format.bits()) - 1);
    for (float& scale : codes.scales) scale = std::fabs(scale) * 4 * size / largest;
    for (size_t i = 0; i < codes.mins.size(); ++i) codes.mins[i] = codes.scales[i] * -largest / 2;
    return packed_codes(level, format, rows, columns, codes);
  }
  Matrix matrix(level, format, rows, columns, format.quantized() ? size * kMultiplier : 1);
  Floats values = normals(static_cast<size_t>(rows) * static_cast<size_t>(columns), seed, size);
  level.rl_pack(level.alone, &matrix.description, values.data(), RL_F32, 0, rows);
  return matrix;
}

Codes random_codes(const Format& format, int rows, int columns, uint64_t seed) {
  Random random(seed);
  int group = group_of(format, columns), groups = (columns + group - 1) / group;
  Codes out;
  for (int64_t i = 0; i < int64_t{rows} * columns; ++i)
    out.codes.push_back(static_cast<uint8_t>(random.below(1 << format.bits())));
  for (int64_t i = 0; i < int64_t{rows} * groups; ++i) {
    out.scales.push_back(static_cast<float>(random.below(2001) - 1000) / 1000);
    out.mins.push_back(static_cast<float>(random.below(2001) - 1000) / 100);
  }
  for (int64_t i = 0; i < int64_t{rows} * ((columns + 31) / 32); ++i)
    out.factors.push_back(static_cast<int8_t>(random.below(32) - 15));
  return out;
}

Matrix packed_codes(const Level& level, const Format& format, int rows, int columns,
                    const Codes& codes) {
  Matrix matrix(level, format, rows, columns, kMultiplier);
  level.rl_pack_codes(level.alone, &matrix.description, codes.codes.data(), codes.scales.data(),
                      format.has_min ? codes.mins.data() : nullptr,
                      format.has_factors ? codes.factors.data() : nullptr);
  return matrix;
}

}  // namespace rl_test
