// dst[i] <- src[i] in every layer's pool by one launch. A block owns one column strip of one layer: it stages the strip of
// all source rows in shared memory and only then writes, so lists that overlap are as safe as lists that do not.
#include <cuda_runtime.h>

#include "sm120_mla.h"

namespace {

constexpr int kThreads = 256, kMaxShared = 101376, kMinStrip = 16, kMaxStrip = 128;

__global__ void __launch_bounds__(kThreads) move_kv_kernel(const uint64_t* pools, const int64_t* src, const int64_t* dst,
                                                           int count, int row_bytes, int strip_bytes) {
  extern __shared__ uint4 staged[];
  const int pieces = min(strip_bytes, row_bytes - int(blockIdx.x) * strip_bytes) / 16;
  char* strip = reinterpret_cast<char*>(pools[blockIdx.y]) + int64_t(blockIdx.x) * strip_bytes;
  for (int n = threadIdx.x; n < count * pieces; n += kThreads) {
    const int i = n / pieces;
    if (dst[i] >= 0) staged[n] = *reinterpret_cast<const uint4*>(strip + src[i] * row_bytes + n % pieces * 16);
  }
  __syncthreads();
  for (int n = threadIdx.x; n < count * pieces; n += kThreads) {
    const int i = n / pieces;
    if (dst[i] >= 0) *reinterpret_cast<uint4*>(strip + dst[i] * row_bytes + n % pieces * 16) = staged[n];
  }
}

}  // namespace

extern "C" int32_t sm120_move_kv_max_rows(void) { return kMaxShared / kMinStrip; }

extern "C" int sm120_move_kv(const uint64_t* pools, int32_t layers, const int64_t* src, const int64_t* dst, int32_t count,
                             int32_t row_bytes, void* stream) {
  if (count == 0 || layers == 0) return cudaSuccess;
  int strip = kMaxStrip;
  while (strip > kMinStrip && int64_t(count) * strip > kMaxShared) strip /= 2;
  const int shared = count * strip;
  const cudaError_t status =
      cudaFuncSetAttribute(move_kv_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  if (status != cudaSuccess) return status;
  const dim3 grid((row_bytes + strip - 1) / strip, layers);
  move_kv_kernel<<<grid, kThreads, shared, static_cast<cudaStream_t>(stream)>>>(pools, src, dst, count, row_bytes, strip);
  return cudaGetLastError();
}
