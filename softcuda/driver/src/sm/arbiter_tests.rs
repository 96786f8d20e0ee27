use super::*;

fn device() -> (tempfile::TempDir, Arbiter) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let wish = Wish { sms: Some(2), memory_bytes: Some(1 << 20) };
    let arbiter = Arbiter::attach(&dir.path().join("device"), wish).unwrap();
    (dir, arbiter)
}

#[test]
fn first_come_first_served() {
    let (_dir, arbiter) = device();
    let (a, granted) = arbiter.arrive(0, 2, false);
    assert_eq!(granted, 2);
    let (sm0, sm1) = (arbiter.take(&a).unwrap(), arbiter.take(&a).unwrap());
    assert_eq!(arbiter.take(&a), None);
    let (b, granted) = arbiter.arrive(0, 2, false);
    assert_eq!(granted, 0);
    assert!(!arbiter.must_yield(&a, sm0), "a later kernel does not displace an earlier one");
    arbiter.leave(&a, Some(sm0));
    assert_eq!(arbiter.take(&b), Some(sm0));
    assert_eq!(arbiter.take(&b), None);
    arbiter.leave(&a, Some(sm1));
    assert_eq!(arbiter.take(&b), Some(sm1));
    arbiter.leave(&b, Some(sm0));
    arbiter.leave(&b, Some(sm1));
    assert_eq!(arbiter.arrive(0, 2, false).1, 2);
}

#[test]
fn urgent_kernels_go_first_at_the_next_block() {
    let (_dir, arbiter) = device();
    let (low, _) = arbiter.arrive(0, 2, false);
    let (sm0, sm1) = (arbiter.take(&low).unwrap(), arbiter.take(&low).unwrap());
    let (high, granted) = arbiter.arrive(-5, 1, false);
    assert_eq!(granted, 0, "a running block is never interrupted");
    assert!(arbiter.must_yield(&low, sm0) && arbiter.must_yield(&low, sm1));
    arbiter.yield_to_others(&low, sm0);
    assert_eq!(arbiter.take(&high), Some(sm0));
    assert!(!arbiter.must_yield(&low, sm1), "one SM was enough");
    assert_eq!(arbiter.take(&low), None);
    arbiter.leave(&high, Some(sm0));
    assert_eq!(arbiter.take(&low), Some(sm0), "it is still in line");
    arbiter.leave(&low, Some(sm0));
    arbiter.leave(&low, Some(sm1));
}

#[test]
fn a_gang_gets_all_or_nothing_and_is_not_overtaken() {
    let (_dir, arbiter) = device();
    let (a, _) = arbiter.arrive(0, 1, false);
    let sm = arbiter.take(&a).unwrap();
    let (gang, granted) = arbiter.arrive(0, 2, true);
    assert_eq!(granted, 0);
    let (later, granted) = arbiter.arrive(0, 1, false);
    assert_eq!(granted, 0, "the free SM is kept for the gang");
    arbiter.leave(&a, Some(sm));
    assert!(arbiter.take(&gang).is_some() && arbiter.take(&gang).is_some());
    assert_eq!(arbiter.take(&later), None);
}

#[test]
fn a_partition_is_waited_for_and_left_alone() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let wish = Wish { sms: Some(4), memory_bytes: Some(1 << 20) };
    let arbiter = Arbiter::attach(&dir.path().join("device"), wish).unwrap();
    let mut upper = SmSet::first(4);
    let lower = upper.split_off(2);
    // Two kernels in the upper half: never more than two SMs together.
    let (a, granted) = arbiter.arrive_within(0, 4, false, &upper);
    assert_eq!(granted, 2);
    assert_eq!((arbiter.take(&a), arbiter.take(&a), arbiter.take(&a)), (Some(2), Some(3), None));
    let (b, granted) = arbiter.arrive_within(-1, 4, false, &upper);
    assert_eq!(granted, 0, "the free SMs are not its own");
    assert!(arbiter.must_yield(&a, 2) && arbiter.must_yield(&a, 3));
    // A kernel of the whole device is not held up by them, nor holds them up.
    let (whole, granted) = arbiter.arrive(0, 4, false);
    assert_eq!(granted, 2);
    assert_eq!((arbiter.take(&whole), arbiter.take(&whole)), (Some(0), Some(1)));
    assert!(!arbiter.must_yield(&whole, 0), "what waits cannot run there");
    arbiter.yield_to_others(&a, 3);
    assert_eq!(arbiter.take(&b), Some(3));
    let (gang, granted) = arbiter.arrive_within(0, 2, true, &lower);
    assert_eq!(granted, 0);
    assert!(!arbiter.must_yield(&whole, 0), "it came earlier");
    arbiter.leave(&whole, Some(0));
    arbiter.leave(&whole, Some(1));
    assert_eq!((arbiter.take(&gang), arbiter.take(&gang)), (Some(0), Some(1)));
    let (nowhere, granted) = arbiter.arrive_within(0, 9, false, &SmSet::default());
    assert_eq!(granted, 0, "all of the device, which is taken");
    arbiter.leave(&a, Some(2));
    assert_eq!(arbiter.take(&b), Some(2));
    for (ticket, sm) in [(b, 2), (b, 3), (gang, 0), (gang, 1)] {
        arbiter.leave(&ticket, Some(sm));
    }
    assert_eq!((0..5).filter_map(|_| arbiter.take(&nowhere)).count(), 4);
}

#[test]
fn waiting_returns_when_an_sm_comes_free() {
    let (_dir, arbiter) = device();
    let (a, _) = arbiter.arrive(0, 2, false);
    let (b, _) = arbiter.arrive(0, 1, false);
    let sm = arbiter.take(&a).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            loop {
                let seen = arbiter.word(&b);
                if arbiter.take(&b).is_some() {
                    break;
                }
                assert_eq!(arbiter.wait(&b, seen), Waited::Changed);
            }
        });
        std::thread::sleep(Duration::from_millis(5));
        arbiter.leave(&a, Some(sm));
    });
}

#[test]
fn memory_is_counted_over_the_device() {
    let (_dir, arbiter) = device();
    assert!(arbiter.reserve_bytes(1 << 20));
    assert!(!arbiter.reserve_bytes(1));
    assert!(!arbiter.reserve_bytes(u64::MAX));
    arbiter.release_bytes(1 << 19);
    assert!(arbiter.reserve_bytes(1));
    assert_eq!(arbiter.used_bytes(), (1 << 19) + 1);
}

#[test]
fn a_foreign_file_is_refused_and_not_touched() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("device");
    let wish = Wish { sms: None, memory_bytes: None };
    std::fs::write(&path, b"something else").unwrap();
    assert!(matches!(Arbiter::attach(&path, wish), Err(AttachError::Foreign { .. })));
    std::fs::write(&path, vec![0u8; size_of::<Device>()]).unwrap();
    assert!(matches!(Arbiter::attach(&path, wish), Err(AttachError::Foreign { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), vec![0u8; size_of::<Device>()]);
    assert!(Arbiter::attach(&dir.path().join("no/such/dir"), wish).is_err());
}

#[test]
fn detaching_hands_everything_on() {
    let (dir, arbiter) = device();
    arbiter.arrive(0, 2, false);
    assert!(arbiter.reserve_bytes(5));
    arbiter.detach();
    let wish = Wish { sms: Some(3), memory_bytes: Some(1 << 30) };
    let again = Arbiter::attach(&dir.path().join("device"), wish).unwrap();
    assert_eq!((again.sms(), again.used_bytes(), again.memory_bytes()), (3, 0, 1 << 30));
    assert_eq!(again.arrive(0, 3, false).1, 3);
}

#[test]
fn a_holder_that_dies_in_the_lock_is_cleaned_up_after() {
    let (_dir, arbiter) = device();
    let (dead, _) = arbiter.arrive(0, 2, false);
    arbiter.take(&dead).unwrap();
    let device = arbiter.device;
    // A thread that ends inside the lock is to the kernel what a process is;
    // it leaves a kernel without a process and an SM without a kernel behind.
    let row = PROCESSES_MAX - 1;
    std::thread::spawn(move || {
        let (guard, _) = lock(device);
        device.processes[row].pid.store(u64::from(u32::MAX), SeqCst);
        device.processes[row].used_bytes.store(77, SeqCst);
        device.kernels[dead.row].process.store(row as u32, SeqCst);
        device.owners[1].0.store(SmWord::running(123_456, KERNELS_MAX - 1).0, SeqCst);
        std::mem::forget(guard);
    })
    .join()
    .unwrap();
    let (next, granted) = arbiter.arrive(0, 2, false);
    assert_eq!(granted, 2);
    assert_eq!(arbiter.used_bytes(), 0);
    assert!(arbiter.take(&next).is_some() && arbiter.take(&next).is_some());
}

/// Whatever kernels come, go and yield in whatever order: no SM is given
/// twice, none is idle while somebody wants it, and nobody waits behind
/// somebody less urgent who could have been made to yield.
#[test]
fn any_order_of_events() {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};
    let (_dir, arbiter) = device();
    let events =
        proptest::collection::vec((0u8..4, any::<u8>(), -5i32..1, 1u32..4, 0u32..4), 1..80);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&events, |events| {
        let mut kernels: Vec<Kernel> = Vec::new();
        for (event, which, priority, want, on) in events {
            let which = usize::from(which) % kernels.len().max(1);
            match (event, kernels.get_mut(which)) {
                (0, _) | (_, None) => {
                    if kernels.len() < 20 {
                        let mut set = SmSet::default();
                        (0..2).filter(|sm| on >> sm & 1 != 0).for_each(|sm| set.insert(sm));
                        let (ticket, _) = arbiter.arrive_within(priority, want, false, &set);
                        let set = if on == 0 { SmSet::first(2) } else { set };
                        kernels.push((ticket, want.min(set.count()), Vec::new(), set));
                    }
                }
                (1, Some((ticket, _, held, _))) => held.extend(arbiter.take(ticket)),
                (2, Some((ticket, _, held, _))) => {
                    if let Some(sm) = held.pop() {
                        arbiter.yield_to_others(ticket, sm);
                    }
                }
                (_, Some(_)) => leave(&arbiter, kernels.swap_remove(which)),
            }
            let held: Vec<u32> = kernels.iter().flat_map(|k| k.2.iter().copied()).collect();
            let mut distinct = held.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(held.len(), distinct.len());
            let confined = kernels.iter().all(|k| k.2.iter().all(|&sm| k.3.contains(sm)));
            prop_assert!(confined, "an SM outside the set");
            // An SM is idle only if all who may run there have enough.
            for sm in 0..2 {
                let owner = SmWord(arbiter.device.owners[sm as usize].0.load(SeqCst));
                let owns = |k: &&Kernel| {
                    let mine = |sm: usize| arbiter.device.owners[sm].0.load(SeqCst) & !1;
                    let word = SmWord::granted(k.0.ticket, k.0.row).0;
                    (0..2).filter(|&sm| mine(sm) == word).count() as u32
                };
                let hungry = kernels.iter().find(|k| k.3.contains(sm) && owns(k) < k.1);
                prop_assert!(owner.0 != 0 || hungry.is_none());
                let first = arbiter.device.first_waiting[sm as usize].0.load(SeqCst);
                let waits = kernels.iter().filter(|k| k.3.contains(sm) && owns(k) < k.1);
                prop_assert_eq!(first, waits.map(|k| k.0.key).min().unwrap_or(u64::MAX));
            }
        }
        for kernel in kernels.drain(..) {
            leave(&arbiter, kernel);
        }
        prop_assert_eq!(arbiter.device.kernels_high.load(SeqCst), 0);
        let idle = |sm: usize| arbiter.device.first_waiting[sm].0.load(SeqCst) == u64::MAX;
        prop_assert!((0..2).all(idle));
        Ok(())
    });
    outcome.unwrap();
}

/// A kernel of the test: how many SMs it can use, those it runs on, and where
/// it may run.
type Kernel = (Ticket, u32, Vec<u32>, SmSet);

fn leave(arbiter: &Arbiter, (ticket, _, held, _): Kernel) {
    arbiter.leave(&ticket, None);
    for sm in held {
        arbiter.leave(&ticket, Some(sm));
    }
}
