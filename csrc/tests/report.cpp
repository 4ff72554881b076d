#include "report.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace rl_test {
namespace {

constexpr int kShown = 5;  // failures of a family that are printed in full

std::string difference(size_t i, float got, float want) {
  char text[100];
  std::snprintf(text, sizeof text, "element %zu is %.9g, not %.9g", i, got, want);
  return text;
}

}  // namespace

void Report::fail(Family& family, const std::string& what, const std::string& how) {
  if (++family.failures <= kShown)
    std::printf("  FAILED %s: %s: %s\n", title_.c_str(), what.c_str(), how.c_str());
}

void Report::close(const std::string& family, const std::string& what, const float* got,
                   const float* want, size_t count, const std::function<double(size_t)>& bound,
                   bool exact) {
  Family& of = families_[family];
  ++of.checks;
  bool equal = count == 0 || std::memcmp(got, want, count * sizeof(float)) == 0;
  of.equal += equal;
  if (equal) return;
  for (size_t i = 0; i < count; ++i) {
    bool odd = !std::isfinite(want[i]) || !std::isfinite(got[i]);
    if (odd && !(std::isnan(want[i]) ? std::isnan(got[i]) : want[i] == got[i]))
      return fail(of, what, difference(i, got[i], want[i]));
    if (odd) continue;
    double error = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    if (error > bound(i) || (exact && error > 0))
      return fail(of, what, difference(i, got[i], want[i]));
    if (error > 0) of.worst = std::max(of.worst, error / bound(i));
  }
}

void Report::close(const std::string& family, const std::string& what, const float* got,
                   const float* want, size_t count, double share, bool exact) {
  double largest = 0;
  for (size_t i = 0; i < count; ++i)
    if (std::isfinite(want[i]))
      largest = std::max(largest, std::fabs(static_cast<double>(want[i])));
  close(family, what, got, want, count, [=](size_t) { return share * largest; }, exact);
}

void Report::same_bytes(const std::string& family, const std::string& what, const void* got,
                        const void* want, size_t count) {
  Family& of = families_[family];
  ++of.checks;
  if (std::memcmp(got, want, count) == 0) {
    ++of.equal;
    return;
  }
  const auto *a = static_cast<const uint8_t*>(got), *b = static_cast<const uint8_t*>(want);
  auto at = static_cast<size_t>(std::mismatch(a, a + count, b).first - a);
  fail(of, what, "byte " + std::to_string(at) + " of " + std::to_string(count) + " differs");
}

void Report::holds(const std::string& family, const std::string& what, bool condition) {
  Family& of = families_[family];
  ++of.checks;
  of.equal += condition;
  if (!condition) fail(of, what, "does not hold");
}

bool Report::print() const {
  std::printf("%s\n", title_.c_str());
  int64_t failures = 0;
  for (const auto& [name, family] : families_) {
    std::printf("  %-28s %6" PRId64 " checks, %6" PRId64 " equal in every bit", name.c_str(),
                family.checks, family.equal);
    if (family.worst > 0) std::printf(", worst error %.2f of its bound", family.worst);
    if (family.failures) std::printf(", %" PRId64 " FAILED", family.failures);
    std::printf("\n");
    failures += family.failures;
  }
  std::fflush(stdout);
  return failures == 0;
}

}  // namespace rl_test
