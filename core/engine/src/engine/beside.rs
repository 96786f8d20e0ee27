//! Whether a launch ran beside other clients' work: then the time it took is not its own.

/// Counts clients with work on the GPU.
#[derive(Debug, Default)]
pub(super) struct Beside {
    active: u32,
    /// When two or more clients last had work at once, ns.
    last_ns: Option<u64>,
}

impl Beside {
    /// A client became active, or ceased to be.
    pub fn note(&mut self, now_ns: u64, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.active += 1,
            (true, false) => {
                if self.active > 1 {
                    self.last_ns = Some(now_ns);
                }
                self.active = self.active.saturating_sub(1);
            }
            _ => {}
        }
    }

    /// Whether, while one client was active from `since_ns` until now, another was at any time.
    pub fn others_since(&self, since_ns: u64) -> bool {
        self.active > 1 || self.last_ns.is_some_and(|last_ns| last_ns > since_ns)
    }
}
