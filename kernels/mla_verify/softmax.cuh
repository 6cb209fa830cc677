// The softmax: each value warp does a part of a tile's rows and tokens for all of them.
#pragma once

#include "pipeline.cuh"

namespace sm120::mla {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kRescaleSlack = 8.0f;   // a row's reference may be exceeded by 2^8 before its accumulators are rescaled
constexpr float kNoReference = -1e30f;  // of a row that has seen nothing: finite, so that no difference is NaN
constexpr int kValueBarrier = 1;        // named barrier of the value warps

__device__ __forceinline__ float soft_cap(float logit, float cap) {
  const float e = ptx::exp2_approx(logit * (2.0f * kLog2e / cap));  // tanh(x) = 1 - 2 / (e^2x + 1)
  return cap * (1.0f - __fdividef(2.0f, e + 1.0f));
}

// What a value thread does for its units (see kUnits in config.h).
template <typename Kv, int RowGroups>
struct Softmax {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kUnits = Cfg::kUnits;
  // Row pairs of this thread: units 0 and 1 of a whole group are the same rows.
  static constexpr bool kSplits = Cfg::kWhole < RowGroups;
  static constexpr int kPairs = (Cfg::kWhole > 0) + kSplits;
  static __device__ constexpr int pair_of(int unit) { return Cfg::kWhole > 0 ? unit / 2 : unit; }
  static __device__ constexpr bool is_split(int pair) { return kSplits && pair == kPairs - 1; }

  const Args& a;
  char* smem;
  BarriersOf<Cfg> bars;
  int warp, lane;
  float reference[kPairs][2];           // of this thread's row pairs, log2 units; the same in all threads of a row
  float row_sum[kPairs][2];             // this thread's share
  Ring<Cfg::kPartialBuffers> partials;  // where the next tile's scores come
  // This lane's places in the first buffer.
  uint32_t wide_smem, narrow_smem;  // partials
  uint32_t probs_smem;              // row group 0, token lane / 4

  __device__ Softmax(const Args& args, char* shared, BarriersOf<Cfg> barriers, int warp_, int lane_)
      : a(args), smem(shared), bars(barriers), warp(warp_), lane(lane_) {
    const uint32_t base = ptx::smem_addr(shared);
    const auto place = [&](int owner) { return owner * Cfg::kColumnParts * 32 + lane; };
    wide_smem = base + Cfg::kPartials + place(min(warp, Cfg::kWhole - 1)) * 16;
    narrow_smem = base + Cfg::kPartials + Cfg::kWideBytes + place(kSplits ? warp % (2 * Cfg::kNarrowGroups) : 0) * 8;
    probs_smem = kept(base + Cfg::kProbs + lane / 4 * Cfg::kProbStride + lane % 4 * 4);
  }

  __device__ float log2_scale() const { return a.p.sm_scale * a.p.kv_scale * kLog2e; }
  __device__ int group(int pair) const { return is_split(pair) ? Cfg::kWhole + warp / 2 : warp; }
  __device__ bool has_pair(int pair) const {
    return is_split(pair) ? Cfg::kWhole + 1 < RowGroups || warp < 2 : Cfg::kWhole == kValueWarps || warp < Cfg::kWhole;
  }
  __device__ int half(int unit) const { return is_split(pair_of(unit)) ? warp % 2 : unit; }
  __device__ int row(int pair, int c) const { return 8 * group(pair) + 2 * (lane % 4) + c; }
  __device__ float& shared_row(int at, int r) const { return reinterpret_cast<float*>(smem + at)[r]; }
  // Whether any logit of the tile with these probabilities exceeds its reference's slack. A flag that is read after the
  // barrier costs less than a barrier that also votes.
  __device__ volatile int& rises(int buffer) const {
    return reinterpret_cast<volatile int*>(smem + Cfg::kRises)[buffer];
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      reference[i][0] = reference[i][1] = kNoReference;
      row_sum[i][0] = row_sum[i][1] = 0.f;
    }
  }

  __device__ bool next_published() const { return ptx::mbarrier_test(bars.published(partials.slot), partials.parity); }

  // A tile's logits but for their scale. `published`: whether the partials were there when looked at.
  __device__ void receive(bool published, float (&x)[kUnits][2]) {
    if (!published) ptx::mbarrier_wait(bars.published(partials.slot), partials.parity);
    add_partials(x);
    arrive(bars.consumed(partials.slot), lane);
    partials.advance();
  }

  // Sums the score warps' partials of this thread's units, always in the same order. A warp that lacks a pair reads
  // another's and makes no use of it: a branch would cost more.
  __device__ void add_partials(float (&x)[kUnits][2]) const {
    const uint32_t buffer = partials.slot * Cfg::kPartialBytes;
    constexpr int kParts = Cfg::kColumnParts;
    if constexpr (Cfg::kWhole > 0) {
      float4 v[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) v[w] = ptx::load_shared_float4(wide_smem + buffer + w * 512);
      x[0][0] = v[0].x + v[1].x, x[0][1] = v[0].y + v[1].y, x[1][0] = v[0].z + v[1].z, x[1][1] = v[0].w + v[1].w;
      if constexpr (kParts == 4) {
        x[0][0] += v[2].x + v[3].x, x[0][1] += v[2].y + v[3].y, x[1][0] += v[2].z + v[3].z, x[1][1] += v[2].w + v[3].w;
      }
    }
    if constexpr (kSplits) {
      float2 v[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) v[w] = ptx::load_shared_float2(narrow_smem + buffer + w * 256);
      x[kUnits - 1][0] = v[0].x + v[1].x, x[kUnits - 1][1] = v[0].y + v[1].y;
      if constexpr (kParts == 4) x[kUnits - 1][0] += v[2].x + v[3].x, x[kUnits - 1][1] += v[2].y + v[3].y;
    }
  }

  // The soft cap, and what a row may not see among the request's own new tokens.
  __device__ void cap_and_mask(float (&x)[kUnits][2], int tile, int batch, int first_row) const {
    const int length = kv_len(a, batch), queries = q_len(a, batch), new_tokens = min(queries, length);
    const float scale = a.p.sm_scale * a.p.kv_scale;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int j = tile * kTileTokens + 8 * half(i) + lane / 4 - (length - new_tokens);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (a.p.logit_cap > 0.f) x[i][c] = soft_cap(x[i][c] * scale, a.p.logit_cap) / scale;
        const int token = min(first_row + row(pair_of(i), c), queries * a.p.heads - 1) / a.p.heads;
        bool seen = j < 0;
        if (j >= 0 && j < new_tokens && token < new_tokens) {
          seen = a.p.tree_mask
                     ? (a.p.tree_mask[int64_t(q_begin(a, batch) + token) * a.p.mask_words + j / 32] >> (j % 32)) & 1u
                     : j <= token;
        }
        if (!seen) x[i][c] = -INFINITY;
      }
    }
  }

  // Probabilities of this thread's logits to shared memory, and the row sums with them; returns whether one is above
  // its reference's slack.
  __device__ bool exponentiate(const float (&x)[kUnits][2], float (&sum)[kPairs][2], int buffer) const {
    float peak = kNoReference;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int pair = pair_of(i);
      float prob[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float above = fmaf(x[i][c], log2_scale(), -reference[pair][c]);
        peak = fmaxf(peak, has_pair(pair) ? above : kNoReference);
        prob[c] = ptx::exp2_approx(above);
        sum[pair][c] = (i == 1 ? sum : row_sum)[pair][c] + prob[c];
      }
      const uint32_t to = buffer * Cfg::kProbBytes + 8 * half(i) * Cfg::kProbStride + group(pair) * 16;
      if (has_pair(pair)) ptx::store_shared(probs_smem + to, ptx::pack2<Mma>(prob[0], prob[1]));
    }
    return peak > kRescaleSlack;
  }

  // Moves the references of rows that have risen by more than the slack, and rescales their sums; leaves the factor of
  // every row at kRescale. Rare.
  __device__ void raise(const float (&x)[kUnits][2], int buffer) {
    const int own = Cfg::kRowPairs + warp % 2 * Cfg::kRows * 4,
              other = Cfg::kRowPairs + (1 - warp % 2) * Cfg::kRows * 4;
    float peak[kPairs][2];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        peak[i][c] = log2_scale() * (is_split(i) ? x[kUnits - 1][c] : fmaxf(x[0][c], x[1 % kUnits][c]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) peak[i][c] = fmaxf(peak[i][c], __shfl_xor_sync(~0u, peak[i][c], step));
        if (is_split(i) && lane < 4 && has_pair(i)) shared_row(own, row(i, c)) = peak[i][c];
      }
    }
    ptx::barrier_sync(kValueBarrier, kValueThreads);
    if (warp == 0 && lane == 0) rises(buffer) = 0;  // all have read it
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!has_pair(i)) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (is_split(i)) peak[i][c] = fmaxf(peak[i][c], shared_row(other, row(i, c)));
        const bool higher = peak[i][c] > reference[i][c] + kRescaleSlack;
        const float factor = higher ? ptx::exp2_approx(reference[i][c] - peak[i][c]) : 1.f;
        if (higher) reference[i][c] = peak[i][c];
        row_sum[i][c] *= factor;
        if (lane < 4 && (!is_split(i) || warp % 2 == 0)) shared_row(Cfg::kRescale, row(i, c)) = factor;
      }
    }
    ptx::barrier_sync(kValueBarrier, kValueThreads);
  }

  __device__ void set_sums(const float (&sum)[kPairs][2]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) row_sum[i][0] = sum[i][0], row_sum[i][1] = sum[i][1];
  }

  // Every row's sum of exponentials, to shared memory: [token half][row].
  __device__ void share_sums() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) row_sum[i][c] += __shfl_xor_sync(~0u, row_sum[i][c], step);
        if (lane < 4 && has_pair(i)) {
          const int own = is_split(i) ? warp % 2 : 0;
          shared_row(Cfg::kRowPairs, own * Cfg::kRows + row(i, c)) = row_sum[i][c];
          if (!is_split(i)) shared_row(Cfg::kRowPairs, Cfg::kRows + row(i, c)) = 0.f;
        }
      }
    }
    ptx::barrier_sync(kValueBarrier, kValueThreads);
  }

  __device__ float sum_of(int r) const {
    return shared_row(Cfg::kRowPairs, r) + shared_row(Cfg::kRowPairs, Cfg::kRows + r);
  }

  __device__ void store_lse(int valid_rows, float* lse_gmem) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if ((is_split(i) && warp % 2 != 0) || lane >= 4 || !has_pair(i) || row(i, c) >= valid_rows) continue;
        const float sum = sum_of(row(i, c));
        lse_gmem[row(i, c)] = sum > 0.f ? (reference[i][c] + log2f(sum)) * kLn2 : -INFINITY;
      }
    }
  }
};

}  // namespace sm120::mla
