//! What the shim puts into streams that wait for the legacy stream keeps nobody waiting for that.

use crate::lingering::{count, counting, settle, taking_turns, warm_up};
use crate::program::{Cells, Device, Ptr, ok, say, wait_for};
use crate::{both, welcome};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

/// Launches `later`, whose first block tells the host that it runs and whose second one waits for the host.
fn later(device: &Device, cells: &Cells, stream: Ptr, words: &[AtomicU32]) {
    let params = [cells.data, cells.counts, words.as_ptr() as u64];
    ok(device.launch(device.function("later"), [2, 1, 1], 1, stream, &params));
}

#[test]
fn nothing_lingers_behind_a_launch_in_the_legacy_stream() {
    both(
        nothing_lingers_behind_a_launch_in_the_legacy_stream,
        &taking_turns(50),
        |device| {
            let blocking = device.stream(0);
            warm_up(device, blocking);
            let (words, cells, more) = (device.words(), device.cells(2), device.cells(2));
            device.step(&cells, [2, 1, 1], blocking, 1, 1_000);
            later(device, &more, null_mut(), words);
            device.sync(blocking);
            assert_eq!(count(), 0);
            words[1].store(1, SeqCst);
            settle(device);
            device.step(&cells, [2, 1, 1], blocking, 2, 40_000);
            device.sync(blocking);
            assert_eq!(count(), 1, "the legacy stream is idle");
            device.check_steps(&cells, &[1, 2]);
            say("end");
        },
        counting,
    );
}

#[test]
fn a_wait_for_a_threads_own_stream_puts_nothing_into_it() {
    let welcome = tally_ipc::wire::Welcome { high_priority: true, ..welcome() };
    both(
        a_wait_for_a_threads_own_stream_puts_nothing_into_it,
        &welcome,
        |device| {
            let (own, other) = (device.per_thread_launch(), device.stream(1));
            // SAFETY: the function's type.
            let wait: unsafe extern "C" fn(Ptr) -> i32 =
                unsafe { std::mem::transmute(device.variable("cuStreamSynchronize_ptsz")) };
            let (words, others) = (device.words(), device.words());
            let [mine, cells, more] = [(); 3].map(|()| device.cells(2));
            later(&own, &mine, null_mut(), words);
            wait_for(&words[0], 1);
            // A busy stream ends: the shim asks what is still running.
            device.step(&more, [2, 1, 1], other, 1, 4_000);
            // SAFETY: a stream of ours.
            ok(unsafe { (device.cuda.cuStreamDestroy_v2)(other) });
            std::thread::sleep(std::time::Duration::from_millis(100));
            later(device, &cells, null_mut(), others);
            words[1].store(1, SeqCst);
            // SAFETY: the thread's own stream.
            ok(unsafe { wait(null_mut()) });
            assert_eq!(others[0].load(SeqCst) & others[1].load(SeqCst), 0, "it still runs");
            others[1].store(1, SeqCst);
            device.sync(null_mut());
        },
        |core| core.ends(0),
    );
}

/// Of one thread's launch the end is awaited, while another thread launches into the legacy stream as soon as the first
/// launch runs.
#[test]
fn the_event_behind_a_launch_waits_for_no_later_one() {
    const ROUNDS: u32 = 1_000;
    both(
        the_event_behind_a_launch_waits_for_no_later_one,
        &welcome(),
        |device| {
            let stream = device.stream(0) as usize;
            let (mine, others, round) = (device.words(), device.words(), AtomicU32::new(0));
            let cells = [device.cells(2), device.cells(2)];
            say("go");
            assert_eq!(crate::program::hear(), "on");
            mine[1].store(1, SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    device.enter();
                    for of in 1..=ROUNDS {
                        while round.load(SeqCst) != of || mine[0].load(SeqCst) == 0 {
                            std::thread::yield_now();
                        }
                        later(device, &cells[1], null_mut(), others);
                        wait_for(&others[0], 1);
                        round.store(0, SeqCst);
                    }
                });
                for of in 1..=ROUNDS {
                    mine[0].store(0, SeqCst);
                    others[0].store(0, SeqCst);
                    others[1].store(0, SeqCst);
                    round.store(of, SeqCst);
                    later(device, &cells[0], stream as Ptr, mine);
                    device.sync(stream as Ptr);
                    others[1].store(1, SeqCst);
                    while round.load(SeqCst) != 0 {
                        std::thread::yield_now();
                    }
                    device.sync(null_mut());
                }
            });
        },
        |core| {
            core.expect("go");
            core.lease(1_000_000, 0);
            core.say("on");
            core.ends(0);
            assert_eq!(core.counters().failed.load(SeqCst), 0);
        },
    );
}
