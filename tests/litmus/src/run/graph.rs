//! Graphs, made node by node or by capturing streams.

use super::launch::Call;
use super::{Run, host};
use crate::cu::{FillNode, Handle, HostNode, KernelNode};
use crate::program::{Graph, Id, Node, Word, Work};
use std::ffi::c_void;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: other threads may do what they like meanwhile.
const RELAXED: u32 = 2;
const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

/// `CUDA_MEMCPY3D` of one word: the memory's kind and its address for the kind, at both ends.
fn copy_node(to: (u64, u64), from: (u64, u64)) -> [u64; 25] {
    const WORD: u64 = 4;
    let mut node = [0; 25];
    // The address of host memory comes before that of device memory.
    let place = |end: (u64, u64)| if end.0 == HOST { 0 } else { 1 };
    (node[4], node[9]) = (from.0, WORD);
    node[5 + place(from)] = from.1;
    (node[15], node[20]) = (to.0, WORD);
    node[16 + place(to)] = to.1;
    (node[22], node[23], node[24]) = (WORD, 1, 1);
    node
}

const HOST: u64 = 1;
const DEVICE: u64 = 2;

impl Run {
    /// A graph's handle; the graph's context is current.
    pub(super) fn build_graph(&self, graph: &Graph) -> Result<Handle, String> {
        let made = if graph.captured { self.capture(graph)? } else { self.by_hand(graph)? };
        super::lock(&self.graphs).push(made);
        if !graph.cloned {
            return Ok(made);
        }
        let mut clone = 0;
        // SAFETY: a graph of ours and a valid out pointer.
        self.check(unsafe { self.machine.cuda.cuGraphClone(&mut clone, made) })?;
        super::lock(&self.graphs).push(clone);
        Ok(clone)
    }

    fn by_hand(&self, graph: &Graph) -> Result<Handle, String> {
        let cuda = self.machine.cuda;
        let mut made = 0;
        // SAFETY: a valid out pointer.
        self.check(unsafe { cuda.cuGraphCreate(&mut made, 0) })?;
        let mut nodes: Vec<Handle> = Vec::new();
        for node in &graph.nodes {
            let after: Vec<Handle> = node.after.iter().map(|&n| nodes[n]).collect();
            nodes.push(self.add_node(made, graph.context, node, &after)?);
        }
        Ok(made)
    }

    fn add_node(
        &self,
        to: Handle,
        context: Id,
        node: &Node,
        after: &[Handle],
    ) -> Result<Handle, String> {
        let cuda = self.machine.cuda;
        let (list, count) = (after.as_ptr(), after.len());
        let mut made = 0;
        // SAFETY, for all: a graph and nodes of ours, a valid out pointer, and parameters that live
        // through the call, which copies them.
        let added = match &node.work {
            Work::Kernel { kernel, module } => {
                let call = Call::new(self, kernel, *module, context)?;
                let params = call.params();
                let kernel = KernelNode {
                    function: call.function,
                    grid: [call.blocks, 1, 1],
                    block: [call.threads, 1, 1],
                    shared_bytes: call.shared_bytes,
                    params: params.as_ptr(),
                    extra: std::ptr::null(),
                    kernel: 0,
                    context: 0,
                };
                // SAFETY: see above.
                unsafe { cuda.cuGraphAddKernelNode_v2(&mut made, to, list, count, &kernel) }
            }
            Work::Fill { word, value, count: words } => {
                let (to_address, width) = (self.address(*word)?, *words as usize);
                let fill = FillNode {
                    to: to_address,
                    pitch: 0,
                    value: *value,
                    element: 4,
                    width,
                    height: 1,
                };
                let context = self.context_handle(context)?;
                // SAFETY: see above.
                unsafe { cuda.cuGraphAddMemsetNode(&mut made, to, list, count, &fill, context) }
            }
            Work::Copy { from, to: target } => {
                let copy = copy_node(self.end(*target)?, self.end(*from)?);
                let context = self.context_handle(context)?;
                // SAFETY: see above.
                unsafe { cuda.cuGraphAddMemcpyNode(&mut made, to, list, count, &copy, context) }
            }
            Work::HostFold { word, value } | Work::HostSet { word, value } => {
                let fold = matches!(node.work, Work::HostFold { .. });
                let (function, data) = self.host_call(*word, *value, fold)?;
                let node = HostNode { function, data };
                // SAFETY: see above; the data lives as long as the program.
                unsafe { cuda.cuGraphAddHostNode(&mut made, to, list, count, &node) }
            }
            Work::Record { event } => {
                let event = self.events[*event].get();
                // SAFETY: see above.
                unsafe { cuda.cuGraphAddEventRecordNode(&mut made, to, list, count, event) }
            }
            // SAFETY: see above.
            Work::Empty => unsafe { cuda.cuGraphAddEmptyNode(&mut made, to, list, count) },
            other => return Err(format!("no node does this: {other}")),
        };
        self.check(added)?;
        Ok(made)
    }

    /// The kind of a word's memory, and its address.
    fn end(&self, word: Word) -> Result<(u64, u64), String> {
        Ok(match word {
            Word::Host(at) => (HOST, self.machine.host.word(at).as_ptr() as u64),
            Word::Device(..) => (DEVICE, self.address(word)?),
        })
    }

    /// Streams join and part as the nodes want it: a node follows in the stream of one that
    /// nothing else follows, or gets a stream of its own.
    fn capture(&self, graph: &Graph) -> Result<Handle, String> {
        let cuda = self.machine.cuda;
        let mut streams: Vec<Handle> = vec![self.new_stream()?];
        let mut events: Vec<Handle> = Vec::new();
        // The stream of each node, the event behind it, and the last node of each stream.
        let mut lane_of: Vec<usize> = Vec::new();
        let mut behind: Vec<Handle> = Vec::new();
        let mut last: Vec<Option<Id>> = vec![None];
        // SAFETY: a stream of ours.
        self.check(unsafe { cuda.cuStreamBeginCapture_v2(streams[0], RELAXED) })?;
        let begin = self.new_event(&mut events)?;
        self.record_now(begin, streams[0])?;
        for (n, node) in graph.nodes.iter().enumerate() {
            let continued =
                node.after.iter().find(|&&before| last[lane_of[before]] == Some(before));
            let lane = match continued {
                Some(&before) => lane_of[before],
                None if n == 0 => 0,
                None => {
                    streams.push(self.new_stream()?);
                    last.push(None);
                    self.wait_now(streams[streams.len() - 1], begin)?;
                    streams.len() - 1
                }
            };
            for &before in node.after.iter().filter(|&&before| lane_of[before] != lane) {
                self.wait_now(streams[lane], behind[before])?;
            }
            self.submit_to(streams[lane], false, graph.context, &node.work, n)?;
            let event = self.new_event(&mut events)?;
            self.record_now(event, streams[lane])?;
            behind.push(event);
            lane_of.push(lane);
            last[lane] = Some(n);
        }
        for end in last.iter().skip(1).flatten() {
            self.wait_now(streams[0], behind[*end])?;
        }
        let mut made = 0;
        // SAFETY: a stream of ours and a valid out pointer.
        self.check(unsafe { cuda.cuStreamEndCapture(streams[0], &mut made) })?;
        for event in events {
            // SAFETY: ours, not used again.
            self.check(unsafe { cuda.cuEventDestroy_v2(event) })?;
        }
        for stream in streams {
            // SAFETY: as above.
            self.check(unsafe { cuda.cuStreamDestroy_v2(stream) })?;
        }
        Ok(made)
    }

    fn new_stream(&self) -> Result<Handle, String> {
        let (mut stream, cuda) = (0, self.machine.cuda);
        // SAFETY: a valid out pointer.
        self.check(unsafe { cuda.cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, 0) })?;
        Ok(stream)
    }

    fn new_event(&self, all: &mut Vec<Handle>) -> Result<Handle, String> {
        let mut event = 0;
        // SAFETY: a valid out pointer.
        self.check(unsafe { self.machine.cuda.cuEventCreate(&mut event, DISABLE_TIMING) })?;
        all.push(event);
        Ok(event)
    }

    fn record_now(&self, event: Handle, stream: Handle) -> Result<(), String> {
        // SAFETY: both of ours.
        self.check(unsafe { self.machine.cuda.cuEventRecord(false, event, stream) })
    }

    fn wait_now(&self, stream: Handle, event: Handle) -> Result<(), String> {
        // SAFETY: both of ours.
        self.check(unsafe { self.machine.cuda.cuStreamWaitEvent(false, stream, event, 0) })
    }

    /// A host function and what it is given.
    pub(super) fn host_call(
        &self,
        word: Word,
        value: u32,
        fold: bool,
    ) -> Result<(crate::cu::HostFunction, *mut c_void), String> {
        let Word::Host(at) = word else {
            return Err("a host function works on words of the host".into());
        };
        // For ever: nobody knows when a driver is done with it.
        let call =
            Box::leak(Box::new(host::Call { word: self.machine.host.word(at), value, fold }));
        Ok((host::call, std::ptr::from_mut(call).cast()))
    }
}
