//! Handles. A handle is the address of the object, which makes it unique and
//! opaque; it is only ever looked up, never dereferenced, so that a stale or
//! invented handle gives an error.

use crate::config;
use crate::error::{CuError, CuResult};
use crate::sync::{read, write};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, RwLock};

/// All living objects of one kind.
pub(crate) struct Registry<T>(RwLock<HashMap<usize, Arc<T>, BuildHasherDefault<AddressHasher>>>);

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<T> Registry<T> {
    /// Adds `object` and returns its handle.
    pub(crate) fn insert(&self, object: &Arc<T>) -> usize {
        let handle = handle_of(object);
        write(&self.0).insert(handle, object.clone());
        handle
    }

    /// The object behind `handle`.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is none.
    pub(crate) fn get(&self, handle: usize) -> CuResult<Arc<T>> {
        self.find(handle).ok_or_else(|| gone::<T>(handle, CuError::INVALID_HANDLE))
    }

    /// The object behind `handle`, if there is one.
    pub(crate) fn find(&self, handle: usize) -> Option<Arc<T>> {
        read(&self.0).get(&handle).cloned()
    }

    /// The first answer that any object gives.
    pub(crate) fn find_map<R>(&self, ask: impl Fn(&Arc<T>) -> Option<R>) -> Option<R> {
        read(&self.0).values().find_map(ask)
    }

    /// Takes the object out.
    ///
    /// # Errors
    /// `INVALID_HANDLE` if there is none.
    pub(crate) fn remove(&self, handle: usize) -> CuResult<Arc<T>> {
        let removed = write(&self.0).remove(&handle);
        removed.ok_or_else(|| gone::<T>(handle, CuError::INVALID_HANDLE))
    }

    /// Drops all objects that `keep` does not want.
    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        let mut dropped = Vec::new();
        write(&self.0).retain(|_, object| {
            let keeps = keep(object);
            if !keeps {
                dropped.push(object.clone());
            }
            keeps
        });
        // Their destructors run here, outside the lock.
        drop(dropped);
    }
}

/// There is no object of that handle: the error, or with `TALLY_SOFTCUDA_STRICT=1` the process's end, for a GPU's
/// driver follows such a handle wherever it leads.
pub(crate) fn gone<T>(handle: usize, error: CuError) -> CuError {
    let kind = std::any::type_name::<T>();
    // A handle of code may be of one kind or another: callers try both.
    let is_code = kind.ends_with("::Function") || kind.ends_with("::KernelHandle");
    if config::is_strict() && !is_code {
        use std::io::Write;
        let trace = std::backtrace::Backtrace::force_capture();
        let _ = writeln!(std::io::stderr(), "softcuda: {kind} {handle:#x} is gone\n{trace}");
        std::process::abort();
    }
    error
}

/// The handle of an object that is in a registry.
pub(crate) fn handle_of<T>(object: &Arc<T>) -> usize {
    Arc::as_ptr(object) as usize
}

/// Spreads addresses, whose low bits are all alike.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(byte.into());
        }
    }

    fn write_usize(&mut self, n: usize) {
        self.0 = (self.0 ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}
