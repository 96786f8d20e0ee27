//! What happens while a kernel runs or a stream waits: flags in device memory
//! are seen, blocks are claimed once, and nobody else is held up.
#![allow(missing_docs)]

mod common;

use common::cuda::*;
use common::on_device;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUresult, CUstream};
use std::sync::atomic::AtomicU32;

fn bytes(address: u64) -> [u8; 8] {
    address.to_ne_bytes()
}

/// Four ways for another stream to write a word of device memory.
fn write_word(how: usize, stream: CUstream, at: u64, value: u32) {
    // SAFETY: a stream and a device word of ours; the operation is the
    // structure of a 32-bit write and is read by the call.
    unsafe {
        match how {
            0 => sys::cuStreamWriteValue32_v2(stream, at, value, 0),
            1 => sys::cuMemsetD32Async(at, value, 1, stream),
            2 => sys::cuMemcpyHtoDAsync_v2(at, (&raw const value).cast(), 4, stream),
            _ => {
                // CU_STREAM_MEM_OP_WRITE_VALUE_32.
                let mut op = [2u64, at, value.into(), 0, 0, 0];
                sys::cuStreamBatchMemOp_v2(stream, 1, op.as_mut_ptr().cast(), 0)
            }
        }
        .result()
        .unwrap();
    }
}

#[test]
fn a_spinning_kernel_is_released_by_another_stream() {
    on_device("a_spinning_kernel_is_released_by_another_stream", 1, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (a, b, f) = (stream(1), stream(1), raw(&module, "until"));
        for how in 0..4 {
            let (flag, started, seen) = (zeros(1), pinned_word(), zeros(1));
            let at = [flag, address(started), seen].map(bytes);
            launch(a, f, [1; 3], [32, 1, 1], &[&at[0], &at[1], &at[2]]);
            await_word(started, 1);
            assert_eq!(query(a), CUresult::CUDA_ERROR_NOT_READY);
            write_word(how, b, flag, 40 + how as u32);
            synchronize(a);
            assert_eq!(fetch(seen, 1), [40 + how as u32]);
        }
    });
}

#[test]
fn later_blocks_see_a_flag_raised_meanwhile() {
    on_device("later_blocks_see_a_flag_raised_meanwhile", 1, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (a, b, f) = (stream(1), stream(1), raw(&module, "note"));
        for how in 0..4 {
            let (flag, out, reached) = (zeros(1), zeros(10), pinned_word());
            let at = [flag, out, address(reached)].map(bytes);
            launch(a, f, [10, 1, 1], [1; 3], &[&at[0], &at[1], &at[2], &3u32.to_ne_bytes()]);
            await_word(reached, 1);
            write_word(how, b, flag, 9);
            synchronize(a);
            assert_eq!(fetch(out, 10), [0, 0, 0, 0, 9, 9, 9, 9, 9, 9]);
        }
    });
}

/// The control block of `tally_rewriter::control`.
fn control(at: [u64; 3], epoch2: u32, base2: u32, flag_mask: u32) -> [u8; 56] {
    tally_rewriter::control::ControlBlock::preemptible(
        at[0], at[1], flag_mask, at[2], epoch2, base2, [1; 3],
    )
    .bytes()
}

/// On one SM the blocks come one by one: block 0 runs, the flag is raised
/// meanwhile, and all others stop.
#[test]
fn claimed_blocks_stop() {
    on_device("claimed_blocks_stop", 1, || claim(Some(65)));
}

#[test]
fn claimed_blocks_run_once() {
    on_device("claimed_blocks_run_once", 5, || claim(None));
}

/// Blocks of a claimed kernel: 66 of 5 x 9 threads. It is stopped while block 0
/// runs, then run again; then twice at one time. Every thread of every block
/// runs once in each instance.
fn claim(stopped_blocks: Option<usize>) {
    let context = CudaContext::new(0).unwrap();
    let module = load_transforming(&context);
    let (a, b, f) = (stream(1), stream(1), raw(&module, "claimed"));
    let (grid, block) = ([11, 3, 2], [5, 9, 1]);
    let threads = (66 * 45) as usize;
    // Flags of SMs, a cache line each; SM 4 reads the first again.
    let (table, flags, notice) = (zeros(66), zeros(4 * 32), pinned_word());
    let at = [table, flags, address(notice)];
    let raise = |stream, value| {
        // SAFETY: the flags, which are ours.
        unsafe { sys::cuMemsetD32Async(flags, value, 4 * 32, stream) }.result().unwrap();
    };
    let run = |stream, count: u64, hold: u64, epoch2, base2| {
        let control = control(at, epoch2, base2, 3);
        launch(stream, f, grid, block, &[&bytes(count), &bytes(hold), &control]);
    };
    let mut epoch2 = 2;
    for round in 0..20 {
        let (count, base2) = (zeros(threads), epoch2);
        let hold = pinned_word();
        let go = {
            let second = (hold.as_ptr() as u64 + 4) as *mut u32;
            // SAFETY: pinned memory of 64 bytes, which lives for ever.
            unsafe { AtomicU32::from_ptr(second) }
        };
        run(a, count, address(hold), epoch2, base2);
        await_word(hold, 1);
        raise(b, u32::MAX);
        synchronize(b);
        go.store(1, std::sync::atomic::Ordering::SeqCst);
        synchronize(a);
        let stopped = fetch(count, threads).iter().filter(|&&c| c == 0).count();
        assert_eq!(stopped % 45, 0, "a block runs whole or not at all");
        assert!(stopped_blocks.is_none_or(|blocks| stopped == blocks * 45));
        let noticed = notice.load(std::sync::atomic::Ordering::SeqCst) == epoch2;
        assert_eq!(noticed, stopped != 0, "round {round}");
        raise(a, 0);
        epoch2 += 2;
        run(a, count, 0, epoch2, base2);
        synchronize(a);
        assert!(fetch(count, threads).iter().all(|&c| c == 1), "round {round}");
        // Another instance with the same table, twice at one time.
        let count = zeros(threads);
        let base2 = epoch2 + 2;
        run(a, count, 0, epoch2 + 2, base2);
        run(b, count, 0, epoch2 + 4, base2);
        epoch2 += 6;
        synchronize(a);
        synchronize(b);
        assert!(fetch(count, threads).iter().all(|&c| c == 1), "round {round}, overlapping");
    }
}

/// A kernel of many blocks, each of which waits for a word of its own: one of a
/// more urgent stream runs between two of its blocks, one of an equal stream
/// only after all of them.
#[test]
fn urgent_streams_go_first_between_blocks() {
    const BLOCKS: u32 = 10_000;
    on_device("urgent_streams_go_first_between_blocks", 1, || {
        let context = CudaContext::new(0).unwrap();
        let module = load_transforming(&context);
        let (fed, affine) = (raw(&module, "fed"), raw(&module, "affine"));
        let (mut least, mut greatest) = (9, 9);
        let prioritised = |priority| {
            let (mut stream, mut found) = (std::ptr::null_mut(), 9);
            // SAFETY: valid out pointers.
            unsafe {
                sys::cuStreamCreateWithPriority(&mut stream, 1, priority).result().unwrap();
                sys::cuStreamGetPriority(stream, &mut found).result().unwrap();
            }
            (stream, found)
        };
        // SAFETY: valid out pointers.
        unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.result().unwrap();
        assert!(greatest < least);
        assert_eq!(prioritised(greatest - 5).1, greatest, "brought into the range");
        let (low, equal, high) =
            (prioritised(least).0, prioritised(least).0, prioritised(greatest).0);
        let (word, started) = (pinned_word(), pinned_word());
        let (data, one) = (zeros(2), 1u32.to_ne_bytes());
        let at = [address(word), address(started), data, data + 4].map(bytes);
        launch(low, fed, [BLOCKS, 1, 1], [32, 1, 1], &[&at[0], &at[1]]);
        await_word(started, 1);
        launch(equal, affine, [1; 3], [32, 1, 1], &[&at[2], &one, &one, &one]);
        launch(high, affine, [1; 3], [32, 1, 1], &[&at[3], &one, &one, &one]);
        let order = std::sync::atomic::Ordering::SeqCst;
        let fed = (1..BLOCKS).find(|&block| {
            word.store(block, order);
            std::thread::sleep(std::time::Duration::from_millis(1));
            query(high) == CUresult::CUDA_SUCCESS
        });
        assert!(fed.is_some(), "all blocks of an earlier, less urgent kernel went first");
        assert_eq!(query(equal), CUresult::CUDA_ERROR_NOT_READY);
        word.store(u32::MAX, order);
        synchronize(equal);
        synchronize(low);
        assert_eq!(fetch(data, 2), [1, 1]);
    });
}

/// A word in memory of our own, shared with whoever maps the file.
struct Shared {
    file: std::os::fd::OwnedFd,
    word: &'static AtomicU32,
}

fn map(file: &std::os::fd::OwnedFd) -> &'static AtomicU32 {
    use std::os::fd::AsRawFd;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new shared mapping of a page of the file, never unmapped.
    unsafe {
        let at =
            libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        &*at.cast::<AtomicU32>()
    }
}

fn shared() -> Shared {
    use std::os::fd::FromRawFd;
    // SAFETY: a new descriptor, owned here; a page that was just mapped.
    unsafe {
        let fd = libc::memfd_create(c"flags".as_ptr(), 0);
        let file = std::os::fd::OwnedFd::from_raw_fd(fd);
        assert_eq!(libc::ftruncate(fd, 4096), 0);
        let word = map(&file);
        sys::cuMemHostRegister_v2(word.as_ptr().cast(), 4096, 2).result().unwrap();
        Shared { file, word }
    }
}

/// Writes the first word of the memfd from another process.
fn write_elsewhere(shared: &Shared, value: u32) {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/{}/fd/{}", std::process::id(), shared.file.as_raw_fd());
    let octal: String = value.to_ne_bytes().iter().map(|b| format!("\\{b:03o}")).collect();
    let script = format!("printf '{octal}' | dd of={path} bs=4 count=1 conv=notrunc status=none");
    assert!(std::process::Command::new("sh").args(["-c", &script]).status().unwrap().success());
}

/// A stream that waits for a word lets other streams and threads go on, and the
/// context is not done until it is.
#[test]
fn a_waiting_stream_holds_up_nobody_else() {
    on_device("a_waiting_stream_holds_up_nobody_else", 2, || {
        let context = CudaContext::new(0).unwrap();
        let module = load(&context);
        let f = kernel(&module, "increment");
        let shared = shared();
        let (blocking, free) = (stream(0), stream(1));
        let free_too = context.new_stream().unwrap();
        let legacy = std::ptr::null_mut();
        let mut value = 0;
        for waiter in [legacy, blocking, free] {
            for elsewhere in [false, true] {
                value += 1;
                let (behind, data) = (pinned_word(), zeros_beside(&free_too));
                wait_value(waiter, shared.word, value);
                write_value(waiter, behind, value);
                // Other streams run, from this thread and another.
                increment(&free_too, &f, data, 64, 1);
                std::thread::scope(|s| {
                    s.spawn(|| {
                        context.bind_to_thread().unwrap();
                        increment(&free_too, &f, data, 64, 10);
                    });
                });
                free_too.synchronize().unwrap();
                assert_eq!(query(waiter), CUresult::CUDA_ERROR_NOT_READY);
                assert_eq!(behind.load(std::sync::atomic::Ordering::SeqCst), 0);
                let synced = std::sync::atomic::AtomicBool::new(false);
                std::thread::scope(|s| {
                    let waiting = s.spawn(|| {
                        context.bind_to_thread().unwrap();
                        // SAFETY: no preconditions.
                        unsafe { sys::cuCtxSynchronize() }.result().unwrap();
                        synced.store(true, std::sync::atomic::Ordering::SeqCst);
                    });
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    assert!(!synced.load(std::sync::atomic::Ordering::SeqCst));
                    if elsewhere {
                        write_elsewhere(&shared, value);
                    } else {
                        // A plain store through another mapping of the file.
                        let other = map(&shared.file).as_ptr();
                        // SAFETY: a word that lives for ever.
                        unsafe { other.write_volatile(value) };
                    }
                    waiting.join().unwrap();
                });
                assert_eq!(behind.load(std::sync::atomic::Ordering::SeqCst), value);
                assert_eq!(fetch(data, 64), [11; 64]);
            }
        }
        // The legacy stream waits for a blocking stream that waits, and no other.
        value += 1;
        wait_value(blocking, shared.word, value);
        write_value(legacy, shared.word, value + 100);
        assert_eq!(query(legacy), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(query(free), CUresult::CUDA_SUCCESS);
        shared.word.store(value, std::sync::atomic::Ordering::SeqCst);
        synchronize(legacy);
        assert_eq!(shared.word.load(std::sync::atomic::Ordering::SeqCst), value + 100);
    });
}

/// 64 zeros, made without waiting for the legacy stream.
fn zeros_beside(stream: &std::sync::Arc<cudarc::driver::CudaStream>) -> u64 {
    let mut at = 0;
    // SAFETY: a valid out pointer, then a range just allocated.
    unsafe {
        sys::cuMemAlloc_v2(&mut at, 256).result().unwrap();
        sys::cuMemsetD32Async(at, 0, 64, stream.cu_stream()).result().unwrap();
    }
    at
}
