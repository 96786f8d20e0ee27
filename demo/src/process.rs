//! Children that cannot hang a test or outlive it: output goes to files, every
//! wait has a limit, and dropping kills the whole process group.

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often a waiting harness looks.
const POLL: Duration = Duration::from_millis(5);
/// End of a captured output that an error message quotes.
const QUOTED_BYTES_MAX: usize = 3_000;

/// Looks until `ready` gives a value.
///
/// # Errors
/// `what` did not happen within `limit`, or `ready` failed.
pub fn wait_until<T>(
    what: &str,
    limit: Duration,
    mut ready: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        ensure!(began.elapsed() < limit, "{what}: nothing for {limit:?}");
        std::thread::sleep(POLL);
    }
}

/// A running program with its output captured.
pub struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: PathBuf,
    stderr: PathBuf,
    /// Bytes of standard output that were read as lines already.
    read_bytes: u64,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` in a process group of its own; its output goes to
    /// `<name>.out` and `<name>.err` in `dir`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, dir: &Path, command: &mut Command) -> Result<Self> {
        let stdout = dir.join(format!("{name}.out"));
        let stderr = dir.join(format!("{name}.err"));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(File::create(&stdout)?)
            .stderr(File::create(&stderr)?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let stdin = child.stdin.take();
        Ok(Self { name: name.into(), child, stdin, stdout, stderr, read_bytes: 0, ended: None })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to it alone.
    ///
    /// # Errors
    /// If it is gone.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        ensure!(self.poll()?.is_none(), "{} has ended already", self.name);
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("signalling {}", self.name))
    }

    /// Kills it without notice (SIGKILL) and collects it. No error if it has
    /// ended by itself.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        if self.poll()?.is_none() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            self.ended = Some(self.child.wait()?);
        }
        Ok(())
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If it has not ended within `limit`; the message quotes its output.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        drop(self.stdin.take());
        let began = Instant::now();
        loop {
            if let Some(status) = self.poll()? {
                return Ok(status);
            }
            if began.elapsed() > limit {
                bail!("{} still runs after {limit:?}\n{}", self.name, self.quote());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits for a good end and reads the last line of its output as JSON.
    ///
    /// # Errors
    /// If it hangs, ends badly or prints no JSON.
    pub fn finish(&mut self, limit: Duration) -> Result<serde_json::Value> {
        let status = self.wait(limit)?;
        ensure!(status.success(), "{} ended with {status}\n{}", self.name, self.quote());
        let out = self.stdout()?;
        let last = out.lines().last().unwrap_or_default();
        serde_json::from_str(last)
            .with_context(|| format!("{} printed no JSON\n{}", self.name, self.quote()))
    }

    /// Whether SIGKILL ended it.
    pub fn was_killed(&self) -> bool {
        self.ended.and_then(|status| status.signal()) == Some(Signal::KILL.as_raw())
    }

    /// Writes a line to its standard input.
    ///
    /// # Errors
    /// If it no longer reads.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("its standard input is closed")?;
        writeln!(stdin, "{line}").with_context(|| format!("telling {} {line:?}", self.name))
    }

    /// The next line of its standard output, as JSON.
    ///
    /// # Errors
    /// If none comes within `limit`, or it ends before.
    pub fn hear(&mut self, limit: Duration) -> Result<serde_json::Value> {
        let began = Instant::now();
        loop {
            let ended = self.poll()?.is_some();
            let mut file = BufReader::new(File::open(&self.stdout)?);
            std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(self.read_bytes))?;
            let mut line = String::new();
            file.read_line(&mut line)?;
            if line.ends_with('\n') {
                self.read_bytes += line.len() as u64;
                return serde_json::from_str(&line)
                    .with_context(|| format!("{} said {line:?}", self.name));
            }
            ensure!(!ended, "{} ended without an answer\n{}", self.name, self.quote());
            if began.elapsed() > limit {
                bail!("{} does not answer for {limit:?}\n{}", self.name, self.quote());
            }
            std::thread::sleep(POLL);
        }
    }

    /// The whole lines of its standard output that were not read yet.
    ///
    /// # Errors
    /// If its output cannot be read.
    pub fn lines(&mut self) -> Result<Vec<String>> {
        let mut file = File::open(&self.stdout)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(self.read_bytes))?;
        let mut text = String::new();
        std::io::Read::read_to_string(&mut file, &mut text)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        self.read_bytes += whole as u64;
        Ok(text[..whole].lines().map(str::to_owned).collect())
    }

    /// What it printed to standard output so far.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn stdout(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(&self.stdout)?).into_owned())
    }

    /// What it printed to standard error so far.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn stderr(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(&self.stderr)?).into_owned())
    }

    /// The end of both outputs, for messages.
    pub fn quote(&self) -> String {
        let end = |text: Result<String>| {
            let text = text.unwrap_or_default();
            let mut from = text.len().saturating_sub(QUOTED_BYTES_MAX);
            while !text.is_char_boundary(from) {
                from += 1;
            }
            text[from..].trim_end().to_owned()
        };
        format!(
            "--- {0}, standard output:\n{1}\n--- {0}, standard error:\n{2}",
            self.name,
            end(self.stdout()),
            end(self.stderr())
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
        // What it may have started itself.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }
}
