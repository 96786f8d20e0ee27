//! The command line for running programs under, and talking to, tally-core.
