//! Cores that die or fall silent while launches are held, exits, forks, and dying contexts.

use crate::governor::Governor;
use crate::program::{Device, ask, hear, ok, say};
use crate::{both, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::submission_flags::CAN_PREEMPT;
use tally_ipc::ring::{Answer, Request};

/// Launches that are held, then waited for.
fn held(device: &mut Device) {
    device.warm_up();
    let (cells, streams) = ([device.cells(16), device.cells(16)], [device.stream(1), null_mut()]);
    assert_eq!(ask("go"), "on");
    for (cells, stream) in cells.iter().zip(streams) {
        device.step(cells, [16, 1, 1], stream, 5, 100);
    }
    say("launched");
    for (cells, stream) in cells.iter().zip(streams) {
        device.sync(stream);
        device.check_steps(cells, &[5]);
    }
    // And it goes on.
    for (cells, stream) in cells.iter().zip(streams) {
        device.step(cells, [16, 1, 1], stream, 6, 100);
        device.sync(stream);
        device.check_steps(cells, &[5, 6]);
    }
}

fn hold(core: &mut Governor, answer: Answer) {
    core.warm_up("step");
    core.expect("go");
    core.policy(move |_, name| if name == "step" { answer } else { Answer::Whole });
    core.closed();
    core.say("on");
}

#[test]
fn a_core_that_dies_lets_go_of_what_it_held() {
    both(a_core_that_dies_lets_go_of_what_it_held, &welcome(), held, |core| {
        hold(core, Answer::Slice(4));
        core.expect("launched");
        core.die();
        core.ends(0);
        assert_eq!(core.counters().sliced.load(SeqCst), 2);
        assert_eq!(core.counters().unscheduled.load(SeqCst), 2);
        assert_eq!(core.counters().rescued.load(SeqCst), 0);
    });
}

#[test]
fn a_core_that_falls_silent_is_not_waited_for() {
    both(a_core_that_falls_silent_is_not_waited_for, &welcome(), held, |core| {
        hold(core, Answer::Preemptible(0));
        core.expect("launched");
        core.go_silent(true);
        core.ends(0);
        assert_eq!(core.counters().preemptible.load(SeqCst), 2);
        assert_eq!(core.counters().rescued.load(SeqCst), 0);
    });
}

/// Exit while launches are held: nobody grants them.
fn exit(device: &mut Device, how: impl FnOnce()) {
    device.warm_up();
    let cells = device.cells(16);
    assert_eq!(ask("go"), "on");
    device.step(&cells, [16, 1, 1], null_mut(), 5, 100);
    say("launched");
    how();
}

#[test]
fn a_program_exits_while_a_launch_is_held() {
    both(
        a_program_exits_while_a_launch_is_held,
        &welcome(),
        |device| exit(device, || ()),
        |core| {
            hold(core, Answer::Preemptible(0));
            core.expect("launched");
            core.ends(0);
        },
    );
}

#[test]
fn another_thread_exits_while_one_waits_for_a_held_launch() {
    both(
        another_thread_exits_while_one_waits_for_a_held_launch,
        &welcome(),
        |device| {
            let other = device.clone();
            exit(device, move || {
                std::thread::spawn(move || {
                    other.enter();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    std::process::exit(7);
                });
            });
            device.sync(null_mut());
            // The exit releases it: until it is over.
            loop {
                std::thread::park();
            }
        },
        |core| {
            hold(core, Answer::Slice(3));
            core.expect("launched");
            core.ends(7);
        },
    );
}

#[test]
fn a_forked_child_starts_afresh() {
    both(
        a_forked_child_starts_afresh,
        &welcome(),
        |device| {
            device.warm_up();
            let cells = device.cells(16);
            assert_eq!(ask("go"), "on");
            device.step(&cells, [16, 1, 1], null_mut(), 1, 100);
            say("launched");
            // SAFETY: the child only looks at the shim's state and leaves.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // CUDA does not outlive a fork; the shim's threads, locks and gate must not
                // hold the child up.
                let mut context = null_mut();
                // SAFETY: a valid out-pointer.
                let refused = unsafe { (device.cuda.cuCtxCreate_v2)(&mut context, 0, 0) };
                // SAFETY: nothing of the parent's is run down.
                unsafe { libc::_exit(if refused == 0 { 1 } else { 3 }) };
            }
            let mut status = 0;
            // SAFETY: a child of ours; a valid out-pointer.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 3);
            say("forked");
            device.sync(null_mut());
            device.check_steps(&cells, &[1]);
            device.step(&cells, [16, 1, 1], null_mut(), 2, 100);
            device.check_steps(&cells, &[1, 2]);
        },
        |core| {
            hold(core, Answer::Preemptible(0));
            core.expect("launched");
            core.expect("forked");
            core.ask_to_yield(false);
            core.ends(0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 2);
        },
    );
}

/// Launch in one context after another.
fn contexts(device: &mut Device, open: impl Fn(&mut Device), close: impl Fn(&Device)) {
    for round in 0..4 {
        open(device);
        device.warm_up();
        let (cells, stream) = (device.cells(16), device.stream(1));
        assert_eq!(ask("go"), "on");
        for k in 0..10 {
            device.step(&cells, [16, 1, 1], stream, k, 100);
        }
        say("launched");
        if round % 2 == 0 {
            device.sync(stream);
            device.check_steps(&cells, &(0..10).collect::<Vec<_>>());
        }
        close(device);
    }
    say("over");
    assert_eq!(hear(), "end");
}

fn in_each_context(core: &mut Governor) {
    for _ in 0..4 {
        core.warm_up("step");
        core.expect("go");
        core.policy(|_, name| if name == "step" { Answer::Preemptible(0) } else { Answer::Whole });
        core.say("on");
        core.expect("launched");
    }
    core.expect("over");
    core.say("end");
    core.ends(0);
    let c = core.counters();
    assert_eq!(c.transformed_kernels.load(SeqCst), 4, "once a context");
    assert_eq!([&c.rescued, &c.refused_kernels].map(|n| n.load(SeqCst)), [0; 2]);
    // On a loaded machine some find no room for parts and are not offered.
    let is_offered = |(r, answer): &&(Request, Answer)| {
        r.flags & CAN_PREEMPT != 0 && matches!(answer, Answer::Preemptible(_))
    };
    let offered = core.requests("step").iter().filter(is_offered).count() as u64;
    assert_eq!((c.preemptible.load(SeqCst), c.degraded.load(SeqCst)), (offered, 0), "{c:?}");
    assert!(offered >= 20, "{offered} of 40");
}

#[test]
fn a_new_context_is_transformed_in_when_the_old_one_is_destroyed() {
    both(
        a_new_context_is_transformed_in_when_the_old_one_is_destroyed,
        &welcome(),
        |device| {
            device.destroy_context();
            contexts(device, Device::new_context, Device::destroy_context);
        },
        in_each_context,
    );
}

#[test]
fn a_primary_context_comes_back_after_its_last_release() {
    both(
        a_primary_context_comes_back_after_its_last_release,
        &welcome(),
        |device| {
            contexts(device, Device::primary_context, |device| {
                // SAFETY: retained once a round.
                ok(unsafe { (device.cuda.cuDevicePrimaryCtxRelease_v2)(0) });
            });
        },
        in_each_context,
    );
}
