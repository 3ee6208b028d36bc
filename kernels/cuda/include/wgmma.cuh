// Hopper's asynchronous pieces: matrix products of four warps from shared memory, bulk copies, and the barriers that
// order both. Only for sm_90a.
// -DBFLOAT=1: bf16, else f16.

#pragma once

#include "half_mma.cuh"

#if BFLOAT
#define WGMMA_TYPES ".f32.bf16.bf16 "
#else
#define WGMMA_TYPES ".f32.f16.f16 "
#endif

// Which permutation of 16-byte chunks a matrix in shared memory has, by bytes of a row.
template <unsigned ROW_BYTES>
__device__ __forceinline__ constexpr uint64_t swizzle_bits() {
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32, "rows of a piece");
    return (uint64_t)(ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3) << 62;
}

// Describes a matrix in shared memory: `group_bytes` from eight rows to the next eight, `piece_bytes` from a piece of
// ROW_BYTES columns to the next where the columns are the longer side of the product.
template <unsigned ROW_BYTES>
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t piece_bytes, uint32_t group_bytes) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(piece_bytes >> 4) << 16 |
           (uint64_t)(group_bytes >> 4) << 32 | swizzle_bits<ROW_BYTES>();
}

#define WGMMA_REGISTERS_8(d, o)                                                                                \
    "+f"((d)[(o)]), "+f"((d)[(o) + 1]), "+f"((d)[(o) + 2]), "+f"((d)[(o) + 3]), "+f"((d)[(o) + 4]),          \
        "+f"((d)[(o) + 5]), "+f"((d)[(o) + 6]), "+f"((d)[(o) + 7])
#define WGMMA_REGISTERS_16(d, o) WGMMA_REGISTERS_8(d, o), WGMMA_REGISTERS_8(d, (o) + 8)
#define WGMMA_REGISTERS_32(d, o) WGMMA_REGISTERS_16(d, o), WGMMA_REGISTERS_16(d, (o) + 16)
#define WGMMA_REGISTERS_64(d, o) WGMMA_REGISTERS_32(d, o), WGMMA_REGISTERS_32(d, (o) + 32)
#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32                                                                                         \
    WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                                         \
    WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a * b', or d += a * b' if `adds`: a [64 rows, 16], b [2 SIZE rows, 16], both in shared memory, SIZE registers.
template <int SIZE>
__device__ __forceinline__ void multiply_shared(float (&d)[SIZE], uint64_t a, uint64_t b, int adds) {
    static_assert(SIZE == 32 || SIZE == 64, "64 or 128 columns");
    if constexpr (SIZE == 64) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "
                     "wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES "{" WGMMA_NAMES_64
                     "}, %64, %65, p, 1, 1, 0, 0; }"
                     : WGMMA_REGISTERS_64(d, 0)
                     : "l"(a), "l"(b), "r"(adds));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; "
                     "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES "{" WGMMA_NAMES_32
                     "}, %32, %33, p, 1, 1, 0, 0; }"
                     : WGMMA_REGISTERS_32(d, 0)
                     : "l"(a), "l"(b), "r"(adds));
    }
}

// d += a * b: a [64, 16] in registers, b [16 rows, COLUMNS] in shared memory, its rows along the sum. The registers
// of d begin at FIRST.
template <int COLUMNS, int FIRST, int SIZE>
__device__ __forceinline__ void multiply_registers(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b) {
    static_assert(COLUMNS == 128 || COLUMNS == 64 || COLUMNS == 32 || COLUMNS == 16, "columns of one product");
    if constexpr (COLUMNS == 128) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES "{" WGMMA_NAMES_64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : WGMMA_REGISTERS_64(d, FIRST)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (COLUMNS == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES "{" WGMMA_NAMES_32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : WGMMA_REGISTERS_32(d, FIRST)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (COLUMNS == 32) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16" WGMMA_TYPES "{" WGMMA_NAMES_16
                     "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 1;"
                     : WGMMA_REGISTERS_16(d, FIRST)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16" WGMMA_TYPES "{" WGMMA_NAMES_8
                     "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 1;"
                     : WGMMA_REGISTERS_8(d, FIRST)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

// Orders accesses to registers before products that follow.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `PENDING` of the newest groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to these registers over this place.
template <int SIZE>
__device__ __forceinline__ void pin(float (&registers)[SIZE]) {
#pragma unroll
    for (int index = 0; index < SIZE; ++index) asm volatile("" : "+f"(registers[index])::"memory");
}

// Makes ordinary writes to shared memory visible to products and bulk copies.
__device__ __forceinline__ void publish_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the barrier wait for so many bytes of bulk copies besides.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

__device__ __forceinline__ void await_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(
                     barrier),
                 "r"(parity)
                 : "memory");
}

// Copies a multiple of 16 bytes to shared memory; `barrier` counts them.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(num_bytes), "r"(barrier)
                 : "memory");
}

// Barrier number `id` of `threads` threads: some wait, the others only arrive.
__device__ __forceinline__ void sync_threads(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_threads(unsigned id, unsigned threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <unsigned REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <unsigned REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
