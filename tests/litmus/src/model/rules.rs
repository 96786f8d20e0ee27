//! Which moments come before which, and which may wait for which.

use super::moments::{Item, Key, Leaves, Moment, Moments, back, begin};
use super::{DEPTH_MAX, DYNAMIC_MIN, words};
use crate::program::{Id, Op, Target};
use std::collections::HashMap;

/// Finds all that is before something else: what one rule finds may let another find more.
///
/// # Errors
/// If something would come before itself.
pub fn settle(all: &mut Moments<'_>) -> Result<(), String> {
    calls(all);
    work(all);
    all.order.close()?;
    loop {
        let mut found = Vec::new();
        streams(all, &mut found);
        execs(all, &mut found);
        events(all, &mut found);
        waits_of_calls(all, &mut found);
        words::wake(all, &mut found);
        found.into_iter().for_each(|(a, b)| all.order.add(a, b));
        if !all.order.close()? {
            return Ok(());
        }
    }
}

/// What calls of different threads must be in order, are.
///
/// # Errors
/// Which are not.
pub fn refuse_ambiguity(all: &Moments<'_>) -> Result<(), String> {
    for (i, a) in all.items.iter().enumerate() {
        for b in &all.items[i + 1..] {
            let same = a.key.is_some() && a.key == b.key;
            if same && !called_before(all, a, b) && !called_before(all, b, a) {
                return Err(format!("two threads put work into stream {:?}, in no order", a.key));
            }
        }
    }
    for (call, c) in all.calls.iter().enumerate() {
        let event = match c.op {
            Op::WaitEvent { event, .. } => *event,
            Op::Sync { target: Target::Event(event), .. } => *event,
            Op::Elapsed { .. } => {
                elapsed_is_known(all, call)?;
                continue;
            }
            _ => continue,
        };
        if is_recorded_by_graphs(all, event) {
            continue;
        }
        for record in all.items.iter().filter(|i| i.records == Some(event)) {
            let known = all.order.before(back(record.op), begin(call))
                || all.order.before(back(call), begin(record.op));
            if !known {
                return Err(format!("which record of e{event} is meant is open"));
            }
        }
    }
    Ok(())
}

/// Both events of a measurement have been reached.
fn elapsed_is_known(all: &Moments<'_>, call: usize) -> Result<(), String> {
    let Op::Elapsed { from, to } = all.calls[call].op else { return Ok(()) };
    let reached = |event: Id| {
        let open = |i: &Item| {
            i.records == Some(event)
                && !all.order.before(back(i.op), begin(call))
                && !all.order.before(back(call), begin(i.op))
        };
        let last = record_of(all, event, call);
        !all.items.iter().any(open) && last.is_some_and(|i| all.order.before(i.end, begin(call)))
    };
    let timed = |event: Id| all.program.events[event].timed;
    if reached(*from) && reached(*to) && timed(*from) && timed(*to) {
        return Ok(());
    }
    Err(format!("e{from} and e{to} may not have been reached"))
}

/// Every wait ends: see the module's documentation.
///
/// # Errors
/// Which may not.
pub fn refuse_circles(all: &Moments<'_>) -> Result<(), String> {
    depth(all)?;
    let waits = waits(all);
    let mut forward = words::waits(all)?;
    for (call, c) in all.calls.iter().enumerate() {
        match c.op {
            Op::Pass { flag } => {
                let posts = all.calls.iter().enumerate();
                let mut posts =
                    posts.filter(|(_, p)| matches!(p.op, Op::Post { flag: f } if f == flag));
                let (post, _) = posts.next().ok_or("a flag that nobody posts")?;
                forward.push((back(call), begin(post)));
            }
            Op::Join { thread } => {
                if let Some((_, last)) = all.threads[*thread] {
                    forward.push((back(call), back(last)));
                }
            }
            _ => {}
        }
    }
    for (waiter, waited) in forward {
        if reaches(&waits, waited, waiter) {
            return Err(format!(
                "{} may never end: what it waits for, {}, may wait for it",
                describe(all, waiter),
                describe(all, waited)
            ));
        }
    }
    Ok(())
}

/// What a moment is, for people.
fn describe(all: &Moments<'_>, moment: Moment) -> String {
    let call = match moment.checked_sub(2 * all.calls.len()) {
        Some(item) => all.items[item / 2].op,
        None => moment / 2,
    };
    format!("{:?} of thread {}", all.calls[call].op.to_string(), all.calls[call].thread)
}

fn reaches(waits: &[Vec<u32>], from: Moment, to: Moment) -> bool {
    let mut seen = vec![false; waits.len()];
    let mut open = vec![from];
    while let Some(at) = open.pop() {
        if at == to {
            return true;
        }
        for &next in &waits[at] {
            if !std::mem::replace(&mut seen[next as usize], true) {
                open.push(next as usize);
            }
        }
    }
    false
}

/// The order of calls.
fn calls(all: &mut Moments<'_>) {
    for call in 0..all.calls.len() {
        all.order.add(begin(call), back(call));
        if call > 0 && all.calls[call - 1].thread == all.calls[call].thread {
            all.order.add(back(call - 1), begin(call));
        }
        match all.calls[call].op {
            Op::Start { thread } => {
                if let Some((first, _)) = all.threads[*thread] {
                    all.order.add(begin(call), begin(first));
                }
            }
            Op::Join { thread } => {
                if let Some((_, last)) = all.threads[*thread] {
                    all.order.add(back(last), back(call));
                }
            }
            Op::Pass { flag } => {
                for post in 0..all.calls.len() {
                    if matches!(all.calls[post].op, Op::Post { flag: f } if f == flag) {
                        all.order.add(begin(post), back(call));
                    }
                }
            }
            _ => {}
        }
    }
}

/// Work starts when it is submitted; a graph's nodes lie within their launch.
fn work(all: &mut Moments<'_>) {
    let mut last: HashMap<(Key, Id), usize> = HashMap::new();
    for i in 0..all.items.len() {
        let (op, start, end) = (all.items[i].op, all.items[i].start, all.items[i].end);
        all.order.add(begin(op), start);
        all.order.add(start, end);
        for before in all.items[i].after.clone() {
            all.order.add(all.items[before].end, start);
        }
        if all.items[i].is_node {
            let whole = all.calls[op].items[0];
            all.order.add(all.items[whole].start, start);
            all.order.add(end, all.items[whole].end);
        }
        // Of one thread and stream: one after the other.
        if let Some(key) = all.items[i].key
            && let Some(before) = last.insert((key, all.calls[op].thread), i)
        {
            all.order.add(all.items[before].end, start);
        }
        // What a call itself waits for.
        let returns_late = match all.calls[op].op {
            Op::CopyNow { .. } => true,
            Op::Submit { work: crate::program::Work::Kernel { .. }, .. } => {
                all.program.environment.blocking
            }
            _ => false,
        };
        if returns_late {
            all.order.add(end, back(op));
        }
    }
}

fn called_before(all: &Moments<'_>, a: &Item, b: &Item) -> bool {
    a.op != b.op && all.order.before(back(a.op), begin(b.op))
}

/// Streams that different threads use, and the legacy stream among blocking ones.
fn streams(all: &Moments<'_>, found: &mut Vec<(Moment, Moment)>) {
    pairs(all, |a, b| {
        if are_ordered_by_calls(all, a, b) && called_before(all, a, b) {
            found.push((a.end, b.start));
        }
    });
}

/// Whether the order of their calls is the order of two pieces of work of different streams, or
/// of different threads.
fn are_ordered_by_calls(all: &Moments<'_>, a: &Item, b: &Item) -> bool {
    let (Some(one), Some(other)) = (a.key, b.key) else { return false };
    let thread = |item: &Item| all.calls[item.op].thread;
    match (one, other) {
        _ if one == other => thread(a) != thread(b),
        (Key::Legacy(context), _) => all.is_blocking(other, context),
        (_, Key::Legacy(context)) => all.is_blocking(one, context),
        _ => false,
    }
}

/// Both directions of every pair of items of streams.
fn pairs(all: &Moments<'_>, mut each: impl FnMut(&Item, &Item)) {
    let of_streams: Vec<&Item> = all.items.iter().filter(|i| i.key.is_some()).collect();
    for (i, a) in of_streams.iter().enumerate() {
        for b in &of_streams[i + 1..] {
            each(a, b);
            each(b, a);
        }
    }
}

/// Launches of one exec.
fn execs(all: &Moments<'_>, found: &mut Vec<(Moment, Moment)>) {
    for (a, b) in exec_pairs(all) {
        if called_before(all, a, b) {
            found.push((a.end, b.start));
        }
    }
}

/// All pairs of launches of the same exec, both ways.
fn exec_pairs<'a>(all: &'a Moments<'_>) -> Vec<(&'a Item, &'a Item)> {
    let launches: Vec<&Item> =
        all.items.iter().filter(|i| i.launch.is_some() && !i.is_node).collect();
    let mut found = Vec::new();
    for a in &launches {
        for b in &launches {
            if !std::ptr::eq(*a, *b) && a.launch.map(|l| l.0) == b.launch.map(|l| l.0) {
                found.push((*a, *b));
            }
        }
    }
    found
}

/// Whether graphs record an event: which of its records a call means is not promised then, and so no order follows.
fn is_recorded_by_graphs(all: &Moments<'_>, event: Id) -> bool {
    all.items.iter().any(|i| i.is_node && i.records == Some(event))
}

/// The record of an event that a call means: the last one before it, if that is known.
fn record_of<'a>(all: &'a Moments<'_>, event: Id, call: usize) -> Option<&'a Item> {
    if is_recorded_by_graphs(all, event) {
        return None;
    }
    let records = all.items.iter().filter(|i| i.records == Some(event));
    let earlier = records.filter(|i| all.order.before(back(i.op), begin(call)));
    earlier.reduce(|last, next| if called_before(all, last, next) { next } else { last })
}

fn events(all: &Moments<'_>, found: &mut Vec<(Moment, Moment)>) {
    for (call, c) in all.calls.iter().enumerate() {
        match c.op {
            Op::WaitEvent { event, .. } => {
                if let Some(record) = record_of(all, *event, call) {
                    found.push((record.end, all.items[c.items[0]].start));
                }
            }
            Op::Sync { target: Target::Event(event), .. } => {
                if let Some(record) = record_of(all, *event, call) {
                    found.push((record.end, back(call)));
                }
            }
            _ => {}
        }
    }
}

/// The items that a call waits for, if they are submitted before it. Those of `lawful` calls
/// only: what other calls wait for is not promised.
fn waited_for<'a>(all: &'a Moments<'_>, call: usize, lawful: bool) -> Vec<&'a Item> {
    let context_is = |context: Id| move |item: &&Item| item.context == context;
    let items = all.items.iter();
    let thread = all.calls[call].thread;
    match all.calls[call].op {
        Op::Sync { target: Target::Stream(on), .. } => {
            let stream = all.program.streams[*on];
            let of = match stream.kind {
                crate::program::StreamKind::Legacy => Key::Legacy(stream.context),
                crate::program::StreamKind::PerThread => Key::PerThread(stream.context, thread),
                _ => Key::Own(*on),
            };
            let blocking = |key: Key| {
                of == Key::Legacy(stream.context) && all.is_blocking(key, stream.context)
            };
            items.filter(|i| i.key.is_some_and(|key| key == of || blocking(key))).collect()
        }
        Op::WaitEvent { event, .. } | Op::Sync { target: Target::Event(event), .. }
            if !lawful && is_recorded_by_graphs(all, *event) =>
        {
            items.filter(|i| i.records == Some(*event)).collect()
        }
        Op::CreateContext { .. } | Op::DestroyContext { .. } if !lawful => items.collect(),
        Op::Sync { target: Target::Context(context), .. } | Op::DestroyContext { context } => {
            items.filter(context_is(*context)).collect()
        }
        Op::DestroyExec { exec } if !lawful => {
            let graph = all.program.execs[*exec];
            items.filter(context_is(all.program.graphs[graph].context)).collect()
        }
        Op::Free { context } if !lawful => items.filter(context_is(*context)).collect(),
        Op::Load { module } | Op::Unload { module } if !lawful => {
            items.filter(context_is(all.program.modules[*module].context)).collect()
        }
        _ => Vec::new(),
    }
}

fn waits_of_calls(all: &Moments<'_>, found: &mut Vec<(Moment, Moment)>) {
    for call in 0..all.calls.len() {
        for item in waited_for(all, call, true) {
            if all.order.before(back(item.op), begin(call)) {
                found.push((item.end, back(call)));
            }
        }
    }
}

/// Whether a call makes other threads' calls wait until it returns.
fn holds_others(op: &Op) -> bool {
    matches!(
        op,
        Op::Free { .. }
            | Op::Load { .. }
            | Op::Unload { .. }
            | Op::DestroyExec { .. }
            | Op::CreateContext { .. }
            | Op::DestroyContext { .. }
    )
}

/// Whether a call may be made to wait by another.
fn is_held(op: &Op) -> bool {
    !matches!(
        op,
        Op::Post { .. }
            | Op::Pass { .. }
            | Op::Store { .. }
            | Op::Await { .. }
            | Op::Start { .. }
            | Op::Join { .. }
            | Op::Sleep { .. }
            | Op::Ask { .. }
            | Op::Sync { .. }
    )
}

/// For each moment what it may wait for.
fn waits(all: &Moments<'_>) -> Vec<Vec<u32>> {
    let mut waits: Vec<Vec<u32>> = vec![Vec::new(); all.order.len()];
    let mut wait = |waiter: Moment, waited: Moment| waits[waiter].push(waited as u32);
    for a in 0..all.order.len() {
        all.order.next(a).for_each(|b| wait(b, a));
    }
    let shared = shared_queues(all);
    pairs(all, |a, b| {
        // Unless b is called before a, b may come after it.
        if called_before(all, b, a) {
            return;
        }
        if are_ordered_by_calls(all, a, b) {
            wait(b.start, a.end);
        }
        let in_queue = a.leaves != Leaves::Never && b.leaves != Leaves::Never;
        if in_queue && a.op != b.op && a.context == b.context && shared.contains(&a.context) {
            wait(b.start, if a.leaves == Leaves::AtStart { a.start } else { a.end });
        }
    });
    for (a, b) in exec_pairs(all) {
        if !called_before(all, b, a) {
            wait(b.start, a.end);
        }
    }
    let environment = all.program.environment;
    for (call, c) in all.calls.iter().enumerate() {
        for item in waited_for(all, call, false) {
            if !all.order.before(back(call), begin(item.op)) {
                let in_stream = matches!(c.op, Op::WaitEvent { .. });
                let waiter = if in_stream { all.items[c.items[0]].start } else { back(call) };
                wait(waiter, item.end);
            }
        }
        let pageable =
            matches!(c.op, Op::Submit { work: crate::program::Work::Pageable { .. }, .. });
        if environment.blocking || pageable {
            c.items.iter().for_each(|&i| wait(back(call), all.items[i].end));
        }
        let is_launch = matches!(c.op, Op::Submit { .. } | Op::Launch { .. });
        if !(holds_others(c.op) || environment.blocking && is_launch) {
            continue;
        }
        for (other, o) in all.calls.iter().enumerate() {
            let may_meet = o.thread != c.thread && !all.order.before(back(other), begin(call));
            if may_meet && is_held(o.op) {
                wait(back(other), back(call));
                // What it would submit is not even submitted.
                o.items.iter().for_each(|&i| wait(all.items[i].start, back(call)));
            }
        }
    }
    if environment.blocking || environment.connections < DYNAMIC_MIN {
        for a in all.items.iter().filter(|i| i.is_node) {
            for b in all.items.iter().filter(|b| b.is_node && b.op == a.op) {
                if !all.order.before(b.start, a.start) && !std::ptr::eq(a, b) {
                    wait(b.start, a.end);
                }
            }
        }
    }
    waits
}

/// Contexts whose streams may share hardware queues.
fn shared_queues(all: &Moments<'_>) -> Vec<Id> {
    let mut streams: HashMap<Id, Vec<Key>> = HashMap::new();
    for item in &all.items {
        let Some(key) = item.key else { continue };
        let keys = streams.entry(item.context).or_default();
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let connections = all.program.environment.connections;
    let apart =
        |keys: &Vec<Key>| connections >= DYNAMIC_MIN && keys.len() <= usize::from(connections) / 2;
    streams.iter().filter(|(_, keys)| !apart(keys)).map(|(context, _)| *context).collect()
}

/// No call finds a full queue.
fn depth(all: &Moments<'_>) -> Result<(), String> {
    if all.items.len() <= DEPTH_MAX {
        return Ok(());
    }
    for call in 0..all.calls.len() {
        let open = all.items.iter().filter(|item| {
            item.leaves != Leaves::Never
                && !all.order.before(back(call), begin(item.op))
                && !all.order.before(item.end, begin(call))
        });
        if open.count() > DEPTH_MAX {
            return Err("more work is under way at one time than a hardware queue holds".into());
        }
    }
    Ok(())
}
