//! Streams wait for their launches on some of the SMs as soon as anything could tell, and no sooner.

use crate::bounds::{crowd, limiting};
use crate::forms::until_limited;
use crate::governor::Governor;
use crate::graphs::{self, recorded};
use crate::program::{Device, ask, ok, wait_for};
use crate::{both, both_under};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_ipc::layout::submission_flags::CAN_LIMIT;
use tally_ipc::ring::Answer;

type Ptr = *mut std::ffi::c_void;

/// `held`: each block waits until a word is set or a time is over, then counts itself. Nothing in its code tells that
/// it waits for the host. For the same reason a GPU's compiler reads the word once: there, only the time ends the wait.
const PTX: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry held(.param .u64 p_word, .param .u64 p_ticks, .param .u64 p_count) {
    .reg .pred %p<3>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [p_word];
    ld.param.u64 %rd2, [p_ticks];
    mov.u64 %rd3, %clock64;
waits:
    ld.global.u32 %r1, [%rd1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra goes;
    mov.u64 %rd4, %clock64;
    sub.u64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p2, %rd5, %rd2;
    @%p2 bra waits;
goes:
    ld.param.u64 %rd6, [p_count];
    red.global.add.u32 [%rd6], 1;
    ret;
}
";
/// 20 ms and more of a GPU's clock, in which a program does what it does while its launches are held.
const GPU_TICKS: u64 = 45_000_000;
const READY: i32 = 0;
const NOT_READY: i32 = 600;

/// Two launches on some of the SMs, the second right behind the first, which wait for a word of the host's.
struct Held<'a> {
    device: &'a Device,
    kernel: Ptr,
    blocks: u32,
    word: &'static AtomicU32,
    /// Blocks that have run.
    count: u64,
    /// What was there when something looked.
    seen: u64,
    /// A stream that waits for nothing by itself. More streams than hardware queues, and nothing would be limited.
    other: Ptr,
}

impl<'a> Held<'a> {
    fn new(device: &'a Device) -> Self {
        let kernel = device.function_of(device.load(PTX), "held");
        let (word, count, seen) = (&device.words()[0], device.memory(1), device.memory(1));
        let other = device.stream(1);
        Held { device, kernel, blocks: crowd(device), word, count, seen, other }
    }

    fn launch(&self, stream: Ptr) {
        self.launch_by(self.word, stream);
    }

    /// A launch that `word` holds.
    fn launch_by(&self, word: &AtomicU32, stream: Ptr) {
        let ticks = if self.device.is_gpu() { GPU_TICKS } else { u64::MAX };
        let params = [std::ptr::from_ref(word) as u64, ticks, self.count];
        ok(self.device.launch(self.kernel, [self.blocks, 1, 1], 1, stream, &params));
    }

    /// Puts something into a stream that copies the count.
    fn copy(&self, stream: Ptr) {
        // SAFETY: memory and a stream of ours.
        ok(unsafe { (self.device.cuda.cuMemcpyDtoDAsync_v2)(self.seen, self.count, 4, stream) });
    }

    /// Two launches into `stream`, held, and behind them `look`, which enqueues something that copies the count, and
    /// returns the stream that it is in.
    fn both_are_seen(&self, stream: Ptr, look: &dyn Fn(&Self, Ptr) -> Ptr) {
        self.device.set(self.count, 0, 1);
        self.device.set(self.seen, 0, 1);
        self.word.store(0, SeqCst);
        self.launch(stream);
        self.launch(stream);
        let looks = look(self, stream);
        // What does not wait has looked by then.
        std::thread::sleep(Duration::from_millis(5));
        self.word.store(1, SeqCst);
        self.device.sync(looks);
        let want = 2 * self.blocks;
        assert_eq!(self.device.read(self.seen, 1), [want]);
        assert_eq!(self.device.read(self.count, 1), [want]);
    }
}

type Look = (&'static str, fn(&Held<'_>, Ptr) -> Ptr);

/// Everything that may see what launches before it did, in their own stream or in another one.
const LOOKS: [Look; 8] = [
    ("a copy", |held, stream| {
        held.copy(stream);
        stream
    }),
    ("a launch that runs whole", |held, stream| {
        held.device.sum(held.seen, held.count, 1, stream);
        stream
    }),
    ("a graph", |held, stream| {
        let exec = recorded(held.device, held.other, || held.copy(held.other));
        graphs::launch(held.device, exec, stream);
        stream
    }),
    ("another stream, behind an event", |held, stream| {
        let (other, event) = (held.other, held.device.event());
        // SAFETY: an event and streams of ours.
        unsafe {
            ok((held.device.cuda.cuEventRecord)(event, stream));
            ok((held.device.cuda.cuStreamWaitEvent)(other, event, 0));
        }
        held.copy(other);
        other
    }),
    ("a word written behind them", |held, stream| {
        let (other, word) = (held.other, held.device.words().as_ptr() as u64);
        // SAFETY: pinned memory and streams of ours. 0: greater or equal.
        unsafe {
            ok((held.device.cuda.cuStreamWriteValue32_v2)(stream, word, 1, 0));
            ok((held.device.cuda.cuStreamWaitValue32_v2)(other, word, 1, 0));
        }
        held.copy(other);
        other
    }),
    ("whoever asks for the stream", |held, stream| {
        let query = || {
            // SAFETY: a stream of ours.
            unsafe { (held.device.cuda.cuStreamQuery)(stream) }
        };
        assert_eq!(query(), NOT_READY);
        held.word.store(1, SeqCst);
        while query() == NOT_READY {}
        assert_eq!(query(), READY);
        held.copy(held.other);
        held.other
    }),
    ("whoever waits for the stream", |held, stream| {
        held.word.store(1, SeqCst);
        held.device.sync(stream);
        held.copy(held.other);
        held.other
    }),
    ("whoever waits for the context", |held, _| {
        held.word.store(1, SeqCst);
        // SAFETY: no arguments.
        ok(unsafe { (held.device.cuda.cuCtxSynchronize)() });
        held.copy(held.other);
        held.other
    }),
];

/// Launch `held` until it is limited; then each round as often as it takes for its second launch to have followed the
/// first one directly.
fn go_round(core: &mut Governor, rounds: usize) {
    core.warm_up("held");
    until_limited(core, "limited?");
    core.policy(|request, name| match request.flags & CAN_LIMIT {
        CAN_LIMIT if name == "held" => Answer::SmLimited(u32::MAX),
        _ => Answer::Whole,
    });
    for round in 0..rounds {
        let mut tries = 0;
        loop {
            core.expect("go");
            let before = core.counters().sm_limited_consecutive.load(SeqCst);
            core.say("on");
            core.expect("done");
            let is_it = core.counters().sm_limited_consecutive.load(SeqCst) > before;
            core.say(if is_it { "next" } else { "again" });
            if is_it {
                break;
            }
            tries += 1;
            assert!(tries < 1_000, "round {round}: launches do not follow one another");
        }
    }
}

fn rounds(core: &mut Governor, rounds: usize) {
    go_round(core, rounds);
    core.ends(0);
    assert_eq!(core.counters().failed.load(SeqCst), 0);
}

fn until_it_counts(round: impl Fn()) {
    loop {
        ask("go");
        round();
        if ask("done") == "next" {
            return;
        }
    }
}

fn begin(device: &mut Device) -> Held<'_> {
    device.primary_context();
    let held = Held::new(device);
    held.word.store(1, SeqCst);
    let launch = || {
        held.launch(null_mut());
        held.device.sync(null_mut());
    };
    held.device.warm_up_with(launch);
    while ask("limited?") == "no" {
        launch();
    }
    held
}

fn everything_sees_them<T>(test: T, stream: impl FnOnce(&Device) -> Ptr) {
    both(
        test,
        &limiting(),
        |device| {
            let held = begin(device);
            let stream = stream(held.device);
            for (_, look) in LOOKS {
                until_it_counts(|| held.both_are_seen(stream, &look));
            }
        },
        |core| rounds(core, LOOKS.len()),
    );
}

#[test]
fn whatever_could_see_launches_on_some_of_the_sms_waits_for_them() {
    let test = whatever_could_see_launches_on_some_of_the_sms_waits_for_them;
    everything_sees_them(test, |device| device.stream(1));
}

#[test]
fn whatever_could_see_such_launches_of_a_blocking_stream_waits_for_them() {
    let test = whatever_could_see_such_launches_of_a_blocking_stream_waits_for_them;
    everything_sees_them(test, |device| device.stream(0));
}

#[test]
fn whatever_could_see_such_launches_of_the_legacy_stream_waits_for_them() {
    let test = whatever_could_see_such_launches_of_the_legacy_stream_waits_for_them;
    everything_sees_them(test, |_| null_mut());
}

/// The legacy stream and blocking ones wait for each other.
#[test]
fn blocking_streams_wait_for_launches_on_some_of_the_sms_in_each_other() {
    both(
        blocking_streams_wait_for_launches_on_some_of_the_sms_in_each_other,
        &limiting(),
        |device| {
            let held = begin(device);
            let (blocking, legacy) = (held.device.stream(0), null_mut());
            for (first, second) in [(blocking, legacy), (legacy, blocking)] {
                until_it_counts(|| {
                    held.both_are_seen(first, &|held, _| {
                        held.copy(second);
                        second
                    });
                });
                // The last one is limited itself, and comes behind the others.
                until_it_counts(|| {
                    let (device, blocks) = (held.device, held.blocks);
                    let (other, seen) = (device.words(), device.words());
                    device.set(held.count, 0, 1);
                    held.word.store(0, SeqCst);
                    held.launch(first);
                    held.launch(first);
                    other[0].store(1, SeqCst);
                    held.launch_by(&other[0], second);
                    // It must not have run.
                    std::thread::sleep(Duration::from_millis(5));
                    let copied = held.other;
                    // SAFETY: pinned memory and a stream of ours.
                    ok(unsafe {
                        (device.cuda.cuMemcpyDtoHAsync_v2)(
                            seen.as_ptr().cast_mut().cast(),
                            held.count,
                            4,
                            copied,
                        )
                    });
                    device.sync(copied);
                    assert_eq!(seen[0].load(SeqCst), 0, "blocks ran: it waits for no other stream");
                    held.word.store(1, SeqCst);
                    device.sync(second);
                    device.sync(first);
                    assert_eq!(device.read(held.count, 1), [3 * blocks]);
                });
            }
        },
        |core| rounds(core, 4),
    );
}

/// Streams that do not wait for each other are not made to.
#[test]
fn other_streams_do_not_wait_for_launches_on_some_of_the_sms() {
    both(
        other_streams_do_not_wait_for_launches_on_some_of_the_sms,
        &limiting(),
        |device| {
            let held = begin(device);
            let (stream, other) = (held.device.stream(1), held.other);
            let words = held.device.words();
            until_it_counts(|| {
                held.device.set(held.count, 0, 1);
                held.word.store(0, SeqCst);
                held.launch(stream);
                held.launch(stream);
                words[1].store(0, SeqCst);
                let word = &raw const words[1] as u64;
                // SAFETY: pinned memory and a stream of ours.
                ok(unsafe { (held.device.cuda.cuStreamWriteValue32_v2)(other, word, 1, 0) });
                wait_for(&words[1], 1);
                held.device.sync(other);
                held.word.store(1, SeqCst);
                // The stream itself may be destroyed before its launches have ended.
                let last = held.device.stream(1);
                held.launch(last);
                // SAFETY: a stream of ours; no arguments.
                unsafe {
                    ok((held.device.cuda.cuStreamDestroy_v2)(last));
                    ok((held.device.cuda.cuCtxSynchronize)());
                }
                assert_eq!(held.device.read(held.count, 1), [3 * held.blocks]);
            });
        },
        |core| rounds(core, 1),
    );
}

/// By a thread for which no context is current, too, although the driver may refuse it to record events then.
#[test]
fn a_thread_without_a_context_has_streams_wait_as_well() {
    both_under(
        a_thread_without_a_context_has_streams_wait_as_well,
        &[("TALLY_SOFTCUDA_STRICT", "1")],
        &limiting(),
        |device| {
            let held = begin(device);
            let (stream, cuda) = (held.device.stream(1), held.device.cuda);
            let (others, word) = (held.other as usize, held.device.words());
            until_it_counts(|| {
                held.both_are_seen(stream, &|held, stream| {
                    word[0].store(0, SeqCst);
                    let address = word.as_ptr() as u64;
                    let writes = move || {
                        // SAFETY: pinned memory and a stream of ours.
                        ok(unsafe { (cuda.cuStreamWriteValue32_v2)(others as Ptr, address, 1, 0) });
                    };
                    std::thread::spawn(writes).join().unwrap();
                    wait_for(&word[0], 1);
                    // SAFETY: a stream of ours.
                    assert_eq!(unsafe { (cuda.cuStreamQuery)(stream) }, NOT_READY);
                    held.copy(stream);
                    stream
                });
            });
        },
        |core| rounds(core, 1),
    );
}

/// While so much may be in a stream that another thread could not have it wait at once, it waits at once itself.
#[test]
fn streams_that_may_be_full_wait_at_once() {
    both(
        streams_that_may_be_full_wait_at_once,
        &limiting(),
        |device| {
            let held = begin(device);
            let (stream, word) = (held.device.stream(1), held.device.words());
            until_it_counts(|| {
                held.both_are_seen(stream, &|held, stream| {
                    held.copy(stream);
                    stream
                });
            });
            assert_eq!(ask("full?"), "on");
            held.device.set(held.count, 0, 1);
            held.word.store(1, SeqCst);
            word[0].store(0, SeqCst);
            // SAFETY: pinned memory and a stream of ours. 0: greater or equal.
            ok(unsafe {
                (held.device.cuda.cuStreamWaitValue32_v2)(stream, word.as_ptr() as u64, 1, 0)
            });
            (0..200).for_each(|_| held.copy(stream));
            (0..4).for_each(|_| held.launch(stream));
            word[0].store(1, SeqCst);
            held.device.sync(stream);
            assert_eq!(held.device.read(held.count, 1), [4 * held.blocks]);
            assert_eq!(ask("none followed?"), "right");
        },
        |core| {
            go_round(core, 1);
            core.expect("full?");
            let c = |core: &Governor| core.counters().sm_limited_consecutive.load(SeqCst);
            let before = c(core);
            core.say("on");
            core.expect("none followed?");
            core.say(if c(core) == before { "right" } else { "wrong" });
            core.ends(0);
        },
    );
}

/// Launches that wait for a word run on two numbers of SMs by turns, so that each is behind work of the stream's on the
/// other one.
#[test]
fn what_going_to_other_sms_costs_is_measured() {
    both(
        what_going_to_other_sms_costs_is_measured,
        &limiting(),
        |device| {
            let held = begin(device);
            let stream = held.device.stream(1);
            until_it_counts(|| {
                held.device.set(held.count, 0, 1);
                held.word.store(0, SeqCst);
                (0..4).for_each(|_| held.launch(stream));
                held.word.store(1, SeqCst);
                held.device.sync(stream);
                assert_eq!(held.device.read(held.count, 1), [4 * held.blocks]);
            });
        },
        |core| {
            core.warm_up("held");
            until_limited(core, "limited?");
            let turn = AtomicU32::new(0);
            core.policy(move |request, name| match request.flags & CAN_LIMIT {
                CAN_LIMIT if name == "held" => match turn.fetch_add(1, SeqCst) % 2 {
                    0 => Answer::SmLimited(1),
                    _ => Answer::SmLimited(u32::MAX),
                },
                _ => Answer::Whole,
            });
            for round in 1.. {
                core.expect("go");
                core.say("on");
                core.expect("done");
                let costs = &core.region().limit_costs;
                let count = costs.count.load(SeqCst);
                if count >= 3 {
                    let latest = costs.latest_ns[..3].iter().map(|ns| ns.load(SeqCst));
                    let latest: Vec<u64> = latest.collect();
                    // The GPU has nothing else to do: what is before takes no part in it.
                    assert!(latest.iter().all(|ns| (1..1_000_000_000).contains(ns)), "{latest:?}");
                    break;
                }
                assert!(round < 1_000, "{count} launches were measured");
                core.say("again");
            }
            core.say("next");
            core.ends(0);
            let report = &core.region().report;
            assert!(report.sm_limit_bytes.load(SeqCst) > 0, "the streams take no memory");
        },
    );
}
