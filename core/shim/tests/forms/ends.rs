//! Contexts that end by other calls than `cuCtxDestroy`. The software device ends a program that uses what is gone.

use crate::common::eventually;
use crate::program::{Cells, Cuda, Device, Ptr, ask, hear, ok, say};
use crate::{both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::wire::{RewriteSettings, SharingMode, Welcome};

/// What is gone is not used: not even where the driver would only answer with an error.
const STRICT: (&str, &str) = ("TALLY_SOFTCUDA_STRICT", "1");
const BLOCKS: u32 = 2;
/// Launches whose events are on their way when a context ends.
const LAUNCHES: u32 = 20;

/// Launches that end when the host says so.
struct Held {
    words: &'static [std::sync::atomic::AtomicU32; 16],
    cells: Cells,
}

impl Held {
    /// To be made before anything is held: making memory waits for the default stream.
    fn new(device: &Device) -> Held {
        Held { words: device.words(), cells: device.cells(BLOCKS) }
    }

    fn launch(&self, device: &Device, stream: Ptr) {
        let later = device.function("later");
        let params = [self.cells.data, self.cells.counts, self.words.as_ptr() as u64];
        for _ in 0..LAUNCHES {
            ok(device.launch(later, [BLOCKS, 1, 1], 1, stream, &params));
        }
    }

    fn end(&self) {
        self.words[1].store(1, SeqCst);
    }
}

/// A green context of so many SMs of the primary context, and its handle as a context.
fn green(device: &Device, sms: u32) -> (Ptr, Ptr) {
    let (mut all, mut part, mut rest) = ([0; 36], [0; 36], [0; 36]);
    let (mut count, mut description) = (1, null_mut());
    let (mut green, mut context) = (null_mut(), null_mut());
    let cuda = &device.cuda;
    // SAFETY: valid out-pointers, and what they were filled with.
    unsafe {
        ok((cuda.cuDeviceGetDevResource)(0, &mut all, 1));
        ok((cuda.cuDevSmResourceSplitByCount)(&mut part, &mut count, &all, &mut rest, 0, sms));
        ok((cuda.cuDevResourceGenerateDesc)(&mut description, &mut part, 1));
        ok((cuda.cuGreenCtxCreate)(&mut green, description, 0, 1));
        ok((cuda.cuCtxFromGreenCtx)(&mut context, green));
    }
    (green, context)
}

/// Whether the primary context is there.
fn is_primary_active(device: &Device) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: valid out-pointers.
    ok(unsafe { (device.cuda.cuDevicePrimaryCtxGetState)(0, &mut flags, &mut active) });
    active != 0
}

/// Make a context current to this thread.
fn set_current(device: &Device, context: Ptr) {
    // SAFETY: a context of ours.
    ok(unsafe { (device.cuda.cuCtxSetCurrent)(context) });
}

/// What all of these tests end with: the core learns that everything is done, and hears of nothing that is gone.
fn all_is_reported(core: &mut crate::governor::Governor) {
    core.expect("done");
    for _ in 0..20 {
        core.probe();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    eventually("everything is reported done", || core.is_idle());
    core.say("on");
    core.ends(0);
    assert_eq!(core.counters().failed.load(SeqCst), 0);
}

/// Launch in a live context once more.
fn goes_on(device: &Device) {
    let (cells, stream) = (device.cells(16), device.stream(1));
    device.step(&cells, [16, 1, 1], stream, 1, 10);
    device.sync(stream);
    device.check_steps(&cells, &[1]);
}

#[test]
fn a_green_context_may_end_while_its_streams_work() {
    both_under(
        a_green_context_may_end_while_its_streams_work,
        &[STRICT],
        &welcome(),
        |device| {
            device.primary_context();
            let (green, context) = green(device, 2);
            let mut inside = null_mut();
            // SAFETY: a valid out-pointer, a green context of ours.
            ok(unsafe { (device.cuda.cuGreenCtxStreamCreate)(&mut inside, green, 1, 0) });
            set_current(device, context);
            // Made there, by the call for any context.
            let created = device.stream(1);
            let held = [(); 4].map(|()| Held::new(device));
            for (held, stream) in held.iter().zip([inside, created, null_mut()]) {
                held.launch(device, stream);
            }
            // A GPU's driver (580) has no per-thread stream in a green context: it says 400.
            if !device.is_gpu() {
                held[3].launch(&device.per_thread_launch(), null_mut());
            }
            assert_eq!(ask("launched"), "on");
            // SAFETY: a green context of ours.
            ok(unsafe { (device.cuda.cuGreenCtxDestroy)(green) });
            held.iter().for_each(Held::end);
            set_current(device, device.context);
            goes_on(device);
            say("done");
            hear();
            for stream in [inside, created] {
                // SAFETY: a stream of ours. On the software device it outlives its green context; a GPU's driver says
                // 709.
                let destroyed = unsafe { (device.cuda.cuStreamDestroy_v2)(stream) };
                assert_eq!(destroyed, if device.is_gpu() { 709 } else { 0 });
            }
        },
        |core| {
            core.expect("launched");
            // All streams are looked at before and after.
            core.probe();
            core.say("on");
            all_is_reported(core);
        },
    );
}

#[test]
fn a_primary_context_ends_with_the_last_green_one() {
    let rewrite = RewriteSettings { reserve_sms: vec![1], ..welcome().rewrite };
    let welcome = Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() };
    both_under(
        a_primary_context_ends_with_the_last_green_one,
        &[STRICT],
        &welcome,
        |device| {
            let first = device.context;
            device.primary_context();
            let (green, context) = green(device, 2);
            // Until there are widths: they hold references, too.
            device.warm_up();
            while ask("widths?") == "no" {
                device.step(&device.cells(device.crowd), [device.crowd, 1, 1], null_mut(), 1, 0);
                device.sync(null_mut());
            }
            // SAFETY: references of ours are given up.
            unsafe {
                ok((device.cuda.cuDevicePrimaryCtxRelease_v2)(0));
                assert!(is_primary_active(device), "the green context holds it");
                goes_on(device);
                set_current(device, context);
                let held = Held::new(device);
                held.launch(device, null_mut());
                held.end();
                ok((device.cuda.cuGreenCtxDestroy)(green));
            }
            assert!(!is_primary_active(device));
            set_current(device, first);
            device.context = first;
            device.reload();
            goes_on(device);
            say("done");
            hear();
        },
        |core| {
            core.warm_up("step");
            crate::forms::until_limited(core, "widths?");
            all_is_reported(core);
        },
    );
}

#[test]
fn a_context_ends_with_its_last_detach() {
    both_under(
        a_context_ends_with_its_last_detach,
        &[STRICT],
        &welcome(),
        |device| {
            device.warm_up();
            let mut same = null_mut();
            let [held, more] = [(); 2].map(|()| Held::new(device));
            // SAFETY: a valid out-pointer; the context is ours.
            unsafe {
                ok((device.cuda.cuCtxAttach)(&mut same, 0));
                held.launch(device, device.stream(1));
                ok((device.cuda.cuCtxDetach)(device.context));
                // It lives: what is in it is known as before.
                goes_on(device);
                assert_eq!(ask("lives"), "on");
                more.launch(device, null_mut());
                held.end();
                more.end();
                ok((device.cuda.cuCtxDetach)(device.context));
            }
            device.new_context();
            device.warm_up();
            goes_on(device);
            say("done");
            hear();
        },
        |core| {
            core.warm_up("step");
            core.expect("lives");
            assert_eq!(core.state("step").0, tally_ipc::layout::transform_state::READY);
            core.probe();
            core.say("on");
            core.warm_up("step");
            all_is_reported(core);
        },
    );
}

/// The driver makes green contexts in the primary context only, and keeps that for as long as they are there.
#[test]
fn a_program_with_a_context_of_its_own_gets_no_primary_one() {
    let rewrite = RewriteSettings { reserve_sms: vec![1], ..welcome().rewrite };
    let welcome = Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() };
    both_under(
        a_program_with_a_context_of_its_own_gets_no_primary_one,
        &[STRICT],
        &welcome,
        |device| {
            // Long after the first launch, behind which green contexts would be made.
            device.warm_up();
            for _ in 0..20 {
                goes_on(device);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            assert!(!is_primary_active(device));
            device.destroy_context();
            assert!(!is_primary_active(device));
        },
        |core| {
            core.warm_up("step");
            core.ends(0);
        },
    );
}

/// Who waits to make green contexts in a context that has ended makes none in a later one of the same handle: those
/// that are not known would keep it.
#[test]
fn a_primary_context_ends_however_often_green_ones_were_to_be_made() {
    let rewrite = RewriteSettings { reserve_sms: vec![1], ..welcome().rewrite };
    let welcome = Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() };
    both_under(
        a_primary_context_ends_however_often_green_ones_were_to_be_made,
        &[STRICT],
        &welcome,
        |device| {
            let first = device.context;
            let ends = |device: &mut Device| {
                set_current(device, first);
                // SAFETY: a reference of ours is given up.
                ok(unsafe { (device.cuda.cuDevicePrimaryCtxRelease_v2)(0) });
                is_primary_active(device)
            };
            let step = |device: &Device, stream| {
                let cells = device.cells(4);
                device.step(&cells, [4, 1, 1], stream, 1, 0);
                std::thread::sleep(std::time::Duration::from_millis(10));
            };
            let mut active = Vec::new();
            for _ in 0..4 {
                device.primary_context();
                let (held, stream) = (Held::new(device), device.stream(1));
                let cells = device.cells(4);
                // The context is not idle while a maker looks at it.
                held.launch(device, device.stream(1));
                for _ in 0..6 {
                    device.step(&cells, [4, 1, 1], stream, 1, 0);
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                held.end();
                device.sync(stream);
                active.push(ends(device));
            }
            device.primary_context();
            let until = std::time::Instant::now() + std::time::Duration::from_secs(4);
            while std::time::Instant::now() < until {
                step(device, null_mut());
                device.sync(null_mut());
            }
            active.push(ends(device));
            assert_eq!(active, [false; 5]);
            device.context = first;
        },
        |core| core.ends(0),
    );
}

/// Runs both at once, on a thread each, in which `context` is current.
fn at_once(cuda: Cuda, context: Ptr, works: [&(dyn Fn() + Sync); 2]) {
    let context = context as usize;
    // A thread that sleeps would come too late.
    let ready = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for work in works {
            scope.spawn(|| {
                // SAFETY: a context of ours, or none.
                ok(unsafe { (cuda.cuCtxSetCurrent)(context as Ptr) });
                ready.fetch_add(1, SeqCst);
                while ready.load(SeqCst) < 2 {
                    std::hint::spin_loop();
                }
                work();
            });
        }
    });
}

/// In a context that is made anew `rounds` times and ends by `end`, what it had is gone.
fn goes_on_in_each(
    device: &mut Device,
    rounds: u32,
    make: impl Fn(&mut Device),
    end: impl Fn(&Device),
) {
    let first = device.context;
    for _ in 0..rounds {
        make(device);
        goes_on(device);
        set_current(device, null_mut());
        end(device);
    }
    device.context = first;
    set_current(device, first);
    device.reload();
    goes_on(device);
}

fn retain(cuda: Cuda) {
    let mut context = null_mut();
    // SAFETY: a valid out-pointer.
    ok(unsafe { (cuda.cuDevicePrimaryCtxRetain)(&mut context, 0) });
}

fn release(cuda: Cuda) {
    // SAFETY: a reference of ours is given up.
    ok(unsafe { (cuda.cuDevicePrimaryCtxRelease_v2)(0) });
}

#[test]
fn threads_that_give_up_the_last_references_at_once_end_the_context() {
    both_under(
        threads_that_give_up_the_last_references_at_once_end_the_context,
        &[STRICT],
        &welcome(),
        |device| {
            let make = |device: &mut Device| {
                device.primary_context();
                retain(device.cuda);
            };
            goes_on_in_each(device, 300, make, |device| {
                let cuda = device.cuda;
                at_once(cuda, null_mut(), [&|| release(cuda), &|| release(cuda)]);
                assert!(!is_primary_active(device));
            });
            // One that is taken as soon as the last was given up is of a new context.
            goes_on_in_each(device, 300, Device::primary_context, |device| {
                let cuda = device.cuda;
                at_once(cuda, null_mut(), [&|| release(cuda), &|| retain(cuda)]);
                release(cuda);
                assert!(!is_primary_active(device));
            });
            say("done");
            hear();
        },
        all_is_reported,
    );
}

#[test]
fn threads_that_detach_at_once_end_the_context() {
    both_under(
        threads_that_detach_at_once_end_the_context,
        &[STRICT],
        &welcome(),
        |device| {
            let make = |device: &mut Device| {
                device.new_context();
                let mut same = null_mut();
                // SAFETY: a valid out-pointer.
                ok(unsafe { (device.cuda.cuCtxAttach)(&mut same, 0) });
            };
            goes_on_in_each(device, 300, make, |device| {
                let (cuda, context) = (device.cuda, device.context as usize);
                // SAFETY: a reference of ours is given up.
                let detach = || ok(unsafe { (cuda.cuCtxDetach)(context as Ptr) });
                at_once(cuda, device.context, [&detach, &detach]);
            });
            say("done");
            hear();
        },
        all_is_reported,
    );
}
