//! Cores that die, hang, come back or were never there; forks, exits and other
//! programs' habits: every launch exactly once and in order.

mod common;

use common::{Core, Program, attached, attached_way, eventually, welcome};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_ipc::layout::report_state;
use tally_ipc::wire::{SharingMode, Welcome};

#[test]
fn a_lost_core_fails_open() {
    let mut core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.tell("launch 0 5");
    client.take();
    core.stop();
    client.die();
    assert_eq!(p.answer(), "0", "the held launch and the others go on");
    assert_eq!(client.region.counters.unscheduled.load(SeqCst), 5);
    assert_eq!(client.region.report.governed.load(SeqCst), report_state::FAILED);
    assert_eq!(p.driver("fake_ran"), 5);
    assert_eq!(p.driver("fake_disorder"), 0);
    // It comes back: the same region, tickets going on.
    core.listen_again();
    let mut again = core.accept(&welcome(), |_, _| {});
    assert!(again.hello.initialised);
    assert_eq!(again.hello.first_ticket, 1);
    eventually("attached", || again.region.report.governed.load(SeqCst) == report_state::ACTIVE);
    p.tell("launch 0 2");
    let served = again.serve(2);
    assert_eq!(p.answer(), "0");
    served.iter().for_each(|r| again.ends(r));
    assert_eq!(p.driver("fake_ran"), 7);
    p.ends_well();
}

#[test]
fn a_lost_core_can_hold_until_the_next() {
    let mut core = Core::new();
    let hold = Welcome { fail_hold: true, ..welcome() };
    let (mut p, mut client) = attached(&core, &hold, &[]);
    p.tell("launch 0 3");
    client.take();
    core.stop();
    client.die();
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(client.region.counters.launches(), 0, "held");
    core.listen_again();
    let mut again = core.accept(&hold, |_, _| {});
    assert_eq!(again.hello.first_ticket, 1);
    let served = again.serve(3);
    assert_eq!(p.answer(), "0");
    assert_eq!(served.iter().map(|r| r.completion).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(again.region.counters.unscheduled.load(SeqCst), 0);
    assert_eq!((p.driver("fake_ran"), p.driver("fake_disorder")), (3, 0));
    p.ends_well();
}

#[test]
fn high_priority_goes_on_without_a_core_in_either_mode() {
    for told in [&[][..], &[("TALLY_FAIL", "hold")]] {
        let mut core = Core::new();
        let hold = Welcome { fail_hold: true, high_priority: true, ..welcome() };
        let environment = [&[("TALLY_PRIORITY", "high")], told].concat();
        let (mut p, client) = attached(&core, &hold, &environment);
        client.ungated();
        p.ok(&["launch 0 3"]);
        core.stop();
        client.die();
        std::thread::sleep(Duration::from_millis(400));
        p.ok(&["launch 0 4"]);
        assert_eq!((p.driver("fake_ran"), p.driver("fake_disorder")), (7, 0));
        p.ends_well();
    }
}

#[test]
fn threads_lose_nothing_while_cores_come_and_go() {
    for fail_hold in [false, true] {
        let mut core = Core::new();
        let welcome = Welcome { fail_hold, ..welcome() };
        let (mut p, mut client) = attached(&core, &welcome, &[]);
        p.ok(&["stream 1", "stream 2", "stream 3", "stream 4"]);
        p.tell("threads 4 300");
        for _ in 0..3 {
            client.serve(100);
            core.stop();
            client.die();
            core.listen_again();
            client = core.accept(&welcome, |_, _| {});
            if !fail_hold {
                break;
            }
        }
        // Whatever is left is asked of the last core.
        client.ungated();
        assert_eq!(p.answer(), "0");
        assert_eq!(p.driver("fake_launched"), 1200, "hold: {fail_hold}");
        assert_eq!(p.driver("fake_ran"), 1200);
        assert_eq!(p.driver("fake_disorder"), 0);
        assert_eq!(client.region.counters.launches(), 1200);
        p.ends_well();
    }
}

#[test]
fn a_stuck_core_is_not_waited_for_for_ever_and_a_slow_one_is() {
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.tell("launch 0");
    client.take();
    client.beat_for(Duration::from_millis(2500));
    assert_eq!(client.region.counters.launches(), 0, "slow, not stuck");
    // No more heartbeats.
    assert_eq!(p.answer(), "0");
    assert_eq!(client.region.counters.unscheduled.load(SeqCst), 1);
    // Still stuck: nobody waits for it again, nor for room in the ring.
    p.ok(&["launch 0 600"]);
    assert_eq!(client.region.counters.unscheduled.load(SeqCst), 601);
    // The connection stands: once it moves, the next launch asks again.
    client.beat_for(Duration::from_millis(1));
    p.tell("launch 0");
    client.serve(1);
    assert_eq!(p.answer(), "0");
    assert_eq!(client.region.counters.unscheduled.load(SeqCst), 601);
    assert_eq!((p.driver("fake_ran"), p.driver("fake_disorder")), (602, 0));
    p.ends_well();
}

#[test]
fn without_a_core_at_the_start_it_runs_and_attaches_later() {
    let mut core = Core::new();
    core.stop();
    let socket = core.socket();
    let mut p = Program::start(1, &[("TALLY_SOCKET", &socket)]);
    p.ok(&["find", "init 0", "module", "launch 0 10", "sync 0"]);
    core.listen_again();
    let mut client = core.accept(&welcome(), |_, _| {});
    assert!(client.hello.initialised && !client.hello.high_priority);
    assert_eq!(client.region.counters.unscheduled.load(SeqCst), 10);
    eventually("attached", || client.region.report.governed.load(SeqCst) == report_state::ACTIVE);
    p.tell("launch 0");
    client.serve(1);
    assert_eq!(p.answer(), "0");
    p.ends_well();
}

#[test]
fn a_core_that_refuses_or_talks_nonsense_is_no_core() {
    use std::io::{Read, Write};
    for reply in
        [tally_ipc::wire::frame(&Welcome::encode_refusal("full")), b"{\"json\":1}".to_vec()]
    {
        let core = Core::new();
        let socket = core.socket();
        let mut p = Program::start(2, &[("TALLY_SOCKET", &socket)]);
        p.ok(&["find"]);
        p.tell("init 0");
        core.reply_raw(|s| {
            let mut start = [0; 16];
            s.read_exact(&mut start).unwrap();
            s.write_all(&reply).unwrap();
        });
        assert_eq!(p.answer(), "0");
        p.ok(&["module", "launch 0", "sync 0"]);
        assert_eq!(p.driver("fake_ran"), 1);
        p.ends_well();
    }
}

#[test]
fn mps_is_set_up_before_the_driver_starts() {
    let mps = Welcome {
        sharing: SharingMode::Mps {
            pipe_directory: "/run/tally/mps".into(),
            client_priority: 1,
            thread_percent: 75,
        },
        ..welcome()
    };
    let core = Core::new();
    let (mut p, _client) = attached(&core, &mps, &[]);
    assert_eq!((p.driver("fake_mps_pipe"), p.driver("fake_mps_priority")), (1, 1));
    assert_eq!(p.driver("fake_mps_percent"), 75);
    // Programs that it starts, perhaps without the preloaded library, find nothing of it.
    assert_eq!(p.ask("env CUDA_MPS_PIPE_DIRECTORY"), "-");
    assert_eq!(p.ask("env CUDA_MPS_CLIENT_PRIORITY"), "-");
    assert_eq!(p.ask("env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "-");
    p.ends_well();
    let own = [("CUDA_MPS_CLIENT_PRIORITY", "0"), ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30")];
    let (mut p, client) = attached(&core, &mps, &own);
    assert_eq!(p.driver("fake_mps_percent"), 30);
    assert_eq!((p.driver("fake_mps_pipe"), p.driver("fake_mps_priority")), (1, 0));
    assert_eq!(p.ask("env CUDA_MPS_CLIENT_PRIORITY"), "0", "the user's stays");
    assert_eq!(client.region.report.time_slice.load(SeqCst), report_state::UNUSED);
    p.ends_well();
}

#[test]
fn among_others_of_its_class_the_time_slice_is_another() {
    let core = Core::new();
    let sharing = SharingMode::TimeSlice { slice_us: 10, shared_us: 350, linger_us: 0 };
    let (p, client) = attached(&core, &Welcome { sharing, ..welcome() }, &[]);
    let wanted = || client.region.report.time_slice_us.load(SeqCst);
    eventually("its own", || wanted() == 10);
    for (best_effort, slice_us) in [(2, 350), (3, 350), (1, 10), (2, 350)] {
        client.core.neighbours.store(best_effort, SeqCst);
        client.probe();
        eventually("that of so many", || wanted() == slice_us);
    }
    p.ends_well();
}

#[test]
fn a_forked_child_is_a_client_of_its_own() {
    let core = Core::new();
    let (mut p, client) = attached(&core, &welcome(), &[]);
    client.ungated();
    p.ok(&["launch 0 3"]);
    p.tell("fork");
    let mut child = core.accept(&welcome(), |hello, _| assert_eq!(hello.first_ticket, 0));
    child.serve(1);
    assert_eq!(p.answer(), "0");
    assert_eq!(child.region.counters.launches(), 1);
    assert_eq!(client.region.counters.launches(), 3, "the parent's books are its own");
    p.ok(&["launch 0"]);
    assert_eq!(client.region.counters.launches(), 4);
    assert_eq!(p.driver("fake_ran"), 4);
    p.ends_well();
}

#[test]
fn exits_do_not_hang() {
    for (way, how) in [(1, "exit 5"), (2, "_exit 5"), (3, "exit 5"), (4, "_exit 5")] {
        let core = Core::new();
        let (mut p, mut client) = attached_way(way, &core, &welcome(), &[]);
        p.tell("launch 0 2");
        client.serve(2);
        assert_eq!(p.answer(), "0");
        p.tell(how);
        assert_eq!(p.finish(), (Some(5), String::new(), String::new()));
    }
    // Killed while a launch is held.
    let core = Core::new();
    let (mut p, mut client) = attached(&core, &welcome(), &[]);
    p.tell("launch 0");
    client.take();
    p.kill();
    assert!(client.is_gone(), "the core learns of it");
}

#[test]
fn the_log_is_written_only_where_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let core = Core::new();
    let (p, _client) = attached(&core, &welcome(), &[("TALLY_SHIM_LOG", log.to_str().unwrap())]);
    p.ends_well();
    let text = std::fs::read_to_string(log).unwrap();
    assert!(text.contains("client 7 (best-effort)"), "{text}");
}

#[test]
fn a_core_in_a_folder_that_others_can_write_to_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let core = Core::new();
    let socket = core.socket();
    let folder = std::path::Path::new(&socket).parent().unwrap().to_owned();
    let set = |mode| std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
    set(0o777);
    let env = [("TALLY_SOCKET", &*socket), ("TALLY_SHIM_LOG", log.to_str().unwrap())];
    let mut p = Program::start(1, &env);
    p.ok(&["find", "init 0", "module", "launch 0 2", "sync 0"]);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text.contains("chmod go-w"), "{text}");
    assert_eq!(p.driver("fake_ran"), 2);
    p.ends_well();
}

#[test]
fn a_program_that_closes_all_descriptors_goes_on() {
    let core = Core::new();
    let hold = Welcome { fail_hold: true, ..welcome() };
    let (mut p, mut client) = attached(&core, &hold, &[]);
    p.tell("launch 0");
    client.serve(1);
    assert_eq!(p.answer(), "0");
    p.ok(&["closeall"]);
    // None of them is the shim's.
    p.tell("launch 0 3");
    assert_eq!(client.serve(3).len(), 3);
    assert_eq!(p.answer(), "0");
    p.ok(&["sync 0"]);
    assert_eq!(client.region.report.governed.load(SeqCst), report_state::ACTIVE);
    assert_eq!(client.region.counters.unscheduled.load(SeqCst), 0);
    assert_eq!(p.driver("fake_ran"), 4);
    p.ends_well();
}

#[test]
fn behind_another_interposer_a_launch_is_one_launch() {
    for look_up in ["next", "handle"] {
        let core = Core::new();
        let socket = core.socket();
        let mut p = Program::start_with(
            1,
            &["libother.so"],
            &[("TALLY_SOCKET", &socket), ("OTHER_LOOKS_UP", look_up)],
        );
        p.ok(&["find"]);
        p.tell("init 0");
        let mut client = core.accept(&welcome(), |_, _| {});
        assert_eq!(p.answer(), "0");
        p.ok(&["module"]);
        p.tell("launch 0 5");
        assert_eq!(client.serve(5).len(), 5);
        assert_eq!(p.answer(), "0");
        client.ungated();
        p.ok(&["launch 0 5"]);
        assert_eq!(p.driver("other_saw"), 10, "it is not cut out ({look_up})");
        assert_eq!(p.driver("fake_ran"), 10);
        assert_eq!(client.region.counters.launches(), 10);
        p.ends_well();
    }
}
