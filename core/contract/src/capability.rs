//! What goes beyond scheduling best effort, and has to be granted by name.
//!
//! A policy schedules best-effort launches without any of it. Who the clients are, which programs' kernels run, and
//! any say over high priority are another matter: denied until the operator grants them (`[policy] capabilities`).
//!
//! A capability is an interface of the contract. What a component imports says what it needs, so one that is not
//! granted it is refused when it is loaded, and never fails for it in the middle of a call.

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Something that a policy may be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(Deserialize, Serialize), serde(rename_all = "kebab-case"))]
pub enum Capability {
    /// The names and labels of clients.
    Identity,
    /// The names of kernels, and which code image holds them.
    KernelIdentity,
    /// A say over high priority: which clients are gated, and decisions other than `run` for
    /// high-priority launches.
    HighPriority,
}

impl Capability {
    pub const ALL: [Capability; 3] =
        [Capability::Identity, Capability::KernelIdentity, Capability::HighPriority];

    /// Name in the configuration, which is that of the contract's interface.
    pub const fn name(self) -> &'static str {
        match self {
            Capability::Identity => "identity",
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Deserialize, Serialize))]
#[cfg_attr(feature = "serde", serde(from = "BTreeSet<Capability>", into = "BTreeSet<Capability>"))]
pub struct Capabilities(u8);

impl Capabilities {
    /// No capability: enough for plain scheduling.
    pub const NONE: Self = Capabilities(0);

    /// Everything that can be granted.
    pub fn all() -> Self {
        Capability::ALL.into_iter().collect()
    }

    /// What a component needs that imports these interfaces, by their bare names.
    pub fn of_imports<'a>(imports: impl IntoIterator<Item = &'a str>) -> Self {
        imports.into_iter().filter_map(|name| name.parse::<Capability>().ok()).collect()
    }

    /// Whether this one is in it.
    #[inline]
    pub const fn has(self, capability: Capability) -> bool {
        self.0 & capability.bit() != 0
    }

    /// The capabilities of this set that are not in `others`.
    pub const fn without(self, others: Self) -> Self {
        Capabilities(self.0 & !others.0)
    }

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

#[cfg(all(test, feature = "serde"))]
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
        assert!("root".parse::<Capability>().unwrap_err().contains("kernel-identity"));
    }

    #[test]
    fn what_a_component_imports_says_what_it_needs() {
        assert!(Capabilities::of_imports(["log", "control", "clients"]).is_empty());
        assert_eq!(Capabilities::of_imports(["log", "high-priority"]).names(), ["high-priority"]);
        for capability in Capability::ALL {
            let interface = format!("interface {capability} {{");
            assert!(crate::TEXT.contains(&interface), "{interface}");
        }
    }
}
