//! A decode service with continuous batching, alone and beside a training.

use std::error::Error;
use tally_engine::BuiltInRule;
use tally_engine::policy::Policy;
use tally_simulator::decode::{Decode, Requests, prefill};
use tally_simulator::{
    Arrivals, Report, Service, Setup, SharingMode, Tenant, Trace, simulate_several,
};

type Outcome = Result<(), Box<dyn Error>>;

const REQUESTS: &str = "arrival_ms,context,generated\n0,700,40\n20,100,30\n200,1500,25\n230,10,1\n";

fn run(
    requests: Requests,
    setup: &Setup,
    low: Option<&Trace>,
    policy: Option<Box<dyn Policy + Send>>,
) -> Result<Report, Box<dyn Error>> {
    let (step, none) = (Trace::open("llama7b_decode_b1")?, Arrivals::At(Vec::new()));
    let decode = Decode { requests, prefill: Some(prefill(4)) };
    let tpot_ns = Some(6_000_000);
    let service = Service { tpot_ns, decode: Some(&decode), ..Service::new(&step, &none) };
    let tenant = |trace| Tenant { trace, weight: 1, min_share_permille: 0 };
    let low: Vec<Tenant> = low.map(tenant).into_iter().collect();
    Ok(simulate_several(setup, &[service], &low, policy))
}

#[test]
fn alone_every_token_is_made_in_batches() -> Outcome {
    let setup = Setup { seconds: 3.0, ..Setup::default() };
    let report = run(Requests::parse("r", REQUESTS)?, &setup, None, None)?;
    let h = &report.high_priority;
    let d = h.decode.ok_or("no decode")?;
    assert_eq!((h.arrived, h.served, h.unserved), (4, 4, 0));
    // 700 tokens are two chunks, 1 500 three; the last one of each request gives its first token.
    assert_eq!(d.prefills, 2 + 1 + 3 + 1);
    let tokens = (d.tokens_per_s * setup.seconds).round();
    assert_eq!(tokens, f64::from(39 + 29 + 24));
    assert_eq!((tokens / d.batch_mean).round(), d.steps as f64);
    assert!(d.steps < 39 + 29 + 24 && d.batch_mean > 1.0, "{d:?}");
    assert_eq!((d.tokens_per_s, h.service_p99_ms), (d.solo_tokens_per_s, h.solo_p99_ms));
    assert_eq!((h.within, h.queued_p99_over_solo), (Some(1.0), 1.0));
    assert_eq!(report.launches, d.steps + d.prefills * prefill(4).kernels.len() as u64);
    Ok(())
}

#[test]
fn a_backlog_keeps_the_batch_full() -> Outcome {
    let setup = Setup { seconds: 2.0, learn_seconds: 1.0, ..Setup::default() };
    let requests = Requests::parse("r", "arrival_ms,context,generated\n0,100,200\n")?.backlog();
    let h = run(requests, &setup, None, None)?.high_priority;
    assert!(h.served > 0 && (h.arrived, h.queued_p99_ms) == (h.served, 0.0), "{h:?}");
    let d = h.decode.ok_or("no decode")?;
    assert!(d.batch_mean > 15.0, "what came before the batch was full is not counted: {d:?}");
    Ok(())
}

#[test]
fn requests_count_that_arrive_in_the_window_also_if_they_are_not_done() -> Outcome {
    let setup = Setup { seconds: 0.5, learn_seconds: 1.0, ..Setup::default() };
    // The third one is not done when the window ends; the last one comes behind it.
    let text = "arrival_ms,context,generated\n0,9,9\n1100,9,9\n1400,9,900\n1600,9,9\n";
    let h = run(Requests::parse("r", text)?, &setup, None, None)?.high_priority;
    assert_eq!((h.arrived, h.served, h.unserved), (2, 1, 1));
    assert_eq!(h.queued_p99_ms, 100.0, "its wait so far");
    Ok(())
}

#[test]
fn beside_a_training_the_scheduled_service_is_faster_and_no_request_is_lost() -> Outcome {
    let low = Trace::open("gpt2_12l_train_b8_s1024")?;
    let setup = Setup { sharing: SharingMode::Mps, seconds: 3.0, ..Setup::default() };
    let requests = || Requests::parse("r", REQUESTS);
    let shared = run(requests()?, &setup, Some(&low), None)?;
    let rule = || Some(Box::new(BuiltInRule { idle_ns: 100_000 }) as Box<dyn Policy + Send>);
    let scheduled = run(requests()?, &setup, Some(&low), rule())?;
    let [shared_p99, scheduled_p99] =
        [&shared, &scheduled].map(|report| report.high_priority.service_p99_over_solo);
    assert!(scheduled_p99 < shared_p99, "{scheduled_p99} {shared_p99}");
    assert_eq!(scheduled.high_priority.served, 4);
    assert!(scheduled.best_effort.as_ref().is_some_and(|low| low.share > 0.2));
    let again = run(requests()?, &setup, Some(&low), rule())?;
    assert_eq!(serde_json::to_string(&again)?, serde_json::to_string(&scheduled)?);
    Ok(())
}
