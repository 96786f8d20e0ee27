//! A program taken apart: its calls, its pieces of work, and what each touches.

use super::order::Order;
use crate::kernels::addend;
use crate::program::{Device, Id, Kernel, Op, Program, StreamKind, Word, Work};
use std::collections::HashMap;

/// A moment, by its number.
pub type Moment = usize;

/// A stream as the device sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    Legacy(Id),
    PerThread(Id, Id),
    Own(Id),
}

/// When a piece of work makes room for the next one in its hardware queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    AtStart,
    AtEnd,
    /// The work is never in a hardware queue.
    Never,
}

/// What is done to memory. Folds are `x * 31 + add`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Set {
        word: Word,
        count: u32,
        value: u32,
    },
    Fold {
        word: Word,
        count: u32,
        add: u32,
    },
    /// Adds to a word, atomically if `atomic` is set.
    Add {
        word: Word,
        add: u32,
        atomic: bool,
    },
    Copy {
        from: Word,
        to: Word,
    },
    /// Nothing in the end, but nobody else may do the same meanwhile.
    Alone {
        inside: Word,
        errors: Word,
    },
}

/// A piece of work for the device, from its start to its end.
pub struct Item {
    pub start: Moment,
    pub end: Moment,
    /// The operation that submitted it.
    pub op: usize,
    pub context: Id,
    /// Its stream; none for a graph's node.
    pub key: Option<Key>,
    pub leaves: Leaves,
    pub effects: Vec<Effect>,
    /// The word and the value that it waits for.
    pub needs: Option<(Word, u32)>,
    pub spinning: u32,
    /// Of a launch of an exec, or a node of one: the exec, and the launch's item.
    pub launch: Option<(Id, usize)>,
    /// The event that it records.
    pub records: Option<Id>,
    /// Items of the same graph launch that it depends on.
    pub after: Vec<usize>,
    /// A node of a graph.
    pub is_node: bool,
}

impl Item {
    /// When its effects are there: kernels that wait for others have theirs before they do.
    pub fn done(&self) -> Moment {
        if self.needs.is_some() { self.start } else { self.end }
    }
}

/// An operation, with its thread; moments `2 * i` and `2 * i + 1` are its begin and return.
pub struct Call<'p> {
    pub thread: Id,
    pub op: &'p Op,
    /// The items that it submits.
    pub items: Vec<usize>,
}

pub struct Moments<'p> {
    pub program: &'p Program,
    pub device: Device,
    pub calls: Vec<Call<'p>>,
    pub items: Vec<Item>,
    pub order: Order,
    /// First and last call of each thread.
    pub threads: Vec<Option<(usize, usize)>>,
}

pub fn begin(call: usize) -> Moment {
    2 * call
}

pub fn back(call: usize) -> Moment {
    2 * call + 1
}

impl<'p> Moments<'p> {
    /// Takes a program apart.
    ///
    /// # Errors
    /// If something in it makes no sense.
    pub fn of(program: &'p Program, device: Device) -> Result<Self, String> {
        let calls: Vec<Call<'p>> = program
            .ops()
            .map(|(thread, _, op)| Call { thread, op: op.plain(), items: Vec::new() })
            .collect();
        let (items, threads) = (Vec::new(), vec![None; program.threads.len()]);
        let mut all = Self { program, device, calls, items, order: Order::default(), threads };
        let mut updated: HashMap<Id, Vec<(usize, Id)>> = HashMap::new();
        for call in 0..all.calls.len() {
            if let Op::Update { exec, graph } = all.calls[call].op {
                updated.entry(*exec).or_default().push((call, *graph));
            }
            let thread = all.calls[call].thread;
            let first = all.threads[thread].map_or(call, |(first, _)| first);
            all.threads[thread] = Some((first, call));
        }
        for call in 0..all.calls.len() {
            all.submit(call, &updated)?;
        }
        let items = all.items.len();
        let base = 2 * all.calls.len();
        for (i, item) in all.items.iter_mut().enumerate() {
            (item.start, item.end) = (base + 2 * i, base + 2 * i + 1);
        }
        all.order = Order::new(base + 2 * items);
        Ok(all)
    }

    fn key(&self, on: Id, thread: Id) -> Key {
        let stream = self.program.streams[on];
        match stream.kind {
            StreamKind::Legacy => Key::Legacy(stream.context),
            StreamKind::PerThread => Key::PerThread(stream.context, thread),
            StreamKind::Blocking | StreamKind::NonBlocking => Key::Own(on),
        }
    }

    /// Whether a stream and the legacy stream of `context` wait for each other.
    pub fn is_blocking(&self, key: Key, context: Id) -> bool {
        match key {
            Key::Legacy(_) => false,
            Key::PerThread(of, _) => of == context,
            Key::Own(on) => {
                let stream = self.program.streams[on];
                stream.context == context && stream.kind == StreamKind::Blocking
            }
        }
    }

    fn item(&mut self, call: usize, context: Id, key: Option<Key>, leaves: Leaves) -> usize {
        self.calls[call].items.push(self.items.len());
        self.items.push(Item {
            start: 0,
            end: 0,
            op: call,
            context,
            key,
            leaves,
            effects: Vec::new(),
            needs: None,
            spinning: 0,
            launch: None,
            records: None,
            after: Vec::new(),
            is_node: false,
        });
        self.items.len() - 1
    }

    /// The items of a call.
    fn submit(
        &mut self,
        call: usize,
        updated: &HashMap<Id, Vec<(usize, Id)>>,
    ) -> Result<(), String> {
        let thread = self.calls[call].thread;
        let on = match self.calls[call].op {
            Op::Submit { on, .. }
            | Op::Record { on, .. }
            | Op::WaitEvent { on, .. }
            | Op::Launch { on, .. } => *on,
            Op::CopyNow { from, to } => {
                let Word::Device(context, _) = *from else {
                    return Err("of the device only".into());
                };
                let (key, leaves) = (Key::Legacy(context), Leaves::AtStart);
                let item = self.item(call, context, Some(key), leaves);
                self.items[item].effects.push(Effect::Copy { from: *from, to: *to });
                return Ok(());
            }
            _ => return Ok(()),
        };
        let stream = self.program.streams[on];
        let key = Some(self.key(on, thread));
        let context = stream.context;
        match self.calls[call].op {
            Op::Submit { work, .. } => {
                let leaves = match work {
                    Work::Write { .. } | Work::Wait { .. } => Leaves::AtEnd,
                    _ => Leaves::AtStart,
                };
                let item = self.item(call, context, key, leaves);
                self.describe(item, work);
            }
            Op::Record { event, .. } => {
                let timed = self.program.events[*event].timed;
                let leaves = if timed { Leaves::AtEnd } else { Leaves::Never };
                let item = self.item(call, context, key, leaves);
                self.items[item].records = Some(*event);
            }
            Op::WaitEvent { .. } => drop(self.item(call, context, key, Leaves::AtEnd)),
            Op::Launch { exec, .. } => {
                let none = Vec::new();
                let updates = updated.get(exec).unwrap_or(&none);
                self.launch(call, *exec, key, context, updates)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn launch(
        &mut self,
        call: usize,
        exec: Id,
        key: Option<Key>,
        context: Id,
        updates: &[(usize, Id)],
    ) -> Result<(), String> {
        let thread = self.calls[call].thread;
        if updates.iter().any(|&(update, _)| self.calls[update].thread != thread) {
            return Err("an exec is updated by another thread than launches it".into());
        }
        let latest = updates.iter().rfind(|&&(update, _)| update < call);
        let graph = latest.map_or(self.program.execs[exec], |&(_, graph)| graph);
        let whole = self.item(call, context, key, Leaves::AtStart);
        let own = (updates.is_empty()).then_some((exec, whole));
        self.items[whole].launch = Some((exec, whole));
        let first = self.items.len();
        let program = self.program;
        for node in &program.graphs[graph].nodes {
            let item = self.item(call, context, None, Leaves::Never);
            self.describe(item, &node.work);
            self.items[item].after = node.after.iter().map(|&before| first + before).collect();
            self.items[item].launch = own;
            self.items[item].is_node = true;
        }
        Ok(())
    }

    /// What a piece of work does.
    fn describe(&mut self, item: usize, work: &Work) {
        let device = self.device;
        let effect = match work {
            Work::Kernel { kernel, module } => {
                self.items[item].spinning = kernel.spinning(device);
                let constant = addend(self.program.modules[*module].constant);
                let (effects, waits) = kernel_effects(kernel, constant, device);
                self.items[item].effects = effects;
                self.items[item].needs = waits;
                return;
            }
            Work::Fill { word, value, count } => {
                Effect::Set { word: *word, count: *count, value: *value }
            }
            Work::Pageable { word, value }
            | Work::HostSet { word, value }
            | Work::Write { word, value } => Effect::Set { word: *word, count: 1, value: *value },
            Work::HostFold { word, value } => Effect::Fold { word: *word, count: 1, add: *value },
            Work::Copy { from, to } => Effect::Copy { from: *from, to: *to },
            Work::Pool { word, value } => Effect::Add { word: *word, add: *value, atomic: false },
            Work::Wait { word, value } => {
                self.items[item].needs = Some((*word, *value));
                return;
            }
            Work::Record { event } => {
                self.items[item].records = Some(*event);
                return;
            }
            Work::Empty => return,
        };
        self.items[item].effects.push(effect);
    }
}

/// What a kernel does to memory, and the word that it waits for.
fn kernel_effects(
    kernel: &Kernel,
    constant: u32,
    device: Device,
) -> (Vec<Effect>, Option<(Word, u32)>) {
    let fold = |word: Word, count: u32, add: u32| Effect::Fold { word, count, add };
    let mut needs = None;
    let effect = match *kernel {
        Kernel::Set { word, value } => Effect::Set { word, count: 1, value },
        Kernel::Poll { word, value } => return (Vec::new(), Some((word, value))),
        Kernel::Meet { set, poll } => {
            needs = Some((poll, 1));
            Effect::Set { word: set, count: 1, value: 1 }
        }
        Kernel::Fold { word, value, .. } => fold(word, 1, value.wrapping_add(constant)),
        Kernel::Each { word, value, blocks, .. } => {
            fold(word, blocks, value.wrapping_add(constant))
        }
        Kernel::Count { word, blocks, .. } => Effect::Add { word, add: blocks, atomic: true },
        Kernel::Alone { inside, errors, .. } => Effect::Alone { inside, errors },
        Kernel::Window { errors, .. } => Effect::Add { word: errors, add: 0, atomic: true },
        Kernel::Barrier { word, arrived, rounds, .. } => {
            let blocks = kernel.blocks(device);
            let arrive = Effect::Add { word: arrived, add: blocks * rounds, atomic: false };
            return (vec![arrive, Effect::Add { word, add: blocks, atomic: true }], None);
        }
        Kernel::LookBack { word, blocks, .. } => {
            let sum = (1..=blocks).fold(0_u32, u32::wrapping_add);
            fold(word, 1, sum)
        }
        Kernel::LastBlock { word, blocks, .. } => {
            let sum = (0..blocks).fold(0_u32, |sum, i| sum.wrapping_add(7 * i + 3));
            fold(word, 1, sum)
        }
        Kernel::EachSm { arrived, word, .. } => {
            let arrive = Effect::Add { word: arrived, add: device.sms, atomic: false };
            return (vec![arrive, Effect::Add { word, add: device.sms, atomic: true }], None);
        }
    };
    (vec![effect], needs)
}
