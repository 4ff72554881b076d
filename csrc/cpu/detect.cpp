// Which instruction-set levels this machine runs. Compiled for the baseline, so that it can refuse.
#define RL_API __attribute__((visibility("default")))

extern "C" RL_API int ridgeline_runs_level(int level) {
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
              __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
              __builtin_cpu_supports("movbe");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
  switch (level) {
    case 1:
      return avx2;
    case 2:
      return avx2 && __builtin_cpu_supports("avxvnni");
    case 3:
      return avx512;
    case 4:
      return avx512 && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return level == 0;
}
