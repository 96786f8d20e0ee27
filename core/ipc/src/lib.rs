//! The shared-memory ABI and registration protocol between the shim and the core.
