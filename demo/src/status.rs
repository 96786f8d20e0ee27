//! What `tallyctl status --json` says: by its types, and as it was printed.

use anyhow::{Context, Result};
use serde_json::Value;
use tally_admin::{Class, ClientStatus, PolicyReport};

/// The whole answer, as printed and read.
#[derive(Clone, Debug)]
pub struct Status(pub Value, tally_admin::Status);

/// What it says of one client, as printed and read.
#[derive(Clone, Debug)]
pub struct Client(pub Value, ClientStatus);

impl Status {
    /// Reads it.
    ///
    /// # Errors
    /// If it is not JSON, or lacks something.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let printed: Value =
            serde_json::from_slice(text).context("tallyctl status --json is not JSON")?;
        let read = serde_json::from_value(printed.clone()).context("tallyctl status --json")?;
        Ok(Self(printed, read))
    }

    /// The status as `tally_admin` types.
    pub fn read(&self) -> &tally_admin::Status {
        &self.1
    }

    pub fn policy(&self) -> &PolicyReport {
        &self.1.policy
    }

    /// Clients now connected.
    ///
    /// # Errors
    /// If the answer does not list them.
    pub fn clients(&self) -> Result<Vec<Client>> {
        let clients = self.0["clients"].as_array().context("the status lists no clients")?;
        let both = clients.iter().cloned().zip(self.1.clients.iter().cloned());
        Ok(both.map(|(printed, read)| Client(printed, read)).collect())
    }

    /// The client of that name.
    ///
    /// # Errors
    /// If there is none.
    pub fn client(&self, name: &str) -> Result<Client> {
        let clients = self.clients()?;
        let client = clients.into_iter().find(|client| client.1.identity.name == name);
        client.with_context(|| format!("no client {name} in the status: {:#}", self.0["clients"]))
    }

    /// Calls of a policy's `decide` since the core started.
    pub fn decisions(&self) -> u64 {
        self.policy().decides
    }

    /// Decisions by the built-in rule instead.
    pub fn built_in_rule_decisions(&self) -> u64 {
        self.policy().built_in_rule_decisions
    }

    /// Turns that policies lost, whatever the reason.
    pub fn policy_faults(&self) -> u64 {
        self.policy().faults.by_kind().iter().map(|(_, count)| count).sum()
    }

    /// Turns lost for one reason: `trap`, `overrun`, `memory` or `nonsense`.
    ///
    /// # Panics
    /// If there is no such reason.
    pub fn faults_of(&self, kind: &str) -> u64 {
        let mut kinds = self.policy().faults.by_kind().into_iter();
        kinds.find(|(name, _)| *name == kind).expect("a kind of fault").1
    }

    /// Message of the latest fault; empty if there was none.
    pub fn last_fault(&self) -> String {
        self.policy().last_fault.clone().unwrap_or_default()
    }

    /// Whether the policy is no longer asked.
    pub fn policy_disabled(&self) -> bool {
        self.policy().disabled
    }

    /// Name of the active policy.
    pub fn policy_name(&self) -> String {
        self.policy().active.name.clone()
    }

    pub fn policy_digest(&self) -> String {
        self.policy().active.digest.clone()
    }

    /// How many policies were put active so far.
    pub fn generation(&self) -> u64 {
        self.policy().active.generation
    }

    /// Why it was loaded: `start`, `asked`, `file-changed`, `rollback`, `fallback`, `retry`.
    pub fn came(&self) -> &'static str {
        self.policy().active.loaded_because.as_str()
    }

    /// What became of the state that it was offered.
    pub fn restored(&self) -> &'static str {
        self.policy().active.restored.outcome()
    }

    /// Why the last policy that was disabled was.
    pub fn disabled(&self) -> Option<String> {
        Some(self.policy().last_disabled.as_ref()?.how.kind.to_string())
    }

    /// Why the last attempt to load another failed, if it did.
    pub fn load_failure(&self) -> Option<String> {
        Some(self.policy().last_load_error.as_ref()?.message.clone())
    }
}

impl Client {
    /// Whether it is of the high-priority class.
    pub fn is_high(&self) -> bool {
        self.1.identity.class == Class::High
    }

    /// Whether its launches are decided, or granted, by the core.
    pub fn governed(&self) -> bool {
        self.1.governed
    }

    /// What its requests took; of a high-priority client.
    pub fn service(&self) -> Option<tally_admin::Service> {
        self.1.service
    }

    /// The hardware time slice that it wants.
    pub fn time_slice_us(&self) -> u64 {
        self.1.report.time_slice_us.into()
    }

    /// Launches that the shim has counted.
    pub fn launches(&self) -> u64 {
        self.1.launches
    }
}
