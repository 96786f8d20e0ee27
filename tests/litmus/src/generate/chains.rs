//! Work on one word by one stream after another, and the ways in which streams and threads wait
//! for one another.

use super::{Maker, Timeline};
use crate::build::kernel;
use crate::program::{Id, Kernel, Op, Target, Word, Work};

/// What one step of a chain does, and how the next one is told.
struct Step {
    place: (Id, Id),
    ops: Timeline,
    /// The next step may come before this one in the timeline: its stream waits by itself.
    may_swap: bool,
}

impl Maker {
    /// A word that several streams fold into, one after the other.
    pub(super) fn chain(&mut self) -> Timeline {
        let count = self.rng.usize(2..=6);
        let mut places = vec![self.place()];
        while places.len() < count {
            let next = self.other_place(places[places.len() - 1]);
            places.push(next);
        }
        let contexts: Vec<Id> = places.iter().map(|&p| self.context_of(p)).collect();
        let same = contexts.iter().all(|c| *c == contexts[0]);
        let word = if same { self.b.device_in(contexts[0], 16) } else { self.b.host() };
        let mut steps: Vec<Step> = places
            .iter()
            .map(|&place| Step { place, ops: self.step(place, word, same), may_swap: false })
            .collect();
        for i in 1..steps.len() {
            let (told, waits, may_swap) = self.link(steps[i - 1].place, steps[i].place);
            steps[i - 1].ops.extend(told);
            steps[i - 1].may_swap = may_swap;
            steps[i].ops.splice(0..0, waits);
        }
        for i in 1..steps.len() {
            if steps[i - 1].may_swap && self.rng.u32(0..5) < 2 {
                steps.swap(i - 1, i);
                // Nobody else before it.
                steps[i].may_swap = false;
                steps[i - 1].may_swap = false;
            }
        }
        steps.into_iter().flat_map(|step| step.ops).collect()
    }

    /// Work on a word in a stream.
    fn step(&mut self, (on, thread): (Id, Id), word: Word, of_device: bool) -> Timeline {
        let value = self.rng.u32(0..1_000);
        let fold = Kernel::Fold { word, value, loops: self.loops() };
        let work = match self.rng.u32(0..13) {
            0 if !of_device => Work::HostFold { word, value },
            _ if !of_device => kernel(fold),
            0 | 1 => {
                let blocks = self.rng.u32(1..=16);
                kernel(Kernel::Each { word, value, blocks, loops: self.loops() })
            }
            2 => Work::Pool { word, value },
            3 => Work::Fill { word, value, count: self.rng.u32(1..=16) },
            4 => Work::Pageable { word, value },
            5 => {
                let blocks = self.rng.u32(2..=40);
                let scratch = self.b.scratch(blocks + 2);
                kernel(Kernel::LastBlock { scratch, word, blocks, loops: self.loops() })
            }
            6 => {
                let blocks = self.rng.u32(2..=40);
                let scratch = self.b.scratch(blocks + 2);
                kernel(Kernel::LookBack { scratch, word, blocks, fixed: false })
            }
            7 => Work::Copy { from: word, to: word.plus(self.rng.u32(1..16)) },
            8 if thread == 0 && self.rng.u32(0..3) == 0 => {
                let to = word.plus(self.rng.u32(1..16));
                let wait = Op::Sync { target: Target::Stream(on), asking: false };
                return vec![(thread, wait), (thread, Op::CopyNow { from: word, to })];
            }
            9 => {
                // More than a whole GPU holds at once: on fewer SMs they follow one another directly.
                let blocks = self.rng.u32(150..250);
                let count = Kernel::Count { word, blocks, loops: self.rng.u32(0..8), apart: true };
                let submit = (thread, Op::Submit { on, work: kernel(count) });
                return vec![submit; self.rng.usize(2..=4)];
            }
            _ => kernel(fold),
        };
        vec![(thread, Op::Submit { on, work })]
    }

    /// How `to` waits for what was put into `from`: what `from` does behind it, what `to` does first,
    /// and whether `to` may do that before.
    pub(super) fn link(&mut self, from: (Id, Id), to: (Id, Id)) -> (Timeline, Timeline, bool) {
        let ((on, thread), (next_on, next)) = (from, to);
        if from == to {
            return (Vec::new(), Vec::new(), false);
        }
        let same_process =
            self.b.program.threads[thread].process == self.b.program.threads[next].process;
        let (mut told, mut waits) = (Vec::new(), Vec::new());
        match self.rng.u32(0..10) {
            0..=2 if same_process => {
                let (context, timed) = (self.context_of(from), self.coin());
                let event = self.b.event_in(context, timed);
                told.push((thread, Op::Record { event, on }));
                if thread != next {
                    let flag = self.b.flag();
                    told.push((thread, Op::Post { flag }));
                    waits.push((next, Op::Pass { flag }));
                }
                let by_stream = self.rng.u32(0..4) > 0;
                waits.push((
                    next,
                    if by_stream {
                        Op::WaitEvent { on: next_on, event }
                    } else {
                        Op::Sync { target: Target::Event(event), asking: self.coin() }
                    },
                ));
                (told, waits, false)
            }
            3 | 4 => {
                if self.rng.u32(0..3) == 0 {
                    told.push((thread, Op::Ask { target: Target::Stream(on) }));
                }
                let target = Target::Stream(on);
                told.push((thread, Op::Sync { target, asking: self.coin() }));
                if thread != next {
                    let flag = self.b.flag();
                    told.push((thread, Op::Post { flag }));
                    waits.push((next, Op::Pass { flag }));
                }
                (told, waits, false)
            }
            5 => {
                // The host sees a word change.
                let word = self.b.host();
                told.extend(self.signal(from, word));
                waits.push((next, Op::Await { word, value: 1 }));
                (told, waits, false)
            }
            _ => {
                let word = self.common_word(from, to);
                told.extend(self.signal(from, word));
                let work = if self.coin() {
                    Work::Wait { word, value: 1 }
                } else {
                    kernel(Kernel::Poll { word, value: 1 })
                };
                waits.push((next, Op::Submit { on: next_on, work }));
                (told, waits, true)
            }
        }
    }

    /// Sets a word to 1 behind what is in the stream.
    pub(super) fn signal(&mut self, (on, thread): (Id, Id), word: Word) -> Timeline {
        let value = 1;
        let work = match (word, self.rng.u32(0..6)) {
            (_, 0 | 1) => kernel(Kernel::Set { word, value }),
            (_, 2) => Work::Write { word, value },
            (Word::Host(_), 3 | 4) => Work::HostSet { word, value },
            (Word::Device(..), 3) => Work::Fill { word, value, count: 1 },
            (Word::Device(..), 4) => Work::Pageable { word, value },
            _ => kernel(Kernel::Set { word, value }),
        };
        vec![(thread, Op::Submit { on, work })]
    }
}
