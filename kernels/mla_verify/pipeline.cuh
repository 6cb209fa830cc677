// What the two roles of a block share: the mbarriers between them, and where in a ring they are.
//
//   landed[stage]        score threads' copies  -> score warps
//   published[1 or 2]    score warps' partials  -> value warps
//   consumed[1 or 2]     value warps            -> partials free
//   done[stage]          value warps            -> stage free for the next copy
//
// A look at an mbarrier takes 40 to 55 clocks even where it has long completed. So every one is looked at some products
// before its answer is needed (ptx::mbarrier_test), and waited for only if it had not completed by then.
#pragma once

#include "ptx.cuh"
#include "work.cuh"

namespace sm120::mla {

template <int Stages, int PartialBuffers>
struct Barriers {
  uint32_t base_smem;
  __device__ uint32_t landed(int stage) const { return base_smem + 8 * stage; }
  __device__ uint32_t done(int stage) const { return base_smem + 8 * (Stages + stage); }
  __device__ uint32_t published(int buffer) const { return base_smem + 8 * (2 * Stages + buffer); }
  __device__ uint32_t consumed(int buffer) const { return base_smem + 8 * (2 * Stages + PartialBuffers + buffer); }
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
};

// A warp's arrival, made by one lane for all. Race checkers follow only threads that arrive themselves: for them every
// lane can be made to (SM120_RACECHECK).
#ifdef SM120_RACECHECK
constexpr int kWarpArrivals = 32;
__device__ __forceinline__ void arrive(uint32_t mbar, int) { ptx::mbarrier_arrive(mbar); }
#else
constexpr int kWarpArrivals = 1;
__device__ __forceinline__ void arrive(uint32_t mbar, int lane) {
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(mbar);
}
#endif

// A value that the compiler must keep: it would rather work addresses out again in every tile.
__device__ __forceinline__ uint32_t kept(uint32_t value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }

template <typename Cfg>
__device__ void init_barriers(BarriersOf<Cfg> bars) {
  for (int stage = 0; stage < Cfg::kStages; ++stage) {
    ptx::mbarrier_init(bars.landed(stage), kScoreThreads);
    ptx::mbarrier_init(bars.done(stage), kValueWarps * kWarpArrivals);
  }
  for (int buffer = 0; buffer < Cfg::kPartialBuffers; ++buffer) {
    ptx::mbarrier_init(bars.published(buffer), kScoreWarps * kWarpArrivals);
    ptx::mbarrier_init(bars.consumed(buffer), kValueWarps * kWarpArrivals);
  }
}

}  // namespace sm120::mla
