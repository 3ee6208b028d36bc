// Adds to the residual stream what was summed over the ranks: by the hosts in f32, by the GPUs in f16 if it is long.
// -DHALVES=1: the addend is f16, else f32.
// Launch: enough blocks for `len / WIDTH` threads, rounded up.

#include "launch.cuh"

#if HALVES
typedef uint16_t Addend;
__device__ __forceinline__ float to_float(Addend bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#else
typedef float Addend;
__device__ __forceinline__ float to_float(Addend value) {
    return value;
}
#endif

// Values of a thread: whole loads of 16 bytes of halves.
constexpr uint32_t WIDTH = 8;

// hidden[i] += addend[i], [len] each, both on borders of 32 bytes
extern "C" __global__ void add(const Addend* __restrict__ addend, uint32_t len, float* __restrict__ hidden) {
    allow_next();
    wait_for_previous();
    const uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    if (first + WIDTH <= len) {
        struct __align__(16) Addends { Addend values[WIDTH]; };
        struct __align__(16) Floats { float values[WIDTH]; };
        const Addends addends = *(const Addends*)(addend + first);
        Floats sums = *(const Floats*)(hidden + first);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            sums.values[i] += to_float(addends.values[i]);
        }
        *(Floats*)(hidden + first) = sums;
    } else {
        for (uint32_t index = first; index < len; ++index) {
            hidden[index] += to_float(addend[index]);
        }
    }
}
