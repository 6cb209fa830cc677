// dst[i] <- src[i] in every layer's pool, for many lists by one launch. A block owns one column strip of one layer for
// one list: it stages the strip of all source rows in shared memory and only then writes, so lists that overlap are as
// safe as lists that do not. Copies into shared memory are asynchronous: a block has all of its reads in flight at
// once.
#include <cuda_runtime.h>

#include "ptx.cuh"
#include "sm120_mla.h"

namespace {

constexpr int kMaxThreads = 1024, kMaxShared = 101376, kMinStrip = 16, kMaxStrip = 128;

__global__ void __launch_bounds__(kMaxThreads)
    move_kv_kernel(const uint64_t* pools, const int64_t* src, const int64_t* dst, int count, int row_bytes,
                   int strip_bytes) {
  extern __shared__ uint4 staged[];
  src += int64_t(blockIdx.z) * count;
  dst += int64_t(blockIdx.z) * count;
  const int pieces = min(strip_bytes, row_bytes - int(blockIdx.x) * strip_bytes) / 16;
  char* strip = reinterpret_cast<char*>(pools[blockIdx.y]) + int64_t(blockIdx.x) * strip_bytes;
  const uint32_t target = sm120::ptx::smem_addr(staged);
#pragma unroll 4
  for (int n = threadIdx.x; n < count * pieces; n += blockDim.x) {
    const int i = n / pieces;
    if (dst[i] >= 0) sm120::ptx::cp_async_16(target + n * 16, strip + src[i] * row_bytes + n % pieces * 16);
  }
  sm120::ptx::cp_async_wait_all();
  __syncthreads();
#pragma unroll 4
  for (int n = threadIdx.x; n < count * pieces; n += blockDim.x) {
    const int i = n / pieces;
    if (dst[i] >= 0) *reinterpret_cast<uint4*>(strip + dst[i] * row_bytes + n % pieces * 16) = staged[n];
  }
}

}  // namespace

extern "C" int32_t sm120_move_kv_max_rows(void) { return kMaxShared / kMinStrip; }

extern "C" int sm120_move_kv(const uint64_t* pools, int32_t layers, const int64_t* src, const int64_t* dst,
                             int32_t lists, int32_t count, int32_t row_bytes, void* stream) {
  if (lists == 0 || count == 0 || layers == 0) return cudaSuccess;
  int strip = kMaxStrip;
  while (strip > kMinStrip && int64_t(count) * strip > kMaxShared) strip /= 2;
  const int shared = count * strip;
  const int threads = min(kMaxThreads, (shared / 16 + 31) / 32 * 32);
  const cudaError_t status =
      cudaFuncSetAttribute(move_kv_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  if (status != cudaSuccess) return status;
  const dim3 grid((row_bytes + strip - 1) / strip, layers, lists);
  move_kv_kernel<<<grid, threads, shared, static_cast<cudaStream_t>(stream)>>>(pools, src, dst, count, row_bytes,
                                                                               strip);
  return cudaGetLastError();
}
