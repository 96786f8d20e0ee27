//! What cuts into launches, maybe held ones: signals, an exec, a reset of the device, the end of the program.

use super::{BLOCKS, Start};
use anyhow::{Context, Result, bail, ensure};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

const LAUNCHES: u32 = 400;
const SIGNAL_US: i64 = 700;
/// How long launches run before the program is left.
const BEFORE: Duration = Duration::from_millis(150);

impl Start {
    /// What each block of `each` has added to its word.
    fn expect_each(&self, wanted: u32) -> Result<()> {
        let mut found = vec![0_u32; BLOCKS as usize];
        // SAFETY: memory of ours of this size.
        unsafe {
            self.cuda.cuCtxSynchronize()?;
            self.cuda.cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), self.word, 4 * found.len())?;
        }
        let wrong = found.iter().filter(|word| **word != wanted).count();
        ensure!(
            wrong == 0,
            "{wrong} of {BLOCKS} words are not {wanted}, the first is {}",
            found[0]
        );
        Ok(())
    }

    fn clear(&self) -> Result<()> {
        // SAFETY: memory of ours.
        unsafe { self.cuda.cuMemsetD32_v2(self.word, 0, BLOCKS as usize) }?;
        // SAFETY: no arguments.
        Ok(unsafe { self.cuda.cuCtxSynchronize() }?)
    }

    /// Launches of two threads, each into a stream of its own, until told to stop.
    fn launch_beside(&self, stop: &AtomicBool, then: impl FnOnce() -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let stream = self.stream()?;
                scope.spawn(move || {
                    // SAFETY: the process's context.
                    let mut done = unsafe { self.cuda.cuCtxSetCurrent(self.context) };
                    while done.is_ok() && !stop.load(SeqCst) {
                        done = self.launch_of(self.each, BLOCKS, stream);
                    }
                });
            }
            std::thread::sleep(BEFORE);
            let done = then();
            stop.store(true, SeqCst);
            done
        })
    }
}

static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, SeqCst);
}

/// A handler without `SA_RESTART` runs all the time: every wait in a launch is interrupted.
pub fn signals() -> Result<()> {
    let start = Start::new()?;
    start.clear()?;
    // SAFETY: all zero is a valid action and a valid timer.
    let (mut action, mut timer) =
        unsafe { (std::mem::zeroed::<libc::sigaction>(), std::mem::zeroed::<libc::itimerval>()) };
    action.sa_sigaction = count as *const () as usize;
    timer.it_interval.tv_usec = SIGNAL_US;
    timer.it_value.tv_usec = SIGNAL_US;
    // SAFETY: a handler that is safe in signals, and valid pointers.
    let is_set = unsafe {
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()) == 0
            && libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) == 0
    };
    ensure!(is_set, "no timer");
    std::thread::scope(|scope| -> Result<()> {
        let launch = || -> Result<()> {
            // SAFETY: the process's context.
            unsafe { start.cuda.cuCtxSetCurrent(start.context) }?;
            let stream = start.stream()?;
            for n in 0..LAUNCHES {
                start.launch_of(start.each, BLOCKS, stream)?;
                if n % 16 == 0 {
                    // SAFETY: a stream of ours.
                    unsafe { start.cuda.cuStreamSynchronize(false, stream) }?;
                }
            }
            Ok(())
        };
        let other = scope.spawn(launch);
        launch()?;
        other.join().map_err(|_| anyhow::anyhow!("it panicked"))?
    })?;
    start.expect_each(2 * LAUNCHES)?;
    ensure!(SIGNALS.load(SeqCst) > 0, "no signal came");
    Ok(())
}

/// The device is reset, and used again.
pub fn reset() -> Result<()> {
    for round in 0..4 {
        let start = Start::new()?;
        start.clear()?;
        let stream = start.stream()?;
        for _ in 0..40 {
            start.launch_of(start.each, BLOCKS, stream)?;
        }
        start.expect_each(40).with_context(|| format!("round {round}"))?;
        // SAFETY: nothing of the context is used any more.
        unsafe {
            start.cuda.cuCtxSetCurrent(0)?;
            start.cuda.cuDevicePrimaryCtxReset_v2(0)?;
            // Whether the reset keeps the reference is not documented.
            let _ = start.cuda.cuDevicePrimaryCtxRelease_v2(0);
        }
    }
    Ok(())
}

/// The program becomes another one while its threads launch; `exec-again` is what it becomes.
pub fn exec() -> Result<()> {
    let start = Start::new()?;
    let become_another = || -> Result<()> {
        let this = std::env::current_exe()?;
        bail!(Command::new(this).args(["scenario", "exec-again"]).exec())
    };
    start.launch_beside(&AtomicBool::new(false), become_another)
}

/// What [`exec`] becomes: launches as any program.
pub fn exec_again() -> Result<()> {
    let start = Start::new()?;
    start.clear()?;
    let stream = start.stream()?;
    for _ in 0..40 {
        start.launch_of(start.each, BLOCKS, stream)?;
    }
    start.expect_each(40)
}

/// The program ends while its threads launch: in time, with its own code.
pub fn quit() -> Result<()> {
    let start = Start::new()?;
    start.launch_beside(&AtomicBool::new(false), || std::process::exit(0))
}

/// Children are forked while launches are under way, and end.
pub fn forked() -> Result<()> {
    let start = Start::new()?;
    start.clear()?;
    let stream = start.stream()?;
    for round in 1..=20_u32 {
        start.launch_of(start.each, BLOCKS, stream)?;
        // SAFETY: the child only ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child, without handlers.
            unsafe { libc::_exit(7) };
        }
        ensure!(child > 0, "no child in round {round}");
        let mut status = 0;
        // SAFETY: a child of ours and a valid pointer.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        ensure!(waited == child && libc::WEXITSTATUS(status) == 7, "the child: {status}");
    }
    start.expect_each(20)
}
