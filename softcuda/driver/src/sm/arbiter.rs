//! Hands out SMs: blocks start in the order in which their kernels arrived,
//! more urgent streams first, and a block that runs is never interrupted.
//!
//! A worker keeps its SM from block to block and looks at the SM's word in between
//! ([`Arbiter::must_yield`]); the lock is taken when a kernel arrives, leaves
//! or yields. Waiters sleep in a futex and wake now and then to see whether
//! somebody died holding what they wait for.

use super::file::{self, AttachError, Wish};
use super::layout::{
    Device, KERNELS_MAX, KernelRow, PROCESSES_MAX, ProcessRow, SMS_MAX, SmWord, TICKET_LIMIT,
};
use super::lock::{Locked, lock, try_lock};
use super::process;
use super::set::SmSet;
use crate::sync::{Scope, futex_wait, futex_wake};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// How long a waiter sleeps before it looks for dead owners.
const REAP_INTERVAL: Duration = Duration::from_millis(25);
/// How long [`Arbiter::detach`] tries to get the lock, in milliseconds.
const DETACH_TRIES: u32 = 100;
/// How long an arrival sleeps if all kernel rows are taken.
const ROWS_FULL_SLEEP: Duration = Duration::from_millis(1);

/// This process's place on the device.
pub struct Arbiter {
    device: &'static Device,
    /// Its row; another one if somebody took it for dead.
    process: AtomicUsize,
    started: u64,
    detached: AtomicBool,
    sms: u32,
    memory_bytes: u64,
}

/// A kernel's place in the queue.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    row: usize,
    ticket: u64,
    key: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// Something may have changed: look again.
    Changed,
    /// The kernel is no longer in the queue: somebody took this process for
    /// dead. It may only finish on its own.
    Lost,
}

impl Arbiter {
    /// Gets this process on the device at `path`, making the device if need
    /// be. Nobody else being on it, it becomes what `wish` says.
    ///
    /// # Errors
    /// [`AttachError`] if the file is unusable or all rows are taken.
    pub fn attach(path: &Path, wish: Wish) -> Result<Self, AttachError> {
        let device = file::open(path, wish)?;
        let pid = std::process::id();
        let started = process::own_start();
        let guard = locked(device);
        reap(&guard);
        // Rows with our own pid are from before an exec.
        for row in 0..PROCESSES_MAX {
            if device.processes[row].pid.load(SeqCst) == u64::from(pid) {
                forget(&guard, row);
            }
        }
        dispatch(&guard);
        if device.processes.iter().all(|p| p.pid.load(SeqCst) == 0) {
            file::reset(device, wish);
        }
        let Some(process) = claim_row(&guard, pid, started) else {
            return Err(AttachError::Full { path: path.to_owned(), limit: PROCESSES_MAX });
        };
        let sms = device.sms.load(SeqCst).clamp(1, SMS_MAX as u32);
        let memory_bytes = device.memory_bytes.load(SeqCst);
        drop(guard);
        let (process, detached) = (AtomicUsize::new(process), AtomicBool::new(false));
        Ok(Self { device, process, started, detached, sms, memory_bytes })
    }

    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// Memory of the device, all processes together.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Puts a kernel in the queue that can use `want` SMs now; `gang` means
    /// all of them or none. Lower `priority` goes first. Also returns how many
    /// SMs were granted at once.
    pub fn arrive(&self, priority: i32, want: u32, gang: bool) -> (Ticket, u32) {
        self.arrive_within(priority, want, gang, &SmSet::first(self.sms))
    }

    /// Like [`arrive`](Self::arrive), for a kernel that only ever runs on SMs
    /// of `allowed`. A set without an SM of the device counts as all of it.
    pub fn arrive_within(
        &self,
        priority: i32,
        want: u32,
        gang: bool,
        allowed: &SmSet,
    ) -> (Ticket, u32) {
        let all = SmSet::first(self.sms);
        let allowed = if allowed.and(&all).is_empty() { all } else { allowed.and(&all) };
        let device = self.device;
        loop {
            let guard = locked(device);
            if self.detached.load(SeqCst) {
                // The process is ending; nothing of it may come back.
                drop(guard);
                std::thread::park();
                continue;
            }
            self.keep_row(&guard);
            let free = device.kernels.iter().position(|k| k.ticket.load(SeqCst) == 0);
            let Some(row) = free else {
                reap(&guard);
                drop(guard);
                std::thread::sleep(ROWS_FULL_SLEEP);
                continue;
            };
            let ticket = device.next_ticket.fetch_add(1, SeqCst) % TICKET_LIMIT;
            let ticket = ticket.max(1);
            let urgency = (priority.clamp(-100, 100) + 128) as u64;
            let key = urgency << 56 | ticket;
            let kernel = &device.kernels[row];
            kernel.key.store(key, SeqCst);
            kernel.process.store(self.process.load(SeqCst) as u32, SeqCst);
            kernel.want.store(want.clamp(1, allowed.count()), SeqCst);
            for (word, bits) in kernel.allowed.iter().zip(allowed.0) {
                word.store(bits, SeqCst);
            }
            kernel.gang.store(u32::from(gang), SeqCst);
            kernel.waiters.store(0, SeqCst);
            let high = device.kernels_high.load(SeqCst).max(row as u32 + 1);
            device.kernels_high.store(high, SeqCst);
            kernel.ticket.store(ticket, SeqCst);
            dispatch(&guard);
            let granted = self.owned(SmWord::granted(ticket, row)).count() as u32;
            return (Ticket { row, ticket, key }, granted);
        }
    }

    /// Takes up an SM that was granted, if there is one.
    pub fn take(&self, ticket: &Ticket) -> Option<u32> {
        let granted = SmWord::granted(ticket.ticket, ticket.row);
        let running = SmWord::running(ticket.ticket, ticket.row);
        self.owned(granted).find(|&sm| {
            let owner = &self.device.owners[sm as usize].0;
            owner.compare_exchange(granted.0, running.0, SeqCst, SeqCst).is_ok()
        })
    }

    /// Whether a kernel that goes first waits for `sm`: one load.
    #[inline]
    pub fn must_yield(&self, ticket: &Ticket, sm: u32) -> bool {
        self.device.first_waiting[sm as usize].0.load(SeqCst) < ticket.key
    }

    /// Gives up `sm` between two blocks; the kernel stays in line for it.
    pub fn yield_to_others(&self, ticket: &Ticket, sm: u32) {
        let guard = locked(self.device);
        self.free(ticket, sm);
        dispatch(&guard);
    }

    /// Says that the kernel has no block left to start, giving up `sm` if one
    /// was held. The last call for the last SM takes the kernel out.
    pub fn leave(&self, ticket: &Ticket, sm: Option<u32>) {
        let guard = locked(self.device);
        if let Some(sm) = sm {
            self.free(ticket, sm);
        }
        let granted = SmWord::granted(ticket.ticket, ticket.row);
        for sm in self.owned(granted) {
            let owner = &self.device.owners[sm as usize].0;
            let _ = owner.compare_exchange(granted.0, 0, SeqCst, SeqCst);
        }
        let kernel = &self.device.kernels[ticket.row];
        if kernel.ticket.load(SeqCst) == ticket.ticket {
            kernel.want.store(0, SeqCst);
            let running = SmWord::running(ticket.ticket, ticket.row);
            if self.owned(running).next().is_none() {
                kernel.ticket.store(0, SeqCst);
                lower_high(&guard);
            }
        }
        notify(kernel);
        dispatch(&guard);
    }

    /// The word to hand to [`wait`](Self::wait), read before looking for a grant.
    pub fn word(&self, ticket: &Ticket) -> u32 {
        self.device.kernels[ticket.row].word.load(SeqCst)
    }

    /// Sleeps until something about the kernel changes since `seen` was read.
    pub fn wait(&self, ticket: &Ticket, seen: u32) -> Waited {
        let kernel = &self.device.kernels[ticket.row];
        kernel.waiters.fetch_add(1, SeqCst);
        futex_wait(&kernel.word, seen, Some(REAP_INTERVAL), Scope::Shared);
        kernel.waiters.fetch_sub(1, SeqCst);
        if kernel.word.load(SeqCst) == seen {
            // A time-out: nobody may be left to hand anything on.
            let guard = locked(self.device);
            reap(&guard);
            dispatch(&guard);
        }
        if kernel.ticket.load(SeqCst) == ticket.ticket { Waited::Changed } else { Waited::Lost }
    }

    /// Device memory in use by all processes.
    pub fn used_bytes(&self) -> u64 {
        self.device.processes.iter().map(|p| p.used_bytes.load(SeqCst)).sum()
    }

    /// Counts `bytes` as used if the device has that much left.
    pub fn reserve_bytes(&self, bytes: u64) -> bool {
        let guard = locked(self.device);
        for attempt in 0..2 {
            let used = self.used_bytes();
            if used.checked_add(bytes).is_some_and(|sum| sum <= self.memory_bytes) {
                self.keep_row(&guard);
                self.own_row().used_bytes.fetch_add(bytes, SeqCst);
                return true;
            }
            if attempt == 0 {
                reap(&guard);
                dispatch(&guard);
            }
        }
        false
    }

    /// Takes back what [`reserve_bytes`](Self::reserve_bytes) counted.
    pub fn release_bytes(&self, bytes: u64) {
        let used = &self.own_row().used_bytes;
        let _ = used.fetch_update(SeqCst, SeqCst, |used| Some(used.saturating_sub(bytes)));
    }

    /// Takes this process off the device, with whatever it holds, for good.
    pub fn detach(&self) {
        let Some((guard, died)) = try_lock(self.device, DETACH_TRIES) else { return };
        if died {
            reap(&guard);
        }
        self.detached.store(true, SeqCst);
        if self.owns_row() {
            forget(&guard, self.process.load(SeqCst));
        }
        dispatch(&guard);
    }

    fn own_row(&self) -> &ProcessRow {
        &self.device.processes[self.process.load(SeqCst)]
    }

    fn owns_row(&self) -> bool {
        let row = self.own_row();
        row.pid.load(SeqCst) == u64::from(std::process::id())
            && row.started.load(SeqCst) == self.started
    }

    /// Gets a row again if somebody took this process for dead.
    fn keep_row(&self, guard: &Locked<'_>) {
        if !self.owns_row()
            && let Some(row) = claim_row(guard, std::process::id(), self.started)
        {
            self.process.store(row, SeqCst);
        }
    }

    /// SMs whose word is `word`.
    fn owned(&self, word: SmWord) -> impl Iterator<Item = u32> + '_ {
        (0..self.sms).filter(move |&sm| self.device.owners[sm as usize].0.load(SeqCst) == word.0)
    }

    fn free(&self, ticket: &Ticket, sm: u32) {
        let running = SmWord::running(ticket.ticket, ticket.row);
        let owner = &self.device.owners[sm as usize].0;
        // Not ours any more if somebody took this process for dead.
        let _ = owner.compare_exchange(running.0, 0, SeqCst, SeqCst);
    }
}

/// Locks the device and puts it right if its last holder died there.
fn locked(device: &Device) -> Locked<'_> {
    let (guard, died) = lock(device);
    if died {
        reap(&guard);
        dispatch(&guard);
    }
    guard
}

/// Takes a free process row.
fn claim_row(guard: &Locked<'_>, pid: u32, started: u64) -> Option<usize> {
    let rows = &guard.device.processes;
    let at = rows.iter().position(|p| p.pid.load(SeqCst) == 0)?;
    rows[at].used_bytes.store(0, SeqCst);
    rows[at].started.store(started, SeqCst);
    rows[at].pid.store(pid.into(), SeqCst);
    Some(at)
}

fn notify(kernel: &KernelRow) {
    kernel.word.fetch_add(1, SeqCst);
    if kernel.waiters.load(SeqCst) != 0 {
        futex_wake(&kernel.word, i32::MAX, Scope::Shared);
    }
}

fn lower_high(guard: &Locked<'_>) {
    let device = guard.device;
    let mut high = (device.kernels_high.load(SeqCst) as usize).min(KERNELS_MAX);
    while high > 0 && device.kernels[high - 1].ticket.load(SeqCst) == 0 {
        high -= 1;
    }
    device.kernels_high.store(high as u32, SeqCst);
}

/// Gives free SMs to the first in line that may run there, and says for each SM
/// who is left waiting for it.
fn dispatch(guard: &Locked<'_>) {
    let device = guard.device;
    let sms = (device.sms.load(SeqCst) as usize).min(SMS_MAX);
    let mut held = [0u16; KERNELS_MAX];
    let mut free = SmSet::default();
    for (sm, owner) in device.owners[..sms].iter().enumerate() {
        match SmWord(owner.0.load(SeqCst)) {
            SmWord(0) => free.insert(sm as u32),
            word => {
                if let Some(count) = held.get_mut(word.row()) {
                    *count += 1;
                }
            }
        }
    }
    let all = SmSet::first(sms as u32);
    // SMs that somebody waits for already, and before whom nobody else comes.
    let mut awaited = SmSet::default();
    let mut last = 0;
    while !free.is_empty() || awaited != all {
        let Some((row, key)) = next_in_line(device, &held, last) else { break };
        last = key;
        let kernel = &device.kernels[row];
        let allowed = SmSet(std::array::from_fn(|i| kernel.allowed[i].load(SeqCst))).and(&all);
        let want = kernel.want.load(SeqCst).min(allowed.count());
        let Some(need) = want.checked_sub(u32::from(held[row])).filter(|&n| n > 0) else {
            continue;
        };
        let mut usable = free.and(&allowed);
        let enough = usable.count() >= need;
        if kernel.gang.load(SeqCst) != 0 && !enough {
            // Nobody overtakes a kernel that needs its SMs all at once: it
            // would never get them.
            free = free.without(&usable);
        } else if !usable.is_empty() {
            let granted = SmWord::granted(kernel.ticket.load(SeqCst), row);
            let taken = usable.split_off(need);
            taken.iter().for_each(|sm| device.owners[sm as usize].0.store(granted.0, SeqCst));
            free = free.without(&taken);
            notify(kernel);
        }
        if !enough {
            for sm in allowed.without(&awaited).iter() {
                say_first_waiting(device, sm, key);
            }
            awaited = SmSet(std::array::from_fn(|i| awaited.0[i] | allowed.0[i]));
        }
    }
    for sm in all.without(&awaited).iter() {
        say_first_waiting(device, sm, u64::MAX);
    }
}

/// Writes only what changes: a worker looks at the word between two blocks.
fn say_first_waiting(device: &Device, sm: u32, key: u64) {
    let first = &device.first_waiting[sm as usize].0;
    if first.load(SeqCst) != key {
        first.store(key, SeqCst);
    }
}

/// The row and key of the first kernel behind `last` that wants an SM more.
fn next_in_line(device: &Device, held: &[u16; KERNELS_MAX], last: u64) -> Option<(usize, u64)> {
    let high = (device.kernels_high.load(SeqCst) as usize).min(KERNELS_MAX);
    (0..high)
        .filter(|&row| {
            let kernel = &device.kernels[row];
            kernel.ticket.load(SeqCst) != 0 && kernel.want.load(SeqCst) > u32::from(held[row])
        })
        .map(|row| (row, device.kernels[row].key.load(SeqCst)))
        .filter(|&(_, key)| key > last)
        .min_by_key(|&(_, key)| key)
}

/// Forgets the processes that are gone.
fn reap(guard: &Locked<'_>) {
    let device = guard.device;
    for row in 0..PROCESSES_MAX {
        let process = &device.processes[row];
        let pid = process.pid.load(SeqCst);
        if pid == 0 {
            continue;
        }
        if !process::is_alive(pid, process.started.load(SeqCst)) {
            forget(guard, row);
        }
    }
    // Also what a holder left half done when it died.
    drop_stale_owners(guard);
    lower_high(guard);
}

/// Clears a process's row, its kernels and its SMs.
fn forget(guard: &Locked<'_>, process: usize) {
    let device = guard.device;
    for kernel in &device.kernels {
        if kernel.ticket.load(SeqCst) != 0 && kernel.process.load(SeqCst) as usize == process {
            kernel.ticket.store(0, SeqCst);
        }
    }
    drop_stale_owners(guard);
    lower_high(guard);
    device.processes[process].used_bytes.store(0, SeqCst);
    device.processes[process].pid.store(0, SeqCst);
}

/// Frees SMs whose kernel is no longer there.
fn drop_stale_owners(guard: &Locked<'_>) {
    let device = guard.device;
    for owner in &device.owners {
        let word = SmWord(owner.0.load(SeqCst));
        let kernel = device.kernels.get(word.row());
        let current = kernel.is_some_and(|k| k.ticket.load(SeqCst) == word.ticket());
        if word.0 != 0 && !current {
            owner.0.store(0, SeqCst);
        }
    }
}

#[cfg(test)]
#[path = "arbiter_tests.rs"]
mod tests;
