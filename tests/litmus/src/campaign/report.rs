//! The report of a campaign: which programs hung, failed or gave other results.

use super::differs;
use super::drive::Outcome;
use crate::model::Values;
use crate::program::Program;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tally_harness::Scene;

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The program, if it is one's.
    pub program: String,
    /// `hang`, `values`, `failure` or `core`; `bare too` if it is no fault of Tally's.
    pub kind: &'static str,
    pub what: String,
    pub text: String,
}

impl Finding {
    pub fn of_pairs(what: String) -> Self {
        Self { program: "pairs".into(), kind: "values", what, text: String::new() }
    }

    pub fn of_core(what: String) -> Self {
        Self { program: String::new(), kind: "core", what, text: String::new() }
    }
}

/// How programs ended bare, or under one setup.
#[derive(Clone, Debug)]
pub struct Row {
    pub setup: String,
    pub policy: String,
    pub mode: String,
    pub class: String,
    pub ended: u64,
    pub hangs: u64,
    pub different: u64,
    pub failed: u64,
    pub not_run: u64,
    /// Misbehaved, but bare as well when they were run more often.
    pub bare_too: u64,
    /// Pairs of images, and those of which one computed another's values.
    pub pairs: u64,
    pub pairs_wrong: u64,
    /// Pairs of whose images both had a launch that was transformed.
    pub pairs_transformed: u64,
    /// What the core says it did to the programs' launches.
    pub mechanisms: BTreeMap<String, u64>,
    pub findings: Vec<Finding>,
}

const BARE_TOO: &str = "bare too";

/// Counts of `clients[].transformed` and of `clients[].decisions` that say what was done.
const FORMS: [&str; 9] = [
    "sliced",
    "sliced_by_offset",
    "preemptible",
    "sm_limited",
    "sm_limited_consecutive",
    "graph_chained",
    "yields",
    "launches_yielded",
    "rescued",
];
const DECISIONS: [&str; 3] = ["launches_held", "window_stalls", "degraded"];

impl Row {
    pub fn new(setup: &str, policy: &str) -> Self {
        Self {
            setup: setup.into(),
            policy: policy.into(),
            mode: String::new(),
            class: String::new(),
            ended: 0,
            hangs: 0,
            different: 0,
            failed: 0,
            not_run: 0,
            bare_too: 0,
            pairs: 0,
            pairs_wrong: 0,
            pairs_transformed: 0,
            mechanisms: BTreeMap::new(),
            findings: Vec::new(),
        }
    }

    /// Counts an outcome; whether it is as it must be.
    pub fn judge(
        &mut self,
        program: &Program,
        expected: Option<&Values>,
        outcome: Outcome,
    ) -> bool {
        let (kind, what) = match outcome {
            Outcome::NotRun => {
                self.not_run += 1;
                return false;
            }
            Outcome::Ended(got) => match differs(expected, &got) {
                None => {
                    self.ended += 1;
                    return true;
                }
                Some(what) => {
                    self.different += 1;
                    ("values", what)
                }
            },
            Outcome::Hung(at) => {
                self.hangs += 1;
                ("hang", at.join("; "))
            }
            Outcome::Failed(why) => {
                self.failed += 1;
                ("failure", why)
            }
        };
        let (name, text) = (program.name.clone(), program.to_string());
        self.findings.push(Finding { program: name, kind, what, text });
        false
    }

    /// Adds what the status says of these processes.
    pub fn count_mechanisms(&mut self, scene: &Scene, pids: &[u32]) {
        let Ok(status) = scene.status() else { return };
        let lists = ["clients", "departed"].map(|list| status.0[list].as_array().cloned());
        for client in lists.into_iter().flatten().flatten() {
            if !client["pid"].as_u64().is_some_and(|pid| pids.iter().any(|p| u64::from(*p) == pid))
            {
                continue;
            }
            let mut add = |name: &str, value: &Value| {
                *self.mechanisms.entry(name.into()).or_default() += value.as_u64().unwrap_or(0);
            };
            add("launches", &client["launches"]);
            FORMS.iter().for_each(|name| add(name, &client["transformed"][name]));
            DECISIONS.iter().for_each(|name| add(name, &client["decisions"][name]));
        }
    }

    /// Of `tries` nothing may have been left undone, in a setup that served enough programs.
    pub fn expect_mechanisms(&mut self, tries: &[&str]) {
        const ENDED_MIN: u64 = 75;
        for name in tries.iter().filter(|_| self.ended >= ENDED_MIN) {
            if self.mechanisms.get(*name).copied().unwrap_or(0) == 0 {
                let what = format!("{} programs ended, and nothing was {name}", self.ended);
                self.findings.push(Finding::of_core(what));
            }
        }
    }

    /// A policy that lost its turn was not what served.
    pub fn count_policy_faults(&mut self, scene: &Scene) {
        let Ok(status) = scene.status() else { return };
        if status.policy_faults() > 0 {
            let what = format!(
                "the policy failed {} times: {}",
                status.policy_faults(),
                status.last_fault()
            );
            self.findings.push(Finding::of_core(what));
        }
    }

    pub fn bad(&self) -> u64 {
        self.findings.iter().filter(|f| f.kind != BARE_TOO).count() as u64
    }

    /// The programs that misbehaved.
    pub fn programs(&self) -> Vec<String> {
        self.findings.iter().map(|f| f.program.clone()).filter(|name| !name.is_empty()).collect()
    }

    /// This one does so bare as well.
    pub fn excuse(&mut self, program: &str) {
        for finding in self.findings.iter_mut().filter(|f| f.program == program) {
            let count = match finding.kind {
                "hang" => &mut self.hangs,
                "values" => &mut self.different,
                "failure" => &mut self.failed,
                _ => continue,
            };
            *count -= 1;
            self.bare_too += 1;
            finding.kind = BARE_TOO;
        }
    }

    /// A finding if fewer than half of the pairs were transformed: little was tried then.
    pub fn expect_transformed_pairs(&mut self) {
        let Self { pairs, pairs_transformed: transformed, .. } = *self;
        if 2 * transformed < pairs {
            self.findings.push(Finding::of_pairs(format!(
                "only {transformed} of {pairs} pairs were transformed"
            )));
        }
    }

    pub fn summary(&self) -> String {
        let Self { setup, ended, hangs, different, failed, not_run, .. } = self;
        let counts: Vec<String> = self
            .mechanisms
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        let pairs = match self.pairs {
            0 => String::new(),
            n => format!(
                ", {n} pairs, {} transformed, {} wrong",
                self.pairs_transformed, self.pairs_wrong
            ),
        };
        format!(
            "{setup}: {ended} ended, {hangs} hung, {different} with other values, {failed} failed, \
             {not_run} not run{pairs}; {}",
            counts.join(", ")
        )
    }

    fn json(&self) -> Value {
        let findings: Vec<Value> = self
            .findings
            .iter()
            .map(|f| json!({"program": f.program, "kind": f.kind, "what": f.what, "text": f.text}))
            .collect();
        json!({
            "setup": self.setup, "policy": self.policy, "mode": self.mode, "class": self.class, "ended": self.ended, "hangs": self.hangs,
            "pairs": self.pairs, "pairs_wrong": self.pairs_wrong,
            "pairs_transformed": self.pairs_transformed,
            "different": self.different, "failed": self.failed, "not_run": self.not_run,
            "bare_too": self.bare_too,
            "mechanisms": self.mechanisms, "findings": findings,
        })
    }
}

/// Results of a campaign, row by row.
#[derive(Clone, Debug)]
pub struct Report {
    pub bare: Row,
    pub rows: Vec<Row>,
    pub seconds: f64,
}

impl Report {
    /// All programs ran, bare and under Tally, and nothing was found.
    pub fn is_good(&self) -> bool {
        let mut rows = [&self.bare].into_iter().chain(&self.rows);
        rows.all(|row| row.bad() == 0 && row.not_run == 0)
    }

    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        json!({"bare": self.bare.json(), "rows": rows, "seconds": self.seconds})
    }

    /// The figures, then each program that misbehaved once, with how to run it again.
    pub fn text(&self, shown_max: usize) -> String {
        let mut text = String::new();
        let rows: Vec<&Row> = std::iter::once(&self.bare).chain(&self.rows).collect();
        for row in &rows {
            text += &format!("{}\n", row.summary());
        }
        let mut shown = std::collections::BTreeSet::new();
        for row in &rows {
            for finding in &row.findings {
                text += &format!(
                    "{} {} {}: {}\n",
                    row.setup, finding.kind, finding.program, finding.what
                );
                if shown.len() < shown_max && shown.insert(finding.program.clone()) {
                    text += &finding.text;
                    text += &again(&finding.program, &row.setup);
                }
            }
        }
        let sum = |of: fn(&Row) -> u64| self.rows.iter().map(of).sum::<u64>();
        text += &format!(
            "{} programs bare; under Tally {} runs, {} hangs, {} with other values, {} failed, {} not run, \
             {} pairs, {} transformed, {} wrong; {:.0} s\n",
            self.bare.ended,
            sum(|r| r.ended + r.hangs + r.different + r.failed),
            sum(|r| r.hangs),
            sum(|r| r.different),
            sum(|r| r.failed),
            sum(|r| r.not_run),
            sum(|r| r.pairs),
            sum(|r| r.pairs_transformed),
            sum(|r| r.pairs_wrong),
            self.seconds
        );
        text
    }
}

fn again(program: &str, setup: &str) -> String {
    let which = match program.strip_prefix("seed-") {
        Some(seed) => format!("--seed {seed} --programs 1"),
        None => format!("--named --only {program} --programs 0"),
    };
    let setup = if setup == "bare" { String::new() } else { format!(" --setup {setup}") };
    format!("again: cargo xtask litmus {which}{setup}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_misbehaves_bare_too_is_told_apart() {
        let mut row = Row::new("fifo", "fifo");
        for name in ["flaky", "harmed"] {
            let program = Program::new(name);
            assert!(!row.judge(&program, None, Outcome::Hung(Vec::new())));
        }
        row.excuse("flaky");
        assert_eq!((row.hangs, row.bare_too, row.bad()), (1, 1, 1));
        row.excuse("flaky");
        assert_eq!((row.hangs, row.bare_too, row.bad()), (1, 1, 1));
    }

    #[test]
    fn pairs_that_were_mostly_not_transformed_are_a_finding() {
        for (transformed, bad) in [(0, 1), (49, 1), (50, 0), (100, 0)] {
            let mut row = Row {
                pairs: 100,
                pairs_transformed: transformed,
                ..Row::new("sliced", "random-forms")
            };
            row.expect_transformed_pairs();
            assert_eq!(row.bad(), bad, "{transformed}");
        }
        let mut none = Row::new("sliced", "random-forms");
        none.expect_transformed_pairs();
        assert_eq!(none.bad(), 0, "no pairs were run");
    }

    #[test]
    fn programs_that_time_left_out_are_no_success() {
        let row = |ended, not_run| Row { ended, not_run, ..Row::new("bare", "no policy") };
        let is_good = |bare, under| Report { bare, rows: vec![under], seconds: 1.0 }.is_good();
        assert!(is_good(row(9, 0), row(9, 0)));
        assert!(!is_good(row(3, 6), row(3, 0)), "not run bare, and so not under Tally");
        assert!(!is_good(row(9, 0), row(3, 6)));
    }

    #[test]
    fn a_setup_that_tried_nothing_is_a_finding() {
        let mut row = Row { ended: 200, ..Row::new("sm-limited", "random-forms") };
        row.mechanisms = [("sm_limited".to_owned(), 0), ("yields".to_owned(), 3)].into();
        row.expect_mechanisms(&["yields"]);
        assert_eq!(row.bad(), 0);
        row.expect_mechanisms(&["sm_limited", "yields"]);
        assert_eq!(row.bad(), 1);
        let mut few = Row { ended: 3, ..Row::new("sm-limited", "random-forms") };
        few.expect_mechanisms(&["sm_limited"]);
        assert_eq!(few.bad(), 0);
    }
}
