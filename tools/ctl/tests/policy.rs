//! `tallyctl policy new`, `check`, `bench` and `wrap`, none of which needs a core.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn tallyctl(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallyctl"));
    command.current_dir(folder).args(arguments).output().unwrap()
}

fn words(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

/// A guest built by `cargo xtask policies`. Never skips.
fn guest(folder: &str, name: &str) -> String {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let file = target.join("release").join(folder).join(name).with_extension("wasm");
    assert!(file.is_file(), "{} is missing: run `cargo xtask policies` first", file.display());
    file.to_string_lossy().into_owned()
}

#[test]
fn a_check_tells_by_its_exit_code_and_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let good = tallyctl(folder.path(), &["policy", "check", &guest("policies", "fifo")]);
    assert_eq!(good.status.code(), Some(0), "{}", words(&good.stderr));
    assert!(words(&good.stdout).contains("ok      no-starvation"), "{}", words(&good.stdout));

    std::fs::write(folder.path().join("chaos.toml"), "always 10").unwrap();
    let chaos = guest("test-policies", "chaos");
    let arguments = ["policy", "check", "--json", "--config", "chaos.toml", &chaos];
    let bad = tallyctl(folder.path(), &arguments);
    assert_eq!(bad.status.code(), Some(1));
    assert!(words(&bad.stderr).contains("does not pass: no-starvation"), "{}", words(&bad.stderr));
    let report: Value = serde_json::from_slice(&bad.stdout).unwrap();
    assert_eq!(report["schema"], 1);
    let failed = report["checks"].as_array().unwrap().iter().find(|c| c["outcome"] == "fail");
    assert_eq!(failed.unwrap()["name"], "no-starvation");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let absent = tallyctl(folder.path(), &["policy", "check", "absent.wasm"]);
    assert_eq!(absent.status.code(), Some(1));
    assert!(words(&absent.stdout).contains("absent.wasm"), "{}", words(&absent.stdout));
    let config = ["policy", "check", "--config", "absent.toml", &guest("policies", "fifo")];
    let config = tallyctl(folder.path(), &config);
    assert_eq!(config.status.code(), Some(1));
    assert!(words(&config.stderr).contains("absent.toml"), "{}", words(&config.stderr));
}

#[test]
fn a_bench_names_the_machine_and_every_figure() {
    let folder = tempfile::tempdir().unwrap();
    let bench = tallyctl(folder.path(), &["policy", "bench", "--json", &guest("policies", "fifo")]);
    assert_eq!(bench.status.code(), Some(0), "{}", words(&bench.stderr));
    let figures: Value = serde_json::from_slice(&bench.stdout).unwrap();
    assert!(figures["machine"]["cpu"].is_string() && figures["machine"]["cpus"].is_u64());
    for at in ["/bytes", "/memory_bytes", "/compile_ms", "/instantiate_us", "/decide/bulk_ns"] {
        assert!(figures.pointer(at).and_then(Value::as_f64).is_some_and(|v| v > 0.0), "{at}");
    }
}

#[test]
fn projects_are_made_and_names_refused() {
    let folder = tempfile::tempdir().unwrap();
    for lang in ["rust", "c", "js", "python"] {
        let made =
            tallyctl(folder.path(), &["policy", "new", "--lang", lang, &format!("my-{lang}")]);
        assert_eq!(made.status.code(), Some(0), "{}", words(&made.stderr));
        let contract = match lang {
            "rust" | "c" => "tally/wit/policy.wit",
            _ => "wit/deps/tally/policy.wit",
        };
        assert!(folder.path().join(format!("my-{lang}")).join(contract).is_file());
    }
    let again = tallyctl(folder.path(), &["policy", "new", "--lang", "c", "my-c"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(words(&again.stderr).contains("not touched"), "{}", words(&again.stderr));
    let wrong = tallyctl(folder.path(), &["policy", "new", "--lang", "c", "../out"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(words(&wrong.stderr).contains("../out"), "{}", words(&wrong.stderr));
}

#[test]
fn a_component_is_not_wrapped_again() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = guest("policies", "fifo");
    let wrapped = tallyctl(folder.path(), &["policy", "wrap", &fifo, "-o", "out.wasm"]);
    assert_eq!(wrapped.status.code(), Some(1));
    assert!(words(&wrapped.stderr).contains("already"), "{}", words(&wrapped.stderr));
    assert!(!folder.path().join("out.wasm").exists());
}
