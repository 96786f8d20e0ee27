//! The preloaded library that intercepts CUDA kernel launches.
