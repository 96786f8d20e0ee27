//! The table of functions replaced, **one row on one line**: `core/preload/build.rs` reads the names line by line and
//! exports a function of each. Each row makes a function for programs linked to the driver, and a few wrappers that
//! look-ups return, one for each distinct real function found (see [`crate::resolve`]).
//!
//! A row names its body: a function that takes the real function, whether the default stream is the thread's own
//! (`_ptsz`, `_ptds`), and the arguments. On the program's behalf a body calls only this real function. Versions that
//! differ only in trailing arguments share a body, which passes them through unread.

#![allow(non_snake_case)]

use crate::table::{EntryPoint, REALS};
use crate::{
    attributes, contexts, launch, lifecycle, loads, names, quiesce, resolve, streams, syncs,
};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use tally_preempt::cuda::{CuResult, LaunchConfig, Ptr, SYMBOL_NOT_FOUND};

#[derive(Debug)]
pub struct Directs(pub &'static [*const ()]);

// SAFETY: function pointers.
unsafe impl Sync for Directs {}

macro_rules! entry_points {
    ($( $name:ident($($arg:ident: $ty:ty),*) $per_thread:literal $($body:ident)::+ ;)*) => {
        $(
            /// The driver function of this name.
            ///
            /// # Safety
            /// The caller keeps to the contract of the CUDA driver's function.
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> CuResult {
                let mut real = wrapped::$name::LINKED.load(Acquire);
                if real == 0 {
                    real = resolve::direct(&wrapped::$name::LINKED, wrapped::$name::SYMBOL);
                    if real == 0 {
                        return SYMBOL_NOT_FOUND;
                    }
                }
                // SAFETY: the driver's function of this name; arguments are the caller's.
                unsafe {
                    let real = std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> CuResult>(real);
                    $($body)::+(real, $per_thread, $($arg),*)
                }
            }
        )*

        mod wrapped {
            use super::*;
            $(
                pub mod $name {
                    use super::*;
                    pub static LINKED: AtomicUsize = AtomicUsize::new(0);
                    pub const SYMBOL: &CStr =
                        match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => panic!("NUL in a name"),
                        };
                    pub static REALS_OF: [AtomicUsize; REALS] = [const { AtomicUsize::new(0) }; REALS];

                    pub unsafe extern "C" fn wrapper<const I: usize>($($arg: $ty),*) -> CuResult {
                        let real = REALS_OF[I].load(Relaxed);
                        // SAFETY: a wrapper is handed out only after its real
                        // function was stored; arguments are the caller's.
                        unsafe {
                            let real = std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> CuResult>(real);
                            $($body)::+(real, $per_thread, $($arg),*)
                        }
                    }
                }
            )*
        }

        /// What programs linked to the driver call, in the table's order.
        pub static DIRECT: Directs = Directs(&[ $( $name as *const () ),* ]);

        /// Every entry point, in the table's order.
        pub static ENTRY_POINTS: &[EntryPoint] = &[ $( EntryPoint {
            name: stringify!($name),
            symbol: wrapped::$name::SYMBOL,
            linked: &wrapped::$name::LINKED,
            direct: $name as *const (),
            reals: &wrapped::$name::REALS_OF,
            wrappers: [
                wrapped::$name::wrapper::<0> as *const (),
                wrapped::$name::wrapper::<1> as *const (),
                wrapped::$name::wrapper::<2> as *const (),
                wrapped::$name::wrapper::<3> as *const (),
            ],
        }, )* ];
    };
}

entry_points! {
    cuInit(flags: c_uint) false lifecycle::init;
    cuGetProcAddress(symbol: *const c_char, pfn: *mut Ptr, version: c_int, flags: u64) false lifecycle::get_proc_address;
    cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut Ptr, version: c_int, flags: u64, status: *mut c_int) false lifecycle::get_proc_address_v2;

    cuLaunchKernel(f: Ptr, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: Ptr, params: *mut Ptr, extra: *mut Ptr) false launch::kernel;
    cuLaunchKernel_ptsz(f: Ptr, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: Ptr, params: *mut Ptr, extra: *mut Ptr) true launch::kernel;
    cuLaunchKernelEx(config: *const LaunchConfig, f: Ptr, params: *mut Ptr, extra: *mut Ptr) false launch::kernel_ex;
    cuLaunchKernelEx_ptsz(config: *const LaunchConfig, f: Ptr, params: *mut Ptr, extra: *mut Ptr) true launch::kernel_ex;
    cuLaunchCooperativeKernel(f: Ptr, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: Ptr, params: *mut Ptr) false launch::cooperative;
    cuLaunchCooperativeKernel_ptsz(f: Ptr, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: Ptr, params: *mut Ptr) true launch::cooperative;
    cuLaunchCooperativeKernelMultiDevice(list: Ptr, count: c_uint, flags: c_uint) false launch::cooperative_multi;
    cuLaunch(f: Ptr) false launch::legacy;
    cuLaunchGrid(f: Ptr, width: c_int, height: c_int) false launch::legacy_grid;
    cuLaunchGridAsync(f: Ptr, width: c_int, height: c_int, stream: Ptr) false launch::legacy_grid_async;
    cuGraphLaunch(exec: Ptr, stream: Ptr) false launch::graph;
    cuGraphLaunch_ptsz(exec: Ptr, stream: Ptr) true launch::graph;
    cuLaunchHostFunc(a: usize, b: usize, c: usize, d: usize) false quiesce::host_func;
    cuLaunchHostFunc_ptsz(a: usize, b: usize, c: usize, d: usize) true quiesce::host_func;
    cuLaunchHostFunc_v2(a: usize, b: usize, c: usize, d: usize) false quiesce::host_func;
    cuLaunchHostFunc_v2_ptsz(a: usize, b: usize, c: usize, d: usize) true quiesce::host_func;
    cuStreamAddCallback(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamAddCallback_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWaitValue32(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWaitValue32_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWaitValue32_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWaitValue32_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWaitValue64(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWaitValue64_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWaitValue64_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWaitValue64_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamBatchMemOp(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamBatchMemOp_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamBatchMemOp_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamBatchMemOp_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuWaitExternalSemaphoresAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuWaitExternalSemaphoresAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyHtoD_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyHtoD_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyDtoD_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyDtoD_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyDtoA_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyDtoA_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyAtoD_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyAtoD_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyHtoA_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyHtoA_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyAtoA_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyAtoA_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy2D_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy2D_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy2DUnaligned_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy2DUnaligned_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3D_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3D_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyPeer(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyPeer_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3DPeer(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3DPeer_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD8_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD8_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD16_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD16_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD32_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD32_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD2D8_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD2D8_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD2D16_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD2D16_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD2D32_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD2D32_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyPeerAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyPeerAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyHtoDAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyHtoDAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyDtoDAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyDtoDAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyHtoAAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyHtoAAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyAtoHAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyAtoHAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy2DAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy2DAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3DAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3DAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3DPeerAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3DPeerAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpyWithAttributesAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyWithAttributesAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3DWithAttributesAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3DWithAttributesAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuFabricCpyBatchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuFabricCpyBatchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3DBatchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3DBatchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD8Async(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD8Async_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD16Async(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD16Async_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD32Async(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD32Async_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD2D8Async(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD2D8Async_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD2D16Async(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD2D16Async_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemsetD2D32Async(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemsetD2D32Async_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWriteValue32(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWriteValue32_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWriteValue32_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWriteValue32_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWriteValue64(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWriteValue64_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuStreamWriteValue64_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuStreamWriteValue64_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuSignalExternalSemaphoresAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuSignalExternalSemaphoresAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemAllocAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemAllocAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemAllocFromPoolAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemAllocFromPoolAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemFreeAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemFreeAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemPrefetchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemPrefetchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemPrefetchAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemPrefetchAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemMapArrayAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemMapArrayAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuGraphUpload(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGraphUpload_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuGraphicsMapResources(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGraphicsMapResources_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuGraphicsUnmapResources(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGraphicsUnmapResources_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemDiscardBatchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemDiscardBatchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemBatchDecompressAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemBatchDecompressAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemcpy3DBatchAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpy3DBatchAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuMemPrefetchBatchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) false quiesce::enqueues_batch;
    cuMemPrefetchBatchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) true quiesce::enqueues_batch;
    cuMemDiscardAndPrefetchBatchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) false quiesce::enqueues_batch;
    cuMemDiscardAndPrefetchBatchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) true quiesce::enqueues_batch;
    cuMemcpyBatchAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) false quiesce::enqueues_batch;
    cuMemcpyBatchAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) true quiesce::enqueues_batch;
    cuCtxRecordEvent(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuCtxWaitEvent(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGreenCtxRecordEvent(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGreenCtxWaitEvent(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGLMapBufferObject_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGLMapBufferObject_v2_ptds(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuGLMapBufferObjectAsync_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGLMapBufferObjectAsync_v2_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) true quiesce::enqueues;
    cuGLUnmapBufferObject(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuGLUnmapBufferObjectAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuEGLStreamConsumerAcquireFrame(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuEGLStreamConsumerReleaseFrame(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuEGLStreamProducerPresentFrame(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuEGLStreamProducerReturnFrame(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::enqueues;
    cuMemcpyBatchAsync(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) false quiesce::enqueues_batch;
    cuMemcpyBatchAsync_ptsz(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize, g: usize, h: usize, i: usize) true quiesce::enqueues_batch;

    cuStreamSynchronize(stream: Ptr) false syncs::stream_wait;
    cuStreamSynchronize_ptsz(stream: Ptr) true syncs::stream_wait;
    cuStreamQuery(stream: Ptr) false syncs::stream;
    cuStreamQuery_ptsz(stream: Ptr) true syncs::stream;
    cuEventSynchronize(event: Ptr) false syncs::event_wait;
    cuEventQuery(event: Ptr) false syncs::event;
    cuEventRecord(event: Ptr, stream: Ptr) false syncs::event_record;
    cuEventRecord_ptsz(event: Ptr, stream: Ptr) true syncs::event_record;
    cuEventRecordWithFlags(event: Ptr, stream: Ptr, flags: c_uint) false syncs::event_record_flags;
    cuEventRecordWithFlags_ptsz(event: Ptr, stream: Ptr, flags: c_uint) true syncs::event_record_flags;
    cuCtxSynchronize() false syncs::context;
    cuCtxSynchronize_v2(ctx: Ptr) false syncs::context_given;
    cuMemcpyDtoH_v2(dst: Ptr, src: u64, bytes: usize) false syncs::copy_to_host;
    cuMemcpyDtoH_v2_ptds(dst: Ptr, src: u64, bytes: usize) true syncs::copy_to_host;
    cuMemcpyDtoHAsync_v2(dst: Ptr, src: u64, bytes: usize, stream: Ptr) false syncs::copy_to_host_async;
    cuMemcpyDtoHAsync_v2_ptsz(dst: Ptr, src: u64, bytes: usize, stream: Ptr) true syncs::copy_to_host_async;
    cuMemcpyAtoH_v2(dst: Ptr, src: Ptr, offset: usize, bytes: usize) false syncs::array_to_host;
    cuMemcpyAtoH_v2_ptds(dst: Ptr, src: Ptr, offset: usize, bytes: usize) true syncs::array_to_host;
    cuMemcpy(dst: u64, src: u64, bytes: usize) false syncs::copy_any;
    cuMemcpy_ptds(dst: u64, src: u64, bytes: usize) true syncs::copy_any;

    cuStreamWaitEvent(stream: Ptr, event: Ptr, flags: c_uint) false syncs::stream_joins;
    cuStreamWaitEvent_ptsz(stream: Ptr, event: Ptr, flags: c_uint) true syncs::stream_joins;
    cuEventDestroy(event: Ptr) false syncs::event_destroy;
    cuEventDestroy_v2(event: Ptr) false syncs::event_destroy;
    cuStreamCreate(stream: *mut Ptr, flags: c_uint) false streams::create;
    cuStreamCreateWithPriority(stream: *mut Ptr, flags: c_uint, priority: c_int) false streams::create_with_priority;
    cuGreenCtxStreamCreate(stream: *mut Ptr, green: Ptr, flags: c_uint, priority: c_int) false streams::create_in_green;
    cuStreamSetAttribute(stream: Ptr, a: usize, b: usize) false streams::set_attribute;
    cuStreamSetAttribute_ptsz(stream: Ptr, a: usize, b: usize) true streams::set_attribute;
    cuStreamCopyAttributes(stream: Ptr, a: usize) false streams::copy_attributes;
    cuStreamCopyAttributes_ptsz(stream: Ptr, a: usize) true streams::copy_attributes;
    cuStreamAttachMemAsync(stream: Ptr, a: usize, b: usize, c: usize) false streams::attach_memory;
    cuStreamAttachMemAsync_ptsz(stream: Ptr, a: usize, b: usize, c: usize) true streams::attach_memory;
    cuStreamDestroy(stream: Ptr) false lifecycle::stream_destroy;
    cuStreamDestroy_v2(stream: Ptr) false lifecycle::stream_destroy;
    cuStreamBeginCapture(stream: Ptr, mode: c_int) false lifecycle::begin_capture;
    cuStreamBeginCapture_ptsz(stream: Ptr, mode: c_int) true lifecycle::begin_capture;
    cuStreamBeginCapture_v2(stream: Ptr, mode: c_int) false lifecycle::begin_capture;
    cuStreamBeginCapture_v2_ptsz(stream: Ptr, mode: c_int) true lifecycle::begin_capture;
    cuStreamBeginCaptureToGraph(stream: Ptr, graph: Ptr, dependencies: Ptr, data: Ptr, count: usize, mode: c_int) false lifecycle::begin_capture_to_graph;
    cuStreamBeginCaptureToGraph_ptsz(stream: Ptr, graph: Ptr, dependencies: Ptr, data: Ptr, count: usize, mode: c_int) true lifecycle::begin_capture_to_graph;
    cuStreamBeginRecaptureToGraph(stream: Ptr, a: usize, b: usize, c: usize, d: usize) false lifecycle::begin_capture_otherwise;
    cuStreamBeginRecaptureToGraph_ptsz(stream: Ptr, a: usize, b: usize, c: usize, d: usize) true lifecycle::begin_capture_otherwise;
    cuStreamBeginCaptureToCig(stream: Ptr, a: usize, b: usize, c: usize, d: usize) false lifecycle::begin_capture_otherwise;
    cuStreamBeginCaptureToCig_ptsz(stream: Ptr, a: usize, b: usize, c: usize, d: usize) true lifecycle::begin_capture_otherwise;
    cuStreamEndCaptureToCig(stream: Ptr) false lifecycle::end_capture_otherwise;
    cuStreamEndCaptureToCig_ptsz(stream: Ptr) true lifecycle::end_capture_otherwise;
    cuStreamEndCapture(stream: Ptr, graph: *mut Ptr) false lifecycle::end_capture;
    cuStreamEndCapture_ptsz(stream: Ptr, graph: *mut Ptr) true lifecycle::end_capture;
    cuGraphInstantiate(exec: *mut Ptr, graph: Ptr, a: usize, b: usize, c: usize) false lifecycle::graph_instantiate;
    cuGraphInstantiate_v2(exec: *mut Ptr, graph: Ptr, a: usize, b: usize, c: usize) false lifecycle::graph_instantiate;
    cuGraphInstantiateWithFlags(exec: *mut Ptr, graph: Ptr, a: usize, b: usize, c: usize) false lifecycle::graph_instantiate;
    cuGraphInstantiateWithParams(exec: *mut Ptr, graph: Ptr, a: usize, b: usize, c: usize) false lifecycle::graph_instantiate;
    cuGraphInstantiateWithParams_ptsz(exec: *mut Ptr, graph: Ptr, a: usize, b: usize, c: usize) true lifecycle::graph_instantiate;
    cuGraphExecDestroy(exec: Ptr) false lifecycle::graph_exec_destroy;
    cuGraphRetainUserObject(graph: Ptr, a: usize, b: usize, c: usize) false lifecycle::graph_retains;
    cuGraphExecUpdate(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecUpdate_v2(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecKernelNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecKernelNodeSetParams_v2(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecMemcpyNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecMemsetNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecHostNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecChildGraphNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecEventRecordNodeSetEvent(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecEventWaitNodeSetEvent(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecExternalSemaphoresSignalNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecExternalSemaphoresWaitNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphExecBatchMemOpNodeSetParams(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuGraphNodeSetEnabled(exec: Ptr, a: usize, b: usize, c: usize) false lifecycle::exec_changes;
    cuCtxDestroy(ctx: Ptr) false contexts::destroy;
    cuCtxDestroy_v2(ctx: Ptr) false contexts::destroy;
    cuCtxAttach(ctx: *mut Ptr, flags: c_uint) false contexts::attach;
    cuCtxDetach(ctx: Ptr) false contexts::detach;
    cuGreenCtxCreate(green: *mut Ptr, description: Ptr, device: c_int, flags: c_uint) false contexts::green_create;
    cuGreenCtxDestroy(green: Ptr) false contexts::green_destroy;
    cuCtxFromGreenCtx(ctx: *mut Ptr, green: Ptr) false contexts::from_green;
    cuDevicePrimaryCtxRetain(ctx: *mut Ptr, device: c_int) false contexts::primary_retain;
    cuDevicePrimaryCtxReset(device: c_int) false contexts::primary_reset;
    cuDevicePrimaryCtxReset_v2(device: c_int) false contexts::primary_reset;
    cuDevicePrimaryCtxRelease(device: c_int) false contexts::primary_release;
    cuDevicePrimaryCtxRelease_v2(device: c_int) false contexts::primary_release;

    cuMemFree_v2(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuMemFreeHost(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuMemHostUnregister(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuMemUnmap(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuMemRelease(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuMemPoolDestroy(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuArrayDestroy(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuMipmappedArrayDestroy(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuIpcCloseMemHandle(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuDestroyExternalMemory(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuCtxSetLimit(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;
    cuLibraryGetUnifiedFunction(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false quiesce::blocks_launches;

    cuModuleLoad(module: *mut Ptr, path: *const c_char) false loads::module_load;
    cuModuleLoadData(module: *mut Ptr, image: *const u8) false loads::module_load_data;
    cuModuleLoadDataEx(module: *mut Ptr, image: *const u8, count: c_uint, options: *mut c_int, values: *mut Ptr) false loads::module_load_data_ex;
    cuModuleLoadFatBinary(module: *mut Ptr, image: *const u8) false loads::module_load_data;
    cuModuleUnload(module: Ptr) false names::unload;
    cuModuleEnumerateFunctions(functions: *mut Ptr, count: c_uint, module: Ptr) false names::enumerate_functions;
    cuLibraryEnumerateKernels(kernels: *mut Ptr, count: c_uint, library: Ptr) false names::enumerate_kernels;
    cuModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) false names::get_function;
    cuModuleGetGlobal_v2(address: *mut u64, bytes: *mut usize, module: Ptr, name: *const c_char) false names::get_global;
    cuLibraryLoadData(library: *mut Ptr, image: *const u8, a: *mut c_int, b: *mut Ptr, c: c_uint, d: Ptr, e: Ptr, f: c_uint) false loads::library_load_data;
    cuLibraryLoadFromFile(library: *mut Ptr, path: *const c_char, a: *mut c_int, b: *mut Ptr, c: c_uint, d: Ptr, e: Ptr, f: c_uint) false loads::library_load_file;
    cuLibraryUnload(library: Ptr) false names::library_unload;
    cuLibraryGetKernel(kernel: *mut Ptr, library: Ptr, name: *const c_char) false names::get_function;
    cuLibraryGetGlobal(address: *mut u64, bytes: *mut usize, library: Ptr, name: *const c_char) false names::library_get_global;
    cuLibraryGetManaged(address: *mut u64, bytes: *mut usize, library: Ptr, name: *const c_char) false names::library_get_global;
    cuLibraryGetModule(module: *mut Ptr, library: Ptr) false names::library_get_module;
    cuFuncLoad(function: Ptr) false names::func_load;
    cuKernelGetFunction(function: *mut Ptr, kernel: Ptr) false names::kernel_get_function;
    cuFuncSetAttribute(function: Ptr, attribute: c_int, value: c_int) false attributes::func_set_attribute;
    cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Ptr, device: c_int) false attributes::kernel_set_attribute;
    cuFuncSetCacheConfig(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false attributes::set_configuration;
    cuFuncSetSharedMemConfig(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false attributes::set_configuration;
    cuKernelSetCacheConfig(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false attributes::set_configuration;
    cuCtxSetCacheConfig(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false attributes::set_configuration;
    cuCtxSetSharedMemConfig(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) false attributes::set_configuration;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{self, exact, is_ours, requested};

    fn found(name: &str) -> Option<&'static str> {
        table::set(ENTRY_POINTS);
        exact(name.as_bytes()).map(|entry_point| entry_point.name)
    }

    #[test]
    fn only_exact_driver_names_match() {
        assert_eq!(found("cuLaunchKernel"), Some("cuLaunchKernel"));
        assert_eq!(found("cuStreamDestroy_v2"), Some("cuStreamDestroy_v2"));
        assert_eq!(found("cuEventDestroy_v2"), Some("cuEventDestroy_v2"));
        for other in [
            "cudaLaunchKernel",
            "cublasCreate",
            "cuLaunchKernelX",
            "cuLaunchKerne",
            "cu",
            "",
            "cuMemAlloc_v2",
        ] {
            assert_eq!(found(other), None, "{other}");
        }
    }

    #[test]
    fn requests_lead_to_the_form_that_was_asked_for() {
        table::set(ENTRY_POINTS);
        let is = |name: &str, per_thread| requested(name.as_bytes(), per_thread).map(|d| d.name);
        assert_eq!(is("cuLaunchKernel", false), Some("cuLaunchKernel"));
        assert_eq!(is("cuLaunchKernel", true), Some("cuLaunchKernel_ptsz"));
        assert_eq!(is("cuMemcpyDtoH", false), Some("cuMemcpyDtoH_v2"));
        assert_eq!(is("cuMemcpyDtoH", true), Some("cuMemcpyDtoH_v2_ptds"));
        assert_eq!(is("cuEventQuery", true), Some("cuEventQuery"));
        assert_eq!(is("cuStreamBeginCapture", false), Some("cuStreamBeginCapture_v2"));
        assert_eq!(is("cuStreamBeginCapture", true), Some("cuStreamBeginCapture_v2_ptsz"));
        assert_eq!(is("cuGetExportTable", false), None);
        assert_eq!(is("cuLaunch", false), Some("cuLaunch"));
        assert_eq!(is("cuGraphExecUpdate", false), Some("cuGraphExecUpdate_v2"));
        assert_eq!(is("cuGraphNodeSetEnabled", true), Some("cuGraphNodeSetEnabled"));
    }

    #[test]
    fn names_are_unique_and_wrappers_distinct() {
        table::set(ENTRY_POINTS);
        let mut names: Vec<_> = ENTRY_POINTS.iter().map(|d| d.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ENTRY_POINTS.len());
        assert!(is_ours(cuLaunchKernel as *const () as usize));
        assert!(!is_ours(only_exact_driver_names_match as *const () as usize));
    }
}
