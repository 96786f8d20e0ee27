//! No unit shares the GPU: contexts take turns, or no high-priority client is connected.

use crate::{Herald, Reason};
use tally_sdk::{Answer, Decision, HOLD_UNTIL_CHANGE, Launch};

impl Herald {
    /// Where contexts take turns.
    pub(crate) fn in_turns(&mut self, launch: &Launch, is_due: bool) -> Answer {
        if !is_due && launch.high_clients > 0 && launch.high_active() {
            return Decision::Hold(HOLD_UNTIL_CHANGE).because(Reason::HighActive);
        }
        if launch.high_clients == 0 {
            return self.alone(launch, is_due);
        }
        if is_due {
            return Decision::Run(0).because(Reason::Floor);
        }
        match self.shares.rounds.hold(launch) {
            Some(hold) => hold.because(Reason::NotItsTurn),
            None => Decision::Run(0).because(Reason::Between),
        }
    }

    /// While no high-priority client is connected.
    pub(crate) fn alone(&mut self, launch: &Launch, is_due: bool) -> Answer {
        self.client_width.end();
        if !is_due && let Some(hold) = self.shares.rounds.hold(launch) {
            return hold.because(Reason::NotItsTurn);
        }
        let lease = self.shares.lease_behind(launch, self.settings.lease_launches);
        Decision::Run(lease).because(Reason::Alone)
    }
}
