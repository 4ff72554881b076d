// One level's library, loaded by name: several of them live in one process.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "../cpu/ceilings.h"
#include "../cpu/ridgeline_cpu.h"

namespace rl_test {

#define RL_TEST_FUNCTIONS(X)                                                                       \
  X(rl_abi_version)                                                                                \
  X(rl_isa_name)                                                                                   \
  X(rl_pool_new)                                                                                   \
  X(rl_record)                                                                                     \
  X(rl_num_spans)                                                                                  \
  X(rl_take_spans)                                                                                 \
  X(rl_pool_free) X(rl_matrix_bytes) X(rl_pack) X(rl_pack_codes) X(rl_unpack_rows) X(rl_matmul)    \
      X(rl_matmul_scratch_bytes) X(rl_kv_group_sizes) X(rl_kv_write) X(rl_kv_move) X(rl_kv_read)   \
          X(rl_attend) X(rl_attend_scratch_bytes) X(rl_program_new) X(rl_program_free)             \
              X(rl_add_embed) X(rl_add_norm) X(rl_add_qkv) X(rl_add_head_norm) X(rl_add_rope)      \
              X(rl_add_bidirectional_attend) X(rl_add_grow_queries) X(rl_add_short_conv)           \
              X(rl_add_delta_project) X(rl_add_gated_delta) X(rl_add_gate_heads)                   \
              X(rl_add_selective_scan) X(rl_add_layer_embed) X(rl_add_layer_input)                 \
              X(rl_add_scale_hidden) X(rl_add_gate_up) X(rl_add_xielu) X(rl_add_down)              \
              X(rl_add_split_streams) X(rl_add_join_streams) X(rl_add_add_to_streams)              \
              X(rl_add_predict_streams) X(rl_add_correct_streams) X(rl_add_add_laurel)             \
              X(rl_add_sparse_gate_up)                                                             \
                  X(rl_add_kv_write) X(rl_add_attend) X(rl_add_out_project) X(rl_add_mlp)          \
                      X(rl_add_moe) X(rl_add_add_shared) X(rl_add_residual)                        \
                          X(rl_add_latent_project) X(rl_add_latent_attend) X(rl_set_head)          \
                              X(rl_add_rope_table) X(rl_reserve) X(rl_buffer) X(rl_state_inputs) X(rl_run) X(rl_head) \
                                  X(rl_sample) X(rl_decode) X(ridgeline_read_pattern)              \
                                      X(ridgeline_read_rate) X(ridgeline_arithmetic_loop)          \
                                          X(ridgeline_arithmetic_rate)

inline void* open_library(const std::string& folder, const std::string& name) {
  std::string path = folder + "/libridgeline_cpu_" + name + ".so";
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  return handle;
}

inline void* find_function(void* library, const char* name) {
  void* function = dlsym(library, name);
  if (!function) throw std::runtime_error(dlerror());
  return function;
}

// The functions of a level, and pools of one and of three threads.
class Level {
 public:
#define RL_TEST_DECLARE(name) decltype(&::name) name;
  RL_TEST_FUNCTIONS(RL_TEST_DECLARE)
#undef RL_TEST_DECLARE

  Level(const std::string& folder, const std::string& level) : name(level) {
    void* library = open_library(folder, level);
#define RL_TEST_FIND(name) name = reinterpret_cast<decltype(name)>(find_function(library, #name));
    RL_TEST_FUNCTIONS(RL_TEST_FIND)
#undef RL_TEST_FIND
    if (rl_abi_version() != RL_ABI_VERSION)
      throw std::runtime_error(level + " is of another version");
    if (level != rl_isa_name()) throw std::runtime_error(level + " calls itself " + rl_isa_name());
    alone = rl_pool_new(1);
    threads = rl_pool_new(3);
    if (!alone || !threads) throw std::runtime_error("no threads");
  }
  ~Level() {
    rl_pool_free(alone);
    rl_pool_free(threads);
  }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

  // Lanes of a vector, by which sums over lanes are grouped.
  int lanes() const { return name.rfind("avx512", 0) == 0 ? 16 : name.rfind("avx", 0) == 0 ? 8 : 4; }
#if defined(__aarch64__)
  bool fuses() const { return true; }  // plain C++ as well
#else
  bool fuses() const { return name != "generic"; }
#endif
  // bfloats are multiplied in pairs, the activations rounded to bfloat.
  bool rounds_to_bfloat() const { return name == "avx512bf16" || name == "avx512amx"; }

  std::string name;
  rl_pool* alone;
  rl_pool* threads;
};

// A level under test and one that is taken to be right.
struct Pair {
  const Level& reference;
  const Level& tested;

  // Whether both round alike where each lane's arithmetic is its own.
  bool same_rounding() const { return reference.fuses() && tested.fuses(); }
  // Whether sums over lanes are the same as well.
  bool same_sums() const { return same_rounding() && reference.lanes() == tested.lanes(); }
};

}  // namespace rl_test
