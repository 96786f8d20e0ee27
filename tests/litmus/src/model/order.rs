//! A relation between moments, and what follows from it.

/// `a` before `b`, for moments by number.
#[derive(Default)]
pub struct Order {
    after: Vec<Vec<u32>>,
    /// For each moment a bit for every later one; as of the last [`close`](Self::close).
    reached: Vec<Vec<u64>>,
    grown: bool,
}

impl Order {
    pub fn new(moments: usize) -> Self {
        Self { after: vec![Vec::new(); moments], reached: Vec::new(), grown: true }
    }

    /// Adds `a` before `b`.
    pub fn add(&mut self, a: usize, b: usize) {
        if self.reached.is_empty() || !self.before(a, b) {
            self.after[a].push(b as u32);
            self.grown = true;
        }
    }

    /// Whether `a` comes before `b`, as far as was known at the last [`close`](Self::close).
    pub fn before(&self, a: usize, b: usize) -> bool {
        self.reached[a][b / 64] >> (b % 64) & 1 == 1
    }

    /// Finds all that follows. `false` if nothing was added since the last time.
    ///
    /// # Errors
    /// If a moment would come before itself.
    pub fn close(&mut self) -> Result<bool, String> {
        if !self.grown {
            return Ok(false);
        }
        self.grown = false;
        let count = self.after.len();
        let sorted = self.sorted()?;
        let mut reached = vec![vec![0_u64; count.div_ceil(64)]; count];
        for &a in sorted.iter().rev() {
            let mut own = std::mem::take(&mut reached[a]);
            for &b in &self.after[a] {
                let b = b as usize;
                own[b / 64] |= 1 << (b % 64);
                own.iter_mut().zip(&reached[b]).for_each(|(own, its)| *own |= its);
            }
            reached[a] = own;
        }
        self.reached = reached;
        Ok(true)
    }

    /// All moments, each after those before it.
    ///
    /// # Errors
    /// If that cannot be.
    pub fn sorted(&self) -> Result<Vec<usize>, String> {
        let mut open = vec![0_u32; self.after.len()];
        self.after.iter().flatten().for_each(|&b| open[b as usize] += 1);
        let mut sorted: Vec<usize> = (0..open.len()).filter(|&m| open[m] == 0).collect();
        let mut at = 0;
        while let Some(&a) = sorted.get(at) {
            at += 1;
            for &b in &self.after[a] {
                open[b as usize] -= 1;
                if open[b as usize] == 0 {
                    sorted.push(b as usize);
                }
            }
        }
        if sorted.len() == open.len() {
            Ok(sorted)
        } else {
            Err("something may never end: it waits for itself".into())
        }
    }

    /// What comes directly after.
    pub fn next(&self, a: usize) -> impl Iterator<Item = usize> + '_ {
        self.after[a].iter().map(|&b| b as usize)
    }

    pub fn len(&self) -> usize {
        self.after.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_found_and_circles_are_refused() {
        let mut order = Order::new(100);
        (0..99).for_each(|m| order.add(m, m + 1));
        assert!(order.close().unwrap() && !order.close().unwrap());
        assert!(order.before(0, 99) && !order.before(99, 0) && !order.before(5, 5));
        order.add(3, 90);
        assert!(!order.close().unwrap(), "known already");
        order.add(90, 3);
        assert!(order.close().is_err());
    }
}
