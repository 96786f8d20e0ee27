//! Meeting the core: before the program's `cuInit`, or at its first launch if
//! that was not seen.
//!
//! Without any of the two environment variables the shim stays out of the way
//! and counts nothing. Must never delay a program by more than the two bounded
//! waits below, and never print.

use crate::cu::{ATTRIBUTE_MPS_ENABLED, ATTRIBUTE_SM_COUNT, SUCCESS, driver};
use crate::helper;
use crate::lock::{Lock, Locked};
use crate::state::{self, Epoch};
use crate::{apart, link};
use crate::{
    capture, completion, contexts, events, graphs, images, lifecycle, log, names, poller, quiesce,
    slots, streams, threads, timeslice,
};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};
use tally_ipc::layout::{CORE_MAGIC, report_state};
use tally_ipc::wire::{self, Hello, SharingMode, Welcome};
use tally_ipc::{ClientRegion, CoreRegion, map};

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Longest wait for each half of the handshake.
const ANSWER_MAX: Duration = Duration::from_secs(1);

static ONCE: Lock = Lock::new();
static HANDLERS: AtomicBool = AtomicBool::new(false);
static EXIT_HANDLER: AtomicBool = AtomicBool::new(false);
static REPORTED: AtomicBool = AtomicBool::new(false);
/// `cuInit` has run.
static INITIALISED: AtomicBool = AtomicBool::new(false);

/// What the environment says.
#[derive(Debug)]
pub struct Settings {
    socket: PathBuf,
    hello: Hello,
}

/// What a core gave.
#[derive(Debug)]
pub struct Connection {
    /// What it made of us.
    pub welcome: Welcome,
    first_ticket: u64,
    core: map::Mapped<CoreRegion>,
}

impl Settings {
    fn from_environment() -> Option<Self> {
        let socket = std::env::var_os(wire::ENV_SOCKET).filter(|s| !s.is_empty());
        let priority = std::env::var(wire::ENV_PRIORITY).ok().filter(|p| !p.is_empty());
        if socket.is_none() && priority.is_none() {
            return None;
        }
        let name = std::env::var(wire::ENV_NAME).ok().filter(|n| !n.is_empty());
        let labels = std::env::var(wire::ENV_LABELS).unwrap_or_default();
        Some(Settings {
            socket: socket.map_or_else(wire::default_socket, PathBuf::from),
            hello: Hello {
                high_priority: priority.as_deref() == Some("high"),
                name: name.unwrap_or_else(program),
                labels: labels
                    .split('\x1f')
                    .filter_map(|l| l.split_once('='))
                    .map(|(k, v)| (k.to_owned(), v.to_owned()))
                    .collect(),
                first_ticket: 0,
                initialised: false,
            },
        })
    }

    /// Register with the core. Gives what it answered, the connection, and what wakes it.
    ///
    /// # Errors
    /// What went wrong, for the log.
    pub fn connect(
        &self,
        region: &OwnedFd,
        client: &ClientRegion,
    ) -> Result<(Connection, OwnedFd, OwnedFd), String> {
        let socket =
            connect(&self.socket).map_err(|e| format!("{}: {e}", self.socket.display()))?;
        tally_ipc::peer::check(&self.socket, socket.as_fd()).map_err(|e| e.to_string())?;
        let first_ticket = client.activity.next_ticket.load(SeqCst);
        let initialised = INITIALISED.load(Acquire);
        let hello = Hello { first_ticket, initialised, ..self.hello.clone() };
        let talk = || -> Result<(Vec<u8>, Vec<OwnedFd>), wire::WireError> {
            rustix::io::ioctl_fionbio(&socket, false)?;
            for t in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
                sockopt::set_socket_timeout(&socket, t, Some(ANSWER_MAX))?;
            }
            wire::send(socket.as_fd(), &hello.encode(), &[region.as_fd()])?;
            wire::receive(socket.as_fd())
        };
        let (payload, fds) = talk().map_err(|e| e.to_string())?;
        let welcome = Welcome::decode(&payload).map_err(|e| e.to_string())?;
        let [core, doorbell]: [OwnedFd; 2] =
            fds.try_into().map_err(|f: Vec<_>| format!("{} descriptors instead of 2", f.len()))?;
        let core = map::open_core(core.as_fd()).map_err(|e| e.to_string())?;
        if core.magic.load(Relaxed) != CORE_MAGIC {
            return Err("not a core region".into());
        }
        Ok((Connection { welcome, first_ticket, core }, socket, doorbell))
    }

    /// Have the core's status say why this process is not governed, if there is a core.
    pub fn tell_core(&self, reason: &str) {
        if let Ok(socket) = connect(&self.socket) {
            let notice = wire::Notice { name: self.hello.name.clone(), reason: reason.into() };
            let _ = wire::send(socket.as_fd(), &notice.encode(), &[]);
        }
    }
}

/// The program's name.
fn program() -> String {
    let exe = std::env::current_exe().ok();
    let name = exe.as_deref().and_then(|p| p.file_name()).map(|n| n.to_string_lossy().into_owned());
    name.unwrap_or_else(|| format!("pid {}", std::process::id()))
}

fn connect(path: &std::path::Path) -> rustix::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let start = Instant::now();
    loop {
        match net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Its backlog is full.
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
                if start.elapsed() < CONNECT_MAX =>
            {
                threads::nap(Duration::from_millis(10));
            }
            Err(error) => return Err(error),
        }
    }
}

impl Connection {
    /// Put it in force.
    pub fn enter(self, client: &ClientRegion) -> SharingMode {
        let Connection { welcome, first_ticket, core } = self;
        if let SharingMode::Mps { pipe_directory, client_priority } = &welcome.sharing
            && !INITIALISED.load(Acquire)
        {
            if !pipe_directory.is_empty() {
                set_environment(c"CUDA_MPS_PIPE_DIRECTORY", pipe_directory, true);
            }
            // Normal is what it is without.
            if *client_priority != 0 {
                let priority = client_priority.to_string();
                set_environment(c"CUDA_MPS_CLIENT_PRIORITY", &priority, false);
            }
        }
        state::set_high_priority(welcome.high_priority);
        // What this client was started with wins.
        state::set_fail_hold(told_fail_hold().unwrap_or(welcome.fail_hold));
        let slice = match welcome.sharing {
            SharingMode::TimeSlice { slice_us: 1.., .. } => report_state::PENDING,
            _ => report_state::UNUSED,
        };
        client.report.time_slice.store(slice, Relaxed);
        log!(
            "client {} ({}) {:?} {}",
            welcome.client_id,
            if welcome.high_priority { "high" } else { "best-effort" },
            welcome.sharing,
            welcome.class_reason
        );
        crate::completion::forget_samples();
        crate::forms::configure(&welcome.rewrite, &welcome.sharing);
        crate::linger::configure(client, welcome.high_priority, &welcome.sharing);
        state::enter(Epoch {
            core: core.leak(),
            spin: Duration::from_nanos(welcome.spin_ns),
            first_ticket,
            stuck_at: AtomicU64::new(0),
        });
        // Only now are launches gated.
        client.report.governed.store(report_state::ACTIVE, Release);
        welcome.sharing
    }
}

/// What variables were before [`set_environment`].
static BEFORE: Locked<Vec<(&'static CStr, Option<CString>)>> = Locked::new(Vec::new());

/// Set a variable until `cuInit` has returned: the driver reads it there (seen on an H200), and programs
/// that this one starts without the preloaded library must not find it.
fn set_environment(name: &'static CStr, value: &str, overwrite: bool) {
    let Ok(value) = CString::new(value) else { return };
    // SAFETY: NUL-terminated. Not safe against other threads that read the
    // environment now, but it must be set and `cuInit` reads it next.
    unsafe {
        let before = libc::getenv(name.as_ptr());
        let before = (!before.is_null()).then(|| CStr::from_ptr(before).to_owned());
        if before.is_some() && !overwrite {
            return;
        }
        BEFORE.with(|all| {
            if all.iter().all(|(known, _)| *known != name) {
                all.push((name, before));
            }
        });
        libc::setenv(name.as_ptr(), value.as_ptr(), 1);
    }
}

/// In the wrapper of `cuInit`, behind the real one.
pub fn restore_environment() {
    for (name, before) in BEFORE.with(std::mem::take) {
        // SAFETY: as in `set_environment`.
        unsafe {
            match before {
                Some(value) => libc::setenv(name.as_ptr(), value.as_ptr(), 1),
                None => libc::unsetenv(name.as_ptr()),
            };
        }
    }
}

/// In the wrapper of `cuInit`, before the real one.
pub fn before_init() {
    start();
}

/// In the wrapper of `cuInit`, once it has succeeded.
pub fn after_init() {
    INITIALISED.store(true, Release);
    let Some(client) = state::client() else { return };
    let mut version = 0;
    if let Some(f) = driver().driver_version {
        // SAFETY: a valid out-pointer.
        let _ = unsafe { f(&mut version) };
    }
    client.report.driver_version.store(version.max(0) as u32, Relaxed);
    crate::forms::initialised();
    if !EXIT_HANDLER.swap(true, SeqCst) {
        // After the driver has registered its own, so that ours runs before.
        // SAFETY: a function without state.
        unsafe { libc::atexit(at_exit) };
    }
}

/// At a launch, if `cuInit` was not seen.
pub fn late() {
    if state::mode() == state::MODE_UNKNOWN {
        INITIALISED.store(true, Release);
        start();
        if state::mode() == state::MODE_ON {
            after_init();
        }
    }
}

#[cold]
fn start() {
    if state::mode() != state::MODE_UNKNOWN {
        return;
    }
    let _held = ONCE.lock();
    if state::mode() != state::MODE_UNKNOWN {
        return;
    }
    let Some(settings) = Settings::from_environment() else {
        return state::set_mode(state::MODE_OFF);
    };
    log::open();
    if !HANDLERS.swap(true, SeqCst) {
        // SAFETY: functions without state; kept for the process's life.
        unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
    }
    match begin(settings) {
        Ok(()) => state::set_mode(state::MODE_ON),
        Err(error) => {
            log!("not governed: {error}");
            state::leave();
            state::forget_client();
            state::set_mode(state::MODE_OFF);
        }
    }
}

/// What the environment says of a lost core: hold (true) or open.
fn told_fail_hold() -> Option<bool> {
    match std::env::var(wire::ENV_FAIL).ok()?.as_str() {
        "hold" => Some(true),
        "open" => Some(false),
        _ => None,
    }
}

fn begin(settings: Settings) -> Result<(), String> {
    state::set_fail_hold(told_fail_hold().unwrap_or(false));
    state::set_high_priority(settings.hello.high_priority);
    threads::count_cpus();
    let (client, connection) = link::start(settings)?;
    let sharing = connection.map(|connection| connection.enter(client));
    if sharing.is_none() {
        client.report.governed.store(report_state::FAILED, Relaxed);
    }
    // Its threads look for it.
    state::set_client(client);
    crate::forms::tools::look();
    let poller = poller::spawn().map_err(|error| format!("helper thread: {error}"));
    poller.and_then(|()| helper::spawn(client, sharing)).inspect_err(link::give_up)
}

/// Report the device of the first launch; `device` below 0 if unknown.
pub fn report_device(device: i32) {
    let Some(client) = state::client() else { return };
    if device < 0 || REPORTED.swap(true, SeqCst) {
        return;
    }
    let d = driver();
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: a valid out-pointer.
        let ok =
            d.device_attribute.is_some_and(|f| unsafe { f(&mut value, which, device) } == SUCCESS);
        ok.then_some(value)
    };
    let report = &client.report;
    if let Some(f) = d.device_uuid {
        let mut uuid = [0_u8; 16];
        // SAFETY: a valid out-pointer to 16 bytes.
        if unsafe { f(&mut uuid, device) } == SUCCESS {
            let (low, high) = uuid.split_at(8);
            for (word, half) in report.device_uuid.iter().zip([low, high]) {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(half);
                word.store(u64::from_le_bytes(bytes), Relaxed);
            }
        }
    }
    let mps = attribute(ATTRIBUTE_MPS_ENABLED).map_or(0, |v| if v != 0 { 1 } else { 2 });
    report.mps_client.store(mps, Relaxed);
    report.sm_count.store(attribute(ATTRIBUTE_SM_COUNT).unwrap_or(0).max(0) as u32, Release);
}

/// See to it that our handler runs before what the driver has registered since: libraries
/// of its own that it loads late (its compiler) end with handlers of theirs, and a thread
/// of ours that were still in one of them would stay there for good.
pub fn exit_before_others() {
    // SAFETY: a function without state, which may run more than once.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    helper::program_exits();
}

/// The child has no helper thread, no connection and no CUDA: it starts afresh at
/// its own `cuInit`. Only async-signal-safe calls: the parent had threads.
unsafe extern "C" fn in_forked_child() {
    ONCE.reset();
    apart::reset();
    BEFORE.reset(Vec::new());
    helper::reset();
    link::reset();
    log::reset();
    state::reset();
    capture::reset();
    completion::reset();
    contexts::reset();
    crate::forms::reset();
    events::reset();
    graphs::reset();
    lifecycle::reset();
    images::reset();
    crate::linger::reset();
    names::reset();
    poller::reset();
    quiesce::reset();
    slots::reset();
    streams::reset();
    timeslice::reset();
    INITIALISED.store(false, SeqCst);
    REPORTED.store(false, SeqCst);
}
