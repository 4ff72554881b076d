// What was compared, and what differed.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace rl_test {

class Report {
 public:
  explicit Report(std::string title) : title_(std::move(title)) {}

  // |got[i] - want[i]| <= bound(i), and if `exact` the same bits; what is not a number must be so
  // in both.
  void close(const std::string& family, const std::string& what, const float* got,
             const float* want, size_t count, const std::function<double(size_t)>& bound,
             bool exact = false);
  // The same with a bound that is a share of the largest wanted magnitude.
  void close(const std::string& family, const std::string& what, const float* got,
             const float* want, size_t count, double share, bool exact = false);
  void same_bytes(const std::string& family, const std::string& what, const void* got,
                  const void* want, size_t count);
  void holds(const std::string& family, const std::string& what, bool condition);

  // Prints a line for each family; whether nothing differed.
  bool print() const;

 private:
  struct Family {
    int64_t checks = 0, equal = 0, failures = 0;
    double worst = 0;  // error as a share of its bound
  };
  void fail(Family& family, const std::string& what, const std::string& how);

  std::string title_;
  std::map<std::string, Family> families_;
};

}  // namespace rl_test
