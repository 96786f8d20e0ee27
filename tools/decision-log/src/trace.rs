//! A kernel trace out of a log: what `tally-simulator` and `tallyctl sim` read.
//!
//! A log tells of completions: which kernel, how long, when it was seen done. Launches
//! seen done at once share the time between them, by what each was expected to take. What
//! a log does not tell (registers of a thread) is left empty.

use crate::record::Record;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::Path;
use tally_engine::policy::{ClientId, Completion, Event, Form, KernelId};
use tally_engine::profile::KernelKey;

/// Rows of one trace.
const ROWS_MAX: usize = 4 << 20;

/// One kernel that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    start_ns: u64,
    dur_ns: u64,
    kernel: KernelId,
}

/// Collects the kernels of one client.
#[derive(Debug)]
pub struct Trace {
    client: String,
    ids: BTreeSet<ClientId>,
    kernels: Vec<KernelKey>,
    shared: BTreeMap<KernelId, u32>,
    /// Seen done at this time, not written yet.
    group: (u64, Vec<Completion>),
    rows: Vec<Row>,
    /// Rows of launches that ran in another form than whole: longer than the kernel.
    pub transformed: u64,
    /// Launches beyond what a trace may have.
    pub left_out: u64,
}

impl Trace {
    /// An empty trace, of the clients of this name.
    pub fn of(client: &str) -> Self {
        Trace {
            client: client.into(),
            ids: BTreeSet::new(),
            kernels: Vec::new(),
            shared: BTreeMap::new(),
            group: (0, Vec::new()),
            rows: Vec::new(),
            transformed: 0,
            left_out: 0,
        }
    }

    /// Whether a client of the name was in the log.
    pub fn has_client(&self) -> bool {
        !self.ids.is_empty()
    }

    /// Kernels of the trace so far.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Takes the next record of the log into account.
    pub fn feed(&mut self, record: &Record) {
        match record {
            Record::Base(_) => self.kernels.clear(),
            Record::Kernel { key, .. } => self.kernels.push(key.clone()),
            Record::Client(info) | Record::Event { event: Event::Joined(info), .. }
                if info.name == self.client =>
            {
                self.ids.insert(info.id);
            }
            Record::Decide { launch, .. } => {
                self.shared.insert(launch.kernel, launch.shared_bytes);
            }
            Record::Event { now_ns, event: Event::Completed(done), .. }
            | Record::Completion { now_ns, done }
                if self.ids.contains(&done.client) =>
            {
                if self.group.0 != *now_ns {
                    self.end();
                    self.group.0 = *now_ns;
                }
                self.group.1.push(*done);
            }
            _ => {}
        }
    }

    /// No more of what was seen done at once comes.
    pub fn end(&mut self) {
        let (now_ns, mut done) = (self.group.0, std::mem::take(&mut self.group.1));
        let sum =
            |of: fn(&Completion) -> u64| done.iter().fold(0u64, |all, d| all.saturating_add(of(d)));
        let (together, expected) = (sum(|d| d.charged_ns), sum(|d| d.predicted_ns));
        let known = done.iter().all(|d| d.predicted_ns > 0);
        let mut start_ns = now_ns.saturating_sub(together);
        for d in &done {
            let dur_ns = match known {
                true => {
                    let share = u128::from(together) * u128::from(d.predicted_ns);
                    (share / u128::from(expected.max(1))) as u64
                }
                false => d.charged_ns,
            };
            self.transformed += u64::from(d.form != Form::Whole);
            if self.rows.len() < ROWS_MAX {
                self.rows.push(Row { start_ns, dur_ns, kernel: d.kernel });
            } else {
                self.left_out += 1;
            }
            start_ns = start_ns.saturating_add(dur_ns);
        }
        done.clear();
        self.group.1 = done;
    }

    /// As CSV, times from the first kernel on.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&mut self, out: &mut impl Write) -> std::io::Result<()> {
        self.end();
        self.rows.sort_by_key(|r| r.start_ns);
        let origin = self.rows.first().map_or(0, |r| r.start_ns);
        writeln!(out, "ts_us,dur_us,name,grid,block,regs,smem")?;
        let us = |ns: u64| format!("{}.{:03}", ns / 1_000, ns % 1_000);
        let three = |n: [u32; 3]| format!("{}x{}x{}", n[0].max(1), n[1].max(1), n[2].max(1));
        for r in &self.rows {
            let Some(key) = self.kernels.get(r.kernel as usize) else { continue };
            // One line each, whatever a program calls its kernels.
            let name: String =
                key.name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            writeln!(
                out,
                "{},{},\"{}\",{},{},,{}",
                us(r.start_ns - origin),
                us(r.dur_ns),
                name.replace('"', "\"\""),
                three(key.grid),
                three(key.block),
                self.shared.get(&r.kernel).map_or(String::new(), u32::to_string),
            )?;
        }
        Ok(())
    }
}

impl Trace {
    /// Into a file that is not there yet; packed if its name ends in `.gz`.
    ///
    /// # Errors
    /// If it is there, or cannot be written.
    pub fn save(&mut self, path: &Path) -> std::io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        let mut file = BufWriter::new(file);
        if path.extension().is_some_and(|e| e == "gz") {
            let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::default());
            self.write(&mut packed)?;
            file = packed.finish()?;
        } else {
            self.write(&mut file)?;
        }
        file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::policy::{Class, ClientInfo};

    fn done(client: ClientId, kernel: KernelId, predicted_ns: u64, charged_ns: u64) -> Completion {
        let (form, argument, measured_ns) = (Form::Whole, 0, None);
        Completion { client, kernel, form, argument, predicted_ns, measured_ns, charged_ns }
    }

    #[test]
    fn the_simulator_reads_what_is_written() {
        let mut trace = Trace::of("job");
        let info = |id, name: &str| {
            let (class, name) = (Class::BestEffort, name.to_owned());
            Record::Client(ClientInfo { id, class, name, labels: vec![] })
        };
        trace.feed(&info(3, "job"));
        trace.feed(&info(4, "other"));
        for (id, name) in [(0, "gemm<1, 2>"), (1, "say \"hi\"\n")] {
            let key =
                KernelKey { name: name.into(), image: 0, grid: [id + 1, 1, 1], block: [32, 1, 1] };
            trace.feed(&Record::Kernel { id, key });
        }
        // One by itself, then two seen at once: 40 us, of which one was expected to take
        // three times as long as the other.
        trace.feed(&Record::Completion { now_ns: 1_000_000, done: done(3, 0, 9_000, 10_000) });
        trace.feed(&Record::Completion { now_ns: 1_000_500, done: done(4, 0, 1, 1) });
        for (kernel, predicted) in [(0, 30_000), (1, 10_000)] {
            let done = done(3, kernel, predicted, 20_000);
            trace.feed(&Record::Completion { now_ns: 1_050_000, done });
        }
        let mut csv = Vec::new();
        trace.write(&mut csv).unwrap();
        assert!(trace.has_client() && trace.rows() == 3 && trace.transformed == 0);
        let read = tally_simulator::Trace::parse("t", std::str::from_utf8(&csv).unwrap()).unwrap();
        let last = &read.kernels[read.kernels.len() - 2..];
        assert_eq!((last[0].name.as_str(), last[0].dur_ns), ("gemm<1, 2>", 30_000));
        assert_eq!((last[1].name.as_str(), last[1].dur_ns), ("say \"hi\"", 10_000));
        assert_eq!(last[1].grid, [2, 1, 1]);
        assert_eq!(last[1].start_ns - last[0].start_ns, 30_000);
    }
}
