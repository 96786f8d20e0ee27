//! Programs as text for people.

use crate::kernels;
use crate::program::{Kernel, Op, Program, Stream, StreamKind, Target, Word, Work};
use std::fmt::{Display, Formatter, Result};

impl Display for Word {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Word::Device(0, at) => write!(f, "d{at}"),
            Word::Device(context, at) => write!(f, "c{context}.d{at}"),
            Word::Host(at) => write!(f, "h{at}"),
        }
    }
}

impl Display for Kernel {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let name = kernels::name(self);
        match self {
            Kernel::Set { word, value } => write!(f, "{name} {word} = {value}"),
            Kernel::Poll { word, value } => write!(f, "{name} until {word} >= {value}"),
            Kernel::Meet { set, poll } => write!(f, "{name}: sets {set}, waits for {poll}"),
            Kernel::Fold { word, value, loops } => {
                write!(f, "{name} {value} into {word}, {loops} loops")
            }
            Kernel::Each { word, value, blocks, loops } => {
                write!(f, "{name} {value} into {word} and on, {blocks} blocks, {loops} loops")
            }
            Kernel::Count { word, blocks, loops, apart } => {
                let apart = if *apart { ", one an SM" } else { "" };
                write!(f, "{name} {blocks} blocks in {word}, {loops} loops{apart}")
            }
            Kernel::Alone { inside, errors, loops } => {
                write!(f, "{name} on {inside}, errors in {errors}, {loops} loops")
            }
            Kernel::Window { errors, id, blocks, loops, .. } => {
                write!(f, "{name} {id} of {blocks} blocks, errors in {errors}, {loops} loops")
            }
            Kernel::Barrier { word, blocks, rounds, .. } => {
                write!(f, "{name} of {blocks:?} blocks, {rounds} rounds, counts in {word}")
            }
            Kernel::LookBack { word, blocks, fixed, .. } => {
                let by = if *fixed { ", in order of %ctaid" } else { "" };
                write!(f, "{name} of {blocks} blocks into {word}{by}")
            }
            Kernel::LastBlock { word, blocks, loops, .. } => {
                write!(f, "{name} of {blocks} blocks into {word}, {loops} loops")
            }
            Kernel::EachSm { word, .. } => write!(f, "{name} counts SMs in {word}"),
        }
    }
}

impl Display for Work {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Work::Kernel { kernel, module: 0 } => write!(f, "{kernel}"),
            Work::Kernel { kernel, module } => write!(f, "{kernel} (module {module})"),
            Work::Fill { word, value, count: 1 } => write!(f, "fill {word} = {value}"),
            Work::Fill { word, value, count } => {
                write!(f, "fill {count} words from {word} = {value}")
            }
            Work::Copy { from, to } => write!(f, "copy {from} to {to}"),
            Work::Pageable { word, value } => {
                write!(f, "copy {value} from pageable memory to {word}")
            }
            Work::HostFold { word, value } => write!(f, "host function folds {value} into {word}"),
            Work::HostSet { word, value } => write!(f, "host function sets {word} = {value}"),
            Work::Write { word, value } => write!(f, "stream writes {word} = {value}"),
            Work::Wait { word, value } => write!(f, "stream waits for {word} >= {value}"),
            Work::Pool { word, value } => write!(f, "allocates, adds {value} to {word}, frees"),
            Work::Record { event } => write!(f, "record e{event}"),
            Work::Empty => write!(f, "nothing"),
        }
    }
}

impl Display for Target {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Target::Stream(id) => write!(f, "s{id}"),
            Target::Event(id) => write!(f, "e{id}"),
            Target::Context(id) => write!(f, "context {id}"),
        }
    }
}

impl Display for Op {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Op::Submit { on, work } => write!(f, "s{on}: {work}"),
            Op::Record { event, on } => write!(f, "s{on}: record e{event}"),
            Op::WaitEvent { on, event } => write!(f, "s{on}: wait for e{event}"),
            Op::Launch { exec, on } => write!(f, "s{on}: launch exec {exec}"),
            Op::Beside { context, op } => write!(f, "{op}, while context {context} is current"),
            Op::Sync { target, asking: false } => write!(f, "synchronize {target}"),
            Op::Sync { target, asking: true } => write!(f, "ask {target} until it is done"),
            Op::Ask { target } => write!(f, "ask {target} once"),
            Op::Elapsed { from, to } => write!(f, "time from e{from} to e{to}"),
            Op::Store { word, value } => write!(f, "store {word} = {value}"),
            Op::Await { word, value } => write!(f, "await {word} >= {value}"),
            Op::Post { flag } => write!(f, "post {flag}"),
            Op::Pass { flag } => write!(f, "pass {flag}"),
            Op::Start { thread } => write!(f, "start thread {thread}"),
            Op::Join { thread } => write!(f, "join thread {thread}"),
            Op::Sleep { us } => write!(f, "sleep {us} us"),
            Op::Free { context } => write!(f, "free memory of context {context}"),
            Op::CopyNow { from, to } => write!(f, "copy {from} to {to} by synchronous calls"),
            Op::Load { module } => write!(f, "load module {module}"),
            Op::Unload { module } => write!(f, "unload module {module}"),
            Op::CreateStream { stream } => write!(f, "create s{stream}"),
            Op::DestroyStream { stream } => write!(f, "destroy s{stream}"),
            Op::CreateContext { context } => write!(f, "create context {context}"),
            Op::DestroyContext { context } => write!(f, "destroy context {context}"),
            Op::Instantiate { exec } => write!(f, "instantiate exec {exec}"),
            Op::Update { exec, graph } => write!(f, "update exec {exec} to graph {graph}"),
            Op::DestroyExec { exec } => write!(f, "destroy exec {exec}"),
            Op::SetAttribute { module } => {
                write!(f, "set an attribute of a kernel of module {module}")
            }
        }
    }
}

impl Display for Stream {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self.kind {
            StreamKind::Legacy => "legacy",
            StreamKind::PerThread => "per-thread",
            StreamKind::Blocking => "blocking",
            StreamKind::NonBlocking => "non-blocking",
        })?;
        if self.urgency > 0 {
            write!(f, ", urgency {}", self.urgency)?;
        }
        if self.context > 0 {
            write!(f, ", context {}", self.context)?;
        }
        Ok(())
    }
}

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let e = self.environment;
        write!(f, "{}: {} connections", self.name, e.connections)?;
        write!(f, ", {}", if e.eager { "eager" } else { "lazy" })?;
        if e.blocking {
            write!(f, ", launches block")?;
        }
        writeln!(f)?;
        for (i, context) in self.contexts.iter().enumerate().skip(1) {
            let kind = if context.primary { "primary" } else { "own" };
            writeln!(f, "  context {i}: {kind}, process {}", context.process)?;
        }
        for (i, stream) in self.streams.iter().enumerate() {
            writeln!(f, "  s{i}: {stream}")?;
        }
        for (i, event) in self.events.iter().enumerate() {
            writeln!(f, "  e{i}: {}", if event.timed { "timed" } else { "untimed" })?;
        }
        for (i, module) in self.modules.iter().enumerate().skip(1) {
            writeln!(f, "  module {i}: {:?}, constant {}", module.source, module.constant)?;
        }
        for (i, graph) in self.graphs.iter().enumerate() {
            let made = if graph.captured { "captured" } else { "made by hand" };
            let cloned = if graph.cloned { ", cloned" } else { "" };
            writeln!(f, "  graph {i}: {made}{cloned}")?;
            for (n, node) in graph.nodes.iter().enumerate() {
                writeln!(f, "    {n} after {:?}: {}", node.after, node.work)?;
            }
        }
        for (i, graph) in self.execs.iter().enumerate() {
            writeln!(f, "  exec {i}: of graph {graph}")?;
        }
        for (t, thread) in self.threads.iter().enumerate() {
            let process = if thread.process == 0 { "" } else { " of the other process" };
            writeln!(f, "  thread {t}{process}:")?;
            let mut at = 0;
            while at < thread.ops.len() {
                let (length, times) = repeats(&thread.ops[at..]);
                for (i, op) in thread.ops[at..at + length].iter().enumerate() {
                    writeln!(f, "    {:3}  {op}", at + i)?;
                }
                if times > 1 {
                    writeln!(f, "         ... {times} times in all")?;
                }
                at += length * times;
            }
        }
        Ok(())
    }
}

/// How many operations, from the first on, come again and again, and how often; one of them,
/// once, if none do.
fn repeats(ops: &[Op]) -> (usize, usize) {
    let times = |length: usize| {
        let chunks = ops.chunks_exact(length);
        chunks.take_while(|chunk| *chunk == &ops[..length]).count()
    };
    let found = (1..=4.min(ops.len())).map(|length| (length, times(length)));
    found
        .filter(|(_, times)| *times > 1)
        .max_by_key(|(length, times)| length * times)
        .unwrap_or((1, 1))
}
