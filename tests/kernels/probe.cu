// The kernels of the test client. probe.ptx is what nvcc makes of it:
//   nvcc -ptx -arch=sm_70 -o probe.ptx probe.cu

// Every thread counts in its own word: n launches leave n everywhere, so a lost
// or doubled launch or block shows.
extern "C" __global__ void count(unsigned *words, int spins) {
  unsigned *word = words + blockIdx.x * blockDim.x + threadIdx.x;
  unsigned mix = *word;
  for (int i = 0; i < spins; ++i) mix = mix * 1664525u + 1013904223u;
  // The loop's outcome is used without changing what is counted.
  *word += 1u + (mix == 0x9e3779b9u && spins < 0);
}
