//! What `tallyctl status --json` says, by the names used there.

use anyhow::{Context, Result};
use serde_json::Value;

/// The whole answer.
#[derive(Clone, Debug)]
pub struct Status(pub Value);

/// What it says of one client.
#[derive(Clone, Debug)]
pub struct Client(pub Value);

impl Status {
    /// Reads it.
    ///
    /// # Errors
    /// If it is not JSON.
    pub fn parse(text: &[u8]) -> Result<Self> {
        Ok(Self(serde_json::from_slice(text).context("tallyctl status --json is not JSON")?))
    }

    /// Clients now connected.
    ///
    /// # Errors
    /// If the answer does not list them.
    pub fn clients(&self) -> Result<Vec<Client>> {
        let clients = self.0["clients"].as_array().context("the status lists no clients")?;
        Ok(clients.iter().cloned().map(Client).collect())
    }

    /// The client of that name.
    ///
    /// # Errors
    /// If there is none.
    pub fn client(&self, name: &str) -> Result<Client> {
        let clients = self.clients()?;
        let client = clients.into_iter().find(|client| client.0["name"] == name);
        client.with_context(|| format!("no client {name} in the status: {:#}", self.0["clients"]))
    }

    /// Calls of a policy's `decide` since the core started.
    pub fn decisions(&self) -> u64 {
        self.0["policy"]["decides"].as_u64().unwrap_or(0)
    }

    /// Decisions by the built-in rule instead.
    pub fn fallbacks(&self) -> u64 {
        self.0["policy"]["fallbacks"].as_u64().unwrap_or(0)
    }

    /// Turns that policies lost, whatever the reason.
    pub fn policy_faults(&self) -> u64 {
        let faults = self.0["policy"]["faults"].as_object();
        faults.map_or(0, |faults| faults.values().filter_map(Value::as_u64).sum())
    }

    /// Turns lost for one reason: `trap`, `overrun`, `memory` or `nonsense`.
    pub fn faults_of(&self, kind: &str) -> u64 {
        self.0["policy"]["faults"][kind].as_u64().unwrap_or(0)
    }

    /// The last such turn.
    pub fn last_fault(&self) -> String {
        self.0["policy"]["last_fault"].to_string()
    }

    /// Whether the policy is no longer asked.
    pub fn policy_disabled(&self) -> bool {
        self.0["policy"]["disabled"] == true
    }

    /// Name of the active policy.
    pub fn policy_name(&self) -> String {
        self.0["policy"]["name"].as_str().unwrap_or_default().to_owned()
    }

    pub fn policy_digest(&self) -> String {
        self.0["policy"]["digest"].as_str().unwrap_or_default().to_owned()
    }

    /// How many policies were put active so far.
    pub fn generation(&self) -> u64 {
        self.0["policy"]["generation"].as_u64().unwrap_or(0)
    }

    /// Why it came: `start`, `asked`, `file-changed`, `rollback`, `strikes`, `retry`.
    pub fn came(&self) -> String {
        self.0["policy"]["loaded_because"].as_str().unwrap_or_default().to_owned()
    }

    /// What became of the state that it was offered.
    pub fn restored(&self) -> String {
        self.0["policy"]["restored"]["outcome"].as_str().unwrap_or_default().to_owned()
    }

    /// Why the last policy that was disabled was.
    pub fn disabled(&self) -> Option<String> {
        Some(self.0["policy"]["last_disabled"]["kind"].as_str()?.to_owned())
    }

    /// Why the last attempt to load another failed, if it did.
    pub fn load_failure(&self) -> Option<String> {
        let failure = &self.0["policy"]["last_load_error"];
        (!failure.is_null()).then(|| failure.to_string())
    }
}

impl Client {
    /// Whether it is of the high-priority class.
    pub fn is_high(&self) -> bool {
        self.0["class"] == "high"
    }

    /// Whether its launches are decided, or granted, by the core.
    pub fn governed(&self) -> bool {
        self.0["governed"] == true
    }

    /// The hardware time slice that it wants.
    pub fn time_slice_us(&self) -> u64 {
        self.0["report"]["time_slice_us"].as_u64().unwrap_or(0)
    }

    /// Launches that the shim has counted.
    pub fn launches(&self) -> u64 {
        self.0["launches"].as_u64().unwrap_or(0)
    }
}
