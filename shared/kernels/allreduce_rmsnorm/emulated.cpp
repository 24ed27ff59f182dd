// fused.cu as a CPU's shared library: one launch of all ranks. See emulated.h, emulated_driver.py.
#define EMULATED 1
#include "fused.cu"

typedef void (*Kernel)(Params);
static const Kernel kernels[] = {fused_plain, fused_bulk, fused_multimem, gather_rows, add_norm};
static Kernel launched;

static void begin_fiber() {
  Fiber* const me = world.now;
  launched(*static_cast<const Params*>(me->params));
  me->ended = true;
  pause_fiber();
}

// Launch on every rank whose params are not null. Returns accesses that went astray, or -1 when nobody could go on.
extern "C" long emulate(int kernel, int blocks, int threads, u64 dynamic_bytes, const Params* const* params, int ranks,
                        const u64* ranges, int num_ranges, u64 multicast, const u64* bases, u32 seed, long most_passes) {
  world = World{};
  world.draw.seed(seed);
  world.multicast = multicast, world.bases.assign(bases, bases + ranks);
  for (int i = 0; i < num_ranges; i++) world.ranges.push_back({ranges[2 * i], ranges[2 * i + 1]});
  launched = kernels[kernel];
  std::vector<std::unique_ptr<Block>> made;
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (int rank = 0; rank < ranks; rank++)
    for (int number = 0; params[rank] && number < blocks; number++) {
      made.push_back(std::make_unique<Block>(Block{number, blocks, threads}));
      made.back()->dynamic.assign((dynamic_bytes + 7) / 8, ~0ull);
      made.back()->warps.resize((threads + 31) / 32), made.back()->lanes.resize(threads);
      for (int thread = 0; thread < threads; thread++) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& one = *fibers.back();
        one.block = made.back().get(), one.thread = thread, one.params = params[rank];
        one.stack.resize(16 << 10);
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
        one.context.uc_link = &world.scheduler;
        makecontext(&one.context, begin_fiber, 0);
      }
    }
  std::vector<Fiber*> live;
  for (const auto& one : fibers) live.push_back(one.get());
  for (; !live.empty(); world.pass++) {
    if (world.pass == most_passes) return -1;
    std::shuffle(live.begin(), live.end(), world.draw);
    for (Fiber* one : live) world.now = one, swapcontext(&world.scheduler, &one->context);
    advance_copies();
    live.erase(std::remove_if(live.begin(), live.end(), [](Fiber* one) { return one->ended; }), live.end());
  }
  if (!world.copies.empty()) return -2;  // a launch has ended and its rows have not arrived
  return world.astray;
}
