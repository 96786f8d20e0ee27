//! Standard output of commands whose exit code tells something.

use std::io::{ErrorKind, Result, Write};

/// Who stops reading (`| head`) misses the text; the command goes on to its exit code.
pub struct UnlessClosed<W>(pub W);

fn unless_closed<T>(done: Result<T>, instead: T) -> Result<T> {
    match done {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(instead),
        done => done,
    }
}

impl<W: Write> Write for UnlessClosed<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        unless_closed(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        unless_closed(self.0.flush(), ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_ended_is_no_error_and_a_full_disk_is() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut out = UnlessClosed(writer);
        out.write_all(b"lost").unwrap();
        out.flush().unwrap();
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert!(UnlessClosed(full).write_all(b"x").is_err());
    }
}
