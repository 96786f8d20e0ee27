//! Fills in the answers of `tally-admin` from what the core knows.

mod departed;
mod kernel;

pub use departed::{departed, totals};
pub use kernel::kernel;

use crate::dispatch::marks::{MarkNumbers, UnitNumbers};
use crate::dispatch::min_share::MinShare;
use crate::dispatch::service::ServiceNumbers;
use crate::dispatch::snapshot::{ClientNumbers, ReportWords, ShimCounts, Snapshot};
use tally_admin::{
    Active, Class, ClientStatus, Decisions, EntryPoints, FaultCostUs, FaultCounts, Faults,
    Identity, LastDisabled, LastFault, LoadFailure, Marks, MechanismState, MpsUse, Objective,
    PolicyReport, ReasonStatus, Report, Restored, Service, Tpot, Transformed, UnitProfile, Units,
    WaitReason, Why,
};
use tally_engine::WaitsFor;
use tally_engine::engine::Had;
use tally_engine::policy::{self, FaultKind};
use tally_ipc::layout::{LaunchCounts, report_state, whole_because};

/// The active policy; `last_disabled`: the last that was disabled, and `load_failures`: their number.
pub fn policy_report(
    active: Active,
    last_load_error: Option<LoadFailure>,
    load_failures: u64,
    last_disabled: Option<LastDisabled>,
    s: &Snapshot,
) -> PolicyReport {
    let of = |kind| s.policy.faults.get(&kind).copied().unwrap_or(0);
    let failed = FaultCounts {
        trap: of(FaultKind::Trap),
        overrun: of(FaultKind::Overrun),
        memory: of(FaultKind::Memory),
        nonsense: of(FaultKind::Nonsense),
        stall: of(FaultKind::Stall),
    };
    let figures = s.figures.as_ref();
    let words = |all: &[&'static str]| all.iter().map(|word| (*word).into()).collect();
    PolicyReport {
        active,
        granted: figures.map(|f| words(&f.granted)).unwrap_or_default(),
        needs: figures.map(|f| words(&f.needs)).unwrap_or_default(),
        reasons: figures.map(|f| f.reasons.iter().map(reason).collect()).unwrap_or_default(),
        decides: s.policy.decides,
        events: s.policy.events,
        built_in_rule_decisions: s.policy.built_in_rule_decisions,
        faults: Faults { failed, disabled: of(FaultKind::Disabled) },
        traps: failed.trap,
        overruns: failed.overrun,
        last_fault: s.policy.last_fault.as_ref().map(ToString::to_string),
        disabled: figures.is_some_and(|f| f.disabled),
        respawns: figures.map_or(0, |f| f.respawns),
        counters: figures.map(|f| f.counters.clone()).unwrap_or_default(),
        gauges: figures.map(|f| f.gauges.clone()).unwrap_or_default(),
        log_dropped: figures.map_or(0, |f| f.log_dropped),
        load_failures,
        last_load_error,
        recent_faults: figures.map_or(0, |f| f.recent_faults),
        last_disabled,
        swap_pause_us: s.swap_pause,
        fault_cost_us: FaultCostUs {
            calls: s.fault_cost.calls,
            max: s.fault_cost.ns_max as f64 / 1e3,
        },
    }
}

fn reason(r: &tally_wasm_host::ReasonStatus) -> ReasonStatus {
    let tally_wasm_host::ReasonStatus { reason, text, decisions } = r;
    ReasonStatus { reason: *reason, text: text.clone(), decisions: *decisions }
}

pub fn restored(from: tally_wasm_host::Restored) -> Restored {
    use tally_wasm_host::Restored as From;
    match from {
        From::NotOffered => Restored::NotOffered,
        From::NoInterface => Restored::NoInterface,
        From::Accepted => Restored::Accepted,
        From::Refused(why) => Restored::Refused(why),
        From::Failed(why) => Restored::Failed(why),
    }
}

pub fn fault_counts(from: tally_wasm_host::FaultCounts) -> FaultCounts {
    let tally_wasm_host::FaultCounts { trap, overrun, memory, nonsense, stall } = from;
    FaultCounts { trap, overrun, memory, nonsense, stall }
}

pub fn last_fault(from: tally_wasm_host::LastFault) -> LastFault {
    let tally_wasm_host::LastFault { kind, message, at_ns } = from;
    LastFault { kind: kind.into(), message, at_ns }
}

fn why(waits_for: WaitsFor, now_ns: u64) -> Why {
    let until = |until_ns: u64| Some(until_ns.saturating_sub(now_ns) as f64 / 1e6);
    let (reason, for_ms) = match waits_for {
        WaitsFor::HighPriority { until_ns } => (WaitReason::HighPriority, until(until_ns)),
        WaitsFor::Policy { until_ns } => (WaitReason::Policy, until(until_ns)),
        WaitsFor::Window => (WaitReason::Window, None),
        WaitsFor::Yielding => (WaitReason::Yielding, None),
        WaitsFor::Decision => (WaitReason::Decision, None),
    };
    Why { reason, for_ms }
}

fn decisions(n: &ClientNumbers) -> Decisions {
    let s = &n.stats;
    Decisions {
        submitted: s.submitted,
        run: s.run,
        leased: s.leased,
        held: s.held,
        launches_held: s.launches_held,
        window_full: s.window_full,
        window_stalls: s.window_stalls,
        sliced: s.sliced,
        preemptible: s.preemptible,
        sm_limited: s.sm_limited,
        width_changes: s.width_changes,
        degraded: s.degraded.saturating_add(n.shim.degraded),
        built_in_rule: s.built_in_rule,
        completed: s.completed,
    }
}

fn transformed(n: &ClientNumbers) -> Transformed {
    let s = &n.shim;
    Transformed {
        kernels: s.transformed_kernels,
        kernels_refused: s.refused_kernels,
        sliced: s.sliced,
        sliced_by_offset: s.sliced_by_offset,
        preemptible: s.preemptible,
        sm_limited: s.sm_limited,
        sm_limited_consecutive: s.sm_limited_consecutive,
        graph_chained: s.graph_chained,
        graph_nodes_transformed: s.graph_nodes_transformed,
        yields: n.stats.yields,
        yielded: n.state.yielded,
        launches_yielded: s.launches_yielded,
        rescued: s.rescued,
        turnaround_us_p50: s.turnaround_p50_ns as f64 / 1e3,
        turnaround_us_p99: s.turnaround_p99_ns as f64 / 1e3,
        sm_limit_us_p50: s.limit_cost_ns as f64 / 1e3,
        sm_limit_us_p99: s.limit_cost_p99_ns as f64 / 1e3,
        sm_limits_timed: s.limit_costs,
        sm_limit_mb: n.report.sm_limit_bytes as f64 / 1e6,
    }
}

fn whole_because(word: u32) -> &'static str {
    match word {
        whole_because::NOTHING => "",
        whole_because::LAUNCH_BLOCKING => "CUDA_LAUNCH_BLOCKING is set",
        whole_because::INJECTION => {
            "a tool is injected (CUDA_INJECTION64_PATH, compute-sanitizer or Nsight)"
        }
        whole_because::DEBUGGER => "a debugger is attached",
        whole_because::BYPASS => {
            "another library stands between the program and the driver, or may call it without the shim: it is in LD_PRELOAD as well, or was opened with RTLD_DEEPBIND"
        }
        whole_because::FEW_QUEUES => "CUDA_DEVICE_MAX_CONNECTIONS is below 8",
        whole_because::NEW_CALL => {
            "it has looked up a function of a newer CUDA than this shim knows (TALLY_SHIM_LOG names it)"
        }
        _ => "its shim reports an unknown reason",
    }
}

fn state(word: u32) -> MechanismState {
    match word {
        report_state::PENDING => MechanismState::Pending,
        report_state::ACTIVE => MechanismState::Active,
        report_state::FAILED => MechanismState::Failed,
        report_state::UNUSED => MechanismState::Unused,
        _ => MechanismState::Invalid,
    }
}

fn report(r: &ReportWords, mps_asked: bool) -> Report {
    Report {
        time_slice: state(r.time_slice),
        time_slice_us: r.time_slice_us,
        time_slice_groups: r.time_slice_groups,
        time_slice_error: r.time_slice_error,
        linger: state(r.linger),
        linger_error: r.linger_error,
        whole_because: whole_because(r.whole_because).into(),
        mps: match (r.mps_client, mps_asked) {
            (1, true) | (2, false) => MpsUse::AsAsked,
            (2, true) => MpsUse::NotAClient,
            (1, false) => MpsUse::NotAsked,
            _ => MpsUse::Unknown,
        },
        sm_count: r.sm_count,
        driver_version: r.driver_version,
        device_uuid: uuid(r.device_uuid),
    }
}

/// A device's UUID as `nvidia-smi` writes it; empty if it is 0.
pub(crate) fn uuid(words: [u64; 2]) -> String {
    if words == [0, 0] {
        return String::new();
    }
    let mut text = String::from("GPU-");
    for (i, byte) in words.iter().flat_map(|w| w.to_le_bytes()).enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn governed(r: &ReportWords) -> (bool, String) {
    let why = match r.governed {
        report_state::ACTIVE => return (true, String::new()),
        report_state::PENDING => "it has not launched anything yet",
        report_state::FAILED => "its shim could not take over the driver's launch functions",
        report_state::UNUSED => "its shim was told not to",
        _ => "its shim reports an unknown state",
    };
    (false, why.into())
}

fn charged_ms(class: Class, n: &ClientNumbers) -> f64 {
    let ns = if class == Class::High { n.shim.busy_total_ns } else { n.stats.charged_ns };
    ns as f64 / 1e6
}

fn units(n: &UnitNumbers) -> Units {
    Units {
        count: n.count,
        recent: n.recent,
        p50_ms: n.p50_ns as f64 / 1e6,
        p99_ms: n.p99_ns as f64 / 1e6,
    }
}

fn marks(n: &MarkNumbers) -> Marks {
    Marks {
        requests: n.has_requests,
        open: n.open,
        oldest_ms: n.oldest_ns as f64 / 1e6,
        tokens: units(&n.tokens),
        prefills: units(&n.prefills),
        dropped: n.dropped,
        wrong: n.wrong,
        shortened: n.shortened,
    }
}

fn min_share((one, had): (MinShare, Had)) -> tally_admin::MinShare {
    let percent = |permille: u32| f64::from(permille) / 10.0;
    let share = had.charged_ns as f64 / had.backlogged_ns as f64 * 100.0;
    tally_admin::MinShare {
        asked_percent: percent(one.asked),
        granted_percent: percent(one.granted),
        had_percent: (had.backlogged_ns > 0).then_some(share),
    }
}

fn service(n: &ServiceNumbers, marked: Option<&MarkNumbers>) -> Service {
    let attainment = n.recent_within as f64 / n.recent as f64 * 100.0;
    Service {
        objective: n
            .objective
            .map(|o| Objective { slo_ms: o.slo_ns as f64 / 1e6, percentile: o.percentile }),
        requests: n.requests,
        requests_within: n.requests_within,
        requests_late: n.requests_late,
        recent: n.recent,
        p50_ms: n.p50_ns as f64 / 1e6,
        p99_ms: n.p99_ns as f64 / 1e6,
        attainment_percent: n.objective.filter(|_| n.recent > 0).map(|_| attainment),
        tpot: marked.and_then(tpot),
        marks: marked.map(marks),
        slack_ms: None,
        profile: None,
    }
}

fn profile(p: policy::UnitProfile) -> UnitProfile {
    UnitProfile {
        units: p.units,
        launches: p.launches,
        gpu_busy_ms: p.gpu_busy_ns as f64 / 1e6,
        gaps: p.gaps,
        gaps_ms: p.gaps_ns as f64 / 1e6,
        gap_median_us: p.gap_median_ns as f64 / 1e3,
        gap_longest_us: p.gap_longest_ns as f64 / 1e3,
        sms_max: p.sms_max,
        sms_mean: p.sms_mean,
    }
}

fn tpot(n: &MarkNumbers) -> Option<Tpot> {
    let tokens = n.tokens;
    let attainment = tokens.recent_within as f64 / tokens.recent as f64 * 100.0;
    n.tpot_ns.map(|ns| Tpot {
        tpot_ms: ns as f64 / 1e6,
        tokens_within: tokens.within,
        tokens_late: tokens.late,
        attainment_percent: (tokens.recent > 0).then_some(attainment),
    })
}

fn entry_points(s: &ShimCounts) -> EntryPoints {
    // Taken apart, so that a counter which is missing from the status does not compile.
    let LaunchCounts { kernel, kernel_ex, cooperative, graph } = s.by_entry_point;
    EntryPoints { kernel, kernel_ex, cooperative, graph }
}

/// A connected client; `reason`: why its last launch was decided as it was.
pub fn client(
    identity: Identity,
    connected_s: f64,
    reason: Option<String>,
    n: &ClientNumbers,
    mps_asked: bool,
) -> ClientStatus {
    let (governed, not_governed_reason) = governed(&n.report);
    ClientStatus {
        connected_s,
        governed,
        not_governed_reason,
        launches: n.shim.launches,
        launches_by_entry_point: entry_points(&n.shim),
        graph_kernels: n.shim.graph_kernels,
        captured: n.shim.captured,
        failed: n.shim.failed,
        unscheduled: n.shim.unscheduled,
        host_func: n.shim.host_func,
        lingered: n.shim.lingered,
        stream_overflow: n.shim.stream_overflow,
        decisions: decisions(n),
        transformed: transformed(n),
        waiting: n.state.waiting,
        why: n.state.waits_for.map(|waits_for| why(waits_for, n.read_ns)),
        waited_ms: n.stats.waited_ns as f64 / 1e6,
        waited_client_ms: n.shim.waited_ns as f64 / 1e6,
        weight: n.weight,
        min_share: n.min_share.map(min_share),
        charged_ms: charged_ms(identity.class, n),
        charged_percent: charged_ms(identity.class, n) / (connected_s * 1e3).max(1.0) * 100.0,
        measured_ms: n.stats.measured_ns as f64 / 1e6,
        launches_measured: n.stats.measured,
        busy: n.shim.busy && identity.class == Class::High,
        service: n.service.as_ref().map(|s| Service {
            profile: n.profile.map(profile),
            slack_ms: n.slack_ns.map(|ns| ns as f64 / 1e6),
            ..service(s, n.marks.as_ref())
        }),
        standstills: n.standstills,
        in_flight: n.state.in_flight,
        in_flight_us: n.state.in_flight_ns as f64 / 1e3,
        window_us: n.state.window_ns as f64 / 1e3,
        width_sms: n.state.width_sms,
        ungated: n.state.ungated,
        reason,
        report: report(&n.report, mps_asked),
        tickets_skipped: n.oddities.skipped,
        tickets_abandoned: n.oddities.abandoned,
        breaches: n.oddities.breaches,
        identity,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let words = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(uuid(words), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
        assert_eq!(uuid([0, 0]), "");
    }

    #[test]
    fn not_being_governed_has_a_reason() {
        for word in 0..=9 {
            let (yes, why) = governed(&ReportWords { governed: word, ..ReportWords::default() });
            assert_eq!(why.is_empty(), word == report_state::ACTIVE);
            assert_eq!(yes, word == report_state::ACTIVE);
        }
    }
}
