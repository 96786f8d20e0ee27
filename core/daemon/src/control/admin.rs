//! Admin requests: one JSON object a line, one answer a line.
//!
//! | request | answer in `ok` | who |
//! | --- | --- | --- |
//! | `{"cmd":"status"}`, with `"kernels":N` | [`Status`](crate::status::Status) | whoever may open the socket |
//! | `{"cmd":"policy_show"}` | [`PolicyReport`](crate::status::PolicyReport) | likewise |
//! | `{"cmd":"policy_load","path":P,"config":C}` | the policy in charge | admins |
//! | `{"cmd":"policy_history"}` | [`Record`](crate::policy_slot::history::Record) of each policy that was in charge, oldest first | whoever may open the socket |
//! | `{"cmd":"policy_rollback"}`, with `"to":GENERATION` | the policy in charge | admins |
//! | `{"cmd":"profiles_show"}`, with `"kernels":N` | `store`: [`ProfilesStatus`](crate::profile_store::ProfilesStatus); `kernels`: [`KernelStatus`](crate::status::KernelStatus) of each | whoever may open the socket |
//! | `{"cmd":"profiles_clear"}` | [`Cleared`](crate::profile_store::Cleared) | admins |
//! | `{"cmd":"ab_start","a":SOURCE,"b":SOURCE,"plan":`[`Plan`](tally_ab::Plan)`}` | [`ExperimentStatus`](crate::ab::ExperimentStatus) | admins |
//! | `{"cmd":"ab_status"}` | likewise, or `null` | whoever may open the socket |
//! | `{"cmd":"ab_report"}` | [`Report`](tally_ab::Report) of the A/B test that runs, or ran last | likewise |
//! | `{"cmd":"ab_stop"}` | the report | admins |
//! | `log_...`, `shadow_...` | see [`crate::record::admin`] | |
//! | `{"cmd":"stop"}` | `"draining"` | admins |
//!
//! An error is `{"error":{"code":C,"message":M}}`; codes are [`Code`]'s.

use super::Plane;
use crate::policy_slot::{SlotError, Source, Trigger};
use crate::record::admin::RecordRequest;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// Longest request.
pub const LINE_BYTES_MAX: u64 = 16 * 1024;
/// A connection without a request for so long is closed.
const IDLE_MAX: Duration = Duration::from_secs(300);
/// A peer that does not read its answer is given up on.
const WRITE_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Status {
        #[serde(default)]
        kernels: Option<usize>,
    },
    PolicyShow {},
    PolicyLoad {
        path: PathBuf,
        #[serde(default)]
        config: Option<PathBuf>,
    },
    PolicyHistory {},
    PolicyRollback {
        #[serde(default)]
        to: Option<u64>,
    },
    ProfilesShow {
        #[serde(default)]
        kernels: Option<usize>,
    },
    ProfilesClear {},
    AbStart {
        a: Source,
        b: Source,
        plan: tally_ab::Plan,
    },
    AbStatus {},
    AbReport {},
    AbStop {},
    Stop {},
}

/// What went wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// Not a request of this protocol.
    BadRequest,
    /// The peer's user may not do this.
    Denied,
    /// The policy could not be loaded; the old one stays in charge.
    PolicyRefused,
    /// Not while an A/B test runs, or none runs; or another request came before.
    Conflict,
    /// The core cannot answer now.
    Unavailable,
}

pub(crate) fn error(code: Code, message: impl std::fmt::Display) -> Value {
    json!({"error": {"code": code, "message": message.to_string()}})
}

fn slot_error(why: &SlotError) -> Value {
    match why {
        SlotError::Load(_) | SlotError::NoWayBack(_) => error(Code::PolicyRefused, why),
        SlotError::Experiment | SlotError::Superseded { .. } => error(Code::Conflict, why),
        SlotError::Ask(_) => error(Code::Unavailable, why),
    }
}

/// Serve a connection until it ends.
pub(super) async fn serve(plane: Rc<Plane>, stream: UnixStream, uid: u32) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut bounded = (&mut read).take(LINE_BYTES_MAX + 1);
        let got = tokio::time::timeout(IDLE_MAX, bounded.read_until(b'\n', &mut line)).await;
        let too_long = line.len() as u64 > LINE_BYTES_MAX;
        if !matches!(got, Ok(Ok(n)) if n > 0) {
            return;
        }
        let answer = if too_long {
            error(Code::BadRequest, format!("a request is at most {LINE_BYTES_MAX} bytes"))
        } else {
            answer(&plane, &line, uid).await
        };
        let mut text = answer.to_string();
        text.push('\n');
        let sent = tokio::time::timeout(WRITE_MAX, write.write_all(text.as_bytes())).await;
        if too_long || !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

/// Whether a request is one of [`RecordRequest`].
fn about_recording(line: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Named {
        cmd: String,
    }
    let named = serde_json::from_slice::<Named>(line);
    named.is_ok_and(|n| n.cmd.starts_with("log_") || n.cmd.starts_with("shadow_"))
}

async fn answer(plane: &Rc<Plane>, line: &[u8], uid: u32) -> Value {
    let denied = |what: &str| {
        let message = format!(
            "user {uid} may not {what}: add it to admin.uids in the core's configuration, or ask \
             as the core's user or root"
        );
        error(Code::Denied, message)
    };
    if about_recording(line) {
        let request: RecordRequest = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(e) => return error(Code::BadRequest, format!("not a request: {e}")),
        };
        return match request.changes() {
            Some(what) if !plane.rules.may_change(uid) => denied(what),
            _ => crate::record::admin::answer(plane, request, uid).await,
        };
    }
    let request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(e) => return error(Code::BadRequest, format!("not a request: {e}")),
    };
    match request {
        Request::Status { kernels } => match plane.status(kernels).await {
            Ok(status) => json!({"ok": status}),
            Err(e) => error(Code::Unavailable, e),
        },
        Request::PolicyShow {} => match plane.status(Some(0)).await {
            Ok(status) => json!({"ok": status.policy}),
            Err(e) => error(Code::Unavailable, e),
        },
        Request::PolicyLoad { .. } if !plane.rules.may_change(uid) => denied("load a policy"),
        Request::PolicyLoad { path, config } => {
            let relative = [Some(&path), config.as_ref()];
            if let Some(p) = relative.into_iter().flatten().find(|p| !p.is_absolute()) {
                let message = format!("{} is relative: give a path from the root", p.display());
                return error(Code::BadRequest, message);
            }
            let source = Source { file: path, config_file: config };
            match plane.load_policy(source, Trigger::Asked).await {
                Ok(in_charge) => json!({"ok": in_charge}),
                Err(e) => slot_error(&e),
            }
        }
        Request::PolicyHistory {} => json!({"ok": plane.policy.history()}),
        Request::PolicyRollback { .. } if !plane.rules.may_change(uid) => {
            denied("roll the policy back")
        }
        Request::PolicyRollback { to } => match plane.rollback_policy(to).await {
            Ok(in_charge) => json!({"ok": in_charge}),
            Err(e) => slot_error(&e),
        },
        Request::AbStart { .. } | Request::AbStop {} if !plane.rules.may_change(uid) => {
            denied("start or stop an A/B test")
        }
        Request::AbStart { a, b, plan } => {
            tracing::info!(uid, a = %a.file.display(), b = %b.file.display(), "asked for an A/B test");
            crate::ab::answer(crate::ab::start(plane, [a, b], plan).await)
        }
        Request::AbStatus {} => json!({"ok": plane.lab.status()}),
        Request::AbReport {} => crate::ab::answer(plane.lab.report().await),
        Request::AbStop {} => {
            tracing::info!(uid, "asked to stop the A/B test");
            crate::ab::answer(plane.lab.stop().await)
        }
        Request::ProfilesShow { kernels } => {
            // What the next interval would bring is to be seen now.
            let known = match plane.profiles.gather(&plane.control).await {
                Ok(()) => plane.status(kernels).await,
                Err(e) => Err(e),
            };
            match known {
                Ok(s) => json!({"ok": {"store": s.profiles, "kernels": s.kernels}}),
                Err(e) => error(Code::Unavailable, e),
            }
        }
        Request::ProfilesClear {} if !plane.rules.may_change(uid) => denied("clear profiles"),
        Request::ProfilesClear {} => match plane.profiles.clear(&plane.control).await {
            Ok(cleared) => {
                tracing::info!(uid, kernels = cleared.kernels, "asked to clear profiles");
                json!({"ok": cleared})
            }
            Err(e) => error(Code::Unavailable, e),
        },
        Request::Stop {} if !plane.rules.may_change(uid) => denied("stop the core"),
        Request::Stop {} => {
            tracing::info!(uid, "asked to stop");
            plane.stop.notify_one();
            json!({"ok": "draining"})
        }
    }
}
