// Random arrays, the same in every run.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace rl_test {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  uint64_t word() {  // SplitMix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int below(int count) { return static_cast<int>(word() % static_cast<uint64_t>(count)); }
  // About normal, of variance 1: the sum of four uniforms less their mean.
  float normal() {
    uint64_t four = word();
    int64_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int64_t>(four >> 16 * i & 0xffff);
    return static_cast<float>(sum - 2 * 0xffff) * (1 / 37837.0f);
  }

 private:
  uint64_t state_;
};

// Floats that no vector is aligned with, as callers may pass them.
class Floats {
 public:
  explicit Floats(size_t count, float value = 0) : storage_(count + 1, value) {}
  float* data() { return storage_.data() + 1; }
  const float* data() const { return storage_.data() + 1; }
  size_t size() const { return storage_.size() - 1; }
  float& operator[](size_t i) { return data()[i]; }
  float operator[](size_t i) const { return data()[i]; }

 private:
  std::vector<float> storage_;
};

inline Floats normals(size_t count, uint64_t seed, float size = 1) {
  Floats out(count);
  Random random(seed);
  for (size_t i = 0; i < count; ++i) out[i] = size * random.normal();
  return out;
}

// Bytes from a cache line on, and not one more than asked for.
class Bytes {
 public:
  explicit Bytes(int64_t count, int value = 0xff) : size_(static_cast<size_t>(count)) {
    data_ = static_cast<uint8_t*>(::operator new(size_, std::align_val_t{64}));
    std::memset(data_, value, size_);
  }
  Bytes(const Bytes& other) : Bytes(static_cast<int64_t>(other.size_)) {
    std::memcpy(data_, other.data_, size_);
  }
  Bytes(Bytes&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { ::operator delete(data_, std::align_val_t{64}); }

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
};

}  // namespace rl_test
