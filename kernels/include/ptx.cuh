// Thin wrappers over the PTX that the kernels use, each named after its instruction (PTX ISA 8.8).
// Everything here exists from sm_80 on; nothing needs a cluster, wgmma or the tensor memory accelerator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sm120::ptx {

__device__ __forceinline__ uint32_t smem_addr(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// cp.async.cg: 16 bytes past L1.
__device__ __forceinline__ void cp_async_16(uint32_t dst_smem, const void* src_gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst_smem), "l"(src_gmem) : "memory");
}

// cp.async.ca: 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t dst_smem, const void* src_gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst_smem), "l"(src_gmem) : "memory");
}

// Waits until all cp.async of this thread have landed.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ld.shared: 4, 16 or 8 bytes.
__device__ __forceinline__ int load_shared(uint32_t address_smem) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address_smem) : "memory");
  return value;
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t address_smem) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address_smem)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t address_smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address_smem) : "memory");
  return v;
}

// st.shared: 4 bytes.
__device__ __forceinline__ void store_shared(uint32_t address_smem, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_smem), "r"(value) : "memory");
}

// cp.async.mbarrier.arrive.noinc: this thread arrives once all its earlier cp.async have landed.
__device__ __forceinline__ void cp_async_arrive(uint32_t mbar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbar) : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint32_t mbar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mbar), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t mbar) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(mbar) : "memory");
}

// Returns once the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t mbar, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}" ::"r"(mbar),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}" ::"r"(mbar),
      "r"(parity)
      : "memory");
#endif
}

// mbarrier.test_wait: whether that phase has completed. Race checkers take only a wait for one: for them
// (SM120_RACECHECK) it never has, and the wait follows.
__device__ __forceinline__ bool mbarrier_test(uint32_t mbar, uint32_t parity) {
#ifdef SM120_RACECHECK
  return false;
#endif
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(mbar), "r"(parity)
      : "memory");
  return done;
}

// bar: waits until `threads` threads, whole warps, have come to the named barrier.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// griddepcontrol (programmatic dependent launch): lets the next launch be set up early; waits for the previous to end.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// %laneid, read anew: what is worked out from it is not kept in registers from before.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// ldmatrix: four (or two) 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_smem)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(row_smem)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_smem)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(row_smem)
               : "memory");
}

// mma.sync m16n8k16, float32 accumulators: d[16 x 8] += a[16 x 16] * b[16 x 8].
template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                         const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two e4m3 bytes (low half of `pair`) to two halves; exact. NaN patterns become +-480 below sm_89.
__device__ __forceinline__ uint32_t e4m3x2_to_half2(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(static_cast<uint16_t>(pair)));
  return out;
#else
  const uint32_t spread = __byte_perm(pair, 0, 0x1404);  // byte 0 -> bits 8..15, byte 1 -> bits 24..31
  const uint32_t bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.0f));  // bias 15 - 7
  return *reinterpret_cast<const uint32_t*>(&scaled);
#endif
}

// Four e4m3 bytes, the low two and the high two: without a shift where cvt takes either half of a register.
__device__ __forceinline__ void e4m3x4_to_half2(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  low = e4m3x2_to_half2(bytes), high = e4m3x2_to_half2(bytes >> 16);
#endif
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Packs two floats, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// ld.global: brings a line to L1; nobody waits for it.
__device__ __forceinline__ void touch(const int32_t* pointer_gmem) {
  [[maybe_unused]] int value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer_gmem));
}

}  // namespace sm120::ptx
