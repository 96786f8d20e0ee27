//! A small codec for what a policy saves ([`crate::Stateful`]): whole numbers in LEB128, so that the
//! usual small ones take one byte, and no more structure than reading them back needs.
//!
//! ```
//! use tally_sdk::codec::{Reader, Writer};
//!
//! let mut out = Writer::new("mine", 1);
//! for n in [3, 70_000] {
//!     out.number(n);
//! }
//! let saved = out.finish();
//!
//! let mut from = Reader::new(&saved, "mine", 1)?;
//! assert_eq!((from.number()?, from.number()?), (3, 70_000));
//! assert!(from.is_done());
//! # Ok::<(), String>(())
//! ```
//!
//! What is restored may be anything, so every read is checked and says where it failed.

use crate::{SAVED_BYTES_MAX, Saved};

/// Writes a policy's state, field by field.
#[derive(Debug)]
pub struct Writer {
    saved: Saved,
}

impl Writer {
    /// An empty one, for this format and version.
    pub fn new(format: &str, version: u32) -> Self {
        Writer {
            saved: Saved { format: format.into(), version, data: Vec::with_capacity(16 << 10) },
        }
    }

    /// Whether so many more bytes certainly fit.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.saved.data.len() + bytes <= SAVED_BYTES_MAX
    }

    /// A number: 1 to 10 bytes.
    pub fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.saved.data.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.saved.data.push(n as u8);
    }

    /// All of it.
    pub fn finish(self) -> Saved {
        self.saved
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
    /// If it is of another format or version.
    pub fn new(saved: &'bytes Saved, format: &str, version: u32) -> Result<Self, String> {
        saved.expect(format, version)?;
        if saved.version < version {
            return Err(format!("version {} of {format:?} is no longer understood", saved.version));
        }
        Ok(Reader { bytes: &saved.data, at: 0 })
    }

    /// Whether that was all.
    pub fn is_done(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// A number.
    ///
    /// # Errors
    /// If there is none, and where.
    pub fn number(&mut self) -> Result<u64, String> {
        let mut n = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.bytes.get(self.at).ok_or_else(|| self.wrong("the end"))?;
            self.at += 1;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            n |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(n);
            }
        }
        Err(self.wrong("a number of more than 64 bits"))
    }

    /// A number of 32 bits.
    ///
    /// # Errors
    /// Likewise.
    pub fn small(&mut self) -> Result<u32, String> {
        let n = self.number()?;
        n.try_into().map_err(|_| self.wrong("a number of more than 32 bits"))
    }

    /// The message for something that is wrong here.
    pub fn wrong(&self, what: &str) -> String {
        format!("byte {} of {}: {what}", self.at, self.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_length_come_back() {
        let numbers: Vec<u64> =
            (0..64).flat_map(|bit| [1 << bit, (1 << bit) - 1]).chain([u64::MAX]).collect();
        let mut out = Writer::new("f", 1);
        numbers.iter().for_each(|n| out.number(*n));
        let saved = out.finish();
        let mut from = Reader::new(&saved, "f", 1).unwrap();
        for n in numbers {
            assert_eq!(from.number(), Ok(n));
        }
        assert!(from.is_done());
    }

    #[test]
    fn what_no_writer_writes_is_refused_with_its_place() {
        let first = |data: &[u8]| {
            let saved = Saved { format: "f".into(), version: 1, data: data.into() };
            Reader::new(&saved, "f", 1).unwrap().number()
        };
        assert_eq!(first(&[]), Err("byte 0 of 0: the end".into()));
        assert!(first(&[0x80; 9]).unwrap_err().contains("the end"));
        let above = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
        assert!(first(&above).unwrap_err().contains("more than 64 bits"));
        let saved = Saved { format: "f".into(), version: 1, data: [0xff; 9].into() };
        let mut from = Reader::new(&saved, "f", 1).unwrap();
        assert!(from.small().is_err());
    }

    #[test]
    fn other_formats_and_versions_are_refused() {
        let of = |format: &str, version| Saved { format: format.into(), version, data: vec![] };
        for (saved, why) in
            [(of("fifo", 1), "\"fifo\""), (of("f", 3), "version 3"), (of("f", 1), "no longer")]
        {
            assert!(Reader::new(&saved, "f", 2).unwrap_err().contains(why));
        }
    }

    #[test]
    fn room_is_what_may_be_saved() {
        let mut out = Writer::new("f", 1);
        assert!(out.has_room(SAVED_BYTES_MAX) && !out.has_room(SAVED_BYTES_MAX + 1));
        out.number(1);
        assert!(!out.has_room(SAVED_BYTES_MAX));
    }
}
