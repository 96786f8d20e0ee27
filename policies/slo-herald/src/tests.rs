use super::*;
use tally_sdk::testing::{self, Call, calls, client, launch, set_services, set_widths};
use tally_sdk::{ClientState, Form, FormsOffered, LaunchState, NEVER, SharingMode};

mod alone;
mod busy;
mod floors;
mod idle;
mod leases;
mod space;
mod strict;
mod width;
mod window;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const WEB: ClientId = 1;
const BATCH: ClientId = 2;

/// A policy with a service that needs so much, a training, and a clock.
struct Bench {
    policy: Herald,
    slo_ns: u64,
    now_ns: u64,
}

impl Bench {
    fn new(slo_ns: u64) -> Self {
        set_widths((1..=16).map(|n| 8 * n).collect());
        set_services(vec![(WEB, testing::service(Some(slo_ns).filter(|ns| *ns != NEVER)))]);
        let mut policy = Herald::init("").unwrap();
        policy.joined(1, &client(WEB, PriorityClass::High));
        policy.joined(1, &client(BATCH, PriorityClass::BestEffort));
        calls();
        Bench { policy, slo_ns, now_ns: MS }
    }

    fn asked(&self, predicted_ns: u64) -> Launch {
        let high = match self.policy.services[0].left_ns() {
            Some(_) => LaunchState::HIGH_ACTIVE,
            None => LaunchState::empty(),
        };
        let (now_ns, client) = (self.now_ns, BATCH);
        Launch { now_ns, client, predicted_ns, state: high, high_clients: 1, ..launch() }
    }

    fn decide(&mut self, predicted_ns: u64) -> Decision {
        self.decide_on(&self.asked(predicted_ns))
    }

    /// Without the lease.
    fn decide_on(&mut self, launch: &Launch) -> Decision {
        match self.policy.decide(launch).decision {
            Decision::Run(_) => RUNS,
            other => other,
        }
    }

    fn begin(&mut self) {
        let deadline_ns = self.now_ns.saturating_add(self.slo_ns);
        self.policy.began(self.now_ns, WEB, self.now_ns, deadline_ns);
    }

    fn end(&mut self, took_ns: u64) {
        self.now_ns += took_ns;
        self.policy.ended(self.now_ns, WEB, 1, took_ns);
        // It is busy a fifth of the time.
        self.now_ns += 4 * took_ns;
    }

    /// So many units that take so long and during which best effort would have more time.
    fn units(&mut self, count: u32, took_ns: u64) {
        for _ in 0..count {
            self.begin();
            self.policy.services[0].is_short();
            self.end(took_ns);
        }
    }

    fn allowance_ns(&self) -> Option<u64> {
        self.policy.services[0].allowance_ns()
    }
}

const HELD: Decision = Decision::Hold(HOLD_UNTIL_CHANGE);
const RUNS: Decision = Decision::Run(0);

#[test]
fn a_unit_bears_what_its_objective_leaves() {
    let mut b = Bench::new(3 * MS);
    // Until it is known what a unit takes, nothing is spared.
    b.begin();
    assert_eq!(b.decide(10 * US), HELD);
    b.end(MS);
    b.units(7, MS);
    // 0.95 of 3 ms, less 1 ms.
    assert_eq!(b.allowance_ns(), Some(1_850 * US));
    b.begin();
    assert_eq!(b.decide(1_000 * US), RUNS);
    assert_eq!(b.decide(0), HELD, "never measured");
    assert_eq!(b.decide(900 * US), HELD, "850 us are left");
    assert_eq!(b.decide(840 * US), RUNS);
    assert_eq!(b.decide(10 * US + US), HELD);
    // A light one counts a tenth.
    assert_eq!(b.decide(5 * US), RUNS);
    let few = Launch { grid_blocks: 15, ..b.asked(90 * US) };
    assert_eq!(b.policy.decide(&few).decision, RUNS);
    b.end(2_000 * US);
    assert_eq!(b.decide(900 * US), RUNS, "between units, without a gap");
}

#[test]
fn a_unit_that_goes_on_while_others_end_gets_no_new_allowance() {
    let mut b = Bench::new(3 * MS);
    b.units(8, MS);
    b.begin();
    assert_eq!(b.decide(MS), RUNS);
    let since_ns = b.now_ns;
    // It may also have another objective.
    b.policy.began(since_ns + 50, WEB, since_ns, since_ns + 3 * MS);
    assert_eq!(b.decide(900 * US), HELD);
    b.policy.ended(since_ns + 100, WEB, 1, MS);
    b.policy.began(since_ns + 100, WEB, since_ns, since_ns + 3 * MS);
    assert_eq!(b.decide(900 * US), HELD, "850 us are left");
    b.policy.ended(since_ns + 200, WEB, 1, MS);
    b.policy.began(since_ns + 300, WEB, since_ns + 250, since_ns + 250 + 3 * MS);
    assert_eq!(b.decide(900 * US), RUNS, "of another one");
}

/// A server that launches the next request before it waits for the last: two are always under way.
#[test]
fn units_that_overlap_are_measured_alone_and_bear_time() {
    let mut b = Bench::new(5 * MS);
    let next = |b: &mut Bench, launched_ns: u64| {
        let since_ns = b.now_ns;
        b.policy.began(b.now_ns, WEB, since_ns, since_ns + 5 * MS);
        let ran = launched_ns > 0 && b.decide(launched_ns) == RUNS;
        // It ends when the one behind it is half over, which the core tells a little later.
        b.now_ns += 2 * MS;
        b.policy.ended(b.now_ns + 20 * US, WEB, 1, 2 * MS);
        b.now_ns -= MS;
        ran
    };
    for _ in 0..8 {
        assert!(!next(&mut b, 100 * US), "nothing is known yet");
    }
    assert_eq!(b.allowance_ns(), Some(2_750 * US));
    let ran = (0..60).filter(|_| next(&mut b, 2 * MS)).count();
    assert!((24..36).contains(&ran), "{ran} of 60: what one bears, the next bears, too");
}

#[test]
fn without_an_objective_a_service_is_served_strictly() {
    let mut b = Bench::new(NEVER);
    b.units(20, MS);
    b.begin();
    assert_eq!(b.decide(10 * US), HELD);
    b.end(MS);
    // Of the gap of 100 us 4 ms are over; then none is.
    assert_eq!(b.decide(10 * US), RUNS);
    b.policy.ended(b.now_ns, WEB, 0, 0);
    b.now_ns += 30 * US;
    assert_eq!(b.decide(10 * US), Decision::Hold(70 * US));
}

#[test]
fn the_rate_follows_what_units_take() {
    let mut b = Bench::new(3 * MS);
    b.units(8, MS);
    let before = b.allowance_ns().unwrap();
    // They bear it easily: the GPU idles within them.
    b.units(64, 2 * MS);
    assert_eq!(b.allowance_ns(), Some(before * 150 / 100));
    // The next is measured alone, the others use the objective up.
    b.units(1, MS);
    b.units(63, 2_900 * US);
    b.units(1, 2_900 * US);
    assert_eq!(b.allowance_ns(), Some(before * 150 / 100), "nearly used up, none late");
    b.units(1, MS);
    b.units(63, 2 * MS);
    b.units(1, 3_100 * US);
    assert_eq!(b.allowance_ns(), Some(before * 150 / 100), "one late in 64 may have other causes");
    b.units(1, MS);
    b.units(63, 2 * MS);
    b.units(1, 3_100 * US);
    let late = before * 90 / 100;
    assert_eq!(b.allowance_ns(), Some(late), "and soon another one");
    b.units(1, MS);
    b.units(64, 2 * MS);
    assert_eq!(b.allowance_ns(), Some(before * 99 / 100), "slowly from then on");
}

#[test]
fn missed_objectives_end_sharing_until_enough_units_keep_it() {
    let mut b = Bench::new(3 * MS);
    b.units(60, MS);
    b.units(2, 4 * MS);
    assert!(b.allowance_ns().is_some(), "2 of 62");
    calls();
    b.units(1, 4 * MS);
    assert_eq!(b.allowance_ns(), None, "of 200 at most two may be late for 99 %");
    let why = "service 1 is served strictly: too few of its latest 200 units kept its objective";
    assert_eq!(logged(), [why]);
    b.begin();
    assert_eq!(b.decide(10 * US), HELD);
    b.end(MS);
    b.units(250, MS);
    assert!(b.allowance_ns().is_some(), "the latest 200 kept it");
    assert_eq!(logged(), ["service 1 is served strictly no longer"]);
}

/// What it told the operator since the last calls.
fn logged() -> Vec<String> {
    let told = |call| match call {
        Call::Log { level: Level::Info, message } => Some(message),
        _ => None,
    };
    calls().into_iter().filter_map(told).collect()
}

#[test]
fn a_service_that_is_nearly_always_busy_spares_nothing() {
    let mut b = Bench::new(30 * MS);
    b.units(200, MS);
    let spare_ns = 28_500 * US - MS;
    assert!(b.allowance_ns().unwrap() > spare_ns);
    let busy = |b: &mut Bench, beside_ns: u64, gap_ns| {
        let mut alone = 0;
        for _ in 0..20_000 {
            b.begin();
            let is_alone = b.policy.services[0].left_ns() == Some(0);
            alone += u32::from(is_alone);
            b.policy.services[0].is_short();
            b.now_ns += 1;
            assert_eq!(b.decide(US), if is_alone { HELD } else { RUNS });
            let took_ns = if is_alone { MS } else { beside_ns };
            b.end(took_ns);
            b.now_ns -= 4 * took_ns - gap_ns;
        }
        alone
    };
    busy(&mut b, 1_100 * US, 100 * US);
    assert_eq!(b.allowance_ns(), Some(spare_ns / 20), "the least: longer units would queue");
    let alone = busy(&mut b, 1_100 * US, 20 * US);
    assert!(alone > 12_000, "{alone} of 20 000: ever more seldom it is tried again");
    b.units(400, MS);
    assert!(b.allowance_ns().is_some());
    // It would be as busy without best effort.
    let alone = busy(&mut b, 1_005 * US, 20 * US);
    assert!(alone < 3_000, "{alone} of 20 000");
    assert!(b.allowance_ns().unwrap() > spare_ns, "{:?}", b.allowance_ns());
}

#[test]
fn long_units_are_judged_before_there_are_many() {
    let mut b = Bench::new(800 * MS);
    b.units(8, 100 * MS);
    let before = b.allowance_ns().unwrap();
    b.units(8, 150 * MS);
    assert_eq!(b.allowance_ns(), Some(2 * before), "twice as much still fits");
    b.units(7, 450 * MS);
    assert_eq!(b.allowance_ns(), Some(2 * before), "too few to tell");
    b.units(1, 450 * MS);
    assert_eq!(b.allowance_ns(), Some(before * 5 / 2));
}

#[test]
fn units_of_tokens_keep_the_objective_of_tokens() {
    let mut b = Bench::new(NEVER);
    // Prefills alone tell nothing of tokens, to which an objective is given then.
    b.units(64, 20 * MS);
    let tokens = Some(testing::tokens(3 * MS));
    set_services(vec![(WEB, tally_sdk::Service { tokens, ..testing::service(None) })]);
    let unit = |b: &mut Bench, longest_ns: u64, took_ns: u64| {
        b.policy.began(b.now_ns, WEB, b.now_ns, b.now_ns.saturating_add(longest_ns));
        let decided = b.decide(500 * US);
        b.end(took_ns);
        // It makes tokens without a pause.
        b.now_ns -= 4 * took_ns;
        decided
    };
    (0..8).for_each(|_| assert_eq!(unit(&mut b, 3 * MS, MS), HELD));
    for _ in 0..1_000 {
        assert_eq!(unit(&mut b, NEVER, 20 * MS), HELD, "a prefill");
        let runs = (0..20).filter(|_| unit(&mut b, 3 * MS, MS + 300 * US) == RUNS).count();
        assert!(runs >= 19, "but for what is measured alone: {runs}");
    }
    assert_eq!(b.policy.services[0].units(), 64 + 8 + 21_000);
}

#[test]
fn an_objective_of_tokens_counts_only_while_there_are_tokens() {
    let mut b = Bench::new(20 * MS);
    let with = |tpot_ns: Option<u64>| {
        let tokens = tpot_ns.map(testing::tokens);
        let service = tally_sdk::Service { tokens, ..testing::service(Some(20 * MS)) };
        set_services(vec![(WEB, service)]);
    };
    with(Some(MS));
    b.policy.services[0].ask(b.now_ns);
    // Requests only: they bear what their own objective leaves.
    b.units(64 + 8, 5 * MS);
    assert_eq!(b.allowance_ns(), Some(14 * MS));
    // The first token: now they bear nothing.
    b.slo_ns = MS;
    b.units(8, 500 * US);
    assert_eq!(b.allowance_ns(), Some(450 * US));
    b.slo_ns = 20 * MS;
    b.begin();
    assert_eq!(b.decide(10 * US), HELD);
    b.end(5 * MS);
    // Without an objective of tokens they bear it again.
    with(None);
    b.units(9, 5 * MS);
    assert_eq!(b.allowance_ns(), Some(14 * MS));
}

#[test]
fn what_was_never_measured_is_let_in_where_much_can_be_spared() {
    let mut b = Bench::new(10 * MS);
    b.units(8, 5 * MS);
    b.begin();
    let spare_ns = b.policy.services[0].left_ns().unwrap();
    assert_eq!(spare_ns, 4_500 * US);
    for expected in [RUNS, RUNS, HELD] {
        assert_eq!(b.decide(UNKNOWN), expected);
    }
}

#[test]
fn another_objective_starts_anew() {
    let mut b = Bench::new(3 * MS);
    b.units(100, 4 * MS);
    assert_eq!(b.allowance_ns(), None);
    b.slo_ns = 30 * MS;
    b.begin();
    assert_eq!(b.allowance_ns(), Some(28_500 * US - 4 * MS));
}

#[test]
fn what_a_unit_cannot_bear_whole_runs_so_that_it_can_yield() {
    let mut b = Bench::new(3 * MS);
    let graph = |b: &Bench| Launch {
        state: LaunchState::GRAPH,
        offered: FormsOffered::SLICED,
        grid_blocks: 100,
        ..b.asked(10 * MS)
    };
    let asked = graph(&b);
    assert_eq!(b.policy.decide(&asked).decision.form().0, Form::Sliced);
    let kernel = Launch { offered: FormsOffered::PREPARABLE, ..b.asked(MS) };
    assert_eq!(b.policy.decide(&kernel).decision, Decision::Preemptible, "to be transformed");
    // One that is under way yields to a unit that can bear nothing, until no unit is open.
    calls();
    b.begin();
    assert_eq!(calls()[0], Call::SetYield { client: BATCH, yielded: true });
    b.end(MS);
    assert!(calls().contains(&Call::SetYield { client: BATCH, yielded: false }));
    b.units(7, MS);
    assert_eq!(b.policy.decide(&kernel).decision, RUNS, "1.85 ms can be borne");
}

/// A marked request whose program does something else for a while.
#[test]
fn what_has_yielded_goes_on_while_a_unit_pauses() {
    let mut b = Bench::new(3 * MS);
    let long =
        Launch { offered: FormsOffered::SLICED, state: LaunchState::GRAPH, ..b.asked(90 * MS) };
    b.decide_on(&long);
    let yields = |yielded| Call::SetYield { client: BATCH, yielded };
    let timer = Call::SetTimer { delay_ns: GAP_NS, token: GAP };
    calls();
    b.begin();
    assert_eq!(calls(), [yields(true), timer.clone()], "no work came with it yet");
    b.policy.high_started(b.now_ns);
    b.policy.fired(b.now_ns + GAP_NS, GAP);
    assert_eq!(calls(), [], "there is work");
    b.policy.high_ended(b.now_ns + 3 * MS);
    assert_eq!(calls(), [timer]);
    b.policy.fired(b.now_ns + 5 * MS, GAP);
    assert_eq!(calls(), [yields(false)]);
    b.policy.high_started(b.now_ns + 9 * MS);
    assert_eq!(calls(), [yields(true)]);
    b.now_ns += 10 * MS;
    b.end(MS);
    assert!(calls().contains(&yields(false)));
}

#[test]
fn a_service_that_leaves_in_a_unit_leaves_nobody_yielded() {
    let mut b = Bench::new(3 * MS);
    b.policy.joined(1, &client(7, PriorityClass::High));
    let long =
        Launch { offered: FormsOffered::SLICED, state: LaunchState::GRAPH, ..b.asked(9 * MS) };
    b.policy.decide(&long);
    b.begin();
    assert!(calls().contains(&Call::SetYield { client: BATCH, yielded: true }));
    b.policy.left(b.now_ns, WEB);
    assert!(calls().contains(&Call::SetYield { client: BATCH, yielded: false }));
}

#[test]
fn a_unit_without_work_on_the_gpu_holds_nothing_back_for_long() {
    let mut b = Bench::new(NEVER);
    b.begin();
    assert_eq!(b.decide(10 * US), HELD);
    let idle =
        |high_idle_ns| Launch { state: LaunchState::empty(), high_idle_ns, ..b.asked(10 * US) };
    let (early, late) = (idle(MS / 2), idle(GAP_NS));
    assert_eq!(b.policy.decide(&early).decision, Decision::Hold(GAP_NS - MS / 2));
    assert_eq!(b.policy.decide(&late).decision, RUNS);
}

#[test]
fn units_that_end_together_count_each() {
    let mut b = Bench::new(3 * MS);
    b.units(8, MS);
    for _ in 0..10 {
        b.begin();
        b.now_ns += MS;
        b.policy.ended(b.now_ns, WEB, 4, MS);
        b.now_ns += 4 * MS;
    }
    assert!(b.allowance_ns().is_some());
    b.begin();
    b.policy.ended(b.now_ns + MS, WEB, 3, 4 * MS);
    assert_eq!(b.allowance_ns(), None, "three late ones");
}

#[test]
fn a_unit_that_is_old_already_can_bear_less() {
    let mut b = Bench::new(3 * MS);
    b.units(8, MS);
    // Of 3 ms it queued for 1.5, and takes 1.
    let since_ns = b.now_ns - 1_500 * US;
    b.policy.began(b.now_ns, WEB, since_ns, since_ns + 3 * MS);
    assert_eq!(b.decide(600 * US), HELD);
    assert_eq!(b.decide(500 * US), RUNS);
}

#[test]
fn best_effort_is_free_while_it_is_alone() {
    let mut policy = Herald::init("").unwrap();
    policy.joined(1, &client(BATCH, PriorityClass::BestEffort));
    let alone = Launch { client: BATCH, ..launch() };
    assert_eq!(policy.decide(&alone).decision, Decision::Run(1_000_000));
    calls();
    policy.joined(2, &client(WEB, PriorityClass::High));
    let told = calls();
    assert!(told.contains(&Call::RevokeLease(BATCH)), "{told:?}");
    assert!(told.contains(&Call::SetWindow { client: BATCH, window_ns: MS }), "{told:?}");
    policy.left(3, WEB);
    assert!(calls().contains(&Call::SetWindow { client: BATCH, window_ns: WINDOW_OPEN }));
    assert_eq!(policy.decide(&alone).decision, Decision::Run(1_000_000));
}

/// The training and client 3 launch by turns.
fn both_launch(b: &mut Bench) {
    let waits = |id| ClientState {
        waiting_since_ns: b.now_ns,
        ..testing::client_state(id, PriorityClass::BestEffort)
    };
    testing::set_clients([BATCH, 3].map(waits).into());
    for client in [BATCH, 3, BATCH] {
        b.now_ns += MS;
        let launch = Launch { client, ..b.asked(20 * US) };
        b.policy.decide(&launch);
    }
}

#[test]
fn the_window_is_long_where_services_can_spare_far_more() {
    let window = |slo_ns, took_ns| {
        let mut b = Bench::new(slo_ns);
        b.units(8, took_ns);
        let set = |call| match call {
            Call::SetWindow { client: BATCH, window_ns } => Some(window_ns),
            _ => None,
        };
        calls().into_iter().filter_map(set).next_back()
    };
    assert_eq!(window(2 * MS, MS), Some(450 * US), "half of what it can spare");
    assert_eq!(window(15 * MS, MS), None, "as at first: 1 ms");
    // 64 ms are spared.
    assert_eq!(window(80 * MS, 12 * MS), Some(4 * MS));
    assert_eq!(window(800 * MS, MS), Some(10 * MS));
    let set = |window_ns| calls().contains(&Call::SetWindow { client: BATCH, window_ns });
    // One that is served strictly has the usual one.
    let mut b = Bench::new(80 * MS);
    b.units(8, 12 * MS);
    assert!(set(4 * MS));
    b.units(3, 81 * MS);
    assert!(set(MS));
    // So has one with another objective, at once, until it is known what that leaves.
    let mut b = Bench::new(80 * MS);
    b.units(8, 12 * MS);
    assert!(set(4 * MS));
    b.slo_ns = 20 * MS;
    b.begin();
    assert!(set(MS));
    // Several clients have it together.
    let mut b = Bench::new(80 * MS);
    b.units(8, 12 * MS);
    assert!(set(4 * MS));
    b.policy.joined(b.now_ns, &client(3, PriorityClass::BestEffort));
    both_launch(&mut b);
    assert!(set(2 * MS));
}

#[test]
fn where_contexts_take_turns_no_time_is_shared_within_a_unit() {
    testing::set_sharing_mode(SharingMode::TimeSliced);
    let mut b = Bench::new(30 * MS);
    b.units(20, MS);
    b.begin();
    assert_eq!(b.decide(10 * US), HELD);
    b.end(MS);
    assert_eq!(b.decide(10 * US), RUNS);
}

#[test]
fn a_wrong_configuration_is_refused() {
    for (text, why) in [("idle_gap_us = -1", "idle_gap_us"), ("slo_ms = 3", "slo_ms")] {
        let error = Herald::init(text).err().unwrap();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn several_best_effort_clients_share_what_units_can_spare_by_weight() {
    for mode in [SharingMode::TimeSliced, SharingMode::Concurrent] {
        testing::set_sharing_mode(mode);
        let mut b = Bench::new(30 * MS);
        b.policy.joined(1, &client(7, PriorityClass::BestEffort));
        b.units(20, MS);
        calls();
        let charged = |of_batch: u64, of_other: u64| {
            let state = |id, charged_ns| ClientState {
                charged_ns,
                waiting_since_ns: 0,
                ..testing::client_state(id, PriorityClass::BestEffort)
            };
            testing::set_clients(vec![state(BATCH, of_batch), state(7, of_other)]);
        };
        let held = |b: &mut Bench, client, now_ns| {
            let asked = Launch { client, now_ns, ..b.asked(US) };
            let decision = b.policy.decide(&asked).decision;
            matches!(decision, Decision::Hold(_) | Decision::HoldUntilCompletion(_))
        };
        let from_ns = b.now_ns;
        charged(0, 0);
        assert!(!held(&mut b, BATCH, from_ns + 1));
        // One has had its 20 ms, and the other one got none of them.
        charged(20 * MS, 0);
        assert!(held(&mut b, BATCH, from_ns + 20 * MS), "{mode:?}");
        assert!(!held(&mut b, 7, from_ns + 20 * MS + 1), "{mode:?}");
    }
}
