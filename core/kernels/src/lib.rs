//! Readers for CUDA code containers (fatbins).
