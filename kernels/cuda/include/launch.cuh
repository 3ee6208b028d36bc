// What every kernel needs: integer types without headers, and the order of overlapped launches.
//
// Invariant: every kernel calls `wait_for_previous` in every block before its first access to memory that an earlier
// kernel of the stream writes, or reads and this one writes. Launches overlap: a kernel may start while the one before
// still runs. Weights and other memory that no kernel writes may be loaded before the wait; that is the gain.

#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

constexpr unsigned WARP = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

// Lets the next kernel of the stream start as soon as all blocks of this one run. Call it first.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one are complete and their writes visible.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
