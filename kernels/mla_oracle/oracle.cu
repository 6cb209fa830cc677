// The definition, written to be read: one block per (query token, head), the whole score row in memory, one softmax in
// float32, no tiles, no splits. What mla_verify computes must equal this up to rounding.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "sm120_mla.h"

namespace {

constexpr int kLatentDim = 512, kHeadDim = 576, kThreads = 256;

__device__ float kv_value(const sm120_mla_params& p, int64_t slot, int column) {
  const char* row = static_cast<const char*>(p.kv) + slot * p.kv_stride_bytes;
  if (p.kv_is_fp8) return static_cast<float>(reinterpret_cast<const __nv_fp8_e4m3*>(row)[column]) * p.kv_scale;
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[column]) * p.kv_scale;
}

__device__ float block_reduce(float value, bool maximum) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      const float other = shared[threadIdx.x + half];
      shared[threadIdx.x] = maximum ? fmaxf(shared[threadIdx.x], other) : shared[threadIdx.x] + other;
    }
    __syncthreads();
  }
  const float result = shared[0];
  __syncthreads();
  return result;
}

__global__ void oracle_kernel(const sm120_mla_params p, float* all_scores, int64_t max_kv_len) {
  const int token = blockIdx.x / p.heads;
  float* scores = all_scores + blockIdx.x * max_kv_len;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q) + int64_t(blockIdx.x) * kHeadDim;

  // Which request, and this token's index i among its q new tokens.
  int b = -1, i = 0, q_len = 0, q_begin = 0;
  for (int candidate = 0; candidate < p.batch; ++candidate) {
    const int begin = p.qo_indptr ? p.qo_indptr[candidate] : candidate * p.q_len;
    const int end = p.qo_indptr ? p.qo_indptr[candidate + 1] : begin + p.q_len;
    if (begin <= token && token < end) b = candidate, i = token - begin, q_len = end - begin, q_begin = begin;
  }
  const int kv_len = b < 0 ? 0 : p.kv_lens[int64_t(b) * p.kv_lens_stride];
  q_len = min(q_len, kv_len);
  const int prefix = kv_len - q_len;
  const int32_t* slots =
      b < 0 ? nullptr
            : p.req_to_token + p.req_pool_indices[int64_t(b) * p.req_pool_indices_stride] * p.req_to_token_stride;

  float peak = -INFINITY;
  for (int n = threadIdx.x; n < kv_len; n += kThreads) {
    const int j = n - prefix;  // index among the new tokens, negative in the prefix
    bool visible = j < 0;
    if (j >= 0 && i < q_len) {
      visible = p.tree_mask ? p.tree_mask[int64_t(q_begin + i) * p.mask_words + j / 32] >> (j % 32) & 1u : j <= i;
    }
    float logit = -INFINITY;
    if (visible) {
      logit = 0.f;
      for (int c = 0; c < kHeadDim; ++c) logit += __bfloat162float(q[c]) * kv_value(p, slots[n], c);
      logit *= p.sm_scale;
      if (p.logit_cap > 0.f) logit = p.logit_cap * tanhf(logit / p.logit_cap);
    }
    scores[n] = logit;
    peak = fmaxf(peak, logit);
  }
  peak = block_reduce(peak, true);
  const float reference = peak == -INFINITY ? 0.f : peak;
  float sum = 0.f;
  for (int n = threadIdx.x; n < kv_len; n += kThreads) sum += expf(scores[n] - reference);
  sum = block_reduce(sum, false);

  for (int c = threadIdx.x; c < kLatentDim; c += kThreads) {
    float value = 0.f;
    for (int n = 0; n < kv_len; ++n) value += expf(scores[n] - reference) * kv_value(p, slots[n], c);
    static_cast<__nv_bfloat16*>(p.out)[int64_t(blockIdx.x) * kLatentDim + c] =
        __float2bfloat16(sum > 0.f ? value / sum : 0.f);
  }
  if (threadIdx.x == 0) p.lse[blockIdx.x] = sum > 0.f ? peak + logf(sum) : -INFINITY;
}

}  // namespace

extern "C" int sm120_mla_oracle(const sm120_mla_params* params, float* scores, int64_t max_kv_len, void* stream) {
  if (params->total_q == 0) return cudaSuccess;
  oracle_kernel<<<params->total_q * params->heads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params, scores,
                                                                                                     max_kv_len);
  return cudaGetLastError();
}
