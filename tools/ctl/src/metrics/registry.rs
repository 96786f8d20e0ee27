//! Every metric: its name, its type, its labels and its HELP text. `docs/reference/metrics.md` is made of them.

use tally_reference::{document, table};

#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    pub name: &'static str,
    /// `counter` or `gauge`, as Prometheus names them.
    pub kind: &'static str,
    /// Labels that it has besides [`COMMON`].
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// Labels of every series, so that the files of several cores lie side by side.
pub const COMMON: [&str; 2] = ["gpu", "socket"];

/// Defines metrics, and the list of all.
macro_rules! metrics {
    ($($id:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)+) => {
        $(pub const $id: Metric = Metric {
            name: $name,
            kind: stringify!($kind),
            labels: &[$($label),*],
            help: $help,
        };)+

        pub const ALL: &[Metric] = &[$($id),+];
    };
}

metrics! {
    UP: gauge "tally_up" [] "1 if the core answers.";
    CORE: gauge "tally_core" ["version", "sharing"] "1; its labels say which core runs.";
    UPTIME: gauge "tally_core_uptime_seconds" [] "Time since the core started.";
    HIGH_BUSY: gauge "tally_high_priority_busy" [] "1 if high-priority work is on the GPU now.";
    LATENCY: gauge "tally_decision_latency_seconds" ["launches", "quantile"]
        "Time from a launch seen to its answer, since the core started.";
    LOG_RECORDING: gauge "tally_log_recording" [] "1 if a decision log is being written.";
    LOG_DROPPED: counter "tally_log_dropped_records_total" []
        "Records of the decision log that were lost.";
    EXPERIMENT: gauge "tally_experiment_running" [] "1 if an A/B test is running.";
    POLICY: gauge "tally_policy" ["name", "digest", "signed_by", "loaded_because"]
        "1; its labels say which policy is active.";
    GENERATION: gauge "tally_policy_generation" []
        "Number of the active policy; rises with each policy loaded.";
    DISABLED: gauge "tally_policy_disabled" []
        "1 if the active policy is disabled and the built-in rule serves.";
    DECIDES: counter "tally_policy_decides_total" []
        "Decisions asked of policies since the core started, also while one is disabled.";
    EVENTS: counter "tally_policy_events_total" []
        "Calls of event functions, of all policies since the core started.";
    BUILT_IN_RULE: counter "tally_built_in_rule_decisions_total" []
        "Decisions by the built-in rule because the policy failed, holds included.";
    LOAD_FAILURES: counter "tally_policy_load_failures_total" [] "Policies that could not be loaded.";
    FAULTS: counter "tally_policy_faults_total" ["kind"]
        "Faults of policies by kind, since the core started; disabled: calls not made.";
    RELOADS: counter "tally_policy_changes_total" [] "Changes of the active policy.";
    SWAP_PAUSE: gauge "tally_policy_swap_pause_seconds" ["quantile"]
        "How long changes of the active policy kept decisions waiting.";
    POLICY_COUNTER: counter "tally_policy_counter_total" ["name"] "Counters that the policy exports.";
    POLICY_GAUGE: gauge "tally_policy_gauge" ["name"] "Gauges that the policy exports.";
    LAUNCHES: counter "tally_launches_total" ["class"] "Launches made by clients of this class.";
    CHARGED: counter "tally_gpu_charged_seconds_total" ["class"]
        "GPU time charged for launches, measured or estimated; for high priority, time that clients were busy.";
    MEASURED: counter "tally_gpu_measured_seconds_total" ["class"]
        "Measured GPU time of the launches that were timed.";
    TIMED: counter "tally_launches_measured_total" ["class"] "Launches that were timed.";
    WAITED: counter "tally_waited_seconds_total" ["class"]
        "Time that launches waited for a decision.";
    UNSCHEDULED: counter "tally_unscheduled_total" ["class"]
        "Launches that went ahead without a core.";
    REGISTERED: counter "tally_clients_registered_total" ["class"]
        "Clients that registered since the core started.";
    DROPPED: counter "tally_clients_dropped_total" ["class"]
        "Clients that the core dropped because they broke the protocol.";
    CLIENTS: gauge "tally_clients" ["class"] "Clients connected now.";
    CLIENT_LAUNCHES: counter "tally_client_launches_total" ["client", "name", "class"]
        "Launches that this client made.";
    CLIENT_CHARGED: counter "tally_client_gpu_charged_seconds_total" ["client", "name", "class"]
        "GPU time charged for launches, measured or estimated; for high priority, time that clients were busy.";
    CLIENT_MEASURED: counter "tally_client_gpu_measured_seconds_total" ["client", "name", "class"]
        "Measured GPU time of the launches that were timed.";
    CLIENT_TIMED: counter "tally_client_launches_measured_total" ["client", "name", "class"]
        "Launches that were timed.";
    CLIENT_WAITED: counter "tally_client_waited_seconds_total" ["client", "name", "class"]
        "Time that launches waited for a decision.";
    CLIENT_UNSCHEDULED: counter "tally_client_unscheduled_total" ["client", "name", "class"]
        "Launches that went ahead without a core.";
    REQUESTS: counter "tally_client_requests_total" ["client", "name", "class"]
        "Requests of this high-priority client that ended.";
    REQUESTS_WITHIN: counter "tally_client_requests_within_objective_total" ["client", "name", "class"]
        "Requests of this high-priority client that kept its objective.";
    REQUESTS_LATE: counter "tally_client_requests_late_total" ["client", "name", "class"]
        "Requests of this high-priority client that took longer than its objective.";
    REQUEST_TIME: gauge "tally_client_request_seconds" ["client", "name", "class", "quantile"]
        "Time of a request of this high-priority client, over the last five to ten minutes.";
    TOKENS: counter "tally_client_tokens_total" ["client", "name", "class"]
        "Tokens of this high-priority client that ended: marked ones, or CUDA graph launches.";
    TOKENS_WITHIN: counter "tally_client_tokens_within_objective_total" ["client", "name", "class"]
        "Tokens of this high-priority client that kept its objective for tokens.";
    TOKENS_LATE: counter "tally_client_tokens_late_total" ["client", "name", "class"]
        "Tokens of this high-priority client that took longer than its objective for tokens.";
    TOKEN_OBJECTIVE: gauge "tally_client_token_objective_seconds" ["client", "name", "class"]
        "Longest time that a token of this client may take, by its objective for tokens.";
    TOKEN_TIME: gauge "tally_client_token_seconds" ["client", "name", "class", "quantile"]
        "Time of a token of this high-priority client, over the last five to ten minutes.";
    MARKS_LOST: counter "tally_client_marks_lost_total" ["client", "name", "class", "why"]
        "Marked units of work of this client that are not counted: dropped for lack of room, or wrong times.";
    OBJECTIVE: gauge "tally_client_objective_seconds" ["client", "name", "class"]
        "Longest time that a request of this client may take, by its objective.";
    WAITING: gauge "tally_client_waiting" ["client", "name", "class"]
        "Launches of this client that wait for a decision.";
    WEIGHT: gauge "tally_client_weight" ["client", "name", "class"]
        "Share of best-effort GPU time that this client is to get, relative to other clients.";
    MIN_SHARE_ASKED: gauge "tally_client_min_share_asked_ratio" ["client", "name", "class"]
        "Floor that this client, or an admin, asked for: least GPU time over the time in which it has work.";
    MIN_SHARE: gauge "tally_client_min_share_ratio" ["client", "name", "class"]
        "Floor that this client is granted: least GPU time over the time in which it has work.";
    MIN_SHARE_HAD: gauge "tally_client_min_share_had_ratio" ["client", "name", "class"]
        "GPU time charged to this client over the time in which it had work, since it asked for its floor.";
    CHARGED_SHARE: gauge "tally_client_gpu_charged_ratio" ["client", "name", "class"]
        "GPU time charged for launches of this client over the time since it registered.";
    GOVERNED: gauge "tally_client_governed" ["client", "name", "class"]
        "1 if the core schedules this client's launches, 0 if they bypass it.";
}

/// The document as Markdown.
pub fn reference() -> String {
    let code = |text: &&str| format!("`{text}`");
    let rows = ALL.iter().map(|metric| {
        let labels: Vec<_> = metric.labels.iter().map(code).collect();
        [code(&metric.name), metric.kind.into(), labels.join(", "), metric.help.into()]
    });
    let introduction = format!(
        "What `tallyctl metrics` prints, in the Prometheus text format 0.0.4. Every series also has the labels {}. \
         A figure that the core does not know is left out.",
        COMMON.map(|label| code(&label)).join(" and ")
    );
    document("Metrics", &introduction, &table(["metric", "type", "labels", "meaning"], rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_types_and_are_given_once() {
        for (at, metric) in ALL.iter().enumerate() {
            let is_counter = metric.name.ends_with("_total");
            assert_eq!(metric.kind, if is_counter { "counter" } else { "gauge" }, "{metric:?}");
            assert!(ALL[..at].iter().all(|other| other.name != metric.name), "{metric:?}");
        }
        let text = reference();
        assert!(
            text.contains("| `tally_policy_faults_total` | counter | `kind` | Faults of "),
            "{text}"
        );
    }
}
