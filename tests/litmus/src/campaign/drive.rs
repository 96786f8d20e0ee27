//! Runs a list of programs in processes of their own, and says how each ended, whatever the
//! processes do.

use crate::model::Values;
use crate::program::{Device, Program};
use crate::run::serve::{Line, Runs};
use anyhow::{Context, Result, bail};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tally_harness::{Process, Scene};

/// How much longer than a program may take a process may be silent: it starts in between.
const SILENCE: Duration = Duration::from_secs(40);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It ended and left these words.
    Ended(Values),
    /// It did not end; what its threads were doing.
    Hung(Vec<String>),
    /// A call failed, or the process ended.
    Failed(String),
    /// The campaign's time was over before the program could run.
    NotRun,
}

/// Where programs run, and for how long.
pub struct Driver<'a> {
    pub scene: &'a Scene,
    /// Seconds that a program may take.
    pub limit_s: f64,
    /// Percent of the loops that kernels are to spin.
    pub work_percent: u32,
    /// When to stop beginning programs.
    pub until: Instant,
    /// The list ends at a hang: what ends a process may harm others that share the GPU with it.
    pub stops_at_hang: bool,
    /// Hangs after which the rest is not run, over all lists.
    pub hangs_left: Cell<usize>,
}

/// Processes that run a program together: one, or two.
struct Group {
    processes: Vec<Process>,
}

impl Driver<'_> {
    /// Runs programs of one environment in order, all or the first ones. `govern` makes a client of each command;
    /// `ended` is told of processes that have ended, by their ids.
    ///
    /// # Errors
    /// If processes cannot be started.
    pub fn run(
        &self,
        programs: &[&Program],
        govern: &dyn Fn(Command) -> Result<Command>,
        ended: &mut dyn FnMut(&[u32]),
    ) -> Result<(Vec<Outcome>, Option<Device>)> {
        let mut outcomes: Vec<Outcome> = Vec::new();
        let mut device = None;
        let file = self.write(programs)?;
        while outcomes.len() < programs.len() {
            if Instant::now() > self.until || self.hangs_left.get() == 0 {
                outcomes.resize(programs.len(), Outcome::NotRun);
                break;
            }
            let (mut group, found) = self.start(programs[0], &file, outcomes.len(), govern)?;
            device = Some(found);
            let before = outcomes.len();
            self.follow(&mut group, programs, &mut outcomes)?;
            let hung = outcomes[before..].iter().filter(|o| matches!(o, Outcome::Hung(_))).count();
            self.hangs_left.set(self.hangs_left.get().saturating_sub(hung));
            let pids: Vec<u32> = group.processes.iter().map(Process::pid).collect();
            drop(group);
            ended(&pids);
            if hung > 0 && self.stops_at_hang {
                break;
            }
        }
        Ok((outcomes, device))
    }

    fn write(&self, programs: &[&Program]) -> Result<PathBuf> {
        let file = tempfile::Builder::new().suffix(".jsonl").tempfile_in(self.scene.dir())?;
        let lines: Result<Vec<String>, _> = programs.iter().map(serde_json::to_string).collect();
        std::fs::write(file.path(), lines?.join("\n") + "\n")?;
        Ok(file.into_temp_path().keep()?)
    }

    fn start(
        &self,
        like: &Program,
        file: &Path,
        first: usize,
        govern: &dyn Fn(Command) -> Result<Command>,
    ) -> Result<(Group, Device)> {
        let pair = like.environment.pair;
        let shared = tempfile::Builder::new().prefix("tally-litmus-").tempfile_in("/dev/shm")?;
        let shared = shared.into_temp_path();
        let mut processes = Vec::new();
        for process in 0..1 + usize::from(pair) {
            let mut command = self.scene.program("tally-litmus")?;
            command.arg("run").arg(file).arg(format!("--first={first}"));
            command.arg(format!("--limit={}", self.limit_s));
            command.arg(format!("--work-percent={}", self.work_percent));
            if pair {
                command.arg(format!("--process={process}")).arg("--shared").arg(&shared);
            }
            command.envs(like.environment.variables());
            // Of the software device: a handle that is gone ends the program, as it may on a GPU.
            command.env("TALLY_SOFTCUDA_STRICT", "1");
            processes.push(self.scene.start("litmus", govern(command)?)?);
        }
        // Both have mapped the file when they have the device.
        let mut device = None;
        for process in &mut processes {
            match serde_json::from_value(process.hear(SILENCE)?)? {
                Line::Ready(found) => device = Some(found),
                other => bail!("it said {other:?}"),
            }
        }
        Ok((Group { processes }, device.context("no process")?))
    }

    /// Listens until all programs have run, or the processes are of no use any more.
    fn follow(
        &self,
        group: &mut Group,
        programs: &[&Program],
        outcomes: &mut Vec<Outcome>,
    ) -> Result<()> {
        while outcomes.len() < programs.len() {
            let number = outcomes.len();
            let heard =
                group.processes.iter_mut().map(|process| self.hear(process, number)).collect();
            let outcome = merged(programs[number], heard);
            let is_over = !matches!(outcome, Outcome::Ended(_));
            let outcome = match outcome {
                Outcome::Hung(mut at) => {
                    at.extend(self.seen_by_the_core(group));
                    Outcome::Hung(at)
                }
                other => other,
            };
            outcomes.push(outcome);
            if is_over || Instant::now() > self.until {
                group.processes.iter_mut().for_each(|process| drop(process.kill()));
                return Ok(());
            }
        }
        for process in &mut group.processes {
            process.wait(SILENCE).context("all programs have ended, but not the process")?;
        }
        Ok(())
    }

    /// What the core says of processes that hang, now and a while later: what changes in between still moves. Nothing
    /// without a core.
    fn seen_by_the_core(&self, group: &Group) -> Vec<String> {
        let look = || {
            let Ok(Ok(clients)) = self.scene.status().map(|status| status.clients()) else {
                return Vec::new();
            };
            let is_ours = |client: &&tally_harness::status::Client| {
                let pid = client.0["pid"].as_u64().unwrap_or_default();
                group.processes.iter().any(|process| u64::from(process.pid()) == pid)
            };
            clients.iter().filter(is_ours).map(|client| client.0.to_string()).collect()
        };
        let mut seen: Vec<String> = look();
        if !seen.is_empty() {
            std::thread::sleep(Duration::from_secs(1));
            seen.extend(look());
        }
        seen
    }

    /// What one process says of a program.
    fn hear(&self, process: &mut Process, number: usize) -> Line {
        let limit = Duration::from_secs_f64(self.limit_s) + SILENCE;
        loop {
            let line = process.hear(limit).and_then(|said| Ok(serde_json::from_value(said)?));
            match line {
                Ok(Line::Begin(_) | Line::Ready(_)) => {}
                Ok(line) => return line,
                Err(why) => return Line::Failed(number, format!("{why:#}")),
            }
        }
    }
}

/// How a program ended, by what its processes said.
fn merged(program: &Program, heard: Vec<Line>) -> Outcome {
    let mut device = vec![Vec::new(); program.contexts.len()];
    let mut host = Vec::new();
    let mut hung = Vec::new();
    let mut failed = None;
    for (process, line) in heard.into_iter().enumerate() {
        match line {
            Line::End(_, values, words) => {
                for (context, words) in values.iter().enumerate() {
                    if let Some(words) = words {
                        device[context] = words.words();
                    }
                }
                if process == 0 {
                    host = words.words();
                }
            }
            Line::Hung(_, at) => hung.extend(at),
            Line::Failed(_, why) => failed = failed.or(Some(why)),
            Line::Ready(_) | Line::Begin(_) => {}
        }
    }
    match failed {
        Some(why) if hung.is_empty() => Outcome::Failed(why),
        _ if !hung.is_empty() => Outcome::Hung(hung),
        _ => Outcome::Ended((device, host)),
    }
}

/// Where two values differ, for people.
pub fn difference(expected: &Values, got: &Values) -> Option<String> {
    let words =
        |values: &Values, context: usize| values.0.get(context).cloned().unwrap_or_default();
    for context in 0..expected.0.len() {
        let (wanted, found) = (words(expected, context), words(got, context));
        if wanted != found {
            return Some(format!("context {context}: {}", first_difference(&wanted, &found)));
        }
    }
    (expected.1 != got.1).then(|| format!("host: {}", first_difference(&expected.1, &got.1)))
}

fn first_difference(wanted: &[u32], found: &[u32]) -> String {
    let at =
        wanted.iter().zip(found).position(|(a, b)| a != b).unwrap_or(wanted.len().min(found.len()));
    let end = |words: &[u32]| {
        Runs::of(&words[at.min(words.len())..]).0.into_iter().take(4).collect::<Vec<_>>()
    };
    format!("from word {at} on {:?} in place of {:?}", end(found), end(wanted))
}
