//! `tallyctl log`: record, read, replay and convert decision logs.

mod replay;
mod show;
mod trace;

use crate::admin::{AdminSocket, Core, FILE_OUT, read};
use crate::error::CtlError;
use crate::output::UnlessClosed;
use crate::status::Paint;
use clap::Subcommand;
use std::fs::File;
use std::io::{BufReader, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tally_ab::units::parse_ns;
use tally_admin::{LogStatus, RecordRequest, Status};
use tally_decision_log::{Reader, Record};

/// How often a recording with an end is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Subcommand)]
pub enum LogCommand {
    /// Have the core record what reaches the policy and what it decides. Without --for
    /// it goes on until `log stop`.
    Record {
        /// Write to this file, which must not exist. Default: a new one in the core's folder of logs.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Record for this long (500ms, 30s, 5m), and wait until it is done.
        #[arg(long = "for", value_name = "TIME", value_parser = duration)]
        time: Option<Duration>,
        /// End at this size, in bytes. Default and most: log.bytes_max of the core's configuration.
        #[arg(long, value_name = "N")]
        max_bytes: Option<u64>,
        /// Record also completions that the policy does not subscribe to; `log trace` needs them.
        #[arg(long)]
        completions: bool,
    },
    /// End the recording and close its file
    Stop,
    /// Show the state of the recording, or of the last one.
    Status {
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Show what is in a log.
    Show {
        /// The decision log to read
        file: PathBuf,
        /// Print one JSON object for the header and one for each record.
        #[arg(long)]
        json: bool,
        /// Show only the last N records.
        #[arg(long, value_name = "N")]
        last: Option<usize>,
    },
    /// Repeat the policy calls of a log, without a GPU or a core, and compare the answers. With the log's own policy
    /// all must be equal; with another policy the differences are shown. Replaying runs the policy's code in the
    /// sandbox, under the log's limits or those of the preset `interpreted`, whichever are lower.
    #[command(after_help = replay::AFTER_HELP)]
    Replay(replay::ReplayArgs),
    /// Make a kernel trace of a client, for `tallyctl sim`, out of a log recorded with
    /// --completions.
    Trace {
        /// The decision log to read
        file: PathBuf,
        /// Name of the client whose launches make up the trace
        #[arg(long, value_name = "NAME")]
        client: String,
        /// Trace file to write: .csv, or .csv.gz. It must not exist.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
}

/// How long a recording may last: the core counts milliseconds.
const RECORD_NS: RangeInclusive<u64> = 1_000_000..=24 * 3_600_000_000_000;

/// A time in the units of A/B tests, within [`RECORD_NS`].
fn duration(text: &str) -> Result<Duration, String> {
    let ns = parse_ns(text)?;
    if !RECORD_NS.contains(&ns) {
        return Err(format!("{text:?}: expected 1ms to 24h"));
    }
    Ok(Duration::from_nanos(ns))
}

/// The core may run in another folder.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// Opens a log and reads its header.
fn open(file: &Path) -> Result<Reader<BufReader<File>>, CtlError> {
    let wrong = |why: String| CtlError::Failed(format!("{}: {why}", file.display()));
    let opened = File::open(file).map_err(|e| wrong(e.to_string()))?;
    Reader::new(BufReader::with_capacity(1 << 20, opened)).map_err(|e| wrong(e.to_string()))
}

/// The next record. What is wrong with the rest of a file is said once, and what was read
/// is used.
fn next(log: &mut Reader<BufReader<File>>, file: &Path) -> (Option<Record>, Option<String>) {
    match log.next_record() {
        Ok(Some(record)) => (Some(record), None),
        Ok(None) if log.has_end() => (None, None),
        Ok(None) => {
            let why = "it has no end: it is still being written, or the core was killed";
            (None, Some(format!("{}: {why}", file.display())))
        }
        Err(e) => (None, Some(format!("{}: {e}", file.display()))),
    }
}

pub fn run(socket: &AdminSocket, command: LogCommand) -> Result<(), CtlError> {
    let mut out = UnlessClosed(std::io::stdout().lock());
    match command {
        LogCommand::Record { out: file, time, max_bytes, completions } => {
            let request = RecordRequest::LogRecord {
                path: file.as_deref().map(absolute),
                for_ms: time.map(|t| t.as_millis() as u64),
                bytes_max: max_bytes,
                completions,
            };
            let mut core = Core::connect(socket)?;
            let mut status = record(&mut core, &request, file.as_deref())?;
            writeln!(out, "recording to {}", name(&status))?;
            while time.is_some() && status.recording {
                out.flush()?;
                std::thread::sleep(LOOK_EVERY);
                status = later(&status, core.get(&RecordRequest::LogStatus {})?)?;
            }
            if time.is_some() {
                summary(&mut out, &status)?;
                complete(&status)?;
            }
        }
        LogCommand::Stop => {
            let status = Core::connect(socket)?.get(&RecordRequest::LogStop {})?;
            summary(&mut out, &status)?;
            complete(&status)?;
        }
        LogCommand::Status { json } => {
            let status = Core::connect(socket)?.ask(&RecordRequest::LogStatus {})?;
            if json {
                writeln!(out, "{status:#}")?;
                return Ok(());
            }
            let status: LogStatus = read(status)?;
            match status.file {
                Some(_) => summary(&mut out, &status)?,
                None => writeln!(out, "nothing was recorded since the core started")?,
            }
        }
        LogCommand::Show { file, json, last } => show::run(&mut out.0, &file, json, last)?,
        LogCommand::Replay(args) => replay::run(&mut out, &args)?,
        LogCommand::Trace { file, client, out: to } => {
            trace::run(&mut out, &file, &client, &to)?;
        }
    }
    Ok(())
}

/// The file is made here, with this user's rights; an empty one is taken away again if the core refuses.
fn record(
    core: &mut Core,
    request: &RecordRequest,
    file: Option<&Path>,
) -> Result<LogStatus, CtlError> {
    let Some(file) = file else { return core.get(request) };
    let out = tally_ipc::admin::create(FILE_OUT, file)
        .map_err(|e| CtlError::Failed(format!("--out {e}")))?;
    let answer = core.ask_about(request, &[out]);
    if matches!(answer, Err(CtlError::Refused { .. })) {
        let _ = std::fs::remove_file(file);
    }
    read(answer?)
}

/// What a recording has become; the core tells of the latest one only.
fn later(before: &LogStatus, now: LogStatus) -> Result<LogStatus, CtlError> {
    let which = |status: &LogStatus| (status.file.clone(), status.started_unix_s);
    if which(before) == which(&now) {
        return Ok(now);
    }
    Err(CtlError::Failed(format!(
        "{}: it has ended, and another recording has begun, so that nothing tells whether it is complete; \
         `tallyctl log show` reads what is there",
        name(before)
    )))
}

/// The file of a recording, for people.
fn name(status: &LogStatus) -> &str {
    status.file.as_deref().unwrap_or("no file")
}

/// That a recording which ended is whole.
fn complete(status: &LogStatus) -> Result<(), CtlError> {
    match &status.failed {
        Some(why) => {
            Err(CtlError::Failed(format!("{}: the log is not complete: {why}", name(status))))
        }
        None => Ok(()),
    }
}

fn summary(out: &mut impl Write, status: &LogStatus) -> std::io::Result<()> {
    writeln!(
        out,
        "{}: {} records, {} bytes, {} dropped; {}",
        name(status),
        status.records,
        status.bytes,
        status.dropped,
        match (&status.ended, status.live) {
            (Some(why), _) => why,
            (None, true) => "every call is in it",
            (None, false) => "what policies see is being described, calls are not in it yet",
        }
    )
}

/// The lines of `tallyctl status`, if there is anything to say.
pub fn status_lines(out: &mut impl Write, s: &Status, paint: Paint) -> std::io::Result<()> {
    if s.log.recording || s.log.dropped > 0 || s.log.failed.is_some() {
        write!(out, "{}  ", paint.bold("log      "))?;
        summary(out, &s.log)?;
    }
    if let Some(why) = &s.log.failed {
        writeln!(out, "           {}", paint.bad(&format!("the log is not complete: {why}")))?;
    }
    if let Some(problem) = &s.profiles.problem {
        writeln!(out, "{}  {}", paint.bold("profiles "), paint.bad(problem))?;
    }
    if let Some(shadow) = &s.shadow {
        write!(
            out,
            "{}  {}: agrees in {:.2} % of {} decisions, {} left out",
            paint.bold("shadow   "),
            shadow.name,
            shadow.agreement_percent,
            shadow.decisions,
            shadow.skipped,
        )?;
        match &shadow.ended {
            Some(why) => writeln!(out, "; {}", paint.bad(&format!("ended: {why}")))?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_admin::ShadowBrief;

    #[test]
    fn times_have_units() {
        assert_eq!(duration("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(duration("30s").unwrap(), Duration::from_secs(30));
        assert_eq!(duration("1.5s").unwrap(), Duration::from_millis(1_500));
        assert_eq!(duration("24h").unwrap(), Duration::from_secs(86_400));
        for wrong in ["", "s", "-1s", "0s", "30", "999us", "25h", "1441m", "5é"] {
            assert!(duration(wrong).unwrap_err().contains("expected"), "{wrong}");
        }
    }

    #[test]
    fn what_became_of_another_recording_tells_nothing_of_ones_own() {
        let of = |file: &str, started_unix_s, records| LogStatus {
            file: Some(file.into()),
            started_unix_s,
            records,
            ..LogStatus::default()
        };
        let own = of("/x", 7, 1);
        assert_eq!(later(&own, of("/x", 7, 9)).unwrap().records, 9);
        for other in [of("/y", 7, 9), of("/x", 8, 9)] {
            let why = later(&own, other).unwrap_err().to_string();
            assert!(why.starts_with("/x: it has ended, and another"), "{why}");
        }
    }

    #[test]
    fn status_says_what_is_recorded_and_compared() {
        let shown = |s: &Status| {
            let mut out = Vec::new();
            status_lines(&mut out, s, Paint(false)).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(&Status::default()), "");
        let lost = Status {
            log: LogStatus {
                file: Some("/x".into()),
                ended: Some("writing failed".into()),
                failed: Some("the disk is full".into()),
                ..LogStatus::default()
            },
            profiles: tally_admin::ProfilesStatus {
                problem: Some("profiles are not kept".into()),
                ..Default::default()
            },
            ..Status::default()
        };
        let text = shown(&lost);
        assert!(text.contains("the log is not complete: the disk is full"), "{text}");
        assert!(text.contains("profiles are not kept"), "{text}");
        let log = LogStatus {
            recording: true,
            file: Some("/x".into()),
            records: 5,
            bytes: 9,
            dropped: 2,
            live: true,
            ..LogStatus::default()
        };
        let shadow = ShadowBrief {
            name: "fifo".into(),
            agreement_percent: 61.5,
            decisions: 7,
            skipped: 1,
            ended: Some("disabled".into()),
            ..ShadowBrief::default()
        };
        let shown = shown(&Status { log, shadow: Some(shadow), ..Status::default() });
        for word in ["/x: 5 records", "2 dropped", "fifo", "61.50 % of 7", "ended: disabled"] {
            assert!(shown.contains(word), "{word:?} not in {shown}");
        }
    }
}
