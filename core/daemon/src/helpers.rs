//! Helper threads: what a peer can make take as long as it likes is done here, not on the control thread.
//!
//! Closing, reading or examining a descriptor that a peer sent may block for ever: the last close of a socket
//! with `SO_LINGER` waits for the other end, and a file may be on a file system that the peer controls. When a
//! connection is closed, the kernel does the same with descriptors that nobody received. So the control thread
//! receives no descriptor ([`tally_ipc::frame::peek`]) and closes no connection that may hold one
//! ([`crate::control::connection`]).
//!
//! Sockets that linger are closed without waiting ([`tally_ipc::linger`]), where the system lets the core do that. What
//! hangs nevertheless hangs here: each user, and each container, has [`USER_MAX`] threads at most. Once these hang its
//! connections take no descriptors any more, so that it keeps out only itself.

use crate::quota::User;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tally_ipc::linger;
use tokio::sync::oneshot;

/// Threads that one user keeps busy.
pub const USER_MAX: usize = 8;
/// Threads that all users keep busy who are not trusted.
const OTHERS_MAX: usize = 64;
/// A thread that has been at one thing for so long counts as stuck.
const STUCK_AFTER: Duration = Duration::from_millis(500);
/// A thread ends that had nothing to do for so long.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Why a user's descriptors are not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelperError {
    #[error(
        "descriptors that {0} sent before cannot be read or closed: no further ones are taken until they are (end \
         what they belong to: sockets that linger, files of file systems that do not answer)"
    )]
    Stuck(User),
    #[error("a file could not be read within {} s", .0.as_secs_f64())]
    TooSlow(Duration),
    #[error("a helper thread panicked")]
    Panicked,
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Since when its threads are at their jobs.
    running: Vec<(u64, Instant)>,
    is_trusted: bool,
}

#[derive(Default)]
struct State {
    users: BTreeMap<User, Queue>,
    /// Threads that wait for a job or are about to.
    idle: usize,
    running_others: usize,
    jobs: u64,
}

impl State {
    fn may_run(&self, queue: &Queue) -> usize {
        let own = USER_MAX - queue.running.len();
        match queue.is_trusted {
            true => own,
            false => own.min(OTHERS_MAX.saturating_sub(self.running_others)),
        }
    }

    /// Jobs for which there should be a thread.
    fn ready(&self) -> usize {
        self.users.values().map(|queue| queue.jobs.len().min(self.may_run(queue))).sum()
    }

    fn next(&mut self) -> Option<(User, u64, Job)> {
        let waits = |queue: &Queue| !queue.jobs.is_empty() && self.may_run(queue) > 0;
        let user = *self.users.iter().find(|(_, queue)| waits(queue))?.0;
        let queue = self.users.get_mut(&user)?;
        let job = queue.jobs.pop_front()?;
        self.jobs += 1;
        queue.running.push((self.jobs, Instant::now()));
        self.running_others += usize::from(!queue.is_trusted);
        Some((user, self.jobs, job))
    }

    fn done(&mut self, user: User, number: u64) {
        let Some(queue) = self.users.get_mut(&user) else { return };
        queue.running.retain(|(running, _)| *running != number);
        self.running_others -= usize::from(!queue.is_trusted);
        if queue.running.is_empty() && queue.jobs.is_empty() {
            self.users.remove(&user);
        }
    }

    fn is_stuck(&self, user: User, is_trusted: bool) -> bool {
        let hangs = |queue: &Queue| {
            queue.running.iter().filter(|(_, since)| since.elapsed() > STUCK_AFTER).count()
        };
        let others = self.users.values().filter(|queue| !queue.is_trusted);
        self.users.get(&user).is_some_and(|queue| hangs(queue) >= USER_MAX)
            || (!is_trusted && others.map(hangs).sum::<usize>() >= OTHERS_MAX)
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads of all users.
#[derive(Clone, Default)]
pub struct Helpers(Arc<Shared>);

impl Helpers {
    /// The threads of this user.
    pub fn of(&self, user: User, is_trusted: bool) -> Helper {
        Helper { shared: self.0.clone(), user, is_trusted }
    }
}

fn work(shared: &Shared) {
    let mut state = shared.state();
    loop {
        state.idle -= 1;
        if let Some((user, number, job)) = state.next() {
            drop(state);
            // What it was to answer is told by the end of its channel.
            let _ = catch_unwind(AssertUnwindSafe(job));
            state = shared.state();
            state.done(user, number);
            state.idle += 1;
            continue;
        }
        state.idle += 1;
        let (back, waited) =
            shared.wake.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
        state = back;
        if waited.timed_out() && state.ready() == 0 {
            state.idle -= 1;
            return;
        }
    }
}

/// The threads of one user.
#[derive(Clone)]
pub struct Helper {
    shared: Arc<Shared>,
    user: User,
    is_trusted: bool,
}

impl std::fmt::Debug for Helper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Helper").field(&self.user).finish()
    }
}

impl Helper {
    fn run(&self, job: Job) {
        let mut state = self.shared.state();
        let queue = state.users.entry(self.user).or_default();
        queue.is_trusted |= self.is_trusted && queue.running.is_empty();
        queue.jobs.push_back(job);
        if state.ready() <= state.idle {
            drop(state);
            self.shared.wake.notify_one();
            return;
        }
        state.idle += 1;
        drop(state);
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("tally-helper".into());
        if thread.stack_size(256 << 10).spawn(move || work(&shared)).is_err() {
            // The job waits for a thread that is there, or for the next attempt.
            self.shared.state().idle -= 1;
        }
    }

    /// Whether further descriptors of the user can be taken.
    ///
    /// # Errors
    /// If its threads are stuck.
    pub fn has_room(&self) -> Result<(), HelperError> {
        match self.shared.state().is_stuck(self.user, self.is_trusted) {
            true => Err(HelperError::Stuck(self.user)),
            false => Ok(()),
        }
    }

    /// Have something done that takes a peer's descriptors, and wait for it, but not for ever.
    ///
    /// # Errors
    /// If it is not even begun because the user's threads are stuck, or takes too long.
    pub async fn ask<T: Send + 'static>(
        &self,
        within: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HelperError> {
        self.has_room()?;
        let (answer, answered) = oneshot::channel();
        self.run(Box::new(move || drop(answer.send(work()))));
        match tokio::time::timeout(within, answered).await {
            Ok(done) => done.map_err(|_| HelperError::Panicked),
            Err(_) => Err(HelperError::TooSlow(within)),
        }
    }

    /// Drop something that may hang.
    pub fn close(&self, what: impl Send + 'static) {
        self.run(Box::new(move || linger::without(|| drop(what))));
    }

    /// Drop something that may hang, and wait until it is gone.
    pub async fn closed(&self, what: impl Send + 'static) {
        let (done, is_done) = oneshot::channel();
        self.run(Box::new(move || {
            linger::without(|| drop(what));
            let _ = done.send(());
        }));
        // An error means that dropping it panicked: gone, too.
        let _ = is_done.await;
    }

    /// A descriptor that is closed by these threads.
    pub fn keep(&self, fd: OwnedFd) -> PeerFd {
        PeerFd { fd: Some(fd), helper: self.clone() }
    }
}

/// Close what a peer sent, on a helper thread: without waiting for the other end if it is a socket.
pub fn let_go(fd: OwnedFd) {
    // Fails for what is no socket.
    let _ = rustix::net::sockopt::set_socket_linger(&fd, None);
    // It may hold others.
    linger::without(|| drop(fd));
}

/// A descriptor that a peer sent. A helper thread closes it.
#[derive(Debug)]
pub struct PeerFd {
    /// `None` once a helper thread has taken it to close it.
    fd: Option<OwnedFd>,
    helper: Helper,
}

impl PeerFd {
    pub fn helper(&self) -> &Helper {
        &self.helper
    }

    /// Takes the descriptor out, for a thread that may wait when it closes it.
    pub fn into_inner(mut self) -> Option<OwnedFd> {
        self.fd.take()
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken only when it is dropped").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.helper.run(Box::new(move || let_go(fd)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const MOMENT: Duration = Duration::from_secs(20);

    /// Keeps threads busy until it is dropped.
    fn hang(helper: &Helper, times: usize) -> Vec<mpsc::Sender<()>> {
        let began = mpsc::channel();
        let hung = (0..times).map(|_| {
            let (end, ended) = mpsc::channel::<()>();
            let began = began.0.clone();
            helper.run(Box::new(move || {
                let _ = began.send(());
                let _ = ended.recv();
            }));
            end
        });
        let hung: Vec<_> = hung.collect();
        for _ in 0..times.min(USER_MAX) {
            began.1.recv_timeout(MOMENT).expect("each has a thread");
        }
        hung
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
    }

    #[test]
    fn one_whose_descriptors_hang_is_refused_and_others_are_served() {
        let helpers = Helpers::default();
        let (one, root) = (helpers.of(User::Uid(7), true), helpers.of(User::Uid(0), true));
        let hung = hang(&one, USER_MAX + 3);
        std::thread::sleep(STUCK_AFTER + Duration::from_millis(50));
        assert_eq!(block_on(one.ask(MOMENT, || 1)), Err(HelperError::Stuck(User::Uid(7))));
        assert_eq!(block_on(root.ask(MOMENT, || 2)), Ok(2));
        drop(hung);
        let start = Instant::now();
        while block_on(one.ask(MOMENT, || 3)) != Ok(3) {
            assert!(start.elapsed() < MOMENT, "it is served again");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn all_that_are_not_trusted_leave_threads_to_those_that_are() {
        let helpers = Helpers::default();
        let users = (0..OTHERS_MAX / USER_MAX).map(|uid| helpers.of(User::Uid(uid as u32), false));
        let hung: Vec<_> = users.map(|user| hang(&user, USER_MAX)).collect();
        let other = helpers.of(User::Containers, false);
        let (done, is_done) = mpsc::channel();
        other.run(Box::new(move || done.send(()).unwrap()));
        assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err(), "no thread is left");
        let trusted = helpers.of(User::Uid(1_000), true);
        assert_eq!(block_on(trusted.ask(MOMENT, || 1)), Ok(1));
        drop(hung);
        is_done.recv_timeout(MOMENT).expect("the next that is free");
    }

    #[test]
    fn what_takes_too_long_is_given_up_and_a_panic_is_told() {
        let helper = Helpers::default().of(User::Uid(1), false);
        let soon = Duration::from_millis(10);
        let slow = block_on(helper.ask(soon, || std::thread::sleep(Duration::from_millis(200))));
        assert_eq!(slow, Err(HelperError::TooSlow(soon)));
        let panics: Result<(), _> = block_on(helper.ask(MOMENT, || panic!("on purpose")));
        assert_eq!(panics, Err(HelperError::Panicked));
        assert_eq!(block_on(helper.ask(MOMENT, || 1)), Ok(1));
    }

    #[test]
    fn a_kept_descriptor_is_closed_elsewhere() {
        let helper = Helpers::default().of(User::Uid(1), false);
        let (read, write) = rustix::pipe::pipe().unwrap();
        let kept = helper.keep(write);
        let hung = hang(&helper, USER_MAX);
        drop(kept);
        rustix::fs::fcntl_setfl(&read, rustix::fs::OFlags::NONBLOCK).unwrap();
        assert_eq!(
            rustix::io::read(&read, &mut [0; 1]),
            Err(rustix::io::Errno::AGAIN),
            "dropping it waits for nothing"
        );
        drop(hung);
        let start = Instant::now();
        while rustix::io::read(&read, &mut [0; 1]) != Ok(0) {
            assert!(start.elapsed() < MOMENT, "it is closed");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
