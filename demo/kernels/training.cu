// The kernels of the training program: gradient descent on a linear layer.
// training.ptx is what nvcc makes of it:
//   nvcc -ptx -arch=sm_70 --fmad=true -o training.ptx training.cu
// All sizes are multiples of TILE; sums go up in k, so that the state after n
// steps is the same to the last bit everywhere.

#define TILE 16

// e[rows][cols] = x[rows][inner] * w[inner][cols] - target[rows][cols]
extern "C" __global__ void __launch_bounds__(TILE * TILE)
forward_error(const float *__restrict__ x, const float *__restrict__ w,
              const float *__restrict__ target, float *__restrict__ e, int inner, int cols) {
  __shared__ float xs[TILE][TILE];
  __shared__ float ws[TILE][TILE];
  int tx = threadIdx.x, ty = threadIdx.y;
  int row = blockIdx.y * TILE + ty, col = blockIdx.x * TILE + tx;
  float sum = 0.0f;
  for (int k0 = 0; k0 < inner; k0 += TILE) {
    xs[ty][tx] = x[row * inner + k0 + tx];
    ws[ty][tx] = w[(k0 + ty) * cols + col];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE; ++k) sum = fmaf(xs[ty][k], ws[k][tx], sum);
    __syncthreads();
  }
  e[row * cols + col] = sum - target[row * cols + col];
}

// w[inner][cols] -= rate * (x transposed * e)
extern "C" __global__ void __launch_bounds__(TILE * TILE)
gradient_step(const float *__restrict__ x, const float *__restrict__ e, float *__restrict__ w,
              int rows, int inner, int cols, float rate) {
  __shared__ float xs[TILE][TILE];
  __shared__ float es[TILE][TILE];
  int tx = threadIdx.x, ty = threadIdx.y;
  int in = blockIdx.y * TILE + ty, col = blockIdx.x * TILE + tx;
  float sum = 0.0f;
  for (int r0 = 0; r0 < rows; r0 += TILE) {
    xs[ty][tx] = x[(r0 + ty) * inner + blockIdx.y * TILE + tx];
    es[ty][tx] = e[(r0 + ty) * cols + col];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < TILE; ++r) sum = fmaf(xs[r][ty], es[r][tx], sum);
    __syncthreads();
  }
  w[in * cols + col] = fmaf(-rate, sum, w[in * cols + col]);
}
