//! What is profiled of kernels outlives the core that profiled it.

mod common;

use common::{BUILT_IN, Client, Core, eventually, policy};
use rustix::process::Signal;
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;
use tally_ipc::layout::transform_state;
use tally_ipc::ring::Answer;
use tally_rewriter::TransformRefusal;

/// The core asks for news at its end only, unless a test says otherwise.
const RARELY: &str = "[profiles]\nsave_every_s = 3600\n";

fn start(dir: tempfile::TempDir, profiles: &str) -> Core {
    Core::start_in(dir, &format!("{BUILT_IN}{profiles}"), &[])
}

/// End it in order; its folder.
fn end(mut core: Core) -> tempfile::TempDir {
    core.signal(Signal::TERM);
    assert_eq!(core.wait().code(), Some(0));
    core.kill()
}

/// A client that launches `gemm` on GPU `uuid`.
fn client(core: &Core, uuid: u64) -> Client {
    let client = Client::best_effort(core, "train");
    let report = &client.region.report;
    report.driver_version.store(12_080, Relaxed);
    report.device_uuid[0].store(uuid, Relaxed);
    report.sm_count.store(132, Release);
    client.region.kernels[0].publish(b"gemm", 7);
    client
}

/// A launch that takes at least so long.
fn launch(core: &Core, client: &mut Client, took: Duration) {
    launch_kernel(core, client, 0, took);
}

/// The same of another kernel of its table.
fn launch_kernel(core: &Core, client: &mut Client, kernel: u32, took: Duration) {
    let (ticket, completion) = client.submit_kernel(kernel);
    assert_eq!(client.wait(ticket), Answer::Whole);
    std::thread::sleep(took);
    client.complete(completion);
    eventually("it is seen done", || core.client(client.id()).unwrap()["in_flight"] == 0);
}

/// How many us a launch is expected to take when it is granted.
fn predicted_us(core: &Core, client: &mut Client) -> f64 {
    predicted_us_of(core, client, 0)
}

fn predicted_us_of(core: &Core, client: &mut Client, kernel: u32) -> f64 {
    let (ticket, completion) = client.submit_kernel(kernel);
    client.wait(ticket);
    let mut us = 0.0;
    eventually("it is in flight", || {
        let shown = core.client(client.id()).unwrap();
        us = shown["in_flight_us"].as_f64().unwrap();
        shown["in_flight"] == 1
    });
    client.complete(completion);
    eventually("it is seen done", || core.client(client.id()).unwrap()["in_flight"] == 0);
    us
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir.join("state/tally"));
    all.map(|all| all.flatten().map(|e| e.path()).collect()).unwrap_or_default()
}

/// The core has put the file in its place, and says so.
fn written(core: &Core) {
    eventually("it is written", || core.status()["profiles"]["written_unix_s"].is_u64());
}

#[test]
fn the_next_core_predicts_a_kernel_at_its_first_launch_and_knows_that_it_must_not_be_transformed() {
    let core = start(tempfile::tempdir().unwrap(), RARELY);
    let mut first = client(&core, 5);
    assert_eq!(predicted_us(&core, &mut first), 0.0, "nobody has measured it");
    for _ in 0..3 {
        launch(&core, &mut first, Duration::from_millis(20));
    }
    let waited =
        transform_state::pack(transform_state::WHOLE_ONLY, TransformRefusal::BlocksWaited.code());
    first.region.kernels[0].transform.store(waited, Release);
    launch(&core, &mut first, Duration::from_millis(20));
    let dir = end(core);
    let kept = files(dir.path());
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert!(kept[0].to_str().unwrap().ends_with("-132sms.jsonl"), "{kept:?}");
    let about = std::fs::metadata(&kept[0]).unwrap();
    assert_eq!(about.mode() & 0o777, 0o600);
    assert_eq!(std::fs::metadata(kept[0].parent().unwrap()).unwrap().mode() & 0o777, 0o700);

    // A core that measures nothing leaves the file alone.
    let core = start(dir, RARELY);
    let _idle = client(&core, 5);
    let dir = end(core);
    assert_eq!(std::fs::metadata(&kept[0]).unwrap().ino(), about.ino());

    let core = start(dir, RARELY);
    let mut second = client(&core, 5);
    let us = predicted_us(&core, &mut second);
    assert!(us >= 15_000.0, "{us}");
    let kernel = core.status()["kernels"][0].clone();
    assert_eq!(kernel["name"], "gemm");
    assert_eq!(kernel["transformed"], format!("whole only: {}", TransformRefusal::BlocksWaited));
    // Its client knows nothing of that, and may think otherwise.
    let ready = transform_state::pack(
        transform_state::READY,
        transform_state::SLICEABLE | transform_state::PREEMPTIBLE,
    );
    second.region.kernels[0].transform.store(ready, Release);
    launch(&core, &mut second, Duration::ZERO);
    assert_eq!(core.status()["kernels"][0]["transformed"], kernel["transformed"]);
    let mut other = client(&core, 6);
    other.region.kernels[0].publish(b"another", 7);
    assert_eq!(predicted_us(&core, &mut other), 0.0);
    let shown = core.ask(json!({"cmd": "profiles_show"}));
    assert_eq!((&shown["store"]["whole_only"], &shown["store"]["kernels"]), (&json!(1), &json!(2)));
    assert_eq!(shown["kernels"][0]["name"], "gemm");
    end(core);
}

#[test]
fn one_name_in_two_images_has_two_profiles_and_verdicts_also_in_the_next_core() {
    let core = start(tempfile::tempdir().unwrap(), RARELY);
    let mut first = client(&core, 5);
    // Also `gemm`, of another image.
    let publish = |client: &Client, kernels: [u128; 2]| {
        for (entry, identity) in client.region.kernels.iter().zip(kernels) {
            entry.publish(b"gemm", identity);
        }
        client.region.kernel_count.store(2, Release);
    };
    publish(&first, [7, 8]);
    for _ in 0..3 {
        launch_kernel(&core, &mut first, 0, Duration::from_millis(20));
        launch_kernel(&core, &mut first, 1, Duration::from_millis(1));
    }
    let waited =
        transform_state::pack(transform_state::WHOLE_ONLY, TransformRefusal::BlocksWaited.code());
    first.region.kernels[0].transform.store(waited, Release);
    launch_kernel(&core, &mut first, 0, Duration::from_millis(20));
    launch_kernel(&core, &mut first, 1, Duration::from_millis(1));
    let dir = end(core);

    let core = start(dir, RARELY);
    let mut second = client(&core, 5);
    // In the other order: only the identities tell them apart.
    publish(&second, [8, 7]);
    let [short, long] = [0, 1].map(|kernel| predicted_us_of(&core, &mut second, kernel));
    assert!(short > 0.0 && long >= 15_000.0, "{short} {long}");
    assert!(short < long / 2.0, "{short} {long}: one profile for both");
    let shown = core.ask(json!({"cmd": "profiles_show"}));
    assert_eq!((&shown["store"]["whole_only"], &shown["store"]["kernels"]), (&json!(1), &json!(2)));
    // Of the one that waited a form that its client has counts for nothing, of the other it does.
    let ready = transform_state::pack(
        transform_state::READY,
        transform_state::SLICEABLE | transform_state::PREEMPTIBLE,
    );
    for kernel in [0, 1] {
        second.region.kernels[kernel].transform.store(ready, Release);
        launch_kernel(&core, &mut second, kernel as u32, Duration::ZERO);
    }
    let kernels = core.status()["kernels"].clone();
    let mut forms: Vec<_> =
        kernels.as_array().unwrap().iter().map(|kernel| kernel["transformed"].clone()).collect();
    forms.sort_by_key(ToString::to_string);
    let whole = format!("whole only: {}", TransformRefusal::BlocksWaited);
    assert_eq!(forms.len(), 2, "{kernels}");
    assert!(forms.contains(&json!(whole)), "{kernels}");
    assert_eq!(forms.iter().filter(|form| **form == json!(whole)).count(), 1, "{kernels}");
    end(core);
}

#[test]
fn times_of_another_gpu_are_not_believed() {
    let core = start(tempfile::tempdir().unwrap(), RARELY);
    let mut first = client(&core, 5);
    launch(&core, &mut first, Duration::from_millis(20));
    let dir = end(core);
    let core = start(dir, RARELY);
    assert_eq!(predicted_us(&core, &mut client(&core, 6)), 0.0);
    let dir = end(core);
    assert_eq!(files(dir.path()).len(), 2, "a file each");
    let core = start(dir, RARELY);
    let mut newer = client(&core, 5);
    newer.region.report.driver_version.store(13_000, Relaxed);
    assert_eq!(predicted_us(&core, &mut newer), 0.0, "another driver compiles otherwise");
}

#[test]
fn what_is_profiled_is_written_now_and_then_and_can_be_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let core = start(dir, "[profiles]\nsave_every_s = 1\n");
    let mut first = client(&core, 5);
    let cleared = core.ask(json!({"cmd": "profiles_clear"}));
    assert!(cleared["left_in"].is_string(), "whose file? {cleared}");
    launch(&core, &mut first, Duration::from_millis(20));
    written(&core);
    assert_eq!(files(core.dir.path()).len(), 1);
    let shown = core.ask(json!({"cmd": "profiles_show"}))["store"].clone();
    assert_eq!((&shown["kernels"], &shown["problem"]), (&json!(1), &json!(null)));
    let cleared = core.ask(json!({"cmd": "profiles_clear"}));
    assert_eq!((&cleared["kernels"], &cleared["file"]), (&json!(1), &shown["file"]));
    assert_eq!(files(core.dir.path()), [] as [PathBuf; 0]);
    assert_eq!(core.status()["kernels"], json!([]));
    let dir = end(core);
    assert_eq!(files(dir.path()), [] as [PathBuf; 0], "nothing was measured since");
}

#[test]
fn a_core_killed_later_leaves_what_it_had_written() {
    let core = start(tempfile::tempdir().unwrap(), "[profiles]\nsave_every_s = 1\n");
    launch(&core, &mut client(&core, 5), Duration::from_millis(20));
    written(&core);
    let core = start(core.kill(), RARELY);
    assert!(predicted_us(&core, &mut client(&core, 5)) >= 15_000.0);
}

#[test]
fn nothing_is_written_where_profiles_are_disabled() {
    let core = start(tempfile::tempdir().unwrap(), "[profiles]\nenabled = false\n");
    launch(&core, &mut client(&core, 5), Duration::from_millis(2));
    let problem = core.status()["profiles"]["problem"].clone();
    assert_eq!(problem, "profiles.enabled is off");
    assert_eq!(core.ask(json!({"cmd": "profiles_clear"}))["kernels"], 1);
    let dir = end(core);
    assert!(!dir.path().join("state").exists());
}

#[test]
fn a_damaged_file_is_moved_aside_and_the_core_serves() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("state/tally");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("GPU-05000000-0000-0000-0000-000000000000-132sms.jsonl");
    std::fs::write(&file, "{\"tally_profiles\":1,\"dev").unwrap();
    std::fs::write(folder.join("GPU-x.jsonl"), "{\"tally_profiles\":9}\n").unwrap();
    let core = start(dir, RARELY);
    launch(&core, &mut client(&core, 5), Duration::from_millis(2));
    let log = core.log();
    assert!(log.contains(file.to_str().unwrap()) && log.contains("line 1 is damaged"), "{log}");
    assert!(log.contains("version 9") && log.contains("may be deleted"), "{log}");
    let dir = end(core);
    let mut names: Vec<_> = files(dir.path());
    names.sort();
    let aside = |f: &Path| f.with_added_extension("bad");
    assert_eq!(names, [file.clone(), aside(&file), aside(&folder.join("GPU-x.jsonl"))]);
    assert!(std::fs::read_to_string(&file).unwrap().contains("gemm"), "measured anew");
}

#[test]
fn a_folder_that_cannot_be_used_is_said_and_the_core_serves() {
    let core = start(tempfile::tempdir().unwrap(), "[profiles]\ndirectory = \"/dev/null/x\"\n");
    launch(&core, &mut client(&core, 5), Duration::from_millis(2));
    let problem = core.status()["profiles"]["problem"].as_str().unwrap().to_owned();
    assert!(problem.contains("/dev/null/x"), "{problem}");
    assert!(core.log().contains("not kept"));
    end(core);
}

#[test]
fn a_policy_is_told_of_earlier_runs() {
    let wasm = policy("tally-priority");
    let args = ["--policy", wasm.to_str().unwrap()];
    let core = Core::start(RARELY, &args);
    launch(&core, &mut client(&core, 5), Duration::from_millis(20));
    let dir = end(core);
    let core = Core::start_in(dir, RARELY, &args);
    assert!(predicted_us(&core, &mut client(&core, 5)) >= 15_000.0);
    assert_eq!(core.status()["policy"]["built_in_rule_decisions"], 0);
}
