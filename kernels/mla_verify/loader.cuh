// The score warps' copies of KV rows to shared memory.
#pragma once

#include "pipeline.cuh"

namespace sm120::mla {

// Copies KV rows, a tile at a time, ahead of their use; 8 lanes a token, 4 tokens a warp. Slots too are copied to
// shared memory, a warp for itself, 8 tiles at a time, a lane per (tile, token of the warp), and two batches ahead: a
// load into a register would make the warp wait for it at the next barrier, for the two share a scoreboard.
template <typename Kv, int RowGroups>
struct Loader {
  using Cfg = Config<Kv, RowGroups>;
  using Stage = Ring<Cfg::kStages>;
  static constexpr int kWarpTokens = kTileTokens / kScoreWarps, kBatchTiles = kSlotBatchTiles;
  static constexpr int kLanes = 32 / kWarpTokens, kChunks = Cfg::kRowBytes / 16;
  static constexpr int kCopies = (kChunks + kLanes - 1) / kLanes;  // of a thread, for one tile

  const Args& a;
  BarriersOf<Cfg> bars;
  Work work;
  int warp, lane;
  int left;                   // tiles still to issue
  int batch_left;             // of them, whose slots are here
  int batch_tile;             // first tile of the batch
  int length;                 // of the current segment
  const int32_t* slots_gmem;  // of its tokens
  uint32_t ring_smem;         // this lane's place in the first batch of slots
  uint32_t slot_smem;         // the next tile's slot of this thread's token
  int batch_slot = 0;         // place of the current batch in the ring
  const char* pool_gmem;      // kv, at this lane's piece of a row
  int slot;                   // of the next tile's token
  bool stage_free;            // of the next tile, when last looked at
  const char* source_gmem;    // of the tile under way, at this lane's piece of its row
  uint32_t target_smem;       // this thread's place in stage 0

  __device__ Loader(const Args& args, BarriersOf<Cfg> barriers, uint32_t base_smem, const Work& w, int warp_, int lane_)
      : a(args), bars(barriers), work(w), warp(warp_), lane(lane_), left(w.left) {
    ring_smem = base_smem + Cfg::kSlots + (warp * 32 + lane) * 4;
    pool_gmem = static_cast<const char*>(a.p.kv) + lane % kLanes * 16;
    const int token = warp * kWarpTokens + lane / kLanes;
    target_smem = base_smem + Cfg::kStages0 + token * Cfg::kRowBytes + Cfg::chunk_at(token, lane % kLanes);
    enter_segment();
  }

  __device__ void enter_segment() {
    const int batch = work.segment.batch;
    length = kv_len(a, batch);
    slots_gmem = a.p.req_to_token +
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
    ptx::cp_async_4(ring_smem + to * kSlotBatchBytes, slots_gmem + min(at, length - 1));
  }

  // The batch after the next is fetched now: it has landed once any tile issued from here on has.
  __device__ void begin_batch() {
    fetch_slots(batch_tile + 2 * kBatchTiles, (batch_slot + 2) % kSlotBatches);
    batch_left = min(work.segment.tile_end - batch_tile, kBatchTiles);
    slot_smem = ring_smem + batch_slot * kSlotBatchBytes + (lane / kLanes - lane) * 4;
  }

  // Asks what `begin` needs to know, ahead of it: where the next row lies, and whether its stage is free.
  __device__ void look(Stage stage) {
    slot = ptx::load_shared(slot_smem);
    stage_free = ptx::mbarrier_test(bars.done(stage.slot), stage.parity ^ 1);  // a fresh barrier counts as done
  }

  // Begins the next tile, once its stage is free.
  __device__ void begin(Stage stage) {
    if (!stage_free) ptx::mbarrier_wait(bars.done(stage.slot), stage.parity ^ 1);
    source_gmem = pool_gmem + uint64_t(uint32_t(slot)) * uint32_t(a.p.kv_stride_bytes);
  }

  // This thread's copies `first` to `last` - 1 of the tile.
  __device__ void copy(Stage stage, int first, int last) const {
    const uint32_t to_smem = target_smem + stage.slot * Cfg::kStageBytes;
#pragma unroll
    for (int i = first; i < last; ++i) {
      if ((i + 1) * kLanes <= kChunks || lane % kLanes < kChunks % kLanes) {
        ptx::cp_async_16(to_smem + i * kLanes * 16, source_gmem + i * kLanes * 16);
      }
    }
  }

  __device__ void arrive_when_landed(Stage stage) const { ptx::cp_async_arrive(bars.landed(stage.slot)); }

  // Goes on to the next tile.
  __device__ void advance() {
    slot_smem += kWarpTokens * 4;
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

}  // namespace sm120::mla
