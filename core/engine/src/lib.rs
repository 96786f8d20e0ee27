//! The scheduling state machine: clients, holds, windows, profiles. Pure: time and events in, actions out.
