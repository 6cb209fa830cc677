// Flash attention of absorbed MLA with split context, for GPUs whose tensor cores are driven by mma.sync.
//
// A block holds up to 48 query rows (new tokens x heads of one request) and walks the KV in tiles of 16 tokens. Both
// products are taken transposed, so that query rows are the mma's n dimension (granularity 8, not 16):
//
//   S^T [16 tokens x rows] = K [16 x 576] . Q^T [576 x rows]    4 score warps (score.cuh): a quarter of the columns
//                                                               each, or half of them for half of the rows
//   O^T [512 x rows] += V^T [512 x 16] . P^T [16 x rows]        4 value warps (value.cuh): 128 of 512 latents each
//
//   gmem --cp.async (score warps)--> stage [16][576], permuted --ldmatrix--> partial S^T, 4 or 2 an element
//        --(value warps: sum, online softmax, a quarter of the elements each)--> probs [16][rows]
//        stage --ldmatrix.trans--> V^T,  probs --ldmatrix.trans--> P^T  --> O^T in registers
//
// Q^T lives in the score warps' registers, O^T in the value warps'. A latent row is copied to shared memory once, and
// read there as key and as value, whatever the number of heads.
//
// A scheduler holds one warp of each role. What a warp waits for, it asks for some products before it needs it: the
// roles meet at mbarriers (pipeline.cuh), the value warps among themselves at a named barrier for the probabilities.
#pragma once

#include "score.cuh"
#include "value.cuh"

namespace sm120::mla {

template <typename Kv, int RowGroups>
__global__ void __launch_bounds__(kThreads, 1) verify_kernel(const __grid_constant__ Args a) {
  using Cfg = Config<Kv, RowGroups>;
  extern __shared__ __align__(128) char smem[];
  const BarriersOf<Cfg> bars{ptx::smem_addr(smem + Cfg::kBarriers)};
  if (threadIdx.x == 0) init_barriers<Cfg>(bars);
  if (threadIdx.x < kProbBuffers) reinterpret_cast<int*>(smem + Cfg::kRises)[threadIdx.x] = 0;
  ptx::launch_dependents();  // the merge may be set up; it waits for this grid to end
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  Work& found = *reinterpret_cast<Work*>(smem + Cfg::kWork);
  if (warp == 0) {
    const Work share = locate_share(a, Cfg::kRows);
    if (lane == 0) found = share;
  } else if (warp == 1 && lane < a.p.batch) {  // looked up next, once it is known which
    ptx::touch(a.p.req_pool_indices + int64_t(lane) * a.p.req_pool_indices_stride);
  }
  __syncthreads();
  const Work work = uniform(found);
  if (work.left == 0) return;
  if (warp < kScoreWarps) {
    ScoreRole<Kv, RowGroups>(a, smem, bars, work, warp, lane).run(work);
  } else {
    ValueRole<Kv, RowGroups>(a, smem, bars, warp - kScoreWarps, lane).run();
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
