//! Takes out of a pair's difference what the difference of load explains (CUPED; Deng, Xu,
//! Kohavi and Walker, WSDM 2013).
//!
//! The slope is that of earlier pairs alone. Whatever it is, if the policies make no difference,
//! the pair's order decides the sign of what is left and nothing else, so the test stays exact. It
//! is taken around the means of earlier pairs, so a ratio that B multiplies all figures by does
//! not change it. Only the number of requests is taken out: best-effort work is what policies
//! trade for latency, and to take it out would hide the effect.

/// Pairs before anything is taken out.
const PAIRS_FIRST: f64 = 10.0;
/// The slope is drawn towards 0 as if so many pairs had shown none.
const PAIRS_NONE: f64 = 5.0;
/// Differences beyond this count as this: a ratio of 7.
const DIFFERENCE_MAX: f64 = 2.0;

#[derive(Clone, Debug, Default)]
pub struct Adjuster {
    pairs: f64,
    mean_load: f64,
    mean: f64,
    load_load: f64,
    load_difference: f64,
}

impl Adjuster {
    fn slope(&self) -> f64 {
        if self.pairs < PAIRS_FIRST || self.load_load <= 0.0 {
            return 0.0;
        }
        self.load_difference / (self.load_load * (1.0 + PAIRS_NONE / self.pairs))
    }

    /// What is left of a pair's difference; `load`: that of the logarithms of its requests.
    pub fn push(&mut self, difference: f64, load: f64) -> f64 {
        let left = difference - self.slope() * load;
        if difference.is_finite() && load.is_finite() {
            let difference = difference.clamp(-DIFFERENCE_MAX, DIFFERENCE_MAX);
            self.pairs += 1.0;
            let beside = load - self.mean_load;
            self.mean_load += beside / self.pairs;
            self.mean += (difference - self.mean) / self.pairs;
            self.load_load += beside * (load - self.mean_load);
            self.load_difference += beside * (difference - self.mean);
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    /// Differences of which load explains most, and an effect.
    fn pairs(effect: f64) -> Vec<(f64, f64)> {
        let mut random = Rng::with_seed(3);
        let mut noise = || 2.0 * random.f64() - 1.0;
        (0..200)
            .map(|_| {
                let load = 0.3 * noise();
                (effect + 1.5 * load + 0.1 * noise(), load)
            })
            .collect()
    }

    fn left(pairs: &[(f64, f64)]) -> Vec<f64> {
        let mut adjuster = Adjuster::default();
        pairs.iter().map(|(difference, load)| adjuster.push(*difference, *load)).collect()
    }

    #[test]
    fn what_load_explains_is_taken_out_and_an_effect_is_not() {
        let size = |all: &[f64]| all[50..].iter().map(|d| d * d).sum::<f64>();
        let raw: Vec<f64> = pairs(0.0).iter().map(|pair| pair.0).collect();
        assert!(size(&left(&pairs(0.0))) < 0.2 * size(&raw));
        for (without, with) in left(&pairs(0.0)).iter().zip(left(&pairs(0.1))) {
            assert!((with - without - 0.1).abs() < 1e-9, "{with} {without}");
        }
    }

    /// With the arms of a pair exchanged, what is left of it changes its sign and nothing else.
    #[test]
    fn the_sign_is_the_coins() {
        let (mut one, mut other) = (Adjuster::default(), Adjuster::default());
        for (difference, load) in pairs(0.2) {
            let exchanged = other.clone().push(-difference, -load);
            assert_eq!(one.push(difference, load), -exchanged);
            other.push(difference, load);
        }
        assert!(one.push(f64::NAN, 0.0).is_nan() && one.slope().is_finite());
    }
}
