//! The control plane's side of the decision log: recordings to a file, and the shadow.
//!
//! Both read a ring of their own on a thread of their own. A reader that wants to end
//! says so; the dispatch thread then takes its tap out, and the reader empties the ring.
//! Read next: [`file`], [`shadow`]; `tally_decision_log::recorder` for the dispatch thread's side.

pub mod admin;
pub mod budget;
pub mod file;
pub mod shadow;

use crate::config::Config;
use crate::dispatch::control::{AskError, Control, ControlSender};
use crate::error::CoreError;
use crate::files::PolicyFiles;
use crate::loader::Loaded;
use file::{FileRecording, Request};
use shadow::Shadow;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tally_admin::{LogStatus, ShadowStatus};
use tally_decision_log::recorder::Described;
use tally_decision_log::{Header, Recorder, Tap, TapOptions, TapReader};
use tally_engine::policy::Subscriptions;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// The contract that this core speaks.
const CONTRACT: &str = "tally:policy@0.1.0";
/// Longest wait for a reader to empty its ring when the core ends.
const FINISH_MAX: Duration = Duration::from_secs(2);
/// Longest wait for a reader to end when a peer asks for that.
const STOP_MAX: Duration = Duration::from_secs(10);
/// A reader that finds nothing sleeps so long. Nobody wakes it: the dispatch thread
/// makes no system call for it.
pub(crate) const NAP: Duration = Duration::from_millis(2);

/// Why nothing is recorded, or compared.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A recording, or a shadow, runs already; there is one of each at a time.
    #[error("{0}")]
    Running(String),
    #[error("{0}")]
    NotRunning(&'static str),
    /// A recording or a shadow does not end in time.
    #[error("{0}")]
    Slow(String),
    /// The request makes no sense, or its file cannot be had.
    #[error("{0}")]
    Request(String),
    /// The component cannot be loaded.
    #[error("{0}")]
    Policy(String),
    /// The dispatch thread does not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
}

/// Says that a reader wants to end; cloned into its thread.
pub(crate) type Wish = Arc<Notify>;

pub struct Recordings {
    file: RefCell<Option<FileRecording>>,
    shadow: RefCell<Option<Shadow>>,
    /// What waits until they wish to end.
    file_wish: RefCell<Option<AbortHandle>>,
    shadow_wish: RefCell<Option<AbortHandle>>,
    taps: Cell<u64>,
    /// Held while a recording or a shadow is started, because the dispatch thread is asked meanwhile.
    busy: tokio::sync::Mutex<()>,
}

pub(crate) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn header(config: &Config) -> Header {
    Header {
        contract: CONTRACT.into(),
        core: env!("CARGO_PKG_VERSION").into(),
        started_unix_s: now_unix_s(),
        limits: serde_json::to_value(&config.policy.limits).unwrap_or_default(),
        capabilities: config.policy.capabilities.names().into_iter().map(Into::into).collect(),
    }
}

/// Options of a recording that begins while the core runs.
fn options(config: &Config, request: &Request) -> TapOptions {
    let ring_bytes = (config.log.ring_kib as usize) << 10;
    TapOptions { ring_bytes, completions: request.completions, from_start: false, state: true }
}

impl Recordings {
    /// With `[log] file`, record from now on: the recorder goes to the dispatch thread.
    ///
    /// # Errors
    /// If the file cannot be had.
    pub fn open(config: &Config, policy: &Loaded, recorder: &Recorder) -> Result<Self, CoreError> {
        let recordings = Recordings {
            file: RefCell::default(),
            shadow: RefCell::default(),
            file_wish: RefCell::default(),
            shadow_wish: RefCell::default(),
            taps: Cell::new(0),
            busy: tokio::sync::Mutex::default(),
        };
        if let Some(path) = &config.log.file {
            let request =
                Request { for_ms: None, bytes_max: None, completions: config.log.completions };
            let failed = |e: std::io::Error| {
                let what = std::io::Error::new(e.kind(), format!("{}: {e}", path.display()));
                CoreError::os("log.file")(what)
            };
            let file = file::create_numbered(path).map_err(failed)?;
            let options = TapOptions { from_start: true, ..options(config, &request) };
            let (id, tap, reader) = recordings.tap(options);
            recorder.insert(tap, &Default::default(), policy.about(), Subscriptions::NONE);
            let wish = Wish::default();
            let recording =
                FileRecording::start(id, file, &header(config), &request, config, reader, wish)
                    .map_err(failed)?;
            *recordings.file.borrow_mut() = Some(recording);
        }
        Ok(recordings)
    }

    /// End the recording from the start (`[log] file`) when it asks for that. Call it once the core serves.
    pub fn heed(&self, control: &ControlSender) {
        if let Some(recording) = &*self.file.borrow() {
            let wait = untap_when_wished(control.clone(), recording.id(), recording.wish());
            *self.file_wish.borrow_mut() = Some(wait);
        }
    }

    fn tap(&self, options: TapOptions) -> (u64, Tap, TapReader) {
        let id = self.taps.get();
        self.taps.set(id + 1);
        let (tap, reader) = Tap::new(id, options);
        (id, tap, reader)
    }

    /// Record into a file that a peer opened, else into a new one in the folder of logs.
    ///
    /// # Errors
    /// If one is being recorded, or the file cannot be had.
    pub async fn record(
        &self,
        config: &Config,
        control: &ControlSender,
        request: Request,
        out: Option<file::New>,
    ) -> Result<LogStatus, RecordError> {
        let _turn = self.busy.lock().await;
        if let Some(running) = self.file.borrow().as_ref().filter(|r| r.is_running()) {
            return Err(RecordError::Running(format!(
                "{} is being recorded: end it with `tallyctl log stop` first",
                running.path().display()
            )));
        }
        let file = match out {
            Some(out) => out,
            None => file::create_in_folder(config)?,
        };
        let (id, tap, reader) = self.tap(options(config, &request));
        let wish = Wish::default();
        let recording =
            FileRecording::start(id, file, &header(config), &request, config, reader, wish.clone())
                .map_err(|e| RecordError::Request(e.to_string()))?;
        control.ask(|done| Control::Tap { tap: Box::new(tap), done }).await?;
        *self.file_wish.borrow_mut() = Some(untap_when_wished(control.clone(), id, wish));
        let status = recording.status();
        *self.file.borrow_mut() = Some(recording);
        Ok(status)
    }

    /// End the recording; its file is complete when this returns.
    ///
    /// # Errors
    /// If there is none, or its file is not written within [`STOP_MAX`]; then it still ends as soon as it is written.
    pub async fn stop(&self, control: &ControlSender) -> Result<LogStatus, RecordError> {
        let _turn = self.busy.lock().await;
        let running = self.file.borrow().as_ref().filter(|r| r.is_running()).map(|r| {
            r.end("asked to stop");
            r.id()
        });
        let Some(id) = running else {
            return Err(RecordError::NotRunning("nothing is being recorded"));
        };
        untap(control, id).await?;
        no_longer(&self.file_wish);
        if over_within(STOP_MAX, || self.records()).await {
            return Ok(self.status());
        }
        Err(RecordError::Slow(format!(
            "the recording is ending, but {} is not written after {} s: see whether its file system answers, and \
             `tallyctl log status` for when it has ended",
            self.status().file.unwrap_or_default(),
            STOP_MAX.as_secs()
        )))
    }

    /// Whether a file is still being written.
    fn records(&self) -> bool {
        self.file.borrow().as_ref().is_some_and(FileRecording::is_running)
    }

    /// For status; of the last recording if none is running.
    pub fn status(&self) -> LogStatus {
        self.file.borrow().as_ref().map(FileRecording::status).unwrap_or_default()
    }

    /// Let a second policy see what the active one sees.
    ///
    /// # Errors
    /// If one does already, or it cannot be loaded.
    pub async fn shadow(
        &self,
        config: &Config,
        control: &ControlSender,
        files: PolicyFiles,
        cpu_percent: f64,
    ) -> Result<ShadowStatus, RecordError> {
        let _turn = self.busy.lock().await;
        if let Some(running) = self.shadow.borrow().as_ref().filter(|s| s.is_running()) {
            return Err(RecordError::Running(format!(
                "{} is the shadow: end it with `tallyctl shadow stop` first",
                running.path().display()
            )));
        }
        let policy = config.policy.clone();
        let load = move || shadow::Component::load(&policy, files);
        let component = tokio::task::spawn_blocking(load)
            .await
            .unwrap_or_else(|e| Err(format!("loading it panicked: {e}")))
            .map_err(RecordError::Policy)?;
        let ring_bytes = (config.log.ring_kib as usize) << 10;
        // What the active policy knows is no business of another.
        let options =
            TapOptions { ring_bytes, completions: false, from_start: false, state: false };
        let (id, tap, reader) = self.tap(options);
        let wish = Wish::default();
        let shadow = Shadow::start(id, component, cpu_percent, reader, wish.clone())
            .map_err(|e| RecordError::Request(e.to_string()))?;
        control.ask(|done| Control::Tap { tap: Box::new(tap), done }).await?;
        *self.shadow_wish.borrow_mut() = Some(untap_when_wished(control.clone(), id, wish));
        let status = shadow.status();
        *self.shadow.borrow_mut() = Some(shadow);
        Ok(status)
    }

    /// End the shadow.
    ///
    /// # Errors
    /// If there is none, or its thread does not end within [`STOP_MAX`]; then it still ends when it can.
    pub async fn stop_shadow(&self, control: &ControlSender) -> Result<ShadowStatus, RecordError> {
        let _turn = self.busy.lock().await;
        let running = self.shadow.borrow().as_ref().filter(|s| s.is_running()).map(|s| {
            s.end("asked to stop");
            s.id()
        });
        let Some(id) = running else {
            return Err(RecordError::NotRunning("no shadow is running"));
        };
        untap(control, id).await?;
        no_longer(&self.shadow_wish);
        let running = || self.shadow.borrow().as_ref().is_some_and(Shadow::is_running);
        if over_within(STOP_MAX, running).await {
            return Ok(self.shadow_status().unwrap_or_default());
        }
        Err(RecordError::Slow(format!(
            "the shadow is ending, but still runs after {} s: see `tallyctl shadow status` for when it has ended",
            STOP_MAX.as_secs()
        )))
    }

    /// The shadow's comparison; of the last one if none is running.
    pub fn shadow_status(&self) -> Option<ShadowStatus> {
        self.shadow.borrow().as_ref().map(Shadow::status)
    }

    /// The dispatch thread is gone: wait for what is left in the rings to be written.
    pub async fn finish(&self) {
        if let Some(r) = &*self.file.borrow() {
            r.end("the core stopped");
        }
        if let Some(s) = &*self.shadow.borrow() {
            s.end("the core stopped");
        }
        over_within(FINISH_MAX, || self.records()).await;
    }
}

/// Waits until a reader no longer runs; false if it still does after that time.
async fn over_within(time: Duration, is_running: impl Fn() -> bool) -> bool {
    let until = tokio::time::Instant::now() + time;
    while is_running() {
        if tokio::time::Instant::now() >= until {
            return false;
        }
        tokio::time::sleep(NAP).await;
    }
    true
}

async fn untap(control: &ControlSender, id: u64) -> Result<(), AskError> {
    let removed = control.ask(|done| Control::Untap { id, done }).await?;
    // Its ring may be large.
    tokio::task::spawn_blocking(move || drop(removed));
    Ok(())
}

/// Waits until a reader wishes to end, which it never does if it was ended.
fn untap_when_wished(control: ControlSender, id: u64, wish: Wish) -> AbortHandle {
    let wait = tokio::task::spawn_local(async move {
        wish.notified().await;
        loop {
            match untap(&control, id).await {
                Err(AskError::Busy) => tokio::time::sleep(NAP).await,
                Ok(()) | Err(AskError::Gone) => return,
            }
        }
    });
    wait.abort_handle()
}

fn no_longer(wish: &RefCell<Option<AbortHandle>>) {
    if let Some(wait) = wish.take() {
        wait.abort();
    }
}
