//! Which of a kernel's forms to run it in, given what each costs (paper: section 4.2,
//! the choice of a configuration).
//!
//! High priority is to wait at most the bound; of the forms that keep it, best effort
//! gets the fastest, in classes of a tenth of its speed so that measuring noise does
//! not decide between forms that are as good. Where none keeps the bound, the paper
//! takes ever more aggressive forms until one does, whatever it costs; here it is the
//! fastest of those whose turnaround is near the least, within the slowdown limit, and
//! the whole kernel if none is a real gain: a form that halves best effort's rate and still makes high
//! priority wait for a millisecond serves neither.

use crate::candidates::{Candidate, scaled};
use crate::choice::Choice;
use crate::settings::Settings;

/// Where no form keeps the bound, turnarounds within a quarter of the least one count
/// as equal, and the fastest of these wins; the whole kernel is one of them if nothing
/// takes more than a quarter off.
const GAIN: (u64, u64) = (3, 4);

/// The best of them. The first is the whole kernel.
pub fn choose(candidates: &[Candidate], settings: &Settings) -> Candidate {
    let whole = candidates[0];
    let bound_ns = settings.turnaround_ns_max;
    if whole.turnaround_ns <= bound_ns {
        return whole;
    }
    // The class of each: 10 is the whole kernel's speed or better. What lies between
    // the limit and the tenth above it is the lowest class that there is.
    let affordable = || {
        let speeds = candidates.iter().map(|c| (c, speed_permille(c, &whole)));
        let fast = |&(c, speed): &(&Candidate, u64)| speed >= slowest_permille(c, settings);
        speeds.filter(fast).map(|(c, speed)| (c, (speed / 100).min(10)))
    };
    let within = affordable().filter(|(c, _)| c.turnaround_ns <= bound_ns && !is_partition(c));
    if let Some(fastest) = fastest(within) {
        return fastest;
    }
    let least_ns = affordable().map(|(c, _)| c.turnaround_ns).min().unwrap_or(u64::MAX);
    let is_near = |(c, _): &(&Candidate, u64)| scaled(c.turnaround_ns, GAIN.0, GAIN.1) <= least_ns;
    fastest(affordable().filter(is_near)).unwrap_or(whole)
}

/// Of the highest class of speed the first: what going down in steps of a tenth finds.
fn fastest<'a>(classed: impl Iterator<Item = (&'a Candidate, u64)>) -> Option<Candidate> {
    let better = |best: (&'a Candidate, u64), other: (&'a Candidate, u64)| {
        if other.1 > best.1 { other } else { best }
    };
    classed.reduce(better).map(|(candidate, _)| *candidate)
}

/// Speed of a form, the whole kernel's being 1 000.
pub fn speed_permille(candidate: &Candidate, whole: &Candidate) -> u64 {
    scaled(whole.time_ns, 1_000, candidate.time_ns.max(1))
}

fn slowest_permille(candidate: &Candidate, settings: &Settings) -> u64 {
    let percent = match candidate.choice {
        Choice::Partition(_) => settings.partition_slowdown_percent_max,
        _ => settings.slowdown_percent_max,
    };
    100_000 / (100 + u64::from(percent))
}

/// High priority starts at once beside it but has few SMs until it ends: the last
/// resort, whatever its figures.
fn is_partition(candidate: &Candidate) -> bool {
    matches!(candidate.choice, Choice::Partition(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1_000;

    fn form(choice: Choice, time_us: u64, turnaround_us: u64) -> Candidate {
        Candidate { choice, parts: 1, time_ns: time_us * US, turnaround_ns: turnaround_us * US }
    }

    fn whole(us: u64) -> Candidate {
        form(Choice::Whole, us, us)
    }

    fn best(candidates: &[Candidate], text: &str) -> Choice {
        choose(candidates, &Settings::read(text).unwrap()).choice
    }

    #[test]
    fn a_kernel_within_the_bound_stays_whole_whatever_else_there_is() {
        let free = form(Choice::Preemptible, 1, 1);
        assert_eq!(best(&[whole(31), free], ""), Choice::Whole);
        assert_eq!(best(&[whole(32), free], ""), Choice::Preemptible);
    }

    #[test]
    fn of_those_within_the_bound_the_fastest() {
        let (slow, fast) = (form(Choice::Preemptible, 140, 10), form(Choice::Slice(9), 105, 30));
        assert_eq!(best(&[whole(100), slow, fast], ""), Choice::Slice(9));
    }

    #[test]
    fn within_a_tenth_of_speed_the_first_wins() {
        let (a, b) = (form(Choice::Preemptible, 110, 20), form(Choice::Slice(9), 105, 30));
        assert_eq!(best(&[whole(100), a, b], ""), Choice::Preemptible);
        // Not across the border of a class: 0.952 against 0.893.
        let a = form(Choice::Preemptible, 112, 20);
        assert_eq!(best(&[whole(100), a, b], ""), Choice::Slice(9));
    }

    #[test]
    fn over_the_bound_is_no_choice_while_another_keeps_it() {
        let (long, kept) = (form(Choice::Preemptible, 100, 40), form(Choice::Slice(9), 145, 30));
        assert_eq!(best(&[whole(100), long, kept], ""), Choice::Slice(9));
    }

    #[test]
    fn if_none_keeps_the_bound_the_least_turnaround() {
        let (a, b) = (form(Choice::Preemptible, 1_010, 300), form(Choice::Slice(9), 1_400, 200));
        assert_eq!(best(&[whole(1_000), a, b], ""), Choice::Slice(9));
    }

    #[test]
    fn never_beyond_the_slowdown_limit_not_even_to_keep_the_bound() {
        let (a, b) = (form(Choice::Preemptible, 1_010, 300), form(Choice::Slice(9), 1_600, 20));
        assert_eq!(best(&[whole(1_000), a, b], ""), Choice::Preemptible);
        assert_eq!(best(&[whole(1_000), b], ""), Choice::Whole);
        assert_eq!(best(&[whole(1_000), a, b], "slowdown_percent_max = 60"), Choice::Slice(9));
        // At the limit itself: 1.5 times as long.
        let limit = form(Choice::Slice(9), 1_500, 20);
        assert_eq!(best(&[whole(1_000), limit], ""), Choice::Slice(9));
    }

    #[test]
    fn near_the_least_turnaround_the_fastest() {
        let (a, b) = (form(Choice::Preemptible, 1_010, 260), form(Choice::Slice(9), 1_400, 200));
        assert_eq!(best(&[whole(1_000), a, b], ""), Choice::Preemptible);
        assert_eq!(best(&[whole(1_000), b, a], ""), Choice::Preemptible);
    }

    #[test]
    fn what_gains_little_is_not_worth_it() {
        let nearly = form(Choice::Preemptible, 1_010, 800);
        assert_eq!(best(&[whole(1_000), nearly], ""), Choice::Whole);
        let gain = form(Choice::Preemptible, 1_010, 749);
        assert_eq!(best(&[whole(1_000), gain], ""), Choice::Preemptible);
    }

    #[test]
    fn a_partition_is_the_last_resort() {
        let partition = form(Choice::Partition(112), 3_500, 10);
        let kept = form(Choice::Slice(9), 4_400, 30);
        assert_eq!(best(&[whole(3_000), kept, partition], ""), Choice::Slice(9));
        assert_eq!(best(&[whole(3_000), partition], ""), Choice::Partition(112));
        let shorter = form(Choice::Preemptible, 3_100, 300);
        let partition = form(Choice::Partition(112), 3_500, 500);
        assert_eq!(best(&[whole(3_000), shorter, partition], ""), Choice::Preemptible);
        let longer = form(Choice::Preemptible, 3_100, 900);
        assert_eq!(best(&[whole(3_000), longer, partition], ""), Choice::Partition(112));
    }

    #[test]
    fn a_bound_of_0_asks_for_the_least_that_can_be_had() {
        let (a, b) = (form(Choice::Preemptible, 105, 20), form(Choice::Slice(9), 130, 8));
        assert_eq!(best(&[whole(100), a, b], "turnaround_ns_max = 0"), Choice::Slice(9));
    }
}
