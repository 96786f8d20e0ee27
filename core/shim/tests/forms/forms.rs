//! Every form gives the memory of a whole run, and each block runs exactly once.

use crate::governor::{Governor, SMS};
use crate::program::{Device, Ptr, THREADS, ok};
use crate::{both, welcome};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::submission_flags::{CAN_LIMIT, CAN_PREEMPT, CAN_PREPARE, CAN_SLICE};
use tally_ipc::layout::transform_state;
use tally_ipc::ring::{Answer, Request};
use tally_ipc::wire::{RewriteSettings, SharingMode, Welcome};
use tally_rewriter::TransformRefusal;

const FORMS: u32 = CAN_SLICE | CAN_PREEMPT | CAN_LIMIT | CAN_PREPARE;

#[test]
fn what_is_offered_grows_as_it_is_asked_for() {
    both(
        what_is_offered_grows_as_it_is_asked_for,
        &welcome(),
        |device| {
            let cells = device.cells(8);
            for _ in 0..3 {
                device.step(&cells, [8, 1, 1], null_mut(), 1, 0);
            }
            device.warm_up();
            device.step(&cells, [8, 1, 1], null_mut(), 2, 0);
            device.check_steps(&cells, &[1, 1, 1, 2]);
        },
        |core| {
            core.expect("ready?");
            let before: Vec<_> =
                core.requests("step").iter().map(|(r, _)| r.flags & FORMS).collect();
            assert_eq!(before, [0, CAN_PREPARE, CAN_PREPARE], "not before it was looked at");
            assert_eq!(core.state("step"), (transform_state::PREPARABLE, 0));
            assert_eq!(core.counters().transformed_kernels.load(SeqCst), 0, "nobody asked yet");
            core.say("no");
            core.warm_up("step");
            let detail = transform_state::SLICEABLE | transform_state::PREEMPTIBLE;
            assert_eq!(core.state("step"), (transform_state::READY, detail));
            core.ends(0);
            let (last, _) = *core.requests("step").last().unwrap();
            assert_eq!(last.flags & FORMS, CAN_SLICE | CAN_PREEMPT);
            let c = core.counters();
            let done = [
                &c.transformed_kernels,
                &c.refused_kernels,
                &c.preemptible,
                &c.sliced,
                &c.degraded,
            ];
            assert_eq!(done.map(|n| n.load(SeqCst)), [1, 0, 0, 0, 0]);
        },
    );
}

/// Grids of one to three dimensions.
const GRIDS: [[u32; 3]; 5] = [[2, 1, 1], [33, 1, 1], [64, 3, 1], [7, 5, 3], [1, 1, 100]];

#[test]
fn slices_and_preemptible_launches_are_whole_runs() {
    both(
        slices_and_preemptible_launches_are_whole_runs,
        &welcome(),
        |device| {
            device.warm_up();
            let cells = GRIDS.map(|grid| device.cells(grid.iter().product()));
            let stream = device.stream(1);
            let mut ks: [Vec<u32>; GRIDS.len()] = Default::default();
            while let Ok(at) = crate::program::ask("next").parse::<usize>() {
                let k = 1 + ks[at].len() as u32 * 7;
                ks[at].push(k);
                device.step(&cells[at], GRIDS[at], stream, k, 0);
                device.sync(stream);
                device.check_steps(&cells[at], &ks[at]);
            }
        },
        |core| {
            core.warm_up("step");
            let answers = [
                Answer::Slice(0),
                Answer::Slice(1),
                Answer::Slice(7),
                Answer::Slice(64),
                Answer::Slice(u32::MAX),
                Answer::Preemptible(0),
                Answer::Preemptible(1),
                Answer::Preemptible(u32::MAX),
            ];
            core.expect("next");
            let count = |core: &Governor| {
                let c = core.counters();
                c.sliced.load(SeqCst) + c.preemptible.load(SeqCst)
            };
            for answer in answers {
                core.answer(answer);
                for at in 0..GRIDS.len() {
                    let before = count(core);
                    // Where there is no room for more parts a launch is whole.
                    for tries in 0.. {
                        core.say(&at.to_string());
                        core.expect("next");
                        if count(core) > before {
                            break;
                        }
                        assert!(tries < 1_000, "{answer:?} {at}");
                    }
                }
            }
            core.say("end");
            core.ends(0);
            let c = core.counters();
            for zero in [&c.degraded, &c.rescued, &c.launches_yielded, &c.failed] {
                assert_eq!(zero.load(SeqCst), 0);
            }
        },
    );
}

#[test]
fn large_grids_are_sliced_by_offset_once_that_form_is_made() {
    // Above the claim table only offsets serve; between, either.
    const BLOCKS: [u32; 2] = [17 * 1024, 256 * 1024 + 3];
    both(
        large_grids_are_sliced_by_offset_once_that_form_is_made,
        &welcome(),
        |device| {
            device.warm_up();
            let cells = BLOCKS.map(|blocks| device.cells(blocks));
            let mut steps = 0;
            while crate::program::ask("next") == "on" {
                steps += 1;
                for (cells, blocks) in cells.iter().zip(BLOCKS) {
                    device.step(cells, [blocks, 1, 1], null_mut(), 5, 0);
                    device.check_steps(cells, &vec![5; steps]);
                }
            }
        },
        |core| {
            core.warm_up("step");
            core.answer(Answer::Slice(10_000));
            // The first launch asks for the form; then the worker makes it.
            let mut rounds = 0;
            let offered = loop {
                core.expect("next");
                let asked = core.requests("step");
                let last = asked.last().map_or(0, |(r, _)| r.flags & FORMS);
                if rounds > 0 && last != 0 {
                    break asked[asked.len() - 2..].iter().map(|(r, _)| r.flags & FORMS).collect();
                }
                rounds += 1;
                // A round takes the CPU that the worker needs.
                std::thread::sleep(std::time::Duration::from_millis(200));
                core.say("on");
            };
            let offered: Vec<u32> = offered;
            core.say("end");
            core.ends(0);
            assert_eq!(offered, [CAN_SLICE | CAN_PREEMPT, CAN_SLICE], "too large to claim");
            // One of each round could be sliced all the time, the other in the last.
            assert_eq!(core.counters().sliced.load(SeqCst), rounds + 1);
            // Not the very first one.
            let by_offset = core.counters().sliced_by_offset.load(SeqCst);
            assert!((1..rounds + 1).contains(&by_offset), "{by_offset} of {rounds} rounds");
        },
    );
}

#[test]
fn a_preemptible_launch_of_many_short_blocks_goes_in_slices_by_offset() {
    const BLOCKS: u32 = 17 * 1024;
    both(
        a_preemptible_launch_of_many_short_blocks_goes_in_slices_by_offset,
        &welcome(),
        |device| {
            device.warm_up();
            let cells = device.cells(BLOCKS);
            let mut steps = 0;
            while crate::program::ask("next") == "on" {
                steps += 1;
                device.step(&cells, [BLOCKS, 1, 1], null_mut(), 5, 0);
                device.check_steps(&cells, &vec![5; steps]);
            }
        },
        |core| {
            core.warm_up("step");
            let counts = |core: &Governor| {
                let c = core.counters();
                [&c.preemptible, &c.sliced, &c.sliced_by_offset, &c.degraded]
                    .map(|n| n.load(SeqCst))
            };
            // Expected to take so long, us, that its blocks exit in less, or unknown: it claims.
            core.expect("next");
            for us in [70, 0] {
                core.answer(Answer::Preemptible(us));
                core.say("on");
                core.expect("next");
            }
            assert_eq!(counts(core), [2, 0, 0, 0]);
            // They take longer. The first launch asks for the form by offset; until it is made, they claim.
            core.answer(Answer::Preemptible(60));
            let mut claiming = 2;
            let asked = std::time::Instant::now();
            while counts(core)[2] == 0 {
                assert!(asked.elapsed() < std::time::Duration::from_secs(60), "{:?}", counts(core));
                claiming = counts(core)[0];
                // A round takes the CPU that the worker needs.
                std::thread::sleep(std::time::Duration::from_millis(200));
                core.say("on");
                core.expect("next");
            }
            assert!(claiming > 2, "the form by offset is not made ahead of a launch that wants it");
            for _ in 0..3 {
                core.say("on");
                core.expect("next");
            }
            assert_eq!(counts(core), [claiming, 4, 4, 0], "none claims from then on");
            // What is not worth it still claims.
            core.answer(Answer::Preemptible(70));
            core.say("on");
            core.expect("next");
            assert_eq!(counts(core), [claiming + 1, 4, 4, 0]);
            core.say("end");
            core.ends(0);
        },
    );
}

/// More blocks than a GPU holds at once.
const CROWD: u32 = 16 * 1024;
/// As many as the software device holds.
const FEW: u32 = SMS;

#[test]
fn some_of_the_sms() {
    let welcome = Welcome {
        sharing: SharingMode::Unmanaged,
        rewrite: RewriteSettings { reserve_sms: vec![1, 2], ..welcome().rewrite },
        ..welcome()
    };
    both(
        some_of_the_sms,
        &welcome,
        |device| {
            // Green contexts are parts of the primary one.
            device.primary_context();
            device.warm_up();
            let (a, b) = (device.stream(0), device.stream(1));
            let (cells, few) = (device.cells(CROWD), device.cells(FEW));
            let mut ks = Vec::new();
            while crate::program::ask("width?") != "end" {
                for (i, stream) in [a, b, null_mut()].into_iter().enumerate() {
                    ks.push(ks.len() as u32);
                    device.step(&cells, [CROWD, 1, 1], stream, ks[ks.len() - 1], 0);
                    device.step(&few, [FEW, 1, 1], stream, ks[ks.len() - 1], 0);
                    if i > 0 {
                        device.sync(stream);
                    }
                    device.sync(a);
                }
                device.check_steps(&cells, &ks);
                device.check_steps(&few, &ks);
            }
        },
        |core| {
            core.warm_up("step");
            let (mut sm_limited, mut rounds) = (0, 0);
            for sms in [SMS - 1, SMS - 2, 1, 0, u32::MAX] {
                loop {
                    rounds += 1;
                    assert!(rounds < 10_000, "no width came");
                    core.expect("width?");
                    core.answer(Answer::SmLimited(sms));
                    core.say("on");
                    let now = core.counters().sm_limited.load(SeqCst);
                    if now > sm_limited {
                        sm_limited = now;
                        break;
                    }
                }
            }
            core.expect("width?");
            core.say("end");
            core.ends(0);
            let c = core.counters();
            assert_eq!((c.degraded.load(SeqCst), c.failed.load(SeqCst)), (0, 0));
            let of_few = |(r, _): &&(Request, Answer)| r.grid[0] == FEW;
            let offered =
                core.requests("step").iter().filter(of_few).any(|(r, _)| r.flags & CAN_LIMIT != 0);
            assert!(offered, "its code was read: its blocks do not wait for one another");
        },
    );
}

/// Answer a program's question with "no" until one of its launches was limited to some of the SMs.
pub fn until_limited(core: &mut crate::governor::Governor, question: &str) {
    core.answer(Answer::SmLimited(u32::MAX));
    for round in 0.. {
        assert!(round < 10_000, "no width came");
        core.expect(question);
        let is_limited = core.counters().sm_limited.load(SeqCst) > 0;
        core.say(if is_limited { "yes" } else { "no" });
        if is_limited {
            break;
        }
    }
    core.answer(Answer::Whole);
}

/// Kernels whose blocks may wait for one another, as far as their code tells, and ask for a special register.
fn that_may_wait(kernels: &[(&str, &str)]) -> String {
    let mut text = String::from(".version 7.0\n.target sm_70\n.address_size 64\n");
    for (name, register) in kernels {
        text += &format!(
            ".visible .entry {name}(.param .u64 p_out) {{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_out];
    ld.volatile.global.u32 %r1, [%rd1];
    mov.u32 %r2, %{register};
    st.global.u32 [%rd1+4], %r2;
    ret;
}}
"
        );
    }
    text
}

/// Kernels of a library, and of the program, by names that say little of where they are from.
const OF_LIBRARY: [(&str, &str); 2] = [("gemv_of_a_library", "tid.x"), ("gemv_that_asks", "smid")];
const OF_PROGRAM: [(&str, &str); 3] =
    [("gemv_of_the_program", "tid.x"), ("dot_kernel", "tid.x"), ("cublas_mine", "tid.x")];

/// Kernels of a closed library and of the program that may wait: which are SM-limited, once `refused` says
/// that each has been refused for its reason.
fn limited_although_they_may_wait<T>(
    test: T,
    reads_closed: bool,
    refused: impl Fn(&str) -> TransformRefusal,
) -> Option<Vec<String>> {
    let rewrite = RewriteSettings {
        vendor_libraries: reads_closed,
        reserve_sms: vec![1],
        ..welcome().rewrite
    };
    let welcome = Welcome { sharing: SharingMode::Unmanaged, rewrite, ..welcome() };
    let names = || OF_LIBRARY.iter().chain(&OF_PROGRAM).map(|(name, _)| *name);
    let mut found = None;
    both(
        test,
        &welcome,
        |device| {
            device.primary_context();
            let out = device.memory(2);
            let of_library = device.load_in_library(&that_may_wait(&OF_LIBRARY), "libcublas.so.0");
            let own = device.load(&that_may_wait(&OF_PROGRAM));
            let of = |module, all: &[(&str, &str)]| -> Vec<_> {
                all.iter().map(|(name, _)| device.function_of(module, name)).collect()
            };
            let kernels = [of(of_library, &OF_LIBRARY), of(own, &OF_PROGRAM)].concat();
            device.warm_up();
            while crate::program::ask("again?") == "yes" {
                for kernel in &kernels {
                    ok(device.launch(*kernel, [CROWD, 1, 1], 1, null_mut(), &[out]));
                    ok(device.launch(*kernel, [FEW, 1, 1], 1, null_mut(), &[out]));
                }
                // Ordinary code is limited all the while.
                device.step(&device.cells(CROWD), [CROWD, 1, 1], null_mut(), 1, 0);
                device.sync(null_mut());
            }
        },
        |core| {
            core.warm_up("step");
            core.policy(|request, _| match request.flags {
                flags if flags & CAN_LIMIT != 0 => Answer::SmLimited(SMS - 1),
                flags if flags & CAN_PREPARE != 0 => Answer::Preemptible(0),
                _ => Answer::Whole,
            });
            // Until all have been refused, and then for two rounds in which some are limited.
            let mut limited = Vec::new();
            let mut rounds = 0;
            while limited.len() < 3 {
                rounds += 1;
                assert!(
                    rounds < 10_000,
                    "{:?}",
                    names().map(|n| core.state(n)).collect::<Vec<_>>()
                );
                if names().all(|name| core.is_refused(name, refused(name))) {
                    limited.push(core.counters().sm_limited.load(SeqCst));
                    limited.dedup();
                }
                core.expect("again?");
                core.say("yes");
            }
            core.expect("again?");
            core.say("no");
            core.ends(0);
            let is_limited = |name: &&str| {
                core.requests(name).iter().any(|(request, _)| request.flags & CAN_LIMIT != 0)
            };
            let of_few = |name: &str| {
                let all = core.requests(name).into_iter().map(|(request, _)| request);
                all.filter(|r| r.grid[0] == FEW).any(|r| r.flags & CAN_LIMIT != 0)
            };
            assert!(!names().any(of_few), "blocks that fit the whole GPU at once may wait");
            found = Some(names().filter(is_limited).map(str::to_owned).collect());
        },
    );
    found
}

#[test]
fn of_kernels_that_may_wait_only_closed_libraries_are_limited() {
    let refused = |_: &str| TransformRefusal::BlocksMayWait;
    let test = of_kernels_that_may_wait_only_closed_libraries_are_limited;
    let limited = limited_although_they_may_wait(test, true, refused);
    assert_eq!(limited.unwrap(), ["gemv_of_a_library"], "one that asks for its SM is not, either");
}

#[test]
fn closed_libraries_that_nobody_reads_are_told_by_their_file() {
    let refused = |name: &str| match name {
        "gemv_of_the_program" | "dot_kernel" => TransformRefusal::BlocksMayWait,
        _ => TransformRefusal::VendorLibrary,
    };
    let test = closed_libraries_that_nobody_reads_are_told_by_their_file;
    let limited = limited_although_they_may_wait(test, false, refused);
    assert_eq!(limited.unwrap(), OF_LIBRARY.map(|(name, _)| name), "by its name none is");
}

#[test]
fn parameters_come_through_either_way() {
    both(
        parameters_come_through_either_way,
        &welcome(),
        |device| {
            device.warm_up();
            let nothing = device.function("nothing");
            device.warm_up_with(|| ok(device.launch(nothing, [4, 1, 1], 1, null_mut(), &[])));
            let cells = device.cells(16);
            let step = device.function("step");
            assert_eq!(crate::program::ask("go"), "on");
            // As one buffer: two addresses, two words.
            let mut buffer = [0_u8; 24];
            buffer[..8].copy_from_slice(&cells.data.to_le_bytes());
            buffer[8..16].copy_from_slice(&cells.counts.to_le_bytes());
            buffer[16..20].copy_from_slice(&9_u32.to_le_bytes());
            let mut size = buffer.len();
            let mut extra = [
                std::ptr::without_provenance_mut(1),
                buffer.as_mut_ptr().cast(),
                std::ptr::without_provenance_mut(2),
                (&raw mut size).cast(),
                null_mut(),
            ];
            let launch = device.cuda.cuLaunchKernel;
            // SAFETY: a function of ours, its parameters in a buffer.
            ok(unsafe {
                launch(step, 16, 1, 1, THREADS, 1, 1, 0, null_mut(), null_mut(), extra.as_mut_ptr())
            });
            device.check_steps(&cells, &[9]);
            ok(device.launch(nothing, [4, 1, 1], 1, null_mut(), &[]));
            // SAFETY: a function without parameters needs no list of them.
            ok(unsafe { launch(nothing, 4, 1, 1, 1, 1, 1, 0, null_mut(), null_mut(), null_mut()) });
            device.sync(null_mut());
        },
        |core| {
            core.warm_up("step");
            core.warm_up("nothing");
            core.expect("go");
            core.answer(Answer::Preemptible(0));
            core.say("on");
            core.ends(0);
            let c = core.counters();
            assert_eq!((c.preemptible.load(SeqCst), c.degraded.load(SeqCst)), (3, 0));
        },
    );
}

/// Launch the kernel of this name, which writes to its shared memory at `at`, and what is there to `data`.
pub fn through_shared(
    device: &Device,
    f: Ptr,
    blocks: u32,
    bytes: u32,
    (data, at): (u64, u64),
    stream: Ptr,
) -> i32 {
    let mut params = [(&raw const data).cast_mut().cast(), (&raw const at).cast_mut().cast()];
    let launch = device.cuda.cuLaunchKernel;
    // SAFETY: a function and parameters of ours.
    unsafe { launch(f, blocks, 1, 1, 1, 1, 1, bytes, stream, params.as_mut_ptr(), null_mut()) }
}

#[test]
fn more_shared_memory_than_the_default() {
    const BYTES: u32 = 96 << 10;
    both(
        more_shared_memory_than_the_default,
        &welcome(),
        |device| {
            let (f, data) = (device.function("through_shared"), device.memory(8));
            let at = u64::from(BYTES) - 4;
            let launch =
                |bytes: u32, at: u64| through_shared(device, f, 8, bytes, (data, at), null_mut());
            // Set before its transformed form is made, and after.
            device.allow(f, 64 << 10);
            device.warm_up_with(|| ok(launch(64 << 10, 0)));
            assert_eq!(crate::program::ask("go"), "on");
            ok(launch(64 << 10, (64 << 10) - 4));
            device.allow(f, BYTES);
            ok(launch(BYTES, at));
            assert_eq!(device.read(data, 8), (7..15).collect::<Vec<u32>>());
            assert_ne!(launch(BYTES + 1, at), 0, "the original's bound holds");
            device.allow(f, 64 << 10);
            assert_ne!(launch(BYTES, at), 0, "and is lowered");
        },
        |core| {
            core.warm_up("through_shared");
            core.expect("go");
            core.answer(Answer::Preemptible(0));
            core.say("on");
            core.ends(0);
            let c = core.counters();
            assert_eq!((c.preemptible.load(SeqCst), c.degraded.load(SeqCst)), (2, 2));
        },
    );
}

/// The forms of one image serve both loads of it, as long as the attributes of their functions are the same.
#[test]
fn a_second_load_of_an_image_keeps_its_own_attributes() {
    const LESS: u32 = 64 << 10;
    const MORE: u32 = 96 << 10;
    both(
        a_second_load_of_an_image_keeps_its_own_attributes,
        &welcome(),
        |device| {
            let first = device.function("through_shared");
            device.reload();
            let (second, data, at) = (device.function("through_shared"), device.memory(8), 0_u64);
            let launch = |f, bytes| through_shared(device, f, 8, bytes, (data, at), null_mut());
            device.allow(first, LESS);
            device.warm_up_with(|| ok(launch(first, LESS)));
            let is_transformed = |f, bytes| {
                let before: u32 = crate::program::ask("count").parse().unwrap();
                ok(launch(f, bytes));
                crate::program::ask("count").parse::<u32>().unwrap() > before
            };
            assert!(is_transformed(first, LESS));
            assert_ne!(launch(second, LESS), 0, "it may not have so much");
            assert!(!is_transformed(second, 4 << 10), "it has another bound");
            device.allow(second, LESS);
            assert!(is_transformed(second, LESS), "the same bound");
            assert!(is_transformed(second, LESS));
            device.allow(second, MORE);
            assert!(!is_transformed(second, MORE));
            assert_ne!(launch(first, MORE), 0, "the first may not have more for that");
            device.allow(first, MORE);
            assert!(is_transformed(first, MORE) && is_transformed(second, MORE));
        },
        |core| {
            core.warm_up("through_shared");
            core.answer(Answer::Preemptible(0));
            // Two questions for each of seven launches.
            for _ in 0..14 {
                core.expect("count");
                let count = core.counters().preemptible.load(SeqCst);
                core.say(&count.to_string());
            }
            core.ends(0);
        },
    );
}
