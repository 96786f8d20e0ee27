//! The scheduling daemon.
