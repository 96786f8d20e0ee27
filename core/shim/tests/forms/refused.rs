//! What is not offered to be transformed, and why.

use crate::governor::Governor;
use crate::governor::SMS;
use crate::loads::{which, written};
use crate::program::{Attribute, Device, THREADS, ask, ok};
use crate::{both, both_under, welcome};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::layout::submission_flags::{CAN_PREEMPT, CAN_PREPARE, CAN_SLICE, COOPERATIVE};
use tally_ipc::layout::{transform_state, whole_because};
use tally_ipc::ring::Answer;
use tally_rewriter::TransformRefusal;

/// A kernel with a variable of its module: two copies of the module would have two.
const GLOBALS: &str = r"
.version 7.0
.target sm_70
.address_size 64
.global .u32 number;
.visible .entry with_global() {
    .reg .b32 %r1;
    mov.u32 %r1, %ctaid.x;
    st.global.u32 [number], %r1;
    ret;
}
";

const PLAIN: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry alone() { ret; }
";

/// Names that say what the kernels do.
const NAMED: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry my_DeviceScan_kernel() { ret; }
.visible .entry ncclDevKernel_mine() { ret; }
.visible .entry cublas_mine() { ret; }
";

#[test]
fn kernels_are_refused_for_the_right_reasons() {
    both(
        kernels_are_refused_for_the_right_reasons,
        &welcome(),
        |device| {
            let globals = device.load(GLOBALS);
            let named = device.load(NAMED);
            for (module, name) in [
                (globals, "with_global"),
                (named, "my_DeviceScan_kernel"),
                (named, "ncclDevKernel_mine"),
                (named, "cublas_mine"),
            ] {
                let f = device.function_of(module, name);
                while crate::program::ask(name) == "again" {
                    ok(device.launch(f, [4, 1, 1], 1, null_mut(), &[]));
                    device.sync(null_mut());
                }
            }
        },
        |core| {
            core.policy(|_, _| Answer::Preemptible(0));
            let why = [
                ("with_global", TransformRefusal::WritableGlobals),
                ("my_DeviceScan_kernel", TransformRefusal::BlocksWaitByName),
                ("ncclDevKernel_mine", TransformRefusal::Communication),
                ("cublas_mine", TransformRefusal::VendorLibrary),
            ];
            for (name, why) in why {
                let mut launches = 0;
                loop {
                    core.expect(name);
                    if core.is_refused(name, why) {
                        break;
                    }
                    assert!(launches < 10_000, "{name}: {:?}", core.state(name));
                    launches += 1;
                    core.say("again");
                }
                core.say("enough");
            }
            core.ends(0);
            assert_eq!(core.counters().refused_kernels.load(SeqCst), 4);
            assert_eq!(core.counters().transformed_kernels.load(SeqCst), 0);
        },
    );
}

/// What forms need is made with the first one, and for each later one if it cannot be made then.
#[test]
fn where_memory_is_full_kernels_run_whole_and_once_it_is_free_others_are_transformed() {
    both(
        where_memory_is_full_kernels_run_whole_and_once_it_is_free_others_are_transformed,
        &welcome(),
        |device| {
            let alone = device.load(PLAIN);
            let cells = device.cells(2);
            let (alloc, free) = (device.cuda.cuMemAlloc_v2, device.cuda.cuMemFree_v2);
            let (mut all, mut bytes) = (Vec::new(), 1 << 28);
            while bytes >= 1 << 12 {
                let mut address = 0;
                // SAFETY: a valid out-pointer.
                match unsafe { alloc(&mut address, bytes) } {
                    0 => all.push(address),
                    _ => bytes /= 2,
                }
            }
            let f = device.function_of(alone, "alone");
            while ask("full") == "again" {
                ok(device.launch(f, [4, 1, 1], 1, null_mut(), &[]));
                device.sync(null_mut());
            }
            // SAFETY: memory of ours.
            all.into_iter().for_each(|address| ok(unsafe { free(address) }));
            device.warm_up_with(|| device.step(&cells, [2, 1, 1], null_mut(), 1, 0));
        },
        |core| {
            core.policy(|request, _| match request.flags & CAN_PREPARE {
                0 => Answer::Whole,
                _ => Answer::Preemptible(0),
            });
            let mut launches = 0;
            loop {
                core.expect("full");
                if core.is_refused("alone", TransformRefusal::OutOfMemory) {
                    break;
                }
                assert!(launches < 10_000, "{:?}", core.state("alone"));
                launches += 1;
                core.say("again");
            }
            core.say("enough");
            core.warm_up("step");
            core.ends(0);
        },
    );
}

const COOPERATIVE_ATTRIBUTE: u32 = 2;
const CLUSTER: u32 = 4;
const PROGRAMMATIC: u32 = 6;
/// What the software device answers.
const INVALID_CLUSTER: i32 = 912;
const PRIORITY: u32 = 8;

fn launch_with(device: &Device, id: u32, value: [u32; 3], grid: u32) -> i32 {
    let cells = device.cells(grid);
    let result = device.step_with(&[Attribute::new(id, &value)], &cells, null_mut(), 1);
    if result == 0 {
        device.check_steps(&cells, &[1]);
    }
    result
}

#[test]
fn where_nothing_is_offered_the_report_says_why() {
    let reasons = [
        ("CUDA_LAUNCH_BLOCKING", "1", whole_because::LAUNCH_BLOCKING),
        ("CUDA_INJECTION64_PATH", "/nowhere/libtool.so", whole_because::INJECTION),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "7", whole_because::FEW_QUEUES),
    ];
    for (variable, value, why) in reasons {
        both_under(
            where_nothing_is_offered_the_report_says_why,
            &[(variable, value)],
            &welcome(),
            |device| {
                let cells = device.cells(4);
                let ks: Vec<u32> = (0..30).collect();
                for k in &ks {
                    device.step(&cells, [4, 1, 1], null_mut(), *k, 50);
                    device.sync(null_mut());
                }
                device.check_steps(&cells, &ks);
            },
            |core| {
                core.answer(Answer::Preemptible(0));
                core.ends(0);
                let offers = CAN_SLICE | CAN_PREEMPT | CAN_PREPARE;
                let requests = core.requests("step");
                assert_eq!(requests.len(), 30, "{variable}");
                assert!(requests.iter().all(|(r, _)| r.flags & offers == 0), "{variable}");
                assert_eq!(core.counters().preemptible.load(SeqCst), 0, "{variable}");
                assert_eq!(core.region().report.whole_because.load(SeqCst), why, "{variable}");
            },
        );
    }
}

#[test]
fn a_debugger_that_attaches_sees_whole_launches() {
    both(
        a_debugger_that_attaches_sees_whole_launches,
        &welcome(),
        |device| {
            device.warm_up();
            let flag: *mut u32 = device.variable("cudbgIpcFlag").cast();
            // SAFETY: as a debugger does: a variable of the driver's, of which it writes the first byte.
            unsafe { flag.cast::<u8>().write_volatile(1) };
            assert_eq!(crate::program::ask("attached"), "on");
            let cells = device.cells(16);
            device.step(&cells, [16, 1, 1], null_mut(), 7, 50);
            device.sync(null_mut());
            device.check_steps(&cells, &[7]);
        },
        |core| {
            core.warm_up("step");
            core.expect("attached");
            let before = core.requests("step").len();
            core.answer(Answer::Preemptible(0));
            core.say("on");
            core.ends(0);
            let offers = CAN_SLICE | CAN_PREEMPT | CAN_PREPARE;
            let after = &core.requests("step")[before..];
            assert_eq!(after.len(), 1);
            assert_eq!(after[0].0.flags & offers, 0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 0);
            assert_eq!(core.region().report.whole_because.load(SeqCst), whole_because::DEBUGGER);
        },
    );
}

#[test]
fn launches_that_cannot_be_repeated_are_not_offered() {
    both(
        launches_that_cannot_be_repeated_are_not_offered,
        &welcome(),
        |device| {
            device.warm_up();
            assert_eq!(crate::program::ask("go"), "on");
            // One block; too many blocks for anything but offsets; then attributes.
            assert_eq!(launch_with(device, PRIORITY, [0; 3], 1), 0);
            assert_eq!(launch_with(device, PROGRAMMATIC, [1, 0, 0], 4), 0);
            assert_eq!(launch_with(device, PROGRAMMATIC, [0, 0, 0], 4), 0);
            assert_eq!(launch_with(device, PRIORITY, [0; 3], 4), 0);
            assert_eq!(launch_with(device, CLUSTER, [1, 1, 1], 4), 0);
            // Not a power of two; the software device has no clusters at all.
            assert!([0, INVALID_CLUSTER].contains(&launch_with(device, CLUSTER, [3, 1, 1], 6)));
            assert_eq!(launch_with(device, COOPERATIVE_ATTRIBUTE, [1, 0, 0], 4), 0);
            let cells = device.cells(4);
            let (k, work) = (1_u32, 0_u32);
            let mut params = [
                (&raw const cells.data).cast_mut().cast(),
                (&raw const cells.counts).cast_mut().cast(),
                (&raw const k).cast_mut().cast(),
                (&raw const work).cast_mut().cast(),
            ];
            let launch = device.cuda.cuLaunchCooperativeKernel;
            // SAFETY: a function and parameters of ours.
            ok(unsafe {
                let (f, params) = (device.function("step"), params.as_mut_ptr());
                launch(f, 4, 1, 1, THREADS, 1, 1, 0, null_mut(), params)
            });
            device.check_steps(&cells, &[1]);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            let before = core.requests("step").len();
            core.answer(Answer::Preemptible(0));
            core.say("on");
            core.ends(0);
            let flags: Vec<_> = core.requests("step")[before..]
                .iter()
                .map(|(r, _)| r.flags & (CAN_SLICE | CAN_PREEMPT | CAN_PREPARE | COOPERATIVE))
                .collect();
            let all = CAN_SLICE | CAN_PREEMPT;
            assert_eq!(flags, [0, 0, all, all, all, 0, COOPERATIVE, COOPERATIVE]);
            assert_eq!(core.state("step").0, transform_state::READY);
            assert_eq!(core.counters().preemptible.load(SeqCst), 3);
            assert_eq!(core.counters().degraded.load(SeqCst), 0);
        },
    );
}

/// The same code under another handle is another load: its form is made anew.
#[test]
fn a_module_that_is_loaded_again_is_made_ready_again() {
    both(
        a_module_that_is_loaded_again_is_made_ready_again,
        &welcome(),
        |device| {
            device.warm_up();
            let cells = device.cells(8);
            for k in 0..20 {
                // SAFETY: a module of ours, not used again.
                ok(unsafe { (device.cuda.cuModuleUnload)(device.module) });
                device.module = null_mut();
                device.reload();
                device.step(&cells, [8, 1, 1], null_mut(), k, 0);
            }
            device.check_steps(&cells, &(0..20).collect::<Vec<_>>());
            device.warm_up();
            assert_eq!(crate::program::ask("go"), "on");
            device.step(&cells, [8, 1, 1], null_mut(), 20, 0);
            device.check_steps(&cells, &(0..=20).collect::<Vec<_>>());
        },
        |core| {
            core.warm_up("step");
            core.warm_up("step");
            core.expect("go");
            core.answer(Answer::Preemptible(0));
            core.say("on");
            core.ends(0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 1);
        },
    );
}

/// Where an SM holds fewer blocks of the transformed kernel, a grid that the GPU would hold at once goes whole.
#[test]
fn what_would_run_at_once_runs_at_once_or_whole() {
    both_under(
        what_would_run_at_once_runs_at_once_or_whole,
        // What `step` has, and no more.
        &[("TALLY_SOFTCUDA_FAULT_OCCUPANCY", "step:24")],
        &welcome(),
        |device| {
            device.warm_up();
            assert_eq!(crate::program::ask("go"), "on");
            for blocks in [SMS, SMS + 1] {
                let cells = device.cells(blocks);
                device.step(&cells, [blocks, 1, 1], null_mut(), 3, 0);
                device.check_steps(&cells, &[3]);
            }
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            let before = core.requests("step").len();
            core.answer(Answer::Preemptible(0));
            core.say("on");
            core.ends(0);
            let requests = core.requests("step");
            let offered = |i: usize| requests[before + i].0.flags & (CAN_PREEMPT | CAN_SLICE) != 0;
            assert_eq!((offered(0), offered(1)), (false, true));
            assert_eq!(core.counters().preemptible.load(SeqCst), 1);
        },
    );
}

/// A device on which transformed kernels go wrong shows it with the kernel whose results are known,
/// and then nothing is transformed there.
#[test]
fn nothing_is_transformed_on_a_device_where_the_known_kernel_goes_wrong() {
    // Of the plain kernel 20 bytes are parameters, of a transformed one more.
    let fault =
        format!("{}:{}", tally_rewriter::proof::NAME, tally_rewriter::proof::PARAMETER_BYTES);
    both_under(
        nothing_is_transformed_on_a_device_where_the_known_kernel_goes_wrong,
        &[("TALLY_SOFTCUDA_FAULT", &fault)],
        &welcome(),
        |device| {
            let cells = device.cells(8);
            let mut steps = 0;
            while crate::program::ask("step") == "again" {
                device.step(&cells, [8, 1, 1], null_mut(), 1, 0);
                device.sync(null_mut());
                steps += 1;
            }
            device.check_steps(&cells, &vec![1; steps]);
        },
        |core| {
            core.policy(|_, _| Answer::Preemptible(0));
            let mut launches = 0;
            loop {
                core.expect("step");
                if core.is_refused("step", TransformRefusal::ResultsDiffer) {
                    break;
                }
                assert!(launches < 10_000, "{:?}", core.state("step"));
                launches += 1;
                core.say("again");
            }
            core.say("enough");
            core.ends(0);
            assert_eq!(core.counters().transformed_kernels.load(SeqCst), 0);
            assert_eq!(core.counters().preemptible.load(SeqCst), 0);
        },
    );
}

/// Parameters of `step`, bytes: its transformed form has more. That one is launched once when it is made, so that the
/// second part of its first launch is the third.
const SECOND_PART: &str = "step:24:3";

#[test]
fn behind_a_part_that_the_driver_refuses_the_rest_goes_in_one_piece() {
    for answer in [Answer::Slice(2), Answer::Preemptible(0)] {
        both_under(
            behind_a_part_that_the_driver_refuses_the_rest_goes_in_one_piece,
            &[("TALLY_SOFTCUDA_FAULT_LAUNCH", SECOND_PART)],
            &welcome(),
            |device| {
                device.warm_up();
                assert_eq!(ask("go"), "on");
                let cells = device.cells(20);
                device.step(&cells, [20, 1, 1], null_mut(), 1, 0);
                device.step(&cells, [20, 1, 1], null_mut(), 2, 0);
                device.check_steps(&cells, &[1, 2]);
            },
            |core| {
                core.warm_up("step");
                core.expect("go");
                core.answer(answer);
                core.say("on");
                core.ends(0);
                let c = core.counters();
                let in_parts = c.sliced.load(SeqCst) + c.preemptible.load(SeqCst);
                assert_eq!((in_parts, c.failed.load(SeqCst)), (2, 0), "{answer:?}");
            },
        );
    }
}

/// As of a whole launch, whose kernel faults after the call has returned.
#[test]
fn a_launch_whose_part_finds_the_context_in_error_is_no_failed_call() {
    both_under(
        a_launch_whose_part_finds_the_context_in_error_is_no_failed_call,
        &[("TALLY_SOFTCUDA_FAULT_LAUNCH", &format!("{SECOND_PART}:fatal"))],
        &welcome(),
        |device| {
            device.warm_up();
            let cells = device.cells(20);
            assert_eq!(ask("go"), "on");
            device.step(&cells, [20, 1, 1], null_mut(), 1, 0);
            // SAFETY: no arguments.
            assert_eq!(unsafe { (device.cuda.cuCtxSynchronize)() }, 719);
        },
        |core| {
            core.warm_up("step");
            core.expect("go");
            core.answer(Answer::Slice(2));
            core.say("on");
            core.ends(0);
            let c = core.counters();
            assert_eq!((c.sliced.load(SeqCst), c.failed.load(SeqCst)), (1, 0));
        },
    );
}

/// Launch a kernel of a module until it is refused; what it computes is right.
fn launch_until_refused(device: &Device) {
    let cells = device.cells(8);
    let mut steps = 0;
    while crate::program::ask("step") == "again" {
        device.step(&cells, [8, 1, 1], null_mut(), 1, 0);
        device.sync(null_mut());
        steps += 1;
    }
    device.check_steps(&cells, &vec![1; steps]);
}

/// Ask for its form until it is refused.
fn refuses(core: &mut Governor, kernel: &str, why: TransformRefusal) {
    refuses_for(core, kernel, &[why]);
}

/// The same, for any of these reasons.
fn refuses_for(core: &mut Governor, kernel: &str, reasons: &[TransformRefusal]) {
    core.policy(|_, _| Answer::Preemptible(0));
    let mut launches = 0;
    loop {
        core.expect("step");
        if reasons.iter().any(|why| core.is_refused(kernel, *why)) {
            break;
        }
        assert!(launches < 10_000, "{:?}", core.state(kernel));
        launches += 1;
        core.say("again");
    }
    core.say("enough");
    core.ends(0);
    assert_eq!(core.counters().transformed_kernels.load(SeqCst), 0);
}

#[test]
fn without_memory_for_a_rewrite_a_kernel_runs_whole() {
    both_under(
        without_memory_for_a_rewrite_a_kernel_runs_whole,
        // A thread whose arena was reserved before would find room in that.
        &[("MALLOC_ARENA_MAX", "1")],
        &welcome(),
        |device| {
            // What the launches take was allocated by then.
            let cells = device.cells(8);
            device.step(&cells, [8, 1, 1], null_mut(), 1, 0);
            device.check_steps(&cells, &[1]);
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
            let limit = pages * 4_096 + (8 << 20);
            let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
            setrlimit(Resource::As, limit).unwrap();
            launch_until_refused(device);
        },
        // Whose allocation fails first, the shim's or the driver's, is chance.
        |core| {
            let reasons = [TransformRefusal::HostMemory, TransformRefusal::DriverRefused];
            refuses_for(core, "step", &reasons);
        },
    );
}

/// For a filter that ends the process where it opens a file, starts a thread or connects.
#[test]
fn behind_a_seccomp_filter_the_shim_makes_no_new_kind_of_call() {
    both_under(
        behind_a_seccomp_filter_the_shim_makes_no_new_kind_of_call,
        // The software device's threads would open a file when they first allocate, and it starts more of them at any
        // time unless it has one SM.
        &[("MALLOC_ARENA_MAX", "1"), ("TALLY_SOFTCUDA_SMS", "1")],
        &welcome(),
        |device| {
            // All that it has run by then.
            let cells = device.cells(256);
            for _ in 0..5 {
                device.step(&cells, [256, 1, 1], null_mut(), 1, 0);
                device.sync(null_mut());
            }
            forbid(&[
                libc::SYS_open,
                libc::SYS_openat,
                libc::SYS_clone,
                libc::SYS_clone3,
                libc::SYS_socket,
                libc::SYS_connect,
            ]);
            ask("shut in");
            launch_until_refused(device);
        },
        |core| {
            core.expect("shut in");
            core.say("on");
            refuses(core, "step", TransformRefusal::Sandboxed);
        },
    );
}

/// For a filter that ends the process where it reads its own memory through the system.
#[test]
fn behind_a_seccomp_filter_code_is_loaded_as_it_comes() {
    both(
        behind_a_seccomp_filter_code_is_loaded_as_it_comes,
        &welcome(),
        |device| {
            device.warm_up();
            forbid(&[libc::SYS_process_vm_readv]);
            let module = device.load(&which(7, 0));
            assert_eq!(written(device, device.function_of(module, "which"), 1), [7]);
            let library = device.library_of(&which(8, 0));
            assert_eq!(written(device, device.kernel_of(library, "which"), 1), [8]);
        },
        |core| {
            core.warm_up("step");
            core.ends(0);
        },
    );
}

/// Have all threads of this process end it by one of these calls.
fn forbid(calls: &[i64]) {
    const NUMBER: u32 = 0;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, NUMBER)];
    for call in calls {
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, *call as u32));
        filter.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: a filter of this length, which is copied.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
        assert_eq!(libc::syscall(libc::SYS_seccomp, mode, flags, &program), 0);
    }
}
