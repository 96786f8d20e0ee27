//! Who is connected, and what best-effort clients may do unasked. The core is told only what changes.

use crate::{Client, ClientId, PriorityClass, host};

/// What each best-effort client may do unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// GPU time that a client may have unfinished ([`host::set_window`]).
    pub window_ns: u64,
    /// Launches may start under leases that were answered. Otherwise the core takes those back
    /// ([`host::revoke_lease`]).
    pub leases: bool,
    /// For how long high priority must have been idle before a launch that yielded goes on; `None`: launches do not
    /// yield by themselves ([`host::set_auto_yield`]).
    pub yields: Option<u64>,
}

/// The clients that are connected, for [`crate::Membership`].
///
/// ```
/// use tally_sdk::testing::{Call, calls, client};
/// use tally_sdk::{Clients, PriorityClass, Terms};
///
/// let mut clients = Clients::default();
/// clients.joined(&client(1, PriorityClass::BestEffort));
/// let terms = Terms { window_ns: 1_000, leases: true, yields: None };
/// clients.set_terms(terms);
/// assert_eq!(calls(), [Call::SetWindow { client: 1, window_ns: 1_000 }]);
/// clients.joined(&client(2, PriorityClass::High));
/// clients.set_terms(Terms { leases: false, ..terms });
/// assert_eq!(calls(), [Call::RevokeLease(1)]);
/// ```
#[derive(Debug, Default)]
pub struct Clients {
    high: Vec<ClientId>,
    /// With the terms that the core was told; `None`: a new one, which has the engine's window, no lease and no
    /// yielding.
    best_effort: Vec<(ClientId, Option<Terms>)>,
}

impl Clients {
    /// A client registered.
    pub fn joined(&mut self, client: &Client) {
        match client.class {
            PriorityClass::High => self.high.push(client.id),
            PriorityClass::BestEffort => self.best_effort.push((client.id, None)),
        }
    }

    /// A client is gone, and its terms with it.
    pub fn left(&mut self, client: ClientId) {
        self.high.retain(|&id| id != client);
        self.best_effort.retain(|&(id, _)| id != client);
    }

    /// Number of high-priority clients.
    pub fn high(&self) -> usize {
        self.high.len()
    }

    /// Number of best-effort clients.
    pub fn best_effort(&self) -> usize {
        self.best_effort.len()
    }

    /// The best-effort clients, in the order in which they came.
    pub fn best_effort_ids(&self) -> impl Iterator<Item = ClientId> {
        self.best_effort.iter().map(|&(id, _)| id)
    }

    /// Give all best-effort clients these terms, and tell the core what is new to each.
    pub fn set_terms(&mut self, terms: Terms) {
        self.set_terms_of(|_| terms);
    }

    /// The same, if they depend on the client.
    pub fn set_terms_of(&mut self, terms_of: impl Fn(ClientId) -> Terms) {
        for (client, had) in &mut self.best_effort {
            let terms = terms_of(*client);
            let had = had.replace(terms);
            if had.is_none_or(|had| had.window_ns != terms.window_ns) {
                host::set_window(*client, terms.window_ns);
            }
            if had.is_some_and(|had| had.leases) && !terms.leases {
                host::revoke_lease(*client);
            }
            if had.and_then(|had| had.yields) != terms.yields {
                host::set_auto_yield(*client, terms.yields.is_some(), terms.yields.unwrap_or(0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Call, calls, client};

    const FREE: Terms = Terms { window_ns: u64::MAX, leases: true, yields: None };
    const BESIDE_HIGH: Terms = Terms { window_ns: 5_000, leases: false, yields: Some(100) };

    fn window(client: u32, window_ns: u64) -> Call {
        Call::SetWindow { client, window_ns }
    }

    fn yields(client: u32, enabled: bool, idle_ns: u64) -> Call {
        Call::SetAutoYield { client, enabled, idle_ns }
    }

    #[test]
    fn the_core_is_told_what_is_new_to_each_client() {
        let mut clients = Clients::default();
        clients.joined(&client(1, PriorityClass::BestEffort));
        clients.set_terms(FREE);
        assert_eq!(calls(), [window(1, u64::MAX)]);
        clients.joined(&client(2, PriorityClass::High));
        clients.joined(&client(3, PriorityClass::BestEffort));
        clients.set_terms(BESIDE_HIGH);
        // A new client has no lease that could be taken back.
        let first = [window(1, 5_000), Call::RevokeLease(1), yields(1, true, 100)];
        assert_eq!(
            calls(),
            first.into_iter().chain([window(3, 5_000), yields(3, true, 100)]).collect::<Vec<_>>()
        );
        clients.set_terms(BESIDE_HIGH);
        assert_eq!(calls(), []);
        clients.left(2);
        clients.left(1);
        assert_eq!((clients.high(), clients.best_effort()), (0, 1));
        clients.set_terms(FREE);
        assert_eq!(calls(), [window(3, u64::MAX), yields(3, false, 0)]);
    }
}
