/* Ridgeline's CPU kernels: plain structs, raw pointers, row-major arrays.
 *
 * One shared library per instruction set has these functions; nothing in them calls back. Buffers
 * grow to the largest batch and are kept; beside that, ops and draws allocate little, and nothing
 * for each token of a prompt. Without memory a function that has a result for it says so: NULL, or
 * -1 in place of 0 or of an index. Every function that takes a pool may be called from one thread at
 * a time for that pool. Pointers stay the caller's. Results do not depend on the number of threads,
 * and those of a token do not depend on what else is in the batch.
 *
 * Shapes: T tokens of the batch, D hidden size, H heads, K KV heads, d head width, F feed-forward
 * width, V vocabulary.
 */
#ifndef RIDGELINE_CPU_H
#define RIDGELINE_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RL_API __attribute__((visibility("default")))

/* Changes whenever a struct or a function does. Packed bytes have a version of their own (PACKING_VERSION). */
#define RL_ABI_VERSION 20
RL_API int32_t rl_abi_version(void);
RL_API const char* rl_isa_name(void);

/* ---- threads ---------------------------------------------------------------------------- */

typedef struct rl_pool rl_pool;
/* NULL if the machine gives no more threads. */
RL_API rl_pool* rl_pool_new(int32_t num_threads);
RL_API void rl_pool_free(rl_pool* pool);

/* ---- recording -------------------------------------------------------------------------- */

/* A span of a recording: an op (or another part) of a step on the calling thread, a job of the pool
 * within it, or one thread's share of a job, from its first tile to its last. A job's shares follow
 * it, and an op its jobs. Times are those of CLOCK_MONOTONIC. */
enum { RL_SPAN_OP = 0, RL_SPAN_JOB = 1, RL_SPAN_SHARE = 2 };
/* What is no op of the program. */
enum { RL_PART_ROPE_TABLES = -1, RL_PART_HEAD = -2, RL_PART_SAMPLE = -3, RL_PART_NONE = -4 };
typedef struct {
  int32_t kind;
  int32_t op; /* index in the program, or one of RL_PART_* */
  int32_t thread;
  int32_t num_tiles;
  int64_t begin_ns;
  int64_t end_ns;
  int64_t busy_ns; /* of a share: in its tiles */
} rl_span;

/* Has everything that runs on the pool timed from now on, or no longer. Returns 0, or -1 if there is
 * no memory. Results are the same; without it nothing is timed. */
RL_API int32_t rl_record(rl_pool* pool, int32_t on);
/* Spans that rl_take_spans would write; it forgets them. */
RL_API int64_t rl_num_spans(rl_pool* pool);
RL_API void rl_take_spans(rl_pool* pool, rl_span* spans);

/* ---- ranks ------------------------------------------------------------------------------ */

/* Processes of one host that compute one model together, and exchange rows through memory that all of
 * them have mapped: rl_group_bytes of it, zeros at first. All ranks make the same calls in one order,
 * and each waits for the others, for ever if one of them has ended. */
typedef struct rl_group rl_group;
RL_API int64_t rl_group_bytes(int32_t num_ranks, int64_t slot_bytes);
/* NULL without memory. */
RL_API rl_group* rl_group_new(void* memory, int32_t rank, int32_t num_ranks, int64_t slot_bytes);
RL_API void rl_group_free(rl_group* group);

/* Row t of `all` becomes the ranks' parts of it: bytes [first[r], first[r + 1]) are rank r's row t. Strides
 * are in bytes. `own` may lie within `all`, with rows of the same stride or a smaller one. Returns 0, -1 if
 * there is no memory, or -2 if a part of one row is larger than slot_bytes. */
RL_API int32_t rl_gather(rl_group* group, rl_pool* pool, const void* own, int64_t own_stride,
                         void* all, int64_t all_stride, const int64_t* first, int32_t num_rows);
/* Row t, of `width` bytes, becomes that of rank owners[t]. */
RL_API int32_t rl_gather_rows(rl_group* group, rl_pool* pool, void* rows, int64_t stride,
                              int64_t width, const int32_t* owners, int32_t num_rows);
/* Bytes that this rank has sent to the others, each of them counted, and calls so far. */
RL_API void rl_group_counts(rl_group* group, int64_t* sent_bytes, int64_t* num_calls);

/* ---- matrices --------------------------------------------------------------------------- */

/* How elements are stored. RL_INT8, RL_INT4 and RL_FP8 are of KV caches alone (kv_cache.h). From
 * RL_Q4 on they are codes with scales, of matrices alone (matrix.h). */
enum {
  RL_FP8 = -2, RL_INT4 = -1, RL_F32 = 0, RL_F16 = 1, RL_BF16 = 2, RL_INT8 = 3, RL_Q4 = 4, RL_Q5 = 5, RL_Q6 = 6, RL_Q8 = 8, RL_Q2 = 12,
  RL_Q3 = 13
};

/* A packed matrix [rows, columns] that multiplies vectors of `columns` elements. */
typedef struct {
  int32_t format;
  int32_t rows;
  int32_t columns;
  int32_t group;   /* columns that share a scale: 16, 32, 64, 128 or a padded row; 0 for floats */
  int32_t has_min; /* value = scale * code + min rather than scale * (code - middle) */
  int32_t has_factors; /* 2 to 4 bits in groups of 128: value = scale * factor * (code - middle), with a
                          small integer factor for each 32 columns */
  float multiplier;
  const void* data;
} rl_matrix;

/* Bytes of `data` for a matrix of these shapes. */
RL_API int64_t rl_matrix_bytes(const rl_matrix* matrix);

/* Packs rows [first_row, first_row + num_rows) of a float matrix [*, columns] (row-major, RL_F32,
 * RL_F16 or RL_BF16) into `matrix`, whose data is written. `source` points to row `first_row`,
 * a multiple of 16. Quantized formats choose each group's scale for the least squared error, and its
 * factors as well. */
RL_API int32_t rl_pack(rl_pool* pool, const rl_matrix* matrix, const void* source,
                       int32_t source_format, int32_t first_row, int32_t num_rows);

/* Packs codes [rows, columns] (one byte each, already offset to be non-negative) with scales and
 * mins [rows, groups] in float and factors [rows, columns / 32 rounded up]; mins and factors are NULL
 * for a matrix without them. */
RL_API void rl_pack_codes(rl_pool* pool, const rl_matrix* matrix, const uint8_t* codes,
                          const float* scales, const float* mins, const int8_t* factors);

/* Rows of a matrix as floats: destination[i, :] = row rows[i]. */
RL_API void rl_unpack_rows(rl_pool* pool, const rl_matrix* matrix, const int32_t* rows,
                           int32_t num_rows, float* destination);

/* out[T, rows] = x[T, columns] . matrix^T + bias (NULL for none). Strides are in floats. For tests
 * and measurements: programs multiply by their ops. */
RL_API int32_t rl_matmul(rl_pool* pool, const rl_matrix* matrix, const float* bias, const float* x,
                         int64_t x_stride, float* out, int64_t out_stride, int32_t num_tokens,
                         void* scratch);

/* Bytes of scratch that rl_matmul needs. */
RL_API int64_t rl_matmul_scratch_bytes(const rl_matrix* matrix, int32_t num_tokens);

/* ---- attention -------------------------------------------------------------------------- */

/* The KV cache of one group of layers. Block b of layer l (counted within the group) begins at
 * data + b * block_bytes + l * layer_bytes; what is inside is described in kv_cache.h. */
typedef struct {
  int32_t format;       /* RL_F32, RL_F16, RL_BF16, RL_INT8, RL_INT4 (not of latents; widths are
                           powers of two from 32 to 512), RL_FP8 */
  int32_t block_tokens; /* a multiple of 16 */
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t k_width;
  int32_t v_width; /* 0: V is the first elements of K (latents) */
  int64_t layer_bytes;
  int64_t block_bytes;
  uint8_t* data;
  /* Where ranks share contexts, a rank has blocks [first_block, first_block + num_blocks) alone, and
   * `data` is where block 0 would be; each has as many. 0: all blocks are here. The blocks of
   * RL_SHARED_TOKENS slots that begin at a multiple of it are one rank's. */
  int32_t first_block;
  int32_t num_blocks;
} rl_kv_group;
#define RL_SHARED_TOKENS 512

/* Fills in layer_bytes and block_bytes. */
RL_API void rl_kv_group_sizes(rl_kv_group* group);

/* A state of a sequence that is to be saved as it is before the token at `position`. */
typedef struct {
  int32_t position;
  float* state;
} rl_state_save;

/* One sequence's part of the batch, of at least one token: rows [first_row, first_row + num_tokens)
 * of it are KV slots [start, start + num_tokens). With drafts in a tree, ancestors[i] has bit j if
 * row i sees draft j, which is KV slot start + num_tokens - num_drafts + j; otherwise NULL, and a
 * token sees all slots up to its own. `state` has what ops on states keep of the sequence, each at its
 * offset; a sequence that starts at 0 begins with zeros. It is read, and left as it is before the first
 * draft, or after the last token if there is none. With a window a token sees the last `window` slots up
 * to its own and the first `sinks` ones, in layers that have no window of their own; blocks between them
 * may be anyone's.
 *
 * What ops on states read of the drafts goes to `drafted`, [num_drafts, rl_state_inputs]. Of these the
 * first may lag in the sequence's next part: `lag` tokens before `start`, which the state takes in first,
 * from `lagging`, of the same layout. Buffers have rows [lag_row, lag_row + lag) for them, behind those of
 * the batch.
 *
 * Where ranks share contexts they share long ranges, too: rank r computes positions [cuts[r], cuts[r + 1]),
 * of which start and num_tokens are this rank's, and there are no drafts. All cuts but the first and the
 * last are where blocks begin. `whole_row` is the row of the whole range's first token after
 * rl_add_gather_ranges. Other sequences have no cuts, and every rank computes all of their tokens. */
typedef struct {
  int32_t first_row;
  int32_t num_tokens;
  int32_t start;
  int32_t num_drafts;
  const uint64_t* ancestors;
  const int32_t* const* block_tables; /* [groups] */
  float* state;                       /* NULL if no op has states */
  const rl_state_save* saves;
  int32_t num_saves;
  int32_t lag;
  int32_t lag_row;
  const float* lagging;
  float* drafted; /* NULL without drafts, or if no op has states */
  int32_t sinks;
  int32_t window;      /* 0: none */
  const int32_t* cuts; /* [ranks + 1], or NULL */
  int32_t whole_row;   /* first_row if no sequence of the batch has cuts */
} rl_sequence;

typedef struct {
  int32_t num_tokens;
  int32_t num_sequences;
  const int32_t* token_ids; /* [T] */
  const int32_t* positions; /* [T] */
  const rl_sequence* sequences;
  const int32_t* token_types; /* [T], of embeddings that have types; NULL for all of type 0 */
} rl_batch;

/* Stores k[T, K, k_width] and v[T, K, v_width] of the batch's tokens into the cache. */
RL_API void rl_kv_write(rl_pool* pool, const rl_kv_group* group, int32_t group_index, int32_t layer,
                        const rl_batch* batch, const float* k, const float* v);

/* Copies KV slots from[i] to to[i] of one sequence, in all layers; reads before it writes. */
RL_API int32_t rl_kv_move(const rl_kv_group* group, const int32_t* block_table,
                          const int32_t* from, const int32_t* to, int32_t count);

/* K [count, K, k_width] and V [count, K, v_width] of slots [start, start + count), as floats. For
 * tests. */
RL_API void rl_kv_read(const rl_kv_group* group, int32_t layer, const int32_t* block_table,
                       int32_t start, int32_t count, float* k, float* v);

typedef struct {
  int32_t num_heads;
  int32_t out_width;   /* with latents, the elements of K that are V; otherwise v_width */
  float scale;
  float softcap;       /* 0: none */
  int32_t window;      /* 0: none; otherwise the positions that a token sees, itself included */
  const float* sinks;  /* [H] or NULL */
  int32_t bidirectional; /* tokens see later ones of the batch, too, within the same distance */
  int32_t chunked; /* tokens see those of their own chunk of `window` positions, up to their own */
} rl_attention;

/* out[T, H, out_width] = softmax(scale * q . K) V for q[T, H, k_width]. */
RL_API void rl_attend(rl_pool* pool, const rl_kv_group* group, int32_t group_index, int32_t layer,
                      const rl_attention* attention, const rl_batch* batch, const float* q,
                      float* out, void* scratch);
/* For each thread at most what 40 partial results of 48 rows take, each of (out_width + 2) floats,
 * and what the thread works on; a little for each sequence. */
RL_API int64_t rl_attend_scratch_bytes(const rl_kv_group* group, const rl_attention* attention,
                                       const rl_batch* batch, int32_t num_threads);

/* ---- programs --------------------------------------------------------------------------- */

enum { RL_RMS_NORM = 0, RL_LAYER_NORM = 1 };
typedef struct {
  int32_t kind;
  int32_t unit_offset; /* the gain is 1 + weight */
  float eps;
} rl_norm;

enum {
  RL_SILU = 0,
  RL_GELU = 1,
  RL_GELU_TANH = 2,
  RL_RELU = 3,
  RL_CLAMPED_SWIGLU = 4,
  RL_RELU_SQUARED = 5,
  RL_IDENTITY = 6
};
typedef struct {
  int32_t kind;
  float alpha, limit; /* of RL_CLAMPED_SWIGLU */
} rl_activation;

/* What norms of heads normalise: each head by one gain [d], each by its own [H, d], or all heads
 * of a token together [H * d]. */
enum { RL_HEAD = 0, RL_EACH_HEAD = 1, RL_PROJECTION = 2 };

/* The named buffers of a forward pass, float [T, width]. */
enum {
  RL_X = 0, RL_H = 1, RL_N = 2, RL_SHARED = 3, RL_QUERY = 4, RL_KEY = 5, RL_VALUE = 6, RL_INNER = 7,
  RL_LAYERS = 8, RL_STREAMS = 9
};
#define RL_NUM_BUFFERS 10

enum { RL_SOFTMAX = 0, RL_SIGMOID = 1 };
typedef struct {
  int32_t num_experts;
  int32_t top_k;
  int32_t scoring;
  int32_t normalised;
  float scale;
  int32_t num_groups; /* 0: experts are not limited to the best groups */
  int32_t top_groups;
  int32_t group_best_two; /* a group is worth its best two experts, not its best one */
  int32_t scales_inputs;  /* an expert's weight multiplies what goes into it, not its output */
} rl_routing;

/* A product with a matrix: rows of [T, matrix.columns] to rows of [T, matrix.rows]. `data` is NULL
 * where an op has no such matrix. `slot` names the product among those that adapters change, from
 * 1 on; 0 for none. */
typedef struct {
  rl_matrix matrix;
  const float* bias;
  int32_t slot;
} rl_linear;

/* The low-rank change that an adapter makes to one product: out += up . (down . x). */
typedef struct {
  int32_t slot;
  rl_matrix down; /* [rank, columns] */
  rl_matrix up;   /* [rows, rank], with the adapter's scale in it */
} rl_adapter_part;

/* An ordered list of ops. `widths` are those of the buffers. Programs keep pointers to weights, and
 * copies of everything else. Each rl_add_* appends an op and returns its index. */
typedef struct rl_program rl_program;
RL_API rl_program* rl_program_new(const int32_t* widths);
RL_API void rl_program_free(rl_program* program);

/* `table` has the rows from first_token on; tokens that it lacks get other rows of it. */
RL_API int32_t rl_add_embed(rl_program* program, const rl_matrix* table, int32_t first_token,
                            float scale, const float* position_table, const float* type_table);
RL_API int32_t rl_add_norm(rl_program* program, int32_t source, int32_t target,
                           const rl_norm* norm, const float* weight, const float* bias,
                           int32_t width);
RL_API int32_t rl_add_qkv(rl_program* program, int32_t source, const rl_linear* query,
                          const rl_linear* key, const rl_linear* value, float clip);
/* Biases may be NULL. `values`: heads of RL_VALUE are normalised as well, without a gain. */
RL_API int32_t rl_add_head_norm(rl_program* program, const rl_norm* norm, int32_t scope,
                                const float* query_weight, const float* key_weight,
                                const float* query_bias, const float* key_bias,
                                int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
                                int32_t values);
/* `table` counts the program's rotary tables, in order of rl_add_rope_table. */
RL_API int32_t rl_add_rope(rl_program* program, int32_t table, int32_t interleaved,
                           int32_t num_heads, int32_t num_kv_heads, int32_t query_dim,
                           int32_t key_dim, int32_t query_start, int32_t key_start);
RL_API int32_t rl_add_kv_write(rl_program* program, int32_t group, int32_t layer);
/* q times 1 + rate * ln(1 + floor((position + offset) / length)); `width` elements of a token. */
RL_API int32_t rl_add_grow_queries(rl_program* program, float rate, int32_t length, int32_t offset,
                                   int32_t width);
RL_API int32_t rl_add_attend(rl_program* program, int32_t group, int32_t layer,
                             const rl_attention* attention);
/* Attention of the batch's tokens of each sequence to one another, later ones included, without a KV
 * cache. K and V are as wide as attention->out_width. */
RL_API int32_t rl_add_bidirectional_attend(rl_program* program, int32_t num_kv_heads,
                                           const rl_attention* attention);
/* h[T, D] = k * (Σ_j weight[:, j] * u[t - L + 1 + j] + bias) of u = q * v, with the last L - 1 rows
 * of u before a token in the state, from element `offset` on. L is at most RL_MAX_CONV_LENGTH. */
#define RL_MAX_CONV_LENGTH 16
RL_API int32_t rl_add_short_conv(rl_program* program, int64_t offset, int32_t channels,
                                 int32_t length, const float* weight, const float* bias);
/* The products before a gated delta rule: query, key and value side by side to RL_QUERY, gate to
 * RL_KEY, beta and decay side by side to RL_VALUE. */
RL_API int32_t rl_add_delta_project(rl_program* program, int32_t source, const rl_linear* query,
                                    const rl_linear* key, const rl_linear* value,
                                    const rl_linear* gate, const rl_linear* beta,
                                    const rl_linear* decay);
/* The rule, with the convolution before it and the norm and the gate after it, from those buffers to
 * h[T, G * value_dim] for G value heads (GatedDelta of ridgeline.core.ops has the formula). The
 * state has the inputs of the convolution from element `offset` on, and then each head's matrix
 * [key_dim, value_dim]. conv is [2 K key_dim + G value_dim, conv_length], decay_log and decay_bias
 * [G], gain [value_dim]. key_dim is at most RL_MAX_KEY_DIM. */
#define RL_MAX_KEY_DIM 256
typedef struct {
  int32_t num_key_heads;
  int32_t num_value_heads; /* a multiple of num_key_heads */
  int32_t key_dim;
  int32_t value_dim;
  int32_t conv_length;
} rl_gated_delta;
RL_API int32_t rl_add_gated_delta(rl_program* program, int64_t offset, const rl_gated_delta* shape,
                                  const float* conv, const float* decay_log,
                                  const float* decay_bias, const float* gain, const rl_norm* norm);
/* Mamba-2's state space, with the convolution before it and the gate and the norm after it, from
 * RL_QUERY (x, B and C side by side), RL_KEY (the gate) and RL_VALUE (the steps, beside room for as
 * many decays) to h[T, num_heads * head_dim] (SelectiveScan of ridgeline.core.ops has the formula). The
 * state has the inputs of the convolution from element `offset` on, and then each head's matrix
 * [state_dim, head_dim]. conv is [channels, conv_length] with a bias or none, decay_log, step_bias and
 * skip [num_heads], gain [num_heads * head_dim]. state_dim is at most RL_MAX_KEY_DIM. */
typedef struct {
  int32_t num_heads; /* a multiple of num_groups */
  int32_t head_dim;
  int32_t num_groups; /* of heads that share B and C, and of outputs that are normed together */
  int32_t state_dim;
  int32_t conv_length;
} rl_selective_scan;
RL_API int32_t rl_add_selective_scan(rl_program* program, int64_t offset,
                                     const rl_selective_scan* shape, const float* conv,
                                     const float* conv_bias, const float* decay_log,
                                     const float* step_bias, const float* skip, const float* gain,
                                     const rl_norm* norm);
/* h[T, rows] *= sigmoid(linear . source), after attention. */
RL_API int32_t rl_add_gate_heads(rl_program* program, int32_t source, const rl_linear* linear);
RL_API int32_t rl_add_out_project(rl_program* program, const rl_linear* linear);
RL_API int32_t rl_add_mlp(rl_program* program, int32_t source, int32_t target,
                          const rl_linear* gate, const rl_linear* up, const rl_linear* down,
                          const rl_activation* activation, const float* output_gate);
/* The two halves of rl_add_mlp: RL_INNER = act(gate . source) * (up . source), and target = down . RL_INNER,
 * times sigmoid(output_gate . source) if there is one. */
RL_API int32_t rl_add_gate_up(rl_program* program, int32_t source, const rl_linear* gate,
                              const rl_linear* up, const rl_activation* activation);
/* RL_INNER = x > 0 ? rise * x^2 + beta * x : fall * (expm1(min(x, eps)) - x) + beta * x. */
typedef struct {
  float rise, fall, beta, eps;
} rl_xielu;
RL_API int32_t rl_add_xielu(rl_program* program, const rl_xielu* xielu, int32_t width);
RL_API int32_t rl_add_down(rl_program* program, int32_t target, const rl_linear* down, int32_t source,
                           const float* output_gate);
/* gate, up and down are arrays of num_experts; or of those from first[rank] to first[rank + 1], if first
 * is not NULL: then all ranks get what each expert made of its tokens. The router reads its own source;
 * the weight of an expert is times its expert_scale, unless that is NULL. */
RL_API int32_t rl_add_moe(rl_program* program, int32_t source, int32_t router_source,
                          const rl_routing* routing, const rl_linear* router,
                          const float* correction, const float* expert_scale, const rl_linear* gate,
                          const rl_linear* up, const rl_linear* down,
                          const rl_activation* activation, const int32_t* first);
RL_API int32_t rl_add_add_shared(rl_program* program);
RL_API int32_t rl_add_residual(rl_program* program, float scale);
/* Tokens that the table lacks have its first row.
 * layers[T, L * width] = (table[token ids] * sqrt(width) + norm(projection . x / sqrt(D))) / sqrt(2), the
 * norm of each `width` elements with one gain. */
RL_API int32_t rl_add_layer_embed(rl_program* program, const rl_matrix* table,
                                  const rl_linear* projection, const float* gain,
                                  const rl_norm* norm, int32_t width);
/* h = up . (act(gate . x) * layers[from `first` on]). */
RL_API int32_t rl_add_layer_input(rl_program* program, const rl_linear* gate, const rl_linear* up,
                                  const rl_activation* activation, int32_t first);
/* Several residual streams RL_STREAMS[T, n, D]: x and others that matrices make of it, scaled to its root
 * mean square; the reverse, and their mean; and h added to all but the first. */
#define RL_MAX_STREAMS 8
RL_API int32_t rl_add_split_streams(rl_program* program, const rl_linear* const* linears,
                                    int32_t count);
RL_API int32_t rl_add_join_streams(rl_program* program, const rl_linear* const* linears,
                                   int32_t count);
RL_API int32_t rl_add_add_to_streams(rl_program* program, int32_t num_streams);
/* Stream j += the sum over i of stream i * f[j * n + i], for f[n * n] = coefs . tanh(router . norm(first
 * stream) / D); x is the first stream then. */
RL_API int32_t rl_add_predict_streams(rl_program* program, const rl_linear* router,
                                      const float* gain, const rl_norm* norm, const float* coefs);
/* Stream j += (x - first stream) * (1 + f[j]), for f[n] = coefs . tanh(router . norm(x) / D); x is the
 * first stream then, times `scale` unless that is NULL. */
RL_API int32_t rl_add_correct_streams(rl_program* program, const rl_linear* router,
                                      const float* gain, const rl_norm* norm, const float* coefs,
                                      const float* scale);
/* x = (x + h + n + shared) / sqrt(2). */
RL_API int32_t rl_add_add_laurel(rl_program* program);
/* rl_add_gate_up, where each token's gates are less their mean and `cutoff` standard deviations, and not
 * below 0, before the activation. */
RL_API int32_t rl_add_sparse_gate_up(rl_program* program, int32_t source, const rl_linear* gate,
                                     const rl_linear* up, const rl_activation* activation,
                                     float cutoff);
/* x times *factor. */
RL_API int32_t rl_add_scale_hidden(rl_program* program, const float* factor);
/* q = query . norm(query_latent . h), or query . h; k = [norm(first R of latent . h), rest]. */
RL_API int32_t rl_add_latent_project(rl_program* program, int32_t source,
                                     const rl_linear* query_latent, const float* query_norm,
                                     const rl_linear* query, const rl_linear* latent,
                                     const float* latent_norm, int32_t latent_dim,
                                     const rl_norm* norm);
/* Latent attention with K and V's expansion absorbed: `key_up` are H matrices [R, n] that take a
 * head's q to latents, `value_up` H matrices [v, R] that take mixed latents to outputs. */
RL_API int32_t rl_add_latent_attend(rl_program* program, int32_t group, int32_t layer,
                                    const rl_attention* attention, const rl_linear* key_up,
                                    const rl_linear* value_up, int32_t nope_dim, int32_t rope_dim);
/* The group whose ranks have a part of each matrix; before the ops that exchange. It stays the caller's. */
RL_API void rl_set_group(rl_program* program, rl_group* group);
/* Rows of a buffer become those of all ranks: columns [first[r], first[r + 1]) are rank r's. Before it
 * each has its own in columns from 0 on, of rows of the buffer's width, or of its own part's (dense); after
 * it the rows are of the buffer's width, or dense. */
RL_API int32_t rl_add_gather(rl_program* program, int32_t buffer, const int32_t* first, int32_t dense);
/* Rows of RL_X become those of the ranks whose table has the token: rank r's begins at first[r]. */
RL_API int32_t rl_add_gather_tokens(rl_program* program, const int32_t* first, int32_t width);
/* Rows of a buffer become those of all ranks, in the places that sequences' `whole_row` says: last of all
 * ops, where ranks share contexts. rl_reserve has made room for so many. */
RL_API int32_t rl_add_gather_ranges(rl_program* program, int32_t buffer, int32_t width);
/* Run by rl_head after the product: the parts of logits that the ranks have. */
RL_API void rl_set_gather_logits(rl_program* program, const int32_t* first);
/* Not an op of the list: run by rl_head. */
RL_API void rl_set_head(rl_program* program, const rl_linear* head, float scale, float softcap);

/* Rotary frequencies [half] of a table; NULL where they depend on the sequence's length, and then
 * rl_run is given cos and sin. */
RL_API int32_t rl_add_rope_table(rl_program* program, const float* frequencies, int32_t half,
                                 float attention_factor);

/* Room for batches of num_tokens, those that lag included; pointers from rl_buffer hold until the next
 * call. Returns 0, or -1 if there is no memory: then there is room for none. */
RL_API int32_t rl_reserve(rl_program* program, int32_t num_tokens);
RL_API float* rl_buffer(rl_program* program, int32_t buffer);
/* Floats that ops on states read of a token; 0 without such ops. */
RL_API int64_t rl_state_inputs(const rl_program* program);

/* Experts whose weights were read since the last call, summed over layers and steps. */
RL_API int64_t rl_take_experts_read(rl_program* program);
/* counts [experts] = tokens that went to each expert of a mixture so far, those of other ranks
 * included. May be called while steps run. */
RL_API void rl_expert_tokens(const rl_program* program, int32_t op, int64_t* counts);

/* Runs ops [first, last) over the batch. `cos_sin` are for each table cos [T, half] and then sin
 * [T, half], read only for tables without frequencies. `adapters` are for each sequence the parts
 * of its adapter, or NULL; all of it may be NULL. Returns 0, -1 if there is no memory, or -2 if the
 * program has no such ops. */
typedef struct {
  int32_t num_parts;
  const rl_adapter_part* parts;
} rl_adapter;
RL_API int32_t rl_run(rl_program* program, rl_pool* pool, int32_t first, int32_t last,
                      const rl_batch* batch, const rl_kv_group* groups,
                      const float* const* cos_sin, const rl_adapter* const* adapters);

/* logits[num_rows, V] of rows of buffer h. */
RL_API int32_t rl_head(rl_program* program, rl_pool* pool, const int32_t* rows, int32_t num_rows,
                       float* logits);

/* ---- sampling --------------------------------------------------------------------------- */

/* One row to draw a token from; see ridgeline.decoding.sampling for the order of the steps. The
 * barred tokens, in ascending order, cannot come before position `barred_until`, unless nothing else
 * can. */
typedef struct {
  const float* logits;   /* [V] */
  const uint32_t* mask;  /* bit i of word w: token 32 w + i is allowed; NULL for all */
  const int32_t* barred;
  int32_t num_barred;
  uint32_t barred_until;
  float temperature; /* 0: greedy */
  float top_p;       /* 1: off */
  float min_p;       /* 0: off */
  int32_t top_k;     /* 0: off */
  uint64_t seed;
  uint32_t sample_index;
  uint32_t position;
} rl_sampling;

/* tokens[i] is the token drawn from row i, or -1 if none is possible. */
RL_API int32_t rl_sample(rl_pool* pool, const rl_sampling* rows, int32_t num_rows,
                         int32_t vocab_size, int32_t* tokens);

/* Up to num_steps decode steps of a batch of one token for each sequence: all ops, the head, and a
 * draw by rows[s] (logits are set here, positions count up), each token fed back. Block tables hold
 * the blocks already, and no rotary table depends on lengths. tokens is [num_steps, S]. Ends early
 * when *abort becomes non-zero, or a sequence has no possible token. Returns the steps done, or -1
 * if there is no memory. */
RL_API int32_t rl_decode(rl_program* program, rl_pool* pool, const rl_batch* batch,
                         const rl_kv_group* groups, const rl_adapter* const* adapters,
                         const rl_sampling* rows, int32_t num_steps,
                         const volatile int32_t* abort, int32_t* tokens);

#ifdef __cplusplus
}
#endif
#endif
