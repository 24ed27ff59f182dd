// One-shot without meetings, after NCCL's LL and TensorRT-LLM's Lamport kernels: every rank sends its rows into a slot of every
// other rank, and who sums polls the rows themselves. A sum waits for one way over the links, not for words, rows and words.
//
// A word of zero is not here yet: two zeros are sent as two negative ones. A word comes whole, sixteen bytes need not, so each
// word is looked at. Who has read words clears them at once: nobody else reads them.
//
// Two slots by turns are enough. Into one slot a rank sends again two pushes later, when it has rows of the push between from
// everybody; they sent those when their push before, with what it read and cleared in this slot, had ended. So nobody is two
// pushes ahead. Calls of other engines between do not matter.

constexpr int kPushThreads = PUSH_THREADS;                             // of a row; a CTA has one row in work
constexpr int kPushed = (kVectors + kPushThreads - 1) / kPushThreads;  // vectors of a row that a thread has
constexpr int kPolls = kInFlight * kRowThreads * kRowsPerCta / kPushThreads;  // under way a thread: an SM's as of fused_plain
constexpr int kPolled = kPolls <= kWorld ? 1 : (kPolls / kWorld < kPushed ? kPolls / kWorld : kPushed);
constexpr int kOthers = kWorld > 1 ? kWorld - 1 : 1;  // an array is never empty
constexpr u32 kTriesPerLook = 64;  // at the clock, which costs more than a try
static_assert(kPushThreads % 32 == 0 && kPushThreads <= 1024, "shape");

struct PushSums {
  float of[2][kPushThreads / 32];  // of warps; rows take turns
};

__device__ __forceinline__ u32 never_zero(u32 pair) { return pair == 0 ? 0x80008000u : pair; }
__device__ __forceinline__ uint4 never_zero(uint4 v) {
  return make_uint4(never_zero(v.x), never_zero(v.y), never_zero(v.z), never_zero(v.w));
}
__device__ __forceinline__ bool is_here(uint4 v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

// Where a row lies in a slot, from all ranks: [kWorld, HIDDEN].
__device__ __forceinline__ size_t in_slot(const Params& p, u32 turn, int row) {
  return (static_cast<size_t>(turn & 1) * p.slot_rows + row) * kWorld * kVectors;
}

// Whether a row has a vector there; known to the compiler where all threads have as many.
__device__ __forceinline__ bool in_row(int at) { return kVectors % kPushThreads == 0 || at < kVectors; }

__device__ __forceinline__ void load_own(const Params& p, int row, uint4 (&own)[kPushed]) {
  if (row >= p.row_stop) return;
#pragma unroll
  for (int i = 0; i < kPushed; i++) {
    const int at = i * kPushThreads + threadIdx.x;
    if (in_row(at)) own[i] = load_far(p.input[p.rank] + static_cast<size_t>(row) * kVectors + at);
  }
}

// All of this CTA's rows, before it waits for any; `own`: the first. Each rank begins with the next one, so that not all send
// to one at a time.
__device__ __forceinline__ void send_rows(const Params& p, u32 turn, uint4 (&own)[kPushed]) {
  for (int row = p.row_start + blockIdx.x; row < p.row_stop; row += gridDim.x) {
#pragma unroll
    for (int i = 0; i < kPushed; i++) {
      const int at = i * kPushThreads + threadIdx.x;
      if (!in_row(at)) continue;
      const uint4 sent = never_zero(own[i]);
      for (int k = 1; k < kWorld; k++)
        store_polled(p.slots[(p.rank + k) % kWorld] + in_slot(p, turn, row) + p.rank * kVectors + at, sent);
    }
    load_own(p, row + gridDim.x, own);
  }
}

// Whether to go on after a look for rows of `peer` in vain: until this rank has lost somebody, here or in any other thread.
__device__ __forceinline__ bool waits(const Params& p, u32 tries, u64& begun, u32 peer) {
  if (tries % kTriesPerLook != 0) return true;
  const u64 now = now_ns();
  if (begun == 0) begun = now;
  if (now - begun > p.timeout_ns) lose(p, kArrive, peer);
  return load_acquire(p.failed) == 0;
}

// This thread's vectors, from the `first` on, of a row from the other ranks in their order; they are not in the slot any more.
__device__ __forceinline__ void receive(const Params& p, uint4* row, int first, uint4 (&theirs)[kPolled][kOthers]) {
  uint4* const below = row + first * kPushThreads + threadIdx.x;  // of the first rank; `above`: so that this rank is left out
  uint4* const above = below + kVectors;
  u64 begun = 0;
  for (u32 tries = 1;; tries++) {
    int missing = kWorld;
#pragma unroll
    for (int i = 0; i < kPolled; i++) {
      if (first + i >= kPushed || !in_row((first + i) * kPushThreads + threadIdx.x)) continue;
#pragma unroll
      for (int k = 0; k < kWorld - 1; k++)
        theirs[i][k] = load_polled((k < p.rank ? below : above) + k * kVectors + i * kPushThreads);
    }
#pragma unroll
    for (int i = 0; i < kPolled; i++) {
      if (first + i >= kPushed || !in_row((first + i) * kPushThreads + threadIdx.x)) continue;
#pragma unroll
      for (int k = 0; k < kWorld - 1; k++)
        if (!is_here(theirs[i][k])) missing = k < p.rank ? k : k + 1;
    }
    if (missing == kWorld || !waits(p, tries, begun, missing)) break;
  }
#pragma unroll
  for (int i = 0; i < kPolled; i++) {
    if (first + i >= kPushed || !in_row((first + i) * kPushThreads + threadIdx.x)) continue;
#pragma unroll
    for (int k = 0; k < kWorld - 1; k++)
      store((k < p.rank ? below : above) + k * kVectors + i * kPushThreads, make_uint4(0, 0, 0, 0));
  }
}

// round(sum + residual), as in the other kernels; `own`: this rank's part, with the bits that others have of it.
__device__ __forceinline__ uint4 summed_with(const Params& p, uint4 own, const uint4 (&theirs)[kOthers], uint4 residual, float& squares) {
  uint4 in[kWorld];
#pragma unroll
  for (int r = 0; r < kWorld; r++) {
    in[r] = own;
    if (r < p.rank && r < kOthers) in[r] = theirs[r];
    if (r > p.rank && r > 0) in[r] = theirs[r - 1];
  }
  return summed(in, residual, squares);
}

extern "C" __global__ void __launch_bounds__(kPushThreads, 1) fused_push(const __grid_constant__ Params p) {
  SHARED(PushSums, sums);
  uint4 sent[kPushed];
  load_own(p, p.row_start + blockIdx.x, sent);  // before anything waits for one of the two words
  const u32 turn = p.turns[0];
  const bool lost = *p.failed != 0;
  if (!lost) send_rows(p, turn, sent);  // else nobody may take for right what is void
  if (__syncthreads_or(lost)) return;
  // Here this CTA has read its turn. The next turn is written by the CTA that was the last to do so, at its end: the count is on
  // its way while rows are.
  const int last = gridDim.x - 1;
  int begun = 0;
  if (threadIdx.x == 0) begun = atomicInc(p.turns + 1, last);
  const float offset = p.gemma ? 1.f : 0.f;
  uint4 weight[kPushed];
#pragma unroll
  for (int i = 0; i < kPushed; i++)
    if (in_row(i * kPushThreads + threadIdx.x)) weight[i] = __ldg(p.weight + i * kPushThreads + threadIdx.x);
  int of = 0;
  for (int row = p.row_start + blockIdx.x; row < p.row_stop; row += gridDim.x, of ^= 1) {
    const size_t base = static_cast<size_t>(row) * kVectors;
    uint4 kept[kPushed];
    float squares = 0.f;
#pragma unroll
    for (int first = 0; first < kPushed; first += kPolled) {
      uint4 own[kPolled], residual[kPolled], theirs[kPolled][kOthers];
#pragma unroll
      for (int i = 0; i < kPolled; i++) {
        const int at = (first + i) * kPushThreads + threadIdx.x;
        if (first + i >= kPushed || !in_row(at)) continue;
        own[i] = load_far(p.input[p.rank] + base + at);
        residual[i] = load_far(p.residual + base + at);
      }
      receive(p, p.slots[p.rank] + in_slot(p, turn, row), first, theirs);
#pragma unroll
      for (int i = 0; i < kPolled; i++) {
        const int at = (first + i) * kPushThreads + threadIdx.x;
        if (first + i >= kPushed || !in_row(at)) continue;
        kept[first + i] = summed_with(p, never_zero(own[i]), theirs[i], residual[i], squares);
        store(p.residual + base + at, kept[first + i]);
      }
    }
    const float sum = over_row<kPushThreads>(squares, sums.of[of], threadIdx.x, 1);
    const float scale = rsqrtf(sum / HIDDEN + p.eps);
#pragma unroll
    for (int i = 0; i < kPushed; i++) {
      const int at = i * kPushThreads + threadIdx.x;
      if (in_row(at)) store(p.out[p.rank] + base + at, normed(kept[i], weight[i], scale, offset));
    }
  }
  if (threadIdx.x == 0 && begun == last) p.turns[0] = turn + 1;
}
