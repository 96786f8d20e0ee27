//! Now and then a change of context, under MPS.
//!
//! Under MPS all clients share one context of the GPU, which gets slower once two streams have had kernels
//! at the same time, until the GPU changes to another context and back (`docs/internals.md`). A program
//! outside of MPS, `tally-refresh`, runs a kernel that does nothing, as often as is configured, while both
//! high-priority and best-effort clients are there. Should it fail, it is not started again.

use crate::mps::ENV_PIPE_DIRECTORY;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;
use tally_admin::RefreshStatus;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// The program, beside the core's.
const PROGRAM: &str = "tally-refresh";
/// A path at which there is no MPS daemon.
const NO_DAEMON: &str = "/nonexistent";
/// CUDA's start and the first answer; any other answer.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(30);
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Bytes of what it says last that are shown.
const WORDS_MAX: u64 = 1024;

/// Shared with whoever shows it.
pub type Shown = Rc<RefCell<RefreshStatus>>;

/// What is shown before the first.
pub fn shown(every: Duration) -> Shown {
    let every_ms = every.as_millis() as u64;
    let state = "waiting for clients of both classes".into();
    Rc::new(RefCell::new(RefreshStatus { every_ms, state, count: 0 }))
}

/// The program as it runs.
struct Running {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    answer_max: Duration,
}

impl Running {
    fn start(program: &Path) -> Result<Self, String> {
        let mut child = Command::new(program)
            .env(ENV_PIPE_DIRECTORY, NO_DAEMON)
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .process_group(0)
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => {
                Ok(Running { child, stdin, stdout, answer_max: FIRST_ANSWER_MAX })
            }
            _ => Err("it has no pipes".into()),
        }
    }

    /// Has the program make one change of context, and waits for its answer.
    async fn refresh(&mut self) -> Result<(), String> {
        let talk = async {
            self.stdin.write_all(b".").await?;
            self.stdin.flush().await?;
            self.stdout.read_u8().await
        };
        match tokio::time::timeout(self.answer_max, talk).await {
            Ok(Ok(_)) => {
                self.answer_max = ANSWER_MAX;
                Ok(())
            }
            Ok(Err(_)) => Err(self.last_words().await),
            Err(_) => Err(format!("no answer within {} s", self.answer_max.as_secs())),
        }
    }

    async fn last_words(&mut self) -> String {
        let mut words = Vec::new();
        if let Some(stderr) = self.child.stderr.take() {
            let mut stderr = stderr.take(WORDS_MAX);
            let all = stderr.read_to_end(&mut words);
            let _ = tokio::time::timeout(ANSWER_MAX, all).await;
        }
        let words = String::from_utf8_lossy(&words);
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        if words.is_empty() { "it ended".into() } else { format!("it ended: {words}") }
    }
}

/// Where the program is if nothing is configured.
fn beside_the_core() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.with_file_name(PROGRAM)
}

/// Go on until it fails, or the task is dropped. `is_wanted`: there are clients of both classes.
pub async fn keep(program: Option<PathBuf>, shown: Shown, is_wanted: impl Fn() -> bool) {
    let program = program.unwrap_or_else(beside_the_core);
    let every = Duration::from_millis(shown.borrow().every_ms);
    let mut running: Option<Running> = None;
    loop {
        tokio::time::sleep(every).await;
        if !is_wanted() {
            // Its context takes memory of the GPU.
            running = None;
            "waiting for clients of both classes".clone_into(&mut shown.borrow_mut().state);
            continue;
        }
        let outcome = match running.take().map_or_else(|| Running::start(&program), Ok) {
            Ok(mut it) => it.refresh().await.map(|()| it),
            Err(why) => Err(why),
        };
        match outcome {
            Ok(it) => {
                running = Some(it);
                let mut shown = shown.borrow_mut();
                shown.count += 1;
                "running".clone_into(&mut shown.state);
            }
            Err(why) => {
                tracing::warn!("contexts are not refreshed any more: {why}");
                shown.borrow_mut().state = format!("failed: {why}");
                return;
            }
        }
    }
}
