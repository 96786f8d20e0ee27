use super::*;
use tally_ab::Sample;
use tally_ab::sample::{Carried, Room};
use tally_engine::EngineConfig;
use tally_engine::policy::{Class, ClientInfo};
use tally_ipc::ClientRegion;
use tally_ipc::map::{self, Mapped};

mod units;

const MS: u64 = 1_000_000;
/// When the client of these tests registers.
const START: u64 = 1_000 * MS;

struct Client {
    region: Mapped<ClientRegion>,
    read: AtomicU64,
    marks: Marks,
}

impl Client {
    fn new() -> Self {
        let (_file, region) = map::create_client().unwrap();
        let read = AtomicU64::new(0);
        let marks = Marks::new(&region.marks, &read, START);
        Client { region, read, marks }
    }

    fn ended(&self, kind: Kind, age_us: Option<u64>, began_ns: u64, ended_ns: u64) {
        let what = What::marked(kind, age_us).pack();
        let unit = Stated { began_ns, ended_ns, what };
        let _ = self.region.marks.publish(self.read.load(Relaxed), unit);
    }

    fn request(&self, began_ns: u64, ended_ns: u64) {
        self.ended(Kind::Request, None, began_ns, ended_ns);
    }

    fn read(&mut self, now_ns: u64) -> bool {
        self.marks.read(now_ns, &self.region.marks, &self.read, PASS_MARKS_CLIENT_MAX);
        self.marks.has_more()
    }

    /// Requests of the last pass, their longest, and how many were carried.
    fn sampled(&mut self) -> (u64, u64, Vec<Carried>) {
        let mut sample = Sample::new();
        self.marks.sample(None, &mut sample);
        let requests = sample.of(tally_ab::Unit::Request);
        let longest_ns = requests.quantile_ns(1.0).unwrap_or(0);
        (requests.count(), longest_ns, requests.carried.clone())
    }

    /// When the requests under way came, ns.
    fn open(&self) -> Vec<u64> {
        self.marks.open_since_ns().collect()
    }

    fn numbers(&self, now_ns: u64) -> MarkNumbers {
        self.marks.numbers(now_ns).unwrap_or_default()
    }
}

/// Figures are kept to a hundredth.
fn is_about(ns: u64, expected_ns: u64) -> bool {
    ns.abs_diff(expected_ns) <= expected_ns / 100
}

#[test]
fn requests_are_marked_ones_from_the_first_that_begins() {
    let mut client = Client::new();
    assert!(!client.read(START + MS) && !client.marks.has_requests);
    assert_eq!(client.marks.numbers(START + MS), None);
    let what = What::marked(Kind::Request, Some(500)).pack();
    client.region.marks.begin(9, START + 2 * MS, what);
    client.read(START + 3 * MS);
    assert!(client.marks.has_requests && client.marks.is_first());
    assert_eq!(client.open(), [START + 2 * MS - 500_000]);
    let mut sample = Sample::new();
    client.marks.under_way(None, &mut sample);
    assert!(sample.of(tally_ab::Unit::Request).open.iter().all(|open| open.queue_known));
    let numbers = client.numbers(START + 3 * MS);
    assert_eq!((numbers.open, numbers.oldest_ns), (1, MS + 500_000));
    client.region.marks.free(9);
    client.ended(Kind::Request, Some(500), START + 2 * MS, START + 4 * MS);
    client.read(START + 5 * MS);
    assert!(client.marks.has_requests && !client.marks.is_first());
    let (requests, longest_ns, _) = client.sampled();
    assert_eq!((requests, client.numbers(START + 5 * MS).open), (1, 0));
    assert!(is_about(longest_ns, 2 * MS + 500_000), "its time in the queue counts: {longest_ns}");
    assert_eq!(client.sampled().0, 0, "once a pass");
}

#[test]
fn a_pass_takes_so_many_and_no_unit_is_lost() {
    let mut client = Client::new();
    let all = 2 * PASS_MARKS_CLIENT_MAX as u64 + 5;
    (0..all).for_each(|n| client.request(START + n, START + n + MS));
    let (mut seen, mut passes) = (0, 0);
    loop {
        let more = client.read(START + 5 * MS);
        let requests = client.sampled().0;
        assert!(requests <= PASS_MARKS_CLIENT_MAX as u64 && more == client.marks.has_more());
        (seen, passes) = (seen + requests, passes + 1);
        if !more {
            break;
        }
    }
    assert_eq!((seen, passes, client.read.load(Relaxed)), (all, 3, all));
    assert_eq!(client.numbers(START + 5 * MS).dropped, 0);
}

#[test]
fn profiles_are_counted_and_those_that_cannot_be_are_wrong() {
    let mut client = Client::new();
    let published = |client: &mut Client, launches, gaps, sms_max, sms_mean| {
        let profile = UnitProfile { launches, gaps, sms_max, sms_mean, ..UnitProfile::default() };
        client.region.marks.profile.publish(&profile);
        client.read(START + MS);
        client.marks.profile().map(|profile| (profile.units, profile.launches))
    };
    client.read(START);
    assert_eq!(client.marks.profile(), None);
    assert_eq!(published(&mut client, 7, 6, 5, 4), Some((1, 7)));
    assert_eq!(published(&mut client, 1_024, 0, 0, 0), Some((2, 1_024)));
    for (launches, gaps, sms_max, sms_mean) in
        [(0, 0, 0, 0), (1_025, 0, 0, 0), (7, 7, 5, 4), (7, 6, 4, 5), (7, 6, 1_025, 4)]
    {
        let last = published(&mut client, launches, gaps, sms_max, sms_mean);
        assert_eq!(last, Some((2, 1_024)), "{launches} {gaps} {sms_max} {sms_mean}");
    }
    assert_eq!(client.numbers(START + MS).wrong, 5);
}

#[test]
fn lies_are_ignored_or_bounded_by_the_time_since_registration() {
    let mut client = Client::new();
    let now = START + 10 * MS;
    client.request(START + 5 * MS, START + 4 * MS);
    client.request(START, now + AHEAD_NS_MAX + 1);
    client.request(u64::MAX, 0);
    let stated = Stated { began_ns: START, ended_ns: START + 1, what: 77 };
    let _ = client.region.marks.publish(0, stated);
    client.read(now);
    assert_eq!((client.sampled().0, client.numbers(now).wrong), (0, 4));
    assert!(!client.marks.has_requests);

    let year_us = 365 * 86_400 * 1_000_000;
    client.ended(Kind::Request, Some(year_us), START + 2 * MS, START + 3 * MS);
    client.request(0, START + 6 * MS);
    client.request(5, 9);
    client.read(now);
    let (requests, longest_ns, _) = client.sampled();
    assert_eq!((requests, client.numbers(now).shortened), (3, 3));
    assert!(is_about(longest_ns, 6 * MS), "{longest_ns}");

    // Open ones are no older, and not in the future.
    for (place, began_ns) in [(0, 3), (1, u64::MAX)] {
        let what = What::marked(Kind::Request, Some(year_us)).pack();
        client.region.marks.begin(place, began_ns, what);
    }
    client.read(now);
    let open = client.open();
    assert!(open.len() == 2 && open.iter().all(|came| (START..=now).contains(came)), "{open:?}");
}

/// Both are counted from the registration, so they came at the same time.
#[test]
fn the_end_of_a_request_from_before_the_registration_leaves_the_others_open() {
    for is_freed_first in [true, false] {
        let mut client = Client::new();
        let what = What::marked(Kind::Request, Some(50_000)).pack();
        let begins_ns = [START + MS, START + MS + 1];
        (0..).zip(begins_ns).for_each(|(at, ns)| client.region.marks.begin(at, ns, what));
        client.read(START + 2 * MS);
        assert_eq!(client.open(), [START, START]);
        if is_freed_first {
            client.region.marks.free(0);
        }
        client.ended(Kind::Request, Some(50_000), begins_ns[0], START + 3 * MS);
        for now_ns in [START + 4 * MS, START + 5 * MS] {
            client.read(now_ns);
            let numbers = client.numbers(now_ns);
            assert_eq!((numbers.open, numbers.oldest_ns), (1, now_ns - START));
        }
    }
}

/// An end may be a little in the future, because a pass has one time.
#[test]
fn a_unit_is_no_longer_than_its_client_has_been_registered() {
    let mut client = Client::new();
    let now = START + MS;
    client.request(START, now + AHEAD_NS_MAX);
    client.ended(Kind::Request, Some(1), now + AHEAD_NS_MAX / 2, now + AHEAD_NS_MAX);
    client.ended(Kind::Token, None, START, now + AHEAD_NS_MAX);
    client.read(now);
    let (requests, longest_ns, _) = client.sampled();
    assert!(requests == 2 && is_about(longest_ns, MS), "{requests} of {longest_ns}");
    assert!(is_about(client.numbers(now).tokens.p99_ns, MS), "{:?}", client.numbers(now));
}

#[test]
fn dropped_units_stay_counted() {
    let mut client = Client::new();
    for (said, counted) in [(3, 3), (1, 3), (0, 3), (4, 4)] {
        client.region.marks.dropped.store(said, Relaxed);
        client.read(START + MS);
        assert_eq!(client.numbers(START + MS).dropped, counted);
    }
}

#[test]
fn a_ring_that_breaks_the_protocol_costs_little_and_recovers() {
    let mut client = Client::new();
    // A slot is taken and never published.
    client.region.marks.next.store(1, Relaxed);
    assert!(!client.read(START) && !client.read(START + STUCK_NS - 1));
    client.request(START, START + MS);
    assert!(!client.read(START + STUCK_NS));
    assert_eq!((client.sampled().0, client.numbers(START).wrong), (1, 1));
    // A sequence far ahead.
    client.region.marks.ring[2].sequence.store(1 << 40, Relaxed);
    client.region.marks.next.store(5, Relaxed);
    client.read(START + STUCK_NS);
    assert_eq!(client.read.load(Relaxed), 5, "no further than the client says it is");
    // Whatever is there, a pass ends, and counts no more than it may.
    for slot in &client.region.marks.ring {
        slot.sequence.store(u64::MAX / 3, Relaxed);
    }
    client.region.marks.next.store(0, Relaxed);
    for _ in 0..10 {
        client.read(START + STUCK_NS);
        assert!(client.sampled().0 <= PASS_MARKS_CLIENT_MAX as u64);
    }
}

#[test]
fn tokens_are_counted_beside_requests_and_go_out_of_the_recent_ones() {
    let mut client = Client::new();
    for n in 1..=20 {
        client.ended(Kind::Token, None, START + MS, START + (1 + n) * MS);
    }
    client.ended(Kind::Prefill, None, START + MS, START + 8 * MS);
    client.read(START + 30 * MS);
    let numbers = client.numbers(START + 30 * MS);
    let UnitNumbers { count, recent, p50_ns, p99_ns, .. } = numbers.tokens;
    assert_eq!((count, recent, numbers.prefills.count), (20, 20, 1));
    assert!(is_about(p50_ns, 10 * MS) && is_about(p99_ns, 20 * MS), "{numbers:?}");
    assert!(is_about(numbers.prefills.p50_ns, 7 * MS), "{numbers:?}");
    assert!(!numbers.has_requests, "they are no requests");
    for (turn, recent) in [(1, 21), (2, 2)] {
        let now = START + turn * (STRETCH_NS + 100 * MS);
        client.ended(Kind::Token, None, now - MS, now);
        client.read(now);
        let tokens = client.numbers(now).tokens;
        assert_eq!((tokens.count, tokens.recent), (20 + turn, recent));
    }
    // None came for long.
    let now = START + 5 * STRETCH_NS;
    client.read(now);
    let tokens = client.numbers(now).tokens;
    assert_eq!((tokens.count, tokens.recent, tokens.p50_ns), (22, 0, 0));
}

#[test]
fn requests_that_came_before_a_cut_are_carried_over_it() {
    let mut client = Client::new();
    client.marks.cut(START + 10 * MS, Room::of_one(1));
    client.ended(Kind::Request, Some(3_000), START + 12 * MS, START + 15 * MS);
    client.ended(Kind::Request, Some(1_000), START + 12 * MS, START + 15 * MS);
    client.read(START + 16 * MS);
    let (requests, longest_ns, carried) = client.sampled();
    assert_eq!(requests, 1);
    assert!(is_about(longest_ns, 4 * MS), "{longest_ns}");
    let limit_ns = None;
    assert_eq!(
        carried,
        [Carried {
            began_ns: START + 9 * MS,
            ns: 6 * MS,
            queue_known: true,
            limit_ns,
            is_age: false
        }]
    );
}

/// The ring is the client's, and outlives its core.
#[test]
fn a_new_core_passes_over_what_was_meant_for_another() {
    let mut client = Client::new();
    (0..5).for_each(|_| client.request(START, START + MS));
    client.region.marks.drop_one();
    client.marks = Marks::new(&client.region.marks, &client.read, START + 2 * MS);
    assert_eq!(client.read.load(Relaxed), 5);
    client.request(START + 3 * MS, START + 4 * MS);
    client.read(START + 5 * MS);
    assert_eq!((client.sampled().0, client.numbers(START + 5 * MS).dropped), (1, 0));
}

/// Each slot states a later ticket, in whose slot is a later one still, all around.
#[test]
fn a_ring_that_leads_in_circles_is_left() {
    let mut client = Client::new();
    let marks = &client.region.marks;
    for (slot, sequence) in [(0, (1 << 62) + 2), (1, (1 << 63) + 3), (2, (3 << 62) + 4), (3, 1)] {
        marks.ring[slot].sequence.store(sequence, Release);
    }
    marks.next.store(7, Release);
    assert!(!client.read(START + MS));
    assert_eq!((client.marks.wrong, client.marks.next), (1, 7));
    assert!(!client.read(START + 2 * MS));
    // It goes on with what is there.
    client.read.store(7, Relaxed);
    client.request(START + 2 * MS, START + 3 * MS);
    client.read(START + 4 * MS);
    assert_eq!(client.sampled().0, 1);
}

impl Client {
    /// A unit that the shim tells, as it does.
    fn unit(&self, began_ns: u64, ended_ns: u64) {
        let what = What::stream(theirs::Graphs::default()).pack();
        let unit = Stated { began_ns, ended_ns, what };
        let _ = self.region.marks.publish(self.read.load(Relaxed), unit);
    }
}

#[test]
fn units_of_streams_are_requests_until_one_is_marked() {
    let mut client = Client::new();
    client.region.marks.show_stream(3, START + MS, false);
    client.read(START + 2 * MS);
    assert_eq!(client.open(), [START + MS]);
    assert_eq!(client.marks.numbers(START + 2 * MS), None, "none is marked");
    // The next was launched before this one ended.
    client.unit(START + MS, START + 4 * MS);
    client.region.marks.show_stream(3, START + 3 * MS, false);
    client.read(START + 5 * MS);
    let (requests, longest_ns, _) = client.sampled();
    assert!(requests == 1 && is_about(longest_ns, 3 * MS), "{requests} {longest_ns}");
    assert_eq!(client.open(), [START + 3 * MS]);
    // Of one pass: it is the same work.
    client.unit(START + 3 * MS, START + 6 * MS);
    client.request(START + 2 * MS, START + 6 * MS);
    client.unit(START + 6 * MS, START + 7 * MS);
    client.read(START + 8 * MS);
    assert!(client.marks.is_first() && client.open().is_empty());
    let (requests, longest_ns, _) = client.sampled();
    assert!(requests == 1 && is_about(longest_ns, 4 * MS), "{requests} {longest_ns}");
    client.unit(START + 8 * MS, START + 9 * MS);
    client.read(START + 10 * MS);
    assert_eq!((client.sampled().0, client.numbers(START + 10 * MS).wrong), (0, 0));
}

#[test]
fn a_unit_that_has_ended_is_not_open_though_its_place_is_not_free_yet() {
    let mut client = Client::new();
    client.region.marks.show_stream(0, START + MS, false);
    client.region.marks.begin(5, START + MS + 1, What::marked(Kind::Token, None).pack());
    client.read(START + 2 * MS);
    client.unit(START + MS, START + 3 * MS);
    for now in [START + 3 * MS, START + 4 * MS] {
        client.read(now);
        assert!(client.open().is_empty());
    }
    client.region.marks.show_stream(0, 0, false);
    client.read(START + 5 * MS);
    assert!(client.open().is_empty());
}

#[test]
fn lies_of_a_shim_are_ignored_or_bounded() {
    let mut client = Client::new();
    let now = START + 10 * MS;
    client.unit(START + 5 * MS, START + 4 * MS);
    client.unit(START, now + AHEAD_NS_MAX + 1);
    client.unit(u64::MAX, 0);
    client.unit(7, START + 6 * MS);
    client.region.marks.streams.iter().for_each(|word| word.store(u64::MAX, Release));
    client.region.marks.changes.fetch_add(1, Release);
    client.read(now);
    let (requests, longest_ns, _) = client.sampled();
    assert!(requests == 1 && is_about(longest_ns, 6 * MS), "{requests} {longest_ns}");
    let numbers = client.numbers(now);
    assert_eq!((numbers.wrong, numbers.shortened, numbers.has_requests), (3, 1, false));
    assert_eq!(client.open(), [now; tally_contract::limits::STREAM_SLOTS]);
}

impl Client {
    /// A unit of so many graphs, of which the unit before took the first time.
    fn graphs(&self, count: u16, began_ns: u64, after_ns: u32, ended_ns: u64) {
        let what = What::stream(theirs::Graphs { count, after_ns }).pack();
        let unit = Stated { began_ns, ended_ns, what };
        let _ = self.region.marks.publish(self.read.load(Relaxed), unit);
    }

    fn tokens(&self, now_ns: u64) -> UnitNumbers {
        self.numbers(now_ns).tokens
    }
}

#[test]
fn graph_launches_are_tokens_where_these_have_an_objective_and_no_marks() {
    let mut client = Client::new();
    client.graphs(1, START + MS, 0, START + 2 * MS);
    client.read(START + 2 * MS);
    assert_eq!(client.tokens(START + 2 * MS).count, 0, "nobody asked for tokens");
    client.marks.set_tpot(START + 2 * MS, Some(3 * MS));
    // The next was launched 1 ms before that one ended; then four in one unit.
    client.graphs(1, START + MS, MS as u32, START + 4 * MS);
    client.graphs(4, START + 10 * MS, 0, START + 26 * MS);
    client.graphs(0, START + 30 * MS, 0, START + 31 * MS);
    client.read(START + 32 * MS);
    let UnitNumbers { count, within, late, recent, recent_within, p50_ns, p99_ns } =
        client.tokens(START + 32 * MS);
    assert_eq!((count, within, late, recent, recent_within), (5, 1, 4, 5, 1));
    assert!(is_about(p50_ns, 4 * MS) && is_about(p99_ns, 4 * MS), "{p50_ns} {p99_ns}");
    assert_eq!(client.sampled().0, 3, "each unit is a request");
    // What is recent begins anew with another objective; totals go on.
    client.marks.set_tpot(START + 32 * MS, Some(10 * MS));
    client.graphs(1, START + 40 * MS, 0, START + 45 * MS);
    client.read(START + 46 * MS);
    let numbers = client.tokens(START + 46 * MS);
    assert_eq!((numbers.count, numbers.within, numbers.late), (6, 2, 4));
    assert_eq!((numbers.recent, numbers.recent_within), (1, 1));
    // Marked tokens count instead, of which requests may be told from launches.
    client.graphs(1, START + 50 * MS, 0, START + 55 * MS);
    client.ended(Kind::Token, None, START + 50 * MS, START + 61 * MS);
    client.graphs(1, START + 62 * MS, 0, START + 63 * MS);
    client.read(START + 64 * MS);
    let numbers = client.tokens(START + 64 * MS);
    assert_eq!((numbers.count, numbers.within, numbers.recent_within), (1, 0, 0));
    assert!(is_about(numbers.p50_ns, 11 * MS) && client.sampled().0 == 2);
}

#[test]
fn the_engine_is_told_of_tokens_that_have_an_objective() {
    let info = ClientInfo {
        id: 7,
        class: Class::High,
        name: String::new(),
        labels: vec![("tpot".into(), "3ms".into())],
    };
    let mut engine = Engine::with_policy(EngineConfig::default(), super::super::built_in());
    engine.client_joined(START, info, 0, &mut Vec::new());
    let mut client = Client::new();
    client.marks.set_tpot(START, Some(3 * MS));
    let mut told = |client: &mut Client, ms| {
        client.read(START + ms * MS);
        client.marks.tell_tokens(7, &mut engine);
        let tokens = engine.world().clients[&7].service.unwrap().tokens.unwrap();
        (tokens.count, tokens.within, tokens.recent, tokens.p50_ns, tokens.p99_ns)
    };
    client.graphs(4, START + 10 * MS, 0, START + 26 * MS);
    client.graphs(1, START + 30 * MS, 0, START + 32 * MS);
    assert_eq!(told(&mut client, 33), (5, 1, 5, 4 * MS, 4 * MS));
    assert_eq!(told(&mut client, 34), (5, 1, 5, 4 * MS, 4 * MS), "each once");
    // Marked tokens count instead.
    client.graphs(1, START + 40 * MS, 0, START + 42 * MS);
    client.ended(Kind::Token, None, START + 40 * MS, START + 41 * MS);
    client.graphs(1, START + 43 * MS, 0, START + 44 * MS);
    assert_eq!(told(&mut client, 45), (1, 1, 1, MS, MS));
}

#[test]
fn lies_about_graphs_are_bounded() {
    let mut client = Client::new();
    client.marks.set_tpot(START, Some(MS));
    client.graphs(u16::MAX, 5, u32::MAX, START + 3 * MS);
    client.graphs(1, START + MS, u32::MAX, START + 3 * MS);
    client.graphs(7, START + 3 * MS, 0, START + MS);
    client.read(START + 4 * MS);
    let numbers = client.tokens(START + 4 * MS);
    assert_eq!(numbers.count, u64::from(u16::MAX) + 1);
    assert!(numbers.p99_ns <= 3 * MS, "{numbers:?}");
}

/// Tokens that a test has of the last pass: how many, how many kept the objective, of how many, and when those began
/// that are carried.
fn sampled_tokens(client: &mut Client) -> (u64, u64, u64, Vec<u64>) {
    let mut sample = Sample::new();
    client.marks.sample(None, &mut sample);
    let tokens = sample.of(tally_ab::Unit::Token);
    let carried = tokens.carried.iter().map(|token| token.began_ns).collect();
    (tokens.count(), tokens.kept.within, tokens.kept.judged, carried)
}

/// When the tokens under way came that a test counts.
fn open_tokens(client: &Client) -> Vec<u64> {
    let mut sample = Sample::new();
    client.marks.under_way(None, &mut sample);
    sample.of(tally_ab::Unit::Token).open.iter().map(|open| open.began_ns).collect()
}

#[test]
fn what_is_under_way_as_a_client_leaves_counts_with_its_age() {
    let mut client = Client::new();
    client.marks.cut(START + 10 * MS, Room::of_one(1));
    for (at, began) in [(0, 4), (1, 12), (2, 39)] {
        client.region.marks.begin(at, START + began * MS, What::marked(Kind::Request, None).pack());
    }
    client.request(START + 11 * MS, START + 13 * MS);
    client.read(START + 40 * MS);
    let (limit_ns, queue_known) = (Some(5 * MS), false);
    let mut sample = Sample::new();
    client.marks.leave(START + 40 * MS, limit_ns, &mut sample);
    let requests = sample.of(tally_ab::Unit::Request);
    assert_eq!((requests.count(), requests.over(20 * MS)), (3, 1));
    // Of the one of 1 ms nobody knows whether it would have kept the objective.
    assert_eq!((requests.kept.judged, requests.kept.within), (2, 1));
    let carried =
        Carried { began_ns: START + 4 * MS, ns: 36 * MS, queue_known, limit_ns, is_age: true };
    assert_eq!((requests.carried.as_slice(), requests.lost), (&[carried][..], 0));
}

#[test]
fn a_test_counts_tokens_as_the_status_does() {
    let mut client = Client::new();
    client.ended(Kind::Token, None, START + MS, START + 4 * MS);
    client.read(START + 5 * MS);
    assert_eq!(sampled_tokens(&mut client), (1, 0, 0, vec![]), "no objective yet");
    assert_eq!(sampled_tokens(&mut client).0, 0, "once a pass");
    client.marks.set_tpot(START + 5 * MS, Some(3 * MS));
    client.ended(Kind::Token, None, START + 6 * MS, START + 9 * MS);
    client.ended(Kind::Token, None, START + 9 * MS, START + 13 * MS);
    client.read(START + 14 * MS);
    assert_eq!(sampled_tokens(&mut client), (2, 1, 2, vec![]));
    // The objective changes: only what ends from now on is judged by it.
    client.marks.set_tpot(START + 14 * MS, Some(9 * MS));
    client.marks.cut(START + 16 * MS, Room::of_one(1));
    client.ended(Kind::Token, None, START + 15 * MS, START + 19 * MS);
    client.ended(Kind::Token, None, START + 17 * MS, START + 21 * MS);
    client.read(START + 22 * MS);
    assert_eq!(sampled_tokens(&mut client), (1, 1, 1, vec![START + 15 * MS]));
    let tokens = client.tokens(START + 22 * MS);
    assert_eq!((tokens.count, tokens.within), (5, 3));
}

#[test]
fn a_marked_token_under_way_is_counted_until_it_ends() {
    let mut client = Client::new();
    client.region.marks.begin(5, START + MS, What::marked(Kind::Token, None).pack());
    client.read(START + 2 * MS);
    assert_eq!((open_tokens(&client), client.open()), (vec![START + MS], vec![]));
    // The end is there before the place is free.
    client.ended(Kind::Token, None, START + MS, START + 3 * MS);
    client.read(START + 4 * MS);
    assert_eq!((open_tokens(&client), sampled_tokens(&mut client).0), (vec![], 1));
}

#[test]
fn graphs_of_a_unit_that_a_cut_divides_belong_where_each_began() {
    let mut client = Client::new();
    client.marks.set_tpot(START, Some(4 * MS));
    client.marks.cut(START + 10 * MS, Room::of_one(1));
    // At 3, 7, 11 and 15 ms.
    client.graphs(4, START + 3 * MS, 0, START + 19 * MS);
    client.read(START + 20 * MS);
    let carried = vec![START + 3 * MS, START + 7 * MS];
    assert_eq!(sampled_tokens(&mut client), (2, 2, 2, carried));
}

#[test]
fn a_client_carries_no_more_over_a_cut_than_it_has_room_for() {
    let mut client = Client::new();
    client.marks.set_tpot(START, Some(4 * MS));
    for (clients, room) in [(1, 300), (20, 204)] {
        client.marks.cut(START + 400 * MS, Room::of_one(clients));
        client.graphs(300, START, 0, START + 300 * MS);
        client.read(START + 401 * MS);
        let (counted, .., carried) = sampled_tokens(&mut client);
        assert_eq!((counted, carried.len()), (0, room), "{clients}");
    }
}
