//! Launches that may follow one unasked: behind one that runs whole, or on the width.

use crate::limit::on_sms;
use crate::service::Service;
use crate::{Herald, LEASED};
use tally_fairness::{Lease, Runs};
use tally_sdk::grid::scaled;
use tally_sdk::{Decision, Launch, UNKNOWN};

impl Herald {
    /// A launch that runs whole, and those that may follow it unasked.
    pub(crate) fn whole(&mut self, launch: &Launch, within: bool) -> Decision {
        if !self.may_lease(launch) {
            return Decision::Run(0);
        }
        let bears = |one: &Service| {
            let at_any_time_ns =
                one.allowance_whole_ns().filter(|_| one.share.limit().is_none())?;
            Some(one.left_ns().unwrap_or(u64::MAX).min(at_any_time_ns))
        };
        let least_ns = self.least(launch.now_ns, bears);
        let lease = self.leases.give(Runs::Whole, launch.predicted_ns, least_ns);
        self.leased(launch, lease, lease.work_ns, within);
        Decision::Run(lease.launches)
    }

    /// A launch on the width, and those that may follow it unasked.
    pub(crate) fn on_width(
        &mut self,
        launch: &Launch,
        sms: u32,
        charge_ns: u64,
        within: bool,
    ) -> Decision {
        if self.may_lease(launch) && self.client_width.has_settled() {
            let bears =
                |one: &Service| Some(one.left_ns().unwrap_or(u64::MAX).min(one.allowance_ns()?));
            let least_ns = self.least(launch.now_ns, bears);
            let lease = self.leases.give(Runs::OnWidth, charge_ns, least_ns);
            let lasts_ns = scaled(lease.work_ns, launch.sms().into(), sms.max(1).into());
            self.leased(launch, lease, lasts_ns, within);
            if lease.launches > 0 {
                return Decision::Run(lease.launches);
            }
        }
        // Left to its client's width, what was never measured whole would be.
        on_sms(launch, sms, false)
    }

    /// Launches may follow this one unasked. What a client with a floor has had is looked at with each launch.
    fn may_lease(&self, launch: &Launch) -> bool {
        let is_known = launch.predicted_ns != UNKNOWN;
        is_known && self.shares.lease(1) > 0 && !launch.has_min_share()
    }

    /// The least that a service bears which may have a unit at any time.
    fn least(&self, now_ns: u64, bears: impl Fn(&Service) -> Option<u64>) -> u64 {
        self.expected(now_ns).map(|one| bears(one).unwrap_or(0)).min().unwrap_or(0)
    }

    /// These launches may follow, and are under way for so long.
    fn leased(&mut self, launch: &Launch, lease: Lease, lasts_ns: u64, within: bool) {
        let until_ns = launch.now_ns.saturating_add(launch.in_flight_ns).saturating_add(lasts_ns);
        for service in &mut self.services {
            service.let_in(launch.now_ns, lease.work_ns, within);
            service.under_way(until_ns);
            if within {
                service.spend(launch.now_ns, lease.takes_ns, false);
            }
        }
        self.counters.add(LEASED, lease.launches.into());
    }
}
