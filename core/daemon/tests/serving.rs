//! Admission, decisions by activity, and clients that misbehave or die.

mod common;

use common::{BUILT_IN, Client, Core, eventually, hello, policy, scribble};
use rustix::fd::AsFd;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;
use tally_ipc::ring::{self, Answer};
use tally_ipc::wire::{self, SharingMode, WireError};

#[test]
fn clients_are_admitted_as_the_rules_say() {
    let core = Core::start(BUILT_IN, &["--sharing", "timeslice"]);
    let high = Client::high(&core, "server");
    let low = Client::best_effort(&core, "train\x1b[31m");
    assert_eq!(high.core.granted.ticket.load(SeqCst), u64::MAX);
    assert_eq!(low.core.granted.ticket.load(SeqCst), 0);
    let slices =
        |slice_us, shared_us, linger_us| SharingMode::TimeSlice { slice_us, shared_us, linger_us };
    assert_eq!(high.welcome.sharing, slices(100_000, 100_000, 100));
    assert_eq!(low.welcome.sharing, slices(10, 350, 0));
    assert_ne!(high.id(), low.id());
    eventually("there is somebody to keep the GPU from", || high.core.neighbours.load(SeqCst) == 1);
    assert_eq!(low.core.neighbours.load(SeqCst), 1, "from the first moment on");
    let other = Client::best_effort(&core, "other");
    eventually("its helper thread is told of another", || low.probed());
    assert_eq!(low.core.neighbours.load(SeqCst), 2);
    eventually("both know", || other.core.neighbours.load(SeqCst) == 2);
    drop(other);
    eventually("its helper thread is told that it is alone again", || low.probed());
    assert_eq!(low.core.neighbours.load(SeqCst), 1);
    let shown = core.client(low.id()).unwrap();
    assert_eq!(shown["name"], "train?[31m");
    assert_eq!(shown["labels"]["test"], "1");
    assert_eq!(shown["pid"], std::process::id());
    assert_eq!(core.client(high.id()).unwrap()["ungated"], true);
    let status = core.status();
    assert_eq!(
        (&status["schema"], &status["sharing"]["in_force"]),
        (&json!(1), &json!("timeslice"))
    );
    assert_eq!(status["policy"]["source"], json!(null));
    assert!(
        status["policy"]["last_load_error"]["message"].as_str().unwrap().contains("nonexistent")
    );
}

#[test]
fn who_comes_and_goes_is_told_to_the_others_ten_times_a_second_at_most() {
    let core = Core::start(BUILT_IN, &["--sharing", "timeslice"]);
    let client = Client::best_effort(&core, "told");
    let start = std::time::Instant::now();
    let before = client.core.probes.load(SeqCst);
    for _ in 0..20 {
        drop((0..5).map(|_| Client::best_effort(&core, "other")).collect::<Vec<_>>());
    }
    let other = Client::best_effort(&core, "other");
    assert!(other.core.neighbours.load(SeqCst) >= 2, "a newcomer knows at once");
    eventually("all are told", || client.core.neighbours.load(SeqCst) == 2);
    let told = u128::from(client.core.probes.load(SeqCst) - before);
    assert!((1..=start.elapsed().as_millis() / 100 + 2).contains(&told), "{told}");
}

#[test]
fn who_may_not_be_high_priority_is_told_why() {
    let config = format!("{BUILT_IN}[high_priority]\nuids = [4294967294]\n");
    let core = Core::start(&config, &[]);
    let client = Client::register(&core.socket, &hello("server", true)).unwrap();
    assert!(!client.welcome.high_priority);
    assert!(client.welcome.class_reason.contains("high_priority.uids"));
    let shown = core.client(client.id()).unwrap();
    assert_eq!(shown["class"], "best-effort");
    assert_eq!(shown["class_reason"], client.welcome.class_reason);
}

#[test]
fn a_full_core_refuses_with_the_reason_and_admits_again() {
    let core = Core::start(&format!("{BUILT_IN}[admission]\nclients_max = 2\n"), &[]);
    let _a = Client::best_effort(&core, "a");
    let b = Client::best_effort(&core, "b");
    match Client::register(&core.socket, &hello("c", false)) {
        Err(WireError::Refused(why)) => assert!(why.contains("clients_max"), "{why}"),
        other => panic!("{:?}", other.map(|c| c.welcome)),
    }
    let id = b.id();
    drop(b);
    eventually("b is gone", || core.client(id).is_none());
    // Its place is free a moment after it has left the status.
    eventually("c is admitted", || Client::register(&core.socket, &hello("c", false)).is_ok());
}

#[test]
fn best_effort_waits_while_high_priority_is_busy_and_goes_on_after() {
    for spin in ["0", "200"] {
        let core = Core::start(BUILT_IN, &["--spin-us", spin]);
        let high = Client::high(&core, "server");
        let mut low = Client::best_effort(&core, "train");
        assert_eq!(low.launch(), Answer::Whole);
        high.set_busy(true);
        eventually("the core knows", || core.status()["high_priority_busy"] == true);
        let (ticket, completion) = low.submit();
        assert!(low.stays_held(ticket));
        let shown = core.client(low.id()).unwrap();
        assert_eq!(
            (&shown["waiting"], &shown["decisions"]["launches_held"]),
            (&json!(1), &json!(1))
        );
        high.set_busy(false);
        assert_eq!(low.wait(ticket), Answer::Whole);
        low.complete(completion);
        eventually("it is seen done", || {
            core.client(low.id()).unwrap()["decisions"]["completed"] == 2
        });
        let shown = core.client(low.id()).unwrap();
        assert_eq!((&shown["waiting"], &shown["in_flight"]), (&json!(0), &json!(0)));
        assert!(shown["waited_ms"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn a_high_priority_client_that_forgets_to_say_idle_is_probed() {
    let core = Core::start(BUILT_IN, &[]);
    let high = Client::high(&core, "server");
    let mut low = Client::best_effort(&core, "train");
    high.set_busy(true);
    let (ticket, _) = low.submit();
    // Its helper thread would look at the streams now.
    eventually("the probe is written", || high.probed());
    assert!(low.answer(ticket).is_none());
    high.set_busy(false);
    low.wait(ticket);
}

/// It may wait for what is held back for it, or its program was stopped: nobody would go on.
#[test]
fn a_high_priority_client_that_is_busy_for_long_and_launches_nothing_is_not_waited_for() {
    let core = Core::start(&format!("{BUILT_IN}[engine]\nhigh_stall_ms = 2000\n"), &[]);
    let high = Client::high(&core, "server");
    let mut low = Client::best_effort(&core, "train");
    let standstills = || core.client(high.id()).unwrap()["standstills"].as_u64().unwrap();
    high.set_busy(true);
    eventually("the core knows", || core.status()["high_priority_busy"] == true);
    let (first, done) = low.submit();
    low.wait(first);
    low.complete(done);
    assert_eq!(standstills(), 1);
    assert_eq!(core.status()["high_priority_busy"], false);
    // Nor does the core stay awake for it while somebody else is waited for, who gets on.
    let other = Client::high(&core, "other");
    other.set_busy(true);
    eventually("the core knows", || core.status()["high_priority_busy"] == true);
    let (held, done) = low.submit();
    let parks = || core.status()["core"]["parks"].as_u64().unwrap();
    let before = parks();
    eventually("the core sleeps", || {
        other.region.counters.by_entry_point.kernel.fetch_add(1, SeqCst);
        parks() > before + 2
    });
    assert!(low.answer(held).is_none());
    other.set_busy(false);
    low.wait(held);
    low.complete(done);
    // It gets on.
    high.region.counters.by_entry_point.kernel.fetch_add(1, SeqCst);
    eventually("it counts again", || core.status()["high_priority_busy"] == true);
    let (second, _) = low.submit();
    assert!(low.answer(second).is_none(), "held again");
    high.set_busy(false);
    low.wait(second);
    assert!(standstills() >= 1);
}

#[test]
fn launches_that_share_a_window_wait_for_completions() {
    let config = format!("{BUILT_IN}[engine]\nwindow_us = 1\nwindow_stall_ms = 3600000\n");
    let core = Core::start(&config, &[]);
    let mut low = Client::best_effort(&core, "train");
    low.region.kernels[0].publish(b"gemm", 7);
    // Measured at well over the window of 1 us.
    for _ in 0..3 {
        let (ticket, completion) = low.submit();
        low.wait(ticket);
        std::thread::sleep(Duration::from_millis(2));
        low.complete(completion);
        eventually("done", || core.client(low.id()).unwrap()["in_flight"] == 0);
    }
    let (first, done) = low.submit();
    low.wait(first);
    let (second, _) = low.submit();
    assert!(low.stays_held(second), "the window is full");
    low.complete(done);
    low.wait(second);
    let status = core.status();
    assert_eq!(status["kernels"][0]["name"], "gemm");
    assert!(core.client(low.id()).unwrap()["decisions"]["window_full"].as_u64().unwrap() > 0);
}

#[test]
fn a_client_that_leaves_lets_others_go_on_and_is_remembered() {
    let core = Core::start(BUILT_IN, &[]);
    let high = Client::high(&core, "server");
    let mut low = Client::best_effort(&core, "train");
    high.set_busy(true);
    eventually("the core knows", || core.status()["high_priority_busy"] == true);
    let (ticket, _) = low.submit();
    assert!(low.stays_held(ticket));
    let id = high.id();
    // It dies while busy.
    drop(high);
    low.wait(ticket);
    let status = core.status();
    assert_eq!(status["departed"][0]["id"], id);
    assert_eq!(status["departed"][0]["reason"], "it closed its socket while its process runs on");
}

/// Set for the process that [`helper_registers_and_ends`] is to be.
const ENV_HELPER: &str = "TALLY_TEST_HELPER_SOCKET";

/// Not a test of its own: run as another process by the next one.
#[test]
fn helper_registers_and_ends() {
    let Some(socket) = std::env::var_os(ENV_HELPER) else { return };
    let client = Client::register(socket.as_ref(), &hello("parent", false)).unwrap();
    // A child of the client that keeps the connection as its standard input.
    let socket = client.socket.try_clone().unwrap();
    std::process::Command::new("sleep")
        .arg("20")
        .stdin(std::os::fd::OwnedFd::from(socket))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::process::exit(0);
}

#[test]
fn a_client_whose_socket_outlives_its_process_is_noticed() {
    let core = Core::start(BUILT_IN, &[]);
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_registers_and_ends"])
        .env(ENV_HELPER, &core.socket)
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    eventually("it is gone", || core.status()["departed"][0]["name"] == "parent");
    assert_eq!(core.status()["departed"][0]["reason"], "its process ended");
}

#[test]
fn who_talks_after_registering_is_dropped() {
    let core = Core::start(BUILT_IN, &[]);
    let client = Client::best_effort(&core, "chatty");
    (&client.socket).write_all(b"hello again").unwrap();
    eventually("it is dropped", || client.is_dropped());
    let reason = core.status()["departed"][0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("after registering"), "{reason}");
    assert_eq!(client.core.serving.load(SeqCst), 0);
}

#[test]
fn a_hostile_client_hurts_nobody_else() {
    let core = Core::start(BUILT_IN, &[]);
    let high = Client::high(&core, "server");
    let mut good = Client::best_effort(&core, "good");
    good.launch();
    let hostile: Vec<Client> =
        (0..4).map(|i| Client::best_effort(&core, &format!("hostile-{i}"))).collect();
    for round in 0..200u64 {
        for (i, client) in hostile.iter().enumerate() {
            scribble(&client.region, round * 31 + i as u64 + 1);
            client.ring();
        }
        assert_eq!(good.launch(), Answer::Whole, "round {round}");
    }
    // Tickets far in the future, for ever: that one is cut off.
    let stubborn = Client::best_effort(&core, "stubborn");
    for s in &stubborn.region.submissions {
        s.sequence.store(u64::MAX, SeqCst);
    }
    stubborn.region.activity.next_ticket.store(u64::MAX, SeqCst);
    stubborn.ring();
    eventually("the stubborn one is cut off", || stubborn.is_dropped());
    assert_eq!(good.launch(), Answer::Whole);
    high.set_busy(true);
    eventually("the core knows", || core.status()["high_priority_busy"] == true);
    let (ticket, _) = good.submit();
    assert!(good.stays_held(ticket));
    high.set_busy(false);
    good.wait(ticket);
    drop(hostile);
    eventually("the hostile ones are gone", || {
        core.status()["clients"].as_array().unwrap().len() == 2
    });
}

/// Each decision takes its policy long, and one pass over all clients far longer than a client waits for a core that
/// stands still.
#[test]
fn a_core_that_is_busy_goes_on_saying_that_it_is_there() {
    const LOOPS: &str = "2";
    let policy = policy("../test-policies/chaos");
    let config = |dir: &Path| {
        let file = dir.join("loops.conf");
        std::fs::write(&file, format!("always {LOOPS}")).unwrap();
        format!(
            "[policy]\nfile = {policy:?}\nconfig_file = {file:?}\n[policy.limits]\ndecide_fuel = 3000000000\n\
             call_cpu_ms_max = 60000\nfaults_max = 1000\n"
        )
    };
    let dir = tempfile::tempdir().unwrap();
    let text = config(dir.path());
    let core = Core::start_in(dir, &text, &[]);
    let mut clients: Vec<Client> =
        (0..12).map(|i| Client::best_effort(&core, &format!("client-{i}"))).collect();
    let first = clients[0].submit().0;
    let rest: Vec<u64> = clients[1..].iter_mut().map(|client| client.submit().0).collect();
    clients[0].wait(first);
    let beats = |client: &Client| client.core.heartbeat.load(SeqCst);
    let before = beats(&clients[0]);
    for (client, ticket) in clients[1..].iter().zip(rest) {
        client.wait(ticket);
    }
    let passed = beats(&clients[0]).wrapping_sub(before);
    assert!(passed >= 5, "{passed} heartbeats in eleven decisions of some 0.3 s each");
    assert!(core.status()["policy"]["faults"]["overrun"].as_u64() >= Some(12), "{}", core.status());
}

/// The same while launches of many end.
#[test]
fn a_core_that_is_told_of_many_completions_goes_on_saying_that_it_is_there() {
    let policy = policy("../test-policies/chaos");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("completed.conf");
    std::fs::write(&file, "completed 2").unwrap();
    let text = format!(
        "[policy]\nfile = {policy:?}\nconfig_file = {file:?}\n[policy.limits]\ndecide_fuel = 3000000000\n\
         call_cpu_ms_max = 60000\nfaults_max = 1000\n"
    );
    let core = Core::start_in(dir, &text, &[]);
    let mut clients: Vec<Client> =
        (0..12).map(|i| Client::best_effort(&core, &format!("client-{i}"))).collect();
    clients.iter().for_each(|client| client.region.kernels[0].publish(b"kernel 0 of all", 7));
    let launches: Vec<_> = clients.iter_mut().map(|client| client.submit()).collect();
    for (client, (ticket, _)) in clients.iter().zip(&launches) {
        client.wait(*ticket);
    }
    let beats = |client: &Client| client.core.heartbeat.load(SeqCst);
    let before = beats(&clients[0]);
    for (client, (_, completion)) in clients.iter_mut().zip(&launches) {
        client.complete(*completion);
    }
    eventually("all completions are told", || {
        core.status()["policy"]["faults"]["overrun"].as_u64() >= Some(12)
    });
    let passed = beats(&clients[0]).wrapping_sub(before);
    assert!(passed >= 5, "{passed} heartbeats in twelve calls of some 0.3 s each");
}

#[test]
fn a_ticket_that_is_never_published_does_not_hold_the_others_for_ever() {
    let core = Core::start(BUILT_IN, &[]);
    let mut client = Client::best_effort(&core, "x");
    let lost = ring::take_ticket(&client.region);
    let (ticket, completion) = client.submit();
    assert_eq!(client.wait(ticket), Answer::Whole);
    client.complete(completion);
    // Its thread comes back and must not wait for ever either.
    assert_eq!(client.answer(lost), Some(Answer::Whole));
    assert_eq!(core.client(client.id()).unwrap()["tickets_skipped"], 1);
}

#[test]
fn a_killed_core_is_replaced_and_clients_attach_again() {
    let core = Core::start(BUILT_IN, &[]);
    let mut client = Client::best_effort(&core, "train");
    for _ in 0..300 {
        client.launch();
    }
    let dir = core.kill();
    eventually("the client sees the end of the socket", || client.is_dropped());
    assert!(dir.path().join("run/clients/core.sock").exists(), "left behind by the dead core");
    // Without a core a thread gives up on a ticket that it published.
    let (abandoned, _) = client.submit();
    let core = Core::start_in(dir, BUILT_IN, &[]);
    let Client { region_fd, region, .. } = client;
    let again = wire::Hello {
        first_ticket: region.activity.next_ticket.load(SeqCst),
        initialised: true,
        ..hello("train", false)
    };
    assert_eq!(again.first_ticket, abandoned + 1);
    let mut client = Client::register_with(&core.socket, &again, region_fd, region).unwrap();
    for _ in 0..300 {
        assert_eq!(client.launch(), Answer::Whole);
    }
    let shown = core.client(client.id()).unwrap();
    assert_eq!(shown["decisions"]["submitted"], 300);
}

#[test]
fn a_second_core_is_turned_away_and_the_first_goes_on() {
    let core = Core::start(BUILT_IN, &[]);
    let second = Core::command(core.dir.path(), BUILT_IN, &[]).output().unwrap();
    assert_eq!(second.status.code(), Some(4));
    Client::best_effort(&core, "x").launch();
    let mut core = core;
    core.signal(Signal::TERM);
    assert_eq!(core.wait().code(), Some(0));
    assert!(!core.socket.exists());
}

#[test]
fn a_terminating_core_lets_held_launches_go() {
    for by_admin in [false, true] {
        let mut core = Core::start(BUILT_IN, &[]);
        let high = Client::high(&core, "server");
        let mut low = Client::best_effort(&core, "train");
        high.set_busy(true);
        eventually("the core knows", || core.status()["high_priority_busy"] == true);
        let held: Vec<u64> = (0..20).map(|_| low.submit().0).collect();
        assert!(low.stays_held(held[0]));
        if by_admin {
            core.ask(json!({"cmd": "stop"}));
        } else {
            core.signal(Signal::TERM);
        }
        for ticket in held {
            assert_eq!(low.wait(ticket), Answer::Whole);
        }
        assert_eq!(core.wait().code(), Some(0));
        assert_eq!(low.core.serving.load(SeqCst), 0, "dropped on purpose");
        assert_eq!(low.core.granted.ticket.load(SeqCst), u64::MAX);
        assert!(core.log().contains("drained"));
    }
}

#[test]
fn an_idle_core_sleeps() {
    let core = Core::start(BUILT_IN, &["--spin-us", "50"]);
    let _clients: Vec<Client> = (0..8)
        .map(|i| Client::register(&core.socket, &hello("idle", i % 2 == 0)).unwrap())
        .collect();
    let parks = |core: &Core| core.status()["core"]["parks"].as_u64().unwrap();
    let beat = _clients[0].core.heartbeat.load(SeqCst);
    let before = parks(&core);
    eventually("ten heartbeats", || _clients[0].core.heartbeat.load(SeqCst) >= beat + 10);
    let slept = parks(&core) - before;
    // One sleep a heartbeat, and a few for the status requests; a loop that
    // polls would sleep thousands of times or never.
    assert!((5..200).contains(&slept), "{slept} sleeps in ten heartbeats");
    // And all its threads together.
    let wakes = || -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", core.pid())).unwrap().flatten();
        let status = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("status")).ok());
        status
            .filter_map(|status| {
                let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
                line?.trim().parse::<u64>().ok()
            })
            .sum()
    };
    // Whatever the status requests began has ended by then.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let (start, before) = (std::time::Instant::now(), wakes());
    std::thread::sleep(std::time::Duration::from_secs(3));
    let per_s = (wakes() - before) as f64 / start.elapsed().as_secs_f64();
    assert!(per_s <= 12.0, "{per_s} wake-ups a second");
    // The last heartbeat and the status request have only just woken it.
    for c in &_clients {
        eventually("sleeps", || c.core.parked.load(SeqCst) == 1);
    }
}

/// Whoever asks before it starts a program is told what class that would have.
#[test]
fn a_user_that_may_not_be_high_priority_is_told_when_it_asks() {
    let core = Core::start(&format!("{BUILT_IN}[high_priority]\nuids = [54321]\n"), &[]);
    let ask = |question: &[u8]| {
        let stream = std::os::unix::net::UnixStream::connect(&core.socket).unwrap();
        wire::send(stream.as_fd(), question, &[]).unwrap();
        let (answer, _) = wire::receive(stream.as_fd()).unwrap();
        assert_eq!(answer[0], wire::PING);
        String::from_utf8(answer[1..].to_vec()).unwrap()
    };
    assert_eq!(ask(&[wire::PING]), "");
    assert!(ask(&[wire::PING, wire::PING_HIGH]).contains("may not register as high priority"));
}

/// A cleaner of temporary files removes sockets that look old.
#[test]
fn sockets_that_are_taken_away_are_made_anew() {
    let core = Core::start(BUILT_IN, &[]);
    let client = Client::best_effort(&core, "before");
    for path in [&core.socket, &core.admin] {
        std::fs::remove_file(path).unwrap();
    }
    let mut second = Core::command(core.dir.path(), BUILT_IN, &[]);
    let second = second.stderr(std::process::Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(4), "{said}");
    assert!(said.contains(&format!("process {}", core.pid())), "{said}");
    eventually("both sockets are there again", || core.socket.exists() && core.admin.exists());
    let after = Client::best_effort(&core, "after");
    for id in [client.id(), after.id()] {
        assert!(core.client(id).is_some(), "{id}");
    }
    // And once more, with the folder; then with both folders and the lock files.
    std::fs::remove_dir_all(core.socket.parent().unwrap()).unwrap();
    eventually("the socket is there again", || core.socket.exists());
    Client::best_effort(&core, "again");
    for path in [&core.socket, &core.admin] {
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
    eventually("both sockets are there again", || core.socket.exists() && core.admin.exists());
    Client::best_effort(&core, "at last");
}

#[test]
fn sums_over_clients_do_not_fall_when_one_leaves_and_how_it_left_is_told() {
    let core = Core::start(BUILT_IN, &[]);
    let launches = || {
        let totals = core.status()["totals"].clone();
        let of = |key: &str| totals["best-effort"][key].as_u64().unwrap_or(0);
        (of("registered"), of("connected"), of("launches"))
    };
    let mut client = Client::best_effort(&core, "one");
    for _ in 0..5 {
        client.launch();
        client.region.counters.by_entry_point.kernel.fetch_add(1, Relaxed);
    }
    assert_eq!(launches(), (1, 1, 5));
    let status = core.client(client.id()).unwrap();
    assert_eq!(status["why"], Value::Null);
    assert!(status["launches_measured"].as_u64().unwrap() > 0, "{status}");
    assert!(status["measured_ms"].as_f64().unwrap() > 0.0, "{status}");
    let id = client.id();
    drop(client);
    eventually("it is gone", || core.client(id).is_none());
    assert_eq!(launches(), (1, 0, 5));
    // Its process is this one, which runs on.
    let status = core.status();
    assert_eq!(status["departed"][0]["reason"], "it closed its socket while its process runs on");
    let mut client = Client::best_effort(&core, "two");
    client.launch();
    client.region.counters.by_entry_point.kernel.fetch_add(1, Relaxed);
    assert_eq!(launches(), (2, 1, 6));
}
