//! How the GPU's time went to several best-effort programs, and how it should have gone by their weights.
//!
//! A program's *fair* time is its weighted max-min share of what all of them had together: by weight, but none gets
//! more than it uses alone, and what it leaves goes to the others by their weights (Bertsekas and Gallager, *Data
//! Networks*, 6.5.2). A program whose own part takes half of its time cannot use more than half of the GPU, and that is
//! no unfairness. One number sums it up: Jain's index of time over fair time, 1 if all are alike, 1/n if one has
//! everything (Jain, Chiu and Hawe, DEC-TR-301, 1984).

use crate::report::{Fairness, Shared, ms};
use crate::sim::Tenant;

/// What a program did in a window of time.
pub(crate) struct Used {
    /// Rate over its rate alone.
    pub share: f64,
    pub gpu_ns: u64,
    pub charged_ns: u64,
}

/// Of each program what it did in a window of this length.
pub(crate) fn judge(tenants: &[Tenant<'_>], each: &[Used], length_ns: u64) -> Fairness {
    let used: Vec<f64> = each.iter().map(|used| used.gpu_ns as f64).collect();
    let weights: Vec<f64> = tenants.iter().map(|tenant| f64::from(tenant.weight)).collect();
    let alone = |tenant: &Tenant<'_>| {
        let gpu_ns: u64 = tenant.trace.kernels.iter().map(|k| k.dur_ns + k.gap_ns).sum();
        gpu_ns as f64 / tenant.trace.period_ns.max(1) as f64 * length_ns as f64
    };
    let most: Vec<f64> = tenants.iter().map(alone).collect();
    let all: f64 = used.iter().sum();
    let fair = max_min(&weights, &most, all);
    let of_all = |ns: f64| if all > 0.0 { ns / all } else { 0.0 };
    let sum: f64 = weights.iter().sum();
    let client = |at: usize| Shared {
        trace: tenants[at].trace.name.clone(),
        weight: tenants[at].weight,
        share: each[at].share,
        gpu_ms: ms(each[at].gpu_ns),
        charged_ms: ms(each[at].charged_ns),
        gpu_share: of_all(used[at]),
        weight_share: weights[at] / sum,
        fair_share: of_all(fair[at]),
    };
    let relative: Vec<f64> = used.iter().zip(&fair).map(|(used, fair)| used / fair).collect();
    Fairness { jain: jain(&relative), clients: (0..tenants.len()).map(client).collect() }
}

/// Divides `all` by weight, to nobody more than its `most`. If all of them together do not take `all`, by how much each
/// takes.
fn max_min(weights: &[f64], most: &[f64], all: f64) -> Vec<f64> {
    let sum: f64 = most.iter().sum();
    if sum <= all {
        return most.iter().map(|most| most / sum * all).collect();
    }
    let mut fair = vec![0.0; weights.len()];
    let mut open: Vec<usize> = (0..weights.len()).collect();
    let mut left = all;
    loop {
        let by_weight = left / open.iter().map(|&at| weights[at]).sum::<f64>();
        let (full, rest): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|&&at| most[at] <= by_weight * weights[at]);
        if full.is_empty() {
            open.iter().for_each(|&at| fair[at] = by_weight * weights[at]);
            return fair;
        }
        full.iter().for_each(|&at| fair[at] = most[at]);
        left -= full.iter().map(|&at| most[at]).sum::<f64>();
        open = rest;
    }
}

/// Jain's index; 1 of nothing.
fn jain(values: &[f64]) -> f64 {
    let (sum, squares) =
        values.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    if squares > 0.0 { sum * sum / (values.len() as f64 * squares) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_cannot_use_goes_to_the_others_by_weight() {
        assert_eq!(max_min(&[3.0, 1.0], &[100.0, 100.0], 80.0), [60.0, 20.0]);
        assert_eq!(max_min(&[3.0, 1.0, 1.0], &[40.0, 100.0, 100.0], 100.0), [40.0, 30.0, 30.0]);
        // One that gets little by weight is full only after another is.
        assert_eq!(max_min(&[8.0, 1.0, 1.0], &[20.0, 30.0, 100.0], 100.0), [20.0, 30.0, 50.0]);
        assert_eq!(max_min(&[3.0, 1.0], &[30.0, 10.0], 80.0), [60.0, 20.0], "nobody wants more");
    }

    #[test]
    fn the_index_is_one_for_equals_and_falls_to_one_over_their_number() {
        assert_eq!(jain(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(jain(&[3.0, 0.0, 0.0]), 1.0 / 3.0);
        assert_eq!(jain(&[1.0, 3.0]), 0.8);
        assert_eq!(jain(&[0.0, 0.0]), 1.0);
    }
}
