//! What a hostile client does to the memory that it shares with the core.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::{
    KERNEL_SLOTS, LIMIT_COST_SLOTS, RING_SLOTS, STREAM_SLOTS, TURNAROUND_SLOTS,
};
use tally_ipc::map::Mapped;
use tally_ipc::marks::{Graphs, Kind, MARK_SLOTS, OPEN_MARKS_MAX, Stated, What};
use tally_ipc::ring::{self, Request};
use tally_ipc::{ClientRegion, CoreRegion};

/// An input, byte by byte; 0 at its end.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn u8(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    /// Small, at an edge, or anything.
    pub fn value(&mut self, now_ns: u64, ticket: u64) -> u64 {
        match self.u8() {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => u64::MAX / 2,
            4 => now_ns,
            5 => ticket.wrapping_add(1),
            6 => 1 << (self.u8() % 64),
            7 => u64::from_le_bytes([0; 8].map(|_: u8| self.u8())),
            8 => now_ns.wrapping_sub(self.u16().into()),
            9 => u64::from(u32::MAX),
            10 => self.u16().into(),
            small => small.into(),
        }
    }
}

/// A client's side: its own region, and what the core shows it.
pub struct Client {
    pub id: u32,
    pub region: Mapped<ClientRegion>,
    pub core: Mapped<CoreRegion>,
    pub ticket: u64,
    pub completion: u32,
}

/// Something that a hostile client does.
pub fn act(others: &mut [Client], now_ns: u64, bytes: &mut Bytes<'_>) {
    let (who, what) = (bytes.u8(), bytes.u8());
    let count = others.len();
    let Some(c) = others.get_mut(usize::from(who) % count.max(1)) else { return };
    match what % 8 {
        0 | 1 => publish(c, bytes),
        2 => {
            let done = bytes.value(now_ns, c.ticket) as u32;
            let done = if bytes.u8() & 1 == 0 { c.completion } else { done };
            for word in &c.region.completions {
                word.done.store(done, SeqCst);
            }
        }
        3 => {
            let busy = bytes.value(now_ns, 0);
            c.region.activity.busy_streams.store(busy, SeqCst);
            c.region.activity.busy_periods.fetch_add(u64::from(busy != 0), SeqCst);
            c.region.activity.idle_since_ns.store(bytes.value(now_ns, 0), SeqCst);
        }
        4 => {
            let t = &c.region.turnarounds;
            for slot in &t.latest {
                slot.ticket.store(c.ticket.wrapping_sub(bytes.u8().into()), SeqCst);
                slot.ns.store(now_ns, SeqCst);
            }
            t.count.fetch_add(bytes.value(now_ns, 0), SeqCst);
        }
        5 => {
            let at = usize::from(bytes.u16()) % KERNEL_SLOTS;
            let entry = &c.region.kernels[at];
            let length = usize::from(bytes.u8());
            entry.publish(&bytes.0[..length.min(bytes.0.len())], bytes.0.len() as u128);
            entry.transform.store(bytes.u16().into(), SeqCst);
        }
        _ => write(c, bytes, now_ns),
    }
}

/// Launches in the ring, as a client does that keeps to the protocol or not.
fn publish(c: &mut Client, bytes: &mut Bytes<'_>) {
    let (count, flags, stream, kernel) = (bytes.u8(), bytes.u8(), bytes.u8(), bytes.u8());
    let shape = u32::from(bytes.u8());
    for _ in 0..count {
        if stream & 128 == 0 && !ring::has_room(&c.core, c.ticket) {
            break;
        }
        c.completion = c.completion.wrapping_add(1);
        let request = Request {
            kernel: if kernel == 255 { u32::MAX } else { kernel.into() },
            flags: flags.into(),
            grid: [shape, 1, 1],
            block: [32, shape, 1],
            shared_bytes: 0,
            stream: if stream & 64 == 0 { stream.into() } else { c.ticket as u32 },
            completion: c.completion,
            demand: Default::default(),
            limited_sms: flags.rotate_left(3).into(),
        };
        ring::publish(&c.region, c.ticket, &request);
        c.ticket = c.ticket.saturating_add(1).min(u64::MAX - 1);
        c.region.activity.next_ticket.store(c.ticket, SeqCst);
    }
}

/// Any word that the core reads.
fn write(c: &mut Client, bytes: &mut Bytes<'_>, now_ns: u64) {
    let (which, at) = (bytes.u8(), usize::from(bytes.u16()));
    let value = bytes.value(now_ns, c.ticket);
    let r = &c.region;
    let a = &r.activity;
    let half = value as u32;
    let slot = &r.submissions[at % RING_SLOTS];
    let completion = &r.completions[at % STREAM_SLOTS];
    let turnaround = &r.turnarounds.latest[at % TURNAROUND_SLOTS];
    let kernel = &r.kernels[at % KERNEL_SLOTS];
    match which % 32 {
        0 => slot.sequence.store(value, SeqCst),
        1 => slot.kernel.store(half, SeqCst),
        2 => slot.flags.store(half, SeqCst),
        3 => slot.grid[at % 3].store(half, SeqCst),
        4 => slot.block[at % 3].store(half, SeqCst),
        5 => slot.shared_bytes.store(half, SeqCst),
        6 => slot.stream.store(half, SeqCst),
        7 => slot.completion.store(half, SeqCst),
        8 => r.submissions.iter().for_each(|s| s.sequence.store(value, SeqCst)),
        9 => {
            // Further and further ahead.
            let ahead = (0..).zip(&r.submissions);
            ahead.for_each(|(n, s)| s.sequence.store(value.wrapping_add(n), SeqCst));
        }
        10 => completion.done.store(half, SeqCst),
        11 => completion.measured.store(value, SeqCst),
        12 => a.busy_streams.store(value, SeqCst),
        13 => a.idle_since_ns.store(value, SeqCst),
        14 => a.busy_since_ns.store(value, SeqCst),
        15 => a.busy_periods.store(value, SeqCst),
        16 => a.busy_total_ns.store(value, SeqCst),
        17 => a.next_ticket.store(value, SeqCst),
        18 => a.waiters.store(half, SeqCst),
        19 => turnaround.ticket.store(value, SeqCst),
        20 => turnaround.ns.store(value, SeqCst),
        21 => r.turnarounds.count.store(value, SeqCst),
        22 => kernel.ready.store(half, SeqCst),
        23 => kernel.transform.store(half, SeqCst),
        24 => kernel.name[at % kernel.name.len()].store(value, SeqCst),
        25 => r.kernel_count.store(half, SeqCst),
        26 => counters(r)[at % 23].store(value, SeqCst),
        27 => {
            let report = &r.report;
            let words = [
                &report.governed,
                &report.time_slice,
                &report.time_slice_groups,
                &report.time_slice_error,
                &report.time_slice_us,
                &report.linger,
                &report.linger_error,
                &report.whole_because,
                &report.sm_count,
                &report.driver_version,
                &report.mps_client,
            ];
            words[at % words.len()].store(half, SeqCst);
        }
        28 => {
            let costs = &r.limit_costs;
            r.report.device_uuid[at % 2].store(value, SeqCst);
            r.report.sm_limit_bytes.store(value, SeqCst);
            costs.latest_ns[at % LIMIT_COST_SLOTS].store(value, SeqCst);
            costs.count.store(value, SeqCst);
        }
        29 => counters(r).iter().for_each(|word| word.store(value, SeqCst)),
        30 => r.magic.store(value, SeqCst),
        _ => c.ticket = value.min(u64::MAX - 1),
    }
}

/// Kind and age of a unit, or any word.
fn what(bytes: &mut Bytes<'_>, now_ns: u64) -> u64 {
    let age_us = match bytes.u8() {
        0 => None,
        1 => Some(bytes.value(now_ns, 0)),
        2 => return bytes.value(now_ns, 0),
        age => Some(u64::from(age) << (age % 32)),
    };
    let kind = match bytes.u8() % 4 {
        0 => Kind::Request,
        1 => Kind::Token,
        2 => Kind::Prefill,
        count => {
            let after_ns = age_us.unwrap_or(0) as u32;
            return What::stream(Graphs { count: count.into(), after_ns }).pack();
        }
    };
    What::marked(kind, age_us).pack()
}

/// Something that a hostile client does to what it marks.
pub fn mark(c: &Client, now_ns: u64, bytes: &mut Bytes<'_>) {
    let (marks, read) = (&c.region.marks, c.core.marks_read.load(SeqCst));
    let next = marks.next.load(SeqCst);
    let (which, at) = (bytes.u8(), usize::from(bytes.u16()));
    let (open, slot) = (&marks.open[at % OPEN_MARKS_MAX], &marks.ring[at % MARK_SLOTS]);
    let mut time = |ticket: u64| bytes.value(now_ns, ticket);
    match which % 20 {
        // Units as the protocol has them, with any times; beyond the room that there is as well.
        0..=3 => {
            let count = (at % 64) << (which % 4);
            let (began_ns, ended_ns) = (time(next), time(next));
            let unit = Stated { began_ns, ended_ns, what: what(bytes, now_ns) };
            let read = if which & 64 == 0 { read } else { next };
            (0..count).for_each(|_| _ = marks.publish(read, unit));
        }
        4 => marks.begin(at % (OPEN_MARKS_MAX + 1), time(next), what(bytes, now_ns)),
        5 => marks.free(at % (OPEN_MARKS_MAX + 1)),
        // Slots that are taken and not published.
        6 => marks.next.store(next.wrapping_add(at as u64), SeqCst),
        7 => marks.next.store(time(read), SeqCst),
        8 => marks.changes.store(time(read), SeqCst),
        9 => marks.dropped.store(time(read), SeqCst),
        10 => open.began_ns.store(time(read), SeqCst),
        11 => open.what.store(what(bytes, now_ns), SeqCst),
        12 => slot.sequence.store(time(read), SeqCst),
        13 => slot.began_ns.store(time(read), SeqCst),
        14 => slot.ended_ns.store(time(read), SeqCst),
        15 => slot.what.store(what(bytes, now_ns), SeqCst),
        16 => {
            let sequence = time(read);
            marks.ring.iter().for_each(|slot| slot.sequence.store(sequence, SeqCst));
        }
        // Each slot leads so far, from where the core is or from anywhere.
        17 => {
            let step = at as u64;
            let first = time(read);
            for (n, slot) in (0..).zip(&marks.ring) {
                slot.sequence.store(first.wrapping_add(step.wrapping_mul(n)), SeqCst);
            }
        }
        18 => {
            let (began_ns, ended_ns) = (time(read), time(read));
            let what = what(bytes, now_ns);
            for slot in &marks.ring {
                slot.began_ns.store(began_ns, SeqCst);
                slot.ended_ns.store(ended_ns, SeqCst);
                slot.what.store(what, SeqCst);
            }
        }
        _ => {
            let (began_ns, what) = (time(read), what(bytes, now_ns));
            (0..OPEN_MARKS_MAX).for_each(|place| marks.begin(place, began_ns, what));
        }
    }
}

fn counters(r: &ClientRegion) -> Vec<&AtomicU64> {
    let c = &r.counters;
    let others = [
        &c.graph_kernels,
        &c.captured,
        &c.failed,
        &c.unscheduled,
        &c.stream_overflow,
        &c.degraded,
        &c.waited_ns,
        &c.host_func,
        &c.sliced,
        &c.preemptible,
        &c.sm_limited,
        &c.graph_chained,
        &c.launches_yielded,
        &c.rescued,
        &c.transformed_kernels,
        &c.refused_kernels,
        &c.lingered,
        &c.sliced_by_offset,
        &c.graph_nodes_transformed,
        &c.sm_limited_consecutive,
    ];
    c.by_entry_point.all().into_iter().chain(others).collect()
}
