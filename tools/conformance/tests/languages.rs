//! The example policies of the SDKs (`sdk/*/examples`) are each one policy in four languages.
//!
//! Ignored: it needs the components, which `cargo xtask languages` builds with the languages'
//! own tools, and which it names by `TALLY_LANGUAGE_COMPONENTS`.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tally_conformance::Wasm;
use tally_conformance::harness::{Harness, Turn};
use tally_conformance::stream::{self, Shape, Step};
use tally_contract::limits::HOLD_NS_MAX_LARGEST;
use tally_engine::policy::{Decision, HOLD_UNTIL_CHANGE};
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

fn turns(compiled: &Compiled, config: &str, steps: &[Step]) -> Vec<Turn> {
    record(&mut harness(compiled, config), steps)
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
        let mut decided = 0;
        for (n, steps) in streams().iter().enumerate() {
            let (first, compiled) = &all[0];
            let expected = turns(compiled, config, steps);
            decided += expected.iter().filter(|turn| turn.decision.is_some()).count();
            for (other, compiled) in &all[1..] {
                let got = turns(compiled, config, steps);
                assert_eq!(got, expected, "{config:?}, stream {n}: {other} against {first}");
            }
        }
        assert!(decided > 100, "{decided} decisions were compared");
    }
    for (language, compiled) in &all {
        let asked = granted(compiled, "");
        assert!(asked.contains(&true) && asked.contains(&false), "{language}: {asked:?}");
        // A lease saves questions and changes nothing else.
        assert_eq!(granted(compiled, "lease = 50"), asked, "{language}");
        for wrong in ["idle_gap_su = 3", "idle_gap_us = many", "lease = 2000000000", "no pair"] {
            let refused = compiled.start(wrong, None).err().map(|e| e.to_string());
            assert!(refused.is_some_and(|e| e.contains("refuses")), "{language}: {wrong:?}");
        }
    }
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
