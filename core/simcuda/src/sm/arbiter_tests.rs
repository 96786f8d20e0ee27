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
    assert!(!arbiter.must_yield(&a), "a later kernel does not displace an earlier one");
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
    assert!(arbiter.must_yield(&low));
    arbiter.give_way(&low, sm0);
    assert_eq!(arbiter.take(&high), Some(sm0));
    assert!(!arbiter.must_yield(&low), "one SM was enough");
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
