//! One service: its open step, what its steps take without others, and whether it keeps its objective.

use crate::rhythm::Rhythm;
use crate::settings::Settings;
use crate::widths::{LATE, Ladder, Widths};
use std::collections::VecDeque;
use tally_sdk::grid::scaled;
use tally_sdk::{ClientId, NEVER, host};

/// Steps without others that are remembered, and needed before any slack is known.
const OWN_STEPS: usize = 16;
const OWN_STEPS_MIN: usize = 8;
/// Such a step is had again after so many, if slack was asked for.
const OWN_EVERY: u32 = 128;
/// So many steps in a row are tried for it, at first and later: what is under way may take longer than a step.
const OWN_RUN: [u32; 2] = [64, 4];
/// Steps by which it is judged whether the objective is kept.
const JUDGED_STEPS: usize = 200;
/// A step that is open for so many times its objective is none: the program does something else.
const LOST: u64 = 8;
/// The slack is divided into so many parts; at first the others have half of it.
const PARTS: usize = 8;
const PARTS_AT_FIRST: usize = PARTS / 2;
/// What a step could not bear runs whole between two of them only if it takes at most so many times its objective.
const WHOLE_OBJECTIVES: u64 = 2;
/// Few of its steps were delayed: of as many at least.
const RISK_STEPS_MIN: usize = 50;
/// A service is asked for its objectives again after so many units.
const ASK_UNITS: u64 = 256;

/// What others may have under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Busy {
    /// Until when anything may be under way.
    pub until_ns: u64,
    /// Until when something is that the width let in.
    pub on_width_until_ns: u64,
}

/// The open unit, or the oldest of several.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    since_ns: u64,
    /// Longest time that it may take. Without, it is no step: others keep to their width beside it.
    target_ns: Option<u64>,
    /// Time that it does not need itself, and what others have taken of it on all SMs.
    slack_ns: u64,
    spent_ns: u64,
    /// The others wait, so that its own time is seen.
    alone: bool,
    /// Others ran meanwhile; such as the width let in; and those on fewer SMs than this service would have left them.
    beside: bool,
    on_width: bool,
    on_fewer: bool,
    /// For how long launches were under way when it began that it could not bear: what that explains tells nothing of
    /// widths.
    unborne_ns: u64,
    /// A launch was held for its sake.
    holds: bool,
}

/// What came of a unit that ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    pub late: bool,
    /// The width, or whether the service is served strictly, is another.
    pub changed: bool,
    /// What the step took of its objective, permille.
    pub permille: Option<u32>,
}

/// What is known of a service: its objective, its steps, and how much time those leave.
#[derive(Clone, Debug)]
pub struct Service {
    pub client: ClientId,
    pub widths: Widths,
    /// Parts of a step's slack for launches that cannot be limited.
    parts: Ladder,
    pub rhythm: Rhythm,
    /// Longest time of a unit and of a token, as far as it has objectives for them.
    objectives_ns: [Option<u64>; 2],
    open: Option<Open>,
    /// The unit that was open before.
    last: Option<Open>,
    ended_ns: Option<u64>,
    units: u64,
    /// Longest time of the latest step.
    target_ns: u64,
    own: VecDeque<u32>,
    own_permille: u32,
    /// Steps until the next ones without others, and of those that are left.
    own_in: u32,
    own_run: u32,
    /// Slack was asked for since the last step without others.
    wants_slack: bool,
    /// Of each of the latest steps: it was late; that, or too long beside what it could not bear.
    kept: VecDeque<(bool, bool)>,
    late_of_kept: usize,
    delayed_of_kept: usize,
    /// Until when something may be under way that ran whole though a step could not bear it.
    pub unborne_until_ns: u64,
    misses: bool,
}

impl Service {
    /// `sms`: of the GPU, 0 if it is not known yet.
    pub fn new(client: ClientId, sms: u32, settings: &Settings) -> Self {
        let (target, good) = (settings.target_permille, settings.good_steps);
        Service {
            client,
            widths: Widths::new(&host::widths(), sms, settings.start_sms, target, good),
            parts: Ladder::new(PARTS_AT_FIRST, PARTS, target, good),
            rhythm: Rhythm::default(),
            objectives_ns: [None; 2],
            open: None,
            last: None,
            ended_ns: None,
            units: 0,
            target_ns: 0,
            own: VecDeque::with_capacity(OWN_STEPS),
            own_permille: 0,
            own_in: OWN_EVERY,
            own_run: OWN_RUN[0],
            wants_slack: true,
            kept: VecDeque::with_capacity(JUDGED_STEPS),
            late_of_kept: 0,
            delayed_of_kept: 0,
            unborne_until_ns: 0,
            misses: false,
        }
    }

    /// Ask the core for its objectives. What was learned of another one is forgotten.
    pub fn ask(&mut self, now_ns: u64) {
        let service = host::service(self.client);
        let objective_ns = service.and_then(|service| service.objective).map(|one| one.slo_ns);
        let token_ns = service.and_then(|service| service.tokens).map(|tokens| tokens.tpot_ns);
        if std::mem::replace(&mut self.objectives_ns, [objective_ns, token_ns])
            != [objective_ns, token_ns]
        {
            self.own.clear();
            (self.own_permille, self.own_run) = (0, OWN_RUN[0]);
            self.kept.clear();
            (self.late_of_kept, self.delayed_of_kept, self.misses) = (0, 0, false);
            self.neighbours_changed(now_ns, true);
        }
    }

    /// The shorter of its objectives.
    pub fn objective_ns(&self) -> Option<u64> {
        self.objectives_ns.into_iter().flatten().min()
    }

    /// Others wait while it has a unit open.
    pub fn is_strict(&self) -> bool {
        self.objectives_ns == [None; 2] || self.misses
    }

    /// A unit is open that others have to respect.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// A step is open, and not for so long that it is none.
    pub fn is_in_step(&self, now_ns: u64) -> bool {
        self.open.is_some_and(|open| {
            let target_ns = open.target_ns.map(|ns| ns.saturating_mul(LOST));
            target_ns.is_some_and(|ns| now_ns < open.since_ns.saturating_add(ns))
        })
    }

    /// SMs that others have beside the open unit.
    pub fn width(&self) -> u32 {
        let is_alone = self.open.is_some_and(|open| open.alone);
        if is_alone { 0 } else { self.widths.sms() }
    }

    /// What others may still take of the open step's time on all SMs.
    pub fn left_ns(&self) -> u64 {
        let left_ns = |open: Open| self.part_of(open.slack_ns).saturating_sub(open.spent_ns);
        self.open.map_or(0, left_ns)
    }

    /// The same of a step that begins.
    pub fn bears_ns(&self, settings: &Settings) -> u64 {
        self.part_of(self.slack_ns(settings))
    }

    /// Whether launches may be under way for so long between two steps, though one that begins meanwhile cannot bear
    /// it: they delay a few at most, and few were delayed.
    pub fn risks(&self, under_way_ns: u64, settings: &Settings) -> bool {
        let is_in_step = self.open.is_some_and(|open| open.target_ns.is_some());
        if is_in_step || self.is_strict() || self.own.len() < OWN_STEPS_MIN {
            return false;
        }
        let objective_ns = self.objective_ns().unwrap_or(0);
        let steps = self.kept.len().max(RISK_STEPS_MIN);
        under_way_ns > self.bears_ns(settings)
            && under_way_ns <= objective_ns.saturating_mul(WHOLE_OBJECTIVES)
            && self.delayed_of_kept * 100 < steps * settings.whole_late_percent_max as usize
    }

    fn part_of(&self, slack_ns: u64) -> u64 {
        slack_ns / PARTS as u64 * self.parts.level() as u64
    }

    /// Time that a step does not need itself.
    fn slack_ns(&self, settings: &Settings) -> u64 {
        if self.own.len() < OWN_STEPS_MIN || self.is_strict() {
            return 0;
        }
        let spare = settings.target_permille.saturating_sub(self.own_permille);
        scaled(self.target_ns, spare.into(), 1_000)
    }

    /// For how long others still have to wait after its last unit.
    pub fn gap_ns(&self, now_ns: u64, idle_gap_ns: u64) -> u64 {
        let ended_ns = self.ended_ns.filter(|_| self.is_strict());
        ended_ns.map_or(0, |ns| idle_gap_ns.saturating_sub(now_ns.saturating_sub(ns)))
    }

    /// A launch starts beside the open unit, on so many SMs at most.
    pub fn goes_on_width(&mut self, width: u32) {
        let own = self.widths.sms();
        if let Some(open) = &mut self.open {
            (open.beside, open.on_width) = (true, true);
            open.on_fewer |= width < own;
        }
    }

    /// A launch starts beside the open unit, and takes so much of its slack.
    pub fn takes_slack(&mut self, cost_ns: u64) {
        if let Some(open) = &mut self.open {
            open.beside = true;
            open.spent_ns = open.spent_ns.saturating_add(cost_ns);
            self.wants_slack = true;
        }
    }

    /// A launch is held for its sake.
    pub fn holds(&mut self) {
        self.wants_slack = true;
        if let Some(open) = &mut self.open {
            open.holds = true;
        }
    }

    /// A unit began, while others are busy.
    pub fn began(
        &mut self,
        now_ns: u64,
        since_ns: u64,
        deadline_ns: u64,
        busy: Busy,
        settings: &Settings,
    ) {
        let target_ns = (deadline_ns != NEVER).then(|| deadline_ns.saturating_sub(since_ns).max(1));
        let is_known = match target_ns {
            Some(_) => self.objectives_ns.contains(&target_ns),
            // It is a prefill, or the objective was taken away.
            None => self.open.or(self.last).is_none_or(|before| before.target_ns.is_none()),
        };
        if self.units.is_multiple_of(ASK_UNITS) || !is_known {
            self.ask(now_ns);
        }
        let again = self.open.or(self.last).filter(|open| open.since_ns == since_ns);
        let open = Open { since_ns, target_ns, ..Open::default() };
        let Some(step_ns) = target_ns else {
            self.open = Some(open);
            return;
        };
        self.target_ns = step_ns;
        if let Some(before) = again {
            // The same one, as another ended or the objective changed: what it bore is borne.
            self.open = Some(Open { target_ns, ..before });
            return;
        }
        self.rhythm.began(since_ns);
        // Of one that has been open for a while less is left.
        let own_ns = scaled(step_ns, self.own_permille.into(), 1_000);
        let end_ns = scaled(step_ns, settings.target_permille.into(), 1_000);
        let rest_ns = since_ns.saturating_add(end_ns).saturating_sub(now_ns).saturating_sub(own_ns);
        let alone = self.is_own_due();
        let slack_ns = if alone { 0 } else { self.slack_ns(settings).min(rest_ns) };
        let beside = busy.until_ns > since_ns;
        let on_width = busy.on_width_until_ns > since_ns;
        let unborne_ns = self.unborne_until_ns.saturating_sub(since_ns);
        self.open = Some(Open { slack_ns, alone, beside, on_width, unborne_ns, ..open });
    }

    /// Whether the others wait in the step that begins, for its own time to be seen.
    fn is_own_due(&mut self) -> bool {
        if self.own_run > 0 {
            self.own_run -= 1;
            return true;
        }
        self.own_in -= 1;
        if self.own_in == 0 {
            let is_known = self.own.len() >= OWN_STEPS_MIN;
            let is_wanted = self.wants_slack || !is_known;
            self.own_run = if is_wanted { OWN_RUN[1] } else { 0 };
            self.own_in = OWN_EVERY;
        }
        false
    }

    /// The open unit is over, and so many took so long each: of several only the average is known, which counts once.
    pub fn ended(&mut self, now_ns: u64, units: u32, took_ns: u64, settings: &Settings) -> Ended {
        let open = self.open.take();
        (self.last, self.ended_ns) = (open, Some(now_ns));
        self.units = self.units.saturating_add(1);
        let Some((open, target_ns)) = open.and_then(|open| Some((open, open.target_ns?))) else {
            return Ended::default();
        };
        if units == 0 || took_ns == 0 {
            return Ended::default();
        }
        let permille = scaled(took_ns, 1_000, target_ns).min(u32::MAX.into()) as u32;
        let late = took_ns > target_ns;
        // A part of a permille is late, too.
        let permille = if late { permille.max(LATE + 1) } else { permille };
        let before = (self.widths.sms(), self.is_strict());
        if !open.beside {
            self.took_alone(permille);
        }
        if !self.misses {
            self.learn(now_ns, &open, permille, settings);
        }
        let delayed = late || (open.unborne_ns > 0 && permille > settings.target_permille);
        self.judge(now_ns, late, delayed, settings);
        let changed = before != (self.widths.sms(), self.is_strict());
        Ended { late, changed, permille: Some(permille) }
    }

    /// What a step tells of the width, and of the part of the slack that others may take.
    fn learn(&mut self, now_ns: u64, open: &Open, permille: u32, settings: &Settings) {
        let is_good = permille <= settings.target_permille;
        if is_good && open.alone {
            return;
        }
        let (has_spent, waits) = (open.spent_ns > 0, open.holds && self.widths.sms() == 0);
        // Of a step that took too long that is to blame which took more of it.
        let ns = |permille: u32| scaled(self.target_ns, permille.into(), 1_000);
        let over_ns = ns(permille.saturating_sub(self.own_permille));
        if !is_good && open.unborne_ns >= over_ns / 2 && open.unborne_ns > 0 {
            return;
        }
        let by_slack = open.spent_ns >= (over_ns / 2).min(self.widths.part_of(ns(permille)));
        if (open.on_width || waits) && !(is_good && open.on_fewer) && (is_good || !by_slack) {
            self.widths.step(now_ns, open.since_ns, permille);
        }
        // What was held asks for more.
        if (has_spent || open.holds) && (is_good || (has_spent && (by_slack || !open.on_width))) {
            self.parts.step(now_ns, open.since_ns, permille);
        }
    }

    fn took_alone(&mut self, permille: u32) {
        if self.own.len() == OWN_STEPS {
            self.own.pop_front();
        }
        self.own.push_back(permille);
        let mut sorted: Vec<u32> = self.own.iter().copied().collect();
        sorted.sort_unstable();
        self.own_permille = sorted[sorted.len() / 2];
        if self.own.len() >= OWN_STEPS_MIN {
            (self.own_in, self.own_run, self.wants_slack) = (OWN_EVERY, 0, false);
        }
    }

    /// Strictly while too many of the latest steps were late. Before there are so many the others count as kept.
    fn judge(&mut self, now_ns: u64, late: bool, delayed: bool, settings: &Settings) {
        if self.kept.len() == JUDGED_STEPS
            && let Some((late, delayed)) = self.kept.pop_front()
        {
            self.late_of_kept -= usize::from(late);
            self.delayed_of_kept -= usize::from(delayed);
        }
        self.kept.push_back((late, delayed));
        self.late_of_kept += usize::from(late);
        self.delayed_of_kept += usize::from(delayed);
        let misses = self.late_of_kept * 100 > JUDGED_STEPS * settings.late_percent_max as usize;
        if self.misses && !misses {
            self.widths.begin_narrow(now_ns);
            self.parts.begin_anew(now_ns, 1);
        }
        self.misses = misses;
    }

    /// Other clients came or left: what was learned of widths is of others.
    pub fn neighbours_changed(&mut self, now_ns: u64, is_one_more: bool) {
        self.widths.neighbours_changed(now_ns, is_one_more);
        self.parts.begin_anew(now_ns, PARTS_AT_FIRST);
    }

    /// What its steps take without others, permille of the objective; `None`: too few were seen.
    pub fn own_permille(&self) -> Option<u32> {
        (self.own.len() >= OWN_STEPS_MIN).then_some(self.own_permille)
    }

    /// Go on from what was saved.
    pub fn remember(&mut self, own_permille: u32, sms: u32) {
        (0..OWN_STEPS_MIN).for_each(|_| self.took_alone(own_permille));
        self.widths.go_on_at(sms);
    }
}
