//! `tallyctl client`: what the core knows that a client needs.

use crate::admin::{AdminSocket, Core};
use crate::cli::ClientCommand;
use crate::error::CtlError;
use std::io::Write;
use tally_admin::{Class, ClientStatus, Identity, Needs, Objective, Request, Status};
use tally_contract::min_share::min_share_permille;
use tally_contract::objective::{SLO_PERCENTILE_DEFAULT, slo_ns, slo_percentile};

/// Value of `--slo`, ms.
///
/// # Errors
/// What it should be.
pub fn slo_ms(text: &str) -> Result<f64, String> {
    slo_ns(text).map(|ns| ns as f64 / 1e6).map_err(|why| format!("expected {}", why.expected))
}

/// Value of `--percentile`.
///
/// # Errors
/// What it should be.
pub fn percentile(text: &str) -> Result<f64, String> {
    slo_percentile(text).map_err(|why| format!("expected {}", why.expected))
}

/// Value of `--min-share`, %.
///
/// # Errors
/// What it should be.
pub fn min_share_percent(text: &str) -> Result<f64, String> {
    let percent = min_share_permille(text).map(|permille| f64::from(permille) / 10.0);
    percent.map_err(|why| format!("expected {}", why.expected))
}

/// The one client that is meant: by its id, or by its name if no other has that.
fn find<'s>(all: &'s [ClientStatus], named: &str) -> Result<&'s ClientStatus, CtlError> {
    if let Ok(id) = named.parse::<u32>()
        && let Some(client) = all.iter().find(|c| c.identity.id == id)
    {
        return Ok(client);
    }
    let mut with_name = all.iter().filter(|c| c.identity.name == named);
    match (with_name.next(), with_name.next()) {
        (Some(client), None) => Ok(client),
        (None, _) => Err(CtlError::Usage(format!(
            "no client has the id or the name {named:?}: `tallyctl status` lists them"
        ))),
        (Some(a), Some(b)) => Err(CtlError::Usage(format!(
            "clients {} and {} are both called {named:?}: give an id",
            a.identity.id, b.identity.id
        ))),
    }
}

/// Whether a client of its class can have a floor, or else an objective.
fn is_for(client: &ClientStatus, is_floor: bool) -> Result<(), CtlError> {
    let Identity { id, name, class, .. } = &client.identity;
    let why = match (class, is_floor) {
        (Class::High, true) => "high priority: only best-effort clients have floors",
        (Class::BestEffort, false) => {
            "best effort: only high-priority clients have objectives; `--min-share` gives it a floor"
        }
        _ => return Ok(()),
    };
    Err(CtlError::Usage(format!("client {id} ({name}) is {why}")))
}

pub fn run(socket: &AdminSocket, command: ClientCommand) -> Result<(), CtlError> {
    let mut core = Core::connect(socket)?;
    let ClientCommand::Set {
        client,
        slo,
        percentile,
        no_slo,
        tpot,
        no_tpot,
        min_share,
        no_min_share,
    } = command;
    let status: Status = core.get(&Request::Status { kernels: Some(0) })?;
    let client = find(&status.clients, &client)?;
    is_for(client, min_share.is_some() || no_min_share)?;
    if min_share.is_some() || no_min_share {
        let (id, percent) = (client.identity.id, min_share.unwrap_or(0.0));
        let granted: f64 = core.get(&Request::ClientMinShare { client: id, percent })?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "client {id} ({}): floor {granted} % of GPU time", client.identity.name)?;
        return Ok(());
    }
    // A time alone keeps the percentile of the objective there is.
    let before = client.service.and_then(|service| service.objective);
    let objective = slo.map(|slo_ms| Objective {
        slo_ms,
        percentile: percentile.or(before.map(|o| o.percentile)).unwrap_or(SLO_PERCENTILE_DEFAULT),
    });
    let tpot_before = client.service.and_then(|service| service.tpot).map(|tpot| tpot.tpot_ms);
    let needs = Needs {
        objective: objective.or(before.filter(|_| !no_slo)),
        tpot_ms: tpot.or(tpot_before.filter(|_| !no_tpot)),
    };
    let request = Request::ClientSet { client: client.identity.id, needs };
    let Needs { objective, tpot_ms } = core.get(&request)?;
    let mut out = std::io::stdout().lock();
    let (id, name) = (client.identity.id, &client.identity.name);
    match objective {
        Some(o) => write!(out, "client {id} ({name}): {} ms at {} %", o.slo_ms, o.percentile)?,
        None => write!(out, "client {id} ({name}): no objective for requests")?,
    }
    match tpot_ms {
        Some(ms) => writeln!(out, ", {ms} ms a token")?,
        None => writeln!(out)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_meant_by_id_or_by_a_name_of_its_own() {
        let client = |id, name: &str| ClientStatus {
            identity: Identity { id, name: name.into(), ..Identity::default() },
            ..ClientStatus::default()
        };
        let all = [client(1, "serve"), client(2, "train"), client(3, "train"), client(4, "2")];
        assert_eq!(find(&all, "2").unwrap().identity.id, 2, "an id comes first");
        assert_eq!(find(&all, "serve").unwrap().identity.id, 1);
        let why = find(&all, "train").unwrap_err().to_string();
        assert!(why.contains("clients 2 and 3 are both called \"train\""), "{why}");
        assert!(find(&all, "7").is_err());
    }

    #[test]
    fn a_client_of_the_wrong_class_is_named_with_its_class() {
        let client = |class| ClientStatus {
            identity: Identity { id: 2, name: "api".into(), class, ..Identity::default() },
            ..ClientStatus::default()
        };
        assert!(is_for(&client(Class::High), false).is_ok());
        assert!(is_for(&client(Class::BestEffort), true).is_ok());
        let why = is_for(&client(Class::High), true).unwrap_err().to_string();
        assert!(why.contains("client 2 (api) is high priority: only best-effort"), "{why}");
        let why = is_for(&client(Class::BestEffort), false).unwrap_err().to_string();
        assert!(why.contains("client 2 (api) is best effort: only high-priority"), "{why}");
    }

    #[test]
    fn times_have_units() {
        assert_eq!(slo_ms("1.5s"), Ok(1_500.0));
        assert_eq!(
            slo_ms("20").unwrap_err(),
            "expected a time from 10us to 600s with its unit, such as 20ms"
        );
        assert!(percentile("100").is_err());
        assert_eq!(min_share_percent("12.5%"), Ok(12.5));
        assert!(min_share_percent("20").unwrap_err().ends_with("such as 20%"));
    }
}
