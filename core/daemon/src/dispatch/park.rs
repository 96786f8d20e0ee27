//! Sleeping until a doorbell rings, the control plane asks, or it is time.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::mem::MaybeUninit;

/// Doorbells taken in after one sleep. More wait for the next one: the loop
/// looks at every client after any wake-up anyway.
const EVENTS_MAX: usize = 64;
/// Sleeping for less costs more than it saves.
const SLEEP_NS_MIN: u64 = 2_000;

/// An eventfd as all of the core's: never blocks, not inherited.
///
/// # Errors
/// The system call's.
pub fn eventfd() -> rustix::io::Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// The dispatch thread's place to sleep.
#[derive(Debug)]
pub struct Parker {
    epoll: OwnedFd,
}

impl Parker {
    /// An empty one.
    ///
    /// # Errors
    /// The system call's.
    pub fn new() -> rustix::io::Result<Self> {
        Ok(Parker { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Let the calling thread's short sleeps be short: the default slack of
    /// 50 us would double them.
    pub fn wake_on_time() {
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }

    /// Wake up when this eventfd is written. Edge-triggered, so that nobody has
    /// to read it: a client's doorbell is no input.
    ///
    /// # Errors
    /// The system call's.
    pub fn watch(&self, eventfd: impl AsFd) -> rustix::io::Result<()> {
        epoll::add(
            &self.epoll,
            eventfd,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )
    }

    pub fn forget(&self, eventfd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, eventfd);
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
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
        if matches!(poll(&mut fds, Some(&timeout)), Ok(n) if n > 0) {
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let _ = epoll::wait(&self.epoll, &mut events, Some(&now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_ring_before_or_during_the_sleep_ends_it_once() {
        let parker = Parker::new().unwrap();
        let bell = eventfd().unwrap();
        parker.watch(&bell).unwrap();
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
        let long = Duration::from_secs(20).as_nanos() as u64;
        let start = Instant::now();
        parker.sleep(long);
        assert!(start.elapsed() < Duration::from_secs(10));
        // Not read, yet a second ring is a second wake-up.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
            });
            parker.sleep(long);
        });
        assert!(start.elapsed() < Duration::from_secs(10));
        parker.sleep(1_000_000);
        parker.forget(&bell);
    }
}
