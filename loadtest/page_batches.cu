// Copies of scattered pages between two GPUs: how they are told, over how many streams (decision 0039).
//
//     nvcc -O3 -std=c++17 loadtest/page_batches.cu -o /tmp/page_batches -lcuda && /tmp/page_batches
//
// A line for each way, medians in microseconds: until all calls have returned, until the host has seen the last event.
// push: by the source's GPU; pull: by the target's. A "part" is one cuMemcpyBatchAsync; parts take turns on the streams,
// and each round of them is so many times as large as the one before, up to a cap.

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

using Clock = std::chrono::steady_clock;
using Batch = CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream);
using Parts = std::vector<std::pair<size_t, size_t>>;  // first and end of each

constexpr size_t MIB = 1 << 20;
constexpr int STREAMS = 4;

#define CHECK(call)                                        \
  do {                                                     \
    if (CUresult status = (call); status != CUDA_SUCCESS) { \
      const char* name;                                    \
      cuGetErrorName(status, &name);                       \
      std::printf("%s: %s\n", #call, name);                \
      std::exit(1);                                        \
    }                                                      \
  } while (0)

double us(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

struct Gpu {
  CUcontext context;
  CUdeviceptr memory;
  CUstream streams[STREAMS];
  CUevent events[STREAMS];
};

struct Set {
  size_t pages, page_bytes;
  std::vector<CUdeviceptr> sources, targets;
  std::vector<size_t> sizes;
};

Set scattered(size_t pages, size_t page_bytes, const Gpu& source, const Gpu& target, std::mt19937& random) {
  std::vector<size_t> from(2 * pages), to(2 * pages);
  for (size_t i = 0; i < 2 * pages; i++) from[i] = to[i] = i;
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  Set set{pages, page_bytes, {}, {}, std::vector<size_t>(pages, page_bytes)};
  for (size_t i = 0; i < pages; i++) {
    set.sources.push_back(source.memory + from[i] * page_bytes);
    set.targets.push_back(target.memory + to[i] * page_bytes);
  }
  return set;
}

Parts equal_parts(size_t pages, size_t count) {
  Parts parts;
  for (size_t i = 0; i < count; i++) parts.push_back({pages * i / count, pages * (i + 1) / count});
  return parts;
}

Parts growing_parts(const Set& set, size_t streams, size_t first_mib, size_t cap_mib, double growth) {
  Parts parts;
  double want = first_mib * MIB;
  for (size_t at = 0; at < set.pages;) {
    size_t count = std::min(set.pages - at, std::max<size_t>(1, want / set.page_bytes));
    parts.push_back({at, at + count});
    at += count;
    if (parts.size() % streams == 0) want = std::min(want * growth, double(cap_mib * MIB));
  }
  return parts;
}

void measure(const char* way, Batch batch, Gpu& gpu, Set& set, const Parts& parts, size_t streams, std::string name) {
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t zero = 0;
  std::vector<double> told, done;
  const int rounds = set.pages >= 512 ? 15 : 60;
  for (int round = -5; round < rounds; round++) {
    for (auto begin = Clock::now(); us(begin, Clock::now()) < 30;) {
    }
    auto begin = Clock::now();
    for (size_t i = 0; i < parts.size(); i++) {
      auto [first, end] = parts[i];
      CHECK(batch(&set.targets[first], &set.sources[first], &set.sizes[first], end - first, &attributes, &zero, 1,
                  gpu.streams[i % streams]));
    }
    for (size_t i = 0; i < streams; i++) CHECK(cuEventRecord(gpu.events[i], gpu.streams[i]));
    auto all_told = Clock::now();
    for (size_t i = 0; i < streams; i++) {
      while (cuEventQuery(gpu.events[i]) == CUDA_ERROR_NOT_READY) {
      }
    }
    auto all_done = Clock::now();
    if (round >= 0) {
      told.push_back(us(begin, all_told));
      done.push_back(us(begin, all_done));
    }
  }
  std::sort(told.begin(), told.end());
  std::sort(done.begin(), done.end());
  const double median = done[done.size() / 2];
  std::printf("%s %4zux%-2zuMiB %-36s told %6.1f done %7.1f us %6.1f GB/s\n", way, set.pages, set.page_bytes / MIB,
              name.c_str(), told[told.size() / 2], median, set.pages * set.page_bytes / median / 1e3);
  std::fflush(stdout);
}

int main() {
  CHECK(cuInit(0));
  Gpu gpus[2];
  for (int i = 0; i < 2; i++) {
    CUdevice device;
    CHECK(cuDeviceGet(&device, i));
    CHECK(cuDevicePrimaryCtxRetain(&gpus[i].context, device));
    CHECK(cuCtxSetCurrent(gpus[i].context));
    CHECK(cuMemAlloc(&gpus[i].memory, 5 * 1024 * MIB));
    for (auto& stream : gpus[i].streams) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (auto& event : gpus[i].events) CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  }
  void* found = nullptr;
  CUdriverProcAddressQueryResult result;
  CHECK(cuGetProcAddress("cuMemcpyBatchAsync", &found, 13000, 0, &result));
  if (!found) return std::printf("this driver has no cuMemcpyBatchAsync of CUDA 13\n"), 1;
  const auto batch = reinterpret_cast<Batch>(found);
  std::mt19937 random(3);
  Gpu &source = gpus[1], &target = gpus[0];
  for (const char* way : {"push", "pull"}) {
    Gpu& gpu = way == std::string("push") ? source : target;
    CHECK(cuCtxSetCurrent(gpu.context));
    CHECK(cuCtxEnablePeerAccess((&gpu == &source ? target : source).context, 0));
    for (auto [pages, mib] : {std::pair<size_t, size_t>{32, 2}, {8, 8}, {64, 1}, {16, 4}, {64, 2}, {64, 8}, {512, 2}}) {
      Set set = scattered(pages, mib * MIB, source, target, random);
      for (size_t streams : {1, 2, 4})
        measure(way, batch, gpu, set, equal_parts(pages, streams), streams,
                std::to_string(streams) + " streams, a part each");
      for (size_t streams : {1, 2, 3})
        for (size_t first : {2, 4, 8})
          for (size_t cap : {8, 16, 64}) {
            std::string name = std::to_string(streams) + " streams, parts of " + std::to_string(first);
            name += " to " + std::to_string(cap) + " MiB";
            measure(way, batch, gpu, set, growing_parts(set, streams, first, cap, 2.0), streams, name);
          }
    }
  }
  return 0;
}
