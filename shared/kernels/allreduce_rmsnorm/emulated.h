// ptx.cuh for a CPU: every CUDA thread is a fiber, and a seeded scheduler runs them in any order that waiting allows. Bulk
// copies read at some later step and arrive at another; words that others poll arrive one by one. Addresses outside the given
// ranges are counted. For tests only.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <typeindex>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 {
  u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Rendezvous {  // of CUDA's barriers
  int count = 0;
  long generation = 0;
};
struct Block {
  int rank, number, count, threads;
  long begin_at;  // pass: CTAs of a launch do not begin at one time
  std::map<std::type_index, std::shared_ptr<void>> shared;
  std::vector<u64> dynamic;
  Rendezvous barriers[16];
  std::vector<Rendezvous> warps;
  std::vector<float> lanes;
};
struct Group {
  int to_read = 0, to_arrive = 0;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Block* block;
  int thread;
  const void* launch;
  bool ended = false;
  std::vector<std::shared_ptr<Group>> groups;
  std::shared_ptr<Group> open = std::make_shared<Group>();
};
struct BulkCopy {
  char* to;
  const char* from;
  u32 bytes;
  u64* barrier;
  std::shared_ptr<Group> group;
  long read_at, arrive_at;  // passes
  bool has_read = false;
  std::vector<char> data;
  int rank;
};
struct PolledWord {  // on its way
  u32 *to, word;
  int rank;  // whose it is
  long arrive_at;
};
struct Phase64 {  // of an mbarrier
  int arrivals, pending;
  long bytes;
  u32 phase;
};
struct World {
  Fiber* now = nullptr;
  ucontext_t scheduler;
  std::mt19937 draw;
  std::vector<BulkCopy> copies;
  std::vector<PolledWord> words;
  std::map<u64*, Phase64> barriers;
  std::vector<std::pair<u64, u64>> ranges;
  std::vector<u64> bases;  // of all ranks' arenas, behind the multicast address
  u64 multicast = 0;
  long pass = 0;    // every fiber has had its turn so many times
  long astray = 0;  // accesses outside the ranges
};
static World world;

struct Index {
  int x;
};
#define threadIdx (Index{world.now->thread})
#define blockIdx (Index{world.now->block->number})
#define gridDim (Index{world.now->block->count})
#define blockDim (Index{world.now->block->threads})
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900
#define SHARED(kind, name) kind& name = shared_memory<kind>()
#define DYNAMIC_SHARED(kind, name) kind* name = reinterpret_cast<kind*>(world.now->block->dynamic.data())

template <typename Kind>
Kind& shared_memory() {
  std::shared_ptr<void>& place = world.now->block->shared[typeid(Kind)];
  if (!place) {
    place = std::make_shared<Kind>();
    memset(place.get(), 0xff, sizeof(Kind));  // nothing is zero by itself
  }
  return *static_cast<Kind*>(place.get());
}
inline void pause_fiber() { swapcontext(&world.now->context, &world.scheduler); }
inline void touch(const void* at, u64 bytes) {
  const u64 begin = reinterpret_cast<u64>(at);
  for (const auto& [first, last] : world.ranges)
    if (begin >= first && begin + bytes <= last) return;
  world.astray++;
}
inline void meet_at(Rendezvous& place, int threads) {
  const long generation = place.generation;
  if (++place.count == threads) {
    place.count = 0, place.generation++;
  } else {
    while (place.generation == generation) pause_fiber();
  }
}
inline void __syncthreads() { meet_at(world.now->block->barriers[0], world.now->block->threads); }
inline void __syncwarp() { meet_at(world.now->block->warps[world.now->thread / 32], 32); }
inline int __syncthreads_or(int word) {
  std::vector<float>& lanes = world.now->block->lanes;
  lanes[world.now->thread] = word != 0;
  __syncthreads();
  const bool any = std::count(lanes.begin(), lanes.end(), 1.f) > 0;
  __syncthreads();
  return any;
}
inline float __shfl_xor_sync(u32, float v, int mask) {
  std::vector<float>& lanes = world.now->block->lanes;
  lanes[world.now->thread] = v;
  __syncwarp();
  const float theirs = lanes[world.now->thread ^ mask];
  __syncwarp();
  return theirs;
}
inline u32 atomicCAS(u32* at, u32 old, u32 word) { return *at == old ? (*at = word, old) : *at; }
inline u32 atomicInc(u32* at, u32 last) {
  touch(at, 4);
  const u32 old = *at;
  *at = old >= last ? 0 : old + 1;
  return old;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __int_as_float(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint4 load_far(const uint4* at) { return touch(at, 16), *at; }
inline uint4 __ldg(const uint4* at) { return load_far(at); }
inline void store(uint4* at, uint4 v) { touch(at, 16), *at = v; }
inline u64 now_ns() { return world.pass * 1000000ull; }  // a pass takes a millisecond, however busy the machine is
inline u32 bf16_bits(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline u32 half_bits(float f) {  // to the nearest, ties to even; no NaN
  const float size = std::fabs(f);
  const u32 sign = std::signbit(f) ? 0x8000u : 0u;
  if (size >= 65520.f) return sign | 0x7c00u;
  if (size < 0x1p-14f) return sign | static_cast<u32>(std::nearbyint(std::ldexp(size, 24)));
  int exponent;
  std::frexp(size, &exponent);  // size = [0.5, 1) * 2^exponent
  return sign | (static_cast<u32>(exponent + 14) << 10) + static_cast<u32>(std::nearbyint(std::ldexp(size, 11 - exponent))) - 1024u;
}
inline u32 bf16_pair(float lo, float hi) { return bf16_bits(hi) << 16 | bf16_bits(lo); }
inline u32 half_pair(float lo, float hi) { return half_bits(hi) << 16 | half_bits(lo); }
inline float half_to_float(u32 bits) {
  const int exponent = bits >> 10 & 31u, fraction = bits & 1023u;
  const float size = exponent == 31 ? INFINITY : std::ldexp(float(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
  return bits & 0x8000u ? -size : size;
}
inline void sync_some(int barrier, int threads) { meet_at(world.now->block->barriers[barrier], threads); }
inline void store_release(u32* at, u32 word) { touch(at, 4), *at = word; }
inline void store_relaxed(u32* at, u32 word) { store_release(at, word); }
inline u32 load_acquire(const u32* at) { return pause_fiber(), touch(at, 4), *at; }
inline void store_polled(uint4* at, uint4 v) {  // each word for itself, some before and some behind what this thread does then
  touch(at, 16);
  const u32 words[] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) {
    const long passes = world.draw() % 4 ? world.draw() % 6 : world.draw() % 40;
    world.words.push_back({reinterpret_cast<u32*>(at) + i, words[i], world.now->block->rank, world.pass + passes});
  }
}
inline uint4 load_polled(const uint4* at) { return pause_fiber(), touch(at, 16), *at; }

inline void barrier_init(u64* at, u32 arrivals) { world.barriers[at] = {int(arrivals), int(arrivals), 0, 0}; }
inline void barrier_turn(Phase64& one) {
  if (one.pending == 0 && one.bytes == 0) one.pending = one.arrivals, one.phase++;
}
inline void barrier_arrive(u64* at) {
  Phase64& one = world.barriers.at(at);
  if (one.pending-- == 0) world.astray++;  // more arrivals than expected
  barrier_turn(one);
}
inline void barrier_expect(u64* at, u32 bytes) { world.barriers.at(at).bytes += bytes, barrier_arrive(at); }
inline void barrier_await(u64* at, u32 parity) {
  while ((world.barriers.at(at).phase & 1u) == parity) pause_fiber();
}
inline void start_copy(uint4* to, const uint4* from, u32 bytes, u64* barrier, std::shared_ptr<Group> group) {
  const int slow = group ? 200 : 24;  // passes; long enough for a meeting, or for the rows behind, to come first
  const long read_at = world.pass + world.draw() % slow;
  world.copies.push_back({reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes, barrier, group, read_at,
                          read_at + static_cast<long>(world.draw() % slow), false, {}, world.now->block->rank});
}
inline void bulk_load(uint4* to, const uint4* from, u32 bytes, u64* barrier) {
  touch(from, bytes), start_copy(to, from, bytes, barrier, nullptr);
}
inline void bulk_store(uint4* to, const uint4* from, u32 bytes) {
  world.now->open->to_read++, world.now->open->to_arrive++;
  touch(to, bytes), start_copy(to, from, bytes, nullptr, world.now->open);
}
inline void bulk_commit() {
  world.now->groups.push_back(world.now->open);
  world.now->open = std::make_shared<Group>();
}
inline void bulk_wait_all_but_one_read() {
  auto busy = [](const auto& groups) {
    for (size_t i = 0; i + 1 < groups.size(); i++)
      if (groups[i]->to_read) return true;
    return false;
  };
  while (busy(world.now->groups)) pause_fiber();
}
inline void bulk_wait_arrived() {
  for (const auto& group : world.now->groups)
    while (group->to_arrive) pause_fiber();
}
inline void fence_before_bulk() {}
inline void fence_before_bulk_of_shared() {}
inline void advance_copies() {  // those whose time has come read, or arrive
  for (size_t i = 0; i < world.copies.size();) {
    BulkCopy& one = world.copies[i];
    if (!one.has_read && world.pass >= one.read_at) {
      one.data.assign(one.from, one.from + one.bytes), one.has_read = true;
      if (one.group) one.group->to_read--;
    }
    if (!one.has_read || world.pass < one.arrive_at) {
      i++;
      continue;
    }
    memcpy(one.to, one.data.data(), one.bytes);
    if (one.group) one.group->to_arrive--;
    if (one.barrier) {
      Phase64& barrier = world.barriers.at(one.barrier);
      barrier.bytes -= one.bytes, barrier_turn(barrier);
    }
    std::swap(one, world.copies.back());
    world.copies.pop_back();
  }
}
inline void advance_words() {
  auto arrives = [](const PolledWord& one) {
    if (world.pass < one.arrive_at) return false;
    *one.to = one.word;
    return true;
  };
  world.words.erase(std::remove_if(world.words.begin(), world.words.end(), arrives), world.words.end());
}

#if BF16
inline float element(u32 bits) { return __int_as_float(bits << 16); }
inline u32 pair_of(float lo, float hi) { return bf16_pair(lo, hi); }
#else
inline float element(u32 bits) { return half_to_float(bits); }
inline u32 pair_of(float lo, float hi) { return half_pair(lo, hi); }
#endif
inline uint4 multimem_add(const uint4* at) {
  u32 sum[4];
  for (int i = 0; i < 4; i++) {
    float lo = 0.f, hi = 0.f;
    for (const u64 base : world.bases) {
      const u32* pair = reinterpret_cast<const u32*>(base + (reinterpret_cast<u64>(at) - world.multicast)) + i;
      touch(pair, 4), lo += element(*pair & 0xffffu), hi += element(*pair >> 16);
    }
    sum[i] = pair_of(lo, hi);
  }
  return make_uint4(sum[0], sum[1], sum[2], sum[3]);
}
inline void multimem_store(uint4* at, uint4 v) {
  for (const u64 base : world.bases) store(reinterpret_cast<uint4*>(base + (reinterpret_cast<u64>(at) - world.multicast)), v);
}
