//! `tallyctl sim` with several programs, policies and objectives.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn sim(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallyctl"));
    command.args(["sim", "--seconds", "0.3"]).args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(args: &[&str]) -> Value {
    let output = sim(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn texts(svg: &Path) -> Vec<String> {
    let svg = std::fs::read_to_string(svg).unwrap();
    let document = roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{e}\n{svg}"));
    document.descendants().filter_map(|n| n.text()).map(|text| text.trim().to_owned()).collect()
}

#[test]
fn several_programs_share_by_weight_and_the_report_says_how() {
    let args = ["--be", "resnet50_train_b128,weight=3", "--be", "resnet50_train_b128"];
    let priority = [&args[..], &["--policy", "native:tally-priority"]].concat();
    let report = json(&priority);
    let clients = &report["fairness"]["clients"];
    assert_eq!((&clients[0]["weight"], &clients[1]["weight"]), (&3.into(), &1.into()));
    let share = clients[0]["gpu_share"].as_f64().unwrap();
    assert!((0.7..0.8).contains(&share), "{report:#}");
    assert!(report["fairness"]["jain"].as_f64().unwrap() > 0.98, "{report:#}");
    assert!(report.get("high_priority").is_none(), "nobody has high priority: {report:#}");
    // Without any scheduling weights are of no use.
    let report = json(&[&args[..], &["--policy", "none"]].concat());
    assert!(report["fairness"]["jain"].as_f64().unwrap() < 0.9, "{report:#}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("several.svg");
    let output = sim(&[&priority[..], &["--svg", file.to_str().unwrap()]].concat());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let share = format!("{share:.3}");
    assert!(printed.contains("WEIGHT") && printed.contains(&share), "{printed}");
    assert!(printed.contains("Jain's index") && !printed.contains("high priority"), "{printed}");
    assert!(texts(&file).contains(&share), "{:?}", texts(&file));
}

const FRONTIER: [&str; 8] = [
    "--hp",
    "bert_base_infer_b1_s128",
    "--be",
    "gpt2_12l_train_b8_s1024",
    "--sharing",
    "mps",
    "--frontier",
    "3,1.25",
];

#[test]
fn a_frontier_has_each_policy_under_each_objective() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("frontier.svg");
    let policies = ["--policy", "native:slo-herald", "--policy", "built-in"];
    let args = [&FRONTIER[..], &policies].concat();
    let report = json(&args);
    assert_eq!(report["schema"], 1);
    let p99_ms = report["solo_p99_ms"].as_f64().unwrap();
    for (at, policy) in ["native:slo-herald", "built-in"].into_iter().enumerate() {
        let curve = &report["policies"][at];
        assert_eq!(curve["policy"], policy);
        let points = curve["points"].as_array().unwrap();
        let multiples: Vec<f64> = points.iter().map(|p| p["multiple"].as_f64().unwrap()).collect();
        assert_eq!(multiples, [1.25, 3.0], "from tight to loose");
        for point in points {
            let number = |key: &str| point[key].as_f64().unwrap();
            assert!((number("slo_ms") - p99_ms * number("multiple")).abs() < 1e-6);
            assert!((0.0..=1.0).contains(&number("within")) && number("share") > 0.0, "{point}");
            assert_eq!(point["kept"], number("within") >= 0.99, "{point}");
        }
    }
    // The rule knows of no objectives: what it leaves for best effort is the same.
    let shares = &report["policies"][1]["points"];
    assert_eq!(shares[0]["share"], shares[1]["share"]);
    let herald = &report["policies"][0]["points"];
    assert!(herald[1]["share"].as_f64() > herald[0]["share"].as_f64(), "{herald}");

    let output = sim(&[&args[..], &["--svg", file.to_str().unwrap()]].concat());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("1.25x") && printed.contains("KEPT BY"), "{printed}");
    let drawn = texts(&file);
    for text in ["native:slo-herald", "built-in", "objective missed"] {
        assert!(drawn.iter().any(|drawn| drawn == text), "{text}: {drawn:?}");
    }
    let title = "bert_base_infer_b1_s128 beside gpt2_12l_train_b8_s1024";
    assert!(drawn.iter().any(|drawn| drawn == title), "{drawn:?}");
}

#[test]
fn wrong_programs_and_frontiers_are_refused() {
    let be = ["--be", "resnet50_train_b128"];
    let both = [&FRONTIER[..], &["--policy", "none", "--policy", "built-in"]].concat();
    for (args, expected) in [
        (vec!["--be", "resnet50_train_b128,weight=0"], "expected a whole number from 1 to 1000"),
        (vec!["--be", "resnet50_train_b128,weight=1001"], "from 1 to 1000"),
        (vec!["--hp", "resnet50_infer_b1"], "--be"),
        ([&be[..], &["--slo", "5ms"]].concat(), "--hp"),
        ([&be[..], &["--frontier", "2"]].concat(), "--hp"),
        ([&FRONTIER[..], &["--slo", "5ms"]].concat(), "cannot be used with"),
        ([&FRONTIER[..6], &["--frontier", "0.5"]].concat(), "multiples from 1 to 1000"),
        ([&be[..], &["--percentile", "90"]].concat(), "--percentile needs --slo or --frontier"),
        (
            [&be[..], &["--policy", "none", "--policy", "built-in"]].concat(),
            "several --policy need --frontier",
        ),
        ([&both[..], &["--policy-config", "x.toml"]].concat(), "without --policy-config"),
    ] {
        let output = sim(&args);
        assert!(!output.status.success(), "{args:?}");
        assert!(said(&output).contains(expected), "{args:?}: {}", said(&output));
    }
}
