// Second launch: combines the partial results of split requests, and defines the rows that nothing computed
// (padded requests, rows past the batch): output 0, log-sum-exp -inf. A thread adds up 8 latents over every n-th
// partial; a row is one block, or four where there are few rows.
#include "partial.cuh"
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

// Tiles of a split, and the first tile of request b, as the verify kernel planned them. Where a warp holds the batch it
// works them out again, for that need not wait until the other launch ends.
struct Plan {
  int per_split, first_tile;
};

__device__ Plan find_plan(const Args& a, int b) {
  if (a.p.batch > 32) {
    ptx::wait_for_previous_launch();
    return {a.ws.plan[0], a.ws.plan[1 + b]};
  }
  const int lane = threadIdx.x % 32;
  const int own = lane < a.p.batch ? ceil_div(kv_len(a, lane), kTileTokens) : 0;
  const int upto = sum_up_to_lane(own);
  return {tiles_per_split(__shfl_sync(~0u, upto, 31), a.part.splits), __shfl_sync(~0u, upto - own, b)};
}

__device__ Partials uniform_partials(const Args& a, int b, int row_tile) {
  const Plan plan = find_plan(a, b);
  const int tiles = ceil_div(kv_len(a, b), kTileTokens);
  if (tiles == 0) return {};
  const int begin = plan.first_tile / plan.per_split, end = (plan.first_tile + tiles - 1) / plan.per_split;
  const auto block = [&](int split) { return split * a.part.row_tiles + row_tile; };
  return {end - begin + 1, partial_slot(a, block(begin), false), partial_slot(a, block(begin + 1), true),
          2 * a.part.row_tiles};
}

__device__ Partials ragged_partials(const Args& a, int b, int row_tile, int rows) {
  ptx::wait_for_previous_launch();
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

// 8 latents of a partial, half a share.
struct Values {
  uint4 halves;
  uint32_t exponent;
};

// Weighted sum of those of several partials, and of their weights.
struct Sum {
  float weight = 0.f;
  float value[8] = {};

  __device__ void add(float partial_weight, const Values& v) {
    const float unit_weight = partial_weight * worth_of_unit(v.exponent);
    const uint32_t words[4] = {v.halves.x, v.halves.y, v.halves.z, v.halves.w};
    weight += partial_weight;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
      value[2 * k] += unit_weight * pair.x, value[2 * k + 1] += unit_weight * pair.y;
    }
  }
};

// A thread is one of `adders` that take every n-th partial each, for one of `chunks` of 8 elements of a row; its first
// values are fetched before their weights are known. Adders are added in order: two runs give the same bits.
__global__ void __launch_bounds__(kMaxMergeThreads) merge_kernel(const __grid_constant__ Args a) {
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
  ptx::wait_for_previous_launch();  // by every block: the next launch takes the end of this one for the end of both
  if (partials.count == 1) return;  // the block wrote the result itself

  const int chunks = kLatentDim / 8 / gridDim.y, adders = blockDim.x / chunks;
  const int adder = threadIdx.x / chunks, chunk = threadIdx.x % chunks, first_element = blockIdx.y * chunks * 8;
  const auto row_of = [&](int i) { return partials.slot(i) * kMaxRows + row_in_tile; };
  const auto values_of = [&](int i) -> Values {
    const int element = first_element + chunk * 8;
    return {*reinterpret_cast<const uint4*>(a.ws.out + row_of(i) * kLatentDim + element),
            a.ws.exponent[row_of(i) * kRowShares + element / kShareLatents]};
  };
  constexpr int kEarly = 3;
  Values early[kEarly];
#pragma unroll
  for (int k = 0; k < kEarly; ++k) {
    if (adder + k * adders < partials.count) early[k] = values_of(adder + k * adders);
  }
  float peak = -INFINITY;  // the largest log-sum-exp, found by every warp for itself
  for (int i = threadIdx.x % 32; i < partials.count; i += 32) peak = fmaxf(peak, a.ws.lse[row_of(i)]);
  for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
  const float reference = peak == -INFINITY ? 0.f : peak;
  const auto weight_of = [&](int i) { return __expf(a.ws.lse[row_of(i)] - reference); };

  Sum sum;
#pragma unroll
  for (int k = 0; k < kEarly; ++k) {
    const int i = adder + k * adders;
    if (i < partials.count) sum.add(weight_of(i), early[k]);
  }
#pragma unroll 2
  for (int i = adder + kEarly * adders; i < partials.count; i += adders) sum.add(weight_of(i), values_of(i));

  __shared__ float values[kMaxMergeThreads * 8];  // [adder][element]
  __shared__ float weights[kMaxMergeThreads];     // [adder]
  for (int k = 0; k < 8; k += 4) {
    *reinterpret_cast<float4*>(&values[threadIdx.x * 8 + k]) = {sum.value[k], sum.value[k + 1], sum.value[k + 2],
                                                                sum.value[k + 3]};
  }
  if (chunk == 0) weights[adder] = sum.weight;
  __syncthreads();
  for (int element = threadIdx.x; element < chunks * 8; element += blockDim.x) {
    float weight = 0.f, value = 0.f;
#pragma unroll 8
    for (int i = 0; i < adders; ++i) weight += weights[i], value += values[i * chunks * 8 + element];
    const int latent = partial_latent(a.p.kv_is_fp8, first_element + element);
    static_cast<__nv_bfloat16*>(a.p.out)[global_row * kLatentDim + latent] =
        __float2bfloat16(weight > 0.f ? value / weight : 0.f);
    if (latent == 0) a.p.lse[global_row] = weight > 0.f ? peak + logf(weight) : -INFINITY;
  }
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
