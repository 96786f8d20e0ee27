//! Programs that were to be governed and are not, for the status: those that say so themselves (the
//! preloaded library and `tallyctl run` send a [`Notice`](tally_ipc::wire::Notice)), those that the core
//! refused, and those found among the processes when the status is asked for.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tally_admin::UngovernedStatus;
use tally_contract::limits::UNGOVERNED_MAX;
use tally_ipc::text::printable;
use tally_ipc::wire;
use tokio::sync::Notify;

/// Processes looked at for one status.
const PROCESSES_MAX: usize = 16_384;
/// Read of a process's environment, and of its mappings.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Read of it at once.
const PIECE_BYTES: usize = 64 << 10;
/// Programs that one look finds.
const FOUND_MAX: usize = 64;
/// Longest look; the next one goes on where it ended.
const LOOK_MAX: Duration = Duration::from_millis(100);
/// Longest wait for it: a process may make reading its environment wait.
const WAIT_MAX: Duration = Duration::from_millis(200);
/// A look that has taken so long is kept waiting by the process that it looks at.
const STUCK_AFTER: Duration = Duration::from_secs(1);
/// What a look found is shown for so many times as long as it took, but no longer than a second.
const SHOWN_TIMES: u32 = 10;
const SHOWN_MAX: Duration = Duration::from_secs(1);

/// Reports of programs that are not governed, the latest first.
#[derive(Debug, Default)]
pub struct Ungoverned(VecDeque<Report>);

#[derive(Debug)]
struct Report {
    pid: u32,
    /// Tells processes with the same id apart.
    process_start: Option<u64>,
    uid: u32,
    name: String,
    reason: String,
    at: Instant,
}

impl Ungoverned {
    /// A program that is not governed; an earlier report of the same process is replaced.
    pub fn report(&mut self, pid: u32, uid: u32, name: String, reason: String) {
        self.is_client(pid);
        self.0.truncate(UNGOVERNED_MAX - 1);
        let process_start = process_start(pid);
        self.0.push_front(Report { pid, process_start, uid, name, reason, at: Instant::now() });
    }

    /// The process has registered: drops what was reported of it.
    pub fn is_client(&mut self, pid: u32) {
        self.0.retain(|report| report.pid != pid);
    }

    /// All reports, and what was found besides.
    pub fn status(&self, found: Vec<UngovernedStatus>) -> Vec<UngovernedStatus> {
        let reported = self.0.iter().map(|report| UngovernedStatus {
            pid: report.pid,
            uid: report.uid,
            name: report.name.clone(),
            reason: report.reason.clone(),
            running: report.process_start.is_some()
                && report.process_start == process_start(report.pid),
            reported_s: report.at.elapsed().as_secs_f64(),
        });
        let known: BTreeSet<u32> = self.0.iter().map(|report| report.pid).collect();
        let found = found.into_iter().filter(|process| !known.contains(&process.pid));
        found.chain(reported).collect()
    }
}

/// When a process started, in clock ticks; `None` if it is gone.
fn process_start(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let fields = stat.rsplit_once(')')?.1;
    let mut fields = fields.split_whitespace();
    (fields.next()? != "Z").then(|| fields.nth(18)?.parse().ok())?
}

/// The name of a process's program.
pub fn program(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    // Names are shown on terminals.
    printable(name.trim_end().to_owned())
}

/// What the last look found.
#[derive(Debug, Default)]
struct Looked {
    found: Vec<UngovernedStatus>,
    /// Process id at which the next look begins.
    from: u32,
}

/// Looks at the processes for those who ask for the status, one look at a time and not too often.
#[derive(Debug)]
pub struct Looker {
    proc: PathBuf,
    looked: RefCell<Looked>,
    /// Until when the last look is shown, and none is made.
    shown: RefCell<Option<Instant>>,
    /// When the look under way began.
    looking_since: RefCell<Option<Instant>>,
    /// The process that it looks at.
    at: Arc<AtomicU32>,
    done: Notify,
}

impl Default for Looker {
    fn default() -> Self {
        Looker::new("/proc".into())
    }
}

impl Looker {
    fn new(proc: PathBuf) -> Self {
        Looker {
            proc,
            looked: RefCell::default(),
            shown: RefCell::default(),
            looking_since: RefCell::default(),
            at: Arc::default(),
            done: Notify::new(),
        }
    }

    /// What is found among the processes. If that takes too long, what was found before.
    pub async fn found(
        self: &Rc<Self>,
        socket: PathBuf,
        clients: BTreeSet<u32>,
    ) -> Vec<UngovernedStatus> {
        let is_shown = self.shown.borrow().is_some_and(|until| Instant::now() < until);
        if !is_shown {
            let done = self.done.notified();
            if self.looking_since.borrow().is_none() {
                *self.looking_since.borrow_mut() = Some(Instant::now());
                self.clone().look(socket, clients.clone());
            }
            let _ = tokio::time::timeout(WAIT_MAX, done).await;
        }
        let looked = self.looked.borrow();
        let found = looked.found.iter().filter(|process| !clients.contains(&process.pid)).cloned();
        self.keeps_waiting().into_iter().chain(found).collect()
    }

    /// The process that keeps a look waiting: its memory is that of a file system that does not answer, for one.
    fn keeps_waiting(&self) -> Option<UngovernedStatus> {
        let since = (*self.looking_since.borrow())?;
        (since.elapsed() >= STUCK_AFTER).then(|| {
            let pid = self.at.load(Relaxed);
            let reason = "reading its environment does not end, and no program behind it is looked \
                          at until that does: end it";
            status_of(&self.proc.join(pid.to_string()), pid, reason)
        })
    }

    fn look(self: Rc<Self>, socket: PathBuf, clients: BTreeSet<u32>) {
        let last = std::mem::take(&mut *self.looked.borrow_mut());
        // Shown meanwhile.
        self.looked.borrow_mut().found.clone_from(&last.found);
        let (proc, at) = (self.proc.clone(), self.at.clone());
        tokio::task::spawn_local(async move {
            let looking = tokio::task::spawn_blocking(move || {
                let began = Instant::now();
                let looked = look(&proc, &socket, &clients, last, began + LOOK_MAX, &at);
                (looked, began.elapsed())
            });
            if let Ok((looked, took)) = looking.await {
                *self.looked.borrow_mut() = looked;
                *self.shown.borrow_mut() =
                    Some(Instant::now() + (took * SHOWN_TIMES).min(SHOWN_MAX));
            }
            *self.looking_since.borrow_mut() = None;
            self.done.notify_waiters();
        });
    }
}

/// Processes whose environment names this core, that have the CUDA driver mapped and are not clients. A core
/// that is not root sees those of its own user. Those that are not looked at before `until` are as in the last look.
/// `at`: which one it looks at.
fn look(
    proc: &Path,
    socket: &Path,
    clients: &BTreeSet<u32>,
    last: Looked,
    until: Instant,
    at: &AtomicU32,
) -> Looked {
    let Ok(processes) = std::fs::read_dir(proc) else { return Looked::default() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut left: BTreeSet<u32> =
        pids.filter(|pid| !clients.contains(pid)).take(PROCESSES_MAX).collect();
    let order: Vec<u32> = left.range(last.from..).chain(left.range(..last.from)).copied().collect();
    let (mut found, mut from) = (Vec::new(), 0);
    for pid in order {
        left.remove(&pid);
        at.store(pid, Relaxed);
        found.extend(examine(&proc.join(pid.to_string()), pid, socket, until));
        if found.len() >= FOUND_MAX || Instant::now() >= until {
            from = pid.saturating_add(1);
            break;
        }
    }
    found.extend(last.found.into_iter().filter(|process| left.contains(&process.pid)));
    found.truncate(FOUND_MAX);
    Looked { found, from }
}

fn examine(process: &Path, pid: u32, socket: &Path, until: Instant) -> Option<UngovernedStatus> {
    if !names_socket(&read(&process.join("environ"), until)?, socket) {
        return None;
    }
    let reason = why_past_us(&read(&process.join("maps"), until)?)?;
    Some(status_of(process, pid, reason))
}

fn status_of(process: &Path, pid: u32, reason: &str) -> UngovernedStatus {
    let uid = std::fs::metadata(process);
    UngovernedStatus {
        pid,
        uid: uid.map_or(u32::MAX, |m| std::os::unix::fs::MetadataExt::uid(&m)),
        name: program(pid),
        reason: reason.into(),
        running: true,
        reported_s: 0.0,
    }
}

/// `None` if it cannot be read, or not whole before `until`.
fn read(file: &Path, until: Instant) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = std::fs::File::open(file).ok()?.take(FILE_BYTES_MAX);
    while file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut bytes).ok()? > 0 {
        if Instant::now() >= until && file.limit() > 0 {
            return None;
        }
    }
    Some(bytes)
}

fn names_socket(environment: &[u8], socket: &Path) -> bool {
    let socket = socket.as_os_str().as_encoded_bytes();
    let mut variables = environment.split(|byte| *byte == 0);
    variables.any(|variable| {
        let value = variable.strip_prefix(wire::ENV_SOCKET.as_bytes());
        value.and_then(|v| v.strip_prefix(b"=")) == Some(socket)
    })
}

/// Why a process with these mappings uses the driver, or may, without being a client; `None` if there is
/// nothing to say of it.
fn why_past_us(maps: &[u8]) -> Option<&'static str> {
    let (mut driver, mut preloaded) = (false, false);
    for line in maps.split(|byte| *byte == b'\n') {
        let file = line.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        driver |= file.starts_with(b"libcuda.so") || file.starts_with(b"libtally_softcuda.so");
        preloaded |= file.starts_with(b"libtally_preload.so");
        if file.starts_with(b"libtally_shim.so") {
            // It registers when it initialises CUDA; until then, or as a forked child, it uses no GPU.
            return None;
        }
    }
    match (driver, preloaded) {
        (false, _) => None,
        (true, true) => Some(
            "it has the CUDA driver loaded, and has called nothing of it through the preloaded library: it \
             has not begun to use it, or a library that was opened by dlmopen or with RTLD_DEEPBIND does",
        ),
        (true, false) => Some(
            "it has the CUDA driver loaded without the preloaded library: LD_PRELOAD was removed from its \
             environment, or it runs with privileges of its own",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_bounded_replaced_and_end_with_registration() {
        let mut all = Ungoverned::default();
        for i in 0..100 {
            all.report(1_000_000_000 + i, 0, format!("{i}"), "r".into());
        }
        assert_eq!(all.status(Vec::new()).len(), UNGOVERNED_MAX);
        let own = std::process::id();
        all.report(own, 0, "a".into(), "first".into());
        all.report(own, 0, "a".into(), "second".into());
        let shown = all.status(Vec::new());
        assert_eq!((shown[0].pid, &*shown[0].reason, shown[0].running), (own, "second", true));
        assert!(!shown[1].running && shown.iter().filter(|s| s.pid == own).count() == 1);
        all.is_client(own);
        assert!(all.status(Vec::new()).iter().all(|s| s.pid != own));
    }

    /// A folder like `/proc`.
    fn processes(pids: std::ops::Range<u32>) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        for pid in pids {
            let process = proc.path().join(pid.to_string());
            std::fs::create_dir(&process).unwrap();
            std::fs::write(process.join("environ"), b"TALLY_SOCKET=/s\0").unwrap();
            std::fs::write(process.join("maps"), b"7f r-xp 0 /usr/lib/libcuda.so.1\n").unwrap();
        }
        proc
    }

    #[test]
    fn a_look_finds_so_many_and_ends_in_time_and_the_next_goes_on() {
        let (socket, none) = (Path::new("/s"), BTreeSet::new());
        let later = || Instant::now() + Duration::from_secs(60);
        let pids = |looked: &Looked| looked.found.iter().map(|p| p.pid).collect::<BTreeSet<_>>();
        let proc = processes(1..201);
        let look = |proc: &Path, socket: &Path, clients: &BTreeSet<u32>, last, until| {
            look(proc, socket, clients, last, until, &AtomicU32::new(0))
        };
        let mut looked = Looked::default();
        let mut seen = BTreeSet::new();
        for _ in 0..4 {
            looked = look(proc.path(), socket, &none, looked, later());
            assert!(looked.found.len() <= FOUND_MAX);
            seen.extend(pids(&looked));
        }
        assert_eq!(seen.len(), 200);
        // Files as long as those of /proc are not read further than the deadline.
        let proc = processes(1..4);
        for pid in 1..4 {
            let mut maps = vec![b'\n'; 2 * PIECE_BYTES];
            maps.extend(b"/libcuda.so.1");
            std::fs::write(proc.path().join(format!("{pid}/maps")), maps).unwrap();
        }
        let looked = look(proc.path(), socket, &none, Looked::default(), Instant::now());
        assert_eq!((looked.found.len(), looked.from), (0, 2), "one was begun");
        let looked = look(proc.path(), socket, &none, looked, later());
        assert_eq!(pids(&looked), BTreeSet::from([1, 2, 3]));
        // What was found is shown until it is looked at again.
        let looked = look(proc.path(), socket, &BTreeSet::from([2]), looked, Instant::now());
        assert_eq!((pids(&looked), looked.from), (BTreeSet::from([3]), 2));
    }

    #[test]
    fn a_process_that_keeps_the_look_waiting_is_named() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let proc = processes(1..4);
        let environment = proc.path().join("2/environ");
        std::fs::remove_file(&environment).unwrap();
        // Opened by a reader it waits for a writer.
        mknodat(CWD, &environment, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let looker = Rc::new(Looker::new(proc.path().to_path_buf()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let tasks = tokio::task::LocalSet::new();
        let found = || tasks.block_on(&runtime, looker.found("/s".into(), BTreeSet::new()));
        let named = || found().iter().any(|p| p.pid == 2 && p.reason.contains("does not end"));
        assert!(!named(), "not yet");
        let start = Instant::now();
        while !named() {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        let writer = std::fs::OpenOptions::new().write(true).open(&environment).unwrap();
        std::fs::remove_file(&environment).unwrap();
        std::fs::write(&environment, b"TALLY_SOCKET=/s\0").unwrap();
        drop(writer);
        while named() || found().len() < 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", found());
        }
    }

    #[test]
    fn mappings_say_how_a_process_came_by_the_driver() {
        let line = |file: &str| format!("7f00-7f01 r-xp 00000000 fe:00 9 {file}\n");
        let why = |files: &[&str]| {
            why_past_us(files.iter().map(|f| line(f)).collect::<String>().as_bytes())
        };
        let (driver, preload) = ("/usr/lib/libcuda.so.580.65", "/t/libtally_preload.so");
        assert!(why(&[driver]).unwrap().contains("LD_PRELOAD"));
        assert!(why(&[preload, "/t/libtally_softcuda.so"]).unwrap().contains("dlmopen"));
        assert_eq!(why(&[preload]), None);
        assert_eq!(why(&[driver, preload, "/t/libtally_shim.so"]), None);
        assert_eq!(why(&["/usr/lib/libcudart.so.13"]), None);
    }

    #[test]
    fn the_environment_must_name_exactly_this_socket() {
        let names = |environment: &[u8]| names_socket(environment, Path::new("/run/a.sock"));
        assert!(names(b"A=1\0TALLY_SOCKET=/run/a.sock\0B=2\0"));
        assert!(!names(b"TALLY_SOCKET=/run/a.sock2\0") && !names(b"XTALLY_SOCKET=/run/a.sock\0"));
        assert!(!names(b""));
    }
}
