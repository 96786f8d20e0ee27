//! Admin requests about the decision log and the shadow.
//!
//! | request | answer in `ok` | who |
//! | --- | --- | --- |
//! | `{"cmd":"log_record"}`, with `"path":NAME` and the file `out`, `"for_ms":N`, `"bytes_max":N`, `"completions":B` | [`LogStatus`] | admins |
//! | `{"cmd":"log_stop"}` | likewise | admins |
//! | `{"cmd":"log_status"}` | likewise | whoever may open the socket |
//! | `{"cmd":"shadow_start","path":NAME}` and files, with `"config":NAME`, `"cpu_percent":N` | [`ShadowStatus`](tally_admin::ShadowStatus) | admins |
//! | `{"cmd":"shadow_stop"}` | likewise | admins |
//! | `{"cmd":"shadow_status"}` | likewise, or `null` | whoever may open the socket |

use super::file::Request;
use super::{RecordError, file};
use crate::control::Plane;
use crate::control::answer::{Code, error};
use crate::files::{Descriptors, Opened};
use crate::helpers::PeerFd;
use crate::policy_slot::Source;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use tally_admin::{LogStatus, RecordRequest};

/// A shadow's share of a CPU unless another is asked for.
const CPU_PERCENT: f64 = 5.0;

fn answered<T: Serialize>(outcome: Result<T, RecordError>) -> Value {
    match outcome {
        Ok(status) => json!({"ok": status}),
        Err(e @ RecordError::Policy(_)) => error(Code::PolicyRefused, e),
        Err(
            e @ (RecordError::Request(_) | RecordError::NotRunning(_) | RecordError::Running(_)),
        ) => error(Code::BadRequest, e),
        Err(e @ (RecordError::Ask(_) | RecordError::Slow(_))) => error(Code::Unavailable, e),
    }
}

/// Answer one. Whether the peer may was checked.
pub async fn answer(plane: &Plane, request: RecordRequest, mut files: Descriptors) -> Value {
    let (recordings, config, control) = (&plane.recordings, &plane.config, &plane.control);
    let taken = match &request {
        RecordRequest::LogRecord { path, .. } => match (path, files.take("out")) {
            (Some(name), Some(fd)) => Ok(Taken::Out(fd, name.clone())),
            (None, None) => Ok(Taken::Nothing),
            _ => Err(
                "`path` and the file `out` go together: the core opens no file that it is told of"
                    .to_owned(),
            ),
        },
        RecordRequest::ShadowStart { path, config: config_file, .. } => {
            let source = Source { file: path.clone(), config_file: config_file.clone() };
            files.policy("", &source).map(|opened| Taken::Policy(source, opened))
        }
        _ => Ok(Taken::Nothing),
    };
    let taken = match taken.and_then(|taken| files.end().map(|()| taken)) {
        Ok(taken) => taken,
        Err(why) => return error(Code::BadRequest, why),
    };
    match (request, taken) {
        (RecordRequest::LogRecord { for_ms, bytes_max, completions, .. }, taken) => {
            let request = Request { for_ms, bytes_max, completions };
            let out = match (file::check(&request), taken) {
                (Err(why), _) => Err(why),
                (Ok(()), Taken::Out(fd, name)) => file::opened(fd, &name).await.map(Some),
                (Ok(()), _) => Ok(None),
            };
            match out {
                Ok(out) => answered(recordings.record(config, control, request, out).await),
                Err(why) => error(Code::BadRequest, why),
            }
        }
        (RecordRequest::ShadowStart { cpu_percent, .. }, Taken::Policy(source, opened)) => {
            let percent = cpu_percent.unwrap_or(CPU_PERCENT);
            if !(0.1..=100.0).contains(&percent) {
                let why = format!("cpu_percent is {percent}: expected 0.1 to 100");
                return error(Code::BadRequest, why);
            }
            match plane.read_policy(source, opened).await {
                Ok(files) => answered(recordings.shadow(config, control, files, percent).await),
                Err(why) => error(Code::PolicyRefused, why),
            }
        }
        (RecordRequest::LogStop {}, _) => answered(recordings.stop(control).await),
        (RecordRequest::LogStatus {}, _) => answered(Ok::<LogStatus, _>(recordings.status())),
        (RecordRequest::ShadowStop {}, _) => answered(recordings.stop_shadow(control).await),
        (RecordRequest::ShadowStatus {} | RecordRequest::ShadowStart { .. }, _) => {
            answered(Ok(recordings.shadow_status()))
        }
    }
}

/// The files of a request.
enum Taken {
    Nothing,
    Out(PeerFd, PathBuf),
    Policy(Source, Opened),
}
