//! Runs the operations of one thread of a program.

use super::launch::Call;
use super::{Run, lock};
use crate::cu::{Handle, LaunchConfig};
use crate::program::{Id, Op, StreamKind, Target, Word, Work};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

const NOT_READY: u32 = 600;
/// `CU_EVENT_RECORD_EXTERNAL`: captured, it becomes a node that records the event at each launch.
const RECORD_EXTERNAL: u32 = 1;
/// How long a thread that waits for another, or for memory to change, sleeps at a time.
const NAP: Duration = Duration::from_micros(50);

/// A thread's current context.
struct Current {
    context: Id,
    /// It stays current, whatever context a call is about.
    is_fixed: bool,
}

impl Run {
    /// Runs a thread's operations, on the calling thread. Does not return if one fails.
    pub(super) fn thread(self: &Arc<Self>, id: Id) {
        let ops = &self.program.threads[id].ops;
        let mut current = Current { context: usize::MAX, is_fixed: false };
        for (i, op) in ops.iter().enumerate() {
            self.now_at(id, i);
            let done = match op {
                Op::Start { thread } => {
                    let (run, child) = (self.clone(), *thread);
                    *lock(&self.threads[child]) =
                        Some(std::thread::spawn(move || run.thread(child)));
                    Ok(())
                }
                Op::Join { thread } => {
                    // Not with the lock held: the main thread looks at all.
                    let handle = lock(&self.threads[*thread]).take();
                    match handle.map(std::thread::JoinHandle::join) {
                        Some(Ok(())) => Ok(()),
                        Some(Err(_)) => Err("it panicked".into()),
                        None => Err("it was not started".into()),
                    }
                }
                op => self.op(op, i, &mut current),
            };
            if let Err(why) = done {
                super::serve::fail(format!("thread {id}, operation {i} ({op}): {why}"));
            }
        }
        self.now_at(id, ops.len());
    }

    /// Makes a context current if it is not, and another is not to stay so.
    fn enter(&self, context: Id, current: &mut Current) -> Result<(), String> {
        if current.context != context && !current.is_fixed {
            self.use_context(context)?;
            current.context = context;
        }
        Ok(())
    }

    /// A stream's handle, and whether functions for per-thread streams are meant; its context is
    /// made current.
    fn stream(&self, on: Id, current: &mut Current) -> Result<(Handle, bool), String> {
        let stream = self.program.streams[on];
        self.enter(stream.context, current)?;
        Ok((self.streams[on].get(), stream.kind == StreamKind::PerThread))
    }

    fn op(&self, op: &Op, number: usize, current: &mut Current) -> Result<(), String> {
        let cuda = self.machine.cuda;
        // SAFETY, for all calls: handles of ours, valid out pointers, and memory that lives until
        // the work on it has ended.
        match op {
            Op::Submit { on, work } => {
                let (stream, own) = self.stream(*on, current)?;
                self.submit_to(stream, own, self.program.streams[*on].context, work, number)
            }
            Op::Record { event, on } => {
                let (stream, own) = self.stream(*on, current)?;
                // SAFETY: see above.
                self.check(unsafe { cuda.cuEventRecord(own, self.events[*event].get(), stream) })
            }
            Op::WaitEvent { on, event } => {
                let (stream, own) = self.stream(*on, current)?;
                let event = self.events[*event].get();
                // SAFETY: see above.
                self.check(unsafe { cuda.cuStreamWaitEvent(own, stream, event, 0) })
            }
            Op::Launch { exec, on } => {
                let (stream, own) = self.stream(*on, current)?;
                // SAFETY: see above.
                self.check(unsafe { cuda.cuGraphLaunch(own, self.execs[*exec].get(), stream) })
            }
            Op::Beside { context, op } => {
                self.enter(*context, current)?;
                current.is_fixed = true;
                let done = self.op(op, number, current);
                current.is_fixed = false;
                done
            }
            Op::Sync { target, asking: false } => self.synchronize(*target, current),
            Op::Sync { target, asking: true } => {
                while !self.is_ready(*target, current)? {
                    std::thread::sleep(NAP);
                }
                Ok(())
            }
            Op::Ask { target } => self.is_ready(*target, current).map(drop),
            Op::Elapsed { from, to } => {
                let (from, to) = (self.events[*from].get(), self.events[*to].get());
                let mut milliseconds = -1.0;
                // SAFETY: see above.
                self.check(unsafe { cuda.cuEventElapsedTime(&mut milliseconds, from, to) })?;
                if milliseconds < 0.0 { Err(format!("{milliseconds} ms")) } else { Ok(()) }
            }
            Op::Store { word, value } => {
                self.host_word(*word)?.store(*value, SeqCst);
                Ok(())
            }
            Op::Await { word, value } => {
                let word = self.host_word(*word)?;
                while word.load(SeqCst) < *value {
                    std::thread::sleep(NAP);
                }
                Ok(())
            }
            Op::Post { flag } => {
                self.machine.host.flag(*flag).store(1, SeqCst);
                Ok(())
            }
            Op::Pass { flag } => {
                while self.machine.host.flag(*flag).load(SeqCst) == 0 {
                    std::thread::sleep(NAP);
                }
                Ok(())
            }
            Op::Sleep { us } => {
                std::thread::sleep(Duration::from_micros((*us).into()));
                Ok(())
            }
            Op::Free { context } => {
                self.enter(*context, current)?;
                let address =
                    lock(&self.context(*context)?.spare).pop().ok_or("nothing to free")?;
                // SAFETY: see above; not used again.
                self.check(unsafe { cuda.cuMemFree_v2(address) })
            }
            Op::CopyNow { from, to } => {
                let (Word::Device(context, _), mut value) = (*from, 0_u32) else {
                    return Err("of words of the device only".into());
                };
                self.enter(context, current)?;
                let (from, to) = (self.address(*from)?, self.address(*to)?);
                // SAFETY: see above.
                self.check(unsafe { cuda.cuMemcpyDtoH_v2((&raw mut value).cast(), from, 4) })?;
                // SAFETY: see above.
                self.check(unsafe { cuda.cuMemcpyHtoD_v2(to, (&raw const value).cast(), 4) })?;
                // A small copy from pageable memory may still be under way when its call returns.
                // SAFETY: see above.
                self.check(unsafe { cuda.cuMemcpyDtoH_v2((&raw mut value).cast(), to, 4) })
            }
            Op::SetAttribute { module } => {
                let context = self.program.modules[*module].context;
                self.enter(context, current)?;
                let function = self.function("each", *module, context)?;
                // SAFETY: see above.
                self.check(unsafe {
                    cuda.cuFuncSetAttribute(function, super::module::SHARED_BYTES, 1024)
                })
            }
            op => {
                // These change what is current.
                current.context = usize::MAX;
                self.change(op)
            }
        }
    }

    /// Makes or ends an object.
    fn change(&self, op: &Op) -> Result<(), String> {
        match op {
            Op::Load { module } => self.load(*module),
            Op::Unload { module } => self.unload(*module),
            Op::CreateStream { stream } => self.create_stream(*stream),
            Op::DestroyStream { stream } => self.destroy_stream(*stream),
            Op::CreateContext { context } => {
                self.create_context(*context)?;
                self.fill_context(*context)
            }
            Op::DestroyContext { context } => self.destroy_context(*context),
            Op::Instantiate { exec } => self.instantiate(*exec),
            Op::Update { exec, graph } => self.update_exec(*exec, *graph),
            Op::DestroyExec { exec } => self.destroy_exec(*exec),
            other => Err(format!("not to be done here: {other}")),
        }
    }

    fn host_word(&self, word: Word) -> Result<&'static std::sync::atomic::AtomicU32, String> {
        match word {
            Word::Host(at) => Ok(self.machine.host.word(at)),
            Word::Device(..) => Err("the host has no such word".into()),
        }
    }

    fn synchronize(&self, target: Target, current: &mut Current) -> Result<(), String> {
        let cuda = self.machine.cuda;
        // SAFETY: handles of ours.
        let done = match target {
            Target::Stream(on) => {
                let (stream, own) = self.stream(on, current)?;
                // SAFETY: see above.
                unsafe { cuda.cuStreamSynchronize(own, stream) }
            }
            Target::Event(event) => {
                self.enter(self.context_of(target), current)?;
                // SAFETY: see above.
                unsafe { cuda.cuEventSynchronize(self.events[event].get()) }
            }
            Target::Context(context) => {
                self.enter(context, current)?;
                // SAFETY: no pointers.
                unsafe { cuda.cuCtxSynchronize() }
            }
        };
        self.check(done)
    }

    fn is_ready(&self, target: Target, current: &mut Current) -> Result<bool, String> {
        let cuda = self.machine.cuda;
        // SAFETY: handles of ours.
        let asked = match target {
            Target::Stream(on) => {
                let (stream, own) = self.stream(on, current)?;
                // SAFETY: see above.
                unsafe { cuda.cuStreamQuery(own, stream) }
            }
            Target::Event(event) => {
                self.enter(self.context_of(target), current)?;
                // SAFETY: see above.
                unsafe { cuda.cuEventQuery(self.events[event].get()) }
            }
            Target::Context(_) => return Err("contexts are not asked".into()),
        };
        match asked {
            Err(failed) if failed.code == NOT_READY => Ok(false),
            other => self.check(other).map(|()| true),
        }
    }

    /// Puts work into a stream of `context`, which is current. Launches take turns, by their
    /// `number`, between the two functions there are.
    pub(super) fn submit_to(
        &self,
        stream: Handle,
        own: bool,
        context: Id,
        work: &Work,
        number: usize,
    ) -> Result<(), String> {
        let cuda = self.machine.cuda;
        // SAFETY, for all: a stream of ours, and addresses of memory that lives until the work ends.
        let done = match work {
            Work::Kernel { kernel, module } => {
                let call = Call::new(self, kernel, *module, context)?;
                return self.launch(stream, own, &call, number);
            }
            Work::Fill { word, value, count } => {
                let at = self.address(*word)?;
                // SAFETY: see above.
                unsafe { cuda.cuMemsetD32Async(own, at, *value, *count as usize, stream) }
            }
            Work::Copy { from, to } => {
                let (from, to) = (self.address(*from)?, self.address(*to)?);
                // SAFETY: see above.
                unsafe { cuda.cuMemcpyAsync(own, to, from, 4, stream) }
            }
            Work::Pageable { word, value } => {
                let (at, value) = (self.address(*word)?, *value);
                // SAFETY: see above; the driver has read pageable memory when it returns.
                unsafe { cuda.cuMemcpyHtoDAsync_v2(own, at, (&raw const value).cast(), 4, stream) }
            }
            Work::HostFold { word, value } | Work::HostSet { word, value } => {
                let fold = matches!(work, Work::HostFold { .. });
                let (function, data) = self.host_call(*word, *value, fold)?;
                // SAFETY: the data lives until the program has ended.
                unsafe { cuda.cuLaunchHostFunc(own, stream, function, data) }
            }
            Work::Write { word, value } => {
                let at = self.address(*word)?;
                // SAFETY: see above.
                unsafe { cuda.cuStreamWriteValue32_v2(own, stream, at, *value, 0) }
            }
            Work::Wait { word, value } => {
                let at = self.address(*word)?;
                // SAFETY: see above. 0: at least the value.
                unsafe { cuda.cuStreamWaitValue32_v2(own, stream, at, *value, 0) }
            }
            Work::Pool { word, value } => {
                let (word, mut made) = (self.address(*word)?, 0);
                // SAFETY: a valid out pointer.
                self.check(unsafe { cuda.cuMemAllocAsync(own, &mut made, 4, stream) })?;
                // SAFETY: see above.
                self.check(unsafe { cuda.cuMemsetD32Async(own, made, *value, 1, stream) })?;
                let call = Call::add_from(self, context, word, made)?;
                self.launch(stream, own, &call, number)?;
                // SAFETY: not used by anything put into the stream later.
                unsafe { cuda.cuMemFreeAsync(own, made, stream) }
            }
            Work::Record { event } => {
                let event = self.events[*event].get();
                // SAFETY: see above.
                unsafe { cuda.cuEventRecordWithFlags(own, event, stream, RECORD_EXTERNAL) }
            }
            Work::Empty => Ok(()),
        };
        self.check(done)
    }

    fn launch(&self, stream: Handle, own: bool, call: &Call, number: usize) -> Result<(), String> {
        let cuda = self.machine.cuda;
        let (params, none) = (call.params(), std::ptr::null());
        let (f, blocks, threads, shared) =
            (call.function, call.blocks, call.threads, call.shared_bytes);
        // SAFETY, for both: a function and a stream of ours, and as many arguments as it has.
        let done = if number.is_multiple_of(2) {
            // SAFETY: see above.
            unsafe {
                cuda.cuLaunchKernel(
                    own,
                    f,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    shared,
                    stream,
                    params.as_ptr(),
                    none,
                )
            }
        } else {
            let config = LaunchConfig {
                grid: [blocks, 1, 1],
                block: [threads, 1, 1],
                shared_bytes: shared,
                stream,
                attributes: none.cast(),
                count: 0,
            };
            // SAFETY: see above.
            unsafe { cuda.cuLaunchKernelEx(own, &config, f, params.as_ptr(), none) }
        };
        self.check(done)
    }
}
