//! What must be true of the programs' results whatever happens, by what they print.

use crate::process::Process;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Rounds after which a program begins anew.
pub const PERIOD: u64 = 48;

/// What each round of a program's period leaves in memory when it has the device for itself.
#[derive(Clone, Debug)]
pub struct Expected(Vec<String>);

impl Expected {
    /// Reads the output of a run of one period without the core.
    ///
    /// # Errors
    /// If it is not one, or lost or doubled a launch by itself.
    pub fn of(output: &str) -> Result<Self> {
        let mut rounds = Rounds::default();
        let mut hashes = Vec::new();
        for line in output.lines() {
            let round: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            hashes.push(round["hash"].as_str().context("no hash")?.to_owned());
            rounds.take(line, None)?;
        }
        ensure!(hashes.len() as u64 == PERIOD, "{} rounds of {PERIOD}", hashes.len());
        Ok(Expected(hashes))
    }
}

/// What a program has shown so far.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    pub complete: u64,
    /// Launches in the complete rounds.
    pub launched: u64,
    /// Signals that its handler took.
    pub signals: u64,
}

impl Rounds {
    /// Checks one more line.
    ///
    /// # Errors
    /// What is wrong with the round.
    pub fn take(&mut self, line: &str, expected: Option<&Expected>) -> Result<()> {
        let told: Value = serde_json::from_str(line).with_context(|| format!("{line:?}"))?;
        let number = |key: &str| told[key].as_u64().with_context(|| format!("no {key}: {told}"));
        ensure!(number("round")? == self.complete, "round {} expected: {told}", self.complete);
        let (lost, doubled) = (number("lost")?, number("doubled")?);
        if lost + doubled > 0 {
            bail!("{lost} threads' runs lost and {doubled} doubled: {told}");
        }
        if let Some(Expected(hashes)) = expected {
            let hash = &hashes[(self.complete % PERIOD) as usize];
            ensure!(told["hash"] == **hash, "wrong bits, {hash} without the core: {told}");
        }
        self.complete += 1;
        self.launched = number("launched")?;
        self.signals = number("signals")?;
        Ok(())
    }

    /// Checks everything that `process` has printed since.
    ///
    /// # Errors
    /// What is wrong with a round.
    pub fn read(&mut self, process: &mut Process, expected: &Expected) -> Result<()> {
        for line in process.lines()? {
            self.take(&line, Some(expected)).with_context(|| process.name().to_owned())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(round: u64, hash: &str, lost: u64, doubled: u64) -> String {
        serde_json::json!({
            "round": round, "hash": hash, "lost": lost, "doubled": doubled, "launched": 7,
            "signals": 0,
        })
        .to_string()
    }

    #[test]
    fn what_is_lost_doubled_wrong_or_missing_is_found() {
        let bare: Vec<_> = (0..PERIOD).map(|n| line(n, &format!("h{n}"), 0, 0)).collect();
        let expected = Expected::of(&bare.join("\n")).unwrap();
        assert!(Expected::of(&bare[1..].join("\n")).is_err());
        let taken = |lines: &[String]| {
            let mut rounds = Rounds::default();
            lines.iter().try_for_each(|line| rounds.take(line, Some(&expected)))
        };
        taken(&bare).unwrap();
        let mut twice = bare.clone();
        twice.push(line(PERIOD, "h0", 0, 0));
        taken(&twice).unwrap();
        for (wrong, why) in [
            (line(0, "h0", 1, 0), "1 threads' runs lost and 0 doubled"),
            (line(0, "h0", 0, 2), "0 threads' runs lost and 2 doubled"),
            (line(0, "h1", 0, 0), "wrong bits"),
            (line(1, "h1", 0, 0), "round 0 expected"),
            ("thread panicked".into(), "thread panicked"),
        ] {
            let error = format!("{:#}", taken(&[wrong]).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }
}
