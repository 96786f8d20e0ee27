//! How much a policy may use.

use crate::HostError;
use serde::{Deserialize, Serialize};
use tally_compiler::CompileLimits;

/// How much a policy may use; one place for every bound, all of them
/// configuration. The defaults suit compiled languages; an interpreter (Python,
/// JavaScript) needs more memory, more fuel and a larger component: [`Limits::interpreted`].
///
/// In a configuration, `preset = "interpreted"` (or `"default"`) names where to start
/// from, and single keys go beyond.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "crate::preset::Given")]
pub struct Limits {
    /// Linear memory, all of a component's memories together.
    pub memory_bytes: usize,
    /// Fuel of one `decide` or event: about one unit an instruction. The
    /// tight bound, and the same on every run: a policy that loops is stopped
    /// after 0.1 ms.
    pub decide_fuel: u64,
    /// Fuel of starting an instance and of its `init`; and again of its `restore`.
    pub init_fuel: u64,
    /// Fuel of one `snapshot`. Decisions wait for it, so less than `init` has.
    pub snapshot_fuel: u64,
    /// CPU time of the calling thread in one `decide` or event, for what fuel does not
    /// count. A call is stopped at the latest half as much later; what waits or is not scheduled is not stopped.
    /// `snapshot` and a new instance in place of a failed one may take 20 ms.
    pub call_cpu_ms_max: u64,
    /// CPU time of starting an instance and of its `init`; and again of its
    /// `restore`.
    pub init_cpu_ms_max: u64,
    /// Size of a component's file. Its native code may be sixteen times as long.
    pub component_bytes_max: usize,
    /// Memory of the process that compiles a component.
    pub compile_memory_bytes: usize,
    /// CPU time of the process that compiles a component, of all its threads.
    pub compile_cpu_s: u64,
    /// Data passed between a policy and the core in one call of a host function.
    pub host_call_bytes_max: usize,
    /// Faults until a policy is switched off.
    pub faults_max: u32,
    /// Faults are forgotten once there was none for so long, s.
    pub faults_forgotten_after_s: u64,
    /// Lines a policy may write to the log in one second.
    pub log_lines_per_s_max: u32,
    /// Counters and gauges together.
    pub metrics_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory_bytes: 16 << 20,
            decide_fuel: 200_000,
            init_fuel: 50_000_000,
            snapshot_fuel: 5_000_000,
            call_cpu_ms_max: 2,
            init_cpu_ms_max: 2_000,
            component_bytes_max: 32 << 20,
            compile_memory_bytes: 512 << 20,
            compile_cpu_s: 60,
            host_call_bytes_max: 64 << 10,
            faults_max: 3,
            faults_forgotten_after_s: 600,
            log_lines_per_s_max: 64,
            metrics_max: 64,
        }
    }
}

/// Native code is three to eight times as long as what it is made of.
const OUTPUT_FACTOR: u64 = 16;

impl Limits {
    /// Those of the process that compiles.
    pub(crate) fn compiling(&self) -> CompileLimits {
        CompileLimits {
            memory_bytes: self.compile_memory_bytes as u64,
            cpu_s: self.compile_cpu_s,
            output_bytes: (self.component_bytes_max as u64).saturating_mul(OUTPUT_FACTOR),
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
        let within = |name, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(HostError::Limit { name, value, least, most })
            }
        };
        within("memory_bytes", self.memory_bytes as u64, 64 << 10, 4 << 30)?;
        within("decide_fuel", self.decide_fuel, 1_000, u64::MAX)?;
        within("init_fuel", self.init_fuel, 1_000, u64::MAX)?;
        within("snapshot_fuel", self.snapshot_fuel, 1_000, u64::MAX)?;
        within("call_cpu_ms_max", self.call_cpu_ms_max, 1, 60_000)?;
        within("init_cpu_ms_max", self.init_cpu_ms_max, 1, 600_000)?;
        within("component_bytes_max", self.component_bytes_max as u64, 1, 1 << 30)?;
        within("compile_memory_bytes", self.compile_memory_bytes as u64, 32 << 20, 64 << 30)?;
        within("compile_cpu_s", self.compile_cpu_s, 1, 86_400)?;
        within("host_call_bytes_max", self.host_call_bytes_max as u64, 1 << 10, 1 << 30)?;
        within("faults_forgotten_after_s", self.faults_forgotten_after_s, 1, 10_000_000)?;
        within("faults_max", self.faults_max.into(), 1, u32::MAX.into())
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
