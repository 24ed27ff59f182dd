// Writes a range without end: every block its own part, again and again, each time with the next word. Nothing ends it
// but the end of its process. Words have the highest bit clear; the lender's own have it set (bench_killed.py).

typedef unsigned long long u64;

extern "C" __global__ void __launch_bounds__(256) write_endlessly(unsigned* words, u64 num_words) {
  volatile unsigned* target = words;  // every store is made
  const u64 begin = num_words / gridDim.x * blockIdx.x;
  const u64 end = blockIdx.x + 1 == gridDim.x ? num_words : num_words / gridDim.x * (blockIdx.x + 1);
  for (unsigned running = 1;; running = (running + 1) & 0x7fffffffu) {
    for (u64 i = begin + threadIdx.x; i < end; i += blockDim.x) target[i] = running;
  }
}
