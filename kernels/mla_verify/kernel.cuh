// Flash attention of absorbed MLA with split context, for GPUs whose tensor cores are driven by mma.sync.
//
// A block holds up to 48 query rows (new tokens x heads of one request) and walks the KV in tiles of 16 tokens. Both
// products are taken transposed, so that query rows are the mma's n dimension (granularity 8, not 16):
//
//   S^T [16 tokens x rows] = K [16 x 576] . Q^T [576 x rows]       score warps 0-3: 144 of the 576 columns each, 16 of
//   every 64 O^T [512 x rows]      += V^T [512 x 16] . P^T [16 x rows]      value warps 0-3: 128 of the 512 latents
//   each
//
//   gmem --cp.async (score warps)--> stage [16][576], permuted --ldmatrix--> partial S^T, 4 of them
//        --(value warps: sum, online softmax, each a quarter of them)--> probs [16][rows]
//        stage --ldmatrix.trans--> V^T,  probs --ldmatrix.trans--> P^T  --> O^T in registers
//
// Q^T lives in the score warps' registers, O^T in the value warps'. A latent row is copied to shared memory once and
// each of its elements is read once for the scores and once for the values, whatever the number of heads.
//
// A scheduler holds one warp of each role. While the value warp goes through its softmax, a chain of dependent steps
// that keeps nothing busy, the score warp multiplies the next tile; it issues copies between products.
//
// Barriers (mbarrier, phases counted by tile):
//   landed[stage]        score threads' copies  -> score warps
//   published[1 or 2]    score warps' partials  -> value warps
//   consumed[1 or 2]     value warps            -> partials free
//   done[stage]          value warps            -> stage free for the next copy
// and a named barrier of the value warps for the probabilities, which also says whether any row's reference must rise.
#include "ptx.cuh"
#include "work.cuh"
namespace sm120::mla {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kRescaleSlack = 8.0f;  // a row's reference may be exceeded by 2^8 before its accumulators are rescaled

constexpr float kNoReference = -1e30f;  // of a row that has seen nothing: finite, so that no difference is NaN
constexpr int kValueBarrier = 1;        // named barrier of the value warps

template <int Stages, int PartialBuffers>
struct Barriers {
  uint32_t base;
  __device__ uint32_t landed(int stage) const { return base + 8 * stage; }
  __device__ uint32_t done(int stage) const { return base + 8 * (Stages + stage); }
  __device__ uint32_t published(int buffer) const { return base + 8 * (2 * Stages + buffer); }
  __device__ uint32_t consumed(int buffer) const { return base + 8 * (2 * Stages + PartialBuffers + buffer); }
};

template <typename Cfg>
using BarriersOf = Barriers<Cfg::kStages, Cfg::kPartialBuffers>;

// A position in a ring of stages or buffers: its place there, and the parity of its round.
template <int Slots>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ Ring plus(int n) const {  // n < Slots
    const int sum = slot + n;
    return sum < Slots ? Ring{sum, parity} : Ring{sum - Slots, parity ^ 1};
  }
  __device__ void advance() { *this = plus(1); }
  static __device__ Ring after(int n) { return {n % Slots, uint32_t(n / Slots % 2)}; }  // n positions from the first
};

// A warp's arrival, made by one lane for all. Race checkers follow only threads that arrive themselves: for them every
// lane can be made to (SM120_ALL_LANES_ARRIVE).
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

// Copies KV rows, a tile at a time, ahead of their use; 8 lanes a token, 4 tokens a warp. Slots too are copied to
// shared memory, a warp for itself, 8 tiles at a time, a lane per (tile, token of the warp), and two batches ahead: a
// load into a register would make the warp wait for it at the next barrier, for the two share a scoreboard.
template <typename Kv, int RowGroups>
struct Loader {
  using Cfg = Config<Kv, RowGroups>;
  static constexpr int kWarpTokens = kTileTokens / kScoreWarps, kBatchTiles = kSlotBatchTiles;
  static constexpr int kLanes = 32 / kWarpTokens, kChunks = Cfg::kRowBytes / 16;
  static constexpr int kCopies = (kChunks + kLanes - 1) / kLanes;  // of a thread, for one tile

  const Args& a;
  BarriersOf<Cfg> bars;
  Work work;
  int warp, lane;
  int left;              // tiles still to issue
  int batch_left;        // of them, whose slots are here
  int batch_tile;        // first tile of the batch
  int length;            // of the current segment
  const int32_t* slots;  // of its tokens
  uint32_t slot_ring;    // shared: this lane's place in the first batch of slots
  uint32_t slot_from;    // shared: the next tile's slot of this thread's token
  int batch_slot = 0;    // place of the current batch in the ring
  const char* pool;      // kv, at this lane's piece of a row
  const char* source;    // of the tile under way, at this lane's piece of its row
  uint32_t target;       // this thread's place in stage 0

  __device__ Loader(const Args& args, BarriersOf<Cfg> barriers, uint32_t stages, const Work& w, int warp_, int lane_)
      : a(args), bars(barriers), work(w), warp(warp_), lane(lane_), left(w.left) {
    slot_ring = stages - Cfg::kStages0 + Cfg::kSlots + (warp * 32 + lane) * 4;
    pool = static_cast<const char*>(a.p.kv) + lane % kLanes * 16;
    const int token = warp * kWarpTokens + lane / kLanes;
    target = stages + token * Cfg::kRowBytes + Cfg::chunk_at(token, lane % kLanes);
    enter_segment();
  }

  __device__ void enter_segment() {
    const int batch = work.segment.batch;
    length = kv_len(a, batch);
    slots = a.p.req_to_token +
            int64_t(a.p.req_pool_indices[int64_t(batch) * a.p.req_pool_indices_stride]) * a.p.req_to_token_stride;
    batch_tile = work.segment.tile_begin;
    ptx::cp_async_wait_all();  // the last segment's look-ahead went to the same places
    fetch_slots(batch_tile, batch_slot);
    fetch_slots(batch_tile + kBatchTiles, (batch_slot + 1) % kSlotBatches);
    ptx::cp_async_wait_all();
    __syncwarp();
    begin_batch();
  }

  // Past the end the last token again: finite values, whose probability is 0.
  __device__ void fetch_slots(int first_tile, int to) const {
    const int at = (first_tile + lane / kWarpTokens) * kTileTokens + warp * kWarpTokens + lane % kWarpTokens;
    ptx::cp_async_4(slot_ring + to * kSlotBatchBytes, slots + min(at, length - 1));
  }

  // The batch after the next is fetched now: it has landed once any tile issued from here on has.
  __device__ void begin_batch() {
    fetch_slots(batch_tile + 2 * kBatchTiles, (batch_slot + 2) % kSlotBatches);
    batch_left = min(work.segment.tile_end - batch_tile, kBatchTiles);
    slot_from = slot_ring + batch_slot * kSlotBatchBytes + (lane / kLanes - lane) * 4;
  }

  // Begins the next tile, once its stage is free.
  __device__ void begin(Ring<Cfg::kStages> ring) {
    const int slot = ptx::load_shared(slot_from);
    ptx::mbarrier_wait(bars.done(ring.slot), ring.parity ^ 1);  // a fresh barrier counts as done
    source = pool + uint64_t(uint32_t(slot)) * uint32_t(a.p.kv_stride_bytes);
  }

  // This thread's copies `first` to `last` - 1 of the tile.
  __device__ void copy(Ring<Cfg::kStages> ring, int first, int last) const {
    const uint32_t to = target + ring.slot * Cfg::kStageBytes;
#pragma unroll
    for (int i = first; i < last; ++i) {
      if ((i + 1) * kLanes <= kChunks || lane % kLanes < kChunks % kLanes) {
        ptx::cp_async_16(to + i * kLanes * 16, source + i * kLanes * 16);
      }
    }
  }

  __device__ void end(Ring<Cfg::kStages> ring) {
    ptx::cp_async_arrive(bars.landed(ring.slot));
    slot_from += kWarpTokens * 4;
    --left;
    if (--batch_left > 0 || left == 0) return;
    __syncwarp();  // the batch's slots have been read
    if (batch_tile + kBatchTiles < work.segment.tile_end) {
      batch_tile += kBatchTiles;
      batch_slot = (batch_slot + 1) % kSlotBatches;
      begin_batch();
    } else {
      work.next(a);
      enter_segment();
    }
  }
};

template <typename Kv, int RowGroups>
struct ScoreRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kSteps = kHeadDim / kScoreWarps / 16;  // k16 steps of a warp's column quarter
  static constexpr int kPairs = (kSteps + 1) / 2;
  static constexpr int kChains = RowGroups == 1   ? 3
                                 : RowGroups <= 3 ? 2
                                                  : 1;  // sums kept apart: few rows wait on latency

  // Partial S^T of a tile: (token lane / 4, + 8) x (row 2 (lane % 4), + 1) of each row group.
  using Partials = float[kChains][RowGroups][4];

  const Args& a;
  char* smem;
  BarriersOf<Cfg> bars;
  int warp, lane;
  Loader<Kv, RowGroups> loader;
  uint32_t keys_at;                  // this lane's place in the keys of stage 0
  uint32_t q[kSteps][RowGroups][2];  // Q^T fragments

  __device__ ScoreRole(const Args& args, char* shared, BarriersOf<Cfg> barriers, const Work& work, int warp_, int lane_)
      : a(args),
        smem(shared),
        bars(barriers),
        warp(warp_),
        lane(lane_),
        loader(args, barriers, ptx::smem_addr(shared + Cfg::kStages0), work, warp_, lane_),
        keys_at(ptx::smem_addr(shared + Cfg::kStages0) + lane_ % 16 * Cfg::kRowBytes +
                (Kv::kBytes == 2 ? Cfg::chunk_at(lane_ % 16, 2 * warp_ + lane_ / 16)
                                 : Cfg::chunk_at(lane_ % 16, warp_) + lane_ / 16 * Cfg::kBlockBytes)) {}

  __device__ void load_queries(int64_t first_row, int valid_rows) {
    const int g = lane / 4, t = lane % 4;
    // e4m3 is loaded in 16-bit pairs, so a thread's two fragment registers are four neighbouring columns.
    constexpr int kThreadStride = Kv::kBytes == 2 ? 2 : 4, kSecond = Kv::kBytes == 2 ? 8 : 2;
    const auto* base = static_cast<const __nv_bfloat16*>(a.p.q) + first_row * kHeadDim + warp * 16;
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const bool valid = 8 * j + g < valid_rows;
      const auto* source = base + int64_t(8 * j + g) * kHeadDim + kThreadStride * t;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t pair =
              valid ? *reinterpret_cast<const uint32_t*>(source + Cfg::kBlockColumns * s + kSecond * i) : 0u;
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
  __device__ void load_keys(uint32_t at, int pair, uint32_t (&raw)[2][4]) const {
    const uint32_t columns = at + pair * 2 * Cfg::kBlockBytes;
    const bool two_steps = 2 * pair + 1 < kSteps;
    if constexpr (Kv::kBytes == 2) {
      ptx::ldmatrix_x4(raw[0], columns);
      if (two_steps) ptx::ldmatrix_x4(raw[1], columns + Cfg::kBlockBytes);
    } else if (two_steps) {
      ptx::ldmatrix_x4(raw[0], columns);
    } else {
      ptx::ldmatrix_x2(raw[0][0], raw[0][1], columns);
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
        k[0] = ptx::e4m3x2_to_half2(raw[0][2 * i]), k[1] = ptx::e4m3x2_to_half2(raw[0][2 * i + 1]);
        k[2] = ptx::e4m3x2_to_half2(raw[0][2 * i] >> 16), k[3] = ptx::e4m3x2_to_half2(raw[0][2 * i + 1] >> 16);
      }
      auto& sums = s[step % kChains];
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) {
        if (step < kChains) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.f;
        ptx::mma_16816<Mma>(sums[j], k, q[step][j]);
      }
    }
  }

  // Hands a tile's partial scores to the value warps, laid out as they read them (see kUnits in config.h).
  __device__ void publish(const Partials& s, Ring<Cfg::kPartialBuffers> buffer) {
    ptx::mbarrier_wait(bars.consumed(buffer.slot), buffer.parity ^ 1);
    char* to = smem + Cfg::kPartials + buffer.slot * Cfg::kPartialBytes;
    const auto sum = [&](int j, int c) {
      float total = s[0][j][c];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) total += s[chain][j][c];
      return total;
    };
#pragma unroll
    for (int v = 0; v < kValueWarps; ++v) {
      const int at = (v * kScoreWarps + warp) * 32 + lane;
      if (Cfg::kWhole > v) reinterpret_cast<float4*>(to)[at] = {sum(v, 0), sum(v, 1), sum(v, 2), sum(v, 3)};
      const int j = Cfg::kWhole + v / 2, c = v % 2 * 2;
      if (j < RowGroups) reinterpret_cast<float2*>(to + Cfg::kWideBytes)[at] = {sum(j, c), sum(j, c + 1)};
    }
    arrive(bars.published(buffer.slot), lane);
  }

  // Scores of a tile, handed over; the tile kAhead on is copied between the products.
  __device__ void score(Ring<Cfg::kStages> ring, Ring<Cfg::kPartialBuffers> buffer) {
    const uint32_t stage = keys_at + ring.slot * Cfg::kStageBytes;
    const Ring<Cfg::kStages> ahead = ring.plus(Cfg::kAhead);
    const bool copies = loader.left > 0;
    uint32_t keys[2][2][4];  // loaded a pair of steps ahead of their products
    Partials s;
    ptx::mbarrier_wait(bars.landed(ring.slot), ring.parity);
    load_keys(stage, 0, keys[0]);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      constexpr int kFirst = 2, kParts = kPairs - kFirst;  // by then the stage is free
      if (copies && pair == kFirst) loader.begin(ahead);
      if (pair + 1 < kPairs) load_keys(stage, pair + 1, keys[(pair + 1) % 2]);
      multiply(pair, keys[pair % 2], s);
      if (copies && pair >= kFirst) {
        loader.copy(ahead, loader.kCopies * (pair - kFirst) / kParts, loader.kCopies * (pair - kFirst + 1) / kParts);
      }
    }
    if (copies) loader.end(ahead);
    publish(s, buffer);
  }

  __device__ void run(Work work) {
    Ring<Cfg::kStages> ring;            // stage to multiply next
    Ring<Cfg::kPartialBuffers> buffer;  // where its partials go
    for (int n = 0; n < Cfg::kAhead && loader.left > 0; ++n) {
      loader.begin(ring.plus(n));
      loader.copy(ring.plus(n), 0, loader.kCopies);
      loader.end(ring.plus(n));
    }
    do {
      const Segment& segment = work.segment;
      const int first_row = work.row_tile * Cfg::kRows;
      load_queries(int64_t(q_begin(a, segment.batch)) * a.p.heads + first_row,
                   q_len(a, segment.batch) * a.p.heads - first_row);
#pragma unroll 1
      for (int left = segment.tile_end - segment.tile_begin; left > 0;) {
        if (Cfg::kUnrolls && ring.slot == 0 && left >= Cfg::kStages) {
#pragma unroll
          for (int n = 0; n < Cfg::kStages; ++n) {
            score({n, ring.parity}, Ring<Cfg::kPartialBuffers>::after(n));
          }
          ring.parity ^= 1;
          left -= Cfg::kStages;
        } else {
          score(ring, buffer);
          ring.advance(), buffer.advance();
          --left;
        }
      }
    } while (work.next(a));
  }
};

// ---------------------------------------------------------------------------------------------------- value warps ----

template <typename Kv, int RowGroups>
struct ValueRole {
  using Cfg = Config<Kv, RowGroups>;
  using Mma = typename Kv::Mma;
  static constexpr int kColumns = kLatentDim / kValueWarps, kTiles = kColumns / 16;  // of a warp; its m16 tiles
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
  float o[kTiles][RowGroups][4];

  // Softmax state of this thread's row pairs, log2 units. All threads of a row keep the same reference; the sum is this
  // thread's share.
  float reference[kPairs][2], row_sum[kPairs][2];
  int batch, first_row, plain_end;  // of the current segment

  __device__ float log2_scale() const { return a.p.sm_scale * a.p.kv_scale * kLog2e; }
  __device__ int group(int pair) const { return is_split(pair) ? Cfg::kWhole + warp / 2 : warp; }
  __device__ bool has_pair(int pair) const {
    return is_split(pair) ? Cfg::kWhole + 1 < RowGroups || warp < 2 : Cfg::kWhole == kValueWarps || warp < Cfg::kWhole;
  }
  __device__ int half(int unit) const { return is_split(pair_of(unit)) ? warp % 2 : unit; }
  __device__ int row(int pair, int c) const { return 8 * group(pair) + 2 * (lane % 4) + c; }
  __device__ float& shared_row(int at, int r) const { return reinterpret_cast<float*>(smem + at)[r]; }

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0.f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      reference[i][0] = reference[i][1] = kNoReference;
      row_sum[i][0] = row_sum[i][1] = 0.f;
    }
  }

  // A thread's accumulator columns are rows 8 j + 2 (lane % 4) and the next one.
  __device__ void scale_group(int j, float even, float odd) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) o[m][j][0] *= even, o[m][j][1] *= odd, o[m][j][2] *= even, o[m][j][3] *= odd;
  }

  // Sums the score warps' partials of this thread's units, always in the same order: logits but for their scale.
  __device__ void receive(int slot, float (&x)[kUnits][2]) const {
    const char* from = smem + Cfg::kPartials + slot * Cfg::kPartialBytes;
    const int at = warp * kScoreWarps * 32 + lane;
    if constexpr (Cfg::kWhole > 0) {
      float4 v[kScoreWarps];
#pragma unroll
      for (int w = 0; w < kScoreWarps; ++w) {
        if (has_pair(0)) v[w] = reinterpret_cast<const float4*>(from)[at + w * 32];
      }
      x[0][0] = (v[0].x + v[1].x) + (v[2].x + v[3].x), x[0][1] = (v[0].y + v[1].y) + (v[2].y + v[3].y);
      x[1][0] = (v[0].z + v[1].z) + (v[2].z + v[3].z), x[1][1] = (v[0].w + v[1].w) + (v[2].w + v[3].w);
    }
    if constexpr (kSplits) {
      float2 v[kScoreWarps];
#pragma unroll
      for (int w = 0; w < kScoreWarps; ++w) {
        if (has_pair(kPairs - 1)) v[w] = reinterpret_cast<const float2*>(from + Cfg::kWideBytes)[at + w * 32];
      }
      x[kUnits - 1][0] = (v[0].x + v[1].x) + (v[2].x + v[3].x);
      x[kUnits - 1][1] = (v[0].y + v[1].y) + (v[2].y + v[3].y);
    }
  }

  // The soft cap, and what a row may not see among the request's own new tokens.
  __device__ void cap_and_mask(float (&x)[kUnits][2], int tile) const {
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
  __device__ bool exponentiate(const float (&x)[kUnits][2], float (&sum)[kPairs][2], char* probs) const {
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int pair = pair_of(i);
      float prob[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float above = fmaf(x[i][c], log2_scale(), -reference[pair][c]);
        exceeds |= has_pair(pair) && above > kRescaleSlack;
        prob[c] = ptx::exp2_approx(above);
        sum[pair][c] = (i == 1 ? sum : row_sum)[pair][c] + prob[c];
      }
      char* at = probs + (8 * half(i) + lane / 4) * Cfg::kProbStride + group(pair) * 16 + lane % 4 * 4;
      if (has_pair(pair)) *reinterpret_cast<uint32_t*>(at) = ptx::pack2<Mma>(prob[0], prob[1]);
    }
    return exceeds;
  }

  // Moves the references of rows that have risen by more than the slack, and rescales what was summed against them.
  // Rare.
  __device__ void raise_references(const float (&x)[kUnits][2]) {
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
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!has_pair(i)) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (is_split(i)) peak[i][c] = fmaxf(peak[i][c], shared_row(other, row(i, c)));
        const bool rises = peak[i][c] > reference[i][c] + kRescaleSlack;
        const float factor = rises ? ptx::exp2_approx(reference[i][c] - peak[i][c]) : 1.f;
        if (rises) reference[i][c] = peak[i][c];
        row_sum[i][c] *= factor;
        if (lane < 4 && (!is_split(i) || warp % 2 == 0)) shared_row(Cfg::kRescale, row(i, c)) = factor;
      }
    }
    ptx::barrier_sync(kValueBarrier, kValueThreads);
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const int r = 8 * j + 2 * (lane % 4);
      scale_group(j, shared_row(Cfg::kRescale, r), shared_row(Cfg::kRescale, r + 1));
    }
  }

  // Receives a tile's logits and makes probabilities of them, which are right unless a reference has to rise: then
  // true, and the sums are as they were.
  template <bool MayMask>
  __device__ bool softmax(int tile, Ring<Cfg::kPartialBuffers> partials, int buffer, float (&x)[kUnits][2]) {
    ptx::mbarrier_wait(bars.published(partials.slot), partials.parity);
    receive(partials.slot, x);
    arrive(bars.consumed(partials.slot), lane);
    if (MayMask && tile >= plain_end) cap_and_mask(x, tile);
    float sum[kPairs][2];
    const bool exceeds = exponentiate(x, sum, probs_at(buffer));
    if (__builtin_expect(ptx::barrier_any(kValueBarrier, kValueThreads, exceeds), 0)) return true;
    set_sums(sum);
    return false;
  }

  // The same again, with higher references.
  __device__ void softmax_again(int buffer, const float (&x)[kUnits][2]) {
    raise_references(x);
    float sum[kPairs][2];
    exponentiate(x, sum, probs_at(buffer));
    ptx::barrier_sync(kValueBarrier, kValueThreads);
    set_sums(sum);
  }

  __device__ void set_sums(const float (&sum)[kPairs][2]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) row_sum[i][0] = sum[i][0], row_sum[i][1] = sum[i][1];
  }
  __device__ char* probs_at(int buffer) const { return smem + Cfg::kProbs + buffer * Cfg::kProbBytes; }

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

  // One ldmatrix of V^T: an m-tile of bf16, two of fp8, as stored.
  static constexpr int kLoadTiles = 2 / Kv::kBytes, kLoads = kTiles / kLoadTiles;
  __device__ void load_values(uint32_t stage, int n, uint32_t (&raw)[4]) const {
    const int token = Kv::kBytes == 2 ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int chunk = Kv::kBytes == 2 ? lane / 8 % 2 : lane / 16;
    const uint32_t at = stage + token * Cfg::kRowBytes + warp * kColumns * Kv::kBytes + Cfg::chunk_at(token, chunk);
    constexpr int kBlockLoads = Cfg::kBlockBytes / 32;
    ptx::ldmatrix_x4_trans(raw, (at ^ (n % kBlockLoads * 32)) + n / kBlockLoads * Cfg::kBlockBytes);
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
        const uint32_t low = raw[2 * i], high = raw[2 * i + 1];
        v[0] = ptx::e4m3x2_to_half2(__byte_perm(low, 0, 0x20)), v[1] = ptx::e4m3x2_to_half2(__byte_perm(low, 0, 0x31));
        v[2] = ptx::e4m3x2_to_half2(__byte_perm(high, 0, 0x20)),
        v[3] = ptx::e4m3x2_to_half2(__byte_perm(high, 0, 0x31));
      }
#pragma unroll
      for (int j = 0; j < RowGroups; ++j) ptx::mma_16816<Mma>(o[kLoadTiles * n + i][j], v, p[j]);
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

  // After a segment's last tile: outputs divided by the sums, and the log-sum-exps.
  __device__ void finish(const Segment& segment) {
    const int valid_rows = min(q_len(a, batch) * a.p.heads - first_row, Cfg::kRows);
    const int64_t out_row = int64_t(q_begin(a, batch)) * a.p.heads + first_row;
    const int64_t slot_row = int64_t(partial_slot(a, blockIdx.x, segment.tile_begin > 0)) * kMaxRows;
    const auto sum_of = [&](int r) {
      return shared_row(Cfg::kRowPairs, r) + shared_row(Cfg::kRowPairs, Cfg::kRows + r);
    };
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
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if ((is_split(i) && warp % 2 != 0) || lane >= 4 || !has_pair(i) || row(i, c) >= valid_rows) continue;
        const float sum = sum_of(row(i, c));
        const float lse = sum > 0.f ? (reference[i][c] + log2f(sum)) * kLn2 : -INFINITY;
        (segment.whole() ? a.p.lse[out_row + row(i, c)] : a.ws.lse[slot_row + row(i, c)]) = lse;
      }
    }
#pragma unroll
    for (int j = 0; j < RowGroups; ++j) {
      const float even = sum_of(8 * j + 2 * (lane % 4)), odd = sum_of(8 * j + 2 * (lane % 4) + 1);
      scale_group(j, even > 0.f ? a.p.kv_scale / even : 0.f, odd > 0.f ? a.p.kv_scale / odd : 0.f);
    }
    if (segment.whole()) {
      auto* out = static_cast<__nv_bfloat16*>(a.p.out) + out_row * kLatentDim;
      for_each_output(valid_rows,
                      [&](int row, int column, float v) { out[row * kLatentDim + column] = __float2bfloat16(v); });
    } else {
      float* out = a.ws.out + slot_row * kLatentDim;
      for_each_output(valid_rows, [&](int row, int column, float v) { out[row * kLatentDim + column] = v; });
    }
  }

  // O += V^T P^T of the tile in that stage.
  __device__ void accumulate(int stage_slot, int buffer) {
    const uint32_t stage = ptx::smem_addr(smem + Cfg::kStages0) + stage_slot * Cfg::kStageBytes;
    uint32_t values[2][4];  // loaded one ahead of their products
    uint32_t p[RowGroups][2];
    load_values(stage, 0, values[0]);
    load_probs(ptx::smem_addr(probs_at(buffer)), p);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (n + 1 < kLoads) load_values(stage, n + 1, values[(n + 1) % 2]);
      multiply(n, values[n % 2], p);
    }
    arrive(bars.done(stage_slot), lane);
  }

  __device__ void run(Work work) {
    first_row = work.row_tile * Cfg::kRows;
    Ring<Cfg::kStages> ring;
    Ring<Cfg::kPartialBuffers> partials;
    int probs_buffer = 0;
    do {
      const Segment& segment = work.segment;
      batch = segment.batch;
      const int length = uniform(kv_len(a, batch));
      // Tiles that lie wholly in the prefix need no mask.
      plain_end = a.p.logit_cap > 0.f ? 0 : (length - min(uniform(q_len(a, batch)), length)) / kTileTokens;
      clear();
#pragma unroll 1
      for (int tile = segment.tile_begin; tile < segment.tile_end;) {
        float x[kUnits][2];
        bool rises = false;
        if (Cfg::kUnrolls && ring.slot == 0 && tile + Cfg::kStages <= min(segment.tile_end, plain_end)) {
          // A round of the stages: slots and parities are constants.
          using Buffers = Ring<Cfg::kPartialBuffers>;
#pragma unroll
          for (int n = 0; n < Cfg::kStages; ++n) {
            rises = softmax<false>(tile, Buffers::after(n), n % 2, x);
            if (__builtin_expect(rises, 0)) {  // go on below, tile by tile
              ring.slot = n, partials = Buffers::after(n), probs_buffer = n % 2;
              break;
            }
            accumulate(n, n % 2);
            ++tile;
          }
          if (!rises) continue;
        } else {
          rises = softmax<true>(tile, partials, probs_buffer, x);
        }
        if (rises) softmax_again(probs_buffer, x);
        accumulate(ring.slot, probs_buffer);
        ring.advance(), partials.advance(), probs_buffer ^= 1;
        ++tile;
      }
      finish(segment);
    } while (work.next(a));
  }
};

template <typename Kv, int RowGroups>
__global__ void __launch_bounds__(kThreads, 1) verify_kernel(const __grid_constant__ Args a) {
  using Cfg = Config<Kv, RowGroups>;
  extern __shared__ __align__(128) char smem[];
  const BarriersOf<Cfg> bars{ptx::smem_addr(smem + Cfg::kBarriers)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Cfg::kStages; ++stage) {
      ptx::mbarrier_init(bars.landed(stage), kScoreThreads);
      ptx::mbarrier_init(bars.done(stage), kValueWarps * kWarpArrivals);
    }
    for (int buffer = 0; buffer < Cfg::kPartialBuffers; ++buffer) {
      ptx::mbarrier_init(bars.published(buffer), kScoreWarps * kWarpArrivals);
      ptx::mbarrier_init(bars.consumed(buffer), kValueWarps * kWarpArrivals);
    }
  }
  ptx::launch_dependents();  // the merge may be set up; it waits for this grid to end
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  Work& found = *reinterpret_cast<Work*>(smem + Cfg::kWork);
  if (warp == 0) {
    const Work share = locate_share(a, Cfg::kRows);
    if (lane == 0) found = share;
  }
  __syncthreads();
  const Work work = uniform(found);
  if (work.left == 0) return;
  if (warp < kScoreWarps) {
    ScoreRole<Kv, RowGroups> role(a, smem, bars, work, warp, lane);
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
