//! Green contexts: partitions of the SMs, and that kernels stay in theirs.
#![allow(missing_docs)]

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    self, CUcontext, CUdevResource, CUdevResourceType, CUgreenCtx, CUresult, CUstream,
};
use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;

const SM: CUdevResourceType = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;

fn blank() -> CUdevResource {
    // SAFETY: an invalid resource is all zeros.
    unsafe { std::mem::zeroed() }
}

fn count(resource: &CUdevResource) -> u32 {
    // SAFETY: integers, whatever the type.
    unsafe { resource.__bindgen_anon_1.sm.smCount }
}

fn device() -> CUdevResource {
    let mut all = blank();
    // SAFETY: a valid out pointer.
    unsafe { sys::cuDeviceGetDevResource(0, &mut all, SM) }.result().unwrap();
    all
}

fn split(input: &CUdevResource, groups: u32, size: u32) -> (Vec<CUdevResource>, CUdevResource) {
    let (mut made, mut out, mut rest) = (groups, vec![blank(); groups as usize], blank());
    // SAFETY: room for as many groups as asked for.
    unsafe {
        sys::cuDevSmResourceSplitByCount(out.as_mut_ptr(), &mut made, input, &mut rest, 0, size)
            .result()
            .unwrap();
    }
    out.truncate(made as usize);
    (out, rest)
}

fn green(resource: &CUdevResource) -> CUgreenCtx {
    let (mut desc, mut green, mut own) = (null_mut(), null_mut(), *resource);
    // SAFETY: valid pointers and a descriptor that was just made.
    unsafe {
        sys::cuDevResourceGenerateDesc(&mut desc, &mut own, 1).result().unwrap();
        sys::cuGreenCtxCreate(&mut green, desc, 0, 1).result().unwrap();
    }
    green
}

fn green_stream(green: CUgreenCtx) -> CUstream {
    let mut stream = null_mut();
    // SAFETY: a green context of ours.
    unsafe { sys::cuGreenCtxStreamCreate(&mut stream, green, 1, 0) }.result().unwrap();
    stream
}

/// Launches `blocks` blocks that note where they are, in words of 64 at `at`:
/// the SMs, then how many run and the most that ran. Each waits for `meet`.
fn whereabouts(stream: CUstream, f: sys::CUfunction, at: [u64; 2], blocks: u32, meet: u32) {
    let [sms, counts] = at;
    let params = [sms, counts, counts + 4].map(u64::to_ne_bytes);
    let [a, b, c] = &params;
    launch(stream, f, [blocks, 1, 1], [40, 1, 1], &[a, b, c, &meet.to_ne_bytes()]);
}

/// The SMs that `blocks` blocks ran on.
fn seen(at: u64, blocks: usize) -> BTreeSet<u32> {
    fetch(at, blocks).into_iter().map(|sm| sm.checked_sub(1).unwrap()).collect()
}

#[test]
fn resources_split_and_join() {
    on_device("resources_split_and_join", 6, || {
        let _context = CudaContext::new(0).unwrap();
        let all = device();
        assert_eq!((count(&all), size_of::<CUdevResource>()), (6, 144));
        let (groups, rest) = split(&all, 3, 2);
        assert_eq!(groups.iter().map(count).collect::<Vec<_>>(), [2, 2, 2]);
        assert_eq!(rest.type_, CUdevResourceType::CU_DEV_RESOURCE_TYPE_INVALID);
        let (groups, rest) = split(&all, 1, 4);
        assert_eq!((count(&groups[0]), count(&rest)), (4, 2));
        let (groups, rest) = split(&all, 9, 4);
        assert_eq!((groups.len(), count(&rest)), (1, 2));
        let mut made = 0;
        let (mut two, mut desc) = ([groups[0], rest], null_mut());
        let mut other = blank();
        // SAFETY: valid pointers, or null where that only asks.
        unsafe {
            let out = null_mut();
            sys::cuDevSmResourceSplitByCount(out, &mut made, &all, null_mut(), 0, 2)
                .result()
                .unwrap();
            assert_eq!(made, 3);
            let too_many =
                sys::cuDevSmResourceSplitByCount(&mut other, &mut made, &all, null_mut(), 0, 7);
            assert_eq!(too_many as u32, 915);
            let not_sms =
                sys::cuDevSmResourceSplitByCount(&mut other, &mut made, &blank(), null_mut(), 0, 1);
            assert_eq!(not_sms, CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE);
            sys::cuDevResourceGenerateDesc(&mut desc, two.as_mut_ptr(), 2).result().unwrap();
            two[1] = two[0];
            let twice = sys::cuDevResourceGenerateDesc(&mut desc, two.as_mut_ptr(), 2);
            assert_ne!(twice, CUresult::CUDA_SUCCESS);
        }
    });
}

#[test]
fn kernels_stay_in_their_partition() {
    on_device("kernels_stay_in_their_partition", 4, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let f = raw(&module, "whereabouts");
        let (groups, rest) = split(&device(), 1, 1);
        let (one, three) = (green(&groups[0]), green(&rest));
        let streams = [green_stream(one), green_stream(one), green_stream(three), stream(1)];
        let sets = streams.map(|_| zeros(64));
        let [a, b, c, whole] = streams;

        // However many blocks there are, one at a time; also from two streams.
        let counts = zeros(2);
        whereabouts(a, f, [sets[0], counts], 30, 1);
        whereabouts(b, f, [sets[1], counts], 30, 1);
        synchronize(a);
        synchronize(b);
        assert_eq!(fetch(counts, 2), [0, 1]);
        let alone = seen(sets[0], 30);
        assert_eq!((alone.len(), &alone), (1, &seen(sets[1], 30)));

        // All of both partitions at once: they have no SM in common.
        let counts = zeros(2);
        whereabouts(a, f, [sets[0], counts], 1, 4);
        whereabouts(c, f, [sets[2], counts], 3, 4);
        synchronize(a);
        synchronize(c);
        assert_eq!(fetch(counts, 2), [0, 4]);
        assert_eq!(seen(sets[2], 3).len(), 3);
        assert!(seen(sets[2], 3).is_disjoint(&alone));

        // The primary context has all of the device, and is not held up by a
        // kernel that has filled a partition and waits.
        let counts = zeros(2);
        whereabouts(whole, f, [sets[3], counts], 4, 4);
        synchronize(whole);
        assert_eq!(seen(sets[3], 4).len(), 4);
        let (flag, started, out) = (zeros(1), pinned_word(), zeros(1));
        let params = [flag, address(started), out].map(u64::to_ne_bytes);
        let [p, q, r] = &params;
        launch(a, raw(&module, "until"), [1; 3], [32, 1, 1], &[p, q, r]);
        await_word(started, 1);
        launch(b, raw(&module, "until"), [1; 3], [32, 1, 1], &[p, q, r]);
        let counts = zeros(2);
        whereabouts(whole, f, [sets[3], counts], 60, 1);
        synchronize(whole);
        assert!(seen(sets[3], 60).is_disjoint(&alone));
        assert_eq!(query(a), CUresult::CUDA_ERROR_NOT_READY);
        write_device(whole, flag, 1);
        synchronize(b);
    });
}

fn write_device(stream: CUstream, at: u64, value: u32) {
    // SAFETY: a stream and a device word of ours.
    unsafe { sys::cuStreamWriteValue32_v2(stream, at, value, 0) }.result().unwrap();
}

#[test]
fn a_graph_keeps_the_partition_it_was_captured_in() {
    on_device("a_graph_keeps_the_partition_it_was_captured_in", 3, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let f = raw(&module, "whereabouts");
        let (groups, _) = split(&device(), 1, 2);
        let green = green(&groups[0]);
        let (inside, outside, sms) = (green_stream(green), stream(1), zeros(64));
        let counts = zeros(2);
        let (mut graph, mut exec) = (null_mut(), null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: streams and graphs of ours; the structure is all integers.
        unsafe {
            sys::cuStreamBeginCapture_v2(inside, mode).result().unwrap();
            whereabouts(inside, f, [sms, counts], 40, 2);
            sys::cuStreamEndCapture(inside, &mut graph).result().unwrap();
            let (mut node, mut count, mut own) = (null_mut(), 1, null_mut());
            sys::cuGraphGetNodes(graph, &mut node, &mut count).result().unwrap();
            let mut params: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            sys::cuGraphKernelNodeGetParams_v2(node, &mut params).result().unwrap();
            sys::cuCtxFromGreenCtx(&mut own, green).result().unwrap();
            assert_eq!(params.ctx, own);
            // Also after its parameters were set again.
            params.gridDimX = 50;
            sys::cuGraphKernelNodeSetParams_v2(node, &params).result().unwrap();
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().unwrap();
            sys::cuGraphLaunch(exec, outside).result().unwrap();
        }
        synchronize(outside);
        assert_eq!(fetch(counts, 2), [0, 2]);
        assert_eq!(seen(sms, 50).len(), 2);
    });
}

#[test]
fn handles_and_order() {
    on_device("handles_and_order", 2, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (groups, _) = split(&device(), 1, 1);
        let green = green(&groups[0]);
        let inside = green_stream(green);
        let (mut own, mut of, mut found): (CUcontext, CUgreenCtx, CUcontext) =
            (null_mut(), null_mut(), null_mut());
        let (mut event, mut other, mut part) = (null_mut(), null_mut(), blank());
        // SAFETY: valid out pointers and handles of ours.
        unsafe {
            let mut refused = null_mut();
            let blocking = sys::cuGreenCtxStreamCreate(&mut refused, green, 0, 0);
            assert_eq!(blocking, CUresult::CUDA_ERROR_INVALID_VALUE);
            sys::cuStreamGetCtx(inside, &mut found).result().unwrap();
            assert_eq!(found, context.cu_ctx(), "the primary context");
            sys::cuStreamGetGreenCtx(inside, &mut of).result().unwrap();
            assert_eq!(of, green);
            sys::cuStreamGetCtx_v2(inside, &mut found, &mut of).result().unwrap();
            assert_eq!((found, of), (context.cu_ctx(), green));
            sys::cuStreamGetGreenCtx(null_mut(), &mut of).result().unwrap();
            assert!(of.is_null());
            sys::cuGreenCtxGetDevResource(green, &mut part, SM).result().unwrap();
            assert_eq!(count(&part), 1);
            sys::cuCtxGetDevResource(context.cu_ctx(), &mut part, SM).result().unwrap();
            assert_eq!(count(&part), 2);

            // Current to a thread: its default stream is the partition's.
            sys::cuCtxFromGreenCtx(&mut own, green).result().unwrap();
            assert_ne!(own, context.cu_ctx());
            sys::cuCtxPushCurrent_v2(own).result().unwrap();
            sys::cuCtxGetCurrent(&mut found).result().unwrap();
            assert_eq!(found, own);
            sys::cuStreamGetGreenCtx(null_mut(), &mut of).result().unwrap();
            assert_eq!(of, green);
            let (sms, counts) = (zeros(64), zeros(2));
            whereabouts(null_mut(), raw(&module, "whereabouts"), [sms, counts], 20, 1);
            sys::cuCtxSynchronize().result().unwrap();
            assert_eq!((fetch(counts, 2), seen(sms, 20).len()), (vec![0, 1], 1));
            sys::cuCtxPopCurrent_v2(&mut found).result().unwrap();
            assert_eq!(found, own);

            // An event of the whole green context; and all of it waits for one.
            sys::cuEventCreate(&mut event, 2).result().unwrap();
            sys::cuEventCreate(&mut other, 2).result().unwrap();
            let (gate, done) = (pinned_word(), pinned_word());
            wait_value(inside, gate, 1);
            sys::cuGreenCtxRecordEvent(green, event).result().unwrap();
            assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_NOT_READY);
            let outside = stream(1);
            wait_value(outside, gate, 2);
            sys::cuEventRecord(other, outside).result().unwrap();
            sys::cuGreenCtxWaitEvent(green, other).result().unwrap();
            let late = green_stream(green);
            write_value(late, done, 1);
            gate.store(1, SeqCst);
            sys::cuEventSynchronize(event).result().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert_eq!(done.load(SeqCst), 0, "a stream made after the call waits too");
            gate.store(2, SeqCst);
            synchronize(late);
            assert_eq!(done.load(SeqCst), 1);

            sys::cuGreenCtxDestroy(green).result().unwrap();
            // Its streams take no more work, and can only be destroyed: CUDA_ERROR_STREAM_DETACHED.
            assert_eq!(sys::cuStreamQuery(late) as u32, 917);
            assert_eq!(sys::cuEventRecord(event, late) as u32, 917);
            let gone = sys::cuCtxPushCurrent_v2(own);
            assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_CONTEXT);
            let gone = sys::cuGreenCtxGetDevResource(green, &mut part, SM);
            assert_eq!(gone, CUresult::CUDA_ERROR_INVALID_CONTEXT);
            sys::cuStreamDestroy_v2(late).result().unwrap();
        }
        assert_eq!(fetch(zeros(4), 4), [0; 4], "the primary context is there");
    });
}

#[test]
fn a_context_ends_with_its_last_reference() {
    on_device("a_context_ends_with_its_last_reference", 2, || {
        let (mut context, mut same, mut event) = (null_mut(), null_mut(), null_mut());
        let mut other = null_mut();
        // SAFETY: valid out pointers and handles of ours.
        #[allow(deprecated)]
        unsafe {
            sys::cuInit(0).result().unwrap();
            assert_eq!(sys::cuCtxAttach(&mut same, 0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
            sys::cuCtxCreate_v2(&mut other, 0, 0).result().unwrap();
            sys::cuCtxCreate_v2(&mut context, 0, 0).result().unwrap();
            assert_eq!(sys::cuCtxAttach(&mut same, 1), CUresult::CUDA_ERROR_INVALID_VALUE);
            sys::cuCtxAttach(&mut same, 0).result().unwrap();
            assert_eq!(same, context);
            // Only of the context that is current.
            assert_eq!(sys::cuCtxDetach(other), CUresult::CUDA_ERROR_INVALID_CONTEXT);
            sys::cuCtxDetach(context).result().unwrap();
            sys::cuEventCreate(&mut event, 2).result().unwrap();
            sys::cuCtxDetach(context).result().unwrap();
            assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
            assert_eq!(sys::cuCtxSetCurrent(context), CUresult::CUDA_ERROR_INVALID_CONTEXT);
            sys::cuCtxGetCurrent(&mut same).result().unwrap();
            assert_eq!(same, other, "it is not current any more");
            let (mut primary, mut again) = (null_mut(), null_mut());
            sys::cuDevicePrimaryCtxRetain(&mut primary, 0).result().unwrap();
            sys::cuCtxSetCurrent(primary).result().unwrap();
            assert_eq!(sys::cuCtxAttach(&mut again, 0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
            assert_eq!(sys::cuCtxDetach(primary), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
    });
}
