//! Words: who waits for whom by them, whether anybody may disturb anybody, and what is in them at
//! the end.

use super::Values;
use super::moments::{Effect, Item, Moment, Moments, back, begin};
use crate::program::{Id, Op, Word};
use std::collections::HashMap;

/// Something that writes a word, and from when on.
struct Write {
    word: Word,
    count: u32,
    /// The value, or what is added.
    value: u32,
    adds: bool,
    /// Nothing is written before the one and after the other.
    from: Moment,
    done: Moment,
}

/// All writes that a wait may be for.
fn writes(all: &Moments<'_>) -> Vec<Write> {
    let mut found = Vec::new();
    for item in &all.items {
        for effect in &item.effects {
            let (word, count, value, adds) = match *effect {
                Effect::Set { word, count, value } => (word, count, value, false),
                Effect::Add { word, add, .. } => (word, 1, add, true),
                // Of a value that is not looked at here: as if it were 0.
                Effect::Fold { word, count, .. } => (word, count, 0, false),
                Effect::Copy { to, .. } => (to, 1, 0, false),
                Effect::Alone { .. } => continue,
            };
            found.push(Write { word, count, value, adds, from: item.start, done: item.done() });
        }
    }
    for (call, c) in all.calls.iter().enumerate() {
        if let Op::Store { word, value } = c.op {
            let (from, done) = (begin(call), back(call));
            found.push(Write { word: *word, count: 1, value: *value, adds: false, from, done });
        }
    }
    found
}

/// All waits for words: the word, the value, and the moments between which it waits.
fn needs(all: &Moments<'_>) -> Vec<(Word, u32, Moment, Moment)> {
    let items = all.items.iter().filter_map(|i| i.needs.map(|(word, v)| (word, v, i.start, i.end)));
    let calls = all.calls.iter().enumerate().filter_map(|(call, c)| match c.op {
        Op::Await { word, value } => Some((*word, *value, begin(call), back(call))),
        _ => None,
    });
    items.chain(calls).collect()
}

fn covers(write: &Write, word: Word) -> bool {
    within(write.word, write.count, word)
}

fn within(first: Word, count: u32, word: Word) -> bool {
    match (first, word) {
        (Word::Device(a, from), Word::Device(b, at)) => {
            a == b && (from..from + count).contains(&at)
        }
        (Word::Host(from), Word::Host(at)) => (from..from + count).contains(&at),
        _ => false,
    }
}

/// The writes that a wait surely ends by: all that add, if it takes all of them; or one that sets a
/// value that is enough and that nobody takes back before the wait has ended.
fn guarantors<'w>(
    all: &Moments<'_>,
    writes: &'w [Write],
    &(word, value, _, end): &(Word, u32, Moment, Moment),
) -> Vec<&'w Write> {
    let of_word: Vec<&Write> = writes.iter().filter(|w| covers(w, word)).collect();
    if of_word.iter().all(|w| w.adds) {
        let sum: u64 = of_word.iter().map(|w| u64::from(w.value)).sum();
        return if sum == u64::from(value) { of_word } else { Vec::new() };
    }
    let before = |a, b| all.order.before(a, b);
    let enough = of_word.iter().filter(|w| !w.adds && w.value >= value);
    let stays = |w: &Write| {
        let others = of_word.iter().filter(|o| !std::ptr::eq(**o, w));
        let mut resets = others.filter(|o| o.adds || o.value < value);
        resets.all(|o| before(o.done, w.from) || before(end, o.from))
    };
    enough.filter(|w| stays(w)).take(1).copied().collect()
}

/// Ends of waits come after what surely ends them, where nothing else can.
pub fn wake(all: &Moments<'_>, found: &mut Vec<(Moment, Moment)>) {
    let writes = writes(all);
    for need in needs(all) {
        let (word, value, start, end) = need;
        let sure = guarantors(all, &writes, &need);
        let [only] = sure.as_slice() else {
            sure.iter().for_each(|w| found.push((w.from, end)));
            continue;
        };
        let before = |a, b| all.order.before(a, b);
        // Others that set as much are too late, or are taken back before the wait begins.
        let excluded = |other: &Write| {
            other.value < value
                || before(end, other.from)
                || writes.iter().any(|reset| {
                    covers(reset, word)
                        && !reset.adds
                        && reset.value < value
                        && before(other.done, reset.from)
                        && before(reset.done, start)
                })
        };
        let mut others = writes.iter().filter(|w| covers(w, word) && !std::ptr::eq(*w, *only));
        if others.all(excluded) {
            found.push((only.from, end));
        }
    }
}

/// Who waits for whom by words.
///
/// # Errors
/// A wait that may not end.
pub fn waits(all: &Moments<'_>) -> Result<Vec<(Moment, Moment)>, String> {
    let writes = writes(all);
    let mut found = Vec::new();
    for need in needs(all) {
        let sure = guarantors(all, &writes, &need);
        if sure.is_empty() {
            return Err(format!("nothing makes sure that {} gets to {}", need.0, need.1));
        }
        found.extend(sure.iter().map(|w| (need.3, w.done)));
    }
    Ok(found)
}

/// One use of a word.
struct Access<'a> {
    from: Moment,
    done: Moment,
    kind: Kind,
    item: Option<&'a Item>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Add,
    Alone,
}

/// Nobody disturbs anybody.
///
/// # Errors
/// A word on which two pieces of work may.
pub fn refuse_races(all: &Moments<'_>) -> Result<(), String> {
    let mut accesses: HashMap<Word, Vec<Access<'_>>> = HashMap::new();
    collect(all, &mut accesses);
    for (word, uses) in &accesses {
        for (i, a) in uses.iter().enumerate() {
            for b in &uses[i + 1..] {
                if disturbs(all, a, b) {
                    return Err(format!("{word} is used by two at one time"));
                }
            }
        }
    }
    Ok(())
}

fn collect<'a>(all: &'a Moments<'_>, accesses: &mut HashMap<Word, Vec<Access<'a>>>) {
    for item in &all.items {
        let mut add = |word: Word, kind: Kind| {
            let access = Access { from: item.start, done: item.done(), kind, item: Some(item) };
            accesses.entry(word).or_default().push(access);
        };
        for effect in &item.effects {
            match *effect {
                Effect::Set { word, count, .. } | Effect::Fold { word, count, .. } => {
                    (0..count).for_each(|i| add(word.plus(i), Kind::Write));
                }
                Effect::Add { word, atomic, .. } => {
                    add(word, if atomic { Kind::Add } else { Kind::Write });
                }
                Effect::Copy { from, to } => {
                    add(from, Kind::Read);
                    add(to, Kind::Write);
                }
                Effect::Alone { inside, errors } => {
                    add(inside, Kind::Alone);
                    add(errors, Kind::Add);
                }
            }
        }
    }
    for (call, c) in all.calls.iter().enumerate() {
        if let Op::Store { word, .. } = c.op {
            let access =
                Access { from: begin(call), done: back(call), kind: Kind::Write, item: None };
            accesses.entry(*word).or_default().push(access);
        }
    }
}

fn disturbs(all: &Moments<'_>, a: &Access<'_>, b: &Access<'_>) -> bool {
    let harmless = a.kind == b.kind && matches!(a.kind, Kind::Read | Kind::Add);
    let before =
        |a: &Access<'_>, b: &Access<'_>| a.done == b.from || all.order.before(a.done, b.from);
    !harmless && !before(a, b) && !before(b, a) && !exclude_each_other(a, b)
}

/// Whether both are of launches of the same exec, which come one after the other and are alike.
fn exclude_each_other(a: &Access<'_>, b: &Access<'_>) -> bool {
    let launch = |access: &Access<'_>| access.item.and_then(|item| item.launch);
    match (launch(a), launch(b)) {
        (Some((one, first)), Some((other, second))) => one == other && first != second,
        _ => false,
    }
}

/// What the words are in the end.
///
/// # Errors
/// If launches of an exec cannot be put in an order.
pub fn evaluate(all: &Moments<'_>) -> Result<Values, String> {
    let mut state = State::new(all);
    for moment in in_sequence(all)? {
        match moment.checked_sub(2 * all.calls.len()) {
            None => {
                if let Op::Store { word, value } = all.calls[moment / 2].op
                    && moment == begin(moment / 2)
                {
                    state.set(*word, *value);
                }
            }
            Some(at) => {
                let item = &all.items[at / 2];
                if moment == item.done() {
                    item.effects.iter().for_each(|effect| state.apply(effect));
                }
            }
        }
    }
    Ok((state.device, state.host))
}

/// All moments in an order that keeps the rules; launches of one exec one after the other.
fn in_sequence(all: &Moments<'_>) -> Result<Vec<Moment>, String> {
    let mut order = super::order::Order::new(all.order.len());
    for a in 0..all.order.len() {
        all.order.next(a).for_each(|b| order.add(a, b));
    }
    order.close()?;
    let launches: Vec<&Item> =
        all.items.iter().filter(|i| i.launch.is_some() && !i.is_node).collect();
    let mut last: HashMap<Id, &Item> = HashMap::new();
    // In an order in which they may start.
    let sorted = order.sorted()?;
    let place: HashMap<Moment, usize> = sorted.iter().enumerate().map(|(i, &m)| (m, i)).collect();
    let mut by_place = launches;
    by_place.sort_by_key(|item| place[&item.start]);
    for item in by_place {
        let Some((exec, _)) = item.launch else { continue };
        if let Some(before) = last.insert(exec, item) {
            order.add(before.end, item.start);
        }
    }
    order.sorted()
}

struct State {
    device: Vec<Vec<u32>>,
    host: Vec<u32>,
}

impl State {
    fn new(all: &Moments<'_>) -> Self {
        let program = all.program;
        let words = vec![0; program.device_words as usize];
        Self {
            device: vec![words; program.contexts.len()],
            host: vec![0; program.host_words as usize],
        }
    }

    fn word(&mut self, word: Word) -> &mut u32 {
        match word {
            Word::Device(context, at) => &mut self.device[context][at as usize],
            Word::Host(at) => &mut self.host[at as usize],
        }
    }

    fn set(&mut self, word: Word, value: u32) {
        *self.word(word) = value;
    }

    fn apply(&mut self, effect: &Effect) {
        match *effect {
            Effect::Set { word, count, value } => {
                (0..count).for_each(|i| self.set(word.plus(i), value));
            }
            Effect::Fold { word, count, add } => (0..count).for_each(|i| {
                let word = self.word(word.plus(i));
                *word = word.wrapping_mul(31).wrapping_add(add);
            }),
            Effect::Add { word, add, .. } => {
                let word = self.word(word);
                *word = word.wrapping_add(add);
            }
            Effect::Copy { from, to } => {
                let value = *self.word(from);
                self.set(to, value);
            }
            Effect::Alone { .. } => {}
        }
    }
}
