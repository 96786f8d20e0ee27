//! The programs of `tallyctl sim`: values of `--hp` and of `--be`, which are traces with options after the last commas.

use super::{SimArgs, positive};
use crate::error::CtlError;
use std::path::{Path, PathBuf};
use tally_contract::limits::WEIGHT_MAX;
use tally_contract::min_share::min_share_permille;
use tally_contract::objective::Objective;
use tally_simulator::decode::{Decode, Requests};
use tally_simulator::{Arrivals, Service, Trace};

pub const LOAD_MAX: f64 = 100.0;

/// A value of `--be`.
#[derive(Clone, Debug)]
pub struct BestEffort {
    pub trace: String,
    pub weight: u32,
    pub min_share_permille: u32,
}

/// A trace, and its weight and floor after the last commas: a file's name may have commas.
pub fn best_effort(text: &str) -> Result<BestEffort, String> {
    let (mut trace, mut weight, mut floor) = (text, None, None);
    while let Some((before, option)) = trace.rsplit_once(',') {
        match option.split_once('=') {
            Some(("weight", n)) if weight.is_none() => {
                let number = n.parse().ok().filter(|n| (1..=WEIGHT_MAX).contains(n));
                let why = || format!("weight={n}: expected a whole number from 1 to {WEIGHT_MAX}");
                weight = Some(number.ok_or_else(why)?);
            }
            Some(("min_share", share)) if floor.is_none() => {
                let permille = min_share_permille(share);
                floor = Some(
                    permille.map_err(|e| format!("min_share={share}: expected {}", e.expected))?,
                );
            }
            _ => break,
        }
        trace = before;
    }
    Ok(BestEffort {
        trace: trace.into(),
        weight: weight.unwrap_or(1),
        min_share_permille: floor.unwrap_or(0),
    })
}

/// A value of `--hp`: what is absent is as the options for all services say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HighPriority {
    pub trace: String,
    pub slo_ms: Option<f64>,
    pub tpot_ms: Option<f64>,
    pub load: Option<f64>,
    pub arrivals: Option<PathBuf>,
    pub eager: bool,
    /// It decodes: requests with their tokens.
    pub requests: Option<PathBuf>,
    /// They are all there from the start.
    pub backlog: bool,
    /// What a chunk of a prefill launches.
    pub prefill: Option<String>,
}

/// A load: `0.5`, or `50%`.
pub fn load(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let load = match text.strip_suffix('%') {
        Some(percent) => number(percent).map(|percent| percent / 100.0),
        None => number(text),
    };
    let load = load.filter(|load| *load > 0.0 && *load <= LOAD_MAX);
    load.ok_or_else(|| format!("expected more than 0 and at most {LOAD_MAX}, such as 0.5 or 50%"))
}

/// A trace, and the service's own options after the last commas.
pub fn high_priority(text: &str) -> Result<HighPriority, String> {
    let mut one = HighPriority { trace: text.into(), ..HighPriority::default() };
    while let Some((before, option)) = one.trace.rsplit_once(',') {
        let wrong = |why| format!("{option}: {why}");
        match option.split_once('=') {
            Some(("slo", time)) if one.slo_ms.is_none() => {
                one.slo_ms = Some(crate::client::slo_ms(time).map_err(wrong)?);
            }
            Some(("tpot", time)) if one.tpot_ms.is_none() => {
                one.tpot_ms = Some(crate::client::slo_ms(time).map_err(wrong)?);
            }
            Some(("load", share)) if one.load.is_none() => {
                one.load = Some(load(share).map_err(wrong)?);
            }
            Some(("arrivals" | "requests" | "prefill", "")) => {
                return Err(wrong("expected the name of a file".into()));
            }
            Some(("arrivals", file)) if one.arrivals.is_none() => one.arrivals = Some(file.into()),
            Some(("requests", file)) if one.requests.is_none() => one.requests = Some(file.into()),
            Some(("prefill", name)) if one.prefill.is_none() => one.prefill = Some(name.into()),
            None if option == "eager" && !one.eager => one.eager = true,
            None if option == "backlog" && !one.backlog => one.backlog = true,
            _ => break,
        }
        one.trace = before.into();
    }
    let decodes = one.requests.is_some();
    for (given, pair) in [
        (one.slo_ms.is_some() && one.tpot_ms.is_some(), "slo and tpot"),
        (one.load.is_some() && one.arrivals.is_some(), "load and arrivals"),
        (decodes && one.slo_ms.is_some(), "requests and slo"),
        (decodes && one.load.is_some(), "requests and load"),
        (decodes && one.arrivals.is_some(), "requests and arrivals"),
        (decodes && one.eager, "requests and eager"),
    ] {
        if given {
            return Err(format!("{pair} exclude each other: leave one of them out"));
        }
    }
    if !decodes && (one.backlog || one.prefill.is_some()) {
        return Err(
            "backlog and prefill are for services with requests: give it requests=FILE".into()
        );
    }
    Ok(one)
}

/// What a service needs of its requests.
#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    Slo(Objective),
    Tpot(u64),
}

/// A service with its trace and arrivals.
pub struct Served {
    pub trace: Trace,
    /// What its requests come by, in words.
    pub traffic: String,
    arrivals: Arrivals,
    needs: Needs,
    graph: bool,
    decode: Option<Decode>,
}

impl Served {
    pub fn open(one: &HighPriority, args: &SimArgs) -> Result<Self, CtlError> {
        let needs = match (one.slo_ms, one.tpot_ms) {
            (None, None) => (args.slo, args.tpot),
            own => own,
        };
        let needs = match needs {
            (Some(slo_ms), _) => Needs::Slo(super::objective(args, slo_ms)?),
            (None, Some(tpot_ms)) => Needs::Tpot((tpot_ms * 1e6) as u64),
            (None, None) => Needs::Nothing,
        };
        if let Some(file) = &one.requests {
            return Self::decodes(one, file, needs, args);
        }
        let graph = !(args.eager || one.eager);
        if matches!(needs, Needs::Tpot(_)) && !graph {
            return Err(CtlError::Usage(format!(
                "--hp {}: tpot is for services whose requests are CUDA graphs, and this one is eager; give it slo, \
                 or give eager only to other services",
                one.trace
            )));
        }
        let file = args.arrivals.as_ref().filter(|_| one.load.is_none());
        let (traffic, arrivals) = match one.arrivals.as_ref().or(file) {
            Some(file) => {
                let arrivals = Arrivals::open(file).map_err(|why| match one.arrivals {
                    Some(_) => CtlError::Failed(format!("--hp {}: {why}", one.trace)),
                    None => CtlError::Failed(format!("--{why}")),
                })?;
                (format!("arrivals of {}", file.display()), arrivals)
            }
            None => {
                let load = one.load.map_or_else(|| positive("load", args.load, LOAD_MAX), Ok)?;
                (format!("load {load}"), Arrivals::Poisson { load })
            }
        };
        Ok(Served {
            trace: super::trace("hp", &one.trace)?,
            traffic,
            arrivals,
            needs,
            graph,
            decode: None,
        })
    }

    /// One that decodes.
    fn decodes(
        one: &HighPriority,
        file: &Path,
        needs: Needs,
        args: &SimArgs,
    ) -> Result<Self, CtlError> {
        for (given, option) in [(args.eager, "eager"), (args.arrivals.is_some(), "arrivals")] {
            if given {
                return Err(CtlError::Usage(format!(
                    "--{option} is for services whose requests are served one by one, and --hp {} has requests of \
                     tokens: give {option} to the others behind their traces",
                    one.trace
                )));
            }
        }
        if matches!(needs, Needs::Slo(_)) {
            return Err(CtlError::Usage(format!(
                "--hp {}: slo is for services whose requests are served one by one; give tpot to one with requests",
                one.trace
            )));
        }
        let requests = Requests::open(file)
            .map_err(|why| CtlError::Failed(format!("--hp {}: {why}", one.trace)))?;
        let prefill = one.prefill.as_ref().map(|name| {
            let failed = |why| CtlError::Failed(format!("--hp {}: prefill: {why}", one.trace));
            Trace::open(name).map_err(failed)
        });
        let (requests, traffic) = match one.backlog {
            true => (requests.backlog(), "a backlog"),
            false => (requests, "requests"),
        };
        Ok(Served {
            trace: super::trace("hp", &one.trace)?,
            traffic: format!("{traffic} of {}", file.display()),
            arrivals: Arrivals::At(Vec::new()),
            needs,
            graph: true,
            decode: Some(Decode { requests, prefill: prefill.transpose()? }),
        })
    }

    /// With this objective in place of its own, if it is given one.
    pub fn service(&self, slo: Option<Objective>) -> Service<'_> {
        let service = Service {
            graph: self.graph,
            decode: self.decode.as_ref(),
            ..Service::new(&self.trace, &self.arrivals)
        };
        match (slo, self.needs) {
            (Some(slo), _) | (None, Needs::Slo(slo)) => Service { slo: Some(slo), ..service },
            (None, Needs::Tpot(tpot_ns)) => Service { tpot_ns: Some(tpot_ns), ..service },
            (None, Needs::Nothing) => service,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_best_effort_program_has_its_options_after_the_last_commas() {
        let parts = |text| best_effort(text).map(|program| (program.trace, program.weight));
        assert_eq!(parts("gpt"), Ok(("gpt".into(), 1)));
        assert_eq!(parts("a,weight=2.csv,weight=3"), Ok(("a,weight=2.csv".into(), 3)));
        let both = best_effort("a,min_share=12.5%,weight=3").unwrap();
        assert_eq!((&*both.trace, both.weight, both.min_share_permille), ("a", 3, 125));
        assert!(best_effort("a,min_share=12").is_err_and(|why| why.contains("such as 20%")));
        for wrong in ["gpt,weight=0", "gpt,weight=1001", "gpt,weight=x", "gpt,weight="] {
            assert!(parts(wrong).is_err_and(|why| why.contains("from 1 to 1000")), "{wrong}");
        }
    }

    #[test]
    fn a_service_has_its_options_after_the_last_commas() {
        let plain = HighPriority { trace: "a,b.csv".into(), ..HighPriority::default() };
        assert_eq!(high_priority("a,b.csv"), Ok(plain.clone()));
        let slo =
            HighPriority { slo_ms: Some(20.0), load: Some(0.4), eager: true, ..plain.clone() };
        assert_eq!(high_priority("a,b.csv,slo=20ms,eager,load=0.4"), Ok(slo.clone()));
        assert_eq!(high_priority("a,b.csv,load=40%,slo=20ms,eager"), Ok(slo), "in any order");
        let tpot = HighPriority { tpot_ms: Some(8.0), arrivals: Some("c.txt".into()), ..plain };
        assert_eq!(high_priority("a,b.csv,tpot=8ms,arrivals=c.txt"), Ok(tpot));
        let decodes = HighPriority {
            requests: Some("r.csv".into()),
            backlog: true,
            prefill: Some("p.csv".into()),
            ..high_priority("a,tpot=8ms").unwrap()
        };
        assert_eq!(high_priority("a,requests=r.csv,prefill=p.csv,tpot=8ms,backlog"), Ok(decodes));
        // What is no option of a service is part of a file's name.
        assert_eq!(high_priority("a,weight=3").unwrap().trace, "a,weight=3");
        assert_eq!(high_priority("a,eager,eager").unwrap().trace, "a,eager");
    }

    #[test]
    fn a_wrong_option_of_a_service_is_named_with_what_was_expected() {
        for (text, expected) in [
            ("a,slo=20", "slo=20: expected a time from 10us to 600s with its unit"),
            ("a,tpot=x", "tpot=x: expected a time"),
            ("a,load=0", "load=0: expected more than 0 and at most 100"),
            ("a,load=x,eager", "load=x: expected more than 0"),
            ("a,load=NaN", "load=NaN: expected more than 0"),
            ("a,arrivals=", "arrivals=: expected the name of a file"),
            ("a,slo=20ms,tpot=8ms", "slo and tpot exclude each other"),
            ("a,arrivals=b,load=1", "load and arrivals exclude each other"),
            ("a,requests=", "requests=: expected the name of a file"),
            ("a,requests=r,slo=20ms", "requests and slo exclude each other"),
            ("a,requests=r,load=1", "requests and load exclude each other"),
            ("a,requests=r,arrivals=b", "requests and arrivals exclude each other"),
            ("a,requests=r,eager", "requests and eager exclude each other"),
            ("a,backlog", "give it requests=FILE"),
            ("a,prefill=p", "give it requests=FILE"),
        ] {
            let why = high_priority(text).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
