// Compiled with NVRTC 12.8 (--gpu-architecture=compute_70) to basic.ptx.
#define TILE 16
extern "C" __global__ void vector_add(const float *a, const float *b, float *c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

// C = A * B, n by n, n a multiple of 16.
extern "C" __global__ void matmul16(const float *a, const float *b, float *c, int n) {
  __shared__ float as[TILE][TILE], bs[TILE][TILE];
  int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
  float sum = 0;
  for (int t = 0; t < n; t += TILE) {
    as[threadIdx.y][threadIdx.x] = a[row * n + t + threadIdx.x];
    bs[threadIdx.y][threadIdx.x] = b[(t + threadIdx.y) * n + col];
    __syncthreads();
    for (int k = 0; k < TILE; k++) sum += as[threadIdx.y][k] * bs[k][threadIdx.x];
    __syncthreads();
  }
  c[row * n + col] = sum;
}

extern "C" __global__ void matmul32(const float *a, const float *b, float *c, int n) {
  __shared__ float as[32][32], bs[32][32];
  int row = blockIdx.y * 32 + threadIdx.y, col = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  for (int t = 0; t < n; t += 32) {
    as[threadIdx.y][threadIdx.x] = a[row * n + t + threadIdx.x];
    bs[threadIdx.y][threadIdx.x] = b[(t + threadIdx.y) * n + col];
    __syncthreads();
    for (int k = 0; k < 32; k++) sum += as[threadIdx.y][k] * bs[k][threadIdx.x];
    __syncthreads();
  }
  c[row * n + col] = sum;
}

// Sums each block's values: shared memory, then shuffles, then an atomic.
extern "C" __global__ void reduce(const int *in, int *out, int n) {
  extern __shared__ int s[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  s[threadIdx.x] = i < n ? in[i] : 0;
  __syncthreads();
  for (int d = blockDim.x / 2; d >= 32; d /= 2) {
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    int v = s[threadIdx.x];
    for (int d = 16; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
    if (threadIdx.x == 0) atomicAdd(out, v);
  }
}

__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
extern "C" __global__ void fibonacci(int *out) { out[threadIdx.x] = fib(threadIdx.x % 13); }

typedef float (*op_t)(float, float);
__device__ __noinline__ float op_add(float a, float b) { return a + b; }
__device__ __noinline__ float op_mul(float a, float b) { return a * b; }
__device__ __noinline__ float op_sub(float a, float b) { return a - b; }
__device__ op_t table[3] = {op_add, op_mul, op_sub};
extern "C" __global__ void indirect(float *x) {
  x[threadIdx.x] = table[threadIdx.x % 3](x[threadIdx.x], 3.0f);
}

struct big { int v[10]; double d; };
__device__ __noinline__ big twist(big b, int k) {
  big r;
  for (int i = 0; i < 10; i++) r.v[i] = b.v[(i + k) % 10];
  r.d = b.d * k;
  return r;
}
extern "C" __global__ void structs(big in, big *out) { out[threadIdx.x] = twist(in, threadIdx.x); }

// Collatz steps: loops of different lengths, an inner branch, an early exit.
extern "C" __global__ void collatz(int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned v = i + 1, steps = 0;
  while (v != 1) {
    if (v & 1) v = 3 * v + 1; else v >>= 1;
    steps++;
    if (steps > 100) { out[i] = -1; return; }
  }
  out[i] = steps;
}

__constant__ float coefficients[4] = {1.0f, -0.5f, 0.25f, -0.125f};
__device__ int counter = 7;
extern "C" __global__ void globals(float *x, int *old) {
  float v = x[threadIdx.x], r = 0;
  for (int i = 3; i >= 0; i--) r = r * v + coefficients[i];
  x[threadIdx.x] = r;
  old[threadIdx.x] = atomicAdd(&counter, 1);
}

// A lock taken by each thread of a warp in turn.
__device__ int lock_word = 0;
extern "C" __global__ void spin_lock(volatile int *sum) {
  bool done = false;
  while (!done) {
    if (atomicCAS(&lock_word, 0, 1) == 0) {
      __threadfence();
      *sum = *sum + 1;
      __threadfence();
      atomicExch(&lock_word, 0);
      done = true;
    }
  }
}

extern "C" __global__ void switcher(int *x) {
  int v = x[threadIdx.x];
  switch (threadIdx.x & 7) {
    case 0: v += 3; break;
    case 1: v *= 5; break;
    case 2: v ^= 0x55; break;
    case 3: v = -v; break;
    case 4: v <<= 2; break;
    case 5: v = v / 3; break;
    case 6: v = v % 7; break;
    default: v = 0;
  }
  x[threadIdx.x] = v;
}

extern "C" __global__ void local_array(int *out, const int *idx) {
  int a[16];
  for (int i = 0; i < 16; i++) a[i] = i * i + threadIdx.x;
  int s = 0;
  for (int i = 0; i < 8; i++) { a[idx[i] & 15] += i; s += a[idx[i + 8] & 15]; }
  out[threadIdx.x] = s;
}

extern "C" __global__ void votes(unsigned *out) {
  unsigned t = threadIdx.x;
  unsigned b = __ballot_sync(~0u, t % 3 == 0);
  int any = __any_sync(~0u, t == 40), all = __all_sync(~0u, t < 64);
  unsigned match = __match_any_sync(~0u, t / 5);
  unsigned x = __shfl_xor_sync(~0u, t, 5), u = __shfl_up_sync(~0u, t, 3), w = __shfl_sync(~0u, t, 9, 16);
  int pc = __syncthreads_count(t & 1);
  out[t] = b ^ (any << 1) ^ (all << 2) ^ match ^ (x << 8) ^ (u << 16) ^ (w << 24) ^ pc;
}

extern "C" __global__ void clocked(long long *out) {
  long long t = clock64();
  while (clock64() - t < 10000) {}
  out[threadIdx.x] = clock64() - t;
}
