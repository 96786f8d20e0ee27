use super::*;
use tally_sdk::testing::{self, Call, calls, client, launch, set_services, set_widths};
use tally_sdk::{FormsOffered, HOLD_UNTIL_CHANGE, LaunchState, NEVER};

mod prepare;
mod risk;
mod widths;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SERVICE: ClientId = 1;
const TRAINING: ClientId = 2;
const OTHER: ClientId = 3;
/// The objective of the service's tokens, and what a step takes alone.
const TPOT: u64 = 10 * MS;
const OWN: u64 = 5 * MS;
const HELD: Decision = Decision::Hold(HOLD_UNTIL_CHANGE);
const RUNS: Decision = Decision::Run(0);

/// A policy with a service that makes tokens, a training, and a clock.
struct Bench {
    policy: TpotFirst,
    now_ns: u64,
}

/// Widths that launches can be limited to.
const EIGHTS: [u32; 16] = [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128];

impl Bench {
    /// Its steps alone are known.
    fn new(config: &str) -> Self {
        Bench::of_widths(config, &EIGHTS)
    }

    fn of_widths(config: &str, widths: &[u32]) -> Self {
        let mut b = Bench::unknown(config);
        set_widths(widths.to_vec());
        b.uneven_steps();
        calls();
        b
    }

    fn unknown(config: &str) -> Self {
        set_services(vec![(SERVICE, service_of_tokens())]);
        set_widths(EIGHTS.to_vec());
        let mut policy = TpotFirst::init(config).unwrap();
        policy.joined(1, &client(SERVICE, PriorityClass::High));
        policy.joined(1, &client(TRAINING, PriorityClass::BestEffort));
        calls();
        Bench { policy, now_ns: MS }
    }

    fn asked(&self, predicted_ns: u64) -> Launch {
        let is_open = self.policy.services.iter().any(Service::is_open);
        let state = if is_open { LaunchState::HIGH_ACTIVE } else { LaunchState::empty() };
        let (now_ns, client) = (self.now_ns, TRAINING);
        let high_clients = self.policy.services.len() as u32;
        let grid_blocks = 4_096;
        Launch { now_ns, client, predicted_ns, state, high_clients, grid_blocks, ..launch() }
    }

    /// A launch that can be limited to some SMs.
    fn limitable(&self, predicted_ns: u64) -> Launch {
        Launch { offered: FormsOffered::SM_LIMITED, ..self.asked(predicted_ns) }
    }

    /// On its client's width it counts as limited to that.
    fn decide(&mut self, launch: &Launch) -> Decision {
        let answer = self.policy.decide(launch);
        match self.policy.client_width.sms() {
            Some(sms) if answer.reason == Reason::Width.into() => Decision::SmLimited(sms),
            _ => answer.decision,
        }
    }

    fn begin(&mut self) {
        self.begin_of(SERVICE, TPOT);
    }

    fn begin_of(&mut self, service: ClientId, longest_ns: u64) {
        let deadline_ns = self.now_ns.saturating_add(longest_ns);
        self.policy.began(self.now_ns, service, self.now_ns, deadline_ns);
    }

    fn end(&mut self, took_ns: u64) {
        self.now_ns += took_ns;
        self.policy.ended(self.now_ns, SERVICE, 1, took_ns);
        self.now_ns += MS;
    }

    /// Steps without others.
    fn steps(&mut self, count: u32, took_ns: u64) {
        for _ in 0..count {
            self.begin();
            self.end(took_ns);
        }
    }

    /// Steps without others and without a rhythm.
    fn uneven_steps(&mut self) {
        for n in 0..9 {
            self.steps(1, OWN);
            self.now_ns += n % 3 * 2 * OWN;
        }
    }

    /// A step with a launch of 1 ms beside it that can be limited.
    fn step_beside(&mut self, took_ns: u64) -> Decision {
        self.begin();
        let decision = self.decide(&self.limitable(MS));
        self.end(took_ns);
        decision
    }

    fn steps_beside(&mut self, count: u32, took_ns: u64) {
        for _ in 0..count {
            self.step_beside(took_ns);
        }
    }

    fn width(&self) -> u32 {
        self.policy.services[0].widths.sms()
    }
}

fn service_of_tokens() -> tally_sdk::Service {
    tally_sdk::Service { tokens: Some(testing::tokens(TPOT)), ..testing::service(None) }
}

fn reason(b: &mut Bench, launch: &Launch) -> u8 {
    b.policy.decide(launch).reason
}

#[test]
fn the_others_run_on_the_width_in_a_step_and_on_all_sms_between_two() {
    let mut b = Bench::new("");
    b.begin();
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(32));
    b.end(OWN);
    assert_eq!(b.decide(&b.limitable(MS)), RUNS);
}

#[test]
fn first_steps_are_measured_without_others() {
    let mut b = Bench::unknown("");
    for _ in 0..8 {
        b.begin();
        assert_eq!(b.decide(&b.limitable(MS)), HELD);
        b.end(OWN);
    }
    assert_eq!(b.policy.services[0].own_permille(), Some(500));
    b.begin();
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(32));
}

#[test]
fn what_is_always_under_way_does_not_keep_the_others_waiting_for_ever() {
    let mut b = Bench::unknown("");
    let decided: Vec<Decision> = (0..200)
        .map(|_| {
            b.policy.busy.until_ns = NEVER - 1;
            b.begin();
            let decided = b.decide(&b.limitable(MS));
            b.end(OWN);
            decided
        })
        .collect();
    assert!(decided[..64].iter().all(|decision| *decision == HELD));
    let runs = decided[64..].iter().filter(|one| matches!(one, Decision::SmLimited(32))).count();
    assert_eq!(runs, 200 - 64 - 4, "and a few later");
}

#[test]
fn a_launch_with_few_blocks_runs_whole() {
    let mut b = Bench::new("");
    b.begin();
    let few = |blocks| Launch { grid_blocks: blocks, ..b.limitable(20 * MS) };
    let (few, more) = (few(32), few(33));
    assert_eq!(b.decide(&few), RUNS);
    assert_eq!(reason(&mut b, &few), Reason::Narrow.into());
    assert_eq!(b.decide(&more), Decision::SmLimited(32));
}

#[test]
fn short_launches_are_limited_only_once_the_slack_is_used_up() {
    let mut b = Bench::new("");
    b.begin();
    // Of 9 ms the step needs 5, and of the rest the others get half at first.
    let slack_ns = 2 * MS;
    let short_ns = 59 * US;
    let whole = (0..1_000).take_while(|_| b.decide(&b.limitable(short_ns)) == RUNS).count() as u64;
    assert_eq!(whole, slack_ns / short_ns);
    assert_eq!(b.decide(&b.limitable(short_ns)), Decision::SmLimited(32));
    b.end(OWN);
    let mut b = Bench::new("limit_us_min = 0");
    b.begin();
    assert_eq!(b.decide(&b.limitable(short_ns)), Decision::SmLimited(32));
}

#[test]
fn what_cannot_be_limited_runs_within_the_slack_and_waits_beyond_it() {
    let mut b = Bench::new("");
    b.begin();
    assert_eq!(b.decide(&b.asked(2 * MS + 1)), HELD);
    assert_eq!(b.decide(&b.asked(1_950 * US)), RUNS);
    assert_eq!(b.decide(&b.asked(100 * US)), HELD, "50 us are left");
    let unknown = b.asked(0);
    assert_eq!(reason(&mut b, &unknown), Reason::NoSlack.into());
    b.end(OWN);
    assert_eq!(b.decide(&unknown), RUNS);
}

#[test]
fn a_kernel_that_only_ever_ran_limited_is_known_by_that() {
    let mut b = Bench::new("");
    b.begin();
    let unknown = b.limitable(0);
    assert_eq!(b.decide(&unknown), Decision::SmLimited(32));
    let form = tally_sdk::FormProfile {
        form: tally_sdk::Form::SmLimited,
        argument: 32,
        count: 1,
        mean_ns: 0,
        p50_ns: 85 * US,
        p99_ns: 0,
        latest_ns: 0,
        turnaround_ns: 0,
    };
    let profile = tally_sdk::KernelProfile { forms: vec![form], ..testing::kernel(4_096) };
    testing::set_kernels(vec![(1, profile)]);
    // 80 us on 32 SMs are about 20 on all of them.
    assert_eq!(b.decide(&unknown), RUNS);
}

#[test]
fn a_unit_without_an_objective_holds_nothing_back() {
    let mut b = Bench::new("");
    b.begin_of(SERVICE, NEVER);
    assert_eq!(b.decide(&b.limitable(50 * MS)), Decision::SmLimited(32), "a prefill");
    assert_eq!(b.decide(&b.asked(50 * MS)), RUNS);
    b.end(500 * MS);
    assert_eq!(b.width(), 32);
}

#[test]
fn where_nothing_has_to_be_decided_there_are_leases() {
    let mut b = Bench::new("start_sms = 1024\nlease_launches = 9");
    b.begin();
    let answer = b.policy.decide(&b.limitable(MS));
    assert_eq!((answer.decision, answer.reason), (Decision::Run(9), Reason::Free.into()));
    // A late step ends that.
    b.end(TPOT + 1);
    let told = calls();
    assert!(told.contains(&Call::RevokeLease(TRAINING)), "{told:?}");
    b.begin();
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(104));
    let mut alone = TpotFirst::init("").unwrap();
    alone.joined(1, &client(TRAINING, PriorityClass::BestEffort));
    assert_eq!(alone.decide(&launch()).decision, Decision::Run(1_000_000));
}

#[test]
fn a_service_that_misses_its_objective_is_served_strictly_until_it_keeps_it() {
    let mut b = Bench::new("");
    for _ in 0..10 {
        b.step_beside(TPOT + 1);
    }
    assert!(!b.policy.services[0].is_strict(), "10 of 200");
    b.steps(1, TPOT + 1);
    let told = calls();
    let shown = |value| Call::GaugeSet { name: "services_served_strictly".into(), value };
    assert!(told.contains(&shown(1)), "{told:?}");
    let is_said =
        |call: &Call| matches!(call, Call::Log { message, .. } if message.contains("others wait"));
    assert!(told.iter().any(is_said), "{told:?}");
    b.begin();
    let held = b.policy.decide(&b.limitable(MS));
    assert_eq!((held.decision, held.reason), (HELD, Reason::Strict.into()));
    b.end(OWN);
    b.steps(188, OWN);
    assert!(b.policy.services[0].is_strict(), "11 of 200");
    b.steps(1, OWN);
    assert!(calls().contains(&shown(0)));
    // Begins with the least width.
    b.begin();
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(8));
}

#[test]
fn a_service_without_an_objective_is_served_strictly() {
    set_services(vec![(SERVICE, testing::service(None))]);
    let mut policy = TpotFirst::init("").unwrap();
    policy.joined(1, &client(SERVICE, PriorityClass::High));
    policy.joined(1, &client(TRAINING, PriorityClass::BestEffort));
    let mut b = Bench { policy, now_ns: MS };
    b.begin_of(SERVICE, NEVER);
    assert_eq!(b.decide(&b.limitable(MS)), HELD);
    b.now_ns += MS;
    b.policy.ended(b.now_ns, SERVICE, 1, MS);
    b.now_ns += 30 * US;
    assert_eq!(b.decide(&b.limitable(MS)), Decision::Hold(70 * US));
    b.now_ns += 70 * US;
    assert_eq!(b.decide(&b.limitable(MS)), RUNS);
}

#[test]
fn work_without_units_of_a_service_that_is_served_strictly_is_waited_for() {
    set_services(vec![(SERVICE, testing::service(None))]);
    let mut policy = TpotFirst::init("").unwrap();
    policy.joined(1, &client(SERVICE, PriorityClass::High));
    let mut b = Bench { policy, now_ns: MS };
    let busy = Launch { state: LaunchState::HIGH_ACTIVE, ..b.limitable(MS) };
    assert_eq!(b.decide(&busy), HELD);
    assert_eq!(b.decide(&b.limitable(MS)), RUNS);
    let late = Launch { waited_ns: 1_000 * MS, ..busy };
    assert_eq!(b.decide(&late), Decision::SmLimited(8));
    // It ran ahead, so that those behind it have waited as long.
    let next = |b: &Bench| Launch { now_ns: b.now_ns, ..late };
    b.now_ns += 999 * MS;
    assert_eq!(b.decide(&next(&b)), HELD);
    b.now_ns += MS;
    assert_eq!(b.decide(&next(&b)), Decision::SmLimited(8));
}

#[test]
fn where_contexts_take_turns_launches_wait_for_slack_instead() {
    testing::set_sharing_mode(SharingMode::TimeSliced);
    set_services(vec![(SERVICE, service_of_tokens())]);
    let mut policy = TpotFirst::init("").unwrap();
    policy.joined(1, &client(SERVICE, PriorityClass::High));
    let said = calls();
    let is_said =
        |call: &Call| matches!(call, Call::Log { message, .. } if message.contains("take turns"));
    assert!(said.iter().any(is_said), "{said:?}");
    policy.joined(1, &client(TRAINING, PriorityClass::BestEffort));
    let mut b = Bench { policy, now_ns: MS };
    b.uneven_steps();
    b.begin();
    // Of 2 ms a launch takes 400 us more than its own time.
    for launch in [b.limitable(1_601 * US), Launch { grid_blocks: 1, ..b.asked(1_601 * US) }] {
        assert_eq!(b.decide(&launch), HELD);
    }
    assert_eq!(b.decide(&b.limitable(1_500 * US)), RUNS);
    assert_eq!(b.decide(&b.limitable(US)), HELD);
    b.end(OWN);
    assert_eq!(b.decide(&b.limitable(1_601 * US)), RUNS);
}

#[test]
fn of_several_services_the_tightest_decides() {
    let mut b = Bench::new("");
    set_services(vec![(SERVICE, service_of_tokens()), (OTHER, service_of_tokens())]);
    b.policy.joined(b.now_ns, &client(OTHER, PriorityClass::High));
    for _ in 0..8 {
        b.begin_of(OTHER, TPOT);
        b.now_ns += OWN;
        b.policy.ended(b.now_ns, OTHER, 1, OWN);
        b.now_ns += MS;
    }
    // A late step of the other one.
    b.begin_of(OTHER, TPOT);
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(32));
    b.now_ns += TPOT + 1;
    b.policy.ended(b.now_ns, OTHER, 1, TPOT + 1);
    b.begin();
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(32), "it alone has a step open");
    b.begin_of(OTHER, TPOT);
    assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(24));
    // Good beside less than its own width: no reason for more.
    for _ in 0..200 {
        b.end(OWN);
        b.begin();
        assert_eq!(b.decide(&b.limitable(MS)), Decision::SmLimited(24));
        b.begin_of(OTHER, TPOT);
    }
    assert_eq!(b.width(), 32);
}

/// What such a service says changes nothing for others, and keeps nobody waiting for ever.
#[test]
fn a_service_that_lies_of_its_units_changes_nothing_for_others() {
    let lies: [fn(&mut Bench); 4] = [
        // It never ends units.
        |b| b.begin_of(OTHER, TPOT),
        // They take no time, or an unknown one.
        |b| b.policy.ended(b.now_ns, OTHER, u32::MAX, 0),
        |b| b.policy.ended(b.now_ns, OTHER, 0, MS),
        |b| b.policy.ended(b.now_ns, OTHER, 1, NEVER),
    ];
    for lie in lies {
        let mut b = Bench::new("");
        set_services(vec![(SERVICE, service_of_tokens()), (OTHER, service_of_tokens())]);
        b.policy.joined(b.now_ns, &client(OTHER, PriorityClass::High));
        for _ in 0..500 {
            lie(&mut b);
            b.begin();
            b.decide(&b.limitable(MS));
            lie(&mut b);
            b.end(OWN);
        }
        let (own, other) = (b.policy.services[0].clone(), &b.policy.services[1]);
        assert_eq!((own.own_permille(), own.is_strict()), (Some(500), false));
        assert_eq!((other.own_permille(), other.is_strict()), (None, false));
        assert!(other.widths.sms() <= 32);
        // Whatever it has open, a launch waits for a second at most.
        b.begin_of(OTHER, TPOT);
        let long = Launch { waited_ns: 1_000 * MS, ..b.limitable(50 * MS) };
        assert_eq!(b.decide(&long), Decision::SmLimited(8));
        let whole = Launch { offered: FormsOffered::empty(), client: TRAINING + 1, ..long };
        assert_eq!(b.decide(&whole), RUNS);
        // Without work on the GPU it holds nothing back.
        let idle = |high_idle_ns| {
            let state = LaunchState::empty();
            Launch { waited_ns: 0, state, high_idle_ns, ..whole }
        };
        assert_eq!(b.decide(&idle(MS / 2)), Decision::Hold(2 * MS - MS / 2));
        let short = Launch { predicted_ns: MS, ..idle(2 * MS) };
        b.now_ns += 2 * MS;
        assert_eq!(b.decide(&Launch { now_ns: b.now_ns, ..short }), RUNS);
        // It is no step any more after eight times its objective.
        b.now_ns += 8 * TPOT;
        assert_eq!(b.decide(&b.asked(50 * MS)), RUNS);
    }
}

#[test]
fn several_units_at_once_count_as_one_of_their_average() {
    let mut b = Bench::new("");
    let ended = |b: &mut Bench, units, took_ns| {
        b.begin();
        b.decide(&b.limitable(MS));
        b.now_ns += took_ns;
        b.policy.ended(b.now_ns, SERVICE, units, took_ns);
        b.now_ns += MS;
    };
    for _ in 0..199 {
        ended(&mut b, 1_000, OWN);
    }
    assert_eq!(b.width(), 32);
    ended(&mut b, 2, OWN);
    assert_eq!(b.width(), 40);
    ended(&mut b, 3, TPOT + 1);
    assert_eq!(b.width(), 32);
}

#[test]
fn a_step_that_goes_on_while_another_ended_bears_no_more() {
    let mut b = Bench::new("");
    b.begin();
    let since_ns = b.now_ns;
    assert_eq!(b.decide(&b.asked(1_950 * US)), RUNS);
    b.now_ns += MS;
    b.policy.ended(b.now_ns, SERVICE, 1, OWN);
    b.policy.began(b.now_ns, SERVICE, since_ns, since_ns + TPOT);
    assert_eq!(b.decide(&b.asked(100 * US)), HELD);
}

#[test]
fn another_objective_begins_anew() {
    let mut b = Bench::new("good_steps = 10");
    b.steps_beside(10, OWN);
    assert_eq!(b.width(), 40);
    let tokens = Some(testing::tokens(TPOT / 2));
    set_services(vec![(SERVICE, tally_sdk::Service { tokens, ..testing::service(None) })]);
    b.begin_of(SERVICE, TPOT / 2);
    assert_eq!((b.width(), b.policy.services[0].own_permille()), (32, None));
    assert_eq!(b.decide(&b.limitable(MS)), HELD, "a step alone");
    // Without one it is served strictly.
    b.end(OWN / 2);
    set_services(vec![(SERVICE, testing::service(None))]);
    b.begin_of(SERVICE, NEVER);
    assert!(b.policy.services[0].is_strict());
}

#[test]
fn several_best_effort_clients_share_by_weight() {
    let mut b = Bench::new("");
    b.policy.joined(b.now_ns, &client(7, PriorityClass::BestEffort));
    let state = |id, charged_ns| tally_sdk::ClientState {
        charged_ns,
        waiting_since_ns: 0,
        ..testing::client_state(id, PriorityClass::BestEffort)
    };
    let from_ns = b.now_ns;
    testing::set_clients(vec![state(TRAINING, 0), state(7, 0)]);
    assert_eq!(b.decide(&b.limitable(US)), RUNS);
    testing::set_clients(vec![state(TRAINING, 20 * MS), state(7, 0)]);
    b.now_ns = from_ns + 20 * MS;
    let held = b.policy.decide(&b.limitable(US));
    assert_eq!(held.reason, Reason::NotItsTurn.into());
    assert_eq!(b.decide(&Launch { client: 7, ..b.limitable(US) }), RUNS);
}

#[test]
fn a_client_below_its_floor_is_let_in_whatever_is_open() {
    let mut b = Bench::new("");
    let state = |charged_ns| tally_sdk::ClientState {
        min_share_permille: 200,
        charged_ns,
        waiting_since_ns: 0,
        backlogged_since_ns: 0,
        ..testing::client_state(TRAINING, PriorityClass::BestEffort)
    };
    testing::set_clients(vec![state(0)]);
    b.begin();
    let asked = |b: &Bench| {
        let launch = b.asked(5 * MS);
        Launch { state: launch.state | LaunchState::MIN_SHARE, ..launch }
    };
    assert!(matches!(b.decide(&asked(&b)), Decision::Hold(ns) if ns < HOLD_UNTIL_CHANGE));
    b.now_ns += 11 * MS;
    let let_in = b.policy.decide(&asked(&b));
    assert_eq!((let_in.decision, let_in.reason), (RUNS, Reason::Floor.into()));
    testing::set_clients(vec![state(5 * MS)]);
    assert!(matches!(b.decide(&asked(&b)), Decision::Hold(ns) if ns < HOLD_UNTIL_CHANGE));
}

#[test]
fn what_was_learned_outlives_a_reload_beside_the_same_neighbours() {
    let mut b = Bench::new("");
    b.steps_beside(200, OWN);
    assert_eq!(b.width(), 40);
    for (neighbour, width) in [(TRAINING, 40), (7, 32)] {
        let mut new: TpotFirst = testing::reloaded(&b.policy, "").unwrap();
        new.joined(b.now_ns, &client(SERVICE, PriorityClass::High));
        new.joined(b.now_ns, &client(neighbour, PriorityClass::BestEffort));
        new.began(b.now_ns, SERVICE, b.now_ns, b.now_ns + TPOT);
        let service = &new.services[0];
        let own = (neighbour == TRAINING).then_some(500);
        assert_eq!((service.widths.sms(), service.own_permille()), (width, own), "{neighbour}");
    }
    let foreign = tally_sdk::Saved { format: "else".into(), version: 1, data: Vec::new() };
    assert!(b.policy.restore(&foreign).is_err());
}

#[test]
fn a_wrong_configuration_is_refused() {
    for (text, why) in [
        ("target_percent = 0", "target_percent"),
        ("good_steps = 0", "good_steps"),
        ("tpot_ms = 3", "tpot_ms"),
    ] {
        let error = TpotFirst::init(text).err().unwrap();
        assert!(error.contains(why), "{error}");
    }
}
