// Partial outputs in the workspace: what a block leaves of a request that others work on too, for the merge.
//
// They are half, which takes half the traffic of float and rounds by 2^-11 where the final bf16 rounds by 2^-8. bf16
// latents may be of any magnitude, so the 16 values of a thread's share of a row have an exponent to themselves: they
// are scaled by the power of two that brings the largest to 2^14 .. 2^15. Nothing overflows, and only what is below
// 2^-28 of the largest is rounded more coarsely.
#pragma once

#include "config.h"

namespace sm120::mla {

constexpr float kSmallestPeak = 0x1p-100f;  // a share below has the exponent of this: its scale is an ordinary float

// Of a share whose largest magnitude is `peak`: its exponent (biased, as in a float), the factor that makes its values
// units, and what a unit is worth.
__device__ __forceinline__ uint32_t share_exponent(float peak) {
  return __float_as_uint(fmaxf(peak, kSmallestPeak)) >> 23;
}
__device__ __forceinline__ float units_of(uint32_t exponent) {
  return __uint_as_float((2 * 127 + 14 - exponent) << 23);
}
__device__ __forceinline__ float worth_of_unit(uint32_t exponent) { return __uint_as_float((exponent - 14) << 23); }

// Latent, within a value warp's 128, of accumulator row lane / 4 (which = 0) or lane / 4 + 8 (which = 1) of its m16
// tile m: fp8 fragments hold pairs of neighbouring latents.
__device__ __forceinline__ constexpr int warp_latent(bool fp8, int lane, int m, int which) {
  return m * 16 + (fp8 ? 2 * (lane / 4) + which : lane / 4 + 8 * which);
}

// Latent of element `e` of a partial row, where shares lie one after the other: [value warp][lane / 4][m][which].
__device__ __forceinline__ constexpr int partial_latent(bool fp8, int e) {
  return e / 128 * 128 + warp_latent(fp8, e % 128 / 16 * 4, e % 16 / 2, e % 2);
}

}  // namespace sm120::mla
