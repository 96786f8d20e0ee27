//! `tallyctl ab`: A/B tests of policies on the core's GPU.

mod plot;

use crate::admin::{AdminSocket, Core, policy_files};
use crate::error::CtlError;
use crate::output::UnlessClosed;
use clap::{Args, Subcommand};
use rustix::fs::OFlags;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;
use tally_ab::combine::combine;
use tally_ab::design::{BLOCK_NS_MIN, State};
use tally_ab::guard::Guard;
use tally_ab::units::{parse_ns, time};
use tally_ab::verdict::ratio_in_words;
use tally_ab::{Metric, Plan, Reason, Report, Verdict};
use tally_admin::ab::AbStatus;
use tally_admin::{Class, ClientStatus, Request, Service, Source, Status};
use tally_decision_log::text::make_printable;
use tally_ipc::admin::File;

#[derive(Debug, Subcommand)]
pub enum AbCommand {
    /// Begin a test: the active policy (A) and B are active by turns, in random order; A serves in the end.
    #[command(after_help = START_AFTER_HELP)]
    Start(Box<StartArgs>),
    /// Show how far the test is.
    Status {
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
        /// Again every second until it has ended.
        #[arg(long)]
        watch: bool,
    },
    /// End the test, make A active and show the report.
    Stop,
    /// Take the reports of the same test on several GPUs together. Exit codes are those of `ab start --wait`.
    Combine {
        /// Reports that `tallyctl ab report --json` printed, one for each core
        #[arg(required = true, num_args = 2.., value_name = "REPORT.json")]
        reports: Vec<PathBuf>,
        /// Print JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Show what the test that runs, or ran last, has found.
    Report {
        /// Print JSON (schema 1), for programs and for `ab combine`.
        #[arg(long)]
        json: bool,
        /// File to draw the blocks over time and the effect with its interval into, as SVG
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Draw on a dark background
        #[arg(long, requires = "svg")]
        dark: bool,
    },
}

fn probability(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a number, as in 0.05"))
}

/// Exit code if A is to be kept.
const EXIT_KEEP_A: u8 = 3;
/// Exit code if the test was not decided.
const EXIT_UNDECIDED: u8 = 4;
/// Exit code if B was withdrawn.
const EXIT_GUARD: u8 = 5;
/// Exit code if the test is invalid.
const EXIT_INVALID: u8 = 6;

const START_AFTER_HELP: &str = "\
Exit codes with --wait, besides those of `tallyctl --help`:
  0  promote B
  3  keep A: B is worse, is not shown to be as good over all requests, or failed
  4  undecided: more time may tell
  5  withdrawn: B breached a guard
  6  invalid: no traffic, A failed or hardly served, the core ended the test, or the arms served different loads";

#[derive(Debug, Args)]
pub struct StartArgs {
    /// Policy files. The last one is B, the policy that is tried. A before it must be the active policy
    /// unless --replace-active is given.
    #[arg(required = true, num_args = 1..=2, value_name = "[A.wasm] B.wasm")]
    policies: Vec<PathBuf>,
    /// Let A replace the active policy, for the test and after it.
    #[arg(long)]
    replace_active: bool,
    /// What is compared: hp_p99 or token_p99 (99th percentile of high-priority requests, or of tokens), be_throughput
    /// (best-effort work a second), slo_attainment or tpot_attainment (share of requests, or tokens, within the
    /// objective).
    #[arg(long, value_name = "METRIC")]
    metric: Metric,
    /// Length of a block; each has one active policy. Default: 1s, and less where requests suffice.
    #[arg(long, value_name = "TIME", value_parser = parse_ns)]
    block: Option<u64>,
    /// Blocks get as short as this where requests suffice. Default: 250ms, or the length that
    /// --block gives.
    #[arg(long, value_name = "TIME", value_parser = parse_ns)]
    min_block: Option<u64>,
    /// The part at the start of a block that does not count; of shorter blocks, as large a part.
    #[arg(long, value_name = "TIME", value_parser = parse_ns, default_value = "100ms")]
    washout: u64,
    /// End at the latest after this.
    #[arg(long, value_name = "TIME", value_parser = parse_ns, default_value = "10m")]
    max_time: u64,
    /// A limit that B must keep, as in 'hp_p99<8ms', 'token_p99<1.2*A', 'slo_attainment>95%', 'tpot_attainment>95%',
    /// 'be_throughput>20%' or 'be_fairness>0.9'; A is active at once if it does not. May be given up to 8 times.
    #[arg(long = "guard", value_name = "GUARD")]
    guards: Vec<Guard>,
    /// Length of the latest time under B that guards look at; at most, and by default, the measured part of a
    /// block.
    #[arg(long, value_name = "TIME", value_parser = parse_ns)]
    guard_window: Option<u64>,
    /// What both arms know when a block begins: frozen (what the active policy knew when the test
    /// began) or carry (what each arm knew at the end of its last block: compares also what they
    /// happen to learn).
    #[arg(long, value_name = "STATE", default_value = "frozen")]
    state: State,
    /// Prefer B although it is worse, by at most this share: 0.05 are 5 %.
    #[arg(long, value_name = "SHARE", value_parser = probability, default_value = "0")]
    margin: f64,
    /// Time of the objective: a request that takes no longer attains it. Default: each client's own objective, as it is
    /// when the request ends.
    #[arg(long, value_name = "TIME", value_parser = parse_ns)]
    slo: Option<u64>,
    /// Seed of the random order. Default: another one each time.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// If the policies do not differ, the test says that they do at most this often.
    #[arg(long, value_name = "P", value_parser = probability, default_value = "0.05")]
    alpha: f64,
    /// Decide nothing before this many blocks.
    #[arg(long, value_name = "N", default_value_t = 20)]
    min_blocks: u32,
    /// If there are requests, prefer B only after so many blocks: in 480, a state that makes 5 % of B's blocks slow is
    /// seen at least four times in 99.8 % of tests. Without effect on be_throughput with a guard on the tail.
    #[arg(long, value_name = "N", default_value_t = 480)]
    min_blocks_better: u32,
    /// Go on to --max-time although it is decided: the interval gets narrower.
    #[arg(long)]
    to_end: bool,
    /// Configuration file that is passed to A, if A is named; the active policy keeps its own
    #[arg(long, value_name = "FILE")]
    config_a: Option<PathBuf>,
    /// Configuration file that is passed to B
    #[arg(long, value_name = "FILE")]
    config_b: Option<PathBuf>,
    /// B's share of the time at first; it doubles each 20 pairs of blocks until it is 50%.
    #[arg(long, value_name = "SHARE", value_parser = percent, default_value = "50%")]
    exposure: f64,
    /// If the verdict is to promote B, B stays active when the test ends.
    #[arg(long)]
    promote: bool,
    /// Shell command to run before the test begins and after it ended. It gets TALLY_AB_EVENT (begin or end)
    /// and, at the end, TALLY_AB_VERDICT and the report as JSON on standard input. If it fails before the test,
    /// the test is not run. If it is refused or the core is lost, it ends without a verdict.
    #[arg(long, value_name = "COMMAND", requires = "wait")]
    hook: Option<String>,
    /// Wait for the end, show the report and end with a code that tells the verdict.
    #[arg(long)]
    wait: bool,
}

impl StartArgs {
    /// A, if it is named, and B.
    fn arms(&self) -> Result<(Option<&Path>, &Path), CtlError> {
        let (a, b) = match self.policies.as_slice() {
            [b] => (None, b),
            [a, b] => (Some(a.as_path()), b),
            _ => return Err(CtlError::Usage("name B, or A and B".into())),
        };
        for (given, option) in
            [(self.config_a.is_some(), "--config-a"), (self.replace_active, "--replace-active")]
        {
            if given && a.is_none() {
                let why = format!("{option} is about A, which is not named: name A before B");
                return Err(CtlError::Usage(why));
            }
        }
        Ok((a, b))
    }

    fn plan(&self) -> Result<Plan, CtlError> {
        // Nobody chooses it, and it is told in the report: time will do.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = self.seed.unwrap_or_else(|| now.map_or(0, |d| d.as_nanos() as u64));
        let block = self.block.unwrap_or(BLOCK_NS);
        let least = if self.block.is_some() { block } else { SHORT_BLOCK_NS };
        let plan = Plan {
            metric: self.metric,
            block_ns: block,
            block_ns_min: self.min_block.unwrap_or(least),
            washout_ns: self.washout,
            time_ns_max: self.max_time,
            slo_ns: self.slo,
            alpha: self.alpha,
            blocks_min: self.min_blocks,
            blocks_min_better: self.min_blocks_better,
            margin: self.margin,
            state: self.state,
            exposure: self.exposure,
            promote: self.promote,
            seed,
            to_end: self.to_end,
            guards: self.guards.clone(),
            guard_window_ns: self
                .guard_window
                .unwrap_or_else(|| block.saturating_sub(self.washout).max(BLOCK_NS_MIN)),
        };
        plan.check().map_err(|e| CtlError::Usage(e.to_string()))?;
        Ok(plan)
    }
}

/// Default lengths of blocks.
const BLOCK_NS: u64 = 1_000_000_000;
const SHORT_BLOCK_NS: u64 = 250_000_000;

fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    let share = number.filter(|percent| (1.0..=50.0).contains(percent)).map(|p| p / 100.0);
    share.ok_or_else(|| format!("{text:?}: expected 1% to 50%"))
}

/// Run a hook to its end.
fn run_hook(command: &str, event: &str, report: Option<&Report>) -> Result<(), CtlError> {
    let failed = |why: String| CtlError::Failed(format!("hook {command:?} at {event}: {why}"));
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", command]).env("TALLY_AB_EVENT", event).stdin(Stdio::piped());
    if let Some(report) = report {
        shell.env("TALLY_AB_VERDICT", report.verdict.as_str());
    }
    let mut child = shell.spawn().map_err(|e| failed(e.to_string()))?;
    if let (Some(mut input), Some(report)) = (child.stdin.take(), report) {
        // A hook need not read it.
        let _ = serde_json::to_writer(&mut input, report);
    }
    let status = child.wait().map_err(|e| failed(e.to_string()))?;
    if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
}

/// The core may run in another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// All of it. The exit codes of `ab start --wait` and `ab combine` tell the verdict.
pub fn run(socket: &AdminSocket, command: AbCommand) -> Result<ExitCode, CtlError> {
    let mut out = std::io::stdout().lock();
    match command {
        AbCommand::Start(args) => return start(socket, &args, &mut UnlessClosed(out)),
        AbCommand::Status { json, watch } => {
            let mut core = Core::connect(socket)?;
            loop {
                let answer = core.ask(&Request::AbStatus {})?;
                let status: Option<AbStatus> = typed(answer.clone())?;
                if json && watch {
                    writeln!(out, "{answer}")?;
                } else if json {
                    writeln!(out, "{answer:#}")?;
                } else {
                    write_status(&mut out, status.as_ref())?;
                }
                out.flush()?;
                if !watch || status.is_none_or(|status| !status.running) {
                    break;
                }
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        AbCommand::Stop => {
            let report: Report = typed(Core::connect(socket)?.ask(&Request::AbStop {})?)?;
            write!(out, "{}", report.text())?;
        }
        AbCommand::Combine { reports, json } => {
            let reports: Vec<Report> =
                reports.iter().map(|f| read_file(f)).collect::<Result<_, _>>()?;
            let all = combine(&reports).map_err(|e| CtlError::Failed(e.to_string()))?;
            let mut out = UnlessClosed(out);
            if json {
                let value =
                    serde_json::to_value(&all).map_err(|e| CtlError::Answer(e.to_string()))?;
                writeln!(out, "{value:#}")?;
            } else {
                write!(out, "{}", all.text())?;
            }
            out.flush()?;
            return Ok(exit_code(all.verdict));
        }
        AbCommand::Report { json, svg, dark } => {
            let answer = Core::connect(socket)?.ask(&Request::AbReport {})?;
            let report: Report = typed(answer.clone())?;
            if let Some(file) = svg {
                crate::picture::write(&file, &plot::figure(&report), dark)?;
            }
            // What the core said, with what this release does not know.
            if json {
                writeln!(out, "{answer:#}")?;
            } else {
                write!(out, "{}", report.text())?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn typed<T: DeserializeOwned>(answer: Value) -> Result<T, CtlError> {
    serde_json::from_value(answer).map_err(|e| CtlError::Answer(e.to_string()))
}

/// Most bytes of a report's file.
const REPORT_BYTES_MAX: u64 = 16 << 20;

fn read_file(file: &Path) -> Result<Report, CtlError> {
    let wrong = |why: String| CtlError::Failed(format!("report {}: {why}", file.display()));
    // Does not wait at a FIFO.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(file);
    let opened = opened.map_err(|e| wrong(e.to_string()))?;
    let about = opened.metadata().map_err(|e| wrong(e.to_string()))?;
    if !about.is_file() {
        let why = "is no regular file: write what `tallyctl ab report --json` prints to a file";
        return Err(wrong(why.into()));
    }
    let mut text = Vec::new();
    // Files of /proc have more bytes than their length says, and a file may grow.
    let read = opened.take(REPORT_BYTES_MAX + 1).read_to_end(&mut text);
    read.map_err(|e| wrong(e.to_string()))?;
    if text.len() as u64 > REPORT_BYTES_MAX {
        return Err(wrong(format!("has more than {REPORT_BYTES_MAX} bytes, the most of a report")));
    }
    let no_report = |e| wrong(format!("{e}: expected what `tallyctl ab report --json` prints"));
    let mut report = serde_json::from_slice(&text).map_err(no_report)?;
    make_printable(&mut report);
    serde_json::from_value(report).map_err(no_report)
}

fn start(
    socket: &AdminSocket,
    args: &StartArgs,
    out: &mut impl Write,
) -> Result<ExitCode, CtlError> {
    let (plan, (a, b)) = (args.plan()?, args.arms()?);
    let source = |file: &Path, config: &Option<PathBuf>| Source {
        file: absolute(file),
        config_file: config.as_deref().map(absolute),
    };
    let mut files = match a {
        Some(a) => policy_files("a.", a, args.config_a.as_deref())?,
        None => Vec::new(),
    };
    files.extend(policy_files("b.", b, args.config_b.as_deref())?);
    let mut core = Core::connect(socket)?;
    let request = Request::AbStart {
        a: a.map(|a| source(a, &args.config_a)),
        b: source(b, &args.config_b),
        plan,
        replace_active: args.replace_active,
    };
    if let Some(hook) = &args.hook {
        run_hook(hook, "begin", None)?;
    }
    let report = report_of(&mut core, args, &request, &files, out);
    let written = match &report {
        Ok(Some(report)) => write!(out, "\n{}", report.text()).and_then(|()| out.flush()),
        _ => Ok(()),
    };
    if let Some(hook) = &args.hook {
        let report = report.as_ref().ok().and_then(Option::as_ref);
        let ended = run_hook(hook, "end", report);
        // Why there is no report matters more.
        if report.is_some() {
            ended?;
        }
    }
    let report = report?;
    written?;
    Ok(report.map_or(ExitCode::SUCCESS, |report| exit_code(report.verdict)))
}

/// Begins the test, and waits for its report if that is asked for.
fn report_of(
    core: &mut Core,
    args: &StartArgs,
    request: &Request,
    files: &[File],
    out: &mut impl Write,
) -> Result<Option<Report>, CtlError> {
    let begun: AbStatus = typed(core.ask_about(request, files)?)?;
    writeln!(
        out,
        "{} (A) against {} (B) on {}, for at most {}; `tallyctl ab status` shows how far it is",
        begun.a,
        begun.b,
        begun.metric,
        time(args.plan()?.time_ns_max as f64)
    )?;
    let mut told = Vec::new();
    warn_of_guards(out, &begun, &mut told)?;
    // The test runs, whatever the status says.
    if let Ok(status) = core.get::<Status>(&Request::Status { kernels: Some(0) })
        && let Some(lack) = lack(begun.metric, &status.clients)
    {
        writeln!(out, "note: {} says nothing while {lack}", begun.metric)?;
    }
    out.flush()?;
    if !args.wait {
        return Ok(None);
    }
    loop {
        let status: AbStatus = typed(core.ask(&Request::AbStatus {})?)?;
        if !status.running {
            break;
        }
        warn_of_guards(out, &status, &mut told)?;
        std::thread::sleep(Duration::from_millis(300));
    }
    Ok(Some(typed(core.ask(&Request::AbReport {})?)?))
}

fn exit_code(verdict: Verdict) -> ExitCode {
    match verdict {
        Verdict::PromoteB => ExitCode::SUCCESS,
        Verdict::KeepA => EXIT_KEEP_A.into(),
        Verdict::Undecided => EXIT_UNDECIDED.into(),
        Verdict::Withdrawn => EXIT_GUARD.into(),
        Verdict::Invalid => EXIT_INVALID.into(),
    }
}

/// What a metric is of and no client has now.
fn lack(metric: Metric, clients: &[ClientStatus]) -> Option<&'static str> {
    let is_any = |class: Class| clients.iter().any(|client| client.identity.class == class);
    let serves = |has: fn(&Service) -> bool| {
        clients.iter().filter_map(|client| client.service.as_ref()).any(has)
    };
    match metric {
        Metric::HpP99 if !is_any(Class::High) => Some("there is no high-priority client"),
        Metric::BeThroughput if !is_any(Class::BestEffort) => {
            Some("there is no best-effort client")
        }
        Metric::SloAttainment if !serves(|service| service.objective.is_some()) => Some(
            "no client has an objective for requests: `tallyctl client set --slo` gives it one",
        ),
        Metric::TpotAttainment if !serves(|service| service.tpot.is_some()) => {
            Some("no client has an objective for tokens: `tallyctl client set --tpot` gives it one")
        }
        Metric::TokenP99
            if !serves(|service| service.tpot.is_some() || service.marks.is_some()) =>
        {
            Some("no client marks tokens or has an objective for them")
        }
        _ => None,
    }
}

/// Says once of each guard that a B as good as A is likely to breach it.
fn warn_of_guards(
    out: &mut impl Write,
    status: &AbStatus,
    told: &mut Vec<String>,
) -> std::io::Result<()> {
    for guard in &status.guards {
        if let Some(warning) = guard.warning().filter(|_| !told.contains(&guard.guard)) {
            writeln!(out, "note: {warning}")?;
            told.push(guard.guard.clone());
        }
    }
    Ok(())
}

/// Of `status` too: some lines on the experiment.
pub fn write_status(out: &mut impl Write, status: Option<&AbStatus>) -> std::io::Result<()> {
    let Some(s) = status else {
        return writeln!(out, "no A/B test since this core started");
    };
    let state = match (s.running, s.arm, s.ended) {
        (true, Some(arm), _) => format!("running, arm {arm}"),
        (true, None, _) => "ending".into(),
        (false, _, Some(Reason::Interrupted)) => "interrupted".into(),
        (false, ..) => format!("ended: {}", s.verdict.as_str()),
    };
    writeln!(
        out,
        "A/B test {state}: {} (A) against {} (B) on {}, {} blocks in {} of {}",
        s.a,
        s.b,
        s.metric,
        s.blocks,
        time(s.elapsed_s * 1e9),
        time(s.time_s_max * 1e9)
    )?;
    let effect = match s.pairs {
        0 => String::new(),
        _ => format!("B {} so far; ", ratio_in_words(s.ratio)),
    };
    writeln!(out, "  {effect}evidence {:.1} of {:.0}", s.e_value, s.e_value_needed)?;
    writeln!(out, "  {}: {}", s.verdict.as_str(), s.why)?;
    for guard in &s.guards {
        let chance = match guard.accident {
            Some(chance) => format!("{:.0} % at most", chance * 100.0),
            None => "not known yet".into(),
        };
        writeln!(
            out,
            "  guard {}: chance that a B as good as A breaches it: {chance}",
            guard.guard
        )?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "ab/tests.rs"]
pub(crate) mod tests;
