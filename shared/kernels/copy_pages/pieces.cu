// Many small copies by a few multiprocessors: a warp takes a row of the table at a time, and asks for up to 4 KiB of it
// before it stores the first byte, so that a bus's round trip is paid once. A copy engine takes 0.4 us a row, whatever
// its size. Host memory is read and written over the bus by the address that the host has for it (unified addressing).
//
// Rows depend on no other row (copies.py checks it), so no thread waits for another one.

typedef unsigned long long u64;

#ifdef __CUDACC__
#define LOAD(address) __ldcs(address)
#define STORE(address, value) __stcs(address, value)
#else  // the test's emulation
#define LOAD(address) (*(address))
#define STORE(address, value) (*(address) = (value))
#endif

constexpr int kWarp = 32;
constexpr int kInFlight = 8;  // vectors of 16 bytes that a lane has asked for

__device__ inline void copy_vectors(const uint4* source, uint4* target, u64 count, unsigned lane) {
  for (u64 first = lane; first < count; first += kWarp * kInFlight) {
    uint4 held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kWarp < count) held[i] = LOAD(source + first + i * kWarp);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kWarp < count) STORE(target + first + i * kWarp, held[i]);
    }
  }
}

// table: `rows` sources, then as many targets, then sizes in bytes, all of them multiples of 16; in pinned host memory
extern "C" __global__ void __launch_bounds__(512) copy_pieces(const u64* table, unsigned rows) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warps = gridDim.x * (blockDim.x / kWarp);
  unsigned row = threadIdx.x / kWarp * gridDim.x + blockIdx.x;
  u64 source = 0, target = 0, size = 0;
  if (row < rows) {
    source = table[row];
    target = table[rows + row];
    size = table[2 * rows + row];
  }
  while (row < rows) {
    // the next row is on its way while this one is copied
    const unsigned next = row + warps;
    u64 next_source = 0, next_target = 0, next_size = 0;
    if (next < rows && next > row) {
      next_source = table[next];
      next_target = table[rows + next];
      next_size = table[2 * rows + next];
    }
    copy_vectors(reinterpret_cast<const uint4*>(source), reinterpret_cast<uint4*>(target), size / 16, lane);
    row = next > row ? next : rows;
    source = next_source;
    target = next_target;
    size = next_size;
  }
}
