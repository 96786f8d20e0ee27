//! What units of work of a high-priority program do on the GPU reaches the core.

use crate::governor::{Governor, SMS};
use crate::program::{Device, ask, ok, wait_for};
use crate::{both, welcome};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tally_contract::unit_profile::UnitProfile;
use tally_ipc::wire::Welcome;

type Ptr = *mut std::ffi::c_void;

/// `tell`: each thread takes some turns of a loop, then counts itself in a word of the host's.
const PTX: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry tell(.param .u64 p_word, .param .u64 p_turns) {
    .reg .pred %p<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p_word];
    ld.param.u64 %rd2, [p_turns];
turn:
    setp.eq.u64 %p1, %rd2, 0;
    @%p1 bra done;
    sub.u64 %rd2, %rd2, 1;
    bra turn;
done:
    red.global.add.u32 [%rd1], 1;
    ret;
}
";
/// Threads of a block of which an SM of the software device holds two.
const THREADS: u32 = 1_024;
/// Blocks of a unit's launches.
const BLOCKS: [u32; 3] = [1, 3, 8];
/// With so many a launch takes milliseconds: a busy machine may see its end late.
const LONG: u64 = 400;
/// Among so many units is one that is profiled.
const ONE_IN: u32 = 129;
/// So often 128 units, after which a profile has come, if not every one was disturbed.
const ROUNDS: u32 = 60;
/// As often by two threads.
const TWO_THREADS_ROUNDS: u32 = 8;

fn high() -> Welcome {
    Welcome { high_priority: true, ..welcome() }
}

struct Told<'a> {
    device: &'a Device,
    kernel: usize,
    word: &'static AtomicU32,
}

impl<'a> Told<'a> {
    fn new(device: &'a Device) -> Self {
        let kernel = device.function_of(device.load(PTX), "tell") as usize;
        Told { device, kernel, word: &device.words()[0] }
    }

    fn launch(&self, blocks: u32, turns: u64, stream: Ptr) {
        let params = [std::ptr::from_ref(self.word) as u64, turns];
        ok(self.device.launch(self.kernel as Ptr, [blocks, 1, 1], THREADS, stream, &params));
    }

    /// The program sees each launch end before it makes the next one, and waits at the end.
    fn unit(&self, stream: Ptr, turns: u64, between: impl Fn()) {
        self.word.store(0, SeqCst);
        let mut threads = 0;
        for (n, more) in BLOCKS.into_iter().enumerate() {
            if n > 0 {
                between();
            }
            threads += more * THREADS;
            self.launch(more, turns, stream);
            wait_for(self.word, threads);
        }
        self.device.sync(stream);
    }
}

/// Blocks of `tell` that an SM holds, by the driver.
fn blocks_per_sm(told: &Told<'_>) -> i32 {
    let mut blocks = 0;
    let occupancy = told.device.cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor;
    // SAFETY: a valid out-pointer, a function of ours.
    ok(unsafe { occupancy(&mut blocks, told.kernel as Ptr, THREADS as i32, 0) });
    blocks
}

/// Units until the core has seen a profile of one. The first two are profiled, and then one of each 128: the first of
/// them, or the one before it if a unit went with a context.
fn until_profiled(told: &Told<'_>) {
    while ask("units") == "again" {
        for at in 0..128 {
            if (2..126).contains(&at) {
                told.launch(1, 0, null_mut());
                told.device.sync(null_mut());
            } else {
                told.unit(null_mut(), LONG, || std::thread::sleep(Duration::from_millis(1)));
            }
        }
    }
}

/// The core's part of it: a profile of one of the long units. On a busy machine a short one may be profiled instead, or
/// a gap be missed because the end before it was seen late.
fn profile(core: &mut Governor) -> UnitProfile {
    let mut seen = 0;
    for _ in 0..ROUNDS {
        core.expect("units");
        if let Some((sequence, profile)) = core.region().marks.profile.read(seen) {
            if (profile.launches, profile.gaps) == (3, 2) {
                core.say("enough");
                return profile;
            }
            seen = sequence;
        }
        core.say("again");
    }
    panic!("no long unit was profiled");
}

#[test]
fn a_profiled_unit_tells_its_launches_their_gaps_and_the_sms_that_they_fill() {
    both(
        a_profiled_unit_tells_its_launches_their_gaps_and_the_sms_that_they_fill,
        &high(),
        |device| {
            let told = Told::new(device);
            ask(&blocks_per_sm(&told).to_string());
            until_profiled(&told);
        },
        |core: &mut Governor| {
            core.grant_all();
            let each: u32 = core.hear().parse().unwrap();
            core.say("on");
            let profile = profile(core);
            core.ends(0);
            assert_eq!((profile.launches, profile.gaps), (3, 2));
            let needed = BLOCKS.map(|blocks| blocks.div_ceil(each).min(SMS));
            assert_eq!(profile.sms_max, needed[2]);
            assert!((needed[0]..=needed[2]).contains(&profile.sms_mean), "{profile:?}");
            assert!(profile.gpu_busy_ns > 0 && profile.gap_median_ns > 0, "{profile:?}");
            assert_eq!(profile.gap_median_ns + profile.gap_longest_ns, profile.gaps_ns);
        },
    );
}

/// Its events are gone with the context: nobody asks for them, and the next unit has others.
#[test]
fn a_context_that_ends_takes_its_profiled_unit_with_it() {
    both(
        a_context_that_ends_takes_its_profiled_unit_with_it,
        &high(),
        |device| {
            let told = Told::new(device);
            told.launch(1, 50 * LONG, null_mut());
            device.destroy_context();
            device.new_context();
            until_profiled(&Told::new(device));
        },
        |core: &mut Governor| {
            core.grant_all();
            let profile = profile(core);
            core.ends(0);
            assert_eq!((profile.launches, profile.gaps), (3, 2));
        },
    );
}

/// Units of two threads, of which either may be the one that is profiled; then one thread's alone.
#[test]
fn units_of_two_threads_are_not_taken_for_one() {
    both(
        units_of_two_threads_are_not_taken_for_one,
        &high(),
        |device| {
            let told = Told::new(device);
            let streams = [device.stream(1) as usize, device.stream(1) as usize];
            while ask("units of two") == "again" {
                std::thread::scope(|scope| {
                    for (stream, launches) in streams.into_iter().zip([1, 2]) {
                        let told = &told;
                        scope.spawn(move || {
                            told.device.enter();
                            for _ in 0..128 {
                                (0..launches).for_each(|_| told.launch(1, LONG, stream as Ptr));
                                told.device.sync(stream as Ptr);
                            }
                        });
                    }
                });
            }
            until_profiled(&told);
        },
        |core: &mut Governor| {
            core.grant_all();
            let mut seen = 0;
            for round in 0..TWO_THREADS_ROUNDS {
                core.expect("units of two");
                if let Some((sequence, profile)) = core.region().marks.profile.read(seen) {
                    seen = sequence;
                    assert!([1, 2].contains(&profile.launches), "{profile:?}");
                }
                core.say(if round + 1 < TWO_THREADS_ROUNDS { "again" } else { "enough" });
            }
            profile(core);
            core.ends(0);
        },
    );
}

/// Whatever a unit does that cannot be measured: it gives no profile, and the program goes on.
#[test]
fn a_unit_that_cannot_be_measured_gives_no_profile() {
    both(
        a_unit_that_cannot_be_measured_gives_no_profile,
        &high(),
        |device| {
            let told = Told::new(device);
            let streams = [device.stream(1), device.stream(1)];
            for _ in 0..2 * ONE_IN {
                for stream in streams {
                    told.launch(1, 0, stream);
                }
                // SAFETY: no arguments.
                ok(unsafe { (device.cuda.cuCtxSynchronize)() });
            }
            assert_eq!(ask("two streams"), "on");
            for _ in 0..ONE_IN {
                for _ in 0..tally_ipc::marks::PROFILED_LAUNCHES_MAX + 1 {
                    told.launch(1, 0, streams[0]);
                }
                device.sync(streams[0]);
            }
            assert_eq!(ask("too many"), "on");
            // It waits for the legacy stream, and that for it; an event would, too.
            let blocking = device.stream(0);
            told.launch(1, 0, blocking);
            device.sync(blocking);
            for _ in 0..2 * ONE_IN {
                told.unit(null_mut(), 0, || ());
            }
            assert_eq!(ask("beside a blocking stream"), "on");
        },
        |core: &mut Governor| {
            core.grant_all();
            for what in ["two streams", "too many", "beside a blocking stream"] {
                core.expect(what);
                assert_eq!(core.region().marks.profile.read(0), None, "{what}");
                core.say("on");
            }
            core.ends(0);
        },
    );
}
