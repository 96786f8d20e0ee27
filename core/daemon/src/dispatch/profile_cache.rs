//! What earlier runs knew of kernels, looked up when a kernel is seen for the first
//! time. Memory that nobody writes: no file is read here, and nothing is freed.

use super::Engine;
use crate::gpus::Named;
use crate::profile_store::profiled::{Device, Loaded, Profiled};
use std::sync::Arc;
use tally_engine::policy::KernelId;
use tally_engine::profile::KernelKey;

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

    /// Tell the engine what is known of a kernel that a client brings which names this GPU.
    pub fn restore(
        &mut self,
        named: Option<Named>,
        key: &KernelKey,
        kernel: KernelId,
        engine: &mut Engine,
    ) {
        let Some(Named { device, decides }) = named else { return };
        if self.device.is_none() && decides {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::Loaded as Policy;
    use tally_engine::EngineConfig;

    #[test]
    fn who_may_not_decide_which_gpu_it_is_names_none_before_another_did() {
        let policy = super::super::unrecorded(Policy::grant_all());
        let mut engine = Engine::with_policy(EngineConfig::default(), policy);
        let key = KernelKey { name: "k".into(), image: 0, grid: [1; 3], block: [1; 3] };
        let kernel = engine.hold_kernel(&key).unwrap();
        let gpu = |uuid| Device { uuid: [uuid, 0], sm_count: 132, driver_version: 13_000 };
        let mut cache = ProfileCache::new(Default::default());
        for (uuid, decides, expected) in [
            (1, false, None),
            (2, true, Some(gpu(2))),
            (1, false, Some(gpu(2))),
            (1, true, Some(gpu(2))),
        ] {
            let named = Named { device: gpu(uuid), decides };
            cache.restore(Some(named), &key, kernel, &mut engine);
            assert_eq!(cache.device(), expected);
        }
    }
}
