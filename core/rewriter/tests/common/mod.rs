//! The corpus of kernels, and a device of host buffers to run them on.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use tally_rewriter::ControlBlock;
use tally_softcuda_vm::{BlockLaunch, Kernel, Memory, Module, Program, Scratch, run_block};

/// Every warp adds one to its block's count; the block must be whole.
pub const COUNTER: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 counts)
{
	.reg .pred %p<2>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<4>;
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
	ret;
}
";

/// A small generator of numbers, the same for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    /// Below `n`; 0 for 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// How to make one argument of a kernel.
#[derive(Clone, Debug)]
pub enum Arg {
    /// A buffer of this many random words.
    Buffer(usize),
    /// The same, of floating-point numbers between -1 and 1.
    Floats(usize),
    Word(u32),
    Bytes(Vec<u8>),
}

/// One launch of one kernel.
#[derive(Clone, Debug)]
pub struct Case {
    pub source: String,
    pub kernel: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub args: Vec<Arg>,
    /// A function reads the block's index: there is no form by offset.
    pub prelude_only: bool,
    /// It uses variables of its module: it has no transformed form.
    pub refused: bool,
}

impl Case {
    pub fn blocks(&self) -> u32 {
        self.grid.iter().product()
    }

    /// From `saxpy grid=9,1,1 block=37,1,1 args=buf:333,u32:7`.
    pub fn read(source: &str, line: &str) -> Case {
        let mut words = line.split_whitespace();
        let mut case = Case {
            source: source.to_string(),
            kernel: words.next().expect("a kernel's name").to_string(),
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            args: Vec::new(),
            prelude_only: false,
            refused: false,
        };
        let axes = |text: &str| -> [u32; 3] {
            let axes: Vec<u32> = text.split(',').map(|n| n.parse().unwrap()).collect();
            axes.try_into().unwrap()
        };
        for word in words {
            match word.split_once('=') {
                Some(("grid", value)) => case.grid = axes(value),
                Some(("block", value)) => case.block = axes(value),
                Some(("shared", value)) => case.shared = value.parse().unwrap(),
                Some(("args", value)) => case.args = value.split(',').map(arg).collect(),
                None if word == "prelude" => case.prelude_only = true,
                None if word == "refused" => case.refused = true,
                _ => panic!("{word}"),
            }
        }
        case
    }
}

fn arg(text: &str) -> Arg {
    let (kind, value) = text.split_once(':').unwrap();
    match kind {
        "buf" => Arg::Buffer(value.parse().unwrap()),
        "floats" => Arg::Floats(value.parse().unwrap()),
        "u32" => Arg::Word(value.parse().unwrap()),
        "bytes" => {
            let pairs = value.as_bytes().chunks(2);
            let byte = |p: &[u8]| u8::from_str_radix(std::str::from_utf8(p).unwrap(), 16).unwrap();
            Arg::Bytes(pairs.map(byte).collect())
        }
        _ => panic!("{text}"),
    }
}

/// What compilers made, from elsewhere in the repository, and how to launch it.
const COMPILED: [(&str, &[&str]); 5] = [
    (
        "../../softcuda/vm/tests/kernels/basic.ptx",
        &[
            "vector_add grid=5,1,1 block=64,1,1 args=floats:300,floats:300,floats:300,u32:300",
            "matmul16 grid=3,3,1 block=16,16,1 args=floats:2304,floats:2304,floats:2304,u32:48",
            "reduce grid=6,1,1 block=128,1,1 shared=512 args=buf:700,buf:1,u32:700",
            "fibonacci grid=3,1,1 block=40,1,1 args=buf:64",
            "indirect grid=1,1,1 block=30,1,1 args=floats:64 refused",
            "structs grid=3,1,1 block=20,1,1 args=bytes:000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f,buf:400",
            "collatz grid=7,1,1 block=50,1,1 args=buf:350,u32:340",
            "switcher grid=1,1,1 block=64,1,1 args=buf:64",
            "local_array grid=3,1,1 block=64,1,1 args=buf:64,buf:16",
            "votes grid=3,1,1 block=96,1,1 args=buf:96",
        ],
    ),
    (
        "../../softcuda/vm/tests/kernels/more.ptx",
        &[
            "leavers grid=3,1,1 block=100,1,1 args=buf:5",
            "nested grid=3,1,1 block=128,1,1 args=buf:128",
            "named grid=3,1,1 block=64,1,1 args=buf:32",
            "depths grid=3,1,1 block=64,1,1 args=buf:64",
            "hello grid=3,1,1 block=32,1,1 args=buf:32",
        ],
    ),
    (
        "../../demo/kernels/inference.ptx",
        &["dense grid=2,3,1 block=16,16,1 args=floats:4096,floats:4096,floats:4096,u32:48,u32:32"],
    ),
    (
        "../../demo/kernels/training.ptx",
        &[
            "forward_error grid=2,3,1 block=16,16,1 args=floats:4096,floats:4096,floats:4096,floats:4096,u32:48,u32:32",
            "gradient_step grid=2,3,1 block=16,16,1 args=floats:4096,floats:4096,floats:4096,u32:32,u32:48,u32:32,u32:1000000000",
        ],
    ),
    ("../../softcuda/driver/tests/kernels/basic.ptx", &[]),
];

/// This package's folder: where it is now, which need not be where it was built.
fn root() -> PathBuf {
    let now = std::env::var("CARGO_MANIFEST_DIR");
    now.unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").into()).into()
}

fn read(path: &str) -> (PathBuf, String) {
    let path = root().join(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
    (path, text)
}

/// The corpus' files, with their names.
pub fn files() -> Vec<(String, String)> {
    let mut names: Vec<_> = std::fs::read_dir(root().join("tests/corpus"))
        .unwrap()
        .map(|e| format!("tests/corpus/{}", e.unwrap().file_name().into_string().unwrap()))
        .collect();
    names.sort();
    names.extend(COMPILED.iter().map(|(name, _)| name.to_string()));
    names.into_iter().map(|name| (name.clone(), read(&name).1)).collect()
}

/// Every launch of the corpus.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, source) in files() {
        let own = source.lines().filter_map(|l| l.strip_prefix("//@ "));
        let listed = COMPILED.iter().filter(|(n, _)| *n == name).flat_map(|(_, lines)| *lines);
        for line in own.chain(listed.copied()) {
            cases.push(Case::read(&source, line));
        }
    }
    cases
}

/// Device memory: buffers, in the order in which they were made.
#[derive(Default)]
pub struct Device {
    buffers: Vec<(Box<[u128]>, u64)>,
}

impl Memory for Device {
    fn range(&self, addr: u64) -> Option<(u64, u64)> {
        let mut ranges = self.buffers.iter().map(|(b, bytes)| (b.as_ptr() as u64, *bytes));
        ranges.find(|&(base, len)| addr >= base && addr < base + len)
    }
}

impl Device {
    pub fn alloc(&mut self, content: &[u8]) -> u64 {
        let mut words = vec![0u128; content.len().div_ceil(16).max(1)].into_boxed_slice();
        // SAFETY: the words have at least as many bytes, and nobody else has them.
        unsafe { std::ptr::copy(content.as_ptr(), words.as_mut_ptr().cast(), content.len()) };
        let at = words.as_ptr() as u64;
        self.buffers.push((words, content.len() as u64));
        at
    }

    pub fn alloc_words(&mut self, words: &[u32]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.alloc(&bytes)
    }

    /// A word that kernels of this device may be using at the same time.
    pub fn word(&self, at: u64) -> &std::sync::atomic::AtomicU32 {
        assert!(self.range(at).is_some() && at.is_multiple_of(4));
        // SAFETY: the address is of a buffer of this device, aligned, and kernels
        // touch words only atomically.
        unsafe { &*(at as *const std::sync::atomic::AtomicU32) }
    }

    pub fn words(&self, at: u64, n: usize) -> Vec<u32> {
        use std::sync::atomic::Ordering::Relaxed;
        (0..n).map(|i| self.word(at + 4 * i as u64).load(Relaxed)).collect()
    }

    /// What the first `n` buffers hold.
    pub fn snapshot(&self, n: usize) -> Vec<Vec<u8>> {
        let bytes = |(b, len): &(Box<[u128]>, u64)| {
            // SAFETY: a buffer has as many bytes, and no kernel runs.
            unsafe { std::slice::from_raw_parts(b.as_ptr().cast::<u8>(), *len as usize) }.to_vec()
        };
        self.buffers[..n].iter().map(bytes).collect()
    }

    /// Places a module's variables.
    pub fn link(&mut self, module: &Module) -> Program {
        let mut places = std::collections::HashMap::new();
        for var in module.globals() {
            let mut content = var.init.clone();
            content.resize(var.size as usize, 0);
            places.insert(var.name.clone(), self.alloc(&content));
        }
        for var in module.globals() {
            for (offset, name) in &var.relocations {
                let at = (places[&var.name] + offset) as *mut u64;
                // SAFETY: the offset is within the variable.
                unsafe { at.write_unaligned(at.read_unaligned() + places[name]) };
            }
        }
        module.clone().link(&mut |var| places[&var.name]).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// A kernel with its memory, as it was before any launch.
pub struct World {
    pub device: Device,
    pub program: Program,
    pub kernel: String,
    /// Its parameters; those of the control block are filled in by a launch.
    pub params: Vec<u8>,
    /// Buffers whose content is to be compared.
    pub compared: usize,
    pub block: [u32; 3],
    pub shared: u32,
    /// Where the count of each block's runs is, if the kernel counts them.
    pub counts: Option<u64>,
}

impl World {
    /// `kernel` of `module` with the arguments of `case`; `counted`: with one more, a
    /// buffer for the counts.
    pub fn new(case: &Case, module: &Module, kernel: &str, seed: u64, counted: bool) -> World {
        let mut device = Device::default();
        let program = device.link(module);
        let found = program.kernel(kernel).unwrap_or_else(|| panic!("no {kernel}"));
        assert!(found.unsupported.is_none(), "{kernel}: {:?}", found.unsupported);
        let mut random = Random::new(seed);
        let mut params = vec![0; found.param_bytes as usize];
        let mut values: Vec<Vec<u8>> = Vec::new();
        for arg in &case.args {
            values.push(match arg {
                Arg::Buffer(n) => {
                    let words: Vec<u32> = (0..*n).map(|_| random.next() as u32).collect();
                    device.alloc_words(&words).to_le_bytes().to_vec()
                }
                Arg::Floats(n) => {
                    let unit = |v: u64| (v % 4096) as f32 / 2048.0 - 1.0;
                    let words: Vec<u32> = (0..*n).map(|_| unit(random.next()).to_bits()).collect();
                    device.alloc_words(&words).to_le_bytes().to_vec()
                }
                Arg::Word(v) => v.to_le_bytes().to_vec(),
                Arg::Bytes(bytes) => bytes.clone(),
            });
        }
        let mut counts = None;
        if counted {
            let at = device.alloc_words(&vec![0; case.blocks() as usize]);
            counts = Some(at);
            values.push(at.to_le_bytes().to_vec());
        }
        for (param, value) in found.params.iter().zip(&values) {
            let n = value.len().min(param.size as usize);
            params[param.offset as usize..][..n].copy_from_slice(&value[..n]);
        }
        let compared = device.buffers.len();
        World {
            device,
            program,
            kernel: kernel.to_string(),
            params,
            compared,
            block: case.block,
            shared: case.shared,
            counts,
        }
    }

    pub fn kernel(&self) -> &Kernel {
        self.program.kernel(&self.kernel).unwrap()
    }

    pub fn params_with(&self, offset: u32, control: &ControlBlock) -> Vec<u8> {
        let last = self.kernel().params.last().expect("a control block");
        assert_eq!((last.offset, last.size), (offset, 56), "where the control block lies");
        let mut params = self.params.clone();
        params[offset as usize..][..56].copy_from_slice(&control.bytes());
        params
    }

    /// Runs block number `linear` of the grid on the VM.
    ///
    /// # Panics
    /// If the block traps.
    pub fn run(&self, params: &[u8], grid: [u32; 3], linear: u32, sm: u32, scratch: &mut Scratch) {
        let launch = BlockLaunch {
            program: &self.program,
            kernel: self.kernel(),
            params,
            grid,
            block: self.block,
            block_index: [linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]],
            dynamic_shared_bytes: self.shared,
            sm_id: sm,
            sm_count: 8,
        };
        if let Err(trap) = run_block(&launch, &self.device, scratch, &AtomicBool::new(false)) {
            panic!("{}: {trap}", self.kernel);
        }
    }
}

/// Statements of [`waits`], and whether a kernel with them may wait for other blocks.
#[allow(dead_code)]
pub const WAITS: [(&str, bool); 35] = [
    ("ld.global.u32 %r1, [%rd1];", false),
    ("ld.global.nc.u32 %r1, [%rd1];", false),
    ("ld.u32 %r1, [%rd1];", false),
    ("ld.global.lu.u32 %r1, [%rd1];", false),
    ("ld.volatile.shared.u32 %r1, [room];", false),
    ("atom.shared.add.u32 %r1, [room], 1;", false),
    ("red.global.add.u32 [%rd1], 1;", false),
    // As nvcc writes a reduction.
    ("atom.global.add.u32 %r2, [%rd1], 1;", false),
    ("atom.global.add.u32 _, [%rd1], 1;", false),
    ("atom.global.exch.b32 %r2, [%rd1], 1;", false),
    ("fence.acq_rel.cta; ld.global.u32 %r1, [%rd1];", false),
    ("membar.cta; ld.global.u32 %r1, [%rd1];", false),
    ("cp.async.ca.shared.global [room], [%rd1], 16;", false),
    ("ld.volatile.global.u32 %r1, [%rd1];", true),
    // `while (*flag == 0) __threadfence();` reads anew each time.
    ("membar.gl; ld.global.u32 %r1, [%rd1];", true),
    ("membar.sys; ld.global.u32 %r1, [%rd1];", true),
    ("fence.acq_rel.gpu; ld.global.u32 %r1, [%rd1];", true),
    ("fence.acq_rel.sys; ld.global.u32 %r1, [%rd1];", true),
    ("fence.sc.gpu; ld.global.u32 %r1, [%rd1];", true),
    ("ld.volatile.global.f64 %d1, [%rd1]; cvt.rzi.u32.f64 %r1, %d1;", true),
    ("atom.add.f32 %f1, [%rd1], 0f3F800000; cvt.rzi.u32.f32 %r1, %f1;", true),
    ("atom.global.add.f64 %d1, [%rd1], 0d3FF0000000000000; cvt.rzi.u32.f64 %r1, %d1;", true),
    ("ld.volatile.u32 %r1, [%rd1];", true),
    ("ld.relaxed.gpu.global.u32 %r1, [%rd1];", true),
    ("ld.relaxed.sys.u32 %r1, [%rd1];", true),
    ("ld.acquire.gpu.global.u32 %r1, [%rd1];", true),
    ("@%p1 ld.acquire.sys.global.u32 %r1, [%rd1];", true),
    ("ld.global.cg.u32 %r1, [%rd1];", true),
    ("ld.global.cv.u32 %r1, [%rd1];", true),
    ("ld.volatile.global.v2.u32 {%r1, %r3}, [%rd1];", true),
    ("atom.global.add.u32 %r1, [%rd1], 1;", true),
    ("atom.add.u32 %r1, [%rd1], 1;", true),
    ("atom.acquire.gpu.global.or.b32 %r1, [%rd1], 1;", true),
    ("atom.global.cas.b32 %r1, [%rd1], 1, 2;", true),
    ("atom.global.exch.b32 %r1, [%rd1], 1;", true),
];

/// A kernel `k` with these statements, which stores `%r1`; any block's, and each block's own.
#[allow(dead_code)]
pub fn waits(statements: &str) -> String {
    format!(
        ".visible .entry k(.param .u64 p) {{ .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<2>; \
         .reg .f32 %f<2>; .reg .f64 %d<2>; \
         .shared .align 16 .b8 room[64]; mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; \
         ld.param.u64 %rd1, [p]; cvta.to.global.u64 %rd1, %rd1; {statements} \
         st.global.u32 [%rd1+16], %r1; ret; }}"
    )
}

/// Statements of [`waits`]'s kernel, and whether they tell it its SM.
pub const READS_SM: [(&str, bool); 4] = [
    ("mov.u32 %r1, %smid; st.global.u32 [%rd1], %r1;", true),
    ("mov.u32 %r1, %nsmid; st.global.u32 [%rd1], %r1;", true),
    ("mov.u32 %r1, %ctaid.x; st.global.u32 [%rd1], %r1;", false),
    ("mov.u32 %r1, %tid.x; st.global.u32 [%rd1], %r1;", false),
];
