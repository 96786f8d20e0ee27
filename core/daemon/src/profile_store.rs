//! What was profiled of kernels is kept on disk from one run of the core to the next:
//! measured times, and verdicts that a kernel must not be transformed.
//!
//! ```text
//! start: files of the folder --(off the dispatch thread)--> memory, read-only
//! a kernel's first launch: looked up there by the dispatch thread
//! every `save_every_s`, and at the end: news in pieces from the dispatch thread
//!     -> merged here -> the file of this GPU, replaced whole, if anything changed
//! ```
//!
//! Which GPU a core serves is known from the first client that launches on it; until
//! then nothing is looked up and nothing written. Whatever is wrong with the folder or a
//! file is said in the log and in status, and never keeps the core from serving. Read
//! next: [`profiled`] for what is kept, [`file`] for how.

pub mod file;
pub mod profiled;

use crate::config;
use crate::dispatch::control::{AskError, Control, ControlSender};
use profiled::{Device, Loaded, News, Profiled};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tally_admin::{Cleared, ProfilesStatus};
use tokio::sync::Mutex;

pub struct ProfileStore {
    config: config::Profiles,
    /// Where profiles are kept; `None`: they are not.
    folder: Option<PathBuf>,
    /// Held while the dispatch thread is asked for news.
    asking: Mutex<()>,
    /// Held while the file is written. Taken after `asking`.
    writing: Mutex<()>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// Until the GPU is known. The dispatch thread's part of it is never the last.
    loaded: Arc<Loaded>,
    device: Option<Device>,
    profiled: Arc<Profiled>,
    /// Whether profiles changed since they were last written.
    changed: bool,
    written_unix_s: Option<u64>,
    problem: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ClearError {
    /// The dispatch thread cannot be asked.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The profiles are forgotten, but the file is still there.
    #[error("forgotten, but {file} cannot be deleted, and the next core will read it: {source}")]
    Delete { file: PathBuf, source: std::io::Error },
}

/// A folder's files in memory.
fn load(folder: &Path, kernels_max: usize) -> Result<Loaded, String> {
    crate::socket::private_folder(folder).map_err(|why| format!("{}: {why}", folder.display()))?;
    let (files, beyond) =
        file::list(folder).map_err(|e| format!("{} cannot be read: {e}", folder.display()))?;
    if beyond > 0 {
        tracing::warn!(
            "{beyond} files of profiles in {} are not read, the oldest: delete those of GPUs that \
             are gone",
            folder.display()
        );
    }
    let mut loaded = Loaded::new();
    for path in files {
        match file::read(&path, kernels_max) {
            Ok((device, profiled)) => {
                // The latest of two for one device.
                loaded.entry(device).or_insert_with(|| Arc::new(profiled));
            }
            Err(why) => {
                let aside = match file::move_aside(&path) {
                    Ok(aside) => {
                        format!("it was moved to {}, which may be deleted", aside.display())
                    }
                    Err(e) => format!("it cannot be moved aside ({e}): delete it"),
                };
                tracing::warn!(
                    "the profiles in {} are not used: {why}; {aside}. Kernels are measured anew",
                    path.display()
                );
            }
        }
    }
    Ok(loaded)
}

impl ProfileStore {
    /// Read what earlier runs kept. Second: for the dispatch thread.
    pub async fn open(config: &config::Profiles) -> (Self, Arc<Loaded>) {
        let (folder, problem) = match config.directory() {
            _ if !config.enabled => (None, None),
            None => {
                let why = "neither XDG_STATE_HOME nor HOME is set: set profiles.directory";
                (None, Some(why.to_owned()))
            }
            folder => (folder, None),
        };
        let loading = folder.clone().map(|folder| {
            let kernels_max = config.kernels_max;
            tokio::task::spawn_blocking(move || load(&folder, kernels_max))
        });
        let outcome = match loading {
            Some(loading) => loading.await.unwrap_or_else(|e| Err(e.to_string())),
            None => problem.map_or(Ok(Loaded::new()), Err),
        };
        let (loaded, folder, problem) = match outcome {
            Ok(loaded) => (Arc::new(loaded), folder, None),
            Err(why) => {
                tracing::warn!("kernel profiles are not kept: {why}");
                (Arc::default(), None, Some(why))
            }
        };
        let state = State { loaded: loaded.clone(), problem, ..State::default() };
        let store = ProfileStore {
            config: config.clone(),
            folder,
            asking: Mutex::new(()),
            writing: Mutex::new(()),
            state: RefCell::new(state),
        };
        (store, loaded)
    }

    /// How often to save; `None`: never.
    pub fn save_every(&self) -> Option<Duration> {
        self.folder.as_ref().map(|_| Duration::from_secs(self.config.save_every_s))
    }

    /// Get from the dispatch thread what it profiled since this was done last.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub async fn gather(&self, control: &ControlSender) -> Result<(), AskError> {
        if self.folder.is_none() {
            return Ok(());
        }
        let _asking = self.asking.lock().await;
        let mut from = Some(0);
        while let Some(first) = from {
            let piece = control.ask(|done| Control::Profiled { from: first, done }).await?;
            let Some(device) = piece.device else { return Ok(()) };
            self.state.borrow_mut().take(device, piece.news);
            from = piece.next;
        }
        Ok(())
    }

    /// Write this GPU's file if something changed.
    pub async fn write(&self) {
        let _writing = self.writing.lock().await;
        let Some((path, device, profiled)) = self.to_write() else { return };
        let to = path.clone();
        let writing = tokio::task::spawn_blocking(move || file::write(&to, &device, &profiled));
        let outcome = match writing.await {
            Ok(outcome) => outcome.map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        let mut state = self.state.borrow_mut();
        match outcome {
            Ok(()) => {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                state.written_unix_s = now.ok().map(|d| d.as_secs());
                if state.problem.take().is_some() {
                    tracing::info!("profiles are written to {} again", path.display());
                }
            }
            Err(why) => {
                state.changed = true;
                let why = format!("{} cannot be written: {why}", path.display());
                // Said once, not every minute.
                if state.problem.as_ref() != Some(&why) {
                    tracing::warn!("kernel profiles are not kept: {why}");
                }
                state.problem = Some(why);
            }
        }
    }

    fn to_write(&self) -> Option<(PathBuf, Device, Arc<Profiled>)> {
        let folder = self.folder.as_ref()?;
        let mut state = self.state.borrow_mut();
        let device = state.device?;
        if !std::mem::take(&mut state.changed) {
            return None;
        }
        Arc::make_mut(&mut state.profiled).trim(self.config.kernels_max);
        Some((file::path(folder, &device), device, state.profiled.clone()))
    }

    /// Forget everything: in this run, and on disk.
    ///
    /// # Errors
    /// If the dispatch thread cannot be asked, or the file not deleted.
    pub async fn clear(&self, control: &ControlSender) -> Result<Cleared, ClearError> {
        let _asking = self.asking.lock().await;
        let _writing = self.writing.lock().await;
        let forgotten = control.ask(|done| Control::Forget { done }).await?;
        let device = {
            let mut state = self.state.borrow_mut();
            state.loaded = Arc::default();
            state.profiled = Arc::default();
            state.changed = false;
            state.device = state.device.or(forgotten.device);
            state.device
        };
        let mut cleared = Cleared { kernels: forgotten.kernels, file: None, left_in: None };
        // What the dispatch thread no longer reads.
        drop(forgotten);
        match (&self.folder, device) {
            (Some(folder), Some(device)) => {
                let path = file::path(folder, &device);
                match std::fs::remove_file(&path) {
                    Ok(()) => cleared.file = Some(path.display().to_string()),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                    Err(source) => return Err(ClearError::Delete { file: path, source }),
                }
            }
            (Some(folder), None) => cleared.left_in = Some(folder.display().to_string()),
            (None, _) => {}
        }
        Ok(cleared)
    }

    pub fn status(&self) -> ProfilesStatus {
        let state = self.state.borrow();
        let file = self.folder.as_ref().zip(state.device).map(|(f, d)| file::path(f, &d));
        ProfilesStatus {
            directory: self.folder.as_ref().map(|f| f.display().to_string()),
            file: file.map(|f| f.display().to_string()),
            kernels: state.profiled.kernels().len(),
            whole_only: state.profiled.verdicts().count(),
            written_unix_s: state.written_unix_s,
            problem: match &state.problem {
                None if !self.config.enabled => Some("profiles.enabled is off".into()),
                problem => problem.clone(),
            },
        }
    }
}

impl State {
    fn take(&mut self, device: Device, news: Vec<News>) {
        if self.device.is_none() {
            self.device = Some(device);
            match self.loaded.get(&device) {
                Some(profiled) => self.profiled = profiled.clone(),
                None if self
                    .loaded
                    .keys()
                    .any(|d| (d.uuid, d.sm_count) == (device.uuid, device.sm_count)) =>
                {
                    tracing::info!(
                        driver = device.driver_version,
                        "the driver is another than before: kernels are measured anew"
                    );
                }
                None => {}
            }
            self.loaded = Arc::default();
        }
        if news.is_empty() {
            return;
        }
        let profiled = Arc::make_mut(&mut self.profiled);
        for one in news {
            self.changed |= profiled.take(one);
        }
    }
}
