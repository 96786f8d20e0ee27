//! What is known of kernels beyond this run: handed in, asked for, forgotten.

use super::Engine;
use crate::policy::{KernelId, Policy};
use crate::profile::{Demand, Kept, KernelKey, Profile, Transformation};

impl<P: Policy> Engine<P> {
    /// What the client's side found out about transforming a kernel. A verdict that it is
    /// only to be run whole stays.
    pub fn set_transformation(&mut self, kernel: KernelId, to: Transformation) {
        self.context.world.profiles.set_transformation(kernel, to);
    }

    /// What a kernel demands, as the client's driver says.
    pub fn set_demand(&mut self, kernel: KernelId, demand: Demand) {
        self.context.world.profiles.set_demand(kernel, demand);
    }

    /// What an earlier run knew of a kernel.
    pub fn restore_profile(&mut self, kernel: KernelId, kept: Kept) {
        self.context.world.profiles.restore(kernel, kept);
    }

    pub fn take_profile_news(&mut self, kernel: KernelId) -> Option<&Profile> {
        self.context.world.profiles.take_news(kernel)
    }

    pub fn forget_profile(&mut self, kernel: KernelId) -> bool {
        self.context.world.profiles.forget(kernel)
    }

    pub fn forget_profile_at(&mut self, place: u32) -> Option<bool> {
        self.context.world.profiles.forget_at(place)
    }

    /// The id of a kernel that a client holds from now on; `None` when too many are known.
    pub fn hold_kernel(&mut self, key: &KernelKey) -> Option<KernelId> {
        self.context.world.profiles.hold(key)
    }

    /// A client that is gone held these.
    pub fn release_kernels(&mut self, held: Vec<KernelId>) {
        self.context.world.profiles.release(held);
    }

    pub fn sweep_kernels(&mut self, most: usize) -> bool {
        self.context.world.profiles.sweep(most)
    }
}
