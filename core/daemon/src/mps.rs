//! NVIDIA's Multi-Process Service: finding a daemon that serves, and keeping a
//! private one.
//!
//! The private daemon is a child of the core in the foreground mode of
//! `nvidia-cuda-mps-control`. It must outlive a core that is killed, because its
//! clients would die with it; the next core with the same socket finds it
//! serving and takes it over.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;
use tally_admin::MpsStatus;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::sync::watch;

/// Where NVIDIA's programs look when nothing is set.
pub const DEFAULT_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
/// The variable that says otherwise.
pub const ENV_PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
const ENV_LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
const START_TIMEOUT: Duration = Duration::from_secs(10);
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A daemon that served for so long before it died is restarted after the shortest pause.
const STEADY: Duration = Duration::from_secs(60);
/// A daemon that was taken over is dead if it misses so many questions in a row.
const MISSED_MAX: u32 = 3;

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// The control program cannot be run.
    #[error("{program}: {source} (part of the NVIDIA driver; set sharing.mps.control to its path)")]
    Program { program: PathBuf, source: std::io::Error },
    /// A folder cannot be made.
    #[error("{path}: {source}")]
    Folder { path: PathBuf, source: std::io::Error },
    /// Somebody else made a folder, or could have.
    #[error("{path} {why}: remove it")]
    Stranger {
        path: PathBuf,
        /// What is wrong with it, to follow its path.
        why: String,
    },
    /// It ended, or does not answer.
    #[error("the MPS daemon {what}; its log is {log}")]
    NotServing {
        /// What is wrong with it, to follow "the MPS daemon".
        what: String,
        log: PathBuf,
    },
}

/// Send one line to a daemon's control program. `None` if nobody answers.
async fn ask(control: &Path, pipe_directory: &Path, line: &str) -> Option<String> {
    let mut child = Command::new(control)
        .env(ENV_PIPE_DIRECTORY, pipe_directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .ok()?;
    let mut stdin = child.stdin.take()?;
    let line = format!("{line}\n");
    let talk = async {
        stdin.write_all(line.as_bytes()).await.ok()?;
        drop(stdin);
        let output = child.wait_with_output().await.ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    tokio::time::timeout(ASK_TIMEOUT, talk).await.ok().flatten()
}

/// Whether a daemon serves at `pipe_directory`.
pub async fn is_serving(control: &Path, pipe_directory: &Path) -> bool {
    // Without its socket the control program would wait or start things.
    pipe_directory.join("control").exists()
        && ask(control, pipe_directory, "get_server_list").await.is_some()
}

/// A private daemon and the task that keeps it.
pub struct PrivateDaemon {
    status: Rc<RefCell<MpsStatus>>,
    stop: watch::Sender<bool>,
    keeper: tokio::task::JoinHandle<()>,
}

struct Place {
    control: PathBuf,
    pipes: PathBuf,
    logs: PathBuf,
}

impl Place {
    fn log(&self) -> PathBuf {
        self.logs.join("control.log")
    }

    fn spawn(&self) -> Result<Child, MpsError> {
        let output = File::options()
            .create(true)
            .append(true)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(self.logs.join("output.log"))
            .map_err(|source| MpsError::Folder { path: self.logs.clone(), source })?;
        Command::new(&self.control)
            .arg("-f")
            .env(ENV_PIPE_DIRECTORY, &self.pipes)
            .env(ENV_LOG_DIRECTORY, &self.logs)
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_or_else(|_| Stdio::null(), Stdio::from))
            .stderr(output)
            // Ctrl-C in the core's terminal is for the core.
            .process_group(0)
            .spawn()
            .map_err(|source| MpsError::Program { program: self.control.clone(), source })
    }

    /// Start it and wait until it answers.
    async fn start(&self) -> Result<Child, MpsError> {
        let mut child = self.spawn()?;
        let not_serving = |what: String| MpsError::NotServing { what, log: self.log() };
        let ready = async {
            while !is_serving(&self.control, &self.pipes).await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let outcome = tokio::select! {
            () = ready => Ok(()),
            ended = child.wait() => Err(match ended {
                Ok(status) => format!("ended while starting ({status})"),
                Err(error) => format!("cannot be waited for: {error}"),
            }),
            () = tokio::time::sleep(START_TIMEOUT) => {
                Err(format!("did not answer within {} s", START_TIMEOUT.as_secs()))
            }
        };
        match outcome {
            Ok(()) => Ok(child),
            Err(what) => {
                let _ = child.kill().await;
                Err(not_serving(what))
            }
        }
    }

    async fn stop(&self, child: Option<Child>) {
        ask(&self.control, &self.pipes, "quit").await;
        let Some(mut child) = child else { return };
        if tokio::time::timeout(STOP_TIMEOUT, child.wait()).await.is_ok() {
            return;
        }
        let pid = child.id().and_then(|p| rustix::process::Pid::from_raw(p as i32));
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
    }
}

/// Make a folder for the core's user alone, or see that what is there is a folder of that user's.
///
/// # Errors
/// What is wrong with it.
pub fn make(path: &Path) -> Result<(), MpsError> {
    let error = |source| MpsError::Folder { path: path.into(), source };
    let is_missing = |e: &std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
    if std::fs::symlink_metadata(path).as_ref().is_err_and(is_missing) {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(path).map_err(error)?;
    }
    let found = std::fs::symlink_metadata(path).map_err(error)?;
    match stranger(&found, rustix::process::geteuid().as_raw()) {
        None => Ok(()),
        Some(why) => Err(MpsError::Stranger { path: path.into(), why }),
    }
}

/// Why it is not a folder of user `own`.
fn stranger(found: &std::fs::Metadata, own: u32) -> Option<String> {
    if found.is_symlink() {
        return Some("is a symbolic link".into());
    }
    if !found.is_dir() {
        return Some("is not a folder".into());
    }
    let uid = found.uid();
    (uid != own).then(|| format!("belongs to user {uid}, not to the core's user {own}"))
}

impl PrivateDaemon {
    /// Start one with its pipes in `pipes` and its logs in `logs`, or take over
    /// the one that serves there. Must run inside a `LocalSet`.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn start(control: &Path, pipes: &Path, logs: &Path) -> Result<Self, MpsError> {
        let place = Place { control: control.into(), pipes: pipes.into(), logs: logs.into() };
        make(pipes)?;
        make(logs)?;
        let child = match is_serving(control, pipes).await {
            true => None,
            false => Some(place.start().await?),
        };
        let status = Rc::new(RefCell::new(MpsStatus {
            pipe_directory: pipes.into(),
            managed: true,
            state: "running".into(),
            restarts: 0,
            pid: child.as_ref().and_then(Child::id),
        }));
        let (stop, stopped) = watch::channel(false);
        let keeper = tokio::task::spawn_local(keep(place, child, status.clone(), stopped));
        Ok(PrivateDaemon { status, stop, keeper })
    }

    pub fn status(&self) -> MpsStatus {
        self.status.borrow().clone()
    }

    /// Stop it and wait for its end.
    pub async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = self.keeper.await;
    }

    /// Leave it to the next core, unless it does not serve: a second one must not meet it on its pipes.
    pub async fn leave(self) {
        if self.status().state != "running" {
            return self.stop().await;
        }
        self.keeper.abort();
    }
}

/// Watch the daemon, start it again when it dies, stop it when asked.
async fn keep(
    place: Place,
    mut child: Option<Child>,
    status: Rc<RefCell<MpsStatus>>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut pause = Duration::from_secs(1);
    loop {
        let started = tokio::time::Instant::now();
        let ended = async {
            match &mut child {
                Some(child) => child.wait().await.map_or("it is lost".into(), |s| s.to_string()),
                // Taken over from another core: no child to wait for.
                None => {
                    let mut missed = 0;
                    while missed < MISSED_MAX {
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        let serves = is_serving(&place.control, &place.pipes).await;
                        missed = if serves { 0 } else { missed + 1 };
                    }
                    "it no longer answers".into()
                }
            }
        };
        let how: String = tokio::select! {
            how = ended => how,
            _ = stopped.wait_for(|s| *s) => return place.stop(child).await,
        };
        if started.elapsed() > STEADY {
            pause = Duration::from_secs(1);
        }
        loop {
            tracing::error!("the MPS daemon died ({how}); its clients lost their GPU contexts");
            {
                let mut s = status.borrow_mut();
                s.state = format!("died ({how}), restarting in {} s", pause.as_secs());
                s.pid = None;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stopped.wait_for(|s| *s) => return,
            }
            pause = (pause * 2).min(PAUSE_MAX);
            // One that was taken over may answer after all, and is not to meet a second one on its pipes.
            let started = match child.is_none() && is_serving(&place.control, &place.pipes).await {
                true => Ok(None),
                false => place.start().await.map(Some),
            };
            match started {
                Ok(new) => {
                    let mut s = status.borrow_mut();
                    s.state = "running".into();
                    s.restarts += u64::from(new.is_some());
                    s.pid = new.as_ref().and_then(Child::id);
                    drop(s);
                    child = new;
                    break;
                }
                Err(error) => {
                    tracing::error!("the MPS daemon cannot be started again: {error}");
                    status.borrow_mut().state = error.to_string();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_the_cores_user_are_used_and_no_links() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        make(&path("a/b")).unwrap();
        make(&path("a/b")).unwrap();
        assert_eq!(std::fs::metadata(path("a/b")).unwrap().mode() & 0o777, 0o700);
        std::os::unix::fs::symlink(path("a/b"), path("link")).unwrap();
        std::os::unix::fs::symlink(path("nothing"), path("dangling")).unwrap();
        std::fs::write(path("file"), "").unwrap();
        for (name, why) in [
            ("link", "is a symbolic link"),
            ("dangling", "is a symbolic link"),
            ("file", "is not a folder"),
        ] {
            let error = make(&path(name)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(why), "{error}");
        }
        let found = std::fs::symlink_metadata(path("a")).unwrap();
        assert_eq!(stranger(&found, found.uid()), None);
        let why = stranger(&found, found.uid() + 1).unwrap();
        assert!(why.contains(&format!("belongs to user {}", found.uid())), "{why}");
    }

    #[test]
    fn output_is_not_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        std::os::unix::fs::symlink(&target, dir.path().join("output.log")).unwrap();
        let (control, folder) = ("/bin/true".into(), dir.path().to_path_buf());
        let place = Place { control, pipes: folder.clone(), logs: folder };
        assert!(matches!(place.spawn(), Err(MpsError::Folder { .. })));
        assert!(!target.exists());
    }
}
