//! Floors of best-effort clients: the least share of GPU time that a policy is to give them.

use super::{Action, Engine};
use crate::policy::{Class, ClientId, Policy};

/// What a client had of the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Had {
    /// GPU time that it was charged for.
    pub charged_ns: u64,
    /// Time in which it had a launch waiting or on the GPU.
    pub backlogged_ns: u64,
}

impl<P: Policy> Engine<P> {
    /// A best-effort client's floor from now on, permille; 0: none. What waits is offered again if that is another one.
    pub fn set_min_share(
        &mut self,
        now_ns: u64,
        client: ClientId,
        permille: u32,
        out: &mut Vec<Action>,
    ) {
        let is_best_effort = |c: &&mut crate::client::Client| c.info.class == Class::BestEffort;
        let Some(c) = self.clients.get_mut(client).filter(is_best_effort) else { return };
        if std::mem::replace(&mut c.min_share_permille, permille) != permille {
            self.offer_all = true;
            self.settle(now_ns, out);
        }
    }

    /// What a client had since it joined.
    pub fn had(&self, now_ns: u64, client: ClientId) -> Option<Had> {
        self.clients
            .get(&client)
            .map(|c| Had { charged_ns: c.stats.charged_ns, backlogged_ns: c.backlog.ns(now_ns) })
    }
}
