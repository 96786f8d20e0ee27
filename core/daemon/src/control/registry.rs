//! Clients that are connected, and those that left.

use crate::dispatch::snapshot::{ClientNumbers, Snapshot};
use crate::status;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Instant;
use tally_admin::{Class, ClientStatus, Departed, Identity, Totals};
use tally_contract::limits::DEPARTED_MAX;
use tally_engine::policy::{self, ClientInfo};
use tokio::sync::Notify;

/// Tells a client's task to end its connection.
#[derive(Debug, Default)]
pub struct Dismissal {
    notify: Notify,
    why: std::cell::Cell<&'static str>,
}

impl Dismissal {
    pub fn now(&self, why: &'static str) {
        self.why.set(why);
        self.notify.notify_one();
    }

    /// Waits until the connection is to be ended, and returns why.
    pub async fn wait(&self) -> &'static str {
        self.notify.notified().await;
        self.why.get()
    }
}

/// How a client's connection ended.
#[derive(Debug)]
pub enum End {
    Left(String),
    /// The core dropped the client, because it broke the protocol.
    Dropped(&'static str),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Left(how) => f.write_str(how),
            End::Dropped(why) => write!(f, "dropped: {why}"),
        }
    }
}

/// What the control plane keeps of a connected client.
#[derive(Debug)]
pub struct Record {
    pub identity: Identity,
    pub since: Instant,
    /// Ends the client's connection.
    pub dismissal: Rc<Dismissal>,
    /// Its figures when they were seen last: what is left of them if it is gone from the dispatch
    /// thread already, which drops clients that misbehave.
    seen: Totals,
}

#[derive(Debug, Default)]
pub struct Registry {
    clients: BTreeMap<u32, Record>,
    departed: VecDeque<Departed>,
    /// Sums over the clients that left, by class.
    left: BTreeMap<Class, Totals>,
    next_id: u32,
}

/// The class in the status; its word is that of the command line.
pub fn class(class: policy::Class) -> Class {
    match class {
        policy::Class::High => Class::High,
        policy::Class::BestEffort => Class::BestEffort,
    }
}

impl Registry {
    /// An id for a client; ids rise.
    pub fn next_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub fn add(
        &mut self,
        info: &ClientInfo,
        pid: u32,
        uid: u32,
        class_reason: String,
    ) -> Rc<Dismissal> {
        let dismissal = Rc::new(Dismissal::default());
        let identity = Identity {
            id: info.id,
            pid,
            uid,
            name: info.name.clone(),
            labels: info.labels.iter().cloned().collect(),
            class: class(info.class),
            class_reason,
        };
        self.clients.insert(
            info.id,
            Record {
                identity,
                since: Instant::now(),
                dismissal: dismissal.clone(),
                seen: Totals { registered: 1, connected: 1, ..Totals::default() },
            },
        );
        dismissal
    }

    /// Removes a client that was never served.
    pub fn forget(&mut self, id: u32) {
        self.clients.remove(&id);
    }

    pub fn depart(&mut self, id: u32, end: &End, numbers: Option<&ClientNumbers>) {
        numbers.into_iter().for_each(|n| self.saw(n));
        let Some(record) = self.clients.remove(&id) else { return };
        self.departed.truncate(DEPARTED_MAX - 1);
        let (class, last) = (record.identity.class, record.seen);
        let connected_s = record.since.elapsed().as_secs_f64();
        let dropped = u64::from(matches!(end, End::Dropped(_)));
        self.left.entry(class).or_default().add(Totals { connected: 0, dropped, ..last });
        let reason = end.to_string();
        self.departed.push_front(status::departed(record.identity, connected_s, reason, numbers));
    }

    /// The client of this id, if it is connected.
    pub fn get(&self, id: u32) -> Option<&Record> {
        self.clients.get(&id)
    }

    /// Whether clients of both classes are connected.
    pub fn has_both_classes(&self) -> bool {
        let has = |class| self.clients.values().any(|c| c.identity.class == class);
        has(Class::High) && has(Class::BestEffort)
    }

    /// All connected clients with their figures.
    pub fn clients(&self, s: &Snapshot, mps_asked: bool) -> Vec<ClientStatus> {
        let reasons = s.figures.as_ref().map(|f| &f.reasons[..]).unwrap_or_default();
        let text = |reason: u8| {
            let known = reasons.iter().find(|r| r.reason == reason)?;
            Some(if known.text.is_empty() {
                format!("reason {reason}")
            } else {
                known.text.clone()
            })
        };
        let with = |n: &ClientNumbers| {
            let record = self.clients.get(&n.id)?;
            let connected_s = record.since.elapsed().as_secs_f64();
            let (who, reason) = (record.identity.clone(), text(n.state.reason));
            Some(status::client(who, connected_s, reason, n, mps_asked))
        };
        s.clients.iter().filter_map(with).collect()
    }

    /// A client's figures, the last ones if it is gone from the dispatch thread.
    pub fn saw(&mut self, numbers: &ClientNumbers) {
        if let Some(record) = self.clients.get_mut(&numbers.id) {
            let connected_s = record.since.elapsed().as_secs_f64();
            record.seen.raise(status::totals(record.identity.class, connected_s, numbers));
        }
    }

    /// Sums by class. `numbers` may know of clients that left since, and not of others that are
    /// leaving now.
    pub fn totals(&mut self, numbers: &[ClientNumbers]) -> BTreeMap<Class, Totals> {
        numbers.iter().for_each(|n| self.saw(n));
        let mut all = self.left.clone();
        for record in self.clients.values() {
            all.entry(record.identity.class).or_default().add(record.seen);
        }
        all
    }

    pub fn processes(&self) -> BTreeSet<u32> {
        self.clients.values().map(|client| client.identity.pid).collect()
    }

    /// Clients that left, newest first.
    pub fn departed(&self) -> Vec<Departed> {
        self.departed.iter().cloned().collect()
    }
}
