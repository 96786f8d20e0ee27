//! The connected clients, and those of whom the policy's view is out of date.

use crate::client::Client;
use crate::policy::{ClientId, Usage};
use std::collections::BTreeMap;
use std::ops::Deref;

/// Clients by id. Whoever could have changed one is noted, so that a policy call costs as much as changed since the
/// last one, however many are connected.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    by_id: BTreeMap<ClientId, Client>,
    /// Clients that may have changed since [`Clients::drain_changed`], each once; see [`Client::is_noted`].
    changed: Vec<ClientId>,
}

/// Read access marks no client as changed.
impl Deref for Clients {
    type Target = BTreeMap<ClientId, Client>;

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

impl Clients {
    pub fn get_mut(&mut self, id: ClientId) -> Option<&mut Client> {
        let client = self.by_id.get_mut(&id)?;
        note(&mut self.changed, id, client);
        Some(client)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ClientId, &mut Client)> {
        let changed = &mut self.changed;
        self.by_id.iter_mut().map(|(&id, client)| {
            note(changed, id, client);
            (id, client)
        })
    }

    /// Returns the client that had this id.
    pub fn insert(&mut self, id: ClientId, mut client: Client) -> Option<Client> {
        let old = self.remove(id);
        note(&mut self.changed, id, &mut client);
        self.by_id.insert(id, client);
        old
    }

    pub fn remove(&mut self, id: ClientId) -> Option<Client> {
        self.changed.retain(|&other| other != id);
        self.by_id.remove(&id)
    }

    /// What a policy may read of each client that may have changed since the last time.
    pub fn drain_changed(&mut self) -> impl Iterator<Item = (ClientId, Usage)> {
        let by_id = &mut self.by_id;
        self.changed.drain(..).filter_map(|id| {
            let client = by_id.get_mut(&id)?;
            client.is_noted = false;
            Some((id, client.usage()))
        })
    }
}

fn note(changed: &mut Vec<ClientId>, id: ClientId, client: &mut Client) {
    if !std::mem::replace(&mut client.is_noted, true) {
        changed.push(id);
    }
}
