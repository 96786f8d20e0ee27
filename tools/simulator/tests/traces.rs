//! What is read of a trace or a file of arrivals, and how a bad one is refused.

use tally_simulator::trace::{Alone, Pace};
use tally_simulator::{Arrivals, Trace, builtin_traces};

const HEADER: &str = "ts_us,dur_us,kind,name,stream,grid,block,regs,smem\n";

fn refused(text: &str) -> String {
    Trace::parse("t.csv", text).unwrap_err().to_string()
}

#[test]
fn every_built_in_trace_is_read_and_lasts_what_it_was_recorded_to() {
    assert_eq!(builtin_traces().count(), 12);
    for name in builtin_traces() {
        let trace = Trace::open(name).unwrap();
        let pauses = trace.kernels.windows(2);
        assert!(pauses.clone().all(|w| w[0].start_ns + w[0].dur_ns <= w[1].start_ns), "{name}");
        assert!(trace.span_ns() <= trace.period_ns, "{name}");
        assert!(trace.as_graph().span_ns() <= trace.span_ns(), "{name}");
        // Those with records of their launches were timed, too.
        assert_eq!(trace.alone[0].is_some(), trace.alone[1].is_some(), "{name}");
        assert_eq!(trace.alone[0].is_some(), trace.lead_ns > 0, "{name}");
    }
    let requests = Trace::open("llama7b_decode_b1").unwrap();
    assert_eq!((requests.kernels.len(), requests.recorded), (482, 8));
    assert!(requests.is_graph() && !Trace::open("resnet50_infer_b1").unwrap().is_graph());
}

#[test]
fn the_last_iteration_is_taken_and_pauses_say_what_the_program_waited_for() {
    let rows = "0,10,kernel,\"a,\"\"b\",7,2x1x1,64x1x1,16,0\n\
                20,5,kernel,c,7,1x1x1,32x1x1,16,0\n\
                50,10,kernel,\"a,\"\"b\",7,2x1x1,64x1x1,16,0\n\
                61,5,kernel,c,7,1x1x1,32x1x1,16,0\n";
    let trace = Trace::parse("t", &format!("{HEADER}{rows}")).unwrap();
    assert_eq!((trace.recorded, trace.kernels.len()), (2, 2));
    let [a, c] = &trace.kernels[..] else { panic!() };
    assert_eq!((a.name.as_str(), a.dur_ns, a.blocks(), a.threads()), ("a,\"b", 10_000, 2, 64));
    // The GPU waited for both launches before it: the program could not launch sooner.
    assert_eq!(a.pace, Pace::AfterLaunch(30_000));
    assert_eq!((c.gap_ns, c.pace), (1_000, Pace::AfterLaunch(3_000)));
    assert_eq!((trace.span_ns(), trace.period_ns), (16_000, 41_000));
}

#[test]
fn a_bad_trace_is_refused_with_the_line_and_what_was_expected() {
    assert!(refused("a,b\n").contains("no column `ts_us`"));
    assert!(refused(HEADER).contains("no kernels"));
    let row = |row: &str| refused(&format!("{HEADER}0,1,kernel,a,7,1x1x1,32x1x1,16,0\n{row}\n"));
    for (bad, column) in [
        ("x,1,kernel,a,7,1x1x1,32x1x1,16,0", "ts_us"),
        ("1,-1,kernel,a,7,1x1x1,32x1x1,16,0", "dur_us"),
        ("1,NaN,kernel,a,7,1x1x1,32x1x1,16,0", "dur_us"),
        ("1,1,kernel,a,7,1x1,32x1x1,16,0", "grid"),
        ("1,1,kernel,a,7,1x1x1,0x1x1,16,0", "block"),
        ("1,1,kernel,a,7,1x1x1,32x1x1,many,0", "regs"),
        ("1", "dur_us"),
    ] {
        let said = row(bad);
        assert!(said.contains("t.csv, line 3") && said.contains(column), "{bad}: {said}");
        assert!(said.contains("expected"), "{said}");
    }
    let said = Trace::open("no-such-trace").unwrap_err().to_string();
    assert!(said.contains("no-such-trace") && said.contains("resnet50_infer_b1"), "{said}");
}

#[test]
fn a_file_that_is_not_what_its_name_says_is_refused() {
    let path = std::env::temp_dir().join(format!("tally-simulator-{}.csv.gz", std::process::id()));
    std::fs::write(&path, HEADER).unwrap();
    let said = Trace::open(path.to_str().unwrap()).unwrap_err().to_string();
    std::fs::remove_file(&path).unwrap();
    assert!(said.contains("gzip header") && said.contains("csv.gz"), "{said}");
}

#[test]
fn arrivals_are_times_that_rise() {
    assert_eq!(
        Arrivals::parse("f", "0.5\n\n1\n").unwrap(),
        Arrivals::At(vec![500_000_000, 1_000_000_000])
    );
    for (bad, line) in [("1\n0.5\n", "line 2"), ("1\nsoon\n", "line 2"), ("-1\n", "line 1")] {
        let said = Arrivals::parse("f", bad).unwrap_err().to_string();
        assert!(said.contains(line) && said.contains("expected seconds"), "{said}");
    }
    assert!(Arrivals::parse("f", "\n").unwrap_err().to_string().contains("expected 1 to"));
}

const CALLS: &str = "ts_us,dur_us,kind,name,stream,grid,block,regs,smem,iteration,launch_us,launch_dur_us,waited_us\n";

#[test]
fn recorded_launches_say_what_the_program_did_in_between() {
    // A cold iteration; then one that waits, launches two kernels, waits in its middle,
    // launches a graph of two, and one kernel that the GPU is not ready for.
    let rows = "0,5,kernel,x,7,1x1x1,32x1x1,16,0,0,-9,3,\n\
                100,10,kernel,a,7,1x1x1,32x1x1,16,0,1,90,3,70\n\
                112,30,kernel,b,7,1x1x1,32x1x1,16,0,1,95,3,\n\
                170,8,kernel,c,7,1x1x1,32x1x1,16,0,1,160,6,150\n\
                179,8,kernel,d,7,1x1x1,32x1x1,16,0,1,160,6,\n\
                190,4,kernel,e,7,1x1x1,32x1x1,16,0,1,175,3,\n";
    let text = format!("# plain_ms=0.1 plain_p99_ms=0.2 plain_launched_ms=0.05\n{CALLS}{rows}");
    let trace = Trace::parse("t", &text).unwrap();
    let found: Vec<_> =
        trace.kernels.iter().map(|k| (k.name.as_str(), k.launch, k.gap_ns)).collect();
    assert_eq!(
        found,
        [("a", 0, 0), ("b", 1, 2_000), ("c", 2, 0), ("d", 2, 1_000), ("e", 3, 3_000)]
    );
    assert_eq!((trace.recorded, trace.lead_ns, trace.is_graph()), (2, 20_000, false));
    let seen_ns = tally_simulator::gpu::SEEN_NS;
    assert_eq!(trace.kernels[0].pace, Pace::AfterEnd(20_000 + seen_ns));
    assert_eq!(trace.kernels[1].pace, Pace::AfterLaunch(5_000));
    assert_eq!(trace.kernels[2].pace, Pace::AfterEnd(10_000 + seen_ns));
    assert_eq!(trace.kernels[4].pace, Pace::AfterLaunch(15_000));
    assert_eq!(trace.period_ns, 124_000 + seen_ns);
    let alone = trace.alone[0].unwrap();
    assert_eq!((alone.ns, alone.p99_ns, alone.launched_ns), (100_000, 200_000, 50_000));
    assert_eq!(trace.alone[1], None);
}

#[test]
fn a_timed_program_takes_what_it_takes_without_a_profiler() {
    for name in builtin_traces() {
        let trace = Trace::open(name).unwrap();
        let (launched_ns, seen_ns) = trace.lone_ns();
        for (faster, launched) in [(1.3, 0.0), (0.97, 0.0), (1.0, 0.5), (1.1, 0.8)] {
            let alone = Alone {
                ns: (seen_ns as f64 * faster) as u64,
                launched_ns: (launched_ns as f64 * launched) as u64,
                ..Alone::default()
            };
            let timed = trace.timed(alone);
            let (_, found_ns) = timed.lone_ns();
            let off = found_ns as f64 / alone.ns as f64 - 1.0;
            assert!(off.abs() < 0.01, "{name} {faster} {launched}: {off}");
            assert_eq!(timed.period_ns, alone.ns);
            assert!(timed.span_ns() <= timed.period_ns, "{name}");
        }
    }
}

/// Pauses could be hidden behind the program's own times, and would show once it is held up.
#[test]
fn a_program_that_its_own_part_limits_gets_no_pauses_of_the_gpu_for_it() {
    for name in ["resnet50_infer_b1", "bert_base_train_b32_s128", "gpt2_large_train_b4_s512"] {
        let trace = Trace::open(name).unwrap();
        let paused_ns = |trace: &Trace| trace.kernels.iter().map(|k| k.gap_ns).sum::<u64>();
        let plain = trace.alone[0].unwrap();
        assert!(plain.is_launch_bound(), "{name}");
        for permille in 900..950 {
            let timed = trace.timed(plain.scaled_to(plain.ns / 1_000 * permille));
            assert!(paused_ns(&timed) <= paused_ns(&trace), "{name}, {permille}");
        }
    }
}

#[test]
fn a_wrong_figure_in_a_comment_is_refused() {
    let said = refused(&format!("# plain_ms=soon\n{HEADER}0,1,kernel,a,7,1x1x1,32x1x1,16,0\n"));
    assert!(
        said.contains("line 1") && said.contains("soon") && said.contains("milliseconds"),
        "{said}"
    );
}
