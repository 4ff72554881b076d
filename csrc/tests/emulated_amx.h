// The operations of csrc/cpu/amx.h in plain C++, for tests on processors without AMX: the level
// avx512amx built with RL_EMULATED_AMX. What the processor refuses ends the program. Products of
// bfloats are summed in the order of Intel's description of tdpbf16ps, without its flushing of very
// small numbers to zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace rl {

struct EmulatedTile {
  int rows, bytes;  // 0 where the register was given no shape
  alignas(64) uint8_t data[kAmxRows][kAmxBytes];
};

inline EmulatedTile* emulated_tiles() {
  static thread_local EmulatedTile tiles[8] = {};
  return tiles;
}

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline EmulatedTile& shaped_tile(int index) {
  EmulatedTile& tile = emulated_tiles()[index];
  require(tile.rows > 0 && tile.bytes > 0, "a register without a shape");
  return tile;
}

class TileShapes {
 public:
  struct Shape {
    int rows, bytes;
  };

  explicit TileShapes(const Shape (&shapes)[8]) {
    for (int i = 0; i < 8; ++i) {
      const Shape& shape = shapes[i];
      require(shape.rows >= 0 && shape.rows <= kAmxRows && shape.bytes >= 0 &&
                  shape.bytes <= kAmxBytes && (shape.rows == 0) == (shape.bytes == 0),
              "a shape that no register has");
      emulated_tiles()[i] = {shape.rows, shape.bytes, {}};
    }
  }
  ~TileShapes() {
    for (int i = 0; i < 8; ++i) emulated_tiles()[i] = {};
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
};

template <int R>
void tile_zero() {
  std::memset(shaped_tile(R).data, 0, sizeof(EmulatedTile::data));
}

template <int R>
void tile_load(const void* from, int64_t stride) {
  EmulatedTile& tile = shaped_tile(R);
  tile_zero<R>();
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], static_cast<const uint8_t*>(from) + row * stride,
                static_cast<size_t>(tile.bytes));
}

template <int R>
void tile_store(void* to, int64_t stride) {
  const EmulatedTile& tile = shaped_tile(R);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile.data[row],
                static_cast<size_t>(tile.bytes));
}

// Calls body(sums, x, weights, row) for each row of the sums, which is a token.
template <class Body>
void for_products(int sums_index, int x_index, int weights_index, const Body& body) {
  EmulatedTile& sums = shaped_tile(sums_index);
  const EmulatedTile &x = shaped_tile(x_index), &weights = shaped_tile(weights_index);
  require(sums_index != x_index && sums_index != weights_index && x_index != weights_index,
          "a register twice in a product");
  require(sums.rows == x.rows && sums.bytes == weights.bytes && x.bytes / 4 == weights.rows,
          "a product of tiles whose shapes do not fit");
  for (int row = 0; row < sums.rows; ++row) body(sums, x, weights, row);
}

template <class T>
T element(const uint8_t* row, int index) {
  T value;
  std::memcpy(&value, row + index * static_cast<int>(sizeof(T)), sizeof(T));
  return value;
}

template <int Sums, int X, int Weights, bool kSigned>
void tile_dot_bytes() {
  for_products(Sums, X, Weights, [](EmulatedTile& sums, const EmulatedTile& x,
                                    const EmulatedTile& weights, int row) {
    for (int lane = 0; lane < sums.bytes / 4; ++lane) {
      auto sum = element<uint32_t>(sums.data[row], lane);  // which wraps around
      for (int i = 0; i < x.bytes; ++i) {
        int weight = weights.data[i / 4][lane * 4 + i % 4];
        if (kSigned) weight = static_cast<int8_t>(weight);
        sum += static_cast<uint32_t>(static_cast<int8_t>(x.data[row][i]) * weight);
      }
      std::memcpy(sums.data[row] + lane * 4, &sum, 4);
    }
  });
}

inline float float_of_bfloat(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

template <int Sums, int X, int Weights>
void tile_dot_bfloats() {
  for_products(Sums, X, Weights, [](EmulatedTile& sums, const EmulatedTile& x,
                                    const EmulatedTile& weights, int row) {
    for (int lane = 0; lane < sums.bytes / 4; ++lane) {
      float of[2] = {};  // the first numbers of all pairs, and the second ones
      for (int i = 0; i < x.bytes / 2; ++i)
        of[i % 2] = std::fma(float_of_bfloat(element<uint16_t>(x.data[row], i)),
                             float_of_bfloat(element<uint16_t>(weights.data[i / 2], lane * 2 + i % 2)),
                             of[i % 2]);
      float sum = element<float>(sums.data[row], lane) + (of[0] + of[1]);
      std::memcpy(sums.data[row] + lane * 4, &sum, 4);
    }
  });
}

}  // namespace rl
