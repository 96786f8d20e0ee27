//! Threads of the shim's own: small, and deaf to the program's signals.

use crate::objects;
use rustix::thread::futex;
use std::ffi::{CString, c_int, c_void};
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// The driver runs on these stacks now and then.
pub const STACK_BYTES: usize = 512 * 1024;
/// Of a thread that has the driver compile code, which recurses. Only what is used of it
/// takes memory.
pub const STACK_BYTES_COMPILING: usize = 16 << 20;

/// Start one.
///
/// # Errors
/// The system's.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    spawn_with(name, STACK_BYTES, run)
}

/// Start one that never allocates: whatever does has an arena of its own, and with the ninth glibc opens a file, which
/// a program may have forbidden since.
///
/// # Errors
/// The system's.
pub fn spawn_plain(run: extern "C" fn(*mut c_void) -> *mut c_void) -> io::Result<()> {
    start(STACK_BYTES, run, null_mut())
}

fn start(
    stack_bytes: usize,
    run: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> io::Result<()> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    // The C library takes what is thread-local out of the stack.
    let stack_bytes = (stack_bytes + objects::thread_local_bytes()).next_multiple_of(4096);
    let mut thread = std::mem::MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: everything is filled before it is used; the new thread inherits the mask, and this thread gets its own
    // back.
    let error = unsafe {
        libc::pthread_attr_init(attributes.as_mut_ptr());
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack_bytes);
        libc::sigfillset(all.as_mut_ptr());
        let masked = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr()) == 0;
        let error = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), run, argument);
        if masked {
            libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), null_mut());
        }
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        error
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// What a thread of ours runs, and its name.
type Start = (CString, Box<dyn FnOnce() + Send>);

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: from `spawn_with`.
    let (name, run) = *unsafe { Box::from_raw(start.cast::<Start>()) };
    // SAFETY: a name with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    // Ends this thread, and not the program.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    null_mut()
}

/// Start one with such a stack. Not as the standard library does: the calling thread, which may be the program's,
/// would wait for the loader, and whoever runs a library's constructors may wait for that thread.
///
/// # Errors
/// The system's.
pub fn spawn_with(
    name: &str,
    stack_bytes: usize,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let start: Box<Start> = Box::new((CString::new(name)?, Box::new(run)));
    let start = Box::into_raw(start);
    self::start(stack_bytes, self::run, start.cast()).inspect_err(|_| {
        // SAFETY: nobody else has it.
        drop(unsafe { Box::from_raw(start) });
    })
}

/// Have the C library read now what its allocator reads once, in files: how many CPUs there are, when it needs a ninth
/// arena, and whether memory is overcommitted, when an arena but the first one shrinks. Threads of the shim cause both,
/// and by then a program may have forbidden to open files, or count on the lowest free descriptor.
pub fn settle_allocator() {
    /// `M_ARENA_TEST` of glibc: the number of arenas from which on it counts CPUs, and what that is otherwise.
    const ARENA_TEST: c_int = -7;
    const ARENAS: c_int = 8;
    /// Two threads have an arena at once: the second one's is the third of all.
    static WAIT: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
    extern "C" fn allocate(first: *mut c_void) -> *mut c_void {
        if first.is_null() {
            // SAFETY: memory of our own.
            unsafe { libc::free(std::hint::black_box(libc::malloc(64))) };
        } else {
            shrink_arena();
        }
        WAIT[0].fetch_add(1, SeqCst);
        let _ = futex::wake(&WAIT[0], futex::Flags::PRIVATE, 1);
        let most = futex::Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = futex::wait(&WAIT[1], futex::Flags::PRIVATE, 0, Some(&most));
        null_mut()
    }
    let is_set = |name| std::env::var_os(name).is_some();
    let is_chosen =
        ["GLIBC_TUNABLES", "MALLOC_ARENA_TEST", "MALLOC_ARENA_MAX"].into_iter().any(is_set);
    let count_from = |arenas| {
        if !is_chosen {
            // SAFETY: a number that the allocator looks at under its own lock.
            unsafe { libc::mallopt(ARENA_TEST, arenas) };
        }
    };
    WAIT.iter().for_each(|word| word.store(0, SeqCst));
    count_from(1);
    let marks = [std::ptr::dangling_mut(), null_mut()];
    let is_started = |mark: &&*mut c_void| start(STACK_BYTES, allocate, **mark).is_ok();
    let started = marks.iter().filter(is_started).count() as u32;
    let since = Instant::now();
    loop {
        let there = WAIT[0].load(SeqCst);
        if there >= started || since.elapsed() > Duration::from_secs(1) {
            break;
        }
        let most = futex::Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = futex::wait(&WAIT[0], futex::Flags::PRIVATE, there, Some(&most));
    }
    count_from(ARENAS);
    WAIT[1].store(1, SeqCst);
    let _ = futex::wake(&WAIT[1], futex::Flags::PRIVATE, 2);
}

/// Have the calling thread's arena grow, and shrink when all is freed. It shrinks if at least 128 KiB are free, or
/// twice the largest piece with a mapping of its own that the program has freed. It grows by 4 MiB and no more: memory
/// may be locked, or limited. Only an arena of the shim's that has grown by more may shrink for the first time later.
fn shrink_arena() {
    /// Far less than what has a mapping of its own.
    const PIECE_BYTES: usize = 16 << 10;
    const PIECES: usize = (4 << 20) / PIECE_BYTES;
    let mut pieces = [null_mut::<c_void>(); PIECES];
    // SAFETY: memory of our own, which is not used.
    pieces.iter_mut().for_each(|piece| *piece = unsafe { libc::malloc(PIECE_BYTES) });
    let pieces = std::hint::black_box(pieces);
    // SAFETY: from above, or null.
    pieces.into_iter().for_each(|piece| unsafe { libc::free(piece) });
}

/// Have the calling thread, one of the shim's own, wake when it is to: by default the system may take 50 us more.
pub fn wake_on_time() {
    // SAFETY: concerns the calling thread's timers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_usize) };
}
