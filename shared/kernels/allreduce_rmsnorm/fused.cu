// All-reduce + residual add + RMSNorm in one launch: every CTA takes rows that this rank owns, reads them from all ranks,
// adds the residual, norms them and stores them into every rank's output. TokenWeave 3.2, 3.3, without the switch's help.
//
// CTA c of one rank meets CTA c of every other rank twice: before it reads (their inputs are written, and nobody reads the
// old outputs any more) and when it is through (all rows have arrived, and nobody reads this rank's input any more).
// Nothing else waits: rows of different CTAs are read, normed and sent while others still are on their way. (fused_push, for
// few rows, meets nobody.)
//
// Compiled by NVRTC, without headers. -D: WORLD HIDDEN BF16 ROW_THREADS ROWS_PER_CTA PUSH_THREADS IN_FLIGHT SEGMENT STAGES
// RELAXED_ARRIVAL PARAMS_BYTES.
#if EMULATED  // on a CPU, for tests
#include "emulated.h"
#else
#include "ptx.cuh"
#endif

constexpr int kWorld = WORLD;
constexpr int kMaxWorld = 8;
constexpr int kVectors = HIDDEN / 8;  // 16 bytes each, in a row
constexpr int kRowThreads = ROW_THREADS;
constexpr int kRowsPerCta = ROWS_PER_CTA;
constexpr int kPerThread = (kVectors + kRowThreads - 1) / kRowThreads;
constexpr int kInFlight = IN_FLIGHT;  // loads a thread has under way
constexpr int kBatch = kWorld >= kInFlight ? 1 : (kInFlight / kWorld < kPerThread ? kInFlight / kWorld : kPerThread);
static_assert(HIDDEN % 8 == 0 && kRowThreads % 32 == 0 && kRowThreads * kRowsPerCta <= 1024, "shape");

#include "rows.cuh"

struct Params {                  // launch.py has the same, field by field
  const uint4* input[kMaxWorld];  // [num_tokens, HIDDEN] of every rank, mapped here
  uint4* out[kMaxWorld];          // likewise
  uint4* whole[kMaxWorld];        // likewise; the whole residual, or null
  u32* flags[kMaxWorld];          // [max_ctas, kMaxWorld]: word r of CTA c is written by rank r's CTA c
  uint4* slots[kMaxWorld];        // [2, slot_rows, kWorld, HIDDEN] of every rank: rows that were pushed there, or zeros
  const uint4* input_all;         // multicast addresses, or null
  uint4* out_all;
  const uint4* weight;  // [HIDDEN]
  uint4* residual;      // [num_tokens, HIDDEN], this rank's
  u32* epochs;          // [max_ctas], this rank's: two more with every call that CTA c took part in
  u32* turns;           // [2], this rank's: pushes so far, and how many CTAs have begun the one behind them
  u32* failed;          // this rank's: not 0 once a wait ran out; every later call returns at once
  u32* report;          // the same word for the host, in its memory
  u64 timeout_ns;
  int row_start, row_stop;  // rows that this launch reads, norms and sends
  int rank;
  int slot_rows;    // at least row_stop, in a push
  int num_targets;  // kWorld, or 1: one-shot keeps its rows to itself
  int gemma;        // the weight is a distance from one
  float eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "launch.py packs another layout");

enum Phase : u32 { kArrive = 1, kLeave = 2 };

__device__ __noinline__ void lose(const Params& p, u32 phase, u32 peer) {
  const u32 word = 0x80000000u | phase << 24 | peer << 16 | blockIdx.x;  // errors.py reads it
  if (atomicCAS(p.failed, 0u, word) == 0u) store_relaxed(p.report, word);
}
// Tell CTA c of every rank that this one is here, and wait until all of them are. All threads call it.
// Words only grow, by wrapping: a peer may be one meeting ahead, never two, because it waits for this one too.
__device__ __forceinline__ bool meet(const Params& p, u32 word, u32 phase, u32* lost) {
  __syncthreads();  // what all threads read and wrote comes before the release
  if (threadIdx.x < kWorld) {
    u32* theirs = p.flags[threadIdx.x] + blockIdx.x * kMaxWorld + p.rank;
    if (RELAXED_ARRIVAL && phase == kArrive)  // as Listing 1, line 6: a launch ends with its writes where peers read them
      store_relaxed(theirs, word);
    else
      store_release(theirs, word);
    const u32* mine = p.flags[p.rank] + blockIdx.x * kMaxWorld + threadIdx.x;
    const u64 begun = now_ns();
    while (static_cast<int>(load_acquire(mine) - word) < 0) {
      if (now_ns() - begun <= p.timeout_ns) continue;
      lose(p, phase, threadIdx.x), *lost = 1;
      break;
    }
  }
  __syncthreads();
  return *lost == 0;
}
struct MeetingState {
  u32 lost, epoch;
};
struct Meeting {
  u32 epoch;
  u32* lost;
};
__device__ __forceinline__ bool arrive(const Params& p, Meeting& m) {
  SHARED(MeetingState, state);
  if (threadIdx.x == 0) state.lost = *p.failed, state.epoch = p.epochs[blockIdx.x];
  __syncthreads();
  if (state.lost != 0) return false;
  m.lost = &state.lost, m.epoch = state.epoch;
  return meet(p, m.epoch + 1, kArrive, m.lost);
}
__device__ __forceinline__ void leave(const Params& p, const Meeting& m) {
  if (meet(p, m.epoch + 2, kLeave, m.lost) && threadIdx.x == 0) p.epochs[blockIdx.x] = m.epoch + 2;
}

struct RowSums {
  float of[2][kRowsPerCta][kRowThreads / 32];  // of warps; rows take turns
};
// Loads into registers: runs everywhere. A CTA has kRowsPerCta rows in work, kRowThreads threads each.
extern "C" __global__ void __launch_bounds__(kRowThreads* kRowsPerCta, 1) fused_plain(const __grid_constant__ Params p) {
  SHARED(RowSums, sums);
  Meeting m;
  if (!arrive(p, m)) return;
  const int group = threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
  const float offset = p.gemma ? 1.f : 0.f;
  int turn = 0;
  for (int row = p.row_start + group * gridDim.x + blockIdx.x; row < p.row_stop; row += gridDim.x * kRowsPerCta, turn ^= 1) {
    const size_t base = static_cast<size_t>(row) * kVectors;
    uint4 kept[kPerThread];
    float squares = 0.f;
#pragma unroll
    for (int first = 0; first < kPerThread; first += kBatch) {
      uint4 in[kBatch][kWorld], residual[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int at = (first + i) * kRowThreads + thread;
        if (first + i >= kPerThread || at >= kVectors) continue;
#pragma unroll
        for (int r = 0; r < kWorld; r++) in[i][r] = load_far(p.input[r] + base + at);
        residual[i] = load_far(p.residual + base + at);
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int at = (first + i) * kRowThreads + thread;
        if (first + i >= kPerThread || at >= kVectors) continue;
        kept[first + i] = summed(in[i], residual[i], squares);
        store(p.residual + base + at, kept[first + i]);
      }
    }
    uint4 weight[kPerThread];  // on its way while the row's threads meet
#pragma unroll
    for (int i = 0; i < kPerThread; i++)
      if (i * kRowThreads + thread < kVectors) weight[i] = __ldg(p.weight + i * kRowThreads + thread);
    const float sum = over_row<kRowThreads>(squares, sums.of[turn][group], thread, 1 + group);
    const float scale = rsqrtf(sum / HIDDEN + p.eps);
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const int at = i * kRowThreads + thread;
      if (at >= kVectors) continue;
      const uint4 x = normed(kept[i], weight[i], scale, offset);
      for (int k = 0; k < p.num_targets; k++) {  // each rank begins with itself, so that not all send to one at a time
        const int to = (p.rank + k) % kWorld;
        store(p.out[to] + base + at, x);
        if (p.whole[to] != nullptr) store(p.whole[to] + base + at, kept[i]);
      }
    }
  }
  leave(p, m);
}

// Add and norm alone, in place in p.out[p.rank]: what follows somebody else's all-reduce.
extern "C" __global__ void __launch_bounds__(kRowThreads* kRowsPerCta, 2) add_norm(const __grid_constant__ Params p) {
  SHARED(RowSums, sums);
  const int group = threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
  const int row = blockIdx.x * kRowsPerCta + group;
  if (row >= p.row_stop) return;
  uint4* const rows = p.out[p.rank] + static_cast<size_t>(row) * kVectors;
  uint4* const residual = p.residual + static_cast<size_t>(row) * kVectors;
  uint4 kept[kPerThread], weight[kPerThread];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    const int at = i * kRowThreads + thread;
    if (at < kVectors) kept[i] = load_far(rows + at), weight[i] = load_far(residual + at);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    const int at = i * kRowThreads + thread;
    if (at >= kVectors) continue;
    Eight sum;
    sum.set(kept[i]), sum.add(weight[i]);
    kept[i] = sum.packed();
    sum.set(kept[i]);
    squares += sum.squares();
    store(residual + at, kept[i]);
    weight[i] = __ldg(p.weight + at);
  }
  const float sum = over_row<kRowThreads>(squares, sums.of[0][group], thread, 1 + group);
  const float scale = rsqrtf(sum / HIDDEN + p.eps), offset = p.gemma ? 1.f : 0.f;
#pragma unroll
  for (int i = 0; i < kPerThread; i++)
    if (i * kRowThreads + thread < kVectors) store(rows + i * kRowThreads + thread, normed(kept[i], weight[i], scale, offset));
}

// This rank's rows of the residual to everybody.
extern "C" __global__ void __launch_bounds__(512, 1) gather_rows(const __grid_constant__ Params p) {
  Meeting m;
  if (!arrive(p, m)) return;
  for (int row = p.row_start + blockIdx.x; row < p.row_stop; row += gridDim.x)
    for (int at = threadIdx.x; at < kVectors; at += blockDim.x) {
      const size_t place = static_cast<size_t>(row) * kVectors + at;
      const uint4 x = load_far(p.residual + place);
      for (int k = 0; k < kWorld; k++) store(p.whole[(p.rank + k) % kWorld] + place, x);
    }
  leave(p, m);
}

#include "push.cuh"

#if __CUDA_ARCH__ >= 900
// The copy engine of each SM (bulk copies) reads and sends: one warp asks, many bytes are under way without registers, so
// that few SMs fill the links. A stage is a segment of a row from every rank and of the residual.
constexpr int kSegment = SEGMENT;  // vectors; as many threads sum them
constexpr int kSegments = (kVectors + kSegment - 1) / kSegment;
constexpr int kStages = STAGES;
constexpr int kSources = kWorld + 1;

__device__ __forceinline__ int segment_vectors(int segment) {
  return segment < kSegments - 1 ? kSegment : kVectors - (kSegments - 1) * kSegment;
}

struct BulkShared {
  u64 full[kStages], empty[kStages];
  float sums[2][kSegment / 32];
};

__device__ void read_rows(const Params& p, uint4* ring, u64* full, u64* empty) {  // the asking warp
  const int lane = threadIdx.x % 32;
  fence_before_bulk();
  const uint4* from = lane < kWorld ? p.input[lane] : p.residual;
  u32 stage = 0, parity = 1;
  for (int row = p.row_start + blockIdx.x; row < p.row_stop; row += gridDim.x)
    for (int segment = 0; segment < kSegments; segment++) {
      const u32 bytes = segment_vectors(segment) * 16;
      barrier_await(&empty[stage], parity);
      if (lane == 0) barrier_expect(&full[stage], bytes * kSources);
      __syncwarp();
      if (lane < kSources)
        bulk_load(ring + (stage * kSources + lane) * kSegment, from + static_cast<size_t>(row) * kVectors + segment * kSegment, bytes, &full[stage]);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(kSegment + 32, 1) fused_bulk(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(uint4, memory);
  SHARED(BulkShared, shared);
  uint4* ring = memory;                                    // [kStages, kSources, kSegment]
  uint4* ready = ring + kStages * kSources * kSegment;     // [2, kVectors]: normed rows on their way out
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) barrier_init(&shared.full[s], 1), barrier_init(&shared.empty[s], kSegment / 32);
    fence_before_bulk_of_shared();
  }
  Meeting m;
  if (!arrive(p, m)) return;
  const int thread = threadIdx.x;
  if (thread >= kSegment) {
    read_rows(p, ring, shared.full, shared.empty);
  } else {
    const float offset = p.gemma ? 1.f : 0.f;
    u32 stage = 0, parity = 0;
    int turn = 0;
    for (int row = p.row_start + blockIdx.x; row < p.row_stop; row += gridDim.x, turn ^= 1) {
      const size_t base = static_cast<size_t>(row) * kVectors;
      uint4 kept[kSegments];
      float squares = 0.f;
#pragma unroll
      for (int segment = 0; segment < kSegments; segment++) {
        const uint4* place = ring + stage * kSources * kSegment + thread;
        barrier_await(&shared.full[stage], parity);
        if (thread < segment_vectors(segment)) {
          uint4 in[kWorld];
#pragma unroll
          for (int r = 0; r < kWorld; r++) in[r] = place[r * kSegment];
          kept[segment] = summed(in, place[kWorld * kSegment], squares);
          store(p.residual + base + segment * kSegment + thread, kept[segment]);
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(&shared.empty[stage]);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      uint4 weight[kSegments];
#pragma unroll
      for (int segment = 0; segment < kSegments; segment++)
        if (segment * kSegment + thread < kVectors) weight[segment] = __ldg(p.weight + segment * kSegment + thread);
      if (thread == 0) bulk_wait_all_but_one_read();  // the row before the last has left its place in `ready`
      const float sum = over_row<kSegment>(squares, shared.sums[turn], thread, 1);
      const float scale = rsqrtf(sum / HIDDEN + p.eps);
#pragma unroll
      for (int segment = 0; segment < kSegments; segment++) {
        const int at = segment * kSegment + thread;
        if (at >= kVectors) continue;
        ready[turn * kVectors + at] = normed(kept[segment], weight[segment], scale, offset);
        for (int to = 0; to < kWorld; to++)
          if (p.whole[to] != nullptr) store(p.whole[to] + base + at, kept[segment]);
      }
      fence_before_bulk_of_shared();
      sync_some(2, kSegment);
      if (thread == 0) {
        for (int k = 0; k < p.num_targets; k++)
          bulk_store(p.out[(p.rank + k) % kWorld] + base, ready + turn * kVectors, kVectors * 16);
        bulk_commit();
      }
    }
    if (thread == 0) bulk_wait_arrived();
  }
  leave(p, m);
}

// TokenWeave's Listing 1: the switch adds and distributes. Only compiled and read by us: our machines have multicast off.
extern "C" __global__ void __launch_bounds__(kRowThreads* kRowsPerCta, 1) fused_multimem(const __grid_constant__ Params p) {
  SHARED(RowSums, sums);
  Meeting m;
  if (!arrive(p, m)) return;
  const int group = threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
  const float offset = p.gemma ? 1.f : 0.f;
  int turn = 0;
  for (int row = p.row_start + group * gridDim.x + blockIdx.x; row < p.row_stop; row += gridDim.x * kRowsPerCta, turn ^= 1) {
    const size_t base = static_cast<size_t>(row) * kVectors;
    uint4 kept[kPerThread];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const int at = i * kRowThreads + thread;
      if (at >= kVectors) continue;
      Eight sum;
      sum.set(multimem_add(p.input_all + base + at)), sum.add(p.residual[base + at]);
      kept[i] = sum.packed();
      sum.set(kept[i]);
      squares += sum.squares();
      p.residual[base + at] = kept[i];
    }
    uint4 weight[kPerThread];  // on its way while the row's threads meet
#pragma unroll
    for (int i = 0; i < kPerThread; i++)
      if (i * kRowThreads + thread < kVectors) weight[i] = __ldg(p.weight + i * kRowThreads + thread);
    const float sum = over_row<kRowThreads>(squares, sums.of[turn][group], thread, 1 + group);
    const float scale = rsqrtf(sum / HIDDEN + p.eps);
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      const int at = i * kRowThreads + thread;
      if (at >= kVectors) continue;
      const uint4 x = normed(kept[i], weight[i], scale, offset);
      multimem_store(p.out_all + base + at, x);
      for (int to = 0; to < kWorld; to++)
        if (p.whole[to] != nullptr) store(p.whole[to] + base + at, kept[i]);
    }
  }
  leave(p, m);
}
#endif
