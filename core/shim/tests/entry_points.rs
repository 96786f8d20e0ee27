//! Every way into the driver is seen, and nothing else changes.

mod common;

use common::{Built, Core, Program, WAYS, shim, welcome};
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;

const OFF: &[(&str, &str)] = &[("X", "1")];

#[test]
fn without_the_environment_everything_passes_through() {
    for way in WAYS {
        let mut p = Program::start(way, OFF);
        p.ok(&[
            "find",
            "init 0",
            "module",
            "stream 1",
            "launch 1 50",
            "launch 0 50",
            "ex 0",
            "coop 0",
        ]);
        p.ok(&[
            "graph 0",
            "hostfunc 0",
            "sync 1",
            "event 0 1",
            "evsync 0",
            "evquery 0",
            "copy",
            "ctxsync",
        ]);
        p.ok(&["destroy 1"]);
        assert_eq!(p.driver("fake_ran"), 103, "way {way}");
        assert_eq!(p.driver("fake_disorder"), 0);
        assert_eq!(p.driver("fake_events"), 1, "nothing of ours in the streams");
        // Errors come back as they are.
        assert_eq!(p.ask("init 1"), "1");
        p.driver("fake_fail 1");
        assert_eq!(p.ask("launch 0"), "700");
        p.ends_well();
    }
}

#[test]
fn every_entry_point_is_counted_whichever_way_it_was_found() {
    for way in WAYS {
        let core = Core::new();
        let mut p =
            Program::start(way, &[("TALLY_SOCKET", &core.socket()), ("TALLY_PRIORITY", "high")]);
        p.ok(&["find"]);
        p.tell("init 0");
        let client = core.accept(&welcome(), |hello, core| {
            assert!(hello.high_priority && !hello.initialised);
            tally_ipc::ring::grant(core, u64::MAX);
        });
        assert_eq!(p.answer(), "0");
        p.ok(&[
            "module",
            "stream 1",
            "launch 1 20",
            "launch 0 10",
            "ex 1",
            "coop 0",
            "graph 1",
            "graph 1",
        ]);
        p.ok(&["hostfunc 0", "capture 1", "launch 1 5", "endcapture 1"]);
        let c = &client.region.counters;
        let counts = [
            &c.by_entry_point.kernel,
            &c.by_entry_point.kernel_ex,
            &c.by_entry_point.cooperative,
            &c.by_entry_point.graph,
            &c.graph_kernels,
            &c.captured,
            &c.host_func,
            &c.failed,
            &client.region.activity.next_ticket,
        ]
        .map(|n| n.load(SeqCst));
        // 4 kernels a graph: two of its own, two of a child.
        assert_eq!(counts, [30, 1, 1, 2, 8, 5, 1, 0, 0], "way {way}");
        assert_eq!(c.launches(), 34);
        assert_eq!(p.driver("fake_ran"), 34);
        assert_eq!(p.driver("fake_captured"), 5);
        assert_eq!(p.driver("fake_inits"), 1);
        assert_eq!(p.driver("fake_disorder"), 0);
        // One may tell that a per-thread stream is idle, if its thread launches again after a pause.
        let events = p.driver("fake_events");
        assert!(events <= 1, "{events}: an ungated launch costs the GPU nothing");
        let report = &client.region.report;
        assert_eq!(report.sm_count.load(SeqCst), 132);
        assert_eq!(report.driver_version.load(SeqCst), 13000);
        assert_eq!(report.mps_client.load(SeqCst), 1);
        assert_eq!(
            report.device_uuid[0].load(SeqCst),
            u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8])
        );
        p.ends_well();
    }
}

#[test]
fn lookups_lead_to_us_only_where_they_should() {
    let mut p = Program::start(2, &[("TALLY_SOCKET", "/nonexistent/core.sock")]);
    assert_eq!(p.ask("default cuInit"), "0", "no driver is loaded, so nobody finds one");
    p.ok(&["find"]);
    assert_eq!(p.ask("own cuLaunchKernel"), "1");
    assert_eq!(p.ask("own cuMemAlloc_v2"), "0");
    assert_eq!(p.ask("own fake_ran"), "0");
    assert_eq!(p.ask("sym cuGraphLaunch_ptsz"), "0", "this driver has none");
    assert_eq!(p.ask("sym cuNoSuchThing"), "0");
    assert_eq!(p.ask("default cuInit"), "0", "it was opened for its opener only");
    assert_eq!(p.ask("third"), "0", "RTLD_NEXT is the caller's next, not ours");
    p.ends_well();
}

#[test]
fn no_driver_at_all_is_no_driver() {
    let output = Command::new(Built::get().dir().join("program2"))
        .current_dir("/")
        .env("LD_PRELOAD", shim())
        .env("TALLY_PRIORITY", "high")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .and_then(|mut c| {
            use std::io::Write;
            c.stdin.take().unwrap().write_all(b"find\n")?;
            c.wait_with_output()
        })
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "no driver\n");
}

#[test]
fn programs_without_cuda_do_not_notice() {
    for environment in [("X", "1"), ("TALLY_PRIORITY", "high")] {
        let output = Command::new("sh")
            .args(["-c", "echo out; ls / >/dev/null; exit 3"])
            .env("LD_PRELOAD", shim())
            .env(environment.0, environment.1)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!((&*output.stdout, &*output.stderr), (&b"out\n"[..], &b""[..]));
    }
}
