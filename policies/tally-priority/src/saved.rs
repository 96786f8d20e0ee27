//! What the policy keeps over a reload, as bytes: whole numbers in LEB128, so that the
//! usual small ones take one byte, and no more structure than reading them back needs.
//!
//! ```text
//! fingerprint of the settings | launches earned | kernels told of | entry, entry, ...
//! ```
//! The entry used last comes first, so that what does not fit is what was not used for
//! longest. A reader gets anything: every number is checked, and what does not add up
//! is refused as a whole.

use crate::choice::Choice;
use tally_sdk::{SAVED_BYTES_MAX, Saved};

/// Whose it is.
pub const FORMAT: &str = "tally-priority";
/// Rises when the encoding changes; older ones are refused.
pub const VERSION: u32 = 1;
/// Room left for what an entry takes at most.
const ENTRY_BYTES_MAX: usize = 640;

/// Writes numbers.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// An empty one, with room for all that it may hold.
    pub fn new() -> Self {
        Writer { bytes: Vec::with_capacity(16 << 10) }
    }

    /// Whether one more entry certainly fits.
    pub fn has_room(&self) -> bool {
        self.bytes.len() + ENTRY_BYTES_MAX <= SAVED_BYTES_MAX
    }

    /// A number.
    pub fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.bytes.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.bytes.push(n as u8);
    }

    /// A form.
    pub fn choice(&mut self, choice: Choice) {
        let (tag, argument) = match choice {
            Choice::Whole => (0, None),
            Choice::Preemptible => (1, None),
            Choice::Slice(blocks) => (2, Some(blocks)),
            Choice::Partition(sms) => (3, Some(sms)),
        };
        self.bytes.push(tag);
        if let Some(argument) = argument {
            self.number(argument.into());
        }
    }

    /// All of it.
    pub fn finish(self) -> Saved {
        Saved { format: FORMAT.into(), version: VERSION, data: self.bytes }
    }
}

/// Reads them back.
#[derive(Debug)]
pub struct Reader<'bytes> {
    bytes: &'bytes [u8],
    at: usize,
}

impl<'bytes> Reader<'bytes> {
    /// From the start.
    ///
    /// # Errors
    /// If it is of another policy or version.
    pub fn new(saved: &'bytes Saved) -> Result<Self, String> {
        saved.expect(FORMAT, VERSION)?;
        if saved.version < VERSION {
            return Err(format!("version {} of {FORMAT:?} is no longer understood", saved.version));
        }
        Ok(Reader { bytes: &saved.data, at: 0 })
    }

    /// Whether that was all.
    pub fn is_done(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// A number.
    pub fn number(&mut self) -> Result<u64, String> {
        let mut n = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            n |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(n);
            }
        }
        Err(self.wrong("a number that is larger than any"))
    }

    /// A number of 32 bits.
    pub fn small(&mut self) -> Result<u32, String> {
        let n = self.number()?;
        n.try_into().map_err(|_| self.wrong("a number that does not fit"))
    }

    /// A form.
    pub fn choice(&mut self) -> Result<Choice, String> {
        let choice = match self.byte()? {
            0 => Choice::Whole,
            1 => Choice::Preemptible,
            2 => Choice::Slice(self.small()?),
            3 => Choice::Partition(self.small()?),
            _ => return Err(self.wrong("an unknown form")),
        };
        match choice {
            Choice::Slice(0) | Choice::Partition(0) => Err(self.wrong("a form of size 0")),
            choice => Ok(choice),
        }
    }

    fn byte(&mut self) -> Result<u8, String> {
        let byte = *self.bytes.get(self.at).ok_or_else(|| self.wrong("the end"))?;
        self.at += 1;
        Ok(byte)
    }

    fn wrong(&self, what: &str) -> String {
        format!("byte {} of {}: {what}", self.at, self.bytes.len())
    }
}

/// Tells settings apart: what was chosen under others is looked at again.
pub fn fingerprint(text: &str) -> u64 {
    // FNV-1a: not against attackers, who could as well save another policy.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn saved(data: Vec<u8>) -> Saved {
        Saved { format: FORMAT.into(), version: VERSION, data }
    }

    proptest! {
        #[test]
        fn numbers_come_back(numbers in prop::collection::vec(any::<u64>(), 0..20), shift in 0..64) {
            let mut writer = Writer::new();
            numbers.iter().for_each(|n| writer.number(n >> shift));
            let saved = writer.finish();
            let mut reader = Reader::new(&saved).unwrap();
            for n in numbers {
                prop_assert_eq!(reader.number(), Ok(n >> shift));
            }
            prop_assert!(reader.is_done());
        }

        #[test]
        fn any_bytes_are_read_or_refused(data in prop::collection::vec(any::<u8>(), 0..60)) {
            let saved = saved(data);
            let mut reader = Reader::new(&saved).unwrap();
            while reader.number().is_ok() && reader.choice().is_ok() {}
        }
    }

    #[test]
    fn what_no_writer_writes_is_refused_with_its_place() {
        let first = |data: &[u8]| Reader::new(&saved(data.into())).unwrap().number();
        assert_eq!(first(&[]), Err("byte 0 of 0: the end".into()));
        assert!(first(&[0x80; 9]).unwrap_err().contains("the end"));
        let above = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
        assert!(first(&above).unwrap_err().contains("larger than any"));
        let choice = |data: &[u8]| Reader::new(&saved(data.into())).unwrap().choice();
        assert_eq!(choice(&[2, 5]), Ok(Choice::Slice(5)));
        assert!(choice(&[4]).unwrap_err().contains("an unknown form"));
        assert!(choice(&[3, 0]).unwrap_err().contains("size 0"));
    }

    #[test]
    fn other_formats_and_versions_are_refused() {
        let of = |format: &str, version| Saved { format: format.into(), version, data: vec![] };
        assert!(Reader::new(&of("fifo", 1)).unwrap_err().contains("\"fifo\""));
        assert!(Reader::new(&of(FORMAT, 2)).unwrap_err().contains("version 2"));
        assert!(Reader::new(&of(FORMAT, 0)).unwrap_err().contains("no longer"));
    }
}
