//! Each record as bytes.

use super::{About, Begin, FAULT_BYTES_MAX, Outcome, Record, beginning, kind, timed};
use tally_engine::policy::{
    self, Class, ClientId, ClientInfo, Command, Completion, Decision, Event, Fault, FaultKind,
    Form, KernelId, Launch, ServiceView, SharingMode, Subscriptions, Usage,
};
use tally_engine::profile::{Demand, FormView, KernelKey, KernelView, Profile, Transformation};

/// Appends records to a buffer. Each starts with its [`kind`].
pub struct Encoder<'a>(pub &'a mut Vec<u8>);

impl Encoder<'_> {
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn bytes(&mut self, v: &[u8]) {
        self.u32(v.len() as u32);
        self.0.extend_from_slice(v);
    }
    fn text(&mut self, v: &str) {
        self.bytes(v.as_bytes());
    }
    fn class(&mut self, class: Class) {
        self.u8(u8::from(class == Class::BestEffort));
    }
    fn client(&mut self, info: &ClientInfo) {
        self.u32(info.id);
        self.class(info.class);
        self.text(&info.name);
        self.u32(info.labels.len() as u32);
        for (key, value) in &info.labels {
            self.text(key);
            self.text(value);
        }
    }

    pub fn policy(&mut self, about: &About) {
        self.u8(kind::POLICY);
        self.u64(about.generation);
        for text in [&about.name, &about.digest, &about.path, &about.config] {
            self.text(text);
        }
        self.u32(about.reasons.len() as u32);
        for (reason, text) in &about.reasons {
            self.u8(*reason);
            self.text(text);
        }
        self.u8(about.saved.is_some().into());
        if let Some(saved) = &about.saved {
            self.text(&saved.format);
            self.u32(saved.version);
            self.bytes(&saved.data);
        }
    }

    pub fn base(&mut self, sharing: SharingMode, reserve_sms: &[u32]) {
        self.u8(kind::BASE);
        self.u8(match sharing {
            SharingMode::Concurrent => 0,
            SharingMode::TimeSliced => 1,
        });
        self.u32(reserve_sms.len() as u32);
        reserve_sms.iter().for_each(|sms| self.u32(*sms));
    }

    pub fn kernel(&mut self, id: KernelId, key: &KernelKey) {
        self.u8(kind::KERNEL);
        self.u32(id);
        self.u64(key.image as u64);
        self.u64((key.image >> 64) as u64);
        key.grid.iter().chain(&key.block).for_each(|n| self.u32(*n));
        self.text(&key.name);
    }

    fn figures(
        &mut self,
        id: KernelId,
        figures: [u64; 6],
        demand: Demand,
        transformation: Transformation,
    ) {
        self.u8(kind::PROFILE);
        self.u32(id);
        figures.iter().for_each(|n| self.u64(*n));
        self.u32(demand.blocks_per_sm.into());
        self.u32(demand.registers.into());
        match transformation {
            // A policy is not told what holds of one client.
            Transformation::Unknown | Transformation::WholeHere(_) => self.u8(0),
            Transformation::Preparable => self.u8(1),
            Transformation::Preparing => self.u8(2),
            Transformation::Ready { sliced, preemptible } => {
                self.u8(3);
                self.u8(u8::from(sliced) | u8::from(preemptible) << 1);
            }
            Transformation::WholeOnly(why) => {
                self.u8(4);
                self.text(why);
            }
        }
    }

    fn forms(&mut self, forms: impl ExactSizeIterator<Item = FormView>) {
        self.u32(forms.len() as u32);
        for f in forms {
            self.form(f.form);
            self.u32(f.argument);
            for n in [f.count, f.mean_ns, f.p50_ns, f.p99_ns, f.latest_ns, f.turnaround_ns] {
                self.u64(n);
            }
        }
    }

    fn form(&mut self, form: Form) {
        self.u8(match form {
            Form::Whole => 0,
            Form::Sliced => 1,
            Form::Preemptible => 2,
            Form::SmLimited => 3,
        });
    }

    /// [`Record::Profile`], of the engine's own table.
    pub fn profile(&mut self, id: KernelId, p: &Profile) {
        let waves = p.waves_permille();
        let figures = [p.count, p.mean_ns, p.p50_ns(), p.p99_ns(), p.latest_ns(), waves];
        self.figures(id, figures, p.demand, p.transformation);
        self.forms(p.form_views());
    }

    pub fn view(&mut self, id: KernelId, v: &KernelView) {
        let figures = [v.count, v.mean_ns, v.p50_ns, v.p99_ns, v.latest_ns, v.waves_permille];
        self.figures(id, figures, v.demand, v.transformation);
        self.forms(v.forms.iter().copied());
    }

    pub fn connected(&mut self, info: &ClientInfo) {
        self.u8(kind::CLIENT);
        self.client(info);
    }

    pub fn usage(&mut self, id: ClientId, usage: &Usage) {
        self.u8(kind::USAGE);
        self.u32(id);
        self.u64(usage.waiting_since_ns);
        self.u32(usage.in_flight);
        self.u64(usage.in_flight_ns);
        self.u64(usage.measured_ns);
        self.u64(usage.charged_ns);
        self.u32(usage.min_share_permille);
        self.u64(usage.backlogged_ns);
        self.u64(usage.backlogged_since_ns);
        self.u64(usage.limit_cost_ns);
    }

    pub fn service(&mut self, id: ClientId, view: &ServiceView) {
        self.u8(kind::SERVICE);
        self.u32(id);
        self.u8(view.objective.is_some().into());
        if let Some(objective) = view.objective {
            self.u64(objective.slo_ns);
            self.u64(objective.percentile.to_bits());
        }
        self.u64(view.open_since_ns);
        self.u8(view.open_is_token.into());
        self.u64(view.units);
        self.u64(view.units_within);
        self.u32(view.recent);
        self.u32(view.recent_within);
        self.u64(view.p50_ns);
        self.u64(view.p99_ns);
        self.u8(view.tokens.is_some().into());
        if let Some(tokens) = view.tokens {
            for n in [tokens.tpot_ns, tokens.count, tokens.within] {
                self.u64(n);
            }
            self.u32(tokens.recent);
            self.u32(tokens.recent_within);
            self.u64(tokens.p50_ns);
            self.u64(tokens.p99_ns);
        }
        self.u8(view.profile.is_some().into());
        if let Some(profile) = view.profile {
            self.u64(profile.units);
            self.u32(profile.launches);
            self.u64(profile.gpu_busy_ns);
            self.u32(profile.gaps);
            for ns in [profile.gaps_ns, profile.gap_median_ns, profile.gap_longest_ns] {
                self.u64(ns);
            }
            self.u32(profile.sms_max);
            self.u32(profile.sms_mean);
        }
    }

    pub fn gone(&mut self, id: ClientId) {
        self.u8(kind::GONE);
        self.u32(id);
    }

    pub fn begin(&mut self, how: Begin, lost: u64, subscribed: Subscriptions, sm_count: u32) {
        self.u8(kind::BEGIN);
        self.u8(match how {
            Begin::PolicyStart => 0,
            Begin::MidRun => 1,
            Begin::AfterGap => 2,
            Begin::Saved => 3,
        });
        self.u64(lost);
        self.u8(subscribed.bits());
        self.u32(sm_count);
    }

    pub fn start(&mut self, commands: &[Command]) {
        self.u8(kind::START);
        self.commands(commands);
    }

    fn commands(&mut self, commands: &[Command]) {
        self.u32(commands.len() as u32);
        for command in commands {
            match *command {
                Command::SetTimer { delay_ns, token } => {
                    self.u8(0);
                    self.u64(delay_ns);
                    self.u64(token);
                }
                Command::SetWindow { client, window_ns } => {
                    self.u8(1);
                    self.u32(client);
                    self.u64(window_ns);
                }
                Command::RevokeLease(client) => {
                    self.u8(2);
                    self.u32(client);
                }
                Command::SetYield { client, yielded } => {
                    self.u8(3);
                    self.u32(client);
                    self.u8(yielded.into());
                }
                Command::SetAutoYield { client, enabled, idle_ns } => {
                    self.u8(4);
                    self.u32(client);
                    self.u8(enabled.into());
                    self.u64(idle_ns);
                }
                Command::SetUngated { client, ungated } => {
                    self.u8(5);
                    self.u32(client);
                    self.u8(ungated.into());
                }
                Command::SetWidth { client, sms } => {
                    self.u8(6);
                    self.u32(client);
                    self.u32(sms);
                }
                Command::Reset => self.u8(7),
            }
        }
    }

    fn fault(&mut self, kind: FaultKind, timed: bool, message: &str) {
        self.u8(match kind {
            FaultKind::Trap => 0x10,
            FaultKind::Overrun => 0x11,
            FaultKind::Memory => 0x12,
            FaultKind::Nonsense => 0x13,
            FaultKind::Disabled => 0x14,
            FaultKind::Stall => 0x15,
        });
        self.u8(timed.into());
        self.text(beginning(message, FAULT_BYTES_MAX));
    }

    /// [`Record::Decide`]: the call's end and the commands that it left.
    #[inline]
    pub fn decide(
        &mut self,
        l: &Launch,
        outcome: Result<policy::Answer, (FaultKind, bool, &str)>,
        commands: &[Command],
    ) {
        self.u8(kind::DECIDE);
        self.u64(l.now_ns);
        self.u32(l.client);
        self.class(l.class);
        self.u32(l.kernel);
        self.u32(l.state);
        self.u32(l.offered);
        self.u64(l.grid_blocks);
        self.u32(l.block_threads);
        self.u32(l.shared_bytes);
        for ns in [l.predicted_ns, l.waited_ns, l.in_flight_ns, l.high_idle_ns] {
            self.u64(ns);
        }
        for n in [l.high_clients, l.waiting_clients, l.stream, l.sm_count] {
            self.u32(n);
        }
        match outcome {
            Ok(policy::Answer { decision, reason }) => {
                match decision {
                    Decision::Run(lease) => {
                        self.u8(0);
                        self.u32(lease);
                    }
                    Decision::Hold(ns) => {
                        self.u8(1);
                        self.u64(ns);
                    }
                    Decision::HoldUntilCompletion(ns) => {
                        self.u8(2);
                        self.u64(ns);
                    }
                    Decision::Sliced(blocks) => {
                        self.u8(3);
                        self.u32(blocks);
                    }
                    Decision::Preemptible => self.u8(4),
                    Decision::SmLimited(sms) => {
                        self.u8(5);
                        self.u32(sms);
                    }
                }
                self.u8(reason);
            }
            Err((kind, timed, message)) => self.fault(kind, timed, message),
        }
        self.commands(commands);
    }

    pub fn event(
        &mut self,
        now_ns: u64,
        event: &Event,
        outcome: Result<(), (FaultKind, bool, &str)>,
        commands: &[Command],
    ) {
        self.u8(kind::EVENT);
        self.u64(now_ns);
        match event {
            Event::Joined(info) => {
                self.u8(0);
                self.client(info);
            }
            Event::Left(id) => {
                self.u8(1);
                self.u32(*id);
            }
            Event::HighStarted => self.u8(2),
            Event::HighEnded => self.u8(3),
            Event::Completed(done) => {
                self.u8(4);
                self.done(done);
            }
            Event::Timer(token) => {
                self.u8(5);
                self.u64(*token);
            }
            Event::UnitBegan { client, since_ns, deadline_ns } => {
                self.u8(6);
                self.u32(*client);
                self.u64(*since_ns);
                self.u64(*deadline_ns);
            }
            Event::UnitsEnded { client, units, took_ns } => {
                self.u8(7);
                self.u32(*client);
                self.u32(*units);
                self.u64(*took_ns);
            }
        }
        match outcome {
            Ok(()) => self.u8(0),
            Err((kind, timed, message)) => self.fault(kind, timed, message),
        }
        self.commands(commands);
    }

    fn done(&mut self, done: &Completion) {
        self.u32(done.client);
        self.u32(done.kernel);
        self.form(done.form);
        self.u32(done.argument);
        self.u64(done.predicted_ns);
        self.u64(done.measured_ns.unwrap_or(0));
        self.u64(done.charged_ns);
    }

    pub fn counted_fault(&mut self, now_ns: u64, kind: FaultKind, message: &str) {
        self.u8(kind::FAULT);
        self.u64(now_ns);
        self.fault(kind, false, message);
    }

    pub fn completion(&mut self, now_ns: u64, done: &Completion) {
        self.u8(kind::COMPLETION);
        self.u64(now_ns);
        self.done(done);
    }

    pub fn end(&mut self, reason: &str, dropped: u64) {
        self.u8(kind::END);
        self.text(reason);
        self.u64(dropped);
    }

    pub fn record(&mut self, record: &Record) {
        match record {
            Record::Policy(about) => self.policy(about),
            Record::Base(b) => self.base(b.sharing, &b.reserve_sms),
            Record::Kernel { id, key } => self.kernel(*id, key),
            Record::Profile { id, view } => self.view(*id, view),
            Record::Client(info) => self.connected(info),
            Record::Usage { id, usage } => self.usage(*id, usage),
            Record::Service { id, view } => self.service(*id, view),
            Record::Gone(id) => self.gone(*id),
            Record::Begin { how, lost, subscribed, sm_count } => {
                self.begin(*how, *lost, *subscribed, *sm_count);
            }
            Record::Start(commands) => self.start(commands),
            Record::Decide { launch, answer } => {
                self.decide(launch, borrowed(&answer.outcome), &answer.commands);
            }
            Record::Event { now_ns, event, answer } => {
                self.event(*now_ns, event, borrowed(&answer.outcome), &answer.commands);
            }
            Record::Completion { now_ns, done } => self.completion(*now_ns, done),
            Record::Fault { now_ns, kind, message } => self.counted_fault(*now_ns, *kind, message),
            Record::End { reason, dropped } => self.end(reason, *dropped),
        }
    }
}

fn borrowed<T: Copy>(outcome: &Outcome<T>) -> Result<T, (FaultKind, bool, &str)> {
    match outcome {
        Outcome::Ok(answer) => Ok(*answer),
        Outcome::Fault { kind, timed, message } => Err((*kind, *timed, message)),
    }
}

/// What the encoders take, of a call's result.
pub fn of_call<T: Copy>(result: &Result<T, Fault>) -> Result<T, (FaultKind, bool, &str)> {
    match result {
        Ok(answer) => Ok(*answer),
        Err(fault) => Err((fault.kind, timed(fault), &fault.message)),
    }
}
