use super::super::kernels::KernelShares;
use super::*;
use crate::loader::Loaded;
use crate::quota::User;
use rustix::fd::AsFd;
use tally_contract::limits::BREACHES_MAX;
use tally_decision_log::Recorded;
use tally_engine::EngineConfig;
use tally_engine::policy::{
    Answer, ClientInfo, Context, Decision, Event, Fault, Launch, Policy, forms_offered,
    launch_state,
};
use tally_ipc::ClientRegion;
use tally_ipc::layout::{KERNEL_SLOTS, KERNEL_UNKNOWN, TURNAROUND_SLOTS};
use tally_ipc::ring::Request;

/// A client that writes what it likes, as the core serves it.
struct Hostile {
    theirs: &'static ClientRegion,
    client: DispatchClient,
    engine: Engine,
    out: Vec<Action>,
}

impl Hostile {
    fn new(is_ungated: bool) -> Self {
        let (fd, theirs) = tally_ipc::map::create_client().unwrap();
        let (_, core) = tally_ipc::map::create_core().unwrap();
        let class = if is_ungated { Class::High } else { Class::BestEffort };
        let info = ClientInfo { id: 1, class, name: "hostile".into(), labels: vec![] };
        let link = NewClient {
            info: info.clone(),
            region: tally_ipc::map::open_client(fd.as_fd()).unwrap(),
            core,
            doorbell: super::super::park::eventfd().unwrap(),
            first_ticket: 0,
            kernels: KernelShares::new(10).of(User::Uid(1), false),
            witness: Default::default(),
        };
        let settings = Settings {
            spin_ns: 0,
            pin_cpu: None,
            completion_poll_ns: 0,
            probe_after_ns: 1_000,
            high_stall_ns: 0,
            engine: EngineConfig::default(),
        };
        let (mut engine, mut out) =
            (Engine::with_policy(settings.engine, super::super::built_in()), Vec::new());
        engine.client_joined(0, info, 0, &mut out);
        let client = DispatchClient::new(link, 0, &settings);
        Hostile { theirs: theirs.leak(), client, engine, out }
    }

    fn publish(&self, ticket: u64) {
        let request = Request {
            kernel: 0,
            flags: submission_flags::LEASED,
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            stream: 0,
            completion: ticket as u32 + 1,
            demand: Default::default(),
            limited_sms: 0,
        };
        ring::publish(self.theirs, ticket, &request);
    }

    fn take(&mut self, share: Share) -> Taken {
        let mut profile_cache = ProfileCache::new(Default::default());
        let Hostile { client, engine, out, .. } = self;
        client.poll_submissions(1_000, share, engine, &mut profile_cache, out)
    }
}

const SHARE: Share = Share { submissions: 7, completions: 10, turnarounds: 5, marks: 3 };

#[test]
fn a_clients_share_of_a_pass_falls_with_the_number_of_clients() {
    let all = |clients| {
        let Share { submissions, completions, turnarounds, .. } = Share::of(clients);
        (submissions, completions, turnarounds)
    };
    assert_eq!(all(0), all(1));
    assert_eq!(all(1), (12, 256, 12));
    for clients in 1..=256 {
        let (submissions, completions, turnarounds) = all(clients);
        assert!(submissions >= 2 && submissions * clients <= 512);
        assert!(completions >= 2 && completions * clients <= 2_048);
        assert!(turnarounds >= 2 && turnarounds * clients <= 512);
    }
}

#[test]
fn in_a_pass_a_client_has_no_more_than_its_share() {
    let mut hostile = Hostile::new(true);
    (0..RING_SLOTS as u64).for_each(|ticket| hostile.publish(ticket));
    assert_eq!(hostile.take(SHARE), Taken::Launches(7));
    while hostile.take(SHARE) != Taken::Launches(0) {}
    let stats = |hostile: &Hostile| hostile.engine.client_stats(1).unwrap();
    assert_eq!(stats(&hostile).submitted, RING_SLOTS as u64);
    // It says that all have ended, and that more have yielded than there are launches.
    hostile.theirs.completions[0].done.store(RING_SLOTS as u32, SeqCst);
    hostile.theirs.turnarounds.count.store(u64::MAX / 2, SeqCst);
    let mut passes = 0;
    let first = u64::MAX / 2 - TURNAROUND_SLOTS as u64;
    while hostile.client.is_pending() {
        let before = stats(&hostile).completed;
        let Hostile { client, engine, out, .. } = &mut hostile;
        client.poll_completions(2_000, SHARE, engine, out);
        passes += 1;
        assert!(stats(&hostile).completed - before <= 10);
        assert_eq!(hostile.client.turnarounds_seen, first + 5 * passes);
    }
    // Of ten, one is for looking at the stream.
    assert_eq!(passes, RING_SLOTS.div_ceil(9) as u64);
    assert_eq!(stats(&hostile).completed, RING_SLOTS as u64, "none is lost");
}

/// Holds the first launch that it is asked about.
struct HoldsOne(bool);

impl Policy for HoldsOne {
    fn decide(&mut self, _: &Launch, _: &mut Context) -> Result<Answer, Fault> {
        let is_first = !std::mem::replace(&mut self.0, true);
        Ok(if is_first { Decision::Hold(1_000) } else { Decision::Run(0) }.into())
    }

    fn on_event(&mut self, _: u64, _: &Event, _: &mut Context) -> Result<(), Fault> {
        Ok(())
    }
}

fn holds_one() -> Recorded<Loaded> {
    super::super::unrecorded(Loaded::native(Box::new(HoldsOne(false))))
}

#[test]
fn a_launch_under_a_grant_that_was_taken_back_meanwhile_is_seen_done() {
    let mut hostile = Hostile::new(false);
    hostile.engine.set_policy(0, holds_one(), &mut hostile.out);
    // The engine has taken it back; the client is not told yet, and starts the launch.
    ring::grant(&hostile.client.link.core, u64::MAX);
    hostile.publish(0);
    hostile.theirs.submissions[0].flags.store(0, SeqCst);
    assert_eq!(hostile.take(SHARE), Taken::Launches(1));
    hostile.theirs.completions[0].done.store(1, SeqCst);
    let Hostile { client, engine, out, .. } = &mut hostile;
    client.poll_completions(1_500, SHARE, engine, out);
    assert_eq!(engine.client_state(1).unwrap().waiting, 1);
    out.clear();
    engine.tick(2_000, out);
    let [Action::Grant { until, .. }] = out[..] else { panic!("{out:?}") };
    client.grant(until, |_| ());
    client.poll_completions(2_500, SHARE, engine, out);
    assert_eq!(engine.client_stats(1).unwrap().completed, 1);
}

#[test]
fn launches_that_end_before_they_are_granted_are_seen_done() {
    const LAUNCHES: u64 = 100;
    let mut hostile = Hostile::new(false);
    hostile.engine.set_policy(0, holds_one(), &mut hostile.out);
    for ticket in 0..LAUNCHES {
        hostile.publish(ticket);
        hostile.theirs.submissions[ticket as usize].flags.store(0, SeqCst);
    }
    let share = Share { submissions: LAUNCHES as usize, ..Share::of(1) };
    assert_eq!(hostile.take(share), Taken::Launches(LAUNCHES as usize));
    let Hostile { theirs, client, engine, out } = &mut hostile;
    engine.begin_pass();
    // More are granted than one pass takes.
    engine.set_policy(1_500, super::super::unrecorded(Loaded::grant_all()), out);
    client.grant(u64::MAX, |_| ());
    assert!(engine.client_state(1).unwrap().waiting > 0);
    theirs.completions[0].done.store(LAUNCHES as u32, SeqCst);
    for pass in 0..4 {
        engine.begin_pass();
        client.poll_completions(2_000 + pass, share, engine, out);
        engine.tick(2_000 + pass, out);
    }
    assert_eq!(engine.client_stats(1).unwrap().completed, LAUNCHES);
    assert!(!client.is_pending() && client.dirty == 0);
}

#[test]
fn flags_are_translated_and_what_the_core_knows_better_is_not_taken() {
    let known_better =
        launch_state::HIGH_ACTIVE | launch_state::OFFERED_AGAIN | launch_state::MIN_SHARE;
    assert_eq!(state_of(u32::MAX), launch_state::ALL & !known_better);
    assert_eq!(offered_by(u32::MAX), forms_offered::ALL);
    assert_eq!(state_of(submission_flags::LEASED), 0);
    assert_eq!(offered_by(submission_flags::LEASED), 0);
}

/// As one of high priority that a policy gates.
#[test]
fn a_client_that_stops_with_a_launch_in_flight_is_waited_for_no_longer() {
    let mut hostile = Hostile::new(true);
    hostile.publish(0);
    assert_eq!(hostile.take(SHARE), Taken::Launches(1));
    let Hostile { theirs, client, engine, out } = &mut hostile;
    let mut is_active = |now_ns| {
        client.poll_activity(now_ns, SHARE, 5_000, engine, out);
        engine.high_active()
    };
    assert!(is_active(2_000) && is_active(6_999));
    assert!(!is_active(7_000) && !is_active(8_000));
    // It goes on.
    theirs.counters.by_entry_point.all()[0].store(1, SeqCst);
    assert!(is_active(9_000) && is_active(13_999));
    assert!(!is_active(14_000));
    assert_eq!(client.standstills(), 2);
}

/// A shim counts a period of activity when it ends.
#[test]
fn busy_time_has_the_open_period_and_never_falls() {
    let hostile = Hostile::new(true);
    let (client, activity) = (&hostile.client, &hostile.theirs.activity);
    activity.busy_total_ns.store(12, SeqCst);
    activity.idle_since_ns.store(90, SeqCst);
    activity.busy_since_ns.store(100, SeqCst);
    assert_eq!((busy_ns(activity, 150), client.busy_ns(150)), (12, 12));
    activity.busy_streams.store(1, SeqCst);
    assert_eq!((busy_ns(activity, 150), busy_ns(activity, 50)), (62, 12));
    assert_eq!(client.busy_ns(150), 62);
    // It ends, and is counted a moment later.
    activity.busy_streams.store(0, SeqCst);
    assert_eq!(client.busy_ns(160), 62);
    activity.busy_total_ns.store(72, SeqCst);
    assert_eq!(client.busy_ns(170), 72);
    // The next one has begun, but not said when.
    activity.idle_since_ns.store(160, SeqCst);
    activity.busy_streams.store(1, SeqCst);
    assert_eq!(client.busy_ns(180), 72);
    // Under an earlier core.
    let mut hostile = Hostile::new(true);
    hostile.client.busy_before_ns = 5;
    hostile.theirs.activity.busy_total_ns.store(12, SeqCst);
    assert_eq!(hostile.client.busy_ns(150), 7);
}

/// It launched all of them long ago.
#[test]
fn a_client_whose_launches_end_gets_on() {
    let mut hostile = Hostile::new(true);
    (0..4).for_each(|ticket| hostile.publish(ticket));
    assert_eq!(hostile.take(SHARE), Taken::Launches(4));
    let Hostile { theirs, client, engine, out } = &mut hostile;
    for done in 0..4 {
        let now_ns = 2_000 + 4_000 * u64::from(done);
        client.poll_activity(now_ns, SHARE, 5_000, engine, out);
        assert!(engine.high_active());
        theirs.completions[0].done.store(done + 1, SeqCst);
        client.poll_completions(now_ns + 1_000, SHARE, engine, out);
    }
    assert_eq!((engine.high_active(), client.standstills()), (false, 0));
}

/// Has a client do one thing again and again, between passes. How often until it was cut off, and why.
fn cut_off_by(act: fn(&Hostile, u64), times: u64) -> Option<(u64, &'static str)> {
    let mut hostile = Hostile::new(true);
    for n in 0..times {
        act(&hostile, n);
        let Hostile { client, engine, out, .. } = &mut hostile;
        client.poll_completions(1_000, SHARE, engine, out);
        let mut profile_cache = ProfileCache::new(Default::default());
        let now_ns = n * STUCK_LOOK_NS;
        let taken = client.poll_submissions(now_ns, SHARE, engine, &mut profile_cache, out);
        if let Taken::Misbehaved(why) = taken {
            assert!(client.oddities.breaches >= BREACHES_MAX);
            return Some((n, why));
        }
        assert!(client.oddities.breaches <= n + 1, "each is counted once");
        out.clear();
    }
    assert_eq!(hostile.client.oddities.breaches, 0);
    None
}

#[test]
fn what_no_shim_writes_is_counted_and_in_the_end_cut_off() {
    type Act = fn(&Hostile, u64);
    fn slot(hostile: &Hostile, n: u64) -> &'static tally_ipc::layout::Submission {
        hostile.publish(n);
        &hostile.theirs.submissions[n as usize % RING_SLOTS]
    }
    let acts: [(Act, &str); 6] = [
        (|h, n| slot(h, n).stream.store(STREAM_SLOTS as u32, SeqCst), "stream slot"),
        (|h, n| slot(h, n).flags.store(submission_flags::ALL + 1, SeqCst), "flags"),
        (|h, n| slot(h, n).kernel.store(KERNEL_SLOTS as u32, SeqCst), "kernel beyond"),
        (|h, _| h.theirs.activity.next_ticket.store(1 << 40, SeqCst), "tickets"),
        (|h, n| h.theirs.turnarounds.count.store((n + 1) << 40, SeqCst), "asked to"),
        (
            // Down and up again, by less than would be a breach.
            |h, n| h.theirs.turnarounds.count.store((1 << 19) * ((n + 1) % 2), SeqCst),
            "falls",
        ),
    ];
    for (act, expected) in acts {
        let (passes, why) = cut_off_by(act, 4 * BREACHES_MAX).expect(expected);
        assert!(why.contains(expected), "{why}");
        assert!(passes >= BREACHES_MAX - 1, "{expected}: not at the first");
    }
}

#[test]
fn what_a_shim_may_write_at_the_edges_is_no_breach() {
    let acts: [fn(&Hostile, u64); 4] = [
        |h, n| {
            h.publish(n);
            let s = &h.theirs.submissions[n as usize % RING_SLOTS];
            s.stream.store(STREAM_SLOTS as u32 - 1, SeqCst);
            s.flags.store(submission_flags::ALL, SeqCst);
            let kernels = [KERNEL_SLOTS as u32 - 1, KERNEL_UNKNOWN];
            s.kernel.store(kernels[n as usize % 2], SeqCst);
            // Whatever a program asks for: the driver refuses it.
            (0..3).for_each(|i| s.grid[i].store(u32::MAX, SeqCst));
        },
        // Each thread that a machine can have waits with one.
        |h, n| h.theirs.activity.next_ticket.store((1 << 22) + n, SeqCst),
        // Two threads that report at once.
        |h, n| h.theirs.turnarounds.count.store(1_000 + n % 2, SeqCst),
        // Ungated launches have numbers that are never submitted.
        |h, n| {
            h.publish(n);
            h.theirs.completions[0].done.store(n as u32 + 1_000_000, SeqCst);
        },
    ];
    for (at, act) in acts.into_iter().enumerate() {
        assert_eq!(cut_off_by(act, 4 * BREACHES_MAX), None, "act {at}");
    }
}
