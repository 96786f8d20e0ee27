//! What a unit of work does on the GPU.

/// What the latest profiled unit of a client did on the GPU; the contract's `unit-profile`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitProfile {
    /// Profiled units, this one included.
    pub units: u64,
    pub launches: u32,
    /// GPU time in which the launches ran.
    pub gpu_busy_ns: u64,
    /// Gaps between the end of a launch and the start of the next.
    pub gaps: u32,
    pub gaps_ns: u64,
    /// Median length of the gaps; 0 if there are none.
    pub gap_median_ns: u64,
    pub gap_longest_ns: u64,
    /// SMs that would hold all blocks of the largest launch; 0: unknown.
    pub sms_max: u32,
    /// The mean of all launches, weighted by their time; 0: unknown.
    pub sms_mean: u32,
}

impl UnitProfile {
    /// Whether unit `n` of a client, counted from 0, is profiled: the first two, and then one in 128: what
    /// that costs the unit must not be the client's 99th percentile.
    pub fn is_of(n: u64) -> bool {
        n < 2 || n.is_multiple_of(128)
    }

    /// Of a unit whose launches took so long each, with such gaps between them, some of them 0. `launches`: GPU time,
    /// and SMs filled (0: unknown).
    pub fn new(launches: &[(u64, u32)], gaps_ns: &mut Vec<u64>) -> Self {
        gaps_ns.retain(|ns| *ns > 0);
        gaps_ns.sort_unstable();
        let busy_ns = launches.iter().fold(0_u64, |all, (ns, _)| all.saturating_add(*ns));
        let is_known = launches.iter().all(|(_, sms)| *sms > 0);
        let weighted =
            launches.iter().map(|(ns, sms)| u128::from(*ns) * u128::from(*sms)).sum::<u128>();
        let mean = weighted.div_ceil(u128::from(busy_ns.max(1)));
        UnitProfile {
            units: 1,
            launches: launches.len() as u32,
            gpu_busy_ns: busy_ns,
            gaps: gaps_ns.len() as u32,
            gaps_ns: gaps_ns.iter().fold(0, |all, ns| all.saturating_add(*ns)),
            gap_median_ns: gaps_ns.get(gaps_ns.len().saturating_sub(1) / 2).copied().unwrap_or(0),
            gap_longest_ns: gaps_ns.last().copied().unwrap_or(0),
            sms_max: launches.iter().map(|(_, sms)| *sms).max().filter(|_| is_known).unwrap_or(0),
            sms_mean: if is_known { mean.try_into().unwrap_or(u32::MAX) } else { 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::UnitProfile;

    #[test]
    fn the_mean_is_weighted_by_time_and_gaps_of_no_length_are_none() {
        let profile = UnitProfile::new(&[(100, 10), (300, 50)], &mut vec![0, 7, 5, 90]);
        let expected = UnitProfile {
            units: 1,
            launches: 2,
            gpu_busy_ns: 400,
            gaps: 3,
            gaps_ns: 102,
            gap_median_ns: 7,
            gap_longest_ns: 90,
            sms_max: 50,
            sms_mean: 40,
        };
        assert_eq!(profile, expected);
    }

    #[test]
    fn what_one_launch_fills_is_needed_to_know_what_all_do() {
        let profile = UnitProfile::new(&[(100, 10), (300, 0)], &mut Vec::new());
        assert_eq!((profile.sms_max, profile.sms_mean), (0, 0));
        assert_eq!((profile.gaps, profile.gap_median_ns, profile.gap_longest_ns), (0, 0, 0));
        let nothing = UnitProfile::new(&[], &mut Vec::new());
        assert_eq!(nothing, UnitProfile { units: 1, ..UnitProfile::default() });
    }

    #[test]
    fn the_first_two_units_and_one_in_128_are_profiled() {
        let profiled: Vec<u64> = (0..300).filter(|n| UnitProfile::is_of(*n)).collect();
        assert_eq!(profiled, [0, 1, 128, 256]);
    }
}
