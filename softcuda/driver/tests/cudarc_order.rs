//! Order and memory as cudarc sees them: streams, events, values, graphs,
//! copies. Each test runs itself again in a child process in which
//! `libcuda.so.1` is this crate's library.

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

#[test]
fn streams_events_and_values_keep_order() {
    on_device("streams_events_and_values_keep_order", 2, || {
        let context = CudaContext::new(0).unwrap();
        let module = load(&context);
        let f = kernel(&module, "increment");
        let (a, b) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let (gate, mark) = (pinned_word(), pinned_word());
        let data = zeros(1000);
        wait_value(a.cu_stream(), gate, 1);
        increment(&a, &f, data, 1000, 3);
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let start = a.record_event(Some(timed)).unwrap();
        b.wait(&start).unwrap();
        increment(&b, &f, data, 1000, 4);
        write_value(b.cu_stream(), mark, 9);
        let end = b.record_event(Some(timed)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(mark.load(SeqCst), 0, "nothing passes the gate");
        assert_eq!(query(a.cu_stream()), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(query(b.cu_stream()), CUresult::CUDA_ERROR_NOT_READY);
        assert!(!end.is_complete());
        gate.store(1, SeqCst);
        end.synchronize().unwrap();
        assert_eq!(mark.load(SeqCst), 9);
        assert!(start.elapsed_ms(&end).unwrap() >= 0.0);
        assert_eq!(fetch(data, 1000), vec![7; 1000]);
        b.synchronize().unwrap();
        assert_eq!(query(b.cu_stream()), CUresult::CUDA_SUCCESS);
    });
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    on_device("the_legacy_stream_waits_for_blocking_streams_only", 2, || {
        let _context = CudaContext::new(0).unwrap();
        let (mut blocking, mut free) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: valid out pointers.
        unsafe {
            sys::cuStreamCreate(&mut blocking, 0).result().unwrap();
            sys::cuStreamCreate(&mut free, 1).result().unwrap();
        }
        let (gate, done) = (pinned_word(), pinned_word());
        wait_value(blocking, gate, 1);
        write_value(free, done, 1);
        // SAFETY: a stream of ours.
        unsafe { sys::cuStreamSynchronize(free) }.result().unwrap();
        assert_eq!(done.load(SeqCst), 1, "a non-blocking stream waits for nobody");
        let legacy = std::ptr::null_mut();
        write_value(legacy, done, 2);
        // And back: a blocking stream waits for the legacy stream.
        let mut late = std::ptr::null_mut();
        // SAFETY: a valid out pointer.
        unsafe { sys::cuStreamCreate(&mut late, 0) }.result().unwrap();
        write_value(late, done, 3);
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(done.load(SeqCst), 1);
        assert_eq!(query(legacy), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(query(late), CUresult::CUDA_ERROR_NOT_READY);
        gate.store(1, SeqCst);
        // SAFETY: a stream of ours; then the handle is not used again.
        unsafe {
            sys::cuStreamSynchronize(late).result().unwrap();
            assert_eq!(done.load(SeqCst), 3);
            sys::cuStreamDestroy_v2(late).result().unwrap();
            let gone = sys::cuStreamSynchronize(late);
            assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
    });
}

#[test]
fn host_functions_run_in_order() {
    extern "C" fn note(data: *mut c_void) {
        // SAFETY: the pointer that the test passed, to a static.
        let word = unsafe { &*data.cast::<AtomicU32>() };
        word.store(word.load(SeqCst) * 10 + 7, SeqCst);
    }
    on_device("host_functions_run_in_order", 1, || {
        static WORD: AtomicU32 = AtomicU32::new(1);
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let data = (&raw const WORD).cast_mut().cast::<c_void>();
        for _ in 0..3 {
            // SAFETY: the function and its data live for ever.
            unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(note), data) }
                .result()
                .unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(WORD.load(SeqCst), 1777);
    });
}

#[test]
fn captured_graphs_replay() {
    on_device("captured_graphs_replay", 2, || {
        let context = CudaContext::new(0).unwrap();
        let module = load(&context);
        let f = kernel(&module, "increment");
        let (a, b) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let (x, y) = (zeros(500), zeros(500));
        a.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        increment(&a, &f, x, 500, 1);
        let fork = a.record_event(None).unwrap();
        b.wait(&fork).unwrap();
        increment(&b, &f, y, 500, 10);
        increment(&a, &f, x, 500, 100);
        let join = b.record_event(None).unwrap();
        // Not joined yet, and calls that wait are forbidden meanwhile.
        a.wait(&join).unwrap();
        // y into x, after both branches.
        // SAFETY: both have 500 elements.
        unsafe { sys::cuMemcpyDtoDAsync_v2(x, y, 250 * 4, a.cu_stream()) }.result().unwrap();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = a.end_capture(flags).unwrap().unwrap();
        assert_eq!(fetch(x, 500), vec![0; 500], "a captured launch does not run");
        for round in 1..=3 {
            graph.launch().unwrap();
            a.synchronize().unwrap();
            assert_eq!(fetch(y, 500), vec![10 * round; 500]);
            let x = fetch(x, 500);
            assert_eq!(x[..250], vec![10 * round; 250]);
            assert_eq!(x[250..], vec![101 * round; 250]);
        }
    });
}

#[test]
fn a_spoilt_capture_says_so() {
    on_device("a_spoilt_capture_says_so", 1, || {
        let context = CudaContext::new(0).unwrap();
        let a = context.new_stream().unwrap();
        let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        a.begin_capture(global).unwrap();
        let mut at = 0;
        // SAFETY: a valid out pointer.
        let refused = unsafe { sys::cuMemAlloc_v2(&mut at, 64) };
        assert_eq!(refused, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        let mut graph = std::ptr::null_mut();
        // SAFETY: a valid out pointer.
        let ended = unsafe { sys::cuStreamEndCapture(a.cu_stream(), &mut graph) };
        assert_eq!(ended, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

        let b = context.new_stream().unwrap();
        a.begin_capture(global).unwrap();
        let fork = a.record_event(None).unwrap();
        b.wait(&fork).unwrap();
        let word = pinned_word_during_capture();
        write_value(b.cu_stream(), word, 1);
        // SAFETY: a valid out pointer.
        let ended = unsafe { sys::cuStreamEndCapture(a.cu_stream(), &mut graph) };
        assert_eq!(ended, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    });
}

fn pinned_word_during_capture() -> &'static AtomicU32 {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: a valid in-out pointer, both times.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().unwrap();
    let word = pinned_word();
    // SAFETY: as above.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().unwrap();
    word
}

#[test]
fn graphs_made_by_hand() {
    on_device("graphs_made_by_hand", 2, || {
        let context = CudaContext::new(0).unwrap();
        let data = zeros(64);
        let stream = context.new_stream().unwrap();
        let mut graph = std::ptr::null_mut();
        let mut exec = std::ptr::null_mut();
        let mut nodes = [std::ptr::null_mut(); 2];
        let fill = |value| sys::CUDA_MEMSET_NODE_PARAMS {
            dst: data,
            pitch: 0,
            value,
            elementSize: 4,
            width: 64,
            height: 1,
        };
        // SAFETY: valid pointers, and handles that these calls gave.
        unsafe {
            sys::cuGraphCreate(&mut graph, 0).result().unwrap();
            let ctx = context.cu_ctx();
            sys::cuGraphAddMemsetNode(&mut nodes[0], graph, std::ptr::null(), 0, &fill(1), ctx)
                .result()
                .unwrap();
            sys::cuGraphAddMemsetNode(&mut nodes[1], graph, &nodes[0], 1, &fill(2), ctx)
                .result()
                .unwrap();
            let mut count = 0;
            sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count).result().unwrap();
            assert_eq!(count, 2);
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().unwrap();
            sys::cuGraphLaunch(exec, stream.cu_stream()).result().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(fetch(data, 64), vec![2; 64]);
            sys::cuGraphExecMemsetNodeSetParams(exec, nodes[1], &fill(5), ctx).result().unwrap();
            sys::cuGraphLaunch(exec, stream.cu_stream()).result().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(fetch(data, 64), vec![5; 64]);
            sys::cuGraphExecDestroy(exec).result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
            let gone = sys::cuGraphLaunch(exec, stream.cu_stream());
            assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
    });
}

#[test]
fn memory_runs_out_and_comes_back() {
    on_device("memory_runs_out_and_comes_back", 1, || {
        let context = CudaContext::new(0).unwrap();
        let total = context.total_mem().unwrap();
        assert_eq!(total, 64 << 20);
        let mut at = 0;
        // SAFETY: valid out pointers, and null where that is allowed.
        unsafe {
            let too_much = sys::cuMemAlloc_v2(&mut at, total + 1);
            assert_eq!(too_much, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            sys::cuMemAlloc_v2(&mut at, total).result().unwrap();
            let mut free = 1;
            sys::cuMemGetInfo_v2(&mut free, std::ptr::null_mut()).result().unwrap();
            assert_eq!(free, 0);
            sys::cuMemGetInfo_v2(std::ptr::null_mut(), std::ptr::null_mut()).result().unwrap();
            let (mut base, mut size) = (0, 0);
            sys::cuMemGetAddressRange_v2(&mut base, &mut size, at + 5).result().unwrap();
            assert_eq!((base, size), (at, total));
            sys::cuMemFree_v2(at).result().unwrap();
            let twice = sys::cuMemFree_v2(at);
            assert_eq!(twice, CUresult::CUDA_ERROR_INVALID_VALUE);
            let freed = sys::cuMemsetD8_v2(at, 0, 1);
            assert_eq!(freed, CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // Stream-ordered: the second allocation waits for the first to go.
        let stream = context.new_stream().unwrap();
        for _ in 0..10 {
            drop(stream.alloc_zeros::<u8>(total / 2 + 1).unwrap());
        }
        stream.synchronize().unwrap();
    });
}

#[test]
fn copies_of_two_and_three_dimensions() {
    on_device("copies_of_two_and_three_dimensions", 1, || {
        let _context = CudaContext::new(0).unwrap();
        let device = zeros(64);
        let host: Vec<u32> = (0..12).collect();
        // 3 rows of 4 words into rows of 8, two words in.
        let mut copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: host.as_ptr().cast(),
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: 16,
            dstXInBytes: 8,
            dstY: 1,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: device,
            dstArray: std::ptr::null_mut(),
            dstPitch: 32,
            WidthInBytes: 16,
            Height: 3,
        };
        // SAFETY: the ranges lie inside both allocations.
        unsafe { sys::cuMemcpy2D_v2(&copy) }.result().unwrap();
        let got = fetch(device, 64);
        for row in 0..3 {
            let at = (row + 1) * 8 + 2;
            assert_eq!(got[at..at + 4], host[row * 4..row * 4 + 4]);
        }
        assert_eq!(got.iter().sum::<u32>(), host.iter().sum());
        copy.Height = 100;
        // SAFETY: refused.
        let beyond = unsafe { sys::cuMemcpy2D_v2(&copy) };
        assert_eq!(beyond, CUresult::CUDA_ERROR_INVALID_VALUE);
        // SAFETY: a range inside the allocation.
        unsafe { sys::cuMemsetD2D16_v2(device, 32, 0xabcd, 4, 8) }.result().unwrap();
        let got = fetch(device, 64);
        assert!((0..8).all(|row| got[row * 8] == 0xabcd_abcd && got[row * 8 + 1] == 0xabcd_abcd));
    });
}

#[test]
fn a_forked_child_has_no_device() {
    on_device("a_forked_child_has_no_device", 1, || {
        let context = CudaContext::new(0).unwrap();
        let data = zeros(8);
        // SAFETY: the child only makes driver calls, which take no lock after
        // a fork, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: calls that fail at once; no destructor runs after.
            unsafe {
                let first = sys::cuCtxSynchronize();
                let second = sys::cuInit(0);
                let expected = CUresult::CUDA_ERROR_NOT_INITIALIZED;
                libc::_exit(i32::from(first != expected || second != expected));
            }
        }
        let mut status = -1;
        // SAFETY: a child of ours and a valid out pointer.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
        assert_eq!(fetch(data, 8), [0; 8], "the parent goes on");
        drop(context);
    });
}

#[test]
fn leaving_with_work_queued_does_not_hang() {
    on_device("leaving_with_work_queued_does_not_hang", 1, || {
        let context = CudaContext::new(0).unwrap();
        let module = load(&context);
        let stream = context.new_stream().unwrap();
        wait_value(stream.cu_stream(), pinned_word(), 1);
        increment(&stream, &kernel(&module, "increment"), zeros_async(&stream), 8, 1);
        std::mem::forget((stream, module, context));
    });
}

fn zeros_async(stream: &Arc<CudaStream>) -> u64 {
    let mut at = 0;
    // SAFETY: a valid out pointer.
    unsafe { sys::cuMemAllocAsync(&mut at, 64, stream.cu_stream()) }.result().unwrap();
    at
}
