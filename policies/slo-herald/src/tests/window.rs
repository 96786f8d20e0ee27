//! What may be under way when a unit begins.

use super::*;

#[test]
fn however_many_clients_launch_they_have_one_window_together() {
    for clients in 2..8_u32 {
        let mut b = Bench::new(3 * MS);
        let ids: Vec<ClientId> = (BATCH..BATCH + clients).collect();
        for id in &ids[1..] {
            b.policy.joined(b.now_ns, &client(*id, PriorityClass::BestEffort));
        }
        let waits = |id: &ClientId| ClientState {
            waiting_since_ns: b.now_ns,
            ..testing::client_state(*id, PriorityClass::BestEffort)
        };
        testing::set_clients(ids.iter().map(waits).collect());
        for at in 0..100 {
            b.now_ns += MS;
            let launch = Launch { client: ids[at % ids.len()], ..b.asked(20 * US) };
            b.policy.decide(&launch);
        }
        let window = |call| match call {
            Call::SetWindow { client: BATCH, window_ns } => Some(window_ns),
            _ => None,
        };
        let window_ns = calls().into_iter().filter_map(window).next_back().unwrap();
        assert_eq!(window_ns, MS / u64::from(clients));
    }
}

/// What is under way is to fit what the service can spare, or it may be late for ever.
#[test]
fn a_newly_strict_service_that_can_spare_little_has_a_short_window() {
    let mut b = Bench::new(2 * MS);
    let latest = || {
        let window = |call| match call {
            Call::SetWindow { client: BATCH, window_ns } => Some(window_ns),
            _ => None,
        };
        calls().into_iter().filter_map(window).next_back()
    };
    b.units(8, MS);
    assert_eq!(latest(), Some(450 * US));
    b.units(3, 3 * MS);
    assert!(b.policy.services[0].is_strict());
    assert_eq!(latest(), None, "it stays as it is");
    b.units(400, 3 * MS);
    assert_eq!(latest(), Some(MS), "late for other causes");
}
