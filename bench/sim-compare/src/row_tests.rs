//! What is compared with what, row by row.

use super::*;
use crate::table::show;
use serde_json::json;

/// With short windows, for what is asked of it does not depend on them.
fn own_row(be: &str, mode: &str, steps_per_s: f64) -> Value {
    let policy = if mode == "mps" { "none" } else { "tally-priority" };
    json!({
        "hp": "bert-graph", "be": be, "mode": mode, "policy": policy, "transformed": {},
        "p99_over_solo": 1.5, "be_share": 0.35, "be_solo_steps_per_s": 10.0, "seconds": 0.5,
        "own_be_solo_steps_per_s": steps_per_s, "be_share_of_own": 0.5, "be_alone_seconds": 0.5,
    })
}

/// What the training takes alone, plain and under MPS.
fn plain_ns(low: &Trace) -> [u64; 2] {
    low.alone.map(|alone| alone.unwrap().ns)
}

#[test]
fn a_row_with_figures_of_its_own_warms_up_as_long_as_it_did() {
    let setup = Setup { warm_up_seconds: Some(1.0), ..Setup::default() };
    let mut row = own_row("gpt2-train", "tally-mps", 7.0);
    let warm_up = |row: &Value| Measured::of(row, &setup).unwrap().setup.warm_up_seconds.unwrap();
    assert_eq!(warm_up(&row), 1.0, "twice half a second");
    row["be_alone_seconds"] = json!(2.5);
    assert_eq!(warm_up(&row), 5.0);
    row["be_alone_seconds"] = Value::Null;
    assert_eq!(warm_up(&row), 6.0, "as long as the step has it");
    row["own_be_solo_steps_per_s"] = Value::Null;
    let without = Measured::of(&row, &setup).unwrap();
    assert_eq!((without.own, without.setup.warm_up_seconds), (None, Some(1.0)));
}

#[test]
fn only_a_training_that_its_own_part_limits_gets_another_pace_under_a_policy() {
    let paces = |row: &Value| {
        let measured = Measured::of(row, &Setup::default()).unwrap();
        let mut high = trace(measured.traces[0]).unwrap().as_graph();
        let mut low = trace(measured.traces[1]).unwrap();
        measured.as_alone(&mut high, &mut low);
        let before_ns = plain_ns(&low);
        let alone = measured.as_own(&high, &mut low, None).unwrap();
        (before_ns, plain_ns(&low), alone)
    };
    let (before_ns, after_ns, alone) = paces(&own_row("gpt2-train", "tally-mps", 5.0));
    assert_eq!((before_ns[0], after_ns), (100_000_000, before_ns), "the GPU limits it");
    let alone = alone.unwrap();
    assert!((6.0..9.0).contains(&alone), "transformed while the inference idles: {alone}");

    let (before_ns, after_ns, alone) = paces(&own_row("gpt2-large-train", "tally-mps", 5.0));
    assert!(after_ns[0] > before_ns[0] && after_ns[1] > before_ns[1], "{after_ns:?}");
    let alone = alone.unwrap();
    assert!((alone / 5.0 - 1.0).abs() < 0.1, "{alone}");

    // Without a policy nothing is modelled that could be off.
    let (_, after_ns, alone) = paces(&own_row("gpt2-train", "mps", 8.0));
    let alone = alone.unwrap();
    assert!((alone / 8.0 - 1.0).abs() < 0.02, "{alone}");
    assert!((after_ns[1] as f64 / 125e6 - 1.0).abs() < 0.02, "{after_ns:?}");

    let mut row = own_row("gpt2-large-train", "tally-mps", 5.0);
    row["own_be_solo_steps_per_s"] = Value::Null;
    let (before_ns, after_ns, alone) = paces(&row);
    assert_eq!((before_ns, alone), (after_ns, None));
}

#[test]
fn a_share_of_own_is_of_the_simulated_rate_alone_in_the_mode() {
    let row = own_row("gpt2-train", "tally-mps", 7.0);
    let of = |row: &Value| Measured::of(row, &Setup::default()).unwrap().compare(None).unwrap();
    let own = of(&row);
    let (share_of_own, alone_share) = (own.share_of_own.unwrap(), own.alone_share.unwrap());
    assert!((own.share / alone_share / share_of_own - 1.0).abs() < 1e-9);
    assert!(alone_share < 0.9 && share_of_own > own.share, "{alone_share} {share_of_own}");
    assert_eq!((own.measured_share, own.measured_share_of_own), (0.35, Some(0.5)));
    assert_eq!(own.measured_alone_share, Some(0.7));

    let mut without = row.clone();
    without["own_be_solo_steps_per_s"] = Value::Null;
    let without = of(&without);
    assert_eq!((without.share_of_own, without.measured_share_of_own), (None, None));
    let reported = without.report.best_effort.as_ref().unwrap().share;
    assert!((without.share / reported - 1.0).abs() < 1e-6);

    let mut table = Vec::new();
    show(&mut table, &[own, without]).unwrap();
    let table = String::from_utf8(table).unwrap();
    let lines: Vec<_> = table.lines().collect();
    let simulated = format!("| {share_of_own:.2} of own | 0.50 of own |");
    assert!(lines[2].contains(&simulated), "{table}");
    assert!(lines[3].contains("| 0.35 |") && !lines[3].contains("of own"), "{table}");
    assert!(lines[5].starts_with("A share of own"), "{table}");
}

#[test]
fn a_row_is_simulated_with_the_configuration_that_it_was_measured_with() {
    let mut row = own_row("gpt2-train", "tally-mps", 7.0);
    let of = |row: &Value, config: Option<&str>| {
        Measured::of(row, &Setup::default()).unwrap().compare(config).map_err(|e| e.to_string())
    };
    let plain = of(&row, None).unwrap();
    row["policy_config"] = json!("forms = false\n");
    let whole = of(&row, None).unwrap();
    assert!(whole.p99_over_alone > 2.0 * plain.p99_over_alone, "nothing yields");
    assert_eq!(whole.policy_config.as_deref(), Some("forms = false\n"));
    let (mut table, whole_p99) = (Vec::new(), whole.p99_over_alone);
    show(&mut table, &[whole]).unwrap();
    assert!(String::from_utf8(table).unwrap().contains("| tally-mps, `forms = false` |"));
    row["policy_config"] = json!("cat = false\n");
    assert!(of(&row, None).is_err_and(|why| why.contains("cat")));
    // Another configuration takes its place.
    let given = of(&row, Some("forms = false\n")).unwrap();
    assert_eq!(given.p99_over_alone, whole_p99);
}

#[test]
fn an_inference_is_as_fast_alone_as_beside_idle_programs_and_gets_the_requests_of_its_row() {
    let mut row = own_row("gpt2-train", "tally-mps", 7.0);
    let measured_of = |row: &Value| {
        let measured = Measured::of(row, &Setup::default()).unwrap();
        let mut high = trace(measured.traces[0]).unwrap();
        measured.as_alone(&mut high, &mut trace(measured.traces[1]).unwrap());
        let Arrivals::At(at) = measured.arrivals() else { panic!("the row has a rate") };
        (measured.p99, high.alone[0].map(|alone| (alone.ns, alone.p99_ns)).unwrap(), at.len())
    };
    row["solo_p50_ms"] = json!(1.0);
    row["solo_p99_ms"] = json!(1.25);
    let (p99, alone, requests) = measured_of(&row);
    assert_eq!((p99, alone), (1.5, (1_000_000, 1_250_000)));
    row["rate_per_s"] = json!(1_000.0);
    row["beside_idle_p50_ms"] = json!(0.5);
    row["beside_idle_p99_ms"] = json!(0.75);
    row["p99_over_beside_idle"] = json!(2.5);
    let (p99, alone, twice) = measured_of(&row);
    assert_eq!((p99, alone), (2.5, (500_000, 750_000)));
    assert!((1.6..2.4).contains(&(twice as f64 / requests as f64)), "{requests}, {twice}");
}

#[test]
fn a_row_whose_host_changed_is_left_out() {
    let setup = Setup::default();
    for (mode, own_ms, drifted) in [
        ("tally-timeslice", 1.2, false),
        ("tally-timeslice", 1.3, true),
        ("tally-mps", 1.3, false),
        ("tally-mps", 1.6, true),
    ] {
        let row = json!({
            "hp": "bert-graph", "be": "gpt2-train", "mode": mode, "policy": "tally-priority",
            "p99_over_solo": 1.1, "be_share": 0.4, "solo_p50_ms": 1.0, "own_solo_p50_ms": own_ms,
        });
        let measured = Measured::of(&row, &setup).unwrap();
        assert_eq!(measured.has_drifted(), drifted, "{}, {own_ms}", measured.name());
    }
}

#[test]
fn what_is_drawn_is_the_median_of_five() {
    let row = json!({
        "hp": "resnet50-eager", "be": "bert-b32-train", "mode": "mps", "policy": "none",
        "p99_over_solo": 1.1, "be_share": 0.4, "solo_p50_ms": 3.5, "solo_p99_ms": 5.5, "seconds": 0.5,
    });
    let p99_ms = |seed| {
        let setup = Setup { seed, ..Setup::default() };
        let measured = Measured::of(&row, &setup).unwrap();
        let (mut high, mut low) =
            (trace(measured.traces[0]).unwrap(), trace(measured.traces[1]).unwrap());
        measured.as_alone(&mut high, &mut low);
        let arrivals = measured.arrivals();
        let service = measured.service(&high, &arrivals);
        let one = simulate(&measured.setup, &service, Some(&low), None);
        (one.high_priority.service_p99_ms, measured.compare(None).unwrap().p99_ms)
    };
    let mut draws: Vec<_> = (7..12).map(|seed| p99_ms(seed).0).collect();
    draws.sort_by(f64::total_cmp);
    assert!(draws[0] < draws[2] && draws[2] < draws[4], "{draws:?}");
    assert_eq!(p99_ms(7).1, draws[2]);
    p99_ms(u64::MAX);
}
