// The value warps: online softmax of a tile's scores, and O^T += V^T . P^T.
#pragma once

#include "partial.cuh"
#include "softmax.cuh"

namespace sm120::mla {

template <typename Kv, int RowGroups>
struct ValueRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kColumns = kLatentDim / kValueWarps, kTiles = kColumns / 16;  // of a warp; its m16 tiles
  // One ldmatrix of V^T is an m-tile of bf16 or two of fp8.
  static constexpr int kLoadTiles = 2 / Kv::kBytes, kLoads = kTiles / kLoadTiles;
  // Loaded ahead of their products, the first ones while waiting at the barrier.
  static constexpr int kValueBuffers = RowGroups <= kAheadUpTo ? 2 : 1;

  const Args& a;
  char* smem;
  BarriersOf<Cfg> bars;
  int warp, lane;
  float o[kTiles][RowGroups][4];  // O^T
  Softmax<Kv, RowGroups> softmax;
  Ring<Cfg::kStages> ring;  // stage whose values are multiplied next
  // This lane's places for ldmatrix.
  uint32_t probs_smem;   // row group 0 of the first buffer
  uint32_t values_smem;  // first m-tile of stage 0

  __device__ ValueRole(const Args& args, char* shared, BarriersOf<Cfg> barriers, int warp_, int lane_)
      : a(args), smem(shared), bars(barriers), warp(warp_), lane(lane_), softmax(args, shared, barriers, warp_, lane_) {
    const uint32_t base = ptx::smem_addr(shared);
    probs_smem = kept(base + Cfg::kProbs + lane % 16 * Cfg::kProbStride + lane / 16 * 16);
    const int token = Kv::kBytes == 2 ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int chunk = Kv::kBytes == 2 ? lane / 8 % 2 : lane / 16;
    values_smem = kept(base + Cfg::kStages0 + token * Cfg::kRowBytes + warp * kColumns * Kv::kBytes +
                       Cfg::chunk_at(token, chunk));
  }

  // The work at its current segment lies in shared memory and is read wherever it is needed, so that it takes no
  // registers. No segment ends before every warp of the block has begun it: the first may be overwritten then.
  __device__ Work& shared_work() const { return *reinterpret_cast<Work*>(smem + Cfg::kWork); }
  __device__ Segment segment() const { return uniform(shared_work()).segment; }
  __device__ int first_row() const { return uniform(shared_work().row_tile) * Cfg::kRows; }
  __device__ bool next_segment() const {
    Work work = uniform(shared_work());
    const bool more = work.next(a);
    ptx::barrier_sync(kValueBarrier, kValueThreads);  // all have read it
    if (warp == 0 && lane == 0) shared_work() = work;
    ptx::barrier_sync(kValueBarrier, kValueThreads);
    return more;
  }

  __device__ void clear() {
    softmax.clear();
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0.f;
  }

  // By the factors that raising references has left.
  __device__ void rescale() {
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const int r = 8 * j + 2 * (lane % 4);
      const float even = softmax.shared_row(Cfg::kRescale, r), odd = softmax.shared_row(Cfg::kRescale, r + 1);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) o[m][j][0] *= even, o[m][j][1] *= odd, o[m][j][2] *= even, o[m][j][3] *= odd;
    }
  }

  // P^T fragments: tokens 0-7 and 8-15 of row group j.
  __device__ void load_probs(int buffer, uint32_t (&p)[RowGroups][2]) const {
    const uint32_t from_smem = probs_smem + buffer * Cfg::kProbBytes;
#pragma unroll
    for (int j = 0; j + 1 < RowGroups; j += 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, from_smem + j * 16);
      p[j][0] = r[0], p[j][1] = r[1], p[j + 1][0] = r[2], p[j + 1][1] = r[3];
    }
    if constexpr (RowGroups % 2 == 1) {
      ptx::ldmatrix_x2_trans(p[RowGroups - 1][0], p[RowGroups - 1][1], from_smem + (RowGroups - 1) * 16);
    }
  }

  // The n-th ldmatrix of V^T, as stored.
  __device__ void load_values(uint32_t stage, int n, uint32_t (&raw)[4]) const {
    constexpr int kBlockLoads = Cfg::kBlockBytes / 32;
    const uint32_t first_smem = values_smem + stage;  // the place of another chunk of the block differs in some bits
    ptx::ldmatrix_x4_trans(raw, (first_smem ^ (n % kBlockLoads * 32)) + n / kBlockLoads * Cfg::kBlockBytes);
  }

  // Adds its m-tiles of V^T P^T.
  __device__ void multiply(int n, const uint32_t (&raw)[4], const uint32_t (&p)[RowGroups][2]) {
#pragma unroll
    for (int i = 0; i < kLoadTiles; ++i) {
      uint32_t v[4];
      if constexpr (Kv::kBytes == 2) {
#pragma unroll
        for (int r = 0; r < 4; ++r) v[r] = raw[r];
      } else {
        // A transposed pair of e4m3 is two latents of one token; byte_perm gathers one latent of two tokens.
        ptx::e4m3x4_to_half2(__byte_perm(raw[2 * i], 0, 0x3120), v[0], v[1]);
        ptx::e4m3x4_to_half2(__byte_perm(raw[2 * i + 1], 0, 0x3120), v[2], v[3]);
      }
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(o[kLoadTiles * n + i][j], v, p[j]);
    }
  }

  // A tile: softmax, and O^T += V^T P^T. `published`: whether its scores were there when looked at; returns that of the
  // next tile.
  template <bool MayMask>
  __device__ bool process(int tile, int buffer, bool published) {
    const uint32_t stage = ring.slot * Cfg::kStageBytes;
    float x[softmax.kUnits][2], sum[softmax.kPairs][2];
    softmax.receive(published, x);
    if (MayMask) softmax.cap_and_mask(x, tile, segment().batch, first_row());
    if (softmax.exponentiate(x, sum, buffer)) softmax.rises(buffer) = 1;
    uint32_t values[kValueBuffers][4], p[RowGroups][2];
#pragma unroll
    for (int n = 0; n < kValueBuffers; ++n) load_values(stage, n, values[n]);
    ptx::barrier_sync(kValueBarrier, kValueThreads);
    const int again = softmax.rises(buffer);
    load_probs(buffer, p);
    if (__builtin_expect(again, 0)) {
      softmax.raise(x, buffer);
      rescale();
      softmax.exponentiate(x, sum, buffer);
      ptx::barrier_sync(kValueBarrier, kValueThreads);
      load_probs(buffer, p);
    }
    softmax.set_sums(sum);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      multiply(n, values[n % kValueBuffers], p);
      if (n + kValueBuffers < kLoads) load_values(stage, n + kValueBuffers, values[n % kValueBuffers]);
      if (RowGroups <= kAheadUpTo && n == kLoads - kValueBuffers - 1) {
        published = softmax.next_published();
      }
    }
    arrive(bars.done(ring.slot), lane);
    ring.advance();
    return published;
  }

  // Calls store(row, scale, v) for each row this thread has latents of: v[m][which], see warp_latent(), is its share of
  // the row but for the factor `scale`.
  template <typename Store>
  __device__ void for_each_row(int valid_rows, Store store) const {
    const int t = ptx::lane_id() % 4;
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + 2 * t + c;
        if (row >= valid_rows) continue;
        const float sum = softmax.sum_of(row), scale = sum > 0.f ? __fdividef(a.p.kv_scale, sum) : 0.f;
        float v[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) v[m][0] = o[m][j][c], v[m][1] = o[m][j][c + 2];
        store(row, scale, v);
      }
    }
  }

  __device__ void store_output(int valid_rows, __nv_bfloat16* out_gmem) const {  // [rows][512]
    const int lane = ptx::lane_id();
    for_each_row(valid_rows, [&](int row, float scale, const float (&v)[kTiles][2]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int latent = warp * kColumns + warp_latent(Kv::kBytes == 1, lane, m, i);
          out_gmem[row * kLatentDim + latent] = __float2bfloat16(v[m][i] * scale);
        }
      }
    });
  }

  // As partial.cuh says: [rows][512] and [rows][32].
  __device__ void store_partial(int valid_rows, __half* out_gmem, uint8_t* exponent_gmem) const {
    static_assert(2 * kTiles == kShareLatents);
    const int share = warp * 8 + ptx::lane_id() / 4;
    for_each_row(valid_rows, [&](int row, float scale, const float (&v)[kTiles][2]) {
      float peak = 0.f;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) peak = fmaxf(peak, fmaxf(fabsf(v[m][0]), fabsf(v[m][1])));
      const uint32_t exponent = share_exponent(peak * scale);
      const float to_half = scale * units_of(exponent);
      uint32_t words[kTiles];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) words[m] = ptx::pack2<__half>(v[m][0] * to_half, v[m][1] * to_half);
      auto* to_gmem = reinterpret_cast<uint4*>(out_gmem + row * kLatentDim + share * kShareLatents);
      to_gmem[0] = {words[0], words[1], words[2], words[3]};
      to_gmem[1] = {words[4], words[5], words[6], words[7]};
      exponent_gmem[row * kRowShares + share] = exponent;
    });
  }

  // After a segment's last tile.
  __device__ void finish() {
    const Segment segment = this->segment();
    const int batch = segment.batch, first_row = this->first_row();
    const int valid_rows = min(q_len(a, batch) * a.p.heads - first_row, Cfg::kRows);
    softmax.share_sums();
    if (segment.whole()) {
      const int64_t row = int64_t(q_begin(a, batch)) * a.p.heads + first_row;
      softmax.store_lse(valid_rows, a.p.lse + row);
      store_output(valid_rows, static_cast<__nv_bfloat16*>(a.p.out) + row * kLatentDim);
    } else {
      const int64_t row = int64_t(partial_slot(a, blockIdx.x, segment.tile_begin > 0)) * kMaxRows;
      softmax.store_lse(valid_rows, a.ws.lse + row);
      store_partial(valid_rows, a.ws.out + row * kLatentDim, a.ws.exponent + row * kRowShares);
    }
  }

  __device__ void run() {
    bool published = false;
    int buffer = 0;
    do {
      const int batch = segment().batch, length = uniform(kv_len(a, batch));
      // Tiles that lie wholly in the prefix need no mask.
      const int plain_end = a.p.logit_cap > 0.f ? 0 : (length - min(uniform(q_len(a, batch)), length)) / kTileTokens;
      int tile = segment().tile_begin;
      clear();
#pragma unroll 1
      for (const int end = min(segment().tile_end, plain_end); tile < end; ++tile, buffer ^= 1) {
        published = process<false>(tile, buffer, published);
      }
#pragma unroll 1
      for (const int end = segment().tile_end; tile < end; ++tile, buffer ^= 1) {
        published = process<true>(tile, buffer, published);
      }
      finish();
    } while (next_segment());
  }
};

}  // namespace sm120::mla
