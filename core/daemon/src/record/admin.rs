//! Admin requests about the decision log and the shadow.
//!
//! | request | answer in `ok` | who |
//! | --- | --- | --- |
//! | `{"cmd":"log_record"}`, with `"path":P`, `"for_ms":N`, `"bytes_max":N`, `"completions":B` | [`LogStatus`](super::file::LogStatus) | admins; a path outside the folder of logs: the core's user and root |
//! | `{"cmd":"log_stop"}` | likewise | admins |
//! | `{"cmd":"log_status"}` | likewise | whoever may open the socket |
//! | `{"cmd":"shadow_start","path":P}`, with `"config":C`, `"cpu_percent":N` | [`ShadowStatus`](super::shadow::ShadowStatus) | admins |
//! | `{"cmd":"shadow_stop"}` | likewise | admins |
//! | `{"cmd":"shadow_status"}` | likewise, or `null` | whoever may open the socket |

use super::file::Request;
use super::{RecordError, file};
use crate::control::Plane;
use crate::control::admin::{Code, error};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;

/// A shadow's share of a CPU unless another is asked for.
const CPU_PERCENT: f64 = 5.0;

/// See the module's documentation.
#[derive(Debug, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs, reason = "the table above")]
pub enum RecordRequest {
    LogRecord {
        #[serde(default)]
        path: Option<PathBuf>,
        #[serde(default)]
        for_ms: Option<u64>,
        #[serde(default)]
        bytes_max: Option<u64>,
        #[serde(default)]
        completions: bool,
    },
    LogStop {},
    LogStatus {},
    ShadowStart {
        path: PathBuf,
        #[serde(default)]
        config: Option<PathBuf>,
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

fn answered<T: Serialize>(outcome: Result<T, RecordError>) -> Value {
    match outcome {
        Ok(status) => json!({"ok": status}),
        Err(e @ RecordError::Policy(_)) => error(Code::PolicyRefused, e),
        Err(
            e @ (RecordError::Request(_) | RecordError::NotRunning(_) | RecordError::Running(_)),
        ) => error(Code::BadRequest, e),
        Err(e @ RecordError::Ask(_)) => error(Code::Unavailable, e),
    }
}

/// Answer one. Whether `uid` may was checked, but for where a file goes.
pub async fn answer(plane: &Plane, request: RecordRequest, uid: u32) -> Value {
    let (recordings, config, control) = (&plane.recordings, &plane.config, &plane.control);
    match request {
        RecordRequest::LogRecord { path, for_ms, bytes_max, completions } => {
            let request = Request { path, for_ms, bytes_max, completions };
            let anywhere = uid == 0 || uid == rustix::process::geteuid().as_raw();
            answered(recordings.record(config, control, request, anywhere).await)
        }
        RecordRequest::LogStop {} => answered(recordings.stop(control).await),
        RecordRequest::LogStatus {} => answered(Ok::<file::LogStatus, _>(recordings.status())),
        RecordRequest::ShadowStart { path, config: file, cpu_percent } => {
            let percent = cpu_percent.unwrap_or(CPU_PERCENT);
            if !(0.1..=100.0).contains(&percent) {
                let why = format!("cpu_percent is {percent}: expected 0.1 to 100");
                return error(Code::BadRequest, why);
            }
            if let Some(p) =
                [Some(&path), file.as_ref()].into_iter().flatten().find(|p| !p.is_absolute())
            {
                let why = format!("{} is relative: give a path from the root", p.display());
                return error(Code::BadRequest, why);
            }
            answered(recordings.shadow(config, control, path, file, percent).await)
        }
        RecordRequest::ShadowStop {} => answered(recordings.stop_shadow(control).await),
        RecordRequest::ShadowStatus {} => answered(Ok(recordings.shadow_status())),
    }
}
