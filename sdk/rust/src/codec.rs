//! A small codec for what a policy saves ([`crate::Stateful`]): whole numbers in LEB128, so that the
//! usual small ones take one byte, and no more structure than reading them back needs.
//!
//! ```
//! use tally_sdk::codec::{Reader, Writer};
//!
//! #[derive(Debug, PartialEq)]
//! struct Seen {
//!     launches: u64,
//!     longest_ns: Option<u64>,
//! }
//! tally_sdk::saved_fields!(Seen { launches, longest_ns });
//!
//! let seen = Seen { launches: 70_000, longest_ns: None };
//! let mut out = Writer::new("mine", 1);
//! out.put(&seen);
//! let saved = out.finish();
//!
//! let mut from = Reader::new(&saved, "mine", 1)?;
//! assert_eq!(from.get::<Seen>()?, seen);
//! assert!(from.is_done());
//! # Ok::<(), String>(())
//! ```
//!
//! What is restored may be anything, so every read is checked and says where it failed. The SDKs of the other
//! languages write numbers and texts the same way.

use crate::{Decision, Form, FormsOffered, SAVED_BYTES_MAX, Saved};

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

    /// Any value that can be saved.
    pub fn put(&mut self, value: &impl Field) {
        value.put(self);
    }

    /// A list of pairs, up to the end of what is saved: the last thing to write, for [`Reader::pairs`].
    pub fn pairs<'a, K: Field, V: Field + 'a>(&mut self, all: impl Iterator<Item = (K, &'a V)>) {
        for (key, value) in all {
            self.put(&key);
            self.put(value);
        }
    }

    /// The saved state with everything written so far.
    pub fn finish(self) -> Saved {
        self.saved
    }
}

/// Reads the values of a saved state in the order in which they were written.
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

    /// Any value that can be saved.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn get<T: Field>(&mut self) -> Result<T, String> {
        T::get(self)
    }

    /// All pairs that follow, up to the end.
    ///
    /// # Errors
    /// What is wrong with one of them, and where.
    pub fn pairs<K: Field, V: Field>(&mut self) -> Result<Vec<(K, V)>, String> {
        let mut all = Vec::new();
        while !self.is_done() {
            all.push((self.get()?, self.get()?));
        }
        Ok(all)
    }

    /// The message for something that is wrong here.
    pub fn wrong(&self, what: &str) -> String {
        format!("byte {} of {}: {what}", self.at, self.bytes.len())
    }
}

/// A value that can be saved and read back.
pub trait Field: Sized {
    /// Appends the value to `out`, in the form that [`get`](Self::get) reads.
    fn put(&self, out: &mut Writer);

    /// Read it back.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    fn get(from: &mut Reader) -> Result<Self, String>;
}

impl Field for u64 {
    fn put(&self, out: &mut Writer) {
        out.number(*self);
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        from.number()
    }
}

impl Field for u32 {
    fn put(&self, out: &mut Writer) {
        out.number((*self).into());
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        let n = from.number()?;
        n.try_into().map_err(|_| from.wrong("a number of more than 32 bits"))
    }
}

impl Field for bool {
    fn put(&self, out: &mut Writer) {
        out.number((*self).into());
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        match from.number()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(from.wrong("neither true nor false")),
        }
    }
}

/// The length in bytes, then the text in UTF-8.
impl Field for String {
    fn put(&self, out: &mut Writer) {
        out.number(self.len() as u64);
        out.saved.data.extend_from_slice(self.as_bytes());
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        let length = usize::try_from(from.number()?).unwrap_or(usize::MAX);
        let end = from.at.saturating_add(length);
        let bytes = from.bytes.get(from.at..end).ok_or_else(|| from.wrong("the end"))?;
        let text = std::str::from_utf8(bytes).map_err(|_| from.wrong("not a text"))?;
        from.at = end;
        Ok(text.into())
    }
}

/// 0, or 1 and the value.
impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Writer) {
        out.put(&self.is_some());
        if let Some(value) = self {
            out.put(value);
        }
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        from.get::<bool>()?.then(|| from.get()).transpose()
    }
}

impl<T: Field, const N: usize> Field for [T; N] {
    fn put(&self, out: &mut Writer) {
        self.iter().for_each(|value| out.put(value));
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        let values: Vec<T> = (0..N).map(|_| from.get()).collect::<Result<_, _>>()?;
        values.try_into().map_err(|_| from.wrong("another count of values"))
    }
}

/// The form that it asks for; neither leases nor holds.
impl Field for Decision {
    fn put(&self, out: &mut Writer) {
        let (form, argument) = self.form();
        out.number(form as u64);
        out.put(&argument);
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        const WHOLE: u64 = Form::Whole as u64;
        const SLICED: u64 = Form::Sliced as u64;
        const PREEMPTIBLE: u64 = Form::Preemptible as u64;
        const SM_LIMITED: u64 = Form::SmLimited as u64;
        match (from.number()?, from.get()?) {
            (WHOLE, 0) => Ok(Decision::Run(0)),
            (SLICED, blocks @ 1..) => Ok(Decision::Sliced(blocks)),
            (PREEMPTIBLE, 0) => Ok(Decision::Preemptible),
            (SM_LIMITED, sms @ 1..) => Ok(Decision::SmLimited(sms)),
            _ => Err(from.wrong("a form that is none, or of a size that is none")),
        }
    }
}

/// Bits that this contract does not define are dropped when they are read.
impl Field for FormsOffered {
    fn put(&self, out: &mut Writer) {
        out.number(self.bits().into());
    }

    fn get(from: &mut Reader) -> Result<Self, String> {
        from.get::<u32>().map(|bits| FormsOffered::from_bits_truncate(bits as u8))
    }
}

/// Makes a structure a [`Field`](crate::codec::Field) of the named fields, in that order. Those behind `..`
/// are not saved, and have their defaults when it is read back.
#[macro_export]
macro_rules! saved_fields {
    ($name:ident { $($field:ident),+ $(,)? $(.. $default:expr)? }) => {
        impl $crate::codec::Field for $name {
            fn put(&self, out: &mut $crate::codec::Writer) {
                $(out.put(&self.$field);)+
            }

            fn get(
                from: &mut $crate::codec::Reader,
            ) -> ::core::result::Result<Self, ::std::string::String> {
                ::core::result::Result::Ok($name { $($field: from.get()?,)+ $(..$default)? })
            }
        }
    };
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
        assert!(from.get::<u32>().is_err());
    }

    /// The bytes that the SDKs of the other languages write for the same.
    const SAMPLE: [u8; 8] = [0x03, 0xf0, 0xa2, 0x04, 0x03, b'a', 0xc3, 0xa9];

    #[test]
    fn numbers_and_texts_are_written_as_in_every_language() {
        let mut out = Writer::new("f", 1);
        out.put(&3_u32);
        out.put(&70_000_u64);
        out.put(&"a\u{e9}".to_owned());
        assert_eq!(out.finish().data, SAMPLE);
    }

    #[test]
    fn values_of_every_type_come_back() {
        type All = ([u32; 2], Option<u64>, Option<u64>, String, FormsOffered);
        let all: All =
            ([1, u32::MAX], Some(u64::MAX), None, "caf\u{e9}".into(), FormsOffered::SLICED);
        let mut out = Writer::new("f", 1);
        out.put(&all.0);
        out.put(&all.1);
        out.put(&all.2);
        out.put(&all.3);
        out.put(&all.4);
        let saved = out.finish();
        let mut from = Reader::new(&saved, "f", 1).unwrap();
        let read = |from: &mut Reader| -> Result<All, String> {
            Ok((from.get()?, from.get()?, from.get()?, from.get()?, from.get()?))
        };
        assert_eq!(read(&mut from), Ok(all));
        // Cut short anywhere it is refused.
        for end in 0..saved.data.len() {
            let cut = Saved { data: saved.data[..end].into(), ..saved.clone() };
            assert!(read(&mut Reader::new(&cut, "f", 1).unwrap()).is_err(), "{end}");
        }
    }

    #[test]
    fn pairs_come_back_up_to_the_end_and_half_a_pair_is_refused() {
        let all = vec![(7_u32, 70_000_u64), (8, 1)];
        let mut out = Writer::new("f", 1);
        out.put(&true);
        out.pairs(all.iter().map(|(key, value)| (*key, value)));
        let saved = out.finish();
        let mut from = Reader::new(&saved, "f", 1).unwrap();
        assert_eq!(from.get::<bool>(), Ok(true));
        assert_eq!(from.pairs(), Ok(all));
        assert_eq!(from.pairs::<u32, u64>(), Ok(Vec::new()));
        let cut = Saved { data: saved.data[..saved.data.len() - 1].into(), ..saved };
        let mut from = Reader::new(&cut, "f", 1).unwrap();
        assert!(from.get::<bool>().is_ok() && from.pairs::<u32, u64>().is_err());
    }

    #[test]
    fn forms_come_back_and_nothing_else_is_a_form() {
        let forms = [
            Decision::Run(0),
            Decision::Preemptible,
            Decision::Sliced(9),
            Decision::SmLimited(u32::MAX),
        ];
        let mut out = Writer::new("f", 1);
        out.put(&forms);
        for bad in [[0_u32, 1], [1, 0], [2, 1], [3, 0], [4, 0]] {
            out.put(&bad);
        }
        let saved = out.finish();
        let mut from = Reader::new(&saved, "f", 1).unwrap();
        assert_eq!(from.get(), Ok(forms));
        while !from.is_done() {
            assert!(from.get::<Decision>().unwrap_err().contains("a form that is none"));
        }
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
