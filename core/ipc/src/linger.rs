//! Closing descriptors that another party sent, without waiting for it.
//!
//! The last close of a socket with `SO_LINGER` waits for the other end, unless the thread that closes it is ending. So
//! another thread gets a table of descriptors of its own, with a copy of each. What is closed then is not the last
//! copy, and returns at once; the last one goes with that thread. This holds for what waits in a closed socket, too.
//!
//! When such a thread ends it closes its copies of all other descriptors as well. A file of a file system that does not
//! answer may hold it up: nobody waits for it for long, and a few such threads are all that there may be.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Threads that have not ended: more than there are that close. With so many, closes may wait.
const THREADS_MAX: usize = 128;
/// Longest time that a thread keeps its copies, and that is waited for its end.
const KEPT_MAX: Duration = Duration::from_secs(1);
/// Longest pause between two looks at whether a thread has ended.
const LOOK_MAX: Duration = Duration::from_millis(20);

/// Where the system shows the threads that have not ended.
static THREADS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Starts a thread that has copies of all descriptors until the sender is dropped; where it is shown. `None` if there
/// are too many, or the system refuses it, as filters of system calls may.
fn keep_copies() -> Option<(PathBuf, mpsc::Sender<()>)> {
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    threads.retain(|thread| thread.exists());
    if threads.len() >= THREADS_MAX {
        return None;
    }
    let (told, thread) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let keeps = move || {
        // SAFETY: only this thread's table changes. It has all that the process had, under the same numbers, and this
        // thread uses none of it.
        if unsafe { libc::unshare(libc::CLONE_FILES) } == 0 {
            let _ = told.send(rustix::thread::gettid());
            // An error, once all that is to be closed is.
            let _ = ended.recv_timeout(KEPT_MAX);
        }
    };
    std::thread::Builder::new()
        .name("tally-close".into())
        .stack_size(64 << 10)
        .spawn(keeps)
        .ok()?;
    let thread = thread.recv().ok()?;
    let place = PathBuf::from(format!("/proc/self/task/{}", thread.as_raw_nonzero()));
    threads.push(place.clone());
    Some((place, end))
}

/// Does `close`, in which no close waits for the other end of a socket, and waits until what was closed is gone. For a
/// thread that may wait: where this cannot be had, closes take as long as ever, as do files of a file system that does
/// not answer.
pub fn without<T>(close: impl FnOnce() -> T) -> T {
    let copies = keep_copies();
    let done = close();
    if let Some((place, end)) = copies {
        drop(end);
        let (start, mut pause) = (Instant::now(), Duration::from_micros(50));
        while place.exists() && start.elapsed() < KEPT_MAX {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOK_MAX);
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::{AsFd, OwnedFd};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    const MINUTE: Duration = Duration::from_secs(60);

    /// The end of a connection whose last close waits a minute: its buffer is full, and nobody reads.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        here.set_nonblocking(true).unwrap();
        while here.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&here, Some(MINUTE)).unwrap();
        (here.into(), there)
    }

    /// The other end is told that it was closed.
    fn see_that_closed(mut there: TcpStream) {
        there.set_read_timeout(Some(MINUTE / 2)).unwrap();
        let (start, mut bytes) = (Instant::now(), vec![0; 1 << 20]);
        while there.read(&mut bytes).unwrap() > 0 {
            assert!(start.elapsed() < MINUTE / 2, "it is closed");
        }
    }

    #[test]
    fn a_socket_that_lingers_is_closed_at_once() {
        let (here, there) = lingering();
        let start = Instant::now();
        let done = without(|| {
            drop(here);
            7
        });
        assert!(done == 7 && start.elapsed() < MINUTE / 2, "{:?}", start.elapsed());
        see_that_closed(there);
    }

    #[test]
    fn threads_that_close_at_the_same_time_wait_for_nothing() {
        let start = Instant::now();
        let there: Vec<_> = std::thread::scope(|scope| {
            let close = || {
                let (here, there) = lingering();
                without(|| drop(here));
                there
            };
            let closing: Vec<_> = (0..12).map(|_| scope.spawn(close)).collect();
            closing.into_iter().map(|closing| closing.join().unwrap()).collect()
        });
        assert!(start.elapsed() < MINUTE / 2, "{:?}", start.elapsed());
        there.into_iter().for_each(see_that_closed);
    }

    #[test]
    fn so_is_one_that_was_sent_and_not_received() {
        let ((here, there), (sends, keeps)) = (lingering(), UnixStream::pair().unwrap());
        crate::wire::send(sends.as_fd(), b"x", &[here.as_fd()]).unwrap();
        drop((here, sends));
        let start = Instant::now();
        without(|| drop(keeps));
        assert!(start.elapsed() < MINUTE / 2, "{:?}", start.elapsed());
        see_that_closed(there);
    }
}
