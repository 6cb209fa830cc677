/* C ABI of libsm120_mla.so: no torch, no C++ types. Every function returns 0 or a cudaError_t, launches on the given
 * stream, and neither allocates, synchronises nor reads device memory on the host.
 *
 * int32 device arrays that callers may hold as int64 come with a stride in int32 units (1, or 2 for the low halves of
 * little-endian int64).
 */
#ifndef SM120_MLA_H
#define SM120_MLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SM120_MLA_ABI 3

/* Query rows: q_len new tokens of each request (qo_indptr null), or qo_indptr[b] .. qo_indptr[b + 1] (q_len ignored).
 */
struct sm120_mla_params {
  const void* q;  /* bf16 [total_q, heads, 576], contiguous */
  const void* kv; /* bf16 or fp8 e4m3 [slots, >= 576], rows kv_stride_bytes apart; both multiples of 16 B */
  const int32_t* req_to_token;     /* [max_requests, req_to_token_stride] slot of each token */
  const int32_t* req_pool_indices; /* [batch] */
  const int32_t* kv_lens;          /* [batch] tokens of KV, new ones included; 0 = padded request */
  const int32_t* qo_indptr;        /* [batch + 1] or null */
  const uint32_t* tree_mask; /* [total_q, mask_words] ancestor bits over the request's new tokens, or null = causal */
  void* out;                 /* bf16 [total_q, heads, 512], contiguous */
  float* lse;                /* [total_q, heads], natural log */
  void* workspace;           /* sm120_mla_workspace_bytes(), 16-byte aligned, contents irrelevant */
  int64_t kv_stride_bytes;
  int64_t req_to_token_stride;
  int32_t req_pool_indices_stride;
  int32_t kv_lens_stride;
  int32_t batch;
  int32_t q_len;
  int32_t total_q;
  int32_t heads;
  int32_t mask_words;
  int32_t kv_is_fp8;
  int32_t num_sms;      /* multiprocessors to plan for */
  int32_t early_launch; /* compute capability 9.0 or later: set the merge up while the kernel runs */
  float sm_scale;
  float kv_scale;  /* what one unit of fp8 KV is worth; 1 for bf16 */
  float logit_cap; /* cap * tanh(logit / cap) where > 0 */
};

int sm120_mla_abi(void);
/* Bytes of workspace that every launch with these limits stays within. */
size_t sm120_mla_workspace_bytes(int32_t num_sms, int32_t max_batch);
/* Blocks that share the context of q_len new tokens' rows, at most; what operators watch. */
int32_t sm120_mla_splits(int32_t q_len, int32_t heads, int32_t num_sms);
int sm120_mla_verify(const struct sm120_mla_params* params, void* stream);
/* The definition, slow: same parameters, no workspace. `scores` holds batch-independent scratch of
 * total_q * heads * max_kv_len floats. */
int sm120_mla_oracle(const struct sm120_mla_params* params, float* scores, int64_t max_kv_len, void* stream);

/* pools: device array of `layers` base addresses; each slot is row_bytes (a multiple of 16) wide. src, dst:
 * [lists][count]. dst[j][i] <- src[j][i] in every layer by one launch, within a list as if all were read before any is
 * written: its src and dst may overlap, those of different lists may not. Entries with dst < 0 are skipped. count is at
 * most sm120_move_kv_max_rows(), lists at most 65535. */
int32_t sm120_move_kv_max_rows(void);
int sm120_move_kv(const uint64_t* pools, int32_t layers, const int64_t* src, const int64_t* dst, int32_t lists,
                  int32_t count, int32_t row_bytes, void* stream);

/* bool [rows, q] -> uint32 [rows, ceil(q / 32)], bit j of word w = column 32 w + j. */
int sm120_pack_tree_mask(const uint8_t* mask, uint32_t* words, int32_t rows, int32_t q, void* stream);

#ifdef __cplusplus
}
#endif
#endif
