// Host side of the verify kernel: how a launch is divided (from shapes only, never from lengths) and which instance
// runs.
#include "args.h"

namespace sm120::mla {
namespace {

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Uniform q beyond this goes the ragged way, where a row tile skips the KV that its causal mask hides.
constexpr int kLongQuery = 256;

// Blocks that share one row tile's context: enough to fill the SMs, in whole waves where there are many row tiles.
int choose_splits(int row_tiles, int num_sms) {
  if (row_tiles <= num_sms) {
    const int one_wave = num_sms / row_tiles, two_waves = 2 * num_sms / row_tiles;
    // 2 row tiles of 132: 66 splits in one wave. 100 of 132: one wave would idle 32 SMs, so would two: keep one.
    const double used_one = double(one_wave * row_tiles) / num_sms,
                 used_two = double(two_waves * row_tiles) / (2 * num_sms);
    return used_one + 0.1 >= used_two ? one_wave : two_waves;
  }
  return 1;
}

Partition partition(const sm120_mla_params& p) {
  Partition part{};
  part.ragged = p.qo_indptr != nullptr || p.q_len > kLongQuery;
  const int64_t rows = int64_t(part.ragged ? p.total_q : p.q_len) * p.heads;
  const int tiles = ceil_div(rows, kMaxRows);
  part.row_groups = ceil_div(ceil_div(rows, tiles), 8);
  part.row_tiles = ceil_div(rows, part.row_groups * 8) + (part.ragged ? p.batch - 1 : 0);
  part.splits = choose_splits(part.row_tiles, p.num_sms);
  return part;
}

template <typename Kv>
int dispatch(const Args& args, int blocks, void* stream) {
  switch (args.part.row_groups) {
    case 1:
      return launch<Kv, 1>(args, blocks, stream);
    case 2:
      return launch<Kv, 2>(args, blocks, stream);
    case 3:
      return launch<Kv, 3>(args, blocks, stream);
    case 4:
      return launch<Kv, 4>(args, blocks, stream);
    case 5:
      return launch<Kv, 5>(args, blocks, stream);
    default:
      return launch<Kv, 6>(args, blocks, stream);
  }
}

size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The workspace, in this order.
size_t partial_rows(int num_sms) { return size_t(kPartialSlotsPerSm) * num_sms * kMaxRows; }
size_t out_bytes(int num_sms) { return align(partial_rows(num_sms) * kLatentDim * sizeof(__half)); }
size_t exponent_bytes(int num_sms) { return align(partial_rows(num_sms) * kRowShares); }
size_t lse_bytes(int num_sms) { return align(partial_rows(num_sms) * sizeof(float)); }
size_t plan_bytes(int max_batch) { return align((max_batch + 1) * sizeof(int32_t)); }

Workspace workspace(const sm120_mla_params& p) {
  char* out = static_cast<char*>(p.workspace);
  char* exponent = out + out_bytes(p.num_sms);
  char* lse = exponent + exponent_bytes(p.num_sms);
  char* plan = lse + lse_bytes(p.num_sms);
  return {reinterpret_cast<int32_t*>(plan), reinterpret_cast<float*>(lse), reinterpret_cast<uint8_t*>(exponent),
          reinterpret_cast<__half*>(out)};
}

}  // namespace
}  // namespace sm120::mla

extern "C" {

int sm120_mla_abi(void) { return SM120_MLA_ABI; }

size_t sm120_mla_workspace_bytes(int32_t num_sms, int32_t max_batch) {
  using namespace sm120::mla;
  return out_bytes(num_sms) + exponent_bytes(num_sms) + lse_bytes(num_sms) + plan_bytes(max_batch);
}

int32_t sm120_mla_splits(int32_t q_len, int32_t heads, int32_t num_sms) {
  sm120_mla_params shape{};
  shape.q_len = shape.total_q = q_len;
  shape.heads = heads;
  shape.num_sms = num_sms;
  shape.batch = 1;
  return sm120::mla::partition(shape).splits;
}

int sm120_mla_verify(const sm120_mla_params* params, void* stream) {
  using namespace sm120::mla;
  if (params->total_q == 0) return cudaSuccess;
  if (params->batch <= 0) return cudaErrorInvalidValue;  // rows of no request
  const Args args{*params, partition(*params), workspace(*params)};
  const int blocks = args.part.row_tiles * args.part.splits;
  const int status = params->kv_is_fp8 ? dispatch<Fp8Kv>(args, blocks, stream) : dispatch<Bf16Kv>(args, blocks, stream);
  return status != cudaSuccess ? status : launch_merge(args, stream);
}

}  // extern "C"
