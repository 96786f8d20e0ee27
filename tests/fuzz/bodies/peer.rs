//! What a peer sends, out of an input: its rights, descriptors of several kinds, and bytes in one message or two.

use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use std::cell::RefCell;
use std::time::{Duration, Instant};
use tally_core::control::harness::{self, Message};
use tally_ipc::frame::DESCRIPTORS_MAX;
use tally_ipc::map;

pub struct Input<'a> {
    pub flags: u8,
    fds: Vec<OwnedFd>,
    split: usize,
    pub rest: &'a [u8],
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.unwrap();
    assert_eq!(rustix::io::write(&fd, bytes).unwrap(), bytes.len());
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn descriptor(kind: u8, bytes: &[u8]) -> OwnedFd {
    let open = |path: &str| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let some = &bytes[..bytes.len().min(4096)];
    match kind % 12 {
        0 | 1 => map::create_client().unwrap().0,
        2 => map::create_core().unwrap().0,
        3 => memfd(some, SealFlags::empty()),
        4 => memfd(some, SEALS),
        5 | 6 => memfd(&[], SealFlags::empty()),
        7 => memfd(b"\xff\0[", SealFlags::empty()),
        8 => rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap().0,
        9 => open("/dev/zero").unwrap(),
        10 => open("/").unwrap(),
        _ => tally_core::dispatch::park::eventfd().unwrap(),
    }
}

impl<'a> Input<'a> {
    /// Flags, a number of descriptors and their kinds, where the bytes are split, the bytes.
    pub fn new(data: &'a [u8]) -> Option<Self> {
        let (&[flags, fds, low, high], data) = data.split_first_chunk::<4>()?;
        let (kinds, rest) = data.split_at_checked(usize::from(fds) % (DESCRIPTORS_MAX + 1))?;
        let fds = kinds.iter().map(|kind| descriptor(*kind, rest)).collect();
        Some(Input { flags, fds, split: usize::from(u16::from_le_bytes([low, high])), rest })
    }

    pub fn is_trusted(&self) -> bool {
        self.flags & 1 != 0
    }

    /// The descriptors come with the first part of `bytes`.
    pub fn messages(self, mut bytes: Vec<u8>) -> Vec<Message> {
        let rest = bytes.split_off(self.split.min(bytes.len()));
        let all = [Message { bytes, fds: self.fds }, Message { bytes: rest, fds: Vec::new() }];
        all.into_iter().filter(|message| !message.bytes.is_empty()).collect()
    }
}

/// A descriptor that a helper thread has not closed by then is left.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);

/// What every input uses is open before `work` begins: no input is charged with its descriptors.
pub fn runtime<T>(work: impl FnOnce(&tokio::runtime::Runtime) -> T) -> T {
    thread_local! {
        static RUNTIME: RefCell<tokio::runtime::Runtime> = RefCell::new(
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        );
    }
    harness::prepare();
    RUNTIME.with_borrow(work)
}

/// Descriptors that this process has.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// As many as `before`, or soon: helper threads close what a peer sent, a moment after its connection has ended.
pub fn see_that_none_is_left(before: usize) {
    let start = Instant::now();
    loop {
        let now = descriptors();
        if now == before {
            return;
        }
        assert!(start.elapsed() < CLOSED_WITHIN, "descriptors are left: {now} against {before}");
        std::thread::sleep(Duration::from_micros(100));
    }
}
