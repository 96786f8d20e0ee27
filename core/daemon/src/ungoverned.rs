//! Programs that were to be governed and are not, for the status: those that say so themselves (the
//! preloaded library and `tallyctl run` send a [`Notice`](tally_ipc::wire::Notice)), those that the core
//! refused, and those found among the processes when the status is asked for.

use std::collections::{BTreeSet, VecDeque};
use std::io::Read;
use std::path::Path;
use std::time::Instant;
use tally_admin::UngovernedStatus;
use tally_contract::limits::UNGOVERNED_MAX;
use tally_ipc::wire;

/// Processes looked at for one status.
const PROCESSES_MAX: usize = 16_384;
/// Read of a process's environment, and of its mappings.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What was reported.
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

    /// It is governed now.
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
    name.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Processes whose environment names this core, that have the CUDA driver mapped and are not clients. A core
/// that is not root sees those of its own user.
pub fn look(socket: &Path, clients: &BTreeSet<u32>) -> Vec<UngovernedStatus> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let others = pids.filter(|pid| !clients.contains(pid)).take(PROCESSES_MAX);
    let found = others.filter_map(|pid: u32| {
        if !names_socket(&read(&format!("/proc/{pid}/environ"))?, socket) {
            return None;
        }
        let reason = why_past_us(&read(&format!("/proc/{pid}/maps"))?)?;
        let uid = std::fs::metadata(format!("/proc/{pid}"));
        Some(UngovernedStatus {
            pid,
            uid: uid.map_or(u32::MAX, |m| std::os::unix::fs::MetadataExt::uid(&m)),
            name: program(pid),
            reason: reason.into(),
            running: true,
            reported_s: 0.0,
        })
    });
    found.collect()
}

fn read(file: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(file).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
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
