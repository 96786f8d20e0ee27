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

const SERVICES: [&str; 10] = [
    "--hp",
    "bert_base_infer_b1_s128,slo=8ms,load=0.2",
    "--hp",
    "llama7b_decode_b1,tpot=20ms",
    "--hp",
    "resnet50_infer_b1,eager,load=0.1",
    "--be",
    "gpt2_12l_train_b8_s1024",
    "--load",
    "0.3",
];

#[test]
fn several_services_are_each_reported_and_drawn() {
    let policy = ["--sharing", "mps", "--policy", "native:slo-herald"];
    let args = [&SERVICES[..], &policy].concat();
    let report = json(&args);
    assert!(report.get("high_priority").is_none(), "{report:#}");
    let services = report["services"].as_array().unwrap();
    let names: Vec<&str> = services.iter().map(|s| s["trace"].as_str().unwrap()).collect();
    assert_eq!(names, ["bert_base_infer_b1_s128", "llama7b_decode_b1", "resnet50_infer_b1"]);
    assert_eq!((&services[0]["slo_ms"], services[0].get("tpot_ms")), (&8.0.into(), None));
    assert_eq!((services[1].get("slo_ms"), &services[1]["tpot_ms"]), (None, &20.0.into()));
    assert!(services[2].get("within").is_none(), "it has no objective: {report:#}");
    for service in services {
        assert_eq!(service["arrived"], service["served"], "{report:#}");
    }

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("services.svg");
    let output = sim(&[&args[..], &["--svg", file.to_str().unwrap()]].concat());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(printed.matches("high priority  ").count(), 3, "{printed}");
    assert_eq!(printed.matches("  objective    ").count(), 2, "{printed}");
    let drawn = texts(&file);
    for service in services {
        for key in ["solo_p99_ms", "service_p99_ms", "solo_queued_p99_ms", "queued_p99_ms"] {
            let shown = format!("{:.3}", service[key].as_f64().unwrap());
            assert!(drawn.contains(&shown), "{key} {shown}: {drawn:?}");
        }
    }
}

#[test]
fn options_for_all_services_are_of_those_without_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (all, own) = (file("all", "0.1\n"), file("own", "0.1\n0.2\n"));
    let with_own = format!("resnet50_infer_b1,tpot=9ms,arrivals={own}");
    let one = ["--hp", "resnet50_infer_b1", "--hp", &with_own, "--be", "resnet50_train_b128"];
    let report = json(&[&one[..], &["--slo", "20ms", "--arrivals", &all]].concat());
    let [plain, own] = [0, 1].map(|at| &report["services"][at]);
    assert_eq!((&plain["slo_ms"], &plain["arrived"]), (&20.0.into(), &1.into()));
    assert_eq!((&own["tpot_ms"], &own["arrived"]), (&9.0.into(), &2.into()));
    assert!(own.get("slo_ms").is_none(), "{own:#}");

    // A service's load comes before the file for all; one that is eager takes longer for a request.
    let one = [
        "--hp",
        "resnet50_infer_b1,load=0.9",
        "--hp",
        "resnet50_infer_b1,eager",
        "--be",
        "resnet50_train_b128",
    ];
    let report = json(&[&one[..], &["--arrivals", &all]].concat());
    let [loaded, eager] = [0, 1].map(|at| &report["services"][at]);
    assert!(loaded["arrived"].as_u64() > Some(50) && eager["arrived"] == 1, "{report:#}");
    assert!(eager["solo_ms"].as_f64() > loaded["solo_ms"].as_f64(), "{report:#}");

    // One service's own options are the same as those for all.
    let be = ["--be", "resnet50_train_b128"];
    let of_all = ["--hp", "resnet50_infer_b1", "--slo", "5ms", "--load", "0.3", "--eager"];
    let of_one = ["--hp", "resnet50_infer_b1,slo=5ms,load=0.3,eager"];
    assert_eq!(json(&[&of_all[..], &be].concat()), json(&[&of_one[..], &be].concat()));
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
fn a_frontier_of_several_services_says_which_share_the_worst_one_kept() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("frontier.svg");
    let args = [&FRONTIER[..], &["--hp", "resnet50_infer_b1,load=0.1"]].concat();
    let report = json(&args);
    assert!(report.get("solo_p99_ms").is_none(), "{report:#}");
    let alone: Vec<f64> =
        [0, 1].map(|at| report["services"][at]["solo_p99_ms"].as_f64().unwrap()).into();
    assert!(alone[0] != alone[1], "{alone:?}");
    for point in report["policies"][0]["points"].as_array().unwrap() {
        let services = point["services"].as_array().unwrap();
        let mut least = 1.0_f64;
        for (service, alone) in services.iter().zip(&alone) {
            let number = |key: &str| service[key].as_f64().unwrap();
            let multiple = point["multiple"].as_f64().unwrap();
            assert!((number("slo_ms") - alone * multiple).abs() < 1e-6, "{point:#}");
            least = least.min(number("within"));
        }
        assert_eq!((services.len(), point["within"].as_f64()), (2, Some(least)), "{point:#}");
        assert_eq!(point["kept"], least >= 0.99, "{point:#}");
        assert!(point.get("slo_ms").is_none() && point.get("service_p99_ms").is_none());
    }
    let output = sim(&[&args[..], &["--svg", file.to_str().unwrap()]].concat());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let both = format!("{:.3} / {:.3} ms", alone[0], alone[1]);
    assert!(printed.contains(&both) && printed.contains("KEPT BY is of"), "{printed}");
    let drawn = texts(&file).join(" ");
    assert!(drawn.contains("bert_base_infer_b1_s128 and resnet50_infer_b1 beside"), "{drawn}");
    assert!(drawn.contains("load 0.5 / load 0.1"), "{drawn}");
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
        ([&be[..], &["--hp", "resnet50_infer_b1,slo=5"]].concat(), "slo=5: expected a time"),
        ([&be[..], &["--hp", "resnet50_infer_b1,load=0"]].concat(), "load=0: expected more than 0"),
        ([&be[..], &["--hp", "resnet50_infer_b1,slow=1"]].concat(), "built-in are"),
        (
            [&be[..], &["--hp", "resnet50_infer_b1,arrivals=/nowhere/a"]].concat(),
            "--hp resnet50_infer_b1: arrivals /nowhere/a",
        ),
        (
            [&be[..], &["--hp", "resnet50_infer_b1,tpot=8ms", "--eager"]].concat(),
            "--hp resnet50_infer_b1: tpot is for services whose requests are CUDA graphs",
        ),
        (
            [&be[..], &["--hp", "resnet50_infer_b1"].repeat(17)].concat(),
            "--hp is given 17 times: expected at most 16",
        ),
        (
            [&FRONTIER[..], &["--hp", "resnet50_infer_b1,slo=5ms"]].concat(),
            "--hp resnet50_infer_b1 has its own: leave out its slo and tpot",
        ),
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
