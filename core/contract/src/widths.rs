//! Numbers of SMs that launches can be limited to: one for each of the core's partitions.

/// SMs are split off in steps of so many.
pub const STEP_SMS: u32 = 8;

/// SMs of the partition that leaves `reserve_sms` of a GPU's `sm_count` free, rounded down so that at least so many
/// are. `None`: there is no such partition.
pub fn partition_sms(sm_count: u32, reserve_sms: u32) -> Option<u32> {
    let wanted =
        sm_count.checked_sub(reserve_sms).filter(|wanted| *wanted > 0 && reserve_sms > 0)?;
    Some((wanted / STEP_SMS * STEP_SMS).max(wanted.min(STEP_SMS)))
}

/// SMs of all partitions, rising.
pub fn partitions(sm_count: u32, reserve_sms: &[u32]) -> Vec<u32> {
    let mut all: Vec<u32> =
        reserve_sms.iter().filter_map(|reserve| partition_sms(sm_count, *reserve)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// SMs of the partition on which a launch that is limited to `sms` runs: the largest that has no more, else the
/// smallest. `None`: there are no partitions.
pub fn partition_of(sm_count: u32, reserve_sms: &[u32], sms: u32) -> Option<u32> {
    let all = || reserve_sms.iter().filter_map(|reserve| partition_sms(sm_count, *reserve));
    all().filter(|partition| *partition <= sms).max().or(all().min())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_leave_at_least_the_reserve_free() {
        assert_eq!(partitions(132, &[16, 32, 64]), [64, 96, 112]);
        assert_eq!(partitions(132, &[132, 131, 200, 0]), [1], "all SMs are no partition");
        assert_eq!(partitions(4, &[1, 2]), [2, 3], "a GPU with few SMs has them one by one");
        assert_eq!(partitions(132, &[5, 6]), [120], "twice the same");
        assert_eq!(partitions(0, &[16]), [], "how many there are is not known yet");
    }

    #[test]
    fn a_launch_runs_on_the_largest_partition_that_is_not_too_large() {
        let of = |sms| partition_of(132, &[64, 16, 32], sms);
        assert_eq!([1, 63, 64, 95, 96, 132].map(of), [64, 64, 64, 64, 96, 112].map(Some));
        assert_eq!(partition_of(132, &[], 64), None);
        assert_eq!(partition_of(0, &[16], 64), None, "the GPU is not known");
    }
}
