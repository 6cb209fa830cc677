// Runs the kernels through their C ABI on the reference bundles that tests/kernels/bundles.py writes.
//
//   bundle_check list FILE...      name, dtype, shape and 64-bit sum of the bytes of every tensor; needs no GPU
//   bundle_check run FILE...       oracle and flash kernel against the expected outputs; exit status 1 if one is off
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "sm120_mla.h"

namespace {

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
};

using Bundle = std::map<std::string, Tensor>;

// safetensors: the header's length in 8 bytes, the header (JSON, flat and without blanks), the data.
Bundle read_bundle(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  uint64_t header_bytes = 0;
  if (text.size() < sizeof(header_bytes)) throw std::runtime_error(path + ": not a safetensors file");
  std::memcpy(&header_bytes, text.data(), sizeof(header_bytes));
  const std::string header = text.substr(sizeof(header_bytes), header_bytes);
  const char* data = text.data() + sizeof(header_bytes) + header_bytes;
  const std::regex entry(R"re("(\w+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),(\d+)\]\})re");
  const std::regex number(R"(\d+)");
  Bundle bundle;
  for (std::sregex_iterator match(header.begin(), header.end(), entry), end; match != end; ++match) {
    Tensor& tensor = bundle[(*match)[1]];
    tensor.dtype = (*match)[2];
    const std::string shape = (*match)[3];
    for (std::sregex_iterator size(shape.begin(), shape.end(), number); size != end; ++size) {
      tensor.shape.push_back(std::stoll(size->str()));
    }
    tensor.bytes.assign(data + std::stoull((*match)[4]), data + std::stoull((*match)[5]));
  }
  if (bundle.empty()) throw std::runtime_error(path + ": no tensors in its header");
  return bundle;
}

void list(const Bundle& bundle) {
  for (const auto& [name, tensor] : bundle) {
    const uint64_t sum = std::accumulate(tensor.bytes.begin(), tensor.bytes.end(), uint64_t{0},
                                         [](uint64_t total, char c) { return total + static_cast<unsigned char>(c); });
    std::printf("%s %s", name.c_str(), tensor.dtype.c_str());
    for (const int64_t size : tensor.shape) std::printf(" %lld", static_cast<long long>(size));
    std::printf(" = %llu\n", static_cast<unsigned long long>(sum));
  }
}

void check(int status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)));
  }
}

// Device memory that holds `bytes`, or all ones.
class Device {
 public:
  explicit Device(const std::vector<char>& bytes) : Device(bytes.size()) {
    check(cudaMemcpy(pointer_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "copy to the device");
  }
  explicit Device(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&pointer_, bytes), "allocation");
    check(cudaMemset(pointer_, 0xff, bytes), "memset");
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(pointer_); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(pointer_);
  }
  template <typename T>
  std::vector<T> read() const {
    std::vector<T> host(bytes_ / sizeof(T));
    check(cudaMemcpy(host.data(), pointer_, bytes_, cudaMemcpyDeviceToHost), "the kernel, or the copy from the device");
    return host;
  }

 private:
  void* pointer_ = nullptr;
  size_t bytes_;
};

float scalar(const Bundle& bundle, const char* name) { return *bundle.at(name).as<float>(); }

// Prints how far the results are from the bundle's and says whether that is within its tolerances. NaN is not.
bool close(const Bundle& bundle, const char* kernel, const Device& out, const Device& lse) {
  const auto got = out.read<__nv_bfloat16>();
  const auto got_lse = lse.read<float>();
  const float *want = bundle.at("out").as<float>(), *want_lse = bundle.at("lse").as<float>();
  double difference = 0, norm = 0, lse_error = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(double(__bfloat162float(got[i])) - want[i], 2);
    norm += std::pow(double(want[i]), 2);
  }
  for (size_t i = 0; i < got_lse.size(); ++i) {
    if (got_lse[i] == want_lse[i]) continue;  // both -inf
    const double error = std::abs(double(got_lse[i]) - want_lse[i]);
    lse_error = std::max(lse_error, std::isnan(error) ? INFINITY : error);
  }
  const double relative = std::sqrt(difference / norm);
  std::printf("  %s: relative error %.2e, log-sum-exp within %.2e\n", kernel, relative, lse_error);
  return relative < scalar(bundle, "max_relative_error") && lse_error < scalar(bundle, "max_lse_error");
}

bool run(const Bundle& bundle) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "no CUDA device");
  const Tensor &query = bundle.at("q"), &kv = bundle.at("kv"), &table = bundle.at("req_to_token");
  const Tensor &indptr = bundle.at("qo_indptr"), &mask = bundle.at("tree_mask");
  const int batch = static_cast<int>(bundle.at("kv_lens").shape[0]);
  const int* starts = indptr.as<int>();
  bool uniform = true;
  for (int b = 1; b < batch; ++b) uniform &= starts[b + 1] - starts[b] == starts[1];

  const Device q(query.bytes), pool(kv.bytes), tokens(table.bytes), requests(bundle.at("req_pool_indices").bytes);
  const Device lengths(bundle.at("kv_lens").bytes), row_starts(indptr.bytes), words(mask.bytes);
  const int64_t rows = query.shape[0] * query.shape[1];
  const Device workspace(sm120_mla_workspace_bytes(device.multiProcessorCount, batch));
  const Device scores(rows * table.shape[1] * sizeof(float));

  sm120_mla_params p{};
  p.q = q.as<void>();
  p.kv = pool.as<void>();
  p.req_to_token = tokens.as<int32_t>();
  p.req_pool_indices = requests.as<int32_t>();
  p.kv_lens = lengths.as<int32_t>();
  p.qo_indptr = uniform ? nullptr : row_starts.as<int32_t>();
  p.tree_mask = words.as<uint32_t>();
  p.workspace = workspace.as<void>();
  p.kv_is_fp8 = kv.dtype == "U8";
  p.kv_stride_bytes = kv.shape[1] * (p.kv_is_fp8 ? 1 : 2);
  p.req_to_token_stride = table.shape[1];
  p.req_pool_indices_stride = p.kv_lens_stride = 1;
  p.batch = batch;
  p.q_len = starts[1];
  p.total_q = static_cast<int32_t>(query.shape[0]);
  p.heads = static_cast<int32_t>(query.shape[1]);
  p.mask_words = static_cast<int32_t>(mask.shape[1]);
  p.num_sms = device.multiProcessorCount;
  p.early_launch = device.major >= 9;
  p.sm_scale = scalar(bundle, "sm_scale");
  p.kv_scale = scalar(bundle, "kv_scale");
  p.logit_cap = scalar(bundle, "logit_cap");

  bool good = true;
  for (const bool flash : {false, true}) {
    const Device out(rows * 512 * sizeof(__nv_bfloat16)), lse(rows * sizeof(float));
    p.out = out.as<void>();
    p.lse = lse.as<float>();
    check(flash ? sm120_mla_verify(&p, nullptr) : sm120_mla_oracle(&p, scores.as<float>(), table.shape[1], nullptr),
          flash ? "sm120_mla_verify" : "sm120_mla_oracle");
    good &= close(bundle, flash ? "flash" : "oracle", out, lse);
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (argc < 3 || (verb != "list" && verb != "run")) {
    std::fprintf(stderr, "usage: bundle_check list|run FILE...\n");
    return 2;
  }
  bool good = true;
  try {
    for (int i = 2; i < argc; ++i) {
      std::printf("%s\n", argv[i]);
      const Bundle bundle = read_bundle(argv[i]);
      if (verb == "list") {
        list(bundle);
      } else {
        good &= run(bundle);
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
  return good ? 0 : 1;
}
