// The kernel of the chaos tests' program. combine.ptx is what nvcc makes of it:
//   nvcc -ptx -arch=sm_70 -o combine.ptx combine.cu

// Each thread has a word and a count. The word depends on every launch's value and on their
// order; the count tells how many launches it took.
extern "C" __global__ void combine(unsigned *words, unsigned *counts, unsigned value, int spins) {
  unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned mix = words[at] * 1664525u + (value ^ at);
  for (int i = 0; i < spins; ++i) mix = mix * 1664525u + 1013904223u;
  words[at] = mix;
  counts[at] += 1u;
}
