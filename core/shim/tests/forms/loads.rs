//! Images that change while they are loaded, files that are none, and callers that cannot be unwound.

use crate::program::{Device, Ptr, ask, ok};
use crate::{Governor, both, welcome};
use std::ffi::{CStr, CString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;
use tally_ipc::layout::submission_flags::{CAN_PREPARE, CAN_SLICE};
use tally_ipc::ring::Answer;
use tally_rewriter::TransformRefusal;
use tally_rewriter::fatbin::{self, Kind};

const BLOCKS: u32 = 24;

/// Each block writes `number`. The padding makes a load take a while.
pub fn which(number: u32, padding: usize) -> String {
    format!(
        ".version 7.0
.target sm_70
.address_size 64
.visible .entry which(.param .u64 p_out) {{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p_out];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    mov.u32 %r2, {number};
    st.global.u32 [%rd1], %r2;
    ret;
}}
// {}
",
        "x".repeat(padding)
    )
}

/// The numbers that the blocks of some launches wrote.
pub fn written(device: &Device, f: Ptr, launches: u32) -> Vec<u32> {
    let out = device.memory(BLOCKS as usize);
    let mut all = Vec::new();
    for _ in 0..launches {
        ok(device.launch(f, [BLOCKS, 1, 1], 1, null_mut(), &[out]));
        device.sync(null_mut());
        all.extend(device.read(out, BLOCKS as usize));
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// The same kernel and another one before it.
fn two(number: u32) -> String {
    which(number, 0) + ".visible .entry another() { ret; }\n"
}

/// Two images of which each has `which`, told into one array: the second has fewer kernels, so that the array keeps one
/// of the first's behind its own. What was in the array before is no handle at all.
fn one_array_for_two(
    device: &Device,
    images: [Ptr; 2],
    enumerate: unsafe extern "C" fn(*mut Ptr, u32, Ptr) -> i32,
    name: unsafe extern "C" fn(*mut *const i8, Ptr) -> i32,
) {
    const ROOM: usize = 8;
    let mut all: [Ptr; ROOM] = std::array::from_fn(|at| std::ptr::without_provenance_mut(16 + at));
    let tell = |all: &mut [Ptr; ROOM], image| {
        // SAFETY: an image of ours, an array of so many entries.
        ok(unsafe { enumerate(all.as_mut_ptr(), ROOM as u32, image) });
    };
    tell(&mut all, images[0]);
    let is_which = |f: &Ptr| {
        let mut text = std::ptr::null();
        // SAFETY: a handle that the driver wrote; a valid out-pointer; a NUL-terminated name.
        unsafe {
            ok(name(&mut text, *f));
            std::ffi::CStr::from_ptr(text) == c"which"
        }
    };
    let at = all[..2].iter().position(is_which).unwrap();
    // Where the second image has none.
    all.swap(at, 1);
    let first = all[1];
    tell(&mut all, images[1]);
    let second = all[0];
    assert_eq!(all[1], first);
    for (f, number) in [(first, 1111), (second, 2222)] {
        while ask("again?") == "yes" {
            assert_eq!(written(device, f, 4), [number]);
        }
        assert_eq!(written(device, f, 4), [number]);
    }
}

#[test]
fn kernels_that_are_told_in_a_used_array_keep_their_code() {
    both(
        kernels_that_are_told_in_a_used_array_keep_their_code,
        &welcome(),
        |device| {
            let cuda = device.cuda;
            let images = [two(1111), which(2222, 0)];
            let libraries = images.each_ref().map(|ptx| device.library_of(ptx));
            let names = cuda.cuKernelGetName;
            one_array_for_two(device, libraries, cuda.cuLibraryEnumerateKernels, names);
            // Other images: those have forms by now.
            let modules = images.map(|ptx| device.load(&(ptx + "// once more\n")));
            let names = cuda.cuFuncGetName;
            one_array_for_two(device, modules, cuda.cuModuleEnumerateFunctions, names);
        },
        |core| {
            core.policy(|request, _| match request.flags & (CAN_PREPARE | CAN_SLICE) {
                0 => Answer::Whole,
                _ => Answer::Slice(5),
            });
            // Four kernels, each until a launch of it was transformed.
            for kernel in 1..=4 {
                let before = core.counters().sliced.load(SeqCst);
                for asked in 0.. {
                    core.expect("again?");
                    // The last launch of the kernel before may be counted late.
                    let is_transformed = core.counters().sliced.load(SeqCst) > before
                        && core.counters().transformed_kernels.load(SeqCst) >= kernel;
                    assert!(asked < 5_000, "no launch of kernel {kernel} was transformed");
                    core.say(if is_transformed { "no" } else { "yes" });
                    if is_transformed {
                        break;
                    }
                }
            }
            core.ends(0);
            assert_eq!(core.counters().transformed_kernels.load(SeqCst), 4);
        },
    );
}

#[test]
fn launches_go_on_while_a_form_is_compiled() {
    let test = launches_go_on_while_a_form_is_compiled;
    // A compiler that ends only once so many launches were made meanwhile.
    crate::disk_cache::transforms(
        test,
        &[("TALLY_SOFTCUDA_COMPILE_LAUNCHES", "step:20")],
        &welcome(),
    );
}

#[test]
fn an_image_that_changes_while_it_is_loaded_is_one_code() {
    both(
        an_image_that_changes_while_it_is_loaded_is_one_code,
        &welcome(),
        |device| {
            let file = tempfile::tempfile().unwrap();
            let text = which(1111, 200_000);
            let at = text.find("1111").unwrap() as u64;
            file.write_all_at(text.as_bytes(), 0).unwrap();
            file.set_len(text.len() as u64 + 1).unwrap();
            let length = text.len() + 1;
            // SAFETY: a new shared mapping of the file.
            let image = unsafe {
                use std::os::fd::AsRawFd;
                let fd = file.as_raw_fd();
                libc::mmap(null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, fd, 0)
            };
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for number in ["2222", "1111"].iter().cycle() {
                        file.write_all_at(number.as_bytes(), at).unwrap();
                        std::thread::sleep(Duration::from_micros(300));
                        if stop.load(SeqCst) {
                            return;
                        }
                    }
                });
                for _ in 0..6 {
                    let mut module = null_mut();
                    // SAFETY: a valid out-pointer; text with a NUL.
                    ok(unsafe { (device.cuda.cuModuleLoadData)(&mut module, image.cast()) });
                    let f = device.function_of(module, "which");
                    let mut numbers = Vec::new();
                    while ask("again?") == "yes" {
                        numbers.extend(written(device, f, 4));
                    }
                    numbers.extend(written(device, f, 20));
                    numbers.dedup();
                    assert!(matches!(numbers[..], [1111 | 2222]), "{numbers:?}");
                    // SAFETY: a module of ours.
                    ok(unsafe { (device.cuda.cuModuleUnload)(module) });
                }
                stop.store(true, SeqCst);
            });
        },
        |core| {
            core.policy(|request, _| match request.flags & (CAN_PREPARE | CAN_SLICE) {
                0 => Answer::Whole,
                _ => Answer::Slice(5),
            });
            let mut sliced = 0;
            for module in 0..6 {
                // Until a launch of this module was transformed.
                for asked in 0.. {
                    core.expect("again?");
                    let now = core.counters().sliced.load(SeqCst);
                    let is_transformed = now > sliced;
                    sliced = now;
                    assert!(asked < 5_000, "no launch of module {module} was transformed");
                    core.say(if is_transformed { "no" } else { "yes" });
                    if is_transformed {
                        break;
                    }
                }
            }
            core.ends(0);
        },
    );
}

fn load_file(device: &Device, path: &Path, as_library: bool) -> i32 {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let (mut handle, none) = (null_mut(), null_mut());
    // SAFETY: a valid out-pointer; a path; no options.
    unsafe {
        if as_library {
            (device.cuda.cuLibraryLoadFromFile)(
                &mut handle,
                path.as_ptr(),
                none,
                none,
                0,
                none,
                none,
                0,
            )
        } else {
            (device.cuda.cuModuleLoad)(&mut handle, path.as_ptr())
        }
    }
}

const INVALID_IMAGE: i32 = 200;

#[test]
fn files_that_end_early_are_refused_as_the_driver_refuses_them() {
    both(
        files_that_end_early_are_refused_as_the_driver_refuses_them,
        &welcome(),
        |device| {
            let text = which(7, 60_000_000);
            let container = fatbin::pack(&[(Kind::Ptx, 70, text.as_bytes())]);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.fatbin");
            for keep in [17, 60, 200, 60_000, 30_000_000] {
                std::fs::write(&path, &container[..keep]).unwrap();
                for as_library in [false, true] {
                    let result = load_file(device, &path, as_library);
                    assert_eq!(result, INVALID_IMAGE, "{keep} bytes");
                }
            }
            std::fs::write(&path, &container).unwrap();
            assert_eq!([false, true].map(|library| load_file(device, &path, library)), [0, 0]);
        },
        |core| core.ends(0),
    );
}

#[test]
fn a_pipe_is_opened_by_the_driver_only() {
    both(
        a_pipe_is_opened_by_the_driver_only,
        &welcome(),
        |device| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("pipe");
            let name = CString::new(path.as_os_str().as_bytes()).unwrap();
            // SAFETY: a path.
            assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
            let (text, broken) = (which(7, 10), AtomicUsize::new(0));
            for _ in 0..300 {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let mut pipe = std::fs::File::options().write(true).open(&path).unwrap();
                        if pipe.write_all(text.as_bytes()).is_err() {
                            broken.fetch_add(1, SeqCst);
                        }
                    });
                    std::thread::sleep(Duration::from_micros(50));
                    assert_eq!(load_file(device, &path, false), 0);
                });
            }
            assert_eq!(broken.load(SeqCst), 0);
        },
        |core| core.ends(0),
    );
}

/// Runs `body` on a stack whose first frame returns to an address where nothing is.
///
/// # Safety
/// `body` must not unwind.
#[unsafe(naked)]
unsafe extern "C" fn on_a_stack_of_its_own(stack: *mut u8, body: extern "C" fn()) {
    std::arch::naked_asm!(
        "push rbx",
        "mov rbx, rsp",
        "mov rsp, rdi",
        // What would be the frame above: nothing that is code.
        "push 16",
        "push 16",
        "call rsi",
        "mov rsp, rbx",
        "pop rbx",
        "ret",
    )
}

const HOST_TABLE: i32 = 0;
const BINARY_IS_PRESERVED: i32 = 1;

/// A library with an option, of text that is overwritten at once unless it is kept, launched until the core says no:
/// all values are its own.
fn launch_library(device: &Device, number: u32, option: (i32, usize), is_kept: bool) {
    let mut text = CString::new(which(number, 10)).unwrap().into_bytes_with_nul();
    let (mut library, none) = (null_mut(), null_mut());
    let (mut name, mut value) = option;
    let (names, values) = ((&raw mut name).cast(), (&raw mut value).cast());
    // SAFETY: a valid out-pointer; text with a NUL; an option of the library.
    ok(unsafe {
        let image = text.as_ptr();
        (device.cuda.cuLibraryLoadData)(&mut library, image, none, none, 0, names, values, 1)
    });
    if !is_kept {
        text.fill(b'x');
    }
    let kernel = device.kernel_of(library, "which");
    let mut numbers = Vec::new();
    while ask("again?") == "yes" {
        numbers.extend(written(device, kernel, 4));
    }
    numbers.extend(written(device, kernel, 4));
    numbers.dedup();
    assert_eq!(numbers, [number]);
}

fn slices_of_5(core: &Governor) {
    core.policy(|request, _| match request.flags & (CAN_PREPARE | CAN_SLICE) {
        0 => Answer::Whole,
        _ => Answer::Slice(5),
    });
}

/// Have a library launched so often at most; whether a launch was sliced.
fn is_sliced_within(core: &mut Governor, rounds: u32) -> bool {
    core.expect("again?");
    let before = core.counters().sliced.load(SeqCst);
    let is_sliced = (0..rounds).any(|_| {
        core.say("yes");
        core.expect("again?");
        core.counters().sliced.load(SeqCst) > before
    });
    core.say("no");
    is_sliced
}

#[test]
fn libraries_from_memory_that_is_freed_or_kept_are_transformed() {
    both(
        libraries_from_memory_that_is_freed_or_kept_are_transformed,
        &welcome(),
        |device| {
            launch_library(device, 1111, (BINARY_IS_PRESERVED, 0), false);
            launch_library(device, 2222, (BINARY_IS_PRESERVED, 1), true);
        },
        |core| {
            slices_of_5(core);
            assert!(is_sliced_within(core, 5_000));
            assert!(is_sliced_within(core, 5_000));
            core.ends(0);
        },
    );
}

#[test]
fn a_library_with_another_option_is_not_transformed_whatever_a_driver_answers() {
    both(
        a_library_with_another_option_is_not_transformed_whatever_a_driver_answers,
        &welcome(),
        |device| launch_library(device, 3333, (HOST_TABLE, 0), false),
        |core| {
            slices_of_5(core);
            assert!(!is_sliced_within(core, 50));
            core.ends(0);
        },
    );
}

/// Each block writes the second number of a table of CUDA's mathematical functions.
fn of_a_table(image: usize) -> String {
    let table = ".global .align 4 .b32 __cudart_i2opi_f[2] = {1111, 2222};\n\
        .visible .global .align 4 .b32 plain = 5;\n.visible .entry which";
    which(0, image)
        .replace("mov.u32 %r2, 0;", "ld.global.u32 %r2, [__cudart_i2opi_f+4];")
        .replace(".visible .entry which", table)
}

/// The program has a kernel launched until the core says no, asks for another variable, has it launched again, asks for
/// the table, and writes it.
fn write_a_table(
    device: &Device,
    f: Ptr,
    of: Ptr,
    get: unsafe extern "C" fn(*mut u64, *mut usize, Ptr, *const i8) -> i32,
) {
    let address_of = |name: &CStr| {
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: valid out-pointers; a module or library of ours; a NUL-terminated name.
        ok(unsafe { get(&mut address, &mut bytes, of, name.as_ptr()) });
        address
    };
    for variable in [c"plain", c"__cudart_i2opi_f"] {
        while ask("again?") == "yes" {
            assert_eq!(written(device, f, 4), [2222]);
        }
        let address = address_of(variable);
        assert_ne!(address, 0);
        if variable == c"__cudart_i2opi_f" {
            device.set(address + 4, 3333, 1);
            assert_eq!(written(device, f, 8), [3333]);
        }
    }
    ask("written");
}

#[test]
fn a_table_whose_address_the_program_asks_for_is_not_doubled() {
    both(
        a_table_whose_address_the_program_asks_for_is_not_doubled,
        &welcome(),
        |device| {
            let cuda = device.cuda;
            let module = device.load(&of_a_table(1));
            let f = device.function_of(module, "which");
            write_a_table(device, f, module, cuda.cuModuleGetGlobal_v2);

            let library = device.library_of(&of_a_table(2));
            let kernel = device.kernel_of(library, "which");
            write_a_table(device, kernel, library, cuda.cuLibraryGetGlobal);

            // A library's module, which only its function tells.
            let library = device.library_of(&of_a_table(3));
            let kernel = device.kernel_of(library, "which");
            let (mut f, mut module) = (null_mut(), null_mut());
            // SAFETY: valid out-pointers; a kernel of ours and its function.
            unsafe {
                ok((cuda.cuKernelGetFunction)(&mut f, kernel));
                ok((cuda.cuFuncGetModule)(&mut module, f));
            }
            write_a_table(device, f, module, cuda.cuModuleGetGlobal_v2);
        },
        |core| {
            slices_of_5(core);
            for refused in 1..=3 {
                // Before and behind the address of a variable that no kernel uses.
                assert!(is_sliced_within(core, 5_000));
                assert!(is_sliced_within(core, 5_000));
                core.expect("written");
                assert_eq!(core.counters().refused_kernels.load(SeqCst), refused);
                core.say("on");
            }
            core.ends(0);
            assert!(core.is_refused("which", TransformRefusal::WritableGlobals));
        },
    );
}

static COROUTINE_DEVICE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn load_in_a_coroutine() {
    // SAFETY: the test's, which lives.
    let device = unsafe { &*(COROUTINE_DEVICE.load(SeqCst) as *const Device) };
    device.load(&which(7, 10));
}

#[test]
fn a_load_from_a_coroutine_looks_no_further_than_its_caller() {
    both(
        a_load_from_a_coroutine_looks_no_further_than_its_caller,
        &welcome(),
        |device| {
            COROUTINE_DEVICE.store(std::ptr::from_ref::<Device>(device) as usize, SeqCst);
            let mut stack = vec![0_u8; 1 << 20];
            let top = (stack.as_mut_ptr() as usize + stack.len() - 64) & !15;
            // SAFETY: a stack, and a function that returns.
            unsafe { on_a_stack_of_its_own(top as *mut u8, load_in_a_coroutine) };
        },
        |core| core.ends(0),
    );
}

#[test]
fn what_a_failed_load_says_is_what_it_says_without_us() {
    both(
        what_a_failed_load_says_is_what_it_says_without_us,
        &welcome(),
        |device| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("text.ptx");
            let text = c"this is no PTX at all, but a text of some length\n";
            std::fs::write(&path, text.to_bytes()).unwrap();
            let path = CString::new(path.as_os_str().as_bytes()).unwrap();
            let mut said = Vec::new();
            for way in 0..3 {
                let (mut handle, mut log) = (null_mut(), [0_u8; 300]);
                // CU_JIT_ERROR_LOG_BUFFER and its size.
                let mut names = [5_i32, 6];
                let mut values = [log.as_mut_ptr() as Ptr, log.len() as Ptr];
                let (names, at) = (names.as_mut_ptr().cast(), values.as_mut_ptr().cast());
                let (cuda, none) = (&device.cuda, null_mut());
                // SAFETY: valid out-pointers; options of this length; a path, or text with a NUL.
                let result = unsafe {
                    match way {
                        0 => (cuda.cuLibraryLoadFromFile)(
                            &mut handle,
                            path.as_ptr(),
                            names,
                            at,
                            2,
                            none,
                            none,
                            0,
                        ),
                        1 => {
                            let image = text.as_ptr().cast();
                            (cuda.cuLibraryLoadData)(
                                &mut handle,
                                image,
                                names,
                                at,
                                2,
                                none,
                                none,
                                0,
                            )
                        }
                        _ => {
                            let copy = text.to_owned();
                            let image = copy.as_ptr().cast();
                            (cuda.cuModuleLoadDataEx)(&mut handle, image, 2, names.cast(), at)
                        }
                    }
                };
                said.push((result, values[1] as usize, log));
            }
            assert_eq!(said[0].0, INVALID_IMAGE);
            assert!(said.iter().all(|way| *way == said[0]), "{said:?}");
            let (_, size, log) = &said[0];
            assert!(*size > 0 && log[..*size].ends_with(b"nor a cubin"), "{size}");
        },
        |core| core.ends(0),
    );
}
