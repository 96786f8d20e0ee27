//! A software CUDA device: `libcuda.so.1` on the CPU.
//!
//! A driver API program whose kernels are PTX runs unmodified with this library
//! instead of NVIDIA's; one built on cudart, or with machine code alone, does not.
//! PTX is executed block by block, streams, events and graphs keep the driver's
//! order, and the SMs are shared with every other process on the same device
//! file. It is what CI, newcomers without a GPU and differential tests run on.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `TALLY_SOFTCUDA_DEVICE` | the file that processes on one device share | `/dev/shm/tally-softcuda-<uid>-v<layout>` |
//! | `TALLY_SOFTCUDA_SMS` | SMs | CPUs of the machine |
//! | `TALLY_SOFTCUDA_MEMORY_MIB` | device memory, all processes together | 1024 |
//! | `TALLY_SOFTCUDA_ARENA_MIB` | address space reserved for it, per process | 16384 |
//! | `TALLY_SOFTCUDA_STRICT` | `1`: a handle that is gone ends the process, and events are not recorded or waited for without a current context | off |
//! | `TALLY_SOFTCUDA_INIT_MS` | how much longer `cuInit` takes, ms | 0 |
//! | `TALLY_SOFTCUDA_LOAD_MS` | how much longer loading a module takes, ms | 0 |
//! | `TALLY_SOFTCUDA_COMPILE_LAUNCHES` | `KERNEL:COUNT`: launches that must begin while PTX with this kernel is compiled, once there was one, or it fails after 20 s | none |
//! | `TALLY_SOFTCUDA_QUEUE_DEPTH` | entries that a hardware queue holds | 1020 |
//! | `CUDA_DEVICE_MAX_CONNECTIONS` | hardware queues of a context, 1 to 32 | 8 |
//! | `CUDA_LAUNCH_BLOCKING` | `1`: launches of kernels return when these have ended | off |
//! | `TALLY_SOFTCUDA_LOG` | `1`: say on stderr why a module, launch or start failed | silent |
//!
//! SMs and memory are the device's: the first process on it decides, and the
//! others find what it chose.
//!
//! Where to read on: [`sm`] for sharing between processes, `engine` for how a
//! kernel runs, `stream` and `hardware` for order, `exports` for the API itself. It never
//! prints (unless `TALLY_SOFTCUDA_LOG=1`), never unwinds into its caller, and
//! never spins.

pub mod config;
pub mod error;
pub mod sm;

mod capture;
mod context;
mod device;
mod driver;
mod engine;
mod event;
mod exec;
mod exports;
mod ffi;
mod graph;
mod green;
mod hardware;
mod image;
mod launch;
mod memory;
mod module;
mod op;
mod registry;
mod stream;
mod sync;
