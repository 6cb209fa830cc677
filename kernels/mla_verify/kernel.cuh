// Flash attention of absorbed MLA with split context, for GPUs whose tensor cores are driven by mma.sync.
//
// A block holds up to 48 query rows (new tokens x heads of one request) and walks the KV in tiles of 16 tokens. Both
// products are taken transposed, so that query rows are the mma's n dimension (granularity 8, not 16):
//
//   S^T [16 tokens x rows] = K [16 x 576] . Q^T [576 x rows]       score warps 0-3: 144 of the 576 columns each
//   O^T [512 x rows]      += V^T [512 x 16] . P^T [16 x rows]      value warps 0-7: 64 of the 512 latents each
//
//   gmem --cp.async (value warps)--> stage [16][576 + pad] --ldmatrix--> S^T partials --> scores smem
//        scores smem --(4 partials summed, mask, online softmax)--> probs smem [rows][16]
//        stage --ldmatrix.trans--> V^T,  probs --ldmatrix--> P^T  --> O^T in registers
//
// Q^T lives in the score warps' registers, O^T in the value warps'. A latent row is copied to shared memory once and
// each of its elements is read once for the scores and once for the values, whatever the number of heads. The two roles
// run one to two tiles apart, so softmax hides behind the other role's products.
//
// Barriers (mbarrier, phases counted by tile):
//   landed[stage]  value threads' copies      -> score warps
//   ready[2]       score warps' probabilities -> value warps
//   done[stage]    value warps                -> stage free for the next copy, probs[tile & 1] free for tile + 2
//   summed         score warps have read the partial scores -> they may be overwritten
#pragma once

#include "ptx.cuh"
#include "work.cuh"

namespace sm120::mla {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kRescaleSlack = 8.0f;  // the maximum a row was scaled by may be exceeded by 2^8 before O is rescaled

template <int Stages>
struct Barriers {
  uint32_t base;
  __device__ uint32_t landed(int stage) const { return base + 8 * stage; }
  __device__ uint32_t done(int stage) const { return base + 8 * (Stages + stage); }
  __device__ uint32_t ready(int buffer) const { return base + 8 * (2 * Stages + buffer); }
  __device__ uint32_t summed() const { return base + 8 * (2 * Stages + 2); }
};

// Waits until the value warps have finished tile n.
template <int Stages>
__device__ __forceinline__ void wait_done(const Barriers<Stages>& bars, int n) {
  ptx::mbarrier_wait(bars.done(n % Stages), (n / Stages) & 1);
}

__device__ __forceinline__ float soft_cap(float logit, float cap) {
  const float e = ptx::exp2_approx(logit * (2.0f * kLog2e / cap));  // tanh(x) = 1 - 2 / (e^2x + 1)
  return cap * (1.0f - __fdividef(2.0f, e + 1.0f));
}

// ---------------------------------------------------------------------------------------------------- score warps ----

template <typename Kv, int RowGroups>
struct ScoreRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kSteps = kHeadDim / kScoreWarps / 16;  // k16 steps of a warp's column quarter

  const Args& a;
  char* smem;
  Barriers<Cfg::kStages> bars;
  int warp, lane;
  uint32_t q[kSteps][RowGroups][2];                           // Q^T fragments

  // This thread's place in the softmax: half a row (8 tokens) of the tile.
  int row, half;
  float row_max, row_sum;                                     // log2 units; this thread's share of the sum

  __device__ void load_queries(int64_t first_row, int valid_rows) {
    const int g = lane / 4, t = lane % 4;
    // e4m3 is loaded in 16-bit pairs, so a thread's two fragment registers are four neighbouring columns.
    constexpr int kThreadStride = Kv::kBytes == 2 ? 2 : 4, kSecond = Kv::kBytes == 2 ? 8 : 2;
    const auto* base = static_cast<const __nv_bfloat16*>(a.p.q) + first_row * kHeadDim + warp * (kHeadDim / kScoreWarps);
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const bool valid = 8 * j + g < valid_rows;
      const auto* source = base + int64_t(8 * j + g) * kHeadDim + kThreadStride * t;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t pair = valid ? *reinterpret_cast<const uint32_t*>(source + 16 * s + kSecond * i) : 0u;
          if constexpr (Kv::kBytes == 1) {
            const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
            pair = ptx::pack2<__half>(fminf(fmaxf(v.x, -65504.f), 65504.f), fminf(fmaxf(v.y, -65504.f), 65504.f));
          }
          q[s][j][i] = pair;
        }
      }
    }
  }

  // Partial S^T of this warp's columns, [16 tokens x rows].
  __device__ void multiply(uint32_t stage, float (&s)[RowGroups][4]) const {
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
    const uint32_t tokens = stage + (lane % 16) * Cfg::kRowStride + warp * (Cfg::kRowBytes / kScoreWarps);
    if constexpr (Kv::kBytes == 2) {
      const uint32_t address = tokens + (lane / 16) * 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, address + step * 32);
#pragma unroll
        for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(s[j], k, q[step][j]);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < kSteps; pair += 2) {
        uint32_t raw[4];
        if (pair + 1 < kSteps) {
          ptx::ldmatrix_x4(raw, tokens + (lane / 16) * 16 + pair * 16);
        } else {
          ptx::ldmatrix_x2(raw[0], raw[1], tokens + pair * 16);
        }
#pragma unroll
        for (int i = 0; i < 2 && pair + i < kSteps; ++i) {
          const uint32_t k[4] = {ptx::e4m3x2_to_half2(raw[2 * i]), ptx::e4m3x2_to_half2(raw[2 * i + 1]),
                                 ptx::e4m3x2_to_half2(raw[2 * i] >> 16), ptx::e4m3x2_to_half2(raw[2 * i + 1] >> 16)};
#pragma unroll
          for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(s[j], k, q[pair + i][j]);
        }
      }
    }
  }

  __device__ void store_partial(const float (&s)[RowGroups][4]) const {
    float* scores = reinterpret_cast<float*>(smem + Cfg::kScores) + warp * Cfg::kRows * kScoreStride;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      float* at = scores + (8 * j + 2 * t) * kScoreStride + g;
      at[0] = s[j][0];
      at[kScoreStride] = s[j][1];
      at[8] = s[j][2];
      at[kScoreStride + 8] = s[j][3];
    }
  }

  // The row's 8 logits in log2 units, summed over the column quarters.
  __device__ void sum_partials(float (&x)[8]) const {
    const float* scores = reinterpret_cast<const float*>(smem + Cfg::kScores) + row * kScoreStride + 8 * half;
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = 0.f;
#pragma unroll
    for (int part = 0; part < kScoreWarps; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(scores + part * Cfg::kRows * kScoreStride + 4 * i);
        x[4 * i] += v.x, x[4 * i + 1] += v.y, x[4 * i + 2] += v.z, x[4 * i + 3] += v.w;
      }
    }
  }

  // Hides what the row may not see among the request's own new tokens. `first_new` is x[0]'s index among them.
  __device__ void mask(float (&x)[8], int first_new, int token, int new_tokens, const uint32_t* row_words) const {
    const int word = max(first_new, 0) / 32;
    uint64_t bits = 0;                                         // of new tokens 32 word .. 32 word + 63
    if (row_words) {
      if (word < a.p.mask_words) bits = row_words[word];
      if (word + 1 < a.p.mask_words) bits |= uint64_t(row_words[word + 1]) << 32;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int j = first_new + e;
      const bool inside = j < new_tokens && token < new_tokens;
      const bool seen = row_words ? (bits >> (j - 32 * word)) & 1u : j <= token;
      if (!(j < 0 || (inside && seen))) x[e] = -INFINITY;
    }
  }

  __device__ void run(Work work) {
    int tile_count = 0;                                       // over all segments: selects stages, buffers and phases
    row = warp * 16 + lane % 16;
    half = lane / 16;
    const bool has_rows = warp * 16 < Cfg::kRows;
    const bool row_exists = row < Cfg::kRows;
    row = min(row, Cfg::kRows - 1);
    const float scale = a.p.sm_scale * a.p.kv_scale;
    const uint32_t stages = ptx::smem_addr(smem + Cfg::kStages0);
    do {
      const Segment& segment = work.segment;
      const int batch = segment.batch, length = kv_len(a, batch);
      const int first_row = work.row_tile * Cfg::kRows, query_begin = q_begin(a, batch), queries = q_len(a, batch);
      const int valid_rows = min(queries * a.p.heads - first_row, Cfg::kRows);
      const int64_t global_row = int64_t(query_begin) * a.p.heads + first_row;
      load_queries(global_row, valid_rows);
      const int new_tokens = min(queries, length), prefix = length - new_tokens;
      const int token = (first_row + min(row, valid_rows - 1)) / a.p.heads;
      const uint32_t* row_words =
          a.p.tree_mask ? a.p.tree_mask + int64_t(query_begin + token) * a.p.mask_words : nullptr;
      row_max = -INFINITY;
      row_sum = 0.f;

      for (int tile = segment.tile_begin; tile < segment.tile_end; ++tile, ++tile_count) {
        const int stage = tile_count % Cfg::kStages, buffer = tile_count % 2;
        ptx::mbarrier_wait(bars.landed(stage), (tile_count / Cfg::kStages) & 1);
        float s[RowGroups][4];
        multiply(stages + stage * Cfg::kStageBytes, s);
        if (tile_count > 0) ptx::mbarrier_wait(bars.summed(), (tile_count - 1) & 1);
        store_partial(s);
        ptx::named_barrier_sync(1, kScoreThreads);

        float x[8];
        if (has_rows) sum_partials(x);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(bars.summed());
        if (tile_count >= 2) wait_done(bars, tile_count - 2);  // frees probs[buffer]
        if (has_rows) {
          if (a.p.logit_cap > 0.f) {
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] = soft_cap(x[e] * scale, a.p.logit_cap) * kLog2e;
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] *= scale * kLog2e;
          }
          const int first_key = tile * kTileTokens;
          if (first_key + kTileTokens > prefix) mask(x, first_key + 8 * half - prefix, token, new_tokens, row_words);
          softmax(x, buffer, row_exists);
          if (tile + 1 == segment.tile_end) finish(segment, buffer, global_row, row_exists && row < valid_rows);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(bars.ready(buffer));
      }
    } while (work.next(a));
  }

  // Online softmax of this thread's 8 logits: probabilities, and the factor that O must be rescaled by, to shared memory.
  __device__ void softmax(const float (&x)[8], int buffer, bool row_exists) {
    float peak = x[0];
#pragma unroll
    for (int e = 1; e < 8; ++e) peak = fmaxf(peak, x[e]);
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 16));
    const bool rises = peak > row_max + kRescaleSlack;
    const bool rescales = rises && row_max != -INFINITY;
    const float factor = rises ? ptx::exp2_approx(row_max - peak) : 1.f;
    if (rises) row_max = peak;
    const float reference = row_max == -INFINITY ? 0.f : row_max;
    float prob[8], sum = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      prob[e] = ptx::exp2_approx(x[e] - reference);
      sum += prob[e];
    }
    row_sum = row_sum * factor + sum;
    const bool any = __any_sync(~0u, rescales);
    if (lane == 0) reinterpret_cast<int*>(smem + Cfg::kFlags)[buffer * 4 + warp] = any;
    if (!row_exists) return;
    const uint4 packed = {ptx::pack2<Mma>(prob[0], prob[1]), ptx::pack2<Mma>(prob[2], prob[3]),
                          ptx::pack2<Mma>(prob[4], prob[5]), ptx::pack2<Mma>(prob[6], prob[7])};
    char* probs = smem + Cfg::kProbs + buffer * Cfg::kRows * kTileTokens * 2;
    *reinterpret_cast<uint4*>(probs + row * 32 + ((half ^ (row / 4)) & 1) * 16) = packed;
    if (half == 0) reinterpret_cast<float*>(smem + Cfg::kRescale)[buffer * Cfg::kRows + row] = factor;
  }

  // After a segment's last tile: the divisor for the value warps, and the log-sum-exp.
  __device__ void finish(const Segment& segment, int buffer, int64_t global_row, bool row_valid) {
    const float sum = row_sum + __shfl_xor_sync(~0u, row_sum, 16);
    if (half != 0) return;
    reinterpret_cast<float*>(smem + Cfg::kInverseSum)[buffer * Cfg::kRows + row] = sum > 0.f ? a.p.kv_scale / sum : 0.f;
    if (!row_valid) return;
    const float lse = sum > 0.f ? (row_max + log2f(sum)) * kLn2 : -INFINITY;
    if (segment.whole()) {
      a.p.lse[global_row + row] = lse;
    } else {
      a.ws.lse[int64_t(partial_slot(a, blockIdx.x, segment.tile_begin > 0)) * kMaxRows + row] = lse;
    }
  }
};

// ---------------------------------------------------------------------------------------------------- value warps ----

// Copies KV rows, a tile at a time, ahead of their use; a half-warp per token.
template <typename Kv, int RowGroups>
struct Loader {
  using Cfg = Config<Kv, RowGroups>;
  const Args& a;
  Barriers<Cfg::kStages> bars;
  uint32_t stages;
  Work work;
  int token, lane16, tile, issued = 0, total;
  int length, slot;                                           // of the current segment; of the next tile's token
  const int32_t* slots;

  __device__ Loader(const Args& args, Barriers<Cfg::kStages> barriers, uint32_t stages_smem, const Work& w, int thread)
      : a(args), bars(barriers), stages(stages_smem), work(w), token(thread / 16), lane16(thread % 16), total(w.left) {
    enter_segment();
  }

  __device__ void enter_segment() {
    const int batch = work.segment.batch;
    length = kv_len(a, batch);
    slots = a.p.req_to_token +
            int64_t(a.p.req_pool_indices[int64_t(batch) * a.p.req_pool_indices_stride]) * a.p.req_to_token_stride;
    tile = work.segment.tile_begin;
    fetch_slot();
  }

  __device__ void fetch_slot() {
    const int at = tile * kTileTokens + token;
    slot = at < length ? slots[at] : -1;
  }

  // Issues the next tile's copy into its stage, once the value warps have left it, and fetches the slot after it.
  __device__ void issue() {
    if (issued == total) return;
    const int stage = issued % Cfg::kStages;
    if (issued >= Cfg::kStages) wait_done(bars, issued - Cfg::kStages);
    const char* source = static_cast<const char*>(a.p.kv) + max(slot, 0) * a.p.kv_stride_bytes + lane16 * 16;
    const uint32_t target = stages + stage * Cfg::kStageBytes + token * Cfg::kRowStride + lane16 * 16;
    const uint32_t bytes = slot >= 0 ? 16 : 0;                // past the end: zeros, since 0 * NaN is not 0
#pragma unroll
    for (int i = 0; i < Cfg::kChunks / 16; ++i) ptx::cp_async_16(target + i * 256, source + i * 256, bytes);
    if (lane16 < Cfg::kChunks % 16) {
      ptx::cp_async_16(target + Cfg::kChunks / 16 * 256, source + Cfg::kChunks / 16 * 256, bytes);
    }
    ptx::cp_async_arrive(bars.landed(stage));
    ++issued;
    if (++tile < work.segment.tile_end) {
      fetch_slot();
    } else if (issued < total) {
      work.next(a);
      enter_segment();
    }
  }
};

template <typename Kv, int RowGroups>
struct ValueRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kTiles = kLatentDim / kValueWarps / 16;  // m16 tiles of a warp's 64 latents

  const Args& a;
  char* smem;
  Barriers<Cfg::kStages> bars;
  int warp, lane;
  float o[kTiles][RowGroups][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0.f;
  }

  // A thread's accumulator columns are rows 8 j + 2 (lane % 4) and the next one.
  __device__ void scale_rows(const float* factors) {
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) o[m][j][0] *= f.x, o[m][j][1] *= f.y, o[m][j][2] *= f.x, o[m][j][3] *= f.y;
    }
  }

  __device__ void load_probs(uint32_t probs, uint32_t (&p)[RowGroups][2]) const {
    const uint32_t address = probs + (lane % 8 + lane / 16 * 8) * 32 + (((lane / 8) ^ (lane % 8 / 4)) & 1) * 16;
#pragma unroll
    for (int j = 0; j + 1 < RowGroups; j += 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, address + j * 256);
      p[j][0] = r[0], p[j][1] = r[1], p[j + 1][0] = r[2], p[j + 1][1] = r[3];
    }
    if constexpr (RowGroups % 2 == 1) {
      const uint32_t last = probs + (lane % 8) * 32 + (((lane / 8) ^ (lane % 8 / 4)) & 1) * 16;
      ptx::ldmatrix_x2(p[RowGroups - 1][0], p[RowGroups - 1][1], last + (RowGroups - 1) * 256);
    }
  }

  __device__ void multiply(uint32_t stage, const uint32_t (&p)[RowGroups][2]) {
    const uint32_t address = stage + (lane % 8 + lane / 16 * 8) * Cfg::kRowStride + warp * 64 * Kv::kBytes;
    if constexpr (Kv::kBytes == 2) {
      const uint32_t column = (lane / 8 % 2) * 16;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, address + column + m * 32);
#pragma unroll
        for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(o[m][j], v, p[j]);
      }
    } else {
      // A transposed pair of e4m3 is two latents of one token; byte_perm gathers one latent of two tokens.
      const uint32_t tokens = stage + (lane % 16) * Cfg::kRowStride + warp * 64 + lane / 16 * 16;
#pragma unroll
      for (int m = 0; m < kTiles; m += 2) {
        uint32_t raw[4];
        ptx::ldmatrix_x4_trans(raw, tokens + m * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = raw[2 * i], high = raw[2 * i + 1];
          const uint32_t v[4] = {
              ptx::e4m3x2_to_half2(__byte_perm(low, 0, 0x20)), ptx::e4m3x2_to_half2(__byte_perm(low, 0, 0x31)),
              ptx::e4m3x2_to_half2(__byte_perm(high, 0, 0x20)), ptx::e4m3x2_to_half2(__byte_perm(high, 0, 0x31))};
#pragma unroll
          for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(o[m + i][j], v, p[j]);
        }
      }
    }
  }

  // Latent column of accumulator rows lane / 4 (which = 0) and lane / 4 + 8 (which = 1) of m-tile m.
  __device__ int latent(int m, int which) const {
    const int g = lane / 4;
    return warp * 64 + m * 16 + (Kv::kBytes == 2 ? g + 8 * which : 2 * g + which);
  }

  template <typename Store>
  __device__ void for_each_output(int valid_rows, Store store) const {
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + 2 * (lane % 4) + c;
        if (row >= valid_rows) continue;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          store(row, latent(m, 0), o[m][j][c]);
          store(row, latent(m, 1), o[m][j][c + 2]);
        }
      }
    }
  }

  __device__ void write_out(const Segment& segment, int row_tile) const {
    const int first_row = row_tile * Cfg::kRows;
    const int valid_rows = min(q_len(a, segment.batch) * a.p.heads - first_row, Cfg::kRows);
    if (segment.whole()) {
      auto* out = static_cast<__nv_bfloat16*>(a.p.out) +
                  (int64_t(q_begin(a, segment.batch)) * a.p.heads + first_row) * kLatentDim;
      for_each_output(valid_rows, [&](int row, int column, float v) { out[row * kLatentDim + column] = __float2bfloat16(v); });
    } else {
      float* out = a.ws.out + int64_t(partial_slot(a, blockIdx.x, segment.tile_begin > 0)) * kMaxRows * kLatentDim;
      for_each_output(valid_rows, [&](int row, int column, float v) { out[row * kLatentDim + column] = v; });
    }
  }

  __device__ void run(Work work) {
    const uint32_t stages = ptx::smem_addr(smem + Cfg::kStages0), probs = ptx::smem_addr(smem + Cfg::kProbs);
    Loader<Kv, RowGroups> loader(a, bars, stages, work, threadIdx.x - kScoreThreads);
    for (int n = 0; n + 1 < Cfg::kStages; ++n) loader.issue();
    int tile_count = 0;
    do {
      const Segment& segment = work.segment;
      clear();
      for (int tile = segment.tile_begin; tile < segment.tile_end; ++tile, ++tile_count) {
        const int stage = tile_count % Cfg::kStages, buffer = tile_count % 2;
        loader.issue();
        ptx::mbarrier_wait(bars.ready(buffer), (tile_count / 2) & 1);
        const int4 flags = reinterpret_cast<const int4*>(smem + Cfg::kFlags)[buffer];
        if (flags.x | flags.y | flags.z | flags.w) {
          scale_rows(reinterpret_cast<const float*>(smem + Cfg::kRescale) + buffer * Cfg::kRows);
        }
        uint32_t p[RowGroups][2];
        load_probs(probs + buffer * Cfg::kRows * kTileTokens * 2, p);
        multiply(stages + stage * Cfg::kStageBytes, p);
        if (tile + 1 == segment.tile_end) {
          scale_rows(reinterpret_cast<const float*>(smem + Cfg::kInverseSum) + buffer * Cfg::kRows);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(bars.done(stage));
      }
      write_out(segment, work.row_tile);
    } while (work.next(a));
  }
};

template <typename Kv, int RowGroups>
__global__ void __launch_bounds__(kThreads, 1) verify_kernel(const __grid_constant__ Args a) {
  using Cfg = Config<Kv, RowGroups>;
  extern __shared__ __align__(128) char smem[];
  const Barriers<Cfg::kStages> bars{ptx::smem_addr(smem + Cfg::kBarriers)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Cfg::kStages; ++stage) {
      ptx::mbarrier_init(bars.landed(stage), kValueThreads);
      ptx::mbarrier_init(bars.done(stage), kValueWarps);
    }
    ptx::mbarrier_init(bars.ready(0), kScoreWarps);
    ptx::mbarrier_init(bars.ready(1), kScoreWarps);
    ptx::mbarrier_init(bars.summed(), kScoreWarps);
  }
  if (threadIdx.x < 8) reinterpret_cast<int*>(smem + Cfg::kFlags)[threadIdx.x] = 0;
  const Work work = locate_work(a, Cfg::kRows);
  __syncthreads();
  if (work.left == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < kScoreWarps) {
    ScoreRole<Kv, RowGroups> role{a, smem, bars, warp, lane};
    role.run(work);
  } else {
    ValueRole<Kv, RowGroups> role{a, smem, bars, warp - kScoreWarps, lane};
    role.run(work);
  }
}

template <typename Kv, int RowGroups>
int launch(const Args& args, int blocks, void* stream) {
  using Cfg = Config<Kv, RowGroups>;
  const cudaError_t status = cudaFuncSetAttribute(verify_kernel<Kv, RowGroups>,
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSharedBytes);
  if (status != cudaSuccess) return status;
  verify_kernel<Kv, RowGroups><<<blocks, kThreads, Cfg::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace sm120::mla
