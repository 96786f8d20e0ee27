//! What status shows of policies that come, go and fail.

use crate::dispatch::handover::SwapPauseUs;
use crate::dispatch::snapshot::Snapshot;
use crate::policy_slot::Active;
use crate::policy_slot::history::{Disabled, LoadedBecause};
use serde::Serialize;
use tally_wasm_host::Restored;

/// Part of the policy's report.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyLife {
    /// Why it came.
    pub loaded_because: LoadedBecause,
    /// The generation that it is again, if it was put back; else its own.
    pub same_as_generation: u64,
    /// What became of the state that it was offered.
    pub restored: Restored,
    /// Its faults that are not forgotten.
    pub strikes: u32,
    /// The last policy that was disabled; not necessarily the active one.
    pub last_disabled: Option<LastDisabled>,
    /// How long changes of policy kept decisions waiting, us.
    pub swap_pause_us: SwapPauseUs,
    /// What failed calls cost, and those after them.
    pub fault_cost_us: FaultCostUs,
}

#[derive(Clone, Debug, Serialize)]
pub struct LastDisabled {
    pub generation: u64,
    #[serde(flatten)]
    pub how: Disabled,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct FaultCostUs {
    /// Such calls, all policies of this run of the core.
    pub calls: u64,
    /// The longest time from when the core looked at a launch until such a call about it
    /// was over, us.
    pub max: f64,
}

impl PolicyLife {
    pub fn new(active: &Active, last: Option<(u64, Disabled)>, s: &Snapshot) -> Self {
        PolicyLife {
            loaded_because: active.loaded_because,
            same_as_generation: active.same_as_generation,
            restored: active.restored.clone(),
            strikes: s.figures.as_ref().map_or(0, |figures| figures.recent_faults),
            last_disabled: last.map(|(generation, how)| LastDisabled { generation, how }),
            swap_pause_us: s.swap_pause,
            fault_cost_us: FaultCostUs {
                calls: s.fault_cost.calls,
                max: s.fault_cost.ns_max as f64 / 1_000.0,
            },
        }
    }
}
