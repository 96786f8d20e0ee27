//! Under what programs run: policy, sharing mode, class, and the other client.

use tally_harness::{Class, Device};

/// How clients share the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// In turns. On the software device nothing takes turns; the core and the shim act as if.
    TimeSlice,
    /// At once. `mps` on a GPU; the software device is shared so anyway (`--sharing mode none`).
    AtOnce,
}

/// A way to run programs as clients of a core.
#[derive(Clone, Debug)]
pub struct Setup {
    pub name: &'static str,
    /// The policy: of `policies/`, or of `tests/policies/`.
    pub policy: &'static str,
    pub is_test_policy: bool,
    /// The policy's configuration; `SEED` stands for a number.
    pub policy_config: &'static str,
    pub sharing: Sharing,
    /// SMs that SM-limited launches may leave free: on the software device, and on a GPU.
    pub reserve_sms: [&'static [u32]; 2],
    /// SMs of the software device.
    pub sms: u32,
    /// The class of the programs. The other client is of the other one.
    pub class: Class,
    /// What it is there to try, as a report counts it: among many programs each is done to some launch.
    pub tries: &'static [&'static str],
}

impl Setup {
    /// The core's `--sharing mode` on a device.
    pub fn mode(&self, device: Device) -> &'static str {
        match (self.sharing, device) {
            (Sharing::TimeSlice, _) => "timeslice",
            (Sharing::AtOnce, Device::Cuda) => "mps",
            (Sharing::AtOnce, Device::Software { .. }) => "none",
        }
    }

    /// The class of the programs, as `tallyctl run` has it.
    pub fn class_name(&self) -> &'static str {
        match self.class {
            Class::High => "high",
            Class::BestEffort => "best-effort",
        }
    }
}

const NO_WIDTH: [&[u32]; 2] = [&[], &[]];
/// Of 8 SMs, and of a GPU's.
const FINE: [&[u32]; 2] = [&[2, 5], &[16, 64]];
/// Of 16 SMs: partitions are multiples of 8 there.
const COARSE: [&[u32]; 2] = [&[8], &[16, 64]];

#[allow(clippy::too_many_arguments, reason = "a row of the table below")]
const fn setup(
    name: &'static str,
    (policy, is_test_policy): (&'static str, bool),
    policy_config: &'static str,
    sharing: Sharing,
    reserve_sms: [&'static [u32]; 2],
    sms: u32,
    class: Class,
    tries: &'static [&'static str],
) -> Setup {
    Setup { name, policy, is_test_policy, policy_config, sharing, reserve_sms, sms, class, tries }
}

/// All of them. Those of the policy `random` give each launch any form on offer, of a random
/// size, and hold launches at random; clients are asked to yield at random times.
pub const ALL: [Setup; 14] = {
    use Class::{BestEffort, High};
    use Sharing::{AtOnce, TimeSlice};
    const TALLY: (&str, bool) = ("tally-priority", false);
    const FIFO: (&str, bool) = ("fifo", false);
    const RANDOM_FORMS: (&str, bool) = ("random-forms", true);
    const RANDOM: &str = "form = 5\nsms = 6\ntoggle_us = 4000\nhold_us = 1500\nseed = SEED\n";
    const TIGHT: &str = "form = 5\ntoggle_us = 3000\nhold_us = 800\nwindow_us = 300\nseed = SEED\n";
    const PREEMPTIBLE: &str = "form = 0\ntoggle_us = 2000\nseed = SEED\n";
    const SLICED: &str = "form = 1\nslices = 5\ntoggle_us = 2000\nseed = SEED\n";
    const SM_LIMITED: &str = "form = 2\nsms = 3\nseed = SEED\n";
    const HELD: &[&str] = &["launches_held"];
    const FORMS: &[&str] = &["preemptible", "sliced", "launches_held", "yields"];
    const PREEMPTED: &[&str] = &["preemptible", "yields"];
    const PARTS: &[&str] = &["sliced", "graph_chained", "yields"];
    const LIMITED: &[&str] = &["sm_limited"];
    const WIDTHS: &str = "form = 6\nlease = 1\ntoggle_us = 1500\nseed = SEED\n";
    const NOTHING: &[&str] = &[];
    const WIDE_AWAKE: &str = "reserve_sms = 8\nexplore_permille = 300\nreview_launches = 32\n";
    [
        setup("random", RANDOM_FORMS, RANDOM, AtOnce, FINE, 8, BestEffort, FORMS),
        setup("tally", TALLY, WIDE_AWAKE, AtOnce, COARSE, 16, BestEffort, HELD),
        setup("tally-timeslice", TALLY, "", TimeSlice, NO_WIDTH, 8, BestEffort, HELD),
        setup("random-no-width", RANDOM_FORMS, TIGHT, AtOnce, NO_WIDTH, 8, BestEffort, FORMS),
        setup("fifo", FIFO, "", AtOnce, NO_WIDTH, 8, BestEffort, NOTHING),
        setup("preemptible", RANDOM_FORMS, PREEMPTIBLE, AtOnce, NO_WIDTH, 8, BestEffort, PREEMPTED),
        setup("sliced", RANDOM_FORMS, SLICED, AtOnce, NO_WIDTH, 8, BestEffort, PARTS),
        setup("sm-limited", RANDOM_FORMS, SM_LIMITED, AtOnce, FINE, 8, BestEffort, LIMITED),
        setup("widths", RANDOM_FORMS, WIDTHS, AtOnce, FINE, 8, BestEffort, NOTHING),
        setup("tally-high", TALLY, WIDE_AWAKE, AtOnce, COARSE, 16, High, NOTHING),
        setup("random-timeslice", RANDOM_FORMS, RANDOM, TimeSlice, NO_WIDTH, 8, BestEffort, FORMS),
        setup("fifo-timeslice", FIFO, "", TimeSlice, NO_WIDTH, 8, BestEffort, NOTHING),
        setup("tally-timeslice-high", TALLY, "", TimeSlice, NO_WIDTH, 8, High, NOTHING),
        setup("random-high", RANDOM_FORMS, RANDOM, AtOnce, FINE, 8, High, NOTHING),
    ]
};
