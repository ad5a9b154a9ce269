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
// Compiled for one shape: HEAD_DIM, GROUP (query heads a KV head, at most 8), WARPS, STAGES, CLUSTER, BLOCKS_PER_SM,
// PAGE_BYTES, UPDATE_SCORES, BFLOAT16 (type of query and output), TIERS (1 or 2), and for tier i: K_BITS_i, V_BITS_i,
// TOKENS_i, K_SCALES_i, VALUES_i, V_SCALES_i, SCORES_i (bytes), UNITS_i (1 or 2). No header of CUDA's is needed.
#include "decode_step.cuh"

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
        __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) decode_attention(Arguments a) {
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
