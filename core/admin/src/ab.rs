//! Answers about A/B tests. A report is [`tally_ab::Report`].

use crate::words::required;
use serde::{Deserialize, Serialize};
use tally_ab::report::GuardReport;
use tally_ab::{Arm, Metric, Reason, Verdict};

/// How far an A/B test is: the answer to `ab_start` and `ab_status`, and `experiment` in status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbStatus {
    pub running: bool,
    pub metric: Metric,
    pub a: String,
    pub b: String,
    /// The arm active, or to be put active; `null` once it ended.
    #[serde(deserialize_with = "required")]
    pub arm: Option<Arm>,
    /// The block's start is under way, which does not count.
    pub in_washout: bool,
    pub blocks: usize,
    /// Finished pairs that say something.
    pub pairs: usize,
    /// Time since it began, s.
    pub elapsed_s: f64,
    /// It ends at the latest after, s.
    pub time_s_max: f64,
    /// B's figure over A's, as estimated.
    pub ratio: f64,
    /// Evidence that decides; it is enough beyond `e_value_needed`.
    pub e_value: f64,
    pub e_value_needed: f64,
    /// Why it ended; `null` until then.
    #[serde(deserialize_with = "required")]
    pub ended: Option<Reason>,
    /// What `ended` means, for people.
    pub message: String,
    /// What to do, as known so far.
    pub verdict: Verdict,
    pub why: String,
    /// How likely a B as good as A breaches each guard by accident: at first from requests of the minutes before, from
    /// the first pair of blocks on from A's.
    pub guards: Vec<GuardReport>,
}
