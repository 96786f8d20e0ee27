// The kernels of the inference program. inference.ptx is what nvcc makes of it:
//   nvcc -ptx -arch=sm_70 --fmad=true -o inference.ptx inference.cu
// All sizes are multiples of TILE.

#define TILE 16

// y[rows][cols] = x[rows][inner] * w[inner][cols], one thread an element, summed
// with k going up so that the outcome is the same to the last bit everywhere.
extern "C" __global__ void __launch_bounds__(TILE * TILE)
dense(const float *__restrict__ x, const float *__restrict__ w, float *__restrict__ y, int inner,
      int cols) {
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
  y[row * cols + col] = sum;
}

// y = max(y + bias of its column, 0)
extern "C" __global__ void bias_relu(float *__restrict__ y, const float *__restrict__ bias,
                                     int cols, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = fmaxf(y[i] + bias[i % cols], 0.0f);
}
