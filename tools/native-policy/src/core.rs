//! What a native policy may call: the engine's world and commands for the length of a
//! call, and metrics.

use crate::convert;
use std::collections::BTreeMap;
use tally_engine::policy::{self, Command, Commands, Context, World};
use tally_sdk::native::Core;
use tally_sdk::{
    ClientId, ClientIdentity, ClientState, KernelId, KernelName, KernelProfile, Level, Service,
    SharingMode,
};

/// Counters and gauges together, as in the Wasm host's default limits.
const METRICS_MAX: usize = 64;

/// A core for native policies; it drops log lines.
#[derive(Default)]
pub struct NativeCore {
    world: Box<World>,
    commands: Box<Commands>,
    metrics: Vec<(String, i64)>,
}

impl NativeCore {
    /// Take the context in, or give it back.
    pub fn swap(&mut self, context: &mut Context) {
        std::mem::swap(&mut self.world, &mut context.world);
        std::mem::swap(&mut self.commands, &mut context.commands);
    }

    /// Move the commands made without a context, during `init`, into one.
    pub fn hand_over(&mut self, context: &mut Context) {
        for command in self.commands.drain() {
            context.commands.push(command);
        }
    }

    /// Counters and gauges by name.
    pub fn metrics(&self) -> BTreeMap<String, i64> {
        self.metrics.iter().cloned().collect()
    }

    fn metric(&mut self, name: &str) -> u32 {
        let known = self.metrics.iter().position(|(known, _)| known == name);
        let id = known.unwrap_or_else(|| {
            if self.metrics.len() < METRICS_MAX {
                self.metrics.push((name.to_owned(), 0));
                self.metrics.len() - 1
            } else {
                usize::MAX
            }
        });
        id as u32
    }
}

impl Core for NativeCore {
    fn log(&mut self, _level: Level, _message: &str) {}

    fn counter(&mut self, name: &str) -> u32 {
        self.metric(name)
    }

    fn counter_add(&mut self, counter: u32, delta: u64) {
        if let Some((_, value)) = self.metrics.get_mut(counter as usize) {
            *value = value.saturating_add_unsigned(delta);
        }
    }

    fn gauge(&mut self, name: &str) -> u32 {
        self.metric(name)
    }

    fn gauge_set(&mut self, gauge: u32, value: i64) {
        if let Some((_, known)) = self.metrics.get_mut(gauge as usize) {
            *known = value;
        }
    }

    fn define_reason(&mut self, _reason: u8, _text: &str) {}

    fn sharing_mode(&mut self) -> SharingMode {
        convert::sharing(self.world.sharing)
    }

    fn clients(&mut self) -> Vec<ClientState> {
        self.world.clients.values().map(convert::client_state).collect()
    }

    fn client(&mut self, id: ClientId) -> Option<ClientState> {
        self.world.clients.get(&id).map(convert::client_state)
    }

    fn client_identity(&mut self, id: ClientId) -> Option<ClientIdentity> {
        self.world.clients.get(&id).map(|view| convert::client_identity(&view.info))
    }

    fn service(&mut self, id: ClientId) -> Option<Service> {
        let view = self.world.clients.get(&id);
        view.and_then(|view| view.service.as_ref()).map(convert::service)
    }

    fn slack_ns(&mut self, now_ns: u64) -> i64 {
        policy::slack_ns(self.world.clients.values(), now_ns)
    }

    fn kernel_profile(&mut self, kernel: KernelId) -> Option<KernelProfile> {
        self.world.profiles.get(kernel).map(convert::kernel_profile)
    }

    fn kernel_identity(&mut self, kernel: KernelId) -> Option<KernelName> {
        self.world.profiles.get(kernel).map(convert::kernel_name)
    }

    fn kernel_mean_ns(&mut self, kernel: KernelId) -> u64 {
        self.world.profiles.mean_ns(kernel)
    }

    fn set_timer(&mut self, delay_ns: u64, token: u64) {
        self.commands.push(Command::SetTimer { delay_ns, token });
    }

    fn set_window(&mut self, client: ClientId, window_ns: u64) {
        self.commands.push(Command::SetWindow { client, window_ns });
    }

    fn widths(&mut self) -> Vec<u32> {
        self.world.widths()
    }

    fn set_width(&mut self, client: ClientId, sms: u32) {
        self.commands.push(Command::SetWidth { client, sms });
    }

    fn width_cost_ns(&mut self, client: ClientId) -> u64 {
        self.world.clients.get(&client).map_or(0, |view| view.usage.limit_cost_ns)
    }

    fn revoke_lease(&mut self, client: ClientId) {
        self.commands.push(Command::RevokeLease(client));
    }

    fn set_yield(&mut self, client: ClientId, yielded: bool) {
        self.commands.push(Command::SetYield { client, yielded });
    }

    fn set_auto_yield(&mut self, client: ClientId, enabled: bool, idle_ns: u64) {
        self.commands.push(Command::SetAutoYield { client, enabled, idle_ns });
    }

    fn set_ungated(&mut self, client: ClientId, ungated: bool) {
        self.commands.push(Command::SetUngated { client, ungated });
    }
}
