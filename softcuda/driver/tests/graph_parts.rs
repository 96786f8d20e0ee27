//! What a program that divides graphs into chains of sub-graphs uses: clones,
//! twins of nodes, what nodes do, and nodes taken out.
#![allow(missing_docs)]

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUgraph, CUgraphNode, CUgraphNodeType, CUresult, CUstream};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

const N: u32 = 200;

/// Nodes of a graph, each after those it depends on.
fn nodes(graph: CUgraph) -> Vec<CUgraphNode> {
    let mut count = 0;
    // SAFETY: a graph of ours, and room for as many nodes as were counted.
    unsafe {
        sys::cuGraphGetNodes(graph, null_mut(), &mut count).result().unwrap();
        let mut list = vec![null_mut(); count];
        sys::cuGraphGetNodes(graph, list.as_mut_ptr(), &mut count).result().unwrap();
        list
    }
}

fn kind(node: CUgraphNode) -> CUgraphNodeType {
    let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: a node of ours.
    unsafe { sys::cuGraphNodeGetType(node, &mut kind) }.result().unwrap();
    kind
}

fn clone(graph: CUgraph) -> CUgraph {
    let mut copy = null_mut();
    // SAFETY: a graph of ours.
    unsafe { sys::cuGraphClone(&mut copy, graph) }.result().unwrap();
    copy
}

/// A clone without those of its nodes whose originals `drop` names.
fn part(graph: CUgraph, drop: &[CUgraphNode]) -> CUgraph {
    let copy = clone(graph);
    for &original in drop {
        let mut twin = null_mut();
        // SAFETY: nodes of graphs of ours; the twin is not used after.
        unsafe {
            sys::cuGraphNodeFindInClone(&mut twin, original, copy).result().unwrap();
            assert_ne!(twin, original);
            sys::cuGraphDestroyNode(twin).result().unwrap();
        }
    }
    copy
}

fn run(graph: CUgraph, stream: CUstream) {
    let mut exec = null_mut();
    // SAFETY: a graph and a stream of ours; the exec is not used after.
    unsafe {
        sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().unwrap();
        sys::cuGraphLaunch(exec, stream).result().unwrap();
        sys::cuGraphExecDestroy(exec).result().unwrap();
    }
    synchronize(stream);
}

extern "C" fn count(data: *mut c_void) {
    // SAFETY: the test's own counter, which lives for ever.
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, SeqCst);
}

/// Captures six different kinds of work on `a`, with a branch, in an order
/// that the result depends on.
fn captured(
    stream: CUstream,
    other: CUstream,
    f: sys::CUfunction,
    at: [u64; 2],
    calls: &'static AtomicU32,
) -> CUgraph {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let affine = |stream, data: u64, mul: u32, add: u32| {
        let (data, n) = (data.to_ne_bytes(), N.to_ne_bytes());
        let (mul, add) = (mul.to_ne_bytes(), add.to_ne_bytes());
        launch(stream, f, [4, 1, 1], [64, 1, 1], &[&data, &n, &mul, &add]);
    };
    let (mut fork, mut join) = (null_mut(), null_mut());
    let mut graph = null_mut();
    // SAFETY: streams, events and memory of ours.
    unsafe {
        sys::cuEventCreate(&mut fork, 2).result().unwrap();
        sys::cuEventCreate(&mut join, 2).result().unwrap();
        sys::cuStreamBeginCapture_v2(stream, mode).result().unwrap();
        sys::cuMemsetD32Async(at[0], 5, N as usize, stream).result().unwrap();
        affine(stream, at[0], 3, 1);
        sys::cuEventRecord(fork, stream).result().unwrap();
        sys::cuStreamWaitEvent(other, fork, 0).result().unwrap();
        affine(stream, at[0], 7, 2);
        sys::cuMemsetD32Async(at[1], 1, N as usize, other).result().unwrap();
        affine(other, at[1], 11, 4);
        sys::cuEventRecord(join, other).result().unwrap();
        sys::cuStreamWaitEvent(stream, join, 0).result().unwrap();
        sys::cuLaunchHostFunc(stream, Some(count), calls.as_ptr().cast()).result().unwrap();
        sys::cuMemcpyDtoDAsync_v2(at[0], at[1], 64 * 4, stream).result().unwrap();
        affine(stream, at[0], 13, 6);
        affine(stream, at[1], 2, 9);
        sys::cuStreamEndCapture(stream, &mut graph).result().unwrap();
    }
    graph
}

/// For every place to transform at: the two parts, one after the other, leave the
/// same memory as the whole.
#[test]
fn halves_do_what_the_whole_does() {
    on_device("halves_do_what_the_whole_does", 3, || {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (a, b) = (stream(1), stream(1));
        let at = [zeros(N as usize), zeros(N as usize)];
        let graph = captured(a, b, raw(&module, "affine"), at, &CALLS);
        let all = nodes(graph);
        assert_eq!(all.len(), 9);
        let read = || (fetch(at[0], N as usize), fetch(at[1], N as usize));
        let wipe = || {
            // SAFETY: ranges of ours, with nothing running.
            unsafe {
                sys::cuMemsetD32_v2(at[0], 77, N as usize).result().unwrap();
                sys::cuMemsetD32_v2(at[1], 88, N as usize).result().unwrap();
            }
        };
        run(graph, a);
        let whole = read();
        assert_eq!(CALLS.swap(0, SeqCst), 1);
        for at in 0..=all.len() {
            let (first, second) = (part(graph, &all[at..]), part(graph, &all[..at]));
            assert_eq!((nodes(first).len(), nodes(second).len()), (at, all.len() - at));
            wipe();
            run(first, a);
            run(second, a);
            assert_eq!(read(), whole, "at after {at} nodes");
            assert_eq!(CALLS.swap(0, SeqCst), 1);
            // SAFETY: graphs of ours, not used after.
            unsafe {
                sys::cuGraphDestroy(first).result().unwrap();
                sys::cuGraphDestroy(second).result().unwrap();
            }
        }
        wipe();
        run(graph, a);
        assert_eq!(read(), whole, "the original is as it was");
    });
}

#[test]
fn nodes_say_what_they_do() {
    on_device("nodes_say_what_they_do", 2, || {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (a, b, f) = (stream(1), stream(1), raw(&module, "affine"));
        let at = [zeros(N as usize), zeros(N as usize)];
        let graph = captured(a, b, f, at, &CALLS);
        let all = nodes(graph);
        let of = |wanted| all.iter().copied().find(|&n| kind(n) == wanted).unwrap();

        let kernel = of(CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL);
        // SAFETY: structures of integers and pointers; nodes and graphs of ours.
        unsafe {
            let mut params: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            sys::cuGraphKernelNodeGetParams_v2(kernel, &mut params).result().unwrap();
            assert_eq!((params.func, params.gridDimX, params.blockDimX), (f, 4, 64));
            assert!(params.extra.is_null());
            assert_eq!(params.ctx, context.cu_ctx());
            let value = |i: usize| (*params.kernelParams.add(i)).cast::<u32>().read_unaligned();
            assert_eq!((value(1), value(2), value(3)), (N, 3, 1));
            assert_eq!((*params.kernelParams).cast::<u64>().read_unaligned(), at[0]);

            let mut fill: sys::CUDA_MEMSET_NODE_PARAMS = std::mem::zeroed();
            let node = of(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET);
            sys::cuGraphMemsetNodeGetParams(node, &mut fill).result().unwrap();
            assert_eq!((fill.dst, fill.value, fill.elementSize), (at[0], 5, 4));
            assert_eq!((fill.width, fill.height), (N as usize, 1));
            let wrong = sys::cuGraphMemsetNodeGetParams(kernel, &mut fill);
            assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE);

            let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY3D>::uninit();
            let node = of(CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY);
            sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()).result().unwrap();
            let copy = copy.assume_init();
            assert_eq!((copy.srcDevice, copy.dstDevice), (at[1], at[0]));
            assert_eq!((copy.WidthInBytes, copy.Height, copy.Depth), (256, 1, 1));
            assert_eq!(copy.srcMemoryType, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);

            let mut host: sys::CUDA_HOST_NODE_PARAMS = std::mem::zeroed();
            let node = of(CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST);
            sys::cuGraphHostNodeGetParams(node, &mut host).result().unwrap();
            assert_eq!(host.userData, CALLS.as_ptr().cast());

            // A clone keeps its own values: changing it leaves the original alone.
            let copy = clone(graph);
            let mut twin = null_mut();
            sys::cuGraphNodeFindInClone(&mut twin, kernel, copy).result().unwrap();
            let mul = 1000u32;
            let mut list: Vec<_> = (0..4).map(|i| *params.kernelParams.add(i)).collect();
            list[2] = (&raw const mul).cast_mut().cast();
            let mut changed = params;
            changed.kernelParams = list.as_mut_ptr();
            sys::cuGraphKernelNodeSetParams_v2(twin, &changed).result().unwrap();
            let mut seen: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            sys::cuGraphKernelNodeGetParams_v2(twin, &mut seen).result().unwrap();
            assert_eq!((*seen.kernelParams.add(2)).cast::<u32>().read_unaligned(), 1000);
            sys::cuGraphKernelNodeGetParams_v2(kernel, &mut seen).result().unwrap();
            assert_eq!((*seen.kernelParams.add(2)).cast::<u32>().read_unaligned(), 3);
            let stranger = sys::cuGraphNodeFindInClone(&mut twin, kernel, graph);
            assert_eq!(stranger, CUresult::CUDA_ERROR_INVALID_VALUE);
            sys::cuGraphDestroy(copy).result().unwrap();
        }
    });
}

/// As with the driver: a clone could not say whose the memory is.
#[test]
fn graphs_that_allocate_are_not_cloned() {
    on_device("graphs_that_allocate_are_not_cloned", 1, || {
        let _context = CudaContext::new(0).unwrap();
        let (a, mut at, mut graph, mut copy) = (stream(1), 0, null_mut(), null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a stream of ours and valid out pointers.
        unsafe {
            sys::cuStreamBeginCapture_v2(a, mode).result().unwrap();
            sys::cuMemAllocAsync(&mut at, 64, a).result().unwrap();
            sys::cuMemsetD32Async(at, 1, 16, a).result().unwrap();
            sys::cuMemFreeAsync(at, a).result().unwrap();
            sys::cuStreamEndCapture(a, &mut graph).result().unwrap();
            let refused = sys::cuGraphClone(&mut copy, graph);
            assert_eq!(refused, CUresult::CUDA_ERROR_NOT_SUPPORTED);
            run(graph, a);
        }
    });
}

/// A node made from a parameter buffer shows that buffer, and can be made again
/// from it.
#[test]
fn a_parameter_buffer_stays_one() {
    on_device("a_parameter_buffer_stays_one", 1, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (data, a) = (zeros(N as usize), stream(1));
        // u64 data, then n, mul, add.
        let mut buffer = data.to_ne_bytes().to_vec();
        buffer.extend([N, 1, 8].iter().flat_map(|v| v.to_ne_bytes()));
        let mut size = buffer.len();
        // SAFETY: structures of integers and pointers; the buffer holds the
        // parameters that the kernel has and is copied by the call.
        unsafe {
            let mut extra = [
                std::ptr::without_provenance_mut(1),
                buffer.as_mut_ptr().cast(),
                std::ptr::without_provenance_mut(2),
                (&raw mut size).cast(),
                null_mut(),
            ];
            let mut params: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            (params.func, params.gridDimX, params.blockDimX) = (raw(&module, "affine"), 4, 64);
            (params.gridDimY, params.gridDimZ, params.blockDimY, params.blockDimZ) = (1, 1, 1, 1);
            params.extra = extra.as_mut_ptr();
            let (mut graph, mut first, mut second) = (null_mut(), null_mut(), null_mut());
            sys::cuGraphCreate(&mut graph, 0).result().unwrap();
            sys::cuGraphAddKernelNode_v2(&mut first, graph, null_mut(), 0, &params)
                .result()
                .unwrap();
            buffer.fill(0xff);
            let mut seen: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            sys::cuGraphKernelNodeGetParams_v2(first, &mut seen).result().unwrap();
            assert!(seen.kernelParams.is_null() && !seen.extra.is_null());
            assert_eq!(**seen.extra.add(3).cast::<*const usize>(), size);
            sys::cuGraphAddKernelNode_v2(&mut second, graph, &first, 1, &seen).result().unwrap();
            run(graph, a);
            assert_eq!(fetch(data, N as usize), vec![16; N as usize]);
        }
    });
}

#[test]
fn child_graphs_and_disabled_nodes() {
    on_device("child_graphs_and_disabled_nodes", 2, || {
        let context = CudaContext::new(0).unwrap();
        let (data, a) = (zeros(64), stream(1));
        let fill = |value| sys::CUDA_MEMSET_NODE_PARAMS {
            dst: data,
            pitch: 0,
            value,
            elementSize: 4,
            width: 64,
            height: 1,
        };
        let ctx = context.cu_ctx();
        let (mut parent, mut child, mut own, mut exec) =
            (null_mut(), null_mut(), null_mut(), null_mut());
        let (mut inner, mut node, mut late) = (null_mut(), null_mut(), null_mut());
        // SAFETY: valid pointers, and handles that these calls gave.
        unsafe {
            sys::cuGraphCreate(&mut parent, 0).result().unwrap();
            sys::cuGraphCreate(&mut child, 0).result().unwrap();
            sys::cuGraphAddMemsetNode(&mut inner, child, null_mut(), 0, &fill(1), ctx)
                .result()
                .unwrap();
            sys::cuGraphAddChildGraphNode(&mut node, parent, null_mut(), 0, child)
                .result()
                .unwrap();
            // The node has a copy of its own, which can be looked at and changed.
            sys::cuGraphMemsetNodeSetParams(inner, &fill(2)).result().unwrap();
            sys::cuGraphDestroy(child).result().unwrap();
            sys::cuGraphChildGraphNodeGetGraph(node, &mut own).result().unwrap();
            assert_eq!(kind(node), CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH);
            run(parent, a);
            assert_eq!(fetch(data, 64), vec![1; 64]);
            let copy = clone(parent);
            sys::cuGraphMemsetNodeSetParams(nodes(own)[0], &fill(3)).result().unwrap();
            run(parent, a);
            assert_eq!(fetch(data, 64), vec![3; 64]);
            run(copy, a);
            assert_eq!(fetch(data, 64), vec![1; 64], "a clone's child is its own");

            sys::cuGraphAddMemsetNode(&mut late, parent, &node, 1, &fill(4), ctx).result().unwrap();
            sys::cuGraphInstantiateWithFlags(&mut exec, parent, 0).result().unwrap();
            for (enabled, value) in [(0, 3), (1, 4)] {
                sys::cuGraphNodeSetEnabled(exec, late, enabled).result().unwrap();
                let mut now = 7;
                sys::cuGraphNodeGetEnabled(exec, late, &mut now).result().unwrap();
                assert_eq!(now, enabled);
                sys::cuGraphLaunch(exec, a).result().unwrap();
                synchronize(a);
                assert_eq!(fetch(data, 64), vec![value; 64]);
            }
            let refused = sys::cuGraphNodeSetEnabled(exec, node, 0);
            assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_VALUE);
            sys::cuGraphDestroy(parent).result().unwrap();
            let mut count = 0;
            let gone = sys::cuGraphGetNodes(own, null_mut(), &mut count);
            assert_ne!(gone, CUresult::CUDA_SUCCESS, "it went with its node");
        }
    });
}
