//! Where the threads of this process are, for the report of a program that does not end.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

const DEPTH_MAX: usize = 48;
const THREADS_MAX: usize = 64;
/// The frames below are not known yet.
const UNKNOWN: usize = usize::MAX;
/// How long a thread has to say where it is: one that blocks signals, or is in a system call that cannot be
/// interrupted, does not.
const WAIT_MAX: Duration = Duration::from_millis(50);

static FRAMES: [AtomicUsize; DEPTH_MAX] = [const { AtomicUsize::new(0) }; DEPTH_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(UNKNOWN);

extern "C" fn note(_: c_int) {
    let mut frames = [std::ptr::null_mut::<c_void>(); DEPTH_MAX];
    // SAFETY: an array of that length.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), DEPTH_MAX as c_int) };
    for (to, from) in FRAMES.iter().zip(frames) {
        to.store(from as usize, SeqCst);
    }
    COUNT.store(usize::try_from(count).unwrap_or(0), SeqCst);
}

/// A line for each other thread: its name and its frames, the innermost first. Only in a process that ends soon: system
/// calls of its threads are interrupted.
pub fn of_other_threads() -> Vec<String> {
    let handler: extern "C" fn(c_int) = note;
    // The first call loads a library, which a handler must not.
    let mut frames = [std::ptr::null_mut::<c_void>(); 1];
    // SAFETY: an array of that length.
    unsafe { libc::backtrace(frames.as_mut_ptr(), 1) };
    // SAFETY: the handler walks the stack and stores into statics.
    unsafe { libc::signal(libc::SIGPROF, handler as libc::sighandler_t) };
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let threads = tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse::<i32>().ok());
    threads.filter(|thread| *thread != me).take(THREADS_MAX).map(of_thread).collect()
}

fn of_thread(thread: i32) -> String {
    let name =
        std::fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
    COUNT.store(UNKNOWN, SeqCst);
    // SAFETY: sends a signal that has a handler to a thread of this process.
    unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, libc::SIGPROF) };
    let start = Instant::now();
    while COUNT.load(SeqCst) == UNKNOWN && start.elapsed() < WAIT_MAX {
        std::thread::sleep(Duration::from_millis(1));
    }
    let frames = match COUNT.load(SeqCst) {
        UNKNOWN => vec!["it does not answer".into()],
        count => FRAMES.iter().take(count).map(|frame| place(frame.load(SeqCst))).collect(),
    };
    format!("{}: {}", name.trim_end(), frames.join(" < "))
}

/// File and function of an address, as far as symbols tell.
fn place(address: usize) -> String {
    // SAFETY: all zeros are valid; the out-pointer is.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: as above; any address may be asked for.
    let found = unsafe { libc::dladdr(address as *const c_void, &mut info) } != 0;
    let text = |pointer: *const std::ffi::c_char| {
        // SAFETY: strings of the loader, which live as long as the file is loaded.
        (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy())
    };
    let (true, Some(file)) = (found, text(info.dli_fname)) else { return format!("{address:#x}") };
    let file = file.rsplit('/').next().unwrap_or_default().to_owned();
    let offset = address - info.dli_fbase as usize;
    match text(info.dli_sname) {
        Some(symbol) => format!("{file}+{offset:#x} {symbol}"),
        None => format!("{file}+{offset:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_is_told_with_its_frames() {
        let (send, wait) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let waits = move || {
            begun.send(()).unwrap();
            let _ = wait.recv();
        };
        let thread = std::thread::Builder::new().name("it-waits".into()).spawn(waits).unwrap();
        has_begun.recv().unwrap();
        let told = of_other_threads();
        let line = told.iter().find(|line| line.starts_with("it-waits: "));
        assert!(line.is_some_and(|line| line.matches(" < ").count() >= 3), "{told:#?}");
        drop(send);
        thread.join().unwrap();
    }
}
