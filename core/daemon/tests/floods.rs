//! Users that take all they can get, and containers with the clients' socket: others are served all the same, and
//! nothing of the host's is read, written or changed. The attacks of the audit's findings 3, 4, 5, 13 and 15.
//!
//! Other users are played by threads of root; a test that cannot do that fails and says so.

mod common;

use common::users::{ADMIN, STRANGER, answers, as_user, core, high};
use common::{BUILT_IN, Client, Core, admin, admin_with, eventually, hello, policy};
use rustix::fd::AsFd;
use rustix::fs::{FileType, Mode};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use tally_contract::limits::JOINS_BURST;
use tally_ipc::admin::open_to_read;
use tally_ipc::wire::{self, WireError};

/// While `flood` runs again and again as a stranger, on `threads` threads, services start and admins get answers.
fn beside(core: &Core, threads: usize, flood: impl Fn(usize) + Sync) {
    let (stop, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                as_user(STRANGER, || {
                    while !stop.load(SeqCst) {
                        flood(rounds.fetch_add(1, SeqCst));
                    }
                });
            });
        }
        eventually("the flood runs", || rounds.load(SeqCst) > 4 * threads);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut waits: Vec<_> = (0..11)
                .map(|_| {
                    drop(high(core));
                    answers(core)
                })
                .collect();
            waits.sort();
            assert!(waits[5] < Duration::from_secs(1), "an admin is answered: {waits:?}");
        }));
        stop.store(true, SeqCst);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    let log = core.log().len();
    assert!(log < 200_000, "{log} bytes of log after {} rounds", rounds.load(SeqCst));
}

#[test]
fn silent_connections_keep_nobody_out() {
    let core = core("");
    let _open: Vec<_> = as_user(STRANGER, || {
        (0..600).map(|_| UnixStream::connect(&core.socket).unwrap()).collect()
    });
    beside(&core, 2, |round| {
        // All at once, the first byte of a frame from half of them, and then nothing.
        let all: Vec<_> = (0..50).filter_map(|_| UnixStream::connect(&core.socket).ok()).collect();
        for mut stream in all.iter().skip(round % 2 * 25) {
            let _ = stream.write_all(b"T");
        }
    });
}

#[test]
fn the_weight_that_a_stranger_asks_for_is_bounded() {
    for (more, of_stranger) in [("", 1), ("[admission]\nuser_weight_max = 3\n", 3)] {
        let core = core(more);
        let asking = |name: &str| {
            let labels = vec![("weight".to_owned(), "1000".to_owned())];
            Client::register(&core.socket, &wire::Hello { labels, ..hello(name, false) }).unwrap()
        };
        let _clients = (as_user(STRANGER, || asking("stranger")), asking("trusted"));
        let status = core.status();
        let weight = |name: &str| {
            let clients = status["clients"].as_array().unwrap();
            clients.iter().find(|c| c["name"] == name).unwrap()["weight"].clone()
        };
        assert_eq!([weight("stranger"), weight("trusted")], [of_stranger, 1000], "{status:#}");
    }
}

#[test]
fn a_stranger_does_not_take_the_floors_of_all() {
    let core = core("[admission]\nmin_share_percent_max = 60\nuser_min_share_percent_max = 30\n");
    let asking = |name: &str| {
        let labels = vec![("min-share".to_owned(), "50%".to_owned())];
        Client::register(&core.socket, &wire::Hello { labels, ..hello(name, false) }).unwrap()
    };
    let _strangers = as_user(STRANGER, || [asking("first"), asking("second")]);
    let _trusted = asking("trusted");
    let status = core.status();
    let granted = ["first", "second", "trusted"].map(|name| {
        let clients = status["clients"].as_array().unwrap();
        let client = clients.iter().find(|c| c["name"] == name).unwrap();
        client["min_share"]["granted_percent"].as_f64().unwrap()
    });
    assert_eq!(granted, [30.0, 0.0, 30.0], "{status:#}");
}

#[test]
fn registrations_are_slowed_down_for_a_user_that_floods() {
    const PER_S: f64 = 1.0;
    let core = core(&format!("[admission]\nuser_joins_per_s = {PER_S}\n"));
    let (registered, refused, began) = (AtomicUsize::new(0), AtomicUsize::new(0), Instant::now());
    let register = |_| {
        let client = Client::register(&core.socket, &hello("flood", false));
        let counted = if client.is_ok() { &registered } else { &refused };
        counted.fetch_add(1, SeqCst);
    };
    beside(&core, 3, register);
    let burst = JOINS_BURST as usize;
    as_user(STRANGER, || (0..2 * burst).for_each(register));
    let most = burst as f64 + PER_S * (began.elapsed().as_secs_f64() + 0.5);
    let (registered, refused) = (registered.load(SeqCst), refused.load(SeqCst));
    assert!(registered as f64 <= most, "{registered} registrations, {most} allowed");
    assert!(registered >= burst && refused > 0, "{registered} registered, {refused} refused");
}

/// Whatever the core logs about others, of every kind at once and with the longest names.
#[test]
fn floods_of_all_kinds_write_less_than_a_megabyte_of_log_a_minute() {
    const FLOOD: Duration = Duration::from_secs(6);
    let core = core("[admission]\nuser_clients_max = 8\nuser_joins_per_s = 10000\n");
    let long = "\u{1b}".repeat(85);
    let (before, began) = (core.log().len(), Instant::now());
    let flood = || {
        // Registered, left and refused.
        for high in [false, true] {
            let register = |_| Client::register(&core.socket, &hello(&long, high));
            drop((0..12).map(register).collect::<Vec<_>>());
        }
        // Dropped.
        if let Ok(client) = Client::register(&core.socket, &hello(&long, false)) {
            let _ = (&client.socket).write_all(b"hello again");
        }
        // Programs that are not governed.
        for _ in 0..10 {
            let stream = UnixStream::connect(&core.socket).unwrap();
            let notice = wire::Notice { name: long.clone(), reason: long.clone() };
            let _ = wire::send(stream.as_fd(), &notice.encode(), &[]);
        }
        // Closed for want of a place.
        drop((0..60).map(|_| UnixStream::connect(&core.socket)).collect::<Vec<_>>());
    };
    let rounds = AtomicUsize::new(0);
    let as_stranger = |work: &(dyn Fn() + Sync)| {
        as_user(STRANGER, || {
            while began.elapsed() < FLOOD {
                work();
                rounds.fetch_add(1, SeqCst);
            }
        });
    };
    let mut waits = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| as_stranger(&flood));
        scope.spawn(|| as_stranger(&|| drop(admin(&core.admin, &json!({"cmd": "stop"})))));
        while began.elapsed() < FLOOD {
            drop(high(&core));
            waits.push(answers(&core));
            // Those that left are there for a while.
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    waits.sort();
    assert!(waits[waits.len() / 2] < Duration::from_secs(1), "an admin is answered: {waits:?}");
    let (written, lasted) = (core.log().len() - before, began.elapsed());
    let log = core.log();
    for kind in ["client registered", "refused", "not governed", "connection was closed", "denied"]
    {
        assert!(log.contains(kind), "no line says {kind:?}");
    }
    assert!(rounds.load(SeqCst) > 10, "{rounds:?}");
    // What a second's worth of lines may be is in the log at its begin.
    let most = 1_000_000 * (lasted.as_millis() as usize + 1_000) / 60_000;
    assert!(written < most, "{written} bytes in {lasted:?}, at most {most}");
    answers(&core);
}

#[test]
fn one_user_does_not_take_all_places() {
    let core = core("[admission]\nclients_max = 40\nuser_clients_max = 12\nreserved_clients = 8\n");
    let flood = |uid| {
        as_user(uid, || {
            let mut held = Vec::new();
            loop {
                match Client::register(&core.socket, &hello("flood", false)) {
                    Ok(client) => held.push(client),
                    Err(WireError::Refused(why)) => return (held, why),
                    Err(other) => panic!("{other}"),
                }
            }
        })
    };
    let (first, why) = flood(STRANGER);
    assert_eq!(first.len(), 12);
    assert!(why.contains("user 12345 has 12 clients") && why.contains("user_clients_max"), "{why}");
    let others: Vec<_> = (20_000..20_004).map(flood).collect();
    let taken = first.len() + others.iter().map(|(held, _)| held.len()).sum::<usize>();
    assert_eq!(taken, 32, "all but those that are kept");
    assert!(others[3].1.contains("clients_max"), "{}", others[3].1);
    // Half of those kept are left by one service to another.
    let services: Vec<_> = (0..4).map(|_| high(&core)).collect();
    let root = Client::high(&core, "root's");
    assert_eq!(core.status()["clients"].as_array().unwrap().len(), 37);
    drop((services, root));
    answers(&core);
}

#[test]
fn idle_admin_connections_keep_no_admin_out() {
    let core = core("");
    let mut refused = 0;
    let open: Vec<_> = as_user(STRANGER, || {
        let connect = |_| {
            let mut stream = UnixStream::connect(&core.admin).unwrap();
            let _ = stream.write_all(b"{\"cmd\":\"policy_history\"}\n");
            stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            refused += usize::from(line.contains("try again later"));
            stream
        };
        (0..64).map(connect).collect()
    });
    assert_eq!(refused, 60, "four of one user are served, and the others told why");
    answers(&core);
    core.status();
    drop(open);
}

#[test]
fn requests_of_strangers_take_turns() {
    let core = core("");
    let answered = AtomicUsize::new(0);
    let began = Instant::now();
    beside(&core, 4, |_| {
        let answer = admin(&core.admin, &json!({"cmd": "status", "kernels": 1_000}));
        answered.fetch_add(usize::from(answer.is_some_and(|a| a["ok"].is_object())), SeqCst);
    });
    let most = began.elapsed().as_millis() as usize / 50 + 4;
    assert!((1..=most).contains(&answered.load(SeqCst)), "{answered:?} of at most {most}");
}

#[test]
fn the_clients_socket_answers_no_admin_request() {
    let core = core("");
    for request in ["status", "policy_show", "policy_load", "log_record", "stop"] {
        let mut stream = UnixStream::connect(&core.socket).unwrap();
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        stream.write_all(format!("{{\"cmd\":\"{request}\",\"kernels\":1}}\n").as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        assert!(text.contains("not a Tally registration frame") && !text.contains("ok"), "{text}");
    }
    let stream = UnixStream::connect(&core.socket).unwrap();
    wire::send(stream.as_fd(), &[wire::PING], &[]).unwrap();
    assert_eq!(wire::receive(stream.as_fd()).unwrap().0, [wire::PING]);
}

#[test]
fn the_clients_that_fit_are_computed_from_the_limit_on_descriptors() {
    let core = Core::start(BUILT_IN, &[]);
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", core.pid())).unwrap().count();
    // Of requests that have just ended some are there for a moment.
    let settled = || {
        let mut last = Vec::new();
        eventually("their number stays the same", || {
            std::thread::sleep(Duration::from_millis(20));
            last.push(descriptors());
            last.len() > 5 && last[last.len() - 5..].iter().all(|n| Some(n) == last.last())
        });
        last.pop().unwrap()
    };
    let before = settled();
    let clients: Vec<_> = (0..20).map(|_| Client::best_effort(&core, "c")).collect();
    let needed = tally_core::quota::DESCRIPTORS_EACH as usize * clients.len();
    assert_eq!(settled() - before, needed);
    let shown = core.status();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", core.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let limits: Vec<_> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(limits[0], limits[1], "raised to what the system allows");
    assert_eq!(shown["core"]["descriptors"].to_string(), limits[0]);
    assert!(shown["core"]["clients_fit"].as_u64() >= shown["core"]["clients_max"].as_u64());
}

/// What an admin that is not root asks, with these descriptors.
fn ask_with(core: &Core, request: &Value, files: &[tally_ipc::admin::File]) -> (String, String) {
    let answer = as_user(ADMIN, || admin_with(&core.admin, request, files)).expect("an answer");
    let word = |at: &str| answer.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
    (word("/error/code"), word("/error/message"))
}

#[test]
fn the_core_opens_no_path_that_it_is_told() {
    let core = core("");
    let (wasm, secret) = (policy("tally-priority"), core.dir.path().join("secret"));
    std::fs::write(&secret, "root:SECRET:1\n").unwrap();
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
    // Who may not read it cannot pass it on.
    as_user(ADMIN, || open_to_read("config", &secret).unwrap_err());
    let component = || open_to_read("component", &wasm).unwrap();
    let (named, planted) = (core.dir.path().join("planted"), Path::new("/etc/shadow"));
    let source = json!({"file": wasm, "config_file": planted});
    for request in [
        json!({"cmd": "policy_load", "path": wasm, "config": planted}),
        json!({"cmd": "policy_load", "path": wasm, "config": secret}),
        json!({"cmd": "shadow_start", "path": wasm, "config": planted}),
        json!({"cmd": "ab_start", "a": source, "b": source, "plan": {}}),
        json!({"cmd": "log_record", "path": named}),
    ] {
        for files in [vec![], vec![component()]] {
            let (code, message) = ask_with(&core, &request, &files);
            assert_eq!(code, "bad_request", "{request}: {message}");
            assert!(!message.contains("SECRET") && !message.contains("root:"), "{message}");
        }
    }
    assert!(!named.exists());
    assert_eq!(core.status()["policy"]["generation"], 1);
}

#[test]
fn only_regular_files_of_a_bounded_size_are_taken() {
    let core = core("");
    let wasm = policy("tally-priority");
    let text = core.dir.path().join("text");
    std::fs::write(&text, "idle_gap_us = 250\n").unwrap();
    let fifo = core.dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .unwrap();
    let large = core.dir.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(3 << 20).unwrap();
    let load = json!({"cmd": "policy_load", "path": "/p/policy.wasm", "config": "/p/the.toml"});
    let configurations: [(PathBuf, &str); 4] = [
        (fifo, "is a FIFO"),
        ("/dev/zero".into(), "is a device"),
        (core.dir.path().into(), "is a directory"),
        (large, "more than 1048576 bytes"),
    ];
    for (path, why) in configurations {
        for role in ["config", "component"] {
            let other = if role == "config" { ("component", &wasm) } else { ("config", &text) };
            let files =
                [open_to_read(other.0, other.1).unwrap(), open_to_read(role, &path).unwrap()];
            let (code, message) = ask_with(&core, &load, &files);
            assert_eq!(code, "policy_refused", "{message}");
            let name = if role == "config" { "/p/the.toml" } else { "/p/policy.wasm" };
            let is_named = message.contains(name) && message.contains(why);
            assert!(is_named || (role == "component" && why.contains("bytes")), "{message}");
        }
    }
    // An output is written by the core: nothing that is there already.
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
    let out = tally_ipc::admin::File { role: "out".into(), fd: null.into() };
    let (_, message) = ask_with(&core, &json!({"cmd": "log_record", "path": "/o"}), &[out]);
    assert!(message.contains("/o: is a device"), "{message}");
    let (code, message) =
        ask_with(&core, &json!({"cmd": "stop"}), &[open_to_read("x", &wasm).unwrap()]);
    assert!(code == "bad_request" && message.contains("takes no file `x`"), "{message}");
    // Nothing of it is in the way of a load.
    let fifo_policy = policy("fifo");
    let loaded = core.ask(json!({"cmd": "policy_load", "path": fifo_policy}));
    assert_eq!(loaded["name"], "fifo");
}

#[test]
fn what_was_loaded_by_descriptor_outlives_its_file_and_is_not_watched() {
    let dir = tempfile::tempdir().unwrap();
    let (own, other) = (dir.path().join("own.wasm"), dir.path().join("other.wasm"));
    std::fs::copy(policy("fifo"), &own).unwrap();
    std::fs::copy(policy("tally-priority"), &other).unwrap();
    let core = Core::start("[policy]\ndebounce_ms = 20\n", &["--policy", own.to_str().unwrap()]);
    let shown = |core: &Core| core.ask(json!({"cmd": "policy_show"}));
    assert_eq!(core.ask(json!({"cmd": "policy_load", "path": other}))["generation"], 2);
    // Neither its file nor that of the core's start changes what an admin asked for ...
    std::fs::remove_file(&other).unwrap();
    std::fs::copy(policy("tally-priority"), &own).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((&shown(&core)["name"], &shown(&core)["generation"]), (&json!("other"), &json!(2)));
    // ... until the core is told to take its own again, which it watches from then on.
    core.signal(rustix::process::Signal::HUP);
    eventually("its own is back", || shown(&core)["name"] == "own");
    std::fs::copy(policy("fifo"), &own).unwrap();
    eventually("the change is seen", || shown(&core)["generation"] == 4);
    let back = core.ask(json!({"cmd": "policy_rollback", "to": 2}));
    assert_eq!(back["name"], "other", "from memory");
}

#[test]
fn the_kernel_table_is_free_again_when_those_who_filled_it_left() {
    let core = core("");
    let junk = |round: u32| {
        let mut client = Client::register(&core.socket, &hello("filler", false)).unwrap();
        client.region.kernels[0].publish(format!("junk{round}").as_bytes(), round.into());
        client.region.kernel_count.store(1, SeqCst);
        for blocks in 1..=5_000 {
            client.launch_unmeasured(blocks);
        }
        client
    };
    let known = || core.status()["kernels_known"].as_u64().unwrap();
    for round in 0..3 {
        let client = as_user(STRANGER, || junk(round));
        eventually("they are known", || known() >= 5_000);
        drop(client);
        eventually("their places are free", || known() == 0);
    }
}
