//! The form with offset block indices: launches of few blocks in place of whole grids.
//!
//! Made when the first launch wants it, and not with the prelude: it is one more module in the driver, as large as
//! the image, and few kernels have grids so large. Until it is there launches do without.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};

const UNTRIED: u32 = 0;
/// The worker has been asked.
const ASKED: u32 = 1;
const READY: u32 = 2;
/// The worker found that the kernel has no such form.
const NONE: u32 = 3;

/// The form with offset block indices of one kernel, or how far it has come.
#[derive(Debug, Default)]
pub struct OffsetForm {
    state: AtomicU32,
    function: AtomicUsize,
}

impl OffsetForm {
    /// The function, if it was made.
    pub fn function(&self) -> Option<usize> {
        (self.state.load(Acquire) == READY).then(|| self.function.load(Relaxed))
    }

    /// Have it made, if nobody has asked yet. Whether the worker is to be asked now.
    pub fn ask(&self) -> bool {
        self.state.compare_exchange(UNTRIED, ASKED, SeqCst, SeqCst).is_ok()
    }

    /// Whether nobody has asked for it.
    pub fn is_untried(&self) -> bool {
        self.state.load(Acquire) == UNTRIED
    }

    /// The worker could not come to it: it may be asked again.
    pub fn forgo(&self) {
        let _ = self.state.compare_exchange(ASKED, UNTRIED, SeqCst, SeqCst);
    }

    /// The worker made it, or found that there is none.
    pub(crate) fn settle(&self, function: Option<usize>) {
        self.function.store(function.unwrap_or(0), Relaxed);
        self.state.store(if function.is_some() { READY } else { NONE }, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_ready_once_made_and_asked_for_again_if_the_worker_could_not_come_to_it() {
        let form = OffsetForm::default();
        assert_eq!(form.function(), None);
        form.state.store(ASKED, SeqCst);
        form.forgo();
        assert_eq!(form.state.load(SeqCst), UNTRIED);
        form.settle(Some(7));
        assert_eq!(form.function(), Some(7));
        form.forgo();
        assert_eq!(form.function(), Some(7), "made in the meantime");
        form.settle(None);
        assert_eq!((form.function(), form.state.load(SeqCst)), (None, NONE));
    }
}
