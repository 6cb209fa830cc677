// The split plan, computed by one warp of every block from the lengths on the device: which tiles of which requests a
// block works on. Nothing here depends on the host knowing a length, so a captured launch serves any.
//
//   uniform q: blocks = splits x row_tiles. All requests' tiles form one line, cut into `splits` equal pieces; the
//              row tiles of a piece run side by side, so the second one finds its KV in L2.
//   ragged q:  blocks = splits x (row tiles of the whole batch). Each row tile's context is cut into `splits` pieces.
#pragma once

#include "args.h"

namespace sm120::mla {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A value that is the same in the whole warp, told to the compiler: branches on it need no reconvergence.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Sum of `own` over this lane and those below it.
__device__ __forceinline__ int sum_up_to_lane(int own) {
  int sum = own;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (threadIdx.x % 32 >= step) sum += other;
  }
  return sum;
}

__device__ __forceinline__ int kv_len(const Args& a, int b) { return a.p.kv_lens[int64_t(b) * a.p.kv_lens_stride]; }

// First query token of request b in q, and how many it has.
__device__ __forceinline__ int q_begin(const Args& a, int b) {
  return a.p.qo_indptr ? a.p.qo_indptr[b] : b * a.p.q_len;
}
__device__ __forceinline__ int q_len(const Args& a, int b) {
  return a.p.qo_indptr ? a.p.qo_indptr[b + 1] - a.p.qo_indptr[b] : a.p.q_len;
}

// Tiles of KV that row tile `row_tile` of request b looks at: up to its last row's own token when the mask is causal.
__device__ __forceinline__ int visible_tiles(const Args& a, int b, int row_tile, int rows) {
  const int length = kv_len(a, b);
  if (!a.part.ragged || a.p.tree_mask) return ceil_div(length, kTileTokens);
  const int new_tokens = min(q_len(a, b), length);
  const int last_token = min(((row_tile + 1) * rows - 1) / a.p.heads, new_tokens - 1);
  return length == 0 ? 0 : ceil_div(length - new_tokens + last_token + 1, kTileTokens);
}

__device__ __forceinline__ int tiles_per_split(int tiles, int splits) {
  return max(ceil_div(tiles, splits), kMinTilesPerSplit);
}

// A stretch of tiles of one request.
struct Segment {
  int batch;
  int tile_begin;
  int tile_end;
  int tiles;  // of the whole request: the segment is all of it, or a partial
  __device__ bool whole() const { return tile_begin == 0 && tile_end == tiles; }
};

// The block's segments in order. Who reads, multiplies or adds up tiles walks them at its own pace.
struct Work {
  int row_tile;
  int left;  // tiles from the current segment's first on
  Segment segment;

  __device__ bool next(const Args& a) {
    left -= segment.tile_end - segment.tile_begin;
    if (left <= 0) return false;
    do {
      ++segment.batch;
      segment.tiles = ceil_div(uniform(kv_len(a, segment.batch)), kTileTokens);
    } while (segment.tiles == 0);
    segment.tile_begin = 0;
    segment.tile_end = min(segment.tiles, left);
    return true;
  }
};

// Walks the exclusive prefix sum of size(b) over the batch; returns the request that holds element `wanted` and that
// request's first element. Block 0 also leaves the prefix sums in the plan, for the merge. Called by whole warps.
template <typename Size>
__device__ int find_request(const Args& a, int wanted, int& first, Size size) {
  const int lane = threadIdx.x % 32;
  const bool writes_plan = blockIdx.x == 0 && threadIdx.x < 32;
  int before = 0, found = -1;
  for (int base = 0; base < a.p.batch && (found < 0 || writes_plan); base += 32) {
    const int b = base + lane;
    const int own = b < a.p.batch ? size(b) : 0;
    const int upto = sum_up_to_lane(own);
    const int start = before + upto - own;
    if (writes_plan && b < a.p.batch) a.ws.plan[1 + b] = start;
    const unsigned holders = __ballot_sync(~0u, start <= wanted && wanted < start + own);
    if (holders) {
      found = base + __ffs(holders) - 1;
      first = __shfl_sync(~0u, start, __ffs(holders) - 1);
    }
    before += __shfl_sync(~0u, upto, 31);
  }
  return found;
}

// The block's share; left == 0 where there is none.
__device__ inline Work locate_share(const Args& a, int rows) {
  const int split = blockIdx.x / a.part.row_tiles;
  const int column = blockIdx.x % a.part.row_tiles;
  Work work{};
  int first = 0;
  if (a.part.ragged) {
    const auto row_tiles = [&](int b) { return ceil_div(q_len(a, b) * a.p.heads, rows); };
    const int b = find_request(a, column, first, row_tiles);
    if (b < 0) return work;
    work.row_tile = column - first;
    const int tiles = visible_tiles(a, b, work.row_tile, rows);
    const int per_split = tiles_per_split(tiles, a.part.splits);
    work.segment = {b, split * per_split, min((split + 1) * per_split, tiles), tiles};
    work.left = max(work.segment.tile_end - work.segment.tile_begin, 0);
    return work;
  }
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int b = lane; b < a.p.batch; b += 32) total += ceil_div(kv_len(a, b), kTileTokens);
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  const int per_split = tiles_per_split(total, a.part.splits);
  if (blockIdx.x == 0 && threadIdx.x == 0) a.ws.plan[0] = per_split;

  const int wanted = split * per_split;
  const int b = find_request(a, wanted, first, [&](int i) { return ceil_div(kv_len(a, i), kTileTokens); });
  if (b < 0) return work;
  work.row_tile = column;
  work.left = min(per_split, total - wanted);
  const int tiles = ceil_div(kv_len(a, b), kTileTokens);
  const int tile_begin = wanted - first;
  work.segment = {b, tile_begin, min(tiles, tile_begin + work.left), tiles};
  return work;
}

__device__ __forceinline__ Work uniform(const Work& w) {
  const Segment& s = w.segment;
  return {uniform(w.row_tile),
          uniform(w.left),
          {uniform(s.batch), uniform(s.tile_begin), uniform(s.tile_end), uniform(s.tiles)}};
}

// Where the block keeps a partial result: its first request may continue another block's, its last may go on elsewhere.
__device__ __forceinline__ int partial_slot(const Args& a, int block, bool continues_another) {
  return a.part.ragged ? block : 2 * block + (continues_another ? 0 : 1);
}

}  // namespace sm120::mla
