//! One iteration out of a recording, and what its times say of the program.

use super::csv::Row;
use super::{Alone, Kernel, LAUNCH_HOST_NS, LAUNCH_LATENCY_NS, Pace, Trace};
use crate::gpu::SEEN_NS;

/// A call that takes so many times as long as most did wait for room in the driver's queue.
const BLOCKED: u64 = 10;

/// Rows of the last iteration: the shortest run of kernels that the recording repeats up
/// to its end, its first quarter apart (an iteration that was cold runs other kernels).
fn period(rows: &[Row]) -> usize {
    // Grids may grow from one to the next, as those of a decoder do.
    let same = |a: &Row, b: &Row| a.name == b.name;
    let count = rows.len();
    let back = |i: usize| &rows[count - 1 - i];
    // Knuth, Morris and Pratt's table of borders, from the end.
    let mut border = vec![0; count + 1];
    let mut k = 0;
    for i in 1..count {
        while k > 0 && !same(back(i), back(k)) {
            k = border[k];
        }
        k += usize::from(same(back(i), back(k)));
        border[i + 1] = k;
    }
    let looked_at = (count - count / 4).max(1)..=count;
    let periods = looked_at.map(|length| (length, length - border[length]));
    periods.filter(|(length, period)| *length >= 2 * period).map(|p| p.1).next().unwrap_or(count)
}

/// A trace of the last iteration that was recorded.
pub(super) fn last(name: &str, mut rows: Vec<Row>, alone: [Option<Alone>; 2]) -> Trace {
    rows.sort_by_key(|r| r.start_ns);
    for i in 1..rows.len() {
        // Kernels that overlap their successors count once.
        rows[i - 1].end_ns = rows[i - 1].end_ns.min(rows[i].start_ns).max(rows[i - 1].start_ns);
    }
    let told = rows.iter().all(|r| r.iteration.is_some());
    let number = rows.iter().filter_map(|r| r.iteration).max();
    let recorded = |each: usize| match number.filter(|_| told) {
        Some(last) => last as usize + 1,
        None => rows.len() / each,
    };
    let rows_each = match number.filter(|_| told) {
        Some(_) => rows.iter().filter(|r| r.iteration == number).count(),
        None => period(&rows),
    };
    let first = rows.len() - rows_each;
    let recorded = recorded(rows_each);
    let mut trace = if rows[first..].iter().all(|r| r.call.is_some()) {
        by_calls(&rows[first..])
    } else {
        by_gaps(&rows, first)
    };
    (trace.name, trace.recorded, trace.alone) = (name.into(), recorded, alone);
    trace
}

fn kernel(r: &Row, origin: u64) -> Kernel {
    Kernel {
        name: r.name.clone(),
        grid: r.grid,
        block: r.block,
        regs: r.regs,
        smem: r.smem,
        start_ns: r.start_ns - origin,
        dur_ns: (r.end_ns - r.start_ns).max(1),
        gap_ns: 0,
        pace: Pace::AfterLaunch(0),
        launch: 0,
    }
}

/// Without records of launches: from the pauses of the GPU.
fn by_gaps(rows: &[Row], first: usize) -> Trace {
    let gap = |i: usize| if i == 0 { 0 } else { rows[i].start_ns - rows[i - 1].end_ns };
    let late = |i: usize| gap(i) > LAUNCH_LATENCY_NS;
    let origin = rows[first].start_ns;
    let mut kernels = Vec::with_capacity(rows.len() - first);
    for i in first..rows.len() {
        let since_last = if i == 0 { 0 } else { rows[i].start_ns - rows[i - 1].start_ns };
        let (gap_ns, pace) = match (late(i), i > 0 && late(i - 1)) {
            // The GPU was waiting: this launch came so long after the last one, or,
            // if the program had been ahead, so long after it saw the GPU done.
            (true, true) => (0, Pace::AfterLaunch(since_last)),
            (true, false) => (0, Pace::AfterEnd(gap(i) - LAUNCH_LATENCY_NS)),
            (false, _) => (gap(i), Pace::AfterLaunch(since_last.min(LAUNCH_HOST_NS))),
        };
        let launch = (i - first) as u32;
        kernels.push(Kernel { gap_ns, pace, launch, ..kernel(&rows[i], origin) });
    }
    let last = &rows[rows.len() - 1];
    let period_ns = (last.end_ns - origin + gap(first)).max(1);
    Trace { kernels, period_ns, ..Trace::default() }
}

/// With records of launches: what the program did in between.
fn by_calls(rows: &[Row]) -> Trace {
    let origin = rows[0].start_ns;
    let mut lengths: Vec<u64> = rows.iter().filter_map(|r| r.call).map(|c| c.dur_ns).collect();
    lengths.sort_unstable();
    let usual_ns = lengths[lengths.len() / 2];
    let mut kernels: Vec<Kernel> = Vec::with_capacity(rows.len());
    let mut lead_ns = 0;
    for (i, r) in rows.iter().enumerate() {
        let (Some(call), before) = (r.call, i.checked_sub(1).and_then(|b| rows[b].call)) else {
            continue;
        };
        let ended_ns = i.checked_sub(1).map_or(r.start_ns, |b| rows[b].end_ns);
        let mut k = kernel(r, origin);
        k.launch = kernels.last().map_or(0, |k| k.launch);
        let since = |from: i64| u64::try_from(call.start_ns - from).unwrap_or(0);
        if before.is_some_and(|b| b.start_ns == call.start_ns) {
            k.gap_ns = r.start_ns - ended_ns;
            kernels.push(k);
            continue;
        }
        k.launch += u32::from(i > 0);
        // What was launched long before the GPU came to it had to wait for the GPU alone.
        let arrived_ns = call.start_ns + LAUNCH_LATENCY_NS as i64;
        if i > 0 && arrived_ns <= ended_ns as i64 {
            k.gap_ns = r.start_ns - ended_ns;
        }
        k.pace = match (call.waited_ns, before) {
            (Some(waited_ns), _) => Pace::AfterEnd(SEEN_NS + since(waited_ns)),
            (None, Some(b)) => {
                let blocked_ns =
                    if b.dur_ns > BLOCKED * usual_ns { b.dur_ns - usual_ns } else { 0 };
                Pace::AfterLaunch(since(b.start_ns).saturating_sub(blocked_ns))
            }
            (None, None) => Pace::AfterEnd(SEEN_NS),
        };
        if i == 0 {
            lead_ns = call.waited_ns.map_or(0, since);
        }
        kernels.push(k);
    }
    let begun_ns = rows[0].call.and_then(|c| c.waited_ns).unwrap_or(origin as i64);
    let seen_ns = rows[rows.len() - 1].end_ns + SEEN_NS;
    let period_ns = u64::try_from(seen_ns as i64 - begun_ns).unwrap_or(0).max(1);
    Trace { kernels, period_ns, lead_ns, ..Trace::default() }
}
