// Flash attention of absorbed MLA with split context, for GPUs whose tensor cores are driven by mma.sync.
//
// A block holds up to 48 query rows (new tokens x heads of one request) and walks the KV in tiles of 16 tokens. Both
// products are taken transposed, so that query rows are the mma's n dimension (granularity 8, not 16):
//
//   S^T [16 tokens x rows] = K [16 x 576] . Q^T [576 x rows]       score warps 0-3: 144 of the 576 columns each
//   O^T [512 x rows]      += V^T [512 x 16] . P^T [16 x rows]      value warps 0-3: 128 of the 512 latents each
//
//   gmem --cp.async (value warps)--> stage [16][576 + pad] --ldmatrix--> partial S^T, 4 of them
//        --(each row group's four partials meet in the warp that owns the group)--> online softmax --> probs [16][rows]
//        stage --ldmatrix.trans--> V^T,  probs --ldmatrix.trans--> P^T  --> O^T in registers
//
// Q^T lives in the score warps' registers, O^T in the value warps'. A latent row is copied to shared memory once and
// each of its elements is read once for the scores and once for the values, whatever the number of heads.
//
// The score warps take the products of tile n + 1 around the exchange and softmax of tile n, and the value warps are a
// tile or two behind: the tensor cores have work while partial sums and exponentials are under way.
//
// Barriers (mbarrier, phases counted by tile):
//   landed[stage]  value threads' copies      -> score warps
//   ready[3]       score warps' probabilities -> value warps
//   done[stage]    value warps                -> stage free for the next copy
//   exchanged[2]   score warps' partials      -> score warps
// probs[n % 3] needs no barrier of its own: it is free once tile n - 3 is done, and with 4 stages the landing of tile
// n + 1, which took that tile's stage, already proves it.
#include "ptx.cuh"
#include "work.cuh"

namespace sm120::mla {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kRescaleSlack = 8.0f;  // a row's reference may be exceeded by 2^8 before its accumulators are rescaled

template <int Stages>
struct Barriers {
  uint32_t base;
  __device__ uint32_t landed(int stage) const { return base + 8 * stage; }
  __device__ uint32_t done(int stage) const { return base + 8 * (Stages + stage); }
  __device__ uint32_t ready(int buffer) const { return base + 8 * (2 * Stages + buffer); }
  __device__ uint32_t exchanged(int half) const { return base + 8 * (2 * Stages + kProbBuffers + half); }
};

// A position in a ring of stages or buffers, advanced tile by tile.
template <int Slots>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++slot == Slots) slot = 0, parity ^= 1;
  }
};

// A warp's arrival, made by one lane for all. Race checkers follow only threads that arrive themselves: for them every lane
// can be made to (SM120_ALL_LANES_ARRIVE).
#ifdef SM120_ALL_LANES_ARRIVE
constexpr int kWarpArrivals = 32;
__device__ __forceinline__ void arrive(uint32_t mbar, int) { ptx::mbarrier_arrive(mbar); }
#else
constexpr int kWarpArrivals = 1;
__device__ __forceinline__ void arrive(uint32_t mbar, int lane) {
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(mbar);
}
#endif

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
  static constexpr int kPairs = (kSteps + 1) / 2;
  static constexpr int kOwned = Cfg::kOwnedGroups;            // warp w owns row groups w and w + 4

  const Args& a;
  char* smem;
  Barriers<Cfg::kStages> bars;
  int warp, lane;
  uint32_t q[kSteps][RowGroups][2];                           // Q^T fragments

  // Partial S^T of a tile: (token lane / 4, + 8) x (row 2 (lane % 4), + 1) of each row group. Two take turns, so that the
  // products of one tile need not wait until the other's have been read out.
  using Partials = float[RowGroups][4];

  // Softmax state of the owned groups' two rows of this thread, log2 units. The sum is this thread's share.
  float reference[kOwned][2], row_sum[kOwned][2];

  uint32_t stages;
  int batch, length, first_row;                               // of the current segment
  Ring<Cfg::kStages> next;                                    // stage to multiply next
  Ring<kProbBuffers> buffer;                                  // where the next probabilities go
  int exchange = 0;                                           // which half of the partials
  int tiles_done = 0;

  __device__ int owned(int i) const { return warp + kScoreWarps * i; }

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

  // K fragments of k16 steps 2 pair and 2 pair + 1 of this warp's columns, as stored.
  __device__ void load_keys(uint32_t stage, int pair, uint32_t (&raw)[2][4]) const {
    const uint32_t tokens =
        stage + (lane % 16) * Cfg::kRowStride + warp * (Cfg::kRowBytes / kScoreWarps) + pair * 32 * Kv::kBytes;
    const bool two_steps = 2 * pair + 1 < kSteps;
    if constexpr (Kv::kBytes == 2) {
      ptx::ldmatrix_x4(raw[0], tokens + lane / 16 * 16);
      if (two_steps) ptx::ldmatrix_x4(raw[1], tokens + lane / 16 * 16 + 32);
    } else if (two_steps) {
      ptx::ldmatrix_x4(raw[0], tokens + lane / 16 * 16);
    } else {
      ptx::ldmatrix_x2(raw[0][0], raw[0][1], tokens);
    }
  }

  // Adds those steps' products to the partial S^T; the first pair starts it.
  __device__ void multiply(int pair, const uint32_t (&raw)[2][4], Partials& s) const {
    if (pair == 0) {
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2 && 2 * pair + i < kSteps; ++i) {
      uint32_t k[4];
      if constexpr (Kv::kBytes == 2) {
#pragma unroll
        for (int r = 0; r < 4; ++r) k[r] = raw[i][r];
      } else {
        k[0] = ptx::e4m3x2_to_half2(raw[0][2 * i]), k[1] = ptx::e4m3x2_to_half2(raw[0][2 * i + 1]);
        k[2] = ptx::e4m3x2_to_half2(raw[0][2 * i] >> 16), k[3] = ptx::e4m3x2_to_half2(raw[0][2 * i + 1] >> 16);
      }
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(s[j], k, q[2 * pair + i][j]);
    }
  }

  // Partials of row group j: slot 0..2 for the three warps that do not own it, a float4 a lane.
  __device__ float4* partial(int j, int slot) const {
    return reinterpret_cast<float4*>(smem + Cfg::kPartials + exchange * Cfg::kPartialBytes) + (j * 3 + slot) * 32 + lane;
  }

  // Sends the partials of other warps' groups to their owners; own[] keeps the rest, -inf where there is no i-th group.
  __device__ void send_partials(const Partials& s, float (&own)[kOwned][4]) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) own[i][0] = own[i][1] = own[i][2] = own[i][3] = -INFINITY;
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const bool mine = ((warp - j) & 3) == 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) own[j / 4][c] = mine ? s[j][c] : own[j / 4][c];
    }
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const int distance = (warp - j) & 3;                    // 0: own group
      if (distance != 0) *partial(j, distance - 1) = {s[j][0], s[j][1], s[j][2], s[j][3]};
    }
  }

  __device__ void receive_partials(float (&own)[kOwned][4]) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (owned(i) >= RowGroups) continue;
#pragma unroll
      for (int slot = 0; slot < 3; ++slot) {
        const float4 v = *partial(owned(i), slot);
        own[i][0] += v.x, own[i][1] += v.y, own[i][2] += v.z, own[i][3] += v.w;
      }
    }
  }

  // Hides what a row may not see among the request's own new tokens.
  __device__ void mask(float (&x)[kOwned][4], int tile) const {
    const int queries = q_len(a, batch), new_tokens = min(queries, length);
    const int first_new = tile * kTileTokens + lane / 4 - (length - new_tokens);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = min(first_row + 8 * owned(i) + 2 * (lane % 4) + c % 2, queries * a.p.heads - 1);
        const int token = row / a.p.heads, j = first_new + 8 * (c / 2);
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

  // Moves the references of the owned rows that have risen by more than the slack. Rare: nothing is exchanged otherwise.
  __device__ void raise_references(const float (&x)[kOwned][4]) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float peak = fmaxf(x[i][c], x[i][c + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
        const bool rises = peak > reference[i][c] + kRescaleSlack;
        const float factor = rises ? ptx::exp2_approx(reference[i][c] - peak) : 1.f;  // 0 if the row saw nothing yet
        if (rises) reference[i][c] = peak;
        row_sum[i][c] *= factor;
        if (lane < 4 && owned(i) < RowGroups) {
          reinterpret_cast<float*>(smem + Cfg::kRescale)[buffer.slot * Cfg::kRows + 8 * owned(i) + 2 * lane + c] = factor;
        }
      }
    }
  }

  __device__ void exponentiate(const float (&x)[kOwned][4], float (&prob)[kOwned][4]) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float r = reference[i][c % 2];
        prob[i][c] = ptx::exp2_approx(x[i][c] - (r == -INFINITY ? 0.f : r));
      }
    }
  }

  // Online softmax of the owned rows' logits (log2 units): probabilities to shared memory.
  __device__ void softmax(const float (&x)[kOwned][4]) {
    float prob[kOwned][4];
    exponentiate(x, prob);                                    // right unless a reference has to rise
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      exceeds |= fmaxf(x[i][0], x[i][2]) > reference[i][0] + kRescaleSlack;
      exceeds |= fmaxf(x[i][1], x[i][3]) > reference[i][1] + kRescaleSlack;
    }
    const bool raises = __any_sync(~0u, exceeds);
    if (__builtin_expect(raises, 0)) {
      raise_references(x);
      exponentiate(x, prob);
    }
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      row_sum[i][0] += prob[i][0] + prob[i][2];
      row_sum[i][1] += prob[i][1] + prob[i][3];
      if (owned(i) < RowGroups) {
        char* at = smem + Cfg::kProbs + buffer.slot * Cfg::kProbBytes + lane / 4 * Cfg::kProbStride + owned(i) * 16 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(at) = ptx::pack2<Mma>(prob[i][0], prob[i][1]);
        *reinterpret_cast<uint32_t*>(at + 8 * Cfg::kProbStride) = ptx::pack2<Mma>(prob[i][2], prob[i][3]);
        if (lane == 0) reinterpret_cast<uint8_t*>(smem + Cfg::kFlags)[buffer.slot * 8 + owned(i)] = raises;
      }
    }
  }

  // After a segment's last tile: the divisors for the value warps, and the log-sum-exps.
  __device__ void finish(const Segment& segment) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = row_sum[i][c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int row = 8 * owned(i) + 2 * (lane % 4) + c;
        if (lane >= 4 || row >= Cfg::kRows) continue;
        reinterpret_cast<float*>(smem + Cfg::kInverseSum)[buffer.slot * Cfg::kRows + row] =
            sum > 0.f ? a.p.kv_scale / sum : 0.f;
        if (first_row + row >= q_len(a, batch) * a.p.heads) continue;
        const float lse = sum > 0.f ? (reference[i][c] + log2f(sum)) * kLn2 : -INFINITY;
        if (segment.whole()) {
          a.p.lse[int64_t(q_begin(a, batch)) * a.p.heads + first_row + row] = lse;
        } else {
          a.ws.lse[int64_t(partial_slot(a, blockIdx.x, segment.tile_begin > 0)) * kMaxRows + row] = lse;
        }
      }
    }
  }

  // probs[buffer] was last used by the tile three back from this one: four back from the next.
  __device__ void wait_probs_free() const {
    const bool wrapped = next.slot < 4;
    if (tiles_done >= 3) ptx::mbarrier_wait(bars.done(next.slot - 4 + (wrapped ? Cfg::kStages : 0)), next.parity ^ wrapped);
  }

  __device__ void wait_landed() const { ptx::mbarrier_wait(bars.landed(next.slot), next.parity); }

  // Exchange and softmax of `tile`, whose partials are in s, with the products of the next tile around them.
  template <bool HasNext, bool Plain>
  __device__ void step(const Segment& segment, int tile, const Partials& s, Partials& s_next) {
    float x[kOwned][4];
    uint32_t keys[2][2][4];                                   // loaded a pair of steps ahead of their products
    const uint32_t stage = stages + next.slot * Cfg::kStageBytes;
    if (!HasNext || Cfg::kStages > 4) wait_probs_free();
    if constexpr (HasNext) {
      wait_landed();
      load_keys(stage, 0, keys[0]);
    }
    send_partials(s, x);
    arrive(bars.exchanged(exchange), lane);
    if constexpr (HasNext) {
      load_keys(stage, 1, keys[1]);
      multiply(0, keys[0], s_next);
      load_keys(stage, 2, keys[0]);
      multiply(1, keys[1], s_next);
    }
    ptx::mbarrier_wait(bars.exchanged(exchange), (tiles_done / 2) & 1);
    receive_partials(x);
    exchange ^= 1;
    if constexpr (HasNext) {
#pragma unroll
      for (int pair = 2; pair < kPairs; ++pair) {
        if (pair + 1 < kPairs) load_keys(stage, pair + 1, keys[(pair + 1) % 2]);
        multiply(pair, keys[pair % 2], s_next);
      }
      next.advance();
    }
    const float scale = a.p.sm_scale * a.p.kv_scale;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (Plain || a.p.logit_cap <= 0.f) {
          x[i][c] *= scale * kLog2e;
        } else {
          x[i][c] = soft_cap(x[i][c] * scale, a.p.logit_cap) * kLog2e;
        }
      }
    }
    if constexpr (!Plain) mask(x, tile);
    softmax(x);
    if constexpr (!HasNext) finish(segment);
    arrive(bars.ready(buffer.slot), lane);
    buffer.advance();
    ++tiles_done;
  }

  __device__ void run(Work work) {
    stages = ptx::smem_addr(smem + Cfg::kStages0);
    first_row = work.row_tile * Cfg::kRows;
    do {
      const Segment& segment = work.segment;
      batch = segment.batch;
      length = kv_len(a, batch);
      const int queries = q_len(a, batch), prefix = length - min(queries, length);
      load_queries(int64_t(q_begin(a, batch)) * a.p.heads + first_row, queries * a.p.heads - first_row);
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        reference[i][0] = reference[i][1] = -INFINITY;
        row_sum[i][0] = row_sum[i][1] = 0.f;
      }
      Partials even, odd;
      wait_landed();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t keys[2][4];
        load_keys(stages + next.slot * Cfg::kStageBytes, pair, keys);
        multiply(pair, keys, even);
      }
      next.advance();
      // Tiles that lie wholly in the prefix need no mask.
      const int plain_end = a.p.logit_cap > 0.f ? 0 : min(prefix / kTileTokens, segment.tile_end - 1);
      int tile = segment.tile_begin;
#pragma unroll 1
      for (; tile + 1 < plain_end; tile += 2) {
        step<true, true>(segment, tile, even, odd);
        step<true, true>(segment, tile + 1, odd, even);
      }
#pragma unroll 1
      for (; tile < segment.tile_end - 1; ++tile) {
        step<true, false>(segment, tile, even, odd);
#pragma unroll
        for (int j = 0; j < RowGroups; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) even[j][c] = odd[j][c];
        }
      }
      step<false, false>(segment, tile, even, odd);
    } while (work.next(a));
  }
};

// ---------------------------------------------------------------------------------------------------- value warps ----

// Copies KV rows, a tile at a time, ahead of their use; 8 lanes a token, 4 tokens a warp. Slots are read 8 tiles at a
// time, a lane per (tile, token of the warp), and a batch ahead, so that inside a segment their latency is not waited for.
template <typename Kv, int RowGroups>
struct Loader {
  using Cfg = Config<Kv, RowGroups>;
  static constexpr int kWarpTokens = kTileTokens / kValueWarps, kBatchTiles = 32 / kWarpTokens;
  static constexpr int kLanes = 32 / kWarpTokens, kChunks = Cfg::kRowBytes / 16;

  const Args& a;
  Barriers<Cfg::kStages> bars;
  Work work;
  int warp, lane;
  int left;                                                   // tiles still to issue
  int batch_left;                                             // of them, whose slots are here
  int from;                                                   // lane that holds the next tile's slot of this thread's token
  int batch_tile;                                             // first tile of the batch
  int length, slots_now, slots_next;                          // of the current segment; this lane's slots
  const int32_t* slots;
  const char* pool;                                           // kv, at this lane's piece of a row
  uint32_t target;                                            // this thread's place in stage 0
  Ring<Cfg::kStages> ring;

  __device__ Loader(const Args& args, Barriers<Cfg::kStages> barriers, uint32_t stages, const Work& w, int thread)
      : a(args), bars(barriers), work(w), warp(thread / 32), lane(thread % 32), left(w.left) {
    pool = static_cast<const char*>(a.p.kv) + lane % kLanes * 16;
    target = stages + (warp * kWarpTokens + lane / kLanes) * Cfg::kRowStride + lane % kLanes * 16;
    enter_segment();
  }

  __device__ void enter_segment() {
    const int batch = work.segment.batch;
    length = kv_len(a, batch);
    slots = a.p.req_to_token +
            int64_t(a.p.req_pool_indices[int64_t(batch) * a.p.req_pool_indices_stride]) * a.p.req_to_token_stride;
    slots_next = fetch_slot(work.segment.tile_begin);
    batch_tile = work.segment.tile_begin - kBatchTiles;
    next_batch();
  }

  // Past the end the last token again: finite values, whose probability is 0.
  __device__ int fetch_slot(int first_tile) const {
    const int at = (first_tile + lane / kWarpTokens) * kTileTokens + warp * kWarpTokens + lane % kWarpTokens;
    return slots[min(at, length - 1)];
  }

  __device__ void next_batch() {
    batch_tile += kBatchTiles;
    slots_now = slots_next;
    slots_next = fetch_slot(batch_tile + kBatchTiles);
    batch_left = min(work.segment.tile_end - batch_tile, kBatchTiles);
    from = lane / kLanes;
  }

  // Issues the next tile's copy into its stage, once the value warps have left it.
  __device__ void issue() {
    if (left == 0) return;
    const int slot = __shfl_sync(~0u, slots_now, from);
    ptx::mbarrier_wait(bars.done(ring.slot), ring.parity ^ 1);  // a fresh barrier counts as done
    const char* source = pool + uint64_t(uint32_t(slot)) * uint32_t(a.p.kv_stride_bytes);
    const uint32_t to = target + ring.slot * Cfg::kStageBytes;
#pragma unroll
    for (int i = 0; i < kChunks / kLanes; ++i) ptx::cp_async_16(to + i * kLanes * 16, source + i * kLanes * 16);
    if constexpr (kChunks % kLanes != 0) {
      constexpr int kDone = kChunks / kLanes * kLanes * 16;
      if (lane % kLanes < kChunks % kLanes) ptx::cp_async_16(to + kDone, source + kDone);
    }
    ptx::cp_async_arrive(bars.landed(ring.slot));
    ring.advance();
    from += kWarpTokens;
    --left;
    if (--batch_left > 0 || left == 0) return;
    if (batch_tile + kBatchTiles < work.segment.tile_end) {
      next_batch();
    } else {
      work.next(a);
      enter_segment();
    }
  }
};

template <typename Kv, int RowGroups>
struct ValueRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kColumns = kLatentDim / kValueWarps, kTiles = kColumns / 16;  // of a warp; its m16 tiles

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
  __device__ void scale_group(int j, const float* factors) {
    const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (lane % 4));
#pragma unroll
    for (int m = 0; m < kTiles; ++m) o[m][j][0] *= f.x, o[m][j][1] *= f.y, o[m][j][2] *= f.x, o[m][j][3] *= f.y;
  }

  // P^T fragments: tokens 0-7 and 8-15 of row group j.
  __device__ void load_probs(uint32_t probs, uint32_t (&p)[RowGroups][2]) const {
    const uint32_t address = probs + lane % 16 * Cfg::kProbStride;
#pragma unroll
    for (int j = 0; j + 1 < RowGroups; j += 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, address + (j + lane / 16) * 16);
      p[j][0] = r[0], p[j][1] = r[1], p[j + 1][0] = r[2], p[j + 1][1] = r[3];
    }
    if constexpr (RowGroups % 2 == 1) {
      ptx::ldmatrix_x2_trans(p[RowGroups - 1][0], p[RowGroups - 1][1], address + (RowGroups - 1) * 16);
    }
  }

  // V^T of m-tiles m and m + 1, as stored.
  __device__ void load_values(uint32_t stage, int m, uint32_t (&raw)[2][4]) const {
    if constexpr (Kv::kBytes == 2) {
      const uint32_t address =
          stage + (lane % 8 + lane / 16 * 8) * Cfg::kRowStride + warp * kColumns * 2 + (lane / 8 % 2) * 16;
      ptx::ldmatrix_x4_trans(raw[0], address + m * 32);
      ptx::ldmatrix_x4_trans(raw[1], address + m * 32 + 32);
    } else {
      ptx::ldmatrix_x4_trans(raw[0], stage + (lane % 16) * Cfg::kRowStride + warp * kColumns + lane / 16 * 16 + m * 16);
    }
  }

  // Adds m-tiles m and m + 1 of V^T P^T.
  __device__ void multiply(int m, const uint32_t (&raw)[2][4], const uint32_t (&p)[RowGroups][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t v[4];
      if constexpr (Kv::kBytes == 2) {
#pragma unroll
        for (int r = 0; r < 4; ++r) v[r] = raw[i][r];
      } else {
        // A transposed pair of e4m3 is two latents of one token; byte_perm gathers one latent of two tokens.
        const uint32_t low = raw[0][2 * i], high = raw[0][2 * i + 1];
        v[0] = ptx::e4m3x2_to_half2(__byte_perm(low, 0, 0x20)), v[1] = ptx::e4m3x2_to_half2(__byte_perm(low, 0, 0x31));
        v[2] = ptx::e4m3x2_to_half2(__byte_perm(high, 0, 0x20)), v[3] = ptx::e4m3x2_to_half2(__byte_perm(high, 0, 0x31));
      }
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(o[m + i][j], v, p[j]);
    }
  }

  // Latent column of accumulator rows lane / 4 (which = 0) and lane / 4 + 8 (which = 1) of m-tile m.
  __device__ int latent(int m, int which) const {
    const int g = lane / 4;
    return warp * kColumns + m * 16 + (Kv::kBytes == 2 ? g + 8 * which : 2 * g + which);
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
    Ring<Cfg::kStages> ring;
    Ring<kProbBuffers> buffer;
    do {
      const Segment& segment = work.segment;
      clear();
#pragma unroll 1
      for (int tile = segment.tile_begin; tile < segment.tile_end; ++tile) {
        loader.issue();
        ptx::mbarrier_wait(bars.ready(buffer.slot), buffer.parity);
        uint32_t p[RowGroups][2];
        load_probs(probs + buffer.slot * Cfg::kProbBytes, p);
        const uint64_t flags = reinterpret_cast<const uint64_t*>(smem + Cfg::kFlags)[buffer.slot];
        const uint32_t stage = stages + ring.slot * Cfg::kStageBytes;
        uint32_t values[2][2][4];                             // loaded two m-tiles ahead of their products
        load_values(stage, 0, values[0]);
        if (__builtin_expect(flags != 0, 0)) {
          const float* factors = reinterpret_cast<const float*>(smem + Cfg::kRescale) + buffer.slot * Cfg::kRows;
#pragma unroll
          for (int j = 0; j < RowGroups; ++j) {
            if (flags >> (8 * j) & 0xff) scale_group(j, factors);
          }
        }
#pragma unroll
        for (int m = 0; m < kTiles; m += 2) {
          if (m + 2 < kTiles) load_values(stage, m + 2, values[(m / 2 + 1) % 2]);
          multiply(m, values[m / 2 % 2], p);
        }
        if (__builtin_expect(tile + 1 == segment.tile_end, 0)) {
          const float* factors = reinterpret_cast<const float*>(smem + Cfg::kInverseSum) + buffer.slot * Cfg::kRows;
#pragma unroll
          for (int j = 0; j < RowGroups; ++j) scale_group(j, factors);
        }
        arrive(bars.done(ring.slot), lane);
        ring.advance();
        buffer.advance();
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
      ptx::mbarrier_init(bars.done(stage), kValueWarps * kWarpArrivals);
    }
    for (int n = 0; n < kProbBuffers; ++n) ptx::mbarrier_init(bars.ready(n), kScoreWarps * kWarpArrivals);
    for (int half = 0; half < 2; ++half) ptx::mbarrier_init(bars.exchanged(half), kScoreWarps * kWarpArrivals);
  }
  ptx::launch_dependents();                                   // the merge may be set up; it waits for this grid to end
  if (threadIdx.x < kProbBuffers * 8) reinterpret_cast<uint8_t*>(smem + Cfg::kFlags)[threadIdx.x] = 0;
  const Work work = locate_work(a, Cfg::kRows);
  __syncthreads();
  if (work.left == 0) return;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
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
