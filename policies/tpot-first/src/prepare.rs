//! Prepare: SMs are taken back before a step that needs them.
//!
//! ```text
//! a launch that can yield is under way, and
//!     a step is predicted that cannot bear it:           have it yield one turnaround before      timer PREPARE
//!         if the step does not come in time:             it goes on, and the rhythm begins anew   timer VAIN
//!     a step begins:                                     it yields one turnaround before the step's slack is used up:
//!                                                        at once, if that is less                 timer SLACK
//!     the step is over, or its program pauses for 2 ms:  it goes on                               timer GAP
//!     it has yielded for wait_ms_max:                    it goes on                               timer RELEASE
//! ```
//!
//! Launches that are limited to the width leave the service its SMs as they are. When a step begins is predicted from
//! when the latest ones did ([`crate::rhythm`]), if they came evenly. Turnarounds are measured, and believed up to a
//! bound.

use crate::TpotFirst;
use crate::select::{GAP_NS, GRACE_NS};
use crate::service::Service;
use tally_sdk::{Decision, KernelId, host};

/// Turnarounds are taken from what programs report, which may be wrong: none longer than this is believed.
const TURNAROUND_NS_MAX: u64 = 100_000_000;

pub const SLACK: u64 = 1;
pub const PREPARE: u64 = 2;
pub const VAIN: u64 = 3;
pub const GAP: u64 = 4;
pub const RELEASE: u64 = 5;

impl TpotFirst {
    /// A launch starts that can yield.
    pub(crate) fn starts_yielding(
        &mut self,
        now_ns: u64,
        kernel: KernelId,
        decision: Decision,
        until_ns: u64,
    ) {
        self.yielding = Some((kernel, decision));
        self.yields.until_ns = self.yields.until_ns.max(until_ns);
        if self.is_in_step(now_ns) {
            self.take_back_in_step(now_ns);
        } else {
            self.prepare(now_ns);
        }
    }

    /// Take SMs back in time for the next step.
    pub(crate) fn prepare(&mut self, now_ns: u64) {
        let next_ns = self.services.iter().filter_map(|service| service.rhythm.next_ns());
        let Some(next_ns) = next_ns.filter(|ns| *ns > now_ns).min() else { return };
        let bears_ns = self.bears_ns().saturating_sub(self.turnaround_ns);
        let is_in_the_way = self.yields.until_ns > next_ns.saturating_add(bears_ns);
        if is_in_the_way && self.yields.is_under_way(now_ns) {
            self.next_ns = next_ns;
            let at_ns = next_ns.saturating_sub(self.turnaround_ns);
            host::set_timer(at_ns.saturating_sub(now_ns), PREPARE);
        }
    }

    /// A step is open: what is under way yields before its slack is used up.
    pub(crate) fn take_back_in_step(&mut self, now_ns: u64) {
        if !self.yields.is_under_way(now_ns) || !self.is_in_step(now_ns) {
            return;
        }
        let in_step = self.services.iter_mut().filter(|service| service.is_in_step(now_ns));
        let mut left_ns = u64::MAX;
        for service in in_step {
            left_ns = left_ns.min(service.left_ns());
            // It is used up by this.
            service.takes_slack(u64::MAX);
        }
        match left_ns.saturating_sub(self.turnaround_ns) {
            0 => self.set_yield(now_ns, true),
            ns => host::set_timer(ns, SLACK),
        }
    }

    pub(crate) fn timer(&mut self, now_ns: u64, token: u64) {
        match token {
            SLACK if self.is_in_step(now_ns) && self.yields.is_under_way(now_ns) => {
                self.set_yield(now_ns, true);
            }
            PREPARE if !self.is_in_step(now_ns) && self.yields.is_under_way(now_ns) => {
                self.set_yield(now_ns, true);
                self.counters.add(crate::PREPARED, 1);
                let rest_ns = self.next_ns.saturating_sub(now_ns).saturating_add(GRACE_NS);
                host::set_timer(rest_ns, VAIN);
            }
            VAIN if self.yields.is_on() && !self.is_in_step(now_ns) => {
                self.counters.add(crate::IN_VAIN, 1);
                self.services.iter_mut().for_each(|service| {
                    if service.rhythm.next_ns().is_some_and(|ns| ns <= now_ns) {
                        service.rhythm.broke();
                    }
                });
                self.set_yield(now_ns, false);
            }
            GAP if !self.high_is_active => self.set_yield(now_ns, false),
            RELEASE => self.set_yield(now_ns, false),
            _ => {}
        }
    }

    pub(crate) fn is_in_step(&self, now_ns: u64) -> bool {
        self.services.iter().any(|service| service.is_in_step(now_ns))
    }

    pub(crate) fn set_yield(&mut self, now_ns: u64, yields: bool) {
        if self.yields.is_on() == yields {
            return;
        }
        if yields {
            host::set_timer(self.settings.wait_ns_max, RELEASE);
            if !self.high_is_active && self.is_in_step(now_ns) {
                host::set_timer(GAP_NS, GAP);
            }
        } else {
            self.measure_turnaround();
        }
        self.yields.set(now_ns, yields, &self.shares);
    }

    /// The longest of the latest turnarounds, which the core measured.
    fn measure_turnaround(&mut self) {
        let Some((kernel, decision)) = self.yielding else { return };
        let profile = host::kernel_profile(kernel);
        let form = profile.as_ref().and_then(|profile| profile.of_form(decision));
        if let Some(measured_ns @ 1..) = form.map(|form| form.turnaround_ns) {
            let less_ns = self.turnaround_ns - self.turnaround_ns / 8;
            self.turnaround_ns = measured_ns.max(less_ns).min(self.turnaround_ns_max());
        }
    }

    /// The longest turnaround that is believed: half of the shortest objective, because preparing for a
    /// longer one would leave the others hardly any time; but not less than what is configured.
    fn turnaround_ns_max(&self) -> u64 {
        let shortest_ns = self.services.iter().filter_map(Service::objective_ns).min();
        let half_ns = shortest_ns.map_or(u64::MAX, |ns| ns / 2);
        half_ns.min(TURNAROUND_NS_MAX).max(self.settings.turnaround_ns)
    }
}
