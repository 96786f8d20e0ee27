//! The file: a header, then records, each with its length and a checksum.
//!
//! ```text
//! "TALLYLOG"  version u32  length u32  crc32 u32  header (JSON)
//! length u32  crc32 u32  record          as often as there are records
//! ```
//!
//! All numbers little-endian. A file that was cut off, by a core that was killed or a
//! disk that is full, is good up to its last whole record.

use crate::decode::{self, Malformed};
use crate::record::{Encoder, RECORD_BYTES_MAX, Record, kind};
use crate::text::make_printable;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};

/// The first bytes of a log.
pub const MAGIC: [u8; 8] = *b"TALLYLOG";
/// Version of the format; a reader takes no other.
pub const VERSION: u32 = 1;
const HEADER_BYTES_MAX: u32 = 64 << 10;

/// What holds for the whole log. Policies and their configuration are records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Package and version of the policy contract.
    pub contract: String,
    /// Release of the core that wrote it.
    pub core: String,
    /// When it began, seconds since the epoch.
    pub started_unix_s: u64,
    /// What policies might use: `[policy.limits]` of the core's configuration.
    pub limits: serde_json::Value,
    /// What policies were granted: `[policy] capabilities`.
    pub capabilities: Vec<String>,
}

/// Why a log is not read, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("{0}")]
    Read(#[from] std::io::Error),
    #[error(
        "it does not begin as a decision log does: expected a file that `tallyctl log record` wrote"
    )]
    NotALog,
    /// A release with another format wrote it.
    #[error("its format is version {found}; this release reads version {VERSION}")]
    Version { found: u32 },
    /// Damaged in its first bytes.
    #[error("its header is damaged: {0}")]
    Header(String),
    /// It stops within a record.
    #[error(
        "it is cut off within record {record}, at byte {at}: the core was killed or its disk was full; what comes before is good"
    )]
    CutOff {
        /// Number of the record, from 1.
        record: u64,
        /// Offset of its first byte.
        at: u64,
    },
    /// Bytes are not those that were written.
    #[error("record {record}, at byte {at}, is damaged ({why}); what comes before is good")]
    Damaged {
        /// Number of the record, from 1.
        record: u64,
        /// Offset of its first byte.
        at: u64,
        why: String,
    },
}

/// Writes the header, then records, each with a checksum.
pub struct Writer<W: Write> {
    out: W,
    bytes: u64,
    records: u64,
    buffer: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begin with a header.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn new(mut out: W, header: &Header) -> std::io::Result<Self> {
        let json = serde_json::to_vec(header)?;
        let mut start = Vec::with_capacity(json.len() + 20);
        start.extend_from_slice(&MAGIC);
        for word in [VERSION, json.len() as u32, crc32fast::hash(&json)] {
            start.extend_from_slice(&word.to_le_bytes());
        }
        start.extend_from_slice(&json);
        out.write_all(&start)?;
        Ok(Writer { out, bytes: start.len() as u64, records: 0, buffer: Vec::new() })
    }

    /// Add a record as it came out of a ring.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn raw(&mut self, record: &[u8]) -> std::io::Result<()> {
        self.out.write_all(&(record.len() as u32).to_le_bytes())?;
        self.out.write_all(&crc32fast::hash(record).to_le_bytes())?;
        self.out.write_all(record)?;
        self.bytes += record.len() as u64 + 8;
        self.records += 1;
        Ok(())
    }

    /// Add a record.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn record(&mut self, record: &Record) -> std::io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        Encoder(&mut buffer).record(record);
        let written = self.raw(&buffer);
        self.buffer = buffer;
        written
    }

    /// Pass on what is buffered.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }

    /// Bytes written so far, the header included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn records(&self) -> u64 {
        self.records
    }

    pub fn into_inner(self) -> W {
        self.out
    }
}

/// Reads a log that may be anything.
#[derive(Debug)]
pub struct Reader<R: Read> {
    from: R,
    header: Header,
    at: u64,
    records: u64,
    buffer: Vec<u8>,
    over: bool,
    ended: bool,
}

/// Fill `bytes` as far as there is anything: how many were read.
fn fill(from: &mut impl Read, bytes: &mut [u8]) -> std::io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match from.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}

impl<R: Read> Reader<R> {
    /// Read the header.
    ///
    /// # Errors
    /// If it is no log, or of a version that is not read.
    pub fn new(mut from: R) -> Result<Self, LogError> {
        let mut start = [0; 20];
        let got = fill(&mut from, &mut start)?;
        if got < MAGIC.len() || start[..8] != MAGIC {
            return Err(LogError::NotALog);
        }
        let (version, length, sum) = (word(&start[8..]), word(&start[12..]), word(&start[16..]));
        if got >= 12 && version != VERSION {
            return Err(LogError::Version { found: version });
        }
        if got < start.len() || length > HEADER_BYTES_MAX {
            return Err(LogError::Header("it is cut off or too long".into()));
        }
        let mut json = vec![0; length as usize];
        if fill(&mut from, &mut json)? < json.len() || crc32fast::hash(&json) != sum {
            return Err(LogError::Header("it is cut off, or its checksum is wrong".into()));
        }
        let no_header = |e: serde_json::Error| LogError::Header(e.to_string());
        let mut header = serde_json::from_slice(&json).map_err(no_header)?;
        make_printable(&mut header);
        let header = serde_json::from_value(header).map_err(no_header)?;
        let at = start.len() as u64 + u64::from(length);
        Ok(Reader { from, header, at, records: 0, buffer: Vec::new(), over: false, ended: false })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn records(&self) -> u64 {
        self.records
    }

    /// Whether the last record was read: the log is complete.
    pub fn has_end(&self) -> bool {
        self.ended
    }

    /// The next record; `None` at the end, and after an error.
    ///
    /// # Errors
    /// If what follows is not a whole, undamaged record.
    pub fn next_record(&mut self) -> Result<Option<Record>, LogError> {
        if self.over {
            return Ok(None);
        }
        let outcome = self.read();
        self.over = !matches!(outcome, Ok(Some(_)));
        outcome
    }

    fn read(&mut self) -> Result<Option<Record>, LogError> {
        let (record, at) = (self.records + 1, self.at);
        let damaged = |why: String| LogError::Damaged { record, at, why };
        let mut start = [0; 8];
        match fill(&mut self.from, &mut start)? {
            0 => return Ok(None),
            8 => {}
            _ => return Err(LogError::CutOff { record, at }),
        }
        let (length, sum) = (word(&start), word(&start[4..]));
        if length as usize > RECORD_BYTES_MAX {
            return Err(damaged(format!("{length} bytes long, at most {RECORD_BYTES_MAX} are")));
        }
        // Grows with what is there, not with what is claimed.
        self.buffer.clear();
        let got = (&mut self.from).take(length.into()).read_to_end(&mut self.buffer)?;
        if got < length as usize {
            return Err(LogError::CutOff { record, at });
        }
        if crc32fast::hash(&self.buffer) != sum {
            return Err(damaged("its checksum is wrong".into()));
        }
        let decoded =
            decode::record(&self.buffer).map_err(|e: Malformed| damaged(e.to_string()))?;
        self.ended |= self.buffer.first() == Some(&kind::END);
        self.records = record;
        self.at = at + 8 + u64::from(length);
        Ok(Some(decoded))
    }
}
