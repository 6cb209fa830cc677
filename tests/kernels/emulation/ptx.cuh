// Stands in for kernels/include/ptx.cuh where the verify kernel runs on a CPU (test_emulated.py): the same names, and
// the CUDA built-ins that the kernel uses. Every thread of a block is a fiber; an instruction of a whole warp waits for
// its 32 lanes; cp.async spoils its target at once and lands late; a look at a barrier may miss that it has completed.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

constexpr int kWarpLanes = 32, kSharedBytes = 101376;
constexpr uint32_t kSharedBase = 1024;  // shared-memory addresses start here: 0 is never one

struct Warp;
struct Fiber {
  uint3 thread{};
  int lane = 0;
  Warp* warp = nullptr;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  const char* waits_for = "";
  bool finished = false;
  int copies = 0;                                  // cp.async on their way
  bool waits_for_copies = false;                   // until there are none
  std::vector<std::pair<int, uint32_t>> arrivals;  // (copies that are to land before it, mbarrier)
};

extern Fiber* current;
extern uint3 block_index;
extern dim3 block_size, grid_size;
extern char* shared;
extern std::mt19937 random;

// Called by every lane of the current warp with its own arguments; the last lane runs `all` on those of all lanes.
void collective(const char* name, void* arguments, void (*all)(void**));
// Ends the process: the kernel did what the hardware would not define.
[[noreturn]] void fail(const char* what);
void barrier(int id, int threads);
void mbarrier_init(uint32_t mbarrier, uint32_t arrivals);
void mbarrier_arrive(uint32_t mbarrier);
bool mbarrier_completed(uint32_t mbarrier, uint32_t parity);
void mbarrier_wait(uint32_t mbarrier, uint32_t parity);
void copy_async(uint32_t to, const void* from, int bytes);
void copy_async_arrive(uint32_t mbarrier);
void copy_async_wait_all();

inline char* at(uint32_t address, uint32_t bytes) {
  if (address < kSharedBase || address + bytes > kSharedBase + kSharedBytes) fail("address outside shared memory");
  if (address % bytes != 0) fail("misaligned shared-memory access");
  return shared + (address - kSharedBase);
}

template <typename T>
T shuffle(T mine, int source) {
  struct Lane {
    T mine;
    int source;
    T out;
  } lane{mine, source, mine};
  collective("shfl", &lane, [](void** lanes) {
    for (int i = 0; i < kWarpLanes; ++i) {
      auto* own = static_cast<Lane*>(lanes[i]);
      own->out = static_cast<Lane*>(lanes[own->source])->mine;
    }
  });
  return lane.out;
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

using std::max;
using std::min;

template <typename T>
T __shfl_sync(unsigned, T mine, int source) {
  return emulation::shuffle(mine, source);
}
template <typename T>
T __shfl_xor_sync(unsigned, T mine, int mask) {
  return emulation::shuffle(mine, emulation::current->lane ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T mine, int delta) {
  const int lane = emulation::current->lane;
  return emulation::shuffle(mine, lane < delta ? lane : lane - delta);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  std::pair<bool, unsigned> lane{mine, 0};
  emulation::collective("ballot", &lane, [](void** lanes) {
    unsigned all = 0;
    for (int i = 0; i < emulation::kWarpLanes; ++i) all |= unsigned(static_cast<decltype(&lane)>(lanes[i])->first) << i;
    for (int i = 0; i < emulation::kWarpLanes; ++i) static_cast<decltype(&lane)>(lanes[i])->second = all;
  });
  return lane.second;
}
inline bool __all_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) == ~0u; }
inline void __syncwarp() {
  emulation::collective("syncwarp", nullptr, [](void**) {});
}
inline void __syncthreads() { emulation::barrier(0, emulation::block_size.x); }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
}
inline float __fdividef(float a, float b) { return a / b; }
#define __expf expf
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

namespace sm120::ptx {

inline uint32_t smem_addr(const void* pointer) {
  return uint32_t(static_cast<const char*>(pointer) - emulation::shared) + emulation::kSharedBase;
}
inline void cp_async_16(uint32_t to, const void* from) { emulation::copy_async(to, from, 16); }
inline void cp_async_4(uint32_t to, const void* from) { emulation::copy_async(to, from, 4); }
inline void cp_async_wait_all() { emulation::copy_async_wait_all(); }
inline void cp_async_arrive(uint32_t mbar) { emulation::copy_async_arrive(mbar); }
template <typename T>
T load(uint32_t address) {
  T value;
  std::memcpy(&value, emulation::at(address, sizeof value), sizeof value);
  return value;
}
inline int load_shared(uint32_t address) { return load<int>(address); }
inline float4 load_shared_float4(uint32_t address) { return load<float4>(address); }
inline float2 load_shared_float2(uint32_t address) { return load<float2>(address); }
inline void store_shared(uint32_t address, uint32_t value) { std::memcpy(emulation::at(address, 4), &value, 4); }

inline void mbarrier_init(uint32_t mbar, uint32_t arrivals) { emulation::mbarrier_init(mbar, arrivals); }
inline void mbarrier_arrive(uint32_t mbar) { emulation::mbarrier_arrive(mbar); }
inline void mbarrier_wait(uint32_t mbar, uint32_t parity) { emulation::mbarrier_wait(mbar, parity); }
inline bool mbarrier_test(uint32_t mbar, uint32_t parity) {
  return emulation::mbarrier_completed(mbar, parity) && emulation::random() % 4 != 0;
}
inline void barrier_sync(int id, int threads) { emulation::barrier(id, threads); }
inline void launch_dependents() {}
inline void wait_for_previous_launch() {}
inline void touch(const int32_t*) {}
inline int lane_id() { return emulation::current->lane; }

template <int Matrices, bool Transposed>
void ldmatrix(uint32_t* out, uint32_t row) {
  std::pair<uint32_t*, uint32_t> lane{out, row};
  emulation::collective("ldmatrix", &lane, [](void** lanes) {
    for (int matrix = 0; matrix < Matrices; ++matrix) {
      uint16_t element[8][8];
      for (int i = 0; i < 8; ++i) {
        const uint32_t from = static_cast<decltype(&lane)>(lanes[8 * matrix + i])->second;
        std::memcpy(element[i], emulation::at(from, 16), 16);
      }
      for (int i = 0; i < emulation::kWarpLanes; ++i) {
        const int g = i / 4, t = i % 4;
        const uint32_t low = Transposed ? element[2 * t][g] : element[g][2 * t];
        const uint32_t high = Transposed ? element[2 * t + 1][g] : element[g][2 * t + 1];
        static_cast<decltype(&lane)>(lanes[i])->first[matrix] = low | high << 16;
      }
    }
  });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) { ldmatrix<4, false>(r, row); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) { ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t row) {
  uint32_t r[2];
  ldmatrix<2, false>(r, row);
  r0 = r[0], r1 = r[1];
}
inline void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t row) {
  uint32_t r[2];
  ldmatrix<2, true>(r, row);
  r0 = r[0], r1 = r[1];
}

template <typename T>
float element(uint32_t pair, int half) {
  const auto bits = uint16_t(pair >> (16 * half));
  T value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

template <typename T>
void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Lane {
    float* d;
    const uint32_t *a, *b;
  } lane{d, a, b};
  emulation::collective(std::is_same_v<T, __half> ? "mma half" : "mma bf16", &lane, [](void** lanes) {
    static float left[16][16], right[16][8], sum[16][8];
    const auto of = [&](int i) { return *static_cast<Lane*>(lanes[i]); };
    for (int i = 0; i < emulation::kWarpLanes; ++i) {
      const int g = i / 4, t = i % 4;
      for (int h = 0; h < 2; ++h) {
        for (int r = 0; r < 4; ++r) left[g + 8 * (r % 2)][2 * t + h + 8 * (r / 2)] = element<T>(of(i).a[r], h);
        for (int r = 0; r < 2; ++r) right[2 * t + h + 8 * r][g] = element<T>(of(i).b[r], h);
      }
      for (int r = 0; r < 4; ++r) sum[g + 8 * (r / 2)][2 * t + r % 2] = of(i).d[r];
    }
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 8; ++n) sum[m][n] += left[m][k] * right[k][n];
      }
    }
    for (int i = 0; i < emulation::kWarpLanes; ++i) {
      for (int r = 0; r < 4; ++r) of(i).d[r] = sum[i / 4 + 8 * (r / 2)][2 * (i % 4) + r % 2];
    }
  });
}

template <typename T>
uint32_t pack2(float low, float high) {
  const T values[2] = {T(low), T(high)};
  uint32_t bits;
  std::memcpy(&bits, values, 4);
  return bits;
}

inline float e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float magnitude = exponent == 15 && mantissa == 7 ? NAN
                          : exponent > 0                  ? std::ldexp(8.f + mantissa, exponent - 10)
                                                          : std::ldexp(float(mantissa), -9);
  return byte & 128 ? -magnitude : magnitude;
}
inline uint32_t e4m3x2_to_half2(uint32_t pair) { return pack2<__half>(e4m3(pair & 0xff), e4m3(pair >> 8 & 0xff)); }
inline void e4m3x4_to_half2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  low = e4m3x2_to_half2(bytes), high = e4m3x2_to_half2(bytes >> 16);
}
inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace sm120::ptx
