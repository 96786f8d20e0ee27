//! Short names for what policies ask of a launch most often.

use crate::{Launch, LaunchFlags, PriorityClass};

impl Launch {
    /// Its client is latency-critical.
    pub fn is_high(&self) -> bool {
        self.class == PriorityClass::High
    }

    /// A high-priority client has work on this GPU now.
    pub fn high_busy(&self) -> bool {
        self.flags.contains(LaunchFlags::HIGH_BUSY)
    }

    /// It was held before and is offered again.
    pub fn offered_again(&self) -> bool {
        self.flags.contains(LaunchFlags::OFFERED_AGAIN)
    }

    /// The core can run it as slices of blocks.
    pub fn can_slice(&self) -> bool {
        self.flags.contains(LaunchFlags::CAN_SLICE)
    }

    /// The core can run it so that it gives way at block boundaries.
    pub fn can_preempt(&self) -> bool {
        self.flags.contains(LaunchFlags::CAN_PREEMPT)
    }

    /// A cut form of its kernel could be made: deciding for one has it made.
    pub fn can_prepare(&self) -> bool {
        self.flags.contains(LaunchFlags::CAN_PREPARE)
    }

    /// The core can run it on some of the SMs.
    pub fn can_partition(&self) -> bool {
        self.flags.contains(LaunchFlags::CAN_PARTITION)
    }
}
