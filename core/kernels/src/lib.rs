//! Readers for CUDA code containers.
//!
//! [`fatbin`] reads the container that `nvcc` embeds in programs and that
//! `cuModuleLoadData` takes. Nothing here trusts its input, runs code or
//! touches a device.

#![forbid(unsafe_code)]

pub mod fatbin;
