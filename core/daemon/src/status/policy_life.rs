//! What status shows of policies that come, go and fail.

use crate::dispatch::handover::SwapPauseUs;
use crate::dispatch::snapshot::Snapshot;
use crate::policy_slot::InCharge;
use crate::policy_slot::history::{Came, StruckOut};
use serde::Serialize;
use tally_wasm_host::Restored;

/// Part of the policy's report.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyLife {
    /// Why it came.
    pub came: Came,
    /// The generation that it is again, if it was put back; else its own.
    pub content_of: u64,
    /// What became of the state that it was offered.
    pub restored: Restored,
    /// Its faults that are not forgotten.
    pub strikes: u32,
    /// The last policy that was struck out; not necessarily the one in charge.
    pub last_struck_out: Option<LastStruckOut>,
    /// How long changes of policy kept decisions waiting, us.
    pub swap_pause_us: SwapPauseUs,
    /// What failed calls cost, and those after them.
    pub fault_cost_us: FaultCostUs,
}

/// See [`StruckOut`].
#[derive(Clone, Debug, Serialize)]
pub struct LastStruckOut {
    /// Which.
    pub generation: u64,
    /// How.
    #[serde(flatten)]
    pub how: StruckOut,
}

/// See [`FaultCost`](crate::dispatch::handover::FaultCost).
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FaultCostUs {
    /// Such calls, all policies of this run of the core.
    pub calls: u64,
    /// The longest time from when the core looked at a launch until such a call about it
    /// was over, us.
    pub max: f64,
}

impl PolicyLife {
    /// Put together.
    pub fn new(in_charge: &InCharge, last: Option<(u64, StruckOut)>, s: &Snapshot) -> Self {
        PolicyLife {
            came: in_charge.came,
            content_of: in_charge.content_of,
            restored: in_charge.restored.clone(),
            strikes: s.figures.as_ref().map_or(0, |figures| figures.recent_faults),
            last_struck_out: last.map(|(generation, how)| LastStruckOut { generation, how }),
            swap_pause_us: s.swap_pause,
            fault_cost_us: FaultCostUs {
                calls: s.fault_cost.calls,
                max: s.fault_cost.ns_max as f64 / 1_000.0,
            },
        }
    }
}
