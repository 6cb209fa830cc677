// Second launch: combines the partial results of split requests, and defines the rows that nothing computed
// (padded requests, rows past the batch): output 0, log-sum-exp -inf. A thread adds up 4 latents over every n-th
// partial; a row is one block, or four where there are few rows.
#include "ptx.cuh"
#include "work.cuh"

namespace sm120::mla {

constexpr int kMaxMergeThreads = 512;
constexpr int kFewRows = 1024;  // up to here a row gets 4 blocks of 512 threads, beyond 1 of 128

// The partials of one row: `count` of them, in slots first, first + stride, ... (the first one in `first_slot`).
struct Partials {
  int count;
  int first_slot;
  int next_slot;  // slot of the second
  int stride;
  __device__ int slot(int i) const { return i == 0 ? first_slot : next_slot + (i - 1) * stride; }
};

__device__ Partials uniform_partials(const Args& a, int b, int row_tile) {
  const int tiles = ceil_div(kv_len(a, b), kTileTokens), per_split = a.ws.plan[0], first = a.ws.plan[1 + b];
  if (tiles == 0) return {};
  const int begin = first / per_split, end = (first + tiles - 1) / per_split;
  const auto block = [&](int split) { return split * a.part.row_tiles + row_tile; };
  return {end - begin + 1, partial_slot(a, block(begin), false), partial_slot(a, block(begin + 1), true),
          2 * a.part.row_tiles};
}

__device__ Partials ragged_partials(const Args& a, int b, int row_tile, int rows) {
  const int tiles = visible_tiles(a, b, row_tile, rows);
  const int block = a.ws.plan[1 + b] + row_tile;
  return {ceil_div(tiles, tiles_per_split(tiles, a.part.splits)), block, block + a.part.row_tiles, a.part.row_tiles};
}

// Request of query token `token`; -1 past the last.
__device__ int request_of(const Args& a, int token) {
  if (!a.p.qo_indptr) return token < a.p.batch * a.p.q_len ? token / a.p.q_len : -1;
  int low = 0, high = a.p.batch;  // qo_indptr[low] <= token < qo_indptr[high], if any
  if (token < a.p.qo_indptr[0] || token >= a.p.qo_indptr[high]) return -1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (a.p.qo_indptr[middle] <= token ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kMaxMergeThreads) merge_kernel(const __grid_constant__ Args a) {
  ptx::wait_for_previous_launch();
  const int64_t global_row = blockIdx.x;
  const int token = global_row / a.p.heads, rows = a.part.row_groups * 8;
  const int b = request_of(a, token);
  Partials partials{};
  int row_in_tile = 0;
  if (b >= 0) {
    const int row = global_row - int64_t(q_begin(a, b)) * a.p.heads;
    row_in_tile = row % rows;
    partials = a.part.ragged ? ragged_partials(a, b, row / rows, rows) : uniform_partials(a, b, row / rows);
  }
  if (partials.count == 1) return;  // the block wrote the result itself

  // Every warp finds the largest log-sum-exp by itself; then each adder takes every n-th partial, and the adders are
  // added in order: two runs give the same bits.
  const auto lse_of = [&](int i) { return a.ws.lse[int64_t(partials.slot(i)) * kMaxRows + row_in_tile]; };
  float peak = -INFINITY;
  for (int i = threadIdx.x % 32; i < partials.count; i += 32) peak = fmaxf(peak, lse_of(i));
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
  const float reference = peak == -INFINITY ? 0.f : peak;

  const int columns = kLatentDim / 4 / gridDim.y, adders = blockDim.x / columns;
  const int adder = threadIdx.x / columns, column = blockIdx.y * columns + threadIdx.x % columns;
  float sum = 0.f;
  float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
  for (int i = adder; i < partials.count; i += adders) {
    const float weight = __expf(lse_of(i) - reference);
    const float4 v = reinterpret_cast<const float4*>(a.ws.out + (int64_t(partials.slot(i)) * kMaxRows + row_in_tile) *
                                                                    kLatentDim)[column];
    sum += weight;
    total.x += weight * v.x, total.y += weight * v.y, total.z += weight * v.z, total.w += weight * v.w;
  }
  __shared__ float4 totals[kMaxMergeThreads];
  __shared__ float sums[kMaxMergeThreads];
  totals[threadIdx.x] = total;
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (adder != 0) return;
  for (int other = threadIdx.x + columns; other < blockDim.x; other += columns) {
    const float4 v = totals[other];
    sum += sums[other];
    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
  }
  const float scale = sum > 0.f ? 1.f / sum : 0.f;
  const uint2 packed = {ptx::pack2<__nv_bfloat16>(total.x * scale, total.y * scale),
                        ptx::pack2<__nv_bfloat16>(total.z * scale, total.w * scale)};
  reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.p.out) + global_row * kLatentDim)[column] = packed;
  if (column == 0) a.p.lse[global_row] = sum > 0.f ? peak + logf(sum) : -INFINITY;
}

int launch_merge(const Args& args, void* stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const unsigned rows = args.p.total_q * args.p.heads;
  config.gridDim = rows <= kFewRows ? dim3(rows, 4) : dim3(rows);
  config.blockDim = dim3(rows <= kFewRows ? kMaxMergeThreads : kLatentDim / 4);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = args.p.early_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, merge_kernel, args);
}

}  // namespace sm120::mla
