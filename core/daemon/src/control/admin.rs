//! Admin requests: one JSON object a line, one answer a line. Files come with a request as descriptors, named by its
//! `"files"` ([`tally_ipc::admin`]); the paths in it are what people call them.
//!
//! | request | answer in `ok` | who |
//! | --- | --- | --- |
//! | `{"cmd":"status"}`, with `"kernels":N` | [`Status`](tally_admin::Status) | whoever may open the socket |
//! | `{"cmd":"policy_show"}` | [`PolicyReport`](tally_admin::PolicyReport) | likewise |
//! | `{"cmd":"policy_load","path":NAME,"config":NAME}` and files | [`Active`](tally_admin::Active) | admins |
//! | `{"cmd":"policy_history"}` | [`PolicyRecord`](tally_admin::PolicyRecord) of each policy that was active, oldest first | whoever may open the socket |
//! | `{"cmd":"policy_rollback"}`, with `"to":GENERATION` | likewise | admins |
//! | `{"cmd":"profiles_show"}`, with `"kernels":N` | [`Profiles`] | whoever may open the socket |
//! | `{"cmd":"profiles_clear"}` | [`Cleared`](tally_admin::Cleared) | admins |
//! | `{"cmd":"ab_start","b":SOURCE,"plan":`[`Plan`](tally_ab::Plan)`}`: B against the active policy; with `"a":SOURCE` A must be that, unless `"replace_active":true` | [`AbStatus`](tally_admin::ab::AbStatus) | admins |
//! | `{"cmd":"ab_status"}` | likewise, or `null` | whoever may open the socket |
//! | `{"cmd":"ab_report"}` | [`Report`](tally_ab::Report) of the A/B test that runs, or ran last | likewise |
//! | `{"cmd":"ab_stop"}` | the report | admins |
//! | `{"cmd":"client_set","client":ID,"objective":`[`Objective`](tally_admin::Objective)`}`, or `null` | the objective | admins |
//! | `{"cmd":"client_min_share","client":ID,"percent":N}` | what it is granted, % | admins |
//! | `log_...`, `shadow_...` | see [`crate::record::admin`] | |
//! | `{"cmd":"stop"}` | `"draining"` | admins |
//!
//! An error is `{"error":{"code":C,"message":M}}`; codes are [`Code`]'s. The types are those of `tally-admin`, which
//! `tallyctl` uses as well.

use super::Plane;
use super::answer::{Code, error};
use super::connection::Connection;
use super::journal::Kind;
use crate::dispatch::control::Control;
use crate::files::{Descriptors, READ_MAX};
use crate::helpers::{HelperError, PeerFd};
use crate::peer::Peer;
use crate::policy_slot::{SlotError, Source};
use rustix::fd::AsFd;
use serde_json::{Value, json};
use std::rc::Rc;
use std::time::Duration;
use tally_admin::{Profiles, RecordRequest, Request};
use tally_contract::limits::{NON_ADMIN_PAUSE_MS, REQUEST_BYTES_MAX};
use tally_contract::min_share::min_share_permille;
use tally_contract::objective::{Objective, tpot_ns};
use tally_decision_log::text::make_printable;
use tally_ipc::admin;
use tokio::io::Interest;

/// A connection without a request for so long is closed.
const IDLE_MAX: Duration = Duration::from_secs(300);
/// A peer that does not read its answer is given up on.
const WRITE_MAX: Duration = Duration::from_secs(5);

fn slot_error(why: &SlotError) -> Value {
    match why {
        SlotError::Load(_) | SlotError::NoWayBack(_) => error(Code::PolicyRefused, why),
        SlotError::Experiment | SlotError::Superseded { .. } => error(Code::Conflict, why),
        SlotError::Ask(_) => error(Code::Unavailable, why),
    }
}

/// Serve a connection until it ends.
pub(super) async fn serve(plane: Rc<Plane>, stream: &Connection, peer: Peer) {
    let is_admin = plane.may_change(&peer);
    let mut requests = Requests::default();
    loop {
        let opened = stream.open();
        let request = match tokio::time::timeout(IDLE_MAX, next(stream, &mut requests)).await {
            Ok(Ok(Some(request))) => request,
            Ok(Err(why)) => {
                if plane.journal.may(Kind::Descriptors) {
                    tracing::warn!(uid = peer.uid, pid = peer.pid, "a request was refused: {why}");
                }
                write(stream, &error(Code::Unavailable, why)).await;
                return;
            }
            Ok(Ok(None)) | Err(_) => return,
        };
        let (answer, is_last) = match request {
            Incoming::TooLong => {
                let why = format!("a request is at most {REQUEST_BYTES_MAX} bytes");
                (error(Code::BadRequest, why), true)
            }
            Incoming::Line(line, fds) if is_admin => {
                (answer(&plane, &line, fds, &peer).await, false)
            }
            Incoming::Line(line, fds) => {
                // All of those that are no admins take turns, and not too often: each answer costs
                // the dispatch thread something, and an admin waits for one of them at most.
                let _turn = plane.non_admins_turn.lock().await;
                tokio::time::sleep(Duration::from_millis(NON_ADMIN_PAUSE_MS)).await;
                (answer(&plane, &line, fds, &peer).await, false)
            }
        };
        let answer = match opened {
            // The files of the request were not taken.
            Err(why) if answer["error"]["code"] == json!(Code::BadRequest) => {
                error(Code::Unavailable, why)
            }
            _ => answer,
        };
        if !write(stream, &answer).await || is_last {
            return;
        }
    }
}

type Incoming = admin::Incoming<PeerFd>;
pub(super) type Requests = admin::Requests<PeerFd>;

/// The next request; `None` at the end of the connection.
///
/// # Errors
/// If its descriptors are not taken.
pub(super) async fn next(
    stream: &Connection,
    requests: &mut Requests,
) -> Result<Option<Incoming>, HelperError> {
    loop {
        if let Some(request) = requests.take() {
            return Ok(Some(request));
        }
        let peek = || requests.peek(stream.as_fd());
        let Ok(peeked) = stream.async_io(Interest::READABLE, peek).await else { return Ok(None) };
        let helper = stream.helper().clone();
        let received = if peeked.has_descriptors {
            let (socket, mut taking) = (stream.shared(), std::mem::take(requests));
            let work = move || {
                let received = taking.receive(socket.as_fd(), peeked, |fd| helper.keep(fd));
                (taking, received)
            };
            let (back, received) = stream.helper().ask(READ_MAX, work).await?;
            *requests = back;
            received
        } else {
            requests.receive(stream.as_fd(), peeked, |fd| helper.keep(fd))
        };
        if !received.unwrap_or(false) {
            return Ok(None);
        }
    }
}

/// Whether the peer took it.
pub(super) async fn write(stream: &Connection, answer: &Value) -> bool {
    let mut text = answer.to_string().into_bytes();
    text.push(b'\n');
    let mut rest = &text[..];
    let sending = async {
        while !rest.is_empty() {
            if stream.writable().await.is_err() {
                return false;
            }
            match stream.try_write(rest) {
                Ok(sent) => rest = &rest[sent..],
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        true
    };
    tokio::time::timeout(WRITE_MAX, sending).await.unwrap_or(false)
}

/// A request without its `files`, and those.
fn taken_apart(line: &[u8], fds: Vec<PeerFd>) -> Result<(Value, Descriptors), String> {
    let not_a_request = |e: serde_json::Error| format!("not a request: {e}");
    let mut request: Value = serde_json::from_slice(line).map_err(not_a_request)?;
    // Its texts are shown in the status, in reports and in the core's log, and name no file that the core opens.
    make_printable(&mut request);
    let named = request.as_object_mut().and_then(|fields| fields.remove("files"));
    let roles: Vec<String> = match named {
        Some(named) => serde_json::from_value(named).map_err(not_a_request)?,
        None => Vec::new(),
    };
    Ok((request, Descriptors::new(roles, fds)?))
}

/// Whether a request is one of [`RecordRequest`].
fn is_about_recording(request: &Value) -> bool {
    let name = request["cmd"].as_str().unwrap_or_default();
    name.starts_with("log_") || name.starts_with("shadow_")
}

pub(super) async fn answer(plane: &Rc<Plane>, line: &[u8], fds: Vec<PeerFd>, peer: &Peer) -> Value {
    let (uid, may_change) = (peer.uid, plane.may_change(peer));
    let denied = |what: &str| {
        let message = match peer.foreign {
            Some(foreign) if plane.rules.may_change(uid) => {
                format!("user {uid} (process {}) may not {what} from there: {foreign}", peer.pid)
            }
            _ => format!(
                "user {uid} may not {what}: add it to admin.uids in the core's configuration, or ask \
                 as the core's user or root"
            ),
        };
        if plane.journal.may(Kind::Admin) {
            tracing::warn!(uid, pid = peer.pid, "denied: {message}");
        }
        error(Code::Denied, message)
    };
    let bad = |why: &dyn std::fmt::Display| error(Code::BadRequest, why);
    let (request, mut files) = match taken_apart(line, fds) {
        Ok(both) => both,
        Err(why) => return bad(&why),
    };
    if is_about_recording(&request) {
        let request: RecordRequest = match serde_json::from_value(request) {
            Ok(request) => request,
            Err(e) => return bad(&format!("not a request: {e}")),
        };
        return match request.changes() {
            Some(what) if !may_change => denied(what),
            _ => crate::record::admin::answer(plane, request, files).await,
        };
    }
    let request = match serde_json::from_value(request) {
        Ok(request) => request,
        Err(e) => return bad(&format!("not a request: {e}")),
    };
    let opened = match &request {
        Request::PolicyLoad { path, config } if may_change => {
            let source = Source { file: path.clone(), config_file: config.clone() };
            files.policy("", &source).map(|opened| vec![(source, opened)])
        }
        Request::AbStart { a, b, .. } if may_change => {
            let mut take =
                |prefix, source: &Source| Ok((source.clone(), files.policy(prefix, source)?));
            let a = a.as_ref().map(|a| take("a.", a)).transpose();
            a.and_then(|a| Ok(a.into_iter().chain([take("b.", b)?]).collect()))
        }
        Request::PolicyLoad { .. } | Request::AbStart { .. } => {
            drop(std::mem::take(&mut files));
            Ok(Vec::new())
        }
        _ => Ok(Vec::new()),
    };
    let mut opened = match opened.and_then(|opened| files.end().map(|()| opened)) {
        Ok(opened) => opened.into_iter(),
        Err(why) => return bad(&why),
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
        Request::PolicyLoad { .. } if !may_change => denied("load a policy"),
        Request::PolicyLoad { .. } => {
            let Some((source, opened)) = opened.next() else { return bad(&"no file") };
            let files = match plane.read_policy(source.clone(), opened).await {
                Ok(files) => files,
                Err(why) => return slot_error(&plane.policy.refused(source, why)),
            };
            match plane.load_policy(files).await {
                Ok(active) => json!({"ok": active}),
                Err(e) => slot_error(&e),
            }
        }
        Request::PolicyHistory {} => json!({"ok": plane.policy.history()}),
        Request::PolicyRollback { .. } if !may_change => denied("roll the policy back"),
        Request::PolicyRollback { to } => match plane.rollback_policy(to).await {
            Ok(active) => json!({"ok": active}),
            Err(e) => slot_error(&e),
        },
        Request::AbStart { .. } | Request::AbStop {} if !may_change => {
            denied("start or stop an A/B test")
        }
        Request::AbStart { a, b, plan, replace_active } => {
            let a = a.map_or_else(|| "the active policy".into(), |a| a.file.display().to_string());
            tracing::info!(uid, a, b = %b.file.display(), replace_active, "asked for an A/B test");
            let Some(b) = opened.next_back() else { return bad(&"no files") };
            let arms = crate::ab::Arms { a: opened.next(), b, replace_active };
            crate::ab::answer(crate::ab::start(plane, arms, plan).await)
        }
        Request::AbStatus {} => json!({"ok": plane.experiments.status()}),
        Request::AbReport {} => crate::ab::answer(plane.experiments.report().await),
        Request::AbStop {} => {
            tracing::info!(uid, "asked to stop the A/B test");
            crate::ab::answer(plane.experiments.stop().await)
        }
        Request::ProfilesShow { kernels } => {
            // What the next interval would bring is to be seen now.
            let known = match plane.profiles.gather(&plane.control).await {
                Ok(()) => plane.status(kernels).await,
                Err(e) => Err(e),
            };
            match known {
                Ok(s) => json!({"ok": Profiles { store: s.profiles, kernels: s.kernels }}),
                Err(e) => error(Code::Unavailable, e),
            }
        }
        Request::ProfilesClear {} if !may_change => denied("clear profiles"),
        Request::ProfilesClear {} => match plane.profiles.clear(&plane.control).await {
            Ok(cleared) => {
                tracing::info!(uid, kernels = cleared.kernels, "asked to clear profiles");
                json!({"ok": cleared})
            }
            Err(e) => error(Code::Unavailable, e),
        },
        Request::ClientSet { .. } | Request::ClientMinShare { .. } if !may_change => {
            denied("change a client")
        }
        Request::ClientSet { client, needs } => set_objectives(plane, uid, client, needs).await,
        Request::ClientMinShare { client, percent } => {
            set_min_share(plane, uid, client, percent).await
        }
        Request::Stop { .. } if !may_change => denied("stop the core"),
        Request::Stop { keep_mps } => {
            tracing::info!(uid, keep_mps, "asked to stop");
            plane.keeps_mps.set(keep_mps);
            plane.stop.notify_one();
            json!({"ok": "draining"})
        }
    }
}
/// Gives a best-effort client another floor, or none. An admin may exceed what programs may have.
async fn set_min_share(plane: &Plane, uid: u32, id: u32, percent: f64) -> Value {
    let asked = match percent {
        0.0 => 0,
        _ => match min_share_permille(&format!("{percent}%")) {
            Ok(asked) => asked,
            Err(why) => return error(Code::BadRequest, why),
        },
    };
    let set = |done| Control::SetMinShare { id, asked, allowed: None, done };
    match plane.control.ask(set).await {
        Ok(Some(granted)) => {
            tracing::info!(uid, id, asked, granted, "asked to change a client's floor, permille");
            json!({"ok": f64::from(granted) / 10.0})
        }
        Ok(None) => error(Code::BadRequest, format!("there is no best-effort client {id}")),
        Err(e) => error(Code::Unavailable, e),
    }
}

/// Gives a high-priority client other objectives, or none.
async fn set_objectives(plane: &Plane, uid: u32, id: u32, asked: tally_admin::Needs) -> Value {
    let objective = asked.objective.map(|o| Objective::new(o.slo_ms * 1e6, o.percentile));
    let tpot_ns = asked.tpot_ms.map(|ms| tpot_ns(ms * 1e6));
    let (objective, tpot_ns) = match (objective.transpose(), tpot_ns.transpose()) {
        (Ok(objective), Ok(tpot_ns)) => (objective, tpot_ns),
        (Err(why), _) | (_, Err(why)) => return error(Code::BadRequest, why),
    };
    let set = |done| Control::SetObjectives { id, objective, tpot_ns, done };
    match plane.control.ask(set).await {
        Ok(true) => {
            tracing::info!(uid, id, ?objective, ?tpot_ns, "asked to change a client's objectives");
            json!({"ok": asked})
        }
        Ok(false) => error(Code::BadRequest, format!("there is no high-priority client {id}")),
        Err(e) => error(Code::Unavailable, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_a_request_are_printable_when_it_is_taken_in() {
        let evil =
            json!({"path": "/a\u{1b}]0;x\u{7}/b\nINFO forged\u{202e}", "a": {"file": "\u{9b}1m"}});
        let (request, _) = taken_apart(evil.to_string().as_bytes(), Vec::new()).unwrap();
        assert_eq!(request, json!({"path": "/a?]0;x?/b?INFO forged?", "a": {"file": "?1m"}}));
        let roles = json!({"files": ["\u{1b}[2J"]}).to_string();
        let why = taken_apart(roles.as_bytes(), Vec::new()).unwrap_err();
        assert!(!why.contains('\u{1b}'), "{why}");
    }
}
