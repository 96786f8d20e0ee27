//! Records and files: what is written is read, and bytes of any kind are refused
//! without a panic or memory for what is not there.

mod common;

use common::header;
use proptest::prelude::*;
use tally_contract::objective::SLO_NS;
use tally_decision_log::record::{Encoder, SavedState};
use tally_decision_log::{
    About, Answer, Base, Begin, Header, LogError, Outcome, Reader, Record, Writer, decode,
};
use tally_engine::policy::{
    self, Class, ClientInfo, Command, Completion, Decision, Event, FaultKind, Form, Launch,
    Objective, ServiceView, SharingMode, Subscriptions, TokensView, UnitProfile, Usage,
};
use tally_engine::profile::{Demand, FormView, KernelKey, KernelView, Transformation};

fn form() -> impl Strategy<Value = Form> {
    prop_oneof![
        Just(Form::Whole),
        Just(Form::Sliced),
        Just(Form::Preemptible),
        Just(Form::SmLimited)
    ]
}

/// A printable text, as those are that a log is read as.
fn text(chars_max: usize) -> impl Strategy<Value = String> {
    let printable = |text: String| tally_ipc::text::printable(text);
    prop::collection::vec(any::<char>(), 0..=chars_max)
        .prop_map(move |chars| printable(chars.into_iter().collect()))
}

fn class() -> impl Strategy<Value = Class> {
    any::<bool>().prop_map(|high| if high { Class::High } else { Class::BestEffort })
}

fn client() -> impl Strategy<Value = ClientInfo> {
    let label = (text(8), text(8));
    (any::<u32>(), class(), text(20), prop::collection::vec(label, 0..4))
        .prop_map(|(id, class, name, labels)| ClientInfo { id, class, name, labels })
}

fn command() -> impl Strategy<Value = Command> {
    let (c, n, b) = (any::<u32>(), any::<u64>(), any::<bool>());
    prop_oneof![
        (n, n).prop_map(|(delay_ns, token)| Command::SetTimer { delay_ns, token }),
        (c, n).prop_map(|(client, window_ns)| Command::SetWindow { client, window_ns }),
        c.prop_map(Command::RevokeLease),
        (c, b).prop_map(|(client, yielded)| Command::SetYield { client, yielded }),
        (c, b, n).prop_map(|(client, enabled, idle_ns)| Command::SetAutoYield {
            client,
            enabled,
            idle_ns
        }),
        (c, b).prop_map(|(client, ungated)| Command::SetUngated { client, ungated }),
        (c, c).prop_map(|(client, sms)| Command::SetWidth { client, sms }),
        Just(Command::Reset),
    ]
}

fn answer<T: Clone + std::fmt::Debug>(
    ok: impl Strategy<Value = T>,
) -> impl Strategy<Value = Answer<T>> {
    let kind = prop_oneof![
        Just(FaultKind::Trap),
        Just(FaultKind::Overrun),
        Just(FaultKind::Memory),
        Just(FaultKind::Nonsense),
        Just(FaultKind::Stall),
        Just(FaultKind::Disabled)
    ];
    let fault = (kind, any::<bool>(), text(40)).prop_map(|(kind, timed, message)| Outcome::Fault {
        kind,
        timed,
        message,
    });
    let outcome = prop_oneof![ok.prop_map(Outcome::Ok), fault];
    (outcome, prop::collection::vec(command(), 0..5))
        .prop_map(|(outcome, commands)| Answer { outcome, commands })
}

fn decision() -> impl Strategy<Value = policy::Answer> {
    let decision = prop_oneof![
        any::<u32>().prop_map(Decision::Run),
        any::<u64>().prop_map(Decision::Hold),
        any::<u64>().prop_map(Decision::HoldUntilCompletion),
        any::<u32>().prop_map(Decision::Sliced),
        Just(Decision::Preemptible),
        any::<u32>().prop_map(Decision::SmLimited),
    ];
    (decision, any::<u8>()).prop_map(|(decision, reason)| policy::Answer { decision, reason })
}

fn launch() -> impl Strategy<Value = Launch> {
    (any::<[u64; 6]>(), any::<[u32; 10]>(), class()).prop_map(|(n, w, class)| Launch {
        now_ns: n[0],
        client: w[0],
        class,
        kernel: w[1],
        state: w[2],
        offered: w[9],
        grid_blocks: n[1],
        block_threads: w[3],
        shared_bytes: w[4],
        predicted_ns: n[2],
        waited_ns: n[3],
        in_flight_ns: n[4],
        high_idle_ns: n[5],
        high_clients: w[5],
        waiting_clients: w[6],
        stream: w[7],
        sm_count: w[8],
    })
}

fn completion() -> impl Strategy<Value = Completion> {
    (any::<[u32; 3]>(), form(), any::<[u64; 3]>()).prop_map(|(w, form, n)| Completion {
        client: w[0],
        kernel: w[1],
        form,
        argument: w[2],
        predicted_ns: n[0],
        measured_ns: Some(n[1]).filter(|ns| *ns > 0),
        charged_ns: n[2],
    })
}

fn view() -> impl Strategy<Value = KernelView> {
    let transformation = prop_oneof![
        Just(Transformation::Unknown),
        Just(Transformation::Preparable),
        Just(Transformation::Preparing),
        any::<[bool; 2]>()
            .prop_map(|[sliced, preemptible]| Transformation::Ready { sliced, preemptible }),
        Just(Transformation::WholeOnly("a reason")),
        Just(Transformation::WholeOnly("another reason")),
    ];
    let forms = prop::collection::btree_map((form(), any::<u32>()), any::<[u64; 6]>(), 0..16);
    let numbers = (any::<[u64; 6]>(), any::<[u16; 2]>());
    (numbers, transformation, forms).prop_map(|((n, demand), transformation, forms)| KernelView {
        count: n[0],
        mean_ns: n[1],
        p50_ns: n[2],
        p99_ns: n[3],
        latest_ns: n[4],
        demand: Demand { blocks_per_sm: demand[0], registers: demand[1] },
        waves_permille: n[5],
        transformation,
        forms: forms
            .into_iter()
            .map(|((form, argument), n)| FormView {
                form,
                argument,
                count: n[0],
                mean_ns: n[1],
                p50_ns: n[2],
                p99_ns: n[3],
                latest_ns: n[4],
                turnaround_ns: n[5],
            })
            .collect(),
    })
}

fn about() -> impl Strategy<Value = About> {
    let saved = (".{0,9}", any::<u32>(), any::<Vec<u8>>())
        .prop_map(|(format, version, data)| SavedState { format, version, data });
    let reasons = prop::collection::vec((any::<u8>(), text(9)), 0..4);
    let texts = (text(9), text(9), text(9), "(?s).{0,99}");
    (any::<u64>(), texts, reasons, prop::option::of(saved)).prop_map(
        |(generation, (name, digest, path, config), reasons, saved)| About {
            generation,
            name,
            digest,
            path,
            config,
            reasons,
            saved,
        },
    )
}

fn usage() -> impl Strategy<Value = Usage> {
    (any::<[u64; 7]>(), any::<[u32; 2]>()).prop_map(|(n, [in_flight, min_share_permille])| Usage {
        waiting_since_ns: n[0],
        in_flight,
        in_flight_ns: n[1],
        measured_ns: n[2],
        charged_ns: n[3],
        min_share_permille,
        backlogged_ns: n[4],
        backlogged_since_ns: n[5],
        limit_cost_ns: n[6],
    })
}

fn service() -> impl Strategy<Value = ServiceView> {
    let objective = (SLO_NS[0]..=SLO_NS[1], 50.0..99.99)
        .prop_map(|(slo_ns, percentile)| Objective { slo_ns, percentile });
    let tokens = (SLO_NS[0]..=SLO_NS[1], any::<[u64; 4]>(), any::<[u32; 2]>()).prop_map(
        |(tpot_ns, n, [recent, recent_within])| TokensView {
            tpot_ns,
            count: n[0],
            within: n[1],
            recent,
            recent_within,
            p50_ns: n[2],
            p99_ns: n[3],
        },
    );
    let numbers = (any::<[u64; 5]>(), any::<[u32; 2]>(), any::<bool>());
    let profile = (any::<[u64; 5]>(), any::<[u32; 4]>()).prop_map(|(n, m)| UnitProfile {
        units: n[0],
        launches: m[0],
        gpu_busy_ns: n[1],
        gaps: m[1],
        gaps_ns: n[2],
        gap_median_ns: n[3],
        gap_longest_ns: n[4],
        sms_max: m[2],
        sms_mean: m[3],
    });
    let optional =
        (prop::option::of(objective), prop::option::of(tokens), prop::option::of(profile));
    (optional, numbers).prop_map(
        |((objective, tokens, profile), (n, [recent, recent_within], open_is_token))| ServiceView {
            objective,
            open_since_ns: n[0],
            open_is_token,
            units: n[1],
            units_within: n[2],
            recent,
            recent_within,
            p50_ns: n[3],
            p99_ns: n[4],
            tokens,
            profile,
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        client().prop_map(Event::Joined),
        any::<u32>().prop_map(Event::Left),
        (any::<u32>(), any::<[u64; 2]>()).prop_map(|(client, [since_ns, deadline_ns])| {
            Event::UnitBegan { client, since_ns, deadline_ns }
        }),
        (any::<[u32; 2]>(), any::<u64>())
            .prop_map(|([client, units], took_ns)| Event::UnitsEnded { client, units, took_ns }),
        Just(Event::HighStarted),
        Just(Event::HighEnded),
        completion().prop_map(Event::Completed),
        any::<u64>().prop_map(Event::Timer),
    ]
}

fn record() -> impl Strategy<Value = Record> {
    let how = prop_oneof![Just(Begin::PolicyStart), Just(Begin::MidRun), Just(Begin::AfterGap)];
    let key = (text(30), any::<u128>(), any::<[u32; 3]>(), any::<[u32; 3]>())
        .prop_map(|(name, image, grid, block)| KernelKey { name, image, grid, block });
    prop_oneof![
        about().prop_map(Record::Policy),
        (any::<bool>(), prop::collection::vec(any::<u32>(), 0..=16)).prop_map(
            |(is_time_sliced, reserve_sms)| {
                let sharing = match is_time_sliced {
                    true => SharingMode::TimeSliced,
                    false => SharingMode::Concurrent,
                };
                Record::Base(Base { sharing, reserve_sms })
            }
        ),
        (any::<u32>(), key).prop_map(|(id, key)| Record::Kernel { id, key }),
        (any::<u32>(), view()).prop_map(|(id, view)| Record::Profile { id, view }),
        client().prop_map(Record::Client),
        (any::<u32>(), usage()).prop_map(|(id, usage)| Record::Usage { id, usage }),
        (any::<u32>(), service()).prop_map(|(id, view)| Record::Service { id, view }),
        any::<u32>().prop_map(Record::Gone),
        (how, any::<u64>(), any::<u8>(), any::<u32>()).prop_map(|(how, lost, bits, sm_count)| {
            Record::Begin { how, lost, sm_count, subscribed: Subscriptions::of_bits(bits) }
        }),
        prop::collection::vec(command(), 0..5).prop_map(Record::Start),
        (launch(), answer(decision()))
            .prop_map(|(launch, answer)| Record::Decide { launch, answer }),
        (any::<u64>(), event(), answer(Just(())))
            .prop_map(|(now_ns, event, answer)| Record::Event { now_ns, event, answer }),
        (any::<u64>(), completion()).prop_map(|(now_ns, done)| Record::Completion { now_ns, done }),
        (any::<u64>(), text(30)).prop_map(|(now_ns, message)| {
            let kind = FaultKind::Stall;
            Record::Fault { now_ns, kind, message }
        }),
        (text(30), any::<u64>()).prop_map(|(reason, dropped)| Record::End { reason, dropped }),
    ]
}

fn file(records: &[Record]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &header()).unwrap();
    for record in records {
        writer.record(record).unwrap();
    }
    assert_eq!(writer.records(), records.len() as u64);
    let bytes = writer.bytes();
    let file = writer.into_inner();
    assert_eq!(bytes, file.len() as u64);
    file
}

/// What can be read of a file, and how that ended.
fn read(file: &[u8]) -> (Vec<Record>, Option<LogError>) {
    let mut log = match Reader::new(file) {
        Ok(log) => log,
        Err(error) => return (Vec::new(), Some(error)),
    };
    let mut all = Vec::new();
    loop {
        match log.next_record() {
            Ok(Some(record)) => all.push(record),
            Ok(None) => return (all, None),
            Err(error) => {
                assert!(matches!(log.next_record(), Ok(None)), "it stops after an error");
                return (all, Some(error));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(records in prop::collection::vec(record(), 0..20)) {
        let (all, error) = read(&file(&records));
        prop_assert!(error.is_none(), "{error:?}");
        prop_assert_eq!(all, records);
    }

    #[test]
    fn a_file_cut_off_anywhere_is_good_up_to_there(
        records in prop::collection::vec(record(), 1..8),
        at in any::<prop::sample::Index>(),
    ) {
        let whole = file(&records);
        let end = at.index(whole.len());
        let (all, error) = read(&whole[..end]);
        prop_assert_eq!(&all[..], &records[..all.len()]);
        // At the end of a record it is only shorter; anywhere else that is said.
        if error.is_none() {
            prop_assert_eq!(file(&records[..all.len()]).len(), end);
        }
    }

    #[test]
    fn a_changed_byte_is_noticed(
        records in prop::collection::vec(record(), 1..8),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut whole = file(&records);
        let at = at.index(whole.len());
        whole[at] ^= flip;
        let (all, error) = read(&whole);
        prop_assert!(error.is_some(), "byte {at}");
        prop_assert_eq!(&all[..], &records[..all.len()]);
    }

    #[test]
    fn bytes_of_any_kind_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode::record(&bytes);
        let _ = read(&bytes);
        // The same behind a good header, with and without a good checksum.
        let mut behind = file(&[]);
        behind.extend_from_slice(&bytes);
        let _ = read(&behind);
        let mut writer = Writer::new(Vec::new(), &header()).unwrap();
        writer.raw(&bytes).unwrap();
        let (all, error) = read(&writer.into_inner());
        prop_assert_eq!(all.is_empty(), error.is_some());
    }

    /// A record with one byte changed is refused, or is another record that can be
    /// written and read again.
    #[test]
    fn changed_records_are_refused_or_whole(
        record in record(),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
    ) {
        let mut bytes = Vec::new();
        Encoder(&mut bytes).record(&record);
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(other) = decode::record(&bytes) {
            let mut again = Vec::new();
            Encoder(&mut again).record(&other);
            prop_assert_eq!(decode::record(&again).unwrap(), other);
        }
    }
}

#[test]
fn other_files_and_versions_are_named() {
    let text = |bytes: &[u8]| Reader::new(bytes).unwrap_err().to_string();
    for bytes in [&b""[..], b"TALLY", b"name,grid\n1,2\n and more text than a header has"] {
        assert!(text(bytes).contains("tallyctl log record"), "{}", text(bytes));
    }
    let mut newer = file(&[]);
    newer[8] = 9;
    assert!(text(&newer).contains("version 9"), "{}", text(&newer));
    let mut older = file(&[]);
    for (version, is_read) in [(0, false), (1, true), (2, false)] {
        older[8] = version;
        assert_eq!(Reader::new(&older[..]).is_ok(), is_read, "{version}");
    }
    let mut long = file(&[]);
    long[15] = 0xff;
    assert!(text(&long).contains("too long"), "{}", text(&long));
    let whole = file(&[Record::Base(Base::default())]);
    let (_, error) = read(&whole[..whole.len() - 1]);
    let said = error.unwrap().to_string();
    assert!(said.contains("cut off within record 1") && said.contains("before is good"), "{said}");
}

/// A length that promises much costs nothing until it is there.
#[test]
fn claimed_lengths_are_not_believed() {
    for length in [u32::MAX, 4 << 20] {
        let mut whole = file(&[]);
        whole.extend_from_slice(&length.to_le_bytes());
        whole.extend_from_slice(&[0; 4]);
        let (all, error) = read(&whole);
        assert!(all.is_empty() && error.is_some());
    }
    // A list of four billion labels in a record of twenty bytes.
    let mut bytes = vec![tally_decision_log::record::kind::CLIENT, 0, 0, 0, 0, 1, 0, 0, 0, 0];
    bytes.extend_from_slice(&u32::MAX.to_le_bytes());
    assert!(decode::record(&bytes).is_err());
}

/// Whoever made the log may have written anything into it.
#[test]
fn texts_that_are_shown_are_printable() {
    const EVIL: &str = "\u{1b}]0;x\u{7}\u{9b}1m\u{202e}a\nforged";
    const CLEAN: &str = "?]0;x??1m?a?forged";
    let (config, format) = (EVIL.to_owned(), EVIL.to_owned());
    let saved = Some(SavedState { format, version: 1, data: Vec::new() });
    let evil = || EVIL.to_owned();
    let about = About {
        generation: 1,
        name: evil(),
        digest: evil(),
        path: evil(),
        config,
        reasons: vec![(1, evil())],
        saved,
    };
    let info =
        ClientInfo { id: 1, class: Class::High, name: evil(), labels: vec![(evil(), evil())] };
    let key = KernelKey { name: evil(), image: 0, grid: [1; 3], block: [1; 3] };
    let fault = Record::Fault { now_ns: 1, kind: FaultKind::Trap, message: evil() };
    let records = [
        Record::Policy(about.clone()),
        Record::Client(info),
        Record::Kernel { id: 1, key },
        fault,
        Record::End { reason: evil(), dropped: 0 },
    ];
    let hostile = Header {
        contract: evil(),
        core: evil(),
        limits: serde_json::json!({EVIL: EVIL}),
        capabilities: vec![evil()],
        ..header()
    };
    let mut writer = Writer::new(Vec::new(), &hostile).unwrap();
    records.iter().for_each(|record| writer.record(record).unwrap());
    let bytes = writer.into_inner();
    let shown = Reader::new(&bytes[..]).unwrap().header().clone();
    let texts = [&shown.contract, &shown.core, &shown.capabilities[0]];
    assert_eq!(texts, [CLEAN; 3]);
    assert_eq!(shown.limits, serde_json::json!({CLEAN: CLEAN}));
    let (all, error) = read(&bytes);
    assert!(error.is_none(), "{error:?}");
    let clean = || CLEAN.to_owned();
    let cleaned = About {
        name: clean(),
        digest: clean(),
        path: clean(),
        reasons: vec![(1, clean())],
        ..about
    };
    assert_eq!(all[0], Record::Policy(cleaned), "what a replay needs is as it was");
    let rest = format!("{:?}", &all[1..]);
    assert_eq!(rest.matches(CLEAN).count(), 5, "{rest}");
    // Lines of a fault stay lines.
    assert!(rest.contains("?]0;x??1m?a\\nforged"), "{rest}");
}
