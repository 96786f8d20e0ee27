//! Recording into a file.
//!
//! The file is opened by a peer, with the peer's rights, or made by the core in its folder of logs, for its own
//! user only (0600). The core opens no path that a peer names.

use super::{NAP, RecordError, Wish, now_unix_s};
use crate::config::Config;
use crate::files::{READ_MAX, check_output};
use crate::helpers::{Helper, PeerFd};
use std::fs::{File, OpenOptions};
use std::io::BufWriter;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tally_admin::LogStatus;
use tally_contract::limits::{LOG_BYTES_MIN, LOGS_MAX};
use tally_decision_log::{Header, Record, TapReader, Writer};

/// Names tried for a file that is there already.
const NUMBERS_MAX: u32 = 10_000;
/// How often what is buffered is passed on.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

#[derive(Clone, Debug)]
pub struct Request {
    /// End after this time.
    pub for_ms: Option<u64>,
    /// End at this size, if it is less than `log.bytes_max`.
    pub bytes_max: Option<u64>,
    /// Whether to record completions that the policy does not ask for, too.
    pub completions: bool,
}

#[derive(Default)]
struct Progress {
    records: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    live: AtomicBool,
    over: AtomicBool,
    /// Why it is to end, or did.
    reason: Mutex<Option<String>>,
    /// Why it is not complete.
    failed: Mutex<Option<String>>,
}

impl Progress {
    /// Notes why the recording ended; the first reason is kept.
    fn end(&self, why: &str) {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason.get_or_insert_with(|| why.into());
    }
    fn fail(&self, why: &str) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get_or_insert_with(|| why.into());
    }
    fn failed(&self) -> Option<String> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A recording, running or ended.
pub struct FileRecording {
    id: u64,
    path: PathBuf,
    started_unix_s: u64,
    progress: Arc<Progress>,
    wish: Wish,
}

/// A file that has just been made, empty.
pub struct New {
    /// `None` once the writing thread has taken it.
    file: Option<File>,
    path: PathBuf,
    /// Closes it if it is a peer's.
    helper: Option<Helper>,
}

impl Drop for New {
    fn drop(&mut self) {
        if let (Some(file), Some(helper)) = (self.file.take(), &self.helper) {
            helper.close(file);
        }
    }
}

/// Make a file that is not there yet.
///
/// # Errors
/// If it is, or cannot be made; names it.
pub fn create(path: &Path) -> std::io::Result<New> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
        .map_err(|e| std::io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    Ok(New { file: Some(file), path: path.into(), helper: None })
}

/// Makes a new file; if `path` exists, a number is added to its name.
///
/// # Errors
/// If it cannot be made.
pub fn create_numbered(path: &Path) -> std::io::Result<New> {
    let names = (1..NUMBERS_MAX).map(|n| path.with_added_extension(n.to_string()));
    let mut last = None;
    for name in std::iter::once(path.to_path_buf()).chain(names) {
        match create(&name) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => last = Some(e),
            other => return other,
        }
    }
    Err(last.unwrap_or_else(|| std::io::Error::other("no name is free")))
}

/// The folder of logs, made if need be.
fn directory(config: &Config) -> Result<PathBuf, RecordError> {
    let folder = config.log.directory.clone();
    let folder = folder.or_else(|| config.profiles.directory().map(|d| d.join("logs")));
    let folder = folder.ok_or_else(|| {
        RecordError::Request("there is no folder for logs: set log.directory".into())
    })?;
    crate::socket::private_folder(&folder)
        .map_err(|why| RecordError::Request(format!("{}: {why}", folder.display())))?;
    Ok(folder)
}

/// A new file in the folder of logs.
///
/// # Errors
/// If it cannot be made.
pub fn create_in_folder(config: &Config) -> Result<New, RecordError> {
    let folder = directory(config)?;
    let free = (0..NUMBERS_MAX)
        .map(|n| folder.join(format!("{}-{n}.tallylog", now_unix_s())))
        .find(|p| !p.exists());
    let path = free.ok_or_else(|| RecordError::Request("no name is free".into()))?;
    let count = count(&folder).map_err(|e| RecordError::Request(e.to_string()))?;
    if count >= LOGS_MAX {
        return Err(RecordError::Request(format!(
            "{} holds {count} logs, at most {LOGS_MAX}: have some removed, or name a file of your own",
            folder.display()
        )));
    }
    create(&path).map_err(|e| RecordError::Request(e.to_string()))
}

/// Logs in a folder.
fn count(folder: &Path) -> std::io::Result<usize> {
    let is_log = |name: &std::ffi::OsStr| Path::new(name).extension() == Some("tallylog".as_ref());
    let names = std::fs::read_dir(folder)?.flatten().map(|entry| entry.file_name());
    Ok(names.filter(|name| is_log(name)).count())
}

/// A file that a peer opened, by the name that it gave.
///
/// # Errors
/// If nothing may be written to it.
pub async fn opened(fd: PeerFd, name: &Path) -> Result<New, RecordError> {
    let (helper, path) = (fd.helper().clone(), name.to_path_buf());
    let keeper = helper.clone();
    let looking = helper.ask(READ_MAX, move || {
        check_output(&fd, &path.display().to_string())?;
        let file = fd.into_inner().map(File::from);
        Ok(New { file, path, helper: Some(keeper) })
    });
    let looked = looking.await.unwrap_or_else(|why| Err(why.to_string()));
    looked.map_err(RecordError::Request)
}

/// See that a request makes sense.
///
/// # Errors
/// What does not.
pub fn check(request: &Request) -> Result<(), RecordError> {
    if request.bytes_max.is_some_and(|n| n < LOG_BYTES_MIN) {
        return Err(RecordError::Request(format!("a log has at least {LOG_BYTES_MIN} bytes")));
    }
    Ok(())
}

/// Size at which a recording ends. `log.bytes_max` bounds every request, because admins without root could otherwise
/// fill the disk of the core's folder of logs.
fn bytes_max(request: &Request, config: &Config) -> u64 {
    let most = config.log.bytes_max;
    request.bytes_max.map_or(most, |asked| asked.min(most)).max(LOG_BYTES_MIN)
}

impl FileRecording {
    /// Write the header, then what comes out of `reader`, on a thread of its own.
    ///
    /// # Errors
    /// If nothing can be written or no thread be had.
    pub fn start(
        id: u64,
        mut new: New,
        header: &Header,
        request: &Request,
        config: &Config,
        reader: TapReader,
        wish: Wish,
    ) -> std::io::Result<Self> {
        let file = new.file.as_ref().ok_or_else(|| std::io::Error::other("no file"))?;
        let written = file.try_clone()?;
        let file = new.file.take().ok_or_else(|| std::io::Error::other("no file"))?;
        let writer = Writer::new(BufWriter::with_capacity(256 << 10, file), header)?;
        let progress = Arc::new(Progress::default());
        let writing = Writing {
            writer,
            written,
            reader,
            progress: progress.clone(),
            wish: wish.clone(),
            bytes_max: bytes_max(request, config),
            until: request.for_ms.map(|ms| Instant::now() + Duration::from_millis(ms)),
            wished: false,
            full: false,
        };
        std::thread::Builder::new().name("tally-log".into()).spawn(move || writing.run())?;
        tracing::info!(file = %new.path.display(), "recording the policy's inputs and decisions");
        let path = new.path.clone();
        Ok(FileRecording { id, path, started_unix_s: now_unix_s(), progress, wish })
    }

    /// Id of the tap that the recording reads.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What says that it wants to end.
    pub fn wish(&self) -> Wish {
        self.wish.clone()
    }

    /// Whether the file is still being written.
    pub fn is_running(&self) -> bool {
        !self.progress.over.load(Acquire)
    }

    /// Notes why the recording ends; the first reason stands.
    pub fn end(&self, why: &str) {
        self.progress.end(why);
    }

    pub fn status(&self) -> LogStatus {
        let p = &self.progress;
        let recording = self.is_running();
        LogStatus {
            recording,
            file: Some(self.path.display().to_string()),
            started_unix_s: self.started_unix_s,
            live: recording && p.live.load(Relaxed),
            records: p.records.load(Relaxed),
            bytes: p.bytes.load(Relaxed),
            dropped: p.dropped.load(Relaxed),
            ended: p.reason().filter(|_| !recording),
            failed: p.failed().filter(|_| !recording),
        }
    }
}

struct Writing {
    writer: Writer<BufWriter<File>>,
    /// A second handle of the file, to see how much of it is there.
    written: File,
    reader: TapReader,
    progress: Arc<Progress>,
    wish: Wish,
    bytes_max: u64,
    until: Option<Instant>,
    wished: bool,
    /// Nothing more is written.
    full: bool,
}

impl Writing {
    fn run(mut self) {
        let mut record = Vec::new();
        let mut flushed = Instant::now();
        while !self.reader.is_over() {
            let mut any = false;
            while self.reader.next(&mut record) {
                any = true;
                self.write(&record);
            }
            if self.until.is_some_and(|until| Instant::now() >= until) {
                self.wish_to_end("its time is over");
            }
            if self.reader.is_too_small() {
                let why = "the ring is too small for the policy's configuration or its clients: raise log.ring_kib";
                self.progress.fail(why);
                self.wish_to_end(why);
            }
            if flushed.elapsed() >= FLUSH_EVERY && !self.full {
                flushed = Instant::now();
                let outcome = self.writer.flush();
                self.heed(outcome);
            }
            self.note();
            if !any {
                std::thread::sleep(NAP);
            }
        }
        self.progress.end("the core stopped");
        let reason = self.progress.reason().unwrap_or_default();
        let end = Record::End { reason: reason.clone(), dropped: self.reader.dropped() };
        // Also when it is full: the end is short.
        let outcome = self.writer.record(&end).and_then(|()| self.writer.flush());
        if let Err(e) = outcome {
            self.progress.fail(&format!("writing failed: {e}"));
        }
        self.note();
        if let Some(why) = self.progress.failed() {
            let there = self.written.metadata().map_or(0, |about| about.len());
            self.progress.bytes.store(there, Relaxed);
            tracing::error!("the decision log is not complete: {why}");
        }
        tracing::info!(
            reason,
            records = self.writer.records(),
            bytes = self.writer.bytes(),
            dropped = self.reader.dropped(),
            "the decision log ended"
        );
        let Writing { writer, written, progress, .. } = self;
        // Whoever is told that it is over may count on the file being closed.
        drop((writer, written));
        progress.over.store(true, Release);
    }

    fn write(&mut self, record: &[u8]) {
        if self.full {
            return;
        }
        if self.writer.bytes() + record.len() as u64 > self.bytes_max {
            self.full = true;
            return self.wish_to_end("it reached its largest size");
        }
        let outcome = self.writer.raw(record);
        self.heed(outcome);
    }

    fn heed(&mut self, outcome: std::io::Result<()>) {
        if let Err(e) = outcome {
            self.full = true;
            let why = format!("writing failed: {e}");
            self.progress.fail(&why);
            self.wish_to_end(&why);
        }
    }

    /// The tap goes on until it is taken out.
    fn wish_to_end(&mut self, why: &str) {
        if !std::mem::replace(&mut self.wished, true) {
            self.progress.end(why);
            self.wish.notify_one();
        }
    }

    fn note(&self) {
        let p = &self.progress;
        p.records.store(self.writer.records(), Relaxed);
        p.bytes.store(self.writer.bytes(), Relaxed);
        p.dropped.store(self.reader.dropped(), Relaxed);
        p.live.store(self.reader.is_live(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::os::unix::fs::MetadataExt;
    use tally_decision_log::{Tap, TapOptions};

    #[test]
    fn the_cores_folder_holds_so_many_logs() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.log.directory = Some(dir.path().to_path_buf());
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        std::fs::write(dir.path().join("notes.txt"), "").unwrap();
        let made: Vec<New> = (0..LOGS_MAX).map(|_| create_in_folder(&config).unwrap()).collect();
        let Err(RecordError::Request(why)) = create_in_folder(&config) else { panic!("one more") };
        assert!(why.contains("holds 32 logs, at most 32: have some removed"), "{why}");
        std::fs::remove_file(&made[0].path).unwrap();
        assert!(create_in_folder(&config).is_ok());
    }

    #[test]
    fn a_file_that_is_there_is_never_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tallylog");
        let first = create(&path).unwrap();
        assert_eq!(first.file.as_ref().unwrap().metadata().unwrap().mode() & 0o777, 0o600);
        let error = create(&path).err().unwrap().to_string();
        assert!(error.contains("a.tallylog"), "{error}");
        assert_eq!(create_numbered(&path).unwrap().path, dir.path().join("a.tallylog.1"));
        assert_eq!(create_numbered(&path).unwrap().path, dir.path().join("a.tallylog.2"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
        assert!(create(&link).is_err() && !dir.path().join("elsewhere").exists());
    }

    #[test]
    fn a_recording_that_is_over_has_its_file_closed() {
        let config = Config::default();
        let options =
            TapOptions { ring_bytes: 0, completions: false, from_start: true, state: false };
        for n in 0..50 {
            // A pipe tells at once whether its other end is closed.
            let (out, file) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
            let new =
                New { file: Some(File::from(file)), path: PathBuf::from("pipe"), helper: None };
            let (tap, reader) = Tap::new(n, options);
            let request = Request { for_ms: None, bytes_max: None, completions: false };
            let (header, wish) = (crate::record::header(&config), Wish::default());
            let recording =
                FileRecording::start(n, new, &header, &request, &config, reader, wish).unwrap();
            drop(tap);
            while recording.is_running() {
                std::hint::spin_loop();
            }
            let mut bytes = vec![0; 64 << 10];
            assert_ne!(rustix::io::read(&out, &mut bytes).unwrap(), 0);
            assert_eq!(rustix::io::read(&out, &mut bytes), Ok(0), "recording {n} is still open");
        }
    }

    #[test]
    fn the_core_writes_into_its_folder_or_into_what_was_opened_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.log.directory = Some(dir.path().join("logs"));
        for _ in 0..3 {
            let new = create_in_folder(&config).unwrap();
            assert_eq!(new.path.parent(), Some(&*dir.path().join("logs")));
        }
        let path = dir.path().join("out");
        let fd = tally_ipc::admin::create("out", &path).unwrap().fd;
        let helper = crate::helpers::Helpers::default().of(crate::quota::User::Uid(1), false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let opened = |fd| runtime.block_on(super::opened(helper.keep(fd), &path));
        assert_eq!(opened(fd).unwrap().path, path);
        let fd = tally_ipc::admin::open_to_read("out", &path).unwrap().fd;
        assert!(opened(fd).err().unwrap().to_string().contains("not open for writing"));
        let small = Request { for_ms: None, bytes_max: Some(5), completions: false };
        assert!(check(&small).unwrap_err().to_string().contains("65536"));
    }

    #[test]
    fn a_request_cannot_exceed_the_configured_size() {
        let mut config = Config::default();
        let at = |config: &Config, bytes| {
            bytes_max(&Request { for_ms: None, bytes_max: bytes, completions: false }, config)
        };
        config.log.bytes_max = 1 << 20;
        assert_eq!(at(&config, None), 1 << 20);
        assert_eq!(at(&config, Some(1 << 19)), 1 << 19);
        assert_eq!(at(&config, Some((1 << 20) + 1)), 1 << 20);
        assert_eq!(at(&config, Some(u64::MAX)), 1 << 20);
        assert_eq!(at(&config, Some(1)), LOG_BYTES_MIN);
    }

    #[test]
    fn the_wait_for_a_writer_that_hangs_is_bounded() {
        let config = Config::default();
        let options =
            TapOptions { ring_bytes: 0, completions: false, from_start: true, state: false };
        // A full pipe: whoever writes to it waits.
        let (out, file) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let room = rustix::pipe::fcntl_getpipe_size(&file).unwrap();
        assert_eq!(rustix::io::write(&file, &vec![0; room]), Ok(room));
        let new = New { file: Some(File::from(file)), path: PathBuf::from("pipe"), helper: None };
        let (tap, reader) = Tap::new(1, options);
        let request = Request { for_ms: None, bytes_max: None, completions: false };
        let (header, wish) = (crate::record::header(&config), Wish::default());
        let recording =
            FileRecording::start(1, new, &header, &request, &config, reader, wish).unwrap();
        drop(tap);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let over = |ms| {
            let running = || recording.is_running();
            runtime.block_on(crate::record::over_within(Duration::from_millis(ms), running))
        };
        assert!(!over(50));
        // Nobody reads any more: writing fails, and the recording is over.
        drop(out);
        assert!(over(10_000));
        assert!(recording.status().failed.is_some());
    }
}
