//! Sleeping until a doorbell rings, the control plane asks, or it is time.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Doorbells taken in after one sleep. More wait for the next one: the loop
/// looks at every client after any wake-up anyway.
const EVENTS_MAX: usize = 64;
/// Sleeping for less costs more than it saves.
const SLEEP_NS_MIN: u64 = 2_000;

/// An eventfd as all of the core's: never blocks, not inherited.
///
/// # Errors
/// The error of the system call that failed.
pub fn eventfd() -> rustix::io::Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// A client's doorbell, an eventfd, and before it what the dispatch thread watches in its place. The client has the
/// doorbell, too, and can have a hundred thousand threads' polls wait at it: whoever rings it then holds its lock for
/// milliseconds, and whoever stops watching it waits for that lock. An epoll instance of the core's own between the two
/// has a lock that is never held for long; it is closed by a helper thread.
///
/// # Errors
/// The error of the system call that failed.
pub fn doorbell() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (watched, doorbell) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, eventfd()?);
    watch(&watched, &doorbell)?;
    Ok((watched, doorbell))
}

/// Edge-triggered, so that nobody has to read it: a client's doorbell is no input.
fn watch(epoll: &OwnedFd, what: impl AsFd) -> rustix::io::Result<()> {
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(epoll, what, epoll::EventData::new_u64(0), flags)
}

/// What wakes the dispatch thread. Shared with the control thread, which adds doorbells: for instances of epoll within
/// each other the kernel has one lock for all processes.
#[derive(Clone, Debug)]
pub struct Bells(Arc<OwnedFd>);

impl Bells {
    /// Wake up when this rings.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub fn watch(&self, what: impl AsFd) -> rustix::io::Result<()> {
        watch(&self.0, what)
    }
}

/// The dispatch thread's place to sleep.
#[derive(Debug)]
pub struct Parker {
    epoll: Arc<OwnedFd>,
}

impl Parker {
    /// An empty one.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub fn new() -> rustix::io::Result<Self> {
        Ok(Parker { epoll: Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?) })
    }

    /// Let the calling thread's short sleeps be short: the default slack of
    /// 50 us would double them.
    pub fn wake_on_time() {
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }

    pub fn bells(&self) -> Bells {
        Bells(self.epoll.clone())
    }

    /// Not to wake up when this rings any more.
    pub fn forget(&self, what: impl AsFd) {
        let _ = epoll::delete(&*self.epoll, what);
    }

    /// Sleep for at most so long.
    pub fn sleep(&self, for_ns: u64) {
        if for_ns < SLEEP_NS_MIN {
            return;
        }
        // ppoll on the epoll descriptor and not epoll_wait: its time-out has
        // nanoseconds on every kernel.
        let timeout = Timespec {
            tv_sec: (for_ns / 1_000_000_000) as _,
            tv_nsec: (for_ns % 1_000_000_000) as _,
        };
        let mut fds = [PollFd::new(&*self.epoll, PollFlags::IN)];
        if matches!(poll(&mut fds, Some(&timeout)), Ok(n) if n > 0) {
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let _ = epoll::wait(&*self.epoll, &mut events, Some(&now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsRawFd;
    use std::time::{Duration, Instant};

    #[test]
    fn a_ring_before_or_during_the_sleep_ends_it_once() {
        let parker = Parker::new().unwrap();
        let (watched, bell) = doorbell().unwrap();
        parker.bells().watch(&watched).unwrap();
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
        let long = Duration::from_secs(20).as_nanos() as u64;
        let ring_during_a_sleep = || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
                });
                parker.sleep(long);
            });
        };
        let start = Instant::now();
        parker.sleep(long);
        assert!(start.elapsed() < Duration::from_secs(10));
        // Not read, yet a second ring is a second wake-up.
        ring_during_a_sleep();
        assert!(start.elapsed() < Duration::from_secs(10));
        // Drained by somebody else, it rings again.
        let mut count = [0; 8];
        rustix::io::read(&bell, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);
        parker.sleep(1_000_000);
        ring_during_a_sleep();
        assert!(start.elapsed() < Duration::from_secs(10));
        parker.forget(&watched);
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
        let start = Instant::now();
        parker.sleep(Duration::from_millis(50).as_nanos() as u64);
        assert!(start.elapsed() >= Duration::from_millis(50), "it is not heard any more");
    }

    /// Who polls a doorbell with a hundred thousand descriptors, and rings it, holds its lock for milliseconds.
    #[test]
    fn the_dispatch_thread_takes_no_lock_of_a_doorbell() {
        let parker = Parker::new().unwrap();
        let (watched, bell) = doorbell().unwrap();
        parker.bells().watch(&watched).unwrap();
        let targets = |epoll: &OwnedFd| {
            let path = format!("/proc/self/fdinfo/{}", epoll.as_raw_fd());
            let text = std::fs::read_to_string(path).unwrap();
            let lines = text.lines().filter_map(|line| line.strip_prefix("tfd:"));
            let number = |line: &str| line.split_whitespace().next().unwrap().parse().unwrap();
            lines.map(number).collect::<Vec<i32>>()
        };
        assert_eq!(targets(&parker.epoll), [watched.as_raw_fd()], "the parker's own");
        assert_eq!(targets(&watched), [bell.as_raw_fd()]);
        // What is left when the client has the doorbell, and the core what it watches.
        drop(watched);
        assert_eq!(targets(&parker.epoll), [0; 0]);
    }
}
