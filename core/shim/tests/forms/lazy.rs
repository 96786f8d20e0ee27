//! Streams that return late from some of the SMs: nothing that a program does can tell.

use crate::forms::until_limited;
use crate::governor::{SMS, offers};
use crate::program::{Cells, Device, Ptr, THREADS, ask, ok};
use crate::{both_under, kernels, welcome};
use std::ptr::null_mut;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use tally_ipc::ring::Answer;
use tally_ipc::wire::{RewriteSettings, SharingMode, Welcome};

/// Enough for the program's streams, and for an SM-limited one of each.
const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Long enough that whoever does not wait comes too early.
const WORK: u32 = 1_500;

fn lazily() -> Welcome {
    Welcome {
        sharing: SharingMode::Unmanaged,
        rewrite: RewriteSettings {
            reserve_sms: vec![1, 2],
            lazy_return: true,
            ..welcome().rewrite
        },
        ..welcome()
    }
}

/// A random number below `n`.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Memory that one stream after another works on.
struct Buffer {
    cells: Cells,
    /// Runs of each block, in memory of the host, which it may look at without a call.
    counts: &'static [AtomicU32],
    ks: Vec<u32>,
    /// The stream that has worked on it last: its place in [`Program::streams`].
    owner: usize,
    /// Copies, and how many steps had been made before each.
    copies: Vec<(u64, usize)>,
}

/// The legacy stream and two non-blocking ones, each with memory to work on.
struct Program<'a> {
    device: &'a Device,
    streams: [Ptr; 3],
    buffers: Vec<Buffer>,
    /// Nobody waits for what works on it.
    scratch: Cells,
    random: Random,
    k: u32,
}

impl<'a> Program<'a> {
    fn new(device: &'a Device, seed: u64) -> Self {
        let streams = [null_mut(), device.stream(1), device.stream(1)];
        let buffers = (0..3).map(|owner| buffer(device, owner)).collect();
        let scratch = device.cells(device.crowd);
        Program { device, streams, buffers, scratch, random: Random(seed), k: 0 }
    }

    fn step_in(&mut self, at: usize, stream: Ptr) {
        self.k += 1;
        let buffer = &mut self.buffers[at];
        self.device.step(&buffer.cells, [buffer.cells.blocks, 1, 1], stream, self.k, WORK);
        buffer.ks.push(self.k);
    }

    fn step(&mut self, at: usize) {
        self.step_in(at, self.streams[self.buffers[at].owner]);
    }

    fn order(&self, before: Ptr, behind: Ptr) {
        let event = self.device.event();
        // SAFETY: an event and streams of ours.
        unsafe {
            ok((self.device.cuda.cuEventRecord)(event, before));
            ok((self.device.cuda.cuStreamWaitEvent)(behind, event, 0));
        }
    }

    /// Another stream goes on.
    fn pass_on(&mut self, at: usize, to: usize) {
        let owner = self.buffers[at].owner;
        self.order(self.streams[owner], self.streams[to]);
        self.buffers[at].owner = to;
    }

    fn copy(&mut self, at: usize) {
        let Buffer { cells, ks, owner, copies, .. } = &mut self.buffers[at];
        let bytes = (cells.blocks * THREADS) as usize * 4;
        let to = self.device.memory(bytes / 4);
        let copy = self.device.cuda.cuMemcpyDtoDAsync_v2;
        // SAFETY: memory of this length, a stream of ours.
        ok(unsafe { copy(to, cells.data, bytes, self.streams[*owner]) });
        copies.push((to, ks.len()));
    }

    /// Wait for a buffer's steps in one of many ways: then they have been made.
    fn wait(&mut self, at: usize) {
        let (cuda, stream) = (&self.device.cuda, self.streams[self.buffers[at].owner]);
        let way = self.random.below(6);
        // SAFETY: a stream and an event of ours; memory of ours.
        unsafe {
            match way {
                0 => ok((cuda.cuStreamSynchronize)(stream)),
                1 => while (cuda.cuStreamQuery)(stream) != 0 {},
                2 => {
                    let event = self.device.event();
                    ok((cuda.cuEventRecord)(event, stream));
                    ok((cuda.cuEventSynchronize)(event));
                }
                3 => ok((cuda.cuCtxSynchronize)()),
                4 => {
                    // What gives memory back waits for all that runs.
                    let mut address = 0;
                    ok((cuda.cuMemAlloc_v2)(&mut address, 4));
                    ok((cuda.cuMemFree_v2)(address));
                }
                _ if stream.is_null() => drop(self.device.read(self.buffers[at].cells.data, 1)),
                _ => {
                    let mut word = 0_u32;
                    let (to, from) = ((&raw mut word).cast(), self.buffers[at].cells.data);
                    ok((cuda.cuMemcpyDtoHAsync_v2)(to, from, 4, stream));
                    ok((cuda.cuStreamSynchronize)(stream));
                }
            }
        }
        let Buffer { counts, ks, .. } = &self.buffers[at];
        let wrong = counts.iter().filter(|n| n.load(SeqCst) != ks.len() as u32).count();
        assert_eq!(wrong, 0, "blocks that had not run {} times after way {way}", ks.len());
    }

    /// A blocking stream goes on behind the legacy one, and that behind it, without a word.
    fn beside_legacy(&mut self, at: usize) {
        self.pass_on(at, 0);
        self.step(at);
        let blocking = self.device.stream(0);
        self.step_in(at, blocking);
        self.step(at);
        // SAFETY: a stream of ours.
        ok(unsafe { (self.device.cuda.cuStreamDestroy_v2)(blocking) });
    }

    /// A step as a graph.
    fn capture(&mut self, at: usize) {
        let owner = 1 + self.random.below(2);
        self.pass_on(at, owner);
        self.step(at);
        let (cuda, stream) = (&self.device.cuda, self.streams[owner]);
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: a stream of ours; thread-local.
        ok(unsafe { (cuda.cuStreamBeginCapture_v2)(stream, 1) });
        self.step(at);
        // SAFETY: a stream of ours, valid out-pointers.
        unsafe {
            ok((cuda.cuStreamEndCapture)(stream, &mut graph));
            ok((cuda.cuGraphInstantiateWithFlags)(&mut exec, graph, 0));
            ok((cuda.cuGraphLaunch)(exec, stream));
        }
    }

    /// A stream ends while what is in it goes on.
    fn destroy(&mut self) {
        let gone = 1 + self.random.below(2);
        let to = 3 - gone;
        for at in 0..self.buffers.len() {
            if self.buffers[at].owner == gone {
                self.step(at);
                self.pass_on(at, to);
            }
        }
        let Cells { blocks, .. } = self.scratch;
        self.device.step(&self.scratch, [blocks, 1, 1], self.streams[gone], 0, WORK);
        // SAFETY: a stream of ours.
        ok(unsafe { (self.device.cuda.cuStreamDestroy_v2)(self.streams[gone]) });
        self.streams[gone] = self.device.stream(1);
        // The new one may have what was known of the old one.
        (0..self.buffers.len()).for_each(|at| {
            self.step(at);
            self.pass_on(at, gone);
            self.step(at);
        });
    }

    fn act(&mut self) {
        let at = self.random.below(self.buffers.len());
        match self.random.below(20) {
            0..8 => (0..=self.random.below(4)).for_each(|_| self.step(at)),
            8..11 => {
                let to = self.random.below(3);
                self.pass_on(at, to);
            }
            11..13 => self.copy(at),
            13..16 => self.wait(at),
            16 => self.beside_legacy(at),
            17 | 18 => self.capture(at),
            _ => self.destroy(),
        }
    }

    fn check(&self) {
        // SAFETY: no arguments.
        ok(unsafe { (self.device.cuda.cuCtxSynchronize)() });
        for Buffer { cells, ks, copies, .. } in &self.buffers {
            let words = cells.blocks * THREADS;
            let after = |steps: usize| -> Vec<u32> {
                let all = |i| ks[..steps].iter().fold(0, |v, k| kernels::step(v, i, *k));
                (0..words).map(all).collect()
            };
            self.device.check_words(cells.data, &after(ks.len()));
            for (copy, steps) in copies {
                self.device.check_words(*copy, &after(*steps));
            }
        }
    }
}

fn buffer(device: &Device, owner: usize) -> Buffer {
    let blocks = device.crowd;
    let mut counts = null_mut();
    // SAFETY: a valid out-pointer; the memory is never freed.
    let counts = unsafe {
        ok((device.cuda.cuMemHostAlloc)(&mut counts, 4 * (blocks as usize + 1), 0));
        counts.write_bytes(0, 4 * (blocks as usize + 1));
        std::slice::from_raw_parts(counts.cast::<AtomicU32>(), blocks as usize)
    };
    let data = device.memory((blocks * THREADS) as usize + 1);
    let cells = Cells { data, counts: counts.as_ptr() as u64, blocks };
    Buffer { cells, counts, ks: Vec::new(), owner, copies: Vec::new() }
}

/// Launches are limited to some of the SMs, or to others, or have another form.
fn any_width(core: &crate::governor::Governor) {
    let mut random = Random(1);
    core.policy(move |request, _| {
        let sms = if random.below(4) == 0 { SMS - 2 } else { SMS - 1 };
        let answer = match random.below(8) {
            0 => Answer::Whole,
            1 => Answer::Slice(8),
            2 => Answer::Preemptible(0),
            _ => Answer::SmLimited(sms),
        };
        if offers(request, answer) { answer } else { Answer::Whole }
    });
}

fn until_limits_are_offered(device: &mut Device) {
    device.primary_context();
    device.warm_up();
    let cells = device.cells(device.crowd);
    while ask("limited?") == "no" {
        device.step(&cells, [cells.blocks, 1, 1], null_mut(), 1, 0);
        device.sync(null_mut());
    }
}

#[test]
fn whatever_a_program_does_next_is_behind_its_limited_launches() {
    both_under(
        whatever_a_program_does_next_is_behind_its_limited_launches,
        &[QUEUES],
        &lazily(),
        |device| {
            until_limits_are_offered(device);
            for seed in 0..8 {
                let mut program = Program::new(device, seed);
                (0..120).for_each(|_| program.act());
                program.check();
            }
        },
        |core| {
            core.warm_up("step");
            until_limited(core, "limited?");
            any_width(core);
            core.ends(0);
            let c = core.counters();
            let stayed = c.sm_limited_stayed.load(SeqCst);
            assert!(stayed > 100, "{stayed} of {}", c.sm_limited.load(SeqCst));
            assert_eq!((c.degraded.load(SeqCst), c.failed.load(SeqCst)), (0, 0));
        },
    );
}

/// Other threads wait for the context, make and destroy streams, give memory back and copy.
#[test]
fn other_threads_may_do_anything_beside_limited_launches() {
    both_under(
        other_threads_may_do_anything_beside_limited_launches,
        &[QUEUES],
        &lazily(),
        |device| {
            until_limits_are_offered(device);
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for kind in 0..2 {
                    let (device, over) = (device.clone(), &over);
                    scope.spawn(move || {
                        device.enter();
                        let mut random = Random(100 + kind);
                        let memory = device.memory(16);
                        while !over.load(SeqCst) {
                            disturb(&device, &mut random, memory);
                        }
                    });
                }
                for seed in 0..4 {
                    let mut program = Program::new(device, seed);
                    for _ in 0..80 {
                        program.act();
                    }
                    program.check();
                }
                over.store(true, SeqCst);
            });
        },
        |core| {
            core.warm_up("step");
            until_limited(core, "limited?");
            any_width(core);
            core.ends(0);
            let c = core.counters();
            assert!(c.sm_limited_stayed.load(SeqCst) > 0);
            assert_eq!(c.failed.load(SeqCst), 0);
        },
    );
}

fn disturb(device: &Device, random: &mut Random, memory: u64) {
    let cuda = &device.cuda;
    // SAFETY: streams and memory of ours.
    unsafe {
        match random.below(6) {
            0 => ok((cuda.cuCtxSynchronize)()),
            1 => {
                let mut address = 0;
                ok((cuda.cuMemAlloc_v2)(&mut address, 4));
                ok((cuda.cuMemFree_v2)(address));
            }
            2 => {
                let stream = device.stream(random.below(2) as u32);
                ok((cuda.cuMemcpyDtoDAsync_v2)(memory, memory + 32, 16, stream));
                ok((cuda.cuStreamDestroy_v2)(stream));
            }
            3 => ok((cuda.cuMemcpyDtoDAsync_v2)(memory, memory + 32, 16, null_mut())),
            4 => {
                (cuda.cuStreamQuery)(null_mut());
            }
            _ => std::thread::sleep(std::time::Duration::from_micros(300)),
        }
    }
}
