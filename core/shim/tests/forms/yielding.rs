//! Yielding: at any moment, often, for long; and what does not count as being stuck.

use crate::governor::Governor;
use crate::program::{Device, ask, hear, ok, say};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;
use std::time::Duration;
use tally_ipc::layout::submission_flags::CAN_PREEMPT;
use tally_ipc::layout::transform_state;
use tally_ipc::ring::Answer;
use tally_ipc::wire::{RewriteSettings, Welcome};

/// A welcome of little patience with what is stuck.
pub fn impatient() -> Welcome {
    Welcome { rewrite: RewriteSettings { rescue_ms: 30, ..welcome().rewrite }, ..welcome() }
}

/// A linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % n
    }
}

/// A thread that asks to yield, for random times, until this is dropped.
pub struct Asking {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Asking {
    pub fn start(core: &Governor, longest_us: u64) -> Asking {
        let (stop, line, mut random) = (Arc::new(AtomicBool::new(false)), core.line(), Random(3));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(SeqCst) {
                for asked in [true, false] {
                    line.ask(asked);
                    std::thread::sleep(Duration::from_micros(random.below(longest_us)));
                }
            }
            line.ask(false);
        });
        Asking { stop, thread: Some(thread) }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Launch rounds until the test has seen enough.
fn rounds(device: &mut Device) {
    device.warm_up();
    let (cells, stream) = (device.cells(60), device.stream(1));
    let mut ks = Vec::new();
    while ask("round") != "end" {
        for _ in 0..4 {
            ks.push(ks.len() as u32);
            device.step(&cells, [60, 1, 1], stream, ks[ks.len() - 1], 1_000);
        }
        device.sync(stream);
    }
    device.check_steps(&cells, &ks);
}

fn at_random_moments(core: &mut Governor, answer: Answer) {
    core.warm_up("step");
    core.answer(answer);
    let mut random = Random(7);
    let mut rounds = 0;
    // Most rounds have launches that yield; all rounds are right.
    while rounds < 60 || (core.counters().launches_yielded.load(SeqCst) < 20 && rounds < 2_000) {
        rounds += 1;
        core.expect("round");
        core.say("on");
        for _ in 0..random.below(12) {
            core.ask_to_yield(true);
            std::thread::sleep(Duration::from_micros(random.below(1_500)));
            core.ask_to_yield(false);
            std::thread::sleep(Duration::from_micros(random.below(600)));
        }
    }
    core.expect("round");
    core.say("end");
    core.ends(0);
    let c = core.counters();
    assert!(c.launches_yielded.load(SeqCst) >= 20, "{:?}", c.launches_yielded);
    assert_eq!([&c.rescued, &c.degraded, &c.failed].map(|n| n.load(SeqCst)), [0; 3]);
    assert!(core.region().turnarounds.count.load(SeqCst) >= 20);
}

#[test]
fn slices_yield_at_random_moments() {
    both(slices_yield_at_random_moments, &welcome(), rounds, |core| {
        at_random_moments(core, Answer::Slice(9));
    });
}

#[test]
fn preemptible_launches_yield_at_random_moments() {
    both(preemptible_launches_yield_at_random_moments, &welcome(), rounds, |core| {
        at_random_moments(core, Answer::Preemptible(4_000));
    });
}

/// One launch and what follows it, while the gate is closed.
fn one_launch(device: &mut Device) {
    device.warm_up();
    let (cells, sum) = (device.cells(16), device.memory(1));
    say("warm");
    assert_eq!(hear(), "go");
    device.step(&cells, [16, 1, 1], null_mut(), 3, 0);
    device.sum(sum, cells.counts, 16, null_mut());
    say("launched");
    device.sync(null_mut());
    device.check_steps(&cells, &[3]);
    assert_eq!(device.read(sum, 1), [16], "what follows waits for all of it");
    say("done");
    // Never taken for one whose blocks wait: it is transformed again.
    device.step(&cells, [16, 1, 1], null_mut(), 4, 0);
    device.check_steps(&cells, &[3, 4]);
}

fn held_for_long(core: &mut Governor, answer: Answer, ask: impl Fn(&Governor)) {
    core.warm_up("step");
    core.expect("warm");
    core.policy(move |_, name| if name == "step" { answer } else { Answer::Whole });
    core.closed();
    core.say("go");
    core.expect("launched");
    ask(core);
    assert_eq!(core.counters().rescued.load(SeqCst), 0);
    core.ask_to_yield(false);
    core.expect("done");
    core.ends(0);
    let c = core.counters();
    assert_eq!([&c.rescued, &c.degraded].map(|n| n.load(SeqCst)), [0; 2]);
    assert_eq!(c.sliced.load(SeqCst) + c.preemptible.load(SeqCst), 2);
    assert_eq!(core.state("step").0, transform_state::READY);
}

#[test]
fn slices_held_for_long_are_not_stuck() {
    both(slices_held_for_long_are_not_stuck, &impatient(), one_launch, |core| {
        // Far longer than any slice may take.
        held_for_long(core, Answer::Slice(4), |_| std::thread::sleep(Duration::from_millis(600)));
    });
}

#[test]
fn launches_at_the_gate_that_are_asked_again_are_not_stuck() {
    both(
        launches_at_the_gate_that_are_asked_again_are_not_stuck,
        &impatient(),
        one_launch,
        |core| {
            held_for_long(core, Answer::Preemptible(12_000), |core| {
                for _ in 0..8 {
                    // The gate may not have opened in between, nor the stream have seen it.
                    core.ask_to_yield(false);
                    core.ask_to_yield(true);
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
        },
    );
}

#[test]
fn no_module_is_loaded_while_a_launch_may_need_help() {
    // The driver would wait for the launch, and a rescue for the driver.
    both(
        no_module_is_loaded_while_a_launch_may_need_help,
        &welcome(),
        |device| {
            device.warm_up();
            let (cells, sum) = (device.cells(16), device.memory(2));
            let (a, b) = (device.stream(1), device.stream(1));
            let f = device.function("sum");
            let sums = || {
                ok(device.launch(f, [2, 1, 1], 1, b, &[sum, cells.counts, 1]));
                device.sync(b);
            };
            // A GPU's driver loads it with its first launch, and waits for all that runs: for the
            // gate, too.
            sums();
            assert_eq!(ask("go"), "on");
            device.step(&cells, [16, 1, 1], a, 1, 0);
            (0..2).for_each(|_| sums());
            say("asked");
            device.sync(a);
            device.warm_up_with(sums);
            device.check_steps(&cells, &[1]);
        },
        |core| {
            core.warm_up("step");
            core.hold_all_at_the_gate();
            core.expect("asked");
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(core.state("sum").0, transform_state::PREPARING);
            core.ask_to_yield(false);
            core.warm_up("sum");
            core.ends(0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 1);
        },
    );
}

#[test]
fn many_threads_and_streams_yield_at_once() {
    both_under(
        many_threads_and_streams_yield_at_once,
        // A queue for each stream.
        &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")],
        &welcome(),
        |device| {
            device.warm_up();
            assert_eq!(ask("go"), "on");
            let device = &*device;
            std::thread::scope(|s| {
                for t in 0..6_u32 {
                    s.spawn(move || {
                        device.enter();
                        let of_thread = device.per_thread_launch();
                        let own = device.stream(t % 2);
                        let cells = [device.cells(24), device.cells(24)];
                        let ks: Vec<u32> = (0..25).map(|i| i * 6 + t).collect();
                        for k in &ks {
                            device.step(&cells[0], [24, 1, 1], own, *k, 300);
                            of_thread.step(&cells[1], [4, 3, 2], null_mut(), *k, 300);
                        }
                        device.sync(own);
                        device.sync(2 as *mut _);
                        cells.iter().for_each(|cells| device.check_steps(cells, &ks));
                        // SAFETY: a stream of ours: its slot becomes another's.
                        unsafe { ok((device.cuda.cuStreamDestroy_v2)(own)) };
                    });
                }
            });
            say("done");
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            let mut n = 0;
            core.policy(move |request, name| {
                n += 1;
                match n % 3 {
                    _ if name != "step" || request.flags & CAN_PREEMPT == 0 => Answer::Whole,
                    0 => Answer::Slice(5),
                    1 => Answer::Preemptible(0),
                    _ => Answer::Preemptible(9_000),
                }
            });
            core.say("on");
            let asking = Asking::start(core, 3_000);
            core.expect("done");
            drop(asking);
            core.ends(0);
            let c = core.counters();
            assert_eq!([&c.rescued, &c.failed].map(|n| n.load(SeqCst)), [0; 2]);
            assert!(c.sliced.load(SeqCst) > 0 && c.preemptible.load(SeqCst) > 0);
        },
    );
}
