// What CUDA has and C has not, for kernels on the CPU.
//
// The blocks of a grid run one after the other, on the thread that launches. The threads of a
// block are fibres: one runs to its next barrier, then the next one of its warp does, and the next
// warp begins when this one waits for the block. Lanes and warps take turns from front to back,
// then from back to front, and which comes first differs between blocks and launches, so that a
// barrier that is missing shows; one that only some of them reach ends the process. Shared memory
// is full of poison when a block begins. What is atomic is so among threads and processes, too.
#pragma once

#define _GNU_SOURCE
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t i32;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

typedef struct { u32 x, y, z; } Index;
typedef struct { u32 x, y, z, w; } __attribute__((aligned(16), may_alias)) uint4;

#define DEVICE static inline __attribute__((always_inline, unused))
#define UNROLL
#define BLOCKS_RUN_AT_ONCE 0
#define SHARED(Type, name) Type *name = (Type *)cpu_block_memory(sizeof(Type))
#define KERNEL(name, Parameters, p)                                                                    \
    static void name(Parameters p);                                                                    \
    static void name##_thread(const void *parameters) { name(*(const Parameters *)parameters); }       \
    void name##_launch(u32 grid[3], u32 block[3], void **parameters) {                                 \
        cpu_launch(name##_thread, parameters[0], grid, block);                                         \
    }                                                                                                  \
    static void name(Parameters p)

enum { CPU_THREADS = 1024, CPU_LANES = 32, CPU_SHARED = 48 << 10 };
// Bytes of a stack: not a power of two, or all stacks would share a few sets of the cache.
enum { CPU_STACK = (64 << 10) + 576 };
// As many launches as a small machine has at a time.
enum { CPU_KEPT = 8 };

// A fibre that does not run: where its stack ends, with what a call must keep on it. The C
// library's contexts do the same with two system calls for each change, which are most of what a
// kernel would take.
#if defined(__x86_64__)
typedef void *CpuContext;

__attribute__((naked, noinline, unused)) static void cpu_switch(CpuContext *from, CpuContext *to) {
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n movq (%rsi), %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}

static void cpu_prepare(CpuContext *context, char *stack, void (*entry)(void)) {
    u64 *top = (u64 *)(((size_t)stack + CPU_STACK) & ~(size_t)15);
    *--top = 0; // as after a call
    *--top = (u64)(size_t)entry;
    for (int i = 0; i < 6; i++) *--top = 0;
    *context = top;
}
#else
#include <ucontext.h>
typedef ucontext_t CpuContext;

static void cpu_switch(CpuContext *from, CpuContext *to) { swapcontext(from, to); }

static void cpu_prepare(CpuContext *context, char *stack, void (*entry)(void)) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = CPU_STACK;
    makecontext(context, entry, 0);
}
#endif

typedef struct {
    CpuContext context;
    Index index;
    u32 number;
} CpuThread;

// Where a thread has stopped.
typedef enum { CPU_AT_WARP, CPU_AT_BLOCK, CPU_DONE, CPU_STOPS } CpuStop;

// Memory of a launch. The next one of a thread uses it again: its pages have been touched.
typedef struct {
    CpuThread threads[CPU_THREADS], *current;
    u32 count, launches, turn;
    u32 stopped[CPU_STOPS]; // threads by where they are: those at a warp's barrier are of the warp
    Index grid, block, at;
    CpuContext scheduler;
    void (*kernel)(const void *);
    const void *parameters;
    u64 exchange[CPU_THREADS];
    _Alignas(16) unsigned char shared[CPU_SHARED];
    char stacks[CPU_THREADS][CPU_STACK];
} CpuLaunch;

// The launch of the thread that runs it. Static thread-local storage has room for a pointer of a
// library that is loaded late, and is found without a call.
static _Thread_local CpuLaunch *cpu __attribute__((tls_model("initial-exec")));

#define threadIdx (cpu->current->index)
#define blockIdx (cpu->at)
#define blockDim (cpu->block)
#define gridDim (cpu->grid)

static void cpu_fail(const char *what) {
    fprintf(stderr, "kernel on the CPU: %s\n", what);
    abort();
}

// The block's memory. A kernel asks once.
DEVICE void *cpu_block_memory(size_t bytes) {
    if (bytes > CPU_SHARED) cpu_fail("too much shared memory");
    return cpu->shared;
}

static void cpu_wait(CpuStop at) {
    cpu->stopped[at]++;
    cpu_switch(&cpu->current->context, &cpu->scheduler);
}

static void cpu_enter(void) {
    cpu->kernel(cpu->parameters);
    cpu_wait(CPU_DONE);
}

// Runs a warp until its threads are done or wait for the rest of the block. All of them run when it
// begins, and again when all of them have reached a barrier of the warp.
static void cpu_run_warp(u32 first) {
    u32 lanes = cpu->count - first < CPU_LANES ? cpu->count - first : CPU_LANES;
    do {
        cpu->stopped[CPU_AT_WARP] = 0;
        u32 backwards = cpu->turn++ & 1;
        for (u32 i = 0; i < lanes; i++) {
            cpu->current = &cpu->threads[first + (backwards ? lanes - 1 - i : i)];
            cpu_switch(&cpu->scheduler, &cpu->current->context);
        }
    } while (cpu->stopped[CPU_AT_WARP] == lanes);
    if (cpu->stopped[CPU_AT_WARP]) cpu_fail("a barrier that not all threads reach");
}

static void cpu_run_block(void) {
    memset(cpu->shared, 0xa5, sizeof cpu->shared);
    for (u32 i = 0; i < cpu->count; i++) cpu_prepare(&cpu->threads[i].context, cpu->stacks[i], cpu_enter);
    u32 warps = (cpu->count + CPU_LANES - 1) / CPU_LANES;
    for (u32 turn = cpu->launches + cpu->at.x;; turn++) {
        cpu->turn = turn;
        cpu->stopped[CPU_AT_BLOCK] = cpu->stopped[CPU_DONE] = 0;
        for (u32 i = 0; i < warps; i++) cpu_run_warp(CPU_LANES * (turn & 1 ? warps - 1 - i : i));
        if (cpu->stopped[CPU_DONE] == cpu->count) return;
        if (cpu->stopped[CPU_AT_BLOCK] != cpu->count) cpu_fail("a barrier that not all threads reach");
    }
}

// Memory of launches that have ended.
static CpuLaunch *cpu_free[CPU_KEPT];

static CpuLaunch *cpu_take(void) {
    for (u32 i = 0; i < CPU_KEPT; i++) {
        CpuLaunch *kept = __atomic_exchange_n(&cpu_free[i], (CpuLaunch *)0, __ATOMIC_ACQUIRE);
        if (kept) return kept;
    }
    CpuLaunch *fresh = (CpuLaunch *)malloc(sizeof(CpuLaunch));
    if (!fresh) cpu_fail("no memory for the threads of a block");
    fresh->launches = 0;
    return fresh;
}

static void cpu_give(CpuLaunch *launch) {
    for (u32 i = 0; i < CPU_KEPT; i++) {
        CpuLaunch *none = 0;
        if (__atomic_compare_exchange_n(&cpu_free[i], &none, launch, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    free(launch);
}

__attribute__((unused)) static void
cpu_launch(void (*kernel)(const void *), const void *parameters, const u32 *grid, const u32 *block) {
    cpu = cpu_take();
    cpu->count = block[0] * block[1] * block[2];
    if (cpu->count > CPU_THREADS) cpu_fail("too many threads");
    cpu->launches++;
    cpu->kernel = kernel;
    cpu->parameters = parameters;
    cpu->grid = (Index){ grid[0], grid[1], grid[2] };
    cpu->block = (Index){ block[0], block[1], block[2] };
    for (u32 i = 0; i < cpu->count; i++) {
        cpu->threads[i].number = i;
        cpu->threads[i].index = (Index){ i % block[0], i / block[0] % block[1], i / block[0] / block[1] };
    }
    for (cpu->at.z = 0; cpu->at.z < grid[2]; cpu->at.z++)
        for (cpu->at.y = 0; cpu->at.y < grid[1]; cpu->at.y++)
            for (cpu->at.x = 0; cpu->at.x < grid[0]; cpu->at.x++) cpu_run_block();
    cpu_give(cpu);
}

DEVICE void __syncthreads(void) { cpu_wait(CPU_AT_BLOCK); }

// What a lane gives to the others of its warp: all of them see it between the two barriers.
static u64 cpu_exchange(u64 value, u32 lane) {
    u32 self = cpu->current->number;
    cpu->exchange[self] = value;
    cpu_wait(CPU_AT_WARP);
    u64 seen = cpu->exchange[(self & ~31u) + (lane & 31u)];
    cpu_wait(CPU_AT_WARP);
    return seen;
}

DEVICE u32 __ballot_sync(u32 lanes, int holds) {
    (void)lanes;
    u32 self = cpu->current->number, ballot = 0;
    cpu->exchange[self] = holds != 0;
    cpu_wait(CPU_AT_WARP);
    for (u32 lane = 0; lane < CPU_LANES; lane++)
        ballot |= (u32)cpu->exchange[(self & ~31u) + lane] << lane;
    cpu_wait(CPU_AT_WARP);
    return ballot;
}

DEVICE u64 __shfl_sync(u32 lanes, u64 value, u32 lane) {
    (void)lanes;
    return cpu_exchange(value, lane);
}

DEVICE u32 __shfl_xor_sync(u32 lanes, u32 value, u32 mask) {
    (void)lanes;
    return (u32)cpu_exchange(value, cpu->current->number ^ mask);
}

DEVICE u32 __popc(u32 bits) { return (u32)__builtin_popcount(bits); }
DEVICE u32 __popcll(u64 bits) { return (u32)__builtin_popcountll(bits); }

// The number of the lowest bit, counted from 1; 0 if there is none.
DEVICE u32 __ffs(u32 bits) { return (u32)__builtin_ffs((int)bits); }

DEVICE u32 atomicCAS(u32 *word, u32 expected, u32 value) {
    __atomic_compare_exchange_n(word, &expected, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

DEVICE u32 atomicAdd(u32 *word, u32 more) { return __atomic_fetch_add(word, more, __ATOMIC_SEQ_CST); }

DEVICE void __threadfence_system(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

DEVICE u32 atomicMin(u32 *word, u32 value) {
    u32 seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while (value < seen && !__atomic_compare_exchange_n(word, &seen, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return seen;
}

DEVICE void rest(void) { sched_yield(); }

DEVICE u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

DEVICE float float_of(u32 bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

DEVICE u64 bits_of_double(double x) {
    u64 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

DEVICE double double_of(u64 bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
