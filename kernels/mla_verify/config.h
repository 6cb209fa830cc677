// Shapes, shared-memory layout and launch arithmetic of the verify kernel. Host and device read the same numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sm120::mla {

constexpr int kLatentDim = 512;                     // key and value
constexpr int kRopeDim = 64;                        // key only
constexpr int kHeadDim = kLatentDim + kRopeDim;
constexpr int kTileTokens = 16;                     // KV tokens of one pipeline stage
constexpr int kScoreWarps = 4;                      // QK^T and softmax; each owns a quarter of the 576 columns
constexpr int kValueWarps = 4;                      // P V and the copies; each owns 128 of the 512 latent columns
constexpr int kScoreThreads = kScoreWarps * 32;
constexpr int kValueThreads = kValueWarps * 32;
constexpr int kThreads = kScoreThreads + kValueThreads;
constexpr int kMaxRowGroups = 6;                    // query rows of a block, in groups of 8 (one mma n-tile)
constexpr int kMaxRows = kMaxRowGroups * 8;
constexpr int kMaxSharedBytes = 101376;             // what sm_86, sm_89 and sm_120 grant one block
constexpr int kMinTilesPerSplit = 4;                // below this a split costs more than it hides
constexpr int kProbBuffers = 3;
constexpr int kPartialSlotsPerSm = 4;               // 2 blocks per SM at most, each with an unfinished first and last request

// A KV element type and the type its tensor-core products are taken in. e4m3 converts to half exactly.
struct Bf16Kv {
  using Mma = __nv_bfloat16;
  static constexpr int kBytes = 2;
};
struct Fp8Kv {
  using Mma = __half;
  static constexpr int kBytes = 1;
};

template <typename Kv, int RowGroups>
struct Config {
  static constexpr int kRows = RowGroups * 8;
  static constexpr int kRowBytes = kHeadDim * Kv::kBytes;
  static constexpr int kRowStride = kRowBytes + 16;  // an odd number of 16-byte units: ldmatrix meets every bank once
  static constexpr int kStageBytes = kTileTokens * kRowStride;
  static constexpr int kProbStride = (RowGroups | 1) * 16;  // bytes of one token's probabilities; odd units again
  static constexpr int kProbBytes = kTileTokens * kProbStride;
  static constexpr int kOwnedGroups = (RowGroups + kScoreWarps - 1) / kScoreWarps;  // row groups whose softmax a warp does
  static constexpr int kPartialBytes = RowGroups * (kScoreWarps - 1) * 512;         // one tile's exchanged partial scores

  // Shared memory, in bytes from the start: fixed parts first, then as many KV stages as fit.
  static constexpr int kBarriers = 0;                                         // mbarriers, see Barriers
  static constexpr int kFlags = 192;                                          // uint8 [3][8]: row group needs rescaling
  static constexpr int kRescale = 256;                                        // float [3][rows]
  static constexpr int kInverseSum = kRescale + kProbBuffers * kRows * 4;     // float [3][rows]
  static constexpr int kProbs = kInverseSum + kProbBuffers * kRows * 4;       // 16-bit [3][16 tokens][rows + pad]
  static constexpr int kPartials = kProbs + kProbBuffers * kProbBytes;        // float4 [2][row group][3][lane]
  static constexpr int kStages0 = kPartials + 2 * kPartialBytes;
  static constexpr int kFit = (kMaxSharedBytes - kStages0) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kStages0 + kStages * kStageBytes;

  static_assert(kStages >= 4, "probabilities of tile n reuse a buffer that tile n + 1's landing proves free");
  static_assert(8 * (2 * kStages + kProbBuffers + 2) <= kFlags);
  static_assert(kStages0 % 16 == 0 && kPartials % 16 == 0 && kProbs % 16 == 0);
};

// How a launch divides the rows and the context. Fixed per (batch bucket, q, heads, num_sms): safe to capture.
struct Partition {
  int row_groups;      // template instance
  int row_tiles;       // uniform q: tiles per request; ragged q: upper bound over the whole batch
  int splits;          // blocks that share the context of one row tile
  bool ragged;
};

// Workspace: plan ints, then LSE and outputs of partial results.
struct Workspace {
  int32_t* plan;       // [0] tiles per split; [1 + b] first tile (uniform) or first row tile (ragged) of request b
  float* lse;          // [slot][kMaxRows]
  float* out;          // [slot][kMaxRows][512]
};

}  // namespace sm120::mla
