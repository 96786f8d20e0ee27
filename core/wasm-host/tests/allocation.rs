//! The decision path does not allocate. A file of its own, because it counts.

mod common;

use common::{Bench, launch, policy};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use tally_engine::policy::{Decision, Policy};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: as the trait demands.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as the trait demands.
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn deciding_does_not_allocate() {
    for name in ["fifo", "tally-priority"] {
        let mut bench = Bench::new(policy(name, ""));
        let mut asked = launch(1);
        let mut decide = |high_clients| {
            asked.high_clients = high_clients;
            asked.high_idle_ns = 5;
            bench.policy.decide(&asked, &mut bench.context)
        };
        decide(0).unwrap();
        let before = ALLOCATIONS.get();
        for round in 0..1_000 {
            let decision = decide(round % 2);
            let decision = decision.map(|answer| answer.decision);
            assert!(matches!(decision, Ok(Decision::Run(_) | Decision::Hold(_))));
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{name} allocates");
    }
}
