//! The forms that a launch can be run in, as this policy speaks of them.

use tally_sdk::{Decision, Form, LaunchFlags};

/// One form of one kernel, with the argument that makes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// As it is.
    #[default]
    Whole,
    /// Gives way at block boundaries.
    Preemptible,
    /// Launches of so many blocks each.
    Slice(u32),
    /// On so many SMs.
    Partition(u32),
}

impl Choice {
    /// What the core is answered.
    pub fn decision(self) -> Decision {
        match self {
            Choice::Whole => Decision::Run(0),
            Choice::Preemptible => Decision::Preemptible,
            Choice::Slice(blocks) => Decision::Slice(blocks),
            Choice::Partition(sms) => Decision::Partition(sms),
        }
    }

    /// How the core's profile of the kernel names it.
    pub fn form(self) -> (Form, u32) {
        match self {
            Choice::Whole => (Form::Whole, 0),
            Choice::Preemptible => (Form::Preemptible, 0),
            Choice::Slice(blocks) => (Form::Sliced, blocks),
            Choice::Partition(sms) => (Form::Partitioned, sms),
        }
    }

    /// Whether a launch with these flags can be run so.
    pub fn is_offered(self, flags: LaunchFlags) -> bool {
        match self {
            Choice::Whole => true,
            Choice::Preemptible => flags.contains(LaunchFlags::CAN_PREEMPT),
            Choice::Slice(blocks) => blocks > 0 && flags.contains(LaunchFlags::CAN_SLICE),
            Choice::Partition(sms) => sms > 0 && flags.contains(LaunchFlags::CAN_PARTITION),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_needs_its_own_offer() {
        let forms = [
            (Choice::Preemptible, LaunchFlags::CAN_PREEMPT),
            (Choice::Slice(1), LaunchFlags::CAN_SLICE),
            (Choice::Partition(8), LaunchFlags::CAN_PARTITION),
        ];
        for (choice, offer) in forms {
            assert!(choice.is_offered(offer) && choice.is_offered(LaunchFlags::all()));
            assert!(!choice.is_offered(LaunchFlags::all() - offer));
        }
        assert!(Choice::Whole.is_offered(LaunchFlags::empty()));
    }

    #[test]
    fn nothing_of_size_0_is_ever_on_offer() {
        assert!(!Choice::Slice(0).is_offered(LaunchFlags::all()));
        assert!(!Choice::Partition(0).is_offered(LaunchFlags::all()));
    }
}
