//! The example policies of the SDKs (`sdk/*/examples`) are each one policy in four languages.
//!
//! Ignored: it needs the components, which `cargo xtask languages` builds with the languages'
//! own tools, and which it names by `TALLY_LANGUAGE_COMPONENTS`.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::collections::BTreeMap;
use tally_conformance::Wasm;
use tally_conformance::harness::{Harness, Turn};
use tally_conformance::stream::{self, Shape, Step};
use tally_contract::limits::HOLD_NS_MAX_LARGEST;
use tally_engine::policy::{Command, Decision, HOLD_UNTIL_CHANGE, NO_KERNEL};
use tally_wasm_host::{Compiled, Compiler, Limits, PolicyHost, Restored, Saved};

const STREAMS: u32 = 12;

/// The components of an example that were built, by language.
fn components(host: &PolicyHost, example: &str) -> Vec<(String, Compiled)> {
    let folder = std::env::var_os("TALLY_LANGUAGE_COMPONENTS").expect("the folder of components");
    let folder = std::path::PathBuf::from(folder).join(example);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("the folder of components") {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "wasm") {
            let compiled = host.compile_file(&path).unwrap();
            found.push((compiled.name().to_owned(), compiled));
        }
    }
    found.sort_by(|one, other| one.0.cmp(&other.0));
    assert!(found.len() >= 2, "nothing to compare in {folder:?}: {found:?}");
    found
}

fn streams() -> Vec<Vec<Step>> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let one = |_| stream::stream().new_tree(&mut runner).unwrap().current();
    (0..STREAMS).map(one).collect()
}

fn harness(compiled: &Compiled, config: &str) -> Harness {
    Harness::new(Box::new(compiled.start(config, None).unwrap()))
}

/// Every call of a stream with its answer, and the policy's counters after it.
fn played(compiled: &Compiled, config: &str, steps: &[Step]) -> (Vec<Turn>, BTreeMap<String, u64>) {
    let mut harness = harness(compiled, config);
    let turns = record(&mut harness, steps);
    (turns, harness.policy().counters())
}

/// Under this configuration all languages answer every call of the random streams alike, and count the same.
fn assert_alike(all: &[(String, Compiled)], config: &str) {
    let mut decided = 0;
    for (n, steps) in streams().iter().enumerate() {
        let (first, compiled) = &all[0];
        let expected = played(compiled, config, steps);
        decided += expected.0.iter().filter(|turn| turn.decision.is_some()).count();
        for (other, compiled) in &all[1..] {
            let got = played(compiled, config, steps);
            assert_eq!(got, expected, "{config:?}, stream {n}: {other} against {first}");
        }
    }
    assert!(decided > 100, "{decided} decisions were compared");
}

/// No language takes any of these configurations.
fn assert_refused(all: &[(String, Compiled)], configs: &[&str]) {
    for (language, compiled) in all {
        for config in configs {
            let refused = compiled.start(config, None).err().map(|e| e.to_string());
            assert!(refused.is_some_and(|e| e.contains("refuses")), "{language}: {config:?}");
        }
    }
}

/// What is answered, holds as the core takes them: JavaScript's numbers are not exact beyond
/// 2^53, and its `HOLD_UNTIL_CHANGE` is another number than the contract's.
fn record(harness: &mut Harness, steps: &[Step]) -> Vec<Turn> {
    let mut turns = harness.record(steps);
    for turn in &mut turns {
        if let Some(Decision::Hold(ns) | Decision::HoldUntilCompletion(ns)) = &mut turn.decision
            && *ns >= HOLD_NS_MAX_LARGEST
        {
            *ns = HOLD_UNTIL_CHANGE;
        }
    }
    turns
}

/// Which of a row of launches are granted, with high-priority work coming and going.
fn granted(compiled: &Compiled, config: &str) -> Vec<bool> {
    let mut harness = harness(compiled, config);
    harness.join(true, 0, 4).unwrap();
    let clients = [harness.join(false, 0, 4).unwrap(), harness.join(false, 0, 4).unwrap()];
    let shape = Shape {
        pick: 0,
        kernel: 1,
        state: 0,
        offered: 0,
        grid_blocks: 100,
        block_threads: 256,
        shared_bytes: 0,
        waited_ns: 0,
        in_flight_ns: 0,
        predicted_ns: 0,
        stream: 0,
        sm_count: 132,
    };
    let mut all = Vec::new();
    for n in 0..600u64 {
        match n % 40 {
            17 => harness.high(true).unwrap(),
            23 => harness.high(false).unwrap(),
            _ => {}
        }
        harness.advance(20_000).unwrap();
        let decision = harness.launch(clients[(n % 2) as usize], &shape).unwrap();
        all.push(!matches!(decision, Some(Decision::Hold(_))));
    }
    all
}

/// One test, because compiling a component of an interpreted language takes 15 s.
#[test]
#[ignore = "needs the components of `cargo xtask languages`"]
fn the_example_is_the_same_policy_in_every_language() {
    let host =
        PolicyHost::compiling_by(Compiler::in_process(), Wasm::limits(&Limits::interpreted()))
            .unwrap();
    let all = components(&host, "idle-gap");
    for config in ["", "idle_gap_us = 250 # a comment", "lease = 50", "idle_gap_us = 0\nlease = 3"]
    {
        assert_alike(&all, config);
    }
    for (language, compiled) in &all {
        let asked = granted(compiled, "");
        assert!(asked.contains(&true) && asked.contains(&false), "{language}: {asked:?}");
        // A lease saves questions and changes nothing else.
        assert_eq!(granted(compiled, "lease = 50"), asked, "{language}");
    }
    let wrong = ["idle_gap_su = 3", "idle_gap_us = many", "lease = 2000000000", "no pair"];
    assert_refused(&all, &wrong);
}

/// A launch by the client of this id, of a kernel that was never measured. The GPU has 132 SMs.
fn launch(client: u8, predicted_ns: u64) -> Step {
    Step::Launch(Shape {
        pick: client,
        kernel: NO_KERNEL,
        state: 0,
        offered: 0,
        grid_blocks: 100,
        block_threads: 256,
        shared_bytes: 0,
        waited_ns: 0,
        in_flight_ns: 0,
        predicted_ns,
        stream: 0,
        sm_count: 132,
    })
}

/// Three units of a service, with objectives of 10 us, 600 s and 10 us ([`Harness`] sets them), and launches of client
/// 1 during and between them. The third unit is late. Client 2 joins after it. Also whether each launch must be granted
/// if one of unknown time counts as 8 us and the margin is 1 us.
fn beside_units() -> (Vec<Step>, Vec<bool>) {
    let join = |high| Step::Join { high, labels: 0, name: 4 };
    let high = |busy| Step::High { busy };
    let all = [
        (join(true), None),
        (join(false), None),
        (launch(1, 0), Some(true)),
        (high(true), None),
        (launch(1, 0), Some(true)),
        (launch(1, 9_000), Some(true)),
        (launch(1, 9_001), Some(false)),
        (Step::Advance(2_000), None),
        (launch(1, 0), Some(false)),
        (launch(1, 7_000), Some(true)),
        (high(false), None),
        (launch(1, u64::MAX), Some(true)),
        (high(true), None),
        (launch(1, 599_000_000_000), Some(true)),
        (launch(1, u64::MAX), Some(false)),
        (Step::Advance(20_000), None),
        (high(false), None),
        // The median unit takes 20 us now, more than the objective: the slack is below 0 at once.
        (high(true), None),
        (launch(1, 1), Some(false)),
        (Step::Advance(30_000), None),
        (high(false), None),
        (join(false), None),
        (launch(2, 1), Some(true)),
    ];
    let granted = all.iter().filter_map(|(_, granted)| *granted).collect();
    (all.into_iter().map(|(step, _)| step).collect(), granted)
}

/// The example that asks about services and sets widths.
#[test]
#[ignore = "needs the components of `cargo xtask languages`"]
fn slack_units_and_widths_are_the_same_in_every_language() {
    let host =
        PolicyHost::compiling_by(Compiler::in_process(), Wasm::limits(&Limits::interpreted()))
            .unwrap();
    let all = components(&host, "slack");
    for config in ["", "width_percent = 50", "unknown_us = 8\nmargin_us = 1\nwidth_percent = 10"] {
        assert_alike(&all, config);
    }
    let (steps, granted) = beside_units();
    // The widths are 32, 64, 96 and 112 SMs of 132.
    for (percent, sms) in [(100, None), (99, Some(112)), (49, Some(64)), (48, Some(32)), (24, None)]
    {
        let config = format!("unknown_us = 8\nmargin_us = 1\nwidth_percent = {percent}");
        for (language, compiled) in &all {
            let (turns, counters) = played(compiled, &config, &steps);
            let decisions = turns.iter().filter_map(|turn| turn.decision);
            let got: Vec<bool> = decisions.map(|d| d == Decision::Run(0)).collect();
            assert_eq!(got, granted, "{language}, {percent} %");
            let commands: Vec<Command> = turns.into_iter().flat_map(|turn| turn.commands).collect();
            let widths = |sms| [1, 2].map(|client| Command::SetWidth { client, sms });
            let expected: Vec<Command> = sms.into_iter().flat_map(widths).collect();
            assert_eq!(commands, expected, "{language}, {percent} %");
            assert_eq!(counters, BTreeMap::from([("units_late".into(), 1)]), "{language}");
        }
    }
    let wrong = ["width_percent = 0", "width_percent = 101", "margin_us = -1", "slack = 1"];
    assert_refused(&all, &wrong);
}

/// What an instance answers to a stream, and has learned after that and after bursts of
/// high-priority work with these pauses in between.
fn taught(
    compiled: &Compiled,
    steps: &[Step],
    pauses_ns: &[u64],
    saved: Option<&Saved>,
) -> (Vec<Turn>, Saved) {
    let policy = compiled.start("most_us = 50000", saved).unwrap();
    if saved.is_some() {
        assert_eq!(*policy.restored(), Restored::Accepted, "{}", compiled.name());
    }
    let mut harness = Harness::new(Box::new(policy));
    let turns = record(&mut harness, steps);
    for pause_ns in pauses_ns {
        harness.high(true).unwrap();
        harness.high(false).unwrap();
        harness.advance(*pause_ns).unwrap();
        harness.high(true).unwrap();
    }
    (turns, harness.snapshot().expect("it keeps what it learned").unwrap())
}

/// The example that keeps what it learned: the same bytes, and each goes on from what another
/// wrote as from its own.
#[test]
#[ignore = "needs the components of `cargo xtask languages`"]
fn what_one_language_saves_every_other_takes() {
    let host =
        PolicyHost::compiling_by(Compiler::in_process(), Wasm::limits(&Limits::interpreted()))
            .unwrap();
    let all = components(&host, "patient");
    for (n, steps) in streams().iter().enumerate() {
        let (before, after) = steps.split_at(steps.len() / 2);
        let pauses_ns = [20_000 + 7_000_000 * n as u64, 3];
        let (writer, compiled) = &all[n % all.len()];
        let (first, saved) = taught(compiled, before, &pauses_ns, None);
        let expected = taught(compiled, after, &[], Some(&saved));
        // A number in LEB128, the only field.
        let bits = saved.data.iter().rev().map(|byte| u64::from(byte & 0x7f));
        let learned = bits.fold(0, |all, bits| all << 7 | bits);
        assert!(learned >= pauses_ns[0].min(50_000_000), "{learned} of {pauses_ns:?}");
        for (other, compiled) in &all {
            let got = taught(compiled, before, &pauses_ns, None);
            assert_eq!(got, (first.clone(), saved.clone()), "stream {n}: {other}, {writer}");
            let got = taught(compiled, after, &[], Some(&saved));
            assert_eq!(got, expected, "stream {n}: {other} from what {writer} saved");
            for (format, version) in [("idle-gap", 1), ("patient", 2)] {
                let strange = Saved { format: format.into(), version, ..saved.clone() };
                let policy = compiled.start("", Some(&strange)).unwrap();
                let refused = matches!(policy.restored(), Restored::Refused { .. });
                assert!(refused, "{other}, {format} {version}: {:?}", policy.restored());
            }
        }
    }
}
