//! What a policy knows, carried from one instance to the next: the contract's
//! optional interface `state`.
//!
//! It is looked up by name and called by hand, because the bindings know only
//! interfaces that every policy has.

use crate::imports::HostState;
use wasmtime::Store;
use wasmtime::component::{
    Component, ComponentExportIndex, ComponentType, Instance, Lift, Lower, TypedFunc,
};

/// What a policy knows, in a form of its own; the contract's `saved`. Here, because wasmtime lifts and lowers it.
#[derive(Clone, Debug, Default, PartialEq, Eq, ComponentType, Lift, Lower)]
#[component(record)]
pub struct Saved {
    /// Name of the form, which tells whose state it is.
    pub format: String,
    /// Rises when the form changes.
    pub version: u32,
    /// At most `SAVED_BYTES_MAX` bytes.
    pub data: Vec<u8>,
}

/// What became of a state that was offered to a policy when it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Restored {
    /// There was no state to offer.
    #[default]
    NotOffered,
    /// The policy does not export `state`: it starts without.
    NoInterface,
    /// The policy took the state over.
    Accepted,
    /// It said why it is of no use, and started without.
    Refused(String),
    /// Its `restore` failed, and a new instance started without.
    Failed(String),
}

/// Where a component has the two functions.
#[derive(Clone, Copy, Debug)]
pub struct Exports {
    snapshot: ComponentExportIndex,
    restore: ComponentExportIndex,
}

impl Exports {
    /// Look them up in the interface of this name. `None` if one is missing.
    pub fn find(component: &Component, interface: &str) -> Option<Self> {
        let interface = component.get_export_index(None, interface)?;
        let function = |name| component.get_export_index(Some(&interface), name);
        Some(Exports { snapshot: function("snapshot")?, restore: function("restore")? })
    }
}

/// The two functions of an instance.
pub struct Functions {
    pub snapshot: TypedFunc<(), (Saved,)>,
    pub restore: TypedFunc<(Saved,), (Result<(), String>,)>,
}

impl Functions {
    /// Looks the functions of `state` in an instance up.
    ///
    /// # Errors
    /// If a type is another than the contract's.
    pub fn of(
        exports: Exports,
        instance: &Instance,
        store: &mut Store<HostState>,
    ) -> wasmtime::Result<Self> {
        Ok(Functions {
            snapshot: instance.get_typed_func(&mut *store, exports.snapshot)?,
            restore: instance.get_typed_func(&mut *store, exports.restore)?,
        })
    }
}
