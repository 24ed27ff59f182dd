// Whole pages by a few multiprocessors, from one launch: 64 MiB to another GPU begin 10 us after the call, where copy
// engines need a call a lane and half a microsecond a page. The addresses lie in the launch's own parameters, so that no
// thread waits for a table to come over the bus.
//
// A block of threads takes a piece of a page at a time and asks for all of it before it stores the first byte. Pieces
// depend on no other piece, so no thread waits for another one.

typedef unsigned long long u64;

#ifdef __CUDACC__
#define LOAD(address) __ldcs(address)
#define STORE(address, value) __stcs(address, value)
#else  // the test's emulation
#define LOAD(address) (*(address))
#define STORE(address, value) (*(address) = (value))
#define __grid_constant__
#endif

constexpr int kThreads = 512;
constexpr int kInFlight = 8;  // vectors of 16 bytes that a thread has asked for
constexpr u64 kPieceVectors = u64{kThreads} * kInFlight;
constexpr int kMostPages = 240;  // of a launch: parameters are 4 KiB at most

struct Addresses {
  u64 source[kMostPages];
  u64 target[kMostPages];
};

// page_bytes: a multiple of 16, as the addresses are
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_pages(const __grid_constant__ Addresses at, u64 page_bytes, unsigned pages) {
  const u64 page_vectors = page_bytes / 16;
  const unsigned page_pieces = static_cast<unsigned>((page_vectors + kPieceVectors - 1) / kPieceVectors);
  const unsigned pieces = page_pieces * pages;
  for (unsigned piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const unsigned page = piece / page_pieces;
    const u64 first = (piece - page * page_pieces) * kPieceVectors + threadIdx.x;
    const uint4* source = reinterpret_cast<const uint4*>(at.source[page]);
    uint4* target = reinterpret_cast<uint4*>(at.target[page]);
    uint4 held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < page_vectors) held[i] = LOAD(source + first + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < page_vectors) STORE(target + first + i * kThreads, held[i]);
    }
  }
}
