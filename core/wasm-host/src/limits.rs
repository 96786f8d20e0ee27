//! How much a policy may use.

use crate::HostError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tally_compiler::CompileLimits;
use tally_contract::limits;

/// How much a policy may use; one place for every bound, all of them
/// configuration. The defaults suit compiled languages; an interpreter (Python,
/// JavaScript) needs more memory, more fuel and a larger component: [`Limits::interpreted`].
///
/// In a configuration, `preset = "interpreted"` (or `"default"`) names where to start
/// from, and single keys go beyond.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(from = "crate::preset::Given")]
#[schemars(!from)]
pub struct Limits {
    /// Linear memory: all memories of a component together.
    #[schemars(range(min = 65_536, max = 4_294_967_296_u64))]
    pub memory_bytes: usize,
    /// Fuel of one `decide` or event, about one unit an instruction. This is the tight bound, and the
    /// same in every run.
    #[schemars(range(min = 1_000))]
    pub decide_fuel: u64,
    /// Fuel for starting an instance together with its `init`; the same again for its `restore`.
    #[schemars(range(min = 1_000))]
    pub init_fuel: u64,
    /// Fuel of one `snapshot`. It is less than that of `init` because decisions wait for it.
    #[schemars(range(min = 1_000))]
    pub snapshot_fuel: u64,
    /// CPU time of one `decide` or event; it bounds what fuel does not count. The call is stopped after
    /// at most 1.5 times as long, or 3.5 times if there was no long one in the second before. A call that begins as the
    /// watching thread falls asleep may take 0.5 s more. Time in which the thread waits or is not scheduled does not
    /// count. A `snapshot`, or an instance started in place of a failed one, may take 20 ms if that is more.
    #[schemars(range(min = 1, max = 60_000))]
    pub call_cpu_ms_max: u64,
    /// CPU time for starting an instance together with its `init`; the same again for its `restore`.
    #[schemars(range(min = 1, max = 600_000))]
    pub init_cpu_ms_max: u64,
    /// Size of a component's file. Its native code may be 16 times as large.
    #[schemars(range(min = 1, max = 1_073_741_824))]
    pub component_bytes_max: usize,
    /// Memory of the process that compiles a component.
    #[schemars(range(min = 33_554_432, max = 68_719_476_736_u64))]
    pub compile_memory_bytes: usize,
    /// CPU time of the process that compiles a component, all threads together. Its wall-clock time may
    /// be ten times as long. A component may be compiled twice, each time with this budget.
    #[schemars(range(min = 1, max = 86_400))]
    pub compile_cpu_s: u64,
    /// Data passed between a policy and the core in one call of a host function.
    #[schemars(range(min = 1_024, max = 1_073_741_824))]
    pub host_call_bytes_max: usize,
    /// Faults after which a policy is disabled.
    #[schemars(range(min = 1, max = u32::MAX))]
    pub faults_max: u32,
    /// Time without a fault after which earlier faults are forgotten.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub faults_forgotten_after_s: u64,
    /// Lines that a policy may write to the log in one second; more are dropped and counted.
    pub log_lines_per_s_max: u32,
    /// Counters and gauges of a policy together; further ones count nothing.
    pub metrics_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory_bytes: limits::MEMORY_BYTES,
            decide_fuel: limits::DECIDE_FUEL,
            init_fuel: limits::INIT_FUEL,
            snapshot_fuel: limits::SNAPSHOT_FUEL,
            call_cpu_ms_max: limits::CALL_CPU_MS,
            init_cpu_ms_max: limits::INIT_CPU_MS,
            component_bytes_max: limits::COMPONENT_BYTES,
            compile_memory_bytes: limits::COMPILE_MEMORY_BYTES,
            compile_cpu_s: limits::COMPILE_CPU_S,
            host_call_bytes_max: limits::HOST_CALL_BYTES,
            faults_max: limits::FAULTS_MAX,
            faults_forgotten_after_s: limits::FAULTS_FORGOTTEN_AFTER_S,
            log_lines_per_s_max: limits::LOG_LINES_PER_S,
            metrics_max: limits::METRICS_MAX,
        }
    }
}

impl Limits {
    /// Between two looks at how long a call takes: a call is stopped at most half as late as it may last.
    pub(crate) fn tick_ms(&self) -> u64 {
        (self.call_cpu_ms_max / 2).clamp(1, 50)
    }

    /// Limits of the process that compiles a component.
    pub(crate) fn compiling(&self) -> CompileLimits {
        CompileLimits {
            memory_bytes: self.compile_memory_bytes as u64,
            cpu_s: self.compile_cpu_s,
            output_bytes: (self.component_bytes_max as u64)
                .saturating_mul(limits::NATIVE_CODE_FACTOR),
        }
    }

    /// For policies whose component carries an interpreter: Python is 18 MiB and has
    /// 13 MiB of memory before it begins, and collects garbage now and then.
    pub fn interpreted() -> Self {
        Limits {
            memory_bytes: 96 << 20,
            decide_fuel: 20_000_000,
            init_fuel: 2_000_000_000,
            snapshot_fuel: 50_000_000,
            call_cpu_ms_max: 20,
            init_cpu_ms_max: 10_000,
            component_bytes_max: 64 << 20,
            compile_memory_bytes: 2 << 30,
            compile_cpu_s: 240,
            ..Limits::default()
        }
    }

    /// Refuse limits under which no policy could run.
    pub(crate) fn check(&self) -> Result<(), HostError> {
        tally_settings::check(self).map_err(HostError::Limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_fills_in_and_refuses_what_it_does_not_know() {
        let limits: Limits = toml::from_str("faults_max = 5").unwrap();
        assert_eq!(limits, Limits { faults_max: 5, ..Limits::default() });
        let error = toml::from_str::<Limits>("fuel = 5").unwrap_err().to_string();
        assert!(error.contains("unknown field `fuel`"), "{error}");
    }

    #[test]
    fn a_preset_is_where_to_start_from() {
        let limits: Limits = toml::from_str("preset = 'interpreted'\nfaults_max = 5").unwrap();
        assert_eq!(limits, Limits { faults_max: 5, ..Limits::interpreted() });
        let limits: Limits = toml::from_str("preset = 'default'").unwrap();
        assert_eq!(limits, Limits::default());
        let error = toml::from_str::<Limits>("preset = 'slow'").unwrap_err().to_string();
        assert!(error.contains("slow") && error.contains("interpreted"), "{error}");
        assert!(Limits::interpreted().check().is_ok());
    }

    #[test]
    fn limits_that_no_policy_can_live_with_are_named() {
        assert!(Limits::default().check().is_ok());
        let limits = Limits { memory_bytes: 5, ..Limits::default() };
        let error = limits.check().unwrap_err().to_string();
        assert!(error.contains("memory_bytes") && error.contains("65536"), "{error}");
        assert!(Limits { faults_max: 0, ..Limits::default() }.check().is_err());
    }
}
