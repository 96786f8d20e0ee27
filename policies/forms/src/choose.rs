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

use super::candidates::Candidate;
use crate::Settings;
use tally_sdk::Decision;
use tally_sdk::grid::scaled;

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
    let within = affordable().filter(|(c, _)| c.turnaround_ns <= bound_ns && !is_sm_limited(c));
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
    let percent = match candidate.form {
        Decision::SmLimited(_) => settings.sm_limit_slowdown_percent_max,
        _ => settings.slowdown_percent_max,
    };
    100_000 / (100 + u64::from(percent))
}

/// High priority starts at once beside it but has few SMs until it ends: the last
/// resort, whatever its figures.
fn is_sm_limited(candidate: &Candidate) -> bool {
    matches!(candidate.form, Decision::SmLimited(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_sdk::config::Config;

    const US: u64 = 1_000;

    fn form(form: Decision, time_us: u64, turnaround_us: u64) -> Candidate {
        let (time_ns, turnaround_ns) = (time_us * US, turnaround_us * US);
        Candidate { form, parts: 1, time_ns, turnaround_ns, is_settled: true }
    }

    fn whole(us: u64) -> Candidate {
        form(Decision::Run(0), us, us)
    }

    fn best(candidates: &[Candidate], text: &str) -> Decision {
        choose(candidates, &Settings::take(&mut Config::parse(text).unwrap(), true).unwrap()).form
    }

    #[test]
    fn a_kernel_within_the_bound_stays_whole_whatever_else_there_is() {
        let free = form(Decision::Preemptible, 1, 1);
        assert_eq!(best(&[whole(31), free], ""), Decision::Run(0));
        assert_eq!(best(&[whole(32), free], ""), Decision::Preemptible);
    }

    #[test]
    fn of_those_within_the_bound_the_fastest() {
        let (slow, fast) =
            (form(Decision::Preemptible, 140, 10), form(Decision::Sliced(9), 105, 30));
        assert_eq!(best(&[whole(100), slow, fast], ""), Decision::Sliced(9));
    }

    #[test]
    fn within_a_tenth_of_speed_the_first_wins() {
        let (a, b) = (form(Decision::Preemptible, 110, 20), form(Decision::Sliced(9), 105, 30));
        assert_eq!(best(&[whole(100), a, b], ""), Decision::Preemptible);
        // Not across the border of a class: 0.952 against 0.893.
        let a = form(Decision::Preemptible, 112, 20);
        assert_eq!(best(&[whole(100), a, b], ""), Decision::Sliced(9));
    }

    #[test]
    fn over_the_bound_is_no_choice_while_another_keeps_it() {
        let (long, kept) =
            (form(Decision::Preemptible, 100, 40), form(Decision::Sliced(9), 145, 30));
        assert_eq!(best(&[whole(100), long, kept], ""), Decision::Sliced(9));
    }

    #[test]
    fn if_none_keeps_the_bound_the_least_turnaround() {
        let (a, b) =
            (form(Decision::Preemptible, 1_010, 300), form(Decision::Sliced(9), 1_400, 200));
        assert_eq!(best(&[whole(1_000), a, b], ""), Decision::Sliced(9));
    }

    #[test]
    fn never_beyond_the_slowdown_limit_not_even_to_keep_the_bound() {
        let (a, b) =
            (form(Decision::Preemptible, 1_010, 300), form(Decision::Sliced(9), 1_600, 20));
        assert_eq!(best(&[whole(1_000), a, b], ""), Decision::Preemptible);
        assert_eq!(best(&[whole(1_000), b], ""), Decision::Run(0));
        assert_eq!(best(&[whole(1_000), a, b], "slowdown_percent_max = 60"), Decision::Sliced(9));
        // At the limit itself: 1.5 times as long.
        let limit = form(Decision::Sliced(9), 1_500, 20);
        assert_eq!(best(&[whole(1_000), limit], ""), Decision::Sliced(9));
    }

    #[test]
    fn near_the_least_turnaround_the_fastest() {
        let (a, b) =
            (form(Decision::Preemptible, 1_010, 260), form(Decision::Sliced(9), 1_400, 200));
        assert_eq!(best(&[whole(1_000), a, b], ""), Decision::Preemptible);
        assert_eq!(best(&[whole(1_000), b, a], ""), Decision::Preemptible);
    }

    #[test]
    fn what_gains_little_is_not_worth_it() {
        let nearly = form(Decision::Preemptible, 1_010, 800);
        assert_eq!(best(&[whole(1_000), nearly], ""), Decision::Run(0));
        let gain = form(Decision::Preemptible, 1_010, 749);
        assert_eq!(best(&[whole(1_000), gain], ""), Decision::Preemptible);
    }

    #[test]
    fn sm_limited_is_the_last_resort() {
        let limited = form(Decision::SmLimited(112), 3_500, 10);
        let kept = form(Decision::Sliced(9), 4_400, 30);
        assert_eq!(best(&[whole(3_000), kept, limited], ""), Decision::Sliced(9));
        assert_eq!(best(&[whole(3_000), limited], ""), Decision::SmLimited(112));
        let shorter = form(Decision::Preemptible, 3_100, 300);
        let limited = form(Decision::SmLimited(112), 3_500, 500);
        assert_eq!(best(&[whole(3_000), shorter, limited], ""), Decision::Preemptible);
        let longer = form(Decision::Preemptible, 3_100, 900);
        assert_eq!(best(&[whole(3_000), longer, limited], ""), Decision::SmLimited(112));
    }

    #[test]
    fn a_bound_of_0_asks_for_the_least_that_can_be_had() {
        let (a, b) = (form(Decision::Preemptible, 105, 20), form(Decision::Sliced(9), 130, 8));
        assert_eq!(best(&[whole(100), a, b], "turnaround_ns_max = 0"), Decision::Sliced(9));
    }
}
