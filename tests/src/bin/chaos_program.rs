//! The CUDA program of the chaos tests: rounds of launches whose results tell a launch that was lost, run twice, out
//! of order, or with wrong bits. Prints one JSON object a round, the same on every run with the same seed. Ends at
//! the end of its standard input.
//!
//! A round launches on two streams from two threads, then across them, and every other time as a graph.

use anyhow::{Context, Result};
use clap::Parser;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaGraph, CudaSlice, CudaStream, DriverError, LaunchConfig,
    PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tally_demo::job;

const KERNELS: &str = include_str!("../../kernels/combine.ptx");
/// Blocks of a launch, at most, and threads of each; a word and a count for each thread.
const BLOCKS_MAX: usize = 24;
const THREADS: usize = 32;
const WORDS: usize = BLOCKS_MAX * THREADS;
/// Longest loop in a kernel.
const SPINS_MAX: u32 = 60;
/// Launches of the graph.
const GRAPH: [Launch; 3] = [
    Launch { value: 11, blocks: 3, spins: 5 },
    Launch { value: 12, blocks: 24, spins: 2 },
    Launch { value: 13, blocks: 7, spins: 9 },
];

/// Rounds of launches whose results tell what was lost, doubled or wrong.
#[derive(Parser)]
struct Options {
    /// Seed of the launches
    #[arg(long)]
    seed: u64,
    /// Rounds after which it begins anew, with the same results
    #[arg(long)]
    period: u64,
    /// Stop after so many rounds; 0: at the end of the input
    #[arg(long, default_value_t = 0)]
    rounds: u64,
    /// Silence after each round, us
    #[arg(long, default_value_t = 0)]
    gap_us: u64,
    /// Launches of a round on each stream, at most
    #[arg(long, default_value_t = 6)]
    launches: u64,
}

/// Signals that have reached a handler.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: i32) {
    SIGNALS.fetch_add(1, Relaxed);
}

/// Has SIGUSR1 interrupt system calls.
fn interruptible() {
    // SAFETY: a zeroed `sigaction` is one without flags, so that calls are not restarted; the handler adds to an
    // atomic number only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
}

#[derive(Clone, Copy)]
struct Launch {
    value: u32,
    blocks: usize,
    spins: u32,
}

impl Launch {
    fn random(random: &mut job::Random) -> Self {
        let mut below = |limit: u32| (random.uniform() * f64::from(limit)) as u32;
        // Many small grids, so that each thread's count tells of a few launches only.
        let blocks = [1, 2, 3, 5, 8, 13, 21, BLOCKS_MAX][below(8) as usize];
        Launch { value: below(u32::MAX), blocks, spins: below(SPINS_MAX) }
    }
}

/// Words, counts, and what the counts must be.
struct Lane {
    stream: Arc<CudaStream>,
    combine: CudaFunction,
    words: CudaSlice<u32>,
    counts: CudaSlice<u32>,
    expected: Vec<u32>,
}

impl Lane {
    fn new(stream: Arc<CudaStream>, combine: &CudaFunction) -> Result<Self, DriverError> {
        let (words, counts) = (stream.alloc_zeros(WORDS)?, stream.alloc_zeros(WORDS)?);
        let combine = combine.clone();
        Ok(Lane { stream, combine, words, counts, expected: vec![0; WORDS] })
    }

    fn begin_anew(&mut self) -> Result<(), DriverError> {
        self.stream.memset_zeros(&mut self.words)?;
        self.stream.memset_zeros(&mut self.counts)?;
        self.expected.fill(0);
        Ok(())
    }

    fn launch_on(&mut self, stream: &CudaStream, launch: Launch) -> Result<(), DriverError> {
        let shape = LaunchConfig {
            grid_dim: (launch.blocks as u32, 1, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut call = stream.launch_builder(&self.combine);
        call.arg(&mut self.words).arg(&mut self.counts).arg(&launch.value).arg(&launch.spins);
        // SAFETY: parameters as `combine` declares them, and a word and a count for every thread of the grid.
        unsafe { call.launch(shape) }?;
        Ok(())
    }

    fn expect(&mut self, launch: Launch) {
        self.expected[..launch.blocks * THREADS].iter_mut().for_each(|n| *n += 1);
    }

    fn launch(&mut self, launches: &[Launch]) -> Result<(), DriverError> {
        let stream = self.stream.clone();
        for &launch in launches {
            self.launch_on(&stream, launch)?;
            self.expect(launch);
        }
        Ok(())
    }

    fn capture(&mut self) -> Result<CudaGraph> {
        let stream = self.stream.clone();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        GRAPH.iter().try_for_each(|launch| self.launch_on(&stream, *launch))?;
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags)?.context("an empty graph")
    }

    /// Adds what it holds to a hash, and what is lost and doubled to `lost` and `doubled`.
    fn read(&self, hash: &mut u64, lost: &mut u64, doubled: &mut u64) -> Result<(), DriverError> {
        let words = self.stream.clone_dtoh(&self.words)?;
        let counts = self.stream.clone_dtoh(&self.counts)?;
        self.stream.synchronize()?;
        for byte in words.iter().chain(&counts).flat_map(|word| word.to_le_bytes()) {
            *hash = (*hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        for (ran, expected) in counts.iter().zip(&self.expected) {
            *lost += u64::from(expected.saturating_sub(*ran));
            *doubled += u64::from(ran.saturating_sub(*expected));
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    interruptible();
    static ENOUGH: AtomicBool = AtomicBool::new(false);
    if options.rounds == 0 {
        std::thread::spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            ENOUGH.store(true, Relaxed);
        });
    }
    let context = CudaContext::new(0)?;
    // SAFETY: the order across streams is made here, by `join`.
    unsafe { context.disable_event_tracking() };
    let module = context.load_module(Ptx::from_src(KERNELS))?;
    let combine = module.load_function("combine")?;
    let mut a = Lane::new(context.new_stream()?, &combine)?;
    let mut b = Lane::new(context.new_stream()?, &combine)?;
    let graph = a.capture()?;
    let mut launched = 0u64;
    for round in 0.. {
        if ENOUGH.load(Relaxed) || (options.rounds > 0 && round == options.rounds) {
            break;
        }
        let phase = round % options.period.max(1);
        if phase == 0 {
            a.begin_anew()?;
            b.begin_anew()?;
        }
        let mut random = job::Random::new(options.seed.wrapping_mul(1_000_003).wrapping_add(phase));
        let mut some = |limit: u64| -> Vec<Launch> {
            let n = 1 + (random.uniform() * limit as f64) as u64;
            (0..n).map(|_| Launch::random(&mut random)).collect()
        };
        let (on_a, on_b, across) = (some(options.launches), some(options.launches), some(2));
        b.stream.join(&a.stream)?;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| b.launch(&on_b));
            a.launch(&on_a)?;
            other.join().expect("the other thread panicked")
        })?;
        // What the other stream has written, from this one.
        a.stream.join(&b.stream)?;
        for launch in &across {
            b.launch_on(&a.stream, *launch)?;
            b.expect(*launch);
        }
        launched += (on_a.len() + on_b.len() + across.len()) as u64;
        if phase % 2 == 1 {
            graph.launch()?;
            GRAPH.iter().for_each(|launch| a.expect(*launch));
            launched += GRAPH.len() as u64;
        }
        b.stream.join(&a.stream)?;
        if phase % 3 == 0 {
            context.synchronize()?;
        }
        let (mut hash, mut lost, mut doubled) = (0xcbf2_9ce4_8422_2325_u64, 0, 0);
        a.read(&mut hash, &mut lost, &mut doubled)?;
        b.read(&mut hash, &mut lost, &mut doubled)?;
        let told = serde_json::json!({
            "round": round, "hash": format!("{hash:016x}"), "lost": lost, "doubled": doubled,
            "launched": launched, "signals": SIGNALS.load(Relaxed),
        });
        let mut out = std::io::stdout().lock();
        // In one piece, so that a reader sees whole lines.
        out.write_all(format!("{told}\n").as_bytes())?;
        out.flush()?;
        std::thread::sleep(Duration::from_micros(options.gap_us));
    }
    Ok(())
}
