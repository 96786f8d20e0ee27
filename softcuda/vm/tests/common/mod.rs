//! A device of host buffers, and helpers to run PTX on it.
#![allow(dead_code)]

use std::sync::atomic::AtomicBool;
use tally_softcuda_vm::{
    BlockLaunch, BlockStats, Memory, Module, Program, Scratch, Trap, run_block,
};

/// Buffers at fixed host addresses. They are freed when the process ends.
#[derive(Default)]
pub struct Device {
    ranges: Vec<(u64, u64)>,
}

impl Memory for Device {
    fn range(&self, addr: u64) -> Option<(u64, u64)> {
        self.ranges.iter().copied().find(|&(base, len)| addr >= base && addr < base + len)
    }
}

impl Device {
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let words: &'static mut [u128] = Vec::leak(vec![0; bytes.div_ceil(16)]);
        let base = words.as_mut_ptr() as u64;
        self.ranges.push((base, bytes as u64));
        base
    }

    pub fn upload<T: Copy>(&mut self, data: &[T]) -> u64 {
        let at = self.alloc(std::mem::size_of_val(data));
        // SAFETY: `at` has as many bytes, and nothing else uses them yet.
        unsafe { std::ptr::copy(data.as_ptr(), at as *mut T, data.len()) };
        at
    }

    pub fn download<T: Copy>(&self, at: u64, n: usize) -> Vec<T> {
        // SAFETY: tests ask for what they uploaded, when no kernel runs.
        (0..n).map(|i| unsafe { (at as *const T).add(i).read() }).collect()
    }

    pub fn link(&mut self, ptx: &str) -> Program {
        let module = Module::parse(ptx).unwrap_or_else(|e| panic!("{e}"));
        let mut places = std::collections::HashMap::new();
        for var in module.globals() {
            let at = self.alloc(var.size.max(1) as usize);
            // SAFETY: as in `upload`; `init` is never longer than the variable.
            unsafe { std::ptr::copy(var.init.as_ptr(), at as *mut u8, var.init.len()) };
            places.insert(var.name.clone(), at);
        }
        for var in module.globals() {
            for (offset, name) in &var.relocations {
                let at = (places[&var.name] + offset) as *mut u64;
                // SAFETY: the offset is within the variable.
                unsafe { at.write_unaligned(at.read_unaligned() + places[name]) };
            }
        }
        module.link(&mut |var| places[&var.name]).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// A launch of a whole grid on `workers` host threads.
pub struct Run<'a> {
    pub kernel: &'a str,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub workers: usize,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self { kernel: "k", grid: [1; 3], block: [32, 1, 1], shared: 0, workers: 1 }
    }
}

impl Run<'_> {
    pub fn go(
        &self,
        device: &Device,
        program: &Program,
        params: &[u8],
    ) -> Result<BlockStats, Trap> {
        let kernel = program.kernel(self.kernel).expect("no such kernel");
        let blocks = self.grid.iter().product::<u32>();
        let worker = |first: usize| {
            let mut scratch = Scratch::new();
            let mut total = BlockStats::default();
            for i in (first as u32..blocks).step_by(self.workers) {
                let block_index = [
                    i % self.grid[0],
                    i / self.grid[0] % self.grid[1],
                    i / self.grid[0] / self.grid[1],
                ];
                let launch = BlockLaunch {
                    program,
                    kernel,
                    params,
                    grid: self.grid,
                    block: self.block,
                    block_index,
                    dynamic_shared_bytes: self.shared,
                    sm_id: first as u32,
                    sm_count: self.workers as u32,
                };
                let stats = run_block(&launch, device, &mut scratch, &AtomicBool::new(false))?;
                total.thread_instructions += stats.thread_instructions;
                total.printf_calls += stats.printf_calls;
            }
            Ok(total)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..self.workers).map(|w| scope.spawn(move || worker(w))).collect();
            let mut total = BlockStats::default();
            for thread in threads {
                let stats: BlockStats = thread.join().expect("a worker panicked")?;
                total.thread_instructions += stats.thread_instructions;
                total.printf_calls += stats.printf_calls;
            }
            Ok(total)
        })
    }
}

/// Parameters, 64 bits each.
pub fn params(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A module with one kernel `k(out)`, with registers of every class: %r, %rd,
/// %f, %fd, %rs, %p; `%rd0` is `out`, `%r0` is `%tid.x`.
pub fn kernel(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<20>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<40>;\n.reg .f32 %f<40>;\n\
         .reg .b64 %rd<40>;\n.reg .f64 %fd<40>;\n\
         ld.param.u64 %rd0, [out];\nmov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
    )
}

/// Runs `kernel(body)` on one block and gives the first `n` words of `out`.
pub fn run_body<T: Copy + Default>(body: &str, threads: u32, n: usize) -> Vec<T> {
    try_body(body, threads, n).unwrap_or_else(|e| panic!("{e}"))
}

pub fn try_body<T: Copy + Default>(body: &str, threads: u32, n: usize) -> Result<Vec<T>, Trap> {
    let mut device = Device::default();
    let out = device.upload(&vec![T::default(); n]);
    let program = device.link(&kernel(body));
    let run = Run { block: [threads, 1, 1], ..Run::default() };
    run.go(&device, &program, &params(&[out]))?;
    Ok(device.download(out, n))
}

/// Evaluates lines of PTX that leave a result in `reg`, by one thread.
pub fn eval(lines: &str, reg: &str) -> u64 {
    let store = match reg.as_bytes()[1..] {
        [b'r', b'd', ..] => "b64",
        [b'f', b'd', ..] => "f64",
        [b'r', b's', ..] => "b16",
        [b'f', ..] => "f32",
        _ => "b32",
    };
    run_body::<u64>(&format!("{lines}\nst.global.{store} [%rd0], {reg};"), 1, 1)[0]
}
