//! Units of work: what a policy is told and can read of them.

mod common;

use common::{HIGH, LOW, Script, info};
use std::sync::{Arc, Mutex};
use tally_engine::policy::*;
use tally_engine::{Action, EndedUnits, Engine, EngineConfig, OpenUnit};

const SLO: Objective = Objective { slo_ns: 1_000, percentile: 95.0 };

fn engine() -> (Engine, Arc<Mutex<common::Seen>>, Vec<Action>) {
    let seen = Arc::default();
    let script = Script { seen: Arc::clone(&seen), ..Default::default() };
    let mut e = Engine::new(EngineConfig::default(), Box::new(script));
    let mut out = Vec::new();
    for (id, class) in [(HIGH, Class::High), (LOW, Class::BestEffort)] {
        e.client_joined(0, info(id, class), 0, &mut out);
    }
    seen.lock().unwrap().events.clear();
    (e, seen, out)
}

fn service(e: &Engine) -> ServiceView {
    e.world().clients[&HIGH].service.unwrap()
}

fn ended(units: u32, took_ns: u64) -> [EndedUnits; 1] {
    [EndedUnits { units, took_ns, is_token: false }]
}

/// The other one of a client's objectives stays.
fn set_objective(
    e: &mut Engine,
    now_ns: u64,
    client: ClientId,
    objective: Option<Objective>,
    out: &mut Vec<Action>,
) -> bool {
    let service = e.world().clients.get(&client).and_then(|client| client.service);
    let tpot_ns = service.and_then(|service| service.tokens).map(|tokens| tokens.tpot_ns);
    e.set_objectives(now_ns, client, objective, tpot_ns, out)
}

fn set_token_objective(
    e: &mut Engine,
    now_ns: u64,
    client: ClientId,
    tpot_ns: Option<u64>,
    out: &mut Vec<Action>,
) -> bool {
    let service = e.world().clients.get(&client).and_then(|client| client.service);
    let objective = service.and_then(|service| service.objective);
    e.set_objectives(now_ns, client, objective, tpot_ns, out)
}

#[test]
fn units_are_told_and_counted_against_the_objective() {
    let (mut e, seen, mut out) = engine();
    assert!(set_objective(&mut e, 0, HIGH, Some(SLO), &mut out));
    e.unit_began(50, HIGH, 40, &mut out);
    assert_eq!(service(&e).open_since_ns, 40);
    e.units_ended(1_090, HIGH, &ended(1, 1_050), None, &mut out);
    // Two at once, and one whose length nobody knows.
    e.units_ended(9_000, HIGH, &ended(2, 900), None, &mut out);
    e.unit_began(9_100, HIGH, 9_999, &mut out);
    e.units_ended(9_200, HIGH, &[], None, &mut out);
    let told = [
        Event::UnitBegan { client: HIGH, since_ns: 40, deadline_ns: 1_040 },
        Event::UnitsEnded { client: HIGH, units: 1, took_ns: 1_050 },
        Event::UnitsEnded { client: HIGH, units: 2, took_ns: 900 },
        // Nobody sees what is to come.
        Event::UnitBegan { client: HIGH, since_ns: 9_100, deadline_ns: 10_100 },
        Event::UnitsEnded { client: HIGH, units: 0, took_ns: 0 },
    ];
    assert_eq!(seen.lock().unwrap().events, told);
    let expected = ServiceView {
        objective: Some(SLO),
        open_since_ns: NEVER,
        open_is_token: false,
        units: 3,
        units_within: 2,
        recent: 3,
        recent_within: 2,
        p50_ns: 900,
        p99_ns: 1_050,
        tokens: None,
        profile: None,
    };
    assert_eq!(service(&e), expected);

    // With another objective what is recent begins anew; without one nothing has a deadline.
    assert!(set_objective(&mut e, 0, HIGH, None, &mut out));
    assert_eq!((service(&e).recent, service(&e).units), (0, 3));
    e.unit_began(9_300, HIGH, 9_300, &mut out);
    let last = seen.lock().unwrap().events.last().cloned();
    let began = Event::UnitBegan { client: HIGH, since_ns: 9_300, deadline_ns: NEVER };
    assert_eq!(last, Some(began));
    e.units_ended(9_400, HIGH, &ended(1, 100), None, &mut out);
    assert_eq!((service(&e).units, service(&e).units_within), (4, 2));
}

#[test]
fn a_unit_of_tokens_keeps_both_objectives_or_none() {
    let (mut e, _, mut out) = engine();
    assert!(
        set_objective(&mut e, 0, HIGH, Some(SLO), &mut out)
            && set_token_objective(&mut e, 0, HIGH, Some(100), &mut out)
    );
    // Whatever is open: a token may begin and end between two looks.
    let took = [(true, 100), (true, 101), (false, 101), (false, 1_001)];
    let took = took.map(|(is_token, took_ns)| EndedUnits { units: 1, took_ns, is_token });
    e.unit_began(9_000, HIGH, 8_000, &mut out);
    e.units_ended(9_200, HIGH, &took[..2], None, &mut out);
    e.units_ended(9_300, HIGH, &took[2..], None, &mut out);
    let kept = |e: &_| (service(e).units, service(e).units_within, service(e).recent_within);
    assert_eq!(kept(&e), (4, 2, 2), "100 of a token, 101 of another unit");
    assert!(set_token_objective(&mut e, 0, HIGH, None, &mut out));
    assert_eq!(kept(&e), (4, 2, 0), "what is recent begins anew");
}

#[test]
fn units_that_end_together_are_judged_one_by_one() {
    let (mut e, seen, mut out) = engine();
    assert!(set_objective(&mut e, 0, HIGH, Some(SLO), &mut out));
    let took = [(2, 100), (1, 2_000), (1, 400)].map(|(units, took_ns)| EndedUnits {
        units,
        took_ns,
        is_token: false,
    });
    e.units_ended(9_000, HIGH, &took, None, &mut out);
    let view = service(&e);
    assert_eq!((view.units, view.units_within, view.recent_within), (4, 3, 3));
    assert_eq!((view.p50_ns, view.p99_ns), (100, 2_000));
    let told = seen.lock().unwrap().events.last().cloned();
    assert_eq!(told, Some(Event::UnitsEnded { client: HIGH, units: 4, took_ns: 650 }));
}

#[test]
fn an_open_unit_has_the_deadline_of_another_objective() {
    let (mut e, seen, mut out) = engine();
    let last = || seen.lock().unwrap().events.pop();
    e.unit_began(50, HIGH, OpenUnit { since_ns: 40, is_token: true }, &mut out);
    let began = |deadline_ns| Some(Event::UnitBegan { client: HIGH, since_ns: 40, deadline_ns });
    assert_eq!(last(), began(NEVER));
    assert!(set_objective(&mut e, 60, HIGH, Some(SLO), &mut out));
    assert_eq!(last(), began(1_040));
    assert!(set_token_objective(&mut e, 70, HIGH, Some(2_000), &mut out));
    assert_eq!(last(), None, "the same deadline");
    assert!(set_token_objective(&mut e, 70, HIGH, Some(100), &mut out));
    assert_eq!(last(), began(140));
    // Both at once are one change.
    let slo = Objective { slo_ns: 90, ..SLO };
    assert!(e.set_objectives(75, HIGH, Some(slo), Some(80), &mut out));
    assert_eq!((last(), last()), (began(120), None));
    e.units_ended(80, HIGH, &[], None, &mut out);
    assert_eq!(last(), Some(Event::UnitsEnded { client: HIGH, units: 0, took_ns: 0 }));
    assert!(set_objective(&mut e, 90, HIGH, None, &mut out));
    assert_eq!(last(), None, "none is open");
}

#[test]
fn a_profile_is_the_latest_and_outlives_what_was_counted() {
    let (mut e, _, mut out) = engine();
    assert_eq!(service(&e).profile, None);
    let profile = |launches| UnitProfile { launches, ..UnitProfile::default() };
    e.unit_profiled(HIGH, profile(3));
    e.unit_profiled(HIGH, profile(4));
    e.unit_profiled(LOW, profile(5));
    e.units_ended(9_000, HIGH, &ended(1, 900), None, &mut out);
    e.forget_units(HIGH);
    assert_eq!((service(&e).units, service(&e).profile), (0, Some(profile(4))));
    assert!(e.world().clients[&LOW].service.is_none());
}

#[test]
fn tokens_are_counted_against_their_objective() {
    let (mut e, seen, mut out) = engine();
    e.tokens_ended(HIGH, 1, 5);
    assert_eq!(service(&e).tokens, None, "no objective");
    assert!(
        set_token_objective(&mut e, 0, HIGH, Some(100), &mut out)
            && !set_token_objective(&mut e, 0, LOW, Some(100), &mut out)
    );
    assert_eq!(service(&e).tokens, Some(TokensView::new(100)));
    e.tokens_ended(HIGH, 3, 80);
    e.tokens_ended(HIGH, 1, 101);
    let expected = TokensView {
        tpot_ns: 100,
        count: 4,
        within: 3,
        recent: 4,
        recent_within: 3,
        p50_ns: 80,
        p99_ns: 101,
    };
    assert_eq!(service(&e).tokens, Some(expected));
    // Units are other things, and no event tells of tokens.
    e.units_ended(2_000, HIGH, &ended(1, 300), None, &mut out);
    assert_eq!((service(&e).units, service(&e).tokens), (1, Some(expected)));
    assert_eq!(seen.lock().unwrap().events.len(), 1);
    e.forget_units(HIGH);
    assert_eq!(service(&e).tokens, Some(expected));

    // With another objective what is recent begins anew.
    set_token_objective(&mut e, 0, HIGH, Some(200), &mut out);
    let kept = TokensView { count: 4, within: 3, ..TokensView::new(200) };
    assert_eq!(service(&e).tokens, Some(kept));
    e.forget_tokens(HIGH);
    assert_eq!(service(&e).tokens, Some(TokensView::new(200)));
    set_token_objective(&mut e, 0, HIGH, None, &mut out);
    assert_eq!(service(&e).tokens, None);
}

#[test]
fn only_high_priority_clients_have_units() {
    let (mut e, seen, mut out) = engine();
    for client in [LOW, 99] {
        assert!(!set_objective(&mut e, 0, client, Some(SLO), &mut out));
        e.unit_began(50, client, 40, &mut out);
        e.units_ended(60, client, &ended(1, 20), None, &mut out);
    }
    assert_eq!(seen.lock().unwrap().events, []);
    assert_eq!(e.world().clients[&LOW].service, None);
}

#[test]
fn labels_give_an_objective_from_the_start() {
    let (mut e, _, mut out) = engine();
    let mut labelled = info(7, Class::High);
    labelled.labels = [("slo", "2ms"), ("slo-percentile", "90"), ("tpot", "8ms")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
    e.client_joined(1, labelled, 0, &mut out);
    let service = e.world().clients[&7].service.unwrap();
    assert_eq!(service.objective, Some(Objective { slo_ns: 2_000_000, percentile: 90.0 }));
    assert_eq!(service.tokens, Some(TokensView::new(8_000_000)));
}

#[test]
fn slack_is_what_the_first_deadline_leaves() {
    let (mut e, _, mut out) = engine();
    e.client_joined(0, info(7, Class::High), 0, &mut out);
    let slack = |e: &Engine, now_ns| slack_ns(e.world().clients.values(), now_ns);
    set_objective(&mut e, 0, HIGH, Some(SLO), &mut out);
    set_objective(&mut e, 0, 7, Some(Objective { slo_ns: 500, ..SLO }), &mut out);
    assert_eq!(slack(&e, 10), NO_UNIT_OPEN);
    e.units_ended(10, HIGH, &ended(1, 300), None, &mut out);
    e.unit_began(1_000, HIGH, 1_000, &mut out);
    // It takes 300 of 1 000, and ends at once if it is late.
    assert_eq!((slack(&e, 1_000), slack(&e, 1_300), slack(&e, 1_900)), (700, 700, 100));
    assert_eq!(slack(&e, 2_500), -500);
    // Of the other nothing is known but that it has 500.
    e.unit_began(1_100, 7, 1_100, &mut out);
    assert_eq!(slack(&e, 1_200), 400);
    e.units_ended(1_300, 7, &ended(1, 200), None, &mut out);
    assert_eq!(slack(&e, 1_300), 700);
}

#[test]
fn a_policy_that_takes_over_is_told_of_open_units() {
    let (mut e, _, mut out) = engine();
    set_objective(&mut e, 0, HIGH, Some(SLO), &mut out);
    e.unit_began(50, HIGH, 40, &mut out);
    let seen = Arc::default();
    let script = Script { seen: Arc::clone(&seen), ..Default::default() };
    e.set_policy(60, Box::new(script), &mut out);
    let open = Event::UnitBegan { client: HIGH, since_ns: 40, deadline_ns: 1_040 };
    let events = seen.lock().unwrap().events.clone();
    assert_eq!(events.len(), 3, "{events:?}");
    assert_eq!(events.last(), Some(&open));
}

#[test]
fn a_policy_that_takes_over_is_told_of_high_priority_activity() {
    for is_active in [false, true] {
        let (mut e, _, mut out) = engine();
        e.high_activity(50, HIGH, is_active, 50, &mut out);
        let seen = Arc::default();
        let script = Script { seen: Arc::clone(&seen), ..Default::default() };
        e.set_policy(60, Box::new(script), &mut out);
        let events = seen.lock().unwrap().events.clone();
        assert_eq!(events.contains(&Event::HighStarted), is_active, "{events:?}");
    }
}

/// A marked unit may end long after the GPU has become idle.
#[test]
fn what_is_held_is_offered_when_a_unit_ends() {
    for deaf_to in [Subscriptions::NONE, Subscriptions::UNITS] {
        let seen = Arc::<Mutex<common::Seen>>::default();
        let answers = [Ok(Decision::Hold(HOLD_UNTIL_CHANGE)), Ok(Decision::Run(0))].into();
        let script = Script { seen: Arc::clone(&seen), answers, deaf_to, ..Default::default() };
        let mut e = Engine::new(EngineConfig::default(), Box::new(script));
        let mut out = Vec::new();
        for (id, class) in [(HIGH, Class::High), (LOW, Class::BestEffort)] {
            e.client_joined(0, info(id, class), 0, &mut out);
        }
        let kernel = e.intern(&common::key("k"));
        e.unit_began(5, HIGH, 5, &mut out);
        e.submitted(10, LOW, common::submission(0, kernel), &mut out);
        assert_eq!(seen.lock().unwrap().launches.len(), 1);
        e.units_ended(20, HIGH, &ended(1, 15), None, &mut out);
        let asked = if deaf_to == Subscriptions::NONE { 2 } else { 1 };
        assert_eq!(seen.lock().unwrap().launches.len(), asked);
    }
}

#[test]
fn a_client_that_leaves_has_no_unit_open() {
    let (mut e, seen, mut out) = engine();
    e.unit_began(5, HIGH, 5, &mut out);
    e.client_left(9, HIGH, &mut out);
    let told = seen.lock().unwrap().events.clone();
    let over = Event::UnitsEnded { client: HIGH, units: 0, took_ns: 0 };
    assert_eq!(told[1..], [over, Event::Left(HIGH)]);
}

/// The objective for tokens is that of units that begin with the launch of a CUDA graph.
#[test]
fn a_unit_of_tokens_has_their_objective() {
    let (mut e, seen, mut out) = engine();
    let token = |since_ns| OpenUnit { since_ns, is_token: true };
    let deadline_ns = |e: &mut Engine, unit: OpenUnit| {
        let mut out = Vec::new();
        e.unit_began(unit.since_ns, HIGH, unit, &mut out);
        let told = seen.lock().unwrap().events.last().cloned();
        e.units_ended(unit.since_ns + 1, HIGH, &ended(1, 1), None, &mut out);
        let Some(Event::UnitBegan { deadline_ns, .. }) = told else { panic!("{told:?}") };
        deadline_ns
    };
    assert_eq!(deadline_ns(&mut e, token(10)), NEVER);
    set_token_objective(&mut e, 0, HIGH, Some(300), &mut out);
    assert_eq!(deadline_ns(&mut e, token(20)), 320);
    assert_eq!(deadline_ns(&mut e, 30.into()), NEVER);
    set_objective(&mut e, 0, HIGH, Some(SLO), &mut out);
    assert_eq!(deadline_ns(&mut e, token(40)), 340);
    assert_eq!(deadline_ns(&mut e, 50.into()), 1_050);
    set_token_objective(&mut e, 0, HIGH, Some(3_000), &mut out);
    assert_eq!(deadline_ns(&mut e, token(60)), 1_060, "the shorter one");
}

#[test]
fn units_of_another_kind_begin_anew() {
    let (mut e, _, mut out) = engine();
    set_objective(&mut e, 0, HIGH, Some(SLO), &mut out);
    e.units_ended(10, HIGH, &ended(3, 300), None, &mut out);
    e.unit_began(20, HIGH, 15, &mut out);
    e.forget_units(HIGH);
    let expected = ServiceView { open_since_ns: 15, ..ServiceView::new(Some(SLO)) };
    assert_eq!(service(&e), expected);
}

/// In which order a policy was told and asked; it holds each launch.
struct Watch(Arc<Mutex<Vec<&'static str>>>);

impl Policy for Watch {
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        self.0.lock().unwrap().push("asked");
        Ok(Decision::Hold(HOLD_UNTIL_CHANGE).into())
    }

    fn on_event(&mut self, _: u64, event: &Event, _: &mut Context) -> Result<(), Fault> {
        match event {
            Event::UnitBegan { .. } => self.0.lock().unwrap().push("began"),
            Event::UnitsEnded { .. } => self.0.lock().unwrap().push("ended"),
            _ => {}
        }
        Ok(())
    }

    fn subscriptions(&self) -> Subscriptions {
        Subscriptions::ALL
    }
}

/// Between the two the launch would seem to be between units.
#[test]
fn what_is_held_is_offered_once_the_next_unit_is_known() {
    let order = Arc::default();
    let mut e = Engine::new(EngineConfig::default(), Box::new(Watch(Arc::clone(&order))));
    let mut out = Vec::new();
    for (id, class) in [(HIGH, Class::High), (LOW, Class::BestEffort)] {
        e.client_joined(0, info(id, class), 0, &mut out);
    }
    let kernel = e.intern(&common::key("k"));
    e.unit_began(5, HIGH, 5, &mut out);
    e.submitted(10, LOW, common::submission(0, kernel), &mut out);
    e.units_ended(20, HIGH, &ended(1, 14), Some(19.into()), &mut out);
    assert_eq!(*order.lock().unwrap(), ["began", "asked", "ended", "began", "asked"]);
}
