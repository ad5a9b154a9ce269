// One step of a warp: fetch 16 or 32 tokens of a page, attend to them, keep the running softmax.
#pragma once
#include "mma_fields.cuh"

constexpr int D = HEAD_DIM;
constexpr float LOWEST = -1e30f;
constexpr float SLACK = 8.f;     // powers of two by which a probability may exceed the running maximum
constexpr int PAIRS_OF_HEADS = (GROUP + 1) / 2;

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

// Query head ``h`` as read by a warp, scaled by a power of two into the upper range of FP16 (codes may stand 2^8 too high).
__device__ __forceinline__ void stage_query(const u32 (&raw)[D / 32], int h, float scale, u16* query, float* query_scale,
                                            float* query_sum, int lane) {
  float x[D / 32], most = 0.f, sum = 0.f;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    x[i] = BFLOAT16 ? __uint_as_float(raw[i] << 16) : half_to_float(raw[i]);
    most = fmaxf(most, fabsf(x[i]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
  const int exponent = min(most > 0.f ? 13 + 127 - (int)(__float_as_uint(most) >> 23) : 0, 100);
  const float up = power_of_two(exponent), down = power_of_two(-exponent);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    u32 packed = halves(x[i] * up, 0.f) & 0xffff;
    query[h * D + 32 * i + lane] = (u16)packed;
    sum += half_to_float(packed);
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (lane == 0) query_scale[h] = down * scale, query_sum[h] = sum * down * scale;
}

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
  const int row = lane >> 2;
  const u16* own = query + min(row, GROUP - 1) * D;
#pragma unroll
  for (int h = 0; h < 2; ++h) s.query_scale[h] = query_scale[2 * (lane & 3) + h] * power_of_two(F::SMALL);
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    int channel = channel_of<T>(i, lane & 3), lift = F::lift(i % F::COUNT);
    float factor = row < GROUP ? power_of_two(-lift) : 0.f;
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
