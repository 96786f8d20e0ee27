//! What a policy may call: the interfaces that the contract lets it import.
//!
//! [`HostState`] is the data of a wasmtime store. For the length of a call it
//! holds the engine's [`World`] and [`Commands`], swapped in by their boxes.

use crate::bindings::{convert, imports, types};
use crate::cpu::Cpu;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::reasons::Reasons;
use crate::runtime::Beat;
use std::sync::Arc;
use tally_contract::limits::{HOST_CALLS_FULL_MAX, LOG_LINE_BYTES_MAX};
use tally_engine::policy::{self, Command, Commands, Context, World};
use tally_ipc::text::printable_lines;
use wasmtime::ResourceLimiter;

const SECOND_NS: u64 = 1_000_000_000;
/// What a description of a client or a kernel counts, bytes; most are about as long.
const DESCRIPTION_BYTES: usize = 512;
/// What a call of a function that passes data counts at least, bytes.
const PASSING_BYTES: usize = 64;

/// What a policy's store carries.
pub struct HostState {
    world: Box<World>,
    commands: Box<Commands>,
    /// The policy's, for the log.
    name: Arc<str>,
    pub metrics: Metrics,
    pub reasons: Reasons,
    pub log: LogGate,
    /// The last error line that it logged in this call: the message of a panic.
    pub last_words: String,
    pub memory: MemoryGate,
    pub cpu: Cpu,
    beat: Arc<Beat>,
    /// Data passed in this call of the policy, bytes.
    passed_bytes: usize,
    passed_bytes_max: usize,
}

/// A policy passed more data to and from the core in one call than it may.
#[derive(Debug, thiserror::Error)]
#[error("passed more than {0} bytes to and from the core in one call")]
pub struct PassedTooMuch(usize);

impl HostState {
    pub fn new(name: Arc<str>, limits: &Limits, beat: Arc<Beat>) -> Self {
        HostState {
            world: Box::default(),
            commands: Box::default(),
            name,
            metrics: Metrics::new(limits.metrics_max),
            reasons: Reasons::default(),
            log: LogGate::new(limits.log_lines_per_s_max),
            last_words: String::new(),
            memory: MemoryGate { bytes: 0, bytes_max: limits.memory_bytes },
            cpu: Cpu::default(),
            beat,
            passed_bytes: 0,
            passed_bytes_max: limits.host_call_bytes_max.saturating_mul(HOST_CALLS_FULL_MAX),
        }
    }

    /// A call of the policy begins.
    #[inline]
    pub fn begin(&mut self, cpu_ms: u64) {
        self.passed_bytes = 0;
        self.cpu.begin(cpu_ms);
        self.beat.begin();
    }

    /// The call that [`begin`](Self::begin) announced is over.
    #[inline]
    pub fn end(&self) {
        self.beat.end();
    }

    /// Fuel does not count what a function of the core does with its arguments and its answer.
    fn pass(&mut self, bytes: usize) -> Result<(), PassedTooMuch> {
        self.passed_bytes = self.passed_bytes.saturating_add(PASSING_BYTES + bytes);
        if self.passed_bytes <= self.passed_bytes_max {
            Ok(())
        } else {
            Err(PassedTooMuch(self.passed_bytes_max))
        }
    }

    /// Take the context in, or give it back: two pointers change places.
    pub fn swap(&mut self, context: &mut Context) {
        std::mem::swap(&mut self.world, &mut context.world);
        std::mem::swap(&mut self.commands, &mut context.commands);
    }

    /// Drop the commands made without a context.
    pub fn forget_commands(&mut self) {
        self.commands.drain();
    }

    /// Move the commands made without a context, during `init`, into one.
    pub fn hand_over(&mut self, context: &mut Context) {
        for command in self.commands.drain() {
            context.commands.push(command);
        }
    }
}

impl imports::types::Host for HostState {}

impl imports::log::Host for HostState {
    fn write(&mut self, level: types::Level, message: String) -> wasmtime::Result<()> {
        self.pass(message.len())?;
        let is_error = matches!(level, types::Level::Error);
        let is_admitted = self.log.admit();
        if !is_error && !is_admitted {
            return Ok(());
        }
        let message = printable_lines(&message, LOG_LINE_BYTES_MAX);
        if is_error {
            self.last_words.clone_from(&message);
        }
        if !is_admitted {
            return Ok(());
        }
        let policy = &*self.name;
        match level {
            types::Level::Trace => tracing::trace!(target: "policy", policy, "{message}"),
            types::Level::Debug => tracing::debug!(target: "policy", policy, "{message}"),
            types::Level::Info => tracing::info!(target: "policy", policy, "{message}"),
            types::Level::Warn => tracing::warn!(target: "policy", policy, "{message}"),
            types::Level::Error => tracing::error!(target: "policy", policy, "{message}"),
        }
        Ok(())
    }
}

impl imports::metrics::Host for HostState {
    fn counter(&mut self, name: String) -> wasmtime::Result<u32> {
        self.pass(name.len())?;
        Ok(self.metrics.counter(&name))
    }

    fn counter_add(&mut self, counter: u32, delta: u64) {
        self.metrics.add(counter, delta);
    }

    fn gauge(&mut self, name: String) -> wasmtime::Result<u32> {
        self.pass(name.len())?;
        Ok(self.metrics.gauge(&name))
    }

    fn gauge_set(&mut self, gauge: u32, value: i64) {
        self.metrics.set(gauge, value);
    }
}

impl imports::reasons::Host for HostState {
    fn define(&mut self, reason: u8, text: String) -> wasmtime::Result<()> {
        self.pass(text.len())?;
        self.reasons.define(reason, &text);
        Ok(())
    }
}

impl imports::sharing::Host for HostState {
    fn mode(&mut self) -> types::SharingMode {
        convert::sharing(self.world.sharing)
    }
}

impl imports::clients::Host for HostState {
    fn all(&mut self) -> wasmtime::Result<Vec<types::ClientState>> {
        self.pass(size_of::<types::ClientState>() * self.world.clients.len())?;
        Ok(self.world.clients.values().map(convert::client_state).collect())
    }

    fn get(&mut self, client: u32) -> wasmtime::Result<Option<types::ClientState>> {
        self.pass(size_of::<types::ClientState>())?;
        Ok(self.world.clients.get(&client).map(convert::client_state))
    }
}

impl imports::services::Host for HostState {
    fn get(&mut self, client: u32) -> wasmtime::Result<Option<types::Service>> {
        self.pass(size_of::<types::Service>())?;
        let view = self.world.clients.get(&client);
        Ok(view.and_then(|view| view.service.as_ref()).map(convert::service))
    }

    fn slack_ns(&mut self, now_ns: u64) -> wasmtime::Result<i64> {
        // It looks at each client.
        self.pass(size_of::<u64>() * self.world.clients.len())?;
        Ok(policy::slack_ns(self.world.clients.values(), now_ns))
    }
}

impl imports::identity::Host for HostState {
    fn get(&mut self, client: u32) -> wasmtime::Result<Option<types::ClientIdentity>> {
        self.pass(DESCRIPTION_BYTES)?;
        let view = self.world.clients.get(&client);
        Ok(view.map(|view| convert::client_identity(&view.info)))
    }
}

impl imports::kernels::Host for HostState {
    fn profile(&mut self, kernel: u32) -> wasmtime::Result<Option<types::KernelProfile>> {
        self.pass(DESCRIPTION_BYTES)?;
        Ok(self.world.profiles.get(kernel).map(convert::kernel_profile))
    }

    fn mean_ns(&mut self, kernel: u32) -> u64 {
        self.world.profiles.mean_ns(kernel)
    }
}

impl imports::kernel_identity::Host for HostState {
    fn get(&mut self, kernel: u32) -> wasmtime::Result<Option<types::KernelName>> {
        self.pass(DESCRIPTION_BYTES)?;
        Ok(self.world.profiles.get(kernel).map(convert::kernel_name))
    }
}

impl imports::timers::Host for HostState {
    fn set(&mut self, delay_ns: u64, token: u64) {
        self.commands.push(Command::SetTimer { delay_ns, token });
    }
}

impl imports::control::Host for HostState {
    fn set_window(&mut self, client: u32, window_ns: u64) {
        self.commands.push(Command::SetWindow { client, window_ns });
    }

    fn revoke_lease(&mut self, client: u32) {
        self.commands.push(Command::RevokeLease(client));
    }

    fn set_yield(&mut self, client: u32, yielded: bool) {
        self.commands.push(Command::SetYield { client, yielded });
    }

    fn set_auto_yield(&mut self, client: u32, enabled: bool, idle_ns: u64) {
        self.commands.push(Command::SetAutoYield { client, enabled, idle_ns });
    }
}

impl imports::widths::Host for HostState {
    fn all(&mut self) -> wasmtime::Result<Vec<u32>> {
        let all = self.world.widths();
        self.pass(size_of::<u32>() * all.len())?;
        Ok(all)
    }

    fn set(&mut self, client: u32, sms: u32) {
        self.commands.push(Command::SetWidth { client, sms });
    }

    fn cost_ns(&mut self, client: u32) -> u64 {
        self.world.clients.get(&client).map_or(0, |view| view.usage.limit_cost_ns)
    }
}

impl imports::high_priority::Host for HostState {
    fn set_ungated(&mut self, client: u32, ungated: bool) {
        self.commands.push(Command::SetUngated { client, ungated });
    }
}

/// Lets so many lines a second into the log. It counts the core's clock as passed
/// in with each call, so that a replay logs the same lines.
pub struct LogGate {
    lines_per_s_max: u32,
    /// Set by each call.
    pub now_ns: u64,
    second_from_ns: u64,
    lines: u32,
    /// Lines not let in.
    pub dropped: u64,
}

impl LogGate {
    fn new(lines_per_s_max: u32) -> Self {
        LogGate { lines_per_s_max, now_ns: 0, second_from_ns: 0, lines: 0, dropped: 0 }
    }

    fn admit(&mut self) -> bool {
        if self.now_ns.saturating_sub(self.second_from_ns) >= SECOND_NS {
            self.second_from_ns = self.now_ns;
            self.lines = 0;
        }
        let admitted = self.lines < self.lines_per_s_max;
        if admitted {
            self.lines += 1;
        } else {
            self.dropped += 1;
        }
        admitted
    }
}

/// A policy wanted more memory than it may have.
#[derive(Debug, thiserror::Error)]
#[error("wanted {wanted} bytes of memory, and may have {bytes_max}")]
pub struct MemoryRefused {
    wanted: usize,
    bytes_max: usize,
}

/// Bounds a policy's linear memories together. Growing beyond ends the call: most
/// languages would only panic on a failed `memory.grow`, and say less about why.
pub struct MemoryGate {
    bytes: usize,
    bytes_max: usize,
}

impl MemoryGate {
    /// All linear memories of the instance together.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A new instance starts with nothing.
    pub fn reset(&mut self) {
        self.bytes = 0;
    }
}

impl ResourceLimiter for MemoryGate {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let wanted = self.bytes.saturating_add(desired.saturating_sub(current));
        if wanted > self.bytes_max {
            return Err(MemoryRefused { wanted, bytes_max: self.bytes_max }.into());
        }
        self.bytes = wanted;
        Ok(true)
    }

    fn table_growing(
        &mut self,
        _current: usize,
        _desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        // Bounded by the pool.
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_gate_opens_again_each_second() {
        let mut gate = LogGate::new(2);
        let admitted = |gate: &mut LogGate| (0..5).filter(|_| gate.admit()).count();
        assert_eq!(admitted(&mut gate), 2);
        gate.now_ns = SECOND_NS - 1;
        assert_eq!(admitted(&mut gate), 0);
        gate.now_ns = SECOND_NS;
        assert_eq!(admitted(&mut gate), 2);
        assert_eq!(gate.dropped, 11);
    }

    #[test]
    fn memories_are_counted_together() {
        let mut gate = MemoryGate { bytes: 0, bytes_max: 100 };
        assert!(gate.memory_growing(0, 60, None).is_ok());
        assert!(gate.memory_growing(0, 40, None).is_ok());
        let error = gate.memory_growing(40, 41, None).unwrap_err();
        assert!(error.downcast_ref::<MemoryRefused>().is_some());
        gate.reset();
        assert!(gate.memory_growing(0, 100, None).is_ok());
    }
}
