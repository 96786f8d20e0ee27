//! On some of the SMs: for all of an open unit, or always.

use crate::Herald;
use crate::service::Service;
use tally_sdk::{Decision, Launch, UNKNOWN};

impl Herald {
    /// SMs on which best effort always runs beside services that are used.
    pub(crate) fn width(&self, now_ns: u64) -> Option<u32> {
        let used = self.services.iter().filter(|one| !one.is_idle(now_ns));
        used.filter_map(|one| one.share.width()).min()
    }

    /// SMs for a launch on which each open unit can bear it for as long as it takes.
    pub(crate) fn beside(&self, launch: &Launch, cost_ns: u64) -> Option<u32> {
        let open = || self.services.iter().filter(|service| service.left_ns().is_some());
        let sms = open().map(Service::sms).reduce(|a, b| Some(a?.min(b?)))??;
        let can = can_limit(launch, sms);
        // A light one costs less than a change of SMs.
        let is_worth_it = cost_ns >= launch.predicted_ns || self.client_width.sms().is_some();
        (can && is_worth_it).then_some(sms)
    }

    /// SMs for a launch that goes because its client is due, whatever the open units can bear: at least a third, so
    /// that it does not last much longer.
    pub(crate) fn for_floor(&self, launch: &Launch, cost_ns: u64) -> Option<u32> {
        let least = launch.sm_count.div_ceil(3);
        let sms = self.widths.iter().copied().filter(|sms| *sms >= least).min()?;
        // A light one costs less than a change of SMs.
        (can_limit(launch, sms) && cost_ns >= launch.predicted_ns).then_some(sms)
    }

    /// It runs whole, because its code was not read: SMs for later ones, where a service spares some.
    pub(crate) fn reads_for(&self, launch: &Launch, cost_ns: u64) -> Option<u32> {
        let is_unread = launch.can_prepare() && !launch.can_limit() && !launch.is_graph();
        let may = is_unread && cost_ns >= launch.predicted_ns;
        self.services.iter().filter_map(|one| one.share.limit()).min().filter(|_| may)
    }
}

/// Whether a launch takes no more SMs than so many, limited or not.
pub fn can_limit(launch: &Launch, sms: u32) -> bool {
    launch.can_limit() || (!exceeds(launch, sms) && launch.predicted_ns != UNKNOWN)
}

/// On so many SMs, which its client may have as its width.
pub fn on_sms(launch: &Launch, sms: u32, has_width: bool) -> Decision {
    // One that was never measured would run whole first.
    match has_width && launch.predicted_ns != UNKNOWN || !exceeds(launch, sms) {
        true => Decision::Run(0),
        false => Decision::SmLimited(sms),
    }
}

/// Whether a launch may take more SMs than so many: more blocks than one each.
pub fn exceeds(launch: &Launch, sms: u32) -> bool {
    launch.is_graph() || launch.grid_blocks > sms.into()
}
