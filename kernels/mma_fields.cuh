// Instructions that CUDA C++ has no name for, and the codes of a word as operands of a matrix instruction.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float half_to_float(u32 h) {
  float f;
  asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h));
  return f;
}
__device__ __forceinline__ u32 halves(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy_async(u32 to, const u8* from) {  // 16 bytes, global to shared memory
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float((u32)(127 + n) << 23); }

// WORDS consecutive words of shared memory, in the widest loads that they fill.
template <int WORDS>
__device__ __forceinline__ void load_words(u32 (&w)[WORDS], u32 from) {
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a lane reads 4, 8 or 16 bytes at a time");
  if constexpr (WORDS == 4)
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
  else if constexpr (WORDS == 2)
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(from) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(from) : "memory");
}

// The codes of a 32-bit word, two at a time: one from each half.
template <int BITS>
struct Fields {
  static constexpr int COUNT = 16 / BITS;                    // pairs in a word
  static constexpr int REACH = BITS == 16 ? 1 : 10 / BITS;   // pairs that lie inside the 10 mantissa bits
  static constexpr u32 MASK = BITS == 16 ? ~0u : ((1u << (BITS % 16)) - 1) * 0x10001u;
  __device__ static __forceinline__ u32 pair(u32 word, int i) {
    return BITS == 16 ? word : (word >> (i / REACH * REACH * BITS)) & (MASK << (i % REACH * BITS));
  }
  __device__ static __forceinline__ constexpr int lift(int i) { return BITS == 16 ? 0 : i % REACH * BITS; }  // the pair is 2^lift too large ...
  static constexpr int SMALL = BITS == 16 ? 0 : 24;                               // ... and 2^SMALL too small
};
