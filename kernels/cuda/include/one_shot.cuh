// One-shot sums over the GPUs of a host: every rank writes its terms into the inboxes of all others and adds up what
// comes into its own. For: all_reduce. -DWORLD_SIZE: 2 to 8 ranks. The host side, `one_shot.rs`, connects the ranks.
//
// An inbox line is {value, epoch, value, epoch}, written and read as 16 bytes, of which each half arrives whole: a line
// whose epochs are the one that is waited for holds the values of this operation. So there is neither a fence nor a flag
// of its own, and a message costs one trip. The epoch counts the operations of the communicator, which all ranks execute
// in the same order; it lives in device memory, so that a recorded launch can be replayed. 0 is what lines start with,
// and is skipped when the count wraps, with 1, which keeps parities alternating. A line that no operation wrote for
// exactly 2^32 - 2 operations would pass for new: days of work at full speed, and then one chance in four billion.
//
// Why two halves of an inbox, by the parity of the epoch, are enough:
// - A kernel sends only after `wait_for_previous`, so a rank sends lines of epoch e + 2 only when its kernel of e + 1 is
//   complete, on all of its blocks (every kernel of the stream waits, so completion is transitive, however many kernels
//   start early). That kernel has received a line of e + 1 from every other rank, as messages are not empty.
// - That rank sent it after its own `wait_for_previous`, so its kernel of epoch e was complete: it has read all lines of
//   epoch e, which those of e + 2 replace. Lines of e + 1 lie in the other half.
// Messages of different lengths, grids and kernels mix freely: it is the epoch that tells lines apart, not their place.
// Early starts take no memory or place that a sender needs: a kernel lets the next one in when all of its blocks run, and
// each block sends before it waits. So some block can always go on: the first one that is not done on all ranks.
//
// A rank that never comes: after some thousand looks at a line the wait asks the host's abort flag now and then, and
// leaves with wrong values when it is raised. It notes that beside every epoch: whatever was launched behind it waits no
// more, and sends nothing, so that no other rank takes for sums what was made of wrong values. The host does not use what
// an aborted communicator computed.

#pragma once

#include "launch.cuh"

constexpr unsigned MAX_WORLD_SIZE = 8;
// Blocks of a launch: as many states are kept, one for each, all equal between launches.
constexpr unsigned MAX_BLOCKS = 512;
// Looks at the inbox between two looks at the abort flag, which lies in host memory: about half a millisecond.
constexpr unsigned LOOKS = 1024;
// Ranks whose lines are under way to registers together.
constexpr unsigned TOGETHER = 4;

struct Ranks {
    uint4* inboxes[MAX_WORLD_SIZE];  // of each rank: [2, WORLD_SIZE, capacity] lines
    uint2* states;  // [MAX_BLOCKS]: epoch of the latest operation, and whether one was left before its end
    const uint32_t* abort;
    uint32_t rank;
    uint32_t capacity;  // lines of a message
};

// The lines that hold chunk `chunk` of four values begin here, and 32 further on: both are contiguous over a warp.
__device__ __forceinline__ uint32_t first_line(uint32_t chunk) { return chunk / WARP * 2 * WARP + chunk % WARP; }

__device__ __forceinline__ void write_line(uint4* line, float first, float second, uint32_t epoch) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};"
                 :: "l"(line), "r"(__float_as_uint(first)), "r"(epoch), "r"(__float_as_uint(second)) : "memory");
}

__device__ __forceinline__ uint4 read_line(const uint4* line) {
    uint4 words;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(line) : "memory");
    return words;
}

// One operation, as the threads of a block see it. Begins after `wait_for_previous`.
struct OneShot {
    const Ranks& ranks;
    uint32_t epoch;
    bool was_left;

    __device__ __forceinline__ explicit OneShot(const Ranks& ranks) : ranks(ranks) {
        uint32_t latest, left;
        asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(latest), "=r"(left) : "l"(ranks.states + blockIdx.x) : "memory");
        was_left = left != 0;
        epoch = latest + 1 == 0 ? 2 : latest + 1;
    }

    // Sends four values to all other ranks, the next one first, so that not all write to one GPU.
    __device__ __forceinline__ void send(uint32_t chunk, float4 own) const {
        if (was_left) return;
#pragma unroll
        for (unsigned step = 1; step < WORLD_SIZE; ++step) {
            const unsigned other = (ranks.rank + step) % WORLD_SIZE;
            uint4* line = lines_of(other, ranks.rank) + first_line(chunk);
            write_line(line, own.x, own.y, epoch);
            write_line(line + WARP, own.z, own.w, epoch);
        }
    }

    // Keeps the epoch for the next launch, also for blocks that this one does not have. Called by all threads, after
    // whatever they send.
    __device__ __forceinline__ void keep_epoch() const {
        __syncthreads();
        if (threadIdx.x == 0) ranks.states[blockIdx.x].x = epoch;
        if (blockIdx.x + 1 == gridDim.x) {
            for (unsigned block = gridDim.x + threadIdx.x; block < MAX_BLOCKS; block += blockDim.x) {
                ranks.states[block].x = epoch;
            }
        }
    }

    // Adds the values of all ranks in the order of the ranks: the same bits on each of them.
    __device__ __forceinline__ float4 receive_sum(uint32_t chunk, float4 own) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (unsigned first = 0; first < WORLD_SIZE; first += TOGETHER) {
            uint4 lines[TOGETHER][2] = {};
            receive(chunk, first, lines);
#pragma unroll
            for (unsigned i = 0; i < TOGETHER && first + i < WORLD_SIZE; ++i) {
                const float4 term = first + i == ranks.rank ? own
                                                            : make_float4(__uint_as_float(lines[i][0].x), __uint_as_float(lines[i][0].z),
                                                                          __uint_as_float(lines[i][1].x), __uint_as_float(lines[i][1].z));
                sum = first + i == 0 ? term
                                     : make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
            }
        }
        return sum;
    }

private:
    // In the inbox of `owner`, what `sender` writes in this epoch.
    __device__ __forceinline__ uint4* lines_of(unsigned owner, unsigned sender) const {
        return ranks.inboxes[owner] + (size_t)(epoch % 2 * WORLD_SIZE + sender) * ranks.capacity;
    }

    __device__ __forceinline__ bool is_new(const uint4& line) const { return line.y == epoch && line.w == epoch; }

    // Waits for the lines of a chunk from ranks `first` on. Each look is at all lines that are missing: one after the
    // other they would cost a trip to memory each.
    __device__ __forceinline__ void receive(uint32_t chunk, unsigned first, uint4 (&lines)[TOGETHER][2]) {
        bool is_missing = true;
        for (unsigned looks = 1; is_missing; ++looks) {
#pragma unroll
            for (unsigned i = 0; i < TOGETHER && first + i < WORLD_SIZE; ++i) {
                if (first + i == ranks.rank) continue;
                const uint4* from = lines_of(ranks.rank, first + i) + first_line(chunk);
                if (!is_new(lines[i][0])) lines[i][0] = read_line(from);
                if (!is_new(lines[i][1])) lines[i][1] = read_line(from + WARP);
            }
            is_missing = false;
#pragma unroll
            for (unsigned i = 0; i < TOGETHER && first + i < WORLD_SIZE; ++i) {
                if (first + i == ranks.rank) continue;
                is_missing |= !is_new(lines[i][0]) || !is_new(lines[i][1]);
            }
            if (is_missing && is_given_up(looks)) return;
        }
    }

    // Whether a wait has no end: the group was aborted. Then this thread waits no more either.
    __device__ __forceinline__ bool is_given_up(unsigned looks) {
        if (!was_left && looks % LOOKS == 0 && *(const volatile uint32_t*)ranks.abort != 0) {
            was_left = true;
            for (unsigned block = 0; block < MAX_BLOCKS; ++block) ranks.states[block].y = 1;
        }
        return was_left;
    }
};
