//! The front door: build, demo, test, bench, bundle.
