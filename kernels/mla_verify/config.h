// Shapes, shared-memory layout and launch arithmetic of the verify kernel. Host and device read the same numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sm120::mla {

constexpr int kLatentDim = 512;  // key and value
constexpr int kRopeDim = 64;     // key only
constexpr int kHeadDim = kLatentDim + kRopeDim;
constexpr int kTileTokens = 16;  // KV tokens of one pipeline stage
constexpr int kScoreWarps = 4;   // QK^T and the copies; each owns a part of the 576 columns
constexpr int kValueWarps = 4;   // softmax and P V; each owns 128 of the 512 latent columns
constexpr int kScoreThreads = kScoreWarps * 32;
constexpr int kValueThreads = kValueWarps * 32;
constexpr int kThreads = kScoreThreads + kValueThreads;
constexpr int kMaxRowGroups = 6;  // query rows of a block, in groups of 8 (one mma n-tile)
constexpr int kMaxRows = kMaxRowGroups * 8;
constexpr int kMaxSharedBytes = 101376;  // what sm_86, sm_89 and sm_120 grant one block
constexpr int kMinTilesPerSplit = 4;     // below this a split costs more than it hides
constexpr int kProbBuffers = 2;
constexpr int kMaxStages = 10;
constexpr int kSlotBatchTiles = 8;  // tiles whose slots are looked up at a time
constexpr int kSlotBatches = 3;     // in a ring: the current batch and two ahead
constexpr int kSlotBatchBytes = kSlotBatchTiles * kTileTokens * 4;
constexpr int kPartialSlotsPerSm = 4;  // 2 blocks per SM at most, each with an unfinished first and last request
constexpr int kShareLatents = 16;      // a value thread's share of a row
constexpr int kRowShares = kLatentDim / kShareLatents;

// Choices that timing made (docs/kernels.md); any value listed is right.
// bf16, from 32 rows on: 1 = a score warp owns a quarter of the columns for all rows; 2 = half of the columns for half
// of the rows: half as many partial scores to exchange, but every key is read twice.
constexpr int kScoreRowParts = 2;
// Fifths (0 to 3) of a tile's products before the copy of the tile kAhead on begins: early copies have longer to land,
// late ones find the stage free.
constexpr int kCopyFromFifths = 2;

// Row groups up to which 255 registers hold all that is loaded or handed over ahead: below sm_90 the same code takes a
// few more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kAheadUpTo = 5;
#else
constexpr int kAheadUpTo = 6;
#endif

// A KV element type and the type its tensor-core products are taken in. e4m3 converts to half exactly.
// kLateHandOverFrom, timed too: the row groups (1 to 6, 7 = none) from which a tile's scores are handed over between
// the products of the next: no waiting for the last products and for their stores, but two tiles' scores in registers.
struct Bf16Kv {
  using Mma = __nv_bfloat16;
  static constexpr int kBytes = 2;
  static constexpr int kLateHandOverFrom = 6;
};
struct Fp8Kv {
  using Mma = __half;
  static constexpr int kBytes = 1;
  static constexpr int kLateHandOverFrom = 3;
};

template <typename Kv, int RowGroups>
struct Config {
  // A score warp owns one of kColumnParts parts of the columns, for one of kRowParts parts of the row groups.
  static constexpr int kRowParts = Kv::kBytes == 2 && RowGroups >= 4 ? kScoreRowParts : 1;
  static constexpr int kColumnParts = kScoreWarps / kRowParts;
  static constexpr int kRows = RowGroups * 8;
  static constexpr int kRowBytes = kHeadDim * Kv::kBytes;
  static constexpr int kStageBytes = kTileTokens * kRowBytes;
  // Rows lie in blocks of 64 columns, whose 16-byte chunks are permuted by token so that ldmatrix meets every bank
  // once. Padding would do that too, but tear the 32-byte sectors of the copies apart.
  static constexpr int kBlockColumns = 64, kBlockBytes = kBlockColumns * Kv::kBytes;
  // Byte offset of a token's chunk (of block 0) from the start of its row.
  static __device__ int chunk_at(int token, int chunk) {
    return 16 * (chunk ^ (Kv::kBytes == 2 ? token % 8 : token / 2 % 4));
  }
  static constexpr int kProbStride =
      (RowGroups | 1) * 16;  // bytes of one token's probabilities; an odd number of 16-byte units
  static constexpr int kProbBytes = kTileTokens * kProbStride;

  // The softmax of a tile is done in units: half the tokens of a row group. Value warp v does both halves of group v
  // (of the first kWhole groups), then half v % 2 of group kWhole + v / 2. Score warps leave their partial scores as it
  // reads them: float4 [value warp][column part][lane], which is an accumulator as it is, then float2 [..][..][..].
  static constexpr int kWhole = RowGroups < 3 ? 0 : RowGroups < kValueWarps ? RowGroups : kValueWarps;
  static constexpr int kUnits = (kWhole > 0 ? 2 : 0) + (kWhole < RowGroups ? 1 : 0);
  static constexpr int kWideBytes = kWhole * kColumnParts * 512;
  static constexpr int kNarrowGroups = RowGroups - kWhole;
  static constexpr int kPartialBytes = kWideBytes + kNarrowGroups * 2 * kColumnParts * 256;

  // Shared memory, in bytes from the start: fixed parts first, then as many KV stages as fit.
  static constexpr int kBarriers = 0;                                       // mbarriers, see Barriers
  static constexpr int kRises = 216;                                        // int32 [2], see Softmax::rises
  static constexpr int kWork = 224;                                         // the block's Work
  static constexpr int kSlots = 256;                                        // int32 [3][score warp][8 tiles][4 tokens]
  static constexpr int kRescale = kSlots + kSlotBatches * kSlotBatchBytes;  // float [rows]
  static constexpr int kRowPairs = kRescale + kRows * 4;                    // float [2 token halves][rows]
  static constexpr int kProbs = kRowPairs + 2 * kRows * 4;                  // 16-bit [2][16 tokens][rows + pad]
  static constexpr int kPartials = kProbs + kProbBuffers * kProbBytes;      // one or two buffers
  // Two buffers of partials, unless the second would cost a stage.
  static constexpr int stages_beside(int buffers) {
    const int fit = (kMaxSharedBytes - 127 - kPartials - buffers * kPartialBytes) / kStageBytes;
    return fit < kMaxStages ? fit : kMaxStages;
  }
  static constexpr int kStages = stages_beside(1);
  static constexpr int kAhead = kStages - 2;  // the tile copied while one is multiplied: stage free once its values are
  static constexpr int kPartialBuffers = stages_beside(2) == kStages ? 2 : 1;
  static constexpr int kStages0 = (kPartials + kPartialBuffers * kPartialBytes + 127) / 128 * 128;
  static constexpr int kSharedBytes = kStages0 + kStages * kStageBytes;

  static_assert(kStages >= 4, "one tile in the products of each role and two on the way");
  static_assert(8 * (2 * kStages + 2 * kPartialBuffers) <= kRises);
  static_assert(kStages0 % 128 == 0 && kPartials % 16 == 0 && kProbs % 16 == 0);
};

// How a launch divides the rows and the context. Fixed per (batch bucket, q, heads, num_sms): safe to capture.
struct Partition {
  int row_groups;  // template instance
  int row_tiles;   // uniform q: tiles per request; ragged q: upper bound over the whole batch
  int splits;      // blocks that share the context of one row tile
  bool ragged;
};

// Plan, and partial results: log-sum-exps, and outputs as partial.cuh has them.
struct Workspace {
  int32_t* plan;      // [0] tiles per split; [1 + b] first tile (uniform) or first row tile (ragged) of request b
  float* lse;         // [slot][kMaxRows]
  uint8_t* exponent;  // [slot][kMaxRows][32]
  __half* out;        // [slot][kMaxRows][512]
};

}  // namespace sm120::mla
