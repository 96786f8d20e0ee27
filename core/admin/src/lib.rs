//! Admin requests: what may be asked of a core at its admin socket, and the form of its answers.
//!
//! One JSON object a line each way. Files go with a request as descriptors (`tally_ipc::admin`), which its
//! `files` names; paths in requests are names to show people. Which type is in an answer's `ok`, and who may ask, is
//! told where the core answers: `core/daemon/src/control/admin.rs` and `core/daemon/src/record/admin.rs`. Fields of
//! answers that are not known are ignored, as a newer core may have more; a missing one is an error that names it.
#![forbid(unsafe_code)]

pub mod ab;
mod client;
mod policy;
mod profiles;
mod record;
mod status;
mod words;

pub use client::{
    ClientStatus, Decisions, Departed, EntryPoints, Identity, Marks, MechanismState, MinShare,
    MpsUse, Needs, Objective, Report, Service, Totals, Tpot, Transformed, UngovernedStatus,
    UnitProfile, Units, WaitReason, Why,
};
pub use policy::{
    Active, Disabled, FaultCostUs, FaultCounts, Faults, LastDisabled, LastFault, LoadFailure,
    LoadedBecause, PolicyRecord, PolicyReport, ReasonStatus, Restored, SwapPauseUs,
    UnloadedBecause,
};
pub use profiles::{Cleared, Form, FormStatus, KernelStatus, Profiles, ProfilesStatus};
pub use record::{LogStatus, ShadowBrief, ShadowShare, ShadowStatus};
pub use status::{
    Class, CoreStatus, MpsStatus, Quantiles, RefreshStatus, SCHEMA, SharingStatus, Status,
};
pub use words::Word;

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What a policy's files are called. The core opens them only if its own configuration names
/// them; else they came as descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    pub file: PathBuf,
    /// File of its configuration, if it has one.
    #[serde(default)]
    pub config_file: Option<PathBuf>,
}

/// A request, except for those of [`RecordRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Status {
        /// How many kernels; by default some.
        #[serde(default)]
        kernels: Option<usize>,
    },
    /// The active policy and its figures.
    PolicyShow {},
    /// Make a policy the active one. With its files.
    PolicyLoad {
        /// What the component is called.
        path: PathBuf,
        /// What its configuration is called, if it has one.
        #[serde(default)]
        config: Option<PathBuf>,
    },
    /// The policies that were active.
    PolicyHistory {},
    /// Make an earlier policy the active one.
    PolicyRollback {
        /// Its generation; by default the last that differs and was not disabled.
        #[serde(default)]
        to: Option<u64>,
    },
    /// What is known of kernels.
    ProfilesShow {
        /// How many kernels; by default some.
        #[serde(default)]
        kernels: Option<usize>,
    },
    /// Forget what is known of kernels.
    ProfilesClear {},
    /// Give a high-priority client other objectives.
    ClientSet {
        /// Id of the client, as in the status.
        client: u32,
        /// What it needs from now on.
        #[serde(flatten)]
        needs: Needs,
    },
    /// Give a best-effort client another floor. An admin may exceed `admission.min_share_percent_max`.
    ClientMinShare {
        /// Id of the client, as in the status.
        client: u32,
        /// Least share of GPU time, %; 0 for none.
        percent: f64,
    },
    /// Begin an A/B test. With the policies' files, their roles prefixed `a.` and `b.`.
    AbStart {
        /// Arm A; by default the active policy, with its own configuration.
        #[serde(default)]
        a: Option<Source>,
        b: Source,
        /// What is compared, and how.
        plan: tally_ab::Plan,
        /// A need not be the active policy: it replaces that.
        #[serde(default)]
        replace_active: bool,
    },
    /// How far the A/B test is.
    AbStatus {},
    /// What the A/B test that runs, or ran last, found.
    AbReport {},
    AbStop {},
    /// End the core in an orderly way.
    Stop {
        /// Leave a private MPS daemon to the next core.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        keep_mps: bool,
    },
}

/// A request about the decision log and the shadow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case", deny_unknown_fields)]
pub enum RecordRequest {
    /// Record a decision log. With the file `out`, if it has a name.
    LogRecord {
        /// What the file is called; by default a new one in the core's folder of logs.
        #[serde(default)]
        path: Option<PathBuf>,
        /// End after so long, ms.
        #[serde(default)]
        for_ms: Option<u64>,
        /// End at this size, bytes; at most `log.bytes_max`.
        #[serde(default)]
        bytes_max: Option<u64>,
        /// Whether to record completions that the policy does not ask for, too.
        #[serde(default)]
        completions: bool,
    },
    LogStop {},
    /// How the decision log does.
    LogStatus {},
    /// Compare a policy with the active one. With its files.
    ShadowStart {
        /// What the component is called.
        path: PathBuf,
        /// What its configuration is called, if it has one.
        #[serde(default)]
        config: Option<PathBuf>,
        /// Its share of a CPU, percent; by default some.
        #[serde(default)]
        cpu_percent: Option<f64>,
    },
    ShadowStop {},
    ShadowStatus {},
}

impl RecordRequest {
    /// What it would do, if it changes anything.
    pub fn changes(&self) -> Option<&'static str> {
        match self {
            RecordRequest::LogRecord { .. } => Some("record a decision log"),
            RecordRequest::LogStop {} => Some("end a decision log"),
            RecordRequest::ShadowStart { .. } => Some("start a shadow"),
            RecordRequest::ShadowStop {} => Some("end a shadow"),
            RecordRequest::LogStatus {} | RecordRequest::ShadowStatus {} => None,
        }
    }
}

/// What went wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// Not a request of this protocol.
    BadRequest,
    /// The peer's user may not do this.
    Denied,
    /// The policy could not be loaded; the old one stays active.
    PolicyRefused,
    /// Refused while an A/B test runs, because none runs, or because another request came before.
    Conflict,
    /// The core cannot answer now.
    Unavailable,
    /// A code that only a newer core knows.
    #[serde(other)]
    Unknown,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub code: Code,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    Ok(T),
    Error(Refusal),
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json, to_value};

    #[test]
    fn requests_are_what_they_were_when_they_arrive() {
        let b = Source { file: "/b.wasm".into(), config_file: None };
        let plan = tally_ab::Plan::of(tally_ab::Metric::HpP99);
        for request in [
            Request::Status { kernels: Some(3) },
            Request::PolicyLoad { path: "/p.wasm".into(), config: None },
            Request::AbStart { a: None, b, plan, replace_active: true },
            Request::Stop { keep_mps: true },
        ] {
            assert_eq!(from_value::<Request>(to_value(&request).unwrap()).unwrap(), request);
        }
        let shadow = RecordRequest::ShadowStart {
            path: "/s".into(),
            config: Some("/c".into()),
            cpu_percent: Some(5.0),
        };
        assert_eq!(from_value::<RecordRequest>(to_value(&shadow).unwrap()).unwrap(), shadow);
        let stop = Request::Stop { keep_mps: false };
        assert_eq!(to_value(&stop).unwrap(), json!({"cmd": "stop"}), "an older core stops, too");
        assert_eq!(from_value::<Request>(json!({"cmd": "stop"})).unwrap(), stop);
        assert!(from_value::<Request>(json!({"cmd": "stop", "now": 1})).is_err());
    }

    #[test]
    fn an_answer_is_one_of_two() {
        assert_eq!(to_value(Answer::Ok(5)).unwrap(), json!({"ok": 5}));
        let refused = json!({"error": {"code": "denied", "message": "no"}});
        let answer: Answer<u8> = from_value(refused.clone()).unwrap();
        assert_eq!(to_value(&answer).unwrap(), refused);
        let newer = json!({"error": {"code": "tired", "message": "no", "until": 5}});
        let Answer::Error(why) = from_value::<Answer<u8>>(newer).unwrap() else { panic!("ok") };
        assert_eq!(why.code, Code::Unknown);
    }
}
