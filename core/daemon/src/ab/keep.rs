//! The last report outlives the core: a file for each socket, replaced whole.
//!
//! While a test runs, what is known so far is written now and then, without an end. A core
//! that finds such a file knows that the one before it died in mid-test.

use crate::config::Config;
use crate::owned_file::{self, OwnedError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use tally_ab::experiment::Ended;
use tally_ab::{Reason, Report};

/// Version of the file's format.
const VERSION: u32 = 1;
/// Largest file read or written.
const BYTES_MAX: usize = 16 << 20;
/// Files in the folder, those of other sockets included; the oldest go first.
const FILES_MAX: usize = 64;
const EXTENSION: &str = "json";

#[derive(Serialize, Deserialize)]
struct Kept {
    tally_ab: u32,
    socket: String,
    report: Report,
}

/// Where reports of this core go; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Keep {
    file: Option<PathBuf>,
    socket: String,
    /// One write at a time, however long the disk takes.
    writing: Arc<Mutex<()>>,
}

impl Keep {
    /// Opens the store of the core at this socket, and reads the report that the core before it left. A store
    /// that cannot be used is logged, and does not keep the core from serving.
    pub fn open(config: &Config, socket: &Path) -> (Keep, Option<Report>) {
        let socket = socket.display().to_string();
        let folder = config.ab.directory.clone();
        let folder = folder.or_else(|| config.profiles.directory().map(|d| d.join("ab")));
        let folder = folder.filter(|_| config.ab.keep);
        let file = folder.map(|folder| folder.join(name(&socket)));
        let keep = Keep { file, socket, writing: Arc::default() };
        let Some(file) = &keep.file else { return (keep, None) };
        let report = match keep.read(file) {
            Ok(report) => report,
            Err(why) => {
                tracing::warn!(file = %file.display(), "the last A/B test's report: {why}");
                None
            }
        };
        (keep, report)
    }

    fn read(&self, file: &Path) -> Result<Option<Report>, String> {
        let bytes = match owned_file::read(file, BYTES_MAX) {
            Err(OwnedError::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|e| e.to_string())?,
        };
        let kept: Kept = serde_json::from_slice(&bytes)
            .map_err(|e| format!("it is damaged, or of another release ({e})"))?;
        if kept.tally_ab != VERSION {
            return Err(format!("it has version {}, expected {VERSION}", kept.tally_ab));
        }
        if kept.socket != self.socket {
            return Ok(None);
        }
        let mut report = kept.report;
        if report.ended.is_none() {
            report.ended = Some(interrupted(&report));
            tracing::warn!("an A/B test was interrupted:\n{}", report.text());
            self.write(&report)?;
        }
        Ok(Some(report))
    }

    /// Write a report, whether its test has ended or not. Takes a while: not on the
    /// control plane's thread.
    ///
    /// # Errors
    /// Why it cannot be written.
    pub fn write(&self, report: &Report) -> Result<(), String> {
        let Some(file) = &self.file else { return Ok(()) };
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let (socket, report) = (self.socket.clone(), report.clone());
        let kept = Kept { tally_ab: VERSION, socket, report };
        let wrong = |why: String| format!("{}: {why}", file.display());
        let bytes = serde_json::to_vec(&kept).map_err(|e| wrong(e.to_string()))?;
        if bytes.len() > BYTES_MAX {
            return Err(wrong(format!("{} bytes, and at most {BYTES_MAX} are kept", bytes.len())));
        }
        let folder = crate::config::socket_folder(file);
        crate::socket::private_folder(folder)
            .map_err(|why| format!("{}: {why}", folder.display()))?;
        owned_file::replace(file, &bytes).map_err(|e| wrong(e.to_string()))?;
        thin_out(folder, FILES_MAX);
        Ok(())
    }
}

/// Nobody was there to say how it ended.
fn interrupted(report: &Report) -> Ended {
    Ended {
        reason: Reason::Interrupted,
        arm: None,
        message: "the core died in mid-test; what is here was known shortly before. The policy of \
                  its configuration is active since"
            .into(),
        after_ns: (report.elapsed_s * 1e9) as u64,
    }
}

/// The file's name, from the socket's: for people, and a hash (FNV-1a) that tells apart
/// what looks alike.
fn name(socket: &str) -> String {
    let hash = socket.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let tail: Vec<char> = socket.trim_start_matches('/').chars().rev().take(80).collect();
    let shown: String = tail.into_iter().rev().map(plain).collect();
    format!("{shown}-{hash:016x}.{EXTENSION}")
}

/// Whether a file is called as [`name`] calls them.
fn is_ours(file: &str) -> bool {
    let stem = file.strip_suffix(EXTENSION).and_then(|stem| stem.strip_suffix('.'));
    let hash = stem.and_then(|stem| stem.rsplit_once('-')).map(|(_, hash)| hash);
    hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Leave at most so many reports in the folder.
fn thin_out(folder: &Path, files_max: usize) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut all: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_ours))
        .filter_map(|entry| Some((entry.metadata().ok()?, entry.path())))
        .filter(|(about, _)| about.is_file())
        .filter_map(|(about, path)| Some((about.modified().ok()?, path)))
        .collect();
    all.sort();
    for (_, path) in all.iter().take(all.len().saturating_sub(files_max)) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
#[path = "keep_tests.rs"]
mod tests;
