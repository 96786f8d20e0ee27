//! What is known of kernels beyond this run: handed in, asked for, forgotten.

use super::Engine;
use crate::policy::KernelId;
use crate::profile::{CutState, Kept, Profile};

impl Engine {
    /// What the client's side found out about cutting a kernel. A verdict that it is
    /// only to be run whole stays.
    pub fn set_cut(&mut self, kernel: KernelId, cut: CutState) {
        self.context.world.profiles.set_cut(kernel, cut);
    }

    /// What an earlier run knew of a kernel.
    pub fn restore_profile(&mut self, kernel: KernelId, kept: Kept) {
        self.context.world.profiles.restore(kernel, kept);
    }

    /// See [`Profiles::take_news`](crate::profile::Profiles::take_news).
    pub fn take_profile_news(&mut self, kernel: KernelId) -> Option<&Profile> {
        self.context.world.profiles.take_news(kernel)
    }

    /// See [`Profiles::forget`](crate::profile::Profiles::forget).
    pub fn forget_profile(&mut self, kernel: KernelId) -> bool {
        self.context.world.profiles.forget(kernel)
    }
}
