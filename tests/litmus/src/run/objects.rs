//! Making and ending a program's objects.

use super::memory::DeviceMemory;
use super::module::Loaded;
use super::{Context, Run, lock};
use crate::program::{Id, Module, Op, Source, StreamKind, Target};
use std::sync::{Arc, Mutex, PoisonError};

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;
/// Size of memory that is made to be freed.
const SPARE_BYTES: usize = 4096;

impl Run {
    /// Makes what no operation makes.
    pub(super) fn prepare(&self) -> Result<(), String> {
        let program = self.program;
        let made_later = |is: &dyn Fn(&Op) -> bool| program.has(is);
        for id in 0..program.contexts.len() {
            if self.is_own(id) && !made_later(&|op| *op == Op::CreateContext { context: id }) {
                self.create_context(id)?;
            }
        }
        // Whose context is made later is made with it.
        let is_there = |context: Id| self.context(context).is_ok();
        for (id, module) in program.modules.iter().enumerate().skip(1) {
            if is_there(module.context) && !made_later(&|op| *op == Op::Load { module: id }) {
                self.load(id)?;
            }
        }
        for (id, stream) in program.streams.iter().enumerate() {
            if is_there(stream.context) && !made_later(&|op| *op == Op::CreateStream { stream: id })
            {
                self.create_stream(id)?;
            }
        }
        for (id, event) in program.events.iter().enumerate() {
            if is_there(event.context) {
                self.create_event(id)?;
            }
        }
        for (id, &graph) in program.execs.iter().enumerate() {
            let context = program.graphs[graph].context;
            if is_there(context) && !made_later(&|op| *op == Op::Instantiate { exec: id }) {
                self.instantiate(id)?;
            }
        }
        if self.machine.process == 0 {
            self.machine.host.clear(program.host_words, program.flags);
        }
        Ok(())
    }

    /// Makes `context` current to the calling thread.
    pub(super) fn use_context(&self, context: Id) -> Result<(), String> {
        let handle = self.context_handle(context)?;
        // SAFETY: a context of ours.
        self.check(unsafe { self.machine.cuda.cuCtxSetCurrent(handle) })
    }

    pub(super) fn create_context(&self, id: Id) -> Result<(), String> {
        let (machine, program) = (self.machine, self.program);
        let cuda = machine.cuda;
        let (words, scratch) = (program.device_words, program.scratch_words);
        let fresh = || DeviceMemory::new(cuda, words, scratch).map_err(|failed| failed.to_string());
        let (mut handle, memory, kernels);
        if program.contexts[id].primary {
            handle = machine.primary;
            // SAFETY: the context that the process keeps.
            self.check(unsafe { cuda.cuCtxSetCurrent(handle) })?;
            let mut kept = lock(&machine.primary_memory);
            let fits = match kept.as_mut() {
                Some(kept) => kept.reuse(cuda, words, scratch).map_err(|f| f.to_string())?,
                None => false,
            };
            if !fits {
                *kept = Some(fresh()?);
            }
            drop(kept);
            (memory, kernels) = (machine.primary_memory.clone(), machine.primary_kernels.clone());
        } else {
            handle = 0;
            // SAFETY: a valid out pointer.
            self.check(unsafe { cuda.cuCtxCreate_v2(&mut handle, 0, 0) })?;
            memory = Arc::new(Mutex::new(Some(fresh()?)));
            let base = Module { context: id, source: Source::Heap, constant: 0 };
            let loaded = Loaded::new(cuda, base, &machine.folder, machine.shared_max);
            kernels = Arc::new(loaded.map_err(|failed| failed.to_string())?);
        }
        let mut spare = Vec::new();
        for _ in program.ops().filter(|(_, _, op)| **op == Op::Free { context: id }) {
            let mut address = 0;
            // SAFETY: a valid out pointer.
            self.check(unsafe { cuda.cuMemAlloc_v2(&mut address, SPARE_BYTES) })?;
            spare.push(address);
        }
        let addresses = lock(&memory).as_ref().map(|m| (m.word(0), m.scratch(0)));
        let (words, scratch) = addresses.ok_or("no memory")?;
        let spare = Mutex::new(spare);
        let context = Context { handle, words, scratch, memory, kernels, spare };
        *self.contexts[id].write().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::new(context));
        Ok(())
    }

    /// What belongs to a context that an operation makes.
    pub(super) fn fill_context(&self, id: Id) -> Result<(), String> {
        let program = self.program;
        let of = |context: Id| context == id;
        for (m, module) in program.modules.iter().enumerate().skip(1) {
            if of(module.context) && !program.has(|op| *op == Op::Load { module: m }) {
                self.load(m)?;
            }
        }
        for (s, stream) in program.streams.iter().enumerate() {
            if of(stream.context) && !program.has(|op| *op == Op::CreateStream { stream: s }) {
                self.create_stream(s)?;
            }
        }
        for (e, event) in program.events.iter().enumerate() {
            if of(event.context) {
                self.create_event(e)?;
            }
        }
        Ok(())
    }

    /// Reads a context's words and destroys it.
    pub(super) fn destroy_context(&self, id: Id) -> Result<(), String> {
        let context = self.context(id)?;
        self.use_context(id)?;
        self.read_words(id, &context)?;
        *self.contexts[id].write().unwrap_or_else(PoisonError::into_inner) = None;
        // Its objects go with it.
        for (s, stream) in self.program.streams.iter().enumerate() {
            if stream.context == id {
                self.streams[s].set(0);
            }
        }
        for (e, event) in self.program.events.iter().enumerate() {
            if event.context == id {
                self.events[e].set(0);
            }
        }
        for (m, module) in self.program.modules.iter().enumerate() {
            if module.context == id {
                *self.modules[m].write().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
        // SAFETY: of ours, not used again.
        self.check(unsafe { self.machine.cuda.cuCtxDestroy_v2(context.handle) })
    }

    fn read_words(&self, id: Id, context: &Context) -> Result<(), String> {
        let memory = lock(&context.memory);
        let memory = memory.as_ref().ok_or("no memory")?;
        // SAFETY: no pointers.
        self.check(unsafe { self.machine.cuda.cuCtxSynchronize() })?;
        let words = memory.read(self.machine.cuda).map_err(|failed| failed.to_string())?;
        lock(&self.values)[id] = Some(words);
        Ok(())
    }

    pub(super) fn load(&self, id: Id) -> Result<(), String> {
        let module = self.program.modules[id];
        self.use_context(module.context)?;
        let (cuda, machine) = (self.machine.cuda, self.machine);
        let loaded = Loaded::new(cuda, module, &machine.folder, machine.shared_max);
        let loaded = Arc::new(loaded.map_err(|failed| failed.to_string())?);
        *self.modules[id].write().unwrap_or_else(PoisonError::into_inner) = Some(loaded);
        Ok(())
    }

    pub(super) fn unload(&self, id: Id) -> Result<(), String> {
        self.use_context(self.program.modules[id].context)?;
        let loaded = self.modules[id].write().unwrap_or_else(PoisonError::into_inner).take();
        self.check(loaded.ok_or("the module is not there")?.unload(self.machine.cuda))
    }

    pub(super) fn create_stream(&self, id: Id) -> Result<(), String> {
        let wanted = self.program.streams[id];
        let flags = match wanted.kind {
            StreamKind::Blocking => 0,
            StreamKind::NonBlocking => NON_BLOCKING,
            StreamKind::Legacy | StreamKind::PerThread => return Ok(()),
        };
        self.use_context(wanted.context)?;
        let priority = self.machine.priority(wanted.urgency);
        let mut stream = 0;
        // SAFETY: a valid out pointer.
        let made =
            unsafe { self.machine.cuda.cuStreamCreateWithPriority(&mut stream, flags, priority) };
        self.check(made)?;
        self.streams[id].set(stream);
        Ok(())
    }

    pub(super) fn destroy_stream(&self, id: Id) -> Result<(), String> {
        self.use_context(self.program.streams[id].context)?;
        let stream = self.streams[id].set(0);
        // SAFETY: a stream of ours, not used again.
        self.check(unsafe { self.machine.cuda.cuStreamDestroy_v2(stream) })
    }

    fn create_event(&self, id: Id) -> Result<(), String> {
        let wanted = self.program.events[id];
        self.use_context(wanted.context)?;
        let flags = if wanted.timed { 0 } else { DISABLE_TIMING };
        let mut event = 0;
        // SAFETY: a valid out pointer.
        self.check(unsafe { self.machine.cuda.cuEventCreate(&mut event, flags) })?;
        self.events[id].set(event);
        Ok(())
    }

    pub(super) fn instantiate(&self, id: Id) -> Result<(), String> {
        let graph = &self.program.graphs[self.program.execs[id]];
        self.use_context(graph.context)?;
        let made = self.build_graph(graph)?;
        let mut exec = 0;
        // SAFETY: a graph of ours and a valid out pointer.
        let done = unsafe { self.machine.cuda.cuGraphInstantiateWithFlags(&mut exec, made, 0) };
        self.check(done)?;
        self.execs[id].set(exec);
        Ok(())
    }

    pub(super) fn update_exec(&self, id: Id, graph: Id) -> Result<(), String> {
        let graph = &self.program.graphs[graph];
        self.use_context(graph.context)?;
        let made = self.build_graph(graph)?;
        let mut info = [0; 3];
        // SAFETY: both of ours, and a valid out pointer.
        let done = unsafe {
            self.machine.cuda.cuGraphExecUpdate_v2(self.execs[id].get(), made, &mut info)
        };
        self.check(done)
    }

    pub(super) fn destroy_exec(&self, id: Id) -> Result<(), String> {
        let exec = self.execs[id].set(0);
        // SAFETY: of ours, not used again.
        self.check(unsafe { self.machine.cuda.cuGraphExecDestroy(exec) })
    }

    /// Ends everything that is left, once all work has ended.
    pub(super) fn finish(&self) -> Result<(), String> {
        let cuda = self.machine.cuda;
        let contexts = 0..self.program.contexts.len();
        for id in contexts.clone().filter(|&id| self.is_own(id)) {
            if let Ok(context) = self.context(id) {
                self.use_context(id)?;
                self.read_words(id, &context)?;
            }
        }
        for exec in self.execs.iter().map(|slot| slot.set(0)).filter(|&exec| exec != 0) {
            // SAFETY: ours, not used again, here and below.
            self.check(unsafe { cuda.cuGraphExecDestroy(exec) })?;
        }
        for graph in lock(&self.graphs).drain(..) {
            // SAFETY: as above.
            self.check(unsafe { cuda.cuGraphDestroy(graph) })?;
        }
        for event in self.events.iter().map(|slot| slot.set(0)).filter(|&event| event != 0) {
            // SAFETY: as above.
            self.check(unsafe { cuda.cuEventDestroy_v2(event) })?;
        }
        for stream in self.streams.iter().map(|slot| slot.set(0)).filter(|&stream| stream != 0) {
            // SAFETY: as above.
            self.check(unsafe { cuda.cuStreamDestroy_v2(stream) })?;
        }
        for id in 1..self.program.modules.len() {
            let is_there =
                self.modules[id].read().unwrap_or_else(PoisonError::into_inner).is_some();
            if is_there {
                self.unload(id)?;
            }
        }
        for id in contexts.filter(|&id| self.is_own(id)) {
            let Ok(context) = self.context(id) else { continue };
            if self.program.contexts[id].primary {
                self.free_spare(id, &context)?;
            } else {
                // SAFETY: ours, not used again.
                self.check(unsafe { cuda.cuCtxDestroy_v2(context.handle) })?;
            }
        }
        // SAFETY: the context that the process keeps.
        self.check(unsafe { cuda.cuCtxSetCurrent(self.machine.primary) })
    }

    fn free_spare(&self, id: Id, context: &Context) -> Result<(), String> {
        self.use_context(id)?;
        let left = std::mem::take(&mut *lock(&context.spare));
        for address in left {
            // SAFETY: memory of ours, not used again.
            self.check(unsafe { self.machine.cuda.cuMemFree_v2(address) })?;
        }
        Ok(())
    }

    /// What a target's calls are about.
    pub(super) fn context_of(&self, target: Target) -> Id {
        match target {
            Target::Stream(id) => self.program.streams[id].context,
            Target::Event(id) => self.program.events[id].context,
            Target::Context(id) => id,
        }
    }
}
