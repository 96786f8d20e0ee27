//! What a native policy may call: the engine's world and commands for the length of a
//! call, and metrics.

use crate::convert;
use std::collections::BTreeMap;
use tally_engine::policy::{self, Command, Commands, Context, World};
use tally_sdk::native::Core;
use tally_sdk::{ClientId, ClientInfo, KernelId, KernelProfile, Level, Sharing, Subscription};

/// Counters and gauges together, as in the policy host's default limits.
const METRICS_MAX: usize = 64;

/// See the module's documentation. Log lines go nowhere.
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

    fn residency(&mut self) -> Sharing {
        match self.world.sharing {
            policy::Sharing::Concurrent => Sharing::Concurrent,
            policy::Sharing::TimeSliced => Sharing::TimeSliced,
        }
    }

    fn clients(&mut self) -> Vec<ClientId> {
        self.world.clients.keys().copied().collect()
    }

    fn client(&mut self, id: ClientId) -> Option<ClientInfo> {
        self.world.clients.get(&id).map(convert::client_info)
    }

    fn kernel_profile(&mut self, kernel: KernelId) -> Option<KernelProfile> {
        self.world.profiles.get(kernel).map(convert::kernel_profile)
    }

    fn kernel_mean_ns(&mut self, kernel: KernelId) -> u64 {
        self.world.profiles.mean_ns(kernel)
    }

    fn subscribe(&mut self, to: Subscription) {
        self.commands.push(Command::Subscribe(to.bits().into()));
    }

    fn set_timer(&mut self, delay_ns: u64, token: u64) {
        self.commands.push(Command::SetTimer { delay_ns, token });
    }

    fn set_window(&mut self, client: ClientId, window_ns: u64) {
        self.commands.push(Command::SetWindow { client, window_ns });
    }

    fn revoke_lease(&mut self, client: ClientId) {
        self.commands.push(Command::RevokeLease(client));
    }

    fn set_yield(&mut self, client: ClientId, yielded: bool) {
        self.commands.push(Command::SetYield { client, yielded });
    }

    fn set_auto_yield(&mut self, client: ClientId, enabled: bool, quiet_ns: u64) {
        self.commands.push(Command::SetAutoYield { client, enabled, quiet_ns });
    }

    fn set_standing_grant(&mut self, client: ClientId, granted: bool) {
        self.commands.push(Command::SetStandingGrant { client, granted });
    }
}
