//! Contexts, streams and modules that end while something of theirs runs.
#![allow(missing_docs)]

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUresult};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;

#[test]
fn contexts_end_in_any_order() {
    on_device("contexts_end_in_any_order", 4, || {
        let primary = CudaContext::new(0).unwrap();
        let mut contexts = [null_mut(); 2];
        // SAFETY: valid out pointers, and handles that these calls gave.
        unsafe {
            for first in [0, 1] {
                let mut events = [null_mut(); 2];
                let mut streams = [null_mut(); 2];
                for i in 0..2 {
                    sys::cuCtxCreate_v2(&mut contexts[i], 0, 0).result().unwrap();
                    events[i] = event(0);
                    streams[i] = stream(0);
                    record(events[i], streams[i]);
                }
                // One waits for work of the other, which in turn waits for ever if it may.
                sys::cuCtxSetCurrent(contexts[0]).result().unwrap();
                if first == 0 {
                    wait_value(streams[0], pinned_word(), 1);
                }
                record(events[0], streams[0]);
                sys::cuCtxSetCurrent(contexts[1]).result().unwrap();
                sys::cuStreamWaitEvent(streams[1], events[0], 0).result().unwrap();
                sys::cuCtxDestroy_v2(contexts[first]).result().unwrap();
                let gone = sys::cuEventQuery(events[first]);
                assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
                let gone = sys::cuStreamDestroy_v2(streams[first]);
                assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
                let left = 1 - first;
                sys::cuCtxSetCurrent(contexts[left]).result().unwrap();
                sys::cuEventSynchronize(events[left]).result().unwrap();
                sys::cuCtxSynchronize().result().unwrap();
                sys::cuCtxDestroy_v2(contexts[left]).result().unwrap();
            }
            primary.bind_to_thread().unwrap();
            sys::cuCtxSynchronize().result().unwrap();
        }
    });
}

#[test]
fn a_stream_that_ends_while_it_works_is_still_waited_for() {
    on_device("a_stream_that_ends_while_it_works_is_still_waited_for", 4, || {
        let context = CudaContext::new(0).unwrap();
        let (gone, word) = (stream(0), pinned_word());
        let spinner = Spinner::start(&context, gone);
        spinner.launch(gone);
        write_value(gone, word, 1);
        // SAFETY: a stream of ours, not used again.
        unsafe { sys::cuStreamDestroy_v2(gone) }.result().unwrap();
        assert_eq!(query(null_mut()), CUresult::CUDA_ERROR_NOT_READY);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                context.bind_to_thread().unwrap();
                // SAFETY: no preconditions.
                unsafe { sys::cuCtxSynchronize() }.result().unwrap();
                word.load(SeqCst)
            });
            std::thread::sleep(STILL);
            assert!(!waiting.is_finished());
            spinner.end();
            assert_eq!(waiting.join().unwrap(), 1);
        });
    });
}

#[test]
fn a_module_is_unloaded_when_its_kernels_have_ended() {
    on_device("a_module_is_unloaded_when_its_kernels_have_ended", 2, || {
        let context = CudaContext::new(0).unwrap();
        let stream = stream(1);
        let spinner = Spinner::new(&context);
        let (mut module, mut f) = (null_mut(), null_mut());
        let ptx = std::ffi::CString::new(
            std::fs::read_to_string(common::kernels().join("transformed.ptx")).unwrap(),
        )
        .unwrap();
        // SAFETY: valid out pointers and text; handles that these calls gave.
        unsafe {
            sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()).result().unwrap();
            sys::cuModuleGetFunction(&mut f, module, c"until".as_ptr()).result().unwrap();
        }
        let own = Spinner { f, ..spinner };
        own.launch(stream);
        let module = module as usize;
        std::thread::scope(|scope| {
            let unloading = scope.spawn(|| {
                context.bind_to_thread().unwrap();
                // SAFETY: a module of ours, not used again.
                unsafe { sys::cuModuleUnload(module as sys::CUmodule) }.result().unwrap();
            });
            std::thread::sleep(STILL);
            assert!(!unloading.is_finished());
            own.end();
            unloading.join().unwrap();
        });
        // SAFETY: the device looks handles up before it uses them.
        let gone =
            unsafe { sys::cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, null_mut(), null_mut()) };
        assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}
