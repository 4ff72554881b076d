// Which instruction-set levels this machine runs. Compiled for the baseline, so that it can refuse.
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define RL_API __attribute__((visibility("default")))

namespace {

#if defined(RL_EMULATED_AMX)

bool has_amx() { return true; }

#elif defined(__x86_64__) && defined(__linux__)

// Linux gives a process the registers of AMX only if it asks for them (ARCH_REQ_XCOMP_PERM, of the
// feature XTILEDATA); threads and forks of it have them, too.
bool has_amx() {
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

#elif defined(__x86_64__)

bool has_amx() { return false; }

#endif

}  // namespace

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
    case 5:
      return avx512 && __builtin_cpu_supports("avx512bf16") && has_amx();
  }
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kDotProducts = 1 << 20;  // HWCAP_ASIMDDP
  if (level == 6) return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#endif
  return level == 0;
}

// Whether a level that runs is faster than the ones before it. Intel's cores without AMX begin a
// `vdpbf16ps` every other cycle and two multiply-adds of floats each: there it has half their rate.
extern "C" RL_API int ridgeline_prefers_level(int level) {
#if defined(__x86_64__)
  if (level == 4) return !__builtin_cpu_is("intel");
#endif
  return level >= 0;
}
