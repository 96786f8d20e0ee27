//! A loaded policy as the engine calls it, and what becomes of it when it fails.
//!
//! ```text
//!           init              trap, overrun, memory
//!   load ----------> live -----------------------------> down
//!                     ^                                   |
//!                     |  next call: new instance, init,   |
//!                     +---- clients told of again --------+
//!                     |                                   |
//!                     +--- faults_max faults: off <-------+
//! ```
//! An instance that trapped is never called again: its memory may be in any
//! state. An answer that makes no sense costs this decision, but not the instance.

use crate::bindings::convert;
use crate::compiled::Compiled;
use crate::imports::HostState;
use crate::inspect;
use crate::spawn::{Budget, Exports, Live, Refusal, fault};
use crate::state::{Restored, Saved};
use crate::status::kind_name;
use crate::{FaultCounts, LastFault, LoadError, PolicyStatus};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tally_contract::capability::Capability;
use tally_contract::limits::PASS_POLICY_MS;
use tally_engine::policy::{
    Answer, Class, Command, Context, Decision, Event, Fault, FaultKind, Launch, Policy,
    Subscriptions,
};

/// Fuel that a new instance may use beyond twice what the first one did.
const RESPAWN_FUEL_SPARE: u64 = 100_000;

/// Calls that cannot be deferred to the next pass, such as those for clients that join, are made until a pass's calls
/// have taken this many times `PASS_POLICY_MS`.
const OVERDUE: u64 = 25;
/// The same, as time.
const PASS_MAX: Duration = Duration::from_millis(OVERDUE * PASS_POLICY_MS);

/// Said of a policy that would not let high priority run.
const NOT_ITS_TO_CHANGE: &str = "answered something else than run for a high-priority launch \
    without the capability `high-priority`: import `tally:policy/high-priority`, and grant it \
    (`capabilities = [\"high-priority\"]` under `[policy]` in the core's configuration), or use a \
    policy that does without";

/// A loaded policy. Dropping it takes some 10 us: not on the dispatch thread.
pub struct WasmPolicy {
    live: Option<Live>,
    /// The state of the store while there is no instance.
    down: Option<Box<HostState>>,
    /// What `init` asked for has reached a context.
    started: bool,
    /// By what it exports; none once it is disabled.
    subscriptions: Subscriptions,
    /// It may answer something else than `run` for a high-priority launch.
    decides_high: bool,
    call_budget: Budget,
    respawn_budget: Budget,
    compiled: Compiled,
    config: String,
    load_ms: f64,
    restored: Restored,
    started_with: Option<Saved>,
    decides: u64,
    events: u64,
    faults: FaultCounts,
    /// Faults that are not forgotten.
    recent_faults: u32,
    last_fault_ns: u64,
    last_fault: Option<LastFault>,
    respawns: u64,
    told: Told,
    /// Calls of this pass of the engine's during which the epoch advanced; each is a tick or more, on average.
    long_calls: u64,
    long_calls_max: u64,
    /// The caller has passes: without them all calls ever would be one.
    has_passes: bool,
    /// Its `snapshot` failed when an onlooker asked: it is not asked for one again.
    mute: bool,
}

impl WasmPolicy {
    pub(crate) fn start(
        compiled: Compiled,
        config: &str,
        saved: Option<&Saved>,
    ) -> Result<Self, LoadError> {
        let started = Instant::now();
        let checked = compiled.checked.clone();
        let limits = &checked.limits;
        let init_budget = checked.budget(limits.init_fuel, limits.init_cpu_ms_max);
        let new_instance = || {
            let state = HostState::new(compiled.name.clone(), limits, checked.ticker.beat());
            Live::start(&checked, state, config, init_budget)
                .map_err(|refused| not_started(&compiled.file, refused.why))
        };
        let (mut live, spent) = new_instance()?;
        let restored = match saved.map(|saved| live.restore(saved, init_budget)) {
            None => Restored::NotOffered,
            Some(None) => Restored::NoInterface,
            Some(Some(Ok(Ok(())))) => Restored::Accepted,
            Some(Some(Ok(Err(why)))) => Restored::Refused(why),
            Some(Some(Err(fault))) => {
                live = new_instance()?.0;
                Restored::Failed(fault.to_string())
            }
        };
        // A new instance is started on the dispatch thread. It runs the same `init`
        // with the same configuration, so it needs what the first one did.
        let respawn_fuel = (2 * spent + RESPAWN_FUEL_SPARE).min(limits.init_fuel);
        Ok(WasmPolicy {
            live: Some(live),
            down: None,
            started: false,
            subscriptions: checked.subscriptions(),
            decides_high: checked.granted.has(Capability::HighPriority)
                && compiled.needs().has(Capability::HighPriority),
            call_budget: checked.budget(limits.decide_fuel, limits.call_cpu_ms_max),
            respawn_budget: checked.seldom_budget(respawn_fuel),
            load_ms: compiled.compile_ms + started.elapsed().as_secs_f64() * 1e3,
            compiled,
            config: config.into(),
            started_with: saved.filter(|_| matches!(restored, Restored::Accepted)).cloned(),
            restored,
            decides: 0,
            events: 0,
            faults: FaultCounts::default(),
            recent_faults: 0,
            last_fault_ns: 0,
            last_fault: None,
            respawns: 0,
            told: Told::default(),
            long_calls: 0,
            long_calls_max: (PASS_POLICY_MS / limits.tick_ms()).max(1),
            has_passes: false,
            mute: false,
        })
    }

    /// The policy's state, to be offered to the next policy. `None` if it exports no `state` or has no instance now.
    /// Runs on the dispatch thread, within [`Limits::snapshot_fuel`](crate::Limits::snapshot_fuel) and 20 ms of CPU
    /// time (`SNAPSHOT_CPU_MS`), or the time of a call if that is longer. A fault counts like any other.
    pub fn snapshot(&mut self) -> Option<Result<Saved, Fault>> {
        let now_ns = self.live.as_ref()?.state().log.now_ns;
        Some(self.write_down()?.map_err(|fault| self.note(fault, now_ns)))
    }

    /// Like [`snapshot`](Self::snapshot), for an observer such as a recording. A fault appears in the status and
    /// discards the instance, but does not count towards `faults_max`: no decision depended on it. After one fault,
    /// observers get no more snapshots.
    pub fn observe(&mut self) -> Option<Saved> {
        if self.mute {
            return None;
        }
        let now_ns = self.live.as_ref()?.state().log.now_ns;
        let written = self.write_down()?;
        written
            .map_err(|fault| {
                self.mute = true;
                self.count(&fault, now_ns);
            })
            .ok()
    }

    fn write_down(&mut self) -> Option<Result<Saved, Fault>> {
        let limits = &self.compiled.checked.limits;
        let budget = self.compiled.checked.seldom_budget(limits.snapshot_fuel);
        let written = self.live.as_mut()?.snapshot(budget)?;
        if written.is_err() {
            self.down = self.live.take().map(Live::end);
        }
        Some(written)
    }

    /// The state that it accepted when it was started.
    pub fn started_with(&self) -> Option<&Saved> {
        self.started_with.as_ref()
    }

    /// What became of the state that it was offered when it was started.
    pub fn restored(&self) -> &Restored {
        &self.restored
    }

    /// The name of its file, without the ending.
    pub fn name(&self) -> &str {
        self.compiled.name()
    }

    /// SHA-256 of its file, in hexadecimal.
    pub fn digest(&self) -> &str {
        self.compiled.digest()
    }

    /// The text that it was configured with.
    pub fn config(&self) -> &str {
        &self.config
    }

    pub fn status(&self) -> PolicyStatus {
        let state = self.live.as_ref().map(Live::state).or(self.down.as_deref());
        PolicyStatus {
            name: self.name().to_owned(),
            path: self.compiled.path.clone(),
            digest: self.digest().to_owned(),
            signed_by: self.compiled.signed_by().map(str::to_owned),
            granted: self.compiled.granted().names(),
            needs: self.compiled.needs().names(),
            subscriptions: self.compiled.subscriptions().names(),
            load_ms: self.load_ms,
            decides: self.decides,
            events: self.events,
            faults: self.faults,
            last_fault: self.last_fault.clone(),
            restored: self.restored.clone(),
            recent_faults: self.recent_faults,
            respawns: self.respawns,
            disabled: self.is_disabled(),
            reasons: state.map(|state| state.reasons.status()).unwrap_or_default(),
            counters: state.map(|state| state.metrics.counters()).unwrap_or_default(),
            gauges: state.map(|state| state.metrics.gauges()).unwrap_or_default(),
            log_dropped: state.map_or(0, |state| state.log.dropped),
        }
    }

    /// Linear memory that its instance has now, bytes; 0 while there is none.
    pub fn memory_bytes(&self) -> usize {
        self.live.as_ref().map_or(0, |live| live.state().memory.bytes())
    }

    /// The texts of its reasons, by number.
    pub fn reasons(&self) -> std::collections::BTreeMap<u8, String> {
        let state = self.live.as_ref().map(Live::state).or(self.down.as_deref());
        state.map(|state| state.reasons.texts().clone()).unwrap_or_default()
    }

    /// Fuel that its last call used; none if it failed, or before the first.
    pub fn call_fuel(&self) -> Option<u64> {
        let left = self.live.as_ref()?.fuel_left()?;
        self.call_budget.fuel.checked_sub(left)
    }

    /// Disabled after too many faults: no call is made any more.
    pub fn is_disabled(&self) -> bool {
        self.recent_faults >= self.compiled.checked.limits.faults_max
    }

    /// Call the instance, making one first if the last one failed.
    #[inline]
    fn call<R>(
        &mut self,
        now_ns: u64,
        context: &mut Context,
        joining: Option<u32>,
        call: impl FnOnce(&Exports, &mut wasmtime::Store<HostState>) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        if self.long_calls >= OVERDUE.saturating_mul(self.long_calls_max) {
            return Err(self.overdue(now_ns));
        }
        if self.live.is_none() || !self.started {
            self.prepare(now_ns, context, joining)?;
        }
        let Some(live) = &mut self.live else { return Err(disabled()) };
        let commands = context.commands.list().len();
        let answer = live.call(self.call_budget, now_ns, context, call);
        self.long_calls += u64::from(live.state().cpu.is_long() && self.has_passes);
        match answer {
            Ok(answer) => Ok(answer),
            Err(error) => {
                // What it asked for before it failed is not done.
                context.commands.truncate(commands);
                Err(self.trapped(&error, now_ns))
            }
        }
    }

    #[cold]
    fn prepare(
        &mut self,
        now_ns: u64,
        context: &mut Context,
        joining: Option<u32>,
    ) -> Result<(), Fault> {
        Policy::start(self, context);
        if self.live.is_some() {
            return Ok(());
        }
        if self.is_disabled() {
            return Err(disabled());
        }
        self.respawn(now_ns, context)?;
        // `joining` is about to be told of anyway.
        let clients = context.world.clients.values().filter(|view| Some(view.info.id) != joining);
        let joined = clients.map(|view| Event::Joined(view.info.clone()));
        let open = self.told.open.iter().map(|&(client, since_ns, deadline_ns)| Event::UnitBegan {
            client,
            since_ns,
            deadline_ns,
        });
        let started = self.told.high_started.then_some(Event::HighStarted);
        let wanted = |event: &Event| self.subscriptions.has(event.kind());
        let events: Vec<_> = joined.chain(started).chain(open).filter(wanted).collect();
        let start = Instant::now();
        for event in &events {
            // Of many clients that takes long although each call is short.
            if start.elapsed() >= PASS_MAX {
                self.down = self.live.take().map(Live::end);
                return Err(self.overdue(now_ns));
            }
            let Some(live) = &mut self.live else { break };
            let commands = context.commands.list().len();
            let told = live.call(self.call_budget, now_ns, context, |policy, store| {
                tell(policy, store, now_ns, event)
            });
            told.map_err(|error| {
                context.commands.truncate(commands);
                self.trapped(&error, now_ns)
            })?;
        }
        self.told.joined = events.iter().filter_map(who_joined).collect();
        if self.has_passes {
            let tick_ms = self.compiled.checked.limits.tick_ms().max(1);
            self.long_calls += start.elapsed().as_millis() as u64 / tick_ms;
        }
        Ok(())
    }

    /// Make a new instance, for which the core is as it is for a policy just
    /// loaded.
    fn respawn(&mut self, now_ns: u64, context: &mut Context) -> Result<(), Fault> {
        let Some(mut state) = self.down.take() else { return Err(disabled()) };
        context.commands.push(Command::Reset);
        state.log.now_ns = now_ns;
        state.swap(context);
        let started =
            Live::start(&self.compiled.checked, *state, &self.config, self.respawn_budget);
        match started {
            Ok((mut live, _)) => {
                live.state_mut().swap(context);
                self.live = Some(live);
                self.respawns += 1;
                Ok(())
            }
            Err(mut refused) => {
                refused.state.swap(context);
                self.down = Some(refused.state);
                let fault = match refused.why {
                    Refusal::Fault(fault) => fault,
                    Refusal::Init(message) => Fault {
                        kind: FaultKind::Nonsense,
                        message: format!("`init` refuses what it accepted before: {message}"),
                    },
                    Refusal::Export(error) => {
                        Fault { kind: FaultKind::Trap, message: format!("{error:#}") }
                    }
                };
                Err(self.note(fault, now_ns))
            }
        }
    }

    #[cold]
    fn trapped(&mut self, error: &wasmtime::Error, now_ns: u64) -> Fault {
        let last_words = self.live.as_ref().map_or("", |live| &live.state().last_words);
        let fault = fault(error, self.call_budget, last_words);
        self.down = self.live.take().map(Live::end);
        self.note(fault, now_ns)
    }

    #[cold]
    fn overdue(&mut self, now_ns: u64) -> Fault {
        let message = format!(
            "its calls in one pass of the core took more than {} ms together",
            OVERDUE * PASS_POLICY_MS
        );
        self.note(Fault { kind: FaultKind::Overrun, message }, now_ns)
    }

    #[cold]
    fn nonsense(&mut self, message: &str, now_ns: u64) -> Fault {
        let fault = Fault { kind: FaultKind::Nonsense, message: message.into() };
        let fault = self.note(fault, now_ns);
        if self.is_disabled() {
            self.down = self.live.take().map(Live::end);
        }
        fault
    }

    /// Count a fault, and log it.
    fn note(&mut self, fault: Fault, now_ns: u64) -> Fault {
        let limits = &self.compiled.checked.limits;
        let forgotten_after_ns = limits.faults_forgotten_after_s.saturating_mul(1_000_000_000);
        if now_ns.saturating_sub(self.last_fault_ns) >= forgotten_after_ns {
            self.recent_faults = 0;
        }
        self.recent_faults += 1;
        self.last_fault_ns = now_ns;
        self.count(&fault, now_ns);
        if self.is_disabled() {
            self.subscriptions = Subscriptions::NONE;
            tracing::error!(
                target: "policy", policy = self.compiled.name(),
                "disabled after {} faults; the built-in rule serves until the core has loaded another",
                self.recent_faults
            );
        }
        fault
    }

    fn count(&mut self, fault: &Fault, now_ns: u64) {
        self.faults.count(fault.kind);
        let kind = kind_name(fault.kind);
        self.last_fault = Some(LastFault { kind, message: fault.message.clone(), at_ns: now_ns });
        tracing::warn!(target: "policy", policy = self.compiled.name(), kind, "{}", fault.message);
    }

    /// A well-formed answer may still make no sense.
    #[inline]
    fn sane(&mut self, answer: Answer, launch: &Launch) -> Result<Answer, Fault> {
        let message = match answer.decision {
            Decision::Run(_) => return Ok(answer),
            _ if launch.class == Class::High && !self.decides_high => NOT_ITS_TO_CHANGE,
            Decision::Sliced(0) => "answered sliced(0): a slice has at least 1 block",
            Decision::SmLimited(0) => "answered sm-limited(0): a launch needs at least 1 SM",
            _ => return Ok(answer),
        };
        Err(self.nonsense(message, launch.now_ns))
    }
}

impl Policy for WasmPolicy {
    fn begin_pass(&mut self) {
        (self.long_calls, self.has_passes) = (0, true);
    }

    #[inline]
    fn is_over_time(&self) -> bool {
        self.long_calls >= self.long_calls_max
    }

    fn is_disabled(&self) -> bool {
        WasmPolicy::is_disabled(self)
    }

    fn count_fault(&mut self, now_ns: u64, fault: &Fault) {
        self.note(fault.clone(), now_ns);
        if self.is_disabled() {
            self.down = self.live.take().map(Live::end).or(self.down.take());
        }
    }

    fn start(&mut self, context: &mut Context) {
        if !self.started {
            self.started = true;
            if let Some(live) = &mut self.live {
                live.state_mut().hand_over(context);
            }
        }
    }

    fn subscriptions(&self) -> Subscriptions {
        self.subscriptions
    }

    #[inline]
    fn decide(&mut self, launch: &Launch, context: &mut Context) -> Result<Answer, Fault> {
        let asked = convert::launch(launch);
        let answer = self.call(launch.now_ns, context, None, |policy, store| {
            policy.scheduler.tally_policy_scheduler().call_decide(store, asked)
        })?;
        let answer = self.sane(convert::answer(&answer), launch)?;
        self.decides += 1;
        if answer.reason > 0
            && let Some(live) = &mut self.live
        {
            live.state_mut().reasons.count(answer.reason);
        }
        Ok(answer)
    }

    fn on_event(&mut self, now_ns: u64, event: &Event, context: &mut Context) -> Result<(), Fault> {
        if !self.subscriptions.has(event.kind()) {
            return if self.is_disabled() { Err(disabled()) } else { Ok(()) };
        }
        let joining = who_joined(event);
        if joining.is_some_and(|id| self.live.is_some() && self.told.joined.remove(&id)) {
            return Ok(());
        }
        let called =
            self.call(now_ns, context, joining, |policy, store| tell(policy, store, now_ns, event));
        self.told.note(event);
        called?;
        self.events += 1;
        Ok(())
    }
}

/// What an instance has been told and what still is so: a new one is told it, too.
#[derive(Default)]
struct Told {
    high_started: bool,
    /// Open units: client, when it began, and its deadline.
    open: Vec<(u32, u64, u64)>,
    /// Clients that it was told of when it was made: who makes a policy active goes on to tell it of each client after
    /// its first instance has failed.
    joined: BTreeSet<u32>,
}

fn who_joined(event: &Event) -> Option<u32> {
    match event {
        Event::Joined(client) => Some(client.id),
        _ => None,
    }
}

impl Told {
    fn note(&mut self, event: &Event) {
        match *event {
            Event::HighStarted => self.high_started = true,
            Event::HighEnded => self.high_started = false,
            Event::UnitBegan { client, since_ns, deadline_ns } => {
                self.open.retain(|(of, ..)| *of != client);
                self.open.push((client, since_ns, deadline_ns));
            }
            Event::UnitsEnded { client, .. } => self.open.retain(|(of, ..)| *of != client),
            Event::Left(client) => {
                self.open.retain(|(of, ..)| *of != client);
                self.joined.remove(&client);
            }
            Event::Completed(_) | Event::Joined(_) | Event::Timer(_) => {}
        }
    }
}

/// Tell an instance of an event, if it exports the event's interface.
fn tell(
    policy: &Exports,
    store: &mut wasmtime::Store<HostState>,
    now_ns: u64,
    event: &Event,
) -> wasmtime::Result<()> {
    let called = match event {
        Event::HighStarted => {
            policy.activity.as_ref().map(|to| to.call_high_started(store, now_ns))
        }
        Event::HighEnded => policy.activity.as_ref().map(|to| to.call_high_ended(store, now_ns)),
        Event::UnitBegan { client, since_ns, deadline_ns } => policy
            .units
            .as_ref()
            .map(|to| to.call_began(store, now_ns, *client, *since_ns, *deadline_ns)),
        Event::UnitsEnded { client, units, took_ns } => {
            policy.units.as_ref().map(|to| to.call_ended(store, now_ns, *client, *units, *took_ns))
        }
        Event::Completed(done) => {
            let done = convert::completion(done);
            policy.completions.as_ref().map(|to| to.call_completed(store, now_ns, done))
        }
        Event::Joined(info) => {
            let client = convert::client(info);
            policy.membership.as_ref().map(|to| to.call_joined(store, now_ns, client))
        }
        Event::Left(client) => {
            policy.membership.as_ref().map(|to| to.call_left(store, now_ns, *client))
        }
        Event::Timer(token) => policy.timer.as_ref().map(|to| to.call_fired(store, now_ns, *token)),
    };
    called.unwrap_or(Ok(()))
}

/// Why the first instance was not started.
fn not_started(file: &str, why: Refusal) -> LoadError {
    match why {
        Refusal::Export(error) => inspect::wrong_export(file, &error),
        Refusal::Init(message) => LoadError::InitRefused { file: file.into(), message },
        Refusal::Fault(fault) => LoadError::InitFailed { file: file.into(), fault },
    }
}

/// No call was made. Without a message, so that a disabled policy costs
/// nothing; [`PolicyStatus::last_fault`] says why it is.
#[cold]
fn disabled() -> Fault {
    Fault { kind: FaultKind::Disabled, message: String::new() }
}
