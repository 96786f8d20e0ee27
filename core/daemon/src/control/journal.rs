//! Log lines that others can cause: so many of a kind a second, and then one line with the count of the rest.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Lines of a kind in each stretch.
const LINES: u64 = 5;
/// How long a stretch is.
const STRETCH: Duration = Duration::from_secs(1);

/// What a log line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Connections that got no place.
    Connections,
    Refusals,
    Registered,
    /// Clients that left, or were dropped.
    Left,
    /// Programs that are not governed.
    Ungoverned,
    /// Descriptors that are not taken.
    Descriptors,
    /// Admin requests that got no place or were denied.
    Admin,
}

const KINDS: usize = Kind::Admin as usize + 1;

impl Kind {
    fn text(self) -> &'static str {
        match self {
            Kind::Connections => "connections were closed for want of a place",
            Kind::Refusals => "clients were refused",
            Kind::Registered => "clients registered",
            Kind::Left => "clients left",
            Kind::Ungoverned => "programs are not governed",
            Kind::Descriptors => "connections were closed because their user's descriptors hang",
            Kind::Admin => "admin requests were refused",
        }
    }
}

#[derive(Debug, Default)]
struct Stretch {
    is_open: bool,
    lines: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Journal(Rc<RefCell<[Stretch; KINDS]>>);

impl Journal {
    /// Whether a line about `kind` is written. On the control thread, in its runtime.
    pub fn may(&self, kind: Kind) -> bool {
        let mut all = self.0.borrow_mut();
        let stretch = &mut all[kind as usize];
        stretch.lines += 1;
        if !std::mem::replace(&mut stretch.is_open, true) {
            let journal = self.clone();
            tokio::task::spawn_local(async move {
                tokio::time::sleep(STRETCH).await;
                let stretch = std::mem::take(&mut journal.0.borrow_mut()[kind as usize]);
                if let Some(more) = stretch.lines.checked_sub(LINES).filter(|more| *more > 0) {
                    tracing::warn!("{more} more {} within a second", kind.text());
                }
            });
        }
        stretch.lines <= LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_of_a_kind_are_written() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let journal = Journal::default();
            let written = (0..10_000).filter(|_| journal.may(Kind::Refusals)).count();
            assert_eq!(written as u64, LINES);
            assert!(journal.may(Kind::Left), "another kind");
            tokio::time::sleep(2 * STRETCH).await;
            assert!(journal.may(Kind::Refusals), "the next stretch");
        });
    }
}
