// A row's arithmetic: pairs of 16-bit floats in and out, float32 between; sums in the order of ranks, norms over a row's threads.
#if BF16
__device__ __forceinline__ float low(u32 pair) { return __int_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __int_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) { return bf16_pair(lo, hi); }
#else
__device__ __forceinline__ float low(u32 pair) { return half_to_float(pair & 0xffffu); }
__device__ __forceinline__ float high(u32 pair) { return half_to_float(pair >> 16); }
__device__ __forceinline__ u32 pack(float lo, float hi) { return half_pair(lo, hi); }
#endif

struct Eight {
  float v[8];
  __device__ __forceinline__ void set(uint4 x) {
    v[0] = low(x.x), v[1] = high(x.x), v[2] = low(x.y), v[3] = high(x.y);
    v[4] = low(x.z), v[5] = high(x.z), v[6] = low(x.w), v[7] = high(x.w);
  }
  __device__ __forceinline__ void add(uint4 x) {
    v[0] += low(x.x), v[1] += high(x.x), v[2] += low(x.y), v[3] += high(x.y);
    v[4] += low(x.z), v[5] += high(x.z), v[6] += low(x.w), v[7] += high(x.w);
  }
  __device__ __forceinline__ uint4 packed() const {
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
  }
  __device__ __forceinline__ float squares() const {
    return v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3] + v[4] * v[4] + v[5] * v[5] + v[6] * v[6] + v[7] * v[7];
  }
};

// round(sum over ranks, in their order, + residual); its squares, of the rounded values, are added to `squares`.
__device__ __forceinline__ uint4 summed(const uint4 (&in)[kWorld], uint4 residual, float& squares) {
  Eight sum;
  sum.set(in[0]);
#pragma unroll
  for (int r = 1; r < kWorld; r++) sum.add(in[r]);
  sum.add(residual);
  const uint4 kept = sum.packed();
  sum.set(kept);
  squares += sum.squares();
  return kept;
}
__device__ __forceinline__ uint4 normed(uint4 kept, uint4 weight, float scale, float offset) {
  Eight x, w;
  x.set(kept), w.set(weight);
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = x.v[i] * scale * (w.v[i] + offset);
  return x.packed();
}
__device__ __forceinline__ float over_warp(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(0xffffffffu, v, lanes);
  return v;
}
// Sum over kThreads threads, the same bits in each. One barrier: `partial` is another one in the next row (turn).
template <int kThreads>
__device__ __forceinline__ float over_row(float v, float* partial, int thread, int barrier) {
  v = over_warp(v);
  if constexpr (kThreads == 32) return v;
  if (thread % 32 == 0) partial[thread / 32] = v;
  sync_some(barrier, kThreads);
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; w++) sum += partial[w];
  return sum;
}
