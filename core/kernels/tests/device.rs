//! The corpus in its cut forms on a GPU, as `differential.rs` does it in the
//! interpreter: `cargo test -p tally-kernels --test device -- --ignored`.
#![allow(missing_docs)]

mod common;

use common::{Arg, Case, Random, cases};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use tally_kernels::control::FLAG_RAISED;
use tally_kernels::{ControlBlock, CutForm, CutKernel, Refusal, ptx};

/// Words of the flag: SMs share them by their number.
const FLAGS: u32 = 4;

/// A function of the driver, by name.
fn symbol<F: Copy>(name: &str) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    let name = CString::new(name).unwrap();
    // SAFETY: the names are C strings; the type is the one that the driver's header
    // gives, and as large as a pointer.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "no libcuda.so.1");
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "no {name:?}");
        std::mem::transmute_copy(&found)
    }
}

/// Calls a function of the driver and expects success.
macro_rules! call {
    ($name:literal, $($arg:expr => $type:ty),*) => {{
        let f: unsafe extern "C" fn($($type),*) -> c_int = symbol($name);
        // SAFETY: the types are the driver's, and the arguments live through the call.
        let code = unsafe { f($($arg),*) };
        assert_eq!(code, 0, "{}", $name);
    }};
}

struct Gpu {
    streams: [*mut c_void; 2],
}

impl Gpu {
    fn open() -> Gpu {
        let mut context = std::ptr::null_mut();
        call!("cuInit", 0 => c_uint);
        call!("cuDevicePrimaryCtxRetain", &mut context => *mut *mut c_void, 0 => c_int);
        call!("cuCtxSetCurrent", context => *mut c_void);
        let mut streams = [std::ptr::null_mut(); 2];
        for stream in &mut streams {
            call!("cuStreamCreate", stream => *mut *mut c_void, 1 => c_uint);
        }
        Gpu { streams }
    }

    fn load(&self, text: &str, kernel: &str) -> *mut c_void {
        let (text, kernel) = (CString::new(text).unwrap(), CString::new(kernel).unwrap());
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        call!("cuModuleLoadData", &mut module => *mut *mut c_void, text.as_ptr() => *const c_char);
        call!("cuModuleGetFunction", &mut function => *mut *mut c_void, module => *mut c_void, kernel.as_ptr() => *const c_char);
        function
    }

    fn alloc(&self, content: &[u32]) -> u64 {
        let mut at = 0u64;
        let bytes = content.len().max(1) * 4;
        call!("cuMemAlloc_v2", &mut at => *mut u64, bytes => usize);
        self.write(at, content);
        at
    }

    fn write(&self, at: u64, words: &[u32]) {
        let bytes = words.len() * 4;
        call!("cuMemcpyHtoDAsync_v2", at => u64, words.as_ptr().cast() => *const c_void, bytes => usize, self.streams[1] => *mut c_void);
        call!("cuStreamSynchronize", self.streams[1] => *mut c_void);
    }

    fn read(&self, at: u64, n: usize) -> Vec<u32> {
        let mut out = vec![0u32; n];
        call!("cuMemcpyDtoH_v2", out.as_mut_ptr().cast() => *mut c_void, at => u64, n * 4 => usize);
        out
    }

    fn launch(
        &self,
        function: *mut c_void,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        params: &[u8],
    ) {
        let mut bytes = params.len();
        // CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END.
        let mut extra: [*mut c_void; 5] = [
            std::ptr::without_provenance_mut(1),
            params.as_ptr() as *mut c_void,
            std::ptr::without_provenance_mut(2),
            (&raw mut bytes).cast(),
            std::ptr::null_mut(),
        ];
        let none = std::ptr::null_mut();
        call!("cuLaunchKernel", function => *mut c_void,
            grid[0] => c_uint, grid[1] => c_uint, grid[2] => c_uint,
            block[0] => c_uint, block[1] => c_uint, block[2] => c_uint,
            shared => c_uint, self.streams[0] => *mut c_void,
            none => *mut *mut c_void, extra.as_mut_ptr() => *mut *mut c_void);
    }

    fn wait(&self) {
        call!("cuStreamSynchronize", self.streams[0] => *mut c_void);
    }
}

/// Buffers and parameters of one case, fresh.
struct Memory {
    buffers: Vec<(u64, usize)>,
    params: Vec<u8>,
}

fn memory(gpu: &Gpu, case: &Case) -> Memory {
    let module = tally_ptx_vm::Module::parse(&case.source).unwrap();
    let program = module.link(&mut |_| 0).unwrap();
    let kernel = program.kernel(&case.kernel).unwrap();
    let mut random = Random::new(5);
    let mut out = Memory { buffers: Vec::new(), params: vec![0; kernel.param_bytes as usize] };
    for (arg, param) in case.args.iter().zip(&kernel.params) {
        let mut buffer = |words: Vec<u32>| {
            let at = gpu.alloc(&words);
            out.buffers.push((at, words.len()));
            at.to_le_bytes().to_vec()
        };
        let bytes = match arg {
            Arg::Buffer(n) => buffer((0..*n).map(|_| random.next() as u32).collect()),
            Arg::Floats(n) => {
                let unit = |v: u64| ((v % 4096) as f32 / 2048.0 - 1.0).to_bits();
                buffer((0..*n).map(|_| unit(random.next())).collect())
            }
            Arg::Word(v) => v.to_le_bytes().to_vec(),
            Arg::Bytes(bytes) => bytes.clone(),
        };
        let n = bytes.len().min(param.size as usize);
        out.params[param.offset as usize..][..n].copy_from_slice(&bytes[..n]);
    }
    out
}

impl Memory {
    fn content(&self, gpu: &Gpu) -> Vec<Vec<u32>> {
        self.buffers.iter().map(|(at, n)| gpu.read(*at, *n)).collect()
    }

    fn with(&self, kernel: &CutKernel, control: &ControlBlock) -> Vec<u8> {
        let mut params = self.params.clone();
        params.resize(kernel.control_offset as usize, 0);
        params.extend(control.bytes());
        params
    }
}

fn cut(gpu: &Gpu, case: &Case, form: CutForm) -> Result<(*mut c_void, CutKernel), Refusal> {
    let only = [case.kernel.as_str()];
    let mut cut = ptx::rewrite(&case.source, form, Some(&only))?;
    if cut.kernel(&case.kernel) == Err(Refusal::WritableGlobals) {
        cut = ptx::duplicate(&case.source, form, Some(&only))?;
    }
    if let Some((_, why)) = cut.refused.first() {
        return Err(*why);
    }
    let kernel = cut.kernels[0].clone();
    let text = std::str::from_utf8(&cut.image).unwrap();
    Ok((gpu.load(text, &kernel.name), kernel))
}

fn halves(n: u32, random: &mut Random) -> Vec<(u32, u32)> {
    let a = random.below(n as usize + 1) as u32;
    let b = a + random.below((n - a) as usize + 1) as u32;
    let mut out: Vec<_> = [(a, b), (b, n), (0, a)].into_iter().filter(|(l, h)| l < h).collect();
    random.shuffle(&mut out);
    out
}

#[test]
#[ignore = "needs a GPU"]
fn cut_kernels_do_on_a_gpu_what_whole_ones_do() {
    let gpu = Gpu::open();
    let (mut kernels, mut schedules) = (0, 0);
    for case in cases() {
        let whole = memory(&gpu, &case);
        let function = gpu.load(&case.source, &case.kernel);
        gpu.launch(function, case.grid, case.block, case.shared, &whole.params);
        gpu.wait();
        let want = whole.content(&gpu);
        kernels += 1;
        let same = |memory: &Memory, how: &str| {
            gpu.wait();
            assert!(memory.content(&gpu) == want, "{} {how}: other results", case.kernel);
        };
        let (prelude, kernel) = cut(&gpu, &case, CutForm::Prelude).unwrap();
        for seed in 0..8 {
            let random = &mut Random::new(seed + 1);
            if let Ok((sub_grid, kernel)) = cut(&gpu, &case, CutForm::SubGrid) {
                let memory = memory(&gpu, &case);
                for (lo, hi) in halves(case.blocks(), random) {
                    let params = memory.with(&kernel, &ControlBlock::sub_grid(lo, case.grid));
                    gpu.launch(sub_grid, [hi - lo, 1, 1], case.block, case.shared, &params);
                }
                same(&memory, "sub-grids");
                schedules += 1;
            }
            let slices = memory(&gpu, &case);
            for (lo, hi) in halves(case.blocks(), random) {
                let params = slices.with(&kernel, &ControlBlock::slice(lo, hi, [1; 3]));
                gpu.launch(prelude, case.grid, case.block, case.shared, &params);
            }
            same(&slices, "slices");
            let memory = memory(&gpu, &case);
            let blocks = case.blocks() as usize;
            let table = gpu.alloc(&vec![3; blocks]);
            let (flag, notice) = (gpu.alloc(&[0; 32 * FLAGS as usize]), gpu.alloc(&[0]));
            for epoch2 in [4, 6, 8, 10] {
                // The SMs of some words stop; at last, none.
                let mut words = [0; 32 * FLAGS as usize];
                for word in 0..FLAGS as usize {
                    if epoch2 < 10 && random.below(2) == 0 || epoch2 == 4 && seed == 0 {
                        words[32 * word] = if random.below(2) == 0 { FLAG_RAISED } else { epoch2 };
                    }
                }
                gpu.write(flag, &words);
                let control =
                    ControlBlock::preemptible(table, flag, FLAGS - 1, notice, epoch2, 4, [1; 3]);
                let params = memory.with(&kernel, &control);
                gpu.launch(prelude, case.grid, case.block, case.shared, &params);
                gpu.wait();
                let skipped = gpu.read(table, blocks).iter().any(|w| w % 2 == 0);
                assert_eq!(gpu.read(notice, 1)[0] == epoch2, skipped, "{}", case.kernel);
            }
            assert!(gpu.read(table, blocks).iter().all(|w| w % 2 == 1 && *w >= 4));
            same(&memory, "preempted");
            schedules += 2;
        }
    }
    println!("device: {kernels} kernels, {schedules} cut schedules");
}

/// Every warp counts in its block's word and works for some time.
const SLOW: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 counts)
{
	.reg .pred %p<2>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<8>;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %laneid;
	setp.ne.u32 %p1, %r2, 0;
	ld.param.u64 %rd1, [counts];
	mul.wide.u32 %rd2, %r1, 4;
	add.u64 %rd1, %rd1, %rd2;
	@%p1 bra past;
	red.global.add.u32 [%rd1], 1;
past:
	bar.sync 0;
	mov.u64 %rd3, %clock64;
wait:
	mov.u64 %rd4, %clock64;
	sub.u64 %rd4, %rd4, %rd3;
	setp.lt.u64 %p1, %rd4, 20000;
	@%p1 bra wait;
	ret;
}
";

#[test]
#[ignore = "needs a GPU"]
fn a_raised_flag_stops_a_running_kernel_and_every_block_runs_once() {
    const BLOCKS: usize = 60_000;
    const WARPS: u32 = 5;
    let gpu = Gpu::open();
    let case = Case::read(SLOW, "k grid=60000,1,1 block=150,1,1");
    let (function, kernel) = cut(&gpu, &case, CutForm::Prelude).unwrap();
    let mut stopped = 0;
    for round in 0..6u32 {
        let counts = gpu.alloc(&vec![0; BLOCKS]);
        let table = gpu.alloc(&vec![0; BLOCKS]);
        let (flag, notice) = (gpu.alloc(&[0]), gpu.alloc(&[0]));
        let memory = Memory { buffers: vec![], params: counts.to_le_bytes().to_vec() };
        let mut ran_before = 0;
        for epoch2 in [4, 6, 8, 10] {
            let control = ControlBlock::preemptible(table, flag, 0, notice, epoch2, 4, [1; 3]);
            gpu.launch(function, case.grid, case.block, 0, &memory.with(&kernel, &control));
            if epoch2 < 10 {
                std::thread::sleep(std::time::Duration::from_micros(100 + 150 * u64::from(round)));
                gpu.write(flag, &[epoch2]);
            }
            gpu.wait();
            let ran = gpu.read(counts, BLOCKS);
            assert!(ran.iter().all(|n| *n == 0 || *n == WARPS), "warps of a block disagree");
            let ran = ran.iter().filter(|n| **n > 0).count();
            assert!(ran >= ran_before);
            let whole = ran == BLOCKS;
            assert_eq!(gpu.read(notice, 1)[0] != epoch2, whole);
            stopped += usize::from(!whole);
            ran_before = ran;
        }
        assert_eq!(ran_before, BLOCKS);
    }
    assert!(stopped > 0, "no launch was stopped");
    println!("device: {stopped} launches of {BLOCKS} blocks stopped while they ran");
}
