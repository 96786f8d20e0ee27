//! A software CUDA device: libcuda.so.1 on the CPU.
