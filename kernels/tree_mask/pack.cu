// bool [rows, q] -> uint32 [rows, ceil(q / 32)]: a warp per word, a lane per column.
#include <cuda_runtime.h>

#include "sm120_mla.h"

namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(kWarps * 32) pack_kernel(const uint8_t* mask, uint32_t* words, int rows, int q) {
  const int words_per_row = (q + 31) / 32, lane = threadIdx.x % 32;
  const int64_t word = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (word >= int64_t(rows) * words_per_row) return;
  const int64_t row = word / words_per_row;
  const int column = int(word % words_per_row) * 32 + lane;
  const uint32_t bits = __ballot_sync(~0u, column < q && mask[row * q + column] != 0);
  if (lane == 0) words[word] = bits;
}

}  // namespace

extern "C" int sm120_pack_tree_mask(const uint8_t* mask, uint32_t* words, int32_t rows, int32_t q, void* stream) {
  const int64_t count = int64_t(rows) * ((q + 31) / 32);
  if (count == 0) return cudaSuccess;
  pack_kernel<<<static_cast<unsigned>((count + kWarps - 1) / kWarps), kWarps * 32, 0,
                static_cast<cudaStream_t>(stream)>>>(mask, words, rows, q);
  return cudaGetLastError();
}
