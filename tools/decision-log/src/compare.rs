//! Two policies' answers to the same calls, counted.

use crate::record::{Answer, Outcome, beginning};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use tally_engine::policy::{
    self, Class, ClientId, Command, Decision, Event, FaultKind, KernelId, Launch, NEVER,
    launch_state,
};

/// Names of the kinds of answers, in the order of [`Comparison::matrix`].
pub const KINDS: [&str; 6] = ["run", "hold", "sliced", "preemptible", "sm-limited", "fault"];
/// Places where two policies part that are kept with their inputs.
const PARTINGS_MAX: usize = 20;
/// Kernels and clients that are counted apart.
const COUNTED_MAX: usize = 65_536;

/// Index into [`KINDS`] of an outcome.
fn kind_of(outcome: &Outcome<policy::Answer>) -> usize {
    let Outcome::Ok(answer) = outcome else { return 5 };
    match answer.decision {
        Decision::Run(_) => 0,
        Decision::Hold(_) | Decision::HoldUntilCompletion(_) => 1,
        Decision::Sliced(_) => 2,
        Decision::Preemptible => 3,
        Decision::SmLimited(_) => 4,
    }
}

/// An answer for people.
pub fn shown(outcome: &Outcome<policy::Answer>) -> String {
    let answer = match outcome {
        Outcome::Ok(answer) => answer,
        Outcome::Fault { kind, message, .. } => return fault(*kind, message),
    };
    let mut text = match answer.decision {
        Decision::Run(0) => "run".into(),
        Decision::Run(lease) => format!("run, lease {lease}"),
        Decision::Hold(policy::HOLD_UNTIL_CHANGE) => "hold until something changes".into(),
        Decision::Hold(ns) => format!("hold {ns} ns"),
        Decision::HoldUntilCompletion(ns) => format!("hold {ns} ns or until a completion"),
        Decision::Sliced(blocks) => format!("sliced {blocks}"),
        Decision::Preemptible => "preemptible".into(),
        Decision::SmLimited(sms) => format!("sm-limited {sms}"),
    };
    if answer.reason > 0 {
        let _ = write!(text, ", reason {}", answer.reason);
    }
    text
}

/// A fault for people, in one line.
pub fn fault(kind: FaultKind, message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    format!("{} ({})", fault_name(kind), beginning(line, 160))
}

pub fn fault_name(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::Trap => "trap",
        FaultKind::Overrun => "overrun",
        FaultKind::Memory => "memory",
        FaultKind::Nonsense => "nonsense",
        FaultKind::Stall => "stall",
        FaultKind::Disabled => "disabled",
    }
}

/// One line with all commands, as the contract names them.
pub fn commands(list: &[Command]) -> String {
    let one = |c: &Command| match *c {
        Command::SetTimer { delay_ns, token } => format!("set-timer {delay_ns} ns, token {token}"),
        Command::SetWindow { client, window_ns } => format!("set-window {client} {window_ns} ns"),
        Command::RevokeLease(client) => format!("revoke-lease {client}"),
        Command::SetYield { client, yielded } => format!("set-yield {client} {yielded}"),
        Command::SetAutoYield { client, enabled, idle_ns } => {
            format!("set-auto-yield {client} {enabled} {idle_ns} ns")
        }
        Command::SetUngated { client, ungated } => format!("set-ungated {client} {ungated}"),
        Command::SetWidth { client, sms } => format!("set-width {client} {sms} SMs"),
        Command::Reset => "reset".into(),
    };
    if list.is_empty() {
        "no commands".into()
    } else {
        list.iter().map(one).collect::<Vec<_>>().join("; ")
    }
}

/// A time in the unit that suits it.
fn time(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// A launch for people, in one line.
pub fn launch(name: &str, l: &Launch) -> String {
    let mut text = format!(
        "launch of {name} by client {}, {} blocks of {} threads",
        l.client, l.grid_blocks, l.block_threads
    );
    let mut and = |words: String| {
        text.push_str(", ");
        text.push_str(&words);
    };
    if l.class == Class::High {
        and("high priority".into());
    }
    match l.predicted_ns {
        0 => and("never measured".into()),
        ns => and(format!("predicted {}", time(ns))),
    }
    and(format!("waited {}", time(l.waited_ns)));
    if l.in_flight_ns > 0 {
        and(format!("{} in flight", time(l.in_flight_ns)));
    }
    match l.high_idle_ns {
        _ if l.state & launch_state::HIGH_ACTIVE != 0 => and("high priority active".into()),
        NEVER => and("no high priority so far".into()),
        ns => and(format!("high priority idle for {}", time(ns))),
    }
    if l.state & launch_state::OFFERED_AGAIN != 0 {
        and("held before".into());
    }
    text
}

/// An event for people, in one line.
pub fn event(event: &Event) -> String {
    match event {
        Event::Joined(c) => format!("client {} ({}) joined", c.id, beginning(&c.name, 64)),
        Event::Left(id) => format!("client {id} left"),
        Event::HighStarted => "high priority became active".into(),
        Event::HighEnded => "high priority became idle".into(),
        Event::UnitBegan { client, .. } => format!("a unit of client {client} began"),
        Event::UnitsEnded { client, units, took_ns } => {
            format!("{units} units of client {client} ended, {took_ns} ns each")
        }
        Event::Completed(done) => format!(
            "kernel {} of client {} ended, predicted {}",
            done.kernel,
            done.client,
            time(done.predicted_ns)
        ),
        Event::Timer(token) => format!("timer {token} fired"),
    }
}

/// A place where they part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parting {
    /// Which record of the log, from 1.
    pub record: u64,
    /// The core's clock at the call, ns.
    pub now_ns: u64,
    /// What was called, with its input, in words.
    pub call: String,
    pub recorded: String,
    pub other: String,
}

/// Decisions about one kernel or client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub decisions: u64,
    /// Decisions that are not equal.
    pub parted: u64,
}

/// Counts of equal and unequal decisions, which only rise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    pub decisions: u64,
    /// Decisions that agree in kind and arguments.
    pub equal: u64,
    /// Decisions that agree in kind, equal ones included.
    pub same_kind: u64,
    /// Decisions up to the first place where they part. Those after it may depend on
    /// what the other policy would have made different.
    pub before_first_parting: u64,
    /// Of the decisions that part: for launches that the log's policy had held before,
    /// which the other might never have been asked about.
    pub parted_after_hold: u64,
    /// Events and starts given to both.
    pub events: u64,
    /// Calls after which the commands, or an event's outcome, were not equal.
    pub calls_differ: u64,
    /// By kind: rows as recorded, columns as the other answers; see [`KINDS`].
    pub matrix: [[u64; 6]; 6],
    /// The other's faults by kind.
    pub faults: BTreeMap<String, u64>,
    /// The last one. `null` if there was none, but never missing.
    #[serde(deserialize_with = "Option::deserialize")]
    pub last_fault: Option<String>,
    /// The first places where they part, at most [`PARTINGS_MAX`].
    pub first: Vec<Parting>,
    #[serde(skip)]
    pub kernels: BTreeMap<KernelId, Share>,
    #[serde(skip)]
    pub clients: BTreeMap<ClientId, Share>,
}

impl Comparison {
    pub fn is_equal(&self) -> bool {
        self.equal == self.decisions && self.calls_differ == 0
    }

    /// Equal decisions of all, percent; 100 if none was compared.
    pub fn agreement_percent(&self) -> f64 {
        match self.decisions {
            0 => 100.0,
            n => self.equal as f64 * 100.0 / n as f64,
        }
    }

    /// Without the counts of each kernel and client.
    pub fn summary(&self) -> Comparison {
        Comparison {
            faults: self.faults.clone(),
            last_fault: self.last_fault.clone(),
            first: self.first.clone(),
            kernels: BTreeMap::new(),
            clients: BTreeMap::new(),
            ..*self
        }
    }

    fn fault<T>(&mut self, outcome: &Outcome<T>) {
        if let Outcome::Fault { kind, message, .. } = outcome {
            *self.faults.entry(fault_name(*kind).into()).or_default() += 1;
            if *kind != FaultKind::Disabled || self.last_fault.is_none() {
                self.last_fault = Some(fault(*kind, message));
            }
        }
    }

    fn part(&mut self, parting: impl FnOnce() -> Parting) {
        if self.first.len() < PARTINGS_MAX {
            self.first.push(parting());
        }
    }

    /// Two answers to one launch. True if they are equal.
    pub fn decided(
        &mut self,
        record: u64,
        launch: &Launch,
        name: &str,
        recorded: &Answer<policy::Answer>,
        other: &Answer<policy::Answer>,
    ) -> bool {
        self.fault(&other.outcome);
        // Whatever the reasons: another policy has other ones.
        let same = same_by(&recorded.outcome, &other.outcome, |a, b| a.decision == b.decision);
        let (row, column) = (kind_of(&recorded.outcome), kind_of(&other.outcome));
        self.matrix[row][column] += 1;
        self.decisions += 1;
        self.equal += u64::from(same);
        self.same_kind += u64::from(row == column);
        let commands_same = recorded.commands == other.commands;
        self.calls_differ += u64::from(!commands_same);
        if self.first.is_empty() && same && commands_same {
            self.before_first_parting += 1;
        }
        if !same && launch.state & launch_state::OFFERED_AGAIN != 0 {
            self.parted_after_hold += 1;
        }
        count(&mut self.kernels, launch.kernel, same);
        count(&mut self.clients, launch.client, same);
        if !same || !commands_same {
            self.part(|| Parting {
                record,
                now_ns: launch.now_ns,
                call: self::launch(name, launch),
                recorded: format!("{}; {}", shown(&recorded.outcome), commands(&recorded.commands)),
                other: format!("{}; {}", shown(&other.outcome), commands(&other.commands)),
            });
        }
        same && commands_same
    }

    /// Two outcomes of one event, or of a start. True if they are equal.
    pub fn told(
        &mut self,
        record: u64,
        now_ns: u64,
        call: impl FnOnce() -> String,
        recorded: &Answer<()>,
        other: &Answer<()>,
    ) -> bool {
        self.fault(&other.outcome);
        self.events += 1;
        let same = same_by(&recorded.outcome, &other.outcome, |(), ()| true)
            && recorded.commands == other.commands;
        if !same {
            self.calls_differ += 1;
            let text = |a: &Answer<()>| match &a.outcome {
                Outcome::Ok(()) => commands(&a.commands),
                Outcome::Fault { kind, message, .. } => {
                    format!("{}; {}", fault(*kind, message), commands(&a.commands))
                }
            };
            self.part(|| Parting {
                record,
                now_ns,
                call: call(),
                recorded: text(recorded),
                other: text(other),
            });
        }
        same
    }

    /// The kernels with the most partings, most first.
    pub fn top_kernels(&self, most: usize) -> Vec<(KernelId, Share)> {
        top(&self.kernels, most)
    }

    /// The clients with the most partings, most first.
    pub fn top_clients(&self, most: usize) -> Vec<(ClientId, Share)> {
        top(&self.clients, most)
    }
}

fn top(all: &BTreeMap<u32, Share>, most: usize) -> Vec<(u32, Share)> {
    let mut list: Vec<_> = all.iter().map(|(id, share)| (*id, *share)).collect();
    list.sort_by_key(|(id, s)| (std::cmp::Reverse(s.parted), std::cmp::Reverse(s.decisions), *id));
    list.truncate(most);
    list
}

fn count(all: &mut BTreeMap<u32, Share>, id: u32, same: bool) {
    if all.len() >= COUNTED_MAX && !all.contains_key(&id) {
        return;
    }
    let share = all.entry(id).or_default();
    share.decisions += 1;
    share.parted += u64::from(!same);
}

/// Messages of faults are for people: only kinds are compared.
fn same_by<T>(a: &Outcome<T>, b: &Outcome<T>, equal: impl Fn(&T, &T) -> bool) -> bool {
    match (a, b) {
        (Outcome::Ok(a), Outcome::Ok(b)) => equal(a, b),
        (Outcome::Fault { kind: a, .. }, Outcome::Fault { kind: b, .. }) => a == b,
        _ => false,
    }
}
