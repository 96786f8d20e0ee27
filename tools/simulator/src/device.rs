//! Who runs when.
//!
//! A lane is a process with one stream: first those of high priority, then those of best effort. Its kernels run in
//! order, one at a time. Between two events every kernel runs at a steady rate:
//!
//! - `timeslice`: the process that has the GPU runs, the others stand. With several at
//!   work the GPU changes to the next at the end of a slice; a process without launched work is left
//!   at once, one of high priority after lingering. High-priority processes take turns with each other as with any
//!   other process. A change costs time ([`Model`]) and is not broken off.
//! - `mps`: the kernel that started first has the room that its blocks take, each later one
//!   what is left, and runs slower by as much. Room frees up when the last wave of
//!   blocks has begun, when a kernel ends, and when a kernel yields. Kernels that move data slow one another. Under the
//!   core a best-effort kernel comes after those of high priority once its present wave of blocks has ended.
//!
//! Work is counted in [`ROOM`]ths of nanoseconds, so that nothing is rounded away.

use crate::gpu::{CONTENTION_PERMILLE, RESUME_NS, ROOM, SharingMode, Work};
use crate::model::Model;
use std::collections::VecDeque;

/// What the device reports as time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// A kernel ended because its work was done.
    Done {
        lane: usize,
        /// Number of the launch that it is of.
        launch: u64,
        /// Whether it was the last kernel of the launch.
        last: bool,
    },
    /// A kernel ended because it has yielded.
    Yielded {
        lane: usize,
        /// Number of the launch that it is of.
        launch: u64,
        /// From being asked to yield until it had.
        turnaround_ns: u64,
    },
}

#[derive(Debug)]
struct Running {
    work: Work,
    /// Work left, in [`ROOM`]ths of nanoseconds.
    left: u64,
    /// Since when, to tell who came first.
    age: u64,
    /// Asked at; stops when `left` is down to this.
    stop: Option<(u64, u64)>,
    stopped: bool,
    /// Its blocks make way for those of high priority when `left` is down to this: one of its waves ends.
    cedes: Option<u64>,
    /// Until when its blocks are leaving, ns.
    exits_ns: Option<u64>,
    resume_ns: Option<u64>,
}

impl Running {
    fn tail(&self) -> u64 {
        self.work.tail_ns.min(self.work.total_ns) * ROOM
    }

    fn room(&self) -> u64 {
        match (self.stopped, self.left > self.tail()) {
            (true, _) => 0,
            (false, true) => self.work.room[0],
            (false, false) => self.work.room[1],
        }
    }

    /// `left` at the next event.
    fn mark(&self) -> u64 {
        let stop = self.stop.map(|s| s.1).filter(|&at| at < self.left);
        let tail = Some(self.tail()).filter(|&at| at < self.left);
        let cedes = self.cedes.filter(|&at| at < self.left);
        stop.max(tail).max(cedes).unwrap_or(0)
    }

    /// At the end of the wave that runs, its blocks that wait come after those of high priority.
    fn cede(&mut self) {
        let (total, wave) = (self.work.total_ns.max(1) * ROOM, self.work.tail_ns.max(1) * ROOM);
        let at = (total - self.left).div_ceil(wave) * wave;
        self.cedes = (at < total).then(|| total - at);
    }
}

#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<Work>,
    running: Option<Running>,
    ended_ns: u64,
    yielded: bool,
    rate: u64,
    /// Room that it has, under MPS.
    got: u64,
    /// What it has had of the GPU, in [`ROOM`]ths of nanoseconds.
    used: u64,
}

impl Lane {
    fn starts_ns(&self) -> Option<u64> {
        let head = self.queue.front().filter(|_| self.running.is_none())?;
        Some(head.ready_ns.max(self.ended_ns + head.gap_ns))
    }

    /// It has something that could run, or will after a pause of the GPU's own: the
    /// driver's queue is not empty.
    fn works(&self, now_ns: u64) -> bool {
        match &self.running {
            Some(r) => !r.stopped,
            None => self.queue.front().is_some_and(|head| head.ready_ns <= now_ns),
        }
    }
}

#[derive(Debug)]
pub struct Device {
    sharing: SharingMode,
    model: Model,
    slices_ns: [u64; 2],
    /// High-priority lanes; the others are of best effort.
    highs: usize,
    /// Under MPS, blocks of high priority start before those of best effort.
    has_priorities: bool,
    lanes: Vec<Lane>,
    /// Lanes by the age of what they run; kept only to be filled again.
    order: Vec<usize>,
    now_ns: u64,
    ages: u64,
    owner: Option<usize>,
    owner_since_ns: u64,
    /// To whom, and when it is done.
    change: Option<(usize, u64)>,
    /// Until when the old owner runs on although the change has begun.
    stops_ns: Option<u64>,
    /// When the owner has to leave.
    slice_ends_ns: Option<u64>,
    /// When the owner, which has nothing to run, has to leave.
    linger_ends_ns: Option<u64>,
    changes: u64,
}

impl Device {
    /// A device without work, in the context of nobody. `slices_ns`: time slices of high priority and of best effort.
    /// Of the lanes so many are high-priority: the first `highs`.
    pub fn new(
        sharing: SharingMode,
        model: Model,
        slices_ns: [u64; 2],
        highs: usize,
        lanes: usize,
    ) -> Self {
        Device {
            sharing,
            model,
            slices_ns,
            highs,
            has_priorities: false,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            order: (0..lanes).collect(),
            now_ns: 0,
            ages: 0,
            owner: None,
            owner_since_ns: 0,
            change: None,
            stops_ns: None,
            slice_ends_ns: None,
            linger_ends_ns: None,
            changes: 0,
        }
    }

    /// Changes of context so far.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// GPU time that a lane has had, ns: what its kernels take alone, as far as they are done, and its pauses between
    /// two of them.
    pub fn used_ns(&self, lane: usize) -> u64 {
        self.lanes[lane].used / ROOM
    }

    /// Kernels of a lane that wait or run.
    pub fn pending(&self, lane: usize) -> u64 {
        let lane = &self.lanes[lane];
        lane.queue.len() as u64 + u64::from(lane.running.is_some())
    }

    /// Put a kernel at the end of a lane.
    pub fn push(&mut self, lane: usize, work: Work) {
        self.lanes[lane].queue.push_back(work);
    }

    /// Have kernels of a lane that can yield do so, or go on.
    pub fn set_yield(&mut self, lane: usize, yielded: bool) {
        let (now_ns, flag_ns, lane) = (self.now_ns, self.model.flag_ns, &mut self.lanes[lane]);
        lane.yielded = yielded;
        let rate = lane.rate;
        let Some(r) = lane.running.as_mut().filter(|r| r.work.quantum_ns > 0) else { return };
        if !yielded {
            (r.stop, r.exits_ns) = (None, None);
            if r.stopped {
                r.resume_ns = Some(now_ns + RESUME_NS);
            }
            return;
        }
        r.resume_ns = None;
        if !r.stopped {
            let (total, quantum) = (r.work.total_ns * ROOM, r.work.quantum_ns * ROOM);
            let seen = total.saturating_sub(r.left) + flag_ns * rate;
            // The last part looks at no flag.
            let at = seen.div_ceil(quantum) * quantum;
            r.stop = (at < total).then(|| (now_ns, total - at));
        }
    }

    /// Time of the device's next event if no further work comes, ns.
    pub fn next_ns(&self) -> Option<u64> {
        let change_ns = self.change.map(|c| c.1);
        let turns = [change_ns, self.stops_ns, self.slice_ends_ns, self.linger_ends_ns];
        let mut next_ns = turns.into_iter().flatten().fold(u64::MAX, u64::min);
        for lane in &self.lanes {
            let event_ns = match &lane.running {
                None => lane.starts_ns(),
                Some(r) if r.stopped => r.resume_ns,
                Some(r) if r.exits_ns.is_some() => r.exits_ns,
                Some(_) if lane.rate == 0 => None,
                Some(r) => Some(self.now_ns + (r.left - r.mark()).div_ceil(lane.rate)),
            };
            next_ns = next_ns.min(event_ns.unwrap_or(u64::MAX));
        }
        (next_ns < u64::MAX).then(|| next_ns.max(self.now_ns))
    }

    /// Under MPS, blocks of high priority start before those of best effort from now on (`CUDA_MPS_CLIENT_PRIORITY`).
    pub fn prefer_high(&mut self) {
        self.has_priorities = true;
    }

    /// Let time pass, at most until [`Self::next_ns`], and say what happened.
    pub fn advance(&mut self, now_ns: u64, out: &mut Vec<Happened>) {
        let (before_ns, passed) = (self.now_ns, now_ns.saturating_sub(self.now_ns));
        self.now_ns = self.now_ns.max(now_ns);
        let is_shared = self.sharing == SharingMode::Mps;
        let owner = self.owner.filter(|_| self.change.is_none());
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            let has_gpu = is_shared || owner == Some(index);
            if lane.running.is_none() && lane.works(before_ns) && has_gpu {
                lane.used += ROOM * passed;
            }
            let Some(r) = &mut lane.running else { continue };
            if r.stopped {
                if r.resume_ns.is_some_and(|ns| ns <= now_ns) {
                    (r.stopped, r.resume_ns) = (false, None);
                }
                continue;
            }
            let did = r.left.min(lane.rate * passed);
            (r.left, lane.used) = (r.left - did, lane.used + did);
            if r.cedes.is_some_and(|at| r.left <= at) {
                self.ages += 1;
                (r.cedes, r.age) = (None, self.ages);
            }
            let launch = r.work.launch;
            if r.left == 0 {
                out.push(Happened::Done { lane: index, launch, last: r.work.last });
                (lane.running, lane.ended_ns) = (None, now_ns);
            } else if let Some((asked_ns, _)) = r.stop.filter(|s| r.left <= s.1) {
                let rest = u128::from(r.left) * u128::from(r.work.exit_ns)
                    / u128::from(r.work.total_ns.max(1) * ROOM);
                let exits_ns = *r.exits_ns.get_or_insert(now_ns + rest as u64);
                if exits_ns <= now_ns {
                    (r.stop, r.stopped, r.exits_ns) = (None, true, None);
                    let turnaround_ns = now_ns - asked_ns;
                    out.push(Happened::Yielded { lane: index, launch, turnaround_ns });
                }
            }
        }
        self.settle();
    }

    /// Start what can start, and work out who runs how fast.
    fn settle(&mut self) {
        let mut has_high_started = false;
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            if lane.starts_ns().is_some_and(|ns| ns <= self.now_ns)
                && let Some(work) = lane.queue.pop_front()
            {
                self.ages += 1;
                has_high_started |= index < self.highs;
                lane.running = Some(Running {
                    left: work.total_ns.max(1) * ROOM,
                    age: self.ages,
                    stop: None,
                    cedes: None,
                    stopped: lane.yielded && work.quantum_ns > 0,
                    exits_ns: None,
                    resume_ns: None,
                    work,
                });
            }
        }
        if has_high_started && self.has_priorities {
            let lows = self.lanes.iter_mut().skip(self.highs);
            lows.filter_map(|lane| lane.running.as_mut()).for_each(Running::cede);
        }
        match self.sharing {
            SharingMode::Timeslice => self.take_turns(),
            SharingMode::Mps => self.share_room(),
        }
    }

    fn take_turns(&mut self) {
        let now_ns = self.now_ns;
        if let Some((to, _)) = self.change.filter(|c| c.1 <= now_ns) {
            (self.owner, self.owner_since_ns, self.change) = (Some(to), now_ns, None);
        }
        self.linger_ends_ns = None;
        if self.change.is_none() {
            let count = self.lanes.len();
            let works = |lane: usize| self.lanes[lane].works(now_ns);
            let next = |o: usize| (1..count).map(|by| (o + by) % count).find(|&lane| works(lane));
            match self.owner.map(|o| (o, next(o))) {
                None => self.owner = (0..count).find(|&lane| works(lane)),
                Some((_, None)) => self.slice_ends_ns = None,
                Some((o, Some(to))) if !works(o) => {
                    let until_ns = self.lanes[o].ended_ns + self.model.linger_ns;
                    self.slice_ends_ns = None;
                    if o < self.highs && now_ns < until_ns {
                        self.linger_ends_ns = Some(until_ns);
                    } else {
                        self.leave(to, self.model.change_idle_ns);
                    }
                }
                Some((o, Some(to))) => {
                    // With nobody waiting a slice is not followed by another.
                    let ends_ns =
                        self.owner_since_ns + self.slices_ns[usize::from(o >= self.highs)];
                    if *self.slice_ends_ns.get_or_insert(ends_ns) <= now_ns {
                        self.leave(to, self.model.change_busy_ns);
                        self.stops_ns = Some(now_ns + self.model.stop_ns);
                    }
                }
            }
        }
        self.stops_ns = self.stops_ns.filter(|&at| at > now_ns && self.change.is_some());
        let owner = self.owner.filter(|_| self.change.is_none() || self.stops_ns.is_some());
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            let exits = lane.running.as_ref().is_some_and(|r| r.exits_ns.is_some());
            let runs = owner == Some(index) && lane.works(now_ns) && !exits;
            lane.rate = if runs { ROOM } else { 0 };
        }
    }

    fn leave(&mut self, to: usize, cost_ns: u64) {
        self.change = Some((to, self.now_ns + cost_ns));
        self.slice_ends_ns = None;
        self.changes += 1;
    }

    fn share_room(&mut self) {
        let age = |lane: &usize| self.lanes[*lane].running.as_ref().map_or(u64::MAX, |r| r.age);
        let mut order = std::mem::take(&mut self.order);
        order.sort_by_key(age);
        let mut free = ROOM;
        for &index in &order {
            let lane = &mut self.lanes[index];
            let wanted = lane.running.as_ref().map_or(0, Running::room);
            let got = wanted.min(free);
            free -= got;
            let exits = lane.running.as_ref().is_some_and(|r| r.exits_ns.is_some());
            lane.rate = (ROOM * got).checked_div(wanted).filter(|_| !exits).unwrap_or(0);
            lane.got = if lane.rate > 0 { got } else { 0 };
        }
        self.order = order;
        self.share_bandwidth();
    }

    /// What moves data is slower beside others, by the room that they have.
    fn share_bandwidth(&mut self) {
        let moves = |lane: &Lane| lane.running.as_ref().is_some_and(|r| r.work.moves_data);
        let load = |lane: &Lane| lane.got * CONTENTION_PERMILLE[usize::from(!moves(lane))];
        let all: u64 = self.lanes.iter().map(load).sum();
        for lane in self.lanes.iter_mut().filter(|lane| lane.rate > 0 && moves(lane)) {
            let more_permille = (all - load(lane)) / ROOM;
            lane.rate = (lane.rate * 1_000 / (1_000 + more_permille)).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIGH: usize = 0;
    const LOW: usize = 1;
    const ALONE_NS: u64 = 10_000;

    fn work(launch: u64, ready_ns: u64, total_ns: u64, room: u64, moves_data: bool) -> Work {
        Work {
            launch,
            last: true,
            ready_ns,
            gap_ns: 0,
            total_ns,
            tail_ns: 0,
            room: [room; 2],
            quantum_ns: 0,
            exit_ns: 0,
            more_launches: 0,
            moves_data,
        }
    }

    /// How long a kernel of the inference takes beside one of the training that has so much room.
    fn beside_ns(room: u64, moves_data: [bool; 2]) -> u64 {
        let mut device = Device::new(SharingMode::Mps, Model::default(), [0; 2], 1, 2);
        device.push(LOW, work(1, 0, 1_000_000, room, moves_data[LOW]));
        device.push(HIGH, work(2, 5_000, ALONE_NS, ROOM - room, moves_data[HIGH]));
        let mut out = Vec::new();
        while let Some(ns) = device.next_ns() {
            device.advance(ns, &mut out);
            if out.iter().any(|h| matches!(h, Happened::Done { lane: HIGH, .. })) {
                return ns - 5_000;
            }
        }
        panic!("it never ends: {device:?}");
    }

    #[test]
    fn what_moves_data_is_slower_beside_others_by_the_room_that_they_have() {
        let near = |ns: u64, permille: u64| {
            assert!(ns.abs_diff(ALONE_NS * permille / 1_000) < 50, "{ns} ns, {permille} permille");
        };
        near(beside_ns(ROOM / 2, [true, true]), 1_350);
        near(beside_ns(ROOM / 4, [true, true]), 1_175);
        near(beside_ns(ROOM / 2, [true, false]), 1_250);
        near(beside_ns(ROOM / 2, [false, true]), 1_000);
    }
    /// When the kernels of each lane end, which all become ready at these times and take so long.
    fn ends_ns(highs: usize, lanes: &[(u64, u64)]) -> Vec<u64> {
        let model = Model { linger_ns: 100_000, ..Model::default() };
        let slices_ns = [2_000_000, 10_000];
        let mut device = Device::new(SharingMode::Timeslice, model, slices_ns, highs, lanes.len());
        for (lane, &(ready_ns, total_ns)) in lanes.iter().enumerate() {
            device.push(lane, work(0, ready_ns, total_ns, ROOM, false));
        }
        let (mut ends_ns, mut out) = (vec![0; lanes.len()], Vec::new());
        while let Some(ns) = device.next_ns() {
            device.advance(ns, &mut out);
            for happened in out.drain(..) {
                if let Happened::Done { lane, .. } = happened {
                    ends_ns[lane] = ns;
                }
            }
        }
        ends_ns
    }

    #[test]
    fn with_priorities_a_kernel_of_the_service_waits_for_one_wave_and_no_more() {
        let ends_ns = |prefers: bool| {
            let mut device = Device::new(SharingMode::Mps, Model::default(), [0; 2], 1, 2);
            if prefers {
                device.prefer_high();
            }
            let waves = Work { tail_ns: 100_000, ..work(1, 0, 1_000_000, ROOM, false) };
            device.push(LOW, waves);
            device.push(HIGH, work(2, 250_000, ALONE_NS, ROOM, false));
            let (mut out, mut ends_ns) = (Vec::new(), [0; 2]);
            while let Some(ns) = device.next_ns() {
                device.advance(ns, &mut out);
                for happened in out.drain(..) {
                    let Happened::Done { lane, .. } = happened else { panic!("{happened:?}") };
                    ends_ns[lane] = ns;
                }
            }
            ends_ns
        };
        assert_eq!(ends_ns(false), [1_000_000 + ALONE_NS, 1_000_000]);
        assert_eq!(ends_ns(true), [300_000 + ALONE_NS, 1_000_000 + ALONE_NS]);
    }

    #[test]
    fn high_priority_processes_take_turns_in_slices_and_linger_after_each_other() {
        let Model { change_idle_ns, change_busy_ns, stop_ns, .. } = Model::default();
        // The first has two slices, with the second's work, which is shorter than a slice, in between.
        let ends_ns = ends_ns(2, &[(0, 3_000_000), (1, 500_000)]);
        let second_ns = 2_000_000 + change_busy_ns + 500_000;
        let first_ns = second_ns + 100_000 + change_idle_ns + 1_000_000 - stop_ns;
        assert_eq!(ends_ns, [first_ns, second_ns]);
        // Best effort does not linger and has shorter slices.
        let one_high = self::ends_ns(1, &[(0, 3_000_000), (1, 5_000)]);
        let low_ns = 2_000_000 + change_busy_ns + 5_000;
        assert_eq!(one_high, [low_ns + change_idle_ns + 1_000_000 - stop_ns, low_ns]);
    }
}
