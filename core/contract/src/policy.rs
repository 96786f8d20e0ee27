//! What the core asks of a policy, and what a policy may ask back.

pub use crate::kernel::KernelId;
use crate::limits::{COMMANDS_MAX, WEIGHT_MAX};
pub use crate::objective::Objective;
use crate::objective::tpot_of_labels;
pub use crate::service::{ServiceView, TokensView};
pub use crate::unit_profile::UnitProfile;
use std::fmt;

/// A client of this core; dense, never reused within one run.
pub type ClientId = u32;

/// The kernel id in [`Launch::kernel`] of a launch whose kernel has none.
pub const NO_KERNEL: KernelId = KernelId::MAX;
/// A time that has not come; see [`Launch::high_idle_ns`].
pub const NEVER: u64 = u64::MAX;
/// A hold that only a change ends, or the longest hold that the core allows (`engine.hold_ms_max`).
pub const HOLD_UNTIL_CHANGE: u64 = u64::MAX;
/// The slack while no client with an objective has a unit open.
pub const NO_UNIT_OPEN: i64 = i64::MAX;
/// A window that holds nothing back.
pub const WINDOW_OPEN: u64 = u64::MAX;
/// From here on a window is taken for [`WINDOW_OPEN`]: the largest number that a policy in JavaScript can name exactly.
pub const WINDOW_OPEN_MIN: u64 = (1 << 53) - 1;

/// The class that a client was admitted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Latency-critical: its launches are ungated.
    High,
    /// Each launch is gated: it waits for a decision.
    BestEffort,
}

/// Bits of [`Launch::state`], in the order of the contract's `launch-state` without its first, which is
/// [`Launch::class`]. Plain constants, not `bitflags`: the decision log and policies get the number as it is.
pub mod launch_state {
    /// A high-priority client has work on this GPU now.
    pub const HIGH_ACTIVE: u32 = 1 << 0;
    /// The launch was held before and is offered again.
    pub const OFFERED_AGAIN: u32 = 1 << 1;
    /// A CUDA graph launch.
    pub const GRAPH: u32 = 1 << 2;
    /// All blocks must be resident at once.
    pub const COOPERATIVE: u32 = 1 << 3;
    /// Launched with thread-block clusters.
    pub const CLUSTERED: u32 = 1 << 4;
    /// The client has a floor: see [`Usage::min_share_permille`](super::Usage).
    pub const MIN_SHARE: u32 = 1 << 5;
    pub const ALL: u32 = (1 << 6) - 1;
}

/// Bits of [`Launch::offered`], in the order of the contract's `forms-offered`.
pub mod forms_offered {
    pub const SLICED: u32 = 1 << 0;
    /// The kernel can yield at block boundaries when asked.
    pub const PREEMPTIBLE: u32 = 1 << 1;
    /// Can run on some of the SMs.
    pub const SM_LIMITED: u32 = 1 << 2;
    /// The kernel is not transformed yet, and may turn out sliceable or preemptible. Deciding for such a form
    /// has it transformed for later launches.
    pub const PREPARABLE: u32 = 1 << 3;
    pub const ALL: u32 = (1 << 4) - 1;
}

/// One launch to decide; the contract's `launch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Time of the call, `CLOCK_MONOTONIC`, ns.
    pub now_ns: u64,
    pub client: ClientId,
    pub class: Class,
    /// What it launches, or [`NO_KERNEL`].
    pub kernel: KernelId,
    pub state: u32,
    pub offered: u32,
    pub grid_blocks: u64,
    pub block_threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Expected GPU time; 0 if never measured.
    pub predicted_ns: u64,
    /// Time this launch has waited.
    pub waited_ns: u64,
    /// Predicted GPU time of the client's unfinished launches.
    pub in_flight_ns: u64,
    /// Time since high-priority activity ended; 0 during, [`NEVER`] if there was none.
    pub high_idle_ns: u64,
    pub high_clients: u32,
    /// Best-effort clients with a launch waiting.
    pub waiting_clients: u32,
    /// Number of the client's stream, below 64; 63 is shared by all streams that find no other free.
    pub stream: u32,
    /// SMs of the GPU; 0 if unknown.
    pub sm_count: u32,
}

/// What to do with a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Run whole, with a lease of this many further launches.
    Run(u32),
    /// Offer again after this many nanoseconds.
    Hold(u64),
    /// Offer again after this many nanoseconds, or when a launch of another best-effort client ends.
    HoldUntilCompletion(u64),
    /// Run as slices of this many blocks.
    Sliced(u32),
    /// Run so that it can yield at block boundaries.
    Preemptible,
    /// Run on this many SMs.
    SmLimited(u32),
}

impl Decision {
    /// The form that it asks for, with its argument.
    pub fn form(self) -> (Form, u32) {
        match self {
            Decision::Sliced(blocks) => (Form::Sliced, blocks),
            Decision::Preemptible => (Form::Preemptible, 0),
            Decision::SmLimited(sms) => (Form::SmLimited, sms),
            Decision::Run(_) | Decision::Hold(_) | Decision::HoldUntilCompletion(_) => {
                (Form::Whole, 0)
            }
        }
    }

    /// For how long it holds the launch, if it does.
    pub fn hold_ns(self) -> Option<u64> {
        match self {
            Decision::Hold(ns) | Decision::HoldUntilCompletion(ns) => Some(ns),
            _ => None,
        }
    }
}

/// A decision, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub decision: Decision,
    /// A number of the policy's own table, for people; 0: none.
    pub reason: u8,
}

impl From<Decision> for Answer {
    fn from(decision: Decision) -> Self {
        Answer { decision, reason: 0 }
    }
}

/// How a launch was run in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    Whole,
    Sliced,
    Preemptible,
    SmLimited,
}

/// A client. Policies see its name and labels only if that was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientInfo {
    pub id: ClientId,
    pub class: Class,
    pub name: String,
    /// Its labels, in the order given.
    pub labels: Vec<(String, String)>,
}

impl ClientInfo {
    /// The first label `weight` that is a number from 1 to [`WEIGHT_MAX`]; else 1.
    pub fn weight(&self) -> u32 {
        let of = |(key, value): &(String, String)| match value.parse() {
            Ok(weight @ 1..=WEIGHT_MAX) if key == "weight" => Some(weight),
            _ => None,
        };
        self.labels.iter().find_map(of).unwrap_or(1)
    }

    /// Of a high-priority client: its service before the first unit, with the objective that its labels say.
    pub fn service(&self) -> Option<ServiceView> {
        let labels = || self.labels.iter().map(|(key, value)| (&**key, &**value));
        let is_high = self.class == Class::High;
        // Labels that say it wrongly were logged when it registered.
        is_high.then(|| ServiceView {
            tokens: tpot_of_labels(labels()).unwrap_or(None).map(TokensView::new),
            ..ServiceView::new(Objective::of_labels(labels()).unwrap_or(None))
        })
    }
}

/// What a client has under way, waits for and has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Since when its oldest undecided launch has waited, or [`NEVER`].
    pub waiting_since_ns: u64,
    /// Launches granted and not finished.
    pub in_flight: u32,
    /// Predicted GPU time of the launches in flight.
    pub in_flight_ns: u64,
    /// Measured GPU time of its finished launches.
    pub measured_ns: u64,
    /// GPU time that it was charged for.
    pub charged_ns: u64,
    /// Least share of GPU time that it is to get of the time in which it has work, permille; 0: no floor.
    pub min_share_permille: u32,
    /// Time in which it had a launch waiting or on the GPU, without the time since `backlogged_since_ns`.
    pub backlogged_ns: u64,
    /// Since when it has one, or [`NEVER`].
    pub backlogged_since_ns: u64,
    /// What it costs a stream that a launch goes to some of the SMs: the median of the latest measured; 0: none was.
    pub limit_cost_ns: u64,
}

impl Default for Usage {
    fn default() -> Self {
        Usage {
            waiting_since_ns: NEVER,
            in_flight: 0,
            in_flight_ns: 0,
            measured_ns: 0,
            charged_ns: 0,
            min_share_permille: 0,
            backlogged_ns: 0,
            backlogged_since_ns: NEVER,
            limit_cost_ns: 0,
        }
    }
}

/// A client as a policy may read of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientView {
    pub info: ClientInfo,
    /// Kept up to date for policies with [`Subscriptions::USAGE`] only.
    pub usage: Usage,
    /// For high-priority clients only.
    pub service: Option<ServiceView>,
}

impl From<ClientInfo> for ClientView {
    fn from(info: ClientInfo) -> Self {
        let service = info.service();
        ClientView { info, usage: Usage::default(), service }
    }
}

/// The least [`ServiceView::slack_ns`] of all clients, or [`NO_UNIT_OPEN`].
pub fn slack_ns<'a>(clients: impl IntoIterator<Item = &'a ClientView>, now_ns: u64) -> i64 {
    let services = clients.into_iter().filter_map(|view| view.service);
    services.filter_map(|service| service.slack_ns(now_ns)).min().unwrap_or(NO_UNIT_OPEN)
}

/// A best-effort launch that has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub client: ClientId,
    pub kernel: KernelId,
    pub form: Form,
    /// Blocks of a slice, or SMs; else 0.
    pub argument: u32,
    /// Predicted when decided; 0 if unknown.
    pub predicted_ns: u64,
    /// Time seen on the device, as its client reports it, bounded by what can be true; `None` if
    /// nobody timed it.
    pub measured_ns: Option<u64>,
    /// GPU time that it is charged: the measured time, or else the share of the time until its end was seen, within
    /// bounds that its prediction sets.
    pub charged_ns: u64,
}

/// Something a policy is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Joined(ClientInfo),
    Left(ClientId),
    /// No high-priority client was busy, and one is now.
    HighStarted,
    /// The last high-priority work ended.
    HighEnded,
    /// A high-priority client's unit of work began.
    UnitBegan {
        client: ClientId,
        since_ns: u64,
        /// When it misses the client's objective, or [`NEVER`].
        deadline_ns: u64,
    },
    /// The open unit is over.
    UnitsEnded {
        client: ClientId,
        /// How many ended since the last look; 0: how long it took is not known.
        units: u32,
        /// What each took on average, ns.
        took_ns: u64,
    },
    /// A best-effort launch finished.
    Completed(Completion),
    /// A timer fired, with its token.
    Timer(u64),
}

impl Event {
    /// What a policy must have subscribed to in order to be told.
    pub fn kind(&self) -> Subscriptions {
        match self {
            Event::Joined(_) | Event::Left(_) => Subscriptions::MEMBERSHIP,
            Event::HighStarted | Event::HighEnded => Subscriptions::ACTIVITY,
            Event::UnitBegan { .. } | Event::UnitsEnded { .. } => Subscriptions::UNITS,
            Event::Completed(_) => Subscriptions::COMPLETIONS,
            Event::Timer(_) => Subscriptions::TIMER,
        }
    }
}

/// What a policy wants of the engine besides being asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Subscriptions(u8);

impl Subscriptions {
    pub const NONE: Self = Subscriptions(0);
    /// Asks for [`Event::HighStarted`] and [`Event::HighEnded`].
    pub const ACTIVITY: Self = Subscriptions(1 << 0);
    pub const COMPLETIONS: Self = Subscriptions(1 << 1);
    /// Asks for [`Event::Joined`] and [`Event::Left`].
    pub const MEMBERSHIP: Self = Subscriptions(1 << 2);
    pub const TIMER: Self = Subscriptions(1 << 3);
    /// [`ClientView::usage`] is to be kept up to date.
    pub const USAGE: Self = Subscriptions(1 << 4);
    /// Asks for [`Event::UnitBegan`] and [`Event::UnitsEnded`].
    pub const UNITS: Self = Subscriptions(1 << 5);
    /// The policy reads [`ClientView::service`].
    pub const SERVICES: Self = Subscriptions(1 << 6);
    pub const ALL: Self = Subscriptions((1 << 7) - 1);

    const NAMES: [(Self, &'static str); 7] = [
        (Self::ACTIVITY, "activity"),
        (Self::COMPLETIONS, "completions"),
        (Self::MEMBERSHIP, "membership"),
        (Self::TIMER, "timer"),
        (Self::USAGE, "clients"),
        (Self::UNITS, "units"),
        (Self::SERVICES, "services"),
    ];

    /// Whether all of `other` is in it.
    #[inline]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Subscriptions(self.0 | other.0)
    }

    /// The subscriptions of this set that are not in `others`.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Subscriptions(self.0 & !others.0)
    }

    /// The bits as a number, for logs.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set that has these bits; bits without a meaning are dropped.
    pub const fn of_bits(bits: u8) -> Self {
        Subscriptions(bits & Self::ALL.0)
    }

    /// Names of the interfaces in `wit/policy.wit`.
    pub fn names(self) -> Vec<&'static str> {
        Self::NAMES.iter().filter(|(one, _)| self.has(*one)).map(|(_, name)| *name).collect()
    }
}

/// What a policy wants done; carried out after its call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send `Timer(token)` after `delay_ns`.
    SetTimer {
        delay_ns: u64,
        /// Given back with the event.
        token: u64,
    },
    /// Bound a client's unfinished GPU time.
    SetWindow {
        client: ClientId,
        /// Most predicted GPU time that may be unfinished; one launch is always let in.
        window_ns: u64,
    },
    /// Take back a client's lease: its next launch waits for a decision.
    RevokeLease(ClientId),
    /// Ask a client to yield, or to go on.
    SetYield { client: ClientId, yielded: bool },
    /// Have a client yield whenever high-priority work appears, without being asked.
    SetAutoYield {
        client: ClientId,
        enabled: bool,
        /// Idle gap before it goes on.
        idle_ns: u64,
    },
    /// Limit a best-effort client's launches to so many SMs unless something else is decided; 0: do not.
    SetWidth { client: ClientId, sms: u32 },
    /// Let a client launch without being decided, or not.
    SetUngated { client: ClientId, ungated: bool },
    /// Timers, windows, leases, yields, widths and who is gated become as they are for a policy just loaded. The host's
    /// own, for a new instance.
    Reset,
}

impl Command {
    /// Of which client it is.
    fn client(&self) -> Option<ClientId> {
        match *self {
            Command::SetWindow { client, .. }
            | Command::RevokeLease(client)
            | Command::SetYield { client, .. }
            | Command::SetAutoYield { client, .. }
            | Command::SetWidth { client, .. }
            | Command::SetUngated { client, .. } => Some(client),
            Command::SetTimer { .. } | Command::Reset => None,
        }
    }

    /// Whether of both, one behind the other, only this one matters.
    fn replaces(&self, earlier: &Command) -> bool {
        let is_same = std::mem::discriminant(self) == std::mem::discriminant(earlier);
        is_same && self.client().is_some() && self.client() == earlier.client()
    }
}

/// Commands that a policy gives in one call.
#[derive(Debug, Default)]
pub struct Commands {
    list: Vec<Command>,
    /// Commands beyond [`COMMANDS_MAX`], since the start.
    pub dropped: u64,
}

impl Commands {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Commands of this call so far.
    pub fn list(&self) -> &[Command] {
        &self.list
    }

    /// Add one. Never grows beyond the bound, so no allocation after the first calls: then only what replaces an
    /// earlier command is taken.
    pub fn push(&mut self, command: Command) {
        if self.list.len() < COMMANDS_MAX {
            return self.list.push(command);
        }
        let latest =
            self.list.iter().rposition(|one| *one == Command::Reset).map_or(0, |at| at + 1);
        match self.list[latest..].iter_mut().rfind(|one| command.replaces(one)) {
            Some(earlier) => *earlier = command,
            None => self.dropped += 1,
        }
    }

    /// Only the first so many are to be done.
    pub fn truncate(&mut self, len: usize) {
        self.list.truncate(len);
    }

    /// Take them out in order, keeping the buffer.
    pub fn drain(&mut self) -> std::vec::Drain<'_, Command> {
        self.list.drain(..)
    }
}

/// How clients share the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharingMode {
    /// All clients' kernels run at once.
    #[default]
    Concurrent,
    /// Contexts take turns, and the hardware interrupts kernels.
    TimeSliced,
}

/// Why a policy lost its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultKind {
    /// It trapped: a panic, `unreachable`, a wild access, stack overflow.
    Trap,
    /// It used more fuel than a call may, or more time.
    Overrun,
    /// It wanted more memory than it may have.
    Memory,
    /// It answered something that makes no sense (slices of 0 blocks).
    Nonsense,
    /// It held best-effort work for longer than it may while there was nothing to hold
    /// it for.
    Stall,
    /// It was disabled after too many faults; no call was made.
    Disabled,
}

/// A lost turn, with what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    /// For people: for a trap, its backtrace.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_a_label_that_is_a_number_in_range() {
        let weight = |labels: &[(&str, &str)]| {
            let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
            ClientInfo { id: 1, class: Class::High, name: String::new(), labels }.weight()
        };
        assert_eq!(weight(&[]), 1);
        assert_eq!(weight(&[("slo", "5"), ("weight", "7"), ("weight", "9")]), 7);
        assert_eq!(weight(&[("weight", "1000")]), 1_000);
        for wrong in ["0", "1001", "-1", "heavy", "", "2.5"] {
            assert_eq!(weight(&[("weight", wrong)]), 1, "{wrong}");
        }
    }

    #[test]
    fn what_replaces_a_command_is_taken_where_there_is_no_room() {
        let window = |client, window_ns| Command::SetWindow { client, window_ns };
        let mut all = Commands::default();
        all.push(window(0, 9));
        all.push(Command::Reset);
        all.push(window(5, 7));
        (1..COMMANDS_MAX as u32 - 2).for_each(|client| all.push(window(client, 1)));
        assert_eq!((all.list().len(), all.dropped), (COMMANDS_MAX, 0));
        all.push(window(5, 2));
        all.push(Command::RevokeLease(5));
        // What was before the reset is another matter.
        all.push(window(0, 2));
        assert_eq!((all.list().len(), all.dropped), (COMMANDS_MAX, 2));
        let of_5 = [all.list()[2], all.list()[7]];
        assert_eq!((all.list()[0], of_5), (window(0, 9), [window(5, 7), window(5, 2)]), "the last");
    }

    #[test]
    fn subscriptions_are_named_like_the_interfaces() {
        let some = Subscriptions::ACTIVITY.and(Subscriptions::USAGE);
        assert_eq!(some.names(), ["activity", "clients"]);
        assert!(some.has(Subscriptions::ACTIVITY) && !some.has(Subscriptions::TIMER));
        assert_eq!(Subscriptions::of_bits(some.bits()), some);
        assert_eq!(Subscriptions::of_bits(u8::MAX), Subscriptions::ALL);
        assert_eq!(some.without(Subscriptions::USAGE), Subscriptions::ACTIVITY);
    }
}
