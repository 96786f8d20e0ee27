//! What is never launched on some of the SMs, and ends that come while forms are made.

use crate::common::{PATIENCE, eventually};
use crate::forms::until_limited;
use crate::governor::{Governor, SMS};
use crate::program::{Device, ask, ok, say, wait_for};
use crate::{both, both_under, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;
use tally_ipc::layout::submission_flags::{CAN_LIMIT, CAN_PREPARE, LEASED};
use tally_ipc::layout::transform_state;
use tally_ipc::ring::{Answer, Request};
use tally_ipc::wire::{RewriteSettings, SharingMode, Welcome};
use tally_rewriter::TransformRefusal;

/// More blocks than the device runs at once.
pub fn crowd(device: &Device) -> u32 {
    device.crowd.max(200)
}

pub fn limiting() -> Welcome {
    let rewrite = RewriteSettings { reserve_sms: vec![1], ..welcome().rewrite };
    Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() }
}

fn is_offered(core: &Governor, kernel: &str) -> bool {
    core.requests(kernel).iter().any(|(request, _)| request.flags & CAN_LIMIT != 0)
}

#[test]
fn a_kernel_that_reads_its_sm_is_never_limited() {
    const READS: [(&str, &str); 2] = [("smid", "reads_smid"), ("nsmid", "reads_nsmid")];
    let ptx = |(register, name): (&str, &str)| {
        format!(
            ".version 7.0
.target sm_70
.address_size 64
.visible .entry {name}(.param .u64 p_out) {{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_out];
    mov.u32 %r1, %{register};
    st.global.u32 [%rd1], %r1;
    ret;
}}
"
        )
    };
    both(
        a_kernel_that_reads_its_sm_is_never_limited,
        &limiting(),
        |device| {
            device.primary_context();
            let (crowd, out) = (crowd(device), device.memory(1));
            let kernels = READS.map(|read| device.function_of(device.load(&ptx(read)), read.1));
            let launch = || {
                for kernel in kernels {
                    ok(device.launch(kernel, [crowd, 1, 1], 1, null_mut(), &[out]));
                }
                device.sync(null_mut());
            };
            device.warm_up();
            while ask("ready?") == "no" {
                launch();
            }
            // Another kernel of as many blocks is limited all the while.
            while ask("limited?") == "no" {
                device.step(&device.cells(crowd), [crowd, 1, 1], null_mut(), 1, 0);
                launch();
            }
        },
        |core| {
            core.warm_up("step");
            core.policy(|request, _| match request.flags & CAN_PREPARE {
                0 => Answer::Whole,
                _ => Answer::Preemptible(0),
            });
            let start = Instant::now();
            loop {
                core.expect("ready?");
                let states = READS.map(|(_, name)| core.state(name).0);
                let are_ready = states == [transform_state::READY; 2];
                core.say(if are_ready { "yes" } else { "no" });
                if are_ready {
                    break;
                }
                assert!(start.elapsed() < PATIENCE, "{states:?}");
            }
            until_limited(core, "limited?");
            core.ends(0);
            assert!(is_offered(core, "step"));
            for (_, name) in READS {
                assert!(!is_offered(core, name), "{name}");
            }
        },
    );
}

#[test]
fn leased_launches_have_the_clients_width_once_their_kernel_was_limited() {
    const LEASED_ALL: u64 = 1_000_000;
    both(
        leased_launches_have_the_clients_width_once_their_kernel_was_limited,
        &limiting(),
        |device| {
            device.primary_context();
            device.warm_up();
            let (crowd, few) = (crowd(device), SMS.min(4));
            let (cells, few_cells) = (device.cells(crowd), device.cells(few));
            let mut ks = Vec::new();
            for question in ["offered?", "undecided?", "limited?", "leased?", "whole?", "decided?"]
            {
                while ask(question) == "no" {
                    ks.push(ks.len() as u32);
                    device.step(&cells, [crowd, 1, 1], null_mut(), ks[ks.len() - 1], 0);
                    device.step(&few_cells, [few, 1, 1], null_mut(), ks[ks.len() - 1], 0);
                    device.sync(null_mut());
                }
            }
            device.check_steps(&cells, &ks);
            device.check_steps(&few_cells, &ks);
        },
        |core| {
            core.warm_up("step");
            let ten_times = |core: &mut Governor, question: &str| {
                let before = (core.requests("step").len(), core.counters().sm_limited.load(SeqCst));
                for round in 0..=10 {
                    core.expect(question);
                    core.say(if round < 10 { "no" } else { "yes" });
                }
                let limited = core.counters().sm_limited.load(SeqCst) - before.1;
                (core.requests("step").split_off(before.0), limited)
            };
            let asked_for = |requests: &[(Request, Answer)]| {
                let leased = requests.iter().filter(|(request, _)| request.flags & LEASED != 0);
                let sms: Vec<u32> = leased.map(|(request, _)| request.limited_sms).collect();
                (sms.len(), sms.iter().filter(|sms| **sms == 1).count())
            };
            for round in 0.. {
                assert!(round < 10_000, "it is never offered");
                core.expect("offered?");
                let is = is_offered(core, "step");
                core.say(if is { "yes" } else { "no" });
                if is {
                    break;
                }
            }
            core.lease(LEASED_ALL, 1);
            let (requests, limited) = ten_times(core, "undecided?");
            assert_eq!((asked_for(&requests), limited), ((20, 0), 0), "the core may know why not");
            core.lease(0, 1);
            until_limited(core, "limited?");
            core.lease(LEASED_ALL, 1);
            let (requests, limited) = ten_times(core, "leased?");
            assert_eq!(
                (asked_for(&requests), limited),
                ((20, 20), 20),
                "those that fit, too: read"
            );
            core.lease(LEASED_ALL, 0);
            let (requests, limited) = ten_times(core, "whole?");
            assert_eq!((asked_for(&requests), limited), ((20, 0), 0));
            let are_offered = requests.iter().any(|(request, _)| request.flags & CAN_LIMIT != 0);
            assert!(!are_offered, "nobody decides about them: the driver is not asked");
            core.lease(0, 0);
            let (requests, _) = ten_times(core, "decided?");
            assert!(requests.iter().all(|(request, _)| request.flags & CAN_LIMIT != 0));
            core.ends(0);
        },
    );
}

/// A launch on some of the SMs is made in another stream, without them.
#[test]
fn a_launch_in_a_stream_with_attributes_is_never_limited() {
    const ACCESS_WINDOW: u32 = 1;
    both(
        a_launch_in_a_stream_with_attributes_is_never_limited,
        &limiting(),
        |device| {
            device.primary_context();
            let (plain, hinted) = (device.stream(1), device.stream(1));
            let cells = device.cells(crowd(device));
            let (lo, hi) = (cells.data as u32, (cells.data >> 32) as u32);
            let mut window = [0; 16];
            window[..7].copy_from_slice(&[lo, hi, 64, 0, 1.0_f32.to_bits(), 2, 1]);
            device.step(&device.cells(2), [2, 1, 1], hinted, 1, 0);
            // SAFETY: a stream of ours; a value of this length.
            ok(unsafe { (device.cuda.cuStreamSetAttribute)(hinted, ACCESS_WINDOW, &window) });
            device.warm_up();
            let mut steps = Vec::new();
            // The core tells them by their shape.
            while ask("limited?") == "no" {
                for (stream, grid) in
                    [(plain, [cells.blocks, 1, 1]), (hinted, [1, cells.blocks, 1])]
                {
                    device.step(&cells, grid, stream, 1, 0);
                    device.sync(stream);
                    steps.push(1);
                }
            }
            device.check_steps(&cells, &steps);
        },
        |core| {
            core.warm_up("step");
            until_limited(core, "limited?");
            core.ends(0);
            let is_offered = |is_hinted: bool| {
                let mut all = core.requests("step").into_iter().map(|(request, _)| request);
                all.any(|r| (r.grid[1] > 1) == is_hinted && r.flags & CAN_LIMIT != 0)
            };
            assert_eq!([is_offered(false), is_offered(true)], [true, false]);
        },
    );
}

/// On the software device blocks of streams of higher priority are dispatched first.
#[test]
fn a_limited_launch_has_the_priority_of_its_stream() {
    const ROUNDS_MAX: u32 = 100;
    both(
        a_limited_launch_has_the_priority_of_its_stream,
        &limiting(),
        |device| {
            device.primary_context();
            let crowd = crowd(device);
            let [low, high] = [0, -1].map(|priority| device.stream_of_priority(priority));
            let [long, short] = [(); 2].map(|()| device.cells(crowd));
            device.warm_up();
            let begun = || device.read(long.counts, crowd as usize).iter().sum::<u32>();
            for round in 0.. {
                device.step(&long, [crowd, 1, 1], low, 1, 10_000);
                while begun() == round * crowd {
                    std::thread::yield_now();
                }
                device.step(&short, [crowd, 1, 1], high, 1, 0);
                device.sync(high);
                // What of the long one was not begun when the short one, launched behind it, had ended.
                let left = (round + 1) * crowd - begun();
                device.sync(low);
                if ask(&left.to_string()) == "end" {
                    break;
                }
            }
        },
        |core| {
            core.warm_up("step");
            core.answer(Answer::SmLimited(u32::MAX));
            let (mut limited, mut round) = (0, 0);
            loop {
                round += 1;
                assert!(round < ROUNDS_MAX, "it was never dispatched first");
                let left: u32 = core.hear().parse().unwrap();
                let before =
                    std::mem::replace(&mut limited, core.counters().sm_limited.load(SeqCst));
                // Without a priority only those that run, one on each SM, are not over.
                let is_first = limited == before + 2 && left > 4 * SMS;
                core.say(if is_first { "end" } else { "again" });
                if is_first {
                    break;
                }
            }
            core.ends(0);
        },
    );
}

/// It takes the ten seconds that such a launch is given.
#[test]
fn a_kernel_that_does_not_end_on_some_of_the_sms_is_not_limited_again() {
    const KERNEL: &str = "unseen";
    both(
        a_kernel_that_does_not_end_on_some_of_the_sms_is_not_limited_again,
        &limiting(),
        |device| {
            device.primary_context();
            let (words, kernel) = (device.words(), device.function(KERNEL));
            let crowd = crowd(device);
            let cells = device.cells(crowd);
            let launch = || {
                let params = [cells.data, cells.counts, words.as_ptr() as u64];
                ok(device.launch(kernel, [crowd, 1, 1], 1, null_mut(), &params));
            };
            words[1].store(1, SeqCst);
            device.warm_up_with(|| {
                launch();
                device.sync(null_mut());
            });
            while ask("limited?") == "no" {
                launch();
                device.sync(null_mut());
            }
            words[0].store(0, SeqCst);
            words[1].store(0, SeqCst);
            device.set(cells.counts, 0, crowd as usize + 1);
            assert_eq!(ask("once more"), "on");
            launch();
            wait_for(&words[0], 1);
            // SAFETY: the legacy stream.
            assert_eq!(unsafe { (device.cuda.cuStreamQuery)(null_mut()) }, 600, "it does not end");
            assert_eq!(ask("stuck"), "go on");
            words[1].store(1, SeqCst);
            device.sync(null_mut());
            // All of its blocks have run, and once.
            device.check_words(cells.counts, &vec![1; crowd as usize]);
            launch();
            device.sync(null_mut());
            say("again");
        },
        |core| {
            core.warm_up(KERNEL);
            until_limited(core, "limited?");
            core.expect("once more");
            core.answer(Answer::SmLimited(u32::MAX));
            let limited = core.counters().sm_limited.load(SeqCst);
            core.say("on");
            core.expect("stuck");
            assert_eq!(core.counters().sm_limited.load(SeqCst), limited + 1);
            eventually("it is refused", || core.is_refused(KERNEL, TransformRefusal::StuckLimited));
            core.say("go on");
            core.expect("again");
            core.ends(0);
            assert_eq!(core.counters().sm_limited.load(SeqCst), limited + 1);
            let (last, _) = *core.requests(KERNEL).last().unwrap();
            assert_eq!(last.flags & CAN_LIMIT, 0);
        },
    );
}

/// Limited to SMs that such a launch has filled, it would never begin, and the host may wait for it.
#[test]
fn beside_one_that_may_wait_for_the_host_on_as_many_sms_nothing_is_limited() {
    both(
        beside_one_that_may_wait_for_the_host_on_as_many_sms_nothing_is_limited,
        &limiting(),
        |device| {
            device.primary_context();
            let (holding, beside) = (device.stream(1), device.stream(1));
            let (words, later) = (device.words(), device.function("later"));
            // As many as the green context has SMs. An SM of the software device runs one to its end.
            let blocks = if device.is_gpu() { device.crowd / 4 } else { SMS - 1 };
            let held = device.cells(blocks);
            let hold = || {
                let params = [held.data, held.counts, words.as_ptr() as u64];
                ok(device.launch(later, [blocks, 1, 1], 1, holding, &params));
            };
            words[1].store(1, SeqCst);
            hold();
            device.sync(holding);
            device.warm_up();
            let cells = device.cells(crowd(device));
            let mut steps = Vec::new();
            let mut until = |question| {
                while ask(question) == "no" {
                    device.step(&cells, [cells.blocks, 1, 1], beside, 1, 0);
                    device.sync(beside);
                    steps.push(1);
                }
            };
            until("limited?");
            device.set(held.counts, 0, blocks as usize + 1);
            words.iter().take(2).for_each(|word| word.store(0, SeqCst));
            hold();
            wait_for(&words[0], 1);
            until("whole?");
            words[1].store(1, SeqCst);
            device.sync(holding);
            until("limited again?");
            device.check_steps(&cells, &steps);
        },
        |core| {
            core.warm_up("step");
            until_limited(core, "limited?");
            core.policy(|_, name| match name {
                "step" => Answer::SmLimited(u32::MAX),
                _ => Answer::Whole,
            });
            let mut ten_times = |question| {
                let before = core.requests("step").len();
                for round in 0..=10 {
                    core.expect(question);
                    core.say(if round < 10 { "no" } else { "yes" });
                }
                let asked = core.requests("step").split_off(before);
                asked.iter().filter(|(request, _)| request.flags & CAN_LIMIT != 0).count()
            };
            assert_eq!([ten_times("whole?"), ten_times("limited again?")], [0, 10]);
            core.ends(0);
        },
    );
}

/// The program exits as soon as the thread that makes forms has begun.
fn exits_while_making(core: &mut Governor) {
    core.warm_up("step");
    core.policy(|request, name| match request.flags & CAN_PREPARE {
        0 => Answer::Whole,
        _ if name == "sum" => Answer::Preemptible(0),
        _ => Answer::Whole,
    });
    core.expect("go");
    core.say("on");
    let is_making = |core: &Governor| core.state("sum").0 == transform_state::PREPARING;
    eventually("a form is made", || is_making(core));
    core.expect("making");
    core.say("exit");
    core.ends(9);
}

#[test]
fn a_program_that_exits_while_a_form_waits_for_an_idle_context_ends() {
    both(
        a_program_that_exits_while_a_form_waits_for_an_idle_context_ends,
        &welcome(),
        |device| {
            device.warm_up();
            let (words, cells, sum) = (device.words(), device.cells(2), device.memory(2));
            let (busy, other) = (device.stream(1), device.stream(1));
            assert_eq!(ask("go"), "on");
            // It runs until the host says so, which it never does.
            let params = [cells.data, cells.counts, words.as_ptr() as u64];
            ok(device.launch(device.function("later"), [2, 1, 1], 1, busy, &params));
            for _ in 0..2 {
                let params = [sum, cells.counts, 1];
                ok(device.launch(device.function("sum"), [2, 1, 1], 1, other, &params));
            }
            assert_eq!(ask("making"), "exit");
            // As a program's own exit: destructors and exit handlers run.
            std::process::exit(9);
        },
        exits_while_making,
    );
}

#[test]
fn a_program_that_exits_while_the_driver_loads_a_form_ends() {
    both_under(
        a_program_that_exits_while_the_driver_loads_a_form_ends,
        // Next to it all else in the making of a form is short.
        &[("TALLY_SOFTCUDA_LOAD_MS", "400")],
        &welcome(),
        |device| {
            device.warm_up();
            // An image of its own: its form is loaded by itself.
            let module = device.load(&crate::kernels::another_image());
            let (cells, sum, kernel) =
                (device.cells(2), device.memory(2), device.function_of(module, "sum"));
            assert_eq!(ask("go"), "on");
            for _ in 0..2 {
                ok(device.launch(kernel, [2, 1, 1], 1, null_mut(), &[sum, cells.counts, 1]));
                device.sync(null_mut());
            }
            assert_eq!(ask("making"), "exit");
            std::process::exit(9);
        },
        exits_while_making,
    );
}
