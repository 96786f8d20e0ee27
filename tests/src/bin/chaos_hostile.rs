//! The hostile client of the chaos tests: registers with the core as the shim does, then tries, one trick a line of
//! its standard input (`trick SEED`), to pull the memory and the descriptors that it shares from under the core.
//! Prints one JSON object a trick: what was tried, what the system said, and whether that should have been refused.

use anyhow::{Context, Result, bail};
use clap::Parser;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use std::ffi::c_void;
use std::io::{BufRead, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;
use tally_ipc::layout::{ClientRegion, CoreRegion};
use tally_ipc::map::{self, Mapped};
use tally_ipc::wire::{self, Hello, Welcome, WireError};

/// Try to pull shared memory and descriptors from under a core.
#[derive(Parser)]
struct Options {
    /// Path of the socket where the core registers clients
    #[arg(long)]
    socket: PathBuf,
    /// Name to register under
    #[arg(long)]
    name: String,
}

/// Longest wait for the core, which may be stopped.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Descriptors sent to the core, which asked for none.
const SENT: usize = 100;
const PAGE: usize = 4096;
/// Parts of the own region that a process which scribbles writes at once.
const SCRIBBLED: usize = 4_000;
struct Client {
    socket: UnixStream,
    own: OwnedFd,
    region: Mapped<ClientRegion>,
    cores: OwnedFd,
    core: Mapped<CoreRegion>,
    doorbell: OwnedFd,
}

fn hello(name: &str) -> Hello {
    Hello {
        high_priority: false,
        name: name.into(),
        labels: vec![],
        first_ticket: 0,
        initialised: true,
    }
}

fn connect(socket: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    stream.set_write_timeout(Some(ANSWER_MAX))?;
    Ok(stream)
}

fn register(options: &Options) -> Result<Client> {
    let socket = connect(&options.socket)?;
    let (own, region) = map::create_client()?;
    wire::send(socket.as_fd(), &hello(&options.name).encode(), &[own.as_fd()])?;
    let (payload, fds) = wire::receive(socket.as_fd())?;
    Welcome::decode(&payload)?;
    let [cores, doorbell] =
        <[OwnedFd; 2]>::try_from(fds).ok().context("the core sent no descriptors")?;
    let core = map::open_core(cores.as_fd())?;
    Ok(Client { socket, own, region, cores, core, doorbell })
}

impl Client {
    /// Whether the core has let it go.
    fn is_gone(&self) -> bool {
        let _ = self.socket.set_nonblocking(true);
        matches!(std::io::Read::read(&mut &self.socket, &mut [0; 1]), Ok(0))
    }
}

type Outcome = rustix::io::Result<()>;

fn writable_map(fd: BorrowedFd<'_>, bytes: usize) -> Outcome {
    // SAFETY: a new mapping, which nothing refers to.
    unsafe {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let at = rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, fd, 0)?;
        at.cast::<u8>().write_volatile(0xff);
        rustix::mm::munmap(at, bytes)
    }
}

/// Through `/proc`, as a descriptor of its own.
fn reopened(fd: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(format!("/proc/self/fd/{}", fd.as_raw_fd()), OFlags::RDWR, Mode::empty())
}

fn region_bytes(of_core: bool) -> usize {
    if of_core { size_of::<CoreRegion>() } else { size_of::<ClientRegion>() }
}

/// What must be refused for the client's own region and for the core's.
const FORBIDDEN: [&str; 9] = [
    "shrink",
    "empty",
    "grow",
    "punch",
    "write",
    "map to write",
    "reopen and write",
    "seal against the maker",
    "remove its pages",
];

fn forbidden(trick: &str, client: &Client, of_core: bool) -> Outcome {
    let fd = if of_core { client.cores.as_fd() } else { client.own.as_fd() };
    let bytes = region_bytes(of_core);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match trick {
        "shrink" => rustix::fs::ftruncate(fd, PAGE as u64),
        "empty" => rustix::fs::ftruncate(fd, 0),
        "grow" => rustix::fs::ftruncate(fd, 2 * bytes as u64),
        "punch" => rustix::fs::fallocate(fd, punch, 0, bytes as u64),
        "write" => rustix::io::pwrite(fd, &[0xff; PAGE], 0).map(drop),
        "map to write" => writable_map(fd, bytes),
        "reopen and write" => {
            let other = reopened(fd)?;
            rustix::io::pwrite(&other, &[0xff; PAGE], 0).map(drop)?;
            writable_map(other.as_fd(), bytes)
        }
        "seal against the maker" => rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE),
        _ if of_core => {
            let at = std::ptr::from_ref(&*client.core).cast_mut().cast::<c_void>();
            let prot = MprotectFlags::READ | MprotectFlags::WRITE;
            // SAFETY: if that were allowed nothing but the rights of the mapping would change.
            unsafe { rustix::mm::mprotect(at, bytes, prot) }
        }
        _ => {
            let at = std::ptr::from_ref(&*client.region).cast_mut().cast::<c_void>();
            // SAFETY: the region holds only atomics, for which zeros are values.
            unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxRemove) }
        }
    }
}

/// What is allowed and must not matter to anybody else.
const ALLOWED: [&str; 10] = [
    "scribble",
    "saturate the doorbell",
    "drain the doorbell",
    "make the doorbell block",
    "signals for the doorbell",
    "lock everything",
    "send descriptors",
    "half-close",
    "forget its pages",
    "unmap and go on",
];

fn allowed(trick: &str, client: &Client, random: &mut Random) -> Outcome {
    let bell = client.doorbell.as_fd();
    let fds = [client.own.as_fd(), client.cores.as_fd(), bell];
    // Whatever was made of it before: this process is to hang for nothing.
    rustix::fs::fcntl_setfl(bell, OFlags::NONBLOCK)?;
    let own = std::ptr::from_ref(&*client.region);
    match trick {
        "scribble" => {
            let words = size_of::<ClientRegion>() / size_of::<AtomicU32>();
            for _ in 0..SCRIBBLED {
                let at = random.below(words as u64) as usize;
                // SAFETY: within the region, which holds only atomics and lasts as long as `client`.
                unsafe { &*own.cast::<AtomicU32>().add(at) }.store(random.next() as u32, Relaxed);
            }
            rustix::io::write(bell, &1u64.to_ne_bytes()).map(drop)
        }
        "saturate the doorbell" => {
            let most = (u64::MAX - 1).to_ne_bytes();
            // Twice: the second one finds no room if nobody has read.
            let _ = rustix::io::write(bell, &most);
            rustix::io::write(bell, &most).map(drop)
        }
        "drain the doorbell" => {
            for _ in 0..1_000 {
                let _ = rustix::io::read(bell, &mut [0; 8]);
                let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
                let _ = rustix::io::read(bell, &mut [0; 8]);
            }
            Ok(())
        }
        // The flag belongs to the open file, which the core has as well.
        "make the doorbell block" => {
            // If it was saturated before the write would wait for a core that never reads it.
            let _ = rustix::io::read(bell, &mut [0; 8]);
            for _ in 0..200 {
                rustix::fs::fcntl_setfl(bell, OFlags::empty())?;
                rustix::io::write(bell, &1u64.to_ne_bytes())?;
                rustix::fs::fcntl_setfl(bell, OFlags::NONBLOCK)?;
                let _ = rustix::io::read(bell, &mut [0; 8]);
                rustix::fs::fcntl_setfl(bell, OFlags::empty())?;
            }
            Ok(())
        }
        "signals for the doorbell" => {
            let flags = OFlags::NONBLOCK | OFlags::from_bits_retain(libc::O_ASYNC as u32);
            rustix::fs::fcntl_setfl(bell, flags)?;
            for _ in 0..50 {
                let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
            }
            Ok(())
        }
        "lock everything" => fds
            .iter()
            .try_for_each(|fd| rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive)),
        "send descriptors" => {
            let many: Vec<_> = (0..SENT).map(|_| bell).collect();
            let parts = many.chunks(25);
            parts.for_each(|part| drop(wire::send(client.socket.as_fd(), b"more", part)));
            Ok(())
        }
        "half-close" => {
            client.socket.shutdown(std::net::Shutdown::Read).map_err(|_| Errno::NOTCONN)
        }
        "forget its pages" => {
            // SAFETY: as when it is removed: zeros are values, and the file keeps what was written.
            unsafe {
                rustix::mm::madvise(
                    own.cast_mut().cast(),
                    region_bytes(false),
                    Advice::LinuxDontNeed,
                )
            }
        }
        _ => rustix::io::write(bell, &1u64.to_ne_bytes()).map(drop),
    }
}

/// What is registered in place of a region, all of which must be refused.
const DESCRIPTORS: [&str; 7] =
    ["unsealed", "half sealed", "too small", "an event", "a folder", "endless zeros", "the core's"];

fn descriptor(trick: &str, core: Option<&Client>) -> Result<OwnedFd> {
    let memory = |bytes: u64, seals: SealFlags| -> Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("tally-client", flags)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        Ok(fd)
    };
    let bytes = region_bytes(false) as u64;
    let sizes = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let open = |path: &str| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    Ok(match (trick, core) {
        ("unsealed", _) => memory(bytes, SealFlags::empty())?,
        ("half sealed", _) => memory(bytes, sizes)?,
        ("too small", _) => memory(PAGE as u64, sizes | SealFlags::FUTURE_WRITE)?,
        ("an event", _) => rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?,
        ("a folder", _) => open("/")?,
        ("the core's", Some(client)) => client.cores.try_clone()?,
        _ => open("/dev/zero")?,
    })
}

/// Whether the core takes it for a region. Nobody there to ask is no answer.
fn is_taken(options: &Options, trick: &str, core: Option<&Client>) -> Result<bool> {
    let socket = connect(&options.socket)?;
    let fd = descriptor(trick, core)?;
    wire::send(socket.as_fd(), &hello(&options.name).encode(), &[fd.as_fd()])?;
    match wire::receive(socket.as_fd()).map(|(payload, _)| Welcome::decode(&payload)) {
        Ok(Ok(_)) => Ok(true),
        Ok(Err(WireError::Refused(_))) => Ok(false),
        Ok(Err(other)) | Err(other) => bail!("{other}"),
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn of<'a>(&mut self, names: &[&'a str]) -> &'a str {
        names[self.below(names.len() as u64) as usize]
    }
}

/// One trick: what it was, what came of it, and whether that is a breach.
fn play(options: &Options, client: &mut Option<Client>, seed: u64) -> (String, String, bool) {
    let mut random = Random(seed);
    if client.as_ref().is_some_and(Client::is_gone) {
        *client = None;
    }
    if random.below(5) == 0 {
        let trick = random.of(&DESCRIPTORS);
        return match is_taken(options, trick, client.as_ref()) {
            Ok(taken) => (format!("register {trick}"), format!("taken: {taken}"), taken),
            Err(error) => (format!("register {trick}"), format!("no answer: {error}"), false),
        };
    }
    if client.is_none() {
        match register(options) {
            Ok(new) => *client = Some(new),
            Err(error) => return ("register".into(), format!("no answer: {error}"), false),
        }
    }
    let Some(registered) = client.as_ref() else { unreachable!("just registered") };
    if random.below(2) == 0 {
        let (trick, of_core) = (random.of(&FORBIDDEN), random.below(2) == 0);
        let outcome = forbidden(trick, registered, of_core);
        let whose = if of_core { "the core's region" } else { "its region" };
        return (format!("{trick}: {whose}"), format!("{outcome:?}"), outcome.is_ok());
    }
    let trick = random.of(&ALLOWED);
    let outcome = allowed(trick, registered, &mut random);
    if trick == "unmap and go on"
        && let Some(Client { socket, region, own, .. }) = client.take()
    {
        // The connection stays, with nothing behind it, until this process ends.
        drop((region, own));
        let raw = std::os::fd::IntoRawFd::into_raw_fd(socket);
        if raw > 200 {
            // SAFETY: nobody else has it.
            drop(unsafe { OwnedFd::from_raw_fd(raw) });
        }
    }
    (trick.into(), format!("{outcome:?}"), false)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut client = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let seed = line.strip_prefix("trick ").context("expected `trick SEED`")?;
        let (trick, outcome, breach) = play(&options, &mut client, seed.parse()?);
        let told = serde_json::json!({"trick": trick, "outcome": outcome, "breach": breach});
        let mut out = std::io::stdout().lock();
        out.write_all(format!("{told}\n").as_bytes())?;
        out.flush()?;
    }
    Ok(())
}
