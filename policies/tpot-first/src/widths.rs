//! Select: on how many SMs the other clients run beside a step of a service, learned from what its steps took. Widths
//! are those of the GPU's partitions (`widths.all`).
//!
//! ```text
//! a step ended, beside launches on at most the width:
//!     if it was late:                                    narrower by a quarter of the widths, at least by one
//!     if the 95th percentile at this width is over the target share of the objective, by more than chance:
//!                                                        narrower by one
//!         both times further, past widths that were measured as too wide
//!     if so many steps at this width were good:          wider by one; twice as many for a width that failed before
//! ```
//!
//! The part of a step's slack that launches have which cannot be limited is learned in the same way, in eighths: from
//! steps in which they took some of it, or wanted more.
//!
//! Steps are compared by their time over their own objective, in permille: a service may have objectives for tokens and
//! for units.

/// SMs that are told apart; a GPU with more, or one that is not known yet, is taken to have as many.
const SMS_MAX: u32 = 1_024;
/// Widths where no launch can be limited are multiples of so many.
const PART_SMS: u32 = 8;
/// Latest steps that are remembered of each width.
const WINDOW: usize = 128;
/// So few do not tell a percentile.
const FEW: usize = 20;
/// Of the latest steps a twentieth and one and a half standard deviations of as many throws may be over the target, and
/// one in any case: looked at after each step, no more than a twentieth would soon be exceeded by chance where far
/// fewer are over. Thousandths of a step, and of a step for the root of how many there are.
const OVER: [u64; 2] = [50, 327];
/// A width that failed is tried again after at most so many doublings of the steps.
const DOUBLINGS_MAX: u32 = 6;
/// In the objective's own time, permille.
pub const LATE: u32 = 1_000;
/// Of several recorded steps this share decides.
const PERCENTILE: usize = 95;

/// Latest steps at one level.
#[derive(Clone, Debug, Default)]
struct Window {
    permille: Vec<u32>,
    next: usize,
    over: usize,
    failures: u32,
}

impl Window {
    fn add(&mut self, permille: u32, target: u32) {
        if self.permille.len() < WINDOW {
            self.permille.push(permille);
        } else {
            self.over -= usize::from(self.permille[self.next] > target);
            self.permille[self.next] = permille;
            self.next = (self.next + 1) % WINDOW;
        }
        self.over += usize::from(permille > target);
    }

    fn forget_steps(&mut self) {
        *self = Window { failures: self.failures, ..Window::default() };
    }

    /// The 95th percentile is over the target, by more than chance.
    fn is_over(&self) -> bool {
        let (count, over) = (self.permille.len() as u64, self.over as u64);
        over > 1 && over * 1_000 > count * OVER[0] + count.isqrt() * OVER[1]
    }

    fn p95(&self) -> Option<u32> {
        let mut sorted = self.permille.clone();
        sorted.sort_unstable();
        sorted.get((sorted.len() * PERCENTILE).div_ceil(100).checked_sub(1)?).copied()
    }
}

/// Levels of which the highest is looked for at which steps keep the target share, and what was measured at each.
#[derive(Clone, Debug)]
pub struct Ladder {
    level: usize,
    target: u32,
    good_steps: u32,
    good: u32,
    /// Steps that began before are not of this level.
    changed_ns: u64,
    windows: Vec<Window>,
}

impl Ladder {
    pub fn new(level: usize, top: usize, target: u32, good_steps: u32) -> Self {
        let windows = vec![Window::default(); top + 1];
        Ladder { level: level.min(top), target, good_steps, good: 0, changed_ns: 0, windows }
    }

    pub fn level(&self) -> usize {
        self.level
    }

    pub fn top(&self) -> usize {
        self.windows.len() - 1
    }

    /// What was measured was of something else. Go on at this level.
    pub fn begin_anew(&mut self, now_ns: u64, level: usize) {
        self.level = level.min(self.top());
        (self.good, self.changed_ns) = (0, now_ns);
        self.windows.fill(Window::default());
    }

    /// A step that began at `since_ns` took so much of its objective.
    pub fn step(&mut self, now_ns: u64, since_ns: u64, permille: u32) {
        if since_ns < self.changed_ns {
            return;
        }
        let window = &mut self.windows[self.level];
        window.add(permille, self.target);
        if permille > LATE {
            return self.descend(now_ns, (self.level / 4).max(1));
        }
        if window.is_over() {
            return self.descend(now_ns, 1);
        }
        if permille > self.target {
            return;
        }
        self.good = self.good.saturating_add(1);
        if self.good == self.good_steps {
            window.failures = window.failures.saturating_sub(1);
        }
        let Some(next) = self.windows.get_mut(self.level + 1) else { return };
        let needed = self.good_steps.saturating_mul(1 << next.failures.min(DOUBLINGS_MAX));
        if self.good >= needed {
            next.forget_steps();
            self.level += 1;
            (self.good, self.changed_ns) = (0, now_ns);
        }
    }

    fn descend(&mut self, now_ns: u64, by: usize) {
        self.good = 0;
        if self.level == 0 {
            return;
        }
        let window = &mut self.windows[self.level];
        window.failures = (window.failures + 1).min(DOUBLINGS_MAX);
        self.level = self.level.saturating_sub(by);
        // Of too few steps nothing was found out.
        let is_bad = |window: &Window| window.permille.len() >= FEW && window.is_over();
        while self.level > 0 && is_bad(&self.windows[self.level]) {
            self.level -= 1;
        }
        self.changed_ns = now_ns;
    }

    /// The 95th percentile of the latest steps at this level, over their objective, permille.
    pub fn p95(&self) -> Option<u32> {
        self.windows[self.level].p95()
    }
}

/// The width beside one service.
#[derive(Clone, Debug)]
pub struct Widths {
    /// 0 (the others wait during a step), each number of SMs that launches can be limited to, and all SMs.
    levels: Vec<u32>,
    start_sms: u32,
    /// Where to begin once the GPU is known.
    wanted_sms: u32,
    ladder: Ladder,
}

impl Widths {
    /// Nothing is known of the service beside its neighbours. 0 SMs: the GPU is not known yet.
    pub fn new(all: &[u32], sms: u32, start_sms: u32, target: u32, good_steps: u32) -> Self {
        let levels = levels(all, sms);
        let ladder = Ladder::new(level(&levels, start_sms), levels.len() - 1, target, good_steps);
        Widths { levels, start_sms, wanted_sms: start_sms, ladder }
    }

    /// The GPU has so many SMs, and launches can be limited to these.
    pub fn set_gpu(&mut self, all: &[u32], sms: u32) {
        self.levels = levels(all, sms);
        let Ladder { target, good_steps, .. } = self.ladder;
        let at = level(&self.levels, self.wanted_sms);
        self.ladder = Ladder::new(at, self.levels.len() - 1, target, good_steps);
    }

    /// SMs that the others have beside a step; all of them: they are not limited.
    pub fn sms(&self) -> u32 {
        self.levels[self.ladder.level]
    }

    /// The fewest that a launch can be limited to.
    pub fn least_sms(&self) -> u32 {
        self.levels[1]
    }

    /// The others may run as if there was no step.
    pub fn is_all(&self) -> bool {
        self.ladder.level == self.ladder.top()
    }

    /// What is lost of so much time if a program has all SMs but these, at most.
    pub fn part_of(&self, ns: u64) -> u64 {
        let all = self.levels.last().copied().unwrap_or(1);
        tally_sdk::grid::scaled(ns, self.sms().into(), all.into())
    }

    /// What was learned is of other neighbours. With one more it begins at the first width again.
    pub fn neighbours_changed(&mut self, now_ns: u64, is_one_more: bool) {
        let most = if is_one_more { level(&self.levels, self.start_sms) } else { usize::MAX };
        self.ladder.begin_anew(now_ns, self.ladder.level.min(most));
    }

    /// Begin with the least width: the service is served by it again.
    pub fn begin_narrow(&mut self, now_ns: u64) {
        self.ladder.begin_anew(now_ns, 1);
    }

    /// Go on at this width, if there is such a one.
    pub fn go_on_at(&mut self, sms: u32) {
        self.wanted_sms = sms;
        self.ladder.level = level(&self.levels, sms);
    }

    /// A step that began at `since_ns` took so much of its objective, beside others on this width.
    pub fn step(&mut self, now_ns: u64, since_ns: u64, permille: u32) {
        self.ladder.step(now_ns, since_ns, permille);
    }

    /// The 95th percentile of the latest steps at this width, over their objective, permille.
    pub fn p95(&self) -> Option<u32> {
        self.ladder.p95()
    }
}

/// Where no launch can be limited, or that is not known yet, a width is only a part of the slack.
fn levels(all: &[u32], sms: u32) -> Vec<u32> {
    let sms = if sms == 0 { SMS_MAX } else { sms.min(SMS_MAX) };
    let is_between = |width: &u32| (1..sms).contains(width);
    let mut levels = vec![0];
    match all {
        [] => levels.extend((PART_SMS..sms).step_by(PART_SMS as usize)),
        all => levels.extend(all.iter().copied().filter(is_between)),
    }
    levels.push(sms);
    levels
}

/// The widest level of no more than so many SMs, but the least width for fewer than that has.
fn level(levels: &[u32], sms: u32) -> usize {
    let fits = levels.iter().rposition(|level| *level <= sms).unwrap_or(0);
    fits.max(usize::from(sms > 0))
}
