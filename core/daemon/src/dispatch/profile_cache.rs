//! What earlier runs knew of kernels, looked up when a kernel is seen for the first
//! time. Memory that nobody writes: no file is read here, and nothing is freed.

use super::Engine;
use crate::profile_store::profiled::{Device, Loaded, Profiled};
use std::sync::Arc;
use tally_engine::policy::KernelId;
use tally_engine::profile::KernelKey;

/// See the module's documentation.
#[derive(Default)]
pub struct ProfileCache {
    /// Until the GPU is known. The control plane has it, too, and drops it later.
    loaded: Option<Arc<Loaded>>,
    device: Option<Device>,
    profiled: Option<Arc<Profiled>>,
}

impl ProfileCache {
    /// A cache of the profiles that were found on disk.
    pub fn new(loaded: Arc<Loaded>) -> Self {
        ProfileCache { loaded: Some(loaded), device: None, profiled: None }
    }

    /// The GPU that this core serves: of the first client that launched and whose word [counts](crate::gpus).
    pub fn device(&self) -> Option<Device> {
        self.device
    }

    /// Tell the engine what is known of a kernel that a client on this GPU brings.
    pub fn restore(
        &mut self,
        device: Option<Device>,
        key: &KernelKey,
        kernel: KernelId,
        engine: &mut Engine,
    ) {
        let Some(device) = device else { return };
        if self.device.is_none() {
            self.device = Some(device);
            self.profiled = self.loaded.take().and_then(|all| all.get(&device).cloned());
        }
        // Another GPU than the first one's: nothing here is about it.
        if self.device == Some(device)
            && let Some(kept) = self.profiled.as_ref().and_then(|all| all.kept(key))
        {
            engine.restore_profile(kernel, kept);
        }
    }

    /// Look nothing up any more. Returns what is to be dropped elsewhere.
    pub fn forget(&mut self) -> (Option<Arc<Loaded>>, Option<Arc<Profiled>>) {
        (self.loaded.take(), self.profiled.take())
    }
}
