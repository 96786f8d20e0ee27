//! An entry as it is kept over a reload ([`crate::saved`]).

use super::{Entry, PERIOD_FIRST, TRIED, Tried};
use crate::saved::{Reader, Writer};
use tally_sdk::LaunchFlags;

/// Bits of an entry.
const LONG_WHOLE: u64 = 1 << 0;
const TOLD: u64 = 1 << 1;
const SETTLED: u64 = 1 << 2;
const NEXT: u64 = 1 << 3;

impl Entry {
    /// Write it down.
    pub fn write(&self, out: &mut Writer) {
        out.number(self.kernel.into());
        let bit = |is: bool, bit| if is { bit } else { 0 };
        out.number(
            bit(self.is_long_whole, LONG_WHOLE)
                | bit(self.is_told, TOLD)
                | bit(self.is_settled, SETTLED)
                | bit(self.next.is_some(), NEXT),
        );
        out.choice(self.chosen);
        if let Some(next) = self.next {
            out.choice(next);
        }
        for n in [self.ask_in, self.offers.bits().into(), self.due, self.period, self.whole_tries] {
            out.number(n.into());
        }
        let used = |t: &&Tried| t.tries > 0 || t.count > 0;
        out.number(self.tried.iter().filter(used).count() as u64);
        for tried in self.tried.iter().filter(used) {
            out.choice(tried.choice);
            out.number(u64::from(tried.tries) << 1 | u64::from(tried.is_warm));
            for n in [tried.count, tried.mean_ns, tried.time_ns] {
                out.number(n);
            }
        }
    }

    /// Read it back. What it holds may be anything that an entry can.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn read(from: &mut Reader) -> Result<Self, String> {
        let mut entry = Entry::new(from.small()?);
        let bits = from.number()?;
        entry.is_long_whole = bits & LONG_WHOLE != 0;
        entry.is_told = bits & TOLD != 0;
        entry.is_settled = bits & SETTLED != 0;
        entry.chosen = from.choice()?;
        if bits & NEXT != 0 {
            entry.next = Some(from.choice()?);
        }
        entry.ask_in = from.small()?;
        entry.offers = LaunchFlags::from_bits_truncate(from.small()? as u16);
        entry.due = from.small()?;
        entry.period = from.small()?.max(PERIOD_FIRST);
        entry.whole_tries = from.small()?;
        let count = from.number()?;
        if count > TRIED as u64 {
            return Err(format!(
                "{count} forms were tried of one kernel, and {TRIED} are remembered"
            ));
        }
        for tried in entry.tried.iter_mut().take(count as usize) {
            tried.choice = from.choice()?;
            let tries = from.number()?;
            (tried.tries, tried.is_warm) = ((tries >> 1) as u32, tries & 1 != 0);
            tried.count = from.number()?;
            tried.mean_ns = from.number()?;
            tried.time_ns = from.number()?;
        }
        Ok(entry)
    }

    /// It was chosen under other settings: look again at its next launch.
    pub fn look_again(&mut self) {
        self.due = 0;
        self.period = PERIOD_FIRST;
    }
}
