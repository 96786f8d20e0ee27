//! What tools that are older or newer than the core make of its answers.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, from_value, to_value};
use std::fmt::Debug;
use tally_ab::report::GuardReport;
use tally_ab::{Arm, Metric, Reason, Verdict};
use tally_admin::ab::AbStatus;
use tally_admin::*;

/// Names chosen by users and policies, which need not be there.
const MAPS: [&str; 4] = ["labels", "totals", "counters", "gauges"];

/// An answer in which nothing is left out: no `null`, no empty list.
fn status() -> Status {
    let source = Source { file: "/p.wasm".into(), config_file: Some("/p.toml".into()) };
    let why = Why { reason: WaitReason::HighPriority, for_ms: Some(2.0) };
    let disabled = Disabled { kind: "trap".into(), ..Disabled::default() };
    Status {
        schema: SCHEMA,
        core: CoreStatus { pin_cpu_asked: Some(2), pinned_cpu: Some(2), ..Default::default() },
        sharing: SharingStatus {
            mps: Some(MpsStatus { pid: Some(7), ..Default::default() }),
            refresh: Some(RefreshStatus::default()),
            ..Default::default()
        },
        policy: PolicyReport {
            active: Active {
                source: Some(source.clone()),
                signed_by: Some("key".into()),
                restored: Restored::Refused("old".into()),
                loaded_because: LoadedBecause::Rollback,
                ..Default::default()
            },
            granted: vec!["identity".into()],
            needs: vec!["identity".into()],
            reasons: vec![ReasonStatus { reason: 1, text: "busy".into(), decisions: 4 }],
            last_fault: Some("trap".into()),
            counters: [("turns".into(), u64::MAX)].into(),
            gauges: [("pause".into(), -1)].into(),
            last_load_error: Some(LoadFailure { source, ..Default::default() }),
            last_disabled: Some(LastDisabled { generation: 1, how: disabled }),
            ..Default::default()
        },
        clients: vec![ClientStatus {
            identity: Identity { labels: [("team".into(), "a".into())].into(), ..identity() },
            why: Some(why),
            reason: Some("busy".into()),
            ..Default::default()
        }],
        totals: [(Class::High, Totals::default()), (Class::BestEffort, Totals::default())].into(),
        departed: vec![Departed { identity: identity(), ..Default::default() }],
        ungoverned: vec![UngovernedStatus::default()],
        kernels: vec![kernel()],
        profiles: store(),
        experiment: Some(ab()),
        log: log(),
        shadow: Some(ShadowBrief { ended: Some("stopped".into()), ..Default::default() }),
        ..Default::default()
    }
}

fn ab() -> AbStatus {
    AbStatus {
        running: false,
        metric: Metric::HpP99,
        a: "fifo".into(),
        b: "mine".into(),
        arm: Some(Arm::B),
        in_washout: false,
        blocks: 4,
        pairs: 2,
        elapsed_s: 4.5,
        time_s_max: 600.0,
        ratio: 1.5,
        e_value: 2.0,
        e_value_needed: 20.0,
        ended: Some(Reason::Guard),
        message: "hp_p99<8ms".into(),
        verdict: Verdict::Withdrawn,
        why: "guard hp_p99<8ms".into(),
        guards: vec![GuardReport { guard: "hp_p99<8ms".into(), accident: Some(0.01) }],
    }
}

fn identity() -> Identity {
    Identity { id: 3, name: "train".into(), class: Class::BestEffort, ..Default::default() }
}

fn kernel() -> KernelStatus {
    let form = FormStatus { form: Form::Sliced, argument: 4, ..Default::default() };
    KernelStatus { grid: [1, 2, 3], forms: vec![form], ..Default::default() }
}

fn store() -> ProfilesStatus {
    ProfilesStatus {
        directory: Some("/s".into()),
        file: Some("/s/GPU.jsonl".into()),
        written_unix_s: Some(1),
        problem: Some("full".into()),
        ..Default::default()
    }
}

fn log() -> LogStatus {
    LogStatus {
        file: Some("/log".into()),
        ended: Some("stopped".into()),
        failed: Some("full".into()),
        ..Default::default()
    }
}

fn record() -> PolicyRecord {
    let full = status().policy;
    PolicyRecord {
        source: full.active.source,
        signed_by: full.active.signed_by,
        unloaded_because: Some(UnloadedBecause::RolledBack),
        unloaded_at_unix_s: Some(9),
        disabled: Some(Disabled::default()),
        last_fault: Some(LastFault::default()),
        ..Default::default()
    }
}

fn shadow() -> ShadowStatus {
    let mut status = ShadowStatus {
        kinds: vec!["run".into()],
        events_missing: vec!["timer".into()],
        kernels: vec![ShadowShare { name: "gemm".into(), ..Default::default() }],
        clients: vec![ShadowShare::default()],
        ended: Some("stopped".into()),
        ..Default::default()
    };
    status.comparison.last_fault = Some("trap".into());
    status
}

/// Calls `each` with every object in a value, outside of maps. An empty one is a map.
fn objects(value: &mut Value, each: &mut impl FnMut(&mut serde_json::Map<String, Value>)) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            each(fields);
            let named = fields.iter_mut().filter(|(name, _)| !MAPS.contains(&name.as_str()));
            named.for_each(|(_, value)| objects(value, each));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| objects(item, each)),
        _ => {}
    }
}

/// An answer reads back, with more fields as well, and not with fewer.
fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(answer: &T, fields_min: usize) {
    let full = to_value(answer).unwrap();
    assert_eq!(&from_value::<T>(full.clone()).unwrap(), answer);

    let mut newer = full.clone();
    objects(&mut newer, &mut |fields| drop(fields.insert("newer".into(), Value::Null)));
    assert_ne!(newer, full);
    assert_eq!(&from_value::<T>(newer).unwrap(), answer);

    let mut count = 0;
    objects(&mut full.clone(), &mut |fields| count += fields.len());
    assert!(count >= fields_min, "{count} fields");
    for field in 0..count {
        let (mut older, mut at, mut lost) = (full.clone(), 0, String::new());
        objects(&mut older, &mut |fields| {
            let name = fields.keys().nth(field.wrapping_sub(at)).cloned();
            at += fields.len();
            if let Some(name) = name {
                fields.remove(&name);
                lost = name;
            }
        });
        let error = from_value::<T>(older).expect_err(&lost).to_string();
        assert!(error.contains(&format!("`{lost}`")), "{lost}: {error}");
    }
}

#[test]
fn more_fields_are_ignored_and_a_missing_one_is_named() {
    check(&status(), 200);
    check(&status().policy.active, 10);
    check(&record(), 20);
    check(&shadow(), 30);
    check(&log(), 9);
    check(&Profiles { store: store(), kernels: vec![kernel()] }, 18);
    let cleared = Cleared { kernels: 1, file: Some("/f".into()), left_in: Some("/d".into()) };
    check(&cleared, 3);
}

#[test]
fn words_of_a_newer_core_are_read() {
    let mut newer = to_value(status()).unwrap();
    newer["clients"][0]["class"] = "middle".into();
    newer["clients"][0]["why"]["reason"] = "lunch".into();
    newer["policy"]["loaded_because"] = "whim".into();
    newer["kernels"][0]["forms"][0]["form"] = "folded".into();
    let read: Status = from_value(newer).unwrap();
    let client = &read.clients[0];
    assert_eq!(client.identity.class, Class::Unknown);
    assert_eq!(client.why.unwrap().reason, WaitReason::Unknown);
    assert_eq!(read.policy.active.loaded_because, LoadedBecause::Unknown);
    assert_eq!(read.kernels[0].forms[0].form, Form::Unknown);
}

#[test]
fn words_are_shown_as_they_are_sent() {
    let test = to_value(ab()).unwrap();
    assert_eq!((&test["ended"], &test["verdict"]), (&"guard".into(), &"withdrawn".into()));
    assert_eq!(to_value(MpsUse::NotAClient).unwrap(), MpsUse::NotAClient.as_str());
    assert_eq!(to_value(Class::BestEffort).unwrap(), "best-effort");
    assert_eq!(format!("{:>6}|", Class::High), "  high|");
    let restored = Restored::NoInterface;
    assert_eq!(to_value(&restored).unwrap()["outcome"], restored.outcome());
}
