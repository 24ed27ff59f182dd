// fused.cu as a CPU's shared library: launches of all ranks, each rank's one after the other. See emulated.h,
// emulated_driver.py.
#define EMULATED 1
#include "fused.cu"

typedef void (*Kernel)(Params);
static const Kernel kernels[] = {fused_plain, fused_push, fused_bulk, fused_multimem, gather_rows, add_norm};

struct Copy {  // of a stream
  char* to;
  const char* from;
  u64 bytes;
};
struct Launch {  // emulated_driver.py has the same, field by field
  const Params* params;
  u64 dynamic_bytes;
  Copy before, behind;  // what writes the input, what reads the output
  int kernel, blocks, threads;
};

static void begin_fiber() {
  Fiber* const me = world.now;
  const Launch& launch = *static_cast<const Launch*>(me->launch);
  kernels[launch.kernel](*launch.params);
  me->ended = true;
  pause_fiber();
}

struct Stream {  // of one rank
  int rank;
  const Launch *next, *end;
  long begin_at = 0;  // pass
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;  // of the launch that is under way

  bool is_over() const { return next == end && fibers.empty(); }
  void begin() {
    if (next->before.bytes) memcpy(next->before.to, next->before.from, next->before.bytes);
    for (int number = 0; number < next->blocks; number++) {
      const long begin_at = world.pass + world.draw() % (world.draw() % 4 ? 4 : 60);
      blocks.push_back(std::make_unique<Block>(Block{rank, number, next->blocks, next->threads, begin_at}));
      Block& block = *blocks.back();
      block.dynamic.assign((next->dynamic_bytes + 7) / 8, ~0ull);
      block.warps.resize((next->threads + 31) / 32), block.lanes.resize(next->threads);
      for (int thread = 0; thread < next->threads; thread++) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& one = *fibers.back();
        one.block = &block, one.thread = thread, one.launch = next;
        one.stack.resize(16 << 10);
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
        one.context.uc_link = &world.scheduler;
        makecontext(&one.context, begin_fiber, 0);
      }
    }
  }
  // The launch is over when its words have arrived. False when rows of it have not, and nothing waits for them.
  bool end_launch(long delay) {
    auto mine = [this](const auto& one) { return one.rank == rank; };
    for (const auto& one : fibers)
      if (!one->ended) return true;
    if (std::any_of(world.copies.begin(), world.copies.end(), mine)) return false;
    if (std::any_of(world.words.begin(), world.words.end(), mine)) return true;
    if (next->behind.bytes) memcpy(next->behind.to, next->behind.from, next->behind.bytes);
    fibers.clear(), blocks.clear();
    next++, begin_at = world.pass + delay;
    return true;
  }
};

// `launches`: [ranks, most]; a rank makes those whose params are not null. Returns accesses that went astray, or -1 when nobody
// could go on, -2 when a launch ended and its rows had not arrived.
extern "C" long emulate(const Launch* launches, int ranks, int most, const u64* ranges, int num_ranges, u64 multicast,
                        const u64* bases, u32 seed, long most_passes) {
  world = World{};
  world.draw.seed(seed);
  world.multicast = multicast, world.bases.assign(bases, bases + ranks);
  for (int i = 0; i < num_ranges; i++) world.ranges.push_back({ranges[2 * i], ranges[2 * i + 1]});
  std::vector<Stream> streams(ranks);
  for (int rank = 0; rank < ranks; rank++) {
    const Launch* first = launches + rank * most;
    streams[rank].rank = rank, streams[rank].next = first;
    streams[rank].end = std::find_if(first, first + most, [](const Launch& one) { return one.params == nullptr; });
  }
  for (;; world.pass++) {
    if (world.pass == most_passes) return -1;
    std::vector<Fiber*> live;
    bool is_over = true;
    for (Stream& one : streams) {
      is_over &= one.is_over();
      if (one.fibers.empty() && one.next != one.end && world.pass >= one.begin_at) one.begin();
      for (const auto& fiber : one.fibers)
        if (!fiber->ended && world.pass >= fiber->block->begin_at) live.push_back(fiber.get());
    }
    if (is_over) return world.astray;
    std::shuffle(live.begin(), live.end(), world.draw);
    for (Fiber* one : live) world.now = one, swapcontext(&world.scheduler, &one->context);
    advance_copies(), advance_words();
    for (Stream& one : streams)
      if (!one.fibers.empty() && !one.end_launch(world.draw() % (world.draw() % 4 ? 8 : 200))) return -2;
  }
}
