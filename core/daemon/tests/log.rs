//! The decision log of a real core, with clients made of `tally-ipc`.

mod common;

use common::{BUILT_IN, Client, Core, eventually, policy};
use rustix::process::Signal;
use serde_json::json;
use std::io::BufReader;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tally_decision_log::trace::Trace;
use tally_decision_log::{Begin, Player, Reader, Record};
use tally_engine::BuiltInRule;

fn read(file: &Path) -> Vec<Record> {
    let mut log = Reader::new(BufReader::new(std::fs::File::open(file).unwrap())).unwrap();
    assert_eq!(log.header().contract, "tally:policy@0.1.0");
    let mut all = Vec::new();
    while let Some(record) = log.next_record().unwrap() {
        all.push(record);
    }
    assert!(log.has_end());
    all
}

/// The built-in rule's answers again.
fn replay(records: &[Record]) -> Player<'static> {
    // As `engine.built_in_rule_idle_gap_us` is by default.
    let mut player = Player::new(|about| {
        assert_eq!(about.name, "built-in");
        Ok(Box::new(BuiltInRule { idle_ns: 100_000 }))
    });
    for record in records {
        player.feed(record, true).unwrap();
    }
    player
}

fn decisions(records: &[Record]) -> usize {
    records.iter().filter(|r| matches!(r, Record::Decide { .. })).count()
}

/// A policy that knows no leases, so that every launch is decided.
fn work(core: &Core, launches: usize) {
    let mut client = Client::best_effort(core, "job");
    client.region.kernels[0].publish(b"gemm", 7);
    for _ in 0..launches {
        client.launch();
    }
}

#[test]
fn a_core_records_from_its_start_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("core.tallylog");
    let mut core = Core::start_in(dir, BUILT_IN, &["--log", file.to_str().unwrap()]);
    let high = Client::high(&core, "serve");
    work(&core, 50);
    drop(high);
    eventually("all clients are gone", || core.status()["clients"].as_array().unwrap().is_empty());
    let log = &core.status()["log"];
    assert_eq!((&log["recording"], &log["dropped"]), (&json!(true), &json!(0)), "{log}");
    core.signal(Signal::TERM);
    assert!(core.wait().success(), "{}", core.log());
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    let records = read(&file);
    let begins = records.iter().filter(|r| matches!(r, Record::Begin { .. })).count();
    assert!(matches!(records[0], Record::Policy(ref p) if p.generation == 1), "{:?}", records[0]);
    assert!(matches!(records[1], Record::Begin { how: Begin::PolicyStart, lost: 0, .. }));
    assert_eq!(begins, 1);
    assert!(decisions(&records) >= 50, "{}", decisions(&records));
    let player = replay(&records);
    assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
    assert_eq!(player.comparison().decisions as usize, decisions(&records));
    assert!(player.world().clients.is_empty());
    // A second core finds the file there and takes another name.
    let dir = tempfile::tempdir().unwrap();
    let second = dir.path().join("core.tallylog");
    std::fs::write(&second, "mine").unwrap();
    let core = Core::start_in(dir, BUILT_IN, &["--log", second.to_str().unwrap()]);
    assert!(core.status()["log"]["file"].as_str().unwrap().ends_with("core.tallylog.1"));
    assert_eq!(std::fs::read(&second).unwrap(), b"mine");
}

#[test]
fn a_recording_in_mid_run_describes_the_world_first() {
    let core = Core::start(BUILT_IN, &[]);
    // Nothing to stop, and nothing said.
    let (code, message) = core.refused(json!({"cmd": "log_stop"}));
    assert!(code == "bad_request" && message.contains("nothing is being recorded"));
    assert_eq!(core.status()["log"]["file"], json!(null));
    let _high = Client::high(&core, "serve");
    work(&core, 20);
    eventually("the client is gone", || core.status()["clients"].as_array().unwrap().len() == 1);
    let file = core.dir.path().join("run.tallylog");
    let started = core.ask(json!({"cmd": "log_record", "path": file, "completions": true}));
    assert_eq!(started["recording"], true);
    let (_, message) = core.refused(json!({"cmd": "log_record"}));
    assert!(message.contains("run.tallylog") && message.contains("log stop"), "{message}");
    eventually("it is live", || core.status()["log"]["live"] == true);
    work(&core, 30);
    eventually("the client is gone", || core.status()["clients"].as_array().unwrap().len() == 1);
    let ended = core.ask(json!({"cmd": "log_stop"}));
    assert_eq!((&ended["recording"], &ended["ended"]), (&json!(false), &json!("asked to stop")));
    assert_eq!(ended["bytes"], std::fs::metadata(&file).unwrap().len());
    let records = read(&file);
    assert_eq!(ended["records"], records.len());
    let begin = records.iter().position(|r| matches!(r, Record::Begin { .. })).unwrap();
    assert!(matches!(records[begin], Record::Begin { how: Begin::MidRun, lost: 0, .. }));
    let known = |r: &&Record| matches!(r, Record::Kernel { .. } | Record::Client(_));
    assert_eq!(records[..begin].iter().filter(known).count(), 2, "a kernel and a client");
    let player = replay(&records);
    assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
    assert!(player.comparison().decisions >= 30);
    // The built-in rule asks for no completions; the recording did.
    let mut trace = Trace::of("job");
    records.iter().for_each(|r| trace.feed(r));
    trace.end();
    assert!(trace.has_client() && trace.rows() >= 20, "{} rows", trace.rows());
    // Without a path: in the folder of logs; and it ends by itself.
    let started = core.ask(json!({"cmd": "log_record", "for_ms": 1}));
    assert!(started["file"].as_str().unwrap().contains("/logs/"), "{started}");
    eventually("its time is over", || core.ask(json!({"cmd": "log_status"}))["recording"] == false);
    let status = core.ask(json!({"cmd": "log_status"}));
    assert_eq!(status["ended"], "its time is over");
    read(Path::new(status["file"].as_str().unwrap()));
}

#[test]
fn what_finds_no_room_is_counted_and_the_log_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tiny.tallylog");
    let config = format!("{BUILT_IN}[log]\nring_kib = 4\nfile = {file:?}\n");
    let mut core = Core::start_in(dir, &config, &[]);
    // Bursts that are decided in one pass each: far more than the ring holds.
    let mut client = Client::best_effort(&core, "burst");
    eventually("something is dropped", || {
        for _ in 0..200 {
            // Done as soon as it is granted, so that no window fills.
            let (_, completion) = client.submit();
            client.complete(completion);
        }
        core.status()["log"]["dropped"].as_u64().unwrap() > 0
    });
    // Whoever reads is brought up to date, and calls are in it again.
    eventually("it is live again", || core.status()["log"]["live"] == true);
    client.launch();
    drop(client);
    core.signal(Signal::TERM);
    assert!(core.wait().success(), "{}", core.log());
    let records = read(&file);
    let Some(Record::End { dropped, .. }) = records.last() else { panic!("no end") };
    let player = replay(&records);
    assert!(*dropped > 0 && player.parts().after_gap > 0, "{:?}", player.parts());
    assert!(player.parts().lost <= *dropped);
    assert!(player.comparison().is_equal(), "{:?}", player.comparison().first);
}

#[test]
fn a_size_is_kept_and_wrong_requests_are_named() {
    let core = Core::start(BUILT_IN, &[]);
    let file = core.dir.path().join("small.tallylog");
    core.ask(json!({"cmd": "log_record", "path": file, "bytes_max": 65_536}));
    eventually("it is full", || {
        work(&core, 50);
        core.ask(json!({"cmd": "log_status"}))["recording"] == false
    });
    let status = core.ask(json!({"cmd": "log_status"}));
    assert_eq!(status["ended"], "it reached its largest size");
    let bytes = std::fs::metadata(&file).unwrap().len();
    assert!((32_768..=65_536 + 256).contains(&bytes), "{bytes}");
    assert!(decisions(&read(&file)) > 100);
    let fifo = policy("fifo");
    for (request, word) in [
        (json!({"cmd": "log_record", "path": file}), "the file `out` go together"),
        (json!({"cmd": "log_record", "bytes_max": 1}), "65536"),
        (json!({"cmd": "log_record", "colour": 1}), "colour"),
        (json!({"cmd": "log_dance"}), "log_dance"),
        (json!({"cmd": "shadow_start", "path": "/none"}), "`component` did not come"),
        (json!({"cmd": "shadow_start", "path": fifo, "cpu_percent": 0}), "cpu_percent"),
        (json!({"cmd": "shadow_stop"}), "no shadow"),
    ] {
        let (code, message) = core.refused(request);
        assert_eq!(code, "bad_request");
        assert!(message.contains(word), "{message}");
    }
    let (code, message) = core.refused(json!({"cmd": "shadow_start", "path": file}));
    assert!(code == "policy_refused" && message.contains("small.tallylog"), "{message}");
    assert_eq!(core.ask(json!({"cmd": "shadow_status"})), json!(null));
}

#[test]
fn only_admins_record_and_shadow() {
    // The rules are the core's; only root can play another user here.
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root to act as another user");
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let open = |p: &Path| {
        std::fs::set_permissions(p, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    let dir = tempfile::tempdir().unwrap();
    open(dir.path());
    let config = format!("{BUILT_IN}[admin]\nmode = \"0666\"\nuids = [65533]\n");
    let core = Core::start_in(dir, &config, &[]);
    open(&core.dir.path().join("run/admin"));
    let ask_as = |uid: u32, request: serde_json::Value| {
        let socket = core.admin.clone();
        let user = rustix::process::Uid::from_raw(uid);
        std::thread::spawn(move || {
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            common::admin(&socket, &request).unwrap()
        })
        .join()
        .unwrap()
    };
    for request in [
        json!({"cmd": "log_record"}),
        json!({"cmd": "log_stop"}),
        json!({"cmd": "shadow_start", "path": "/x"}),
        json!({"cmd": "shadow_stop"}),
    ] {
        let answer = ask_as(65_534, request);
        assert_eq!(answer["error"]["code"], "denied", "{answer}");
    }
    assert!(ask_as(65_534, json!({"cmd": "log_status"}))["ok"].is_object());
    // An admin may record; where, its own rights decide, not those of this core, which is root's.
    let place = core.dir.path().join("elsewhere");
    let answer = ask_as(65_533, json!({"cmd": "log_record", "path": place}));
    assert_eq!(answer["error"]["code"], "bad_request", "{answer}");
    assert!(!place.exists());
    let answer = ask_as(65_533, json!({"cmd": "log_record"}));
    assert_eq!(answer["ok"]["recording"], true, "{answer}");
}

/// Files that may not grow beyond some size stand for a disk that is full.
#[test]
fn a_log_that_cannot_be_written_is_said_to_be_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.tallylog");
    let core = Core::start_with_small_files(dir, BUILT_IN);
    core.ask(json!({"cmd": "log_record", "path": file, "for_ms": 200}));
    // More than fits.
    work(&core, 1_000);
    eventually("it ended", || core.status()["log"]["recording"] == false);
    let log = core.status()["log"].clone();
    let failed = log["failed"].as_str().unwrap_or_default();
    assert!(failed.contains("writing failed"), "{log}");
    assert_eq!(log["bytes"], std::fs::metadata(&file).unwrap().len(), "what is there");
    // A log that is whole is not called incomplete.
    let core = Core::start(BUILT_IN, &[]);
    core.ask(json!({"cmd": "log_record", "for_ms": 20}));
    eventually("it ended", || core.status()["log"]["recording"] == false);
    assert_eq!(core.status()["log"]["failed"], json!(null));
}
