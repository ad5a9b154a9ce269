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
#include "cluster.cuh"
#include "decode_step.cuh"

using Tier0 = Tier<K_BITS_0, V_BITS_0, TOKENS_0, K_SCALES_0, VALUES_0, V_SCALES_0, SCORES_0, UNITS_0>;
#if TIERS == 2
using Tier1 = Tier<K_BITS_1, V_BITS_1, TOKENS_1, K_SCALES_1, VALUES_1, V_SCALES_1, SCORES_1, UNITS_1>;
#else
using Tier1 = Tier0;  // never entered
#endif
constexpr int STAGE = Tier0::STAGE > Tier1::STAGE ? Tier0::STAGE : Tier1::STAGE;
constexpr int ALL_WARPS = WARPS * CLUSTER;
constexpr int PART = D + 16;  // floats of a partial result: eight runs, padded so that they meet different banks
constexpr int MERGE = (WARPS * PART + D) * GROUP * 4;  // bytes for partial results, where the rings were
constexpr int RING = (WARPS * STAGES * STAGE > MERGE ? WARPS * STAGES * STAGE : MERGE + 127) / 128 * 128;

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
  __shared__ u16 query[GROUP * D];
  __shared__ float query_scale[8], query_sum[8];
  __shared__ float warp_top[WARPS][8], warp_weight[WARPS][8], warp_zeros[WARPS][8];
  __shared__ float block_top[8], block_weight[8], block_zeros[8], log_sum[8];
  __shared__ const float* newest;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = blockIdx.x % CLUSTER;
  const int head = blockIdx.y, row = blockIdx.z;

  // What needs nothing else first: its way through memory is as long as that to the first page.
  constexpr int OWN = (GROUP + WARPS - 1) / WARPS;  // query heads of a warp
  u32 raw[OWN][D / 32];
#pragma unroll
  for (int own = 0; own < OWN; ++own)
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      int h = warp + own * WARPS;
      raw[own][i] = h < GROUP ? a.query[row * a.query_row + (head * GROUP + h) * D + 32 * i + lane] : 0;
    }
  const int newest_slot = UPDATE_SCORES && a.newest ? a.newest[row * gridDim.y + head] : -1;
  const int request = max(a.requests[row], 0);
  const int* table = a.tables + request * a.table_request + head * a.table_head;
  const int* length = a.lengths + request * a.length_request + head * a.length_head;
  const bool present = a.requests[row] >= 0;  // -1: no request, the output is 0
  for (int entry = 32 * threadIdx.x; present && entry < a.entries; entry += WARPS * 1024)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(table + entry));
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

  if (threadIdx.x == 0)
    newest = newest_slot < 0 ? nullptr
                             : (const float*)(a.pool + (i64)table[newest_slot / Tier0::TOKENS] * PAGE_BYTES + Tier0::SCORES) +
                                   newest_slot % Tier0::TOKENS;
  if (threadIdx.x >= GROUP && threadIdx.x < 8) query_scale[threadIdx.x] = query_sum[threadIdx.x] = 0.f;
#pragma unroll
  for (int own = 0; own < OWN; ++own)
    if (warp + own * WARPS < GROUP)
      stage_query(raw[own], warp + own * WARPS, a.scale, query, query_scale, query_sum, lane);
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
  float* partial = (float*)memory;                    // [WARPS][GROUP][8][D / 8 and 2 of padding]
  float* block_out = partial + WARPS * GROUP * PART;  // [GROUP][D]
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int column = 2 * (lane & 3) + h;
    float top = LOWEST;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, warp_top[w][column]);
    float factor = exp2_fast(s.top[h] - top);
    if (column < GROUP)
#pragma unroll
      for (int m = 0; m < D / 16; ++m)
        *(float2*)(partial + (warp * GROUP + column) * PART + (lane >> 2) * (PART / 8) + 2 * m) =
            make_float2(s.out[m][h] * factor, s.out[m][2 + h] * factor);
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
#pragma unroll
  for (int turn = 0; turn < (GROUP * D + WARPS * 32 - 1) / (WARPS * 32); ++turn) {
    const int i = turn * WARPS * 32 + threadIdx.x;
    if (i >= GROUP * D) break;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
      sum += partial[(w * GROUP + i / D) * PART + i % D / (D / 8) * (PART / 8) + i % (D / 8)];
    block_out[i] = sum;
  }

  // Merge the blocks of the cluster; each writes its share of the output.
  cluster_arrive();
  cluster_wait();
  // All that a head's blocks say of it, asked for at once: their parts' shares of the whole, and the log of its sum.
  auto merged = [&](int h, float (&share)[CLUSTER], float& zeros) {
    float tops[CLUSTER], weights[CLUSTER], block_sum[CLUSTER], top = LOWEST, weight = 0.f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b)
      tops[b] = peer(block_top + h, b), weights[b] = peer(block_weight + h, b), block_sum[b] = peer(block_zeros + h, b);
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) top = fmaxf(top, tops[b]);
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) weight += weights[b] * exp2_fast(tops[b] - top);
    const float log_all = weight > 0.f ? top + log2_fast(weight) : 0.f;
    zeros = 0.f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) {
      share[b] = weights[b] > 0.f ? exp2_fast(tops[b] - log_all) : 0.f;
      zeros += share[b] > 0.f ? block_sum[b] * share[b] : 0.f;
    }
    return log_all;
  };
  float share[CLUSTER], sum;
  for (int i = rank * WARPS * 32 + threadIdx.x; i < GROUP * D; i += ALL_WARPS * 32) {
    float parts[CLUSTER];
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) parts[b] = peer(block_out + i, b);
    merged(i / D, share, sum);
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) sum += share[b] > 0.f ? parts[b] * share[b] : 0.f;  // else it may be NaN
    u32 packed;
    if (BFLOAT16)
      asm("{.reg .b16 t; cvt.rn.bf16.f32 t, %1; cvt.u32.u16 %0, t;}" : "=r"(packed) : "f"(sum));
    else
      packed = halves(sum, 0.f) & 0xffff;
    a.out[row * a.out_row + head * GROUP * D + i] = (u16)packed;
  }
  if (UPDATE_SCORES) {
    if (threadIdx.x < 8) log_sum[threadIdx.x] = merged(threadIdx.x, share, sum);
    __syncthreads();
  }
  __syncwarp();
  cluster_arrive();  // done with the others' shared memory

  // Scores: the largest probability over the query heads (official code: two more kernels).
  if (UPDATE_SCORES) {
    const float* not_this = newest;
    float log_of[2 * PAIRS_OF_HEADS];
#pragma unroll
    for (int h = 0; h < 2 * PAIRS_OF_HEADS; ++h) log_of[h] = log_sum[h];
    auto settle = [&](auto tier, int from, int to, const u8* kept) {
      using T = decltype(tier);
      const int token = lane % T::STEP;
#pragma unroll 4
      for (int j = from + lane / T::STEP; j < to; j += 2 / T::UNITS) {
        const int2 record = records[j];
        const u8* own = kept + (j - from) * T::WAITING;
        struct __align__(PAIRS_OF_HEADS % 2 ? 4 : 8) Halves { u32 pair[PAIRS_OF_HEADS]; };
        const Halves p = ((const Halves*)own)[token];
        const float2* top = (const float2*)(own + 4 * T::STEP * PAIRS_OF_HEADS);
        float most = 0.f;
#pragma unroll
        for (int h = 0; h < PAIRS_OF_HEADS; ++h) {
          most = fmaxf(most, half_to_float(p.pair[h] & 0xffff) * exp2_fast(top[h].x - log_of[2 * h]));
          if (2 * h + 1 < GROUP) most = fmaxf(most, half_to_float(p.pair[h] >> 16) * exp2_fast(top[h].y - log_of[2 * h + 1]));
        }
        // An addition that the L2 cache carries out: nobody waits for the old score, nor for the asm's place in the loop.
        float* to_add = (float*)(a.pool + (i64)(u32)record.x * 32) + token;
        if (token < record.y && to_add != not_this) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to_add), "f"(most));
      }
    };
    settle(Tier0(), 0, count0, waiting);
    if (TIERS == 2) settle(Tier1(), count0, count, waiting + count0 * Tier0::WAITING);
  }
  __syncwarp();
  if (CLUSTER > 1) cluster_wait();  // no block leaves while another may read its shared memory
}
