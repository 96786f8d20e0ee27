//! A process that runs programs one after the other and says how each ended.
//!
//! It reads programs as JSON, one a line, from a file, and prints JSON lines: one for the
//! device, one as each program begins, and one as it ends. A program that does not end in
//! time, or fails, ends the process: nobody could say what state the device is in.

use super::{Machine, Run, lock};
use crate::program::{Device, Op, Program};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How a process ends when a program hung, or a call failed.
pub const HUNG: i32 = 5;
pub const FAILED: i32 = 4;
/// Threads that a program has at most.
const THREADS_MAX: usize = 64;
/// Where processes of a pair count who has come, in the last flags.
const MEETINGS: usize = 3;

/// A line that the process prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The process has opened the device.
    Ready(Device),
    /// The program of that number begins.
    Begin(usize),
    /// It has ended: the words of each context of this process, and of the host.
    End(usize, Vec<Option<Runs>>, Runs),
    /// The program did not end; what its threads are doing.
    Hung(usize, Vec<String>),
    /// A call of the program of that number failed, and why.
    Failed(usize, String),
}

/// How long a process that hangs stays.
const STAY: Duration = Duration::from_secs(5);

/// Words, as values and how often each comes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runs(pub Vec<(u32, u32)>);

impl Runs {
    pub fn of(words: &[u32]) -> Self {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &word in words {
            match runs.last_mut() {
                Some((value, count)) if *value == word => *count += 1,
                _ => runs.push((word, 1)),
            }
        }
        Self(runs)
    }

    pub fn words(&self) -> Vec<u32> {
        self.0
            .iter()
            .flat_map(|&(value, count)| std::iter::repeat_n(value, count as usize))
            .collect()
    }
}

/// Prints a line at once; whoever reads it may be waiting.
fn say(line: &Line) {
    let mut out = std::io::stdout().lock();
    let text = serde_json::to_string(line).unwrap_or_default();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Ends the process at once: threads of it may be stuck in the driver.
fn leave(code: i32) -> ! {
    // SAFETY: ends the process; no destructor is needed.
    unsafe { libc::_exit(code) }
}

/// The program that runs, for [`fail`].
static RUNNING: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Says that a call of the program failed, and ends the process: other threads may wait for what
/// will never come.
pub(super) fn fail(why: String) -> ! {
    say(&Line::Failed(RUNNING.load(SeqCst), why));
    leave(FAILED);
}

/// Waits for the other process of a pair, `step` of a program's three times. Leaves the
/// counters as they were for the next program.
pub(super) fn meet(machine: &Machine, program: &Program, step: usize) {
    if !program.environment.pair {
        return;
    }
    let counter = |step: usize| machine.host.flag(super::memory::FLAGS - 1 - step % MEETINGS);
    // Nobody can be at the step before the last any more.
    counter(step + 1).store(0, SeqCst);
    counter(step).fetch_add(1, SeqCst);
    while counter(step).load(SeqCst) < 2 {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Which program runs, and until when it may.
struct Watch {
    running: Mutex<Option<usize>>,
    changed: Condvar,
    at: Vec<AtomicUsize>,
    process: u8,
}

/// Runs the programs of a file, from number `first` on.
///
/// # Errors
/// If there is no device, or the file cannot be read.
pub fn serve(
    machine: &'static Machine,
    file: &Path,
    first: usize,
    limit: Duration,
) -> anyhow::Result<()> {
    let lines = std::io::BufReader::new(std::fs::File::open(file)?).lines();
    let programs: Vec<Program> =
        lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect::<anyhow::Result<_>>()?;
    let at = (0..THREADS_MAX).map(|_| AtomicUsize::new(0)).collect();
    // For ever: threads of a program are not bound to any scope.
    let programs: &'static [Program] = programs.leak();
    let watch: &'static Watch = Box::leak(Box::new(Watch {
        running: Mutex::new(None),
        changed: Condvar::new(),
        at,
        process: machine.process,
    }));
    say(&Line::Ready(machine.device));
    std::thread::scope(|scope| {
        scope.spawn(|| watch.over(programs, limit));
        for (number, program) in programs.iter().enumerate().skip(first) {
            say(&Line::Begin(number));
            watch.at.iter().for_each(|at| at.store(0, SeqCst));
            RUNNING.store(number, SeqCst);
            watch.set(Some(number));
            match Run::values(machine, program, &watch.at) {
                Ok((values, host)) => {
                    watch.set(None);
                    let values = values.iter().map(|v| v.as_deref().map(Runs::of)).collect();
                    say(&Line::End(number, values, Runs::of(&host)));
                }
                Err(why) => fail(why),
            }
        }
        watch.set(Some(usize::MAX));
    });
    Ok(())
}

impl Watch {
    fn set(&self, running: Option<usize>) {
        *lock(&self.running) = running;
        self.changed.notify_all();
    }

    /// Ends the process if a program runs for longer than `limit`; returns when all have run.
    fn over(&self, programs: &[Program], limit: Duration) {
        let mut running = lock(&self.running);
        loop {
            let seen = *running;
            if seen == Some(usize::MAX) {
                return;
            }
            let wait = if seen.is_some() { limit } else { Duration::from_secs(3600) };
            let waited = self.changed.wait_timeout(running, wait);
            let (next, out) = waited.unwrap_or_else(PoisonError::into_inner);
            running = next;
            if let Some(number) = seen
                && out.timed_out()
                && *running == seen
            {
                let mut at = self.where_all_are(&programs[number]);
                at.extend(super::stacks::of_other_threads());
                say(&Line::Hung(number, at));
                // Until it is killed: the core is asked about it before.
                std::thread::sleep(STAY);
                leave(HUNG);
            }
        }
    }

    fn where_all_are(&self, program: &Program) -> Vec<String> {
        let threads = program.threads.iter().zip(&self.at).enumerate();
        let own = threads.filter(|(_, (thread, _))| thread.process == self.process);
        let at = own.map(|(t, (thread, at))| {
            let at = at.load(SeqCst);
            match thread.ops.get(at) {
                Some(op @ Op::Join { .. }) => format!("thread {t} at {at}: {op}"),
                Some(op) => format!("thread {t} at {at}: {op}"),
                None => format!("thread {t} has ended"),
            }
        });
        at.collect()
    }
}
