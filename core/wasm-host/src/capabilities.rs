//! What goes beyond scheduling best effort, and has to be granted by name.
//!
//! A policy schedules best-effort launches without any of it: it holds, runs, cuts and
//! narrows them, sets windows, leases and timers, asks clients to give way, counts, logs
//! and sees measured times. Who the clients are, which programs' kernels run, and any say
//! over high priority are another matter: denied until the operator grants them
//! (`[policy] capabilities`).
//!
//! Data that is not granted is empty. A call that is not granted ends the policy's turn
//! with a [`Denied`]. A component that only *imports* such a function is loaded, with a
//! warning: interpreted languages import all there are.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Something that a policy may be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Capability {
    /// See the names and labels of clients. Without: empty.
    ClientIdentity,
    /// See the names of kernels and which code image holds them. Without: empty and 0.
    KernelIdentity,
    /// Have a say over high priority: `set-standing-grant`, and any decision but `run` for
    /// a high-priority launch.
    HighPriority,
}

impl Capability {
    /// All that there are.
    pub const ALL: [Capability; 3] =
        [Capability::ClientIdentity, Capability::KernelIdentity, Capability::HighPriority];

    /// As in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Capability::ClientIdentity => "client-identity",
            Capability::KernelIdentity => "kernel-identity",
            Capability::HighPriority => "high-priority",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Capability {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| {
            let all = Self::ALL.map(Capability::name).join(", ");
            format!("there is no capability {text:?}: expected one of {all}")
        })
    }
}

/// A set of capabilities; none by default. Small enough that asking is one instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "BTreeSet<Capability>", into = "BTreeSet<Capability>")]
pub struct Capabilities(u8);

impl Capabilities {
    /// What plain scheduling needs.
    pub const NONE: Self = Capabilities(0);

    /// Everything that can be granted.
    pub fn all() -> Self {
        Capability::ALL.into_iter().collect()
    }

    /// Whether this one is granted.
    #[inline]
    pub const fn has(self, capability: Capability) -> bool {
        self.0 & capability.bit() != 0
    }

    /// Those of these that are not among the others.
    pub const fn without(self, others: Self) -> Self {
        Capabilities(self.0 & !others.0)
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Their names, in order.
    pub fn names(self) -> Vec<&'static str> {
        Capability::ALL.into_iter().filter(|one| self.has(*one)).map(Capability::name).collect()
    }
}

impl FromIterator<Capability> for Capabilities {
    fn from_iter<T: IntoIterator<Item = Capability>>(all: T) -> Self {
        Capabilities(all.into_iter().fold(0, |bits, one| bits | one.bit()))
    }
}

impl From<Capabilities> for BTreeSet<Capability> {
    fn from(all: Capabilities) -> Self {
        Capability::ALL.into_iter().filter(|one| all.has(*one)).collect()
    }
}

impl From<Capability> for Capabilities {
    fn from(one: Capability) -> Self {
        Capabilities(one.bit())
    }
}

impl From<BTreeSet<Capability>> for Capabilities {
    fn from(all: BTreeSet<Capability>) -> Self {
        all.into_iter().collect()
    }
}

/// Functions of `host` that may only be called with a capability.
pub const GUARDED: [(&str, Capability); 1] = [("set-standing-grant", Capability::HighPriority)];

/// The capabilities without which a component that imports these functions of `host` may
/// meet a [`Denied`].
pub fn needs<'a>(imports: impl IntoIterator<Item = &'a str>) -> Capabilities {
    let guard = |import| GUARDED.into_iter().find(|(name, _)| *name == import);
    imports.into_iter().filter_map(guard).map(|(_, capability)| capability).collect()
}

/// A policy called a function that it has not been granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "called `{function}` without the capability `{capability}`: grant it (`capabilities = \
     [\"{capability}\"]` under `[policy]` in the core's configuration), or use a policy that does \
     without"
)]
pub struct Denied {
    /// Which function of `host`.
    pub function: &'static str,
    /// What it takes.
    pub capability: Capability,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Settings {
        #[serde(default)]
        capabilities: Capabilities,
    }

    #[test]
    fn names_are_read_as_they_are_written_and_nothing_is_granted_unasked() {
        let read = |text: &str| toml::from_str::<Settings>(text).map(|all| all.capabilities);
        assert_eq!(read("").unwrap(), Capabilities::NONE);
        for capability in Capability::ALL {
            let set = read(&format!("capabilities = [\"{capability}\"]")).unwrap();
            assert_eq!(set.names(), [capability.name()]);
            assert_eq!(capability.name().parse(), Ok(capability));
            assert!(set.has(capability) && Capabilities::all().has(capability));
            assert!(!Capabilities::all().without(set).has(capability));
        }
        let error = read("capabilities = [\"root\"]").unwrap_err().to_string();
        assert!(error.contains("`root`") && error.contains("`high-priority`"), "{error}");
        assert!("root".parse::<Capability>().unwrap_err().contains("client-identity"));
    }

    #[test]
    fn what_a_component_imports_says_what_it_needs() {
        assert!(needs(["log", "set-window", "client"]).is_empty());
        assert_eq!(needs(["log", "set-standing-grant"]).names(), ["high-priority"]);
        let contract = crate::bindings::CONTRACT;
        for (name, _) in GUARDED {
            assert!(
                contract.contains(&format!("  {name}: func(")),
                "{name} is not in the contract"
            );
        }
    }
}
