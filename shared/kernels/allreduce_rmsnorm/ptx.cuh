// What fused.cu asks of the hardware, one PTX instruction each. emulated.h says the same for a CPU.
typedef unsigned int u32;
typedef unsigned long long u64;

// A kernel's static shared memory, and its dynamic.
#define SHARED(kind, name) __shared__ kind name
#define DYNAMIC_SHARED(kind, name) extern __shared__ __align__(128) kind name[]

__device__ __forceinline__ uint4 load_far(const uint4* at) {  // read once: no place in L1
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
__device__ __forceinline__ void store(uint4* at, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ u32 bf16_pair(float lo, float hi) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}
__device__ __forceinline__ u32 half_pair(float lo, float hi) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}
__device__ __forceinline__ float half_to_float(u32 bits) {
  float f;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
  return f;
}

__device__ __forceinline__ void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Words that other GPUs, or the host, read.
__device__ __forceinline__ void store_release(u32* at, u32 word) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void store_relaxed(u32* at, u32 word) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ u32 load_acquire(const u32* at) {
  u32 word;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  return word;
}
// Rows that other GPUs poll, and such rows: each word comes whole, the four of them in any order.
__device__ __forceinline__ void store_polled(uint4* at, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 load_polled(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 shared_at(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {  // arrives, too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_await(u64* barrier, u32 parity) {
  u32 done = 0;
  while (done == 0)
    asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
                 : "=r"(done) : "r"(shared_at(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(uint4* to, const uint4* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_at(to)), "l"(from), "r"(bytes), "r"(shared_at(barrier)) : "memory");
}
__device__ __forceinline__ void bulk_store(uint4* to, const uint4* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_at(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All of this thread's groups but the last one have left shared memory.
__device__ __forceinline__ void bulk_wait_all_but_one_read() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
// All of this thread's bulk stores have arrived, and may be told of.
__device__ __forceinline__ void bulk_wait_arrived() { asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory"); }
// What ordinary stores wrote, here or (acquired) elsewhere, bulk copies read.
__device__ __forceinline__ void fence_before_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same of shared memory alone: does not wait for stores to global memory.
__device__ __forceinline__ void fence_before_bulk_of_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#if BF16
#define PAIRS "bf16x2"
#else
#define PAIRS "f16x2"
#endif
__device__ __forceinline__ uint4 multimem_add(const uint4* at) {  // the sum over all ranks, made by the switch in float32
  uint4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4." PAIRS " {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ void multimem_store(uint4* at, uint4 v) {  // to all ranks
  asm volatile("multimem.st.relaxed.sys.global.v4." PAIRS " [%0], {%1,%2,%3,%4};"
               ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#endif
