//! Policies that look good if one does not look closely, tried on a service in virtual time:
//! its requests as the core counts them, and the experiment as the core runs it.

use super::{exponential, normal};
use crate::design::{Arm, Plan};
use crate::experiment::{Action, Experiment};
use crate::fairness::BestEffort;
use crate::metric::Metric;
use crate::report::{ArmSource, Report};
use crate::sample::{Carried, Sample, UnderWay, Unit};
use fastrand::Rng;

/// Requests a second, of the whole service.
const RATE: f64 = 50.0;
/// Median time of a request under A, ns.
const SERVICE_NS: f64 = 5e6;
/// Best-effort work under B over that under A, if that is the metric.
const WORK: f64 = 1.3;

/// How B behaves. A test must promote none of [`Trap::ALL`], whatever its metric: if that is best-effort work, B does
/// more of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trap {
    /// It serves no request as long as it is active.
    ServesNothing,
    /// Each five seconds or so a request takes 2.5 s longer: more than a block.
    StallsLongerThanABlock,
    /// 0.8 times as slow as A, but five times in 5 % of its blocks.
    SlowInFewBlocks,
    /// A service of one thread; each ten seconds or so a request takes 0.3 s longer, and what
    /// arrives meanwhile waits inside the program.
    SingleThreadedStalls,
    /// It holds what it takes over for half a block, and is as good as A else.
    StallsAtItsStart,
    /// Of two best-effort clients it serves one only. No trap of [`Trap::ALL`]: more work is done, and only a guard on
    /// fairness says that it must be shared.
    StarvesOne,
    /// The same, and the other client has no work waiting under it.
    HidesOne,
    /// No trap: of two best-effort clients one sleeps at times, under either policy.
    OneSleeps,
    /// No trap: requests take as long as under A.
    Same,
    /// No trap: 0.7 times as slow in all blocks.
    Better,
}

impl Trap {
    /// Traps: behaviours that must not be promoted.
    pub const ALL: [Trap; 5] = [
        Trap::ServesNothing,
        Trap::StallsLongerThanABlock,
        Trap::SlowInFewBlocks,
        Trap::SingleThreadedStalls,
        Trap::StallsAtItsStart,
    ];
}

/// One thread of the service.
struct Client {
    /// When the request under way began, ns.
    began_ns: Option<u64>,
    /// Requests that began before are carried over a cut.
    cut_ns: u64,
    now_ns: u64,
    arrival_ns: u64,
    /// Time left of the request under way, ns.
    left_ns: u64,
}

/// The service under whatever policy is active.
struct Service {
    trap: Trap,
    random: Rng,
    clients: Vec<Client>,
    /// How much slower than usual the present block is.
    factor: f64,
    arm: Arm,
    switched_ns: u64,
    /// Two of one weight, with work all the time but for [`Trap::OneSleeps`].
    best_effort: [BestEffort; 2],
    /// The second one sleeps, until then, ns.
    sleeps: bool,
    until_ns: u64,
    /// Until then work was shared out, ns.
    shared_ns: u64,
}

impl Service {
    fn new(trap: Trap, seed: u64) -> Self {
        let threads = match trap {
            Trap::SingleThreadedStalls | Trap::StallsAtItsStart => 1,
            _ => 8,
        };
        let mut random = Rng::with_seed(seed);
        let clients = (0..threads)
            .map(|_| Client {
                began_ns: None,
                cut_ns: 0,
                now_ns: 0,
                arrival_ns: (exponential(&mut random) * f64::from(threads) / RATE * 1e9) as u64,
                left_ns: 0,
            })
            .collect();
        let best_effort =
            [1, 2].map(|client| BestEffort { client, weight: 1, work_ns: 0, backlog_ns: 0 });
        let (factor, arm, switched_ns, sleeps, until_ns) = (1.0, Arm::A, 0, false, 0);
        let shared_ns = 0;
        Service {
            trap,
            random,
            clients,
            factor,
            arm,
            switched_ns,
            best_effort,
            sleeps,
            until_ns,
            shared_ns,
        }
    }

    /// So much best-effort work was done until now: by turns, or by one client.
    fn share_out(&mut self, now_ns: u64, work_ns: u64) {
        while self.trap == Trap::OneSleeps && self.until_ns <= now_ns {
            self.sleeps ^= true;
            self.until_ns += (exponential(&mut self.random) * 3e9) as u64;
        }
        let (first, is_idle) = match (self.trap, self.arm) {
            (Trap::StarvesOne, Arm::B) => (work_ns, false),
            (Trap::HidesOne, Arm::B) => (work_ns, true),
            _ if self.sleeps => (work_ns, true),
            _ => (work_ns / 2, false),
        };
        let span_ns = now_ns - std::mem::replace(&mut self.shared_ns, now_ns);
        let each = [(first, false), (work_ns - first, is_idle)];
        for (client, (work_ns, is_idle)) in self.best_effort.iter_mut().zip(each) {
            client.work_ns += work_ns;
            client.backlog_ns += if is_idle { 0 } else { span_ns };
        }
    }

    fn switch(&mut self, arm: Arm, now_ns: u64) {
        (self.arm, self.switched_ns) = (arm, now_ns);
        self.factor = match (self.trap, arm) {
            (Trap::SlowInFewBlocks, Arm::B) if self.random.f64() < 0.05 => 5.0,
            (Trap::SlowInFewBlocks, Arm::B) => 0.8,
            (Trap::Better, Arm::B) => 0.7,
            _ => 1.0,
        };
    }

    /// Draws the time that the next request takes, ns.
    fn service_ns(&mut self) -> u64 {
        let ns = SERVICE_NS * self.factor * (0.4 * normal(&mut self.random)).exp();
        let (stall_ns, each_s) = match self.trap {
            Trap::StallsLongerThanABlock => (2.5e9, 5.0),
            Trap::SingleThreadedStalls => (0.3e9, 10.0),
            _ => (0.0, 1.0),
        };
        let stalls = self.arm == Arm::B && self.random.f64() < 1.0 / (RATE * each_s);
        (ns + if stalls { stall_ns } else { 0.0 }) as u64
    }

    /// Until when the service serves nothing, ns.
    fn frozen_until(&self) -> u64 {
        match (self.trap, self.arm) {
            (Trap::ServesNothing, Arm::B) => u64::MAX,
            (Trap::StallsAtItsStart, Arm::B) => self.switched_ns + 500_000_000,
            _ => 0,
        }
    }

    fn run(&mut self, until_ns: u64, sample: &mut Sample) {
        let frozen_ns = self.frozen_until().min(until_ns);
        let threads = self.clients.len() as f64;
        for at in 0..self.clients.len() {
            loop {
                let c = &mut self.clients[at];
                if let Some(began_ns) = c.began_ns {
                    c.now_ns = c.now_ns.max(frozen_ns);
                    let end_ns = c.now_ns + c.left_ns;
                    if end_ns > until_ns {
                        c.left_ns = end_ns - until_ns;
                        break;
                    }
                    c.now_ns = end_ns;
                    c.began_ns = None;
                    let ns = end_ns - began_ns;
                    match began_ns < c.cut_ns {
                        true => sample.of_mut(Unit::Request).carry(Carried {
                            began_ns,
                            ns,
                            queue_known: false,
                            limit_ns: None,
                            is_age: false,
                        }),
                        false => sample.request(ns),
                    }
                } else {
                    let start_ns = c.arrival_ns.max(c.now_ns);
                    if start_ns > until_ns {
                        break;
                    }
                    let gap_ns = exponential(&mut self.random) * threads / RATE * 1e9;
                    let left_ns = self.service_ns();
                    let c = &mut self.clients[at];
                    (c.now_ns, c.left_ns) = (start_ns, left_ns);
                    c.arrival_ns += gap_ns as u64;
                    c.began_ns = Some(start_ns);
                }
            }
            self.clients[at].now_ns = until_ns;
        }
    }
}

/// A whole test of such a policy against A.
pub fn test(trap: Trap, plan: Plan) -> Report {
    let mut service = Service::new(trap, !plan.seed);
    let more = if plan.metric == Metric::BeThroughput { WORK } else { 1.0 };
    // Some time before, so that it is under way.
    let (mut sample, mut now_ns) = (Sample::new(), 1_000_000_000);
    service.run(now_ns, &mut sample);
    let mut experiment = match Experiment::new(plan, now_ns) {
        Ok(experiment) => experiment,
        Err(why) => unreachable!("the plans here make sense: {why}"),
    };
    loop {
        sample.clear();
        let (arm, cut) = match experiment.next_action() {
            Action::End => break,
            // It takes 1 ms, during which the other arm serves.
            Action::Switch(arm) => {
                sample.from_ns = now_ns;
                now_ns += 1_000_000;
                (Some(arm), true)
            }
            Action::Take { at_ns, cut } => {
                sample.from_ns = now_ns;
                now_ns = at_ns;
                (None, cut)
            }
        };
        service.run(now_ns, &mut sample);
        sample.to_ns = now_ns;
        let times = if service.arm == Arm::B { more } else { 1.0 };
        (sample.work_ns, sample.launches) = ((sample.span_ns() as f64 / 3.0 * times) as u64, 1);
        service.share_out(now_ns, sample.work_ns);
        if cut {
            service.best_effort.iter().for_each(|client| sample.best_effort(*client));
        }
        for client in &mut service.clients {
            if let Some(began_ns) = client.began_ns {
                let open = UnderWay { began_ns, queue_known: false, limit_ns: None };
                sample.of_mut(Unit::Request).under_way(open);
            }
            if cut {
                client.cut_ns = now_ns;
            }
        }
        match arm {
            Some(arm) => {
                experiment.switched(now_ns, &sample);
                service.switch(arm, now_ns);
            }
            None => experiment.took(now_ns, cut, &sample),
        }
    }
    let arms = ["a", "b"].map(|name| ArmSource { digest: name.into(), ..ArmSource::default() });
    Report::new(&experiment, &arms, now_ns, false)
}

/// With defaults, or as users begin: with a guard.
pub fn plan(metric: Metric, guard: Option<&str>, seed: u64) -> Plan {
    let guards = guard.into_iter().filter_map(|guard| guard.parse().ok()).collect();
    Plan { guards, seed, ..Plan::of(metric) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Reason;
    use crate::verdict::Verdict;

    /// The short form of `cargo xtask test ab`.
    #[test]
    fn no_trap_is_promoted() {
        for (metric, trap) in [Metric::HpP99, Metric::BeThroughput]
            .into_iter()
            .flat_map(|metric| Trap::ALL.map(|trap| (metric, trap)))
        {
            for seed in 1..=3 {
                let report = test(trap, plan(metric, None, seed));
                assert_eq!(report.verdict, Verdict::KeepA, "{trap:?} {seed}: {}", report.text());
            }
        }
    }

    /// A request that B takes over is A's miss in the sequential test: what B made late must count against it all the
    /// same.
    #[test]
    fn no_trap_is_promoted_for_an_objective() {
        for trap in Trap::ALL {
            let slo_ns = Some(20_000_000);
            let report = test(trap, Plan { slo_ns, ..plan(Metric::SloAttainment, None, 1) });
            assert_ne!(report.verdict, Verdict::PromoteB, "{trap:?}: {}", report.text());
        }
    }

    #[test]
    fn a_guard_notices_stalls_and_starvation() {
        for trap in [Trap::ServesNothing, Trap::StallsLongerThanABlock] {
            for seed in 1..=5 {
                let report = test(trap, plan(Metric::HpP99, Some("hp_p99<50ms"), seed));
                assert_eq!(
                    report.verdict,
                    Verdict::Withdrawn,
                    "{trap:?} {seed}: {}",
                    report.text()
                );
            }
        }
        // Within B's first block.
        let report = test(Trap::ServesNothing, plan(Metric::HpP99, Some("hp_p99<50ms"), 1));
        assert!(report.blocks.len() <= 1 && report.elapsed_s < 2.5, "{}", report.text());
    }

    #[test]
    fn without_a_guard_starvation_is_told_by_the_requests_served() {
        let report = test(Trap::ServesNothing, plan(Metric::HpP99, None, 1));
        assert_eq!(report.ended.as_ref().unwrap().reason, Reason::NotServed);
        assert!(report.why.contains("B served 0 requests while A served"), "{}", report.why);
        assert!(report.pairs_empty > 0 && report.elapsed_s < 30.0, "{}", report.text());
    }

    /// Without a guard it is promoted: it does more work.
    #[test]
    fn a_guard_on_fairness_notices_that_one_of_two_clients_is_starved() {
        for seed in 1..=5 {
            let plan = plan(Metric::BeThroughput, Some("be_fairness>0.9"), seed);
            let report = test(Trap::StarvesOne, plan);
            assert_eq!(report.verdict, Verdict::Withdrawn, "{}", report.text());
            assert!(report.why.contains("was 0.500 under B"), "{}", report.why);
            assert!(report.blocks.len() <= 2, "within B's first block: {}", report.text());
        }
        let report = test(Trap::Same, plan(Metric::BeThroughput, Some("be_fairness>0.9"), 1));
        assert_eq!(report.verdict, Verdict::PromoteB, "{}", report.text());
        let fairness = report.rates.iter().find(|rate| rate.name == "be_fairness").unwrap();
        assert!(fairness.a > 0.999 && fairness.b > 0.999, "{fairness:?}");
        let report = test(Trap::StarvesOne, plan(Metric::BeThroughput, None, 1));
        assert_eq!(report.verdict, Verdict::PromoteB, "{}", report.text());
        let fairness = report.rates.iter().find(|rate| rate.name == "be_fairness").unwrap();
        assert!(fairness.high.is_some_and(|high| high < -0.4), "{fairness:?}");
    }

    #[test]
    fn a_guard_on_fairness_notices_a_client_that_b_keeps_from_having_work() {
        let test = |trap, seed| {
            let guarded = plan(Metric::BeThroughput, Some("be_fairness>0.9"), seed);
            test(trap, Plan { to_end: true, time_ns_max: 180_000_000_000, ..guarded })
        };
        for seed in 1..=5 {
            let report = test(Trap::HidesOne, seed);
            assert_eq!(report.verdict, Verdict::Withdrawn, "{}", report.text());
            assert!(report.why.contains("was 0.500 under B"), "{}", report.why);
            // Six pairs that agree, and B's blocks until they last as long as a window.
            assert!((12..=20).contains(&report.blocks.len()), "{}", report.blocks.len());
        }
        // One that sleeps by itself is no reason to withdraw B.
        for seed in 1..=20 {
            let report = test(Trap::OneSleeps, seed);
            assert_ne!(report.verdict, Verdict::Withdrawn, "{seed}: {}", report.text());
        }
    }

    #[test]
    fn what_is_better_is_promoted_and_what_is_the_same_is_not() {
        let report = test(Trap::Better, plan(Metric::HpP99, None, 1));
        assert_eq!(report.verdict, Verdict::PromoteB, "{}", report.text());
        let report = test(Trap::Same, plan(Metric::HpP99, Some("hp_p99<1.2*A"), 1));
        assert_eq!(report.verdict, Verdict::Undecided, "{}", report.text());
        let report = test(Trap::Same, plan(Metric::BeThroughput, None, 1));
        assert_eq!(report.verdict, Verdict::PromoteB, "{}", report.text());
    }
}
