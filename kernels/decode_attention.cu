// Decode attention over unified pages: one launch reads each code of a KV head once for all its query heads, merges the
// parts of a split sequence, and adds this step's attention to the token scores. DiffKV section 5.3; the kernel is ours.
//
// What makes it as quick as its bytes allow:
//  * Codes go to the tensor cores without becoming numbers first. A field of an FP16 mantissa *is* the half-precision
//    subnormal code * 2^-24 * 2^position, so one AND turns two codes into two operands; the powers of two are taken back
//    from the query (keys) or from the result (values).
//  * q.(s c + z) = s (q.c) + z sum(q) and sum p (s c + z) = sum (p s) c + sum p z: scales touch logits, never codes.
//  * The sum over channels, and over tokens, may run in any order. The order is chosen so that 16-byte loads of the page
//    are already the operand of m16n8k16 in the lane that needs it (keys: a token a row; values: two tokens a word).
//  * Tokens are the 16 rows of the product, query heads its 8 columns, so a GQA group costs what one head costs.
//  * A thread-block cluster shares a sequence: partial results meet in distributed shared memory. Probabilities wait in
//    shared memory, in half precision and relative to the maximum so far, until the softmax is known; so scores cost a
//    read and a write of 4 bytes a token and no second launch.
//
// Compiled for one shape: HEAD_DIM, GROUP (query heads a KV head, at most 8), WARPS, STAGES, CLUSTER, PAGE_BYTES,
// TIERS (1 or 2), and for tier i: K_BITS_i, V_BITS_i, TOKENS_i, K_SCALES_i, VALUES_i, V_SCALES_i, SCORES_i (bytes),
// UNITS_i (1 or 2);
// UPDATE_SCORES, BFLOAT16 (type of query and output). No header is needed.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int D = HEAD_DIM;
constexpr int MIN_BLOCKS = BLOCKS_PER_SM;
constexpr float LOWEST = -1e30f;
constexpr float SLACK = 8.f;     // powers of two by which a probability may exceed the running maximum
constexpr int PAIRS_OF_HEADS = (GROUP + 1) / 2;

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

template <int K_BITS, int V_BITS, int TOKENS_, int K_SCALES_, int VALUES_, int V_SCALES_, int SCORES_, int UNITS_>
struct Tier {
  using Key = Fields<K_BITS>;
  using Value = Fields<V_BITS>;
  static constexpr int TOKENS = TOKENS_, K_SCALES = K_SCALES_, VALUES = VALUES_, V_SCALES = V_SCALES_;
  static constexpr int SCORES = SCORES_;
  static constexpr int UNITS = UNITS_, STEP = 16 * UNITS;             // a warp takes a step at a time: units of 16 tokens
  static constexpr int WAITING = UPDATE_SCORES ? (4 * STEP + 8) * PAIRS_OF_HEADS : 0;  // bytes: halves, then maxima
  static constexpr bool KEY_SCALED = K_BITS < 16, VALUE_SCALED = V_BITS < 16;
  static constexpr int STEPS = (TOKENS + STEP - 1) / STEP;            // of a page
  static constexpr int TAIL = TOKENS - (STEPS - 1) * STEP;            // tokens of a page's last step
  static constexpr int K_ROW = D * K_BITS / 8, V_ROW = D * V_BITS / 8;
  static constexpr int K_LANE = K_ROW / 16, V_LANE = V_ROW / 16;  // words a lane reads of a token, of a pair of tokens
  static constexpr int K_LOAD = K_LANE < 4 ? K_LANE : 4, V_LOAD = V_LANE < 4 ? V_LANE : 4;
  static_assert(K_ROW >= 16 && V_ROW >= 16, "four lanes share a row of keys, eight a row of a pair of values");
  static constexpr int S_VALUES = STEP * K_ROW, S_K_SCALES = S_VALUES + STEP * V_ROW, S_V_SCALES = S_K_SCALES + 4 * STEP;
  static constexpr int STAGE = S_V_SCALES + 4 * STEP;  // bytes of a step in shared memory

  // Chunks of 16 bytes are permuted within a row, so that the lanes that read together meet different banks.
  __device__ static __forceinline__ int key_swizzle(int row) { return K_ROW >= 128 ? (row & 1) << 2 : 0; }
  __device__ static __forceinline__ int value_swizzle(int pair) {
    return V_LANE == 1   ? 0
           : V_LANE == 2 ? (pair >> 1 & 1) << 1
           : V_LANE == 4 ? (pair & 3) << 1
           : V_LANE == 8 ? (pair & 1) | (pair & 2) << 1
                         : pair & 3;
  }
  __device__ static int steps(int tokens) { return tokens / TOKENS * STEPS + (tokens % TOKENS + STEP - 1) / STEP; }

  // Tokens of step ``sub`` of a page when ``left`` of the sequence remain from the page's first on.
  __device__ static __forceinline__ int valid(int sub, int left) { return min(STEP, min(TOKENS, left) - STEP * sub); }

  // Step ``sub`` of a page, up to the end of the page; tokens that are not there are masked where they are used.
  __device__ static __forceinline__ void fetch(u32 stage, const u8* page, int sub, int lane) {
    const int tokens = TAIL < STEP && sub == STEPS - 1 ? TAIL : STEP;
    const u8* keys = page + sub * (STEP * K_ROW) + 16 * lane;
    const u8* values = page + VALUES + sub * (STEP * V_ROW) + 16 * lane;
#pragma unroll
    for (int i = 0; i < STEP * K_ROW / 16; i += 32) {
      int row = (i + lane) * 16 / K_ROW;
      if (i + lane < tokens * K_ROW / 16)
        copy_async(stage + (16 * (lane ^ key_swizzle(row)) + 16 * i), keys + 16 * i);
    }
#pragma unroll
    for (int i = 0; i < STEP * V_ROW / 16; i += 32) {
      int pair = (i + lane) * 8 / V_ROW;
      if (i + lane < (tokens + 1) / 2 * 2 * V_ROW / 16)
        copy_async(stage + (S_VALUES + 16 * (lane ^ value_swizzle(pair)) + 16 * i), values + 16 * i);
    }
    constexpr int CHUNKS = STEP / 4;  // of either kind of scales
    const bool of_keys = lane < CHUNKS;
    if (of_keys ? KEY_SCALED : VALUE_SCALED && lane < 2 * CHUNKS)
      copy_async(stage + S_K_SCALES + 16 * lane,
                 page + (of_keys ? K_SCALES : V_SCALES) + 4 * STEP * sub + 16 * (lane & (CHUNKS - 1)));
  }
};

// Where the channels of operand i of the key product lie, for lane column c: low half at the result, high half COUNT on.
template <class T>
__device__ __forceinline__ int channel_of(int i, int c) {
  using F = typename T::Key;
  int word = i / F::COUNT, field = i % F::COUNT;
  int in_row = word / T::K_LOAD * 4 * T::K_LOAD + c * T::K_LOAD + word % T::K_LOAD;
  return in_row * 2 * F::COUNT + field;
}

struct State {
  float query_scale[2], query_sum[2];  // of query heads 2c and 2c + 1
  float top[2], weight[2], zeros[2];   // running maximum, sum of p, sum of p z
  float shrink;                        // power of two that brings value scales to about 1
  float limit;                         // SLACK, and LOWEST before the first step: that sets the references
  float out[D / 16][4];                // [slot pair][row r: heads 2c, 2c + 1; row r + 8: the same]
  u32 query[D / 8];
};

template <class T>
__device__ __forceinline__ void enter(State& s, const u16* query, const float* query_scale, int lane) {
  using F = typename T::Key;
  const u16* own = query + (lane >> 2) * D;
#pragma unroll
  for (int h = 0; h < 2; ++h) s.query_scale[h] = query_scale[2 * (lane & 3) + h] * power_of_two(F::SMALL);
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    int channel = channel_of<T>(i, lane & 3), lift = F::lift(i % F::COUNT);
    float factor = power_of_two(-lift);
    s.query[i] = halves(half_to_float(own[channel]) * factor, half_to_float(own[channel + F::COUNT]) * factor);
  }
}

template <class T, bool IN>
__device__ __forceinline__ void rescale_slots(State& s) {
  using F = typename T::Value;
#pragma unroll
  for (int m = 0; m < D / 16; ++m)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      int power = F::lift((2 * m + k) % F::COUNT) - F::SMALL;
      float factor = power_of_two(IN ? power : -power);
      s.out[m][2 * k] *= factor;
      s.out[m][2 * k + 1] *= factor;
    }
}

// By how much the maximum rises (x, y: powers of two), and the factor by which ``shrink`` falls (z), for the whole warp.
__device__ __noinline__ float3 raised(float2 above, float least, float shrink, float scale) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    above.x = fmaxf(above.x, __shfl_xor_sync(~0u, above.x, lanes));
    above.y = fmaxf(above.y, __shfl_xor_sync(~0u, above.y, lanes));
    scale = fmaxf(scale, __shfl_xor_sync(~0u, scale, lanes));
  }
  // The exponent alone, so that dividing by it is exact; FP16 has no scale below 2^-24.
  float reference = __uint_as_float(__float_as_uint(fmaxf(scale, 5.9604645e-8f)) & 0xff800000u);
  return make_float3(fmaxf(above.x, least), fmaxf(above.y, least), fminf(1.f, 1.f / (reference * shrink)));
}

// One step. Lane (r, c) has tokens r and r + 8 of each unit of 16, and query heads 2c and 2c + 1.
template <class T>
__device__ __forceinline__ void attend(State& s, u32 stage, int valid, u32 waiting, int lane) {
  using K = typename T::Key;
  using V = typename T::Value;
  constexpr int UNITS = T::UNITS, STEP = T::STEP;
  const int r = lane >> 2, c = lane & 3;

  float product[UNITS][4] = {};
#pragma unroll
  for (int n = 0; n < T::K_LANE / T::K_LOAD; ++n)
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      u32 near[T::K_LOAD], far[T::K_LOAD];
      u32 at = stage + 16 * u * T::K_ROW;
      at += T::K_LOAD == 4 ? 16u * ((r * (T::K_ROW / 16) + n * 4 + c) ^ T::key_swizzle(r)) : r * T::K_ROW + c * 4 * T::K_LOAD;
      load_words(near, at);
      load_words(far, at + 8 * T::K_ROW);
      constexpr int PAIRS = T::K_LOAD * K::COUNT;
#pragma unroll
      for (int i = 0; i < PAIRS; i += 2) {
        int q = n * PAIRS + i;
        mma(product[u], K::pair(near[i / K::COUNT], i % K::COUNT), K::pair(far[i / K::COUNT], i % K::COUNT),
            K::pair(near[(i + 1) / K::COUNT], (i + 1) % K::COUNT), K::pair(far[(i + 1) / K::COUNT], (i + 1) % K::COUNT),
            s.query[q], s.query[q + 1]);
      }
    }

  // Logits, in powers of two above the running maximum.
  float above[2 * UNITS][2], scale[2 * UNITS], zero[2 * UNITS];
#pragma unroll
  for (int t = 0; t < 2 * UNITS; ++t) {
    float k_scale = 1.f, k_zero = 0.f;
    scale[t] = 1.f, zero[t] = 0.f;
    if (T::KEY_SCALED) {
      u32 w[1];
      load_words(w, stage + T::S_K_SCALES + 4 * r + 32 * t);
      k_scale = half_to_float(w[0] & 0xffff), k_zero = half_to_float(w[0] >> 16);
    }
    if (T::VALUE_SCALED) {
      u32 w[1];
      load_words(w, stage + T::S_V_SCALES + 4 * r + 32 * t);
      scale[t] = half_to_float(w[0] & 0xffff), zero[t] = half_to_float(w[0] >> 16);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      above[t][h] = product[t / 2][t % 2 * 2 + h] * (k_scale * s.query_scale[h]) + (k_zero * s.query_sum[h] - s.top[h]);
  }
  if (valid < STEP)
#pragma unroll
    for (int t = 0; t < 2 * UNITS; ++t)
      if (r + 8 * t >= valid) above[t][0] = above[t][1] = LOWEST, scale[t] = zero[t] = 0.f;

  float most[2] = {above[0][0], above[0][1]}, largest = scale[0];
#pragma unroll
  for (int t = 1; t < 2 * UNITS; ++t) {
    most[0] = fmaxf(most[0], above[t][0]), most[1] = fmaxf(most[1], above[t][1]);
    if (T::VALUE_SCALED) largest = fmaxf(largest, scale[t]);
  }
  // The reference may lag: rescaling is rare.
  if (__any_sync(~0u, fmaxf(most[0], most[1]) > s.limit || largest * s.shrink > 128.f)) {
    float3 by = raised(make_float2(most[0], most[1]), s.limit == SLACK ? 0.f : LOWEST, s.shrink, largest);
    const float up[2] = {by.x, by.y}, smaller = by.z;
    s.shrink *= smaller, s.limit = SLACK;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float factor = exp2_fast(-up[h]);
      s.top[h] += up[h], s.weight[h] *= factor, s.zeros[h] *= factor, factor *= smaller;
#pragma unroll
      for (int t = 0; t < 2 * UNITS; ++t) above[t][h] -= up[h];
#pragma unroll
      for (int m = 0; m < D / 16; ++m) s.out[m][h] *= factor, s.out[m][2 + h] *= factor;
    }
  }

  u32 weights[2 * UNITS];
#pragma unroll
  for (int t = 0; t < 2 * UNITS; ++t) {
    float p[2], level = T::VALUE_SCALED ? scale[t] * s.shrink : s.shrink;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p[h] = exp2_fast(above[t][h]);
      s.weight[h] += p[h];
      if (T::VALUE_SCALED) s.zeros[h] += p[h] * zero[t];
    }
    if (UPDATE_SCORES && c < PAIRS_OF_HEADS)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(waiting + 4 * (PAIRS_OF_HEADS * (r + 8 * t) + c)), "r"(halves(p[0], p[1]))
                   : "memory");
    weights[t] = transposed(halves(p[0] * level, p[1] * level));
  }
  if (UPDATE_SCORES && lane < PAIRS_OF_HEADS)
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(waiting + 4 * STEP * PAIRS_OF_HEADS + 8 * lane), "f"(s.top[0]),
                 "f"(s.top[1]) : "memory");

#pragma unroll
  for (int n = 0; n < T::V_LANE / T::V_LOAD; ++n)
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      u32 near[T::V_LOAD], far[T::V_LOAD];
      constexpr int PAIR_ROW = 2 * T::V_ROW;
      u32 at = stage + T::S_VALUES + (8 * u + c) * PAIR_ROW;
      if (T::V_LOAD == 4)
        at += 16 * ((r * (T::V_LANE / 4) + n) ^ T::value_swizzle(c));
      else
        at += (r * 4 * T::V_LOAD) ^ 16 * T::value_swizzle(c);
      load_words(near, at);
      load_words(far, at + 4 * PAIR_ROW);
      if (!T::VALUE_SCALED && valid < STEP) {  // what is past the last token may be NaN, and NaN times 0 is NaN
        int left = valid - 16 * u - 2 * c;
        u32 near_mask = (left > 0 ? 0xffffu : 0u) | (left > 1 ? 0xffff0000u : 0u);
        u32 far_mask = (left > 8 ? 0xffffu : 0u) | (left > 9 ? 0xffff0000u : 0u);
#pragma unroll
        for (int i = 0; i < T::V_LOAD; ++i) near[i] &= near_mask, far[i] &= far_mask;
      }
      constexpr int SLOTS = T::V_LOAD * V::COUNT;
#pragma unroll
      for (int i = 0; i < SLOTS; i += 2)
        mma(s.out[(n * SLOTS + i) / 2], V::pair(near[i / V::COUNT], i % V::COUNT),
            V::pair(near[(i + 1) / V::COUNT], (i + 1) % V::COUNT), V::pair(far[i / V::COUNT], i % V::COUNT),
            V::pair(far[(i + 1) / V::COUNT], (i + 1) % V::COUNT), weights[2 * u], weights[2 * u + 1]);
    }
}

using Tier0 = Tier<K_BITS_0, V_BITS_0, TOKENS_0, K_SCALES_0, VALUES_0, V_SCALES_0, SCORES_0, UNITS_0>;
#if TIERS == 2
using Tier1 = Tier<K_BITS_1, V_BITS_1, TOKENS_1, K_SCALES_1, VALUES_1, V_SCALES_1, SCORES_1, UNITS_1>;
#else
using Tier1 = Tier0;  // never entered
#endif
constexpr int STAGE = Tier0::STAGE > Tier1::STAGE ? Tier0::STAGE : Tier1::STAGE;
constexpr int ALL_WARPS = WARPS * CLUSTER;
constexpr int MERGE = (WARPS + 1) * GROUP * D * 4;  // bytes for partial results, where the rings were
constexpr int RING = (WARPS * STAGES * STAGE > MERGE ? WARPS * STAGES * STAGE : MERGE + 127) / 128 * 128;

#if CLUSTER > 1
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float peer(const float* mine, int rank) {
  u32 at;
  float x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
#else
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ float peer(const float* mine, int) { return *mine; }
#endif

struct Arguments {
  u8* pool;
  const int* tables;        // of this layer: [request, KV head, entry] by the strides below
  const int* lengths;       // of this layer: [request, KV head, tier]
  const int* requests;      // row of the tables for each row of the batch, or -1
  const u16* query;         // [batch, KV heads * GROUP, D]
  u16* out;                 // the same
  const int* newest;        // tier-0 slot of the newest token [batch, KV heads], which gets no score of its own; or null
  i64 table_request, table_head, length_request, length_head;  // elements
  i64 query_row, out_row;   // elements from one row of the batch to the next
  float scale;              // softmax scale times log2(e)
  int entries, steps_per_warp, waiting_per_warp;
};

extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode_attention(Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u16 query[8 * D];
  __shared__ float query_scale[8], query_sum[8];
  __shared__ float warp_top[WARPS][8], warp_weight[WARPS][8], warp_zeros[WARPS][8];
  __shared__ float block_top[8], block_weight[8], block_zeros[8], log_sum[8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = blockIdx.x % CLUSTER;
  const int head = blockIdx.y, row = blockIdx.z, request = max(a.requests[row], 0);
  const int* table = a.tables + request * a.table_request + head * a.table_head;
  const int* length = a.lengths + request * a.length_request + head * a.length_head;
  const bool present = a.requests[row] >= 0;  // -1: no request, the output is 0
  const int tokens0 = present ? length[0] : 0, tokens1 = TIERS == 2 && present ? length[1] : 0;

  // This warp's steps: a run of each tier's, all runs of a tier equally long but for one step.
  const int position = rank * WARPS + warp;
  const int steps0 = Tier0::steps(tokens0), steps1 = TIERS == 2 ? Tier1::steps(tokens1) : 0;
  const int last = ALL_WARPS - 1 - position;  // the longer runs of tier 1 go to the other end
  const int first0 = steps0 / ALL_WARPS * position + min(position, steps0 % ALL_WARPS);
  const int count0 = steps0 / ALL_WARPS + (position < steps0 % ALL_WARPS);
  const int first1 = steps1 / ALL_WARPS * last + min(last, steps1 % ALL_WARPS);
  const int count = count0 + steps1 / ALL_WARPS + (last < steps1 % ALL_WARPS);

  // Shared memory: the rings, then records of steps, then what waits for the softmax.
  const u32 ring = shared_address(memory) + warp * STAGES * STAGE;
  int2* records = (int2*)(memory + RING) + warp * a.steps_per_warp;  // where the scores are (in 32 bytes), valid tokens
  const u8* waiting = memory + RING + 8 * WARPS * a.steps_per_warp + warp * a.waiting_per_warp;

  // Page ids come 32 at a time, one a lane; those of both tiers' first pages at once.
  auto page_ids = [&](int tier, int page) {
    int entry = page + lane;
    return entry < a.entries ? table[tier == 0 ? entry : a.entries - 1 - entry] : 0;
  };
  int page = first0 / Tier0::STEPS, sub = first0 % Tier0::STEPS, held = page;
  int ids = page_ids(0, page), ids1 = TIERS == 2 ? page_ids(1, first1 / Tier1::STEPS) : 0;
  int fetched = 0;
  u32 filling = ring;
  auto fetch_of = [&](auto tier, int tokens) {
    using T = decltype(tier);
    if (sub == T::STEPS) {
      sub = 0;
      if (++page == held + 32) held = page, ids = page_ids(fetched < count0 ? 0 : 1, page);
    }
    const i64 at = (i64)__shfl_sync(~0u, ids, page - held) * PAGE_BYTES;
    if (lane == 0)
      records[fetched] = make_int2((int)((at + T::SCORES + 4 * T::STEP * sub) / 32), T::valid(sub, tokens - page * T::TOKENS));
    T::fetch(filling, a.pool + at, sub, lane);
    ++sub, ++fetched;
    filling = filling == ring + (STAGES - 1) * STAGE ? ring : filling + STAGE;
  };
  auto fetch = [&]() {
    if (fetched < count0) {
      fetch_of(Tier0(), tokens0);
    } else if (TIERS == 2 && fetched < count) {
      if (fetched == count0) page = held = first1 / Tier1::STEPS, sub = first1 % Tier1::STEPS, ids = ids1;
      fetch_of(Tier1(), tokens1);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int j = 0; j < STAGES - 1; ++j) fetch();

  // The query, each head scaled by a power of two into the upper range of FP16 (codes may stand 2^8 too high).
  for (int h = warp; h < 8; h += WARPS) {
    float x[D / 32], most = 0.f, sum = 0.f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      u32 raw = h < GROUP ? a.query[row * a.query_row + (head * GROUP + h) * D + 32 * i + lane] : 0;
      x[i] = BFLOAT16 ? __uint_as_float(raw << 16) : half_to_float(raw);
      most = fmaxf(most, fabsf(x[i]));
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    int exponent = most > 0.f ? 13 + 127 - (int)(__float_as_uint(most) >> 23) : 0;
    exponent = min(exponent, 100);
    float up = __uint_as_float((u32)(127 + exponent) << 23), down = __uint_as_float((u32)(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      u32 packed = halves(x[i] * up, 0.f) & 0xffff;
      query[h * D + 32 * i + lane] = (u16)packed;
      sum += half_to_float(packed);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) query_scale[h] = down * a.scale, query_sum[h] = sum * down * a.scale;
  }
  __syncthreads();

  State s;
  s.shrink = 16777216.f, s.limit = LOWEST;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    s.query_sum[h] = query_sum[2 * (lane & 3) + h];
    s.top[h] = s.weight[h] = s.zeros[h] = 0.f;
  }
#pragma unroll
  for (int m = 0; m < D / 16; ++m)
#pragma unroll
    for (int k = 0; k < 4; ++k) s.out[m][k] = 0.f;

  u32 reading = ring, store = shared_address(waiting);
  auto run = [&](auto tier, int from, int to) {
    using T = decltype(tier);
    enter<T>(s, query, query_scale, lane);
    rescale_slots<T, true>(s);
#pragma unroll 1
    for (int j = from; j < to; ++j) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncwarp();
      fetch();
      attend<T>(s, reading, records[j].y, store, lane);
      reading = reading == ring + (STAGES - 1) * STAGE ? ring : reading + STAGE;
      store += T::WAITING;
    }
    rescale_slots<T, false>(s);
  };
  if (count0 > 0) run(Tier0(), 0, count0);
  if (TIERS == 2 && count > count0) run(Tier1(), count0, count);
#pragma unroll
  for (int m = 0; m < D / 16; ++m)
#pragma unroll
    for (int k = 0; k < 4; ++k) s.out[m][k] *= 1.f / s.shrink;
  asm volatile("cp.async.wait_all;" ::: "memory");

  // Merge the warps of the block; their rings are free now.
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      s.weight[h] += __shfl_xor_sync(~0u, s.weight[h], lanes);
      s.zeros[h] += __shfl_xor_sync(~0u, s.zeros[h], lanes);
    }
  if (lane < 4)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      warp_top[warp][2 * lane + h] = count > 0 ? s.top[h] : LOWEST;
      warp_weight[warp][2 * lane + h] = s.weight[h];
      warp_zeros[warp][2 * lane + h] = s.zeros[h];
    }
  __syncthreads();
  float* partial = (float*)memory;           // [WARPS][GROUP][D]
  float* block_out = partial + WARPS * GROUP * D;  // [GROUP][D]
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int column = 2 * (lane & 3) + h;
    float top = LOWEST;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, warp_top[w][column]);
    float factor = exp2_fast(s.top[h] - top);
    if (column < GROUP)
#pragma unroll
      for (int m = 0; m < D / 16; ++m)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          partial[(warp * GROUP + column) * D + (lane >> 2) * (D / 8) + 2 * m + k] = s.out[m][2 * k + h] * factor;
  }
  if (threadIdx.x < 8) {
    float top = LOWEST, weight = 0.f, zeros = 0.f;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, warp_top[w][threadIdx.x]);
    for (int w = 0; w < WARPS; ++w) {
      float factor = exp2_fast(warp_top[w][threadIdx.x] - top);
      weight += warp_weight[w][threadIdx.x] * factor, zeros += warp_zeros[w][threadIdx.x] * factor;
    }
    block_top[threadIdx.x] = top, block_weight[threadIdx.x] = weight, block_zeros[threadIdx.x] = zeros;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * D; i += WARPS * 32) {
    float sum = 0.f;
    for (int w = 0; w < WARPS; ++w) sum += partial[w * GROUP * D + i];
    block_out[i] = sum;
  }

  // Merge the blocks of the cluster; each writes its share of the output.
  cluster_sync();
  if (threadIdx.x < 8) {
    float top = LOWEST, weight = 0.f;
    for (int b = 0; b < CLUSTER; ++b) top = fmaxf(top, peer(block_top + threadIdx.x, b));
    for (int b = 0; b < CLUSTER; ++b)
      weight += peer(block_weight + threadIdx.x, b) * exp2_fast(peer(block_top + threadIdx.x, b) - top);
    log_sum[threadIdx.x] = weight > 0.f ? top + log2_fast(weight) : 0.f;
  }
  __syncthreads();
  for (int i = rank * WARPS * 32 + threadIdx.x; i < GROUP * D; i += ALL_WARPS * 32) {
    int h = i / D;
    float sum = 0.f;
    for (int b = 0; b < CLUSTER; ++b) {
      float weight = peer(block_weight + h, b);
      if (weight > 0.f) sum += (peer(block_out + i, b) + peer(block_zeros + h, b)) * exp2_fast(peer(block_top + h, b) - log_sum[h]);
    }
    u32 packed;
    if (BFLOAT16)
      asm("{.reg .b16 t; cvt.rn.bf16.f32 t, %1; cvt.u32.u16 %0, t;}" : "=r"(packed) : "f"(sum));
    else
      packed = halves(sum, 0.f) & 0xffff;
    a.out[row * a.out_row + head * GROUP * D + i] = (u16)packed;
  }

  // Scores: the largest probability over the query heads (official code: two more kernels).
  if (UPDATE_SCORES) {
    __syncwarp();
    const float* newest = nullptr;
    if (a.newest && a.newest[row * gridDim.y + head] >= 0) {
      int slot = a.newest[row * gridDim.y + head];
      newest = (const float*)(a.pool + (i64)table[slot / Tier0::TOKENS] * PAGE_BYTES + Tier0::SCORES) + slot % Tier0::TOKENS;
    }
    auto settle = [&](auto tier, int from, int to, const u8* kept) {
      using T = decltype(tier);
      const int token = lane % T::STEP;
#pragma unroll 2
      for (int j = from + lane / T::STEP; j < to; j += 2 / T::UNITS) {
        const int2 record = records[j];
        const u8* own = kept + (j - from) * T::WAITING;
        const u32* p = (const u32*)own + token * PAIRS_OF_HEADS;
        const float* top = (const float*)(own + 4 * T::STEP * PAIRS_OF_HEADS);
        float most = 0.f;
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
          float relative = half_to_float(h % 2 ? p[h / 2] >> 16 : p[h / 2] & 0xffff);
          most = fmaxf(most, relative * exp2_fast(top[h] - log_sum[h]));
        }
        // An addition that the L2 cache carries out: nobody waits for the old score.
        float* to_add = (float*)(a.pool + (i64)(u32)record.x * 32) + token;
        if (token < record.y && to_add != newest)
          asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to_add), "f"(most) : "memory");
      }
    };
    settle(Tier0(), 0, count0, waiting);
    if (TIERS == 2) settle(Tier1(), count0, count, waiting + count0 * Tier0::WAITING);
  }
  cluster_sync();  // no block leaves while another may read its shared memory
}
