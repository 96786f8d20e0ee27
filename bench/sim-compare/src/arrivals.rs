//! The very requests that a measured pair served: `bench/gpu` draws them with Python's
//! generator (the Mersenne Twister of Matsumoto and Nishimura, 1998) from a fixed seed.

const N: usize = 624;
const M: usize = 397;

struct Twister {
    state: [u32; N],
    index: usize,
}

impl Twister {
    /// As `random.Random(seed)` for a seed of 32 bits.
    fn new(seed: u32) -> Self {
        let mut state = [0u32; N];
        state[0] = 19_650_218;
        for i in 1..N {
            let before = state[i - 1] ^ (state[i - 1] >> 30);
            state[i] = before.wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        let mut i = 1;
        let mix = |state: &mut [u32; N], i: usize, by: u32, plus: u32| {
            let before = state[i - 1] ^ (state[i - 1] >> 30);
            state[i] = (state[i] ^ before.wrapping_mul(by)).wrapping_add(plus);
            if i + 1 < N {
                return i + 1;
            }
            state[0] = state[N - 1];
            1
        };
        for _ in 0..N {
            i = mix(&mut state, i, 1_664_525, seed);
        }
        for _ in 1..N {
            i = mix(&mut state, i, 1_566_083_941, (i as u32).wrapping_neg());
        }
        state[0] = 0x8000_0000;
        Twister { state, index: N }
    }

    fn next(&mut self) -> u32 {
        if self.index == N {
            for i in 0..N {
                let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
                let odd = if y & 1 == 0 { 0 } else { 0x9908_b0df };
                self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ odd;
            }
            self.index = 0;
        }
        let mut y = self.state[self.index];
        self.index += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// A uniform random number, from 0 to below 1.
    fn unit(&mut self) -> f64 {
        let (a, b) = (self.next() >> 5, self.next() >> 6);
        (f64::from(a) * 67_108_864.0 + f64::from(b)) / 9_007_199_254_740_992.0
    }
}

/// `stats.poisson_schedule` of the GPU suite, in nanoseconds.
pub fn poisson(rate_per_s: f64, seconds: f64, seed: u32) -> Vec<u64> {
    let (mut source, mut at, mut all) = (Twister::new(seed), 0.0, Vec::new());
    loop {
        at += -(1.0 - source.unit()).ln() / rate_per_s;
        if at.is_nan() || at >= seconds {
            return all;
        }
        all.push((at * 1e9) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_pythons() {
        // python3 -c 'import random; r = random.Random(7); print([r.random() for _ in range(700)])'
        let mut source = Twister::new(7);
        let all: Vec<f64> = (0..700).map(|_| source.unit()).collect();
        assert_eq!(
            (all[0], all[1], all[699]),
            (0.32383276483316237, 0.15084917392450192, 0.034097423373332436)
        );
    }

    #[test]
    fn the_schedule_is_the_suites() {
        // stats.poisson_schedule(100, 5, 7): its length, first and last.
        let all = poisson(100.0, 5.0, 7);
        assert_eq!((all.len(), all[0] / 1_000, all[all.len() - 1] / 1_000), (525, 3913, 4975491));
    }
}
