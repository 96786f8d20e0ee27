// Compiled with NVRTC 12.8 (--gpu-architecture=compute_90) to more.ptx.
extern "C" __device__ int printf(const char *, ...);

// Lanes leave at different times; the rest still meet at the barrier.
extern "C" __global__ void leavers(int *out) {
  __shared__ int total;
  int t = threadIdx.x;
  if (t == 0) total = 0;
  __syncthreads();
  for (int round = 0; round < 5; round++) {
    if (t % 5 == round && t != 0) return;
    atomicAdd(&total, 1);
    __syncthreads();
    if (t == 0) out[round] = total;
    __syncthreads();
  }
}

// Nested branches, a loop with break and continue, and a barrier after.
extern "C" __global__ void nested(int *out) {
  __shared__ int s[128];
  int t = threadIdx.x, v = 0;
  if (t & 1) {
    if (t & 2) { for (int i = 0; i < t; i++) { if (i == 17) break; if (i & 1) continue; v += i; } }
    else v = -t;
  } else {
    int k = t;
    do { v += k; k >>= 1; } while (k > 0);
  }
  s[t] = v;
  __syncthreads();
  out[t] = s[127 - t];
}

// One warp waits for another by spinning on shared memory.
extern "C" __global__ void handoff(int *out) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    while (flag == 0) {}
    out[threadIdx.x] = flag;
  } else if (threadIdx.x == 32) {
    flag = 42;
  }
}

// Blocks wait for each other: a grid barrier of resident blocks.
extern "C" __global__ void grid_barrier(unsigned *count, unsigned *out) {
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count, 1u);
    while (*(volatile unsigned *)count < gridDim.x) {}
    out[blockIdx.x] = *(volatile unsigned *)count;
  }
}

// Producer and consumer warps over named barriers.
extern "C" __global__ void named(int *out) {
  __shared__ int s[32];
  int lane = threadIdx.x & 31;
  if (threadIdx.x < 32) {
    for (int i = 0; i < 4; i++) {
      s[lane] = i * 100 + lane;
      asm volatile("bar.arrive 1, 64;" ::: "memory");
      asm volatile("bar.sync 2, 64;" ::: "memory");
    }
  } else {
    int sum = 0;
    for (int i = 0; i < 4; i++) {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      sum += s[31 - lane];
      asm volatile("bar.arrive 2, 64;" ::: "memory");
    }
    out[lane] = sum;
  }
}

// Each lane calls itself to its own depth, with a frame in local memory.
__device__ __noinline__ int deep(int n, int *up) {
  int frame[4] = {n, n + 1, n + 2, n + 3};
  if (n == 0) return *up;
  int below = deep(n - 1, &frame[n & 3]);
  return below + frame[(n + 1) & 3] * 1000;
}
extern "C" __global__ void depths(int *out) {
  int x = threadIdx.x;
  out[x] = deep(x & 7, &x);
}

__device__ __noinline__ int endless(int n) { return n == -1 ? 0 : endless(n + 1) * 2 + n; }
extern "C" __global__ void overflow(int *out) { out[0] = endless(out[1]); }

extern "C" __global__ void hello(int *out) { out[threadIdx.x] = printf("hello %d\n", threadIdx.x); }

extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, size_t);
extern "C" __global__ void asserts(int *out) {
  if (threadIdx.x == 7) __assertfail("x > 0", "file.cu", 12, "asserts", 1);
  out[threadIdx.x] = 1;
}

extern "C" __global__ void atomics(int *i, float *f, double *d, unsigned long long *u, unsigned *w) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ unsigned s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  atomicMax(i, t); atomicMin(i + 1, -t);
  atomicAdd(f, 0.5f); atomicAdd(d, 0.25);
  unsigned long long old = *u, seen;
  do { seen = old; old = atomicCAS(u, seen, seen + 3); } while (old != seen);
  atomicInc(w, 9u); atomicXor(w + 1, 1u << (t & 31));
  atomicAdd(&s, 1u);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(w + 2, s);
}
