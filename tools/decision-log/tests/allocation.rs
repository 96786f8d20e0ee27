//! Recording does not allocate on the dispatch thread, also while records are lost and
//! the world is described anew. A file of its own, because it counts.

mod common;

use common::{Driver, Input, Named, options, recorded_into, through_a_file};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use tally_decision_log::{Recorded, Recorder, Tap};
use tally_engine::BuiltInRule;
use tally_engine::policy::{Class, Context, Event, Launch, Policy, Subscriptions};
use tally_engine::profile::{KernelKey, Transformation};

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

fn built_in() -> Named {
    Named(Box::new(BuiltInRule { idle_ns: 100_000 }), "built-in")
}

fn launch(kernel: u32) -> Launch {
    Launch {
        now_ns: 1,
        client: 1,
        class: Class::BestEffort,
        kernel,
        state: 0,
        offered: 0,
        grid_blocks: 1,
        block_threads: 1,
        shared_bytes: 0,
        predicted_ns: 0,
        waited_ns: 0,
        in_flight_ns: 0,
        high_idle_ns: u64::MAX,
        high_clients: 0,
        waiting_clients: 1,
        stream: 0,
        sm_count: 132,
    }
}

#[test]
fn recording_does_not_allocate() {
    let recorder = Recorder::default();
    let mut policy = Recorded::new(built_in(), 1, recorder.clone());
    let mut context = Context::default();
    policy.start(&mut context);
    let info = common::client(1);
    context.world.clients.insert(1, info.clone().into());
    policy.on_event(1, &Event::Joined(info), &mut context).unwrap();
    for x in 0..500 {
        let key = KernelKey { name: format!("k{x}"), image: 1, grid: [1; 3], block: [1; 3] };
        context.world.profiles.intern(&key);
    }
    // A ring that holds all, and one that holds next to nothing.
    let (large, mut large_reader) = Tap::new(1, options(8 << 20, false));
    let (small, mut small_reader) = Tap::new(2, options(4 << 10, false));
    recorder.insert(large, &context.world, Default::default(), Subscriptions::NONE);
    recorder.insert(small, &context.world, Default::default(), Subscriptions::NONE);
    let before = ALLOCATIONS.get();
    for round in 0..4_000u32 {
        recorder.pump(&mut context.world, &mut || None);
        let kernel = round % 500;
        context.world.profiles.record(kernel, u64::from(round) + 1);
        context.world.profiles.set_transformation(kernel, Transformation::Preparable);
        policy.decide(&launch(kernel), &mut context).unwrap();
        policy.on_event(u64::from(round), &Event::HighEnded, &mut context).unwrap();
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(large_reader.is_live() && large_reader.dropped() == 0);
    let mut records = 0;
    let mut record = Vec::new();
    while large_reader.next(&mut record) {
        records += 1;
    }
    assert!(records > 8_000, "{records}");
    assert!(!small_reader.is_live(), "its world does not even fit");
    assert!(small_reader.next(&mut record));
}

/// The same through an engine, whose own inputs may allocate: what the recorder adds is none.
#[test]
fn a_recorder_adds_no_allocation_to_the_engines() {
    let stream: Vec<(u64, Input)> = std::iter::once((0, Input::Join(1, false)))
        .chain((0..400).flat_map(|i| {
            [(1_000, Input::Submit(1, (i % 12) as u8, 0, 0)), (90_000, Input::End(1, 1))]
        }))
        .collect();
    let allocations = |recorder: Recorder| {
        let mut driver = Driver::new(built_in(), recorder);
        // What grows once grows here.
        stream.iter().for_each(|(gap, input)| driver.feed(*gap, input));
        let before = ALLOCATIONS.get();
        stream[1..].iter().for_each(|(gap, input)| driver.feed(*gap, input));
        ALLOCATIONS.get() - before
    };
    let (recorder, mut reader) = recorded_into(8 << 20);
    let (without, with) = (allocations(Recorder::default()), allocations(recorder));
    assert_eq!(with, without);
    assert!(through_a_file(&mut reader).len() > 1_600);
}
