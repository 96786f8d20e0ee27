//! An inference server in small: requests arrive at random times (Poisson), each
//! is a few dense layers on the GPU, each answer is compared with the right one.
//!
//! Prints one JSON object. Times are of two kinds: `service` from when a request
//! is begun to when its answer is here, `queued` from when it arrived. Arrivals
//! that could not be begun before the end are counted as `unserved`.

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tally_demo::job;

const KERNELS: &str = include_str!("../../kernels/inference.ptx");
/// Side of a block of `dense`; sizes are multiples of it.
const TILE: u32 = 16;
/// Threads in a block of `bias_relu`.
const ELEMENTWISE_THREADS: u32 = 256;
/// Different inputs that requests go through in turn.
const INPUTS: usize = 4;
/// Requests whose time is taken before the start, after as many that warm up.
const WARM_UP_REQUESTS: u32 = 6;

/// Sizes that suit a device.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// A device that is a CPU: a request is some 25 ms of one core.
    Software,
    /// A data-centre GPU: a request is some 0.5 ms of it.
    Cuda,
}

#[derive(Parser, Debug)]
#[command(about = "A small inference server with an open-loop load; prints one JSON object.")]
struct Options {
    /// Sizes to start from.
    #[arg(long, value_enum, default_value = "software")]
    preset: Preset,
    /// Width of a layer (a multiple of 16).
    #[arg(long)]
    size: Option<u32>,
    /// Rows of a request's input (a multiple of 16).
    #[arg(long)]
    rows: Option<u32>,
    /// Layers, two kernels each.
    #[arg(long)]
    layers: Option<u32>,
    /// How long requests arrive.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Stop after so many requests, however long it takes.
    #[arg(long)]
    requests: Option<u64>,
    /// Rate of arrivals, in requests a second
    #[arg(long, conflicts_with = "load")]
    rate: Option<f64>,
    /// Requests as a share of what could be served, by the time taken warming up.
    #[arg(long, default_value_t = 0.4)]
    load: f64,
    /// Seed of the arrivals, the weights and the inputs.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    #[command(flatten)]
    start: job::Start,
}

/// The network on the device.
struct Model {
    stream: Arc<CudaStream>,
    dense: CudaFunction,
    bias_relu: CudaFunction,
    rows: u32,
    size: u32,
    /// Weights and bias of each layer.
    layers: Vec<(CudaSlice<f32>, CudaSlice<f32>)>,
    /// A layer reads one and writes the other.
    activations: [CudaSlice<f32>; 2],
}

impl Model {
    fn new(
        context: &Arc<CudaContext>,
        rows: u32,
        size: u32,
        weights: &[(Vec<f32>, Vec<f32>)],
    ) -> Result<Self, DriverError> {
        let module = context.load_module(Ptx::from_src(KERNELS))?;
        let stream = context.default_stream();
        let layers = weights
            .iter()
            .map(|(w, b)| Ok((stream.clone_htod(w)?, stream.clone_htod(b)?)))
            .collect::<Result<_, DriverError>>()?;
        let buffer = || stream.alloc_zeros((rows * size) as usize);
        Ok(Self {
            dense: module.load_function("dense")?,
            bias_relu: module.load_function("bias_relu")?,
            activations: [buffer()?, buffer()?],
            stream,
            rows,
            size,
            layers,
        })
    }

    /// One request: input to the device, all layers, answer back.
    fn run(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), DriverError> {
        let count = (self.rows * self.size) as i32;
        let size = self.size as i32;
        let tiles = LaunchConfig {
            grid_dim: (self.size / TILE, self.rows / TILE, 1),
            block_dim: (TILE, TILE, 1),
            shared_mem_bytes: 0,
        };
        let elements = LaunchConfig {
            grid_dim: ((self.rows * self.size).div_ceil(ELEMENTWISE_THREADS), 1, 1),
            block_dim: (ELEMENTWISE_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let [x, y] = &mut self.activations;
        self.stream.memcpy_htod(input, x)?;
        for (weights, bias) in &self.layers {
            let mut dense = self.stream.launch_builder(&self.dense);
            dense.arg(&*x).arg(weights).arg(&mut *y).arg(&size).arg(&size);
            // SAFETY: parameters as `dense` declares them; x and y hold rows x
            // size numbers, the weights size x size, and the grid covers just y.
            unsafe { dense.launch(tiles) }?;
            let mut bias_relu = self.stream.launch_builder(&self.bias_relu);
            bias_relu.arg(&mut *y).arg(bias).arg(&size).arg(&count);
            // SAFETY: parameters as `bias_relu` declares them; it stops at count,
            // the length of y, and the bias holds size numbers.
            unsafe { bias_relu.launch(elements) }?;
            std::mem::swap(x, y);
        }
        self.stream.memcpy_dtoh(x, output)?;
        self.stream.synchronize()
    }
}

/// The same on the host, in the kernels' order of operations.
fn expected(rows: u32, size: u32, weights: &[(Vec<f32>, Vec<f32>)], input: &[f32]) -> Vec<f32> {
    let (rows, size) = (rows as usize, size as usize);
    let mut x = input.to_vec();
    for (weights, bias) in weights {
        let mut y = vec![0.0f32; rows * size];
        for (x, y) in x.chunks(size).zip(y.chunks_mut(size)) {
            for (x, weights) in x.iter().zip(weights.chunks(size)) {
                for (y, w) in y.iter_mut().zip(weights) {
                    *y = x.mul_add(*w, *y);
                }
            }
            for (y, b) in y.iter_mut().zip(bias) {
                *y = (*y + b).max(0.0);
            }
        }
        x = y;
    }
    x
}

/// Moments of arrival from the start, in seconds.
struct Arrivals {
    random: job::Random,
    rate: f64,
    at: f64,
}

impl Iterator for Arrivals {
    type Item = f64;
    fn next(&mut self) -> Option<f64> {
        self.at -= (1.0 - self.random.uniform()).ln() / self.rate;
        Some(self.at)
    }
}

/// What was seen of all requests.
#[derive(Default)]
struct Outcome {
    service_ms: Vec<f64>,
    queued_ms: Vec<f64>,
    errors: u64,
    unserved: u64,
}

fn percentiles(mut times: Vec<f64>) -> serde_json::Value {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1)) - 1;
        times.get(index).copied()
    };
    let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
    serde_json::json!({ "mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0) })
}

fn serve(
    options: &Options,
    rate: f64,
    model: &mut Model,
    questions: &[(Vec<f32>, Vec<f32>)],
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut output = vec![0.0; questions[0].1.len()];
    let arrivals = Arrivals { random: job::Random::new(options.seed ^ 0xa5a5), rate, at: 0.0 };
    let begin = Instant::now();
    for (number, at) in (0u64..).zip(arrivals) {
        match options.requests {
            Some(requests) if number >= requests => break,
            None if at >= options.seconds => break,
            None if begin.elapsed().as_secs_f64() >= options.seconds => {
                outcome.unserved += 1;
                continue;
            }
            _ => {}
        }
        let arrived = begin + Duration::from_secs_f64(at);
        std::thread::sleep(arrived.saturating_duration_since(Instant::now()));
        let (input, right) = &questions[number as usize % questions.len()];
        let begun = Instant::now();
        model.run(input, &mut output)?;
        let done = Instant::now();
        outcome.service_ms.push((done - begun).as_secs_f64() * 1e3);
        outcome.queued_ms.push(done.saturating_duration_since(arrived).as_secs_f64() * 1e3);
        outcome.errors += u64::from(job::checksum(&output) != job::checksum(right));
    }
    Ok(outcome)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (rows, size, layers) = match options.preset {
        Preset::Software => (48, 112, 12),
        Preset::Cuda => (128, 512, 12),
    };
    let (rows, size) = (options.rows.unwrap_or(rows), options.size.unwrap_or(size));
    let layers = options.layers.unwrap_or(layers);
    ensure!(rows >= TILE && rows.is_multiple_of(TILE), "--rows must be a multiple of {TILE}");
    ensure!(size >= TILE && size.is_multiple_of(TILE), "--size must be a multiple of {TILE}");
    ensure!(layers > 0, "--layers must be at least 1");

    let mut random = job::Random::new(options.seed);
    let limit = (6.0 / size as f32).sqrt();
    let weights: Vec<_> = (0..layers)
        .map(|_| (random.fill((size * size) as usize, limit), random.fill(size as usize, 0.1)))
        .collect();
    let questions: Vec<_> = (0..INPUTS)
        .map(|_| random.fill((rows * size) as usize, 1.0))
        .map(|input| (expected(rows, size, &weights, &input), input))
        .map(|(right, input)| (input, right))
        .collect();

    let context = CudaContext::new(0)?;
    let mut model = Model::new(&context, rows, size, &weights)?;
    let mut output = vec![0.0; (rows * size) as usize];
    let mut warm_up = || -> Result<f64> {
        let began = Instant::now();
        for _ in 0..WARM_UP_REQUESTS {
            model.run(&questions[0].0, &mut output)?;
        }
        Ok(began.elapsed().as_secs_f64() / f64::from(WARM_UP_REQUESTS))
    };
    warm_up()?;
    let solo_s = warm_up()?;
    let rate = options.rate.unwrap_or(options.load / solo_s);
    ensure!(rate.is_finite() && rate > 0.0, "--rate and --load must be above 0");

    options.start.wait()?;
    let outcome = serve(&options, rate, &mut model, &questions)?;
    let answers: Vec<f32> = questions.iter().flat_map(|(_, right)| right.clone()).collect();
    let launches_per_request = 2 * layers;
    let requests = outcome.service_ms.len() as u64;
    println!(
        "{}",
        serde_json::json!({
            "device": context.name()?,
            "requests": requests,
            "unserved": outcome.unserved,
            "errors": outcome.errors,
            "launches": (requests + 2 * u64::from(WARM_UP_REQUESTS)) * u64::from(launches_per_request),
            "rate_per_s": rate,
            "warm_up_ms": solo_s * 1e3,
            "service_ms": percentiles(outcome.service_ms),
            "queued_ms": percentiles(outcome.queued_ms),
            "checksum": job::checksum(&answers),
        })
    );
    ensure!(outcome.errors == 0, "{} of {requests} answers were wrong", outcome.errors);
    Ok(())
}
