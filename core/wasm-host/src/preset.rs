//! [`Limits`] as they are written down: a preset, and what differs from it.

use crate::Limits;
use serde::Deserialize;

/// The limits that hold where the configuration says nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Limits for policies in compiled languages: [`Limits::default`].
    #[default]
    Default,
    /// Limits for policies that bring an interpreter: [`Limits::interpreted`].
    Interpreted,
}

impl Preset {
    pub fn limits(self) -> Limits {
        match self {
            Preset::Default => Limits::default(),
            Preset::Interpreted => Limits::interpreted(),
        }
    }
}

/// Every key of the configuration is here and in [`Limits`], under the same name.
macro_rules! given {
    ($($key:ident: $kind:ty,)*) => {
        /// The settings as written; what is absent comes from the preset.
        #[derive(Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Given {
            preset: Preset,
            $($key: Option<$kind>,)*
        }

        impl From<Given> for Limits {
            fn from(given: Given) -> Limits {
                let preset = given.preset.limits();
                Limits { $($key: given.$key.unwrap_or(preset.$key),)* }
            }
        }
    };
}

given! {
    memory_bytes: usize,
    decide_fuel: u64,
    init_fuel: u64,
    snapshot_fuel: u64,
    call_cpu_ms_max: u64,
    init_cpu_ms_max: u64,
    component_bytes_max: usize,
    compile_memory_bytes: usize,
    compile_cpu_s: u64,
    host_call_bytes_max: usize,
    faults_max: u32,
    faults_forgotten_after_s: u64,
    log_lines_per_s_max: u32,
    metrics_max: usize,
}
