// Runs the verify kernel's own sources on a CPU, a block at a time. Which fiber goes on, and which copy lands, is drawn
// anew at every step, with one warp or another preferred for a while, so that warps run far ahead of each other.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>

#include "ptx.cuh"

namespace emulation {

struct Warp {
  int arrived = 0;
  const char* instruction = "";
  std::array<void*, kWarpLanes> arguments{};
  std::vector<Fiber*> waiting, ready;
};

namespace {

struct Mbarrier {
  uint32_t arrivals, missing, completed;
  std::vector<Fiber*> waiting;
};
struct NamedBarrier {
  int arrived = 0;
  std::vector<Fiber*> waiting;
};
struct Copy {
  Fiber* owner;
  uint32_t to;
  const char* from;
  int bytes;
};

constexpr size_t kStackBytes = 64 << 10;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::map<uint32_t, Mbarrier> mbarriers;
std::map<int, NamedBarrier> named_barriers;
std::vector<Copy> copies;
std::function<void()> kernel;
void* scheduler_stack_pointer;

extern "C" void switch_stack(void** save, void* to);
asm(R"(
switch_stack:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

void run_fiber() {
  kernel();
  current->finished = true;
  switch_stack(&current->stack_pointer, scheduler_stack_pointer);
  std::abort();
}

void wait_in(std::vector<Fiber*>& list, const char* what) {
  current->waits_for = what;
  list.push_back(current);
  switch_stack(&current->stack_pointer, scheduler_stack_pointer);
}

void wake(std::vector<Fiber*>& list) {
  for (Fiber* fiber : list) fiber->warp->ready.push_back(fiber);
  list.clear();
}

Mbarrier& initialised(uint32_t mbarrier) {
  const auto found = mbarriers.find(mbarrier);
  if (found == mbarriers.end()) fail("mbarrier used before it was initialised");
  return found->second;
}

// A copy lands: a thread's own in their order, so that its arrivals fire when those before them have.
void land_one() {
  size_t i = random() % copies.size();
  const auto same = [&](const Copy& copy) { return copy.owner == copies[i].owner; };
  i = std::find_if(copies.begin(), copies.end(), same) - copies.begin();
  const Copy copy = copies[i];
  copies.erase(copies.begin() + i);
  std::memcpy(at(copy.to, copy.bytes), copy.from, copy.bytes);
  Fiber& owner = *copy.owner;
  --owner.copies;
  for (auto& arrival : owner.arrivals) --arrival.first;
  while (!owner.arrivals.empty() && owner.arrivals.front().first == 0) {
    mbarrier_arrive(owner.arrivals.front().second);
    owner.arrivals.erase(owner.arrivals.begin());
  }
  if (owner.waits_for_copies && owner.copies == 0) {
    owner.waits_for_copies = false;
    owner.warp->ready.push_back(&owner);
  }
}

void begin_block(int threads) {
  if (fibers.size() < size_t(threads)) fibers.resize(threads);
  warps.assign(threads / kWarpLanes, {});
  mbarriers.clear(), named_barriers.clear(), copies.clear();
  block_size = dim3(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    char* stack = fiber.stack ? fiber.stack : static_cast<char*>(std::aligned_alloc(64, kStackBytes));
    fiber = {};
    fiber.stack = stack, fiber.thread = {unsigned(i), 0, 0}, fiber.lane = i % kWarpLanes;
    fiber.warp = &warps[i / kWarpLanes];
    // As if run_fiber had been called from a frame that ends here: what switch_stack pops, and an aligned stack.
    auto** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(run_fiber);
    fiber.stack_pointer = top - 6;
    std::fill(top - 6, top, nullptr);
    fiber.warp->ready.push_back(&fiber);
  }
}

void run_block(int threads, std::function<void()> function) {
  kernel = std::move(function);
  begin_block(threads);
  const int count = warps.size();
  int preferred = 0, copy_interval = 1;
  unsigned step = 0;
  for (int left = threads; left > 0;) {
    if (step++ % 4096 == 0) preferred = random() % (count + 2), copy_interval = 1 << random() % 7;
    if (!copies.empty() && random() % copy_interval == 0) land_one();
    int chosen = preferred < count && random() % 8 != 0 ? preferred : random() % count;
    for (int tried = 0; warps[chosen].ready.empty() && tried < count; ++tried) chosen = (chosen + 1) % count;
    auto& ready = warps[chosen].ready;
    if (ready.empty()) {
      if (copies.empty()) fail("deadlock");
      land_one();
      continue;
    }
    std::swap(ready[random() % ready.size()], ready.back());
    current = ready.back();
    ready.pop_back();
    switch_stack(&scheduler_stack_pointer, current->stack_pointer);
    left -= current->finished;
  }
}

}  // namespace

Fiber* current;
uint3 block_index;
dim3 block_size, grid_size;
char* shared;
std::mt19937 random;

void fail(const char* what) {
  std::fprintf(stderr, "error: block %u: %s\n", block_index.x, what);
  for (size_t i = 0; i < warps.size(); ++i) {
    const Fiber& first = fibers[i * kWarpLanes];
    std::fprintf(stderr, "  warp %zu: %s\n", i, first.finished ? "finished" : first.waits_for);
  }
  std::abort();
}

void collective(const char* name, void* arguments, void (*all)(void**)) {
  Warp& warp = *current->warp;
  if (warp.arrived == 0) warp.instruction = name;
  if (std::strcmp(warp.instruction, name) != 0) fail("lanes of a warp at different instructions");
  warp.arguments[current->lane] = arguments;
  if (++warp.arrived < kWarpLanes) return wait_in(warp.waiting, name);
  warp.arrived = 0;
  all(warp.arguments.data());
  wake(warp.waiting);
}

void barrier(int id, int threads) {
  NamedBarrier& named = named_barriers[id];
  if (++named.arrived < threads) return wait_in(named.waiting, "named barrier");
  named.arrived = 0;
  wake(named.waiting);
}

void mbarrier_init(uint32_t mbarrier, uint32_t arrivals) { mbarriers[mbarrier] = {arrivals, arrivals, 0, {}}; }

void mbarrier_arrive(uint32_t mbarrier) {
  Mbarrier& barrier = initialised(mbarrier);
  if (--barrier.missing > 0) return;
  barrier.missing = barrier.arrivals;
  ++barrier.completed;
  wake(barrier.waiting);
}

bool mbarrier_completed(uint32_t mbarrier, uint32_t parity) { return initialised(mbarrier).completed % 2 != parity; }

void mbarrier_wait(uint32_t mbarrier, uint32_t parity) {
  while (!mbarrier_completed(mbarrier, parity)) wait_in(initialised(mbarrier).waiting, "mbarrier");
}

void copy_async(uint32_t to, const void* from, int bytes) {
  std::memset(at(to, bytes), 0xff, bytes);  // NaN in every type: whoever reads too early shows it
  copies.push_back({current, to, static_cast<const char*>(from), bytes});
  ++current->copies;
}

void copy_async_arrive(uint32_t mbarrier) {
  if (current->copies == 0) return mbarrier_arrive(mbarrier);
  current->arrivals.emplace_back(current->copies, mbarrier);
}

void copy_async_wait_all() {
  std::vector<Fiber*> nobody;  // land_one wakes
  if (current->copies == 0) return;
  current->waits_for_copies = true;
  wait_in(nobody, "cp.async.wait_all");
}

}  // namespace emulation

namespace sm120::mla {
alignas(128) char smem[emulation::kSharedBytes];  // the kernel's `extern __shared__`
}

// The sources as test_emulated.py prepares them: without launches, which follow here.
#include "kernel.cuh"
#include "merge.cuh"

extern "C" int shared_bytes;  // of the last launch
int shared_bytes;

namespace sm120::mla {

template <typename Kv, int RowGroups>
int launch(const Args& args, int blocks, void*) {
  shared_bytes = Config<Kv, RowGroups>::kSharedBytes;
  emulation::shared = smem;
  emulation::grid_size = dim3(blocks);
  for (unsigned block = 0; block < unsigned(blocks); ++block) {
    std::memset(smem, 0xff, sizeof smem);
    emulation::block_index = {block, 0, 0};
    emulation::run_block(kThreads, [&] { verify_kernel<Kv, RowGroups>(args); });
  }
  return 0;
}

int launch_merge(const Args& args, void*) {
  const unsigned rows = args.p.total_q * args.p.heads;
  const bool few = rows <= kFewRows;
  emulation::grid_size = few ? dim3(rows, 4) : dim3(rows);
  for (unsigned row = 0; row < rows; ++row) {
    for (unsigned part = 0; part < emulation::grid_size.y; ++part) {
      emulation::block_index = {row, part, 0};
      emulation::run_block(few ? kMaxMergeThreads : kLatentDim / 4, [&] { merge_kernel(args); });
    }
  }
  return 0;
}

}  // namespace sm120::mla

#include "launch.cu"

extern "C" void set_emulation_seed(unsigned seed) { emulation::random.seed(seed); }
