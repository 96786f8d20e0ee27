// What basic.ptx does. The PTX is written by hand after this source, so that
// no NVIDIA tool is needed to change it.

__device__ unsigned int counter = 7;
__constant__ int table[4] = {10, 20, 30, 40};

extern "C" __global__ void vector_add(const float *a, const float *b, float *out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

// Adds 1 to every element, `rounds` times over.
extern "C" __global__ void increment(unsigned *data, unsigned n, unsigned rounds) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    for (unsigned r = 0; r < rounds; r++) data[i] += 1;
}

extern "C" __global__ void lookup(int *out) { out[threadIdx.x] = table[threadIdx.x] + counter; }

extern "C" __global__ void store_at(unsigned *at, unsigned value) { *at = value; }

extern "C" __global__ void stop() { asm("trap;"); }

// Every block waits until all blocks of the grid have come.
extern "C" __global__ void meet(unsigned *arrived, unsigned expected) {
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1);
        while (*(volatile unsigned *)arrived < expected) {}
    }
}

// Keeps an SM busy for `rounds` rounds and counts the block.
extern "C" __global__ void spin(unsigned *done, unsigned rounds) {
    volatile unsigned x = 0;
    for (unsigned r = 0; r < rounds; r++) x++;
    if (threadIdx.x == 0) atomicAdd(done, 1);
}

extern "C" __global__ void empty() {}
