// The score warps: S^T = K . Q^T of a tile, and the copies of tiles to come.
#pragma once

#include "loader.cuh"

namespace sm120::mla {

template <typename Kv, int RowGroups>
struct ScoreRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kSteps = kHeadDim / Cfg::kColumnParts / 16;  // k16 steps of a warp's columns
  static constexpr int kPairs = (kSteps + 1) / 2;                   // of steps, whose keys are loaded together
  static constexpr int kKeyBuffers = 3;                             // pairs: two ahead of the one multiplied
  static constexpr int kGroups = (RowGroups + Cfg::kRowParts - 1) / Cfg::kRowParts;  // row groups of a warp
  static constexpr int kChains = kGroups == 1 ? 3 : kGroups <= 3 ? 2 : 1;  // sums kept apart: few rows wait on latency
  static constexpr bool kLateHandOver = RowGroups >= Kv::kLateHandOverFrom && RowGroups <= kAheadUpTo;
  // After which pair the last tile's scores are handed over, and the one before which a copy begins.
  static constexpr int kPublishAfter = kPairs / 6, kCopyFrom = kCopyFromFifths * kPairs / 5;

  // Partial S^T of a tile: (token lane / 4, + 8) x (row 2 (lane % 4), + 1) of each row group.
  using Partials = float[kChains][kGroups][4];

  const Args& a;
  char* smem;
  BarriersOf<Cfg> bars;
  int warp, lane;
  Loader<Kv, RowGroups> loader;
  uint32_t keys_smem;                 // this lane's place in the keys of stage 0
  uint32_t q[kSteps][kGroups][2];     // Q^T fragments
  Ring<Cfg::kStages> ring;            // stage to multiply next
  Ring<Cfg::kPartialBuffers> buffer;  // where the partials go that are handed over next
  bool landed = false;                // the stage, when last looked at

  __device__ ScoreRole(const Args& args, char* shared, BarriersOf<Cfg> barriers, const Work& work, int warp_, int lane_)
      : a(args),
        smem(shared),
        bars(barriers),
        warp(warp_),
        lane(lane_),
        loader(args, barriers, ptx::smem_addr(shared), work, warp_, lane_) {
    const int token = lane % 16;
    const uint32_t chunk = Kv::kBytes == 2 ? Cfg::chunk_at(token, 8 / Cfg::kColumnParts * column_part() + lane / 16)
                                           : Cfg::chunk_at(token, column_part()) + lane / 16 * Cfg::kBlockBytes;
    keys_smem = ptx::smem_addr(shared + Cfg::kStages0) + token * Cfg::kRowBytes + chunk;
  }

  // A warp's columns are 16 (32 where there are two parts) of every 64.
  __device__ int column_part() const { return warp % Cfg::kColumnParts; }
  __device__ int row_part() const { return Cfg::kRowParts == 1 ? 0 : warp / Cfg::kColumnParts; }
  // First column of a step, from the warp's first.
  static __device__ constexpr int column(int step) {
    return Cfg::kColumnParts == 4 ? Cfg::kBlockColumns * step : Cfg::kBlockColumns * (step / 2) + 16 * (step % 2);
  }

  __device__ void load_queries(int64_t first_row, int valid_rows) {
    const int g = lane / 4, t = lane % 4;
    // e4m3 is loaded in 16-bit pairs, so a thread's two fragment registers are four neighbouring columns.
    constexpr int kThreadStride = Kv::kBytes == 2 ? 2 : 4, kSecond = Kv::kBytes == 2 ? 8 : 2;
    const auto* base_gmem = static_cast<const __nv_bfloat16*>(a.p.q) + first_row * kHeadDim +
                            Cfg::kBlockColumns / Cfg::kColumnParts * column_part();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int row = 8 * (row_part() * kGroups + j) + g;
      const bool valid = row < min(valid_rows, Cfg::kRows);
      const auto* source_gmem = base_gmem + int64_t(row) * kHeadDim + kThreadStride * t;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t pair = valid ? *reinterpret_cast<const uint32_t*>(source_gmem + column(s) + kSecond * i) : 0u;
          if constexpr (Kv::kBytes == 1) {
            const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
            pair = ptx::pack2<__half>(fminf(fmaxf(v.x, -65504.f), 65504.f), fminf(fmaxf(v.y, -65504.f), 65504.f));
          }
          q[s][j][i] = pair;
        }
      }
    }
  }

  // K fragments of k16 steps 2 pair and 2 pair + 1 of this warp's columns, as stored.
  __device__ void load_keys(uint32_t stage_smem, int pair, uint32_t (&raw)[2][4]) const {
    const bool two_steps = 2 * pair + 1 < kSteps;
    if constexpr (Kv::kBytes == 2) {
#pragma unroll
      for (int i = 0; i < 1 + two_steps; ++i) {
        const int step = 2 * pair + i;  // with two parts, the second of a block is 2 chunks on: another bit of theirs
        ptx::ldmatrix_x4(raw[i], Cfg::kColumnParts == 4 ? stage_smem + step * Cfg::kBlockBytes
                                                        : (stage_smem ^ 32 * i) + pair * Cfg::kBlockBytes);
      }
    } else if (two_steps) {
      ptx::ldmatrix_x4(raw[0], stage_smem + 2 * pair * Cfg::kBlockBytes);
    } else {
      ptx::ldmatrix_x2(raw[0][0], raw[0][1], stage_smem + 2 * pair * Cfg::kBlockBytes);
    }
  }

  // Adds those steps' products to the partial S^T; the first step of a chain starts it.
  __device__ void multiply(int pair, const uint32_t (&raw)[2][4], Partials& s) const {
#pragma unroll
    for (int i = 0; i < 2 && 2 * pair + i < kSteps; ++i) {
      const int step = 2 * pair + i;
      uint32_t k[4];
      if constexpr (Kv::kBytes == 2) {
#pragma unroll
        for (int r = 0; r < 4; ++r) k[r] = raw[i][r];
      } else {
        ptx::e4m3x4_to_half2(raw[0][2 * i], k[0], k[2]);
        ptx::e4m3x4_to_half2(raw[0][2 * i + 1], k[1], k[3]);
      }
      auto& sums = s[step % kChains];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        if (step < kChains) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.f;
        ptx::mma_16816<Mma>(sums[j], k, q[step][j]);
      }
    }
  }

  // This warp's partials to shared memory, laid out as the value warps read them (see kUnits in config.h).
  template <int RowPart>
  __device__ void store(const Partials& s, char* to_smem) const {
    const auto sum = [&](int j, int c) {
      float total = s[0][j][c];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) total += s[chain][j][c];
      return total;
    };
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int group = RowPart * kGroups + j, narrow = group - Cfg::kWhole;
      if (group >= RowGroups) continue;
      if (narrow < 0) {
        reinterpret_cast<float4*>(to_smem)[(group * Cfg::kColumnParts + column_part()) * 32 + lane] = {
            sum(j, 0), sum(j, 1), sum(j, 2), sum(j, 3)};
      } else {
        auto* narrow_smem = reinterpret_cast<float2*>(to_smem + Cfg::kWideBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          narrow_smem[((2 * narrow + half) * Cfg::kColumnParts + column_part()) * 32 + lane] = {sum(j, 2 * half),
                                                                                                sum(j, 2 * half + 1)};
        }
      }
    }
  }

  __device__ bool partials_free() const {
    return ptx::mbarrier_test(bars.consumed(buffer.slot), buffer.parity ^ 1);  // a fresh barrier counts as consumed
  }

  // Hands a tile's partial scores to the value warps once their place is free: `free` if it was when looked at.
  __device__ void publish(const Partials& s, bool free) {
    if (__builtin_expect(!free, 0)) ptx::mbarrier_wait(bars.consumed(buffer.slot), buffer.parity ^ 1);
    char* to_smem = smem + Cfg::kPartials + buffer.slot * Cfg::kPartialBytes;
    if (Cfg::kRowParts == 1 || row_part() == 0) {
      store<0>(s, to_smem);
    } else {
      store<Cfg::kRowParts - 1>(s, to_smem);
    }
    arrive(bars.published(buffer.slot), lane);
    buffer.advance();
  }

  __device__ bool next_landed() const { return ptx::mbarrier_test(bars.landed(ring.slot), ring.parity); }

  // Partial scores of the next tile. Between its products the tile kAhead on is copied (`Copies`: sure that there is
  // one) and, with kLateHandOver, the previous tile's scores are handed over; else this tile's are in the end.
  template <bool Copies, bool HasPrevious>
  __device__ void score(Partials& s, const Partials& previous) {
    const uint32_t stage_smem = keys_smem + ring.slot * Cfg::kStageBytes;
    const Ring<Cfg::kStages> ahead = ring.plus(Cfg::kAhead);
    const bool copies = Copies || loader.left > 0;
    constexpr bool kPublishesPrevious = kLateHandOver && HasPrevious;
    constexpr int kCopyPairs = kPairs - 1 - kCopyFrom;
    uint32_t keys[kKeyBuffers][2][4];
    if (__builtin_expect(!__all_sync(~0u, landed), 0)) ptx::mbarrier_wait(bars.landed(ring.slot), ring.parity);
    load_keys(stage_smem, 0, keys[0]);
    load_keys(stage_smem, 1, keys[1]);
    bool free = true;
    if (kPublishesPrevious) free = partials_free();
    if (copies) loader.look(ahead);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair + 2 < kPairs) load_keys(stage_smem, pair + 2, keys[(pair + 2) % kKeyBuffers]);
      if (pair == kCopyFrom && copies) loader.begin(ahead);
      multiply(pair, keys[pair % kKeyBuffers], s);
      if (kPublishesPrevious && pair == kPublishAfter) publish(previous, free);
      if (copies && pair >= kCopyFrom && pair < kPairs - 1) {
        const int done = pair - kCopyFrom;
        loader.copy(ahead, loader.kCopies * done / kCopyPairs, loader.kCopies * (done + 1) / kCopyPairs);
      }
      if (pair == kPairs - 2) {
        if (copies) loader.arrive_when_landed(ahead);
        if (!kLateHandOver) free = partials_free();
        ring.advance();
        if (kLateHandOver) landed = next_landed();
      }
    }
    if (!kLateHandOver) {
      landed = next_landed();
      publish(s, free);
    }
    if (copies) loader.advance();
  }

  __device__ void score_tiles(int left) {
    Partials s;
#pragma unroll 1
    for (; left > 0 && loader.left > 0; --left) score<true, false>(s, s);
#pragma unroll 1
    for (; left > 0; --left) score<false, false>(s, s);
  }

  // The same with late hand-over: two tiles' scores take turns.
  __device__ void score_tiles_in_turn(int left) {
    Partials even, odd;
    score<false, false>(even, odd);
    --left;
#pragma unroll 1
    for (; left >= 2 && loader.left >= 2; left -= 2) {
      score<true, true>(odd, even);
      score<true, true>(even, odd);
    }
#pragma unroll 1
    for (; left >= 2; left -= 2) {
      score<false, true>(odd, even);
      score<false, true>(even, odd);
    }
    if (left == 1) score<false, true>(odd, even);
    if (left == 1) {
      publish(odd, false);
    } else {
      publish(even, false);
    }
  }

  __device__ void fill_pipeline() {
    for (int n = 0; n < Cfg::kAhead && loader.left > 0; ++n) {
      loader.look(ring.plus(n));
      loader.begin(ring.plus(n));
      loader.copy(ring.plus(n), 0, loader.kCopies);
      loader.arrive_when_landed(ring.plus(n));
      loader.advance();
    }
  }

  __device__ void run(Work work) {
    fill_pipeline();
    do {
      const Segment& segment = work.segment;
      const int first_row = work.row_tile * Cfg::kRows;
      load_queries(int64_t(q_begin(a, segment.batch)) * a.p.heads + first_row,
                   q_len(a, segment.batch) * a.p.heads - first_row);
      const int tiles = segment.tile_end - segment.tile_begin;
      if constexpr (kLateHandOver) {
        score_tiles_in_turn(tiles);
      } else {
        score_tiles(tiles);
      }
    } while (work.next(a));
  }
};

}  // namespace sm120::mla
