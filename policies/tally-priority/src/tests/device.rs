//! A GPU and a core that only know how long each form of each kernel takes: enough
//! for the policy to learn from. Deterministic.

use crate::Priority;
use crate::tests::forms_of;
use crate::tests::policy;
use std::collections::{BTreeMap, VecDeque};
use tally_forms::Settings;
use tally_forms::candidates::{Candidate, candidates};
use tally_forms::choose::choose;
use tally_sdk::testing::{kernel, launch, set_kernels};
use tally_sdk::{
    Decision, Form, FormProfile, FormsOffered, KernelProfile, Launch, Policy, RECENT_SAMPLES,
};

/// How a kernel behaves.
#[derive(Clone, Copy, Debug)]
pub struct Truth {
    pub offered: FormsOffered,
    pub blocks: u64,
    pub whole_ns: u64,
    /// What being preemptible adds.
    pub preemptible_permille: u64,
    /// How long it then takes to yield, on top of the least that it can.
    pub yielding_ns: u64,
    /// Pause between two slices, ns.
    pub gate_ns: u64,
    /// What leaving SMs out adds.
    pub sm_limited_permille: u64,
}

impl Truth {
    /// A launch of it beside an idle high-priority client.
    pub fn launch(&self, id: u32, predicted_ns: u64) -> Launch {
        Launch {
            kernel: id,
            offered: self.offered,
            grid_blocks: self.blocks,
            predicted_ns,
            high_clients: 1,
            high_idle_ns: 1_000_000,
            ..launch()
        }
    }

    /// What a form of it really takes.
    fn cost(&self, candidate: &Candidate) -> Candidate {
        let add = |permille: u64| self.whole_ns + self.whole_ns * permille / 1_000;
        let (time_ns, turnaround_ns) = match candidate.form {
            Decision::Run(0) => (self.whole_ns, self.whole_ns),
            Decision::Preemptible => {
                let time_ns = add(self.preemptible_permille);
                (time_ns, (candidate.turnaround_ns + self.yielding_ns).min(time_ns))
            }
            Decision::Sliced(blocks) => {
                let parts = self.blocks.div_ceil(blocks.into());
                let time_ns = self.whole_ns + parts * self.gate_ns;
                (time_ns, time_ns / parts)
            }
            Decision::SmLimited(_) => (add(self.sm_limited_permille), candidate.turnaround_ns),
            other => panic!("no form: {other:?}"),
        };
        Candidate { time_ns, turnaround_ns, ..*candidate }
    }

    /// All forms with what they really take.
    pub fn costs(&self, settings: &Settings) -> Vec<Candidate> {
        let all = candidates(&self.launch(0, self.whole_ns), settings);
        all.iter().map(|c| self.cost(c)).collect()
    }

    /// What knowing everything would choose.
    pub fn best(&self, settings: &Settings) -> Decision {
        choose(&self.costs(settings), settings).form
    }
}

impl Truth {
    /// Whether a form is that, give or take one per cent of what was measured of
    /// each sliced or preemptible form: as much as the gates of many slices can add to a long kernel.
    pub fn is_best(&self, choice: Decision, settings: &Settings) -> bool {
        let is_transformed =
            |c: &Candidate| !matches!(c.form, Decision::Run(0) | Decision::SmLimited(_));
        let is_best = |errors: u32| {
            let mut costs = self.costs(settings);
            for (at, cost) in costs.iter_mut().filter(|c| is_transformed(c)).enumerate() {
                let permille = [1_000, 990, 1_010][errors as usize / 3_usize.pow(at as u32) % 3];
                cost.time_ns = cost.time_ns * permille / 1_000;
                cost.turnaround_ns = cost.turnaround_ns * permille / 1_000;
            }
            choose(&costs, settings).form == choice
        };
        (0..81).any(is_best)
    }
}

/// The kernels, what the core has measured of them, and the policy.
pub struct Device {
    pub truths: Vec<Truth>,
    pub settings: Settings,
    pub policy: Priority,
    /// The form of each launch so far.
    pub ran: Vec<(usize, Decision)>,
    /// Every so many-th launch is disturbed by high priority; 0: none.
    pub disturbed_every: u64,
    /// What the first launch in each form takes longer.
    pub loading_ns: u64,
    measured: Vec<KernelProfile>,
    recent: BTreeMap<(usize, u8, u32), VecDeque<u64>>,
    predicted: Vec<Vec<u64>>,
    under_way: VecDeque<(usize, Decision, bool)>,
}

/// Launches under way before the first of them is measured.
const LAG: usize = 3;

impl Device {
    pub fn new(truths: Vec<Truth>, config: &str) -> Self {
        Device {
            measured: truths.iter().map(|t| kernel(t.blocks as u32)).collect(),
            recent: BTreeMap::new(),
            predicted: vec![Vec::new(); truths.len()],
            truths,
            settings: forms_of(config),
            policy: policy(config),
            ran: Vec::new(),
            disturbed_every: 0,
            loading_ns: 0,
            under_way: VecDeque::new(),
        }
    }

    /// Has the policy decide a launch of kernel `at`, and runs it as decided.
    pub fn launch(&mut self, at: usize) -> Decision {
        let known = self.measured.iter().cloned().enumerate();
        set_kernels(known.map(|(id, profile)| (id as u32, profile)).collect());
        let launch = self.truths[at].launch(at as u32, self.predicted_ns(at));
        let choice = match self.policy.decide(&launch).decision {
            Decision::Run(0) => Decision::Run(0),
            Decision::Preemptible => Decision::Preemptible,
            Decision::Sliced(blocks) => Decision::Sliced(blocks),
            Decision::SmLimited(sms) => Decision::SmLimited(sms),
            other => panic!("{other:?}"),
        };
        assert!(launch.offers(choice.form().0), "{choice:?}");
        self.ran.push((at, choice));
        let every = self.disturbed_every;
        // Not in step with anything: the fractions of multiples of the golden ratio.
        let fraction = (self.ran.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let is_disturbed = every > 0 && fraction <= u64::MAX / every;
        self.under_way.push_back((at, choice, is_disturbed));
        if self.under_way.len() > LAG {
            let (at, choice, disturbed) = self.under_way.pop_front().unwrap();
            self.measure(at, choice, disturbed);
        }
        choice
    }

    /// The core's rule: the lower median of the last nine.
    fn predicted_ns(&self, at: usize) -> u64 {
        let mut last: Vec<u64> = self.predicted[at].iter().rev().take(9).copied().collect();
        last.sort_unstable();
        last.get(last.len().saturating_sub(1) / 2).copied().unwrap_or(0)
    }

    fn measure(&mut self, at: usize, choice: Decision, disturbed: bool) {
        let estimates =
            candidates(&self.truths[at].launch(0, self.predicted_ns(at)), &self.settings);
        let estimate = estimates.iter().find(|c| c.form == choice).copied();
        let cost =
            self.truths[at].cost(&estimate.unwrap_or(Candidate { form: choice, ..estimates[0] }));
        let profile = &mut self.measured[at];
        if choice == Decision::Run(0) {
            if !disturbed || profile.count == 0 {
                let loading_ns = if profile.count == 0 { self.loading_ns } else { 0 };
                profile.count += 1;
                self.predicted[at].push(cost.time_ns + loading_ns);
            }
            return;
        }
        let (form, argument) = choice.form();
        let found = profile.forms.iter().position(|f| f.form == form && f.argument == argument);
        let index = found.unwrap_or_else(|| {
            assert!(profile.forms.len() < 16, "the core tells 16 forms apart");
            profile.forms.push(FormProfile {
                form,
                argument,
                count: 0,
                mean_ns: 0,
                p50_ns: 0,
                p99_ns: 0,
                latest_ns: 0,
                turnaround_ns: 0,
            });
            profile.forms.len() - 1
        });
        let figures = &mut profile.forms[index];
        if disturbed && form != Form::SmLimited {
            figures.turnaround_ns = cost.turnaround_ns;
        } else if !disturbed {
            let loading_ns = if figures.count == 0 { self.loading_ns } else { 0 };
            figures.count += 1;
            figures.latest_ns = cost.time_ns + loading_ns;
            let recent = self.recent.entry((at, form as u8, argument)).or_default();
            recent.push_back(figures.latest_ns);
            recent.drain(..recent.len().saturating_sub(RECENT_SAMPLES));
            let mut sorted: Vec<u64> = recent.iter().copied().collect();
            sorted.sort_unstable();
            figures.p50_ns = sorted[(sorted.len() - 1) / 2];
        }
    }

    /// Its form most often used in its last launches.
    pub fn settled(&self, at: usize) -> Decision {
        let last: Vec<Decision> =
            self.ran.iter().rev().filter(|(k, _)| *k == at).map(|(_, c)| *c).take(9).collect();
        let times = |choice: &Decision| last.iter().filter(|c| *c == choice).count();
        last.iter().copied().max_by_key(times).unwrap()
    }
}
