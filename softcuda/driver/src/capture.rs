//! Stream capture: work submitted to a capturing stream becomes nodes of a
//! graph instead. Other streams join by waiting for an event recorded in it.

use crate::driver::driver;
use crate::error::{CuError, CuResult};
use crate::graph::{Graph, Node};
use crate::op::Op;
use crate::registry::handle_of;
use crate::stream::{Stream, StreamKind};
use crate::sync::lock;
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

/// Capture modes, `CU_STREAM_CAPTURE_MODE_*` in the driver's header.
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// One capture, from begin to end.
pub(crate) struct Session {
    pub(crate) id: u64,
    pub(crate) graph: Arc<Graph>,
    mode: u32,
    thread: std::thread::ThreadId,
    origin: Weak<Stream>,
    invalid: AtomicBool,
    streams: Mutex<Vec<Weak<Stream>>>,
}

/// A place in a capture: what comes next runs after these nodes.
#[derive(Clone)]
pub(crate) struct Fork {
    pub(crate) session: Arc<Session>,
    pub(crate) after: Vec<Arc<Node>>,
}

impl Session {
    pub(crate) fn is_valid(&self) -> bool {
        !self.invalid.load(SeqCst)
    }

    fn check(&self) -> CuResult {
        if self.is_valid() { Ok(()) } else { Err(CuError::STREAM_CAPTURE_INVALIDATED) }
    }
}

/// Captures under way whose mode forbids unsafe calls to all threads.
static GLOBAL_SESSIONS: AtomicU32 = AtomicU32::new(0);
static ACTIVE: Mutex<Vec<Weak<Session>>> = Mutex::new(Vec::new());

thread_local! {
    static THREAD_MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    static OWN_SESSIONS: Cell<u32> = const { Cell::new(0) };
}

pub(crate) fn exchange_mode(mode: u32) -> CuResult<u32> {
    if mode > RELAXED {
        return Err(CuError::INVALID_VALUE);
    }
    driver()?;
    Ok(THREAD_MODE.replace(mode))
}

/// Fails, and spoils the captures concerned, if the calling thread must not
/// make calls that wait for the device or allocate from it now.
pub(crate) fn forbid() -> CuResult {
    let forbidden = match THREAD_MODE.get() {
        GLOBAL => GLOBAL_SESSIONS.load(SeqCst) != 0 || OWN_SESSIONS.get() != 0,
        THREAD_LOCAL => OWN_SESSIONS.get() != 0,
        _ => false,
    };
    if !forbidden {
        return Ok(());
    }
    let thread = std::thread::current().id();
    for session in lock(&ACTIVE).iter().filter_map(Weak::upgrade) {
        if session.mode == GLOBAL || (session.mode == THREAD_LOCAL && session.thread == thread) {
            session.invalid.store(true, SeqCst);
        }
    }
    Err(CuError::STREAM_CAPTURE_UNSUPPORTED)
}

/// `cuStreamBeginCapture`, into `graph` after `after`.
pub(crate) fn begin(
    stream: &Arc<Stream>,
    mode: u32,
    graph: Arc<Graph>,
    after: Vec<Arc<Node>>,
) -> CuResult {
    if mode > RELAXED {
        return Err(CuError::INVALID_VALUE);
    }
    if stream.kind == StreamKind::Legacy {
        return Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut capture = lock(&stream.capture);
    if capture.is_some() {
        return Err(CuError::ILLEGAL_STATE);
    }
    let session = Arc::new(Session {
        id: driver()?.new_id(),
        graph,
        mode,
        thread: std::thread::current().id(),
        origin: Arc::downgrade(stream),
        invalid: AtomicBool::new(false),
        streams: Mutex::new(vec![Arc::downgrade(stream)]),
    });
    match mode {
        GLOBAL => drop(GLOBAL_SESSIONS.fetch_add(1, SeqCst)),
        THREAD_LOCAL => OWN_SESSIONS.set(OWN_SESSIONS.get() + 1),
        _ => {}
    }
    let mut active = lock(&ACTIVE);
    active.retain(|s| s.strong_count() != 0);
    active.push(Arc::downgrade(&session));
    drop(active);
    *capture = Some(Fork { session, after });
    Ok(())
}

pub(crate) fn end(stream: &Arc<Stream>) -> CuResult<Arc<Graph>> {
    let fork = lock(&stream.capture).clone().ok_or(CuError::ILLEGAL_STATE)?;
    let session = fork.session;
    if session.origin.as_ptr() != Arc::as_ptr(stream) {
        return Err(CuError::STREAM_CAPTURE_UNMATCHED);
    }
    if session.mode != RELAXED && session.thread != std::thread::current().id() {
        return Err(CuError::STREAM_CAPTURE_WRONG_THREAD);
    }
    match session.mode {
        GLOBAL => drop(GLOBAL_SESSIONS.fetch_sub(1, SeqCst)),
        THREAD_LOCAL => OWN_SESSIONS.set(OWN_SESSIONS.get().saturating_sub(1)),
        _ => {}
    }
    let joined: Vec<_> = lock(&session.streams).iter().filter_map(Weak::upgrade).collect();
    let mut ends = Vec::new();
    for other in &joined {
        if let Some(fork) = lock(&other.capture).take()
            && !Arc::ptr_eq(other, stream)
        {
            ends.extend(fork.after);
        }
    }
    session.check()?;
    // Everything another stream did must lead back to where this one is.
    let mut reached = HashSet::new();
    let mut open = fork.after;
    while let Some(node) = open.pop() {
        if reached.insert(handle_of(&node)) {
            open.extend(lock(&node.after).iter().cloned());
        }
    }
    if ends.iter().any(|node| !reached.contains(&handle_of(node))) {
        return Err(CuError::STREAM_CAPTURE_UNJOINED);
    }
    Ok(session.graph.clone())
}

/// If `stream` is capturing, makes `op` a node and returns `true`.
///
/// # Errors
/// The capture was spoilt; or this is the legacy stream and a blocking stream
/// is capturing.
pub(crate) fn record(stream: &Arc<Stream>, op: &Op) -> CuResult<bool> {
    let mut capture = lock(&stream.capture);
    let Some(fork) = capture.as_mut() else {
        drop(capture);
        if stream.kind == StreamKind::Legacy {
            forbid_legacy(stream)?;
        }
        return Ok(false);
    };
    fork.session.check()?;
    let node = fork.session.graph.add(op.clone(), fork.after.clone())?;
    fork.after = vec![node];
    Ok(true)
}

/// The legacy stream would wait for a blocking stream under capture.
fn forbid_legacy(stream: &Stream) -> CuResult {
    if lock(&ACTIVE).is_empty() {
        return Ok(());
    }
    let streams = lock(&stream.context.streams).clone();
    for other in streams.iter().filter(|s| s.is_blocking()) {
        if let Some(fork) = &*lock(&other.capture) {
            fork.session.invalid.store(true, SeqCst);
            return Err(CuError::STREAM_CAPTURE_IMPLICIT);
        }
    }
    Ok(())
}

/// Fails, and spoils the capture, if `stream` is capturing.
pub(crate) fn forbid_on(stream: &Stream) -> CuResult {
    match &*lock(&stream.capture) {
        Some(fork) => {
            fork.session.invalid.store(true, SeqCst);
            Err(CuError::STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    }
}

/// Where `stream` is in a capture, if it is in one.
pub(crate) fn fork_of(stream: &Stream) -> Option<Fork> {
    lock(&stream.capture).clone()
}

/// Whether `stream` is being captured.
pub(crate) fn is_capturing(stream: &Stream) -> bool {
    lock(&stream.capture).is_some()
}

/// `cuStreamWaitEvent` for an event recorded in a capture: the stream joins it.
pub(crate) fn join(stream: &Arc<Stream>, from: &Fork) -> CuResult {
    from.session.check()?;
    if stream.kind == StreamKind::Legacy {
        from.session.invalid.store(true, SeqCst);
        return Err(CuError::STREAM_CAPTURE_IMPLICIT);
    }
    let mut capture = lock(&stream.capture);
    match capture.as_mut() {
        Some(fork) if !Arc::ptr_eq(&fork.session, &from.session) => {
            fork.session.invalid.store(true, SeqCst);
            from.session.invalid.store(true, SeqCst);
            Err(CuError::STREAM_CAPTURE_MERGE)
        }
        Some(fork) => {
            for node in &from.after {
                if !fork.after.iter().any(|n| Arc::ptr_eq(n, node)) {
                    fork.after.push(node.clone());
                }
            }
            Ok(())
        }
        None => {
            lock(&from.session.streams).push(Arc::downgrade(stream));
            *capture = Some(from.clone());
            Ok(())
        }
    }
}
