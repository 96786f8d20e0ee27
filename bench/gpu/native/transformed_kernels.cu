// Kernels to transform, one for each thing that could break: see step_forms.py. All but
// `globals` take (in, in, out, n, ran); every warp that runs adds 1 to ran[block],
// if it is given, so that a block which runs twice, or in part, is noticed.
#include <cooperative_groups.h>

#include <cstdint>

namespace cg = cooperative_groups;

__device__ __forceinline__ unsigned block_id() {
    return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}

__device__ __forceinline__ void count_warp(unsigned *ran) {
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    if (ran != nullptr && thread % 32 == 0) atomicAdd(&ran[block_id()], 1u);
}

#define KERNEL extern "C" __global__ void
#define PARAMETERS const float *a, const float *b, float *out, unsigned n, unsigned *ran

// The shortest blocks there are: what cutting costs at worst.
KERNEL vecadd(PARAMETERS) {
    count_warp(ran);
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

// Barriers in a loop, many registers, 1024 threads.
KERNEL __launch_bounds__(1024) matmul(PARAMETERS) {
    count_warp(ran);
    __shared__ float left[32][33], right[32][33];
    unsigned x = threadIdx.x, y = threadIdx.y;
    size_t row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    float sum = 0;
    for (unsigned k = 0; k < n; k += 32) {
        left[y][x] = a[row * n + k + x];
        right[y][x] = b[(size_t)(k + y) * n + column];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 32; ++i) sum = fmaf(left[y][i], right[i][x], sum);
        __syncthreads();
    }
    out[row * n + column] = sum;
}

// Dynamic shared memory, warps that leave early, a ragged last block, a partial last warp.
KERNEL reduce(PARAMETERS) {
    count_warp(ran);
    extern __shared__ float part[];
    const size_t share = 16384, begin = blockIdx.x * share;
    float sum = 0;
    for (size_t i = begin + threadIdx.x; i < begin + share && i < n; i += blockDim.x) sum += a[i] * 1.0001f;
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    for (unsigned i = threadIdx.x + 32; i < blockDim.x; i += 32) sum += part[i];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x != 0) return;
    out[blockIdx.x] = sum;
}

__device__ __noinline__ float descend(float x, int depth) {
    return depth <= 0 ? x : descend(x * 1.0001f + sinf(x) / (x + 2.f), depth - 1) + 0.5f;
}

// A stack that is really used, calls, double precision's slow path, a grid in three dimensions.
KERNEL recursion(PARAMETERS) {
    count_warp(ran);
    unsigned block = block_id(), i = block * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float deep = descend(a[i], 2 + (block & 3));
    out[i] = deep + static_cast<float>(static_cast<double>(deep) / (static_cast<double>(a[i]) + 3.0));
}

// Blocks that spin for n us: the length of a block is what turnaround is measured against.
KERNEL spin(PARAMETERS) {
    count_warp(ran);
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < n * 1000ull);
    if (threadIdx.x == 0) out[block_id()] = static_cast<float>(block_id());
}

// Decoupled look-back in its smallest form: every block waits for the one before it.
KERNEL lookback(PARAMETERS) {
    count_warp(ran);
    if (threadIdx.x != 0) return;
    volatile float *results = out;
    float before = 0;
    if (blockIdx.x != 0) {
        while ((before = results[blockIdx.x - 1]) == 0.f) __nanosleep(100);
    }
    __threadfence();
    results[blockIdx.x] = before + 1.f;
}

// No parameters, and a variable of the image: a second copy of the image has its own.
__device__ unsigned tally[4096];
KERNEL globals() {
    if (threadIdx.x == 0) atomicAdd(&tally[blockIdx.x % 4096], blockIdx.x + 1);
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

__device__ __forceinline__ float ring(float *own, float value, int rounds) {
    cg::cluster_group cluster = cg::this_cluster();
    own[threadIdx.x] = value;
    cluster.sync();
    float sum = 0;
    for (unsigned k = 0; k < cluster.num_blocks(); ++k) {
        unsigned rank = (cluster.block_rank() + k) % cluster.num_blocks();
        sum += *cluster.map_shared_rank(&own[(threadIdx.x + k) % 256], rank) * (k + 1);
    }
    for (int i = 0; i < rounds; ++i) sum = sum * 1.00001f + 0.001f;
    return sum;
}

// Distributed shared memory in clusters fixed at compile time.
KERNEL __cluster_dims__(4, 1, 1) cluster_fixed(PARAMETERS) {
    count_warp(ran);
    __shared__ float own[256];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = ring(own, i < n ? a[i] : 0.f, 400);
    if (i < n) out[i] = sum;
    cg::this_cluster().sync();
}

// The same in two dimensions, with dimensions that the launch gives.
KERNEL cluster_launched(PARAMETERS) {
    count_warp(ran);
    __shared__ float own[256];
    unsigned i = block_id() * blockDim.x + threadIdx.x;
    float sum = ring(own, i < n ? a[i] : 0.f, 0);
    if (i < n) out[i] = sum;
    cg::this_cluster().sync();
}

// The copy engine of a block, and a barrier in shared memory that it completes.
KERNEL bulk_copy(PARAMETERS) {
    count_warp(ran);
    __shared__ alignas(128) float buffer[2048];
    __shared__ alignas(8) uint64_t barrier;
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(buffer));
    const float *from = a + static_cast<size_t>(blockIdx.x) * 2048;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at));
        asm volatile("fence.proxy.async.shared::cta;");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], 8192;}" ::"r"(at));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 8192, [%2];" ::"r"(to),
                     "l"(from), "r"(at)
                     : "memory");
    }
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again;}" ::"r"(at)
        : "memory");
    for (unsigned k = threadIdx.x; k < 2048; k += blockDim.x) {
        out[static_cast<size_t>(blockIdx.x) * 2048 + k] = buffer[k] * 2.f + 1.f;
    }
}

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Warps that give registers to others, as in warp-specialised matrix products; one block an SM.
KERNEL __launch_bounds__(384, 1) reconfigure(PARAMETERS) {
    count_warp(ran);
    __shared__ float tile[1024];
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (unsigned k = threadIdx.x; k < 1024; k += 128) tile[k] = a[(size_t)blockIdx.x * 1024 + k];
        asm volatile("bar.sync 1, 384;");
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    asm volatile("bar.sync 1, 384;");
    float r[96], sum = 0;
#pragma unroll
    for (int k = 0; k < 96; ++k) r[k] = tile[(threadIdx.x * 3 + k * 7) % 1024];
    for (int round = 0; round < 64; ++round) {
#pragma unroll
        for (int k = 0; k < 96; ++k) r[k] = fmaf(r[k], 1.0001f, r[(k + 1) % 96] * 0.01f);
    }
#pragma unroll
    for (int k = 0; k < 96; ++k) sum += r[k];
    out[(size_t)blockIdx.x * 256 + threadIdx.x - 128] = sum;
}

#endif
