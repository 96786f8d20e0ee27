//! The proof that transformed kernels compute the same on this machine.
//!
//! Before the first transformed form of a kind (PTX, machine code) is used on a device, a kernel
//! with known results ([`tally_rewriter::proof`]) is transformed in the same way, there: whole, in
//! slices, stopped before it starts and stopped while it runs. Sums and the number of
//! times that each block ran must be right each time: the host's for a short run, and for one that is
//! long enough to be stopped those of the kernel before it is transformed, some of them computed here, too. For machine
//! code the driver compiles the kernel first, so that what is patched is this driver's code for this architecture,
//! whether anybody ever tried it there or not. If it fails, nothing of that kind is transformed on this device.
//!
//! On the worker's thread only, in a stream and with words of its own. The memory
//! (three words a block) is kept: to free some would wait for the program's kernels.

use crate::compile::{compiled, compiled_or_text};
use crate::cuda::{LaunchConfig, Ptr, STREAM_NON_BLOCKING, SUCCESS, WRITE_VALUE_DEFAULT, driver};
use crate::host::{self, host, log};
use crate::issue::with_buffer;
use crate::jobs::Failed;
use crate::lock::Locked;
use std::ffi::CString;
use std::time::{Duration, Instant};
use tally_ipc::wait;
use tally_rewriter::control::{CONTROL_BYTES, FLAG_RAISED, FLAG_STRIDE_BYTES};
use tally_rewriter::{ControlBlock, KernelForm, TransformRefusal, image, proof};

/// Blocks for each SM: of 128 threads at most 16 run at once, so some are left when the
/// flag goes up.
const BLOCKS_PER_SM: u32 = 48;
/// SMs reckoned with, at most: the memory is that of so many.
const SMS_MAX: u32 = 512;
/// The run that is stopped in the middle takes at least so long.
const RUN_MIN: Duration = Duration::from_millis(2);
const ROUNDS_FIRST: u32 = 4;
const ROUNDS_MAX: u32 = 1 << 14;
/// Blocks whose sums at more rounds are computed here, spread over the grid: all of them would take
/// seconds on a large GPU.
const SAMPLES: u32 = 13;
/// Parts of the run at which the flag goes up, thousandths.
const STOPS_PERMILLE: [u32; 3] = [200, 450, 700];
/// Launches until a stopped run is complete, at most.
const RESUMES_MAX: u32 = 8;

/// A device, and whether the code is PTX.
type Kind = (i32, bool);

/// Transformed forms that may be used.
#[derive(Clone, Copy, Debug)]
pub struct Proven {
    /// The form with offset block indices, too.
    pub offsets: bool,
}

/// Results for each device and kind of code; found once in a process.
static FOUND: Locked<Vec<(Kind, Result<Proven, TransformRefusal>)>> = Locked::new(Vec::new());

/// Whether transformed forms of a kind may be used on a device, which is the current context's.
///
/// # Errors
/// [`TransformRefusal::ResultsDiffer`], or why it could not be found out.
pub(super) fn passed(
    device: i32,
    arch: u32,
    is_ptx: bool,
    context: usize,
) -> Result<Proven, Failed> {
    let known = FOUND.with(|all| all.iter().find(|(key, _)| *key == (device, is_ptx)).copied());
    if let Some((_, found)) = known {
        return Ok(found?);
    }
    let start = Instant::now();
    let found = match driver().relaxed(|| prove(device, arch, is_ptx, context)) {
        Err(Failed::Busy) => return Err(Failed::Busy),
        Err(Failed::Unloaded) => return Err(Failed::Unloaded),
        Err(Failed::For(why)) => Err(why),
        Ok(runs) => Ok(runs),
    };
    // The driver's compiler is loaded now.
    host().exit_before_others();
    let kind = if is_ptx { "PTX" } else { "machine code" };
    match found {
        Ok(runs) => log!(
            "transforming {kind} was proven on device {device}: {} stopped runs, {} of them with \
             some blocks run and some not, {} slices by offset, in {:.1} ms",
            runs.stopped,
            runs.partly,
            runs.offsets,
            start.elapsed().as_secs_f64() * 1e3
        ),
        Err(why) => log!("nothing of {kind} is transformed on device {device}: {why}"),
    }
    let found = found.map(|runs| Proven { offsets: runs.offsets > 0 });
    FOUND.with(|all| all.push(((device, is_ptx), found)));
    Ok(found?)
}

/// Counts of what the proof has run.
#[derive(Clone, Copy, Debug, Default)]
struct Runs {
    stopped: u32,
    /// Stopped runs in which some blocks ran before the flag was seen, and some did not.
    partly: u32,
    /// Slices by offset, if there is that form.
    offsets: u32,
}

/// The driver's answer as an error.
fn check(result: i32) -> Result<(), TransformRefusal> {
    if result == SUCCESS { Ok(()) } else { Err(TransformRefusal::DriverRefused) }
}

/// The kernel in one form.
struct Form {
    function: Ptr,
    control_offset: Option<usize>,
}

struct Bench {
    stream: Ptr,
    /// Stream of the flag's writes while the kernel runs.
    other: Ptr,
    grid: [u32; 3],
    sums: u64,
    counts: u64,
    table: u64,
    flag: u64,
    notice: u64,
    /// Where words are copied to: pinned, for a copy to other memory keeps its thread within the driver.
    landing: *const u32,
    rounds: u32,
    expected: Vec<u32>,
}

fn prove(device: i32, arch: u32, is_ptx: bool, context: usize) -> Result<Runs, Failed> {
    // The driver's compiler is used for the first time while launches wait: a program that goes on may exit meanwhile,
    // and what the compiler has registered for that end would run before the shim waits for it.
    let while_idle = |ptx: &[u8]| {
        let compiled = host::load(context, host::LOAD_PATIENCE, || compiled(ptx));
        compiled.ok_or(Failed::Busy)?.map_err(Failed::For)
    };
    let ptx = proof::PTX.as_bytes();
    let original = if is_ptx { ptx.to_vec() } else { while_idle(ptx)? };
    let rewritten = image::rewrite(&original, arch, KernelForm::ByClaims, None)?;
    let transformed = rewritten.kernel(proof::NAME)?.control_offset as usize;
    let mut images = vec![(original.clone(), None), (rewritten.image, Some(transformed))];
    // The form with offset block indices. None if this driver's code of the kernel does not read them as
    // the patch knows.
    let by_offset = image::rewrite(&original, arch, KernelForm::ByOffset, None)?;
    match by_offset.kernel(proof::NAME) {
        Ok(kernel) => {
            let at = kernel.control_offset as usize;
            images.push((by_offset.image, Some(at)));
        }
        Err(why) => log!("nothing is sliced by offset: {why}"),
    }
    let code = |image| if is_ptx { compiled_or_text(image) } else { image };
    let loaded = host::load(context, host::LOAD_PATIENCE, || {
        let load = |(image, at)| function(code(image), at);
        images.into_iter().map(load).collect::<Result<Vec<_>, _>>()
    });
    let mut forms = loaded.ok_or(Failed::Busy)??.into_iter();
    let (Some(plain), Some(transformed), by_offset) = (forms.next(), forms.next(), forms.next())
    else {
        return Err(Failed::For(TransformRefusal::DriverRefused));
    };
    let mut bench = Bench::new(device)?;

    // How long it takes, and that it is right when nothing is done to it. Not the first time:
    // the driver loads code then.
    bench.run(&plain, bench.grid, None)?;
    bench.check("whole, not transformed")?;
    loop {
        let start = Instant::now();
        bench.run(&plain, bench.grid, None)?;
        let took = start.elapsed();
        bench.check("whole, not transformed")?;
        if took >= RUN_MIN || bench.rounds >= ROUNDS_MAX {
            break;
        }
        bench.rounds *= 4;
        bench.run(&plain, bench.grid, None)?;
        bench.expect_what_ran()?;
    }
    let mut runs = Runs::default();
    let mut epoch2 = 2;
    let start = Instant::now();
    bench.run(&transformed, bench.grid, Some(bench.preemptible(epoch2, epoch2)))?;
    let took = start.elapsed();
    bench.check("with the flag down")?;
    let blocks = bench.blocks();
    for range in [0..1, 1..blocks / 3, blocks / 3..blocks - 1, blocks - 1..blocks] {
        bench.run(
            &transformed,
            bench.grid,
            Some(ControlBlock::slice(range.start, range.end, [1; 3])),
        )?;
    }
    bench.check("in slices")?;
    // Stopped before it starts, then in the middle.
    for permille in std::iter::once(0).chain(STOPS_PERMILLE) {
        let base2 = epoch2 + 2;
        epoch2 = base2;
        if permille == 0 {
            bench.raise(bench.stream, true)?;
        }
        bench.issue(&transformed, bench.grid, Some(bench.preemptible(epoch2, base2)))?;
        if permille > 0 {
            wait::nap(took * permille / 1_000);
            bench.raise(bench.other, true)?;
            // Not to come behind the next write, should the run be over already.
            bench.settle(bench.other)?;
        }
        bench.settle(bench.stream)?;
        runs.stopped += 1;
        let ran = bench.read(bench.counts, blocks as usize)?.iter().filter(|n| **n != 0).count();
        runs.partly += u32::from(ran > 0 && ran < blocks as usize);
        if permille == 0 && ran != 0 {
            log!("{ran} blocks of {blocks} ran although they were asked not to");
            return Err(Failed::For(TransformRefusal::ResultsDiffer));
        }
        bench.raise(bench.stream, false)?;
        let mut resumes = 0;
        while bench.read(bench.counts, blocks as usize)?.contains(&0) && resumes < RESUMES_MAX {
            epoch2 += 2;
            bench.run(&transformed, bench.grid, Some(bench.preemptible(epoch2, base2)))?;
            resumes += 1;
        }
        bench.check("stopped and resumed")?;
    }
    if let Some(form) = by_offset {
        runs.offsets = offsets(&form, is_ptx, &bench)?;
    }
    Ok(runs)
}

/// The form with offset block indices; how many slices.
fn offsets(form: &Form, is_ptx: bool, bench: &Bench) -> Result<u32, TransformRefusal> {
    let blocks = bench.blocks();
    // The kernel counts its blocks as a grid of one dimension has them, too.
    let grid = if is_ptx { bench.grid } else { [blocks, 1, 1] };
    let slices = [0..1, 1..blocks / 2, blocks / 2..blocks];
    for range in &slices {
        let part = ControlBlock::by_offset(range.start, grid);
        bench.run(form, [range.end - range.start, 1, 1], Some(part))?;
    }
    bench.check("in slices by offset")?;
    Ok(slices.len() as u32)
}

/// Load an image and find the kernel in it. The module stays. The context is idle.
fn function(mut image: Vec<u8>, control_offset: Option<usize>) -> Result<Form, TransformRefusal> {
    image.push(0);
    let d = driver();
    let (load, get) = (d.module_load, d.module_function);
    let (Some(load), Some(get)) = (load, get) else { return Err(TransformRefusal::DriverRefused) };
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    let name = CString::new(proof::NAME).map_err(|_| TransformRefusal::NoSuchKernel)?;
    // SAFETY: an image with a NUL behind it, a NUL-terminated name, valid out-pointers.
    unsafe {
        check(load(&mut module, image.as_ptr()))?;
        check(get(&mut function, module, name.as_ptr()))?;
        // Now, and not with its first launch, which would wait for all that runs.
        if let Some(load) = d.func_load {
            load(function);
        }
    }
    Ok(Form { function, control_offset })
}

impl Bench {
    fn new(device: i32) -> Result<Self, TransformRefusal> {
        let d = driver();
        let missing = TransformRefusal::DriverRefused;
        let mut sms = 0;
        // SAFETY: a valid out-pointer. CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
        check(unsafe { d.device_attribute.ok_or(missing)?(&mut sms, 16, device) })?;
        let grid = [(sms.max(1) as u32).min(SMS_MAX) * (BLOCKS_PER_SM / 4), 2, 2];
        let words = grid.iter().product::<u32>() as usize;
        let flag_words = FLAG_STRIDE_BYTES as usize / 4;
        let (mut stream, mut other) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut low, mut high, mut memory) = (0, 0, 0);
        let mut landing: Ptr = std::ptr::null_mut();
        let all_words = 3 * words + 2 * flag_words;
        // SAFETY: valid out-pointers; memory and streams of our own.
        unsafe {
            check(d.stream_priorities.ok_or(missing)?(&mut low, &mut high))?;
            let create = d.stream_create.ok_or(missing)?;
            // Ahead of what the program has enqueued: tens of short runs, one after another,
            // would wait for all of that each time.
            check(create(&mut stream, STREAM_NON_BLOCKING, high))?;
            check(create(&mut other, STREAM_NON_BLOCKING, high))?;
            check(d.mem_alloc.ok_or(missing)?(&mut memory, all_words * 4))?;
            check(d.host_alloc.ok_or(missing)?(&mut landing, 2 * words * 4, 0))?;
            check(d.mem_set.ok_or(missing)?(memory, 0, all_words, stream))?;
        }
        let at = |word: usize| memory + 4 * word as u64;
        let bench = Bench {
            stream,
            other,
            grid,
            flag: memory,
            notice: at(flag_words),
            sums: at(2 * flag_words),
            counts: at(2 * flag_words + words),
            table: at(2 * flag_words + 2 * words),
            landing: landing.cast_const().cast(),
            rounds: ROUNDS_FIRST,
            expected: (0..grid.iter().product())
                .map(|block| proof::expected(block, ROUNDS_FIRST))
                .collect(),
        };
        Ok(bench)
    }

    fn blocks(&self) -> u32 {
        self.grid.iter().product()
    }

    /// The sums of a whole run of the plain kernel, which were right at fewer rounds and of which some are
    /// computed here, are from now on what any run must write.
    fn expect_what_ran(&mut self) -> Result<(), TransformRefusal> {
        let blocks = self.blocks();
        self.expected = self.read(self.sums, blocks as usize)?;
        let samples = (0..SAMPLES).map(|n| n * (blocks - 1) / (SAMPLES - 1));
        for block in samples {
            self.expected[block as usize] = proof::expected(block, self.rounds);
        }
        self.check("whole, not transformed, for longer")
    }

    fn preemptible(&self, epoch2: u32, base2: u32) -> ControlBlock {
        ControlBlock::preemptible(self.table, self.flag, 0, self.notice, epoch2, base2, [1; 3])
    }

    fn issue(
        &self,
        form: &Form,
        grid: [u32; 3],
        control: Option<ControlBlock>,
    ) -> Result<(), TransformRefusal> {
        let mut buffer = vec![0_u8; proof::PARAMETER_BYTES];
        buffer[..8].copy_from_slice(&self.sums.to_le_bytes());
        buffer[8..16].copy_from_slice(&self.counts.to_le_bytes());
        buffer[16..20].copy_from_slice(&self.rounds.to_le_bytes());
        if let (Some(at), Some(control)) = (form.control_offset, control) {
            buffer.resize(at + CONTROL_BYTES as usize, 0);
            buffer[at..].copy_from_slice(&control.bytes());
        }
        let config = LaunchConfig {
            grid,
            block: [proof::THREADS, 1, 1],
            shared_bytes: 0,
            stream: self.stream,
            attributes: std::ptr::null(),
            attribute_count: 0,
        };
        let launch = driver().launch_ex.ok_or(TransformRefusal::DriverRefused)?;
        let none = std::ptr::null_mut();
        // SAFETY: a function of ours in the current context; the driver copies the
        // parameters before it returns.
        check(with_buffer(&buffer, |extra| unsafe { launch(&config, form.function, none, extra) }))
    }

    fn settle(&self, stream: Ptr) -> Result<(), TransformRefusal> {
        let synchronize = driver().stream_synchronize.ok_or(TransformRefusal::DriverRefused)?;
        // SAFETY: a stream of our own.
        check(unsafe { synchronize(stream) })
    }

    fn run(
        &self,
        form: &Form,
        grid: [u32; 3],
        control: Option<ControlBlock>,
    ) -> Result<(), TransformRefusal> {
        self.issue(form, grid, control)?;
        self.settle(self.stream)
    }

    fn raise(&self, stream: Ptr, raised: bool) -> Result<(), TransformRefusal> {
        let write = driver().stream_write.ok_or(TransformRefusal::DriverRefused)?;
        let value = if raised { FLAG_RAISED } else { 0 };
        // SAFETY: a stream and a word of our own.
        check(unsafe { write(stream, self.flag, value, WRITE_VALUE_DEFAULT) })
    }

    /// Copies words from the device; not more than two for each block.
    fn read(&self, from: u64, count: usize) -> Result<Vec<u32>, TransformRefusal> {
        let copy = driver().copy_out.ok_or(TransformRefusal::DriverRefused)?;
        let count = count.min(2 * self.blocks() as usize);
        // SAFETY: so many words of our own on both sides.
        check(unsafe { copy(self.landing.cast_mut().cast(), from, count * 4, self.stream) })?;
        self.settle(self.stream)?;
        // SAFETY: as above; nothing writes to them any more.
        Ok(unsafe { std::slice::from_raw_parts(self.landing, count) }.to_vec())
    }

    /// Each block ran once and wrote what it must; then both are cleared.
    fn check(&self, how: &str) -> Result<(), TransformRefusal> {
        let blocks = self.blocks() as usize;
        // The counts lie behind the sums.
        let both = self.read(self.sums, 2 * blocks)?;
        let (sums, counts) = both.split_at(blocks);
        let clear = driver().mem_set.ok_or(TransformRefusal::DriverRefused)?;
        // SAFETY: memory of our own.
        check(unsafe { clear(self.sums, 0, 2 * blocks, self.stream) })?;
        let wrong = sums.iter().zip(&self.expected).filter(|(got, wanted)| got != wanted).count();
        let odd = counts.iter().filter(|n| **n != 1).count();
        if wrong == 0 && odd == 0 {
            return Ok(());
        }
        log!("the known kernel, {how}: {wrong} wrong sums, {odd} blocks of {blocks} not run once");
        Err(TransformRefusal::ResultsDiffer)
    }
}

/// Only in a forked child.
pub fn reset() {
    FOUND.reset(Vec::new());
}
