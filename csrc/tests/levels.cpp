// Compares the CPU kernels' instruction-set levels: AVX2 and NEON with plain C++, and those beyond
// AVX2 with it, from which they may not differ in a bit where the order of a sum does not hang on the
// width of vectors. On aarch64 plain C++ is rounded as NEON is, too.
//
//   levels FOLDER           lists the levels that run here, and checks each of them
//   levels FOLDER LEVEL...  checks those
//
// FOLDER holds the libraries. Exits with 1 if a check fails.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "checks.h"

namespace {

using namespace rl_test;

const std::vector<std::string> kLevels = {"generic", "avx2", "avxvnni", "avx512", "avx512bf16",
                                          "avx512amx", "neondot"};

// What the library of detection says.
struct Detected {
  std::vector<std::string> running;
  std::string chosen;  // the last of these that is faster than the ones before it
};

Detected detect(const std::string& folder) {
  void* library = open_library(folder, "detect");
  auto ask = [&](const char* question, int level) {
    return reinterpret_cast<int (*)(int)>(find_function(library, question))(level) != 0;
  };
  Detected out;
  for (int level = 0; level < static_cast<int>(kLevels.size()); ++level) {
    if (!ask("ridgeline_runs_level", level)) continue;
    out.running.push_back(kLevels[static_cast<size_t>(level)]);
    if (ask("ridgeline_prefers_level", level)) out.chosen = out.running.back();
  }
  return out;
}

bool compare(const Level& reference, const Level& tested) {
  Pair pair{reference, tested};
  Report report(tested.name + " against " + reference.name);
  check_packing(pair, report);
  check_products(pair, report);
  check_attention(pair, report);
  check_programs(pair, report);
  check_sampling(pair, report);
  check_ceilings(pair, report);
  return report.print();
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    std::fprintf(stderr, "usage: levels FOLDER [LEVEL...]\n");
    return 2;
  }
  const std::string& folder = arguments[0];
  const Detected detected = detect(folder);
  std::vector<std::string> levels = detected.running;
  std::string names;
  for (const std::string& level : levels) names += " " + level;
  std::printf("levels that run here:%s\n", names.c_str());
  std::printf("level that is chosen: %s\n", detected.chosen.c_str());
  if (arguments.size() > 1) levels.assign(arguments.begin() + 1, arguments.end());
  bool passed = true;
  for (const std::string& name : levels) {
    bool beyond = name.rfind("avx", 0) == 0 && name != "avx2";
    Level reference(folder, beyond ? "avx2" : "generic"), tested(folder, name);
    passed &= compare(reference, tested);
  }
  std::printf(passed ? "every check passed\n" : "some checks FAILED\n");
  return passed ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return run({arguments + 1, arguments + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "levels: %s\n", error.what());
    return 2;
  }
}
