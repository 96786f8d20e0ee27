//! The side of the program that wants a component.

use crate::child::{EXIT_INVALID, EXIT_NOT_CONFINED, NAME, is_served, native};
use crate::{CompileError, bounds, threads};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use std::fs::File;
use std::io::{Error, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wasmtime::component::Component;
use wasmtime::{Engine, Precompiled};

/// The executable of this process, also after the file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// What is read of the compiler's messages.
const SAID_BYTES_MAX: u64 = 16 << 10;
/// The compiler may take this many times its CPU time by the wall clock: a busy machine gives it only a share.
const WALL_FACTOR: u64 = 10;
/// Beginning of Rust's message before it aborts for want of memory.
const OUT_OF_MEMORY: &str = "memory allocation of";
/// Linux's text for a memory mapping that failed.
const NO_MAPPING: &str = "Cannot allocate memory";

/// How much a compiler process may use.
#[derive(Clone, Copy, Debug)]
pub struct CompileLimits {
    /// Memory of its own, bytes.
    pub memory_bytes: u64,
    /// CPU time of all its threads, s.
    pub cpu_s: u64,
    /// Native code that it may write, bytes.
    pub output_bytes: u64,
}

/// Stops a compilation from another thread, or all that begin later.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Option<Arc<OwnedFd>>);

impl Cancel {
    /// A handle that can stop a compilation.
    ///
    /// # Errors
    /// Without a descriptor left.
    pub fn new() -> std::io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Cancel(Some(Arc::new(event))))
    }

    /// A handle that never stops anything.
    pub fn never() -> Self {
        Cancel(None)
    }

    /// Stop what uses this. It says [`CompileError::Cancelled`].
    pub fn cancel(&self) {
        if let Some(event) = &self.0 {
            // Fails only if it is set 2^64 times.
            let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
        }
    }

    pub fn is_cancelled(&self) -> bool {
        let Some(event) = &self.0 else { return false };
        let mut wanted = [PollFd::new(event, PollFlags::IN)];
        poll(&mut wanted, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// Compiles components, in a child process or in this one.
#[derive(Clone, Debug)]
pub struct Compiler(Way);

#[derive(Clone, Debug)]
enum Way {
    Child(PathBuf),
    InProcess,
}

impl Compiler {
    /// In a child that is this program again.
    ///
    /// # Errors
    /// If `main` does not begin with [`serve_if_child`](crate::serve_if_child).
    pub fn this_program() -> Result<Self, CompileError> {
        if is_served() { Ok(Self::program(THIS_PROGRAM)) } else { Err(CompileError::NotServed) }
    }

    /// In a child that is another program, built from the same source.
    pub fn program(path: impl Into<PathBuf>) -> Self {
        Compiler(Way::Child(path.into()))
    }

    /// In this process, without limits: for tests and measurements with components of one's own.
    pub fn in_process() -> Self {
        Compiler(Way::InProcess)
    }

    /// Compile a component for this engine, whose settings are [`settings`](crate::settings) but for the
    /// allocation of instances. Blocks; another thread can end it by `cancel`.
    ///
    /// # Errors
    /// What is wrong with the component, or what it took too much of.
    pub fn compile(
        &self,
        engine: &Engine,
        component: &[u8],
        limits: CompileLimits,
        cancel: &Cancel,
    ) -> Result<Component, CompileError> {
        bounds::check(component)?;
        let code = |as_it_is| self.code(engine, component, as_it_is, limits, cancel);
        match take_over(engine, &code(false)?) {
            // Perhaps the forwarding module (`entry`) made it too large: compile the file as it is, with a new budget.
            Err(CompileError::Unfit(_)) => take_over(engine, &code(true)?),
            taken => taken,
        }
    }

    fn code(
        &self,
        engine: &Engine,
        component: &[u8],
        as_it_is: bool,
        limits: CompileLimits,
        cancel: &Cancel,
    ) -> Result<Vec<u8>, CompileError> {
        match &self.0 {
            Way::Child(program) => in_child(program, component, as_it_is, limits, cancel),
            Way::InProcess => {
                let pool = threads::pool().map_err(|error| CompileError::Process {
                    doing: "replaced by threads",
                    source: Error::other(error),
                })?;
                let code = pool.install(|| native(engine, component, as_it_is));
                code.map_err(|error| CompileError::Invalid(format!("{error:#}")))
            }
        }
    }
}

fn take_over(engine: &Engine, code: &[u8]) -> Result<Component, CompileError> {
    if Engine::detect_precompiled(code) != Some(Precompiled::Component) {
        let said = "what it made is not native code of a component".to_owned();
        return Err(CompileError::Crashed { how: "exit code 0".into(), said });
    }
    // SAFETY: wasmtime asks for bytes that `Engine::precompile_component` made and nobody changed. They were made
    // by `native`, in this process or in one that runs the same executable (for tests: one of the same source), and
    // are a copy that only this process can reach. wasmtime itself refuses code of another version or of other
    // settings. Left is a component that takes over the compiler through a bug in it: see this crate's documentation.
    #[allow(unsafe_code)]
    let component = unsafe { Component::deserialize(engine, code) };
    component.map_err(CompileError::Unfit)
}

fn in_child(
    program: &Path,
    component: &[u8],
    as_it_is: bool,
    limits: CompileLimits,
    cancel: &Cancel,
) -> Result<Vec<u8>, CompileError> {
    if cancel.is_cancelled() {
        return Err(CompileError::Cancelled);
    }
    let failed = |doing| move |source: Error| CompileError::Process { doing, source };
    let input = sealed(component).map_err(failed("given the component"))?;
    let mut output = memory("policy-code").map_err(failed("given memory for its result"))?;
    let mut said = memory("policy-said").map_err(failed("given memory for its messages"))?;
    let inherit = |file: &File| file.try_clone().map_err(failed("given descriptors"));
    let child = Command::new(program)
        .arg0(NAME)
        .args([
            std::process::id().to_string(),
            limits.memory_bytes.to_string(),
            limits.cpu_s.to_string(),
            limits.output_bytes.to_string(),
            u8::from(as_it_is).to_string(),
        ])
        .env_clear()
        .envs(std::env::var_os("LD_LIBRARY_PATH").map(|value| ("LD_LIBRARY_PATH", value)))
        .stdin(input)
        .stdout(inherit(&output)?)
        .stderr(inherit(&said)?)
        .spawn()
        .map_err(failed("started"))?;
    let status = Running(child).wait(limits, cancel)?;
    let said = || -> String {
        let mut text = Vec::new();
        let _ = said.rewind();
        let _ = (&mut said).take(SAID_BYTES_MAX).read_to_end(&mut text);
        String::from_utf8_lossy(&text).trim().to_owned()
    };
    judge(status, said, limits)?;
    let unreadable = failed("read");
    let bytes = output.metadata().map_err(unreadable)?.len();
    if bytes > limits.output_bytes {
        return Err(CompileError::Output(limits.output_bytes));
    }
    let mut code = Vec::with_capacity(bytes as usize);
    output.rewind().map_err(unreadable)?;
    (&mut output).take(bytes).read_to_end(&mut code).map_err(unreadable)?;
    Ok(code)
}

/// Ended at the latest when it is dropped.
struct Running(Child);

impl Running {
    fn wait(mut self, limits: CompileLimits, cancel: &Cancel) -> Result<ExitStatus, CompileError> {
        let failed = |doing| move |source: Error| CompileError::Process { doing, source };
        let pid = Pid::from_child(&self.0);
        let ended = pidfd_open(pid, PidfdFlags::empty());
        let ended = ended.map_err(|error| failed("watched")(error.into()))?;
        let wall_s = limits.cpu_s.saturating_mul(WALL_FACTOR);
        let deadline = Instant::now() + Duration::from_secs(wall_s);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CompileError::WallTime(wall_s));
            }
            let left = Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut watched = vec![PollFd::new(&ended, PollFlags::IN)];
            watched.extend(cancel.0.as_ref().map(|event| PollFd::new(event, PollFlags::IN)));
            match poll(&mut watched, Some(&left)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed("waited for")(error.into())),
            }
            if watched[1..].iter().any(|cancel| !cancel.revents().is_empty()) {
                return Err(CompileError::Cancelled);
            }
            if !watched[0].revents().is_empty() {
                return self.0.wait().map_err(failed("waited for"));
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// What the end of the compiler says about the component.
fn judge(
    status: ExitStatus,
    said: impl FnOnce() -> String,
    limits: CompileLimits,
) -> Result<(), CompileError> {
    if status.success() {
        return Ok(());
    }
    match status.signal().and_then(Signal::from_named_raw) {
        Some(Signal::XCPU) => return Err(CompileError::CpuTime(limits.cpu_s)),
        Some(Signal::XFSZ) => return Err(CompileError::Output(limits.output_bytes)),
        _ => {}
    }
    let said = said();
    if said.contains(OUT_OF_MEMORY) || said.contains(NO_MAPPING) {
        return Err(CompileError::Memory(limits.memory_bytes));
    }
    match status.code() {
        Some(EXIT_INVALID) => Err(CompileError::Invalid(said)),
        Some(EXIT_NOT_CONFINED) => {
            Err(CompileError::Process { doing: "confined", source: Error::other(said) })
        }
        _ => {
            let how = status.to_string();
            // A panic ends with a note on backtraces.
            let line = said.lines().rev().find(|line| !line.starts_with("note: "));
            let said = line.unwrap_or_default().to_owned();
            Err(CompileError::Crashed { how, said })
        }
    }
}

fn memory(name: &str) -> std::io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(rustix::fs::memfd_create(name, flags)?))
}

/// Bytes that the child can read from its start, and nobody change.
fn sealed(bytes: &[u8]) -> std::io::Result<File> {
    let mut file = memory("policy-component")?;
    file.write_all(bytes)?;
    file.rewind()?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}
